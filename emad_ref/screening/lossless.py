"""Lossless ways of decoding one prompt, beside our full depth: what a request is timed by.

    self            our decoder, drafting by the model's own head at a shallow layer, without a gate
    lens            our decoder, the exit's drafts without its copies
    copies          our decoder, the exit's copies without its drafts
    prompt lookup   transformers' ``generate``, what followed the last n-gram earlier in the text as drafts
    assisted        the same, a smaller model's drafts

Greedy, a fixed number of new tokens and no stop token, so that all do the same. An assistant must read the same ids
(``assistant_of``); the model itself, cut off, is none: its first layers with its own head are the way "self".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from emad_ref.decoding.drafted import DraftingDecoder
from emad_ref.decoding.drafting import Drafting
from emad_ref.decoding.pair import shared_vocabulary
from emad_ref.errors import BadArgument
from emad_ref.models.bundled import bundled_names
from emad_ref.models.greedy import greedy
from emad_ref.models.loading import Loaded, load
from emad_ref.protocol import Prompt
from emad_ref.record import Ints

LOOKUP, ASSISTED, SELF, LENS, COPIES = "prompt lookup", "assisted", "self", "lens", "copies"
LOOKED_UP = 10  # tokens that prompt lookup drafts: transformers' documentation

Arm = Callable[[Prompt, int], Ints]


def by_drafting(loaded: Loaded, drafting: Drafting) -> Arm:
    """Our decoder, drafting for itself."""
    decoder = DraftingDecoder(loaded.stepper, drafting)
    return lambda prompt, new: decoder.generate([prompt], new).emitted[0]


def by_parts(loaded: Loaded, drafting: Drafting) -> dict[str, Arm]:
    """Our decoder with either half of ``drafting`` alone, where it has two; and by the model's own head."""
    ways = {}
    if drafting.longest:
        ways[SELF] = Drafting(drafting.layer, drafting.longest)
    if drafting.longest and drafting.copied:
        ways[LENS] = replace(drafting, copied=0)
        ways[COPIES] = Drafting(drafting.layer, 0, copied=drafting.copied)
    return {name: by_drafting(loaded, way) for name, way in ways.items()}


def by_generate(loaded: Loaded, **options: Any) -> Arm:
    """The model's own ``generate``, plainly greedy, with further settings of ``models.greedy.greedy``."""
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
    return by_generate(loaded, assistant=assistant.model)


def assistant_of(loaded: Loaded) -> Loaded | None:
    """The smallest bundled decoder-only model that reads the same ids and has fewer parameters; None: there is none."""
    found = []
    for name in bundled_names():
        other = load(name, device=str(loaded.stepper.device), dtype=loaded.stepper.dtype)
        if other.geometry.encoder_layers or other.geometry.parameters() >= loaded.geometry.parameters():
            continue
        try:
            shared_vocabulary(loaded, other)
        except BadArgument:  # it reads another text
            continue
        found.append(other)
    return min(found, key=lambda each: each.geometry.parameters(), default=None)


def _generated(loaded: Loaded, prompt: Prompt, new: int, options: Mapping[str, Any]) -> Ints:
    ids = torch.from_numpy(np.asarray(prompt.tokens))[None].to(loaded.stepper.device)
    given = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    emitted: Ints = greedy(loaded.model, given, new, **options)[0, ids.shape[1] :].cpu().numpy()
    return emitted
