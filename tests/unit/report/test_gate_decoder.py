"""Gate ``decoder``: a feature that the decoder always declines may stay open, one declined only sometimes may not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from emad_ref.point import OperatingPoint, full_depth, truncated
from pytest_emad.report.deselection import list_shipped_tests
from pytest_emad.report.gaps import find_gaps
from pytest_emad.report.provenance import declined_features, format_request_counts, merge_provider_counts
from pytest_emad.report.summary import build_run_summary
from pytest_emad.report.tiers import OPTIONAL, required_tier_test_cases
from pytest_emad.run.decoder_providers import features_required_by_request
from tests.unit.report.sample_report import foreign_report, passed

SAMPLING = "suites/fidelity/test_sampling.py::test_tokens_are_drawn_at_temperatures_that_are_not_round"
MEMORY = "suites/invariants/test_memory.py::test_what_is_closed_or_rolled_back_gives_its_memory_back"
BRIDGE = "suites/fidelity/test_bridge.py::test_teacher_forced_depths_and_losses_are_replays"
GREEDY, POSITIONS = (name for name, _ in required_tier_test_cases("tokens") if "greedy" in name or "positions" in name)


def declined_call(name, case="m"):
    kind = {"outcome": "skipped", "kind": "refused", "reason": "not today"}
    return passed(name) | kind | {"nodeid": f"{name}[{case}]"}


def declined(name, case="m", *features):
    return declined_call(name, case) | {"features": list(features)}


def judged(tests, features, gate="decoder"):
    provider = {"name": "mine", "plugin": "mine", "foreign": True, "answered": 9, "declined": 3, "none": 0}
    decoder = {"name": "mine", "foreign": True, "providers": [provider | {"features": features}], "overlooked": []}
    settings = {"models": [], "gate": gate}
    return foreign_report(
        tests=tests, decoder=decoder, settings=settings, audits=[], waivers=[], deselected=[], claims=[]
    )


def gaps(tests, features, gate="decoder"):
    return [
        gap.of
        for gap in find_gaps(judged(tests, features, gate), [test["shipped"] for test in tests], list_shipped_tests())
    ]


def test_a_feature_that_is_always_declined_is_not_offered():
    tests = [declined(SAMPLING, "m", "exits", "sampling")]
    assert gaps(tests, {"sampling": [0, 2], "exits": [5, 2]}) == []
    assert gaps(tests, {"sampling": [0, 2], "exits": [5, 2]}, gate="paper") == [SAMPLING]


def test_a_feature_that_is_declined_in_places_is_offered():
    assert gaps([declined(SAMPLING, "m", "sampling")], {"sampling": [1, 2]}) == [SAMPLING]
    assert gaps([declined(BRIDGE, "m", "exits")], {"exits": [1, 2]}) == [BRIDGE]


def test_a_request_for_nothing_beyond_full_depth_may_not_be_declined():
    for counted in ({}, {"exits": [0, 3]}, {"exits": [0, 3], "sampling": [0, 1]}):
        for refused in (declined, declined_call):
            assert gaps([refused(GREEDY)], counted) == [GREEDY]
            assert gaps([refused(POSITIONS, "m-full-far")], counted) == [POSITIONS]
        assert gaps([declined(MEMORY)], counted) == [MEMORY], "a hard case at full depth"


def test_without_exits_sampling_that_is_declined_in_places_is_offered():
    assert gaps([declined(SAMPLING, "m", "sampling")], {"exits": [0, 3], "sampling": [1, 2]}) == [SAMPLING]


def test_without_exits_what_a_call_declines_may_stay_open():
    tests = [declined(BRIDGE, "m", "exits"), declined(POSITIONS, "m-probing-far", "exits"), declined_call(MEMORY)]
    assert gaps(tests, {"exits": [0, 3]}) == []
    assert gaps(tests, {}) == [BRIDGE, POSITIONS, MEMORY]


def test_what_is_not_offered_is_told():
    about = build_run_summary(judged([declined(SAMPLING, "m", "sampling")], {"sampling": [0, 2]})).about
    assert "the decoder does not offer sampling: 1 tests do not apply" in about


@pytest.mark.parametrize("gate", ["decoder", "paper"])
@pytest.mark.parametrize("feature", ["streaming", "requests at once"])
def test_what_no_decoder_owes_may_be_declined_under_each_gate_but_not_in_places(feature, gate):
    test, *_ = OPTIONAL[feature]
    tests = [declined(test, "m", feature)]
    assert gaps(tests, {feature: [0, 2]}, gate) == []
    assert gaps(tests, {feature: [1, 2]}, gate) == [test]
    about = build_run_summary(judged(tests, {feature: [0, 2]}, gate)).about
    assert f"the decoder does not offer {feature}: 1 tests do not apply" in about


def test_features_and_requests_of_several_processes_are_added_up():
    one = {"name": "mine", "plugin": "mine", "foreign": True, "answered": 1, "declined": 1, "none": 0}
    parts = [
        [one | {"features": {"exits": [0, 1]}, "requests": 4}],
        [one | {"features": {"exits": [2, 0], "sampling": [0, 1]}, "requests": 2, "served": {"model": "x"}}],
        [one | {"retries": 3, "retry_reasons": {"status 503": 2, "connection reset": 1}}],
        [one | {"retries": 1, "retry_reasons": {"status 503": 1}, "requests": 1}],
    ]
    (found,) = merge_provider_counts(parts)
    assert found["features"] == {"exits": [2, 1], "sampling": [0, 1]}
    assert declined_features([found]) == {"sampling"}
    assert format_request_counts(found) == "7 requests, 4 retried (1 connection reset, 3 status 503); it serves model x"
    report = judged([], {})
    report["decoder"]["providers"][0] |= {"requests": 7, "served": {"path": "/completion", "model": "x", "window": 64}}
    assert "mine: 7 requests, 0 retried; it serves model x, window 64" in build_run_summary(report).about


@pytest.mark.parametrize(
    ("point", "temperature", "asked"),
    [
        (full_depth(4), 0.0, ()),
        (full_depth(4), 0.7, ("sampling",)),
        (truncated(4, 2), 0.0, ("exits",)),
        (OperatingPoint("p", "f", 4, 4, (2,), ((0.5,),)), 0.0, ("exits",)),
        (
            OperatingPoint("p", "f", 4, 4, (2,), ((0.5,),), "free_eager"),
            1.0,
            ("exits", "schedule free_eager", "sampling"),
        ),
        (OperatingPoint("p", "f", 4, 4, (2,), ((0.5,),), interpolate=True), 0.0, ("exits", "interpolate")),
    ],
)
def test_a_request_names_what_it_asks_beyond_greedy_full_depth(point, temperature, asked):
    assert features_required_by_request(SimpleNamespace(point=point, temperature=temperature)) == asked
