"""Measured error rates and power of every row at its threshold: 500 draws of each cell, 5,000 where 500 fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pytest_emad.claims.base import ClaimContext, find_question_of_claim
from pytest_emad.statistics.legs import unmeasured_leg, verdict_from_legs
from pytest_emad.statistics.verdicts import Verdict
from tests.claims import simulation
from tests.claims.cases.early_exit_answers import tuned_exits
from tests.claims.simulated_exits import Cell
from tests.claims.simulation import Case, celled, clustered, hold, hold_rates
from tests.claims.test_simulated_truth import simulated, simulations

MEASURED = [
    pytest.param(*parameter.values, id=parameter.id)
    for parameter in simulated()
    if parameter.values[1].truth in ("edge", "power")
]


@pytest.mark.slow
@pytest.mark.parametrize(("claim", "case"), MEASURED)
def test_the_measured_rates_are_what_the_level_says(claim: str, case: Case) -> None:
    hold_rates(claim, find_question_of_claim(claim).decide, case)


# --- the measurement itself ---------------------------------------------------------------------------------------


def saying(share: float, outcome: str):
    """Return a rule with ``outcome`` in this share of draws, for any input."""

    def decide(found: float, asked: ClaimContext) -> Verdict:
        leg = unmeasured_leg("a", "by lot")
        verdict = verdict_from_legs(asked.claim, asked.model, [leg])
        kind = outcome if found < share else "inconclusive"
        return Verdict(**{**vars(verdict), "verdict": kind})

    return decide


def lots(truth: str, **options) -> Case:
    return Case("lots", truth, lambda rng: rng.random(), **options)


@pytest.mark.parametrize("outcome", ["survived", "falsified"])
def test_a_rule_that_errs_too_often_at_the_edge_is_caught(outcome: str) -> None:
    hold_rates("EMAD-E9", saying(0.045, outcome), lots("edge"))
    with pytest.raises(AssertionError, match="of 5000 draws"):
        hold_rates("EMAD-E9", saying(0.08, outcome), lots("edge"))


def test_a_rule_without_power_is_caught() -> None:
    hold_rates("EMAD-E9", saying(0.83, "falsified"), lots("power"))
    hold_rates("EMAD-E9", saying(0.83, "survived"), lots("power", wanted="survived"))
    with pytest.raises(AssertionError, match="of 5000 draws"):
        hold_rates("EMAD-E9", saying(0.72, "falsified"), lots("power"))
    with pytest.raises(AssertionError, match="of 5000 draws"):
        hold_rates("EMAD-E9", saying(0.9, "survived"), lots("power"))


def test_where_500_draws_say_no_all_5000_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound lies just below the rate of the first 500 draws, so that they alone do not decide."""
    drawn = []

    def decide(found: float, asked: ClaimContext) -> Verdict:
        drawn.append(found)
        return saying(0.05, "falsified")(found, asked)

    first = np.mean([np.random.default_rng([simulation.SEED, draw]).random() < 0.05 for draw in range(500)])
    monkeypatch.setattr(simulation, "MOST", first - 0.001)
    share = np.mean([np.random.default_rng([simulation.SEED, draw]).random() < 0.05 for draw in range(5000)])
    if share <= first - 0.001:
        hold_rates("EMAD-E9", decide, lots("edge"))
    else:
        with pytest.raises(AssertionError, match="of 5000 draws"):
            hold_rates("EMAD-E9", decide, lots("edge"))
    assert len(drawn) == 5000


def test_few_draws_catch_what_is_grossly_wrong() -> None:
    hold("EMAD-E9", saying(0.05, "falsified"), lots("edge", draws=40))
    with pytest.raises(AssertionError, match="at the threshold"):
        hold("EMAD-E9", saying(0.5, "falsified"), lots("edge", draws=40))
    hold("EMAD-E9", saying(0.8, "falsified"), lots("power", draws=40))
    with pytest.raises(AssertionError, match="less than"):
        hold("EMAD-E9", saying(0.2, "falsified"), lots("power", draws=40))
    hold("EMAD-E9", saying(0.0, "falsified"), lots("tied", draws=40))
    with pytest.raises(AssertionError, match="reasons"):
        hold("EMAD-E9", saying(0.1, "survived"), lots("tied", draws=40))


def test_a_rate_of_too_few_units_measures_nothing() -> None:
    decide = find_question_of_claim("EE-13").decide
    (few,) = (
        case for case in simulations()["EE-13"] if case.name == "tuning changes nothing on average; n = 100, ICC 0"
    )
    assert decide is not None
    hold("EE-13", decide, few)
    for truth in ("edge", "power"):
        with pytest.raises(AssertionError, match=r"measures nothing: 30 items, at least 100 are needed"):
            hold("EE-13", decide, replace(few, truth=truth, found=tuned_exits(0.0, cell=Cell(30, 0.0))))


def test_cells_are_named_after_what_they_are_made_of() -> None:
    made = list(celled("a", "edge", lambda n, icc: lambda rng: (n, icc), n=(30, 60), draws=3))
    assert [case.name for case in made] == [f"a; n = {n}, ICC {icc:g}" for n in (30, 60) for icc in (0, 0.3)]
    assert [case.found(np.random.default_rng(0)) for case in made] == [(n, icc) for n in (30, 60) for icc in (0.0, 0.3)]
    assert {case.draws for case in made} == {3}


@pytest.mark.parametrize("icc", [0.0, 0.3])
def test_clustered_values_have_the_correlation_asked_for(icc: float) -> None:
    values, cluster = clustered(np.random.default_rng(0), 4000, 5, icc)
    between = values.reshape(4000, 5).mean(1).var()
    assert values.var() == pytest.approx(1, abs=0.05)
    assert between == pytest.approx(icc + (1 - icc) / 5, abs=0.02)
    assert np.bincount(cluster).tolist() == [5] * 4000
