"""``emad verify`` accepts a complete, green report, and names each fault of any other."""

from __future__ import annotations

import pytest

from pytest_emad import cli
from pytest_emad.claims.base import find_question_of_claim
from pytest_emad.report.deselection import (
    ABOVE_BUDGET,
    SUITES,
    is_in_selection,
    list_shipped_tests,
    path_below_suites,
    suite_folder_names,
)
from pytest_emad.report.gaps import DECIDING_TESTS, find_gaps
from pytest_emad.report.known_gaps import known_gap_mark
from pytest_emad.report.verification import find_contradictions, find_proof_shortfalls
from tests.unit.report.sample_report import foreign_report, passed, verdict, written

SHIPPED = list_shipped_tests()
INVARIANT = "suites/invariants/test_depth.py::test_signals_depths_and_ledger_are_the_rules"


def whole(*, settings=(), **changes):
    """Return a report of every shipped test, as a smoke run of a foreign decoder writes it."""
    tests = [passed(name) for name in SHIPPED]
    verdicts = [verdict("survived", claim) | {"gate": True} for claim in DECIDING_TESTS]
    made = foreign_report(tests=tests, claims=verdicts, settings=dict(settings), waivers=[], deselected=[]) | changes
    audits = [audit(test["nodeid"]) for test in made["tests"] if isinstance(test, dict)]
    return made | {"audits": audits} | changes


def audit(nodeid, **changes):
    return {"test": nodeid, "check": "rows", "passed": True, "detail": "as seen", "n": 3, "ties": 0} | changes


def with_test(name, **changes):
    return whole(tests=[passed(name, **changes) if test == name else passed(test) for test in SHIPPED])


def verified(folder, capsys, data, *options):
    """Return (exit status, output)."""
    status = cli.main(["verify", str(written(folder, data)), *options])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_the_shipped_tests_are_those_of_the_suites():
    assert INVARIANT in SHIPPED
    assert len(SHIPPED) > 25
    assert set(suite_folder_names()) == {"ablations", "claims", "cost", "fidelity", "invariants"}
    assert path_below_suites(SUITES[0] / "cost" / "test_claims.py") == "suites/cost/test_claims.py"
    assert path_below_suites(SUITES[1] / "cost") == "suites/cost"
    assert path_below_suites(SUITES[0].parent / "tests") is None
    assert is_in_selection(INVARIANT, ["suites/invariants"])
    assert is_in_selection(INVARIANT, [INVARIANT])
    assert not is_in_selection(INVARIANT, ["suites/invariant", "suites/invariants/test_dept", f"{INVARIANT}_too"])


def test_the_rows_that_must_be_decided_are_asked_where_the_table_says():
    for claim, test in DECIDING_TESTS.items():
        assert test in SHIPPED
        assert test.startswith(f"suites/{find_question_of_claim(claim).suite}/")


def test_a_whole_report_is_believed(tmp_path, capsys):
    for options in ([], ["--require-suite", "all"], ["--require-suite", "invariants,fidelity"],
                    ["--expect-decoder", "foreign"], ["--expect-decoder", "mylib"]):  # fmt: skip
        status, said = verified(tmp_path, capsys, whole(), *options)
        assert status == 0, said
        assert f"complete, {len(SHIPPED)} tests passed; decoder: hook of plugin mylib (mylib)" in said
    assert cli.main(["verify", str(tmp_path / "report.json")]) == 0


def test_a_premise_or_an_extra_that_is_absent_is_no_fault(tmp_path, capsys):
    for changes in ({"outcome": "skipped", "kind": "not applicable"}, {"outcome": "xpassed"}):
        assert verified(tmp_path, capsys, with_test(INVARIANT, **changes))[0] == 0
    table = "suites/claims/test_tables.py::test_table"
    assert verified(tmp_path, capsys, with_test(table, outcome="skipped", kind="refused"))[0] == 0
    file = INVARIANT.partition("::")[0]
    others = [passed(name) for name in SHIPPED if not name.startswith(file)]
    absent = passed(file, outcome="skipped", kind="not applicable", reason="the extra is not installed")
    assert verified(tmp_path, capsys, whole(tests=[*others, absent]))[0] == 0
    above = {"nodeid": f"{INVARIANT}[m]", "shipped": INVARIANT, "why": ABOVE_BUDGET}
    less = [passed(name) for name in SHIPPED if name != INVARIANT]
    assert verified(tmp_path, capsys, whole(tests=less, deselected=[above]))[0] == 0


PAIRS = "suites/invariants/test_pairs.py::test_every_pair_of_values_is_asked_and_answered"
RUN, DECODER = whole()["run"], whole()["decoder"]
LESS = [passed(name) for name in SHIPPED if name != INVARIANT]
OURS = DECODER["providers"][0] | {"plugin": "emad-walked", "name": "reference (ours)", "foreign": False}
FAULTY = [
    (whole(state="running", run=RUN | {"exit_status": None}), "state='running', but expected 'complete'"),
    (whole(state="interrupted"), "state='interrupted'"),
    (whole(run=RUN | {"exit_status": 1}), "exit_status=1, but expected 0"),
    (whole(run=RUN | {"failures": ["goldens updated"]}), "the run failed as a whole: goldens updated"),
    (with_test(INVARIANT, outcome="failed", reason="assert 1\nmore"), f"{INVARIANT}[m]: failed (assert 1)"),
    (with_test(INVARIANT, outcome="xfailed", reason="flaky"), f"{INVARIANT}: marked as an expected failure (flaky): m"),
    (with_test(INVARIANT, outcome="skipped", kind="left out"), f"{INVARIANT}: skipped by a mark, a fixture or a hook"),
    (
        with_test(INVARIANT, outcome="skipped", kind="refused", reason="no"),
        f"{INVARIANT}: the decoder declined (no): m",
    ),
    (with_test(INVARIANT, outcome="not reported"), f"{INVARIANT}: collected, but never run: m"),
    (
        whole(audits=[*whole()["audits"], audit(f"{PAIRS}[m]", passed=None, live={"unanswered_pairs": 2})]),
        f"{PAIRS}[m]: as seen",
    ),
    (whole(tests=LESS), f"{INVARIANT}: no test of it was collected"),
    (
        whole(deselected=[{"nodeid": f"{INVARIANT}[n]", "shipped": INVARIANT, "why": "deselected"}]),
        f"{INVARIANT}: deselected: n; let it run",
    ),
    (
        whole(claims=[verdict("survived", claim) for claim in list(DECIDING_TESTS)[1:]]),
        "EMAD-E2: not decided for m: no verd",
    ),
    (
        whole(claims=[verdict("not applicable", claim) | {"refused": "busy"} for claim in DECIDING_TESTS]),
        "EMAD-F2: not decided for m: not applicable (busy)",
    ),
    (whole(decoder=DECODER | {"providers": [*DECODER["providers"], OURS]}), "decoder: ours answered 3 of 6 requests"),
    (
        whole(decoder=DECODER | {"foreign": False, "providers": [OURS], "overlooked": ["conftest.py"]}),
        "decoder: ours was judged, although conftest.py offers one",
    ),
]


@pytest.mark.parametrize(("data", "said"), FAULTY, ids=[said[:50] for _, said in FAULTY])
def test_each_fault_is_named(tmp_path, capsys, data, said):
    status, text = verified(tmp_path, capsys, data)
    assert status == 1
    assert f"{tmp_path}: {said}" in text


F1 = verdict("falsified", "EMAD-F1") | {"test": f"{INVARIANT}[m]", "fails": True}
OTHERS = [verdict("survived", claim) | {"gate": True} for claim in DECIDING_TESTS if claim != "EMAD-F1"]
SURE = verdict("survived", "EMAD-F1") | {"gate": True}
TRIED = [{"outcome": "failed", "reason": "Failed: wrong"}, {"outcome": "passed", "reason": ""}]
REPEAT = {"id": "EMAD-F1", "model": "m", "verdict": "survived", "gate": True, "fails": False, "attempt": 2}
CONTRADICTORY = [
    ({"claims": [F1, *OTHERS]}, "EMAD-F1 of m is falsified and fails the run, but its test"),
    (
        {"claims": [F1 | {"gate": False}, *OTHERS]},
        "EMAD-F1 of m gates by the register, but is recorded with gate=false",
    ),
    (
        {"claims": [verdict("falsified", "EMAD-F1"), *OTHERS]},
        "EMAD-F1 of m is falsified and fails the run, but exit_status=0 and its test is not on record",
    ),
    (
        {
            "claims": [F1 | {"verdict": "inconclusive", "fails": False}, *OTHERS],
            "settings": {"inconclusive": "fail"},
        },
        "EMAD-F1 of m is inconclusive and fails the run",
    ),
    ({"audits": [audit("t")]}, "audit rows is of t, but no such test is on record"),
    ({"audits": []}, "passed, but put no audit and no verdict on record: that is no pass"),
    (
        {"repeats": [REPEAT | {"test": f"{INVARIANT}[m]", "alike": True}]},
        "EMAD-F1 of m was decided 2 times (survived, then survived)",
    ),
]
OF_ONE_TEST = [  # outcome of its entry, outcome of its audit, the message about both
    ({}, {"passed": False}, f"{INVARIANT}: passed, although audit rows refuted it (as seen)"),
    ({"outcome": "xfailed", "reason": "flaky"}, {"passed": False}, f"{INVARIANT}: xfailed, although audit rows"),
    ({"outcome": "skipped", "kind": "not applicable"}, {"passed": False}, f"{INVARIANT}: skipped, although audit rows"),
    ({"outcome": "failed"}, {}, "reported as failed, although every verdict and audit of it holds and no reason is"),
    ({"outcome": "failed", "reason": "wrong"}, {}, f"exit_status=0, although {INVARIANT}[m] failed"),
    ({"attempts": TRIED}, {}, "its first attempt ended as failed (Failed: wrong), then passed; the first attempt co"),
    ({"attempts": TRIED[:1]}, {}, "its body ended as failed (Failed: wrong); find the mark, hook or plugin"),
    ({"attempts": [{"outcome": "not reported", "reason": ""}]}, {}, "its body never ended; find the mark, hook"),
]


@pytest.mark.parametrize(("changes", "said"), CONTRADICTORY, ids=[said[:50] for _, said in CONTRADICTORY])
def test_a_report_that_contradicts_itself_is_refused(tmp_path, capsys, changes, said):
    waiver = {"of": INVARIANT, "reason": "next week", "needed": True}
    status, text = verified(tmp_path, capsys, whole(waivers=[waiver], **({"claims": [SURE, *OTHERS]} | changes)))
    assert status == 1
    assert f"{tmp_path}: " in text
    assert said in text


@pytest.mark.parametrize(("entry", "found", "said"), OF_ONE_TEST, ids=[said[:50] for *_, said in OF_ONE_TEST])
def test_outcome_and_audit_of_a_test_must_agree_each_way(tmp_path, capsys, entry, found, said):
    data = with_test(INVARIANT, **entry)
    data["audits"] = [one | found if one["test"] == f"{INVARIANT}[m]" else one for one in data["audits"]]
    waiver = {"of": INVARIANT, "reason": "next week", "needed": True}
    status, text = verified(tmp_path, capsys, data | {"waivers": [waiver]})
    assert status == 1
    assert said in text


def test_what_agrees_is_no_contradiction():
    """A verdict recorded as falsified under gate ``known``, the same fact twice, a shown table."""
    table = "suites/claims/test_tables.py::test_table"
    tests = [passed(table, shown=1) if name == table else passed(name) for name in SHIPPED]
    audits = [audit(f"{name}[m]") for name in SHIPPED if name != table]
    alike = REPEAT | {"test": f"{INVARIANT}[m]", "alike": True, "attempt": 1}
    known = {"models": ["m"], "gate": "known"}
    claims = [F1 | {"fails": False}, *OTHERS]
    assert find_contradictions(whole(tests=tests, audits=audits, claims=claims, settings=known, repeats=[alike])) == []
    failed = whole(tests=[passed(INVARIANT, outcome="failed", reason="x")], claims=[F1], run=RUN | {"exit_status": 1})
    assert find_contradictions(failed | {"audits": [audit(f"{INVARIANT}[m]", passed=False)]}) == []


def test_what_was_not_asked_of_the_run_is_asked_here(tmp_path, capsys):
    some = [passed(name) for name in SHIPPED if name.startswith("suites/invariants")]
    partly = whole(
        tests=some, claims=[verdict("survived", "EMAD-E2") | {"gate": True}], run=RUN | {"asked": ["suites/invariants"]}
    )
    assert verified(tmp_path, capsys, partly)[0] == 0
    assert verified(tmp_path, capsys, partly, "--require-suite", "invariants")[0] == 0
    status, text = verified(tmp_path, capsys, partly, "--require-suite", "invariants,fidelity")
    assert status == 1
    missing = [name for name in SHIPPED if name.startswith("suites/fidelity")]
    counted = f"{len(missing)} test functions: no test of them was collected ({', '.join(missing[:3])} and "
    assert f"{counted}{len(missing) - 3} more); let them run, or --emad-waive FILE=REASON for each file" in text
    assert "EMAD-F1" not in text
    assert "EMAD-F1: not decided for m" in verified(tmp_path, capsys, partly, "--require-suite", "all")[1]


def test_what_one_option_left_out_is_one_line_with_a_count():
    some = [name for name in SHIPPED if name.startswith("suites/invariants")]
    left = [
        {"nodeid": f"{name}[{number}]", "shipped": name, "why": "left out by --emad-only", "claim": None}
        for name in some
        for number in (1, 2)
    ]
    report = whole(tests=[], claims=[], deselected=left, run=RUN | {"asked": ["suites/invariants"]})
    lines = [line for line in find_proof_shortfalls(report, [], SHIPPED, None) if "left out" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{2 * len(some)} tests of {len(some)} functions: left out by --emad-only ({some[0]}, ")


def test_a_decoder_that_was_required_must_have_been_judged(tmp_path, capsys):
    ours = whole(decoder={"name": OURS["name"], "foreign": False, "providers": [OURS], "overlooked": []})
    assert verified(tmp_path, capsys, ours)[0] == 0
    for wanted in ("foreign", "mylib"):
        status, text = verified(tmp_path, capsys, ours, "--expect-decoder", wanted)
        assert status == 1
        assert f"--expect-decoder {wanted}: reference (ours) was judged" in text
    assert verified(tmp_path, capsys, whole(), "--expect-decoder", "ours")[0] == 1


def test_our_own_decoder_proves_no_more_by_leaving_out(tmp_path, capsys):
    """A gap that a run of the reference decoder may leave open is a gap nevertheless."""
    ours = {"name": OURS["name"], "foreign": False, "providers": [OURS], "overlooked": []}
    assert find_gaps(whole(tests=LESS, decoder=ours), ["suites"], SHIPPED) == []
    assert verified(tmp_path, capsys, whole(tests=LESS, decoder=ours))[0] == 1


def test_a_waiver_that_is_on_record_counts(tmp_path, capsys):
    waiver = {"of": INVARIANT, "reason": "next week", "needed": True}
    status, said = verified(tmp_path, capsys, whole(tests=LESS, waivers=[waiver]), "--require-suite", "all")
    assert status == 0
    assert f"waived {INVARIANT}: next week" in said


def test_what_cannot_be_verified_is_refused(tmp_path, capsys):
    for data, options, expected, said in (
        (
            whole(),
            ["--require-suite", "speed"],
            4,
            "--require-suite='speed', but expected all, or a comma list of ablations",
        ),
        (whole(state="running"), [], 1, "state='running', but expected 'complete'"),
    ):
        status, text = verified(tmp_path, capsys, data, *options)
        assert status == expected
        assert said in text
    assert cli.main(["verify", str(tmp_path / "none")]) == 4
    assert "cannot be read" in capsys.readouterr().err


def known_gap(**changes):
    """Return a report in which one test failed as its author expects."""
    made = with_test(INVARIANT, outcome="xfailed", attempts=[{"outcome": "failed", "reason": "AssertionError"}])
    made["settings"]["known_gaps"] = {INVARIANT: "the ledger counts pads"}
    made["tests"] = [test | known_gap_mark(test, made["settings"]) for test in made["tests"]]
    made["audits"] = [
        each | {"passed": False} if each["test"].startswith(INVARIANT) else each for each in made["audits"]
    ]
    return made | changes


def test_a_known_gap_is_no_fault_and_is_said_to_be_unproven(tmp_path, capsys):
    status, said = verified(tmp_path, capsys, known_gap())
    assert status == 0, said
    assert "complete but for 1 known gap, " in said
    assert f"not proven: known gap {INVARIANT}: the ledger counts pads" in said
    unlisted = known_gap()
    unlisted["settings"]["known_gaps"] = {}
    status, said = verified(tmp_path, capsys, unlisted)
    assert status == 1
    assert f"reported as known gap '{INVARIANT}', but no such test is listed and failed by itself" in said


@pytest.mark.parametrize("attempts", [[], [{"outcome": "passed", "reason": ""}], [{"outcome": "error", "reason": ""}]])
def test_a_listed_test_that_did_not_fail_itself_is_no_known_gap(tmp_path, capsys, attempts):
    made = known_gap()
    for test in made["tests"]:
        if test["shipped"] == INVARIANT:
            test["attempts"] = attempts
            assert known_gap_mark(test, made["settings"]) == {}
            del test["known_gap"]
    status, said = verified(tmp_path, capsys, made)
    assert status == 1
    assert "known gap" not in said
