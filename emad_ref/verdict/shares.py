"""Shares of items lost and gained against a reference: a drop of accuracy, with the exact tail of its score."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.verdict.bootstrap import FEWEST_DIFFERING
from emad_ref.verdict.columns import require_paired
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.units import ByItem

NORMAL_TAIL = 100  # expected discordant items above which the score is as good as normal: it then errs 5.2 % at most


def accuracy_drop(
    reference_correct: ByItem, candidate_correct: ByItem, *, threshold: float, level: float = 0.95
) -> Estimate:
    """Paired drop of accuracy, (b − c) / n: b items lost, c items gained against the reference.

    Tango's score statistic (Tango 1998, Statistics in Medicine 17:891–908), whose tail is summed over all tables at the
    nuisance share that fits the difference tested best (Storer & Kim 1990; Lloyd 2008): at a true drop of one to five
    points among 100 to 300 items it errs 5.0 % of the time at most, where the normal tail errs up to 8.3 %. The
    interval holds every drop that neither tail rejects. No discordant item leaves a finite bound.

    Items in clusters count as fewer, by the design effect of their differences (Rao & Scott 1992); ``n`` counts
    clusters. SciPy has no interval for paired shares, nor has statsmodels.

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
    found = _discordant(reference_correct, candidate_correct)
    tail, (above, below) = (1 - level) / 2, found.tails(threshold)
    return Estimate(
        found.drop,
        found.bound(tail, -1.0),
        found.bound(tail, 1.0),
        len(reference_correct.independent),
        above,
        below,
        "accuracy drop",
        found.method,
        ByItem.noun,
    )


@dataclass(frozen=True)
class _Discordant:
    """Shares of items ``lost`` and ``gained`` among ``n`` that count as independent."""

    lost: float
    gained: float
    n: int
    method: str = "Tango's score, exact tail"

    @property
    def drop(self) -> float:
        return self.lost - self.gained

    def tails(self, drop: float) -> tuple[float, float]:
        """P(a statistic at least, at most, as large as that found), were ``drop`` the truth."""
        lost, gained = self.lost * self.n, self.gained * self.n
        nuisance = float(_nuisance(lost, gained, self.n, drop))
        # Items in clusters make no whole counts: 3.995 of 799 is four, not more than three.
        least = math.floor(lost + 1e-9), math.ceil(gained - 1e-9)
        most = math.ceil(lost - 1e-9), math.floor(gained + 1e-9)
        high, low = (float(_score(*counts, self.n, drop)) for counts in (least, most))
        if self.n * (2 * nuisance + drop) > NORMAL_TAIL:
            return float(stats.norm.sf(high)), float(stats.norm.cdf(low))
        b, c, chance = _tables(self.n, max(0.0, nuisance + drop), nuisance)
        score = _score(b, c, self.n, drop)
        above, below = (float(chance[side].sum()) for side in (score >= high - 1e-9, score <= low + 1e-9))
        return min(1.0, above), min(1.0, below)

    def bound(self, error: float, end: float) -> float:
        """The drop between the one found and ``end`` (−1 or 1) that a tail of size ``error`` just rejects."""
        tail = 0 if end < 0 else 1
        far = end * (1 - 1e-6)
        if (abs(self.drop) > 1 - 1e-6 and self.drop * end > 0) or self.tails(far)[tail] > error:
            return end
        return float(optimize.brentq(lambda drop: self.tails(drop)[tail] - error, self.drop, far, xtol=1e-7))


def _discordant(reference: ByItem, candidate: ByItem) -> _Discordant:
    lost, gained = reference.values & ~candidate.values, ~reference.values & candidate.values
    shares, n = (float(lost.mean()), float(gained.mean())), len(lost)
    if reference.all_distinct:
        return _Discordant(*shares, n)
    effective = max(1, math.floor(n / _design_effect(reference.like(lost.astype(float) - gained))))
    said = f"Tango's score, {n} items in {len(reference.independent)} clusters count as {effective}"
    return _Discordant(*shares, effective, said)


def _design_effect(values: ByItem) -> float:
    """How many items of clusters are worth one independent item (Rao & Scott 1992), one at least.

    The spread of cluster sums over what it were if items were independent, with Student's quantile for the normal one:
    of as many degrees of freedom as clusters hold a difference, less one, for the others say nothing of spread. At most
    Σ m² / Σ m over clusters of m items, as if items of a cluster were repeats of one; and that where fewer than
    ``FEWEST_DIFFERING`` differ: one item lost in 400 of 100 clusters looks independent of all others, and at a true
    loss of 1 % and a correlation of 0.3 the bound erred 13 % of the time.
    """
    away = values.values - values.values.mean()
    sums, total = values.like(away).independent, float(away @ away)
    sizes = values.like(np.ones(len(away))).independent
    clusters, repeats = len(sums), float(sizes @ sizes) / len(away)
    differing = int(np.count_nonzero(values.like(np.abs(values.values)).independent))
    if clusters == 1 or differing < FEWEST_DIFFERING or total == 0:
        return repeats
    effect = clusters / (clusters - 1) * float(sums @ sums) / total
    student, normal = stats.t.ppf(0.95, differing - 1), stats.norm.ppf(0.95)
    return min(repeats, max(1.0, effect * float(student / normal) ** 2))


def _nuisance(lost: Floats | float, gained: Floats | float, n: int, drop: float) -> NDArray[np.float64]:
    """Largest likelihood of the share gained, where the share lost is ``drop`` more (Tango 1998, Eq. 7)."""
    b = -lost - gained + (2 * n - lost + gained) * drop
    c = -gained * drop * (1 - drop)
    return np.maximum((np.sqrt(np.maximum(b * b - 8 * n * c, 0.0)) - b) / (4 * n), max(0.0, -drop))


def _score(lost: Floats | float, gained: Floats | float, n: int, drop: float) -> NDArray[np.float64]:
    """(b − c − nδ) over its standard error were δ the truth; ±∞ where that is 0 and something else was found."""
    away = np.asarray(lost - gained - n * drop, dtype=np.float64)
    variance = n * (2 * _nuisance(lost, gained, n, drop) + drop * (1 - drop))
    with np.errstate(divide="ignore", invalid="ignore"):
        score = away / np.sqrt(np.maximum(variance, 0.0))
    return np.where(np.abs(away) <= 1e-9 * n, 0.0, score)


def _tables(n: int, lost: float, gained: float) -> tuple[NDArray[np.float64], NDArray[np.float64], Floats]:
    """Counts lost [b, 1] and gained [1, c] with the chance [b, c] of each pair, but for the rarest 10⁻⁹ of them."""
    most = (int(stats.binom.ppf(1 - 1e-9, n, share)) + 1 if share > 0 else 0 for share in (lost, gained))
    b, c = (np.arange(min(n, many) + 1.0) for many in most)
    b, c = b[:, None], c[None, :]
    rest = n - b - c
    logs = special.gammaln(n + 1) - special.gammaln(b + 1) - special.gammaln(c + 1) - special.gammaln(abs(rest) + 1)
    logs = (
        logs + special.xlogy(b, lost) + special.xlogy(c, gained) + special.xlogy(abs(rest), max(0.0, 1 - lost - gained))
    )
    return b, c, np.where(rest >= 0, np.exp(logs), 0.0)


def needed_items(
    reference_correct: ByItem, candidate_correct: ByItem, *, threshold: float, error: float, most: int = 10_000_000
) -> int | None:
    """About how many items would show the drop below or above ``threshold`` if the discordant shares stay as they are.

    None where even ``most`` items would not: the shares lie on the threshold.
    """
    found, independent = _discordant(reference_correct, candidate_correct), len(reference_correct.independent)

    def decides(items: int) -> bool:
        return min(replace(found, n=max(1, items * found.n // independent)).tails(threshold)) <= error

    if not decides(most):
        return None
    low, high = 0, most
    while high - low > max(1, high // 200):
        middle = (low + high) // 2 or 1
        low, high = (low, middle) if decides(middle) else (middle, high)
    return max(independent, high)
