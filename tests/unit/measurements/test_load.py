"""Times of an engine with its exit rule and without it, at 1, 4 and 16 requests in flight, by a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.models.loading import load as load_model
from emad_ref.protocol import Prompt, TokenArrivals, Unsupported
from pytest_emad.audit.finding import AuditRefutedError
from pytest_emad.claims.engines import (
    attach_times_under_load,
    describe_loss_under_load,
    estimate_speedups_under_load,
)
from pytest_emad.measurements import load
from pytest_emad.measurements.load import IN_FLIGHT, WAVES, LoadByRequests, measure_load
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.measurements.run_resources import RemoteDecoders, RunResources
from pytest_emad.measurements.study import Study
from pytest_emad.remote.address import parse_url
from tests.decoders.engine_server import Engine, serve
from tests.unit.test_energy import Board

NEW, LENGTH = 4, 3
PROMPTS = [Prompt(np.full(LENGTH, at)) for at in range(50)]


class Served:
    """Answers a wave of n requests in ``seconds(n)`` by the clock of ``board``, at 100 W; two tokens in each event."""

    offers = (True, False)  # values of ``stream``

    def __init__(self, board: Board, seconds: Callable[[int], float]):
        self.board, self.seconds, self.asked = board, seconds, list[list[int]]()

    def token_arrivals(
        self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
    ) -> list[TokenArrivals]:
        if stream not in self.offers:
            raise Unsupported("it streams nothing" if stream else "it takes one request at a time")
        self.asked.append([int(prompt.tokens[0]) for prompt in prompts])
        whole_s = self.seconds(len(prompts)) * (1 + 0.01 * (len(self.asked) % 3 - 1))  # not quite steady
        self.board.spend(whole_s, 100.0)
        arrived = (1 + np.arange(max_new) // 2) * whole_s / (max_new // 2)
        return [TokenArrivals(np.zeros(max_new, dtype=np.int64), arrived, whole_s) for _ in prompts]


class Counting(Served):
    def energy_j(self) -> float:
        return self.board.millijoules / 1000


class Resetting(Counting):
    """Begins anew once, after the times of single requests."""

    def energy_j(self) -> float:
        joules = super().energy_j()
        return joules if joules < 7_900 else joules - 7_900


class Whole(Served):
    offers = (False,)


class Alone(Served):
    offers = ()


class Short(Served):
    """Loses a token of each answer at more than four requests at once."""

    def token_arrivals(self, prompts: Sequence[Prompt], max_new: int, *rest: Any) -> list[TokenArrivals]:
        return super().token_arrivals(prompts, max_new - (len(prompts) > 4), *rest)


def linear(at_one: float) -> Callable[[int], float]:
    return lambda at_once: at_one * at_once


def crowded(at_once: int) -> float:
    """Half the time of ``linear(0.1)`` for up to four requests, and half as much again for more."""
    return at_once * (0.05 if at_once <= 4 else 0.15)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadByRequests | Absent]:
    def measure(rule: type[Served] = Served, seconds: Callable[[int], float] = crowded) -> LoadByRequests | Absent:
        board = Board()
        clocked = {"clock": board.clock, "process_clock": board.clock}
        monkeypatch.setattr(load, "time_call", partial(load.time_call, **clocked))
        monkeypatch.setattr(load, "measure_energy_window", partial(load.measure_energy_window, clock=board.clock))
        arms = {"full": Served(board, linear(0.1)), "rule": rule(board, seconds)}
        found = measure_load(arms, lambda most: PROMPTS[:most], PROMPTS[0], NEW, np.random.default_rng(0))
        if rule is Served:
            assert arms["full"].asked == arms["rule"].asked, "the same prompts"
            assert [len(wave) for wave in arms["full"].asked[1:]] == [n for n in IN_FLIGHT for _ in range(WAVES)]
        return found

    return measure


def test_waves_are_timed_by_the_number_of_requests_in_flight(measured: Any) -> None:
    found = measured()
    for at_once, times in found.items():
        assert times.seconds["full"].values == pytest.approx([0.1 * at_once] * WAVES, rel=0.011)
        assert times.tokens_per_s("full") == pytest.approx(NEW / 0.1, rel=0.01)
        assert times.tokens_per_s("rule") == pytest.approx(NEW * at_once / crowded(at_once), rel=0.01)
        assert len(times.answers["rule"]) == WAVES * at_once
        assert times.is_streamed
    assert tuple(found) == IN_FLIGHT


def attached(found: LoadByRequests | Absent) -> Any:
    return attach_times_under_load(SimpleNamespace(name="m", own_rule_evidence=SimpleNamespace(load=found)))  # type: ignore[arg-type]


def test_a_speed_up_that_turns_to_loss_is_said_with_the_number_of_requests(measured: Any) -> None:
    shown = attached(measured())
    (table,) = shown.tables
    assert shown.notes[0].startswith("m: the speed-up turns to loss at 16 requests in flight: 0.67×")
    rows = {(row["requests in flight"], row["arm"]): row for row in table.rows}
    four = rows[4, "rule"]
    assert four["tokens/s"] == pytest.approx(NEW * 4 / 0.2, rel=0.01)
    assert (four["first token, ms"], four["between tokens, ms"], four["whole answer, ms"]) == (100.0, 50.0, 200.0)


@pytest.mark.parametrize(("at_one", "said"), [(0.2, "is a loss at 1 requests in flight: 0.50×"), (0.05, "")])
def test_a_rule_that_never_saves_or_never_loses(at_one: float, said: str, measured: Any) -> None:
    found = SimpleNamespace(load=measured(seconds=linear(at_one)))
    described = describe_loss_under_load(estimate_speedups_under_load(found))  # type: ignore[arg-type]
    assert said in described
    assert bool(said) is bool(described)


def test_an_engine_that_does_not_stream_has_times_of_whole_answers(measured: Any) -> None:
    (table,) = attached(measured(Whole)).tables
    assert {row["first token, ms"] for row in table.rows} == {None}
    assert table.rows[0]["whole answer, ms"] is not None


def test_an_engine_of_one_request_at_a_time_says_so(measured: Any) -> None:
    found = measured(Alone)
    assert found == Absent("it takes one request at a time", "premise")
    assert attached(found).notes == ("m: no times under load: it takes one request at a time",)
    assert estimate_speedups_under_load(SimpleNamespace(load=found)) == {}  # type: ignore[arg-type]


def test_an_answer_of_another_length_is_no_answer(measured: Any) -> None:
    with pytest.raises(AuditRefutedError, match=r"^rule, 16 in flight: \[3, .* new tokens, where 4 in each of 16"):
        measured(Short)


def test_joules_are_those_of_the_decoders_own_counter(measured: Any) -> None:
    shown = attached(measured(Counting))
    rows = {(row["requests in flight"], row["arm"]): row for row in shown.tables[0].rows}
    assert rows[1, "rule"]["J per output token"] == pytest.approx(100 * 0.05 / NEW, rel=0.01)
    assert rows[1, "rule"]["J per input or output token"] == pytest.approx(100 * 0.05 / (NEW + LENGTH), rel=0.01)
    assert rows[1, "full"]["J per output token"] is None
    assert "m: no energy of full under load: the decoder counts no energy" in shown.notes


def test_a_counter_that_was_reset_gives_no_joules(measured: Any) -> None:
    shown = attached(measured(Resetting))
    joules = {
        row["requests in flight"]: row["J per output token"] for row in shown.tables[0].rows if row["arm"] == "rule"
    }
    assert joules == {1: pytest.approx(100 * 0.05 / NEW, rel=0.01), 4: None, 16: None}
    assert any("no energy of rule under load: the energy counter went back from" in note for note in shown.notes)


def test_two_servers_are_two_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests at full depth go to the baseline, those under the rule to the server of ``--emad-decoder``."""
    monkeypatch.setattr(load, "IN_FLIGHT", (1, 2))
    monkeypatch.setattr(load, "WAVES", 2)
    loaded = load_model("random:emad-nano")

    def answer(prompt: list[int], max_new: int, *rest: Any) -> tuple[list[int], bool]:
        return [7] * max_new, False

    def engine() -> Engine:
        return Engine(answer, window=loaded.stepper.max_positions)

    with ExitStack() as stack:
        under_rule, without = engine(), engine()
        urls = [stack.enter_context(serve(each)) for each in (under_rule, without)]
        address, baseline = (parse_url(url, Path(), "decoder") for url in urls)
        distant = RemoteDecoders(address, 10, None, baseline)
        subject = ModelUnderTest(loaded, Study(), RunResources(distant.make))
        full, rule = (
            stack.enter_context(subject.open_decoder(subject.full_depth_point, own_rule=own_rule))
            for own_rule in (False, True)
        )
        arms = {"full": full, "rule": rule}
        found = measure_load(arms, lambda most: PROMPTS[:most], PROMPTS[0], NEW, np.random.default_rng(0))
        assert rule.stated.speedup == 1.0  # type: ignore[attr-defined]
        assert getattr(full, "stated", None) is None
        assert distant.request_counts["requests"] == len(under_rule.bodies) + len(without.bodies)
    assert not isinstance(found, Absent)
    assert [len(each.answers["rule"]) for each in found.values()] == [2, 4]
    assert len(under_rule.bodies) == len(without.bodies) == 1 + 2 + 4


def test_without_a_baseline_a_server_has_no_rule() -> None:
    loaded = load_model("random:emad-nano")
    with serve(Engine(lambda *request: ([0], False), window=loaded.stepper.max_positions)) as url:
        distant = RemoteDecoders(parse_url(url, Path(), "decoder"), 10)
        subject = ModelUnderTest(loaded, Study(), RunResources(distant.make))
        with (
            pytest.raises(Unsupported, match="--emad-decoder-baseline names a server without its rule"),
            subject.open_decoder(subject.full_depth_point, own_rule=True),
        ):
            pass
