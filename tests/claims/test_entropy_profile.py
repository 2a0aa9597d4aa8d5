"""EMAD-E1: the rows listed with the entropy steps, and the minimum number of documents."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.claims.base import ClaimContext
from pytest_emad.claims.entropy_premises import decide_entropy_profile
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Verdict, load_register


def judged(steps: list[float], n: int = 150) -> Verdict:
    source = np.random.default_rng(2)
    tokens = source.integers(50, 200, n)
    means = 5 + np.concatenate([[0], np.cumsum(steps)])
    sums = tokens[:, None] * (means + 0.02 * source.standard_normal((n, len(means))))
    asked = ClaimContext(load_register()["EMAD-E1"], "m", np.random.default_rng(5))
    return decide_entropy_profile(
        (ByDocument.from_whole_documents(sums), ByDocument.from_whole_documents(tokens)), asked
    )


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [([-1.0, -0.5, -0.2], "survived"), ([-1.0, 0.3, -0.9], "falsified"), ([-1.0, 0.0, -0.5], "inconclusive")],
)
def test_the_slope_over_all_layers_reports_and_decides_nothing(steps, outcome):
    verdict = judged(steps)
    assert verdict.verdict == outcome
    assert (verdict.legs[-1].name, verdict.legs[-1].outcome) == ("slope over all layers", "measured")
    assert verdict.legs[-1].estimate == pytest.approx(np.polyfit(range(4), np.cumsum([0, *steps]), 1)[0], abs=0.02)


def test_a_rise_is_named_with_its_size():
    verdict = judged([-1.0, 0.3, -0.9])
    assert "layer 2 → 3" in verdict.reason
    assert verdict.estimate == pytest.approx(0.3, abs=0.02)


def test_below_thirty_documents_it_is_inconclusive():
    assert judged([-1.0, 1.0], n=29).verdict == "inconclusive"
    assert judged([-1.0, 1.0], n=40).verdict == "falsified"  # unequal lengths: the effective number is lower
