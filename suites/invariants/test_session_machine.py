"""After any order of feed, forced feed, rollback, commit and drop, a session answers as a fresh one.

A state machine keeps the history of every row of up to two sessions of one decoder; the oracle is the lens over that
history. Outputs are kept until their row ends, is rolled back or is dropped; then one pass compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from emad_ref.protocol import Decoder, Prompt, Session, Step
from emad_ref.record import Floats
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.tolerances import find_first_excess
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.run.hypothesis_profile import property_test_settings, reraise_refusal, stop_search_on_refusal
from pytest_emad.run.options import RunSettings
from pytest_emad.run.suite_support import AuditFindingGate

ROWS = 3  # of a session at most
SHORT, LONG = 4, 64  # tokens of a prompt
GROWTH = 12  # tokens that may follow it
WIDEST = 3  # tokens of one feed
STEPS = 10

Numbers = NDArray[np.number[Any]]


@dataclass
class SessionRow:
    """``depths`` of all tokens of ``history``, prompts at the ceiling; ``shown``: position → (depth, logits, after)."""

    history: list[int]
    depths: list[int]
    room: int
    committed: int = 0
    shown: dict[int, tuple[int, Floats, str]] = field(default_factory=dict)


@dataclass
class OpenSession:
    """One open session: its rows, its operations, and (name, array, copy) of each array that it returned."""

    session: Session
    rows: list[SessionRow]
    done: list[str]
    returned: list[tuple[str, Numbers, Numbers]] = field(default_factory=list)

    def remember_returned_array(self, name: str, array: Numbers) -> None:
        self.returned.append((f"{name} after {self.done[-1]}", array, np.array(array)))


def stop_search_if_declined(step: Callable[..., None]) -> Callable[..., None]:
    @wraps(step)
    def taken(machine: SessionMachine, *given: Any, **named: Any) -> None:
        with stop_search_on_refusal():
            step(machine, *given, **named)

    return taken


class SessionMachine(RuleBasedStateMachine):
    """The test below subclasses it with ``subject``, ``decoder``, ``tolerance`` and whether it ``forces`` depths."""

    subject: ClassVar[ModelUnderTest]
    decoder: ClassVar[Decoder]
    tolerance: ClassVar[float]
    forces: ClassVar[bool]
    sessions: list[OpenSession]

    @initialize(seed=st.integers(0, 2**16), data=st.data())
    @stop_search_if_declined
    def start(self, seed: int, data: st.DataObject) -> None:
        self.rng = np.random.default_rng(seed)
        self.layers = self.subject.stepper.layers
        self.sessions = []
        self.open_session(data)

    def draw_random_tokens(self, n: int) -> list[int]:
        drawn: list[int] = self.rng.integers(0, self.subject.stepper.vocabulary_size, n).tolist()
        return drawn

    @precondition(lambda self: len(self.sessions) < 2)
    @rule(data=st.data())
    @stop_search_if_declined
    def open_session(self, data: st.DataObject) -> None:
        longest = min(LONG, self.subject.window_size - GROWTH)
        length = st.one_of(st.integers(1, SHORT), st.integers(1, longest))
        lengths = data.draw(st.lists(length, min_size=1, max_size=ROWS), label="prompts")
        prompts = [self.draw_random_tokens(n) for n in lengths]
        session, step = self.decoder.start([Prompt(np.array(prompt)) for prompt in prompts])
        # a prompt's last position is the first decoding step
        rows = [SessionRow(prompt, [self.layers] * (len(prompt) - 1), len(prompt) + GROWTH) for prompt in prompts]
        opened = OpenSession(session, rows, [f"a start over prompts of {lengths} tokens"])
        self.sessions.append(opened)
        self.record_step(opened, step, 1, 1)

    def pick_session(self, data: st.DataObject) -> OpenSession:
        return self.sessions[data.draw(st.integers(0, len(self.sessions) - 1), label="session")]

    def record_step(self, opened: OpenSession, step: Step, n: int, last: int) -> None:
        """Keep the outputs of ``step`` for the last ``n`` tokens of each row, with logits of the last ``last``."""
        for part in ("logits", "depth", "signal"):
            opened.remember_returned_array(f"step.{part}", getattr(step, part))
        assert step.logits.shape[:2] == (len(opened.rows), last), f"logits of shape {step.logits.shape}, last={last}"
        for index, row in enumerate(opened.rows):
            for depth in step.depth[index].tolist():
                cap = row.depths[-1] if row.depths else self.layers
                assert 1 <= depth <= cap, f"row {index}: depth {depth} under cap {cap}, after {opened.done[-1]}"
                row.depths.append(depth)
            for at in range(n - last, n):
                answer = (int(step.depth[index, at]), np.array(step.logits[index, at - n + last]), opened.done[-1])
                row.shown[len(row.history) - n + at] = answer

    @precondition(lambda self: any(len(row.history) < row.room for opened in self.sessions for row in opened.rows))
    @rule(data=st.data(), forced=st.booleans())
    @stop_search_if_declined
    def feed(self, data: st.DataObject, forced: bool) -> None:
        opened = self.pick_session(data)
        room = min(row.room - len(row.history) for row in opened.rows)
        if room < 1:
            return
        n = data.draw(st.integers(1, min(WIDEST, room, self.decoder.capabilities.max_feed)), label="tokens")
        last = data.draw(st.one_of(st.none(), st.integers(0, n)), label="last")
        tokens = np.array([self.draw_random_tokens(n) for _ in opened.rows])
        depth = None
        if forced and self.forces:
            drawn = [data.draw(st.lists(st.integers(1, r.depths[-1]), min_size=n, max_size=n)) for r in opened.rows]
            depth = np.minimum.accumulate(np.array(drawn), axis=1)
        opened.done.append(f"a feed of {n} tokens{'' if depth is None else ' at forced depths'}, last={last}")
        step = opened.session.feed(tokens, depth, last)
        for row, fed in zip(opened.rows, tokens.tolist(), strict=True):
            row.history += fed
        assert depth is None or np.array_equal(step.depth, depth), f"depth {depth} was forced, {step.depth} taken"
        self.record_step(opened, step, n, n if last is None else last)

    @rule(data=st.data())
    @stop_search_if_declined
    def rollback(self, data: st.DataObject) -> None:
        opened = self.pick_session(data)
        lengths = [
            data.draw(st.integers(max(1, row.committed), len(row.history)), label="length") for row in opened.rows
        ]
        opened.done.append(f"a rollback to {lengths}")
        opened.session.rollback(np.array(lengths))
        for index, (row, length) in enumerate(zip(opened.rows, lengths, strict=True)):
            if length < len(row.history):
                self.compare_row(index, row)
            del row.history[length:], row.depths[length:]

    @rule(data=st.data())
    @stop_search_if_declined
    def commit(self, data: st.DataObject) -> None:
        opened = self.pick_session(data)
        for row in opened.rows:
            row.committed = data.draw(st.integers(max(1, row.committed), len(row.history)), label="length")
        lengths = [row.committed for row in opened.rows]
        opened.done.append(f"a commit of {lengths} of {[len(row.history) for row in opened.rows]} tokens")
        opened.session.commit(np.array(lengths))

    @precondition(lambda self: any(len(opened.rows) > 1 for opened in self.sessions))
    @rule(data=st.data())
    @stop_search_if_declined
    def drop(self, data: st.DataObject) -> None:
        opened = self.pick_session(data)
        if len(opened.rows) == 1:
            return
        order = data.draw(st.permutations(range(len(opened.rows))), label="rows")
        gone = order[: data.draw(st.integers(1, len(order) - 1), label="of them")]
        opened.done.append(f"a drop of rows {gone}")
        opened.session.drop(np.array(gone))
        for index in gone:
            self.compare_row(index, opened.rows[index])
        opened.rows = [row for index, row in enumerate(opened.rows) if index not in gone]

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    @stop_search_if_declined
    def close(self, data: st.DataObject) -> None:
        opened = self.pick_session(data)
        self.compare_all_rows(opened)
        self.sessions.remove(opened)
        opened.session.close()

    def compare_all_rows(self, opened: OpenSession) -> None:
        for index, row in enumerate(opened.rows):
            self.compare_row(index, row)

    def compare_row(self, index: int, row: SessionRow) -> None:
        """Compare the row's outputs with the lens over its history."""
        if not row.shown:
            return
        first = min(row.shown)
        reference = self.subject.reference_lens(np.array(row.history), first)
        for position, (depth, logits, after) in sorted(row.shown.items()):
            off = np.abs(logits - reference.after_layer(depth)[[position - first]]).max(axis=-1)
            excess = find_first_excess(
                self.subject.reference_lens, np.array(row.history), position, off, [depth], self.tolerance
            )
            at, (_, allowed) = f"row {index}, position {position}, depth {depth}", excess or (0, 0.0)
            assert excess is None, f"{at}: logits off by {off[0]:.2g} after {after}, more than {allowed:g}"
        row.shown.clear()

    @invariant()
    @stop_search_if_declined
    def length_and_cap_are_those_of_the_history(self) -> None:
        for opened in getattr(self, "sessions", []):
            length, cap = opened.session.length, opened.session.cap
            assert length.tolist() == [len(row.history) for row in opened.rows], f"length after {opened.done[-1]}"
            assert cap.tolist() == [row.depths[-1] for row in opened.rows], f"cap after {opened.done[-1]}"
            opened.remember_returned_array("session.length", length)
            opened.remember_returned_array("session.cap", cap)

    @invariant()
    def what_was_returned_stays(self) -> None:
        for opened in getattr(self, "sessions", []):
            for name, returned, copied in opened.returned:
                assert np.array_equal(returned, copied, equal_nan=True), f"{name} changed after {opened.done[-1]}"

    def teardown(self) -> None:
        sessions = getattr(self, "sessions", [])
        try:
            for opened in sessions:
                self.compare_all_rows(opened)
        finally:
            for opened in sessions:
                opened.session.close()


@pytest.mark.parametrize("full", [True, False], ids=["full", "probing"])
def test_session_survives_any_order_of_operations(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_settings: RunSettings, full: bool
) -> None:
    """A failure is raised where it shows; the audit records that all orders were tried.

    Case ``full`` forces no depth.
    """
    subject, wanted = emad_evidence.subject, property_test_settings(emad_settings.budget, STEPS)
    point = subject.full_depth_point if full else emad_evidence.replay_validity.probing_point
    with subject.open_decoder(point, max_rows=ROWS) as decoder:
        bound = {
            "subject": subject,
            "decoder": decoder,
            "tolerance": subject.compute_allowed_difference(decoder.capabilities),
        }
        bound["forces"] = not full
        with reraise_refusal():
            run_state_machine_as_test(type("BoundMachine", (SessionMachine,), bound), settings=wanted)
    orders, steps = wanted.max_examples, wanted.stateful_step_count
    detail = f"at most {orders} orders of at most {steps} operations each, and every answer as a fresh session gives it"
    emad_audit(Finding("session machine", True, detail, n=orders, ties=0))
