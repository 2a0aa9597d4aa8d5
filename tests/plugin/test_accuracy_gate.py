"""The fixture ``emad_accuracy`` in a user's suite: it fails, warns or passes by the verdict, and loads no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation_folders import write_choice_pair

SUITE = """
import sys


def test_accuracy_is_kept(emad_accuracy):
    comparison = emad_accuracy({base!r}, {candidate!r}, margin=0.01)
    assert comparison.verdict != "falsified"
    assert not {{"torch", "transformers"}} & set(sys.modules)
"""


def run_suite(
    pytester: pytest.Pytester, numbers: tuple[int, int, int], *options: str, other: str = ""
) -> pytest.RunResult:
    base, candidate = write_choice_pair(pytester.path, *numbers)
    pytester.makepyfile(SUITE.format(base=str(base), candidate=other or str(candidate)))
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


def test_accuracy_that_is_kept_passes_without_a_model(pytester: pytest.Pytester) -> None:
    result = run_suite(pytester, (2000, 5, 5))
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*emad-nano*")


def test_accuracy_that_fell_fails_with_the_table(pytester: pytest.Pytester) -> None:
    result = run_suite(pytester, (2000, 100, 10))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*letters*2,000*falsified*", "FALSIFIED: accuracy falls by at most 1 point*"])


def test_an_open_comparison_warns_or_fails(pytester: pytest.Pytester) -> None:
    result = run_suite(pytester, (400, 8, 4))
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*AccuracyWarning: inconclusive: accuracy falls by at most 1 point; *"])
    result = run_suite(pytester, (400, 8, 4), "--emad-inconclusive", "fail")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["--emad-inconclusive fail is set."])


def test_evaluations_that_cannot_be_compared_fail_with_one_line(pytester: pytest.Pytester) -> None:
    missing = str(Path("nowhere"))
    result = run_suite(pytester, (400, 8, 4), other=missing)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["CANDIDATE='nowhere', but expected*name one that exists*"])
    result.stdout.no_fnmatch_line("*Traceback*")
