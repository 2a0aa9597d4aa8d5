"""Every row of the register has a claim, and every claim is decided on simulated data of known truth."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from emad_ref.record import Floats
from pytest_emad.claims import learned_exits, quality
from pytest_emad.claims.base import find_question_of_claim
from pytest_emad.measurements.study import Study
from pytest_emad.statistics import fronts, rates
from pytest_emad.statistics.verdicts import load_register
from tests.claims import cases
from tests.claims.simulation import Case, Truth, hold

REGISTER = load_register()
BOTH_WAYS: set[Truth] = {"holds", "fails"}
LAYERS = 12  # name of the model for which statistical legs are counted
SAMPLES = 1_999  # bootstrap samples: p-values down to 1/2,000 decide every leg here; `tox -e rates` draws all


@cache
def simulations() -> dict[str, list[Case]]:
    """Return the cases of every claim."""
    modules = [import_module(module.name) for module in iter_modules(cases.__path__, f"{cases.__name__}.")]
    return {claim: found for module in modules for claim, found in module.CASES.items()}


def simulated() -> list[ParameterSet]:
    """Give one parameter per case; another test names a claim without cases."""
    return [
        pytest.param(claim, case, id=f"{claim}: {case.name}")
        for claim in REGISTER
        for case in simulations().get(claim, [])
    ]


@pytest.mark.parametrize("claim", REGISTER)
def test_the_row_has_a_question_and_a_simulation(claim: str) -> None:
    question = find_question_of_claim(claim)
    assert question.claim == claim
    assert inspect.signature(question.answer).return_annotation == "Answer"
    truths = {case.truth for case in simulations().get(claim, [])}
    if REGISTER[claim].kind == "report":
        assert "value" in truths or truths >= BOTH_WAYS, f"only {sorted(truths)}"
        return
    # without a statistical leg (integers, bounds of rounding) there is no error at the threshold
    edge: set[Truth] = {"edge"} if question.legs(Study(), LAYERS) else set()
    assert truths >= BOTH_WAYS | edge, f"only {sorted(truths)}"


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a fifth of a run's bootstrap samples, which take most of the time here."""

    def drawn(documents: int, resamples: int, rng: np.random.Generator) -> Floats:
        return document_draws(documents, min(resamples, SAMPLES), rng)

    document_draws = rates.draw_document_counts
    for module in (rates, fronts, learned_exits, quality):
        monkeypatch.setattr(module, "draw_document_counts", drawn)


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize(("claim", "case"), [each for each in simulated() if each.values[1].sampled])
def test_the_verdict_is_what_the_truth_allows(claim: str, case: Case) -> None:
    hold(claim, find_question_of_claim(claim).decide, case)
