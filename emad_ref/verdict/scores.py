"""Scores of the same items by two arms: what share is retained, how far their means lie apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy import stats

from emad_ref.errors import BadArgument
from emad_ref.verdict.bootstrap import FEWEST_DIFFERING
from emad_ref.verdict.columns import column_of, pooled, require_paired
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.rates import mean_rate
from emad_ref.verdict.ratios import fieller, p_positive
from emad_ref.verdict.shares import accuracy_drop
from emad_ref.verdict.units import ByItem


def retained(candidate: ByItem, reference: ByItem, kept: float) -> Estimate:
    """Σ candidate / Σ reference over paired items, tested against ``kept``; neither score is taken as fixed.

    The ratio exceeds ``kept`` exactly where the mean of candidate_i − kept · reference_i exceeds 0: a t test, and for
    the interval all ratios that it does not reject (Fieller 1954), clusters summed. Where few items differ between the
    two, t is too sure; so the drop that keeps this share is tested too (``accuracy_drop``), and of both the larger
    p-value and the wider bound count.

    Args:
        candidate, reference: [items] bool, right by either arm; the same items in the same order.
        kept: a share of the reference's score; 0.967 is 96.7 %.

    Raises:
        BadArgument: a reference that is never right, fewer than two independent items, a share that is not in 0–2, and
            as in ``accuracy_drop``.
    """
    for name, column in (("candidate", candidate), ("reference", reference)):
        column_of(name, column, ByItem)
    require_paired("reference", reference, candidate, "both arms answer the same items")
    if not 0 < kept < 2:
        raise BadArgument("kept", kept, "a share between 0 and 2")
    right, wanted = pooled(candidate), pooled(reference)
    if not wanted.any():
        raise BadArgument("reference", "no item right", "at least one", "a share of no score is no number")
    if len(right) < 2:
        raise BadArgument("reference", len(right), "at least two independent items", "one has no spread")
    score, ratio, n = float(reference.values.mean()), float(right.sum() / wanted.sum()), len(right)
    drop = accuracy_drop(reference, candidate, threshold=(1 - kept) * score)
    low, high = fieller(right, wanted, float(stats.t.ppf(0.975, n - 1)))
    return Estimate(
        ratio,
        min(low, max(0.0, 1 - drop.high / score)),
        max(high, 1 - drop.low / score),
        n,
        max(p_positive(right - kept * wanted), drop.p_below),
        max(p_positive(kept * wanted - right), drop.p_above),
        "share of the score",
        "paired t on candidate − θ·reference (Fieller), and " + drop.method,
        ByItem.noun,
    )


def difference(a: ByItem, b: ByItem, *, threshold: float, rng: np.random.Generator, unit: str) -> Estimate:
    """Mean of a − b over items, both [items] in 0–1, paired; studentised bootstrap over items.

    Where few items differ a bootstrap resamples those few, and makes a bound of any size out of one: then the mean lies
    between minus the share of items that are worse and the share that are better, each with its exact bound
    (``accuracy_drop``).

    Raises:
        BadArgument: other items on either side, and as in ``mean_rate``.
    """
    first, second = column_of("a", a, ByItem), column_of("b", b, ByItem)
    require_paired("b", b, a, "both sides answer the same items")
    worse, better = first < second, first > second
    differing = int(np.count_nonzero(a.like(worse | better).independent))
    if differing >= FEWEST_DIFFERING:
        ones = a.like(np.ones(len(a), dtype=np.int64))
        return mean_rate(a.like(first - second), ones, threshold=threshold, rng=rng, unit=unit)
    every = a.like(np.ones(len(a), dtype=bool))
    up = accuracy_drop(every, a.like(~better), threshold=threshold)
    down = accuracy_drop(a.like(~worse), every, threshold=threshold)
    value, method = float((first - second).mean()), f"{differing} items differ: exact bounds on how many do"
    return Estimate(value, down.low, up.high, up.n, down.p_above, up.p_below, unit, method, ByItem.noun)


def earlier(sooner: ByItem, later: ByItem, *, layers: int, threshold: float, rng: np.random.Generator) -> Estimate:
    """How many blocks earlier ``sooner`` exits than ``later``: mean over items of later's exit block minus sooner's.

    Args:
        sooner, later: [items] mean exit block of each item's tokens, 0 to ``layers``.
        threshold: blocks.

    Raises:
        BadArgument: as in ``difference``.
    """
    # as shares of depth, so that differences lie within ±1
    shares = (side.like(side.values / layers) for side in (later, sooner))
    scaled = difference(*shares, threshold=threshold / layers, rng=rng, unit="blocks earlier")
    return replace(scaled, value=scaled.value * layers, low=scaled.low * layers, high=scaled.high * layers)
