"""How far early answers stray from the model's own at full depth: what thresholds are calibrated and judged by.

Thresholds are chosen on calibration sets and judged on a pool of other items. Every item is about a text of its own,
and no two sets share an item: sets drawn again and again from the same items would agree because of those items, and
say next to nothing of the next set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.evidence.exits.answers import Answered
from emad_ref.evidence.exits.tasks import scored
from emad_ref.record import Floats
from emad_ref.sweep.risk import textual_consistency

SET_SIZE = 50  # items; 29 certify δ = 10 % without any loss
SETS = {"smoke": 2, "standard": 12, "full": 64}  # 63 that all keep the promise show a coverage of 95 %


@dataclass(frozen=True, eq=False)
class Consistency:
    """``pool`` float64 [items, λ], ``sets`` [sets, items, λ]: difference from the full text, 0–1, 0 = the same.

    Items of the pool and of the sets are independent of one another: each is about a text of its own.
    ``mean_exit`` [λ] blocks per token of the pool.
    """

    pool: Floats
    sets: Floats
    mean_exit: Floats


def different(task: str, full: Answered, early: Sequence[Answered]) -> Floats:
    """float64 [items, rules]: one minus the score of each early text against the full one."""
    dissimilar = [
        [1 - scored(task, text, [own]) if text != own else 0.0 for text, own in zip(one.texts, full.texts, strict=True)]
        for one in early
    ]
    return textual_consistency(np.array(dissimilar).T)
