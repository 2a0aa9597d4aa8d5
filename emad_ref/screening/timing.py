"""Timing of the few candidates of a screening: seconds per token beside full depth of the same decoder.

Requests are paired (``benchmark.clock``): each candidate and full depth continue the same prompt next to one another.
EMAD-X3 and EMAD-X4 judge the result on more requests and against more baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from emad_ref.benchmark.clock import time_pairs
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import DraftingDecoder
from emad_ref.models.loading import LoadedModel
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import Ints
from emad_ref.screening.families import TUNED_LENS
from emad_ref.screening.selection import SelectedPoint, SelectionRow
from emad_ref.screening.settings import ScreeningSettings
from emad_ref.screening.traces import ScreeningText

FULL_DEPTH = "full depth"
CANDIDATES = 3
PROMPT_LENGTHS = (16, 64, 128)  # tokens: after a long prompt a model repeats itself more often
NEW_TOKENS = 64
PAIRS = 9  # three per prompt length

Generate = Callable[[Prompt, int], Ints]  # (prompt, new tokens) → emitted tokens


@dataclass(frozen=True)
class CandidateTime:
    """``seconds`` per token at batch 1, and ``fast``: the speed-up over full depth of the same decoder."""

    name: str
    seconds: float
    fast: float


def generate_by(decoder: WalkedDecoder | DraftingDecoder) -> Generate:
    """One prompt at a time, greedily, without a stop token."""
    return lambda prompt, new: decoder.generate([prompt], new).emitted[0]


def time_candidates(
    model: LoadedModel, candidates: Mapping[str, Generate], text: ScreeningText, settings: ScreeningSettings
) -> list[CandidateTime]:
    """Times of full depth and then ``candidates``, after prompts of ``text``; empty if no window holds a prompt.

    Raises:
        BadArgument: as ``time_pairs``.
    """
    pairs = max(len(PROMPT_LENGTHS), settings.part(PAIRS))
    new = min(NEW_TOKENS, model.stepper.max_positions // 2)
    prompts = list(islice(_prompts(text, model.stepper.max_positions - new), 1 + pairs))
    if not prompts or not candidates:
        return []

    def request(generate: Generate, pair: int) -> None:
        generate(prompts[pair % len(prompts)], new)

    full = WalkedDecoder(model.stepper, full_depth(model.stepper.layers))
    arms = {FULL_DEPTH: generate_by(full), **candidates}
    timed = time_pairs(
        {name: partial(request, generate) for name, generate in arms.items()},
        pairs,
        np.random.default_rng(settings.seed),
        synchronize=full.synchronize,
    )
    seconds = {name: float(each.sum()) for name, each in timed.seconds.items()}
    return [CandidateTime(name, spent / (pairs * new), seconds[FULL_DEPTH] / spent) for name, spent in seconds.items()]


def _prompts(text: ScreeningText, room: int) -> Iterator[Prompt]:
    """Openings of windows, each with the next of ``PROMPT_LENGTHS`` that fits it and ``room``."""
    for number, window in enumerate(text.windows):
        length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
        yield Prompt(window.tokens[: min(length, len(window.tokens), room)])


def points_to_time(
    rows: Sequence[SelectionRow], decoded: Sequence[SelectedPoint], rise: float
) -> dict[str, OperatingPoint]:
    """Name → point of at most three: the ``decoded`` ones, then monotone ones on the lens by their saving."""
    monotone = [
        row
        for row in rows
        if isinstance(row, SelectedPoint)
        and (row.level, row.family.readout, row.family.depth) == (rise, TUNED_LENS, "monotone")
    ]
    best = [*decoded, *sorted(monotone, key=lambda row: -row.net.value)][:CANDIDATES]
    return {f"{row.family.name}, {row.family.depth} depth, {row.how}, {row.point.name}": row.point for row in best}
