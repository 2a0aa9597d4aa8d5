"""Tiers: a decoder's tier follows from its answers, and a run fails on less than its tier promises."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import pytest

from pytest_emad.audit.dimensions import (
    REQUEST_CONSTRAINTS,
    REQUESTS,
    SESSION_CONSTRAINTS,
    SESSIONS,
    Constraint,
    Dimension,
    iterate_pairs,
    make_covering_cases,
)
from pytest_emad.audit.finding import Tally
from pytest_emad.report.deselection import list_shipped_tests
from pytest_emad.report.gaps import find_gaps, find_missing, find_tier_gaps, format_gaps, is_partial_run, unexcused_gaps
from pytest_emad.report.tiers import (
    LEAST_PAIRS,
    LEAST_SESSION_PAIRS,
    LIMITS,
    OPTIONAL,
    TIERS,
    find_tier_shortfalls,
    format_tier,
    included_tiers,
    live_answer_counts_by_model,
    offered_tiers,
    required_tier_test_cases,
)
from pytest_emad.report.verification import find_proof_shortfalls
from tests.unit.report.sample_report import foreign_report, passed

DECLINED = {"exits": [0, 2], "sessions": [0, 2], "log-probabilities": [0, 1], "sampling": [4, 0]}


def live_entries(tier: str) -> list[dict[str, Any]]:
    """Return a passed entry for every test of ``tier``, with the tier's case."""
    folders = ("suites/invariants", "suites/fidelity")
    named = [test for test in required_tier_test_cases(tier) if test[0] not in folders]
    named += [
        (f"{folder}/test_x.py::test_y", "") for folder in folders if (folder, "") in required_tier_test_cases(tier)
    ]
    return [passed(name, nodeid=f"{name}[m-{case or 'any'}]") for name, case in named]


def whole(tier: str, features: dict[str, list[int]] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a report of a foreign decoder in which every entry of ``tier`` is live."""
    provider = {"name": "mine", "plugin": "mine", "foreign": True, "answered": 9, "declined": 3, "none": 0}
    answered = {TIERS[each].feature: [3, 0] for each in included_tiers(tier) if TIERS[each].feature}
    provider["features"] = DECLINED | answered if features is None else features
    decoder = {"name": "mine", "foreign": True, "providers": [provider], "overlooked": []}
    promise = {name: least for each in included_tiers(tier) for name, least in TIERS[each].promise.items()}
    entries = live_entries(tier)
    audit = {"check": "rows", "passed": True, "detail": "", "n": 3, "ties": 0}
    audits = [audit | {"test": entry["nodeid"]} for entry in entries]
    audits[0] |= {"model": "m", "live": promise}
    settings = {"models": ["m"], "gate": "decoder", "tier": tier, "expect_decoder": None, "inconclusive": "warn"}
    parts = {"tests": entries, "audits": audits, "decoder": decoder, "settings": settings}
    return foreign_report(**parts | {"waivers": [], "deselected": [], "claims": []} | changes)


def failures(report) -> list[str]:
    """Return the sentences for which the run fails."""
    return format_gaps(unexcused_gaps(report, find_missing(report, list_shipped_tests(), {})))


def test_tests_of_every_tier_are_shipped() -> None:
    for tier in TIERS:
        for name, _ in required_tier_test_cases(tier):
            assert any(test.startswith(name) for test in list_shipped_tests()), name


@pytest.mark.parametrize("tier", TIERS)
def test_a_decoder_is_judged_at_its_tier_where_all_of_it_is_live(tier: str) -> None:
    report = whole(tier)
    assert offered_tiers(report)[-1] == tier
    assert list(find_tier_shortfalls(report, tier)) == []
    assert f"tier {tier}; live: " in format_tier(report)


def test_a_higher_tier_than_is_offered_is_refused() -> None:
    (gap, *_) = find_tier_gaps(whole("tokens"), "sessions")
    assert str(gap) == "tier sessions: the decoder never answered log-probabilities, sessions; its tier is tokens"
    assert "its tier is tokens" in " ".join(
        find_proof_shortfalls(whole("tokens"), [], list_shipped_tests(), None, "sessions")
    )


@pytest.mark.parametrize("count", TIERS["tokens"].promise)
def test_less_than_the_promise_is_named(count: str) -> None:
    report = whole("tokens")
    live = report["audits"][0]["live"]
    live[count] -= 1
    least = TIERS["tokens"].promise[count]
    wanted = f"tier tokens: it promises {count}={least} for m, but {least - 1} were live"
    assert list(map(str, find_tier_gaps(report, "tokens"))) == [wanted]
    assert wanted in failures(report)
    assert wanted in list(find_proof_shortfalls(report, [], list_shipped_tests(), None))


def test_what_a_failed_or_second_attempt_asked_is_not_live() -> None:
    for change in ({"passed": False}, {"passed": None}, {"attempt": 2}):
        report = whole("tokens")
        report["audits"][0] |= change
        assert live_answer_counts_by_model(report) == {}


@pytest.mark.parametrize("place", range(len(TIERS["tokens"].tests)))
def test_each_test_must_be_live(place: int) -> None:
    report = whole("tokens")
    report["tests"][place] |= {"outcome": "skipped", "kind": "refused", "features": ["exits"]}
    name, _ = TIERS["tokens"].tests[place]
    assert any(f"{name}" in line and "not live for m" in line for line in find_tier_shortfalls(report, "tokens"))
    assert name in [gap.of for gap in find_gaps(report, ["suites"], list_shipped_tests(), tier="tokens")]


def test_a_test_that_failed_was_live() -> None:
    """Its own failure fails the run; a second message would say that it never ran."""
    report = whole("tokens")
    report["tests"][0]["outcome"] = "failed"
    assert list(find_tier_shortfalls(report, "tokens")) == []


def test_amounts_that_failed_tests_keep_from_being_live_are_one_sentence() -> None:
    report = whole("tokens")
    report["audits"][0]["live"] = {"positions": 2000}
    others = ", ".join(name for name in TIERS["tokens"].promise if name != "positions")
    assert len(list(find_tier_shortfalls(report, "tokens"))) == len(TIERS["tokens"].promise) - 1
    report["tests"][0]["outcome"] = "failed"
    assert list(find_tier_shortfalls(report, "tokens")) == [
        f"its promise is not kept for m, since tests failed: fewer live {others}"
    ]


def test_a_known_gap_was_live_and_the_run_owes_no_amounts() -> None:
    """Its failed audit counts no answers."""
    report = whole("tokens")
    first = report["tests"][0]
    first |= {"outcome": "xfailed", "attempts": [{"outcome": "failed", "reason": "AssertionError"}]}
    report["audits"][0] |= {"passed": False, "live": {}}
    assert len(list(find_tier_shortfalls(report, "tokens"))) == 1 + len(TIERS["tokens"].promise)
    first["known_gap"] = first["shipped"]
    assert list(find_tier_shortfalls(report, "tokens")) == []
    del first["known_gap"]
    first["outcome"] = "passed"
    other = "suites/ablations/test_text.py::test_text"
    report["tests"].append(passed(other, outcome="xfailed", attempts=first["attempts"], known_gap=other))
    missing = list(find_tier_shortfalls(report, "tokens"))
    assert len(missing) == len(TIERS["tokens"].promise), "a gap outside of the tier excuses no amount"
    report["tests"][1]["outcome"] = "xfailed"
    assert [line for line in find_tier_shortfalls(report, "tokens") if report["tests"][1]["shipped"] in line]


def test_the_name_of_a_model_is_no_case() -> None:
    """For a model called ``full``, the case ``probing`` is not the case at full depth."""
    report = whole("tokens")
    report["settings"]["models"] = ["full"]
    for entry in report["tests"]:
        entry["nodeid"] = entry["nodeid"].partition("[")[0] + "[full-probing]"
    assert sum("is not live for full" in line for line in find_tier_shortfalls(report, "tokens")) >= 5


def test_a_model_of_a_path_is_named_by_its_last_part() -> None:
    report = whole("tokens")
    report["settings"]["models"] = ["models/m"]
    report["audits"][0]["model"] = "models/m"
    assert list(find_tier_shortfalls(report, "tokens")) == []
    report["settings"]["models"] = ["models/m", "other/m"]
    assert any("not live for models/m" in line for line in find_tier_shortfalls(report, "tokens"))


@pytest.mark.parametrize("feature", OPTIONAL)
def test_a_decoder_that_never_offers_a_feature_is_told_and_owes_nothing_of_it(feature: str) -> None:
    tests = [part for part in OPTIONAL[feature] if part.startswith("suites/")]
    counts = [part for part in OPTIONAL[feature] if part not in tests]
    report = whole("tokens", {"exits": [0, 2], feature: [0, 2]})
    for count in counts:
        del report["audits"][0]["live"][count]
    report["tests"] = [entry for entry in report["tests"] if entry["shipped"] not in tests]
    assert list(find_tier_shortfalls(report, "tokens")) == []
    assert f"tier tokens ({LIMITS[feature]})" in format_tier(report)
    for counted in ({}, {feature: [1, 1]}):
        owing = whole("tokens", counted)
        for count in counts:
            del owing["audits"][0]["live"][count]
        owing["tests"] = [entry for entry in owing["tests"] if entry["shipped"] not in tests]
        missing = list(find_tier_shortfalls(owing, "tokens"))
        assert all(any(part in line for line in missing) for part in (*tests, *counts))


def test_a_part_that_a_person_typed_proves_nothing_and_fails_nothing() -> None:
    """Unless a proof is required: then a deselected test is a gap as always."""
    gone = {"why": "deselected", "claim": None, "shipped": required_tier_test_cases("tokens")[0][0], "nodeid": "x[m]"}
    report = whole("tokens", deselected=[gone])
    report["settings"]["tier"] = None
    report["run"]["asked"] = [gone["shipped"]]
    assert failures(report) != []
    report["run"]["partial"] = "-k"
    assert is_partial_run(report)
    missing = find_missing(report, list_shipped_tests(), {})
    assert (failures(report), [gap.of for gap in missing]) == ([], [gone["shipped"]])
    assert any(gone["shipped"] in fault for fault in find_proof_shortfalls(report, [], list_shipped_tests(), None))
    report["settings"]["expect_decoder"] = "foreign"
    assert any(gone["shipped"] in reason for reason in failures(report))


def count_pairs(table: Mapping[str, Dimension], constraints: Sequence[Constraint], **left_out: Container[str]) -> int:
    """Return the number of pairs of the values that are not left out."""
    values = {
        name: [value for value in each.values if value not in left_out.get(name, ())] for name, each in table.items()
    }
    cases = make_covering_cases(values, constraints, 0)
    return len({pair for case in cases for pair in iterate_pairs(case)})


def test_the_least_decoder_of_a_tier_reaches_its_pairs() -> None:
    least = {"point": REQUESTS["point"].values[1:], "ceiling": ("below",), "rows": ("33",), "new": ("70",)}
    least |= {"place": ("position 96",), "temperature": REQUESTS["temperature"].values[1:]}
    requests = least | {"call": ("stream", "at once"), "neighbours": ("session", "65th session")}
    requests["seed"] = REQUESTS["seed"].values[1:]
    assert count_pairs(REQUESTS, REQUEST_CONSTRAINTS, **requests) == LEAST_PAIRS
    sessions = least | {"neighbours": ("65th session",), "depths": SESSIONS["depths"].values[1:]}
    sessions["feed"] = SESSIONS["feed"].values[1:]
    assert count_pairs(SESSIONS, SESSION_CONSTRAINTS, **sessions) == LEAST_SESSION_PAIRS


def test_new_tokens_of_answers_are_counted() -> None:
    tally = Tally("x", needed=0)
    tally.count_new_tokens([range(4), range(4), range(6)])
    tally.count_new_tokens([range(3), range(3)], drawn=True)
    assert tally.to_finding().live == {"positions": 20, "samples": 6}
