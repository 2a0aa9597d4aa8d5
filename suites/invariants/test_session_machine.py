"""After any order of feed, forced feed, rollback, commit and drop, a session answers as a fresh one.

A state machine holds up to two sessions of one decoder, at full depth or at a drawn point with exits. Prompts begin
with tokens that Hypothesis does not draw, so a cache that kept an earlier execution cannot hide a failure. The lens
judges all answers at the end of an execution, those that a rollback forgot, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from emad_ref.protocol import Decoder
from emad_ref.record import Ints
from pytest_emad.audit.finding import Tally
from pytest_emad.audit.request_cases import CaseBench
from pytest_emad.audit.trajectory import CheckedSession, Judge, Trajectory
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.hypothesis_profile import (
    find_machine_complaint,
    keep_complaint,
    property_test_settings,
    stop_search_on_refusal,
)
from pytest_emad.run.options import RunSettings
from pytest_emad.run.suite_support import AuditFindingGate

ROWS = 9  # of a session at most; few as a rule
FEW_ROWS = 3
SHORT, LONG = 4, 64  # tokens of a prompt
GROWTH = 40  # tokens that may follow it
NARROW, WIDEST = 3, 20  # tokens of one feed
STEPS = 10
EXITS = ("probing", "binned", "eager", "top2_gap")  # points of which the lens knows all states
CASES = {"full": (("full", "L"),), "exits": tuple((kind, ceiling) for kind in EXITS for ceiling in ("L", "below"))}


@dataclass
class OpenSession:
    """One open session, the longest that its rows may grow, and what its rows have committed."""

    transcript: CheckedSession
    judge: Judge
    room: list[int]
    committed: list[int]
    forgotten: list[Trajectory] = field(default_factory=list)

    def held(self, row: int) -> int:
        return len(self.transcript.tokens[row])


def stop_search_if_declined(step: Callable[..., None]) -> Callable[..., None]:
    @wraps(step)
    def taken(machine: SessionMachine, *given: Any, **named: Any) -> None:
        with stop_search_on_refusal():
            step(machine, *given, **named)

    return taken


class SessionMachine(RuleBasedStateMachine):
    """The test below subclasses it with decoders and their judges, and what the model holds.

    ``failing``: steps and complaint of each failing execution; Hypothesis ends with the simplest.
    """

    opened: ClassVar[list[tuple[Decoder, Judge]]]
    bench: ClassVar[CaseBench]
    forces: ClassVar[bool]
    failing: ClassVar[list[str]]

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[OpenSession] = []
        self.closed: list[tuple[Judge, Trajectory]] = []
        self.steps: list[str] = []
        self.complained = False

    @initialize(seed=st.integers(0, 2**16), data=st.data())
    @stop_search_if_declined
    def start(self, seed: int, data: st.DataObject) -> None:
        self.rng = np.random.default_rng(seed)
        self.decoder, self.judge = data.draw(st.sampled_from(self.opened), label="point")
        self.steps.append(f"open {self.judge.point.name}")
        self.open_session(data)

    @precondition(lambda self: len(self.sessions) < 2)
    @rule(data=st.data())
    @stop_search_if_declined
    def open_session(self, data: st.DataObject) -> None:
        longest = min(LONG, self.bench.window - GROWTH)
        length = st.one_of(st.integers(1, SHORT), st.integers(1, longest))
        most = data.draw(st.sampled_from([FEW_ROWS, ROWS]), label="most rows")
        lengths = data.draw(st.lists(length, min_size=1, max_size=most), label="prompts")
        self.steps.append(f"start a session over prompts of {lengths} tokens")
        prompts = [self.bench.draw_random_prompt(self.rng, length) for length in lengths]
        with self.complaining():
            transcript = CheckedSession(self.judge, self.decoder, prompts)
            self.sessions.append(OpenSession(transcript, self.judge, [n + GROWTH for n in lengths], [1] * len(lengths)))

    def pick_session(self, data: st.DataObject) -> OpenSession:
        return self.sessions[data.draw(st.integers(0, len(self.sessions) - 1), label="session")]

    @rule(data=st.data(), forced=st.booleans())
    @stop_search_if_declined
    def feed(self, data: st.DataObject, forced: bool) -> None:
        opened = self.pick_session(data)
        transcript = opened.transcript
        room = min(opened.room[row] - opened.held(row) for row in transcript.rows)
        if room < 1:
            return
        widest = min(data.draw(st.sampled_from([NARROW, WIDEST]), label="widest"), room)
        n = data.draw(st.integers(1, min(widest, self.decoder.capabilities.max_feed)), label="tokens")
        last = data.draw(st.one_of(st.none(), st.integers(0, n)), label="last")
        tokens, depth = self.rng.integers(0, self.bench.vocabulary, (len(transcript.rows), n)), None
        if forced and self.forces:
            caps = transcript.session.cap.tolist()
            drawn = [data.draw(st.lists(st.integers(1, cap), min_size=n, max_size=n)) for cap in caps]
            depth = np.minimum.accumulate(np.array(drawn), axis=1)
        forced_at = "" if depth is None else f" at depths {depth.tolist()}"
        self.steps.append(f"feed {len(tokens)} × {n} tokens{forced_at}, last={last}")
        with self.complaining():
            transcript.feed(tokens, depth, last)

    def draw_lengths(self, data: st.DataObject, opened: OpenSession) -> Ints:
        drawn = [
            data.draw(st.integers(opened.committed[row], opened.held(row)), label="length")
            for row in opened.transcript.rows
        ]
        return np.array(drawn, dtype=np.int64)

    @rule(data=st.data())
    @stop_search_if_declined
    def rollback(self, data: st.DataObject) -> None:
        opened = self.pick_session(data)
        lengths = self.draw_lengths(data, opened)
        self.steps.append(f"rollback to {lengths.tolist()}")
        with self.complaining():
            opened.forgotten += opened.transcript.build_trajectories()
            opened.transcript.rollback(lengths)

    @rule(data=st.data())
    @stop_search_if_declined
    def commit(self, data: st.DataObject) -> None:
        opened = self.pick_session(data)
        lengths = self.draw_lengths(data, opened)
        self.steps.append(f"commit {lengths.tolist()}")
        for row, length in zip(opened.transcript.rows, lengths.tolist(), strict=True):
            opened.committed[row] = length
        with self.complaining():
            opened.transcript.commit(lengths)

    @rule(data=st.data())
    @stop_search_if_declined
    def drop(self, data: st.DataObject) -> None:
        opened = self.pick_session(data)
        present = len(opened.transcript.rows)
        order = data.draw(st.permutations(range(present)), label="rows")
        gone = order[: data.draw(st.integers(0, present - 1), label="of them")]
        self.steps.append(f"drop rows {gone}")
        with self.complaining():
            opened.transcript.drop(*gone)

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    @stop_search_if_declined
    def close(self, data: st.DataObject) -> None:
        opened = self.pick_session(data)
        self.steps.append("close a session")
        self.close_session(opened)
        self.sessions.remove(opened)

    def close_session(self, opened: OpenSession) -> None:
        with self.complaining():
            answered = [*opened.forgotten, *opened.transcript.build_trajectories()]
            self.closed += [(opened.judge, trajectory) for trajectory in answered]
            opened.transcript.session.close()

    @contextmanager
    def complaining(self) -> Iterator[None]:
        try:
            with keep_complaint(self.failing, self.steps):
                yield
        except BaseException:
            self.complained = True  # also by a refusal: what was fed is not held
            raise

    def teardown(self) -> None:
        for opened in self.sessions:
            if self.complained:  # what the transcripts hold no longer fits what was fed
                opened.transcript.session.close()
            else:
                self.close_session(opened)
        if self.closed and not self.complained:
            judge = self.closed[0][0].with_lens_prefetch(trajectory for _, trajectory in self.closed)
            with self.complaining():
                for _, trajectory in self.closed:
                    judge.require_trajectory_matches_lens(trajectory)


@pytest.mark.parametrize("case", CASES)
def test_session_survives_any_order_of_operations(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_settings: RunSettings, case: str
) -> None:
    """Case ``full`` forces no depth, and judges sessions of a decoder that offers no exits."""
    subject, wanted = emad_evidence.subject, property_test_settings(emad_settings.budget, STEPS)
    bench, tally = emad_evidence.replay_validity.case_bench, Tally("session machine", needed=0)
    with ExitStack() as stack:
        opened = []
        for each in bench.open_offered(stack, CASES[case], ROWS):
            judge = Judge.for_check(tally.check, subject.make_decoder_under_test(each.decoder, each.point))
            opened.append((each.decoder, replace(judge, tally=tally)))
        complaint = find_machine_complaint(SessionMachine, wanted, opened=opened, bench=bench, forces=case != "full")
    with tally:
        tally.require(not complaint, complaint)
    orders, steps = wanted.max_examples, wanted.stateful_step_count
    tally.notes.append(f"at most {orders} orders of at most {steps} operations each")
    emad_audit(tally.to_finding())
