"""Choosing EAD's threshold τ for a saving: a grid by quantile, its front, and the mixture that saves exactly as much.

    τ grid   quantiles of H̄ of the small model on validation, each moved to the middle between two values that occur
    front    upper hull of (large-model share, score) over the rules tried on validation, either model alone included
    mixture  each item by rule A with probability p, else by rule B: a decoder itself (METHODS, "Equal FLOPs"), whose
             share of the large model lies anywhere between theirs. p follows from tokens alone, never from scores

Quantiles are a first guess at a share, since they leave out d_min and the large model's own (lower) entropies once it
is in charge; the front is made of what runs measured. This module runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Floats, Ints


@dataclass(frozen=True)
class Routing:
    """One measured run of a pair: the share of tokens that the large model emitted, and the score, higher is better."""

    large_share: float
    score: float


def thresholds(rolling_bits: Floats, count: int) -> list[float]:
    """At most ``count`` thresholds τ, bits, ascending: the quantiles k / (count + 1) of ``rolling_bits`` float64 [n].

    Each stands in the middle between two neighbouring values. On a value itself the last bit of a sum would decide,
    and another batch size rounds differently. Where values tie there are fewer; where all are one, none.

    >>> thresholds(np.array([0.1, 0.2, 0.4, 0.9]), 1)
    [0.30000000000000004]

    Raises:
        BadArgument: no or not finite values, a count below 1.
    """
    if count < 1:
        raise BadArgument("count", count, "at least one threshold")
    if len(rolling_bits) == 0 or not np.isfinite(rolling_bits).all():
        raise BadArgument("rolling_bits", f"{len(rolling_bits)} values", "at least one, all finite")
    values = np.unique(rolling_bits)
    middles = (values[:-1] + values[1:]) / 2
    if not len(middles):
        return []
    wanted = np.quantile(rolling_bits, np.arange(1, count + 1) / (count + 1))
    found = np.minimum(np.searchsorted(middles, wanted), len(middles) - 1)
    tau: list[float] = middles[np.unique(found)].tolist()
    return tau


def front(tried: Sequence[Routing]) -> list[int]:
    """Indices of the upper hull of (share, score), by falling share: what mixtures of the rules can reach.

    Raises:
        BadArgument: nothing was tried.
    """
    if not tried:
        raise BadArgument("tried", tried, "at least one routing")
    hull: list[int] = []
    # of rules of one share the best comes first, and the others lie below it
    for index in sorted(range(len(tried)), key=lambda i: (-tried[i].large_share, -tried[i].score)):
        here = tried[index]
        if hull and tried[hull[-1]].large_share == here.large_share:
            continue
        while len(hull) > 1 and not _turns(tried[hull[-2]], tried[hull[-1]], here):
            hull.pop()
        hull.append(index)
    return hull


def _turns(first: Routing, middle: Routing, last: Routing) -> bool:
    """Whether ``middle`` lies above the line from ``first`` to ``last``."""
    width = first.large_share - last.large_share
    line = last.score + (middle.large_share - last.large_share) / width * (first.score - last.score)
    return middle.score > line


@dataclass(frozen=True, eq=False)
class Ran:
    """Items under one rule: ``right`` float64 [items] in 0–1; int64 [items] tokens ``emitted``, and those
    ``by_large``."""

    right: Floats
    emitted: Ints
    by_large: Ints


@dataclass(frozen=True, eq=False)
class Mixture:
    """Items by rule number ``first`` with probability ``probability``, else by rule ``second``.

    ``score``  float64 [items] whose mean is the mixture's expected score at exactly the share wanted. What an item adds
               to the share is weighed at the exchange rate between the two rules, so that the spread of this column
               holds that of p, which these very items fixed (first order: the influence function of the score).
    ``dealt``  float64 [items] right where each item was in fact given to one of the two, as many to the first, in an
               order drawn beforehand, as bring the share nearest to the one wanted.
    """

    first: int
    second: int
    probability: float
    score: Floats
    dealt: Floats


def mixed(runs: Sequence[Ran], share: float, rng: np.random.Generator, near: int = 0) -> Mixture:
    """The mixture of two neighbours among ``runs``, of falling share, that leaves the large model exactly ``share``.

    With l tokens by the large model of e emitted, d_i = l_i − share · e_i: p solves p Σ d_A + (1 − p) Σ d_B = 0.

    Args:
        rng: draws the order in which items are dealt.
        near: where several neighbours will do, those at this index or nearest to it.

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
    # the mean of these is 0: p was chosen so
    return Mixture(k, k + 1, p, score - rate * (p * d_one + (1 - p) * d_other), _dealt(one, other, d_one, d_other, rng))


def _dealt(one: Ran, other: Ran, d_one: Floats, d_other: Floats, rng: np.random.Generator) -> Floats:
    order = rng.permutation(len(d_one))
    # what is away from the share once the first 0, 1, … items of the order go by ``one``
    away = d_other.sum() + np.concatenate([[0.0], np.cumsum((d_one - d_other)[order])])
    taken = order[: int(np.argmin(np.abs(away)))]
    right = other.right.copy()
    right[taken] = one.right[taken]
    return right
