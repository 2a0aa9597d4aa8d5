"""Baselines: a model's own greedy ``generate``, and ``torch.compile`` that fails instead of falling back.

A model's generation_config may hold penalties, beams, forced tokens or a kind of cache. Each would change a baseline's
tokens or cost, so a fresh config replaces it for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, __version__
from transformers.cache_utils import DynamicSlidingWindowLayer

from emad_ref.absent import Absent
from emad_ref.models.tokenizers import BOS, EOS, PAD, START
from emad_ref.protocol import Prompt
from emad_ref.record import Ints

TOKEN_ID_KEYS = frozenset({START, BOS, EOS, PAD})
OUTPUT_FLAGS = ("output_attentions", "output_hidden_states")  # also flags of a model's config
LOOKUP = "prompt lookup"  # drafts the continuation of an earlier equal n-gram
LOOKUP_TOKENS = 10  # drafted tokens of prompt lookup, as in transformers' documentation
MAX_SHOWN = 60  # most characters of a value in a sentence


def greedy_generate(
    model: Any,
    inputs: dict[str, Tensor | Any],
    new: int,
    *,
    ends: Collection[int] = (),
    padding: int | None = None,
    assistant: Any | None = None,
    **settings: Any,
) -> Tensor:
    """Output of ``model.generate`` for ``inputs``, the call's own tensors: int64 [rows, prompt + at most ``new``].

    ``ends``: ids that end a row; none by default, so all rows do the same work. ``padding`` fills an ended row, by
    default with its first end. ``assistant``: a model that drafts. ``settings``: of ``GenerationConfig``.
    """
    stops = sorted(ends)
    fill = padding if padding is not None else stops[0] if stops else 0
    chosen = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=stops or None, pad_token_id=fill, **settings
    )
    helped = {} if assistant is None else {"assistant_model": assistant}
    with torch.inference_mode(), _default_generation_config(model, *helped.values()):
        output: Tensor = model.generate(**inputs, generation_config=chosen, **helped)
    return output


def ignored_generation_settings(model: Any) -> dict[str, Any]:
    """Name → value of the model's generation settings beyond ids of special tokens and transformers' defaults.

    ``greedy_generate`` ignores them; they would change its tokens or its work.
    """
    defaults, standard = GenerationConfig._get_default_generation_params(), vars(GenerationConfig())
    flags = {name: True for name in OUTPUT_FLAGS if getattr(model.config, name, False)}
    return flags | {
        name: value
        for name, value in sorted(model.generation_config.to_dict().items())
        if name in standard
        and not (name.startswith("_") or name in TOKEN_ID_KEYS or name == "transformers_version")
        and not (value is None or value == defaults.get(name, False))
    }


def describe_ignored_settings(settings: dict[str, Any]) -> str:
    """The run's sentence about ``ignored_generation_settings``; empty if there are none."""
    if not settings:
        return ""
    listed = ", ".join(f"{name}={_shorten(value)}" for name, value in settings.items())
    return f"its files say {listed}: left out of every baseline, which decodes plainly greedily"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def disable_per_layer_outputs(model: Any) -> None:
    """Disable per-layer outputs that the config requests: they cost time, and no code reads them."""
    for name in OUTPUT_FLAGS:
        if getattr(model.config, name, False):
            setattr(model.config, name, False)


@contextmanager
def _default_generation_config(*models: Any) -> Iterator[None]:
    """Remove the generation settings of models for the block."""
    configs = [(model, model.generation_config) for model in models]
    try:
        for model in models:
            model.generation_config = GenerationConfig()
        yield
    finally:
        for model, config in configs:
            model.generation_config = config


Generate = Callable[[Prompt, int], Ints]  # (prompt, new tokens) → emitted tokens


def make_transformers_generate(model: Any, device: torch.device, **options: Any) -> Generate:
    """A function that generates with the model's own greedy ``generate``; ``options`` as of ``greedy_generate``.

    ``device``: takes token ids in. ``assistant``: another model of the same ids, which drafts.
    """

    def generate(prompt: Prompt, new: int) -> Ints:
        ids = torch.from_numpy(np.asarray(prompt.tokens))[None].to(device)
        inputs = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
        emitted: Ints = greedy_generate(model, inputs, new, **options)[0, ids.shape[1] :].cpu().numpy()
        return emitted

    return generate


def make_prompt_lookup_generate(model: Any, device: torch.device) -> Generate:
    """The same with transformers' prompt lookup, which drafts the continuation of an earlier equal n-gram."""
    return make_transformers_generate(model, device, prompt_lookup_num_tokens=LOOKUP_TOKENS)


def absent_drafting(*models: Any) -> Absent | None:
    """Why transformers cannot verify drafts of and by these models here; None if it can.

    Assisted generation keeps more keys of a sliding window than the window, to take rejected drafts back. Before
    huggingface/transformers#48280 the cache also returned them all: an eager step fails, and one of sdpa without a mask
    attends beyond the window. The cache itself is tried, since a version number does not tell of a patched build.
    """
    windowed = any(any(DynamicCache(config=model.config).is_sliding) for model in models)
    if not windowed or not _returns_keys_beyond_window():
        return None
    return Absent(
        f"a sliding window, and the cache of transformers {__version__} returns keys beyond it while drafts are "
        "verified; fixed in transformers 5.18"
    )


def _returns_keys_beyond_window() -> bool:
    """Whether a window of 2 that keeps rejected drafts returns more keys than its mask covers."""
    layer, states = DynamicSlidingWindowLayer(sliding_window=2), torch.zeros(1, 1, 3, 1)
    layer.activate_past_recording()
    layer.update(states, states)
    masked, _ = layer.get_mask_sizes(1)
    keys, _ = layer.update(states[:, :, :1], states[:, :, :1])
    return bool(keys.shape[-2] != masked)


@contextmanager
def fail_on_recompile_limit() -> Iterator[None]:
    """Compile everything inside the block, or raise.

    Raises:
        RuntimeError: more shapes than TorchDynamo compiles one function for.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        with config.patch(fail_on_recompile_limit_hit=True):
            yield
    except FailOnRecompileLimitHit as limit:
        raise RuntimeError(f"more shapes than TorchDynamo compiles a step for: {limit}") from limit


def count_traced_graphs() -> int:
    """Graphs that TorchDynamo has traced in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
