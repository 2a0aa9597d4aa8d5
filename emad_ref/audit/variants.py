"""Operating points of which a decoder may ignore a field: for every field one that uses it, and what ignoring it gives.

A *variant* is a point that differs from a plain one in some fields. ``ignored`` holds the points by which a decoder
would decode that does not look at one of them; ``audit.fields`` chooses thresholds under which these decode otherwise.
``tests/unit/audit/test_fields.py`` walks the dataclasses of ``point``: a
field, or a value of a field, that stands nowhere here fails it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from emad_ref.point import BinSpec, Confidence, Estimator, OperatingPoint
from emad_ref.signals import SIGNALS, layers_read

MOST_PROBES = 5
NOBODY = "0" * 16  # the digest of something that nobody has fitted


@dataclass(frozen=True)
class Sizes:
    """``layers`` L and ``vocabulary`` V of a model, ``width`` E of its head's input."""

    layers: int
    vocabulary: int
    width: int


Making = Callable[[Sizes, np.random.Generator], OperatingPoint]
Ignoring = Callable[[OperatingPoint], OperatingPoint]


@dataclass(frozen=True)
class Variant:
    """``made``: a point that uses ``fields``, whose thresholds are still to be chosen; ``ignored``: one for each.

    ``least``       layers that a model needs for it.
    ``by_lens``     whether the lens knows the states that it decodes on; else our own decoder stands in for it.
    ``unservable``  no decoder can serve it: it names a file that does not exist, and must be refused.
    ``jumps``       its signal jumps where two tokens tie: which lead, are kept, or are retrieved.
    """

    fields: tuple[str, ...]
    made: Making
    ignored: tuple[Ignoring, ...] = ()
    least: int = 2
    by_lens: bool = True
    unservable: bool = False
    jumps: bool = False


def spread(layers: int, ceiling: int | None = None, first: int = 1) -> tuple[int, ...]:
    """At most ``MOST_PROBES`` layers below ``ceiling``, evenly from ``first`` on."""
    return tuple(range(first, ceiling or layers, max(1, math.ceil((ceiling or layers) / MOST_PROBES))))


def plain(sizes: Sizes, probes: tuple[int, ...] | None = None, **change: Any) -> OperatingPoint:
    """A point without exits, at which thresholds are to be put."""
    probes = spread(sizes.layers) if probes is None else probes
    bins, signal = change.get("bins", BinSpec()), change.get("signal", "entropy_nats")
    change.setdefault("ceiling", sizes.layers)
    thresholds = ((SIGNALS[signal].never,) * len(probes),) * bins.count
    return OperatingPoint("fields", "quantile", sizes.layers, probes=probes, thresholds=thresholds, **change)


def confident(signal: str, minimum: int = 2, **parameters: Any) -> Making:
    """A signal with parameters, decided from layer ``minimum`` on."""

    def make(sizes: Sizes, rng: np.random.Generator) -> OperatingPoint:
        given = {name: value(sizes) if callable(value) else value for name, value in parameters.items()}
        probes = layers_read(signal, minimum, sizes.layers)
        return plain(sizes, probes, signal=signal, confidence=Confidence(minimum, **given))

    return make


def by_signal(name: str) -> Making:
    return lambda sizes, rng: plain(sizes, signal=name)


def shrinking(sizes: Sizes) -> float:
    """A share that leaves four tokens where a readout is sure."""
    return max(0.0, 1 - 4 / sizes.vocabulary)


def estimated(**change: Any) -> Making:
    """``change`` holds fields of an estimator, or functions of (probes, sizes, rng) that give them."""

    def make(sizes: Sizes, rng: np.random.Generator) -> OperatingPoint:
        probes = spread(sizes.layers)
        given = {name: value(probes, sizes, rng) if callable(value) else value for name, value in change.items()}
        return plain(sizes, probes, estimator=Estimator(**given))

    return make


def few(probes: tuple[int, ...], sizes: Sizes, rng: np.random.Generator) -> int:
    """At most half of the vocabulary: twice as many is what ignoring ``k`` stands for."""
    return max(1, min(int(rng.integers(3, 9)), sizes.vocabulary // 2))


def corrections(probes: tuple[int, ...], sizes: Sizes, rng: np.random.Generator) -> tuple[tuple[float, float], ...]:
    return tuple((float(rng.uniform(1.1, 1.3)), float(rng.uniform(0.1, 0.3))) for _ in probes)


def weights(probes: tuple[int, ...], sizes: Sizes, rng: np.random.Generator) -> tuple[tuple[float, ...], ...]:
    """Of one per probe and entry of the head's input, so small that a state's error is none of the sum's."""
    drawn = rng.normal(0, 0.3 / math.sqrt(sizes.width), (len(probes), sizes.width + 1))
    return tuple(tuple(row) for row in drawn.astype(np.float32).tolist())


def thirds(sizes: Sizes, rng: np.random.Generator) -> OperatingPoint:
    # both, or one of two tables would have fewer buckets than rows of thresholds
    table = bytes(rng.integers(0, 3, sizes.vocabulary - 2, dtype=np.uint8)) + b"\x01\x02"
    return plain(sizes, bins=BinSpec(("frequency",), frequency=table))


def other_thirds(point: OperatingPoint) -> OperatingPoint:
    """Every token in the next bucket."""
    moved = bytes((bucket + 1) % 3 for bucket in point.bins.frequency)
    return replace(point, bins=replace(point.bins, frequency=moved))


def by_confidence(sizes: Sizes, rng: np.random.Generator) -> OperatingPoint:
    """Edges between an even guess and certainty, wherever a model's confidence lies."""
    low, high = sorted(math.exp(rng.uniform(-0.8 * math.log(sizes.vocabulary), 0)) for _ in range(2))
    return plain(sizes, bins=BinSpec(("confidence",), confidence_edges=(low, high)))


def swaps(**change: Any) -> Ignoring:
    return lambda point: replace(point, **change)


def estimator(**change: Any) -> Ignoring:
    return lambda point: replace(point, estimator=replace(point.estimator, **change))


def confidence(**change: Any) -> Ignoring:
    return lambda point: replace(point, confidence=replace(point.confidence, **change))  # type: ignore[type-var]  # made with one


def bins(**change: Any) -> Ignoring:
    return lambda point: replace(point, bins=replace(point.bins, **change))


def one_row(point: OperatingPoint) -> OperatingPoint:
    return replace(point, bins=BinSpec(), thresholds=point.thresholds[:1])


def later(point: OperatingPoint) -> OperatingPoint:
    """Probes a layer below or above those asked for."""
    by = 1 if point.probes[-1] + 1 < point.ceiling else -1
    return replace(point, probes=tuple(probe + by for probe in point.probes))


def unread(point: OperatingPoint) -> OperatingPoint:
    return replace(point, thresholds=((SIGNALS[point.signal].never,) * len(point.probes),) * point.bins.count)


def earlier(point: OperatingPoint) -> OperatingPoint:
    """Decides at the first layer that its signal allows."""
    assert point.confidence is not None, "made with one"
    minimum = SIGNALS[point.signal].needs.least
    probes = layers_read(point.signal, minimum, point.ceiling)
    level = point.thresholds[0][-1]
    row = tuple(math.inf if probe < minimum else level for probe in probes)
    return replace(point, probes=probes, thresholds=(row,), confidence=replace(point.confidence, minimum=minimum))


def entropy(point: OperatingPoint) -> OperatingPoint:
    row = (0.0,) * len(point.probes)
    return replace(point, signal="entropy_nats", confidence=None, decay=None, thresholds=(row,))


FULL_READOUT: Ignoring = swaps(estimator=Estimator())
UNPRUNED: Ignoring = swaps(confidence=None)

VARIANTS: dict[str, Variant] = {
    "probes and thresholds": Variant(
        ("probes", "thresholds"), lambda sizes, rng: plain(sizes, spread(sizes.layers, first=2)), (later, unread), 4
    ),
    "a ceiling below the last layer": Variant(
        ("ceiling",),
        lambda sizes, rng: plain(sizes, spread(sizes.layers - 1), ceiling=sizes.layers - 1),
        (lambda point: replace(point, ceiling=point.layers),),
        3,
    ),
    "free depth, eager": Variant(
        ("schedule",), lambda sizes, rng: plain(sizes, schedule="free_eager"), (swaps(schedule="monotone"),)
    ),
    "free depth, deferred": Variant(
        ("schedule",),
        lambda sizes, rng: plain(sizes, schedule="free_deferred"),
        (swaps(schedule="monotone"),),
        by_lens=False,
    ),
    "copied states": Variant(
        ("schedule",), lambda sizes, rng: plain(sizes, schedule="copying"), (swaps(schedule="monotone"),), by_lens=False
    ),
    "depth by position": Variant(
        ("schedule", "period", "floor"),
        lambda sizes, rng: plain(sizes, (), schedule="positional", period=int(rng.integers(5, 8)), floor=1),
        (
            swaps(schedule="monotone", period=None, floor=None),
            swaps(period=12),
            lambda point: replace(point, floor=point.ceiling // 2),
        ),
        4,
        by_lens=False,
    ),
    "depth by chunks": Variant(
        ("schedule", "period"),
        lambda sizes, rng: plain(sizes, schedule="chunked", period=3),
        (swaps(schedule="monotone", period=None), swaps(period=7)),
        by_lens=False,
    ),
    "states that nobody has translated": Variant(
        ("schedule", "translators"),
        lambda sizes, rng: plain(sizes, schedule="translated", translators=NOBODY),
        unservable=True,
    ),
    "a lens that nobody has tuned": Variant(("lens",), lambda sizes, rng: plain(sizes, lens=NOBODY), unservable=True),
    "top-k estimates": Variant(
        ("estimator.kind", "estimator.k"),
        estimated(kind="topk", k=few),
        (FULL_READOUT, lambda point: replace(point, estimator=replace(point.estimator, k=2 * point.estimator.k))),
    ),
    "corrected estimates": Variant(
        ("estimator.correction",), estimated(kind="topk", k=few, correction=corrections), (estimator(correction=()),)
    ),
    "retrieved estimates": Variant(
        ("estimator.search", "estimator.rank"),
        estimated(kind="topk", k=few, search="lowrank", rank=2),
        (estimator(search="exact", rank=0), estimator(rank=1)),
        jumps=True,
    ),
    "a low-rank readout": Variant(
        ("estimator.kind", "estimator.rank"),
        estimated(kind="lowrank", k=few, rank=3),
        (FULL_READOUT, estimator(rank=1)),
    ),
    "linear probes": Variant(
        ("estimator.kind", "estimator.weights"),
        estimated(kind="linear", weights=weights),
        (
            FULL_READOUT,
            lambda point: replace(
                point, estimator=replace(point.estimator, weights=tuple(row[::-1] for row in point.estimator.weights))
            ),
        ),
    ),
    "a learnt gate": Variant(
        ("signal",),
        lambda sizes, rng: replace(estimated(kind="linear", weights=weights)(sizes, rng), signal="divergence"),
        (lambda point: replace(point, signal="entropy_nats", estimator=Estimator()),),
    ),
    **{
        name: Variant(("signal",), by_signal(name), (entropy,), jumps=name == "agreement")
        for name in ("softmax_response", "top2_gap", "agreement")
    },
    "saturation": Variant(("signal", "confidence"), confident("saturation"), (entropy,), 4),
    "weighted_contrast": Variant(("signal", "confidence"), confident("weighted_contrast"), (entropy,), 4, jumps=True),
    "jsd_contrast": Variant(("signal", "confidence"), confident("jsd_contrast"), (entropy,), 4, jumps=True),
    "minimum layer": Variant(("confidence.minimum",), confident("saturation", 3), (earlier,), 5),
    "a constant α": Variant(
        ("confidence.alpha",), confident("jsd_contrast", alpha=0.4), (confidence(alpha=0.1),), 4, jumps=True
    ),
    "a decaying α": Variant(
        ("confidence.alpha_decay",),
        confident("jsd_contrast", alpha=0.4, alpha_decay=0.5),
        (confidence(alpha_decay=None),),
        4,
        jumps=True,
    ),
    "what is emitted": Variant(
        ("confidence.emit",), confident("jsd_contrast", emit="expert"), (confidence(emit="contrastive"),), 4, jumps=True
    ),
    "rescaled scores": Variant(
        ("confidence.rescale",), confident("jsd_contrast", rescale=True), (confidence(rescale=False),), 4, jumps=True
    ),
    "a pruned vocabulary": Variant(
        ("confidence.kept",),
        confident("softmax_response", kept=lambda sizes: (3,) * (sizes.layers - 3)),
        (UNPRUNED,),
        4,
        jumps=True,
    ),
    "a vocabulary that shrinks": Variant(
        ("confidence.shrink",), confident("softmax_response", shrink=shrinking), (UNPRUNED,), 4, jumps=True
    ),
    "bins of position": Variant(
        ("bins.features", "bins.position_edges"),
        lambda sizes, rng: plain(sizes, bins=BinSpec(("position",), position_edges=(9, 14))),
        (one_row, bins(position_edges=(32, 128))),
    ),
    "bins of confidence": Variant(
        ("bins.features", "bins.confidence_edges"),
        by_confidence,
        (one_row, bins(confidence_edges=(0.4, 0.7))),
    ),
    "bins of frequency": Variant(
        ("bins.features", "bins.frequency"),
        thirds,
        (one_row, other_thirds),
    ),
    "exits between probes": Variant(
        ("interpolate",),
        lambda sizes, rng: plain(sizes, (1, 2, *range(4, sizes.layers, 3)), interpolate=True),
        (swaps(interpolate=False),),
        6,
    ),
    "thresholds that fall": Variant(
        ("decay",),
        lambda sizes, rng: plain(sizes, signal="top2_gap", decay=(8.0, 8.0)),
        (swaps(decay=None), swaps(decay=(8.0, 800.0))),
    ),
}
