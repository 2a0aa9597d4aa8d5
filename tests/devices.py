"""Simulated devices for a machine without accelerators: tensors carry a device name that every operation checks.

    with two_devices():
        torch.zeros(2, device=FIRST) + torch.zeros(2, device=SECOND)      # MixedDevices

A ``Placed`` tensor holds its values on the CPU and reports the device ``meta:0`` or ``meta:1`` (the only device type
with indices that PyTorch, transformers and accelerate accept without a driver). Within ``two_devices`` every operation
runs on the values, and its result keeps the name. Operations that real devices refuse are refused: operands on two
devices, and host tensors with device tensors, except scalars and indices. Only ``Tensor.to`` moves a tensor between
devices; ``crossings`` records each move, and whether ``models.placement.to_device`` made it.

Not emulated: streams, asynchronous copies, kernels that differ between devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FIRST, SECOND = torch.device("meta:0"), torch.device("meta:1")
HOST = torch.device("cpu")
INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class MixedDevices(RuntimeError):
    """An operation has tensors of several devices."""


class Placed(torch.Tensor):
    """``value``, a tensor on the CPU that reports the device ``place``."""

    value: torch.Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, value: torch.Tensor, place: torch.device) -> Placed:
        made: Placed = torch.Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=place,
        )
        made.value, made.place = value, place
        return made

    def tolist(self) -> Any:  # the only copy to the host that PyTorch does not dispatch
        return self.value.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} on {cls.__name__} tensors outside of two_devices()")


class Devices(TorchDispatchMode):
    """Run the block on named devices; ``crossings`` lists (from, to, whether ``to_device`` moved it)."""

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[tuple[torch.device, torch.device, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.to:  # composite; its ``device`` argument may be anywhere
            with self:
                return function.decompose(*args, **(kwargs or {}))
        given = dict(kwargs or {})
        wanted = given.get("device")
        places = _places(function, tree_leaves((args, given)))
        if len(places) > 1:
            raise MixedDevices(f"{function}: {', '.join(sorted(map(str, places)))}")
        here = next(iter(places), HOST)
        there = here if wanted is None else torch.device(wanted)
        if here != there and HOST not in (here, there):
            self.crossings.append((here, there, _moved_by_us()))
        if wanted is not None:
            given["device"] = HOST
        with torch.inference_mode(False), torch.no_grad():  # also views of tensors made outside inference mode
            result = function(*tree_map(_value, args), **tree_map(_value, given))
            if function._schema.is_mutable and isinstance(args[0], Placed):
                return args[0]
            if there == HOST:
                return result
            return tree_map(lambda leaf: Placed(leaf, there) if isinstance(leaf, torch.Tensor) else leaf, result)


@contextmanager
def two_devices() -> Iterator[Devices]:
    """Yield the devices ``FIRST`` and ``SECOND`` until the block ends."""
    torch._C._set_only_lift_cpu_tensors(True)  # as in FakeTensorMode: else torch.tensor(…, device=…) is not dispatched
    try:
        with Devices() as devices:
            yield devices
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _places(function: Any, leaves: list[Any]) -> set[torch.device]:
    """Return the devices of the operands; the host counts if its tensor is neither a number nor an index."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    named = {tensor.place for tensor in tensors if isinstance(tensor, Placed)}
    plain = [tensor for tensor in tensors if not isinstance(tensor, Placed) and tensor.ndim > 0]
    if named and function in INDEXED and isinstance(tensors[0], Placed):
        plain = []
    return named | ({HOST} if plain else set())


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Placed) else leaf


def _moved_by_us() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "to_device" and frame.f_globals["__name__"] == "emad_ref.models.placement":
            return True
        frame = frame.f_back
    return False
