"""Learn-then-Test: the loosest threshold whose risk on unseen sequences is provably bounded.

Early-exit LLMs, Introduction, Eq. (1): P(E[D(Y_early, Y_full)] ≤ δ) ≥ 1 − ε, the outer probability over draws of the
calibration set.

    δ  ``tolerance``  the tolerated risk: the largest admissible mean loss of a sequence
    ε  ``level``      the probability, over calibration sets, that the chosen threshold's risk exceeds δ

Candidates λ are ordered before the data are seen, strict (deep, safe) to loose (shallow, cheap). Each H_λ, "the risk
R(λ) exceeds δ", has a p-value. Fixed-sequence testing walks the order, rejects while p ≤ ε, stops at the first p > ε
and returns the last λ that passed, without a correction for the number of λ. If none passes → full depth.

Hoeffding–Bentkus uses only the mean loss R̂ over n sequences (Bates et al. 2021; valid at finite n, losses in [0, 1]):

    p = min( exp(−n·h₁(R̂ ∧ δ, δ)),  e·P(Bin(n, δ) ≤ ⌈nR̂⌉) ),    h₁(a, b) = a·log(a/b) + (1 − a)·log((1 − a)/(1 − b))

Betting (Waudby-Smith & Ramdas, 2010.09686) needs fewer sequences if losses vary little. It bets against "the risk is at
least m" document after document, at odds that are fair if it is m:

    K_t = Π_{i ≤ t} (1 + λ_i·(m − x_i)),    p = min(1, 1 / max_t K_t)

x_i in [0, 1] is the loss of document i, 0 ≤ λ_i ≤ ¾/(1 − m) the stake, set before x_i is seen. If the risk is m or
more, K is a non-negative supermartingale that starts at 1, so that P(max_t K_t ≥ 1/ε) ≤ ε (Ville): valid at every n.
Stakes are the predictable plug-in for a number n of documents that is known beforehand:

    λ_i = √(2·ln(1/ε) / (n·σ̂²_{i−1})),    σ̂²_i = (¼ + Σ_{j ≤ i} (x_j − μ̂_j)²) / (i + 1)
    μ̂_i = (½ + Σ_{j ≤ i} x_j) / (i + 1)

Betting depends on the order, and a text's order is no random one: after 180 documents without loss the capital is
enough to certify any loss of the next 120. So documents are bet on in an order permuted once, by a fixed seed. A
threshold whose mean loss on these documents exceeds δ is not certified, whatever the capital was on the way.

The promise holds for sequences drawn like the calibration ones, and for the mean of the given loss, not for each one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from emad_ref.errors import BadArgument
from emad_ref.record import Floats

PValue = Callable[[Floats, int, float], Floats]  # (Σ loss [λ], sequences n, tolerance δ) → p [λ] of "risk exceeds δ"


@dataclass(frozen=True, eq=False)
class FixedSequenceTestResult:
    """Result of fixed-sequence testing.

    ``index``      of the last λ that passed, counted from 0 in test order; None: none passed, full depth.
    ``p_values``   [λ] of every candidate; only the first ``tested`` count.
    ``mean_loss``  [λ] R̂.
    ``reason``     one sentence on the choice of this λ and no looser one, or of none.
    """

    index: int | None
    p_values: Floats
    mean_loss: Floats
    tested: int
    sequences: int
    tolerance: float
    level: float
    reason: str


@dataclass(frozen=True)
class RiskSelection:
    """A certificate and its saving: blocks per token at the chosen λ, and blocks saved against full depth."""

    certificate: FixedSequenceTestResult
    mean_depth: float
    blocks_saved: float


def hoeffding_bentkus_pvalues(loss_sums: Floats, n: int, tolerance: float) -> Floats:
    """[λ] p-values of "the risk exceeds ``tolerance``", from sums of ``n`` i.i.d. losses in [0, 1]."""
    mean = np.minimum(loss_sums / n, tolerance)
    divergence = special.rel_entr(mean, tolerance) + special.rel_entr(1 - mean, 1 - tolerance)
    bentkus = math.e * special.bdtr(np.ceil(loss_sums), n, tolerance)
    # If R̂ ≥ δ the first term is 1 up to rounding of the divergence; no p-value is larger.
    return np.asarray(np.minimum(np.minimum(np.exp(-n * divergence), bentkus), 1.0), dtype=np.float64)


def min_sequences_to_certify(tolerance: float, level: float) -> int:
    """The fewest sequences that can certify a λ: (1 − δ)ⁿ ≤ ε, Hoeffding–Bentkus with zero loss.

    >>> min_sequences_to_certify(tolerance=0.01, level=0.05)
    299

    Raises:
        BadArgument: tolerance or level not strictly between 0 and 1.
    """
    _require_valid_bounds(tolerance, level)
    return math.ceil(math.log(level) / math.log1p(-tolerance))


def require_textual_consistency_losses(dissimilarity: Floats) -> Floats:
    """[sequences, λ] loss D(Y_early, Y_full), the distance of each output from the model's own full-depth output.

    Args:
        dissimilarity: [sequences, λ] in [0, 1], 0 = the same text; e.g. 1 − ROUGE-L or 1 − token F1 between the two.

    Raises:
        BadArgument: no matrix, empty, or an entry outside [0, 1].
    """
    return _unit_matrix("dissimilarity", dissimilarity)


def certify_loosest_threshold(
    losses: Floats, *, tolerance: float, level: float = 0.05, p_value: PValue = hoeffding_bentkus_pvalues
) -> FixedSequenceTestResult:
    """The last λ, strict to loose, up to which all risks are shown to be at most ``tolerance``.

    Args:
        losses: [sequences, λ] in [0, 1]; columns in an order fixed without looking at these losses. Risk need not be
            monotone along it: a bad order only stops early.
        tolerance: δ.
        level: ε.
        p_value: ``hoeffding_bentkus_pvalues``, or another valid one to compare with.

    Raises:
        BadArgument: losses as in ``require_textual_consistency_losses``; tolerance or level not strictly between 0 and
            1.
    """
    _require_valid_bounds(tolerance, level)
    losses = _unit_matrix("losses", losses)
    n = len(losses)
    # fsum rounds once: Σ of ten losses 0.1 is then 1, and ⌈Σ⌉ does not depend on the order of the sequences.
    sums = np.array([math.fsum(column) for column in losses.T.tolist()])
    return fixed_sequence_test(p_value(sums, n, tolerance), sums / n, n, tolerance, level)


def fixed_sequence_test(p: Floats, mean: Floats, n: int, tolerance: float, level: float) -> FixedSequenceTestResult:
    """Fixed-sequence test of ``p`` [λ] for "the risk exceeds ``tolerance``" in an order fixed before; ``mean`` [λ] R̂.

    Each p-value has to be valid on its own, for ``n`` independent sequences.
    """
    passing = int(np.argmax(np.append(p > level, True)))
    return FixedSequenceTestResult(
        index=passing - 1 if passing else None,
        p_values=p,
        mean_loss=mean,
        tested=min(passing + 1, len(p)),
        sequences=n,
        tolerance=tolerance,
        level=level,
        reason=_stopping_reason(passing, p, mean, n, tolerance, level),
    )


def _stopping_reason(passing: int, p: Floats, mean: Floats, n: int, tolerance: float, level: float) -> str:
    if passing == len(p):
        return f"all {len(p)} thresholds pass: a looser one might as well"
    stopped = (
        f"threshold {passing + 1} of {len(p)} fails: mean loss {mean[passing]:.4g}, p = {p[passing]:.3g} > {level:g}"
    )
    if passing:
        return stopped
    needed = min_sequences_to_certify(tolerance, level)
    short = f"; {n} sequences certify nothing, {needed:,} without any loss would" if n < needed else ""
    return f"full depth: {stopped}{short}"


def select_threshold(
    losses: Floats,
    mean_depths: Floats,
    layers: int,
    *,
    tolerance: float,
    level: float = 0.05,
    p_value: PValue = hoeffding_bentkus_pvalues,
) -> RiskSelection:
    """The certified λ with its depth; full depth, saving 0 blocks, if none is certified.

    Args:
        losses, tolerance, level, p_value: as in ``certify_loosest_threshold``.
        mean_depths: [λ] blocks per token at each λ, between 0 and ``layers``. Depth is reported, not certified.
        layers: L.

    Raises:
        BadArgument: as in ``certify_loosest_threshold``; depths that do not belong to the losses' λ or lie outside 0–L.
    """
    certificate = certify_loosest_threshold(losses, tolerance=tolerance, level=level, p_value=p_value)
    depth = _valid_depths(mean_depths, layers, len(certificate.p_values))
    chosen = float(layers) if certificate.index is None else float(depth[certificate.index])
    return RiskSelection(certificate, chosen, layers - chosen)


def _require_valid_bounds(tolerance: float, level: float) -> None:
    for name, value in (("tolerance", tolerance), ("level", level)):
        if not 0 < value < 1:
            raise BadArgument(name, value, "a number strictly between 0 and 1", "δ is tolerated risk, ε its chance")


def _unit_matrix(name: str, values: Floats) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size:
        raise BadArgument(name, f"shape {array.shape}", "[sequences, thresholds] with at least one of each")
    outside = ~((array >= 0) & (array <= 1))  # NaN is outside
    if outside.any():
        raise BadArgument(name, float(array[outside][0]), "values in [0, 1]", "scale the loss; the bounds rest on it")
    return array


def _valid_depths(mean_depths: Floats, layers: int, candidates: int) -> Floats:
    depth = np.asarray(mean_depths, dtype=np.float64)
    if depth.shape != (candidates,):
        raise BadArgument("mean_depths", f"shape {depth.shape}", f"shape ({candidates},)", "one depth per threshold")
    if not ((depth >= 0) & (depth <= layers)).all():
        raise BadArgument("mean_depths", depth.tolist(), f"blocks per token between 0 and {layers}")
    return depth


ORDER_SEED = 0  # of the one permutation of documents
MAX_STAKE = 0.75  # largest stake on one document, as share of the capital
POWER = 0.8
DRAWS = 400  # simulated calibration sets: a power of 0.8 to within 0.02
MAX_DOCUMENTS = 2**13  # documents; above this, no practical number suffices


def betting_pvalues(losses: NDArray[np.floating], tolerance: float, level: float) -> Floats:
    """[λ] p-values of "the risk is at least ``tolerance``", from ``losses`` [documents, λ] in [0, 1].

    ``level``: ε at which stakes are set; at any other the p-values stay valid, and need more documents. Documents are
    taken in an order permuted once; p is 1 where the observed mean loss exceeds ``tolerance``.
    """
    x = np.asarray(losses, dtype=np.float64)[np.random.default_rng(ORDER_SEED).permutation(len(losses))]
    counts = np.arange(1, len(x) + 1).reshape(-1, *[1] * (x.ndim - 1)) + 1.0
    mean = (0.5 + np.cumsum(x, axis=0)) / counts
    variance = (0.25 + np.cumsum((x - mean) ** 2, axis=0)) / counts
    before = np.concatenate([np.full_like(x[:1], 0.25), variance[:-1]])
    stake = np.minimum(np.sqrt(2 * math.log(1 / level) / (len(x) * before)), MAX_STAKE / (1 - tolerance))
    capital = np.cumsum(np.log1p(stake * (tolerance - x)), axis=0).max(axis=0)
    return np.where(x.mean(axis=0) > tolerance, 1.0, np.exp(-np.maximum(capital, 0.0)))


def simulate_certification_power(
    losses: NDArray[np.floating], documents: int, tolerance: float, level: float, *, seed: int = 0
) -> float:
    """Share of calibration sets of ``documents`` documents, drawn from ``losses`` [n, λ], that certify the last λ.

    All λ before it have to pass too. This estimate treats the observed losses as the population.
    """
    rng = np.random.default_rng(seed)
    indices = rng.integers(len(losses), size=(documents, DRAWS))
    for column in losses.T[::-1]:  # the last first: a set that fails it needs no others
        indices = indices[:, betting_pvalues(column[indices], tolerance, level) <= level]
    return float(indices.shape[1] / DRAWS)


def documents_needed_to_certify(
    losses: NDArray[np.floating], tolerance: float, level: float, *, seed: int = 0
) -> int | None:
    """Approximate number of documents that certify the last λ of ``losses`` [n, λ] in 80 % of draws; None: above 8,192.

    By doubling, then bisection in steps of 2 %. No test could use fewer than (1 − m)ⁿ ≤ ε.
    """
    if losses.mean(axis=0).max() >= tolerance:
        return None

    def enough(documents: int) -> bool:
        return simulate_certification_power(losses, documents, tolerance, level, seed=seed) >= POWER

    low = high = min_sequences_to_certify(tolerance, level)
    while not enough(high):
        low, high = high, 2 * high
        if high > MAX_DOCUMENTS:
            return None
    while high > 1.02 * low + 1:
        middle = max(math.isqrt(low * high), low + 1)  # the root of n (n + 2) is n itself
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
