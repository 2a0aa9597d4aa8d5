"""Audits of every exit rule: an honest decoder passes each check, and each planted defect fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.exit_rules import assign_frequency_buckets
from emad_ref.models.causal import CausalStepper
from emad_ref.models.stepper import Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec
from emad_ref.protocol import Prompt
from emad_ref.record import Ints, Work
from emad_ref.signals import LAYERWISE, SIGNALS, ProbeOutput
from pytest_emad.audit import (
    Finding,
    check_decisions,
    check_generation,
    check_replay_agreement,
    tolerance,
)
from pytest_emad.audit.model_lens import ModelLens, replay_document
from pytest_emad.audit.reference_logits import compute_reference
from pytest_emad.audit.trajectory import DecoderUnderTest
from tests.laws.test_confidence import RULES as CONFIDENCE_RULES
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

pytestmark = pytest.mark.each_value

PROBES = (1, 3, 5)
TOLERANCE = tolerance("gpt_neox", "float64", "cpu")
NEW = 10
SHARE = 0.08  # share of tokens that stop at a probe, so that rows fall step by step
TOPK = EntropyEstimator("topk", k=8, correction=((1.1, 0.05), (0.9, 0.1), (1.0, -0.1)))
LOWRANK = EntropyEstimator("lowrank", k=8, rank=6)
LINEAR = EntropyEstimator(
    "linear", weights=tuple(tuple(row) for row in np.random.default_rng(5).normal(0, 0.3, (3, 33)).tolist())
)
# name → (bins, share of tokens that each row of thresholds lets exit): hardly any at the first positions
BINNED = {
    "position and top1_probability": (
        ThresholdBinSpec(("position", "top1_probability"), position_edges=(8,), top1_probability_edges=(0.06, 0.1)),
        (0.001, 0.002, 0.003, 0.02, 0.3, 0.6),
    ),
    "frequency and position": (
        ThresholdBinSpec(
            ("frequency", "position"), (8,), frequency=assign_frequency_buckets(np.arange(VOCABULARY, 0, -1))
        ),
        (0.001, 0.6, 0.002, 0.1, 0.003, 0.01),
    ),
}


@cache
def stepper() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


@cache
def lens() -> ModelLens:
    return ModelLens(stepper())


@cache
def tuned(rank: int | None = 4) -> str:
    """Return the digest of a tuned lens attached to the model above."""
    return attached(stepper(), PROBES, rank)


@cache
def trace(through: str | None = None) -> Trace:
    """Return a trace of the text from which thresholds are taken, read through a tuned lens or not."""
    rng = np.random.default_rng(1)
    texts = [TokenSequence(rng.integers(0, VOCABULARY, 40)) for _ in range(6)]
    estimators = dict.fromkeys((TOPK, LOWRANK, LINEAR), PROBES)
    rules = [point for point in CONFIDENCE_RULES.values() if point.confidence is not None and through is None]
    return take_trace(stepper(), texts, estimators=estimators, rules=rules, lens=through)


def sure(point: OperatingPoint, share: float) -> OperatingPoint:
    """Return thresholds that a ``share`` of all tokens pass at each probe that may decide."""
    signal = SIGNALS[point.signal]
    seen = np.nan_to_num(trace(point.lens).rule_signal(point)[:, np.array(point.probes) - 1].astype(np.float64))
    found = np.quantile(seen, share if signal.sense == "falls" else 1 - share, axis=0)
    levels = [
        signal.unreachable_threshold if old == signal.unreachable_threshold else float(level)
        for level, old in zip(found, point.thresholds[0], strict=True)
    ]
    return replace(point, thresholds=(tuple(levels),) * point.bins.bin_count, schedule="monotone")


def plain(**change: Any) -> OperatingPoint:
    return OperatingPoint("plain", "f", LAYERS, LAYERS, PROBES, ((0.0,) * len(PROBES),), **change)


def binned(spec: ThresholdBinSpec, shares: tuple[float, ...]) -> OperatingPoint:
    """Give every bin its own share of tokens, so that a token in a wrong bin is detected."""
    table = tuple(sure(plain(), share).thresholds[0] for share in shares)
    return replace(plain(), thresholds=table, bins=spec)


def between(signal: str) -> OperatingPoint:
    """Place layers between probes and thresholds that rise with depth, so that lines cross them there."""
    levels = tuple(sure(plain(signal=signal), share).thresholds[0][i] for i, share in enumerate((0.02, 0.02, 0.3)))
    return replace(plain(signal=signal), thresholds=(levels,), interpolate=True)


def agreeing(**change: Any) -> OperatingPoint:
    """Exit at half of the places where two probes agree; random readouts seldom agree."""
    point = plain(signal="agreement", **change)
    seen = trace(point.lens).rule_signal(point)
    level = float(np.median(seen[seen > 0]))
    return replace(point, thresholds=((level,) * len(PROBES),))


POINTS: dict[str, Callable[[], OperatingPoint]] = {
    **{name: lambda name=name: sure(plain(signal=name), SHARE) for name in LAYERWISE},
    **{
        name: lambda point=point: sure(point, SHARE)
        for name, point in CONFIDENCE_RULES.items()
        if point.confidence is not None
    },
    **{
        estimator.name: lambda estimator=estimator: sure(plain(estimator=estimator), SHARE)
        for estimator in (TOPK, LOWRANK, LINEAR)
    },
    **{name: lambda row=row: binned(*row) for name, row in BINNED.items()},
    "between probes": lambda: between("entropy_nats"),
    "between probes, rising": lambda: between("softmax_response"),
    "tuned lens": lambda: sure(plain(lens=tuned()), SHARE),
    "tuned lens of full rank": lambda: sure(plain(lens=tuned(None)), SHARE),
    "tuned lens at the exit": lambda: sure(plain(lens=tuned(), estimator=LINEAR), SHARE),
    "tuned lens behind a gate": lambda: sure(plain(lens=tuned(), estimator=LINEAR, signal="divergence"), SHARE),
    "agreement": agreeing,
    "agreement through a tuned lens": lambda: agreeing(lens=tuned()),
    "falling thresholds": lambda: replace(sure(plain(signal="softmax_response"), 0.04), decay=(8.0, 16.0)),
    "falling by CALM's form": lambda: replace(
        sure(plain(signal="softmax_response"), 0.04), decay=(8.0, 16.0), decay_form="calm"
    ),
}
CHECKS = ("decisions", "generation", "bridge")
ALIKE = {"jsd decaying alpha", "jsd rescaled", "decaying", "jsd fixed", "between probes, rising"}
KINDS = [name for name in POINTS if name not in ALIKE]  # for defects of all rules, one per way of reading is enough


@cache
def prompts() -> tuple[list[Prompt], np.ndarray]:
    rng = np.random.default_rng(11)
    return [Prompt(rng.integers(0, VOCABULARY, n)) for n in (5, 9, 1)], rng.integers(0, VOCABULARY, (3, 12))


@cache
def texts() -> list[TokenSequence]:
    rng = np.random.default_rng(12)
    return [TokenSequence(rng.integers(0, VOCABULARY, 30), start) for start in (0, 4)]


def audited(check: str, decoder: WalkedDecoder, point: OperatingPoint) -> Finding:
    asked, continuation = prompts()
    if check == "bridge":
        replayed = [replay_document(stepper(), text, point, TOLERANCE) for text in texts()]
        return check_replay_agreement(decoder, point, replayed, TOLERANCE)
    under_test = DecoderUnderTest(decoder, lens(), point, TOLERANCE, exact_context=True)
    if check == "decisions":
        return check_decisions(under_test, asked, continuation)
    # a text in which depth changes no token gives no power, but no refutation either
    return check_generation(under_test, asked, NEW, needed=0)


def honest(point: OperatingPoint) -> WalkedDecoder:
    return WalkedDecoder(stepper(), point, max_rows=3)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", POINTS)
def test_an_honest_decoder_passes(name: str, check: str) -> None:
    point = POINTS[name]()
    finding = audited(check, honest(point), point)
    assert finding.passed is True, finding.detail
    assert finding.n > 0
    assert finding.ties == 0


@pytest.mark.parametrize("name", POINTS)
def test_depths_are_spread(name: str) -> None:
    """Without different depths no test here has power."""
    point = POINTS[name]()
    text = TokenSequence(np.random.default_rng(12).integers(0, VOCABULARY, 60))
    depth = replay_document(stepper(), text, point, TOLERANCE).depth
    assert len(set(depth.tolist())) > 1, depth
    if point.interpolate:
        assert set(depth.tolist()) - {*PROBES, LAYERS}, "no token exits between probes"


# ---------------------------------------------------------------- planted defects


class Altered:
    """A probe with one fault."""

    def __init__(self, watch: Any):
        self.watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watch, name)


class OtherSignal(Altered):
    """Compare a signal that is off by one thousandth."""

    def read(self, hidden: Tensor, probe: int, work: Work, row_ids: Ints) -> ProbeOutput:
        seen = self.watch.read(hidden, probe, work, row_ids)
        return replace(seen, signal=seen.signal * 1.001)


class FullHead(Altered):
    """Compare what the rule compares, but emit from the full head, without counting it."""

    def read(self, hidden: Tensor, probe: int, work: Work, row_ids: Ints) -> ProbeOutput:
        seen = self.watch.read(hidden, probe, work, row_ids)
        return replace(seen, logits=self.watch.stepper.logits(hidden))


class RawExit(Altered):
    """Charge the lens at the exit, but emit from the model's own head."""

    def emit_logits(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        self.watch.emit_logits(hidden, layer, work)
        return self.watch.stepper.logits(hidden)


class FreeLens(Altered):
    """Read through the lens, but charge the head alone."""

    def emit_logits(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        free = Work.none(work.layers)
        logits = self.watch.emit_logits(hidden, layer, free)
        work.readout_rows[:] += free.readout_rows
        return logits


class Free(Altered):
    """Read without being charged."""

    def read(self, hidden: Tensor, probe: int, work: Work, row_ids: Ints) -> ProbeOutput:
        return self.watch.read(hidden, probe, Work.none(work.layers), row_ids)


def with_watch(point: OperatingPoint, altered: type[Altered]) -> WalkedDecoder:
    decoder = honest(point)
    decoder._forward.probe = altered(decoder._forward.probe)
    return decoder


EMITS = [name for name in POINTS if (rule := CONFIDENCE_RULES.get(name)) is not None and rule.confidence is not None]


@pytest.mark.parametrize("name", [name for name in EMITS if SIGNALS[CONFIDENCE_RULES[name].signal].cost is not None])
def test_a_decoder_that_emits_from_the_full_head_is_refuted(name: str) -> None:
    """For rules whose own distribution is contrastive, or lacks pruned tokens."""
    point = POINTS[name]()
    assert point.confidence is not None
    if point.confidence.emit == "expert" and not point.confidence.prunes_vocabulary:
        assert audited("decisions", with_watch(point, FullHead), point).passed is True, "the expert is the full head"
        return
    for check in ("decisions", "bridge"):
        finding = audited(check, with_watch(point, FullHead), point)
        assert finding.passed is False, (check, finding.detail)
        assert "logits off by" in finding.detail or "NLL off by" in finding.detail


LENSED = [name for name in POINTS if name.startswith("tuned lens")]
AT_PROBES = [name for name in LENSED if name not in ("tuned lens at the exit", "tuned lens behind a gate")]


def of_easier_thresholds(point: OperatingPoint) -> WalkedDecoder:
    """Its signals are the rule's; its decisions use easier thresholds."""
    easier = 0.1 if SIGNALS[point.signal].sense == "rises" else 1.6
    return honest(replace(point, thresholds=tuple(tuple(level * easier for level in row) for row in point.thresholds)))


def with_free_lens_at_probes(point: OperatingPoint) -> WalkedDecoder:
    """At a probe, emit within the probe's readout."""
    decoder = honest(point)
    watch: Any = decoder._forward.probe
    watch.emit_logits = FreeLens(honest(point)._forward.probe).emit_logits
    return decoder


def with_(altered: type[Altered]) -> Callable[[OperatingPoint], WalkedDecoder]:
    return lambda point: with_watch(point, altered)


EXITS = [name for name in LENSED if name not in AT_PROBES]
OFF = r"(logits|NLL) off by"
# defect → the points at which it is refuted, the decoder, the refuting checks, their words
REFUTED: dict[str, tuple[list[str], Callable[[OperatingPoint], WalkedDecoder], tuple[str, ...], str]] = {
    "another signal": (KINDS, with_(OtherSignal), ("generation", "bridge"), "{unit}, more than"),
    "other thresholds": (
        KINDS, of_easier_thresholds, ("decisions", "bridge"), "the rule gives depth|a signal that the rule compares"),
    "free probes": (  # saturation runs no readout that could be charged
        [name for name in KINDS if name != "saturation"], with_(Free), ("decisions",), r"work\.readout_"),
    "emission past the lens at probes": (AT_PROBES, with_(FullHead), ("decisions", "bridge"), OFF),
    "emission past the lens at exits": (EXITS, with_(RawExit), ("decisions", "bridge"), OFF),
    "a free lens at probes": (AT_PROBES, with_free_lens_at_probes, ("decisions",), r"work\.readout_macs"),
    "a free lens at exits": (EXITS, with_(FreeLens), ("decisions",), r"work\.readout_macs"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("defect", "name"), [(defect, name) for defect, (names, *_) in REFUTED.items() for name in names]
)
def test_a_decoder_with_a_defect_is_refuted(defect: str, name: str) -> None:
    point, (_, made, checks, complaint) = POINTS[name](), REFUTED[defect]
    for check in checks:
        finding = audited(check, made(point), point)
        assert finding.passed is False, (check, finding.detail)
        assert re.search(complaint.format(unit=re.escape(SIGNALS[point.signal].unit)), finding.detail)


CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "no exit between probes": ("between probes", {"interpolate": False}),
    "no exit between probes, rising": ("between probes, rising", {"interpolate": False}),
    "no correction": (TOPK.name, {"estimator": replace(TOPK, correction=())}),
    "another position edge": (
        "position and top1_probability",
        {"bins": replace(BINNED["position and top1_probability"][0], position_edges=(14,))},
    ),
    "another probability edge": (
        "position and top1_probability",
        {"bins": replace(BINNED["position and top1_probability"][0], top1_probability_edges=(0.5, 0.9))},
    ),
    "another frequency table": (
        "frequency and position",
        {
            "bins": replace(
                BINNED["frequency and position"][0], frequency=assign_frequency_buckets(np.arange(VOCABULARY))
            )
        },
    ),
}


@pytest.mark.parametrize("defect", CHANGED)
def test_a_decoder_that_leaves_out_part_of_the_rule_is_refuted(defect: str) -> None:
    name, change = CHANGED[defect]
    point = POINTS[name]()
    for check in ("decisions", "bridge"):
        assert audited(check, honest(replace(point, **change)), point).passed is False, check


@pytest.mark.parametrize("decay", [None, (0.01, 16.0)], ids=["no decay", "a slower decay"])
def test_a_decoder_whose_thresholds_do_not_fall_as_they_should_is_refuted(decay: tuple[float, float] | None) -> None:
    """Thresholds lie just above the largest signal of the text, so that it passes them once they fall by a tenth."""
    plain_response = plain(signal="softmax_response")
    asked, continuation = prompts()
    read = {
        "decisions": [
            compute_reference(
                lens(), np.concatenate([prompt.tokens, row]), plain_response, len(prompt.tokens) - 1
            ).signal[2:]
            for prompt, row in zip(asked, continuation, strict=True)
        ],
        "bridge": [
            compute_reference(lens(), text.tokens[:-1], plain_response, text.first_decided).signal[2:]
            for text in texts()
        ],
    }
    for check, signals in read.items():
        levels = tuple((np.concatenate(signals).max(axis=0) / 0.95).tolist())
        point = replace(plain_response, thresholds=(levels,), decay=(200.0, 16.0))
        assert audited(check, honest(point), point).passed is True
        finding = audited(check, honest(replace(point, decay=decay)), point)
        assert finding.passed is False, check
        assert "the rule gives depth" in finding.detail


# ---------------------------------------------------------------- the oracle


@pytest.mark.parametrize("name", LAYERWISE)
def test_a_rule_led_and_a_signal_taken_from_logits_are_the_same(name: str) -> None:
    """Two computations of one number: the probe on the states of the pass, and NumPy on its logits."""
    point, text = POINTS[name](), np.random.default_rng(3).integers(0, VOCABULARY, 12)
    reference, led = compute_reference(lens(), text, point, 2), lens().read_rule(text, 2, point)
    np.testing.assert_allclose(led.signal, reference.signal, atol=TOLERANCE)
    np.testing.assert_allclose(led.emitted, reference.emitted, atol=TOLERANCE)
    assert led.readouts.heads.tolist() == reference.readouts.heads.tolist()
    assert led.readouts.shows.tolist() == reference.readouts.shows.tolist()
