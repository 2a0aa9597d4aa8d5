"""Check the answers that a verdict used, and the timed requests, after the fact.

A decoder may pass every audit, but err in the batches for quality, work or energy, or cut corners while timed. So code
that reads answers for a verdict uses ``AuditedDecoder``, which keeps a few requests and sessions. Outputs from a timed
run are judged unchanged; only approximate schedules decode them again, to compare. The operating system's entropy
selects answers and rows after the answers, so no seed predicts them.

Any number of ties is excused: a few hundred tokens cannot show a share of 1 %.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import SystemRandom
from typing import Any

import numpy as np
from scipy.stats import binom

from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Capabilities, Decoder, Prompt, Session, Step
from emad_ref.record import Floats, Ints, Record, Work
from pytest_emad.audit.decoding_checks import (
    NO_STOP,
    extract_trajectories,
    require_record_matches_lens,
    require_record_work,
)
from pytest_emad.audit.finding import Finding, Tally, prefix_raised_complaints
from pytest_emad.audit.reference_logits import (
    Lens,
    ProbeReadoutWork,
    is_decided_by_full_heads,
)
from pytest_emad.audit.token_comparison import require_reference_step
from pytest_emad.audit.trajectory import Judge, Trajectory

KEPT_REQUESTS = 8  # half as many sessions
JUDGED_ROWS = 2  # rows of each kept request, including the last
EXACT_SCHEDULES = ("monotone", "free_eager", "free_deferred")  # schedules under which every state is the model's own
# Largest ratio of a time ratio to a work ratio. If every kind of work costs time, and part of the time does not depend
# on depth, a time ratio is below the largest ratio of any kind of work: sums of non-negative parts differ at most by
# the ratio of their most different part. Fewer layers also find more of their weights and K/V in caches. The factor of
# one and a half leaves room for that, and for noise.
MAX_UNEXPLAINED_SPEEDUP = 1.5
ONE_SIDED = 0.025  # chance that the median is below its interval

EmittedRows = Sequence[Ints]  # [rows] of new tokens


def _all_excused(check: str, tally: Tally, prefix: str = "") -> Finding:
    """The finding of a check that excuses any number of ties."""
    if tally.complaint is None:
        return Finding(check, True, f"{tally.n} positions compared, {tally.ties} ties", tally.n, tally.ties)
    complaint = f"{prefix}{tally.complaint}"
    counts = f" ({tally.n} positions compared, {tally.ties} ties)" if prefix else ""
    detail = f"{complaint}{counts}"
    return replace(tally.refuted_finding(detail, complaint), check=check)


# ---------------------------------------------------------------- answers that a verdict reads


@dataclass(frozen=True, eq=False)
class AnsweredRequest:
    """Output of ``generate`` for ``prompts``, ``max_new`` and ``stop``."""

    prompts: Sequence[Prompt]
    max_new: int
    stop: frozenset[int]
    record: Record


class AuditedDecoder:
    """``wrapped`` at ``point``, with a sample of its answers kept for ``check_kept_answers``.

    ``reference``: makes a trusted decoder at ``point``, for schedules whose states above an exit are approximate, which
    the lens cannot reproduce.
    """

    def __init__(
        self,
        wrapped: Decoder,
        point: OperatingPoint,
        lens: Callable[[Ints | None], Lens],
        tolerance: float,
        reference: Callable[[], Decoder],
    ):
        self.wrapped, self.point = wrapped, point
        self._lens, self._tolerance, self._reference = lens, tolerance, reference
        self._draw = SystemRandom()
        self._answers: list[AnsweredRequest] = []
        self._sessions: list[RecordedSession] = []
        self._n_requests = self._opened = 0

    @property
    def capabilities(self) -> Capabilities:
        return self.wrapped.capabilities

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = NO_STOP) -> Record:
        record = self.wrapped.generate(prompts, max_new, stop)
        self._n_requests += 1
        place = self._place(self._n_requests, KEPT_REQUESTS)
        if place is not None:  # copies, since the decoder may overwrite a returned array
            answered = AnsweredRequest(copy.deepcopy(list(prompts)), max_new, frozenset(stop), copy.deepcopy(record))
            self._answers[place : place + 1] = [answered]
        return record

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        session, step = self.wrapped.start(prompts)
        self._opened += 1
        place = self._place(self._opened, KEPT_REQUESTS // 2)
        if place is None:
            return session, step
        recorded = RecordedSession(session, prompts, self._draw.randrange(len(prompts)), step)
        self._sessions[place : place + 1] = [recorded]
        return recorded, step

    def synchronize(self) -> None:
        self.wrapped.synchronize()

    def close(self) -> None:
        self.wrapped.close()

    def check_kept_answers(self) -> Finding:
        """Judge the kept answers.

        All rows of kept requests are complete and end at the right token. For some rows, always including the last,
        every token is the argmax at its claimed depth, and depths follow the rule; the work of the first request
        matches its rows. For one row of each kept session depths, signals and logits follow the rule.
        """
        tally = Tally("answers", needed=0)
        judge = Judge(
            tally, None, self.point, tally.tolerance_at_least_noise(self._tolerance, self.capabilities.logit_noise)
        )
        with tally:
            for number, answer in enumerate(self._answers):
                self._judge_answer(judge, answer, counted=self.capabilities.counted and not number)
            for session in self._sessions:
                if session.trajectory is not None:
                    self._judge_row(judge, session.trajectory, session.prompt, None)
        return _all_excused("answers", tally, "of the answers that this verdict reads, ")

    # ------------------------------------------------------------ private

    def _place(self, number: int, capacity: int) -> int | None:
        """Reservoir sampling: place of the ``number``-th item among ``capacity`` places; None: drop it."""
        place = number - 1 if number <= capacity else self._draw.randrange(number)
        return place if place < capacity else None

    def _judge_answer(self, judge: Judge, answer: AnsweredRequest, *, counted: bool) -> None:
        prompts, record, point = answer.prompts, answer.record, self.point
        trajectories = extract_trajectories(judge.tally, record, prompts, answer.max_new, answer.stop, point)
        last = len(prompts) - 1
        for row in (last, *self._draw.sample(range(last), min(JUDGED_ROWS - 1, last))):
            self._judge_row(judge, trajectories[row], prompts[row], record.emitted[row])
        if counted and point.schedule in EXACT_SCHEDULES and is_decided_by_full_heads(point):
            readouts = [
                ProbeReadoutWork.from_point_with_full_heads(point, len(trajectory.depth)) for trajectory in trajectories
            ]
            require_record_work(judge, record, trajectories, readouts)

    def _judge_row(self, judge: Judge, trajectory: Trajectory, prompt: Prompt, emitted: Ints | None) -> None:
        """Judge one row's depths, signals and, if shown, logits and ``emitted`` tokens."""
        if self.point.schedule not in EXACT_SCHEDULES:
            self._compare_with_reference(judge, trajectory, prompt, emitted)
            return
        judge = replace(judge, lens=self._lens(prompt.source))
        reference = judge.require_trajectory_matches_lens(trajectory)
        if emitted is not None:
            judge.require_tokens_are_argmax(trajectory, emitted, reference)

    def _compare_with_reference(
        self, judge: Judge, trajectory: Trajectory, prompt: Prompt, emitted: Ints | None
    ) -> None:
        """Judge one row position by position against the trusted decoder, up to a tie of a depth."""
        first = trajectory.first
        session, step = self._reference().start([Prompt(trajectory.tokens[: first + 1], prompt.source)])
        signals: list[Floats] = []
        for at, depth in enumerate(trajectory.depth.tolist()):
            if at:
                forced = None if trajectory.chosen[at] else np.array([[depth]])
                step = session.feed(trajectory.tokens[None, [first + at]], forced)
            signals.append(step.signal[0, -1])
            reference = int(step.depth[0, -1]), step.logits[0, -1]
            shown = None if trajectory.logits is None else trajectory.logits[at]
            token = None if emitted is None else int(emitted[at])
            where, seen = trajectory.describe_position(at), np.array(signals)
            if not require_reference_step(judge, where, seen, reference, depth, shown, token, first + at):
                break
        session.close()


class RecordedSession:
    """Session that wraps ``wrapped`` and keeps its outputs for ``row``, as long as it shows every token's logits."""

    def __init__(self, wrapped: Session, prompts: Sequence[Prompt], row: int, step: Step):
        self.wrapped, self.prompt = wrapped, copy.deepcopy(prompts[row])
        self._name, self._row, self._is_kept = f"session, row {row}", row, True
        self._tokens = [int(token) for token in self.prompt.tokens]
        self._steps: list[tuple[int, Any, Any, bool]] = []  # depth, signal, logits, whether the rule chose the depth
        self._write(step, chosen=True)

    @property
    def length(self) -> Ints:
        return self.wrapped.length

    @property
    def cap(self) -> Ints:
        return self.wrapped.cap

    @property
    def work(self) -> Work | None:
        return self.wrapped.work

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = self.wrapped.feed(tokens, depth, last)
        self._is_kept = self._is_kept and last is None
        if self._is_kept:
            self._tokens += [int(token) for token in tokens[self._row]]
            self._write(step, chosen=depth is None)
        return step

    def deepen(self, length: Ints) -> Step:
        self._is_kept, self._steps = False, []  # the shown depths differ from those taken
        return self.wrapped.deepen(length)

    def rollback(self, length: Ints) -> None:
        self.wrapped.rollback(length)
        prompt = len(self.prompt.tokens)
        if self._is_kept and length[self._row] < prompt:
            self._is_kept = False
        elif self._is_kept:
            length_kept = int(length[self._row])
            del self._tokens[length_kept:], self._steps[length_kept - prompt + 1 :]

    def commit(self, length: Ints) -> None:
        self.wrapped.commit(length)

    def drop(self, rows: Ints) -> None:
        self.wrapped.drop(rows)
        gone = [int(row) for row in np.atleast_1d(rows)]
        self._is_kept = self._is_kept and self._row not in gone
        self._row -= sum(row < self._row for row in gone)

    def close(self) -> None:
        self.wrapped.close()

    @property
    def trajectory(self) -> Trajectory | None:
        """The kept part of the row; None if empty."""
        if not self._steps:
            return None
        depth, signal, logits, chosen = (np.array(column) for column in zip(*self._steps, strict=True))
        tokens = np.array(self._tokens, dtype=np.int64)
        return Trajectory(self._name, tokens, len(self.prompt.tokens) - 1, depth, signal, chosen, logits)

    def _write(self, step: Step, *, chosen: bool) -> None:
        for at in range(step.depth.shape[1]):
            signal, logits = np.array(step.signal[self._row, at]), np.array(step.logits[self._row, at])
            self._steps.append((int(step.depth[self._row, at]), signal, logits, chosen))


# ---------------------------------------------------------------- requests that were timed


@dataclass(frozen=True, eq=False)
class TimedRequestOutputs:
    """One request as timed: ``prompts`` [rows], and each arm's output.

    ``records``: arm → its record; ``emitted``: arm without records, such as the model's ``generate`` → its tokens.
    """

    prompts: Sequence[Prompt]
    records: Mapping[str, Record]
    emitted: Mapping[str, EmittedRows]


def check_timed_lengths(emitted: Mapping[str, Sequence[EmittedRows]], rows: int, new: int) -> Finding:
    """Check that every arm emitted ``new`` tokens in each of ``rows`` rows, in all requests."""
    tally = Tally("timed", needed=0)
    with tally:
        for arm, requests in emitted.items():
            for request, each in enumerate(requests):
                lengths = [len(tokens) for tokens in each]
                tally.require(
                    lengths == [new] * rows,
                    f"{arm}, request {request}: {lengths} new tokens, but {new} in each of {rows}",
                )
                tally.n += sum(lengths)
    return tally.to_finding()


def check_speedup_explained(
    arm: str, full: str, rows: int, seconds: Mapping[str, Floats], executed: Mapping[str, Floats]
) -> Finding:
    """Check that the work skipped by ``arm`` explains its speed-up over ``full``, full depth.

    Args:
        seconds: arm → [pairs], of one decoder at a point and at full depth. Uses the lower end of the interval of the
            median ratio (95 %, by order statistics; the least of up to six): a slowed full depth is slow in every pair,
            a busy machine only in some.
        executed: arm → [pairs, kinds] work of each kind, NaN if unknown.
    """
    pairs = len(seconds[arm])
    ratios = executed[full].sum(axis=0) / np.maximum(executed[arm].sum(axis=0), 1.0)
    if not np.isfinite(ratios).all():
        return Finding("timed", True, f"{arm}: what it ran says nothing of time", pairs, 0)
    by_pair, explained = np.sort(seconds[full] / seconds[arm]), max(1.0, float(ratios.max()))
    least = by_pair[max(int(binom.ppf(ONE_SIDED, pairs, 0.5)) - 1, 0)]
    speed = f"{arm}, batch {rows}: {np.median(by_pair):.2f}× (at least {least:.2f}×)"
    speed += f" as fast as full depth by the same decoder; its work is {explained:.2f}×"
    most = MAX_UNEXPLAINED_SPEEDUP * explained
    if least > most:
        complaint = f"{speed} less, which explains at most {most:.2f}×: full depth is slowed, or work ran unsaid"
        return Finding("timed", False, complaint, pairs, 0)
    return Finding("timed", True, f"{speed} less", pairs, 0)


def check_timed_requests(
    timed: Sequence[TimedRequestOutputs],
    points: Mapping[str, OperatingPoint],
    new: int,
    lens: Lens,
    tolerance: Mapping[str, float],
    *,
    counted: bool,
    rows: Collection[int] | None = None,
) -> Finding:
    """Check that the tokens, depths and work of ``timed`` match the claims.

    Args:
        points: operating point of each arm with records; the other arms decode at full depth.
        new: tokens requested per row.
        tolerance: largest honest difference of a logit, by arm.
        counted: whether the decoder counts its work.
        rows: compared with the lens if a batch has many; None: all.

    Raises:
        BadArgument: as ``require_record_matches_lens``.
    """
    tally, full = Tally("timed", needed=0), full_depth(next(iter(points.values())).layers)
    with tally:
        for request in timed:
            for arm, record in request.records.items():
                with prefix_raised_complaints(f"{arm}, "):
                    judge = Judge(tally, lens, points[arm], tolerance[arm], counted)
                    require_record_matches_lens(judge, record, request.prompts, new, rows=rows)
            for arm, emitted in request.emitted.items():
                judge = Judge(tally, lens, full, tolerance[arm])
                with prefix_raised_complaints(f"{arm}, "):
                    for row in range(len(request.prompts)) if rows is None else rows:
                        trajectory = _full_depth_trajectory(row, request.prompts[row], emitted[row], full)
                        judge.require_tokens_are_argmax(
                            trajectory, emitted[row], judge.require_trajectory_matches_lens(trajectory)
                        )
    return _all_excused("timed", tally)


def _full_depth_trajectory(row: int, prompt: Prompt, emitted: Ints, full: OperatingPoint) -> Trajectory:
    history, n = np.concatenate([prompt.tokens, np.asarray(emitted[:-1], dtype=np.int64)]), len(emitted)
    depth, chosen = np.full(n, full.layers, dtype=np.int64), np.ones(n, dtype=bool)
    return Trajectory(f"row {row}", history, len(prompt.tokens) - 1, depth, np.empty((n, 0)), chosen)
