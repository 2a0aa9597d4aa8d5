"""Rates: sums over documents (or items) per token, and what is linear in them: perplexity, profiles, slopes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.signals import STEEPEST_NATS, relative_rise
from emad_ref.verdict.alike import alike
from emad_ref.verdict.bootstrap import FEWEST_DIFFERING, RESAMPLES, document_draws, linearised, studentised
from emad_ref.verdict.columns import column_of, pooled, require_paired
from emad_ref.verdict.interval import Distance, Estimate
from emad_ref.verdict.units import ByDocument, DocumentOf, Units, effective

ROUNDING = 1e-12  # of two sums that differ by less, relatively, nothing is known but how they were added up
# A document is ruined where it loses this much per token: its perplexity is e times as high. With a larger number no
# run of 400 documents could let a claim about 1 % survive; with a smaller one 300 would not be asked for, and of 200
# documents one sample in seven shows none of 1 % that are ruined.
RUINED_NATS = 1.0


def perplexity_rise(
    nll_candidate: ByDocument,
    nll_reference: ByDocument,
    tokens: ByDocument,
    *,
    threshold: float,
    rng: np.random.Generator,
    level: float = 0.95,
    draws: Floats | None = None,
    worst: float | None = RUINED_NATS,
) -> Estimate:
    """Relative rise of perplexity, exp(Σ(c_i − r_i) / Σ n_i) − 1, paired over documents.

    Both p-values hold also where this sample happens to lack a few documents that lie far out (``interval.priced``),
    twice as far as the farthest seen, and where they lose it is ``RUINED_NATS`` per token at least: a sample without
    the heavy documents has a low mean and a low error at once. Against a rise of 1 % nothing survives with fewer than
    300 documents. Simulated at the threshold with log-normal rises of σ = 1.2 to 2, gamma, Pareto, mirrored log-normal,
    1 and 2 % ruined documents, and lengths of any kind, independent of the rises or not, 200 to 800 documents survive
    in at most 5 % and are falsified in at most 6 % (``tests/questions/cases/emad_f1.py``); of 400 documents half a per
    cent of which lose 2 nats survive in 11 %: more than is assumed.

    Args:
        nll_candidate: [documents] c_i, sums of −log p over each document's tokens, in nats.
        nll_reference: [documents] r_i, the same tokens at full depth.
        tokens: [documents] n_i ≥ 1.
        threshold: the rise to compare with, a fraction; 0.01 is 1 %.
        rng: source of the bootstrap samples; unused when ``draws`` is given.
        level: of the two-sided interval.
        draws: [resamples, documents] from ``document_draws``, to share between calls.
        worst: nats per token that an unseen document may lose; None: neither p-value pays for unseen documents, as
            where a separate promise bounds them.

    Raises:
        BadArgument: shapes differ, no document, a token count below 1, or a value that is not finite.
    """
    candidate, reference = (
        column_of(name, column, ByDocument)
        for name, column in (("nll_candidate", nll_candidate), ("nll_reference", nll_reference))
    )
    require_paired("nll_reference", nll_reference, nll_candidate, "both arms score the same documents")
    if not threshold > -1:
        raise BadArgument("threshold", threshold, "a rise above -1", "perplexity cannot fall by more than all of it")
    rise = candidate - reference
    rise[np.abs(rise) <= ROUNDING * np.abs(reference)] = 0.0  # the same decisions, added up in another order: a tie
    rate = mean_rate(
        nll_candidate.like(rise),
        tokens,
        threshold=math.log1p(threshold),
        rng=rng,
        level=level,
        draws=draws,
        unit="nats",
        worst=worst,
    )
    value, low, high = (relative_rise(bound) for bound in (rate.value, rate.low, rate.high))
    weight = pooled(tokens)
    largest = f"the largest has {100 * float(weight.max() / weight.sum()):.2g} % of the tokens"
    steep = f"it rises by {rate.value:.4g} nats per token, shown as the rise of {STEEPEST_NATS:g}"
    note = "; ".join(part for part in (steep if rate.value > STEEPEST_NATS else "", rate.note, largest) if part)
    return replace(rate, value=value, low=low, high=high, unit="relative rise", note=note)


def mean_rate(
    sums: Units,
    tokens: Units,
    *,
    threshold: float,
    rng: np.random.Generator,
    unit: str,
    level: float = 0.95,
    draws: Floats | None = None,
    worst: float | None = None,
) -> Estimate:
    """Σ x_i / Σ n_i over documents (or items), with the wider of a studentised bootstrap's and Student's interval.

    t* = (θ* − θ̂) / se*, where se is the linearised standard error of the ratio, sqrt(n/(n−1) Σ z_i²) / Σ n_i with
    z_i = x_i − θ n_i; SciPy's bootstrap has percentile, basic and BCa but no studentised interval. The bootstrap knows
    skew, and of 15 documents that differ among 60 it is too sure; Student's t knows no skew and is not. Of both the
    larger p-value and the wider bound count. At the threshold a 5 % bound then errs, on its worse side and at 30, 60
    and 200 documents, 4.9 % of the time with normal rates, 6.1 % with exponential ones, 7.1 % with log-normal ones of
    σ = 1 (800 simulations each; the bootstrap of n out of n errs 9.3 % there).

    Where more than half of all documents share one rate and fewer than ``FEWEST_DIFFERING`` have another, there is
    nothing to resample: see ``alike``.

    ``n`` of documents is their effective number, (Σ n_i)² / Σ n_i², rounded down: one that holds most of the tokens
    leaves little more than itself.

    Args:
        sums: [documents] x_i, summed over each document's tokens.
        tokens: [documents] n_i ≥ 1, of the same kind of unit.
        threshold, rng, level, draws: as in ``perplexity_rise``.
        unit: of x per token.
        worst: what a document that no sample shows may add per token. p_below then pays for it, and p_above for gains
            twice as large as the largest seen; None: neither pays.

    Raises:
        BadArgument: as in ``perplexity_rise``.
    """
    x, weight, noun = column_of("sums", sums, Units), column_of("tokens", tokens, type(sums)), sums.noun
    require_paired("tokens", tokens, sums, f"one count for each of the {noun}")
    if weight.min() < 1:
        raise BadArgument("tokens", int(weight.min()), f"at least 1 for each of the {noun}", "leave empty ones out")
    x, weight = (pooled(column) for column in (sums, tokens))
    n = len(x)
    if n == 1:
        value = float(x.sum() / weight.sum())
        return Estimate(value, -math.inf, math.inf, 1, 1.0, 1.0, unit, f"one {noun[:-1]} has no spread", noun)
    counted = effective(weight) if isinstance(sums, ByDocument) else n
    note = f"{n} unequal {noun} count as {counted}" if counted < n else ""
    common, apart = _common_rate(x, weight)
    differing = int(np.count_nonzero(apart))
    if differing < FEWEST_DIFFERING and 2 * differing < n:
        value, _, error = linearised(x, weight)
        away = float(np.abs(apart).max()) / float(weight.mean())
        few = {"threshold": threshold, "level": level, "worst": worst or 0.0}
        found = alike(value, common, away, differing, n, unit=unit, noun=noun, counted=counted, **few)
        least = math.ceil(counted * FEWEST_DIFFERING / differing) if differing else 0
        note = "; ".join(part for part in (found.method if differing else "", note) if part)
        return replace(found, distance=Distance(threshold - value, error, worst, least, 2 * counted > n), note=note)
    if draws is None:
        draws = document_draws(n, RESAMPLES, rng)
    if draws.ndim != 2 or draws.shape[1] != n:
        raise BadArgument("draws", draws.shape, f"shape [resamples, {n}]", "draw them for this number of documents")
    found = studentised(
        x, weight, draws, threshold=threshold, level=level, unit=unit, noun=noun, counted=counted, worst=worst
    )
    return replace(found, note=note)


def _common_rate(x: Floats, weight: Floats) -> tuple[float, Floats]:
    """The middle rate, and how far each unit's x lies from it: exactly 0 but for rounding."""
    middle = np.argsort(x / weight)[len(x) // 2]
    common = float(x[middle] / weight[middle])
    apart = x - common * weight
    apart[np.abs(apart) <= 8 * np.finfo(np.float64).eps * np.abs(x).max()] = 0.0
    return common, apart


def profile_steps(entropy_sums: Units, tokens: Units, *, threshold: float, rng: np.random.Generator) -> list[Estimate]:
    """Change of mean entropy from each layer to the next, H_{ℓ+1} − H_ℓ, clustered by document (or item).

    Args:
        entropy_sums: [documents, L] Σ_t H_ℓ(t) of each document, nats.
        tokens: [documents] tokens of each document.
        threshold: nats; 0 asks whether entropy rises at all.
        rng: one set of bootstrap samples is drawn from it and shared by all layers.

    Returns:
        L − 1 estimates; entry ℓ − 1 belongs to the step from layer ℓ to layer ℓ + 1.

    Raises:
        BadArgument: fewer than two layers, and as in ``mean_rate``.
    """
    sums = _profile(entropy_sums)
    draws = document_draws(len(entropy_sums.independent), RESAMPLES, rng)
    return [
        mean_rate(entropy_sums.like(step), tokens, threshold=threshold, rng=rng, unit="nats per layer", draws=draws)
        for step in np.diff(sums, axis=1).T
    ]


def profile_slope(entropy_sums: Units, tokens: Units, *, threshold: float, rng: np.random.Generator) -> Estimate:
    """Least-squares slope of mean entropy over the layers 1…L, nats per layer, clustered by document.

    The slope is linear in the layer means, so each document's own weighted sum can be resampled.
    Arguments and errors as in ``profile_steps``.
    """
    sums = _profile(entropy_sums)
    layer = np.arange(sums.shape[1]) - (sums.shape[1] - 1) / 2
    weighted = entropy_sums.like(sums @ (layer / (layer @ layer)))
    return mean_rate(weighted, tokens, threshold=threshold, rng=rng, unit="nats per layer")


def _profile(entropy_sums: Units) -> Floats:
    sums = np.asarray(entropy_sums.values, dtype=np.float64)
    if sums.ndim != 2 or sums.shape[1] < 2 or not len(sums):
        raise BadArgument("entropy_sums", f"shape {sums.shape}", "[documents, layers] with at least two layers")
    return sums


def slope_within_documents(
    x: Floats, y: Floats, document: DocumentOf, *, threshold: float, rng: np.random.Generator, unit: str
) -> Estimate:
    """Least-squares slope of ``y`` over ``x``, both [tokens], with a level for each document (fixed effects).

    Σ_d Σ (x−x̄_d)(y−ȳ_d) / Σ_d Σ (x−x̄_d)², in econometrics the within estimator: of tokens pooled over documents, long
    easy documents alone would make a slope (Simpson's paradox). It is a ratio of sums over documents: those are
    resampled. Documents whose x is the same everywhere weigh nothing and are left out.

    Raises:
        BadArgument: no spread in ``x`` within any document, and as in ``mean_rate``.
    """
    place = document.place
    tokens = np.bincount(place)
    away, beside = (column - (np.bincount(place, weights=column) / tokens)[place] for column in (x, y))
    weight, product = np.bincount(place, weights=away**2), np.bincount(place, weights=away * beside)
    seen = weight > 1e-9 * weight.sum()
    if not seen.any():
        raise BadArgument("x", "one value", "values that differ", "there is no slope over one position")
    scale = 2 / weight[seen].min()  # ``mean_rate`` wants weights of 1 and more; the ratio does not care
    parts = (ByDocument(column * scale, np.arange(len(seen))).among(seen) for column in (product, weight))
    return mean_rate(*parts, threshold=threshold, rng=rng, unit=unit)
