"""What a machine is, for records of what was measured on it: processor, accelerator, driver, clocks, limits, libraries.

What cannot be read stands as the reason why. Memory bandwidth is measured by copying, not looked up: what a data sheet
promises no copy reaches, and slices of a board and shared machines have less.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from emad_ref.meters.energy import Unmeasured, bindings, shut_down

LIBRARIES = ("torch", "transformers", "numpy", "nvidia-ml-py")
COPIED = {"cuda": 2**30, "cpu": 2**28}  # bytes: many times what any cache holds
COPIES = 20

# name → (function of NVML, its further arguments as names of constants, divisor)
NVML: dict[str, tuple[str, tuple[str, ...], float]] = {
    "power limit, W": ("nvmlDeviceGetEnforcedPowerLimit", (), 1000.0),
    "SM clock, MHz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",), 1.0),
    "largest SM clock, MHz": ("nvmlDeviceGetMaxClockInfo", ("NVML_CLOCK_SM",), 1.0),
    "memory clock, MHz": ("nvmlDeviceGetClockInfo", ("NVML_CLOCK_MEM",), 1.0),
    "temperature, °C": ("nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",), 1.0),
}


def facts(device: str) -> dict[str, Any]:
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
            **_nvml(f"GPU-{properties.uuid}".replace("GPU-GPU-", "GPU-")),
        }
    return said


def copied_per_second(device: str, *, size: int | None = None, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second, read and written, of the fastest of ``COPIES`` copies of ``size`` bytes on ``device``."""
    source = torch.ones(size or COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(COPIES):
        _wait(device)
        start = clock()
        target.copy_(source)
        _wait(device)
        best = min(best, clock() - start)
    return 2 * source.numel() / best


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _nvml(uuid: str) -> dict[str, Any]:
    """What NVML says of a board; a text in place of a number where it says nothing."""
    pynvml = bindings()
    if isinstance(pynvml, Unmeasured):
        return {"driver": f"unread: {pynvml.reason}"}
    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVMLError, or whatever its bindings run into
        return {"driver": f"unread: {type(error).__name__}: {error}"}
    try:
        return {
            "driver": _read(lambda: _text(pynvml.nvmlSystemGetDriverVersion())),
            **{name: _read(partial(_number, pynvml, uuid, *query)) for name, query in NVML.items()},
        }
    finally:
        shut_down(pynvml)


def _read(query: Callable[[], Any]) -> Any:
    try:
        return query()
    except Exception as error:  # NVMLError, or whatever its bindings run into: a name that is not UTF-8, for one
        return f"unread: {error}"


def _number(pynvml: Any, uuid: str, function: str, constants: tuple[str, ...], divisor: float) -> float:
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    value: float = getattr(pynvml, function)(handle, *(getattr(pynvml, constant) for constant in constants)) / divisor
    return value


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
