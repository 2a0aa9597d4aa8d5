"""Where a family keeps embedding, blocks, final norm and head: one table row per family.

Only names and conventions, read off the model's own ``forward``; no tensor, no torch. A family that is not here is
refused; a row that is wrong fails the stepper's self-check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from emad_ref.errors import BadArgument

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_KERNELS = ("sdpa", "eager")  # those that take an additive mask [rows, 1, queries, keys]
# frequencies that depend on the longest sequence in a batch would make rows depend on their neighbours
LENGTH_DEPENDENT_ROTARY = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Anatomy:
    """Attribute names inside ``model.get_decoder()``, unless said otherwise.

    ``positions``          learned position table [positions + offset, D], or None.
    ``rotary``             module that gives (cos, sin), or None; ``rotary_per_kind``: one table per kind of layer.
    ``cache_keyword``      by which a block takes its cache.
    ``project_in/out``     between embedding width and D; the attribute may be None.
    ``softcap``            config key of the cap on final logits: c·tanh(z/c).
    ``window_everywhere``  a config without ``layer_types`` puts its sliding window on every layer.
    """

    blocks: str = "layers"
    final_norm: str = "norm"
    positions: str | None = None
    position_offset: int = 0
    rotary: str | None = "rotary_emb"
    rotary_per_kind: bool = False
    cache_keyword: str = "past_key_values"
    project_in: str | None = None
    project_out: str | None = None
    softcap: str | None = None
    window_everywhere: bool = False


ANATOMY: dict[str, Anatomy] = {
    "gpt_neox": Anatomy(final_norm="final_layer_norm", cache_keyword="layer_past"),
    "opt": Anatomy(
        final_norm="final_layer_norm",  # None in the post-norm 350m
        positions="embed_positions",
        position_offset=2,
        rotary=None,
        project_in="project_in",
        project_out="project_out",
    ),
    "gpt2": Anatomy(blocks="h", final_norm="ln_f", positions="wpe", rotary=None),
    "llama": Anatomy(),
    "mistral": Anatomy(window_everywhere=True),
    "qwen2": Anatomy(),
    "qwen3": Anatomy(),
    "olmo2": Anatomy(),
    "phi": Anatomy(final_norm="final_layernorm"),
    "gemma2": Anatomy(softcap="final_logit_softcapping"),
    "gemma3_text": Anatomy(softcap="final_logit_softcapping", rotary_per_kind=True),
}


def anatomy_of(config: Any) -> Anatomy:
    """The table row of a text config (``model.config.get_text_config()``).

    Raises:
        BadArgument: a family without a row, bidirectional attention, or length-dependent rotary frequencies.
    """
    if config.model_type not in ANATOMY:
        raise BadArgument(
            "model_type", config.model_type, f"one of {', '.join(sorted(ANATOMY))}", "add its row to anatomy.py"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise BadArgument("use_bidirectional_attention", True, "a causal model", "it is not a decoder")
    for rotary in rotary_settings(config):
        if rotary.get("rope_type") in LENGTH_DEPENDENT_ROTARY:
            raise BadArgument("rope_type", rotary["rope_type"], "frequencies that do not depend on the batch")
    return ANATOMY[config.model_type]


def rotary_settings(config: Any) -> list[dict[str, Any]]:
    """The rotary parameter dicts of a config: none, one, or one per kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def layer_kinds(config: Any) -> list[str]:
    """FULL or SLIDING for each layer.

    Raises:
        BadArgument: another kind of layer (chunked, linear, …).
    """
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        everywhere = ANATOMY[config.model_type].window_everywhere and getattr(config, "sliding_window", None)
        kinds = [SLIDING if everywhere else FULL] * layers
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise BadArgument("layer_types", unknown, f"{FULL} or {SLIDING}")
    return list(kinds[:layers])
