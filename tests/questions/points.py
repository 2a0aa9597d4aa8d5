"""Operating points whose truth is known: documents with a perplexity rise of their own, items with a known accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from emad_ref.measurements.operating_points import NllPair, PointMeasurements
from emad_ref.statistics.accuracy import TaskAccuracy
from emad_ref.statistics.units import ByDocument, ByItem

SPREAD_NATS = 0.004  # per token, between documents of one text


def documents(rng: np.random.Generator, rise: float, count: int, spread: float = SPREAD_NATS) -> NllPair:
    """Documents of different length and level, whose perplexity rises by ``rise`` on average."""
    tokens = rng.integers(100, 300, count)
    full = tokens * rng.uniform(1.0, 3.0, count)
    each = math.log1p(rise) + spread * rng.standard_normal(count)
    # a rate that depends on the length would move Σ x / Σ n away from the mean rate: the truth is the latter
    return ByDocument.distinct(full + tokens * each), ByDocument.distinct(full), ByDocument.distinct(tokens)


def items(
    rng: np.random.Generator,
    lost: float,
    count: int,
    solved: float = 0.9,
    *,
    saving: float = 0.3,
    guess: float = 0.0,
    gained: float = 0.0,
    each: int = 1,
    correlation: float = 0.0,
) -> TaskAccuracy:
    """Items of which full depth solves a share of ``solved``, and the point a share of ``lost`` fewer.

    ``gained``: share that only the point solves, so that as many more are lost.
    ``each``: items per cluster; ``correlation`` within it: with this probability its items share one draw of luck.
    """
    clusters = -(-count // each)
    cluster = np.repeat(np.arange(clusters), each)[:count]
    alike = rng.random(clusters) < correlation
    luck, drop = (_luck(rng, cluster, alike) for _ in range(2))
    full = luck < solved
    kept = drop >= (lost + gained) / solved
    won = drop < (gained / (1 - solved) if gained else 0.0)
    return TaskAccuracy(ByItem(full, cluster), ByItem(np.where(full, kept, won), cluster), guess, saving)


def _luck(rng: np.random.Generator, cluster: np.ndarray, alike: np.ndarray) -> np.ndarray:
    """Uniform numbers, one per item; items of a cluster that is ``alike`` share theirs."""
    shared = rng.random(len(alike))[cluster]
    return np.where(alike[cluster], shared, rng.random(len(cluster)))


def point(
    rng: np.random.Generator,
    name: str = "p",
    rise: float = 0.0,
    lost: Mapping[str, float] | None = None,
    saves: float = 0.3,
    count: int = 500,
    answered: int = 1500,
    idle: Mapping[str, float] | None = None,
    **options: float,
) -> PointMeasurements:
    """A point that saves ``saves``, with one corpus, and tasks on which it loses ``lost`` of all items.

    ``idle``: tasks on which it saves nothing, and what it loses there all the same; ``options`` of ``items``.
    """
    lost = {"a": 0.0, "b": 0.0, "c": 0.0} if lost is None else lost
    tasks = {task: items(rng, share, answered, **options) for task, share in lost.items()}
    tasks |= {task: items(rng, share, answered, saving=0.004) for task, share in (idle or {}).items()}
    return PointMeasurements(name, saves, {"world": documents(rng, rise, count)}, tasks)
