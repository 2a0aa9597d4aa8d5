"""Prefill and decoding told apart, and the K/V that a point lets go: numbers beside a race, of no verdict.

The seconds to a request's first new token are timed by themselves, after the race and on its first prompts; those of
every other token are what is left of the whole request. K/V is counted, not measured: under the monotone schedule no
later token reads the layers above the depth of this one, so that what all tokens before it hold there may be freed.
Every other schedule fills them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from emad_ref.meters.clock import Arm, paired
from emad_ref.models.geometry import Geometry
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Floats

OPENED = 6  # requests of a race whose first token is timed by itself, at most
LETS_GO = "monotone"  # the schedule under which depth never rises again


def first_tokens(
    decoders: Mapping[str, Decoder], batches: Sequence[Sequence[Prompt]], warm_up: int, seed: tuple[int, ...]
) -> dict[str, Floats]:
    """Decoder → [pairs] seconds that one new token takes after the prompts of the first ``batches``."""

    def opening(decoder: Decoder) -> Arm:
        def run(pair: int) -> None:  # a number that an arm returns would be taken as its own measurement
            decoder.generate(batches[pair], 1, frozenset())

        return run

    return paired(
        {name: opening(decoder) for name, decoder in decoders.items()},
        min(OPENED, len(batches) - warm_up),
        np.random.default_rng(seed),
        warm_up=warm_up,
        synchronize=next(iter(decoders.values())).synchronize,
    ).seconds


def each_apart(first: Mapping[str, Floats], whole: Mapping[str, Floats], new: int) -> dict[str, tuple[float, float]]:
    """Arm → seconds to the first token, and for each of the other ``new`` − 1; medians."""
    opened = {arm: float(np.median(seconds)) for arm, seconds in first.items()}
    return {arm: (seconds, (float(np.median(whole[arm])) - seconds) / (new - 1)) for arm, seconds in opened.items()}


def held_bytes(geometry: Geometry, bytes_each: int) -> int:
    """K and V of one token at full depth."""
    return 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * bytes_each


def sentence(races: Mapping[int, Mapping[str, tuple[float, float]]], held: int, skipped: float, schedule: str) -> str:
    """One sentence: ``races`` batch size → ``each_apart``; ``skipped``: share of blocks that the point leaves out."""
    times = "; ".join(
        f"batch {rows}: "
        + ", ".join(f"{arm} {1e3 * one:.3g} ms and {1e3 * other:.3g} ms" for arm, (one, other) in arms)
        for rows, arms in ((rows, each.items()) for rows, each in races.items())
    )
    freed = f"none may be freed under the {schedule} schedule, which fills all of it"
    if schedule == LETS_GO:
        freed = f"{100 * skipped:.1f} % of it may be freed while it decodes, as depth never rises (counted)"
    return f"to the first new token, and for each other: {times}; K/V at full depth: {held:,} bytes a token, {freed}"
