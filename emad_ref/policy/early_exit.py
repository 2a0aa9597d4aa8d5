"""The confidence rules of early-exit LLMs as points: families, minimum exit layer, pruned vocabularies.

Every rule leaves after the first layer ℓ ≥ j whose confidence c_ℓ is at least λ (0.9 in the paper):

``softmax_response``   top-1 minus top-2 of p_ℓ (CALM)
``saturation``         cos(h_ℓ, h_{ℓ−1}) (CALM)
``weighted_contrast``  top-1 minus top-2 of p_DCD, the amateur at ⌊ℓ/2⌋
``jsd_contrast``       the same, the amateur chosen by its divergence; first decides after j + 1

and, where a rule reads tokens above j only from a pruned vocabulary,

``fixed``     k*(j) at every layer after j
``decaying``  k*(ℓ) at layer ℓ
``adaptive``  ⌊|V|·(1 − 0.9·c_{ℓ−1})⌋

    k*(ℓ) = max(250, ⌊35000 / (1 + 139·ℓ/24)⌋)

as published for T5-large: 24 layers, 32,128 tokens. Elsewhere 24 is the model's L, which keeps k* a function of
relative depth, and 250 and 35000 are scaled by |V|/32128.

The combined rule is ``jsd_contrast`` with a pruning: the same score among the kept tokens, so that keeping all of them
is no pruning. The paper's wording, by which the kept tokens take the place of the plausibility constraint, is
``alpha=0``: then kept tokens that neither layer believes in share in the score, and it rarely grows sure.

The authors' code reads JSD otherwise: its amateurs run from layer 2 on, whatever j is, so that it decides at j itself
(``amateurs_from``), and what it emits is p_ℓ (``emit="expert"``).

Layers below j that a rule must read are probed under the threshold inf: they cost, and never fire. What is compared
where stands in ``readout``; this module makes data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from emad_ref.errors import BadArgument
from emad_ref.point import Confidence, OperatingPoint, ScheduleName
from emad_ref.policy.thresholds import short
from emad_ref.signals import SIGNALS, SINCE, layers_read

PUBLISHED_LAYERS, PUBLISHED_VOCABULARY = 24, 32_128  # T5-large, on which k* was fitted
LEAST_KEPT, MOST_KEPT, STEEPNESS = 250, 35_000, 139
SHRINK = 0.9  # what a sure readout prunes of the vocabulary
ALPHA = 0.1


def kept_tokens(layer: int, layers: int, vocabulary: int) -> int:
    """k*(``layer``) for a model of ``layers`` layers and ``vocabulary`` tokens.

    >>> [kept_tokens(layer, 24, 32_128) for layer in (2, 7, 19)]
    [2781, 842, 315]

    Raises:
        BadArgument: a layer the model lacks, or a vocabulary of which less than two tokens would be kept.
    """
    if not 1 <= layer <= layers:
        raise BadArgument("layer", layer, f"a layer in 1–{layers}")
    scale = vocabulary / PUBLISHED_VOCABULARY
    # scaled before the floor: ⌊2781.4⌋ · |V|/32128 would lose up to a token per unit of scale
    k = max(math.floor(LEAST_KEPT * scale), math.floor(MOST_KEPT * scale / (1 + STEEPNESS * layer / layers)))
    if k < 2:
        least = math.ceil(2 * PUBLISHED_VOCABULARY / LEAST_KEPT)
        raise BadArgument("vocabulary", vocabulary, f"{least} tokens, of which two can be kept", "do not prune it")
    return k


@dataclass(frozen=True)
class Pruning:
    """``kept``: k of each layer after j; ``shrink``: s of the adaptive rule. Neither: the whole vocabulary."""

    kept: tuple[int, ...] = ()
    shrink: float | None = None


# (minimum layer, layers, vocabulary) → sizes
PRUNINGS: dict[str, Callable[[int, int, int], Pruning]] = {
    "none": lambda minimum, layers, vocabulary: Pruning(),
    "fixed": lambda minimum, layers, vocabulary: Pruning(
        (kept_tokens(minimum, layers, vocabulary),) * (layers - 1 - minimum)
    ),
    "decaying": lambda minimum, layers, vocabulary: Pruning(
        tuple(kept_tokens(layer, layers, vocabulary) for layer in range(minimum + 1, layers))
    ),
    "adaptive": lambda minimum, layers, vocabulary: Pruning(shrink=SHRINK),
}
CONFIDENCES: tuple[str, ...] = tuple(name for name, signal in SIGNALS.items() if signal.sense == "rises")


def early_exit(
    signal: str,
    layers: int,
    vocabulary: int,
    minimum: int,
    threshold: float = 0.9,
    *,
    pruning: str = "none",
    schedule: ScheduleName = "copying",
    decay: tuple[float, float] | None = None,
    alpha: float = ALPHA,
    alpha_decay: float | None = None,
    emit: str = "contrastive",
    rescale: bool = False,
    amateurs_from: int | None = None,
) -> OperatingPoint:
    """The point of one rule.

    ``signal``: of ``CONFIDENCES``. ``layers``, ``vocabulary``: L and |V| of the model. ``minimum``: j.
    ``threshold``: λ; above 1 nothing leaves. ``pruning``: of ``PRUNINGS``. ``decay``: (rate, N), see
    ``OperatingPoint``. ``alpha``, ``alpha_decay``, ``emit``, ``rescale``: of the contrasts, see ``Confidence``.
    ``amateurs_from``: of JSD without pruning, the first layer that may be contrasted with, below j; None: j itself.

    Raises:
        BadArgument: unknown names, a minimum without a layer to decide at, a combination that means nothing.
    """
    for name, value, known in (("signal", signal, CONFIDENCES), ("pruning", pruning, PRUNINGS)):
        if value not in known:
            raise BadArgument(name, value, f"one of {', '.join(known)}")
    if pruning != "none" and minimum >= layers - 1:
        raise BadArgument("minimum", minimum, f"a layer in 1–{layers - 2}", "after it no layer is read but the last")
    since = minimum if amateurs_from is None else amateurs_from
    if since != minimum and not (SIGNALS[signal].needs is SINCE and pruning == "none" and 1 <= since < minimum):
        expected = f"a layer in 1–{minimum - 1}, for jsd_contrast without pruning"
        raise BadArgument("amateurs_from", amateurs_from, expected, "a race is read from its minimum layer on")
    probes, first = layers_read(signal, since, layers), max(minimum, since + SIGNALS[signal].needs.delay)
    sizes = PRUNINGS[pruning](minimum, layers, vocabulary)
    confidence = Confidence(since, alpha, alpha_decay, emit, rescale, sizes.kept, sizes.shrink)
    return OperatingPoint(
        name=_name(signal, pruning, minimum, confidence, threshold, schedule, decay),
        family=signal if pruning == "none" else f"{signal} {pruning}",
        layers=layers,
        ceiling=layers,
        probes=probes,
        thresholds=(tuple(threshold if layer >= first else math.inf for layer in probes),),
        schedule=schedule,
        signal=signal,
        # what one whole readout decides is what any lens trace records: it replays like any other point
        confidence=confidence if SIGNALS[signal].parametrised or pruning != "none" else None,
        decay=decay,
    )


def _name(
    signal: str,
    pruning: str,
    minimum: int,
    confidence: Confidence,
    threshold: float,
    schedule: str,
    decay: tuple[float, float] | None,
) -> str:
    """Says all that distinguishes points of one sweep."""
    parts = [
        (signal.replace("_", " "), True),
        (pruning, pruning != "none"),
        (f"j={minimum} λ={short(threshold)}", True),
        (f"amateurs from {confidence.minimum}", confidence.minimum != minimum),
        (f"α={short(confidence.alpha)}", SIGNALS[signal].contrasts),
        (f"α′ rate={short(confidence.alpha_decay or 0.0)}", confidence.alpha_decay is not None),
        (confidence.emit, confidence.emit != "contrastive"),
        ("rescaled", confidence.rescale),
        ("decay={}/{}".format(*map(short, decay or (0.0, 0.0))), decay is not None),
        (schedule, schedule != "monotone"),
    ]
    return " ".join(part for part, said in parts if said)
