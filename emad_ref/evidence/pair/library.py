"""What a user of transformers would take instead, for the large model's own output: two arms beside a pair's.

    assisted       assisted generation: speculative decoding of the same pair, by transformers, with its own defaults
    prompt lookup  what followed the last n-gram earlier in the text as drafts, and no second model

Both run on the judge's own models, whoever's decoders are under test, and keep no record: their FLOPs are not counted.
Where transformers refuses one, the reason is told, and nothing stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from emad_ref.models.loading import Loaded
from emad_ref.protocol import Prompt
from emad_ref.record import Ints
from emad_ref.screening.lossless import ASSISTED, LOOKUP, by_assistant, by_lookup

LIBRARY = (ASSISTED, LOOKUP)
TRIED = 3  # new tokens of a trial: one of the prefill, and a draft with what follows it


@dataclass(frozen=True)
class Library:
    """Arms that run, each from a prompt and a number of new tokens to int64 [new]; ``absent``: why others do not."""

    arms: Mapping[str, Callable[[Prompt, int], Ints]]
    absent: Mapping[str, str]


def library(small: Loaded, large: Loaded, prompt: Prompt) -> Library:
    """Those of ``LIBRARY`` that transformers runs for this pair, each tried on ``prompt``."""
    arms, absent = {ASSISTED: by_assistant(large, small), LOOKUP: by_lookup(large)}, {}
    for name, arm in arms.items():
        try:
            arm(prompt, TRIED)
        except (RuntimeError, ValueError) as refusal:  # a cache that cannot be cut back, a model without one
            absent[name] = f"{type(refusal).__name__}: {str(refusal).strip().partition(chr(10))[0]}"
    return Library({name: arm for name, arm in arms.items() if name not in absent}, absent)
