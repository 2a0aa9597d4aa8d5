"""Fronts equal SciPy's hull, and mixtures equal their formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial import ConvexHull

from emad_ref.errors import BadArgument
from emad_ref.replay.losses import Losses
from pytest_emad.sweep.front import (
    FamilyFront,
    choose_front,
    mark_lower_hull_corners,
    mix_to_saving,
    resample_savings_and_losses,
)
from tests.handmade_losses import handmade_losses

FULL = (0.0, 1.0)


def sheet(*points: tuple[float, float], documents: int = 4, spread: float = 0.0, seed: int = 0) -> Losses:
    """Return points of (saving, loss per token) on documents of unequal length that vary in both by ``spread``."""
    rng = np.random.default_rng(seed)
    tokens, full = rng.integers(5, 20, documents).astype(float), rng.uniform(1e6, 2e6, documents)
    saving, loss = np.array([FULL, *points]).T
    away = spread * rng.standard_normal((2, documents, len(saving)))
    away[0, :, 0] = 0.0
    lost, spent = (loss + away[1]) * tokens[:, None], full[:, None] * (1 - saving - away[0])
    return handmade_losses(lost, spent, tokens, NAMES[: len(saving)])


NAMES = "full depth", "a", "b", "c", "d"


@example([(0.5, 3e-217), (0.5, 0.0)], 0)
@given(st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.0, 9.0)), min_size=2, max_size=9), st.integers(0, 3))
def test_no_point_lies_below_the_corners_and_every_corner_is_one(points: list[tuple[float, float]], seed: int) -> None:
    saving, loss = np.array([FULL, *points]).T
    (corners,) = mark_lower_hull_corners(saving[None], loss[None])
    order = np.flatnonzero(corners)[np.argsort(saving[corners])]
    below = np.interp(saving, saving[order], loss[order])
    assert (loss >= below - 1e-9).all()
    assert corners[0]
    assert corners[np.lexsort((loss, -saving))[0]], "the one that saves most"
    slopes = np.diff(loss[order]) / np.diff(saving[order])
    assert (np.diff(slopes) > -1e-9).all(), "a hull bends upwards"


def test_corners_are_those_of_scipy_in_every_draw() -> None:
    rng = np.random.default_rng(0)
    saving, loss = rng.uniform(0.01, 1, (50, 20)), rng.uniform(0, 1, (50, 20))
    saving[:, 0], loss[:, 0] = 0.0, 0.5
    for corners, x, y in zip(mark_lower_hull_corners(saving, loss), saving, loss, strict=True):
        hull = ConvexHull(np.column_stack([x, y]))
        last = int(np.argmax(x))
        chord = np.interp(x, [0.0, x[last]], [y[0], y[last]])
        below = {int(v) for v in hull.vertices if y[v] < chord[v] or v in (0, last)}
        assert set(np.flatnonzero(corners)) == below


def test_what_saves_nothing_is_no_corner_and_full_depth_always_is() -> None:
    (corners,) = mark_lower_hull_corners(np.array([[0.0, -0.1, 0.0, 0.3]]), np.array([[1.0, 0.2, 0.5, 9.0]]))
    assert corners.tolist() == [True, False, False, True]


def test_points_of_one_decision_are_one_corner() -> None:
    (corners,) = mark_lower_hull_corners(np.array([[0.0, 0.2, 0.2, 0.2]]), np.array([[1.0, 1.5, 1.5, 1.7]]))
    assert corners.tolist() == [True, True, False, False]


def test_a_mixture_saves_exactly_what_is_asked_and_loses_what_its_points_do() -> None:
    found = choose_front(sheet((0.2, 1.1), (0.6, 2.0)), sheet((0.3, 1.2), (0.5, 2.4), seed=1))
    mixed = found.mixture_at(0.35)
    assert (mixed.name, mixed.share) == ("75.0% a, 25.0% b", pytest.approx(0.75))
    spent = found.judged.flops
    assert mixed.flops == pytest.approx(0.75 * spent[1] + 0.25 * spent[2])
    assert mixed.flops.sum() / spent[0].sum() == pytest.approx(1 - 0.35)
    assert mixed.loss.sum() / found.judged.tokens.sum() == pytest.approx(0.75 * 1.2 + 0.25 * 2.4)


def test_shares_follow_from_costs_alone_whatever_is_lost_where_they_are_judged() -> None:
    """The corner that saved more on validation saves less here: the mixture is of the nearest on either side."""
    found = choose_front(sheet((0.2, 1.1), (0.6, 2.0)), sheet((0.5, 99.0), (0.4, 0.1)))
    assert found.corners.tolist() == [True] * 3
    assert found.mixture_at(0.2).name == "50.0% full depth, 50.0% b"
    assert found.mixture_at(0.45).name == "50.0% b, 50.0% a"
    assert found.mixture_at(found.largest_saving).name == "a"
    assert found.mixture_at(0.0).name == "full depth"


def test_a_point_above_the_hull_on_validation_is_not_mixed_however_good_it_is_elsewhere() -> None:
    found = choose_front(sheet((0.3, 5.0), (0.6, 2.0)), sheet((0.3, 0.0), (0.6, 2.0)))
    assert found.mixture_at(0.3).name == "50.0% full depth, 50.0% b"


def test_no_more_can_be_saved_than_a_corner_does() -> None:
    found = choose_front(sheet((0.5, 2.0)), sheet((0.4, 2.0)))
    assert found.largest_saving == pytest.approx(0.4)
    for saving in (0.41, -0.01):
        with pytest.raises(BadArgument, match="the corners reach no other"):
            found.mixture_at(saving)


def test_every_draw_has_a_hull_and_a_mixture_of_its_own() -> None:
    rng = np.random.default_rng(3)
    chosen, judged = (sheet((0.2, 1.1), (0.4, 1.2), (0.6, 2.0), spread=0.05, seed=seed) for seed in (1, 2))
    counts = rng.multinomial(4, [0.25] * 4, size=6).astype(float)
    corners = mark_lower_hull_corners(*resample_savings_and_losses(chosen, counts))
    savings, losses = resample_savings_and_losses(judged, counts)
    mixed = mix_to_saving(corners, savings, np.full(6, 0.3))
    for draw, count in enumerate(counts):
        rows = np.repeat(np.arange(4), count.astype(int))
        one = [repeated(each, rows) for each in (chosen, judged)]
        alone: FamilyFront = choose_front(*one)
        assert alone.corners.tolist() == corners[draw].tolist()
        expected = alone.mixture_at(0.3)
        assert mixed.share[draw] == pytest.approx(expected.share)
        assert mixed.expectation_of_resampled_values(losses)[draw] == pytest.approx(
            expected.loss.sum() / one[1].tokens.sum()
        )


def repeated(losses: Losses, rows: NDArray[np.intp]) -> Losses:
    columns = {name: getattr(losses, name)[:, rows] for name in ("nats", "wrong", "flops", "depth")}
    return replace(losses, cluster=np.arange(len(rows)), tokens=losses.tokens[rows], **columns)


def test_a_lost_next_token_has_no_front_of_perplexity() -> None:
    good = sheet((0.2, 1.0))
    nats = good.nats.copy()
    nats[1, 2] = np.inf
    lost = replace(good, nats=nats)
    for pair in ((lost, good), (good, lost)):
        with pytest.raises(BadArgument, match="infinite at a"):
            choose_front(*pair)
    assert choose_front(lost, lost, "wrong").corners.tolist() == [True, True]
