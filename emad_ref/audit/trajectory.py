"""One row's decided positions, judged against the lens on its own history.

Each position is judged under the cap the row itself claims, D_{t-1}: while no comparison is within the tolerance this
is the replay of the whole row, by induction; after a tie has flipped one depth, the rest of the row is still judged,
along the trajectory it took (DESIGN: "after it each trajectory is audited on its own").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.audit.finding import Tally
from emad_ref.audit.lens import Lens, Reference, consult
from emad_ref.audit.rule import depths_of, emission_noise, headroom, may_fire, noise_of, tied_gap
from emad_ref.point import OperatingPoint
from emad_ref.record import Bools, Floats, Ints
from emad_ref.signals import SIGNALS


@dataclass(frozen=True)
class Trajectory:
    """Positions ``first`` … ``first`` + m − 1 of one row, in order.

    ``tokens`` int64 [first + m] the row's history; ``depth`` int64 [m]; ``signal`` float64 [m, probes], NaN = unread;
    ``chosen`` bool [m]: the rule chose the depth (False: it was forced); ``logits`` float64 [m, V] where the decoder
    showed them, else None. ``stage`` [m]: what had happened to the session by then, in words; () where nothing is told.
    """

    name: str
    tokens: Ints
    first: int
    depth: Ints
    signal: Floats
    chosen: Bools
    logits: Floats | None = None
    stage: tuple[str, ...] = ()

    def caps(self, point: OperatingPoint) -> Ints:
        """[m] the largest depth each position was allowed, by the depths claimed before it."""
        if point.schedule != "monotone" or len(self.depth) == 0:
            return np.full(len(self.depth), point.ceiling, dtype=np.int64)
        return np.concatenate([[point.ceiling], self.depth[:-1]])

    def place(self, at: int) -> str:
        told = f", {self.stage[at]}" if self.stage and self.stage[at] else ""
        return f"{self.name}, position {self.first + at}, depth {self.depth[at]}{told}"


def hold_against(
    tally: Tally, trajectory: Trajectory, lens: Lens, point: OperatingPoint, tolerance: float
) -> Reference:
    """Judge depths, signals and (where shown) logits against the lens; return what it says of the decided positions."""
    reference = consult(lens, trajectory.tokens, point, trajectory.first, tolerance)
    tally.n += len(reference.logits)
    judge_depths(tally, trajectory, reference.signal, point, tolerance, reference.rows)
    if trajectory.logits is not None:
        judge_logits(tally, trajectory, reference, point, tolerance)
    return reference


def hold_all_against(
    tally: Tally, trajectories: Sequence[Trajectory], lens: Lens, point: OperatingPoint, tolerance: float
) -> None:
    """The same of every trajectory; discriminating are positions as in ``differing_logits``."""
    for trajectory in trajectories:
        reference = hold_against(tally, trajectory, lens, point, tolerance)
        tally.discriminating += differing_logits(reference, trajectory, tolerance)


def judge_depths(
    tally: Tally,
    trajectory: Trajectory,
    reference: Floats,
    point: OperatingPoint,
    tolerance: float,
    rows: tuple[Ints, ...] = (),
) -> None:
    """Depths within 1 … cap, signals as in ``reference`` [m, probes] and read where they must be, the rule obeyed.

    ``rows``: the row of thresholds of each position [m], and other rows that the tolerance allows; by default the
    first of all.
    """
    depth, cap, chosen = trajectory.depth, trajectory.caps(point), trajectory.chosen
    rows = rows or (np.zeros(len(depth), dtype=np.int64),)
    _first(tally, trajectory, (depth < 1) | (depth > cap), lambda t: f"its cap allows 1–{cap[t]}; depth must not rise")

    probes, read = np.asarray(point.probes, dtype=np.int64), ~np.isnan(trajectory.signal)
    above: Bools = np.asarray((read & (probes > depth[:, None])).any(axis=1))
    _first(tally, trajectory, above, lambda t: "a signal was read above the exit")
    off: Floats = np.where(read, np.abs(trajectory.signal - reference), 0.0).max(axis=1, initial=0.0)
    allowed, unit = noise_of(point) * tolerance, SIGNALS[point.signal].unit
    # NaN, a value where the rule is not defined, must not pass for a small difference
    _first(tally, trajectory, ~(off <= allowed), lambda t: f"signal off by {off[t]:.2g} {unit}, more than {allowed:g}")
    # A probe at the cap decides nothing, one that never fires need not be read: both are the decoder's choice.
    passed = (probes < depth[:, None]) & may_fire(point, reference, rows)
    exited = (probes == depth[:, None]) & (depth < cap)[:, None]
    unread = ((passed | exited) & ~read).any(axis=1)
    _first(tally, trajectory, unread & chosen, lambda t: "a signal that the rule compares was not read")

    strict, excused, several = _given(trajectory, reference, point, tolerance, rows)
    wrong = chosen & (depth != strict)
    tally.near += int((chosen & several).sum())
    _first(tally, trajectory, wrong & ~excused, lambda t: f"the rule gives depth {strict[t]} under cap {cap[t]}")
    tally.ties += int(wrong.sum())


def _given(
    trajectory: Trajectory, reference: Floats, point: OperatingPoint, tolerance: float, rows: tuple[Ints, ...]
) -> tuple[Ints, Bools, Bools]:
    """[m] the depth that the rule gives, whether the tolerance excuses the one taken, whether it allows several."""
    depth, cap = trajectory.depth, trajectory.caps(point)
    at_cap, given = depth == cap, []
    nearly, shallow, deep = at_cap.copy(), cap.copy(), np.zeros_like(cap)
    for one in rows:
        room, noise = headroom(point, reference, one)
        slack = tolerance * noise
        given.append(depths_of(point, room, cap))
        shallow = np.minimum(shallow, depths_of(point, room + slack, cap))
        deep = np.maximum(deep, depths_of(point, room - slack, cap))
        nearly |= (room + slack)[np.arange(len(depth)), depth - 1] >= 0
    return given[0], nearly & (shallow <= depth) & (depth <= deep), shallow < deep


def judge_logits(
    tally: Tally, trajectory: Trajectory, reference: Reference, point: OperatingPoint, tolerance: float
) -> None:
    """Logits are what the rule emits at the claimed depths, or a full head's where the depth was forced."""
    assert trajectory.logits is not None, "the caller has looked"
    wanted = emitted_at(reference, trajectory)
    tally.require(
        trajectory.logits.shape[-1] == wanted.shape[-1],
        f"{trajectory.name}: logits over {trajectory.logits.shape[-1]} tokens, but the model has {wanted.shape[-1]}",
    )
    with np.errstate(invalid="ignore"):  # −inf of a pruned token on both sides is no difference
        off = np.where(trajectory.logits == wanted, 0.0, np.abs(trajectory.logits - wanted)).max(axis=-1)
    allowed = tolerance * emission_noise(point)
    # NaN must not pass for a small difference
    _first(tally, trajectory, ~(off <= allowed), lambda t: f"logits off by {off[t]:.2g}, more than {allowed:g}")


def judge_tokens(
    tally: Tally,
    trajectory: Trajectory,
    emitted: Ints,
    reference: Reference,
    point: OperatingPoint,
    tolerance: float,
) -> None:
    """Each token of ``emitted`` [m] is the argmax of what is emitted at its claimed depth."""
    rows = np.arange(len(emitted))
    shown = emitted_at(reference, trajectory)
    gap = shown.max(axis=-1) - shown[rows, emitted]
    best, allowed = shown.argmax(axis=-1), tied_gap(point, tolerance)
    first, second = np.partition(shown, (-1, -2), axis=-1)[:, [-1, -2]].T
    tally.near += int((first - second < allowed).sum())
    _first(
        tally,
        trajectory,
        gap >= allowed,
        lambda t: f"emitted {emitted[t]}, but the argmax at that depth is {best[t]}",
    )
    tally.ties += int((emitted != best).sum())


def emitted_at(reference: Reference, trajectory: Trajectory) -> Floats:
    """[m, V] what is emitted at the depths taken: by the rule where it chose them, else by a full head."""
    chosen, forced = (at_depth(each, trajectory.depth) for each in (reference.emitted, reference.logits))
    emitted: Floats = np.where(trajectory.chosen[:, None], chosen, forced)
    return emitted


def at_depth(logits: Floats, depth: Ints) -> Floats:
    """[m, V] of ``logits`` [m, L, V] after layer ``depth`` [m] (layers from 1)."""
    return logits[np.arange(len(depth)), depth - 1]


def differing_tokens(reference: Reference, trajectory: Trajectory) -> int:
    """Positions whose argmax is not full depth's: only there do emitted tokens betray a wrong depth."""
    return int((emitted_at(reference, trajectory).argmax(axis=-1) != reference.logits[:, -1].argmax(axis=-1)).sum())


def differing_logits(reference: Reference, trajectory: Trajectory, tolerance: float) -> int:
    """Positions whose logits are not full depth's: only there do logits betray a wrong depth."""
    shown = emitted_at(reference, trajectory)
    return int((np.abs(shown - reference.logits[:, -1]).max(axis=-1) > tolerance).sum())


def discriminating(trajectory: Trajectory, point: OperatingPoint) -> int:
    """Positions at which some probe lay below the cap, so that the rule had something to decide."""
    return int((trajectory.caps(point) > min(point.probes)).sum()) if point.probes else 0


def _first(tally: Tally, trajectory: Trajectory, wrong: Bools, say: Callable[[int], str]) -> None:
    """Refute at the first wrong position."""
    if wrong.any():
        at = int(np.argmax(wrong))
        tally.require(False, f"{trajectory.place(at)}: {say(at)}")
