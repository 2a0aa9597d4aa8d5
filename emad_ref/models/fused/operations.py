"""Operations of fused blocks: linear layers, rotary embedding, attention over the cache, norms, activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from emad_ref.models.weight_layout import packed_view

Pointwise = Callable[[Tensor], Tensor]
RotaryTables = tuple[Tensor, Tensor]


class PackedQKV(NamedTuple):
    """Queries, keys and values side by side in one buffer, and the views of it that a step takes.

    ``whole`` [rows · n, all outs], or [all outs] of a token alone. ``written``: where projections go, in order.
    ``rotated`` [rows, n, heads, k, d]: the parts that the rotary embedding changes. ``query`` [rows, heads, n,
    head_dim]; ``key``, ``value`` [rows, kv_heads, n, head_dim].
    """

    whole: Tensor
    written: tuple[Tensor, ...]
    rotated: Tensor
    query: Tensor
    key: Tensor
    value: Tensor

    def rotate_parts(self, rotary: RotaryTables) -> None:
        """Apply the rotary embedding to queries and keys, in place."""
        (rotate_single if self.whole.dim() == 1 else rotate)(self.rotated, rotary)


class KVWriter(Protocol):
    """The cache as a fused step sees it: ``models.stepper.CacheWriter``, or one over buffers of its own."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, n, head_dim]; what to attend over, [rows, kv_heads, keys, head_dim]."""
        ...


class AttentionInputs:
    """Inputs of the fused steps of one ``LayerPlacement`` in one forward.

    ``writer``: the cache of the forward's rows. ``mask``: additive [rows or 1, 1, n, keys]; None where every query sees
    every key or, for ``several`` queries, under SDPA's causal flag. ``rotary``: (cos, signed sin) [rows or 1, n, 1,
    1, d], None where positions are embedded.
    """

    __slots__ = ("_packed", "_parts", "_stacked", "causal", "mask", "rotary", "writer")

    def __init__(self, writer: KVWriter, mask: Tensor | None, rotary: RotaryTables | None, several: bool):
        self.writer, self.mask, self.rotary, self.causal = writer, mask, rotary, several and mask is None
        self._stacked: dict[int, Tensor] = {}
        self._packed: dict[tuple[int, ...], PackedQKV] = {}
        self._parts: dict[tuple[int, ...], tuple[Tensor, tuple[Tensor, ...]]] = {}

    def packed(self, states: Tensor, sizes: tuple[int, ...], made: Callable[..., PackedQKV]) -> PackedQKV:
        """``made(states, rotary, *sizes)``, allocated by the first block of these sizes and reused by the others.

        The cache copies what it stores, so the next block may overwrite the buffer.
        """
        if sizes not in self._packed:
            self._packed[sizes] = made(states, self.rotary, *sizes)
        return self._packed[sizes]

    def parts(self, states: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A buffer [all outs], and its parts, for one token's outputs of layers of these ``sizes``; blocks reuse it."""
        if sizes not in self._parts:
            whole = buffer_for(states, sum(sizes))
            self._parts[sizes] = whole, tuple(whole.split(sizes))
        return self._parts[sizes]

    def stacked(self, groups: int) -> Tensor | None:
        """The mask of ``groups`` query heads that stand as queries of one: [rows or 1, 1, groups · n, keys]."""
        if self.mask is None or self.mask.shape[2] == 1:
            return self.mask
        if groups not in self._stacked:
            self._stacked[groups] = self.mask.repeat(1, 1, groups, 1)
        return self._stacked[groups]


class FusedBlock(Protocol):
    """One block over states [rows, n, D], or [D] of a token alone: writes K and V, returns the states after it."""

    def __call__(self, states: Tensor, inputs: AttentionInputs) -> Tensor: ...


def signed_rotary(cos: Tensor, sin: Tensor) -> RotaryTables:
    """Tables [1, P, d] of a model's rotary module as ``rotate`` takes them: [1, P, 1, 1, d]."""
    half = sin.shape[-1] // 2
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return cos[:, :, None, None], sin[:, :, None, None]


def rotate(states: Tensor, rotary: RotaryTables) -> Tensor:
    """Apply the rotary embedding to ``states`` [rows, n, heads, k, d], in place."""
    cos, sin = rotary
    swapped = states.roll(cos.shape[-1] // 2, -1)
    if cos.dtype == states.dtype:  # not ``addcmul``: it rounds once less than the modules do
        return states.mul_(cos).add_(swapped.mul_(sin))
    return states.copy_(states * cos + swapped * sin)  # OLMo2's tables are float32, and so is its turn


def rotate_single(states: Tensor, rotary: RotaryTables) -> Tensor:
    """``rotate`` for one token in one operation less; it rounds once less than the modules do."""
    cos, sin = rotary
    swapped = states.roll(cos.shape[-1] // 2, -1)
    return states.mul_(cos).addcmul_(swapped, sin)


def token_shape(states: Tensor) -> tuple[int, int]:
    """(rows, n) of ``states`` [rows, n, D], or [D] of a token alone."""
    return (1, 1) if states.dim() == 1 else (states.shape[0], states.shape[1])


def buffer_for(states: Tensor, width: int) -> Tensor:
    """[rows · n, ``width``] for what is projected from ``states`` [rows, n, D]; [``width``] for a token alone."""
    return states.new_empty(width if states.dim() == 1 else (states.shape[0] * states.shape[1], width))


def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: AttentionInputs, scale: float, like: Tensor) -> Tensor:
    """[rows, n, heads · d] of ``query`` [rows, heads, n, d] over [rows, kv_heads, keys, d].

    ``like``: states of the same tokens; of a vector, a vector [heads · d].
    """
    rows, heads, queries, width = query.shape
    groups = heads // keys.shape[1]
    if groups == 1 or inputs.causal:
        seen = F.scaled_dot_product_attention(
            query, keys, values, inputs.mask, is_causal=inputs.causal, scale=scale, enable_gqa=groups > 1
        )
    else:
        stacked = query.reshape(rows, keys.shape[1], groups * queries, width)
        seen = F.scaled_dot_product_attention(stacked, keys, values, inputs.stacked(groups), scale=scale)
    if like.dim() == 1:
        return seen.reshape(-1)
    return seen.reshape(rows, heads, queries, width).transpose(1, 2).reshape(rows, queries, heads * width)


def as_vector(hidden: Tensor) -> Tensor:
    """``hidden`` [1, 1, D] as a vector [D] where that gains time; else, and under autograd, [rows, n, D] as it is.

    A vector stays one.
    """
    if hidden.dim() == 1:
        return hidden
    one = hidden.shape[0] * hidden.shape[1] == 1 and hidden.dtype == torch.float32 and hidden.is_cpu
    return hidden.view(-1) if one and not torch.is_grad_enabled() else hidden


def linear(states: Tensor, own: dict[str, Any], out: Tensor | None = None) -> Tensor:
    """The linear layer with parameters ``own`` of ``states`` [rows, n, in] or [in]; ``out``: where to write it."""
    if states.dim() > 1:
        if out is None:
            return F.linear(states, own["weight"], own["bias"])
        rows, transposed = states.flatten(0, -2), own["weight"].t()
        if own["bias"] is None:
            return torch.mm(rows, transposed, out=out)
        return torch.addmm(own["bias"], rows, transposed, out=out)
    if own["bias"] is None:
        return torch.mv(own["weight"], states, out=out)
    return torch.addmv(own["bias"], own["weight"], states, out=out)


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """The module's own table of parameters, read at every call, so that a replaced parameter takes effect."""
    return module._parameters


def layer_norm(module: nn.LayerNorm) -> Pointwise:
    """``module`` as a function, without the four calls that are made to enter it."""
    width, eps, own = module.normalized_shape, module.eps, parameter_table(module)
    return lambda states: torch.layer_norm(states, width, own["weight"], own["bias"], eps)


def activation(module: nn.Module) -> Pointwise:
    """``module`` as a function: PyTorch's own where it does nothing but call it."""
    if type(module).__name__ == "GELUActivation":
        return gelu if getattr(module, "act", None) is F.gelu else module
    return ACTIVATIONS.get(type(module).__name__, module)


def gelu(states: Tensor) -> Tensor:
    """x·Φ(x), PyTorch's own kernel wherever it runs.

    For contiguous float32 on a CPU, PyTorch calls oneDNN, which builds a primitive at every call: a fifth of the time
    of a small model's token. It computes a transposed view of the same numbers itself.
    """
    asks = states.is_cpu and states.dtype == torch.float32 and states.is_contiguous()
    if not asks or states.shape[-1] % 2:
        return F.gelu(states)
    transposed = states.as_strided((2, states.numel() // 2), (1, 2))
    return F.gelu(transposed).as_strided(states.shape, states.stride())


# not those of ``nn.functional``, which ask first whether another library's tensors are at hand
ACTIVATIONS: dict[str, Pointwise] = {
    "SiLUActivation": torch._C._nn.silu,
    "SiLU": torch._C._nn.silu,
    "ReLU": torch.relu,
}


class PackedLinear:
    """Linear layers of these ``parameters``, over the same states [rows, n, in], or [in] of a token alone.

    Several tokens are multiplied with one weight after the other, as the modules do it, whose bits they keep.
    ``sizes``: outputs of each.
    """

    __slots__ = ("_joined", "_names", "_owns", "_places", "sizes")

    def __init__(self, *owns: dict[str, Any]):
        self._owns, self.sizes = owns, tuple(len(own["weight"]) for own in owns)
        self._names = [name for name in ("weight", "bias") if any(own[name] is not None for own in owns)]
        self._places: list[int] = []
        self._joined = self._found()

    def __call__(self, states: Tensor, inputs: AttentionInputs) -> Sequence[Tensor]:
        """What each of them makes of ``states``; of a token alone, until the forward's next block is asked."""
        if self._joined is not None and states.dim() == 1:
            whole, parts = inputs.parts(states, self.sizes)
            if self._one(states, whole):
                return parts
        return [linear(states, own) for own in self._owns]

    def write(self, states: Tensor, packed: PackedQKV) -> None:
        """The same, to where ``packed`` has it."""
        if self._joined is None or states.dim() > 1 or not self._one(states, packed.whole):
            for own, written in zip(self._owns, packed.written, strict=True):
                linear(states, own, written)

    def _one(self, states: Tensor, out: Tensor) -> bool:
        """Whether the weights lie side by side; then what they make of a token alone is in ``out`` [all outs].

        Where they lay when the step was made is asked again at every call: a parameter put in another's place counts.
        """
        places = [own[name].data_ptr() for name in self._names for own in self._owns]
        if places != self._places:
            self._joined, self._places = self._found(), places  # in this order: another thread may ask meanwhile
        if self._joined is None:
            return False
        weight, *bias = self._joined
        if bias:
            torch.addmv(bias[0], weight, states, out=out)
        else:
            torch.mv(weight, states, out=out)
        return True

    def _found(self) -> list[Tensor] | None:
        """Weight, and bias if they have one, of all together; None where they are to be taken one by one."""
        if any(own[name] is None for name in self._names for own in self._owns):
            return None
        found = [packed_view([own[name] for own in self._owns]) for name in self._names]
        return None if any(each is None for each in found) else found  # type: ignore[return-value]  # just seen
