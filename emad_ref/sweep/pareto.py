"""Quality against FLOPs over whole sweeps: one family against another at equal net FLOPs.

Rows of a family are chosen on the validation split and compared on the evaluation split: the best of many points on
the text it is judged by would flatter the larger sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emad_ref.point import OperatingPoint
from emad_ref.sweep.losses import Loss
from emad_ref.sweep.select import equal_flops

LEVELS = (0.15, 0.30, 0.45, 0.60)  # net reductions at which families are compared; 15 % is the paper's least


@dataclass(frozen=True)
class Duel:
    """The best point of each side that saves at least ``reduction``, on the validation split."""

    reduction: float
    ours: OperatingPoint
    rival: OperatingPoint


def duels(ours: Sequence[Loss], rival: Sequence[Loss], levels: Sequence[float] = LEVELS) -> list[Duel]:
    """One duel per level that both sides reach; rows are of the validation split."""
    found = []
    for level in levels:
        mine, theirs = equal_flops(ours, level), equal_flops(rival, level)
        if mine is not None and theirs is not None:
            found.append(Duel(level, mine.point, theirs.point))
    return found
