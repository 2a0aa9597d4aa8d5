"""Does a checkpoint fill the model that its config describes: every tensor there, none left over, each of its shape?

What a file does not hold, transformers draws at random and says so in a log: the model then runs, and is nobody's. A
config that names fewer layers than the file holds loads without a word of error too. Both are refused here, by name.

Not missing: a tensor that is tied to one that is there. Not left over: tables that older versions of a family stored
beside the weights and that are computed today (``TABLES``; each family's own list is transformers' to know).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from emad_ref.errors import BadArgument

TABLES = re.compile(
    r"(^|\.)(attn|attention|self_attn|self_attention)\.(masked_)?bias$"  # causal masks and the value behind them
    r"|(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
    r"|(^|\.)embed_positions$"  # GPT-J's sines
    r"|(^|\.)position_ids$"
)
SHOWN = 3


def require_filled(name: str, model: Any, found: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that did not fill ``model``.

    ``found``: as ``from_pretrained(…, output_loading_info=True)`` gives it: sets ``missing_keys``, ``unexpected_keys``,
    and ``mismatched_keys`` of (name, shape in the file, shape in the model).

    Raises:
        BadArgument: tensors that are missing, left over, or of another shape, how many, and the first few by name; a
            head that differs from the embedding which the config says it is tied to.
    """
    left_over = [key for key in found["unexpected_keys"] if not TABLES.search(key)]
    reshaped = [f"{key} {list(theirs)} for {list(ours)}" for key, theirs, ours in found["mismatched_keys"]]
    problems = (
        ("missing", found["missing_keys"]),
        ("that the config leaves no place for", left_over),
        ("of another shape than the config says", reshaped),
    )
    told = [f"{len(keys)} {what} ({_first(keys)})" for what, keys in problems if keys]
    if told:
        raise BadArgument(
            "name",
            name,
            "a checkpoint that fills the model of its config",
            f"tensors: {'; '.join(told)}; save weights and config together again, or fetch both",
        )
    config = model.config.get_text_config()
    # every T5Config says that they are tied, v1.1's too, which has a head of its own and says so by not scaling
    tied = config.tie_word_embeddings and getattr(config, "scale_decoder_outputs", True)
    if tied and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise BadArgument(
            "name",
            name,
            "one tensor for embedding and head, as tie_word_embeddings says",
            "the file holds two that differ: mend config.json, or save weights and config together again",
        )


def require_finite(name: str, model: Any) -> None:
    """Refuse weights, and tables stored beside them, that hold NaN or infinity.

    Raises:
        BadArgument: the first such tensor, by name. A mask may hold infinity, but is no floating-point buffer of any
            family that is walked.
    """
    for tensor, values in (*model.named_parameters(), *model.named_buffers()):
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise BadArgument(
                "name",
                name,
                "finite weights",
                f"{tensor} holds NaN or infinity in {values.dtype}: fetch or save the checkpoint again",
            )


def _first(keys: Collection[str]) -> str:
    """The first few, layer 2 before layer 10."""
    by_number = sorted(keys, key=lambda key: [int(part) if part.isdecimal() else part for part in _parts(key)])
    return ", ".join([*by_number[:SHOWN], *(["…"] if len(keys) > SHOWN else [])])


def _parts(key: str) -> list[str]:
    return re.split(r"(\d+)", key)  # text and numbers in turn: each place compares with its kind
