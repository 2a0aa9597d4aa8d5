"""Fronts of loss over saving, and mixtures of two points that save exactly a given share.

A decoder that uses point A for a document with probability w and point B otherwise is itself a decoder. Its saving and
loss are the weighted ones of A and B. So the reachable set of a family is the lower convex hull of

    (net saving, mean loss)   over its points, full depth among them,

and two families can be compared at exactly the same net FLOPs. The hull is chosen on one split. On another its points
have other savings; there w depends only on costs, never on losses.

    saving    1 − Σ FLOPs / Σ FLOPs of full depth, over documents; FLOPs charge all executed work
    loss      Σ loss / Σ tokens, over documents; nats for perplexity, else wrongly predicted next tokens

These are arrays over draws of documents: a bootstrap chooses the hull anew in each. SciPy's ``ConvexHull`` takes one
set of points, not thousands of small ones; gift wrapping advances all of them by one step at once.

For EAD the same is done with a pair of models: thresholds τ are quantiles of H̄ of the small model on validation, the
front is the upper hull of (large-model share, score), and each item goes by one of two rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats, Ints
from emad_ref.replay.losses import CostColumn, LossColumn, Losses

Places = NDArray[np.intp]


def resample_savings_and_losses(
    table: Losses, counts: Floats, loss: LossColumn = "nats", cost: CostColumn = "flops"
) -> tuple[Floats, Floats]:
    """(savings, losses), both [draws, points], of samples with ``counts`` [draws, documents] of each document."""
    spent = counts @ getattr(table, cost).T.astype(np.float64)
    lost = counts @ getattr(table, loss).T.astype(np.float64)
    return 1 - spent / spent[:, :1], lost / (counts @ table.tokens)[:, None]


@dataclass(frozen=True, eq=False)
class BootstrapMixtures:
    """One mixture per draw: point ``first`` with probability ``share``, else point ``second``; all [draws]."""

    first: Places
    second: Places
    share: Floats

    def expectation_of_point_values(self, values: NDArray[Any]) -> Floats:
        """[draws, …] expectation of ``values`` [points, …]."""
        share = self.share.reshape(-1, *(1,) * (values.ndim - 1))
        mixed: Floats = share * values[self.first] + (1 - share) * values[self.second]
        return mixed

    def expectation_of_resampled_values(self, values: Floats) -> Floats:
        """[draws] expectation of ``values`` [draws, points], by draw."""
        draw = np.arange(len(self.share))
        mixed: Floats = self.share * values[draw, self.first] + (1 - self.share) * values[draw, self.second]
        return mixed


def mark_lower_hull_corners(savings: Floats, losses: Floats) -> Bools:
    """[draws, points] whether a point is a corner of the lower convex hull of (saving, loss) in each draw.

    The hull runs from full depth, the first point, to the point that saves most, always along the flattest line. Among
    points on one line the farthest is a corner; among equal rounded slopes, the one with the least loss; among equal
    points, the first. A point without a saving is no corner.
    """
    draw, corner = np.arange(len(savings)), np.zeros(savings.shape, dtype=np.bool_)
    here = np.zeros(len(savings), dtype=np.intp)
    while True:
        corner[draw, here] = True
        right = savings - savings[draw, here][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(right > 0, (losses - losses[draw, here][:, None]) / right, np.inf)
        flattest = slope.min(axis=1)
        going = np.isfinite(flattest)
        if not going.any():
            return corner
        along = np.where(slope == flattest[:, None], right, -np.inf)
        farthest = along == along.max(axis=1)[:, None]
        here = np.where(going, np.where(farthest, losses, np.inf).argmin(axis=1), here)


def mix_to_saving(corners: Bools, savings: Floats, saving: Floats) -> BootstrapMixtures:
    """Mixture of the two ``corners`` [draws, points] nearest to ``saving`` [draws] on either side, with exactly it.

    ``savings`` [draws, points] of the split on which the mixture decodes; in each draw some corner must save that much.
    """
    target = saving[:, None]
    below = np.where(corners & (savings <= target), savings, -np.inf)
    above = np.where(corners & (savings >= target), savings, np.inf)
    first, second = below.argmax(axis=1), above.argmin(axis=1)
    less, more = below.max(axis=1), above.min(axis=1)
    assert np.isfinite(less).all(), "full depth is a corner, and saves nothing"
    assert np.isfinite(more).all(), "a saving that the corners do not reach"
    apart = more - less
    share = np.where(apart > 0, (more - saving) / np.where(apart > 0, apart, 1.0), 1.0)
    return BootstrapMixtures(first, second, share)


@dataclass(frozen=True, eq=False)
class FrontMixtureByDocument:
    """Loss and cost of a mixture by document: ``loss``, ``flops`` [documents]; ``share`` is of the first point.

    ``name``: of both points with their shares, or of the single point.
    """

    name: str
    share: float
    loss: Floats
    flops: Floats


@dataclass(frozen=True, eq=False)
class FamilyFront:
    """A family's front: ``corners`` bool [points] chosen on one split by ``loss``, measured on ``judged``, another."""

    corners: Bools
    judged: Losses
    loss: LossColumn = "nats"

    @property
    def largest_saving(self) -> float:
        """The largest saving of any corner."""
        return float(np.max(self.judged.savings, where=self.corners, initial=0.0))

    def mix_corners_to_saving(self, saving: float) -> BootstrapMixtures:
        """The two corners and their shares that save exactly ``saving``.

        Raises:
            BadArgument: more than any corner saves, or less.
        """
        if not 0 <= saving <= self.largest_saving:
            raise BadArgument(
                "saving", saving, f"a saving in 0–{self.largest_saving:.4f}", "the corners reach no other"
            )
        return mix_to_saving(self.corners[None], self.judged.savings[None], np.array([saving]))

    def mixture_at(self, saving: float) -> FrontMixtureByDocument:
        """The mixture that saves exactly ``saving``; raises as ``mix_corners_to_saving``."""
        mixed = self.mix_corners_to_saving(saving)
        (loss,), (flops,) = (
            mixed.expectation_of_point_values(values) for values in (getattr(self.judged, self.loss), self.judged.flops)
        )
        return FrontMixtureByDocument(self.describe_mixture(mixed), float(mixed.share[0]), loss, flops)

    def describe_mixture(self, mixed: BootstrapMixtures) -> str:
        """e.g. ``38% full depth, 62% emad m=0.20``."""
        share: float = mixed.share[0]
        first, second = (self.judged.points[int(each[0])].name for each in (mixed.first, mixed.second))
        if share in (0.0, 1.0) or first == second:
            return first if share == 1.0 else second
        return f"{share:.1%} {first}, {1 - share:.1%} {second}"


def choose_front(chosen_on: Losses, judged_on: Losses, loss: LossColumn = "nats") -> FamilyFront:
    """Choose the front on one split, and measure it on another.

    Raises:
        BadArgument: an infinite loss on either split.
    """
    for table in (chosen_on, judged_on):
        require_finite_losses(table, loss)
    return FamilyFront(mark_front_corners(chosen_on, loss), judged_on, loss)


def mark_front_corners(table: Losses, loss: LossColumn = "nats", cost: CostColumn = "flops") -> Bools:
    """[points] whether a point is a corner of the front of the whole split."""
    corners: Bools = mark_lower_hull_corners(table.saved_shares(cost)[None], table.means(loss)[None])[0]
    return corners


def require_finite_losses(table: Losses, loss: LossColumn) -> None:
    """Raise BadArgument if a point has lost a next token."""
    lost = ~np.isfinite(getattr(table, loss)).all(axis=1)
    if lost.any():
        name = table.points[int(np.flatnonzero(lost)[0])].name
        raise BadArgument("loss", f"infinite at {name}", "finite losses", "compare next tokens told right")


@dataclass(frozen=True)
class RoutingShareAndScore:
    """One measured run of a pair: the share of tokens that the large model emitted, and the score, higher is better."""

    large_share: float
    score: float


def switching_thresholds(rolling_bits: Floats, count: int) -> list[float]:
    """At most ``count`` thresholds τ, bits, ascending: the quantiles k / (count + 1) of ``rolling_bits`` float64 [n].

    Each is in the middle between two neighbouring values. At a value itself the last bit of a sum would decide, which
    depends on the batch size. Ties reduce their number; a constant has none.

    >>> switching_thresholds(np.array([0.1, 0.2, 0.4, 0.9]), 1)
    [0.30000000000000004]
    """
    assert np.isfinite(rolling_bits).all(), "entropies of answered items"
    values = np.unique(rolling_bits)
    middles = (values[:-1] + values[1:]) / 2
    if not len(middles):
        return []
    quantiles = np.quantile(rolling_bits, np.arange(1, count + 1) / (count + 1))
    places = np.minimum(np.searchsorted(middles, quantiles), len(middles) - 1)
    tau: list[float] = middles[np.unique(places)].tolist()
    return tau


def routing_front_indices(tried: Sequence[RoutingShareAndScore]) -> list[int]:
    """Indices of the upper hull of (share, score), by falling share: the best mixtures of the rules."""
    hull: list[int] = []
    # among rules with one share the best comes first, and the others are below it
    for index in sorted(range(len(tried)), key=lambda i: (-tried[i].large_share, -tried[i].score)):
        here = tried[index]
        if hull and tried[hull[-1]].large_share == here.large_share:
            continue
        while len(hull) > 1 and not _is_above_line(tried[hull[-2]], tried[hull[-1]], here):
            hull.pop()
        hull.append(index)
    return hull


def _is_above_line(first: RoutingShareAndScore, middle: RoutingShareAndScore, last: RoutingShareAndScore) -> bool:
    """Whether ``middle`` is above the line from ``first`` to ``last``."""
    width = first.large_share - last.large_share
    line = last.score + (middle.large_share - last.large_share) / width * (first.score - last.score)
    return middle.score > line


@dataclass(frozen=True, eq=False)
class RoutedTaskItems:
    """Items under one rule: ``right`` float64 [items] in 0–1; tokens ``emitted`` and ``by_large``, int64 [items]."""

    right: Floats
    emitted: Ints
    by_large: Ints


@dataclass(frozen=True, eq=False)
class RoutingMixtureItemScores:
    """Items by rule number ``first`` with probability ``probability``, else by rule ``second``.

    ``score``  float64 [items] with the mixture's expected score at exactly the requested share as mean. It weighs an
               item's effect on the share at the exchange rate between the two rules, so its spread includes that of p,
               which these items determined (first order: the influence function of the score).
    ``dealt``  float64 [items] right with one of the two rules per item, in a random order, with the number of items by
               the first that brings the share nearest to the requested one.
    """

    first: int
    second: int
    probability: float
    score: Floats
    dealt: Floats


def mix_runs_to_large_share(
    runs: Sequence[RoutedTaskItems], share: float, rng: np.random.Generator, near: int = 0
) -> RoutingMixtureItemScores:
    """The mixture of two neighbours among ``runs``, of falling share, that leaves the large model exactly ``share``.

    With l tokens by the large model of e emitted, d_i = l_i − share · e_i: p solves p Σ d_A + (1 − p) Σ d_B = 0.

    Args:
        rng: draws the order of dealing items.
        near: if several neighbours qualify, those at this index or nearest to it.

    Raises:
        BadArgument: no two neighbours have the share between them.
    """
    away = [run.by_large - share * run.emitted for run in runs]
    between = [k for k, (a, b) in enumerate(pairwise(each.sum() for each in away)) if a >= 0 >= b and a > b]
    if not between:
        raise BadArgument("share", share, "a share between those of the runs", "take in either model alone")
    k = min(between, key=lambda at: abs(at - near))
    one, other, d_one, d_other = runs[k], runs[k + 1], away[k], away[k + 1]
    p = float(d_other.sum() / (d_other.sum() - d_one.sum()))
    score = p * one.right + (1 - p) * other.right
    rate = (one.right.mean() - other.right.mean()) / (d_one.mean() - d_other.mean())
    # their mean is 0 by the choice of p
    return RoutingMixtureItemScores(
        k, k + 1, p, score - rate * (p * d_one + (1 - p) * d_other), _deal_items(one, other, d_one, d_other, rng)
    )


def _deal_items(
    one: RoutedTaskItems, other: RoutedTaskItems, d_one: Floats, d_other: Floats, rng: np.random.Generator
) -> Floats:
    order = rng.permutation(len(d_one))
    # distance from the share if the first 0, 1, … items of the order use ``one``
    away = d_other.sum() + np.concatenate([[0.0], np.cumsum((d_one - d_other)[order])])
    first_items = order[: int(np.argmin(np.abs(away)))]
    right = other.right.copy()
    right[first_items] = one.right[first_items]
    return right
