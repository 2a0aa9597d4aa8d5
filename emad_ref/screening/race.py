"""Ways of decoding the same prompts, timed side by side: a model's own loops, ours at full depth, and drafting.

    full            our decoder, all layers
    self            the same, drafting by the model's own head at a shallow layer, without a gate
    drafting        the same, drafting as asked
    generate        the model's own, greedy
    prompt lookup   the same, what followed the last n-gram earlier in the text as drafts
    assisted        the same, a smaller model's drafts

Greedy, one prompt a request, a fixed number of new tokens and no stop token, so that all arms do the same. What an arm
emitted is kept beside its times: an arm that promises the model's own output is held to it by whoever times it
(``emitted``), up to ties by rounding. An assistant must read the same ids (``assistant_of``); the model itself, cut
off, is none: its first layers with its own head are the arm "self".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from emad_ref.decoding.drafted import DraftingDecoder
from emad_ref.decoding.drafting import Drafting
from emad_ref.decoding.pair import shared_vocabulary
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.meters.clock import Timings, paired
from emad_ref.models.loading import Loaded
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import Ints

FULL, GENERATE, LOOKUP, ASSISTED, SELF, DRAFTING = "full", "generate", "prompt lookup", "assisted", "self", "drafting"
LOOKED_UP = 10  # tokens that prompt lookup drafts: transformers' documentation
WARM_UP = 2  # requests that are not counted

Arm = Callable[[Prompt, int], Ints]


@dataclass(frozen=True, eq=False)
class Raced:
    """``timings``: arm → [pairs] seconds; ``prompts`` [pairs]; ``emitted``: arm → [pairs] of int64 [new]."""

    timings: Timings
    prompts: Sequence[Prompt]
    emitted: Mapping[str, Sequence[Ints]]

    def differing(self, arm: str, than: str) -> list[int]:
        """Pairs in which two arms emitted different tokens."""
        pairs = zip(self.emitted[arm], self.emitted[than], strict=True)
        return [number for number, (one, other) in enumerate(pairs) if not np.array_equal(one, other)]

    def seconds(self, arm: str) -> float:
        """Total over the pairs: the estimate of a mix of requests is the ratio of total times."""
        return float(self.timings.seconds[arm].sum())


def race(
    loaded: Loaded, arms: Mapping[str, Arm], prompts: Sequence[Prompt], new: int, pairs: int, rng: np.random.Generator
) -> Raced:
    """Time every arm on each of ``pairs`` prompts, after ``WARM_UP`` others; ``rng`` draws the order of arms.

    Raises:
        BadArgument: fewer prompts than that, and what ``meters.clock.paired`` refuses.
    """
    if len(prompts) < pairs + WARM_UP:
        raise BadArgument("prompts", len(prompts), f"{pairs + WARM_UP}, a fresh one for each request", "give more text")
    emitted: dict[str, list[Ints]] = {name: [] for name in arms}

    def timed(name: str) -> Callable[[int], None]:
        def run(pair: int) -> None:
            emitted[name].append(arms[name](prompts[pair], new))

        return run

    clock = WalkedDecoder(loaded.stepper, full_depth(loaded.stepper.layers))
    timings = paired({name: timed(name) for name in arms}, pairs, rng, warm_up=WARM_UP, synchronize=clock.synchronize)
    kept = {name: found[WARM_UP:] for name, found in emitted.items()}
    return Raced(timings, prompts[WARM_UP : WARM_UP + pairs], kept)


def usual_arms(loaded: Loaded, drafting: Drafting | None, raw: Drafting | None = None) -> dict[str, Arm]:
    """Full depth, ``generate``, prompt lookup, and drafting as asked; ``raw``: neither lens nor gate."""
    arms = {FULL: at_full_depth(loaded), GENERATE: by_generate(loaded), LOOKUP: by_lookup(loaded)}
    for name, asked in ((SELF, raw), (DRAFTING, drafting)):
        if asked is not None:
            arms[name] = by_drafting(loaded, asked)
    return arms


def at_full_depth(loaded: Loaded) -> Arm:
    """Our decoder, all layers."""
    decoder = WalkedDecoder(loaded.stepper, full_depth(loaded.stepper.layers))
    return lambda prompt, new: decoder.generate([prompt], new).emitted[0]


def by_drafting(loaded: Loaded, drafting: Drafting) -> Arm:
    """Our decoder, drafting for itself."""
    decoder = DraftingDecoder(loaded.stepper, drafting)
    return lambda prompt, new: decoder.generate([prompt], new).emitted[0]


def by_generate(loaded: Loaded, **options: Any) -> Arm:
    """The model's own ``generate``, greedy, with further options of its own."""
    return lambda prompt, new: _generated(loaded, prompt, new, options)


def by_lookup(loaded: Loaded) -> Arm:
    """Transformers' prompt lookup: what followed the last n-gram earlier in the text is drafted."""
    return by_generate(loaded, prompt_lookup_num_tokens=LOOKED_UP)


def by_assistant(loaded: Loaded, assistant: Loaded) -> Arm:
    """Transformers' assisted generation: another model drafts.

    Raises:
        BadArgument: models that do not read the same ids.
    """
    shared_vocabulary(loaded, assistant)
    return by_generate(loaded, assistant_model=assistant.model)


def _generated(loaded: Loaded, prompt: Prompt, new: int, options: Mapping[str, Any]) -> Ints:
    model, ids = loaded.model, torch.from_numpy(np.asarray(prompt.tokens))[None].to(loaded.stepper.device)
    kept, plain = model.generation_config, copy.deepcopy(model.generation_config)
    plain.eos_token_id, plain.pad_token_id, plain.max_length = None, 0, None
    plain.do_sample, plain.temperature, plain.top_p, plain.top_k = False, None, None, None
    model.generation_config = plain  # a stop token would end rows early, and arms must do equal work
    try:
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)
    finally:
        model.generation_config = kept
    emitted: Ints = out[0, ids.shape[1] :].cpu().numpy()
    return emitted
