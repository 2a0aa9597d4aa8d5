"""What a schedule allows the next token, given the depths of the decided tokens before it.

monotone    D_t ≤ D_{t−1}; the first token up to the ceiling
positional  exactly the depth of its place
chunked     the first token of a chunk up to the ceiling; the others exactly as deep as it
free        up to the ceiling, always
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.point import OperatingPoint
from emad_ref.schedule.positional import positional_depths


@dataclass(frozen=True)
class Admission:
    """``cap``: the largest admissible depth; ``held``: the token takes it unasked."""

    cap: int
    held: bool = False


def admission(point: OperatingPoint, trail: Sequence[int], first: int, length: int) -> Admission:
    """What ``point`` allows the token after ``trail[:length]``.

    ``trail``: depths of a sequence's tokens, oldest first; those before index ``first`` are its prompt.
    """
    decided = length - first
    if point.schedule == "monotone":
        return Admission(trail[length - 1] if length else point.ceiling)  # a prompt runs at the ceiling
    if point.schedule == "positional":
        return Admission(int(positional_depths(point, np.array([max(decided, 0)]))[0]), held=True)
    if point.schedule == "chunked":
        assert point.period is not None
        within = max(decided, 0) % point.period
        return Admission(trail[length - within], held=True) if within else Admission(point.ceiling)
    return Admission(point.ceiling)
