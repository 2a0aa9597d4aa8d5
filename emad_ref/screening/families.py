"""What a screening tries: every kind of exit that this project knows, each with one dial from safe to loose.

    readout    the model's own head, or the tuned lens
    criterion  entropy, softmax response, the linear gate; a profile less a margin (EMAD); or none at all
    depth      free, K and V above an exit filled in; monotone; in chunks; by position
    probes     layers a token may leave after: all, every second, every third, a few

Families are replayed with exact K and V, free ones charged as if those above an exit were copied: what copies lose in
quality, ``screening.decoding`` finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from emad_ref.calibration.lens_file import FittedLens
from emad_ref.calibration.profile import Profile
from emad_ref.errors import BadArgument
from emad_ref.point import Estimator, OperatingPoint
from emad_ref.policy.thresholds import fixed_entropy, response
from emad_ref.sweep.ceilings import FREE
from emad_ref.sweep.grids import CHUNKS, Dial, margins, positional, truncations

OWN, LENS = "own head", "tuned lens"
GATE, ENTROPY, RESPONSE = "gate", "entropy", "softmax response"
WIDEST_GATE = 64.0  # √nats: no divergence of a softmax over float32 comes near


@dataclass(frozen=True, eq=False)
class Family:
    """One row of the table. ``dials``: the same rule at several sets of probes; ``points``: those of one without a
    dial.

    ``readout``: ``OWN`` or ``LENS``. ``depth``: ``free``, ``monotone``, ``in chunks``, ``by position``, ``fixed``.
    """

    name: str
    readout: str
    depth: str
    dials: tuple[Dial, ...] = ()
    points: tuple[OperatingPoint, ...] = ()


def published(profile: Profile, vocabulary: int) -> list[Family]:
    """Families as their papers have them, by the model's own head; the first is EMAD."""
    layers, probes = profile.layers, profile.probes
    chunk = CHUNKS[1]
    emad = margins(profile)

    def chunked(setting: float) -> OperatingPoint:
        return replace(emad.point(setting), family="chunked", schedule="chunked", period=chunk)

    return [
        Family("EMAD, mean − margin", OWN, "monotone", (emad,)),
        Family("entropy", OWN, "monotone", (_entropy(layers, probes, vocabulary),)),
        Family("softmax response", OWN, "monotone", (_response(layers, probes),)),
        Family(f"EMAD, chunks of {chunk}", OWN, "in chunks", (replace(emad, point=chunked),)),
        Family("positional", OWN, "by position", points=tuple(positional(layers))),
        Family("truncation", OWN, "fixed", points=tuple(truncations(layers))),
    ]


def freed(layers: int, vocabulary: int) -> list[Family]:
    """Free depth by the model's own head; softmax response is CALM."""
    sets = probe_sets(layers)
    return [
        Family("entropy", OWN, "free", tuple(_free(_entropy(layers, probes, vocabulary)) for probes in sets)),
        Family("softmax response", OWN, "free", tuple(_free(_response(layers, probes)) for probes in sets)),
    ]


def tuned(fitted: FittedLens, vocabulary: int) -> list[Family]:
    """Through a lens with a gate, monotone and free.

    Raises:
        BadArgument: a lens without a gate.
    """
    if fitted.gate is None:
        raise BadArgument("fitted.gate", None, "a lens with a gate", "see calibration.gate")
    lens, gate = fitted.lens, fitted.gate
    layers, known = lens.layers, tuple(lens.translators)
    rows = dict(zip(known, gate.weights, strict=True))
    sets = probe_sets(layers, known)

    def read(dial: Dial) -> Dial:
        return replace(dial, point=lambda setting: replace(dial.point(setting), lens=lens.digest))

    def gated(probes: Sequence[int]) -> Dial:
        estimator = replace(gate, weights=tuple(rows[probe] for probe in probes))
        return _gate(layers, probes, estimator, lens.digest)

    rules = {
        GATE: [gated(probes) for probes in sets],
        ENTROPY: [read(_entropy(layers, probes, vocabulary)) for probes in sets],
        RESPONSE: [read(_response(layers, probes)) for probes in sets],
    }
    return [
        Family(name, LENS, depth, tuple(dials if depth == "monotone" else map(_free, dials)))
        for depth in ("monotone", "free")
        for name, dials in rules.items()
    ]


def probe_sets(layers: int, known: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Layers to leave after, densest first, each set once: of those ``known``, all below the last by default.

    >>> probe_sets(5)
    [(1, 2, 3, 4), (1, 3), (2, 4), (3,), (2, 3), (1, 2, 4)]
    """
    offered = list(range(1, layers)) if known is None else list(known)
    third, quarter = layers / 3, layers / 4
    wanted = [
        offered,
        [layer for layer in offered if layer % 2 == layers % 2],
        [layer for layer in offered if layer % 2 != layers % 2],
        [layer for layer in offered if layer % 3 == 0],
        [_nearest(offered, third), _nearest(offered, 2 * third)],
        [_nearest(offered, part * quarter) for part in (1, 2, 3)],
    ]
    return list(dict.fromkeys(tuple(sorted(set(each))) for each in wanted if each))


def _nearest(offered: Sequence[int], place: float) -> int:
    return min(offered, key=lambda layer: abs(layer - place))


# ---------------------------------------------------------------- dials


def _free(dial: Dial) -> Dial:
    return replace(dial, point=lambda setting: replace(dial.point(setting), schedule=FREE))


def _entropy(layers: int, probes: Sequence[int], vocabulary: int) -> Dial:
    return Dial(
        lambda h0: fixed_entropy(layers, probes, h0), lambda h0, digits: f"H ≤ {h0:.{digits}g}", 0.0, log(vocabulary)
    )


def _response(layers: int, probes: Sequence[int]) -> Dial:
    return Dial(
        lambda doubt: response(layers, probes, 1 - doubt), lambda doubt, digits: f"doubt ≤ {doubt:.{digits}g}", 0.0, 1.0
    )


def _gate(layers: int, probes: Sequence[int], gate: Estimator, lens: str) -> Dial:
    def point(setting: float) -> OperatingPoint:
        return OperatingPoint(
            f"gate ≤ {setting:.4g}",
            "gate",
            layers,
            layers,
            tuple(probes),
            ((setting,) * len(probes),),
            "monotone",
            gate,
            "divergence",
            lens=lens,
        )

    return Dial(point, lambda setting, digits: f"gate ≤ {setting:.{digits}g}", 0.0, WIDEST_GATE)
