"""Any order of feed, forced feed, rollback, commit and drop leaves a session that answers as a fresh one would.

A state machine holds the plain history of every row beside the session; the oracle is the lens over that history.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.subject import Subject
from emad_ref.protocol import Decoder, Prompt, Step
from pytest_emad.options import Settings

LONGEST = 14
STEPS = 8


class SessionMachine(RuleBasedStateMachine):
    """Subclassed with ``subject`` and ``decoder`` by the test below."""

    subject: ClassVar[Subject]
    decoder: ClassVar[Decoder]

    @initialize(seed=st.integers(0, 2**16), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=2))
    def start(self, seed: int, lengths: list[int]) -> None:
        self.rng = np.random.default_rng(seed)
        self.layers = self.subject.stepper.layers
        self.history = [self.random(n) for n in lengths]
        self.committed = [0] * len(lengths)
        self.session, step = self.decoder.start([Prompt(np.array(h)) for h in self.history])
        depths = step.depth[:, 0].tolist()  # a prompt's last position is the first decoding step
        self.caps = [[self.layers] * (n - 1) + [depth] for n, depth in zip(lengths, depths, strict=True)]
        self.compare(step, depths)

    def random(self, n: int) -> list[int]:
        drawn: list[int] = self.rng.integers(0, self.subject.stepper.vocabulary, n).tolist()
        return drawn

    def compare(self, step: Step, depths: list[int]) -> None:
        for row, depth in enumerate(depths):
            want = self.subject.lens_at_end(np.array(self.history[row]))[depth - 1]
            difference = np.abs(step.logits[row, -1] - want).max()
            assert difference <= self.subject.tolerance, f"row {row} at depth {depth} is off by {difference:.2e}"

    @precondition(lambda self: self.history and max(map(len, self.history)) < LONGEST)
    @rule(data=st.data())
    def feed_at_forced_depths(self, data: st.DataObject) -> None:
        depths = [data.draw(st.integers(1, caps[-1]), label="depth") for caps in self.caps]
        tokens = [self.random(1)[0] for _ in self.history]
        step = self.session.feed(np.array(tokens)[:, None], np.array(depths)[:, None])
        for row, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
            self.history[row].append(token)
            self.caps[row].append(depth)
        self.compare(step, depths)

    @precondition(lambda self: self.history and max(map(len, self.history)) < LONGEST)
    @rule()
    def feed(self) -> None:
        tokens = [self.random(1)[0] for _ in self.history]
        step = self.session.feed(np.array(tokens)[:, None])
        depths = step.depth[:, -1].tolist()
        for row, (token, depth) in enumerate(zip(tokens, depths, strict=True)):
            assert depth <= self.caps[row][-1], f"row {row}: depth rose from {self.caps[row][-1]} to {depth}"
            self.history[row].append(token)
            self.caps[row].append(depth)
        self.compare(step, depths)

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        lengths = [
            data.draw(st.integers(max(1, floor), len(h)), label="length")
            for floor, h in zip(self.committed, self.history, strict=True)
        ]
        self.session.rollback(np.array(lengths))
        for row, length in enumerate(lengths):
            del self.history[row][length:], self.caps[row][length:]

    @precondition(lambda self: self.history)
    @rule()
    def commit(self) -> None:
        self.committed = [len(h) for h in self.history]
        self.session.commit(np.array(self.committed))

    @precondition(lambda self: len(self.history) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.history) - 1), label="row")
        self.session.drop(np.array([row]))
        for column in (self.history, self.caps, self.committed):
            del column[row]

    @invariant()
    def length_and_cap_are_those_of_the_history(self) -> None:
        if not hasattr(self, "session"):
            return
        assert self.session.length.tolist() == [len(h) for h in self.history]
        assert self.session.cap.tolist() == [caps[-1] for caps in self.caps]

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()


def test_session_survives_any_order_of_operations(emad_evidence: Evidence, emad_settings: Settings) -> None:
    with emad_evidence.subject.open(emad_evidence.bridging.probing_point, max_rows=2) as decoder:
        machine = type("BoundMachine", (SessionMachine,), {"subject": emad_evidence.subject, "decoder": decoder})
        run_state_machine_as_test(
            machine, settings=settings(max_examples=emad_settings.budget.examples, stateful_step_count=STEPS)
        )
