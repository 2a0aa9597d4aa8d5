"""Does the decoder read all of an operating point: every field, every digit, and what ``feed`` is asked to show?"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from emad_ref.audit.point_fields import VARIANTS, FieldsCheck, ModelDimensions
from emad_ref.audit.session_checks import WIDEST_PARTLY_SHOWN, last_logits, partly_shown_feeds
from emad_ref.audit.threshold_comparisons import comparisons
from emad_ref.audit.work import counters
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.measurements.model_measurements import ModelMeasurements
from emad_ref.measurements.model_under_test import FixedEncoderInput
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Unsupported
from pytest_emad.suite_support import Auditor

LENGTH, FED, NEW = 6, 14, 8
FEWEST_PART = 3  # at least one variant of three, of our own decoder on a large model
ROWS, BATCHES = 4, 6
SHOWN = sum(n for n, _ in partly_shown_feeds(WIDEST_PARTLY_SHOWN))  # tokens fed under every number of logits wanted
COUNTED = 24  # tokens after a prompt of a quarter of the window


def test_every_field_of_a_point_is_honoured_or_declined(
    emad_evidence: ModelMeasurements, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject, stepper = emad_evidence.subject, emad_evidence.subject.stepper

    def own(point: OperatingPoint) -> Decoder:
        decoder = WalkedDecoder(stepper, point)
        return decoder if subject.source is None else FixedEncoderInput(decoder, subject.source)

    sizes = ModelDimensions(stepper.layers, stepper.vocabulary, int(stepper.unembedding.shape[1]))
    (prompt,), continuation = subject.drawn_rows(emad_rng, [LENGTH], FED)
    check = FieldsCheck(subject.open, own, subject.lens, sizes, NEW, emad_rng, subject.tolerance)
    names = emad_rng.permutation(list(VARIANTS))[: subject.share_of(len(VARIANTS), len(VARIANTS) // FEWEST_PART)]
    asked = {name: variant for name, variant in VARIANTS.items() if name in names}
    emad_audit(check.finding(prompt, continuation[0], asked))


def test_thresholds_are_compared_to_the_last_digit(
    emad_evidence: ModelMeasurements, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    if subject.stepper.layers < 2:
        pytest.skip("not applicable (a model of one layer has no probe)")
    batches = [subject.drawn_rows(emad_rng, subject.brief(emad_rng, ROWS, 1), 1)[0] for _ in range(BATCHES)]
    opened, layers = partial(subject.open, max_rows=ROWS), subject.stepper.layers
    emad_audit(comparisons(opened, layers, batches))
    try:
        emad_audit(comparisons(opened, layers, batches, signal="softmax_response"))  # it rises: ≥ takes the place of ≤
    except Unsupported:
        return  # as ``test_every_field_of_a_point_is_honoured_or_declined`` says


@pytest.mark.parametrize("case", ["full", "forced", "probing"])
def test_as_many_logits_are_shown_as_are_wanted(
    emad_evidence: ModelMeasurements, emad_audit: Auditor, emad_rng: np.random.Generator, case: str
) -> None:
    """One row at full depth, where every head is counted; several at a point whose probes run whatever is wanted.

    Case ``full`` forces no depth; the others do so in every other feed.
    """
    subject, full = emad_evidence.subject, case != "probing"
    point = subject.full if full else emad_evidence.replay_validity.probing_point
    lengths = subject.brief(emad_rng, 1 if full else ROWS, SHOWN)
    with subject.open_drawn(point, emad_rng, lengths, SHOWN, forces=case != "full") as (
        under_test,
        prompts,
        continuation,
    ):
        emad_audit(last_logits(under_test, prompts, continuation, emad_rng))


def test_the_same_tokens_cost_the_same_at_every_point(
    emad_evidence: ModelMeasurements, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    point, source = emad_evidence.replay_validity.probing_point, 0 if subject.source is None else len(subject.source)
    fed = min(COUNTED, subject.audited_window // 2)
    room = subject.audited_window - fed
    (prompt,), (continuation,) = subject.drawn_rows(emad_rng, [int(emad_rng.integers(room // 2, room))], fed)
    with subject.open(subject.full) as full, subject.open(point) as exiting:
        emad_audit(counters(full, exiting, prompt, continuation, fed, source))
