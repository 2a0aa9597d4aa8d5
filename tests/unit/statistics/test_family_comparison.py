"""Two families at equal FLOPs: ties, the estimated quantity, and resampling of the selection."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.replay.losses import Losses
from pytest_emad.statistics.fronts import (
    PointFamily,
    build_comparison_leg_test,
    compare_families_at_saving_levels,
    resample_count_for_legs,
)
from pytest_emad.statistics.verdicts import load_register
from tests.claims.cases.ablations import Text, convex, family, halved, linear, renamed
from tests.handmade_losses import handmade_losses

LEVELS = (0.15, 0.30)


def texts(seed: int, documents: int = 80) -> tuple[Text, Text]:
    rng = np.random.default_rng(seed)
    return Text(rng, 60), Text(rng, documents)


def compared(ours: PointFamily, rival: PointFamily, levels=LEVELS, seed: int = 0, resamples: int = 499):
    rng = np.random.default_rng(seed)
    return compare_families_at_saving_levels(
        ours, rival, levels, threshold=0.0, rng=rng, unit="nats per token", resamples=resamples
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("curve", [convex, linear])
def test_a_family_under_another_name_ties(seed: int, curve) -> None:
    ours = family("emad", texts(seed), curve)
    assert [met.estimate for met in compared(ours, renamed(ours))] == [None, None]


def test_points_of_the_same_decisions_tie_in_whatever_order_and_number_they_stand() -> None:
    ours = family("emad", texts(0), convex)
    order = [0, *range(26, 0, -1), 3, 3]

    other = PointFamily(ours.validation.select(order), ours.evaluation.select(order))
    assert [met.estimate for met in compared(ours, other)] == [None, None]


def test_both_sides_save_exactly_the_same_and_so_many_nats_lie_between_them() -> None:
    both = texts(1)
    ours, rival = family("emad", both, convex), family("rival", both, lambda savings: convex(savings) + 0.1 * savings)
    full = ours.evaluation.flops[0]
    for met in compared(ours, rival):
        for side in (met.ours, met.rival):
            assert 1 - side.flops.sum() / full.sum() == pytest.approx(met.level) == pytest.approx(met.saving)
        value = (met.ours.loss - met.rival.loss).sum() / both[1].tokens.sum()
        assert met.estimate.value == pytest.approx(value)
        assert met.estimate.value == pytest.approx(-0.1 * met.level, abs=0.01)
        assert met.estimate.low < met.estimate.value < met.estimate.high
        assert met.estimate.n == 80


def test_where_a_side_falls_short_on_evaluation_both_save_what_it_reaches() -> None:
    both = texts(2)
    ours = family("emad", both, convex)
    short = family("rival", both, convex, np.array([0.0, 0.1, 0.305]))
    spent = short.evaluation.flops
    stingy = (spent[0] - 0.9 * (spent[0] - spent)).astype(np.int64)
    short = replace(short, evaluation=replace(short.evaluation, flops=stingy))
    *_, met = compared(ours, short)
    assert met.level == 0.30
    assert met.saving == pytest.approx(short.front.largest_saving)
    assert met.saving < 0.295
    for side in (met.ours, met.rival):
        assert 1 - side.flops.sum() / short.evaluation.flops[0].sum() == pytest.approx(met.saving)


def test_a_level_that_one_side_misses_on_validation_is_not_asked() -> None:
    both = texts(3)
    ours, rival = family("emad", both, convex), family("rival", both, convex, np.array([0.0, 0.1, 0.2]))
    assert [met.level for met in compared(ours, rival)] == [0.15]
    assert [met.level for met in compared(rival, ours)] == [0.15]


@pytest.mark.parametrize("seed", range(3))
def test_a_front_that_bends_is_never_worse_than_itself_on_every_second_document(seed: int) -> None:
    ours = family("emad", texts(seed, 200), convex)
    for met in compared(ours, halved(ours)):
        assert met.estimate is not None
        assert met.estimate.value < 0
        assert met.estimate.p_above > 0.5


@pytest.mark.parametrize(("noise", "apart", "wide"), [(1.0, 0.0, True), (0.01, 0.2, False)])
def test_what_other_text_would_choose_is_part_of_the_interval(noise: float, apart: float, wide: bool) -> None:
    """Two points, precisely ±0.2 nats on evaluation: if validation cannot tell them apart, either may be chosen."""
    rng, tokens = np.random.default_rng(0), np.full(60, 100)
    flops = np.tile([1.0, 0.6, 0.6], (60, 1))

    def split(apart: float, noise: float) -> Losses:
        lost = np.array([0.0, 1.0 - apart, 1.0 + apart]) + noise * rng.standard_normal((60, 3))
        return handmade_losses(lost * 100, flops, tokens)

    two = PointFamily(split(apart, noise), split(0.2, 0.01))
    one_nat = handmade_losses(np.tile([0.0, 100.0], (60, 1)), flops[:, :2], tokens)
    flat = PointFamily(one_nat, one_nat)
    (met,) = compared(two, flat, (0.3,))
    assert (met.estimate.high - met.estimate.low > 0.2) == wide
    assert wide or met.estimate.value == pytest.approx(-0.15, abs=0.01)


def test_samples_suffice_for_the_first_of_many_legs() -> None:
    for legs in (1, 4, 300):
        assert 1 / (resample_count_for_legs(legs) + 1) < 0.05 / legs
    assert resample_count_for_legs(300) > resample_count_for_legs(4)


def test_other_documents_on_either_side_are_refused() -> None:
    with pytest.raises(BadArgument, match="compare on the same text"):
        compared(family("emad", texts(0), convex), family("rival", texts(1), convex))


def test_one_document_has_no_spread() -> None:
    both = texts(4, documents=1)
    ours, rival = family("emad", both, convex), family("rival", both, convex)
    (met, _) = compared(ours, rival)
    assert (met.estimate.low, met.estimate.high, met.estimate.p_above) == (-np.inf, np.inf, 1.0)


def test_a_tie_takes_no_part_in_holm_and_says_what_both_save() -> None:
    claim = load_register()["EMAD-R2"]
    ours = family("emad", texts(0), convex)
    met, _ = compared(ours, renamed(ours))
    leg = build_comparison_leg_test("15% net", met, None, 0.0, claim).leg
    assert (leg.outcome, leg.p_falsify, leg.p_survive, leg.interval) == ("inconclusive", None, None, None)
    assert leg.reason == "tied: both decide the same; both save 15.00% net"
