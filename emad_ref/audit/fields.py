"""Check that a decoder honours every field of an operating point, or declines the point.

For each variant the decoder is opened at a point that uses one field, with thresholds under which a decoder that
ignores the field decides otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from emad_ref.audit.comparisons import UNREACHED_THRESHOLD
from emad_ref.audit.decoding_checks import judge_record, judge_session
from emad_ref.audit.finding import AuditRefutedError, Finding, Tally, prefix_complaints
from emad_ref.audit.lens import Lens, LensReference, consult, emission_noise, headroom, rule_depths, signal_noise
from emad_ref.audit.token_comparison import same_tokens
from emad_ref.errors import EmadError
from emad_ref.point import BinSpec, Confidence, Estimator, OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import Floats, Ints
from emad_ref.signals import SIGNALS, required_layers

MOST_PROBES = 5
MISSING_DIGEST = "0" * 16  # the digest of something that nobody has fitted


@dataclass(frozen=True)
class ModelDimensions:
    """``layers`` L and ``vocabulary`` V of a model, ``width`` E of its head's input."""

    layers: int
    vocabulary: int
    width: int


PointFactory = Callable[[ModelDimensions, np.random.Generator], OperatingPoint]
PointChange = Callable[[OperatingPoint], OperatingPoint]


@dataclass(frozen=True)
class PointVariant:
    """``made``: a point that uses ``fields``, whose thresholds are still to be chosen; ``ignored``: one for each.

    ``least``       layers that a model needs for it.
    ``by_lens``     whether the lens knows the states that it decodes on; else our own decoder stands in for it.
    ``unservable``  no decoder can serve it: it names a file that does not exist, and must be refused.
    ``jumps``       its signal jumps where two tokens tie: which lead, are kept, or are retrieved.
    """

    fields: tuple[str, ...]
    made: PointFactory
    ignored: tuple[PointChange, ...] = ()
    least: int = 2
    by_lens: bool = True
    unservable: bool = False
    jumps: bool = False


def spread_probes(layers: int, ceiling: int | None = None, first: int = 1) -> tuple[int, ...]:
    """At most ``MOST_PROBES`` layers below ``ceiling``, evenly from ``first`` on."""
    return tuple(range(first, ceiling or layers, max(1, math.ceil((ceiling or layers) / MOST_PROBES))))


def plain_point(sizes: ModelDimensions, probes: tuple[int, ...] | None = None, **change: Any) -> OperatingPoint:
    """A point without exits, at which thresholds are to be put."""
    probes = spread_probes(sizes.layers) if probes is None else probes
    bins, signal = change.get("bins", BinSpec()), change.get("signal", "entropy_nats")
    change.setdefault("ceiling", sizes.layers)
    thresholds = ((SIGNALS[signal].never,) * len(probes),) * bins.count
    return OperatingPoint("fields", "quantile", sizes.layers, probes=probes, thresholds=thresholds, **change)


def confidence_point(signal: str, minimum: int = 2, **parameters: Any) -> PointFactory:
    """A signal with parameters, decided from layer ``minimum`` on."""

    def make(sizes: ModelDimensions, rng: np.random.Generator) -> OperatingPoint:
        given = {name: value(sizes) if callable(value) else value for name, value in parameters.items()}
        probes = required_layers(signal, minimum, sizes.layers)
        return plain_point(sizes, probes, signal=signal, confidence=Confidence(minimum, **given))

    return make


def signal_point(name: str) -> PointFactory:
    return lambda sizes, rng: plain_point(sizes, signal=name)


def shrink_share(sizes: ModelDimensions) -> float:
    """A share that leaves four tokens where a readout is sure."""
    return max(0.0, 1 - 4 / sizes.vocabulary)


def estimator_point(**change: Any) -> PointFactory:
    """``change`` holds fields of an estimator, or functions of (probes, sizes, rng) that give them."""

    def make(sizes: ModelDimensions, rng: np.random.Generator) -> OperatingPoint:
        probes = spread_probes(sizes.layers)
        given = {name: value(probes, sizes, rng) if callable(value) else value for name, value in change.items()}
        return plain_point(sizes, probes, estimator=Estimator(**given))

    return make


def draw_k(probes: tuple[int, ...], sizes: ModelDimensions, rng: np.random.Generator) -> int:
    """At most half of the vocabulary: twice as many is what ignoring ``k`` stands for."""
    return max(1, min(int(rng.integers(3, 9)), sizes.vocabulary // 2))


def draw_corrections(
    probes: tuple[int, ...], sizes: ModelDimensions, rng: np.random.Generator
) -> tuple[tuple[float, float], ...]:
    return tuple((float(rng.uniform(1.1, 1.3)), float(rng.uniform(0.1, 0.3))) for _ in probes)


def draw_weights(
    probes: tuple[int, ...], sizes: ModelDimensions, rng: np.random.Generator
) -> tuple[tuple[float, ...], ...]:
    """Of one per probe and entry of the head's input, so small that a state's error is none of the sum's."""
    drawn = rng.normal(0, 0.3 / math.sqrt(sizes.width), (len(probes), sizes.width + 1))
    return tuple(tuple(row) for row in drawn.astype(np.float32).tolist())


def frequency_point(sizes: ModelDimensions, rng: np.random.Generator) -> OperatingPoint:
    # both, or one of two tables would have fewer buckets than rows of thresholds
    table = bytes(rng.integers(0, 3, sizes.vocabulary - 2, dtype=np.uint8)) + b"\x01\x02"
    return plain_point(sizes, bins=BinSpec(("frequency",), frequency=table))


def shift_buckets(point: OperatingPoint) -> OperatingPoint:
    """Every token in the next bucket."""
    moved = bytes((bucket + 1) % 3 for bucket in point.bins.frequency)
    return replace(point, bins=replace(point.bins, frequency=moved))


def confidence_bins_point(sizes: ModelDimensions, rng: np.random.Generator) -> OperatingPoint:
    """Edges between an even guess and certainty, wherever a model's confidence lies."""
    low, high = sorted(math.exp(rng.uniform(-0.8 * math.log(sizes.vocabulary), 0)) for _ in range(2))
    return plain_point(sizes, bins=BinSpec(("confidence",), confidence_edges=(low, high)))


def replace_fields(**change: Any) -> PointChange:
    return lambda point: replace(point, **change)


def replace_estimator(**change: Any) -> PointChange:
    return lambda point: replace(point, estimator=replace(point.estimator, **change))


def replace_confidence(**change: Any) -> PointChange:
    return lambda point: replace(point, confidence=replace(point.confidence, **change))  # type: ignore[type-var]  # made with one


def replace_bins(**change: Any) -> PointChange:
    return lambda point: replace(point, bins=replace(point.bins, **change))


def drop_bins(point: OperatingPoint) -> OperatingPoint:
    return replace(point, bins=BinSpec(), thresholds=point.thresholds[:1])


def shift_probes(point: OperatingPoint) -> OperatingPoint:
    """Probes a layer below or above those asked for."""
    by = 1 if point.probes[-1] + 1 < point.ceiling else -1
    return replace(point, probes=tuple(probe + by for probe in point.probes))


def never_fire(point: OperatingPoint) -> OperatingPoint:
    return replace(point, thresholds=((SIGNALS[point.signal].never,) * len(point.probes),) * point.bins.count)


def decide_at_first_layer(point: OperatingPoint) -> OperatingPoint:
    """Decides at the first layer that its signal allows."""
    assert point.confidence is not None, "made with one"
    minimum = SIGNALS[point.signal].needs.least
    probes = required_layers(point.signal, minimum, point.ceiling)
    level = point.thresholds[0][-1]
    row = tuple(math.inf if probe < minimum else level for probe in probes)
    return replace(point, probes=probes, thresholds=(row,), confidence=replace(point.confidence, minimum=minimum))


def use_entropy(point: OperatingPoint) -> OperatingPoint:
    row = (0.0,) * len(point.probes)
    return replace(point, signal="entropy_nats", confidence=None, decay=None, thresholds=(row,))


FULL_READOUT: PointChange = replace_fields(estimator=Estimator())
UNPRUNED: PointChange = replace_fields(confidence=None)

VARIANTS: dict[str, PointVariant] = {
    "probes and thresholds": PointVariant(
        ("probes", "thresholds"),
        lambda sizes, rng: plain_point(sizes, spread_probes(sizes.layers, first=2)),
        (shift_probes, never_fire),
        4,
    ),
    "a ceiling below the last layer": PointVariant(
        ("ceiling",),
        lambda sizes, rng: plain_point(sizes, spread_probes(sizes.layers - 1), ceiling=sizes.layers - 1),
        (lambda point: replace(point, ceiling=point.layers),),
        3,
    ),
    "free depth, eager": PointVariant(
        ("schedule",),
        lambda sizes, rng: plain_point(sizes, schedule="free_eager"),
        (replace_fields(schedule="monotone"),),
    ),
    "free depth, deferred": PointVariant(
        ("schedule",),
        lambda sizes, rng: plain_point(sizes, schedule="free_deferred"),
        (replace_fields(schedule="monotone"),),
        by_lens=False,
    ),
    "copied states": PointVariant(
        ("schedule",),
        lambda sizes, rng: plain_point(sizes, schedule="copying"),
        (replace_fields(schedule="monotone"),),
        by_lens=False,
    ),
    "depth by position": PointVariant(
        ("schedule", "period", "floor"),
        lambda sizes, rng: plain_point(sizes, (), schedule="positional", period=int(rng.integers(5, 8)), floor=1),
        (
            replace_fields(schedule="monotone", period=None, floor=None),
            replace_fields(period=12),
            lambda point: replace(point, floor=point.ceiling // 2),
        ),
        4,
        by_lens=False,
    ),
    "depth by chunks": PointVariant(
        ("schedule", "period"),
        lambda sizes, rng: plain_point(sizes, schedule="chunked", period=3),
        (replace_fields(schedule="monotone", period=None), replace_fields(period=7)),
        by_lens=False,
    ),
    "states that nobody has translated": PointVariant(
        ("schedule", "translators"),
        lambda sizes, rng: plain_point(sizes, schedule="translated", translators=MISSING_DIGEST),
        unservable=True,
    ),
    "a lens that nobody has tuned": PointVariant(
        ("lens",), lambda sizes, rng: plain_point(sizes, lens=MISSING_DIGEST), unservable=True
    ),
    "top-k estimates": PointVariant(
        ("estimator.kind", "estimator.k"),
        estimator_point(kind="topk", k=draw_k),
        (FULL_READOUT, lambda point: replace(point, estimator=replace(point.estimator, k=2 * point.estimator.k))),
    ),
    "corrected estimates": PointVariant(
        ("estimator.correction",),
        estimator_point(kind="topk", k=draw_k, correction=draw_corrections),
        (replace_estimator(correction=()),),
    ),
    "retrieved estimates": PointVariant(
        ("estimator.search", "estimator.rank"),
        estimator_point(kind="topk", k=draw_k, search="lowrank", rank=2),
        (replace_estimator(search="exact", rank=0), replace_estimator(rank=1)),
        jumps=True,
    ),
    "a low-rank readout": PointVariant(
        ("estimator.kind", "estimator.rank"),
        estimator_point(kind="lowrank", k=draw_k, rank=3),
        (FULL_READOUT, replace_estimator(rank=1)),
    ),
    "linear probes": PointVariant(
        ("estimator.kind", "estimator.weights"),
        estimator_point(kind="linear", weights=draw_weights),
        (
            FULL_READOUT,
            lambda point: replace(
                point, estimator=replace(point.estimator, weights=tuple(row[::-1] for row in point.estimator.weights))
            ),
        ),
    ),
    "a learnt gate": PointVariant(
        ("signal",),
        lambda sizes, rng: replace(
            estimator_point(kind="linear", weights=draw_weights)(sizes, rng), signal="divergence"
        ),
        (lambda point: replace(point, signal="entropy_nats", estimator=Estimator()),),
    ),
    **{
        name: PointVariant(("signal",), signal_point(name), (use_entropy,), jumps=name == "agreement")
        for name in ("softmax_response", "top2_gap", "agreement")
    },
    "saturation": PointVariant(("signal", "confidence"), confidence_point("saturation"), (use_entropy,), 4),
    "weighted_contrast": PointVariant(
        ("signal", "confidence"), confidence_point("weighted_contrast"), (use_entropy,), 4, jumps=True
    ),
    "jsd_contrast": PointVariant(
        ("signal", "confidence"), confidence_point("jsd_contrast"), (use_entropy,), 4, jumps=True
    ),
    "minimum layer": PointVariant(
        ("confidence.minimum",), confidence_point("saturation", 3), (decide_at_first_layer,), 5
    ),
    "a constant α": PointVariant(
        ("confidence.alpha",),
        confidence_point("jsd_contrast", alpha=0.4),
        (replace_confidence(alpha=0.1),),
        4,
        jumps=True,
    ),
    "a decaying α": PointVariant(
        ("confidence.alpha_decay",),
        confidence_point("jsd_contrast", alpha=0.4, alpha_decay=0.5),
        (replace_confidence(alpha_decay=None),),
        4,
        jumps=True,
    ),
    "what is emitted": PointVariant(
        ("confidence.emit",),
        confidence_point("jsd_contrast", emit="expert"),
        (replace_confidence(emit="contrastive"),),
        4,
        jumps=True,
    ),
    "rescaled scores": PointVariant(
        ("confidence.rescale",),
        confidence_point("jsd_contrast", rescale=True),
        (replace_confidence(rescale=False),),
        4,
        jumps=True,
    ),
    "a pruned vocabulary": PointVariant(
        ("confidence.kept",),
        confidence_point("softmax_response", kept=lambda sizes: (3,) * (sizes.layers - 3)),
        (UNPRUNED,),
        4,
        jumps=True,
    ),
    "a vocabulary that shrinks": PointVariant(
        ("confidence.shrink",), confidence_point("softmax_response", shrink=shrink_share), (UNPRUNED,), 4, jumps=True
    ),
    "bins of position": PointVariant(
        ("bins.features", "bins.position_edges"),
        lambda sizes, rng: plain_point(sizes, bins=BinSpec(("position",), position_edges=(9, 14))),
        (drop_bins, replace_bins(position_edges=(32, 128))),
    ),
    "bins of confidence": PointVariant(
        ("bins.features", "bins.confidence_edges"),
        confidence_bins_point,
        (drop_bins, replace_bins(confidence_edges=(0.4, 0.7))),
    ),
    "bins of frequency": PointVariant(
        ("bins.features", "bins.frequency"),
        frequency_point,
        (drop_bins, shift_buckets),
    ),
    "exits between probes": PointVariant(
        ("interpolate",),
        lambda sizes, rng: plain_point(sizes, (1, 2, *range(4, sizes.layers, 3)), interpolate=True),
        (replace_fields(interpolate=False),),
        6,
    ),
    "thresholds that fall": PointVariant(
        ("decay",),
        lambda sizes, rng: plain_point(sizes, signal="top2_gap", decay=(8.0, 8.0)),
        (replace_fields(decay=None), replace_fields(decay=(8.0, 800.0))),
    ),
}


FIELDS_CHECK = "fields"
EXIT_SHARES = (0.5, 0.3, 0.15, 0.7, 0.05)  # of the tokens fed that a threshold lets go
DRAWN_THRESHOLDS = 200  # further thresholds to try, drawn
DECODED_THRESHOLDS = 12  # of them, where our own decoder has to decode at each
MAX_JUMP_TOLERANCE = (
    0.01  # logits: a tolerance beyond which ties are so many that a signal which jumps there is not compared
)
DRAWS = 3  # of a variant's own numbers, until ignoring it shows
ENOUGH = 3  # discriminating positions with which no better thresholds are looked for
CLEAR = 2  # tolerances that a signal must lie off a threshold: nearer ones decide by rounding

DecoderOpening = Callable[[OperatingPoint], AbstractContextManager[Decoder]]


def fields(
    opened: DecoderOpening,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    sizes: ModelDimensions,
    prompt: Prompt,
    continuation: Ints,
    new: int,
    rng: np.random.Generator,
    tolerance: float,
    *,
    variants: dict[str, PointVariant] = VARIANTS,
) -> Finding:
    """Check every variant on ``prompt`` followed by ``continuation`` int64 [n], and on ``new`` tokens generated.

    Args:
        opened: opens the decoder under test at a point; it or its methods may raise Unsupported.
        own: our own decoder at a point whose states the lens does not know.
        tolerance: in logits and nats, raised to the decoder's declared noise.
    """
    tally, declined, power = Tally(FIELDS_CHECK, needed=0), [], []
    with tally:
        for name, variant in variants.items():
            if sizes.layers < variant.least:
                tally.notes.append(f"{name}: {variant.least} layers needed")
                continue
            texts = [(prompt, continuation), *([_reverse_text(prompt, continuation)] if variant.jumps else [])]
            try:
                with prefix_complaints(f"{name}: "):
                    differing = _check_variant(tally, variant, sizes, opened, own, lens, texts, new, rng, tolerance)
            except Unsupported as refusal:
                declined.append(f"{name} ({refusal})")
                continue
            except SignalTooNoisyError as reason:
                tally.notes.append(f"{name}: {reason}")
                continue
            power.append((differing, name))
        if declined:
            tally.notes.append(f"declined: {'; '.join(declined)}")
        powerless = [name for differing, name in power if differing == 0]
        tally.notes += [f"{name}: ignoring it would not show on these tokens" for name in powerless]
        tally.needed, tally.discriminating = len(power) // 2, len(power) - len(powerless)
    return tally.finding()


class SignalTooNoisyError(EmadError):
    """A variant whose signal jumps cannot be held to numbers that are so far off."""


def _check_variant(
    tally: Tally,
    variant: PointVariant,
    sizes: ModelDimensions,
    opened: DecoderOpening,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    texts: Sequence[tuple[Prompt, Ints]],
    new: int,
    rng: np.random.Generator,
    tolerance: float,
) -> int:
    """Judge ``variant`` on the first of ``texts`` that it passes; positions at which ignoring it would show there.

    On one text two tokens may tie, and the signal jump; who ignores the field is wrong on the next one, too.

    Raises:
        AuditRefutedError: on the last of them.
        Unsupported, TooNoisy: nothing can be said.
    """
    for left, text in zip(reversed(range(len(texts))), texts, strict=True):
        for _ in range(DRAWS):
            point, differing = _choose_thresholds(variant, sizes, own, lens, *text, new, rng, tolerance)
            if differing:
                break
        try:
            _judge_variant(tally, variant, point, opened, own, lens, *text, new, tolerance)
        except AuditRefutedError:
            if left == 0:
                raise
            tally.ties += 1
        else:
            break
    return differing


def _reverse_text(prompt: Prompt, continuation: Ints) -> tuple[Prompt, Ints]:
    """Other tokens of the same lengths."""
    tokens = np.concatenate([prompt.tokens, continuation])[::-1].copy()
    return Prompt(tokens[: len(prompt.tokens)], prompt.source), tokens[len(prompt.tokens) :]


def _judge_variant(
    tally: Tally,
    variant: PointVariant,
    point: OperatingPoint,
    opened: DecoderOpening,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    prompt: Prompt,
    continuation: Ints,
    new: int,
    tolerance: float,
) -> None:
    if variant.unservable:
        _require_refused(tally, opened, point, prompt)
        return
    with opened(point) as decoder:
        declared = decoder.capabilities.logit_noise
        if not variant.by_lens:
            found, wanted = (each.generate([prompt], new, frozenset()) for each in (decoder, own(point)))
            theirs, mine = ([emitted.tolist() for emitted in record.emitted] for record in (found, wanted))
            there, here = ([each.tokens.depth[each.tokens.kept_of(0)][-new:].tolist()] for each in (found, wanted))
            same = same_tokens(
                lens, tolerance, [prompt], theirs, mine, point, there, here, declared=declared, most_ties=1.0
            )  # one row: that it ends in a tie is no share of anything
            tally.n += same.n
            tally.require(same.passed is not False, same.detail)
            return
        allowed = tally.allow(tolerance, declared)
        if variant.jumps and allowed > MAX_JUMP_TOLERANCE:
            raise SignalTooNoisyError(f"its signal jumps where tokens tie, which {allowed:g} of a logit often decides")
        judge_session(tally, decoder, lens, point, [prompt], continuation[None], allowed, exact_context=False)
        record = decoder.generate([prompt], new, frozenset())
        judge_record(
            tally, record, [prompt], new, frozenset(), point, lens, allowed,
            counted=decoder.capabilities.counted, exact_context=False,
        )  # fmt: skip


def _require_refused(tally: Tally, opened: DecoderOpening, point: OperatingPoint, prompt: Prompt) -> None:
    """A point that names a file that does not exist cannot be served: decoding at it ignores the field."""
    try:
        with opened(point) as decoder:
            decoder.generate([prompt], 1, frozenset())
    except EmadError:
        return
    tally.require(False, f"decoded at lens={point.lens!r}, translators={point.translators!r}, which do not exist")


# ---------------------------------------------------------------- thresholds under which ignoring shows


def _choose_thresholds(
    variant: PointVariant,
    sizes: ModelDimensions,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    prompt: Prompt,
    continuation: Ints,
    new: int,
    rng: np.random.Generator,
    tolerance: float,
) -> tuple[OperatingPoint, int]:
    """(the variant's point, positions where ignoring one of its fields changes decoding, the fewest of them)."""
    point, first = variant.made(sizes, rng), len(prompt.tokens) - 1
    tokens = np.concatenate([prompt.tokens, continuation])
    if variant.unservable:
        return point, ENOUGH
    if not variant.by_lens:
        return _choose_thresholds_by_decoding(variant, point, own, lens, prompt, tokens, new, rng, tolerance)
    # what is read and emitted does not depend on thresholds: one pass each serves all that are tried
    mine = consult(lens, tokens, point, first, tolerance)
    theirs = [consult(lens, tokens, ignoring(point), first, tolerance) for ignoring in variant.ignored]
    best, chosen = -1, point
    for number, levels in enumerate(_threshold_candidates(point, mine.signal, rng, tolerance)):
        candidate = _set_thresholds(point, levels)
        honoured = _point_depths(candidate, mine)
        differing = min(
            _count_differing(candidate, mine, honoured, other, _point_depths(ignoring(candidate), other), tolerance)
            for ignoring, other in zip(variant.ignored, theirs, strict=True)
        )
        if differing > best:
            best, chosen = differing, candidate
        if number >= len(EXIT_SHARES) and best >= ENOUGH:
            break
    return chosen, best


def _choose_thresholds_by_decoding(
    variant: PointVariant,
    point: OperatingPoint,
    own: Callable[[OperatingPoint], Decoder],
    lens: Lens,
    prompt: Prompt,
    tokens: Ints,
    new: int,
    rng: np.random.Generator,
    tolerance: float,
) -> tuple[OperatingPoint, int]:
    """The same by what our own decoder emits after ``prompt``, for points whose states the lens does not know."""

    def emitted(at: OperatingPoint) -> Ints:
        record = own(at).generate([prompt], new, frozenset())
        return np.stack([record.emitted[0], record.tokens.depth[record.tokens.kept_of(0)][-new:]])

    best, chosen = -1, point
    # the states that it copies change its signals; those of exact ones are near enough to choose thresholds by
    exact = replace(point, schedule="monotone", period=None, floor=None)
    signal = consult(lens, tokens, exact, len(prompt.tokens) - 1, tolerance).signal
    for levels in islice(
        _threshold_candidates(point, signal, rng, tolerance), DECODED_THRESHOLDS if point.probes else 1
    ):
        candidate = _set_thresholds(point, levels)
        mine = emitted(candidate)
        differing = min(int((mine != emitted(ignoring(candidate))).any(axis=0).sum()) for ignoring in variant.ignored)
        if differing > best:
            best, chosen = differing, candidate
        if best >= ENOUGH:
            break
    return chosen, best


def _threshold_candidates(
    point: OperatingPoint, signal: Floats, rng: np.random.Generator, tolerance: float
) -> Iterator[Floats]:
    """Thresholds [probes] to try: of a share at every probe, of one value at one probe, and drawn ones.

    Each lies half-way between two values of ``signal`` [m, probes] that are clearly apart.
    """
    sense, never = SIGNALS[point.signal].sense, SIGNALS[point.signal].never
    if point.interpolate:  # a line to an infinite threshold is none
        never = UNREACHED_THRESHOLD[sense]
    allowed = CLEAR * tolerance * signal_noise(point)
    between = []
    for at, probe in enumerate(point.probes):
        values = np.sort(signal[~np.isnan(signal[:, at]), at])
        decided = point.confidence is None or probe >= point.confidence.minimum
        clear = np.flatnonzero(np.diff(values) > 2 * allowed) if decided else np.zeros(0, dtype=np.int64)
        between.append((values[clear] + values[clear + 1]) / 2)
    for share in EXIT_SHARES:
        wanted = share if sense == "falls" else 1 - share
        yield np.array([each[int(wanted * (len(each) - 1))] if len(each) else never for each in between])
    for scale in (1.0,) if point.decay is None else (1.0, 1.05):  # what falls by a tenth lies between there
        for at, each in enumerate(between):
            for level in each:
                yield np.where(np.arange(len(between)) == at, scale * level, never)
    for _ in range(DRAWN_THRESHOLDS):
        yield np.array([rng.choice(each) if len(each) else never for each in between])


def _set_thresholds(point: OperatingPoint, levels: Floats) -> OperatingPoint:
    """``point`` with thresholds ``levels`` [probes], of bins in every second row: the others let nothing go."""
    never = SIGNALS[point.signal].never
    row: tuple[float, ...] = tuple(levels.astype(np.float32).tolist())
    rows = tuple(row if number % 2 else (never,) * len(row) for number in range(point.bins.count))
    return replace(point, thresholds=rows if point.bins.features else (row,))


def _point_depths(point: OperatingPoint, reference: LensReference) -> Ints:
    """[m] that the rule of ``point`` gives."""
    room, _ = headroom(point, reference.signal, reference.rows[0])
    depth = rule_depths(point, room, np.full(len(room), point.ceiling, dtype=np.int64))
    return np.minimum.accumulate(depth) if point.schedule == "monotone" else depth


def _count_differing(
    point: OperatingPoint, mine: LensReference, depth: Ints, theirs: LensReference, depth_there: Ints, tolerance: float
) -> int:
    """Positions at which depths differ, or signals that were read, or what is emitted, clearly beyond the tolerance."""
    differ = depth != depth_there
    if mine.signal.shape == theirs.signal.shape:
        read = np.asarray(point.probes, dtype=np.int64) <= depth[:, None]
        off = np.abs(mine.signal - theirs.signal) > CLEAR * tolerance * signal_noise(point)
        differ |= (off & read).any(axis=1)
    at = np.arange(len(depth)), depth - 1
    with np.errstate(invalid="ignore"):  # −inf of a pruned token on both sides is no difference
        apart = np.abs(mine.emitted[at] - theirs.emitted[at]) > CLEAR * tolerance * emission_noise(point)
    differ |= apart.any(axis=-1)
    return int(differ.sum())
