"""Placement of a model's parts on several devices, and the transfer of tensors between them.

The stepper moves hidden states itself, once between neighbouring blocks on different devices (``to_device``).
accelerate's hooks check every argument of every module. That takes 0.08 ms per block and token in Python, as long as a
small block takes on an accelerator. So the stepper runs blocks without hooks, on the same weights. The model itself
keeps its hooks, so the baselines (its own forward and ``generate``) run as its user has set them up.

This has not been tested on two accelerators. On a CPU ``tests/laws/test_placement.py`` runs whole decodings on tensors
that carry a device's name and refuse operations across devices. On a machine with two accelerators the same laws use
them.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emad_ref.errors import BadArgument


class LayerPlacement(NamedTuple):
    """The ``kind`` of a block's attention and the ``device`` of its weights, which decide its inputs."""

    kind: str
    device: torch.device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; unchanged if it is there already."""
    return tensor if tensor.device == device else tensor.to(device)


def device_of(name: str, part: nn.Module) -> torch.device | None:
    """The device of all weights and buffers of ``part``; None without any.

    Raises:
        BadArgument: several devices, or weights that are not in memory.
    """
    devices = {tensor.device for tensor in (*part.parameters(), *part.buffers())}
    if torch.device("meta") in devices:
        remedy = "times mean nothing where weights come and go at every step: load it whole, e.g. with device='auto'"
        raise BadArgument(name, "weights that are offloaded", "weights in memory", remedy)
    if len(devices) > 1:
        remedy = "its residual connections must not cross devices: give accelerate no_split_module_classes"
        raise BadArgument(name, sorted(map(str, devices)), "one device for all of it", remedy)
    return next(iter(devices), None)


def wrap_with_device_moves(name: str, part: nn.Module, home: torch.device) -> Any:
    """``part`` as a function from tensors on ``home`` to tensors on ``home``. Raises as ``device_of``."""
    place, plain = device_of(name, part), copy_without_hooks(part)
    if place is None or place == home:
        return plain
    return lambda tensor: to_device(plain(to_device(tensor, place)), home)


def copy_without_hooks(part: Any) -> Any:
    """``part`` without accelerate's hooks, on the same weights; ``part`` itself without hooks.

    Only hooks that move inputs are removed, and only if they wrap the class's own forward.
    """
    hooked = [module for module in part.modules() if "_hf_hook" in vars(module)]
    return _copy_without_hooks(part) if hooked and all(map(_has_only_moving_hook, hooked)) else part


def _has_only_moving_hook(module: nn.Module) -> bool:
    mover = import_module("accelerate.hooks").AlignDevicesHook  # already imported with the hook
    hook, wrapped = vars(module)["_hf_hook"], vars(module).get("_old_forward")
    return type(hook) is mover and not hook.offload and getattr(wrapped, "__func__", None) is type(module).forward


def _copy_without_hooks(module: nn.Module) -> nn.Module:
    plain = copy.copy(module)  # a new module with the same parameters and buffers
    for name in ("_hf_hook", "_old_forward", "forward"):
        vars(plain).pop(name, None)
    plain._modules = {
        name: None if child is None else _copy_without_hooks(child) for name, child in module._modules.items()
    }
    return plain
