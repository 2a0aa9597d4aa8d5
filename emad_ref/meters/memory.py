"""How much memory is in use where a model's caches live: of this process on a CPU, of the whole device elsewhere.

Resident memory counts what C and C++ allocate as well as Python and torch do. What was freed but not yet returned to
the system would hide growth, so the C library is asked to return it first. What a decoder holds in another process is
not seen here.
"""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")  # pages: total, resident, …


def without_reading(device: torch.device) -> str:
    """Why memory on ``device`` cannot be read here; empty where it can."""
    if device.type == "cuda":
        return ""
    if device.type != "cpu":
        return f"memory of a device {device.type!r} is not read"
    return "" if STATM.exists() else f"resident memory is read from {STATM}, which this system does not have"


def used_bytes(device: torch.device) -> int:
    """Bytes in use on ``device``, garbage collected first; ask ``without_reading`` before."""
    gc.collect()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc alone has it
        trim(0)
    return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes() -> int:
    """Bytes of all storages, on any device, of tensors that Python still reaches, garbage that waits included.

    Ask ``used_bytes`` before, which has garbage collected. Each storage counts once, however many tensors are views of
    it. Tensors that C++ alone holds are not seen. Tensors without memory (meta, fake, lazy) count nothing, nor does a
    wrapper of other tensors, which count themselves.
    """
    held: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may compute where it is asked
        for each in gc.get_objects():
            # by its type, not by isinstance: a proxy would be asked for its class, and may load what it stands for
            if issubclass(type(each), torch.Tensor) and each.layout == torch.strided:
                try:
                    storage = each.untyped_storage()
                    if storage.device.type != "meta":
                        held[storage.data_ptr()] = storage.nbytes()
                except (RuntimeError, ValueError):  # torch's words for "has no storage"
                    continue
    return sum(held.values())
