"""The one table of tolerances: largest honest differences, and the largest noise that a decoder may declare.

``tolerance``                 of a logit, by family, dtype and backend; all others are multiples of it
``measured_tolerance``        of the logits at one position, by the rounding measured there
``max_logit_error``           of a logit that a point emits; contrasts sum several errors
``max_tied_gap``              between two logits of which either may lead: a tie
``max_log_prob_error``        of a log-probability or NLL
``signal_noise_factor``       of a signal at a probe; ``reference_logits.signal_sensitivity`` where it moves faster
``TRACE_ROUNDING``            of a trace; ``ROLLING_BITS_FACTOR``: of a rolling mean of entropy
``FLOAT32_DRAW``              of a draw: the chance that rounding changes it

Differences are absolute: in logits, and in nats for signals and NLL. A cached step and a pass over the whole sequence
sum the same products in another order. The bounds are about three times the differences observed on small random
models; accelerator rows are extrapolated from the CPU's, not measured.

Trained models have positions that amplify rounding a hundredfold: two float32 passes of SmolLM2-135M, whose logits
reach 40, differ by 2e-5 at the median of random tokens, and by up to 0.015 where a token nearly becomes an attention
sink. ``measured_tolerance`` measures one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from emad_ref.errors import BadArgument
from emad_ref.models.families import get_family
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints
from emad_ref.signals import SIGNALS
from pytest_emad.audit.finding import Finding

Tolerance = TypeVar("Tolerance", float, Floats)  # one, or one for each position


class RoundingLens(Protocol):
    """What this module asks of a ``reference_logits.Lens``."""

    def __call__(self, tokens: Ints) -> ArrayLike:
        """Logits [n, L, V]."""

    def max_rounding_error(self, tokens: Ints, layers: Sequence[int]) -> float:
        """Largest honest difference by rounding of a logit of the last of ``tokens`` after ``layers``; 0: unknown."""


# (float32 inside, dtype) → (on the CPU, on an accelerator). "Seen": largest difference between token-by-token cached
# decoding and one pass, small random models of 8 and 24 layers with logits up to 10, six families.
TOLERANCES: dict[tuple[bool, str], tuple[float, float]] = {
    (False, "float64"): (1e-9, 1e-9),  # only the order of summation: 2e-14 seen, with room for real depth and width
    (True, "float64"): (5e-6, 5e-6),  # RMSNorm, or eager softmax, computes in float32 even here: 1.5e-6 seen
    # 24 bits through every layer; accelerators split reductions by shape, and TF32 must be off
    (False, "float32"): (2e-4, 1e-3),  # 1.3e-5 seen
    (True, "float32"): (2e-4, 1e-3),  # 4e-5 seen
    # 11 and 8 bits, and a rounding around each float32 norm; twice as much if sums split by shape, so that batch, cache
    # and pass all differ
    (False, "float16"): (0.06, 0.12),  # 0.02 seen
    (True, "float16"): (0.25, 0.5),  # 0.08 seen
    (False, "bfloat16"): (0.4, 0.8),  # 0.13 seen
    (True, "bfloat16"): (1.0, 2.0),  # 0.34 seen
}
DTYPES: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
BACKENDS: tuple[str, ...] = ("cpu", "cuda", "mps", "xpu")


def tolerance(family: str, dtype: str, backend: str, kernel: str = "sdpa") -> float:
    """Largest honest difference, in logits and in nats, on ``backend`` (a device type).

    ``family``: a config's ``model_type``. ``kernel``: of attention; an eager softmax is in float32 in any family, less
    exact only than float64.

    Raises:
        BadArgument: a family, dtype or backend without a row.
    """
    inside = get_family(family).float32_inside or (kernel == "eager" and dtype == "float64")
    if dtype not in DTYPES:
        raise BadArgument("dtype", dtype, f"one of {', '.join(DTYPES)}")
    if backend not in BACKENDS:
        raise BadArgument("backend", backend, f"one of {', '.join(BACKENDS)}")
    return TOLERANCES[inside, dtype][backend != "cpu"]


# ---------------------------------------------------------------- of other quantities


def signal_noise_factor(point: OperatingPoint) -> float:
    """Largest error of a signal at a probe, in multiples of a logit's tolerance."""
    slopes = [abs(slope) for slope, _ in point.estimator.correction]
    return SIGNALS[point.signal].noise * max(1.0, *slopes) if slopes else SIGNALS[point.signal].noise


def emission_noise_factor(point: OperatingPoint) -> float:
    """Largest error of an emitted logit, in multiples of a logit's tolerance; contrasts sum several errors."""
    return 1.0 if SIGNALS[point.signal].is_single_layer else SIGNALS[point.signal].noise


def max_logit_error(point: OperatingPoint | None, tolerance: Tolerance) -> Tolerance:
    """Largest error of a logit that ``point`` emits; None: of full depth."""
    return tolerance * (1.0 if point is None else emission_noise_factor(point))


def max_tied_gap(point: OperatingPoint | None, tolerance: Tolerance) -> Tolerance:
    """Largest gap between two emitted logits at which either may lead, since each has an error; None: full depth."""
    return 2 * max_logit_error(point, tolerance)


def max_log_prob_error(point: OperatingPoint | None, tolerance: Tolerance) -> Tolerance:
    """Largest error of a log-probability in nats: of its logit, and of the normaliser. None: of full depth."""
    return 2 * max_logit_error(point, tolerance)


# of a trace, which holds float32: 6e-8 of values up to tens of nats, and room for the sum over the vocabulary
TRACE_ROUNDING = 1e-5
ROLLING_BITS_FACTOR = 2.0  # error of a rolling mean of entropy in bits, in tolerances: 1 / ln 2, and room
FLOAT32_DRAW = 1e-5  # chance that a sum of float32 probabilities changes a draw


# ---------------------------------------------------------------- measured at one position

# Times a logit's largest move under random rounding of states. Seen: cached decoding and one pass differ by up to 1.6,
# 1.0 and 0.4 times that in float32, float16 and bfloat16 (185 positions each of four models, two layers).
ROUNDING_FACTORS: dict[str, float] = {"float64": 4.0, "float32": 4.0, "float16": 2.0, "bfloat16": 1.0}


def measured_tolerance(lens: RoundingLens, tokens: Ints, layers: Sequence[int], tolerance: float) -> float:
    """``tolerance``, or the measured rounding of the logits of the last of ``tokens`` after ``layers``, if larger."""
    return max(tolerance, lens.max_rounding_error(tokens, layers))


def find_first_excess(
    lens: RoundingLens, tokens: Ints, first: int, off: Floats, layers: Sequence[int], tolerance: float
) -> tuple[int, float] | None:
    """The first position with a difference above ``tolerance`` and the rounding measured there; None without one.

    ``off`` float64 [m]: differences of logits after one of ``layers`` at positions ``first`` … of ``tokens``; NaN
    exceeds everything. Returns the index into ``off`` and the allowed difference.
    """
    for at in np.flatnonzero(~(off <= tolerance)).tolist():
        allowed = measured_tolerance(lens, tokens[: first + at + 1], layers, tolerance)
        if not off[at] <= allowed:
            return at, allowed
    return None


MAX_ROUNDINGS = 16
UNIT_ROUNDOFF: dict[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST_PRECISE = max(UNIT_ROUNDOFF, key=UNIT_ROUNDOFF.__getitem__)


def largest_declarable_noise(lens: RoundingLens, tokens: Ints, tolerance: float) -> float:
    """The largest noise that a decoder may declare, in logits; at least ``tolerance``.

    ``tokens`` int64 [n]: text for the largest logit.
    """
    return max(tolerance, MAX_ROUNDINGS * UNIT_ROUNDOFF[LEAST_PRECISE] * float(np.abs(lens(tokens)).max()))


def check_declared_noise(noise: float, largest: float) -> Finding:
    """Check that the declared ``noise`` is a number ≥ 0 and at most ``largest``."""
    if not 0 <= noise <= largest:
        complaint = (
            f"the decoder declares logit_noise={noise:g}, but {LEAST_PRECISE}, the least precise dtype, honestly "
            f"needs {largest:g} at most on this model"
        )
        return Finding("noise", False, complaint, 1, 0)
    return Finding("noise", True, f"logit_noise={noise:g} of {largest:g} at most", 1, 0)
