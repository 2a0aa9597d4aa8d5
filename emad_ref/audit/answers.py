"""Answers that a verdict reads, a random few of them checked after all were given.

A decoder may be right wherever an audit asks and wrong in the batches by which quality, work or energy is read. So
code that reads answers for a verdict asks through ``AuditedDecoder``, which keeps a few requests and sessions. Which of
them, and which of their rows, the operating system's entropy decides once the answer is there: no seed tells.

requests  all rows are complete and end where they must; of some, always the last among them, every token is the argmax
          at the depth claimed for it, and depths are the rule's; the work of the first request is what its rows imply
sessions  of one row all that was fed and not rolled back: depths, signals and logits

Where states above an exit are made up the lens says nothing of what follows (``exact``): there a decoder that is known
to be right is fed the same tokens, and must show the same. Ties are excused as in ``timed``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

import numpy as np

from emad_ref.audit.finding import Finding, Tally
from emad_ref.audit.generation import judge_work, read_record
from emad_ref.audit.lens import Lens, Readouts, read_from_logits
from emad_ref.audit.rule import emission_noise, headroom, tied_gap
from emad_ref.audit.trajectory import Trajectory, hold_against, judge_tokens
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, Decoder, Prompt, Session, Step
from emad_ref.record import Floats, Ints, Record, Work

CHECK = "answers"
KEPT = 8  # requests, and half as many sessions
ROWS = 2  # of each request that is kept, the last among them
EXACT = ("monotone", "free_eager", "free_deferred")  # schedules under which every state is the model's own


@dataclass(frozen=True, eq=False)
class Answer:
    """What ``generate`` returned for ``prompts``, ``max_new`` and ``stop``."""

    prompts: Sequence[Prompt]
    max_new: int
    stop: frozenset[int]
    record: Record


class AuditedDecoder:
    """``wrapped`` at ``point``, with what ``finding`` needs of its answers kept on the way.

    ``reference``: makes a decoder at ``point`` that is known to be right, where the lens does not say what is.
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
        self._answers: list[Answer] = []
        self._sessions: list[WatchedSession] = []
        self._asked = self._opened = 0

    @property
    def capabilities(self) -> Capabilities:
        return self.wrapped.capabilities

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        record = self.wrapped.generate(prompts, max_new, stop)
        self._asked += 1
        place = self._place(self._asked, KEPT)
        if place is not None:  # copies, in case the decoder goes on writing into what it has returned
            self._answers[place : place + 1] = [
                Answer(copy.deepcopy(list(prompts)), max_new, frozenset(stop), copy.deepcopy(record))
            ]
        return record

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        session, step = self.wrapped.start(prompts)
        self._opened += 1
        place = self._place(self._opened, KEPT // 2)
        if place is None:
            return session, step
        watched = WatchedSession(session, prompts, self._draw.randrange(len(prompts)), step)
        self._sessions[place : place + 1] = [watched]
        return watched, step

    def synchronize(self) -> None:
        self.wrapped.synchronize()

    def close(self) -> None:
        self.wrapped.close()

    def finding(self) -> Finding:
        """What was found of the answers so far."""
        tally = Tally(CHECK, needed=0)
        said = self.capabilities
        tolerance = tally.allow(self._tolerance, said.logit_noise)
        with tally:
            for number, answer in enumerate(self._answers):
                self._judge(tally, answer, tolerance, counted=said.counted and not number)
            for session in self._sessions:
                if session.trajectory is not None:
                    self._hold(tally, session.trajectory, session.prompt, None, tolerance)
        seen = f"{tally.n} positions compared, {tally.ties} ties"
        if tally.complaint is not None:
            detail = f"of the answers that this verdict reads, {tally.complaint} ({seen})"
            return Finding(CHECK, False, detail, tally.n, tally.ties)
        return Finding(CHECK, True, seen, tally.n, tally.ties)

    # ------------------------------------------------------------ private

    def _place(self, number: int, kept: int) -> int | None:
        """Where the ``number``-th of equally likely things is kept, ``kept`` of all of them; None: nowhere."""
        place = number - 1 if number <= kept else self._draw.randrange(number)
        return place if place < kept else None

    def _judge(self, tally: Tally, answer: Answer, tolerance: float, *, counted: bool) -> None:
        prompts, record, point = answer.prompts, answer.record, self.point
        trajectories = read_record(tally, record, prompts, answer.max_new, answer.stop, point)
        last = len(prompts) - 1
        for row in (last, *self._draw.sample(range(last), min(ROWS - 1, last))):
            self._hold(tally, trajectories[row], prompts[row], record.emitted[row], tolerance)
        if counted and self._is_exact and read_from_logits(point):
            readouts = [Readouts.whole(point, len(trajectory.depth)) for trajectory in trajectories]
            judge_work(tally, record, trajectories, readouts, point, exact_context=False)

    @property
    def _is_exact(self) -> bool:
        return self.point.schedule in EXACT

    def _hold(
        self, tally: Tally, trajectory: Trajectory, prompt: Prompt, emitted: Ints | None, tolerance: float
    ) -> None:
        """One row's depths, signals and, where there are any, logits and ``emitted`` tokens."""
        if not self._is_exact:
            self._hold_against_reference(tally, trajectory, prompt, emitted, tolerance)
            return
        reference = hold_against(tally, trajectory, self._lens(prompt.source), self.point, tolerance)
        if emitted is not None:
            judge_tokens(tally, trajectory, emitted, reference, self.point, tolerance)

    def _hold_against_reference(
        self, tally: Tally, trajectory: Trajectory, prompt: Prompt, emitted: Ints | None, tolerance: float
    ) -> None:
        """The same, position by position beside the decoder that is known to be right; up to a tie of a depth."""
        point, first = self.point, trajectory.first
        session, step = self._reference().start([Prompt(trajectory.tokens[: first + 1], prompt.source)])
        signals: list[Floats] = []
        for at, depth in enumerate(trajectory.depth.tolist()):
            if at:
                forced = None if trajectory.chosen[at] else np.array([[depth]])
                step = session.feed(trajectory.tokens[None, [first + at]], forced)
            own, logits = int(step.depth[0, -1]), step.logits[0, -1]
            signals.append(step.signal[0, -1])
            tally.n += 1
            if depth != own:
                place = trajectory.place(at)
                near = _is_near(point, np.array(signals), tolerance)
                tally.require(near, f"{place}: our own decoder stops at depth {own} after the same tokens")
                tally.ties += 1
                break
            if emitted is not None:
                gap, best = logits.max() - logits[emitted[at]], int(logits.argmax())
                tally.require(
                    bool(gap < tied_gap(point, tolerance)),
                    f"{trajectory.place(at)}: emitted {emitted[at]}, but our own decoder {best}",
                )
                tally.ties += int(emitted[at] != best)
            if trajectory.logits is not None:
                off = float(np.abs(trajectory.logits[at] - logits).max())
                allowed = tolerance * emission_noise(point)
                tally.require(off <= allowed, f"{trajectory.place(at)}: logits off by {off:.2g}, more than {allowed:g}")
        session.close()


def _is_near(point: OperatingPoint, signals: Floats, tolerance: float) -> bool:
    """Whether the last of ``signals`` [m, probes] of one row lies within ``tolerance`` of a threshold of any bin."""
    for row in range(len(point.thresholds)):
        room, noise = headroom(point, signals, np.full(len(signals), row))
        if (np.abs(room[-1]) <= tolerance * noise).any():
            return True
    return False


class WatchedSession:
    """``wrapped``, with all that it shows of ``row`` kept, as long as every token's logits are shown."""

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
        self._is_kept, self._steps = False, []  # depths that were shown are no longer those taken
        return self.wrapped.deepen(length)

    def rollback(self, length: Ints) -> None:
        self.wrapped.rollback(length)
        prompt = len(self.prompt.tokens)
        if self._is_kept and length[self._row] < prompt:
            self._is_kept = False
        elif self._is_kept:
            kept = int(length[self._row])
            del self._tokens[kept:], self._steps[kept - prompt + 1 :]

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
        """What was kept of the row; None where there is nothing."""
        if not self._steps:
            return None
        depth, signal, logits, chosen = (np.array(column) for column in zip(*self._steps, strict=True))
        tokens = np.array(self._tokens, dtype=np.int64)
        return Trajectory(self._name, tokens, len(self.prompt.tokens) - 1, depth, signal, chosen, logits)

    def _write(self, step: Step, *, chosen: bool) -> None:
        for at in range(step.depth.shape[1]):
            signal, logits = np.array(step.signal[self._row, at]), np.array(step.logits[self._row, at])
            self._steps.append((int(step.depth[self._row, at]), signal, logits, chosen))
