"""Rows decide on their own: n rows together give the tokens and depths of each row alone.

Compared up to the first difference of a row, which must be a tie: a logit gap within twice the tolerance, or a distance
of a signal from its threshold, at that or an earlier token, within it. From there on one flipped depth carries to every
later token; both trajectories are then judged by the lens, each on its own history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from emad_ref.audit.finding import Finding, Tally
from emad_ref.audit.generation import read_record
from emad_ref.audit.lens import Lens, Reference, consult
from emad_ref.audit.rule import tied, tied_gap
from emad_ref.audit.trajectory import Trajectory, at_depth, hold_against, judge_tokens
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints, Record


@dataclass(frozen=True)
class Run:
    """What one row of one record did: its trajectory, and the tokens [m] it emitted."""

    depths: Trajectory
    emitted: Ints


def rows(
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    max_new: int,
    tolerance: float,
    *,
    stop: frozenset[int] = frozenset(),
    needed: int = 1,
) -> Finding:
    """Check ``generate`` on all ``prompts`` against ``generate`` on each.

    Discriminating are pairs of rows that alone take different depths (different tokens, where the point is not
    adaptive): rows that decide alike cannot be told from rows that follow each other. ``tolerance`` as in
    ``decisions``.
    """
    tally = Tally("rows", needed)
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    with tally:
        record = decoder.generate(prompts, max_new, stop)
        together = _runs(tally, record, prompts, max_new, stop, point)
        alone: list[Run] = []
        for prompt in prompts:
            alone += _runs(tally, decoder.generate([prompt], max_new, stop), [prompt], max_new, stop, point)
        for both in zip(together, alone, strict=True):
            _compare(tally, *both, lens, point, tolerance)
        told = [run.depths.depth if point.adaptive else run.emitted for run in alone]
        tally.discriminating += sum(not np.array_equal(a, b) for a, b in combinations(told, 2))
    return tally.finding()


def _runs(
    tally: Tally, record: Record, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], point: OperatingPoint
) -> list[Run]:
    trajectories = read_record(tally, record, prompts, max_new, stop, point)
    return [Run(trajectory, tokens) for trajectory, tokens in zip(trajectories, record.emitted, strict=True)]


def _compare(tally: Tally, together: Run, alone: Run, lens: Lens, point: OperatingPoint, tolerance: float) -> None:
    """Equal to the end, or to a tie; after a tie each run is judged on its own."""
    shared = min(len(together.emitted), len(alone.emitted))
    differ = (together.depths.depth[:shared] != alone.depths.depth[:shared]) | (
        together.emitted[:shared] != alone.emitted[:shared]
    )
    if not differ.any():
        # same tokens, same endings: read_record has held both lengths against max_new and the stop tokens
        tally.n += shared
        return
    at = int(np.argmax(differ))
    reference = consult(lens, together.depths.tokens, point, together.depths.first, tolerance)
    tally.require(
        _tied(reference, together.depths, at, point, tolerance) or _tied(reference, alone.depths, at, point, tolerance),
        f"{together.depths.place(at)}: token {together.emitted[at]} among its neighbours, but alone depth "
        f"{alone.depths.depth[at]} and token {alone.emitted[at]}, with no tie at or before it",
    )
    for run in (together, alone):
        reference = hold_against(tally, run.depths, lens, point, tolerance)
        judge_tokens(tally, run.depths, run.emitted, reference, point, tolerance)


def _tied(reference: Reference, run: Trajectory, at: int, point: OperatingPoint, tolerance: float) -> bool:
    """Whether a comparison at or before ``at``, or the two best logits at ``at``, lie within ``tolerance``.

    Up to there both runs have the same history, but the depth that each took at ``at`` is its own.
    """
    near = tied(point, reference.signal[: at + 1], tuple(one[: at + 1] for one in reference.rows), tolerance)
    best = np.sort(at_depth(reference.emitted[at : at + 1], run.depth[at : at + 1])[0])[-2:]
    return bool(near.any() or best[1] - best[0] < tied_gap(point, tolerance))
