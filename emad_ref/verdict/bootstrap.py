"""The studentised bootstrap over documents: how samples are drawn, and the interval that they give."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy import stats

from emad_ref.record import Floats
from emad_ref.verdict.interval import Distance, Estimate, priced

RESAMPLES = 9_999  # the smallest attainable p-value is 1 / (RESAMPLES + 1): one leg of 500 can be falsified after Holm
FARTHER = 2.0  # times as far from the mean as the farthest unit seen: as far as one that was not seen may lie
FEWEST_DIFFERING = 10  # units, for a bootstrap of their differences to mean anything


def resamples_for(family: int, level: float = 0.05, least: int = RESAMPLES) -> int:
    """Bootstrap samples, at ``least`` so many, whose smallest p-value is half of Holm's smallest, ``level / family``.

    ``RESAMPLES``, which every estimate draws by itself, do for any run that gates every row on two models; whoever
    judges more legs draws with ``document_draws``.
    """
    return max(least, math.ceil(2 * family / level))


def document_draws(documents: int, resamples: int, rng: np.random.Generator) -> Floats:
    """How often each document is drawn in each bootstrap sample: [resamples, documents].

    A sample has 2·√n documents fewer than there are, and at least half of them: n documents show less skew than what
    they come from has, and smaller samples of them show more (m out of n: Bickel, Götze & van Zwet 1997).

    Draws can be shared by all operating points of one corpus: cheaper, and points are compared on the same samples.
    """
    drawn = max(2, documents // 2, documents - math.floor(2 * math.sqrt(documents)))
    picks = rng.integers(documents, size=(resamples, drawn)) + documents * np.arange(resamples)[:, None]
    counts = np.bincount(picks.ravel(), minlength=resamples * documents)
    return counts.reshape(resamples, documents).astype(np.float64)


def linearised(x: Floats, weight: Floats) -> tuple[float, Floats, float]:
    """Σ ``x`` / Σ ``weight`` of two or more documents, z_i = x_i − θ̂ n_i [documents], and the standard error."""
    n, total = len(x), float(weight.sum())
    value = float(x.sum()) / total
    z = x - value * weight
    return value, z, math.sqrt(n / (n - 1) * float(z @ z)) / total


def studentised(
    x: Floats,
    weight: Floats,
    draws: Floats,
    *,
    threshold: float,
    level: float,
    unit: str,
    noun: str,
    counted: int,
    worst: float | None = None,
) -> Estimate:
    """Σ ``x`` / Σ ``weight``, both [documents], by ``draws`` [samples, documents]: ``rates.mean_rate`` says how.

    ``counted``: the effective number of documents; ``worst``: as in ``rates.mean_rate``.
    """
    drawn = draws[0].sum()
    value, z, error = linearised(x, weight)
    # Written about θ̂ (δ = θ* − θ̂, z* = z − δn) because Σx² − 2θΣxn + θ²Σn² cancels badly.
    drawn_total = draws @ weight
    shift = (draws @ z) / drawn_total
    squares = draws @ (z * z) - 2 * shift * (draws @ (z * weight)) + shift**2 * (draws @ (weight * weight))
    drawn_error = np.sqrt(drawn / (drawn - 1) * np.maximum(squares, 0.0)) / drawn_total
    # A sample without spread has an infinite t: it honestly says that so few differing documents bound nothing.
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.sort(np.nan_to_num(shift / drawn_error, nan=0.0, posinf=np.inf, neginf=-np.inf))
    found = by_t(value, error, t, len(x), threshold=threshold, level=level, unit=unit, noun=noun)
    gap, mean, equal = threshold - value, float(weight.mean()), 2 * counted > len(x)
    if worst is None or error == 0:
        return replace(found, n=counted, distance=Distance(gap, error, worst, equal=equal))
    worst, best = max(worst, FARTHER * float(z.max()) / mean), FARTHER * float(-z.min()) / mean

    def below(gaps: Floats) -> Floats:
        resampled = (1 + np.searchsorted(t, -gaps / error, side="right")) / (len(t) + 1)
        return np.asarray(np.maximum(resampled, stats.t.cdf(-gaps / error, len(x) - 1)), dtype=np.float64)

    def above(gaps: Floats) -> Floats:
        resampled = (1 + len(t) - np.searchsorted(t, gaps / error, side="left")) / (len(t) + 1)
        return np.asarray(np.maximum(resampled, stats.t.sf(gaps / error, len(x) - 1)), dtype=np.float64)

    return replace(
        found,
        n=counted,
        p_above=max(found.p_above, priced(above, -gap, best, counted)),
        p_below=max(found.p_below, priced(below, gap, worst, counted)),
        distance=Distance(gap, error, worst, equal=equal),
    )


def by_t(
    value: float, error: float, t: Floats, n: int, *, threshold: float, unit: str, noun: str, level: float = 0.95
) -> Estimate:
    """An estimate with its standard error: the wider of bootstrapped ``t`` [samples], sorted, and Student's."""
    tail, many = (1 - level) / 2, len(t)
    with np.errstate(divide="ignore", invalid="ignore"):
        observed = float(np.nan_to_num((value - threshold) / np.float64(error), nan=0.0, posinf=np.inf, neginf=-np.inf))
    student = float(stats.t.ppf(1 - tail, n - 1))
    right = max(student, float(t[math.ceil(round((many + 1) * (1 - tail), 6)) - 1]))
    left = min(-student, float(t[max(math.floor(round((many + 1) * tail, 6)), 1) - 1]))
    above = (1 + many - int(np.searchsorted(t, observed, side="left"))) / (many + 1)
    below = (1 + int(np.searchsorted(t, observed, side="right"))) / (many + 1)
    return Estimate(
        value,
        value - right * error,
        value - left * error,
        n,
        max(above, float(stats.t.sf(observed, n - 1))),
        max(below, float(stats.t.cdf(observed, n - 1))),
        unit,
        f"studentised bootstrap, {many:,} samples of {noun}, and Student's t",
        noun,
    )
