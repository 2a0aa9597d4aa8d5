"""Where a config's family keeps embedding, blocks, final norm and head, and whether its layers can be walked at all.

The names stand in ``models.families``; no tensor, no torch.
"""

from __future__ import annotations

from typing import Any

from emad_ref.errors import BadArgument
from emad_ref.models.families import Anatomy, family_of, row_of

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_KERNELS = ("sdpa", "eager")  # those that take an additive mask [rows, 1, queries, keys]
# fused steps where a block has one (``models.fused``), captured where the device can (``models.graphs``); the same,
# nothing captured; modules alone
FAST, EAGER, WALKED = BACKENDS = ("fast", "eager", "walked")
# frequencies that depend on the longest sequence in a batch would make rows depend on their neighbours
LENGTH_DEPENDENT_ROTARY = frozenset({"dynamic", "longrope"})


def anatomy_of(config: Any) -> Anatomy:
    """The table row of a text config (``model.config.get_text_config()``).

    Raises:
        BadArgument: a family without a row or a variant of one that is not walked, bidirectional attention, or
            length-dependent rotary frequencies.
    """
    family = family_of(config)
    if getattr(config, "use_bidirectional_attention", None):
        raise BadArgument("use_bidirectional_attention", True, "a causal model", "it is not a decoder")
    for rotary in rotary_settings(config):
        if rotary.get("rope_type") in LENGTH_DEPENDENT_ROTARY:
            raise BadArgument("rope_type", rotary["rope_type"], "frequencies that do not depend on the batch")
    return family.anatomy


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
        everywhere = row_of(config.model_type).anatomy.window_everywhere and getattr(config, "sliding_window", None)
        kinds = [SLIDING if everywhere else FULL] * layers
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise BadArgument("layer_types", unknown, f"{FULL} or {SLIDING}")
    return list(kinds[:layers])
