"""Whether a model is still what it was: its weights, buffers, hooks and settings, sealed once and looked at again.

The judge's own model is the oracle and every baseline. A decoder is lent a copy; whoever changes the judge's found it
through the interpreter, and whatever is measured from then on is about another model. What a seal holds, by module:

weights, buffers   dtype, shape, strides, device and a digest of the bytes
hooks              of every kind, as objects
methods            those that the instance itself shadows (``forward``, …), and its class's own ``forward``
training, config   the flag; the model's config and generation config, attention kernel included

Bytes are digested piece by piece. A model of at most ``AT_ONCE`` bytes is read whole at every look; of a larger one
each tensor's first piece and a share of the others that moves on from look to look: a change of whole matrices shows at
once, one of a single number after as many looks as there are shares.

``ProcessSnapshot`` are what any code of the process can change for all models: threads, default dtype, precision flags,
hooks on all modules, functions that every step calls, the clocks.
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
}  # bytes read at one look: 0.1 s of CRC-32, as much of a reduction
MAX_NAMED = 3  # differences that a complaint lists
HOOK_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

NamedTensors = list[tuple[str, Tensor]]


class ModelMutatedError(EmadError):
    """The judge's own model, or what it runs in, is no longer what it was."""


class ModelSnapshot:
    """What ``model`` is now; ``broken`` says, whenever asked, what has changed since."""

    def __init__(self, model: nn.Module):
        self._model, self._looks = model, 0
        self._shown = _visible_state(model)
        self._digests = {name: _digests(tensor) for name, tensor in _named_tensors(model)}

    def broken(self) -> str:
        """The first differences by the names of their tensors or modules; "" where there is none."""
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
            if any(found != sealed[at] for at, found in _digests_at(tensor, chosen)):
                yield name


def _named_tensors(model: nn.Module) -> NamedTensors:
    return [*model.named_parameters(), *model.named_buffers()]


def _shares(tensors: NamedTensors) -> int:
    """In how many looks all bytes are read once."""
    held = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    at_once = BYTES_PER_CHECK["cpu" if all(tensor.device.type == "cpu" for _, tensor in tensors) else "accelerator"]
    return -(-held // at_once) if held else 1


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
    """Σ bᵢ·wᵢ mod 2⁶⁴ over odd weights wᵢ, where the bytes lie: any one byte that changes changes it."""
    weights = torch.arange(1, 2 * len(piece), 2, dtype=torch.int64, device=piece.device) * 0x5851F42D4C957F2D
    return int((piece.to(torch.int64) * weights).sum())


# ------------------------------------------------------------ everything else


def _visible_state(model: nn.Module) -> dict[str, Any]:
    """Name of a tensor, module or setting → what stands there, comparable; objects are compared as themselves."""
    shown: dict[str, Any] = {}
    for name, tensor in _named_tensors(model):
        shown[name] = (tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())
    for name, module in model.named_modules():
        where = name or "the model"
        shown[f"{where} (training mode)"] = module.training
        shown[f"{where} (class)"] = _Identity(type(module), type(module).forward)
        for kind in HOOK_KINDS:
            shown[f"{where} ({kind.strip('_').replace('_', ' ')})"] = _Identity(*getattr(module, kind).values())
        for method in sorted(name for name in vars(module) if callable(getattr(type(module), name, None))):
            shown[f"{where} ({method})"] = _Identity(vars(module)[method])
    for name in ("config", "generation_config"):
        if (config := getattr(model, name, None)) is not None:
            kernel = getattr(config, "_attn_implementation", None)
            shown[name] = (json.dumps(config.to_dict(), sort_keys=True, default=str), kernel)
    return shown


class _Identity:
    """Objects that equal none but themselves: one hook in place of another is a change."""

    def __init__(self, *objects: object):
        self.objects = objects  # held: the address of one that is gone could be another's

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


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {  # what it is called → (read, put back)
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
WATCHED_FUNCTIONS: tuple[tuple[str, Any], ...] = (  # what every block, the head or the stopwatch calls by its name
    *((name, time) for name in ("perf_counter", "process_time", "sleep")),
    *((name, F) for name in ("linear", "layer_norm", "scaled_dot_product_attention", "softmax")),
    *((name, nn.Module) for name in ("__call__", "_call_impl", "_wrapped_call_impl")),
    *((name, torch) for name in ("matmul", "argmax", "inference_mode")),
)


class ProcessSnapshot:
    """What the process is set to now. Gradient mode is left out: the judge runs under ``inference_mode``."""

    def __init__(self) -> None:
        self._settings = {name: read() for name, (read, _) in SETTINGS.items()}
        self._hooks = {name: dict(getattr(torch_modules, name)) for name in GLOBAL_HOOKS}
        self._functions = [(name, owner, getattr(owner, name)) for name, owner in WATCHED_FUNCTIONS]

    def restored(self) -> str:
        """Puts back what has changed, and says what that was; "" where nothing was."""
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
