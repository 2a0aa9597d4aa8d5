"""Fused blocks: blocks of known families in plain tensor operations, with a third of the calls.

At batch 1 a small model spends more time entering modules than multiplying. So a forward with a cache, over one or
several queries per row at common or own positions, runs a block's fused *step* (``FusedBlock``) if there is one:

    NEOX_BLOCKS    GPT-NeoX, parallel and sequential
    LLAMA_BLOCKS   Llama and families that differ by norms, factors and rotary layers: Qwen2 and 3, Mistral, OLMo2, …
    OPT_BLOCKS     OPT, norms before or after

``fuse_norm`` is the norm in front of the head as a function, bit-equal to its module.

The modules stay the reference: a law (``tests/laws/test_fused_blocks.py``) and the stepper's self-check compare these
steps with them. A block that differs from the module of its step (another layer type, a subclass, a hook, a quantised
or replaced layer, another attention kernel) keeps its own forward. A step reads a module's parameters at every call,
never a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from emad_ref.models.fast.products import find_faster_product, is_weight_bound
from emad_ref.models.fast.weight_layout import LARGE_WEIGHT, packed_view

Pointwise = Callable[[Tensor], Tensor]
RotaryTables = tuple[Tensor, Tensor]


class PackedQKV(NamedTuple):
    """Packed QKV: queries, keys and values side by side in one buffer, with the views of it that a step uses.

    ``whole`` [rows · n, all outs], or [all outs] of a single token. ``written``: targets of the projections, in order.
    ``rotated`` [rows, n, heads, k, d]: the parts that the rotary embedding changes. ``query`` [rows, heads, n,
    head_dim]; ``key``, ``value`` [rows, kv_heads, n, head_dim].
    """

    whole: Tensor
    written: tuple[Tensor, ...]
    rotated: Tensor
    query: Tensor
    key: Tensor
    value: Tensor

    def apply_rotary(self, rotary: RotaryTables) -> None:
        """Apply the rotary embedding to queries and keys, in place."""
        (apply_token_rotary_in_place if self.whole.dim() == 1 else apply_rotary)(self.rotated, rotary)


class KVWriter(Protocol):
    """The cache of a fused step: ``models.kv_cache.CacheWriter``, or a writer over other buffers."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, n, head_dim]; returns keys and values [rows, kv_heads, keys, head_dim]."""
        ...


class AttentionInputs:
    """Inputs of the fused steps of one ``LayerPlacement`` in one forward.

    ``writer``: the cache of the forward's rows. ``mask``: additive [rows or 1, 1, n, keys]; None if every query sees
    every key or, for ``several`` queries, under SDPA's causal flag. ``rotary``: (cos, signed sin) [rows or 1, n, 1, 1,
    d], None if positions are embedded.
    """

    __slots__ = ("_packed", "_parts", "_stacked", "causal", "mask", "rotary", "writer")

    def __init__(self, writer: KVWriter, mask: Tensor | None, rotary: RotaryTables | None, several: bool):
        self.writer, self.mask, self.rotary, self.causal = writer, mask, rotary, several and mask is None
        self._stacked: dict[int, Tensor] = {}
        self._packed: dict[tuple[int, ...], PackedQKV] = {}
        self._parts: dict[tuple[int, ...], tuple[Tensor, tuple[Tensor, ...]]] = {}

    def packed_qkv_buffer(self, states: Tensor, sizes: tuple[int, ...], make: Callable[..., PackedQKV]) -> PackedQKV:
        """``make(states, rotary, *sizes)``, allocated by the first block of these sizes and reused by the others.

        The cache copies its entries, so the next block may overwrite the buffer.
        """
        if sizes not in self._packed:
            self._packed[sizes] = make(states, self.rotary, *sizes)
        return self._packed[sizes]

    def output_buffers(self, states: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A buffer [all outs], and its parts, for one token's outputs of layers of these ``sizes``; blocks reuse it."""
        if sizes not in self._parts:
            whole = allocate_projection_buffer(states, sum(sizes))
            self._parts[sizes] = whole, tuple(whole.split(sizes))
        return self._parts[sizes]

    def grouped_mask(self, groups: int) -> Tensor | None:
        """The mask for ``groups`` query heads folded into the queries of one: [rows or 1, 1, groups · n, keys]."""
        if self.mask is None or self.mask.shape[2] == 1:
            return self.mask
        if groups not in self._stacked:
            self._stacked[groups] = self.mask.repeat(1, 1, groups, 1)
        return self._stacked[groups]


class FusedBlock(Protocol):
    """One block over states [rows, n, D], or [D] of a single token: writes K and V, returns the states after it."""

    def __call__(self, states: Tensor, inputs: AttentionInputs) -> Tensor: ...


def signed_rotary_tables(cos: Tensor, sin: Tensor) -> RotaryTables:
    """Tables [1, P, d] of a model's rotary module as ``apply_rotary`` takes them: [1, P, 1, 1, d]."""
    half = sin.shape[-1] // 2
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return cos[:, :, None, None], sin[:, :, None, None]


def apply_rotary(states: Tensor, rotary: RotaryTables) -> Tensor:
    """Apply the rotary embedding to ``states`` [rows, n, heads, k, d], in place."""
    cos, sin = rotary
    swapped = states.roll(cos.shape[-1] // 2, -1)
    if cos.dtype == states.dtype:  # not ``addcmul``, which rounds once less than the modules
        return states.mul_(cos).add_(swapped.mul_(sin))
    return states.copy_(states * cos + swapped * sin)  # OLMo2's tables are float32, and so is its rotation


def apply_token_rotary_in_place(states: Tensor, rotary: RotaryTables) -> Tensor:
    """``apply_rotary`` for one token with one operation less; it rounds once less than the modules."""
    cos, sin = rotary
    swapped = states.roll(cos.shape[-1] // 2, -1)
    return states.mul_(cos).addcmul_(swapped, sin)


def row_and_token_counts(states: Tensor) -> tuple[int, int]:
    """(rows, n) of ``states`` [rows, n, D], or [D] of a single token."""
    return (1, 1) if states.dim() == 1 else (states.shape[0], states.shape[1])


def allocate_projection_buffer(states: Tensor, width: int) -> Tensor:
    """[rows · n, ``width``] for a projection of ``states`` [rows, n, D]; [``width``] for a single token."""
    return states.new_empty(width if states.dim() == 1 else (states.shape[0] * states.shape[1], width))


def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: AttentionInputs, scale: float, like: Tensor) -> Tensor:
    """[rows, n, heads · d] of ``query`` [rows, heads, n, d] over [rows, kv_heads, keys, d].

    ``like``: states of the same tokens; of a vector, a vector [heads · d].
    """
    rows, heads, queries, width = query.shape
    groups = heads // keys.shape[1]
    if groups == 1 or inputs.causal:
        attended = F.scaled_dot_product_attention(
            query, keys, values, inputs.mask, is_causal=inputs.causal, scale=scale, enable_gqa=groups > 1
        )
    else:
        stacked = query.reshape(rows, keys.shape[1], groups * queries, width)
        attended = F.scaled_dot_product_attention(stacked, keys, values, inputs.grouped_mask(groups), scale=scale)
    if like.dim() == 1:
        return attended.reshape(-1)
    return attended.reshape(rows, heads, queries, width).transpose(1, 2).reshape(rows, queries, heads * width)


def flatten_single_cpu_token(hidden: Tensor) -> Tensor:
    """``hidden`` [1, 1, D] as a vector [D] if that saves time; else, and under autograd, [rows, n, D] unchanged.

    A vector stays one.
    """
    if hidden.dim() == 1:
        return hidden
    one = hidden.shape[0] * hidden.shape[1] == 1 and hidden.dtype == torch.float32 and hidden.is_cpu
    return hidden.view(-1) if one and not torch.is_grad_enabled() else hidden


def apply_linear_parameters(states: Tensor, own: dict[str, Any], out: Tensor | None = None) -> Tensor:
    """The linear layer with parameters ``own`` of ``states`` [..., in]; ``out`` [tokens, out] or [out]: the target."""
    return multiply_by_weight(states, own["weight"], own["bias"], out)


def multiply_by_weight(states: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``states`` [..., in] by ``weight`` [out, in] plus ``bias``: ``F.linear``, for a large weight by the fastest."""
    product = find_faster_product(states, weight) if weight.numel() >= LARGE_WEIGHT else None
    if product is not None:
        done = product(states.reshape(-1, weight.shape[1]), weight)
        done = done if bias is None else done + bias
        shape = (*states.shape[:-1], len(weight))
        return done.contiguous().view(shape) if out is None else out.copy_(done.view_as(out))
    if states.dim() == 1:
        return torch.mv(weight, states, out=out) if bias is None else torch.addmv(bias, weight, states, out=out)
    if out is None:
        return F.linear(states, weight, bias)
    rows, transposed = states.flatten(0, -2), weight.t()
    return torch.mm(rows, transposed, out=out) if bias is None else torch.addmm(bias, rows, transposed, out=out)


def apply_linear(module: nn.Module, states: Tensor) -> Tensor:
    """``module(states)``, by ``multiply_by_weight`` if it is PyTorch's linear layer, neither hooked nor patched."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    if hooked or type(module) is not nn.Linear:
        return module(states)
    return apply_linear_parameters(states, parameters_by_name(module))


def parameters_by_name(module: nn.Module) -> dict[str, Any]:
    """The module's own table of parameters, read at every call, so that a replaced parameter takes effect."""
    return module._parameters


def make_layer_norm(module: nn.LayerNorm) -> Pointwise:
    """``module`` as a function, without the four calls to enter it."""
    width, eps, own = module.normalized_shape, module.eps, parameters_by_name(module)
    return lambda states: torch.layer_norm(states, width, own["weight"], own["bias"], eps)


def make_activation_from_module(module: nn.Module) -> Pointwise:
    """``module`` as a function: PyTorch's own if the module only calls it."""
    if type(module).__name__ == "GELUActivation":
        return gelu if getattr(module, "act", None) is F.gelu else module
    return ACTIVATIONS.get(type(module).__name__, module)


def gelu(states: Tensor) -> Tensor:
    """x·Φ(x), by PyTorch's own kernel if possible.

    For contiguous float32 on a CPU, PyTorch calls oneDNN, which builds a primitive at every call: a fifth of the time
    of a small model's token. PyTorch computes a transposed view of the same numbers itself.
    """
    exact = states.is_cpu and states.dtype == torch.float32 and states.is_contiguous()
    if not exact or states.shape[-1] % 2:
        return F.gelu(states)
    transposed = states.as_strided((2, states.numel() // 2), (1, 2))
    return F.gelu(transposed).as_strided(states.shape, states.stride())


# not those of ``nn.functional``, which first check for other libraries' tensors
ACTIVATIONS: dict[str, Pointwise] = {
    "SiLUActivation": torch._C._nn.silu,
    "SiLU": torch._C._nn.silu,
    "ReLU": torch.relu,
}


class PackedLinear:
    """Linear layers of these ``parameters`` over the same states [rows, n, in], or [in] of a single token.

    Several tokens use one weight after the other, as in the modules, with equal bits, unless few tokens meet large
    weights. ``sizes``: outputs of each.
    """

    __slots__ = ("_joined", "_names", "_owns", "_places", "sizes")

    def __init__(self, *owns: dict[str, Any]):
        self._owns, self.sizes = owns, tuple(len(own["weight"]) for own in owns)
        self._names = [name for name in ("weight", "bias") if any(own[name] is not None for own in owns)]
        self._places: list[int] = []
        self._joined = self._packed_views()

    def __call__(self, states: Tensor, inputs: AttentionInputs) -> Sequence[Tensor]:
        """Outputs of each layer; those of a single token stay valid until the next block of the forward."""
        if (joined := self._joined_for(states)) is None:
            return [apply_linear_parameters(states, own) for own in self._owns]
        if states.dim() > 1:
            return multiply_by_weight(states, *joined).split(self.sizes, dim=-1)
        whole, parts = inputs.output_buffers(states, self.sizes)
        multiply_by_weight(states, *joined, out=whole)
        return parts

    def write_outputs(self, states: Tensor, packed: PackedQKV) -> None:
        """Write the outputs into ``packed``."""
        if (joined := self._joined_for(states)) is not None:
            multiply_by_weight(states, *joined, out=packed.whole)
            return
        for own, written in zip(self._owns, packed.written, strict=True):
            apply_linear_parameters(states, own, written)

    def _joined_for(self, states: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of all layers, for one product with one token, or a few if they are large; else None.

        Addresses are compared at every call, so a replaced parameter is noticed.
        """
        if self._joined is None:
            return None
        if states.dim() > 1:
            weight = self._joined[0]
            large = weight.numel() >= LARGE_WEIGHT
            if not large or torch.is_grad_enabled() or not is_weight_bound(states, weight):
                return None
        places = [own[name].data_ptr() for name in self._names for own in self._owns]
        if places != self._places:
            self._joined, self._places = (
                self._packed_views(),
                places,
            )  # in this order: another thread may read meanwhile
        return self._joined

    def _packed_views(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias, None without one, of all layers together; None if they must be taken one by one."""
        if any(own[name] is None for name in self._names for own in self._owns):
            return None
        views = [packed_view([own[name] for own in self._owns]) for name in self._names]
        if views[0] is None or views[-1] is None:
            return None
        return views[0], views[1] if len(views) > 1 else None


class NormNames(NamedTuple):
    """Attribute names of a block's norms, None without one; ``norm`` makes a norm into a function."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    norm: Callable[[Any], Pointwise]


def fuse_llama_block(names: NormNames, block: Any) -> FusedBlock:
    """The step of a Llama-like decoder layer."""
    attention, mlp = block.self_attn, block.mlp
    head, scale, index, act = (
        attention.head_dim,
        attention.scaling,
        attention.layer_idx,
        make_activation_from_module(mlp.act_fn),
    )
    first, after_first = (_norm_of(block, names.norm, name) for name in (names.before_attention, names.after_attention))
    second, after_second = (_norm_of(block, names.norm, name) for name in (names.before_mlp, names.after_mlp))
    query_norm, key_norm = (_norm_of(attention, names.norm, name) for name in ("q_norm", "k_norm"))
    uses_rotary, factor = getattr(attention, "use_rope", True), getattr(block, "residual_multiplier", None)
    mixed = PackedLinear(*(parameters_by_name(getattr(attention, f"{name}_proj")) for name in "qkv"))
    widened = PackedLinear(parameters_by_name(mlp.gate_proj), parameters_by_name(mlp.up_proj))
    out, down = parameters_by_name(attention.o_proj), parameters_by_name(mlp.down_proj)
    sizes = (*mixed.sizes[:2], head)
    whole = query_norm is not None and attention.q_norm.weight.shape[0] != head

    def heads(projected: Tensor, norm: Pointwise | None, tokens: tuple[int, int]) -> Tensor:
        if norm is not None and whole:
            projected = norm(projected)
        split = projected.view(*tokens, -1, head)
        return norm(split) if norm is not None and not whole else split

    def step(states: Tensor, inputs: AttentionInputs) -> Tensor:
        normed = states if first is None else first(states)
        if query_norm is None and not torch.is_grad_enabled():
            packed = inputs.packed_qkv_buffer(states, sizes, _packed_llama)
            mixed.write_outputs(normed, packed)
            query, key, value = packed.query, packed.key, packed.value
            if uses_rotary:
                assert inputs.rotary is not None
                packed.apply_rotary(inputs.rotary)
        else:
            tokens = row_and_token_counts(states)
            projected = zip(mixed(normed, inputs), (query_norm, key_norm, None), strict=True)
            query, key, value = (heads(each, norm, tokens) for each, norm in projected)
            if uses_rotary:
                assert inputs.rotary is not None
                both = apply_rotary(torch.cat((query, key), dim=2).unsqueeze(3), inputs.rotary).squeeze(3)
                query, key = both.split((query.shape[2], key.shape[2]), dim=2)
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        keys, values = inputs.writer.update(key, value, index)
        change = apply_linear_parameters(attend(query, keys, values, inputs, scale, states), out)
        base = _add_residual(states, change if after_first is None else after_first(change), factor)
        normed = base if second is None else second(base)
        gate, up = widened(normed, inputs)
        change = apply_linear_parameters(act(gate) * up, down)
        return _add_residual(base, change if after_second is None else after_second(change), factor)

    return step


def _packed_llama(states: Tensor, _rotary: RotaryTables | None, queries: int, keys: int, head: int) -> PackedQKV:
    """All heads of the queries, then of the keys, then of the values."""
    whole, tokens = allocate_projection_buffer(states, queries + 2 * keys), row_and_token_counts(states)
    written = whole.split((queries, keys, keys), dim=-1)
    query, key, value = (each.view(*tokens, -1, head).transpose(1, 2) for each in written)
    rotated = whole.narrow(-1, 0, queries + keys).view(*tokens, -1, 1, head)
    return PackedQKV(whole, tuple(written), rotated, query, key, value)


def _add_residual(hidden: Tensor, change: Tensor, factor: float | None) -> Tensor:
    return change.add_(hidden) if factor is None else hidden + change * factor


def _norm_of(owner: Any, norm: Callable[[Any], Pointwise], name: str | None) -> Pointwise | None:
    return None if name is None or not hasattr(owner, name) else norm(getattr(owner, name))


def make_llama_norm(module: Any) -> Pointwise:
    """Make Llama's RMSNorm: the float32 quotient is rounded to the model's dtype before the product with the weight."""
    quotient, own = _normalise(module, module.variance_epsilon), parameters_by_name(module)
    return lambda states: own["weight"] * quotient(states).to(states.dtype)


def make_olmo2_norm(module: Any) -> Pointwise:
    """Make OLMo2's RMSNorm: the product of weight and quotient is rounded."""
    quotient, own = _normalise(module, module.variance_epsilon), parameters_by_name(module)
    return lambda states: (own["weight"] * quotient(states)).to(states.dtype)


def make_gemma_norm(module: Any) -> Pointwise:
    """Make Gemma's RMSNorm: the factor is 1 + weight, in float32."""
    quotient, own = _normalise(module, module.eps), parameters_by_name(module)
    return lambda states: (quotient(states) * (1.0 + own["weight"].float())).to(states.dtype)


def _normalise(module: Any, eps: float) -> Pointwise:
    """x / √(mean x² + ε) in float32; the weight stays outside, since inside the order of products differs.

    For a single token mean and ε are one product: PyTorch's own norm is seven operations on a CPU, twice the time. Its
    sum is in another order.
    """
    width = tuple(parameters_by_name(module)["weight"].shape)
    with torch.inference_mode(False):  # steps may be built without gradients and run with gradients
        added = torch.full((1,), eps)

    def quotient(states: Tensor) -> Tensor:
        if states.dim() > 1:
            return torch.rms_norm(states.float(), width, None, eps)
        return states * torch.addmv(added, states[None], states, alpha=1 / width[0]).rsqrt_()

    return quotient


RMS_NORMS: dict[str, Callable[[Any], Pointwise]] = {
    "LlamaRMSNorm": make_llama_norm,
    "Qwen2RMSNorm": make_llama_norm,
    "Qwen3RMSNorm": make_llama_norm,
    "MistralRMSNorm": make_llama_norm,
    "SmolLM3RMSNorm": make_llama_norm,
    "GraniteRMSNorm": make_llama_norm,
    "GemmaRMSNorm": make_gemma_norm,
    "Gemma3RMSNorm": make_gemma_norm,
    "Olmo2RMSNorm": make_olmo2_norm,
}
_PRE_NORM = NormNames("input_layernorm", None, "post_attention_layernorm", None, make_llama_norm)
_POST_NORM = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm", make_olmo2_norm)
_PRE_AND_POST_NORM = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    make_gemma_norm,
)
LLAMA_BLOCKS: dict[str, Callable[[Any], FusedBlock | None]] = {
    "LlamaDecoderLayer": partial(fuse_llama_block, _PRE_NORM),
    "Qwen2DecoderLayer": partial(fuse_llama_block, _PRE_NORM),
    "Qwen3DecoderLayer": partial(fuse_llama_block, _PRE_NORM),
    "MistralDecoderLayer": partial(fuse_llama_block, _PRE_NORM),
    "SmolLM3DecoderLayer": partial(fuse_llama_block, _PRE_NORM),
    "GraniteDecoderLayer": partial(fuse_llama_block, _PRE_NORM),
    "GemmaDecoderLayer": partial(fuse_llama_block, _PRE_NORM._replace(norm=make_gemma_norm)),
    "Gemma3DecoderLayer": partial(fuse_llama_block, _PRE_AND_POST_NORM),
    "Olmo2DecoderLayer": partial(fuse_llama_block, _POST_NORM),
}


def fuse_gpt_neox_block(block: Any) -> FusedBlock:
    """The step of a ``GPTNeoXLayer``."""
    attention, mlp = block.attention, block.mlp
    first, second = block.input_layernorm, block.post_attention_layernorm
    width, first_eps, second_eps = first.normalized_shape, first.eps, second.eps
    head, scale = attention.head_size, attention.scaling
    index, parallel, act = attention.layer_idx, block.use_parallel_residual, make_activation_from_module(mlp.act)
    norm, inner_norm = parameters_by_name(first), parameters_by_name(second)
    mix, out = parameters_by_name(attention.query_key_value), parameters_by_name(attention.dense)
    up, down = parameters_by_name(mlp.dense_h_to_4h), parameters_by_name(mlp.dense_4h_to_h)

    def step(states: Tensor, inputs: AttentionInputs) -> Tensor:
        normed = torch.layer_norm(states, width, norm["weight"], norm["bias"], first_eps)
        assert inputs.rotary is not None
        if torch.is_grad_enabled():
            # each head's output is [query | key | value], so this view is free
            mixed = apply_linear_parameters(normed, mix).view(*states.shape[:2], -1, 3, head)
            apply_rotary(_rotated_part(mixed, inputs.rotary), inputs.rotary)
            query, key, value = mixed.transpose(1, 2).unbind(3)
        else:
            packed = inputs.packed_qkv_buffer(states, (normed.shape[-1] // head, head), _packed_neox)
            apply_linear_parameters(normed, mix, packed.whole)
            packed.apply_rotary(inputs.rotary)
            query, key, value = packed.query, packed.key, packed.value
        keys, values = inputs.writer.update(key, value, index)
        change = apply_linear_parameters(attend(query, keys, values, inputs, scale, states), out)
        base = states if parallel else change + states
        normed = torch.layer_norm(base, width, inner_norm["weight"], inner_norm["bias"], second_eps)
        inner = apply_linear_parameters(act(apply_linear_parameters(normed, up)), down)
        return inner.add_(change).add_(states) if parallel else inner.add_(base)

    return step


def _packed_neox(states: Tensor, rotary: RotaryTables, heads: int, head: int) -> PackedQKV:
    whole = allocate_projection_buffer(states, heads * 3 * head)
    mixed = whole.view(*row_and_token_counts(states), heads, 3, head)
    return PackedQKV(whole, (whole,), _rotated_part(mixed, rotary), *mixed.transpose(1, 2).unbind(3))


def _rotated_part(mixed: Tensor, rotary: RotaryTables) -> Tensor:
    """The rotated part of queries and keys: as wide as the tables, which may be narrower than a head."""
    return mixed.narrow(3, 0, 2).narrow(4, 0, rotary[0].shape[-1])


NEOX_BLOCKS: dict[str, Callable[[Any], FusedBlock | None]] = {"GPTNeoXLayer": fuse_gpt_neox_block}


def fuse_opt_block(block: Any) -> FusedBlock:
    """The step of an ``OPTDecoderLayer``."""
    attention, before = block.self_attn, block.do_layer_norm_before
    head, scale, index = attention.head_dim, attention.scaling, attention.layer_idx
    act = make_activation_from_module(block.activation_fn)
    first, second = make_layer_norm(block.self_attn_layer_norm), make_layer_norm(block.final_layer_norm)
    mixed = PackedLinear(*(parameters_by_name(getattr(attention, f"{name}_proj")) for name in "qkv"))
    out, up, down = parameters_by_name(attention.out_proj), parameters_by_name(block.fc1), parameters_by_name(block.fc2)

    def step(states: Tensor, inputs: AttentionInputs) -> Tensor:
        tokens = row_and_token_counts(states)
        normed = first(states) if before else states
        query, key, value = mixed(normed, inputs)
        query, key, value = (each.view(*tokens, -1, head).transpose(1, 2) for each in (query * scale, key, value))
        keys, values = inputs.writer.update(key, value, index)
        base = states + apply_linear_parameters(attend(query, keys, values, inputs, 1.0, states), out)
        if not before:
            base = first(base)
        inner = act(apply_linear_parameters(second(base) if before else base, up))
        changed = base + apply_linear_parameters(inner, down)
        return changed if before else second(changed)

    return step


OPT_BLOCKS: dict[str, Callable[[Any], FusedBlock | None]] = {"OPTDecoderLayer": fuse_opt_block}


FUSED_BLOCKS: dict[str, Callable[[Any], FusedBlock | None]] = {
    **NEOX_BLOCKS,
    **LLAMA_BLOCKS,
    **OPT_BLOCKS,
}
NORMS: dict[str, Callable[[Any], Pointwise]] = {"LayerNorm": make_layer_norm, **RMS_NORMS}
# layers that steps compute themselves, and those without effect in eval mode
_PLAIN_MODULES = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh)


def fuse_block(block: nn.Module, kernel: str) -> FusedBlock | None:
    """The step of ``block`` for queries with a cache under an attention ``kernel``; None without one."""
    maker = FUSED_BLOCKS.get(type(block).__name__)
    return maker(block) if maker is not None and kernel == "sdpa" and _is_unmodified(block) else None


def fuse_norm(module: nn.Module) -> Pointwise | None:
    """The norm in front of the head as a function of states [..., D]; None without a bit-equal function."""
    maker = NORMS.get(type(module).__name__)
    if maker is None or not _is_unmodified(module):
        return None
    norm = maker(module)
    # steps treat a vector as a single token and sum it in another order
    return lambda states: norm(states) if states.dim() > 1 else norm(states[None])[0]


def _is_unmodified(part: nn.Module) -> bool:
    """Whether all its modules are its own source's, activations or PyTorch's; none hooked, patched or wrapped."""
    home = type(part).__module__
    if type(part) not in _PLAIN_MODULES and not home.startswith("transformers.models."):
        return False
    for module in part.modules():
        kind = type(module)
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return False
        if kind not in _PLAIN_MODULES and kind.__module__ not in (home, "transformers.activations"):
            return False
        # a patched class computes something else under its old name
        if kind not in _PLAIN_MODULES and kind.forward.__module__ != kind.__module__:
            return False
    return True
