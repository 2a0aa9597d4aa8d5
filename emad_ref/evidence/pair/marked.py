"""What a task says of its items once they are answered: which are right, and what was written for each."""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.tasks.ways import Written
from emad_ref.verdict.units import ByItem


@dataclass(frozen=True, eq=False)
class Marked:
    """Items of one task as some way answered them: ``right`` [items] bool, and per item what was written, a text or
    every option."""

    right: ByItem
    written: list[list[Written]]
