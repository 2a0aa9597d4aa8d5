"""How far an honest decoder's numbers may lie from the lens: one table by family, dtype and backend.

Differences are absolute: in logits, and in nats for signals and NLL. A cached step and a pass over the whole sequence
sum the same products in another order; what that costs depends on the dtype of the sums, on where a family insists on
float32, and on the kernels of the backend. These are bounds on honest noise, about three times what was seen on small
random models or more; accelerator rows are extrapolated from the CPU's, not measured. A defect is larger: a wrong
layer, position or row moves logits by whole units. Where a half-precision bound comes near that, the checks find few
discriminating positions and say so. Which families insist on float32 stands in their rows (``models.families``).
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.errors import BadArgument
from emad_ref.models.families import row_of


@dataclass(frozen=True)
class Entry:
    """``value`` in logits and in nats; ``reason`` why this much."""

    value: float
    reason: str


# (float32 inside, dtype, on an accelerator). "Seen": largest difference between token-by-token cached decoding and one
# pass, small random models of 8 and 24 layers with logits up to 10, six families.
TABLE: dict[tuple[bool, str, bool], Entry] = {
    (False, "float64", False): Entry(1e-9, "order of summation only: 2e-14 seen, with room for real depth and width"),
    (False, "float64", True): Entry(1e-9, "as on the CPU: float64 kernels have no reduced-precision mode"),
    (True, "float64", False): Entry(5e-6, "RMSNorm, or eager softmax, computes in float32 even here: 1.5e-6 seen"),
    (True, "float64", True): Entry(5e-6, "the same float32 inside"),
    (False, "float32", False): Entry(2e-4, "24 bits through every layer: 1.3e-5 seen"),
    (True, "float32", False): Entry(2e-4, "24 bits through every layer: 4e-5 seen"),
    (False, "float32", True): Entry(1e-3, "as on the CPU, with split reductions per shape; TF32 must be off"),
    (True, "float32", True): Entry(1e-3, "as on the CPU, with split reductions per shape; TF32 must be off"),
    (False, "float16", False): Entry(0.06, "11 bits through every layer: 0.02 seen"),
    (True, "float16", False): Entry(0.25, "11 bits, and a rounding around each float32 norm: 0.08 seen"),
    (False, "float16", True): Entry(0.12, "twice the CPU's: sums split by shape, so batch, cache and pass all differ"),
    (True, "float16", True): Entry(0.5, "twice the CPU's: sums split by shape, so batch, cache and pass all differ"),
    (False, "bfloat16", False): Entry(0.4, "8 bits through every layer: 0.13 seen"),
    (True, "bfloat16", False): Entry(1.0, "8 bits, and a rounding around each float32 norm: 0.34 seen"),
    (False, "bfloat16", True): Entry(0.8, "twice the CPU's: sums split by shape, so batch, cache and pass all differ"),
    (True, "bfloat16", True): Entry(2.0, "twice the CPU's: sums split by shape, so batch, cache and pass all differ"),
}
DTYPES: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16")
BACKENDS: tuple[str, ...] = ("cpu", "cuda", "mps", "xpu")


def entry(family: str, dtype: str, backend: str, kernel: str = "sdpa") -> Entry:
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
    return TABLE[inside, dtype, backend != "cpu"]


def tolerance(family: str, dtype: str, backend: str, kernel: str = "sdpa") -> float:
    """Largest honest difference, in logits and in nats; see ``entry``."""
    return entry(family, dtype, backend, kernel).value
