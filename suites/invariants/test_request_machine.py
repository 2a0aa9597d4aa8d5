"""After any order of requests, each answer is the one that its prompts get alone.

A state machine sends requests to several open decoders: new ones, earlier ones again, rows in another order, single
rows, streamed ones and several at once. Prompts begin with tokens that Hypothesis does not draw, so a cache that kept
an earlier execution cannot hide a failure. All answers are judged at the end of an execution.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from emad_ref.protocol import Prompt
from pytest_emad.audit.decoding_checks import NO_STOP
from pytest_emad.audit.dimensions import REQUESTS
from pytest_emad.audit.finding import Tally
from pytest_emad.audit.request_cases import CaseBench, History, OpenedDecoder, RequestCases
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.hypothesis_profile import (
    find_machine_complaint,
    keep_complaint,
    property_test_settings,
    stop_search_on_refusal,
)
from pytest_emad.run.options import RunSettings
from pytest_emad.run.suite_support import AuditFindingGate

ROWS, FEW_ROWS = 9, 3
LONGEST = 40  # tokens of a prompt
NEW, FEW_NEW = 24, 6  # new tokens of a request
STEPS = 8
# points with exits of which the lens knows all states
EXITS = (("probing", "L"), ("truncated", "below"), ("binned", "L"), ("eager", "L"), ("top2_gap", "L"))
CALLS = REQUESTS["call"].values
CASES = {"full": (("full", "L"),), "exits": EXITS}


class RequestMachine(RuleBasedStateMachine):
    """The test below subclasses it with decoders and what they offer.

    ``failing``: steps and complaint of each failing execution; Hypothesis ends with the simplest.
    """

    opened: ClassVar[list[OpenedDecoder]]
    bench: ClassVar[CaseBench]
    tally: ClassVar[Tally]
    calls: ClassVar[list[str]]
    failing: ClassVar[list[str]]

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[list[Prompt], int, frozenset[int]]] = []

    @initialize(seed=st.integers(0, 2**16), arrays=st.sampled_from(REQUESTS["arrays"].values), strided=st.booleans())
    def start(self, seed: int, arrays: str, strided: bool) -> None:
        self.rng = np.random.default_rng(seed)
        prompt = "strided" if strided else "within a block"
        self.history = History({"arrays": arrays, "prompt": prompt, "call": "generate"})
        self.cases = RequestCases(self.bench, self.tally)

    def send(self, data: st.DataObject, prompts: list[Prompt], new: int, stop: frozenset[int]) -> None:
        by = data.draw(st.sampled_from(self.opened), label="point")
        call = data.draw(st.sampled_from(self.calls), label="call")
        self.history.case = {**self.history.case, "call": call}
        self.history.steps.append(f"at {by.point.name}:")
        self.sent.append((prompts, new, stop))
        with keep_complaint(self.failing, self.history.steps), stop_search_on_refusal():
            self.cases.send(self.history, by, prompts, new, stop)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """Send new prompts; some begin with an earlier one's tokens."""
        most = data.draw(st.sampled_from([FEW_ROWS, ROWS]), label="most rows")
        lengths = data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=most), label="prompts")
        prompts = [self.bench.draw_random_prompt(self.rng, length) for length in lengths]
        shares: bool = data.draw(st.booleans(), label="shares a beginning")
        if self.sent and shares:
            known = self.sent[-1][0][0].tokens
            kept = data.draw(st.integers(1, len(known)), label="of so many tokens")
            prompts[0] = Prompt(np.concatenate([known[:kept], prompts[0].tokens])[:LONGEST])
        new = data.draw(st.one_of(st.integers(1, FEW_NEW), st.integers(1, NEW)), label="new tokens")
        stop = NO_STOP
        answered = [token for answer in self.history.answers for token in answer.request.record.emitted[0].tolist()]
        ends: bool = data.draw(st.booleans(), label="with stop ids")
        if answered and ends:
            stop = frozenset(data.draw(st.lists(st.sampled_from(answered), min_size=1, max_size=24), label="stop"))
        self.send(data, prompts, new, stop)

    @precondition(lambda self: bool(self.sent))
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """Send rows of an earlier request: all of them, some, or one, in any order."""
        prompts, new, stop = data.draw(st.sampled_from(self.sent), label="request")
        order = data.draw(st.permutations(range(len(prompts))), label="order")
        count = data.draw(st.integers(1, len(prompts)), label="rows")
        fewer = data.draw(st.integers(1, new), label="new tokens")
        self.send(data, [prompts[row] for row in order[:count]], fewer, stop)

    def teardown(self) -> None:
        if not hasattr(self, "history"):
            return
        with keep_complaint(self.failing, self.history.steps):
            self.cases.judge(self.history)


@pytest.mark.parametrize("case", CASES)
def test_requests_in_any_order_get_the_answers_of_each_alone(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_settings: RunSettings, case: str
) -> None:
    """Case ``full`` asks at full depth alone, so it judges engines, too."""
    bench, wanted = emad_evidence.replay_validity.case_bench, property_test_settings(emad_settings.budget, STEPS)
    tally = Tally("request machine", needed=0)
    with ExitStack() as stack:
        opened = bench.open_offered(stack, CASES[case], ROWS)
        calls = [call for call in CALLS if all(RequestCases(bench, tally).offers_call(by, call) for by in opened)]
        complaint = find_machine_complaint(RequestMachine, wanted, opened=opened, bench=bench, tally=tally, calls=calls)
    with tally:
        tally.require(not complaint, complaint)
    tally.notes.append(f"at most {wanted.max_examples} orders of at most {wanted.stateful_step_count} requests each")
    emad_audit(tally.to_finding())
