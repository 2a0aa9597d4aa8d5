"""Plain greedy decoding by a model's own ``generate``: argmax, the ends that are named, and nothing else.

Baselines are this. A model's generation_config may ship penalties, beams, banned or forced tokens, stop strings, a kind
of cache: each would change what a baseline says or what it costs. ``generate`` fills in whatever a config of the call
leaves open from the model's own, so both are fresh ones for as long as the call lasts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from emad_ref.models.special_tokens import BOS, EOS, PAD, START

IDS = frozenset({START, BOS, EOS, PAD})
COLLECTED = ("output_attentions", "output_hidden_states")  # flags of a model's config, too
LONGEST = 60  # characters of a value that a sentence shows


def greedy(
    model: Any,
    inputs: dict[str, Tensor | Any],
    new: int,
    *,
    ends: Collection[int] = (),
    padding: int | None = None,
    assistant: Any | None = None,
    **settings: Any,
) -> Tensor:
    """int64 [rows, prompt + at most ``new``]: what ``model.generate`` gives for ``inputs``, the call's own tensors.

    ``ends``: ids that end a row; none by default, so that all rows do the same work. ``padding`` fills a row that has
    ended: by default with its first end. ``assistant``: a model that drafts. ``settings``: of ``GenerationConfig``.
    """
    stops = sorted(ends)
    fill = padding if padding is not None else stops[0] if stops else 0
    chosen = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=stops or None, pad_token_id=fill, **settings
    )
    helped = {} if assistant is None else {"assistant_model": assistant}
    with torch.inference_mode(), _unconfigured(model, *helped.values()):
        found: Tensor = model.generate(**inputs, generation_config=chosen, **helped)
    return found


def settings_left_out(model: Any) -> dict[str, Any]:
    """Name → value of what the model's files say of generation beyond ids of special tokens and transformers' defaults.

    What ``greedy`` leaves out, and what would have changed its tokens or its work.
    """
    defaults, known = GenerationConfig._get_default_generation_params(), vars(GenerationConfig())
    flags = {name: True for name in COLLECTED if getattr(model.config, name, False)}
    return flags | {
        name: value
        for name, value in sorted(model.generation_config.to_dict().items())
        if name in known
        and not (name.startswith("_") or name in IDS or name == "transformers_version")
        and not (value is None or value == defaults.get(name, False))
    }


def remark_on(settings: dict[str, Any]) -> str:
    """The sentence that a run says of ``settings_left_out``; empty where there are none."""
    if not settings:
        return ""
    listed = ", ".join(f"{name}={_short(value)}" for name, value in settings.items())
    return f"its files say {listed}: left out of every baseline, which decodes plainly greedily"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def collect_nothing(model: Any) -> None:
    """Switch off what the config says to return of every layer: it costs time, and nothing here reads it."""
    for name in COLLECTED:
        if getattr(model.config, name, False):
            setattr(model.config, name, False)


@contextmanager
def _unconfigured(*models: Any) -> Iterator[None]:
    """Models without settings of their own, as long as the block lasts."""
    kept = [(model, model.generation_config) for model in models]
    try:
        for model in models:
            model.generation_config = GenerationConfig()
        yield
    finally:
        for model, config in kept:
            model.generation_config = config
