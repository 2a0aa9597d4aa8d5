"""Record what a session returns, row by row, and judge each position against the lens on the row's own history.

Each position is judged under the cap that the row itself claims. After a tie has flipped a depth, the rest of the row
is judged along the trajectory it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from emad_ref.audit.finding import Tally
from emad_ref.audit.lens import (
    Lens,
    LensReference,
    consult,
    emission_noise,
    headroom,
    may_fire,
    rule_depths,
    signal_noise,
    tied_gap,
)
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, InadmissibleDepth, Prompt, Step
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


def judge_trajectory(
    tally: Tally, trajectory: Trajectory, lens: Lens, point: OperatingPoint, tolerance: float
) -> LensReference:
    """Judge depths, signals and (where shown) logits against the lens; return what it says of the decided positions."""
    reference = consult(lens, trajectory.tokens, point, trajectory.first, tolerance)
    tally.n += len(reference.logits)
    judge_depths(tally, trajectory, reference.signal, point, tolerance, reference.rows)
    if trajectory.logits is not None:
        judge_logits(tally, trajectory, reference, point, tolerance)
    return reference


def judge_trajectories(
    tally: Tally, trajectories: Sequence[Trajectory], lens: Lens, point: OperatingPoint, tolerance: float
) -> None:
    """The same of every trajectory; discriminating are positions as in ``count_differing_logits``."""
    for trajectory in trajectories:
        reference = judge_trajectory(tally, trajectory, lens, point, tolerance)
        tally.discriminating += count_differing_logits(reference, trajectory, tolerance)


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
    _refute_first(
        tally, trajectory, (depth < 1) | (depth > cap), lambda t: f"its cap allows 1–{cap[t]}; depth must not rise"
    )

    probes, read = np.asarray(point.probes, dtype=np.int64), ~np.isnan(trajectory.signal)
    above: Bools = np.asarray((read & (probes > depth[:, None])).any(axis=1))
    _refute_first(tally, trajectory, above, lambda t: "a signal was read above the exit")
    off: Floats = np.where(read, np.abs(trajectory.signal - reference), 0.0).max(axis=1, initial=0.0)
    allowed, unit = signal_noise(point) * tolerance, SIGNALS[point.signal].unit
    # NaN, a value where the rule is not defined, must not pass for a small difference
    _refute_first(
        tally, trajectory, ~(off <= allowed), lambda t: f"signal off by {off[t]:.2g} {unit}, more than {allowed:g}"
    )
    # A probe at the cap decides nothing, one that never fires need not be read: both are the decoder's choice.
    passed = (probes < depth[:, None]) & may_fire(point, reference, rows)
    exited = (probes == depth[:, None]) & (depth < cap)[:, None]
    unread = ((passed | exited) & ~read).any(axis=1)
    _refute_first(tally, trajectory, unread & chosen, lambda t: "a signal that the rule compares was not read")

    strict, excused, several = _rule_depth_range(trajectory, reference, point, tolerance, rows)
    wrong = chosen & (depth != strict)
    tally.near += int((chosen & several).sum())
    _refute_first(tally, trajectory, wrong & ~excused, lambda t: f"the rule gives depth {strict[t]} under cap {cap[t]}")
    tally.ties += int(wrong.sum())


def _rule_depth_range(
    trajectory: Trajectory, reference: Floats, point: OperatingPoint, tolerance: float, rows: tuple[Ints, ...]
) -> tuple[Ints, Bools, Bools]:
    """[m] the depth that the rule gives, whether the tolerance excuses the one taken, whether it allows several."""
    depth, cap = trajectory.depth, trajectory.caps(point)
    at_cap, given = depth == cap, []
    nearly, shallow, deep = at_cap.copy(), cap.copy(), np.zeros_like(cap)
    for one in rows:
        room, noise = headroom(point, reference, one)
        slack = tolerance * noise
        given.append(rule_depths(point, room, cap))
        shallow = np.minimum(shallow, rule_depths(point, room + slack, cap))
        deep = np.maximum(deep, rule_depths(point, room - slack, cap))
        nearly |= (room + slack)[np.arange(len(depth)), depth - 1] >= 0
    return given[0], nearly & (shallow <= depth) & (depth <= deep), shallow < deep


def judge_logits(
    tally: Tally, trajectory: Trajectory, reference: LensReference, point: OperatingPoint, tolerance: float
) -> None:
    """Logits are what the rule emits at the claimed depths, or a full head's where the depth was forced."""
    assert trajectory.logits is not None, "the caller has looked"
    wanted = emitted_logits(reference, trajectory)
    tally.require(
        trajectory.logits.shape[-1] == wanted.shape[-1],
        f"{trajectory.name}: logits over {trajectory.logits.shape[-1]} tokens, but the model has {wanted.shape[-1]}",
    )
    with np.errstate(invalid="ignore"):  # −inf of a pruned token on both sides is no difference
        off = np.where(trajectory.logits == wanted, 0.0, np.abs(trajectory.logits - wanted)).max(axis=-1)
    allowed = tolerance * emission_noise(point)
    # NaN must not pass for a small difference
    _refute_first(tally, trajectory, ~(off <= allowed), lambda t: f"logits off by {off[t]:.2g}, more than {allowed:g}")


def judge_tokens(
    tally: Tally,
    trajectory: Trajectory,
    emitted: Ints,
    reference: LensReference,
    point: OperatingPoint,
    tolerance: float,
) -> None:
    """Each token of ``emitted`` [m] is the argmax of what is emitted at its claimed depth."""
    rows = np.arange(len(emitted))
    shown = emitted_logits(reference, trajectory)
    gap = shown.max(axis=-1) - shown[rows, emitted]
    best, allowed = shown.argmax(axis=-1), tied_gap(point, tolerance)
    first, second = np.partition(shown, (-1, -2), axis=-1)[:, [-1, -2]].T
    tally.near += int((first - second < allowed).sum())
    _refute_first(
        tally,
        trajectory,
        gap >= allowed,
        lambda t: f"emitted {emitted[t]}, but the argmax at that depth is {best[t]}",
    )
    tally.ties += int((emitted != best).sum())


def emitted_logits(reference: LensReference, trajectory: Trajectory) -> Floats:
    """[m, V] what is emitted at the depths taken: by the rule where it chose them, else by a full head."""
    chosen, forced = (logits_at_depth(each, trajectory.depth) for each in (reference.emitted, reference.logits))
    emitted: Floats = np.where(trajectory.chosen[:, None], chosen, forced)
    return emitted


def logits_at_depth(logits: Floats, depth: Ints) -> Floats:
    """[m, V] of ``logits`` [m, L, V] after layer ``depth`` [m] (layers from 1)."""
    return logits[np.arange(len(depth)), depth - 1]


def count_differing_tokens(reference: LensReference, trajectory: Trajectory) -> int:
    """Positions whose argmax is not full depth's: only there do emitted tokens betray a wrong depth."""
    return int((emitted_logits(reference, trajectory).argmax(axis=-1) != reference.logits[:, -1].argmax(axis=-1)).sum())


def count_differing_logits(reference: LensReference, trajectory: Trajectory, tolerance: float) -> int:
    """Positions whose logits are not full depth's: only there do logits betray a wrong depth."""
    shown = emitted_logits(reference, trajectory)
    return int((np.abs(shown - reference.logits[:, -1]).max(axis=-1) > tolerance).sum())


def count_discriminating(trajectory: Trajectory, point: OperatingPoint) -> int:
    """Positions at which some probe lay below the cap, so that the rule had something to decide."""
    return int((trajectory.caps(point) > min(point.probes)).sum()) if point.probes else 0


def _refute_first(tally: Tally, trajectory: Trajectory, wrong: Bools, say: Callable[[int], str]) -> None:
    """Refute at the first wrong position."""
    if wrong.any():
        at = int(np.argmax(wrong))
        tally.require(False, f"{trajectory.place(at)}: {say(at)}")


WIDEST_FEED = 3  # tokens of a feed


class Transcript:
    """An open session, closed by leaving the context; ``rows`` are the indices of the prompts it still holds."""

    def __init__(
        self,
        tally: Tally,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        point: OperatingPoint,
        names: Sequence[str] | None = None,
    ):
        self.tally, self.point = tally, point
        self.names = names or [f"row {row}" for row in range(len(prompts))]
        self.rows = list(range(len(prompts)))
        self.tokens = [[int(token) for token in prompt.tokens] for prompt in prompts]
        self.first = [len(prompt.tokens) - 1 for prompt in prompts]
        self.steps: list[list[tuple[int, np.ndarray, np.ndarray, bool, str]]] = [[] for _ in prompts]
        self.stage = ""  # what has happened to the session, for complaints about what is fed from here on
        self._returned: list[tuple[str, np.ndarray, np.ndarray]] = []  # (what, as returned, a copy made at once)
        self._calls = 0
        self.session, step = decoder.start(prompts)
        self._write(step, 1, None)

    def __enter__(self) -> Transcript:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()

    def feed(self, tokens: Ints, depth: Ints | None = None) -> None:
        """Feed ``tokens`` [rows, n] at ``depth`` [rows, n], or at depths of the rule's choosing."""
        for row, fed in zip(self.rows, tokens, strict=True):
            self.tokens[row].extend(int(token) for token in fed)
        try:
            step = self.session.feed(tokens, depth)
        except InadmissibleDepth as refusal:
            self.tally.require(False, f"admissible depth {np.asarray(depth).tolist()} refused: {refusal}")
            raise
        self._write(step, tokens.shape[1], depth)

    def refuse(self, tokens: Ints, depth: Ints) -> None:
        """Require that inadmissible ``depth`` [rows, n] is refused and the state stays as it was."""
        length, cap = self.session.length.copy(), self.session.cap.copy()
        try:
            self.session.feed(tokens, depth)
        except InadmissibleDepth:
            same = np.array_equal(self.session.length, length) and np.array_equal(self.session.cap, cap)
            self.tally.require(same, f"depth {depth.tolist()} was refused, but length or cap changed")
        else:
            self.tally.require(False, f"depth {depth.tolist()} accepted under cap {cap.tolist()}")

    def rollback(self, length: Ints) -> None:
        """Roll back to ``length`` [rows], and require the lengths and caps of that time."""
        self.session.rollback(length)
        for row, held in zip(self.rows, length, strict=True):
            del self.tokens[row][held:], self.steps[row][held - self.first[row] :]
        self._require_state("after rollback")

    def drop(self, *indices: int) -> None:
        """Drop the rows at ``indices`` among the present ones, in one call and in that order."""
        self.session.drop(np.array(indices))
        self.rows = [row for index, row in enumerate(self.rows) if index not in indices]
        self._require_state("after drop")

    def trajectories(self) -> list[Trajectory]:
        """What every row did, dropped ones included, after requiring that no array returned so far has changed."""
        self.require_kept()
        return [self._trajectory(row) for row in range(len(self.tokens))]

    def require_kept(self) -> None:
        """Arrays that the session returned are their caller's: no later call may change them."""
        for what, returned, copied in self._returned:
            same = np.array_equal(returned, copied, equal_nan=True)
            self.tally.require(same, f"{what} has changed since it was returned: it is a view of state, or reused")

    def _trajectory(self, row: int) -> Trajectory:
        depth, signal, logits, chosen, stage = zip(*self.steps[row], strict=True)
        tokens = np.array(self.tokens[row], dtype=np.int64)
        return Trajectory(
            self.names[row],
            tokens,
            self.first[row],
            np.array(depth),
            np.array(signal),
            np.array(chosen),
            np.array(logits),
            stage,
        )

    def _write(self, step: Step, n: int, depth: Ints | None) -> None:
        rows, probes = len(self.rows), len(self.point.probes)
        self._calls += 1
        kept = {part: getattr(step, part) for part in ("logits", "depth", "signal")}
        step = Step(**{part: self._keep(f"step.{part} of call {self._calls}", array) for part, array in kept.items()})
        for name, shape, expected in (
            ("logits", step.logits.shape[:2], (rows, n)),
            ("depth", step.depth.shape, (rows, n)),
            ("signal", step.signal.shape, (rows, n, probes)),
        ):
            self.tally.require(
                shape == expected, f"step.{name} has shape {shape}, but {rows} rows × {n} tokens were fed"
            )
        if depth is not None:
            obeyed = np.array_equal(step.depth, depth)
            self.tally.require(
                obeyed, f"depth {np.asarray(depth).tolist()} was forced, but {step.depth.tolist()} taken"
            )
        for index, row in enumerate(self.rows):
            for at in range(n):
                said = (int(step.depth[index, at]), step.signal[index, at], step.logits[index, at])
                self.steps[row].append((*said, depth is None, self.stage))
        self._require_state("after a step")

    def _keep(self, what: str, returned: np.ndarray) -> np.ndarray:
        """Remember ``returned`` beside a copy made at once, and give the copy."""
        copied = np.array(returned)
        self._returned.append((what, returned, copied))
        return copied

    def _require_state(self, when: str) -> None:
        for part in ("length", "cap"):
            self._keep(f"session.{part} read {when} (call {self._calls})", getattr(self.session, part))
        length = [len(self.tokens[row]) for row in self.rows]
        held = self.session.length.tolist()
        self.tally.require(held == length, f"{when}: length {held}, but the rows hold {length} tokens")
        last = [self.steps[row][-1][0] for row in self.rows]
        cap = last if self.point.schedule == "monotone" else [self.point.ceiling] * len(last)
        held = self.session.cap.tolist()
        self.tally.require(held == cap, f"{when}: cap {held}, but the rows' last tokens allow {cap}")


def feed_slices(tokens: int, widest: int) -> list[slice]:
    """``tokens`` columns cut into feeds of one token and of the widest allowed (``WIDEST`` at most), in turn."""
    cut: list[slice] = []
    start = 0
    while start < tokens:
        width = 1 if len(cut) % 2 == 0 else min(widest, WIDEST_FEED)
        cut.append(slice(start, min(start + width, tokens)))
        start += width
    return cut
