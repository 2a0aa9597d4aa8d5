"""Rows whose legs compare numbers exactly: no sample, no interval, one largest honest difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.verdict.claims import Claim, Leg, Outcome, Verdict
from emad_ref.verdict.legs import row, unmeasured, unseen


def judge_exact(claim: Claim, model: str, errors: Mapping[str, Floats], tolerance: float) -> Verdict:
    """A difference stays within ``tolerance`` wherever it was checked; one leg per entry of ``errors``.

    Args:
        errors: name of the leg → |difference| of every comparison made, any shape. NaN or infinite: falsified.
        tolerance: the largest honest difference, from the table of tolerances; 0 for counted integers.

    Raises:
        BadArgument: a tolerance that is negative or NaN, or negative errors.
    """
    if not tolerance >= 0:
        raise BadArgument("tolerance", tolerance, "a number ≥ 0")
    legs = [
        _exact_leg(name, np.asarray(part, dtype=np.float64), tolerance, claim.unit) for name, part in errors.items()
    ]
    return row(claim, model, legs) if legs else unmeasured(claim, model, "nothing was compared")


def _exact_leg(name: str, errors: Floats, tolerance: float, unit: str) -> Leg:
    if not errors.size:
        return replace(unseen(name, "nothing was compared"), threshold=tolerance, unit=unit, good="lower")
    if (errors < 0).any():
        raise BadArgument("errors", float(errors.min()), "absolute differences ≥ 0", f"take abs() for leg {name!r}")
    if not np.isfinite(errors).all():
        reason = f"{int((~np.isfinite(errors)).sum())} of {errors.size} differences are NaN or infinite"
        return Leg(name, "falsified", None, None, errors.size, tolerance, unit, reason, good="lower")
    largest = float(errors.max())
    outcome: Outcome = "survived" if largest <= tolerance else "falsified"
    beyond = f"{int((errors > tolerance).sum())} of {errors.size} comparisons differ by more than {tolerance:g}"
    reason = beyond if outcome == "falsified" else ""
    return Leg(name, outcome, largest, None, errors.size, tolerance, unit, reason, good="lower")
