"""Facts about a machine: processor, accelerator, driver, clocks, limits, libraries, and memory in use.

An unreadable fact is replaced by the reason. Memory bandwidth is measured by copying: no copy reaches the data sheet's
value, and slices of a board and shared machines have less.

Memory is that of this process on a CPU, of the whole device elsewhere. Resident memory includes allocations of C, C++,
Python and torch. Freed memory that the C library keeps would hide growth, so the library returns it first. Memory of a
decoder in another process is not included.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from emad_ref.absent import Absent
from pytest_emad.benchmark.clock import time_call
from pytest_emad.benchmark.energy import import_nvml, shut_down_nvml

LIBRARIES = ("torch", "transformers", "numpy", "nvidia-ml-py")
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}  # bytes: many times the size of any cache
COPIES = 20

# name → (function of NVML, its further arguments as names of constants, divisor)
NVML_QUERIES: dict[str, tuple[str, tuple[str, ...], float]] = {
    "power limit, W": ("nvmlDeviceGetEnforcedPowerLimit", (), 1000.0),
    "SM clock, MHz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",), 1.0),
    "largest SM clock, MHz": ("nvmlDeviceGetMaxClockInfo", ("NVML_CLOCK_SM",), 1.0),
    "memory clock, MHz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_MEM",), 1.0),
    "temperature, °C": ("nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",), 1.0),
}


def machine_facts(device: str) -> dict[str, Any]:
    """Plain JSON values about this machine and ``device``, ``cpu`` or ``cuda``."""
    said: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "libraries": {library: _version(library) for library in LIBRARIES},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        said["accelerator"] = {
            "name": properties.name,
            "memory, bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "CUDA": torch.version.cuda,
            **_nvml_facts(f"GPU-{properties.uuid}".replace("GPU-GPU-", "GPU-")),
        }
    return said


def measure_copy_bandwidth(
    device: str, *, size: int | None = None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes a second, read and written, of the fastest of ``COPIES`` copies of ``size`` bytes on ``device``."""
    source = torch.ones(size or COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    best = min(time_call(copy, partial(_wait, device), clock=clock).seconds for _ in range(COPIES))
    return 2 * source.numel() / best


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _nvml_facts(uuid: str) -> dict[str, Any]:
    """NVML's facts about a board; a text in place of a missing number."""
    pynvml = import_nvml()
    if isinstance(pynvml, Absent):
        return {"driver": f"unread: {pynvml.reason}"}
    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVMLError, or any error of its bindings
        return {"driver": f"unread: {type(error).__name__}: {error}"}
    try:
        return {
            "driver": _value_or_reason(lambda: _text(pynvml.nvmlSystemGetDriverVersion())),
            **{
                name: _value_or_reason(partial(_nvml_number, pynvml, uuid, *query))
                for name, query in NVML_QUERIES.items()
            },
        }
    finally:
        shut_down_nvml(pynvml)


def _value_or_reason(query: Callable[[], Any]) -> Any:
    try:
        return query()
    except Exception as error:  # NVMLError, or an error of its bindings, such as a name that is not UTF-8
        return f"unread: {error}"


def _nvml_number(pynvml: Any, uuid: str, function: str, constants: tuple[str, ...], divisor: float) -> float:
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    value: float = getattr(pynvml, function)(handle, *(getattr(pynvml, constant) for constant in constants)) / divisor
    return value


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


STATM = Path("/proc/self/statm")  # pages: total, resident, …


def absent_memory(device: torch.device) -> Absent | None:
    """Why memory on ``device`` cannot be read here; None if it can."""
    if device.type == "cuda":
        return None
    if device.type != "cpu":
        return Absent(f"memory of a device {device.type!r} is not read")
    if STATM.exists():
        return None
    return Absent(f"resident memory is read from {STATM}, which this system does not have")


def used_memory_bytes(device: torch.device) -> int:
    """Bytes in use on ``device``, after garbage collection; call ``absent_memory`` first."""
    gc.collect()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only in glibc
        trim(0)
    return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory(NamedTuple):
    """The most memory in use so far, in bytes, and ``of``: the counter and the process."""

    bytes: int
    of: str


def peak_memory(device: torch.device, *, in_children: bool = False) -> PeakMemory | Absent:
    """Peak memory of this process since its start, or of the largest of its ended children.

    On a CUDA device what torch has allocated there, else resident memory, which includes the judge and the model.
    """
    if device.type == "cuda":
        if in_children:
            return Absent("peak memory of a CUDA device is read in one process, and this was timed in others")
        return PeakMemory(torch.cuda.max_memory_allocated(device), "allocated by torch on the device")
    if device.type != "cpu":
        return Absent(f"memory of a device {device.type!r} is not read")
    try:
        import resource
    except ImportError:
        return Absent("peak resident memory is read by getrusage, which this system does not have")
    used = resource.getrusage(resource.RUSAGE_CHILDREN if in_children else resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return PeakMemory(used * unit, "resident, the largest timed process" if in_children else "resident, this process")


def peak_memory_to_json(peak: PeakMemory | Absent) -> dict[str, Any]:
    """``bytes`` and ``of``, or ``why_none``."""
    return {"why_none": peak.reason} if isinstance(peak, Absent) else peak._asdict()


def live_tensor_bytes() -> int:
    """Bytes of all storages, on any device, of tensors that Python reaches, uncollected garbage included.

    Call ``used_memory_bytes`` first, which collects garbage. Each storage counts once, for any number of views. Tensors
    that only C++ holds are not included. Tensors without memory (meta, fake, lazy) and wrappers of other tensors count
    as 0.
    """
    held: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may compute on access
        for each in gc.get_objects():
            # by type, not by isinstance, which reads a proxy's class and may load its object
            if issubclass(type(each), torch.Tensor) and each.layout == torch.strided:
                try:
                    storage = each.untyped_storage()
                    if storage.device.type != "meta":
                        held[storage.data_ptr()] = storage.nbytes()
                except (RuntimeError, ValueError):  # torch's words for "has no storage"
                    continue
    return sum(held.values())
