"""A foreign decoder under the suites: an honest one passes all of them, a defective one fails by name.

The conftest of the project under test provides the decoder, as an accelerator team would.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_emad.report.schema import read_report
from tests.suites.conftest import Run, only, text_of, verdicts_of

HONEST = """
from emad_ref.protocol import Unsupported
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.decoders.audited_model import require_entropy_thresholds

def pytest_emad_make_decoder(config, request):
    if request.temperature:
        raise Unsupported("greedy only")
    require_entropy_thresholds(request.point)
    return ForeignDecoder(request.model.load().model, request.point)
"""
DEFECTIVE = """
from tests.decoders.planted_defects import DEFECTS

def pytest_emad_make_decoder(config, request):
    return DEFECTS[{defect!r}][0](request.model.load().model, request.point)
"""
DECLINING = """
from emad_ref.protocol import Unsupported

def pytest_emad_make_decoder(config, request):
    raise Unsupported("this part has no room for that model")
"""
# claims that take seconds through a decoder without a cache
DECIDED = ("E1", "E3", "E5", "E9", "E11", "E13", "F1", "F1-literal", "R1", "R2", "R3", "R4")
# suites that take minutes with it, or are about the bundled pair; and features that it lacks
WAIVED = {
    "suites/claims/test_model.py": "some rows take minutes without a cache",
    "suites/cost/test_claims.py": "the same",
    "suites/invariants/test_speculative.py": "about a pair of bundled models",
    "suites/fidelity/test_golden_pair.py": "the same",
    "suites/fidelity/test_sampling.py": "it decodes greedily alone",
    "EMAD-F2": "a decoder without a cache is not timed",
    "EMAD-E5": "it does not count its work",
}
DECISIONS = ("invariants/test_depth.py", "fidelity/test_bridge.py")
PLANTED = {  # defect → suites, and words that their run must print
    "stale K/V after rollback": (("invariants/test_pairs.py",), "audit pairs of sessions:"),
    "position off by one": (DECISIONS, "audit decisions:"),
    "depth rises behind a false cap": (DECISIONS, "audit decisions:"),
    "full-depth tokens in generate only": (DECISIONS, "audit generation:"),
    "batch-wide exit": (DECISIONS, "audit decisions:"),
}


@pytest.mark.slow  # every suite; honest decoders of other makes pass them in test_mutants.py
def test_an_honest_foreign_decoder_passes_every_suite(
    pytester: pytest.Pytester, judge_apart: Run, tiny: Path, ungated: Path
) -> None:
    pytester.makeconftest(HONEST)
    waivers = [f"--emad-waive={of}={reason}" for of, reason in WAIVED.items()]
    result = judge_apart(
        "invariants", "fidelity", "claims/test_model.py", "cost/test_claims.py::test_claim",
        more=(".", *waivers, *only(*(f"EMAD-{name}" for name in DECIDED))), model=tiny, register=ungated, report="out",
    )  # fmt: skip
    outcomes = result.parseoutcomes()
    assert result.ret == pytest.ExitCode.OK, text_of(result)
    assert outcomes["passed"] >= 15
    assert set(outcomes) <= {"passed", "skipped", "deselected", "warnings", "warning"}
    verdicts = verdicts_of(pytester.path / "out")
    assert verdicts["EMAD-E2"]["verdict"] == "survived"
    assert verdicts["EMAD-E5"]["verdict"] == "not applicable"
    assert "does not count" in verdicts["EMAD-E5"]["refused"]
    report = read_report(pytester.path / "out")
    assert report["decoder"]["name"] == f"hook of {pytester.path / 'conftest.py'}"
    declined = {entry["shipped"] for entry in report["tests"] if entry["kind"] == "refused"}
    sampled = {"suites/fidelity/test_sampling.py", "suites/invariants/test_requests.py"}
    assert {name.partition("::")[0] for name in declined} == sampled
    assert report["run"]["failures"] == []
    assert [waiver["of"] for waiver in report["waivers"] if waiver["needed"]] == list(WAIVED)
    assert {"bridge", "pairs of requests", "pairs of sessions"} <= {audit["check"] for audit in report["audits"]}


# One stays in CI: tests/suites/test_planted_defects.py has a defect of each of these kinds.
@pytest.mark.parametrize(
    "defect", [pytest.param(one, marks=[] if one == "batch-wide exit" else [pytest.mark.slow]) for one in PLANTED]
)
def test_a_defect_fails_the_suites_by_the_name_of_its_check(
    pytester: pytest.Pytester, judge: Run, tiny: Path, defect: str
) -> None:
    pytester.makeconftest(DEFECTIVE.format(defect=defect))
    suites, words = PLANTED[defect]
    result = judge(*suites, more=(".",), model=tiny)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert words in text_of(result)


def test_the_provider_must_be_chosen_where_there_are_two(pytester: pytest.Pytester, judge: Run, tiny: Path) -> None:
    pytester.makeconftest(HONEST)
    pytester.makepyfile(second=DECLINING)
    pytester.syspathinsert()
    result = judge("invariants", more=(".", "-p", "second"), model=tiny)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--emad-backend=None, but expected one of" in text_of(result)


def test_a_decoder_that_declines_is_not_applicable(pytester: pytest.Pytester, judge: Run, tiny: Path) -> None:
    pytester.makeconftest(DECLINING)
    result = judge("invariants/test_kv_consistency.py", more=(".",), model=tiny, report="out", expect_decoder="foreign")
    result.assert_outcomes(passed=1)
    verdict = verdicts_of(pytester.path / "out")["EMAD-E2"]
    assert (verdict["verdict"], verdict["reason"]) == ("not applicable", "this part has no room for that model")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    said = f"FAILED: EMAD-E2: not decided for {tiny}: not applicable (this part has no room for that model)"
    assert said in " ".join(text_of(result).split())
