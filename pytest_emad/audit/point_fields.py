"""Check that a decoder honours every field of an operating point, or declines the point.

A *variant* is a point that uses a field. The check opens the decoder at each variant; it may decline (``Unsupported``).
If it decodes, a session and a ``generate`` are compared with the lens at that point, or with the reference decoder if
the lens does not know the states. Thresholds are quantiles of the signals on the fed tokens, chosen so that ignoring
the field changes some decision. If no thresholds do, a note names the field. The check decodes enough tokens to show
the difference ``ENOUGH`` times.

``tests/unit/audit/test_point_fields.py`` walks the dataclasses of ``point`` and fails for a field or value without a
variant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from emad_ref.errors import EmadError
from emad_ref.point import ConfidenceParameters, EntropyEstimator, OperatingPoint, ThresholdBinSpec
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.record import Floats, Ints
from emad_ref.signals import ENTROPY, SIGNALS, required_layers
from pytest_emad.audit.decoding_checks import require_record_matches_lens, require_session_run_matches_lens
from pytest_emad.audit.finding import AuditRefutedError, Finding, Tally, prefix_raised_complaints
from pytest_emad.audit.reference_logits import (
    Lens,
    LensReference,
    PrefixCachingLens,
    compute_reference,
    headroom_and_noise,
    rule_depths,
)
from pytest_emad.audit.threshold_comparisons import UNREACHED_THRESHOLD, DecoderOpening
from pytest_emad.audit.token_comparison import check_same_tokens, is_next_token_tied, require_reference_step
from pytest_emad.audit.tolerances import emission_noise_factor, signal_noise_factor
from pytest_emad.audit.trajectory import Judge

MOST_PROBES = 5
MOST_CONTRASTED = 6  # layers; models of up to 8 are read from layer 2 on
MISSING_DIGEST = "0" * 16  # digest of a tuned lens, or translators, that do not exist

EXIT_SHARES = (0.5, 0.3, 0.15, 0.7, 0.05)  # shares of the fed tokens that a threshold lets exit
DRAWN_THRESHOLDS = 200  # further random thresholds
DECODED_THRESHOLDS = 12  # number of these if the reference decoder has to decode at each
MAX_JUMP_TOLERANCE = 0.01  # logits; with more noise, tokens tie too often to compare a signal that jumps at ties
PLAIN_SIGNALS = tuple(
    name for name, signal in SIGNALS.items() if signal.needs_only_thresholds and signal is not ENTROPY
)
DRAWS = 3  # most draws of a variant's own numbers until ignoring it shows
ENOUGH = 3  # discriminating positions that end the search for thresholds, and that are decoded
FEWEST_DECODED = 4  # least tokens fed, and generated
BATCH_ROWS = 3
CLEAR = 2  # least tolerances between a signal and a threshold; closer ones are decided by rounding


# ---------------------------------------------------------------- points that use a field


@dataclass(frozen=True)
class ModelDimensions:
    """``layers`` L and ``vocabulary`` V of a model, ``width`` E of its head's input."""

    layers: int
    vocabulary: int
    width: int


PointFactory = Callable[[ModelDimensions, np.random.Generator], OperatingPoint]
PointChange = Callable[[OperatingPoint], OperatingPoint]


@dataclass(frozen=True)
class PointVariantSpec:
    """A point that uses ``fields``; thresholds are chosen later.

    ``made``        makes the point.
    ``ignored``     the points of a decoder that ignores one of the fields.
    ``least``       least number of layers of a model for it.
    ``by_lens``     whether the lens knows its states; else the reference decoder replaces it.
    ``unservable``  it names a file that does not exist, so decoders must refuse it.
    ``jumps``       its signal jumps if two tokens tie for the top, for being kept, or for retrieval.
    """

    fields: tuple[str, ...]
    made: PointFactory
    ignored: tuple[PointChange, ...] = ()
    least: int = 2
    by_lens: bool = True
    unservable: bool = False
    jumps: bool = False


def evenly_spaced_probes(layers: int, first: int = 1) -> tuple[int, ...]:
    """At most ``MOST_PROBES`` layers below ``layers``, evenly from ``first`` on."""
    return tuple(range(first, layers, max(1, math.ceil(layers / MOST_PROBES))))


def point_without_exits(sizes: ModelDimensions, probes: tuple[int, ...] | None = None, **change: Any) -> OperatingPoint:
    """A point without exits, whose thresholds are set later."""
    probes = evenly_spaced_probes(sizes.layers) if probes is None else probes
    bins, signal = change.get("bins", ThresholdBinSpec()), change.get("signal", "entropy_nats")
    change.setdefault("ceiling", sizes.layers)
    thresholds = ((SIGNALS[signal].unreachable_threshold,) * len(probes),) * bins.bin_count
    return OperatingPoint("fields", "quantile", sizes.layers, probes=probes, thresholds=thresholds, **change)


def plain_point_factory(**change: Any) -> PointFactory:
    return lambda sizes, rng: point_without_exits(sizes, **change)


def confidence_point_factory(signal: str, minimum: int = 2, **parameters: Any) -> PointFactory:
    """Factory of points with a signal and its parameters, from layer ``minimum`` on.

    In a deep model a signal that contrasts or prunes readouts starts at a higher layer, so that it reads at most
    ``MOST_CONTRASTED`` layers. Contrasts of all pairs of 30 layers over a vocabulary of 50,000 take minutes and show no
    more defects. Parameters may be functions of the model's dimensions.
    """
    deep = SIGNALS[signal].is_contrastive or not parameters.keys().isdisjoint(("kept", "shrink"))

    def make(sizes: ModelDimensions, rng: np.random.Generator) -> OperatingPoint:
        first = max(minimum, sizes.layers - MOST_CONTRASTED) if deep else minimum
        values = {name: value(sizes) if callable(value) else value for name, value in parameters.items()}
        probes = required_layers(signal, first, sizes.layers)
        return point_without_exits(sizes, probes, signal=signal, confidence=ConfidenceParameters(first, **values))

    return make


def estimator_point_factory(signal: str = "entropy_nats", **change: Any) -> PointFactory:
    """Factory of points with an estimator. ``change`` holds its fields, or functions of (probes, sizes, rng)."""

    def make(sizes: ModelDimensions, rng: np.random.Generator) -> OperatingPoint:
        probes = evenly_spaced_probes(sizes.layers)
        values = {name: value(probes, sizes, rng) if callable(value) else value for name, value in change.items()}
        return replace(point_without_exits(sizes, probes, estimator=EntropyEstimator(**values)), signal=signal)

    return make


def draw_k(probes: tuple[int, ...], sizes: ModelDimensions, rng: np.random.Generator) -> int:
    """Draw k, at most half of the vocabulary, since the model of ignoring ``k`` uses twice as many."""
    return max(1, min(int(rng.integers(3, 9)), sizes.vocabulary // 2))


def draw_corrections(
    probes: tuple[int, ...], sizes: ModelDimensions, rng: np.random.Generator
) -> tuple[tuple[float, float], ...]:
    return tuple((float(rng.uniform(1.1, 1.3)), float(rng.uniform(0.1, 0.3))) for _ in probes)


def draw_probe_weights(
    probes: tuple[int, ...], sizes: ModelDimensions, rng: np.random.Generator
) -> tuple[tuple[float, ...], ...]:
    """Draw weights per probe and entry of the head's input, so small that the sum does not amplify errors of states."""
    weights = rng.normal(0, 0.3 / math.sqrt(sizes.width), (len(probes), sizes.width + 1))
    return tuple(tuple(row) for row in weights.astype(np.float32).tolist())


def frequency_bins_point(sizes: ModelDimensions, rng: np.random.Generator) -> OperatingPoint:
    """A point with three frequency buckets, two of them filled by the last tokens.

    Otherwise a table might have fewer buckets than rows.
    """
    table = bytes(rng.integers(0, 3, sizes.vocabulary - 2, dtype=np.uint8)) + b"\x01\x02"
    return point_without_exits(sizes, bins=ThresholdBinSpec(("frequency",), frequency=table))


def top1_probability_bins_point(sizes: ModelDimensions, rng: np.random.Generator) -> OperatingPoint:
    """A point with edges between an even guess and certainty, so that the bins suit any model's confidence."""
    low, high = sorted(math.exp(rng.uniform(-0.8 * math.log(sizes.vocabulary), 0)) for _ in range(2))
    return point_without_exits(sizes, bins=ThresholdBinSpec(("top1_probability",), top1_probability_edges=(low, high)))


# ---------------------------------------------------------------- points at which a field is ignored


def make_field_change(**fields: Any) -> PointChange:
    return lambda point: replace(point, **fields)


def make_part_change(part: str, **fields: Any) -> PointChange:
    """Change of fields of the point's estimator, confidence or bins; functions get the part."""

    def changed(point: OperatingPoint) -> OperatingPoint:
        current = getattr(point, part)
        values = {name: value(current) if callable(value) else value for name, value in fields.items()}
        return replace(point, **{part: replace(current, **values)})

    return changed


def point_without_bins(point: OperatingPoint) -> OperatingPoint:
    return replace(point, bins=ThresholdBinSpec(), thresholds=point.thresholds[:1])


def shift_probes(point: OperatingPoint) -> OperatingPoint:
    """Move probes one layer down or up."""
    by = 1 if point.probes[-1] + 1 < point.ceiling else -1
    return replace(point, probes=tuple(probe + by for probe in point.probes))


def disable_exits(point: OperatingPoint) -> OperatingPoint:
    return replace(
        point, thresholds=((SIGNALS[point.signal].unreachable_threshold,) * len(point.probes),) * point.bins.bin_count
    )


def decide_at_first_layer(point: OperatingPoint) -> OperatingPoint:
    """Decide at the first layer that its signal allows."""
    assert point.confidence is not None, "made with one"
    minimum = SIGNALS[point.signal].needs.least
    probes = required_layers(point.signal, minimum, point.ceiling)
    level = point.thresholds[0][-1]
    row = tuple(math.inf if probe < minimum else level for probe in probes)
    return replace(point, probes=probes, thresholds=(row,), confidence=replace(point.confidence, minimum=minimum))


def use_entropy(point: OperatingPoint) -> OperatingPoint:
    row = (0.0,) * len(point.probes)
    return replace(point, signal="entropy_nats", confidence=None, decay=None, decay_form="free", thresholds=(row,))


FULL_READOUT = make_field_change(estimator=EntropyEstimator())
MONOTONE = make_field_change(schedule="monotone")

VARIANTS: dict[str, PointVariantSpec] = {
    "probes and thresholds": PointVariantSpec(
        ("probes", "thresholds"), lambda sizes,
         rng: point_without_exits(sizes, evenly_spaced_probes(sizes.layers, first=2)),
        (shift_probes, disable_exits), 4),
    "a ceiling below the last layer": PointVariantSpec(
        ("ceiling",),
        lambda sizes, rng: point_without_exits(sizes, evenly_spaced_probes(sizes.layers - 1), ceiling=sizes.layers - 1),
        (lambda point: replace(point, ceiling=point.layers),), 3),
    "free depth, eager": PointVariantSpec(("schedule",), plain_point_factory(schedule="free_eager"), (MONOTONE,)),
    "free depth, deferred": PointVariantSpec(("schedule",), plain_point_factory(schedule="free_deferred"), (MONOTONE,),
        by_lens=False),
    "copied states": PointVariantSpec(("schedule",), plain_point_factory(schedule="copying"), (MONOTONE,),
        by_lens=False),
    "depth by position": PointVariantSpec(
        ("schedule", "period", "floor"),
        lambda sizes, rng: point_without_exits(sizes, (), schedule="positional", period=int(rng.integers(5, 8)),
        floor=1),
        (make_field_change(schedule="monotone", period=None, floor=None), make_field_change(period=12),
         lambda point: replace(point, floor=point.ceiling // 2)), 4, by_lens=False),
    "depth by chunks": PointVariantSpec(
        ("schedule", "period"), plain_point_factory(schedule="chunked", period=3),
        (make_field_change(schedule="monotone", period=None), make_field_change(period=7)), by_lens=False),
    "translators that do not exist": PointVariantSpec(
        ("schedule", "translators"), plain_point_factory(schedule="translated", translators=MISSING_DIGEST),
         unservable=True),
    "a tuned lens that does not exist": PointVariantSpec(("lens",), plain_point_factory(lens=MISSING_DIGEST),
        unservable=True),
    "top-k estimates": PointVariantSpec(
        ("estimator.kind", "estimator.k"), estimator_point_factory(kind="topk", k=draw_k),
        (FULL_READOUT, make_part_change("estimator", k=lambda estimator: 2 * estimator.k))),
    "corrected estimates": PointVariantSpec(
        ("estimator.correction",), estimator_point_factory(kind="topk", k=draw_k, correction=draw_corrections),
        (make_part_change("estimator", correction=()),)),
    "retrieved estimates": PointVariantSpec(
        ("estimator.search", "estimator.rank"),
         estimator_point_factory(kind="topk", k=draw_k, search="lowrank", rank=2),
        (make_part_change("estimator", search="exact", rank=0), make_part_change("estimator", rank=1)), jumps=True),
    "a low-rank readout": PointVariantSpec(
        ("estimator.kind", "estimator.rank"), estimator_point_factory(kind="lowrank", k=draw_k, rank=3),
        (FULL_READOUT, make_part_change("estimator", rank=1))),
    "linear probes": PointVariantSpec(
        ("estimator.kind", "estimator.weights"), estimator_point_factory(kind="linear", weights=draw_probe_weights),
        (FULL_READOUT,
         make_part_change("estimator", weights=lambda estimator: tuple(row[::-1] for row in estimator.weights)))),
    "a learnt gate": PointVariantSpec(
        ("signal",), estimator_point_factory("divergence", kind="linear", weights=draw_probe_weights),
        (make_field_change(signal="entropy_nats", estimator=EntropyEstimator()),)),
    **{name: PointVariantSpec(("signal",), plain_point_factory(signal=name), (use_entropy,),
        jumps=not SIGNALS[name].is_single_layer)
       for name in PLAIN_SIGNALS},
    **{name: PointVariantSpec(("signal", "confidence"), confidence_point_factory(name), (use_entropy,), 4,
        jumps=signal.is_contrastive)
       for name, signal in SIGNALS.items() if signal.needs_confidence_parameters},
    "minimum layer": PointVariantSpec(
        ("confidence.minimum",), confidence_point_factory("saturation", 3), (decide_at_first_layer,), 5),
    "a constant α": PointVariantSpec(
        ("confidence.alpha",), confidence_point_factory("jsd_contrast", alpha=0.4),
         (make_part_change("confidence", alpha=0.1),), 4,
        jumps=True),
    "a decaying α": PointVariantSpec(
        ("confidence.alpha_decay",), confidence_point_factory("jsd_contrast", alpha=0.4, alpha_decay=0.5),
        (make_part_change("confidence", alpha_decay=None),), 4, jumps=True),
    "what is emitted": PointVariantSpec(
        ("confidence.emit",), confidence_point_factory("jsd_contrast", emit="expert"),
        (make_part_change("confidence", emit="contrastive"),), 4, jumps=True),
    "rescaled scores": PointVariantSpec(
        ("confidence.rescale",), confidence_point_factory("jsd_contrast", rescale=True),
        (make_part_change("confidence", rescale=False),), 4, jumps=True),
    "a pruned vocabulary": PointVariantSpec(
        ("confidence.kept",),
        confidence_point_factory("softmax_response",
        kept=lambda sizes: (3,) * (min(sizes.layers - 2, MOST_CONTRASTED) - 1)),
        (make_field_change(confidence=None),), 4, jumps=True),
    "a vocabulary that shrinks": PointVariantSpec(  # to four tokens if a readout is confident
        ("confidence.shrink",),
        confidence_point_factory("softmax_response", shrink=lambda sizes: max(0.0, 1 - 4 / sizes.vocabulary)),
        (make_field_change(confidence=None),), 4, jumps=True),
    "bins of position": PointVariantSpec(
        ("bins.features", "bins.position_edges"),
         plain_point_factory(bins=ThresholdBinSpec(("position",), position_edges=(9, 14))),
        (point_without_bins, make_part_change("bins", position_edges=(32, 128)))),
    "bins of top1_probability": PointVariantSpec(
        ("bins.features", "bins.top1_probability_edges"), top1_probability_bins_point,
        (point_without_bins, make_part_change("bins", top1_probability_edges=(0.4, 0.7)))),
    "bins of frequency": PointVariantSpec(
        ("bins.features", "bins.frequency"), frequency_bins_point,
        (point_without_bins, make_part_change("bins",
         frequency=lambda bins: bytes((bucket + 1) % 3 for bucket in bins.frequency)))),
    "exits between probes": PointVariantSpec(
        ("interpolate",), lambda sizes,
         rng: point_without_exits(sizes, (1, 2, *range(4, sizes.layers, 3)), interpolate=True),
        (make_field_change(interpolate=False),), 6),
    "thresholds that fall": PointVariantSpec(
        ("decay",), plain_point_factory(signal="top2_gap", decay=(8.0, 8.0)),
         (make_field_change(decay=None), make_field_change(decay=(8.0, 800.0)))),
    "thresholds that fall by CALM's form": PointVariantSpec(
        ("decay", "decay_form"), plain_point_factory(signal="top2_gap", decay=(8.0, 80.0), decay_form="calm"),
         (make_field_change(decay=None, decay_form="free"), make_field_change(decay_form="free"))),
}  # fmt: skip


# ---------------------------------------------------------------- the check


class SignalTooNoisyError(EmadError):
    """Raised if a variant's signal jumps and is too noisy to compare."""


@dataclass(frozen=True)
class FieldsCheck:
    """Inputs of the check of every variant.

    ``opened`` opens the decoder under test at a point, for ``BATCH_ROWS`` rows; it or its methods may raise
    Unsupported. ``own`` makes the reference decoder, for as many, at a point whose states the lens does not know.
    ``new``: most tokens to generate. ``tolerance`` in logits and nats, raised to the decoder's declared noise.
    """

    opened: DecoderOpening
    own: Callable[[OperatingPoint], Decoder]
    lens: Lens
    sizes: ModelDimensions
    new: int
    rng: np.random.Generator
    tolerance: float

    @cached_property
    def _text_lens(self) -> PrefixCachingLens:
        """The lens for the text that all variants share: its heads are read once."""
        return PrefixCachingLens(self.lens)

    def check_variants(
        self, prompt: Prompt, continuation: Ints, variants: dict[str, PointVariantSpec] = VARIANTS
    ) -> Finding:
        """Check every variant on ``prompt`` followed by ``continuation`` int64 [n], and on tokens generated.

        Discriminating are the variants with power; the check needs half of them.
        """
        tally, declined, power = Tally("fields", needed=0), [], []
        with tally:
            for name, variant in variants.items():
                if self.sizes.layers < variant.least:
                    tally.notes.append(f"{name}: {variant.least} layers needed")
                    continue
                texts = [(prompt, continuation), *([_reverse_text(prompt, continuation)] if variant.jumps else [])]
                try:
                    with prefix_raised_complaints(f"{name}: "):
                        power.append((self._check_variant(tally, variant, texts), name))
                except Unsupported as refusal:
                    declined.append(f"{name} ({refusal})")
                except SignalTooNoisyError as reason:
                    tally.notes.append(f"{name}: {reason}")
            if declined:
                tally.notes.append(f"declined: {'; '.join(declined)}")
            powerless = [name for differing, name in power if differing == 0]
            tally.notes += [f"{name}: ignoring it would not show on these tokens" for name in powerless]
            tally.needed, tally.discriminating = len(power) // 2, len(power) - len(powerless)
        return tally.to_finding()

    def _check_variant(self, tally: Tally, variant: PointVariantSpec, texts: Sequence[tuple[Prompt, Ints]]) -> int:
        """Judge ``variant`` on the first of ``texts`` that it passes; returns the positions with power there.

        If tokens tie on one text, the signal may jump; a decoder that ignores the field fails on the next text too.

        Raises:
            AuditRefutedError: on the last of them.
            Unsupported, SignalTooNoisyError: the variant cannot be judged.
        """
        for left, (prompt, continuation) in zip(reversed(range(len(texts))), texts, strict=True):
            for _ in range(DRAWS):
                point, differing, needed = self._choose_thresholds(variant, prompt, continuation)
                if differing:
                    break
            try:
                self._judge_variant(tally, variant, point, prompt, continuation[: max(FEWEST_DECODED, needed)])
            except AuditRefutedError:
                if left == 0:
                    raise
                tally.ties += 1
            else:
                break
        return differing

    def _judge_variant(
        self, tally: Tally, variant: PointVariantSpec, point: OperatingPoint, prompt: Prompt, continuation: Ints
    ) -> None:
        if variant.unservable:
            self._require_refused(tally, point, prompt)
            return
        new, (prompts, continuations) = min(self.new, len(continuation)), _rows_of_a_batch(prompt, continuation)
        with self.opened(point) as decoder:
            declared = decoder.capabilities.logit_noise
            allowed = tally.tolerance_at_least_noise(self.tolerance, declared)
            if not variant.by_lens:
                own = self.own(point)
                actual, expected = (each.generate(prompts, new, frozenset()) for each in (decoder, own))
                theirs, mine = ([emitted.tolist() for emitted in record.emitted] for record in (actual, expected))
                there, here = (
                    [
                        each.tokens.depth[each.tokens.kept_row_indices(row)][-new:].tolist()
                        for row in range(len(prompts))
                    ]
                    for each in (actual, expected)
                )
                same = check_same_tokens(
                    self.lens, self.tolerance, prompts, theirs, mine, point, there, here, declared=declared,
                    most_ties=1.0, tied_when_decoded=partial(is_next_token_tied, own, point),
                )  # fmt: skip  # with few rows, a share of ties has no meaning
                tally.n += same.n
                same.require()
                judge = Judge(tally, self.lens, point, allowed, decoder.capabilities.counted)
                _compare_steps(judge, decoder, own, prompts, continuations)
                return
            if variant.jumps and allowed > MAX_JUMP_TOLERANCE:
                why = f"its signal jumps where tokens tie, which {allowed:g} of a logit often decides"
                raise SignalTooNoisyError(why)
            judge = Judge(tally, self._text_lens, point, allowed, decoder.capabilities.counted)
            require_session_run_matches_lens(judge, decoder, [prompt], continuation[None])
            require_record_matches_lens(
                replace(judge, lens=self.lens), decoder.generate([prompt], new, frozenset()), [prompt], new
            )
            judge = replace(judge, lens=self.lens)
            require_session_run_matches_lens(judge, decoder, prompts, continuations)
            require_record_matches_lens(judge, decoder.generate(prompts, new, frozenset()), prompts, new)

    def _require_refused(self, tally: Tally, point: OperatingPoint, prompt: Prompt) -> None:
        """Require a refusal: decoding at a point that names a missing file ignores the field."""
        try:
            with self.opened(point) as decoder:
                decoder.generate([prompt], 1, frozenset())
        except EmadError:
            return
        tally.require(False, f"decoded at lens={point.lens!r}, translators={point.translators!r}, which do not exist")

    # ------------------------------------------------------------ thresholds under which ignoring shows

    def _choose_thresholds(
        self, variant: PointVariantSpec, prompt: Prompt, continuation: Ints
    ) -> tuple[OperatingPoint, int, int]:
        """(the variant's point, positions with power, tokens to decode until ``ENOUGH`` of them).

        Both numbers are of the field that is hardest to show.
        """
        point, first = variant.made(self.sizes, self.rng), len(prompt.tokens) - 1
        tokens = np.concatenate([prompt.tokens, continuation])
        if variant.unservable:
            return point, ENOUGH, 0
        # copied states change the signals; signals of exact states suffice to choose thresholds
        exact = point if variant.by_lens else replace(point, schedule="monotone", period=None, floor=None)
        mine = compute_reference(self._text_lens, tokens, exact, first, self.tolerance)
        if variant.by_lens:
            # readouts and emissions do not depend on thresholds, so one pass each serves all tried thresholds
            theirs = [
                compute_reference(self._text_lens, tokens, ignoring(point), first, self.tolerance)
                for ignoring in variant.ignored
            ]
            most, least = None, len(EXIT_SHARES)
        else:
            most, least = (DECODED_THRESHOLDS if point.probes else 1), 0
        best, chosen, needed = -1, point, 0
        for number, levels in enumerate(islice(self._threshold_candidates(point, mine.signal), most)):
            candidate = _set_thresholds(point, levels)
            if variant.by_lens:
                places = [
                    self._differing(candidate, mine, ignoring(candidate), other)
                    for ignoring, other in zip(variant.ignored, theirs, strict=True)
                ]
            else:
                places = self._differing_decoded(variant, candidate, prompt)
            if (fewest := min(map(len, places))) > best:
                best, chosen = fewest, candidate
                needed = max(1 + int(at[:ENOUGH][-1]) if len(at) else 0 for at in places)
            if number >= least and best >= ENOUGH:
                break
        return chosen, best, needed

    def _threshold_candidates(self, point: OperatingPoint, signal: Floats) -> Iterator[Floats]:
        """Thresholds [probes] to try: of a share at every probe, of one value at one probe, and random ones.

        Each is half-way between two clearly different values of ``signal`` [m, probes].
        """
        sense, never = SIGNALS[point.signal].sense, SIGNALS[point.signal].unreachable_threshold
        if point.interpolate:  # interpolation needs finite thresholds
            never = UNREACHED_THRESHOLD[sense]
        allowed = CLEAR * self.tolerance * signal_noise_factor(point)
        between = []
        for at, probe in enumerate(point.probes):
            values = np.sort(signal[~np.isnan(signal[:, at]), at])
            decided = point.confidence is None or probe >= point.confidence.minimum
            clear = np.flatnonzero(np.diff(values) > 2 * allowed) if decided else np.zeros(0, dtype=np.int64)
            between.append((values[clear] + values[clear + 1]) / 2)
        for share in EXIT_SHARES:
            quantile = share if sense == "falls" else 1 - share
            yield np.array([each[int(quantile * (len(each) - 1))] if len(each) else never for each in between])
        for scale in (1.0,) if point.decay is None else (1.0, 1.05):  # a signal that falls by a tenth is between them
            for at, each in enumerate(between):
                for level in each:
                    yield np.where(np.arange(len(between)) == at, scale * level, never)
        for _ in range(DRAWN_THRESHOLDS):
            yield np.array([self.rng.choice(each) if len(each) else never for each in between])

    def _differing_decoded(self, variant: PointVariantSpec, point: OperatingPoint, prompt: Prompt) -> list[Ints]:
        """Tokens after ``prompt`` at which the reference decoder emits or decides differently, per ignored field."""

        def emitted(at: OperatingPoint) -> Ints:
            record = self.own(at).generate([prompt], self.new, frozenset())
            return np.stack([record.emitted[0], record.tokens.depth[record.tokens.kept_row_indices(0)][-self.new :]])

        mine = emitted(point)
        return [np.flatnonzero((mine != emitted(ignoring(point))).any(axis=0)) for ignoring in variant.ignored]

    def _differing(
        self, point: OperatingPoint, mine: LensReference, ignoring: OperatingPoint, theirs: LensReference
    ) -> Ints:
        """Positions, from the prompt's last on, where depths, read signals or emissions differ beyond the tolerance."""
        depth = _point_depths(point, mine)
        differ = depth != _point_depths(ignoring, theirs)
        if mine.signal.shape == theirs.signal.shape:
            read = np.asarray(point.probes, dtype=np.int64) <= depth[:, None]
            off = np.abs(mine.signal - theirs.signal) > CLEAR * self.tolerance * signal_noise_factor(point)
            differ |= (off & read).any(axis=1)
        shown, hidden = mine.emitted.at_depth(depth), theirs.emitted.at_depth(depth)
        with np.errstate(invalid="ignore"):  # −inf of a pruned token on both sides is no difference
            apart = np.abs(shown - hidden) > CLEAR * self.tolerance * emission_noise_factor(point)
        differ |= apart.any(axis=-1)
        return np.flatnonzero(differ)


def _reverse_text(prompt: Prompt, continuation: Ints) -> tuple[Prompt, Ints]:
    """A second text: the same tokens reversed."""
    tokens = np.concatenate([prompt.tokens, continuation])[::-1].copy()
    return Prompt(tokens[: len(prompt.tokens)], prompt.source), tokens[len(prompt.tokens) :]


def _rows_of_a_batch(prompt: Prompt, continuation: Ints) -> tuple[list[Prompt], Ints]:
    """The text, the text reversed, and its halves exchanged, after prompts of different lengths; [rows, n] to feed.

    The rows exit at different layers, so that state of a batch in place of a row's shows.
    """
    tokens, fed = np.concatenate([prompt.tokens, continuation]), len(continuation)
    texts = (tokens, tokens[::-1], np.roll(tokens, len(tokens) // 2))
    rows = [text[min(row, len(prompt.tokens) - 1) :].copy() for row, text in enumerate(texts)]
    return [Prompt(row[:-fed], prompt.source) for row in rows], np.stack([row[-fed:] for row in rows])


def _set_thresholds(point: OperatingPoint, levels: Floats) -> OperatingPoint:
    """``point`` with thresholds ``levels`` [probes] in every second bin row; the other rows let nothing exit."""
    never = SIGNALS[point.signal].unreachable_threshold
    row: tuple[float, ...] = tuple(levels.astype(np.float32).tolist())
    rows = tuple(row if number % 2 else (never,) * len(row) for number in range(point.bins.bin_count))
    return replace(point, thresholds=rows if point.bins.features else (row,))


def _point_depths(point: OperatingPoint, reference: LensReference) -> Ints:
    """Depths [m] by the rule of ``point``."""
    room, _ = headroom_and_noise(point, reference.signal, reference.rows[0])
    depth = rule_depths(point, room, np.full(len(room), point.ceiling, dtype=np.int64))
    return np.minimum.accumulate(depth) if point.schedule == "monotone" else depth


def _compare_steps(
    judge: Judge, decoder: Decoder, own: Decoder, prompts: Sequence[Prompt], continuations: Ints
) -> None:
    """Require the depths and logits of ``own``, the reference decoder, in each row up to the first tie of a depth.

    Tokens would show an error in copied K/V only where it changes an argmax.
    """
    (session, theirs), (own_session, mine) = (each.start(prompts) for each in (decoder, own))
    signals: dict[int, list[Floats]] = {row: [] for row in range(len(prompts))}  # of the rows that are still compared
    with closing(session), closing(own_session):
        for at in range(continuations.shape[1] + 1):
            if at:
                token = continuations[:, at - 1 : at]
                theirs, mine = session.feed(token.copy()), own_session.feed(token.copy())
            for row in list(signals):
                signals[row].append(mine.signal[row, -1])
                reference = int(mine.depth[row, -1]), mine.logits[row, -1]
                shown = int(theirs.depth[row, -1]), theirs.logits[row, -1]
                where = f"fed token {at} of row {row}"
                if not require_reference_step(judge, where, np.array(signals[row]), reference, *shown):
                    del signals[row]
