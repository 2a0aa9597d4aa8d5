"""Every field and every value of an operating point has an audit that refutes a decoder which ignores it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.point import (
    EMISSIONS,
    ESTIMATORS,
    FEATURES,
    SEARCHES,
    ConfidenceParameters,
    EntropyEstimator,
    OperatingPoint,
    ScheduleName,
    ThresholdBinSpec,
)
from emad_ref.protocol import Decoder, Prompt, Unsupported
from emad_ref.signals import SIGNALS
from pytest_emad.audit import Finding, tolerance
from pytest_emad.audit.model_lens import ModelLens
from pytest_emad.audit.point_fields import BATCH_ROWS, VARIANTS, FieldsCheck, ModelDimensions, PointChange
from tests.small_models import LAYERS, VOCABULARY, small_model

# fields that decide nothing, and the reason why no audit can tell whether they are read
LABELS: dict[str, str] = {
    "name": "how reports call the point",
    "family": "where its thresholds come from, which stand beside it",
    "margin_nats": "for reports: thresholds already contain it",
    "layers": "the layers of the model, whatever the point is",
}
PARTS = {
    "": OperatingPoint,
    "estimator.": EntropyEstimator,
    "confidence.": ConfidenceParameters,
    "bins.": ThresholdBinSpec,
}
WHOLE = {"estimator", "confidence", "bins"}  # by their parts
OTHERWISE_RETRIEVED = {"faiss"}  # approximations of "exact" whose misses depend on the index
NEW = 8


@cache
def stepper() -> CausalStepper:
    return CausalStepper(small_model("gpt_neox"))


SIZES = ModelDimensions(LAYERS, VOCABULARY, 32)


def points() -> Iterator[OperatingPoint]:
    rng = np.random.default_rng(0)
    for variant in VARIANTS.values():
        yield variant.made(SIZES, rng)


def test_every_field_is_used_by_a_variant_or_decides_nothing() -> None:
    covered = {path for variant in VARIANTS.values() for path in variant.fields}
    there = {prefix + field.name for prefix, part in PARTS.items() for field in fields_of(part)} - WHOLE
    assert there - covered - set(LABELS) == set(), "give it a variant in pytest_emad/audit/point_fields.py"
    assert covered - there - WHOLE == set(), "no such field"
    assert set(LABELS) <= there


@pytest.mark.parametrize(
    ("values", "used"),
    [
        (get_args(ScheduleName), lambda point: [point.schedule]),
        (SIGNALS, lambda point: [point.signal]),
        (ESTIMATORS, lambda point: [point.estimator.kind]),
        (SEARCHES, lambda point: [point.estimator.search]),
        (FEATURES, lambda point: point.bins.features),
        (EMISSIONS, lambda point: [] if point.confidence is None else [point.confidence.emit]),
    ],
    ids=["schedules", "signals", "estimators", "searches", "features", "emissions"],
)
def test_every_value_of_a_field_is_used(values: Any, used: Any) -> None:
    seen = {value for point in points() for value in used(point)}
    assert set(values) - seen - OTHERWISE_RETRIEVED == set()


def check(opened: Any, rng: np.random.Generator) -> FieldsCheck:
    allowed = tolerance("gpt_neox", "float64", "cpu")
    return FieldsCheck(
        opened,
        lambda point: WalkedDecoder(stepper(), point, max_rows=BATCH_ROWS),
        ModelLens(stepper()),
        SIZES,
        NEW,
        rng,
        allowed,
    )


def audited(name: str, by: PointChange = lambda point: point) -> Finding:
    """Audit, for one variant, a decoder that decodes ``by`` a point other than the requested one."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCABULARY, 20)

    @contextmanager
    def opened(point: OperatingPoint) -> Iterator[Decoder]:
        yield WalkedDecoder(stepper(), by(point), max_rows=BATCH_ROWS)

    return check(opened, rng).check_variants(Prompt(text[:6]), text[6:], {name: VARIANTS[name]})


@pytest.mark.parametrize("name", VARIANTS)
def test_honouring_passes_with_power(name: str) -> None:
    finding = audited(name)
    assert finding.passed is True, finding.detail
    assert "would not show" not in finding.detail
    assert "layers needed" not in finding.detail


IGNORED = [(name, number) for name, variant in VARIANTS.items() for number in range(len(variant.ignored))]


@pytest.mark.parametrize(("name", "number"), IGNORED)
def test_ignoring_is_refuted(name: str, number: int) -> None:
    finding = audited(name, VARIANTS[name].ignored[number])
    assert finding.passed is False, finding.detail
    assert finding.detail.startswith(name) or "row 0" in finding.detail


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.unservable])
def test_what_nobody_has_must_be_refused(name: str) -> None:
    finding = audited(name, lambda point: replace(point, lens=None, translators=None, schedule="monotone"))
    assert finding.passed is False
    assert "which do not exist" in finding.detail


@pytest.mark.parametrize("vocabulary", [2, 3, 8])
def test_no_variant_keeps_more_logits_than_a_small_vocabulary_has(vocabulary: int) -> None:
    for seed in range(10):
        for name, variant in VARIANTS.items():
            point = variant.made(replace(SIZES, vocabulary=vocabulary), np.random.default_rng(seed))
            for used in (point, *(ignoring(point) for ignoring in variant.ignored)):
                assert used.estimator.k <= vocabulary, name


def test_declining_is_no_fault() -> None:
    @contextmanager
    def opened(point: OperatingPoint) -> Iterator[Decoder]:
        raise Unsupported("only this")
        yield

    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCABULARY, 20)
    variants = {"thresholds that fall": VARIANTS["thresholds that fall"]}
    finding = check(opened, rng).check_variants(Prompt(text[:6]), text[6:], variants)
    assert finding.passed is True
    assert "declined: thresholds that fall (only this)" in finding.detail
