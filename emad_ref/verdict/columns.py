"""Columns of numbers by the unit that is resampled: of the right type, finite, and paired with one another."""

from __future__ import annotations

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.verdict.units import Units


def column_of(name: str, column: Units, kind: type[Units]) -> Floats:
    """[n] values of ``column`` as float64.

    Raises:
        BadArgument: another kind of unit, no single column, no value, or one that is not finite.
    """
    if not isinstance(column, kind):  # what a type checker sees, for callers without one
        raise BadArgument(name, type(column).__name__, kind.__name__, "see verdict.units: what is resampled is a type")
    array = np.asarray(column.values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise BadArgument(name, f"shape {array.shape}", "one column with at least one value")
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        one = column.noun.removesuffix("s")
        remedy = f"look at {one} {wrong[0]} (of 0–{len(array) - 1}): {len(wrong)} of {len(array)} {column.noun} are so"
        raise BadArgument(f"{name}[{wrong[0]}]", float(array[wrong[0]]), "a finite number", remedy)
    return array


def require_paired(name: str, column: Units, other: Units, remedy: str) -> None:
    """The same units as ``other``: as many, and under the same numbers or in the same clusters. Raises BadArgument."""
    if np.shape(column.values) != np.shape(other.values):
        raise BadArgument(name, np.shape(column.values), f"shape {np.shape(other.values)}", remedy)
    mine, theirs = column.names, other.names
    if mine is not None and theirs is not None and not np.array_equal(mine, theirs):
        raise BadArgument(f"{name}.names", mine[:5], f"the {column.noun} of the other side, {theirs[:5]}", remedy)


def pooled(column: Units) -> Floats:
    """[n] sums over what depends on each other."""
    return np.asarray(column.independent, dtype=np.float64)
