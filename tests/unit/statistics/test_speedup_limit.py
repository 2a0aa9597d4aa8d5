"""The limit of a speedup: the named batch size, the baseline, and the rate of false limits under noise."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.speedup import estimate_total_speedup, find_batch_size_limit
from pytest_emad.statistics.units import ByPair

BATCHES, PAIRS = (1, 2, 4, 8, 16), 12


def ratio(value: float, reach: float = 0.04, n: int = PAIRS) -> Estimate:
    return Estimate(value, value - reach, value + reach, n, 0.5, 0.5, "×", "", "pairs")


def swept(*values: float, **more: float) -> dict[int, dict[str, Estimate]]:
    return {rows: {"generate": ratio(value, **more)} for rows, value in zip(BATCHES, values, strict=False)}


@pytest.mark.parametrize(
    ("values", "at", "said"),
    [
        ((1.3, 1.1, 0.97, 0.8, 0.7), 4, "gain vanishes at batch 4: 0.97× [0.93, 1.01] against generate, 12 pairs"),
        ((1.3, 1.1, 0.80, 0.7, 0.6), 4, "gain vanishes at batch 4: 0.80× [0.76, 0.84] against generate, 12 pairs"),
        ((0.8, 0.7, 0.6, 0.5, 0.4), 1, "no gain at batch 1 already: 0.80× [0.76, 0.84] against generate, 12 pairs"),
        ((1.3, 1.3, 1.2, 1.2, 1.2), None, "still faster at batch 16: 1.20× [1.16, 1.24] against generate, 12 pairs"),
        ((1.3, 1.0, 1.2, 0.9, 1.2), 2, "gain vanishes at batch 2: 1.00× [0.96, 1.04] against generate, 12 pairs "
                                       "(shown at batch 4, 16 all the same)"),
    ],
)  # fmt: skip
def test_the_smallest_batch_whose_interval_does_not_clear_one_is_named(values, at, said):
    found = find_batch_size_limit(swept(*values))
    assert (None if found.first_insignificant_speedup is None else found.first_insignificant_speedup.rows) == at
    assert found.description == said


def test_an_interval_that_ends_at_one_shows_no_gain():
    assert find_batch_size_limit({1: {"generate": ratio(1.5, reach=0.5)}}).first_insignificant_speedup is not None


def test_batches_are_gone_through_from_the_smallest_on_however_they_come():
    shuffled = {rows: {"generate": ratio(value)} for rows, value in ((16, 0.5), (1, 1.5), (4, 0.9))}
    found = find_batch_size_limit(shuffled)
    assert [each.rows for each in found.sweep] == [1, 4, 16]
    assert found.first_insignificant_speedup is found.sweep[1]


def test_every_baseline_has_to_be_beaten_and_the_least_sure_is_named():
    """The slower baseline by its mean may be the less certain one, because of its noise."""
    found = find_batch_size_limit(
        {1: {"full depth": ratio(1.2), "generate": ratio(1.25, reach=0.3), "compiled": ratio(1.4)}}
    )
    assert found.first_insignificant_speedup is not None
    assert found.first_insignificant_speedup.against == "generate"
    assert found.first_insignificant_speedup.description == "1.25× [0.95, 1.55] against generate, 12 pairs"


def test_one_pair_shows_no_gain():
    alone = estimate_total_speedup(ByPair(np.array([9.0])), ByPair(np.array([1.0])))
    assert find_batch_size_limit({1: {"generate": alone}}).description == (
        "no gain at batch 1 already: 9.00× [0.00, inf] against generate, 1 pairs"
    )


@pytest.mark.parametrize(("ratios", "said"), [({}, "ratios={}"), ({4: {}}, r"ratios\[4\]={}")])
def test_nothing_timed_is_refused(ratios: Mapping[int, Mapping[str, Estimate]], said: str):
    with pytest.raises(BadArgument, match=said):
        find_batch_size_limit(ratios)


def timed(rng: np.random.Generator, faster: float, baselines: int = 2) -> dict[str, Estimate]:
    """Make all baselines equally fast and the method ``faster`` times faster; pairs vary by 7 %."""

    def column(mean: float) -> ByPair:
        return ByPair(mean * np.exp(0.05 * rng.standard_normal(PAIRS)))

    own = column(1 / faster)
    return {f"baseline {number}": estimate_total_speedup(column(1.0), own) for number in range(baselines)}


def test_a_gain_that_ends_is_called_longer_no_more_often_than_its_level():
    """1.3 × up to batch 2, equal from batch 4 on: a limit above 4 would report a gain that does not exist.

    300 draws, a share of 2.5 % at most: 4 standard errors are 3.6 points.
    """
    rng, truth = np.random.default_rng(0), dict(zip(BATCHES, (1.3, 1.3, 1.0, 1.0, 1.0), strict=True))
    ends = [
        find_batch_size_limit({rows: timed(rng, faster) for rows, faster in truth.items()}).first_insignificant_speedup
        for _ in range(300)
    ]
    late = np.mean([end is None or end.rows > 4 for end in ends])
    assert late <= 0.061
    assert np.mean([end is not None and end.rows < 4 for end in ends]) <= 0.02, "a third is more than noise hides"
