"""Each mutant in a run of its own: its check complains in the expected words; of an honest one no check complains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_emad.report.deselection import list_shipped_tests, suite_folder_names
from tests.forked_python import run_pytest
from tests.mutants.cache_defects import PAIRS
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.complaints import CheckComplaint, is_expected_complaint, iterate_run_complaints
from tests.mutants.mutant import RUN, VERIFY
from tests.mutants.provider import OPTION
from tests.suites.conftest import ROOT, SUITES, text_of

PROVIDER = "tests.mutants.provider"
# One for each detector stays in CI, and one that needs a whole run; test_planted_defects.py calls the tests of most.
OFTEN = ("kv-of-other-rows", "judge-weight", "exits-process", "refuses-everything")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in CATALOGUE]
)
def test_a_mutant_is_caught_by_its_check_and_an_honest_decoder_by_none(pytester: pytest.Pytester, name: str) -> None:
    """``--emad-expect-decoder``: a run of part of the suites still has to prove something."""
    mutant = CATALOGUE[name]
    case = f"[{mutant.model}-{mutant.case}]" if mutant.case.startswith("EMAD") or mutant.test == PAIRS else ""
    paths = [f"{SUITES / test}{case}" for test in mutant.test.split()]
    planted = ["-p", PROVIDER, OPTION, name, "--emad-backend", PROVIDER, "--emad-expect-decoder", PROVIDER]
    ours = [f"-c{ROOT / 'pyproject.toml'}", "-pno:cacheprovider", "--emad-model", mutant.model, "--emad-report", "out"]
    said = text_of(run_pytest(pytester, *ours, *planted, *paths))
    found = list(iterate_run_complaints(pytester.path / "out"))
    if mutant.is_honest:
        assert found == [], said
    else:
        assert any(is_expected_complaint(mutant, complaint) for complaint in found), (found, said)


def test_every_mutant_names_a_test_that_is_shipped() -> None:
    shipped, suites = set(list_shipped_tests()), set(suite_folder_names())
    assert len(CATALOGUE) > 150, "the mutants were not found"
    assert set(OFTEN) <= CATALOGUE.keys()
    for mutant in CATALOGUE.values():
        asked = mutant.test.split()
        assert set(asked) <= suites if mutant.is_honest else f"suites/{mutant.test}" in shipped, mutant.name
        assert mutant.expected_detector in (RUN, VERIFY, f"suites/{mutant.test}")


ENTRY = CATALOGUE["kv-fills-of-zeros"]
COPYING, EAGER = (f"{ENTRY.expected_detector}[m-{case}]" for case in ("copying", "eager"))
SAID = "Failed: audit golden: row 1, new token 4: 3 (2), but the golden has 5 (2)"


def test_only_the_check_that_is_meant_catches() -> None:
    meant = CheckComplaint(ENTRY.expected_detector, COPYING, SAID)
    assert is_expected_complaint(ENTRY, meant)
    wrapped = replace(meant, message=SAID.replace(" ", "\n"))
    assert is_expected_complaint(ENTRY, wrapped), "a gate's message is as wide as a terminal"
    assert not is_expected_complaint(ENTRY, replace(meant, nodeid=EAGER))
    assert not is_expected_complaint(ENTRY, replace(meant, by="suites/other.py::test"))
    assert not is_expected_complaint(ENTRY, replace(meant, message="RuntimeError: out of memory"))
