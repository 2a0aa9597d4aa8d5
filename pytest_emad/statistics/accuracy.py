"""Accuracy: a paired drop with the exact tail of its score, the retained share of a score, and differences of means.

``TaskAccuracy`` defines once whether a task counts at an operating point, for every row, selection and table:

    solved      accuracy at full depth exceeds the honest guess, shown at 5 %, by at least a point
    exercised   the point saves at least 5 % of the decode FLOPs of the task's own sequences, net

A model that does not solve a task cannot lose accuracy on it. A point that does not exercise a task answers it at full
depth in both arms. Both would let a claim about quality survive untested, so such tasks do not count, and are listed
with the numbers. The honest guess is the best accuracy without solving the task: from the input's own symbols, or the
most frequent answer elsewhere.

An exact binomial test compares with the guess. With items in clusters it uses the effective number of items, n / deff
(Korn and Graubard 1998, *Survey Methodology* 24, 193–201): repeats of one item count once.

This module knows no model, no trace and no claim: ``measurements`` measures, ``claims`` decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from pytest_emad.statistics.estimate import Estimate, fieller_interval, positive_mean_pvalue
from pytest_emad.statistics.legs import LEVEL
from pytest_emad.statistics.rates import FEWEST_DIFFERING, mean_rate
from pytest_emad.statistics.units import ByItem, float_column, require_paired, sum_dependent_units

NORMAL_TAIL = 100  # expected discordant items above which the score is nearly normal: its error is then 5.2 % at most


def estimate_accuracy_drop(
    reference_correct: ByItem, candidate_correct: ByItem, *, threshold: float, level: float = 0.95
) -> Estimate:
    """Paired drop of accuracy, (b − c) / n: b items lost, c items gained against the reference.

    The test is Tango's score statistic (Tango 1998, Statistics in Medicine 17:891–908). Its tail is summed over all
    tables at the nuisance share that fits the tested difference best (Storer & Kim 1990; Lloyd 2008). At a true drop of
    one to five points among 100 to 300 items its error is 5.0 % at most; that of the normal tail is up to 8.3 %. The
    interval holds every drop that neither tail rejects. Bounds stay finite without any discordant item.

    Items in clusters count as fewer, by the design effect of their differences (Rao & Scott 1992); ``n`` counts
    clusters. Neither SciPy nor statsmodels has an interval for paired shares.

    Args:
        reference_correct: [items] bool, right at full depth.
        candidate_correct: [items] bool, right at the operating point; the same items in the same order.
        threshold: the drop to compare with, a fraction; 0.01 is one point.

    Raises:
        BadArgument: not boolean, shapes or clusters differ, no item, or a threshold beyond ±1.
    """
    for name, column in (("reference_correct", reference_correct), ("candidate_correct", candidate_correct)):
        array = column.values
        if array.dtype != np.bool_ or array.ndim != 1 or not len(array):
            raise BadArgument(name, f"{array.dtype}{list(array.shape)}", "bool [items] with at least one item")
    require_paired("candidate_correct", candidate_correct, reference_correct, "both arms answer the same items")
    if not -1 < threshold < 1:
        raise BadArgument("threshold", threshold, "a drop between -1 and 1", "a fraction: one point is 0.01")
    shares = _discordant_shares(reference_correct, candidate_correct)
    tail, (above, below) = (1 - level) / 2, shares.tails(threshold)
    return Estimate(
        shares.drop,
        shares.bound(tail, -1.0),
        shares.bound(tail, 1.0),
        len(reference_correct.independent_values),
        above,
        below,
        "accuracy drop",
        shares.method,
        ByItem.noun,
    )


@dataclass(frozen=True)
class _DiscordantShares:
    """Shares of items ``lost`` and ``gained`` among ``n`` that count as independent."""

    lost: float
    gained: float
    n: int
    method: str = "Tango's score, exact tail"

    @property
    def drop(self) -> float:
        return self.lost - self.gained

    def tails(self, drop: float) -> tuple[float, float]:
        """P(statistic at least, at most, as large as the observed one) if ``drop`` is the true drop."""
        lost, gained = self.lost * self.n, self.gained * self.n
        nuisance = float(_nuisance_share(lost, gained, self.n, drop))
        # Items in clusters give fractional counts: 3.995 of 799 is four, not more than three.
        least = math.floor(lost + 1e-9), math.ceil(gained - 1e-9)
        most = math.ceil(lost - 1e-9), math.floor(gained + 1e-9)
        high, low = (float(_tango_score(*counts, self.n, drop)) for counts in (least, most))
        if self.n * (2 * nuisance + drop) > NORMAL_TAIL:
            return float(stats.norm.sf(high)), float(stats.norm.cdf(low))
        b, c, chance = _table_probabilities(self.n, max(0.0, nuisance + drop), nuisance)
        score = _tango_score(b, c, self.n, drop)
        above, below = (float(chance[side].sum()) for side in (score >= high - 1e-9, score <= low + 1e-9))
        return min(1.0, above), min(1.0, below)

    def bound(self, error: float, end: float) -> float:
        """The drop between the estimate and ``end`` (−1 or 1) that a tail of size ``error`` just rejects."""
        tail = 0 if end < 0 else 1
        far = end * (1 - 1e-6)
        if (abs(self.drop) > 1 - 1e-6 and self.drop * end > 0) or self.tails(far)[tail] > error:
            return end
        return float(optimize.brentq(lambda drop: self.tails(drop)[tail] - error, self.drop, far, xtol=1e-7))


def _discordant_shares(reference: ByItem, candidate: ByItem) -> _DiscordantShares:
    lost, gained = reference.values & ~candidate.values, ~reference.values & candidate.values
    shares, n = (float(lost.mean()), float(gained.mean())), len(lost)
    if reference.has_only_independent_items:
        return _DiscordantShares(*shares, n)
    effective = max(1, math.floor(n / _design_effect(reference.with_values(lost.astype(float) - gained))))
    method = f"Tango's score, {n} items in {len(reference.independent_values)} clusters count as {effective}"
    return _DiscordantShares(*shares, effective, method)


def _design_effect(values: ByItem) -> float:
    """Design effect: how many clustered items are worth one independent item (Rao & Scott 1992), at least one.

    It is the spread of cluster sums over that of independent items, with Student's quantile for the normal one. The
    degrees of freedom are the clusters with a difference, less one, since the others say nothing of spread. The upper
    limit is Σ m² / Σ m over clusters of m items, as if items of a cluster were repeats of one. It applies if fewer than
    ``FEWEST_DIFFERING`` differ: one item lost in 400 of 100 clusters looks independent of all others, and at a true
    loss of 1 % and a correlation of 0.3 the bound's error was 13 %.
    """
    away = values.values - values.values.mean()
    sums, total = values.with_values(away).independent_values, float(away @ away)
    sizes = values.with_values(np.ones(len(away))).independent_values
    clusters, repeats = len(sums), float(sizes @ sizes) / len(away)
    differing = int(np.count_nonzero(values.with_values(np.abs(values.values)).independent_values))
    if clusters == 1 or differing < FEWEST_DIFFERING or total == 0:
        return repeats
    effect = clusters / (clusters - 1) * float(sums @ sums) / total
    student, normal = stats.t.ppf(0.95, differing - 1), stats.norm.ppf(0.95)
    return min(repeats, max(1.0, effect * float(student / normal) ** 2))


def _nuisance_share(lost: Floats | float, gained: Floats | float, n: int, drop: float) -> NDArray[np.float64]:
    """Maximum-likelihood share gained, given that the share lost is ``drop`` larger (Tango 1998, Eq. 7)."""
    b = -lost - gained + (2 * n - lost + gained) * drop
    c = -gained * drop * (1 - drop)
    return np.maximum((np.sqrt(np.maximum(b * b - 8 * n * c, 0.0)) - b) / (4 * n), max(0.0, -drop))


def _tango_score(lost: Floats | float, gained: Floats | float, n: int, drop: float) -> NDArray[np.float64]:
    """(b − c − nδ) over its standard error under δ; ±∞ if that is 0 and the counts differ from it."""
    away = np.asarray(lost - gained - n * drop, dtype=np.float64)
    variance = n * (2 * _nuisance_share(lost, gained, n, drop) + drop * (1 - drop))
    with np.errstate(divide="ignore", invalid="ignore"):
        score = away / np.sqrt(np.maximum(variance, 0.0))
    return np.where(np.abs(away) <= 1e-9 * n, 0.0, score)


def _table_probabilities(n: int, lost: float, gained: float) -> tuple[NDArray[np.float64], NDArray[np.float64], Floats]:
    """Counts lost [b, 1] and gained [1, c] with the probability [b, c] of each pair, without the rarest 10⁻⁹."""
    most = (int(stats.binom.ppf(1 - 1e-9, n, share)) + 1 if share > 0 else 0 for share in (lost, gained))
    b, c = (np.arange(min(n, many) + 1.0) for many in most)
    b, c = b[:, None], c[None, :]
    rest = n - b - c
    logs = special.gammaln(n + 1) - special.gammaln(b + 1) - special.gammaln(c + 1) - special.gammaln(abs(rest) + 1)
    logs = (
        logs + special.xlogy(b, lost) + special.xlogy(c, gained) + special.xlogy(abs(rest), max(0.0, 1 - lost - gained))
    )
    return b, c, np.where(rest >= 0, np.exp(logs), 0.0)


def accuracy_drop_pvalues(lost: float, gained: float, n: int, *, threshold: float) -> tuple[float, float]:
    """(p_above, p_below) of ``estimate_accuracy_drop`` for shares ``lost`` and ``gained`` of ``n`` items."""
    return _DiscordantShares(lost, gained, n).tails(threshold)


def count_effective_items(reference_correct: ByItem, candidate_correct: ByItem) -> int:
    """Number of independent items that ``estimate_accuracy_drop`` counts: items in clusters count as fewer."""
    return _discordant_shares(reference_correct, candidate_correct).n


def items_needed_to_decide(
    reference_correct: ByItem, candidate_correct: ByItem, *, threshold: float, error: float, most: int = 10_000_000
) -> int | None:
    """Approximate number of items that would decide the drop against ``threshold`` at the same discordant shares.

    None if ``most`` items would not suffice, since the shares are at the threshold.
    """
    shares = _discordant_shares(reference_correct, candidate_correct)
    independent = len(reference_correct.independent_values)

    def decides(items: int) -> bool:
        return min(replace(shares, n=max(1, items * shares.n // independent)).tails(threshold)) <= error

    if not decides(most):
        return None
    low, high = 0, most
    while high - low > max(1, high // 200):
        middle = (low + high) // 2 or 1
        low, high = (low, middle) if decides(middle) else (middle, high)
    return max(independent, high)


def estimate_retained_share(candidate: ByItem, reference: ByItem, target_share: float) -> Estimate:
    """Σ candidate / Σ reference over paired items, tested against ``target_share``; both scores are random.

    The ratio exceeds the target exactly if the mean of candidate_i − target · reference_i exceeds 0. A t test decides
    that; the interval holds all ratios that it does not reject (Fieller 1954), with clusters summed. If few items
    differ, t is too confident. So the drop that keeps this share is tested too (``estimate_accuracy_drop``); the larger
    p-value and the wider bound count.

    Args:
        candidate, reference: [items] bool, right by either arm; the same items in the same order.
        target_share: a share of the reference's score; 0.967 is 96.7 %.

    Raises:
        BadArgument: a reference that is never right, fewer than two independent items, a share that is not in 0–2, and
            as in ``estimate_accuracy_drop``.
    """
    for name, column in (("candidate", candidate), ("reference", reference)):
        float_column(name, column, ByItem)
    require_paired("reference", reference, candidate, "both arms answer the same items")
    if not 0 < target_share < 2:
        raise BadArgument("target_share", target_share, "a share between 0 and 2")
    right, reference_scores = sum_dependent_units(candidate), sum_dependent_units(reference)
    if not reference_scores.any():
        raise BadArgument("reference", "no item right", "at least one", "a share of no score is no number")
    if len(right) < 2:
        raise BadArgument("reference", len(right), "at least two independent items", "one has no spread")
    score, ratio, n = float(reference.values.mean()), float(right.sum() / reference_scores.sum()), len(right)
    drop = estimate_accuracy_drop(reference, candidate, threshold=(1 - target_share) * score)
    low, high = fieller_interval(right, reference_scores, float(stats.t.ppf(0.975, n - 1)))
    return Estimate(
        ratio,
        min(low, max(0.0, 1 - drop.high / score)),
        max(high, 1 - drop.low / score),
        n,
        max(positive_mean_pvalue(right - target_share * reference_scores), drop.p_below),
        max(positive_mean_pvalue(target_share * reference_scores - right), drop.p_above),
        "share of the score",
        "paired t on candidate − θ·reference (Fieller), and " + drop.method,
        ByItem.noun,
    )


def estimate_score_difference(
    a: ByItem, b: ByItem, *, threshold: float, rng: np.random.Generator, unit: str
) -> Estimate:
    """Mean of a − b over items, both [items] in 0–1, paired; studentised bootstrap over items.

    If few items differ, a bootstrap resamples only those and its bound may have any size. Then the mean lies between
    minus the share of items that are worse and the share that are better, each with its exact bound
    (``estimate_accuracy_drop``).

    Raises:
        BadArgument: the columns have different items, and as in ``mean_rate``.
    """
    first, second = float_column("a", a, ByItem), float_column("b", b, ByItem)
    require_paired("b", b, a, "both sides answer the same items")
    worse, better = first < second, first > second
    differing = int(np.count_nonzero(a.with_values(worse | better).independent_values))
    if differing >= FEWEST_DIFFERING:
        ones = a.with_values(np.ones(len(a), dtype=np.int64))
        return mean_rate(a.with_values(first - second), ones, threshold=threshold, rng=rng, unit=unit)
    every = a.with_values(np.ones(len(a), dtype=bool))
    up = estimate_accuracy_drop(every, a.with_values(~better), threshold=threshold)
    down = estimate_accuracy_drop(a.with_values(~worse), every, threshold=threshold)
    value, method = float((first - second).mean()), f"{differing} items differ: exact bounds on how many do"
    return Estimate(value, down.low, up.high, up.n, down.p_above, up.p_below, unit, method, ByItem.noun)


def estimate_paired_exit_depth_difference(
    sooner: ByItem, later: ByItem, *, layers: int, threshold: float, rng: np.random.Generator
) -> Estimate:
    """Number of blocks by which ``sooner`` exits earlier: mean over items of later's exit block minus sooner's.

    Args:
        sooner, later: [items] mean exit block of each item's tokens, 0 to ``layers``.
        threshold: blocks.

    Raises:
        BadArgument: as in ``estimate_score_difference``.
    """
    # as shares of depth, so differences lie within ±1
    shares = (side.with_values(side.values / layers) for side in (later, sooner))
    scaled = estimate_score_difference(*shares, threshold=threshold / layers, rng=rng, unit="blocks earlier")
    return replace(scaled, value=scaled.value * layers, low=scaled.low * layers, high=scaled.high * layers)


LEAST_SAVED = 0.05  # least net share of a task's own decode FLOPs for a rule that acts on the task
AT_STAKE = 0.01  # least accuracy above the guess: F1 concerns one point, which a task with less cannot lose
FEWEST = 2  # counting tasks for a claim about accuracy to survive: F1 concerns "two or more tasks"


@dataclass(frozen=True)
class TaskAccuracy:
    """Accuracy on one task at one operating point.

    ``full``      [items] bool, right at full depth; ``adaptive``: right at the point, the same items in the same order.
    ``guess``     accuracy of an honest guess, 0–1.
    ``saving``    net share of the decode FLOPs of the task's own sequences that the point saves; negative if deciding
                  costs more than it saves.

    Raises:
        BadArgument: a guess or a saving that is no share.

    >>> none_right = ByItem.from_independent_items(np.zeros(4, dtype=bool))
    >>> TaskAccuracy(none_right, none_right, guess=0.25, saving=0.004).exclusion.reason
    'not solved: 0.0 % right, 25.0 % by guessing; not exercised: saves 0.4 %'
    """

    full: ByItem
    adaptive: ByItem
    guess: float
    saving: float

    def __post_init__(self) -> None:
        if not 0 <= self.guess <= 1:
            raise BadArgument("guess", self.guess, "a share, 0–1")
        if not self.saving <= 1:
            raise BadArgument("saving", self.saving, "a share of at most 1")

    @property
    def accuracies(self) -> tuple[float, float]:
        """Share right at full depth and at the point."""
        return float(self.full.values.mean()), float(self.adaptive.values.mean())

    @property
    def is_above_guessing(self) -> bool:
        """Whether full depth beats the honest guess."""
        enough = self.accuracies[0] - self.guess >= AT_STAKE
        return enough and guessing_pvalue(self.full, self.guess) <= LEVEL

    @property
    def has_sufficient_saving(self) -> bool:
        """Whether the exit rule acts on the task."""
        return self.saving >= LEAST_SAVED

    @property
    def is_counted(self) -> bool:
        return self.exclusion is None

    @cached_property
    def exclusion(self) -> Absent | None:
        """Why the task does not count, in a few words with the numbers; None if it counts."""
        full, _ = self.accuracies
        reasons = []
        if not self.is_above_guessing:
            reasons.append(f"not solved: {100 * full:.1f} % right, {100 * self.guess:.1f} % by guessing")
        if not self.has_sufficient_saving:
            verb = "saves" if self.saving >= 0 else "probing costs"
            reasons.append(f"not exercised: {verb} {100 * abs(self.saving):.1f} %")
        return Absent("; ".join(reasons), "premise") if reasons else None


def guessing_pvalue(right: ByItem, guess: float) -> float:
    """One-sided p-value of "``right`` [items] bool is right no more often than ``guess``".

    Exact binomial over distinct items; with clusters, the same tail at the effective number of items.

    Raises:
        BadArgument: no item.
    """
    values = right.values
    if not len(values):
        raise BadArgument("right", "no item", "at least one item")
    if right.has_only_independent_items:
        return float(stats.binomtest(int(values.sum()), len(values), guess, alternative="greater").pvalue)
    clusters, share = len(np.unique(right.cluster)), float(values.mean())
    if clusters == 1 or share == 0:
        return 1.0  # one cluster has no spread
    n = _effective_items(right, clusters)
    return float(special.betainc(share * n, n - share * n + 1, guess))


def _effective_items(right: ByItem, clusters: int) -> float:
    """Effective number of independent items among items in clusters, n / deff.

    deff is the variance of the share over the C clusters, divided by that of independent items, times (t₁(C − 1) / t₁(n
    − 1))². It is at least 1, and at most Σ m² / Σ m over clusters of m items, the value for repeats, which also applies
    without variance.
    """
    values, share = right.values.astype(np.float64), float(right.values.mean())
    n, sizes = len(values), right.with_values(np.ones(len(values))).independent_values
    alone, repeats = share * (1 - share) / n, float(sizes @ sizes) / n
    if alone == 0:
        return n / repeats
    away = right.with_values(values - share).independent_values
    spread = clusters / (clusters - 1) * float(away @ away) / n**2
    few, many = stats.t.ppf(1 - LEVEL, [clusters - 1, n - 1])
    return n / min(repeats, max(1.0, float(spread / alone * (few / many) ** 2)))
