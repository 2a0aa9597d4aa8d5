"""Model families: one row per family with names of its modules, rules for its sizes, and float32 computation.

A row follows the family's own ``forward``; it has names, conventions and arithmetic on a config, and uses no torch. A
family without a row is refused. A wrong row fails when a stepper is built: the layers must give the model's own logits,
and the sizes must add up to the model's number of parameters. ``tests/laws/test_flops.py`` compares the FLOPs with
PyTorch's counter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from emad_ref.errors import BadArgument
from emad_ref.extensions import EXTENSIONS


@dataclass(frozen=True)
class Anatomy:
    """Attribute names inside ``model.get_decoder()``, unless said otherwise.

    ``positions``          learned position table [positions + offset, D], or None.
    ``rotary``             module that gives (cos, sin), or None; ``rotary_per_kind``: one table per kind of layer.
    ``positions_inside``   the table of rotations ends at ``max_position_embeddings``; a decoder without the module
                           ``rotary`` has it inside its blocks, which take ``position_ids``.
    ``always_masked``      a block adds its mask unconditionally.
    ``constants``          further keyword arguments of a block, the same at every call.
    ``project_in/out``     between embedding width and D; the attribute may be None.
    ``embedding_factor``   config key of a factor on embeddings outside their module.
    ``logits_divisor``     config key of a divisor of logits.
    ``softcap``            config key of the cap on final logits: c·tanh(z/c).
    ``window_everywhere``  a config without ``layer_types`` puts its sliding window on every layer.
    """

    blocks: str = "layers"
    final_norm: str = "norm"
    positions: str | None = None
    position_offset: int = 0
    rotary: str | None = "rotary_emb"
    rotary_per_kind: bool = False
    positions_inside: bool = False
    always_masked: bool = False
    constants: tuple[tuple[str, Any], ...] = ()
    project_in: str | None = None
    project_out: str | None = None
    embedding_factor: str | None = None
    logits_divisor: str | None = None
    softcap: str | None = None
    window_everywhere: bool = False


@dataclass(frozen=True)
class ModelWidths:
    """Sizes that determine a family's norms and biases; ``models.geometry`` defines the symbols."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int


def _has_gated_mlp(config: Any) -> bool:
    return True


def _has_plain_mlp(config: Any) -> bool:
    return False


def _kv_heads(config: Any) -> int | None:
    return getattr(config, "num_key_value_heads", None)


def _has_tied_embeddings(config: Any) -> bool:
    return bool(config.tie_word_embeddings)


@dataclass(frozen=True)
class SizeRules:
    """Config keys of the sizes of ``models.geometry.Geometry``.

    ``gated``         whether the MLP has three matrices.
    ``block_extras``  parameters of one block that belong to no matrix product (norms, biases); ``extras`` of the rest.
    ``layers``, ``hidden``, ``heads``, ``head_dim``, ``intermediate``: config keys; a missing head width is hidden
    / heads, an empty intermediate 4 · hidden.
    ``kv_heads``      None if every head has its own key.
    ``experts``, ``experts_used``: config keys of the experts of a block and of those that one token runs; None if
    a block has one MLP.
    ``encoder_layers`` config key of the encoder's depth; None in a decoder-only family.
    """

    gated: Callable[[Any], bool]
    block_extras: Callable[[Any, ModelWidths], int]
    extras: Callable[[Any, ModelWidths], int]
    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    head_dim: str = "head_dim"
    intermediate: str = "intermediate_size"
    kv_heads: Callable[[Any], int | None] = _kv_heads
    tied: Callable[[Any], bool] = _has_tied_embeddings
    experts: str | None = None
    experts_used: str | None = None
    encoder_layers: str | None = None

    def widths(self, config: Any) -> ModelWidths:
        """Widths from ``config``, or from a SimpleNamespace with its keys."""
        hidden, heads = getattr(config, self.hidden), getattr(config, self.heads)
        return ModelWidths(
            hidden=hidden,
            heads=heads,
            kv_heads=self.kv_heads(config) or heads,
            head_dim=getattr(config, self.head_dim, None) or hidden // heads,
            intermediate=getattr(config, self.intermediate) or 4 * hidden,  # GPT-2 leaves n_inner empty
            vocabulary=config.vocab_size,
        )


@dataclass(frozen=True)
class ConfigRequirement:
    """Condition on a config of the family: ``holds(config.key)``; ``expected`` describes it."""

    key: str
    holds: Callable[[Any], bool]
    expected: str


@dataclass(frozen=True)
class ModelFamily:
    """One model family.

    ``float32_inside``: its norm, softmax or router computes in float32 whatever the model's dtype. ``needs``:
    requirements that exclude unsupported variants.
    """

    anatomy: Anatomy
    sizes: SizeRules
    float32_inside: bool
    needs: tuple[ConfigRequirement, ...] = ()

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it is an encoder-decoder (``models.seq2seq``)."""
        return self.sizes.encoder_layers is not None


def _attention_biases(w: ModelWidths) -> int:
    return (w.heads + 2 * w.kv_heads) * w.head_dim


def _all_biases(w: ModelWidths) -> int:
    """Biases of query, key, value, output and both MLP matrices."""
    return _attention_biases(w) + w.hidden + w.intermediate + w.hidden


def _gpt_neox_block(c: Any, w: ModelWidths) -> int:
    return 4 * w.hidden + w.intermediate + w.hidden + (_attention_biases(w) + w.hidden) * bool(c.attention_bias)


def _opt_block(c: Any, w: ModelWidths) -> int:
    return 4 * w.hidden * bool(c.layer_norm_elementwise_affine) + _all_biases(w) * bool(c.enable_bias)


def _opt_extras(c: Any, w: ModelWidths) -> int:
    normed = c.do_layer_norm_before and not c._remove_final_layer_norm and c.layer_norm_elementwise_affine
    return 2 * w.hidden * bool(normed) + (c.max_position_embeddings + 2) * w.hidden


def _llama_block(c: Any, w: ModelWidths) -> int:
    attention = (_attention_biases(w) + w.hidden) * bool(getattr(c, "attention_bias", False))
    return 2 * w.hidden + attention + (2 * w.intermediate + w.hidden) * bool(getattr(c, "mlp_bias", False))


def _phi_block(c: Any, w: ModelWidths) -> int:
    return 2 * w.hidden + _all_biases(w) + 4 * (w.hidden // w.heads) * bool(c.qk_layernorm)


def _stablelm_block(c: Any, w: ModelWidths) -> int:
    norms = (1 if c.use_parallel_residual else 2) * 2 * w.hidden
    per_head = (w.heads + w.kv_heads) * w.head_dim * bool(c.qk_layernorm)
    return norms + per_head + _attention_biases(w) * bool(c.use_qkv_bias)


def _falcon_block(c: Any, w: ModelWidths) -> int:
    # the model's constructor replaces an empty number of norms: two in the new architecture, else one
    parallel = c.num_ln_in_parallel_attn or (2 if c.new_decoder_architecture else 1)
    norms = (2 if not c.parallel_attn or parallel == 2 else 1) * 2 * w.hidden
    return norms + _all_biases(w) * bool(c.bias)


def _falcon_kv_heads(c: Any) -> int | None:
    if c.new_decoder_architecture:
        return int(c.num_kv_heads)
    return 1 if c.multi_query else None


def _rms_norm_parameters(c: Any, w: ModelWidths) -> int:
    """Parameters of the final RMSNorm."""
    return w.hidden


def _layer_norm_parameters(c: Any, w: ModelWidths) -> int:
    """Parameters of the final LayerNorm."""
    return 2 * w.hidden


def _t5_extras(c: Any, w: ModelWidths) -> int:
    norms = (2 * c.num_layers + 2) * w.hidden
    return norms + 2 * c.relative_attention_num_buckets * w.heads


FAMILIES: dict[str, ModelFamily] = {
    "gpt_neox": ModelFamily(
        Anatomy(final_norm="final_layer_norm"),
        SizeRules(_has_plain_mlp, _gpt_neox_block, _layer_norm_parameters),
        float32_inside=False,
    ),
    "opt": ModelFamily(
        Anatomy(
            final_norm="final_layer_norm",  # None in the post-norm 350m
            positions="embed_positions",
            position_offset=2,
            rotary=None,
            project_in="project_in",
            project_out="project_out",
        ),
        SizeRules(_has_plain_mlp, _opt_block, _opt_extras, intermediate="ffn_dim"),
        float32_inside=False,
    ),
    "gpt2": ModelFamily(
        Anatomy(blocks="h", final_norm="ln_f", positions="wpe", rotary=None),
        SizeRules(
            _has_plain_mlp,
            lambda c, w: 4 * w.hidden + _all_biases(w),
            lambda c, w: 2 * w.hidden + c.max_position_embeddings * w.hidden,
            intermediate="n_inner",
        ),
        float32_inside=False,
    ),
    "llama": ModelFamily(Anatomy(), SizeRules(_has_gated_mlp, _llama_block, _rms_norm_parameters), float32_inside=True),
    "mistral": ModelFamily(
        Anatomy(window_everywhere=True),
        SizeRules(_has_gated_mlp, lambda c, w: 2 * w.hidden, _rms_norm_parameters),
        float32_inside=True,
    ),
    "qwen2": ModelFamily(
        Anatomy(),
        SizeRules(_has_gated_mlp, lambda c, w: 2 * w.hidden + _attention_biases(w), _rms_norm_parameters),
        float32_inside=True,
    ),
    "qwen3": ModelFamily(
        Anatomy(),
        SizeRules(_has_gated_mlp, lambda c, w: _llama_block(c, w) + 2 * w.head_dim, _rms_norm_parameters),
        float32_inside=True,
    ),
    "olmo2": ModelFamily(
        Anatomy(),
        SizeRules(
            _has_gated_mlp, lambda c, w: _llama_block(c, w) + (w.heads + w.kv_heads) * w.head_dim, _rms_norm_parameters
        ),
        float32_inside=True,
    ),
    "phi": ModelFamily(
        Anatomy(final_norm="final_layernorm"),
        SizeRules(_has_plain_mlp, _phi_block, lambda c, w: 2 * w.hidden + w.vocabulary),
        float32_inside=False,
    ),
    "gemma2": ModelFamily(
        Anatomy(softcap="final_logit_softcapping"),
        SizeRules(_has_gated_mlp, lambda c, w: 2 * w.hidden + _llama_block(c, w), _rms_norm_parameters),
        float32_inside=True,
    ),
    "gemma3_text": ModelFamily(
        Anatomy(softcap="final_logit_softcapping", rotary_per_kind=True),
        SizeRules(
            _has_gated_mlp, lambda c, w: 2 * w.hidden + _llama_block(c, w) + 2 * w.head_dim, _rms_norm_parameters
        ),
        float32_inside=True,
    ),
    "gemma": ModelFamily(Anatomy(), SizeRules(_has_gated_mlp, _llama_block, _rms_norm_parameters), float32_inside=True),
    "granite": ModelFamily(
        Anatomy(embedding_factor="embedding_multiplier", logits_divisor="logits_scaling"),
        SizeRules(_has_gated_mlp, _llama_block, _rms_norm_parameters),
        float32_inside=True,
    ),
    "smollm3": ModelFamily(
        Anatomy(), SizeRules(_has_gated_mlp, _llama_block, _rms_norm_parameters), float32_inside=True
    ),
    "stablelm": ModelFamily(
        Anatomy(), SizeRules(_has_gated_mlp, _stablelm_block, _layer_norm_parameters), float32_inside=False
    ),
    "falcon": ModelFamily(
        Anatomy(
            blocks="h",
            final_norm="ln_f",
            always_masked=True,
            constants=(("alibi", None),),
        ),
        SizeRules(
            _has_plain_mlp,
            _falcon_block,
            _layer_norm_parameters,
            intermediate="ffn_hidden_size",
            kv_heads=_falcon_kv_heads,
        ),
        float32_inside=False,
        needs=(ConfigRequirement("alibi", lambda alibi: not alibi, "False: only its rotary variants are walked"),),
    ),
    "gptj": ModelFamily(
        Anatomy(
            blocks="h",
            final_norm="ln_f",
            positions_inside=True,
            always_masked=True,
        ),
        SizeRules(
            _has_plain_mlp,
            lambda c, w: 2 * w.hidden + w.intermediate + w.hidden,
            lambda c, w: 2 * w.hidden + w.vocabulary,
            intermediate="n_inner",
        ),
        float32_inside=True,  # scores are products of float32 queries and keys
    ),
    "mixtral": ModelFamily(
        Anatomy(window_everywhere=True),
        SizeRules(
            _has_gated_mlp,
            lambda c, w: 2 * w.hidden,
            _rms_norm_parameters,
            experts="num_local_experts",
            experts_used="num_experts_per_tok",
        ),
        float32_inside=True,
    ),
    "qwen3_moe": ModelFamily(
        Anatomy(window_everywhere=True),
        SizeRules(
            _has_gated_mlp,
            lambda c, w: _llama_block(c, w) + 2 * w.head_dim,
            _rms_norm_parameters,
            intermediate="moe_intermediate_size",
            experts="num_experts",
            experts_used="num_experts_per_tok",
        ),
        float32_inside=True,
        needs=(
            ConfigRequirement(
                "num_experts", lambda experts: experts > 0, "at least 1: without experts it is another family"
            ),
            ConfigRequirement(
                "decoder_sparse_step", lambda step: step == 1, "1: experts in every layer, for layers cost the same"
            ),
            ConfigRequirement(
                "mlp_only_layers", lambda plain: not plain, "[]: experts in every layer, for layers cost the same"
            ),
        ),
    ),
    # the anatomy is the decoder's; ``models.seq2seq`` passes the arguments of its blocks
    "t5": ModelFamily(
        Anatomy(blocks="block", final_norm="final_layer_norm", rotary=None),
        SizeRules(
            lambda c: c.feed_forward_proj.startswith("gated"),
            lambda c, w: 3 * w.hidden,
            _t5_extras,
            layers="num_decoder_layers",
            hidden="d_model",
            heads="num_heads",
            head_dim="d_kv",  # heads · d_kv need not be d_model
            intermediate="d_ff",
            # transformers declares every T5 tied; only v1.1, with its own head, does not scale the head's input
            tied=lambda c: getattr(c, "scale_decoder_outputs", c.tie_word_embeddings),
            encoder_layers="num_layers",
        ),
        float32_inside=True,
    ),
}


def get_family(family: str) -> ModelFamily:
    """The row of a family, by its config's ``model_type``.

    Raises:
        BadArgument: a family without a row.
    """
    if family in FAMILIES:
        return FAMILIES[family]
    if family not in EXTENSIONS.places("families"):
        names = ", ".join(sorted((*FAMILIES, *EXTENSIONS.places("families"))))
        raise BadArgument("model_type", family, f"one of {names}", "add its row to emad_ref/models/families.py")
    theirs = EXTENSIONS.load_part("families", family)
    if not isinstance(theirs, ModelFamily):
        raise BadArgument(f"families: {family}", type(theirs).__name__, "a ModelFamily", "see docs/own-claim.md")
    return theirs


def family_of_config(config: Any) -> ModelFamily:
    """The row of a text config (``model.config.get_text_config()``), or of a SimpleNamespace with its keys.

    Raises:
        BadArgument: a family without a row, or an unsupported variant.
    """
    family = get_family(config.model_type)
    for need in family.needs:
        value = getattr(config, need.key)
        if not need.holds(value):
            raise BadArgument(need.key, value, need.expected, f"in a model of the family {config.model_type}")
    return family


FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
ATTENTION_KERNELS = ("sdpa", "eager")  # those with an additive mask [rows, 1, queries, keys]
# fused steps (``models.fast.fused_blocks``) captured if possible (``models.fast.graph_capture``); fused steps; modules
FAST, EAGER, WALKED = BACKENDS = ("fast", "eager", "walked")
# frequencies that depend on the longest sequence in a batch would make rows depend on their neighbours
LENGTH_DEPENDENT_ROTARY = frozenset({"dynamic", "longrope"})


def anatomy_of(config: Any) -> Anatomy:
    """The table row of a text config (``model.config.get_text_config()``).

    Raises:
        BadArgument: a family without a row or an unsupported variant, bidirectional attention, or length-dependent
            rotary frequencies.
    """
    family = family_of_config(config)
    if getattr(config, "use_bidirectional_attention", None):
        raise BadArgument("use_bidirectional_attention", True, "a causal model", "it is not a decoder")
    for rotary in list_rope_parameter_dicts(config):
        if rotary.get("rope_type") in LENGTH_DEPENDENT_ROTARY:
            expected = "frequencies that do not depend on how long the texts of a batch are"
            raise BadArgument("rope_type", rotary["rope_type"], expected, "choose a model with another kind, e.g. yarn")
    return family.anatomy


def list_rope_parameter_dicts(config: Any) -> list[dict[str, Any]]:
    """The rotary parameter dicts of a config: none, one, or one per kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def layer_attention_types(config: Any) -> list[str]:
    """FULL or SLIDING for each layer.

    Raises:
        BadArgument: another kind of layer (chunked, linear, …).
    """
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        everywhere = get_family(config.model_type).anatomy.window_everywhere and getattr(config, "sliding_window", None)
        kinds = [SLIDING_ATTENTION if everywhere else FULL_ATTENTION] * layers
    unknown = sorted(set(kinds) - {FULL_ATTENTION, SLIDING_ATTENTION})
    if unknown:
        raise BadArgument("layer_types", unknown, f"{FULL_ATTENTION} or {SLIDING_ATTENTION}")
    return list(kinds[:layers])
