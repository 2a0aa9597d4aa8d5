"""Regressions of calibration: isotonic targets, corrections of an estimator, a linear probe.

    E*[H_ℓ] = isotonic(mean H_ℓ), non-increasing over probes             (EMAD, "Calibration details")
    H_ℓ ≈ a_ℓ·Ĥ_ℓ + c_ℓ on held-out tokens, by least squares             (EMAD, "Entropy estimation at inference")
    H_ℓ ≈ w_ℓ·x_ℓ + c_ℓ, x the head's input, by ridge regression         (``probes.estimators``)

The last two use ``RegressionMoments``, sums over tokens that add up over batches and runs, with E × E memory per probe
for any corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy import optimize
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator
from emad_ref.record import Floats, Ints
from emad_ref.signals import to_numpy_float64

RIDGE_PENALTY = 1e-3  # relative to the mean variance of an entry of x: keeps the fit finite if entries are collinear


def isotonic_targets(probes: Sequence[int], mean_nats: Floats, tokens: Ints) -> Floats:
    """[probes] the non-increasing curve nearest to ``mean_nats`` [probes] in least squares weighted by ``tokens``.

    Raises:
        BadArgument: lengths that differ, or a mean that is not a finite number.
    """
    if len(probes) != len(mean_nats) or len(probes) != len(tokens):
        raise BadArgument("mean_nats", np.shape(mean_nats), f"one mean and one token count per probe ({len(probes)})")
    if not np.isfinite(mean_nats).all():
        raise BadArgument("mean_nats", np.asarray(mean_nats).tolist(), "finite entropies", "take the trace again")
    if len(probes) == 0:
        return np.empty(0)
    nats, weights = (np.asarray(values, dtype=float) for values in (mean_nats, tokens))
    targets: Floats = optimize.isotonic_regression(nats, weights=weights, increasing=False).x
    return targets


@dataclass(frozen=True, eq=False)
class RegressionMoments:
    """Sums over ``tokens`` pairs of x [width] and y, in float64: Σx, Σy, Σxxᵀ, Σxy. y is a number, or [outputs]."""

    tokens: int
    x: Floats
    y: Floats
    xx: Floats
    xy: Floats

    @staticmethod
    def empty(width: int, *outputs: int) -> RegressionMoments:
        """Moments of no pairs."""
        return RegressionMoments(
            0, np.zeros(width), np.zeros(outputs), np.zeros((width, width)), np.zeros((width, *outputs))
        )

    @staticmethod
    def from_pairs(x: Floats, y: Floats) -> RegressionMoments:
        """The sums of ``x`` [tokens, width] and ``y`` [tokens] or [tokens, outputs].

        Raises:
            BadArgument: other shapes, or values that are not finite numbers.
        """
        x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
        if x.ndim != 2 or y.ndim not in (1, 2) or y.shape[:1] != x.shape[:1]:
            raise BadArgument("x, y", (x.shape, y.shape), "[tokens, width] and [tokens], or [tokens, outputs]")
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise BadArgument("x, y", "NaN or infinite entries", "finite numbers", "leave out what was not read")
        return RegressionMoments(len(x), x.sum(axis=0), np.asarray(y.sum(axis=0)), x.T @ x, x.T @ y)

    def __add__(self, other: RegressionMoments) -> RegressionMoments:
        return RegressionMoments(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def fit_ridge(moments: RegressionMoments, penalty: float = RIDGE_PENALTY) -> Floats:
    """[width + 1] weights w and, last, the intercept c that minimise Σ(w·x + c − y)² + n·λ·|w|².

    For several outputs [width + 1, outputs]. λ is ``penalty`` times the mean variance of an entry of x, so it does not
    depend on x's unit; c is not penalised.

    Raises:
        BadArgument: fewer than two tokens, a negative penalty, x that never varies, or, without a penalty, x with
            linearly dependent entries.
    """
    system = ridge_covariance_matrix(moments, penalty)
    mean_x, mean_y = moments.x / moments.tokens, moments.y / moments.tokens
    weights = np.linalg.solve(system, moments.xy / moments.tokens - np.multiply.outer(mean_x, mean_y))
    return np.concatenate([weights, np.asarray(mean_y - mean_x @ weights)[None]]).astype(np.float64)


def ridge_covariance_matrix(moments: RegressionMoments, penalty: float = RIDGE_PENALTY) -> Floats:
    """[width, width] covariance of x plus λ on its diagonal, the system that ``fit_ridge`` solves.

    Raises:
        BadArgument: as ``fit_ridge``.
    """
    n, width = moments.tokens, len(moments.x)
    if n < 2:
        raise BadArgument("tokens", n, "at least 2", "calibrate on more text")
    if penalty < 0:
        raise BadArgument("penalty", penalty, "a number ≥ 0")
    mean_x = moments.x / n
    covariance = moments.xx / n - np.outer(mean_x, mean_x)
    variance, largest = float(np.trace(covariance)) / width, float(np.trace(moments.xx)) / n / width
    if variance <= n * np.finfo(np.float64).eps * largest:  # the rounding of a constant
        raise BadArgument("x", f"{n} equal values", "values that vary", "nothing can be read off a constant")
    system: Floats = covariance + penalty * variance * np.eye(width)
    if np.linalg.matrix_rank(system, hermitian=True) < width:
        raise BadArgument("penalty", penalty, "a number > 0 where entries of x follow from one another")
    return system


def reduced_rank_factors(slopes: Floats, system: Floats, rank: int) -> tuple[Floats, Floats]:
    """(U, V), each [D, r], of the best x ↦ U·Vᵀ·x, given the unrestricted solution ``slopes`` and ``system``."""
    _, directions = np.linalg.eigh(slopes.T @ system @ slopes)  # ascending
    up = directions[:, -rank:]
    return up, slopes @ up


def fit_linear_correction(raw: Floats, full: Floats) -> tuple[float, float]:
    """(slope, intercept) of the least-squares line from estimates ``raw`` [tokens] to ``full`` entropies [tokens].

    Fit it on tokens that neither the estimator nor the thresholds used.

    Raises:
        BadArgument: lengths that differ, fewer than two tokens, no finite numbers, or estimates or entropies that never
            vary, which would give all tokens one value.
    """
    raw, full = np.asarray(raw, dtype=np.float64), np.asarray(full, dtype=np.float64)
    if raw.ndim != 1 or raw.shape != full.shape:
        raise BadArgument("raw, full", (raw.shape, full.shape), "one estimate and one entropy per token")
    for name, values in (("raw", raw), ("full", full)):
        if len(values) and np.ptp(values) == 0:
            raise BadArgument(name, f"{len(values)} times {values[0]:.4g}", "values that vary", "use more tokens")
    slope, intercept = fit_ridge(RegressionMoments.from_pairs(raw[:, None], full), penalty=0).tolist()
    return slope, intercept


def correct_estimator(estimator: EntropyEstimator, raw: Floats, full: Floats) -> EntropyEstimator:
    """``estimator`` with the line of each probe, from ``raw`` and ``full`` [tokens, probes] on held-out tokens.

    Raises:
        BadArgument: as ``fit_linear_correction``; shapes that differ.
    """
    if np.ndim(raw) != 2 or np.shape(raw) != np.shape(full):
        raise BadArgument("raw, full", (np.shape(raw), np.shape(full)), "two arrays [tokens, probes]")
    lines = tuple(
        fit_linear_correction(mine, theirs) for mine, theirs in zip(np.transpose(raw), np.transpose(full), strict=True)
    )
    return replace(estimator, correction=lines)


class LinearProbeFit:
    """Fits linear probes in the calibration pass: pass it to the trace as ``observe``, then call ``fit_estimator``."""

    def __init__(self, stepper: Stepper, probes: Sequence[int]):
        self._stepper = stepper
        self.moments = {probe: RegressionMoments.empty(stepper.unembedding.shape[1]) for probe in probes}

    def __call__(self, layer: int, states: Tensor, entropy: Tensor) -> None:
        """Add states [tokens, D] after ``layer`` and their full entropies [tokens] in nats."""
        if layer in self.moments:
            x = self._stepper.apply_final_norm(states)
            self.moments[layer] += RegressionMoments.from_pairs(*map(to_numpy_float64, (x, entropy)))

    def fit_estimator(self, penalty: float = RIDGE_PENALTY) -> EntropyEstimator:
        """The linear estimator of these probes.

        Raises:
            BadArgument: as ``fit_ridge``.
        """
        rows = (fit_ridge(moments, penalty).tolist() for moments in self.moments.values())
        return EntropyEstimator("linear", weights=tuple(tuple(row) for row in rows))
