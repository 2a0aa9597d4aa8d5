"""Largest honest difference from the lens, by family, dtype and backend, and the largest noise a decoder may declare.

Differences are absolute: in logits, and in nats for signals and NLL. A cached step and a pass over the whole sequence
sum the same products in another order. The bounds are about three times what was seen on small random models;
accelerator rows are extrapolated from the CPU's, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.audit.finding import Finding
from emad_ref.audit.lens import Lens
from emad_ref.errors import BadArgument
from emad_ref.models.families import row_of
from emad_ref.record import Ints


@dataclass(frozen=True)
class ToleranceEntry:
    """``value`` in logits and in nats; ``reason`` why this much."""

    value: float
    reason: str


# (float32 inside, dtype, on an accelerator). "Seen": largest difference between token-by-token cached decoding and one
# pass, small random models of 8 and 24 layers with logits up to 10, six families.
TOLERANCES: dict[tuple[bool, str, bool], ToleranceEntry] = {
    (False, "float64", False): ToleranceEntry(
        1e-9, "order of summation only: 2e-14 seen, with room for real depth and width"
    ),
    (False, "float64", True): ToleranceEntry(1e-9, "as on the CPU: float64 kernels have no reduced-precision mode"),
    (True, "float64", False): ToleranceEntry(
        5e-6, "RMSNorm, or eager softmax, computes in float32 even here: 1.5e-6 seen"
    ),
    (True, "float64", True): ToleranceEntry(5e-6, "the same float32 inside"),
    (False, "float32", False): ToleranceEntry(2e-4, "24 bits through every layer: 1.3e-5 seen"),
    (True, "float32", False): ToleranceEntry(2e-4, "24 bits through every layer: 4e-5 seen"),
    (False, "float32", True): ToleranceEntry(1e-3, "as on the CPU, with split reductions per shape; TF32 must be off"),
    (True, "float32", True): ToleranceEntry(1e-3, "as on the CPU, with split reductions per shape; TF32 must be off"),
    (False, "float16", False): ToleranceEntry(0.06, "11 bits through every layer: 0.02 seen"),
    (True, "float16", False): ToleranceEntry(0.25, "11 bits, and a rounding around each float32 norm: 0.08 seen"),
    (False, "float16", True): ToleranceEntry(
        0.12, "twice the CPU's: sums split by shape, so batch, cache and pass all differ"
    ),
    (True, "float16", True): ToleranceEntry(
        0.5, "twice the CPU's: sums split by shape, so batch, cache and pass all differ"
    ),
    (False, "bfloat16", False): ToleranceEntry(0.4, "8 bits through every layer: 0.13 seen"),
    (True, "bfloat16", False): ToleranceEntry(1.0, "8 bits, and a rounding around each float32 norm: 0.34 seen"),
    (False, "bfloat16", True): ToleranceEntry(
        0.8, "twice the CPU's: sums split by shape, so batch, cache and pass all differ"
    ),
    (True, "bfloat16", True): ToleranceEntry(
        2.0, "twice the CPU's: sums split by shape, so batch, cache and pass all differ"
    ),
}
DTYPES: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
BACKENDS: tuple[str, ...] = ("cpu", "cuda", "mps", "xpu")


def tolerance_entry(family: str, dtype: str, backend: str, kernel: str = "sdpa") -> ToleranceEntry:
    """The row that holds for ``family`` (a config's ``model_type``), ``dtype`` and ``backend`` (a device type).

    ``kernel``: of attention; the softmax of an eager one is in float32 in any family, which only float64 is wider than.

    Raises:
        BadArgument: a family, dtype or backend without a row: an unknown tolerance is not a loose one.
    """
    inside = row_of(family).float32_inside or (kernel == "eager" and dtype == "float64")
    if dtype not in DTYPES:
        raise BadArgument("dtype", dtype, f"one of {', '.join(DTYPES)}")
    if backend not in BACKENDS:
        raise BadArgument("backend", backend, f"one of {', '.join(BACKENDS)}")
    return TOLERANCES[inside, dtype, backend != "cpu"]


def tolerance(family: str, dtype: str, backend: str, kernel: str = "sdpa") -> float:
    """Largest honest difference, in logits and in nats; see ``entry``."""
    return tolerance_entry(family, dtype, backend, kernel).value


MAX_ROUNDINGS = 16
UNIT_ROUNDOFF: dict[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST_PRECISE = max(UNIT_ROUNDOFF, key=UNIT_ROUNDOFF.__getitem__)


def largest_noise(lens: Lens, tokens: Ints, tolerance: float) -> float:
    """The most that a decoder may declare, in logits; at least ``tolerance``.

    ``tokens`` int64 [n]: text on which the largest logit is looked for.
    """
    return max(tolerance, MAX_ROUNDINGS * UNIT_ROUNDOFF[LEAST_PRECISE] * float(np.abs(lens(tokens)).max()))


def check_declared_noise(noise: float, largest: float) -> Finding:
    """Whether ``noise``, as a decoder declares it, is a number ≥ 0 and at most ``largest``."""
    if not 0 <= noise <= largest:
        complaint = (
            f"the decoder declares logit_noise={noise:g}, but {LEAST_PRECISE}, the least precise dtype, honestly "
            f"needs {largest:g} at most on this model"
        )
        return Finding("noise", False, complaint, 1, 0)
    return Finding("noise", True, f"logit_noise={noise:g} of {largest:g} at most", 1, 0)
