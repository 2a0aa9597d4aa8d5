"""Points that are read in part: fields ignored, digits of thresholds lost, another probe's threshold, ``last``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from emad_ref.mutants.base import MutantDecoder, MutantSession, decoder_factory, session_factory
from emad_ref.mutants.depths import AnotherRule
from emad_ref.mutants.mutant import Mutant, MutantFactory, NotPlantable
from emad_ref.point import BinSpec, Estimator, OperatingPoint
from emad_ref.protocol import Decoder, Request, Step
from emad_ref.record import Floats, Ints
from emad_ref.signals import SIGNALS

FIELDS = "invariants/test_fields.py::test_every_field_of_a_point_is_honoured_or_declined"
DIGITS = "invariants/test_fields.py::test_thresholds_are_compared_to_the_last_digit"
LEAST_BETWEEN = 6  # layers of a model in which some lie between three probes
LAST = "invariants/test_fields.py::test_as_many_logits_are_shown_as_are_wanted"


def decoding_by(change: Callable[[OperatingPoint], OperatingPoint]) -> MutantFactory:
    """An honest decoder of another point than the one asked for."""

    def make(request: Request) -> Decoder:
        return decoder_factory(MutantDecoder)(replace(request, point=change(request.point)))

    return make


def without_bins(point: OperatingPoint) -> OperatingPoint:
    return replace(point, bins=BinSpec(), thresholds=point.thresholds[:1])


def full_readouts(point: OperatingPoint) -> OperatingPoint:
    return point if SIGNALS[point.signal].learnt else replace(point, estimator=Estimator())


def by_entropy(point: OperatingPoint) -> OperatingPoint:
    plain = point.confidence is None and not SIGNALS[point.signal].learnt
    return replace(point, signal="entropy_nats", decay=None) if plain else point


def no_decay(point: OperatingPoint) -> OperatingPoint:
    return replace(point, decay=None)


def at_probes(point: OperatingPoint) -> OperatingPoint:
    if point.layers < LEAST_BETWEEN:
        raise NotPlantable("probes of so few layers leave none between them")
    return replace(point, interpolate=False)


def plain_alpha(point: OperatingPoint) -> OperatingPoint:
    return point if point.confidence is None else replace(point, confidence=replace(point.confidence, alpha_decay=None))


def to_the_top(point: OperatingPoint) -> OperatingPoint:
    return replace(point, ceiling=point.layers)


def never_rising(point: OperatingPoint) -> OperatingPoint:
    return replace(point, schedule="monotone") if point.schedule.startswith("free") else point


def own_head(point: OperatingPoint) -> OperatingPoint:
    return replace(point, lens=None)


class RoundedThresholds(AnotherRule):
    """``rounded``: thresholds float64 [bins, probes] as they are compared with."""

    def rule(self, point: OperatingPoint) -> OperatingPoint:
        given = np.array(point.thresholds, dtype=np.float32)
        finite = np.isfinite(given)
        changed = np.where(finite, self.rounded(np.where(finite, given, 0), SIGNALS[point.signal].sense), given)
        return replace(point, thresholds=tuple(tuple(row) for row in changed.tolist()))

    def rounded(self, thresholds: Floats, sense: str) -> Floats:
        return thresholds


def to_bfloat16(values: Floats) -> Floats:
    """The first 16 bits, to nearest."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    cut = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return cut.astype(np.uint32).view(np.float32).astype(np.float64)


class InBfloat16(RoundedThresholds):
    def rounded(self, thresholds: Floats, sense: str) -> Floats:
        return to_bfloat16(thresholds)


class InFloat16(RoundedThresholds):
    def rounded(self, thresholds: Floats, sense: str) -> Floats:
        return thresholds.astype(np.float16).astype(np.float64)


class ComparedInBfloat16(RoundedThresholds):
    """Signals are rounded, too: whatever lies up to half a step beyond the threshold passes."""

    def rounded(self, thresholds: Floats, sense: str) -> Floats:
        near = to_bfloat16(thresholds)
        half = np.exp2(np.floor(np.log2(np.maximum(np.abs(near), 2.0**-100))) - 8)
        moved: Floats = near + (half if sense == "falls" else -half)
        return moved


class Strict(RoundedThresholds):
    """A signal that equals its threshold does not pass."""

    def rounded(self, thresholds: Floats, sense: str) -> Floats:
        towards = np.float32(-np.inf if sense == "falls" else np.inf)
        stricter: Floats = np.nextafter(thresholds.astype(np.float32), towards).astype(np.float64)
        return stricter


class NextThreshold(AnotherRule):
    """Each probe compares with the threshold of the next."""

    def rule(self, point: OperatingPoint) -> OperatingPoint:
        return replace(point, thresholds=tuple((*row[1:], row[-1]) for row in point.thresholds))


class FirstShown(MutantSession):
    """Of a feed the first logits are shown, as many as are wanted of the last."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth)
        return step if last is None else replace(step, logits=step.logits[:, :last])


class LastOfAll(MutantSession):
    """Depths and signals are those of the last tokens alone."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step, first = super().feed(tokens, depth, last), 0 if last is None else tokens.shape[1] - last
        return replace(step, depth=step.depth[:, first:], signal=step.signal[:, first:])


class HeadsForNothing(MutantSession):
    """Heads run for every token, whatever is wanted, and are cut away afterwards."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth)
        return step if last is None else replace(step, logits=step.logits[:, tokens.shape[1] - last :])


OWN_WORD = r"by the signals that it reports the rule gives depth"

PLANTED = (
    Mutant(
        "field-bins-ignored",
        "fields",
        "every token takes the first row of thresholds",
        decoding_by(without_bins),
        FIELDS,
        r"bins of \w+: row 0",
    ),
    Mutant(
        "field-estimator-ignored",
        "fields",
        "probes read the full head, whatever estimator is asked for",
        decoding_by(full_readouts),
        FIELDS,
        r"(estimates|readout|linear probes): row 0",
    ),
    Mutant(
        "field-signal-ignored",
        "fields",
        "entropy is compared, whatever signal is asked for",
        decoding_by(by_entropy),
        FIELDS,
        r"(softmax_response|top2_gap|agreement): row 0",
    ),
    Mutant(
        "field-decay-ignored",
        "fields",
        "thresholds do not fall",
        decoding_by(no_decay),
        FIELDS,
        r"thresholds that fall: row 0",
    ),
    Mutant(
        "field-interpolation-ignored",
        "fields",
        "tokens leave at probes alone",
        decoding_by(at_probes),
        FIELDS,
        r"exits between probes: row 0",
    ),
    Mutant(
        "field-alpha-decay-ignored",
        "fields",
        "α stays as it is",
        decoding_by(plain_alpha),
        FIELDS,
        r"a decaying α: row 0",
    ),
    Mutant(
        "field-ceiling-ignored",
        "fields",
        "tokens run to the last layer, whatever the ceiling is",
        decoding_by(to_the_top),
        FIELDS,
        r"a ceiling below the last layer: ",
    ),
    Mutant(
        "field-schedule-ignored",
        "fields",
        "depth never rises, whatever the schedule is",
        decoding_by(never_rising),
        FIELDS,
        r"free depth, \w+: ",
    ),
    Mutant(
        "field-lens-ignored",
        "fields",
        "heads are the model's own, whatever lens is named",
        decoding_by(own_head),
        FIELDS,
        r"a lens that nobody has tuned: decoded at",
    ),
    Mutant(
        "compared-thresholds-in-bfloat16",
        "comparisons",
        "thresholds are kept in bfloat16",
        decoder_factory(InBfloat16),
        DIGITS,
        OWN_WORD,
    ),
    Mutant(
        "compared-thresholds-in-float16",
        "comparisons",
        "thresholds are kept in float16",
        decoder_factory(InFloat16),
        DIGITS,
        OWN_WORD,
    ),
    Mutant(
        "compared-in-bfloat16",
        "comparisons",
        "signals and thresholds are compared in bfloat16",
        decoder_factory(ComparedInBfloat16),
        DIGITS,
        OWN_WORD,
    ),
    Mutant(
        "compared-strictly",
        "comparisons",
        "a signal that equals its threshold does not pass",
        decoder_factory(Strict),
        DIGITS,
        OWN_WORD,
    ),
    Mutant(
        "compared-with-the-next",
        "comparisons",
        "each probe compares with the threshold of the next",
        decoder_factory(NextThreshold),
        DIGITS,
        OWN_WORD,
    ),
    Mutant(
        "last-from-the-front",
        "last",
        "of a feed the first logits are shown, not the last",
        session_factory(FirstShown),
        LAST,
        r"row \d, position \d+, depth \d+: logits off by",
    ),
    Mutant(
        "last-of-depths-too",
        "last",
        "depths and signals are those of the last tokens alone",
        session_factory(LastOfAll),
        LAST,
        r"tells depths of shape",
    ),
    Mutant(
        "last-heads-all-run",
        "last",
        "heads run for all tokens, however few logits are wanted",
        session_factory(HeadsForNothing),
        LAST,
        r"work counts \d+ heads, but the logits of \d+ positions",
    ),
)
