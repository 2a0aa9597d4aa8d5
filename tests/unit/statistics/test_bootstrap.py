"""Bootstrap samples: their number and their size."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.statistics import rates
from pytest_emad.statistics.rates import draw_document_counts, required_resamples


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_resamples_reach_the_smallest_level_of_any_family():
    for family in (1, 60, 250, 3000):
        assert 1 / (required_resamples(family) + 1) < 0.05 / family
    assert required_resamples(1) == 9_999


@pytest.mark.parametrize(("n", "drawn"), [(2, 2), (5, 2), (30, 20), (200, 172)])
def test_draws_are_somewhat_smaller_than_the_sample_they_come_from(n, drawn):
    draws = draw_document_counts(n, 400, rng())
    assert draws.shape == (400, n)
    assert (draws.sum(1) == drawn).all()
    assert draws.mean(0) == pytest.approx(np.full(n, drawn / n), abs=0.25)
    assert len(np.unique(draws, axis=0)) >= min(3, n)


def test_draws_are_the_same_however_many_are_made_at_once(monkeypatch):
    """Counts and the generator's state after them agree: recorded verdicts were drawn all at once."""
    made = []
    for picks in (1, 100, 10**9):
        monkeypatch.setattr(rates, "PICKS_AT_ONCE", picks)
        source = rng()
        made.append((draw_document_counts(30, 11, source).tolist(), source.bit_generator.state))
    assert made[0] == made[1] == made[2]
