"""Operating points whose truth is known: documents with a perplexity rise of their own, items with a known accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from emad_ref.evidence.points import AnswerPair, NllPair, PointEvidence
from emad_ref.verdict.units import ByDocument, ByItem

SPREAD_NATS = 0.004  # per token, between documents of one text


def documents(rng: np.random.Generator, rise: float, count: int, spread: float = SPREAD_NATS) -> NllPair:
    """Documents of different length and level, whose perplexity rises by ``rise`` on average."""
    tokens = rng.integers(100, 300, count)
    full = tokens * rng.uniform(1.0, 3.0, count)
    each = math.log1p(rise) + spread * rng.standard_normal(count)
    # a rate that depends on the length would move Σ x / Σ n away from the mean rate: the truth is the latter
    return ByDocument(full + tokens * each), ByDocument(full), ByDocument(tokens)


def items(rng: np.random.Generator, lost: float, count: int, solved: float = 0.9) -> AnswerPair:
    """Items of which full depth solves a share of ``solved``, and the point a share of ``lost`` fewer."""
    full = rng.random(count) < solved
    kept = rng.random(count) >= lost / solved
    return ByItem.distinct(full), ByItem.distinct(full & kept)


def point(
    rng: np.random.Generator,
    name: str = "p",
    rise: float = 0.0,
    lost: Mapping[str, float] | None = None,
    saves: float = 0.3,
    count: int = 200,
    answered: int = 1500,
) -> PointEvidence:
    """A point that saves ``saves``, with one corpus, and tasks on which it loses ``lost`` of all items."""
    lost = {"a": 0.0, "b": 0.0, "c": 0.0} if lost is None else lost
    tasks = {task: items(rng, share, answered) for task, share in lost.items()}
    return PointEvidence(name, saves, {"world": documents(rng, rise, count)}, tasks)
