"""Snapshots of a model: its weights, buffers, hooks and settings, recorded once and compared later.

The judge's model is the reference and every baseline. A decoder gets a copy. If code reaches the judge's model through
the interpreter and changes it, all later measurements are of another model. A snapshot holds, by module:

weights, buffers   dtype, shape, strides, device and a digest of the bytes
hooks              of every kind, as objects
methods            those that the instance overrides (``forward``, …), and its class's own ``forward``
training, config   the flag; the model's config and generation config, attention kernel included

Bytes are digested piece by piece. Each comparison reads a model of at most ``BYTES_PER_CHECK`` completely. Of a larger
one it reads each tensor's first piece and the next share of the others: a change of whole matrices shows at once, a
change of a single number after at most as many comparisons as there are shares.

``ProcessSnapshot`` holds process-wide state that any code can change for all models: threads, default dtype, precision
flags, hooks on all modules, functions that every step calls, the clocks.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules

from emad_ref.errors import EmadError

PIECE = 1 << 22  # bytes digested at a time
BYTES_PER_CHECK = {
    "cpu": 1 << 28,
    "accelerator": 1 << 34,
}  # bytes read per comparison: 0.1 s of CRC-32, or of a reduction
MAX_NAMED = 3  # most differences in a message
HOOK_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

NamedTensors = list[tuple[str, Tensor]]


class ModelMutatedError(EmadError):
    """Raised if the judge's own model, or its process, has changed."""


class ModelSnapshot:
    """Snapshot of ``model``; ``describe_changes`` names later changes."""

    def __init__(self, model: nn.Module):
        self._model, self._looks = model, 0
        self._shown = _visible_state(model)
        self._digests = {name: _digests(tensor) for name, tensor in _named_tensors(model)}

    def describe_changes(self) -> str:
        """The first differences by the names of their tensors or modules; "" without any."""
        changed = [*_changed_names(self._shown, _visible_state(self._model)), *self._rewritten()]
        more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        return ", ".join(changed[:MAX_NAMED]) + more

    def _rewritten(self) -> Iterator[str]:
        present = [(name, tensor) for name, tensor in _named_tensors(self._model) if name in self._digests]
        shares = _shares(present)
        turn, self._looks = self._looks % shares, self._looks + 1
        for name, tensor in present:
            sealed = self._digests[name]
            chosen = range(len(sealed)) if shares == 1 else sorted({0, *range(turn, len(sealed), shares)})
            if any(digest != sealed[at] for at, digest in _digests_at(tensor, chosen)):
                yield name


def _named_tensors(model: nn.Module) -> NamedTensors:
    return [*model.named_parameters(), *model.named_buffers()]


def _shares(tensors: NamedTensors) -> int:
    """Number of comparisons that read all bytes once."""
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    at_once = BYTES_PER_CHECK["cpu" if all(tensor.device.type == "cpu" for _, tensor in tensors) else "accelerator"]
    return -(-total // at_once) if total else 1


# ------------------------------------------------------------ bytes


def _digests(tensor: Tensor) -> list[int]:
    pieces = -(-tensor.numel() * tensor.element_size() // PIECE)
    return [digest for _, digest in _digests_at(tensor, range(pieces))]


def _digests_at(tensor: Tensor, pieces: Any) -> Iterator[tuple[int, int]]:
    read = tensor.detach().contiguous().flatten().view(torch.uint8)
    for at in pieces:
        piece = read[at * PIECE : (at + 1) * PIECE]
        yield at, zlib.crc32(piece.numpy().data) if piece.device.type == "cpu" else _weighted_sum(piece)


def _weighted_sum(piece: Tensor) -> int:
    """Checksum Σ bᵢ·wᵢ mod 2⁶⁴ with odd weights wᵢ, on the bytes' device: any changed byte changes it."""
    weights = torch.arange(1, 2 * len(piece), 2, dtype=torch.int64, device=piece.device) * 0x5851F42D4C957F2D
    return int((piece.to(torch.int64) * weights).sum())


# ------------------------------------------------------------ everything else


def _visible_state(model: nn.Module) -> dict[str, Any]:
    """Name of a tensor, module or setting → comparable state; objects compare by identity."""
    state: dict[str, Any] = {}
    for name, tensor in _named_tensors(model):
        state[name] = (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())
    for name, module in model.named_modules():
        where = name or "the model"
        state[f"{where} (training mode)"] = module.training
        state[f"{where} (class)"] = _Identity(type(module), type(module).forward)
        for kind in HOOK_KINDS:
            state[f"{where} ({kind.strip('_').replace('_', ' ')})"] = _Identity(*getattr(module, kind).values())
        for method in sorted(name for name in vars(module) if callable(getattr(type(module), name, None))):
            state[f"{where} ({method})"] = _Identity(vars(module)[method])
    for name in ("config", "generation_config"):
        if (config := getattr(model, name, None)) is not None:
            kernel = getattr(config, "_attn_implementation", None)
            state[name] = (json.dumps(config.to_dict(), sort_keys=True, default=str), kernel)
    return state


class _Identity:
    """Objects compared by identity, so that one hook in place of another is a change."""

    def __init__(self, *objects: object):
        self.objects = objects  # keeps them alive, since a freed object's address could be reused

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or len(self.objects) != len(other.objects):
            return False
        return all(mine is yours for mine, yours in zip(self.objects, other.objects, strict=True))

    __hash__ = None  # type: ignore[assignment]  # compared, never looked up


def _changed_names(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    absent = object()
    names = dict.fromkeys([*before, *now])
    return [name for name in names if before.get(name, absent) != now.get(name, absent)]


# ------------------------------------------------------------ the process


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {  # name → (read, restore)
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
}  # fmt: skip
GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
)  # fmt: skip
WATCHED_FUNCTIONS: tuple[
    tuple[str, Any], ...
] = (  # functions that every block, the head or the stopwatch calls by name
    *((name, time) for name in ("perf_counter", "process_time", "sleep")),
    *((name, F) for name in ("linear", "layer_norm", "scaled_dot_product_attention", "softmax")),
    *((name, nn.Module) for name in ("__call__", "_call_impl", "_wrapped_call_impl")),
    *((name, torch) for name in ("matmul", "mm", "mv", "addmm", "addmv", "bmm", "argmax", "inference_mode")),
    ("embedding_bag", torch),
)


class ProcessSnapshot:
    """State of the process, without the gradient mode, since the judge runs under ``inference_mode``."""

    def __init__(self) -> None:
        self._settings = {name: read() for name, (read, _) in SETTINGS.items()}
        self._hooks = {name: dict(getattr(torch_modules, name)) for name in GLOBAL_HOOKS}
        self._functions = [(name, owner, getattr(owner, name)) for name, owner in WATCHED_FUNCTIONS]

    def restore(self) -> str:
        """Restore what has changed, and describe it; "" without changes."""
        changed = []
        for name, (read, put_back) in SETTINGS.items():
            if (now := read()) != self._settings[name]:
                changed.append(f"{name}: {self._settings[name]}, then {now}")
                put_back(self._settings[name])
        for name, before in self._hooks.items():
            hooks = getattr(torch_modules, name)
            if dict(hooks) != before:
                changed.append(f"torch.nn.modules.module.{name}")
                hooks.clear()
                hooks.update(before)
        for name, owner, function in self._functions:
            if getattr(owner, name) is not function:
                changed.append(f"{owner.__name__}.{name} was replaced")
                setattr(owner, name, function)
        return "; ".join(changed)
