"""The fixture ``emad_accuracy``: a comparison of two finished evaluations that fails a user's test."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emad_ref.errors import EmadError

if TYPE_CHECKING:
    from pytest_emad.accuracy.comparison import AccuracyComparison

WIDTH = 110  # letters in a line of a message
ITEMS = 3  # lost and gained items in a message


class AccuracyWarning(pytest.PytestWarning):
    """A comparison of two evaluations that its items could not decide."""


class AccuracyGate:
    """Called with two evaluations, it fails the test, warns, or passes; see ``fixtures.emad_accuracy``."""

    def __init__(self, inconclusive: str) -> None:
        self._inconclusive = inconclusive

    def __call__(
        self, base: str | Path, candidate: str | Path, margin: float = 0.01, **options: Any
    ) -> AccuracyComparison:
        from pytest_emad.accuracy.comparison import compare_accuracy
        from pytest_emad.accuracy.summary import format_comparison_summary

        try:
            comparison = compare_accuracy(base, candidate, margin, **options)
        except EmadError as error:
            pytest.fail(str(error), pytrace=False)
        if comparison.verdict == "survived":
            return comparison
        message = format_comparison_summary(comparison, WIDTH, ITEMS)
        if comparison.verdict == "falsified":
            pytest.fail(message, pytrace=False)
        if self._inconclusive == "fail":
            pytest.fail(f"{message}\n\n--emad-inconclusive fail is set.", pytrace=False)
        warnings.warn(AccuracyWarning(comparison.headline), stacklevel=2)
        return comparison
