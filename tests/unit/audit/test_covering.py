"""Offers of a decoder, cases that are asked, and the reduction of a failing case; the runner decodes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from emad_ref.protocol import Unsupported
from pytest_emad.audit.covering import CoveringResult, Offers, check_covering_cases, settle_offers
from pytest_emad.audit.dimensions import Case, Constraint, Dimension
from pytest_emad.audit.finding import AuditRefutedError, Tally
from pytest_emad.audit.request_cases import History

TABLE = {
    "rows": Dimension("rows", ("1", "2", "9")),
    "point": Dimension("points", ("full", "probing", "copying")),
    "call": Dimension("calls", ("generate", "stream")),
}


ALIVE = 8  # cases that settle the offers, and a few more


@dataclass
class Runner:
    """Fails or declines the cases that are named."""

    fails: Callable[[Case], bool] = lambda case: False
    declines: Callable[[Case], bool] = lambda case: False
    tally: Tally = field(default_factory=lambda: Tally("cases", needed=0))
    decoded: list[Case] = field(default_factory=list)

    def decode(self, history: History, seed: int) -> None:
        self.decoded.append(history.case)
        history.steps.append(f"ask with {history.case['rows']} rows")
        if self.declines(history.case):
            raise Unsupported("not this")

    def judge(self, history: History) -> None:
        if self.fails(history.case):
            raise AuditRefutedError("a wrong token")


def settled(runner: Runner) -> Offers:
    return settle_offers(runner, TABLE, (), {}, ("rows", "point", "call"), (("point", "call"),))


def checked(runner: Runner) -> CoveringResult:
    return check_covering_cases(runner, settled(runner), 0)


def test_an_honest_decoder_answers_every_pair() -> None:
    result = checked(Runner())
    assert result.finding.passed
    assert [row["dimension"] for row in result.rows] == list(TABLE)
    assert all(row["pairs asked"] == row["pairs answered"] > 0 for row in result.rows)
    assert result.finding.live == {"pairs": 3 * 3 + 3 * 2 + 3 * 2}


def test_a_defect_of_two_values_is_found_and_reduced_to_them() -> None:
    runner = Runner(fails=lambda case: case["rows"] == "9" and case["call"] == "stream")
    finding = checked(runner).finding
    assert finding.passed is False
    assert "a wrong token" in finding.detail
    assert "Simplest case: rows 9, call stream. Steps: 1. ask with 9 rows" in finding.detail
    assert finding.sample is not None
    assert finding.sample["case"] == {"rows": "9", "point": "full", "call": "stream"}


def test_an_error_of_the_decoder_is_a_complaint() -> None:
    class Broken(Runner):
        def decode(self, history: History, seed: int) -> None:
            super().decode(history, seed)
            if history.case["point"] == "copying":
                raise IndexError("list index out of range")

    assert "IndexError: list index out of range" in checked(Broken()).finding.detail


def test_a_decoder_that_died_is_told_with_the_case_it_died_in() -> None:
    """Every simpler case fails then, so the simplest one says nothing."""

    class Dying(Runner):
        dead = False

        def decode(self, history: History, seed: int) -> None:
            super().decode(history, seed)
            self.dead |= history.case["rows"] == "9" and len(self.decoded) > ALIVE
            if self.dead:
                raise ConnectionResetError("the engine is gone")

    detail = checked(Dying()).finding.detail
    assert "ConnectionResetError: the engine is gone. The decoder answers no more as it did" in detail
    assert "First failing case: rows 9" in detail


def test_what_is_declined_is_not_asked_for() -> None:
    runner = Runner(declines=lambda case: case["point"] == "copying" or case["rows"] == "9")
    offers = settled(runner)
    assert offers.values == {"rows": ("1", "2"), "point": ("full", "probing"), "call": ("generate", "stream")}
    assert offers.declined == {"rows 9": "not this", "point copying": "not this"}
    assert check_covering_cases(runner, offers, 0).finding.passed


def test_a_pair_that_is_declined_is_not_asked_for() -> None:
    runner = Runner(declines=lambda case: case["point"] == "probing" and case["call"] == "stream")
    offers = settled(runner)
    assert offers.declined == {"point probing with call stream": "not this"}
    assert offers.values["point"] == ("full", "probing", "copying")
    assert check_covering_cases(runner, offers, 0).finding.passed


def test_a_pair_that_was_never_answered_is_a_gap() -> None:
    """Pairs that are not settled before: rows and calls."""
    runner = Runner(declines=lambda case: case["rows"] == "2" and case["call"] == "stream")
    finding = checked(runner).finding
    assert finding.passed is None
    assert "never answered" in finding.detail
    assert "call stream with rows 2" in finding.detail
    assert finding.live["unanswered_pairs"] == 2


def test_a_decoder_that_declines_the_simplest_case_declines_all() -> None:
    with pytest.raises(Unsupported, match="not this"):
        settled(Runner(declines=lambda case: True))


def test_values_that_are_left_out_are_not_asked_for() -> None:
    runner = Runner()
    offers = settle_offers(runner, TABLE, (), {"rows": ("9",)}, ("rows",), ())
    check_covering_cases(runner, offers, 0)
    assert not any(case["rows"] == "9" for case in runner.decoded)


def test_the_least_possible_case_near_a_value_settles_it() -> None:
    """A value that the simplest case excludes is asked for with another one."""
    only = Constraint(("point", "rows"), lambda point, rows: point != "copying" or rows == "2", "two rows")
    runner = Runner(declines=lambda case: case["point"] == "copying")
    offers = settle_offers(runner, TABLE, (only,), {}, ("point",), ())
    assert offers.values["point"] == ("full", "probing")
    assert {"rows": "2", "point": "copying", "call": "generate"} in runner.decoded


def test_a_share_of_the_cases_leaves_no_gap() -> None:
    runner = Runner()
    offers = settled(runner)
    before = len(runner.decoded)
    result = check_covering_cases(runner, offers, 0, share=0.2)
    assert result.finding.passed
    assert len(runner.decoded) - before == 2
