"""One row's decided positions, judged against the lens on its own history.

Each position is judged under the cap the row itself claims, D_{t-1}: while no comparison is within the tolerance this
is the replay of the whole row, by induction; after a tie has flipped one depth, the rest of the row is still judged,
along the trajectory it took (DESIGN: "after it each trajectory is audited on its own").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from emad_ref.audit.finding import Tally
from emad_ref.audit.lens import Lens, consult, signals
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import first_fires
from emad_ref.record import Bools, Floats, Ints


@dataclass(frozen=True)
class Trajectory:
    """Positions ``first`` … ``first`` + m − 1 of one row, in order.

    ``tokens`` int64 [first + m] the row's history; ``depth`` int64 [m]; ``signal`` float64 [m, probes], NaN = unread;
    ``chosen`` bool [m]: the rule chose the depth (False: it was forced); ``logits`` float64 [m, V] where the decoder
    showed them, else None.
    """

    name: str
    tokens: Ints
    first: int
    depth: Ints
    signal: Floats
    chosen: Bools
    logits: Floats | None = None

    def caps(self, point: OperatingPoint) -> Ints:
        """[m] the largest depth each position was allowed, by the depths claimed before it."""
        if point.schedule != "monotone" or len(self.depth) == 0:
            return np.full(len(self.depth), point.ceiling, dtype=np.int64)
        return np.concatenate([[point.ceiling], self.depth[:-1]])

    def place(self, at: int) -> str:
        return f"{self.name}, position {self.first + at}, depth {self.depth[at]}"


def judge(tally: Tally, trajectory: Trajectory, lens: Lens, point: OperatingPoint, tolerance: float) -> Floats:
    """Judge depths, signals and (where shown) logits; return the reference [m, L, V] of the decided positions."""
    reference = consult(lens, trajectory.tokens, point.layers)[trajectory.first :]
    tally.n += len(reference)
    judge_depths(tally, trajectory, signals(reference, point), point, tolerance)
    if trajectory.logits is not None:
        judge_logits(tally, trajectory, reference, tolerance)
    return reference


def judge_depths(
    tally: Tally, trajectory: Trajectory, reference: Floats, point: OperatingPoint, tolerance: float
) -> None:
    """Depths within 1 … cap, signals as in ``reference`` [m, probes] and read where they must be, the rule obeyed."""
    depth, cap, chosen = trajectory.depth, trajectory.caps(point), trajectory.chosen
    _first(tally, trajectory, (depth < 1) | (depth > cap), lambda t: f"its cap allows 1–{cap[t]}; depth must not rise")

    probes, read = np.asarray(point.probes, dtype=np.int64), ~np.isnan(trajectory.signal)
    threshold = np.asarray(point.thresholds[0], dtype=np.float64)
    above: Bools = np.asarray((read & (probes > depth[:, None])).any(axis=1))
    _first(tally, trajectory, above, lambda t: "a signal was read above the exit")
    off: Floats = np.where(read, np.abs(trajectory.signal - reference), 0.0).max(axis=1, initial=0.0)
    _first(tally, trajectory, off > tolerance, lambda t: f"signal off by {off[t]:.2g} nats, more than {tolerance:g}")
    # A probe at the cap decides nothing, one that never fires need not be read: both are the decoder's choice.
    passed = (probes < depth[:, None]) & (threshold > -np.inf)
    exited = (probes == depth[:, None]) & (depth < cap)[:, None]
    unread = ((passed | exited) & ~read).any(axis=1)
    _first(tally, trajectory, unread & chosen, lambda t: "a signal that the rule compares was not read")

    strict, shallow, deep = (
        np.minimum(cap, first_fires(reference <= bound, probes, point.ceiling))
        for bound in (threshold, threshold + tolerance, threshold - tolerance)
    )
    fires_nearly = np.concatenate([reference <= threshold + tolerance, np.ones((len(depth), 1), dtype=bool)], axis=1)
    column = np.where(depth == cap, len(probes), np.searchsorted(probes, depth).clip(max=len(probes)))
    is_exit = (depth == cap) | np.isin(depth, probes)
    excused = is_exit & (shallow <= depth) & (depth <= deep) & fires_nearly[np.arange(len(depth)), column]
    wrong = chosen & (depth != strict)
    _first(tally, trajectory, wrong & ~excused, lambda t: f"the rule gives depth {strict[t]} under cap {cap[t]}")
    tally.ties += int(wrong.sum())


def judge_logits(tally: Tally, trajectory: Trajectory, reference: Floats, tolerance: float) -> None:
    """Logits equal ``reference`` [m, L, V] at the claimed depths."""
    assert trajectory.logits is not None, "the caller has looked"
    tally.require(
        trajectory.logits.shape[-1] == reference.shape[-1],
        f"{trajectory.name}: logits over {trajectory.logits.shape[-1]} tokens, but the model has {reference.shape[-1]}",
    )
    off = np.abs(trajectory.logits - at_depth(reference, trajectory.depth)).max(axis=-1)
    # NaN must not pass for a small difference
    _first(tally, trajectory, ~(off <= tolerance), lambda t: f"logits off by {off[t]:.2g}, more than {tolerance:g}")


def judge_tokens(tally: Tally, trajectory: Trajectory, emitted: Ints, reference: Floats, tolerance: float) -> None:
    """Each token of ``emitted`` [m] is the argmax of ``reference`` [m, L, V] at its claimed depth."""
    rows = np.arange(len(emitted))
    shown = at_depth(reference, trajectory.depth)
    gap = shown.max(axis=-1) - shown[rows, emitted]
    best = shown.argmax(axis=-1)
    _first(
        tally,
        trajectory,
        gap >= tolerance,
        lambda t: f"emitted {emitted[t]}, but the argmax at that depth is {best[t]}",
    )
    tally.ties += int((emitted != best).sum())


def at_depth(reference: Floats, depth: Ints) -> Floats:
    """[m, V] of ``reference`` [m, L, V] after layer ``depth`` [m] (layers from 1)."""
    return reference[np.arange(len(depth)), depth - 1]


def differing_tokens(reference: Floats, depth: Ints) -> int:
    """Positions whose argmax at ``depth`` is not full depth's: only there do emitted tokens betray a wrong depth."""
    return int((at_depth(reference, depth).argmax(axis=-1) != reference[:, -1].argmax(axis=-1)).sum())


def differing_logits(reference: Floats, depth: Ints, tolerance: float) -> int:
    """Positions whose logits at ``depth`` are not full depth's: only there do logits betray a wrong depth."""
    return int((np.abs(at_depth(reference, depth) - reference[:, -1]).max(axis=-1) > tolerance).sum())


def decided(trajectory: Trajectory, point: OperatingPoint) -> int:
    """Positions at which some probe lay below the cap, so that the rule had something to decide."""
    return int((trajectory.caps(point) > min(point.probes)).sum()) if point.probes else 0


def _first(tally: Tally, trajectory: Trajectory, wrong: Bools, say: Callable[[int], str]) -> None:
    """Refute at the first wrong position."""
    if wrong.any():
        at = int(np.argmax(wrong))
        tally.require(False, f"{trajectory.place(at)}: {say(at)}")
