"""Merging the reports of parts: the result of one run, and an error for parts of different runs."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_emad.report.deselection import ABOVE_BUDGET, REASON_TEXTS
from pytest_emad.report.gaps import undecided_failure_reasons_and_gaps
from pytest_emad.report.suite_parts import PartsDisagreeError, merge_reports
from tests.unit.report.sample_report import passed, report_2, verdict

OURS = {"name": "reference (ours)", "plugin": "emad-walked", "foreign": False, "answered": 2, "declined": 0, "none": 0}
SETTINGS = {"budget": "smoke", "models": ["m"], "require": [], "gate": "paper", "gate_claims": [], "claims": None} | {
    "update_golden": False, "expect_decoder": None, "report": "out/a",
}  # fmt: skip
PROVENANCE = {"versions": {"torch": "2.11"}, "commit": "f00", "platform": "Linux", "machine": "x", "torch_threads": 1}
ABSENT = {"nodeid": "suites/ablations/test_x.py::test_x[m]", "shipped": None, "claim": None, "why": ABOVE_BUDGET}
ASKED = {"tests": ["suites"], "deselected": [ABSENT]}, ["python", "-m", "reproduce"]


def part(claim: str, test: str, *, run: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    made = report_2(
        **{
            "claims": [verdict("survived", claim)],
            "tests": [passed(f"suites/{test}::test_it")],
            "settings": SETTINGS,
            "provenance": PROVENANCE,
            "points": [],
            "tables": [],
            "notes": ["of both", f"of {claim}"],
            "known": [],
            "deselected": [],
            "audits": [],
            "waivers": [],
            "decoder": {"name": OURS["name"], "foreign": False, "providers": [OURS], "overlooked": []},
        }
        | changes
    )
    return made | {"run": made["run"] | (run or {})}


def test_what_parts_found_is_there_once_and_in_order() -> None:
    first = part("EMAD-E1", "claims/test_a.py", points=[{"model": "m", "name": "p", "mean_depth": 3.0, "role": None}])
    second = part("EMAD-F2", "cost/test_b.py", points=[{"model": "m", "name": "p", "role": "selected"}])
    found = merge_reports({"claims": first, "cost": second}, *ASKED, [])
    assert [claim["id"] for claim in found["claims"]] == ["EMAD-E1", "EMAD-F2"]
    assert [test["nodeid"] for test in found["tests"]] == [
        "suites/claims/test_a.py::test_it[m]", "suites/cost/test_b.py::test_it[m]",
    ]  # fmt: skip
    assert found["points"] == [{"model": "m", "name": "p", "mean_depth": 3.0, "role": "selected"}]
    assert found["notes"][:3] == ["of both", "of EMAD-E1", "of EMAD-F2"]
    assert found["models"] == first["models"]
    assert found["decoder"]["providers"][0]["answered"] == 4
    assert (found["state"], found["run"]["exit_status"], found["run"]["asked"]) == ("complete", 0, ["suites"])
    assert found["run"]["duration_s"] == 123.0
    assert list(found["run"]["parts"]) == ["claims", "cost"]


def test_what_was_not_asked_is_that_of_the_whole() -> None:
    """A part does not run the claims of the others; its notes on that are no notes of the whole."""
    left = {"nodeid": "suites/cost/test_b.py::test_it[m]", "shipped": None, "claim": "EMAD-F2", "why": ABOVE_BUDGET}
    said = 'skipped "Decoding is at least 1.10 times as fast" (EMAD-F2): ' + REASON_TEXTS[ABOVE_BUDGET]
    first = part("EMAD-E1", "claims/test_a.py", deselected=[left], notes=["of it", said])
    found = merge_reports({"claims": first, "cost": part("EMAD-F2", "cost/test_b.py")}, *ASKED, [])
    assert found["deselected"] == [ABSENT]
    assert said not in found["notes"]
    assert found["notes"][-1].startswith("skipped 1 test: slow")


def test_machines_may_differ_and_are_named() -> None:
    other = part("EMAD-F2", "cost/test_b.py", provenance=PROVENANCE | {"machine": "y", "torch_threads": 8})
    found = merge_reports({"claims": part("EMAD-E1", "claims/test_a.py"), "cost": other}, *ASKED, [])
    made = found["provenance"]
    assert (made["platform"], made["machine"], made["torch_threads"]) == ("Linux", "x and y", "1 and 8")


def test_a_model_that_a_part_only_names_is_described_by_another() -> None:
    bare = part("EAD-H1", "claims/test_a.py", models=[{"name": "m"}])
    found = merge_reports({"claims": bare, "cost": part("EMAD-F2", "cost/test_b.py")}, *ASKED, [])
    assert [model["fingerprint"] for model in found["models"]] == ["f00d"]


def test_by_what_a_model_was_walked_is_known_of_one_part_and_told_once() -> None:
    """A part that ran it layer by layer names the backend; the others agree with that part nevertheless."""
    facts = {"name": "m", "fingerprint": "f00d"}
    walked = part("EMAD-F2", "cost/test_b.py", models=[facts | {"ran": "fast, captured graphs"}])
    found = merge_reports({"claims": part("EMAD-E1", "claims/test_a.py", models=[facts]), "cost": walked}, *ASKED, [])
    assert found["models"] == [facts | {"ran": "fast, captured graphs"}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": [{"name": "m", "fingerprint": "beef"}]}, "model m is .*f00d.* in the first and .*beef"),
        ({"provenance": PROVENANCE | {"versions": {"torch": "2.12"}}}, "versions is .*2.11.* in the first and .*2.12"),
        ({"provenance": PROVENANCE | {"extensions": ["x"]}}, r"extensions is None in the first and \['x'\]"),
        ({"provenance": PROVENANCE | {"commit": "bad"}}, "commit is 'f00' in the first and 'bad'"),
        ({"settings": SETTINGS | {"budget": "full"}}, "option budget is 'smoke' in the first and 'full'"),
        ({"run": {"addopts": "-k x"}}, "addopts is '' in the first and '-k x'"),
        ({"decoder": report_2()["decoder"]}, r"decoders is \[\('emad-walked', False\)\] in the first and .*mylib"),
    ],
)
def test_what_parts_do_not_share_is_an_error_that_names_both(changes: dict[str, Any], said: str) -> None:
    """Also if a part between them does not mention it."""
    between = part("EAD-H1", "fidelity/test_c.py", models=[{"name": "m"}])
    first, last = part("EMAD-E1", "claims/test_a.py"), part("EMAD-F2", "cost/test_b.py", **changes)
    with pytest.raises(PartsDisagreeError, match=f"^(claims|fidelity) and cost are parts of one report, but {said}"):
        merge_reports({"claims": first, "fidelity": between, "cost": last}, *ASKED, [])


@pytest.mark.parametrize(
    ("claim", "test", "said"),
    [("EMAD-E1", "cost/test_b.py", "EMAD-E1 of m is in"), ("EMAD-F2", "claims/test_a.py", r"test_it\[m\] is in")],
)
def test_a_claim_or_a_test_that_two_parts_decide_is_an_error(claim: str, test: str, said: str) -> None:
    with pytest.raises(PartsDisagreeError, match=rf"{said} claims and in cost"):
        merge_reports({"claims": part("EMAD-E1", "claims/test_a.py"), "cost": part(claim, test)}, *ASKED, [])


def test_what_a_part_alone_leaves_open_fails_the_whole_only_where_no_part_decides_it() -> None:
    def parts(require: list[str]) -> dict[str, Any]:
        asked = SETTINGS | {"require": require}
        alone = [f"--emad-require {word}: no claim that needs it was decided in this run" for word in require]
        first = part("EMAD-E1", "claims/test_a.py", settings=asked, run={"failures": [*alone[1:]], "exit_status": 1})
        second = part("EMAD-F2", "cost/test_b.py", settings=asked, run={"failures": [alone[0]], "exit_status": 1})
        return {"claims": first, "cost": second}

    found = merge_reports(parts(["quality", "speed"]), *ASKED, [])
    assert (found["run"]["failures"], found["run"]["exit_status"]) == ([], 0)
    found = merge_reports(parts(["quality", "energy"]), *ASKED, [])
    assert found["run"]["failures"] == ["--emad-require energy: no claim that needs it was decided in this run"]
    assert found["run"]["exit_status"] == 1


def test_a_test_that_one_part_leaves_out_is_missing_only_where_no_other_ran_it() -> None:
    """With a foreign decoder, which may leave nothing open."""
    shipped = ["suites/claims/test_a.py::test_it", "suites/claims/test_b.py::test_it"]
    asked = {"asked": ["suites/claims"]}

    def alone(test: str, shipped: list[str]) -> dict[str, Any]:
        made = part(
            "EMAD-E1" if test == "test_a" else "EMAD-F2", f"claims/{test}.py", decoder=report_2()["decoder"], run=asked
        )
        reasons, _ = undecided_failure_reasons_and_gaps(made, shipped, {})
        assert len(reasons) == len(shipped) - 1
        return made | {"run": made["run"] | {"failures": reasons, "exit_status": 1}}

    def whole(shipped: list[str]) -> dict[str, Any]:
        parts = {"claims-rest": alone("test_a", shipped), "claims-measuring": alone("test_b", shipped)}
        run: dict[str, Any] = merge_reports(parts, {"tests": ["suites/claims"], "deselected": []}, [], shipped)["run"]
        return run

    assert (whole(shipped)["failures"], whole(shipped)["exit_status"]) == ([], 0)
    run = whole([*shipped, "suites/claims/test_c.py::test_it"])
    assert ([failure.partition(";")[0] for failure in run["failures"]], run["exit_status"]) == (
        ["suites/claims/test_c.py::test_it: no test of it was collected"],
        1,
    )


def test_what_failed_in_a_part_fails_the_whole() -> None:
    first, second = part("EMAD-E1", "claims/test_a.py"), part("EMAD-F2", "cost/test_b.py")
    failed = second | {"tests": [second["tests"][0] | {"outcome": "failed"}]}
    assert merge_reports({"claims": first, "cost": failed}, *ASKED, [])["run"]["exit_status"] == 1
    said = second | {"run": second["run"] | {"failures": ["--emad-report: no space left"]}}
    found = merge_reports({"claims": first, "cost": said}, *ASKED, [])["run"]
    assert (found["failures"], found["exit_status"]) == (["--emad-report: no space left"], 1)
    stopped = second | {"state": "interrupted"}
    assert merge_reports({"claims": first, "cost": stopped}, *ASKED, [])["state"] == "interrupted"
