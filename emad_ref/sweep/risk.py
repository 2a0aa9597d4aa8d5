"""Learn-then-Test: the loosest threshold whose risk on unseen sequences is provably bounded.

Early-exit LLMs, Introduction, Eq. (1): P(E[D(Y_early, Y_full)] ≤ δ) ≥ 1 − ε, the outer probability over draws of the
calibration set. Two numbers, easily mixed up:

    δ  ``tolerance``  the risk that is tolerated: the largest admissible mean loss of a sequence
    ε  ``level``      the chance, over calibration sets, that the chosen threshold's risk exceeds δ after all

Candidates λ stand in an order fixed before the data are seen, strict (deep, safe) to loose (shallow, cheap). For each,
H_λ: "the risk R(λ) exceeds δ" has the Hoeffding–Bentkus p-value of its mean loss R̂ over n sequences,

    p = min( exp(−n·h₁(R̂ ∧ δ, δ)),  e·P(Bin(n, δ) ≤ ⌈nR̂⌉) ),    h₁(a, b) = a·log(a/b) + (1 − a)·log((1 − a)/(1 − b))

(Bates et al. 2021; valid at finite n for any i.i.d. losses in [0, 1]). Fixed-sequence testing walks the order, rejects
while p ≤ ε, stops at the first p > ε and returns the last λ that passed: no correction for the number of λ is owed,
and none may be skipped. Nothing passes → full depth, which loses nothing against itself and needs no certificate.

Hoeffding–Bentkus knows the mean alone. Where losses vary little, ``sweep.betting`` needs fewer sequences, and its
p-values take the same walk (``fixed_sequence``).

The module knows no model and no rule: it is given losses per sequence, made by whoever decoded. What it promises holds
for sequences drawn like the calibration ones, and for the mean of the given loss, not for each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from emad_ref.errors import BadArgument
from emad_ref.record import Floats

PValue = Callable[[Floats, int, float], Floats]  # (Σ loss [λ], sequences n, tolerance δ) → p [λ] of "risk exceeds δ"


@dataclass(frozen=True, eq=False)
class Certificate:
    """What fixed-sequence testing found.

    ``index``      of the last λ that passed, counted from 0 in the order tested; None = none passed: full depth.
    ``p_values``   [λ] of every candidate; only the first ``tested`` had a say, whatever the later ones are.
    ``mean_loss``  [λ] R̂.
    ``reason``     one sentence: why this λ and no looser one, or why none.
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
class Selection:
    """A certificate and what it buys: blocks per token at the chosen λ, and blocks saved against full depth."""

    certificate: Certificate
    mean_depth: float
    blocks_saved: float


def hoeffding_bentkus(loss_sums: Floats, n: int, tolerance: float) -> Floats:
    """[λ] p-values of "the risk exceeds ``tolerance``", from sums of ``n`` i.i.d. losses in [0, 1]."""
    mean = np.minimum(loss_sums / n, tolerance)
    divergence = special.rel_entr(mean, tolerance) + special.rel_entr(1 - mean, 1 - tolerance)
    bentkus = math.e * special.bdtr(np.ceil(loss_sums), n, tolerance)
    # Where R̂ ≥ δ the first term is 1 up to rounding of the divergence; no p-value is larger.
    return np.asarray(np.minimum(np.minimum(np.exp(-n * divergence), bentkus), 1.0), dtype=np.float64)


def hoeffding(loss_sums: Floats, n: int, tolerance: float) -> Floats:
    """[λ] p-values of Hoeffding's inequality alone, exp(−2n(δ − R̂)₊²): valid, and blind to small variance.

    For comparison: at δ = 1 %, ε = 5 % and no loss at all it asks for 14,979 sequences, Hoeffding–Bentkus for 299.
    """
    return np.asarray(np.exp(-2 * n * np.maximum(tolerance - loss_sums / n, 0.0) ** 2), dtype=np.float64)


def needed_sequences(tolerance: float, level: float) -> int:
    """The fewest sequences that can certify anything: (1 − δ)ⁿ ≤ ε, Hoeffding–Bentkus with zero loss.

    >>> needed_sequences(tolerance=0.01, level=0.05)
    299

    Raises:
        BadArgument: tolerance or level not strictly between 0 and 1.
    """
    _check_bounds(tolerance, level)
    return math.ceil(math.log(level) / math.log1p(-tolerance))


def textual_consistency(dissimilarity: Floats) -> Floats:
    """[sequences, λ] loss D(Y_early, Y_full): how far each output lies from the model's own full-depth output.

    Args:
        dissimilarity: [sequences, λ] in [0, 1], 0 = the same text; e.g. 1 − ROUGE-L or 1 − token F1 between the two.

    Raises:
        BadArgument: no matrix, empty, or an entry outside [0, 1].
    """
    return _matrix("dissimilarity", dissimilarity)


def risk(full: Floats, early: Floats) -> Floats:
    """[sequences, λ] loss max(0, R_early − R_full): what is worse against the reference; what is better earns nothing.

    Args:
        full: [sequences] risk of the full-depth output in [0, 1], e.g. 1 − F1 against the reference answer.
        early: [sequences, λ] risk of the early-exit output, likewise.

    Raises:
        BadArgument: shapes that do not belong together, empty, or an entry outside [0, 1].
    """
    full, early = _column("full", full), _matrix("early", early)
    if len(full) != len(early):
        raise BadArgument("full", f"{len(full)} sequences", f"{len(early)}", "both outputs answer the same sequences")
    return np.maximum(early - full[:, None], 0.0)


def certify(
    losses: Floats, *, tolerance: float, level: float = 0.05, p_value: PValue = hoeffding_bentkus
) -> Certificate:
    """The last λ, strict to loose, up to which every λ's risk is shown to be at most ``tolerance``.

    Args:
        losses: [sequences, λ] in [0, 1]; columns in an order fixed without looking at these losses. Risk need not be
            monotone along it: the promise holds anyway, a bad order only stops early.
        tolerance: δ.
        level: ε.
        p_value: ``hoeffding_bentkus``, or another valid one to compare with.

    Raises:
        BadArgument: losses as in ``textual_consistency``; tolerance or level not strictly between 0 and 1.
    """
    _check_bounds(tolerance, level)
    losses = _matrix("losses", losses)
    n = len(losses)
    # fsum rounds once: Σ of ten losses 0.1 is then 1, and ⌈Σ⌉ does not depend on the order of the sequences.
    sums = np.array([math.fsum(column) for column in losses.T.tolist()])
    return fixed_sequence(p_value(sums, n, tolerance), sums / n, n, tolerance, level)


def fixed_sequence(p: Floats, mean: Floats, n: int, tolerance: float, level: float) -> Certificate:
    """The walk alone, along ``p`` [λ] of "the risk exceeds ``tolerance``" in the order fixed before; ``mean`` [λ] R̂.

    Whatever the p-values are: each has to be valid by itself, for ``n`` independent sequences.
    """
    passing = int(np.argmax(np.append(p > level, True)))
    return Certificate(
        index=passing - 1 if passing else None,
        p_values=p,
        mean_loss=mean,
        tested=min(passing + 1, len(p)),
        sequences=n,
        tolerance=tolerance,
        level=level,
        reason=_reason(passing, p, mean, n, tolerance, level),
    )


def _reason(passing: int, p: Floats, mean: Floats, n: int, tolerance: float, level: float) -> str:
    if passing == len(p):
        return f"all {len(p)} thresholds pass: a looser one might as well"
    stopped = (
        f"threshold {passing + 1} of {len(p)} fails: mean loss {mean[passing]:.4g}, p = {p[passing]:.3g} > {level:g}"
    )
    if passing:
        return stopped
    needed = needed_sequences(tolerance, level)
    short = f"; {n} sequences certify nothing, {needed:,} without any loss would" if n < needed else ""
    return f"full depth: {stopped}{short}"


def selected(
    losses: Floats,
    mean_depths: Floats,
    layers: int,
    *,
    tolerance: float,
    level: float = 0.05,
    p_value: PValue = hoeffding_bentkus,
) -> Selection:
    """The certified λ with its depth; full depth, saving 0 blocks, where none is certified.

    Args:
        losses, tolerance, level, p_value: as in ``certify``.
        mean_depths: [λ] blocks per token at each λ, between 0 and ``layers``. Depth is reported, not certified.
        layers: L.

    Raises:
        BadArgument: as in ``certify``; depths that do not belong to the losses' λ or lie outside 0–L.
    """
    certificate = certify(losses, tolerance=tolerance, level=level, p_value=p_value)
    depth = _depths(mean_depths, layers, len(certificate.p_values))
    chosen = float(layers) if certificate.index is None else float(depth[certificate.index])
    return Selection(certificate, chosen, layers - chosen)


def _check_bounds(tolerance: float, level: float) -> None:
    for name, value in (("tolerance", tolerance), ("level", level)):
        if not 0 < value < 1:
            raise BadArgument(name, value, "a number strictly between 0 and 1", "δ is tolerated risk, ε its chance")


def _matrix(name: str, values: Floats) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size:
        raise BadArgument(name, f"shape {array.shape}", "[sequences, thresholds] with at least one of each")
    return _unit_interval(name, array)


def _column(name: str, values: Floats) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise BadArgument(name, f"shape {array.shape}", "one column with at least one value")
    return _unit_interval(name, array)


def _unit_interval(name: str, array: Floats) -> Floats:
    outside = ~((array >= 0) & (array <= 1))  # NaN is outside
    if outside.any():
        raise BadArgument(name, float(array[outside][0]), "values in [0, 1]", "scale the loss; the bounds rest on it")
    return array


def _depths(mean_depths: Floats, layers: int, candidates: int) -> Floats:
    depth = np.asarray(mean_depths, dtype=np.float64)
    if depth.shape != (candidates,):
        raise BadArgument("mean_depths", f"shape {depth.shape}", f"shape ({candidates},)", "one depth per threshold")
    if not ((depth >= 0) & (depth <= layers)).all():
        raise BadArgument("mean_depths", depth.tolist(), f"blocks per token between 0 and {layers}")
    return depth
