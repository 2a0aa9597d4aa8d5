"""Record the outputs of a session, row by row, and judge each position against the lens on the row's own history.

Each position is judged under the cap that the row claims, D_{t-1}. Without comparisons within the tolerance this
equals, by induction, the replay of the whole row. After a tie has changed a depth, the rest of the row is judged along
its own trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, InadmissibleDepth, Prompt, Step
from emad_ref.record import Bools, Floats, Ints
from emad_ref.signals import SIGNALS
from pytest_emad.audit.finding import MIN_DISCRIMINATING, AuditRefutedError, FirstDifference, LikelyCause, Tally
from pytest_emad.audit.likely_cause import likely_cause
from pytest_emad.audit.reference_logits import (
    Lens,
    LensReference,
    PrefixCachingLens,
    can_fire,
    compute_reference,
    headroom_and_noise,
    rule_depths,
)
from pytest_emad.audit.tolerances import emission_noise_factor, max_tied_gap, measured_tolerance, signal_noise_factor

WIDEST_FEED = 3  # tokens


class RefutedPositionError(AuditRefutedError):
    """A complaint about position ``first`` + ``at`` of a row."""

    def __init__(
        self,
        complaint: str,
        at: int,
        difference: FirstDifference | None = None,
        likely_cause: LikelyCause | None = None,
    ):
        self.at = at
        super().__init__(complaint, difference=difference, likely_cause=likely_cause)


@dataclass(frozen=True)
class Trajectory:
    """Positions ``first`` … ``first`` + m − 1 of one row, in order.

    ``tokens`` int64 [first + m] the row's history; ``depth`` int64 [m]; ``signal`` float64 [m, probes], NaN = unread;
    ``chosen`` bool [m]: the rule chose the depth (False: it was forced); ``logits`` float64 [shown, V], None if the
    decoder showed none; ``shown`` bool [m]: their positions, None: all. ``stage`` [m]: texts about earlier events of
    the session, or ().
    """

    name: str
    tokens: Ints
    first: int
    depth: Ints
    signal: Floats
    chosen: Bools
    logits: Floats | None = None
    shown: Bools | None = None
    stage: tuple[str, ...] = ()

    def caps(self, point: OperatingPoint) -> Ints:
        """Largest allowed depth of each position [m], by the depths claimed before it."""
        if point.schedule != "monotone" or len(self.depth) == 0:
            return np.full(len(self.depth), point.ceiling, dtype=np.int64)
        return np.concatenate([[point.ceiling], self.depth[:-1]])

    def describe_position(self, at: int) -> str:
        stage = f", {self.stage[at]}" if self.stage and self.stage[at] else ""
        return f"{self.name}, position {self.first + at}, depth {self.depth[at]}{stage}"

    def reproduction_json(self, at: int, point: OperatingPoint) -> dict[str, Any]:
        """The history up to position ``first`` + ``at``, which suffices to reproduce the failure, as JSON values.

        ``depths`` are those of the tokens from ``first`` on; ``forced``: whether the check set the last of them.
        """
        return {
            "point": point.name,
            "row": self.name,
            "tokens": self.tokens[: self.first + at + 1].tolist(),
            "first": int(self.first),
            "depths": self.depth[: at + 1].tolist(),
            "forced": not bool(self.chosen[at]),
        }


@dataclass(frozen=True)
class DecoderUnderTest:
    """A decoder at ``point``, its reference lens, and ``tolerance``: the largest honest difference.

    ``tolerance`` in logits and nats; a check raises it to the decoder's declared noise. ``exact_context`` False
    requires only the causal minimum of one row's ``work.context``, for decoders that attend over padded keys, or run
    the prompt in other pieces, and count these. ``window``: positions that the model holds, 0 if unknown. ``forces``
    False: sessions are fed without depths, for decoders at full depth that take no forced depth.

    Raises:
        BadArgument: ``forces`` False at a point with exits, where the rule would decide the depths.
    """

    decoder: Decoder
    lens: Lens
    point: OperatingPoint
    tolerance: float
    exact_context: bool = False
    window: int = 0
    forces: bool = True

    def __post_init__(self) -> None:
        if not self.forces and not self.point.is_full_depth:
            raise BadArgument("forces", False, "a point at full depth", f"{self.point.name!r} has exits")


@dataclass(frozen=True)
class Judge:
    """Compares a decoder at ``point`` with ``lens`` (None: with replay); a complaint ends ``tally``'s check.

    ``tolerance``: in logits and nats, the decoder's declared noise included. ``counted``: the decoder counts its work.
    ``exact_context``, ``forces`` as in ``DecoderUnderTest``.

    A few positions amplify rounding a hundredfold, such as a token that becomes an attention sink. For a complaint the
    lens measures the rounding of that position, which replaces the tolerance if it is larger.
    """

    tally: Tally
    lens: Lens | None
    point: OperatingPoint
    tolerance: float
    counted: bool = False
    exact_context: bool = False
    forces: bool = True

    @classmethod
    def for_check(
        cls, check: str, under_test: DecoderUnderTest, needed: int = MIN_DISCRIMINATING, *, judges_work: bool = False
    ) -> Judge:
        """Begin ``check``; ``judges_work``: add a note if the decoder does not count its work."""
        capabilities = under_test.decoder.capabilities
        tally = Tally(check, needed, window=under_test.window)
        if judges_work and not capabilities.counted:
            tally.notes.append("ledger not checked: the decoder does not count its work")
        tolerance = tally.tolerance_at_least_noise(under_test.tolerance, capabilities.logit_noise)
        exactness = under_test.exact_context, under_test.forces
        return cls(tally, under_test.lens, under_test.point, tolerance, capabilities.counted, *exactness)

    def with_lens_prefetch(self, trajectories: Iterable[Trajectory]) -> Judge:
        """This judge with a lens that reads ``trajectories``, the next ones to judge in order, several at once."""
        assert self.lens is not None, "only replay is judged without a lens"
        lens = self.lens if isinstance(self.lens, PrefixCachingLens) else PrefixCachingLens(self.lens)
        lens.announce_sequences(((each.tokens, each.first) for each in trajectories), self.point.readout_layers)
        return replace(self, lens=lens)

    def require_trajectory_matches_lens(self, trajectory: Trajectory) -> LensReference:
        """Require right depths, signals and (if shown) logits; return the lens' reference for the decided positions."""
        reference = self.compute_reference(trajectory)
        self.tally.n += len(reference.logits)
        return self._judge_with_tolerances(
            trajectory, reference, lambda settled: self._judge_decisions(trajectory, settled)
        )

    def _judge_decisions(self, trajectory: Trajectory, reference: LensReference) -> None:
        self.require_depths_follow_rule(trajectory, reference.signal, reference.rows, reference.signal_tolerance)
        self.require_logits_match_lens(trajectory, reference)

    def _judge_with_tolerances(
        self, trajectory: Trajectory, reference: LensReference, judged: Callable[[LensReference], None]
    ) -> LensReference:
        """Run ``judged``, and repeat it after each complaint that its position's own tolerance may explain."""
        while True:
            ties, near = self.tally.ties, self.tally.near
            try:
                judged(reference)
            except RefutedPositionError as refuted:
                widened = self.widen_reference_at_position(trajectory, reference, refuted.at)
                if widened is reference:
                    raise
                self.tally.ties, self.tally.near, self.tally.sample = ties, near, None
                reference = widened
            else:
                return reference

    def widen_reference_at_position(self, trajectory: Trajectory, reference: LensReference, at: int) -> LensReference:
        """``reference`` with the tolerances of position ``first`` + ``at``, if these are larger than the judge's.

        The rounding measured there allows larger differences of logits, and its signal may move faster than they do.
        """
        if self.lens is None or reference.signal_tolerance[at] > self.tolerance:  # measured before
            return reference
        history = trajectory.tokens[: trajectory.first + at + 1]
        layers = sorted({*self.point.readout_layers, int(trajectory.depth[at])})
        allowed = measured_tolerance(self.lens, history, layers, self.tolerance)
        wider = reference.with_tolerance_at_position(self.point, trajectory.first, at, allowed)
        if wider.signal_tolerance[at] == self.tolerance:
            return reference
        if allowed > self.tolerance:
            self.tally.roundings.append(allowed)
        return wider

    def compute_reference(self, trajectory: Trajectory) -> LensReference:
        """The lens' reference for the decided positions."""
        assert self.lens is not None, "only replay is judged without a lens"
        return compute_reference(self.lens, trajectory.tokens, self.point, trajectory.first, self.tolerance)

    def require_depths_follow_rule(
        self,
        trajectory: Trajectory,
        reference: Floats,
        rows: tuple[Ints, ...] = (),
        tolerance: Floats | None = None,
    ) -> None:
        """Require depths within 1 … cap, signals as in ``reference`` [m, probes] and read if required, the rule obeyed.

        ``rows``: the threshold row of each position [m], and other rows that the tolerance allows; by default the
        first. ``tolerance`` [m]: of each position's signals; by default the judge's.
        """
        point, depth, chosen = self.point, trajectory.depth, trajectory.chosen
        cap = trajectory.caps(point)
        each = np.full(len(depth), self.tolerance) if tolerance is None else tolerance
        rows = rows or (np.zeros(len(depth), dtype=np.int64),)
        self._refute_first(
            trajectory, (depth < 1) | (depth > cap), lambda t: f"its cap allows 1–{cap[t]}; depth must not rise"
        )
        probes, read = np.asarray(point.probes, dtype=np.int64), ~np.isnan(trajectory.signal)
        above: Bools = np.asarray((read & (probes > depth[:, None])).any(axis=1))
        self._refute_first(trajectory, above, lambda t: "a signal was read above the exit")
        off: Floats = np.where(read, np.abs(trajectory.signal - reference), 0.0).max(axis=1, initial=0.0)
        allowed, unit = signal_noise_factor(point) * each, SIGNALS[point.signal].unit
        # NaN, a value where the rule is undefined, must not pass for a small difference
        self._refute_first(
            trajectory, ~(off <= allowed), lambda t: f"signal off by {off[t]:.2g} {unit}, more than {allowed[t]:g}"
        )
        # A decoder may skip a probe at the cap, which decides nothing, and one that never fires.
        passed = (probes < depth[:, None]) & can_fire(point, reference, rows)
        exited = (probes == depth[:, None]) & (depth < cap)[:, None]
        unread = ((passed | exited) & ~read).any(axis=1)
        self._refute_first(trajectory, unread & chosen, lambda t: "a signal that the rule compares was not read")

        # the rule's depth, and the range of depths that the tolerance excuses
        rule_given, nearly, shallow, deep = [], depth == cap, cap.copy(), np.zeros_like(cap)
        for one in rows:
            room, noise = headroom_and_noise(point, reference, one)
            slack = each[:, None] * noise
            rule_given.append(rule_depths(point, room, cap))
            shallow = np.minimum(shallow, rule_depths(point, room + slack, cap))
            deep = np.maximum(deep, rule_depths(point, room - slack, cap))
            nearly |= (room + slack)[np.arange(len(depth)), depth - 1] >= 0
        wrong, excused = chosen & (depth != rule_given[0]), nearly & (shallow <= depth) & (depth <= deep)
        self.tally.near += int((chosen & (shallow < deep)).sum())
        self._refute_first(
            trajectory, wrong & ~excused, lambda t: f"the rule gives depth {rule_given[0][t]} under cap {cap[t]}"
        )
        self.tally.ties += int(wrong.sum())

    def require_logits_match_lens(self, trajectory: Trajectory, reference: LensReference) -> None:
        """Require that shown logits are those of the rule at the claimed depths, or of a full head at forced depths."""
        actual = trajectory.logits
        if actual is None or not len(actual):
            return
        positions = np.arange(len(trajectory.depth)) if trajectory.shown is None else np.flatnonzero(trajectory.shown)
        expected = emitted_logits(reference, trajectory)[positions]
        self.tally.require(
            actual.shape[-1] == expected.shape[-1],
            f"{trajectory.name}: logits over {actual.shape[-1]} tokens, but the model has {expected.shape[-1]}",
        )
        with np.errstate(invalid="ignore"):  # −inf of a pruned token on both sides is no difference
            off = np.where(actual == expected, 0.0, np.abs(actual - expected)).max(axis=-1)
        allowed = reference.tolerance[positions] * emission_noise_factor(self.point)
        if not (off <= allowed).all():  # NaN must not pass for a small difference
            at = int(np.argmax(~(off <= allowed)))
            complaint = (
                f"{trajectory.describe_position(positions[at])}: logits off by {off[at]:.2g}, more than {allowed[at]:g}"
            )
            self._refute(trajectory, int(positions[at]), complaint)

    def require_tokens_are_argmax(self, trajectory: Trajectory, emitted: Ints, reference: LensReference) -> None:
        """Require that each of ``emitted`` [m] is the argmax of the emission at its claimed depth.

        A complaint about an engine at full depth says what its cause looks like.
        """
        try:
            self._judge_with_tolerances(
                trajectory, reference, lambda settled: self._judge_emissions(trajectory, emitted, settled)
            )
        except RefutedPositionError as refuted:
            if self.lens is None or not self.point.is_full_depth:
                raise
            prompt, logits = trajectory.tokens[: trajectory.first + 1], emitted_logits(reference, trajectory)
            if not (cause := likely_cause(self.lens, prompt, emitted, logits[refuted.at], refuted.at)):
                raise
            raise RefutedPositionError(str(refuted), refuted.at, likely_cause=cause) from refuted

    def _judge_emissions(self, trajectory: Trajectory, emitted: Ints, reference: LensReference) -> None:
        emitted_from, allowed = emitted_logits(reference, trajectory), max_tied_gap(self.point, reference.tolerance)
        gap = emitted_from.max(axis=-1) - emitted_from[np.arange(len(emitted)), emitted]
        best = emitted_from.argmax(axis=-1)
        first, second = np.partition(emitted_from, (-1, -2), axis=-1)[:, [-1, -2]].T
        self.tally.near += int((first - second < allowed).sum())
        if (wrong := np.flatnonzero(gap >= allowed)).size:
            at = int(wrong[0])
            tokens = int(emitted[at]), int(best[at])
            difference = FirstDifference.from_logits(trajectory.first + at, *tokens, emitted_from[at])
            complaint = f"emitted {emitted[at]}, but the argmax at that depth is {best[at]}"
            self._refute(trajectory, at, f"{trajectory.describe_position(at)}: {complaint}", difference)
        self.tally.ties += int((emitted != best).sum())

    def _refute_first(self, trajectory: Trajectory, wrong: Bools, complaint: Callable[[int], str]) -> None:
        """Refute at the first wrong position."""
        if wrong.any():
            at = int(np.argmax(wrong))
            self._refute(trajectory, at, f"{trajectory.describe_position(at)}: {complaint(at)}")

    def _refute(
        self, trajectory: Trajectory, at: int, complaint: str, difference: FirstDifference | None = None
    ) -> None:
        self.tally.sample = trajectory.reproduction_json(at, self.point)
        raise RefutedPositionError(complaint, at, difference)


def emitted_logits(reference: LensReference, trajectory: Trajectory) -> Floats:
    """[m, V] emitted logits at the depths taken: by the rule if it chose them, else by a full head."""
    depth, chosen = trajectory.depth, trajectory.chosen
    if reference.emitted is reference.logits or chosen.all():
        return reference.emitted.at_depth(depth)
    by_rule, by_head = reference.emitted.at_depth(depth), reference.logits.at_depth(depth)
    emitted: Floats = np.where(chosen[:, None], by_rule, by_head)
    return emitted


def count_tokens_unlike_full_depth(reference: LensReference, trajectory: Trajectory) -> int:
    """Number of positions with another argmax than full depth's: only there emitted tokens show a wrong depth."""
    return int((emitted_logits(reference, trajectory).argmax(-1) != reference.logits.last_layer.argmax(-1)).sum())


def count_exit_eligible_positions(trajectory: Trajectory, point: OperatingPoint) -> int:
    """Number of positions with a probe below the cap, where the rule decides."""
    return int((trajectory.caps(point) > min(point.probes)).sum()) if point.probes else 0


# ---------------------------------------------------------------- sessions


class CheckedSession:
    """An open session that keeps every answer by row and checks it against the protocol's contract.

    The contract: shapes; ``length`` grows by the fed tokens; a forced depth is the depth taken; under the monotone
    schedule ``cap`` is the last depth; returned arrays do not change later. ``rows`` are the indices of the prompts it
    still holds; ``stage`` lists past events, for complaints about later feeds. Leaving the context closes the session.
    """

    def __init__(
        self, judge: Judge, decoder: Decoder, prompts: Sequence[Prompt], names: Sequence[str] | None = None
    ) -> None:
        self.tally, self.point, self.forces, self.stage = judge.tally, judge.point, judge.forces, ""
        self.names = names or [f"row {row}" for row in range(len(prompts))]
        self.rows = list(range(len(prompts)))
        self.tokens = [[int(token) for token in prompt.tokens] for prompt in prompts]
        self.first = [len(prompt.tokens) - 1 for prompt in prompts]
        self.steps: list[list[tuple[int, Floats, Floats | None, bool, str]]] = [[] for _ in prompts]
        self._returned: list[tuple[str, np.ndarray, np.ndarray]] = []  # (name, array as returned, immediate copy)
        self._calls = 0
        self.session, step = decoder.start(prompts)
        self._write(step, 1, 1, None)

    def __enter__(self) -> CheckedSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> None:
        """Feed ``tokens`` [rows, n] at ``depth`` [rows, n] (None: the rule's), as ``Session.feed``.

        A judge that forces no depth omits ``depth``.
        """
        depth = depth if self.forces else None
        for row, fed in zip(self.rows, tokens, strict=True):
            self.tokens[row].extend(int(token) for token in fed)
        try:
            step = self.session.feed(tokens, depth) if last is None else self.session.feed(tokens, depth, last)
        except InadmissibleDepth as refusal:
            self.tally.require(False, f"admissible depth {np.asarray(depth).tolist()} refused: {refusal}")
            raise
        self._write(step, tokens.shape[1], tokens.shape[1] if last is None else last, depth)

    def require_inadmissible_depth_refused(self, tokens: Ints, depth: Ints) -> None:
        """If depths are forced, require that inadmissible ``depth`` [rows, n] is refused and changes no state."""
        if not self.forces:
            return
        length, cap = self.session.length.copy(), self.session.cap.copy()
        try:
            self.session.feed(tokens, depth)
        except InadmissibleDepth:
            same = np.array_equal(self.session.length, length) and np.array_equal(self.session.cap, cap)
            self.tally.require(same, f"depth {depth.tolist()} was refused, but length or cap changed")
        else:
            self.tally.require(False, f"depth {depth.tolist()} accepted under cap {cap.tolist()}")

    def rollback(self, length: Ints) -> None:
        """Roll back to ``length`` [rows], and require the lengths and caps at that point."""
        self.session.rollback(length)
        for row, row_length in zip(self.rows, length.tolist(), strict=True):
            del self.tokens[row][row_length:], self.steps[row][max(0, row_length - self.first[row]) :]
            self.first[row] = min(self.first[row], row_length)  # the next token is the first one decided
        self.require_state("after rollback")

    def commit(self, length: Ints) -> None:
        """Commit ``length`` [rows], which changes no length and no cap."""
        self.session.commit(length)
        self.require_state("after commit")

    def drop(self, *indices: int) -> None:
        """Drop the rows at ``indices`` among the present ones, in one call and in that order; none: an empty array."""
        sent = np.array(indices, dtype=np.int64)
        self.session.drop(sent)
        sent.fill(0)  # a caller may use its array again
        self.rows = [row for index, row in enumerate(self.rows) if index not in indices]
        self.require_state("after drop")

    def build_trajectories(self) -> list[Trajectory]:
        """Trajectories of all rows, dropped ones included, after requiring that no returned array has changed."""
        for what, returned, copied in self._returned:
            same = np.array_equal(returned, copied, equal_nan=True)
            self.tally.require(same, f"{what} has changed since it was returned: it is a view of state, or reused")
        trajectories = []
        for name, tokens, first, steps in zip(self.names, self.tokens, self.first, self.steps, strict=True):
            if not steps:  # all of them were rolled back
                continue
            depth, signal, logits, chosen, stage = zip(*steps, strict=True)
            history = np.array(tokens, dtype=np.int64)
            has_logits, shown_logits = [one is not None for one in logits], [one for one in logits if one is not None]
            decided = np.array(depth), np.array(signal), np.array(chosen)
            trajectories.append(
                Trajectory(name, history, first, *decided, np.array(shown_logits), np.array(has_logits), stage)
            )
        return trajectories

    def _write(self, step: Step, n: int, last: int, depth: Ints | None) -> None:
        rows, probes = len(self.rows), len(self.point.probes)
        self._calls += 1
        self.tally.live["session_positions"] += rows * n
        self.tally.live["forced_positions"] += rows * n if depth is not None else 0
        parts = {part: getattr(step, part) for part in ("logits", "depth", "signal")}
        step = Step(**{part: self._keep(f"step.{part} of call {self._calls}", array) for part, array in parts.items()})
        fed = f"{rows} rows × {n} tokens were fed" + (f" with last={last}" if last < n else "")
        for name, shape, expected in (
            ("logits", step.logits.shape[:2], (rows, last)),
            ("depth", step.depth.shape, (rows, n)),
            ("signal", step.signal.shape, (rows, n, probes)),
        ):
            self.tally.require(shape == expected, f"step.{name} has shape {shape}, but {fed}")
        if depth is not None:
            obeyed = np.array_equal(step.depth, depth)
            self.tally.require(
                obeyed, f"depth {np.asarray(depth).tolist()} was forced, but {step.depth.tolist()} taken"
            )
        for index, row in enumerate(self.rows):
            for at in range(n):
                logits = step.logits[index, at - n + last] if at >= n - last else None
                answer = (int(step.depth[index, at]), step.signal[index, at], logits)
                self.steps[row].append((*answer, depth is None, self.stage))
        self.require_state("after a step")

    def _keep(self, what: str, returned: np.ndarray) -> np.ndarray:
        """Store ``returned`` with an immediate copy, and return the copy."""
        copied = np.array(returned)
        self._returned.append((what, returned, copied))
        return copied

    def require_state(self, when: str) -> None:
        """Require the lengths and caps of the session's rows."""
        for part in ("length", "cap"):
            self._keep(f"session.{part} read {when} (call {self._calls})", getattr(self.session, part))
        length = [len(self.tokens[row]) for row in self.rows]
        lengths = self.session.length.tolist()
        self.tally.require(lengths == length, f"{when}: length {lengths}, but the rows hold {length} tokens")
        last = [self.steps[row][-1][0] if self.steps[row] else self.point.ceiling for row in self.rows]
        cap = last if self.point.schedule == "monotone" else [self.point.ceiling] * len(last)
        lengths = self.session.cap.tolist()
        self.tally.require(lengths == cap, f"{when}: cap {lengths}, but the rows' last tokens allow {cap}")


def make_feed_slices(tokens: int, widest: int) -> list[slice]:
    """Slices of ``tokens`` columns for feeds of one token and of the widest allowed (≤ ``WIDEST_FEED``), in turn."""
    cut: list[slice] = []
    start = 0
    while start < tokens:
        width = 1 if len(cut) % 2 == 0 else min(widest, WIDEST_FEED)
        cut.append(slice(start, min(start + width, tokens)))
        start += width
    return cut
