"""The rounds that a record of drafting holds."""

from __future__ import annotations

import numpy as np

from emad_ref.record import DRAFT, VERIFY, Record
from emad_ref.screening.drafts import DraftingRounds


def rounds_of(record: Record, longest: int) -> DraftingRounds:
    """Of one row: how many drafts its rounds had, and what a round emitted."""
    phase = record.tokens.phase
    opens = np.flatnonzero((phase == DRAFT) & np.append(True, phase[:-1] != DRAFT))
    drafts = np.array([int((phase[start:] != DRAFT).argmax()) - 1 for start in opens])
    kept = int(record.tokens.kept[phase == VERIFY].sum())
    return DraftingRounds(np.bincount(drafts, minlength=longest + 1) / len(drafts), kept / len(drafts))
