"""The decoder honours every field and digit of an operating point, and the number of logits that ``feed`` requests."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Unsupported
from pytest_emad.audit.point_fields import BATCH_ROWS, VARIANTS, FieldsCheck, ModelDimensions
from pytest_emad.audit.session_checks import WIDEST_PARTLY_SHOWN, check_feed_last_argument, plan_feeds_with_last_logits
from pytest_emad.audit.threshold_comparisons import check_threshold_comparisons
from pytest_emad.audit.work import check_full_and_exiting_work
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import FixedEncoderInput
from pytest_emad.run.suite_support import AuditFindingGate

LENGTH, FED, NEW = 6, 14, 8
FEWEST_PART = 3  # at least one variant of three, of our own decoder on a large model
ROWS, BATCHES = 4, 6
SHOWN = sum(n for n, _ in plan_feeds_with_last_logits(WIDEST_PARTLY_SHOWN))  # tokens fed, whatever logits are shown
COUNTED = 24  # tokens after a prompt of a quarter of the window


def test_every_field_of_a_point_is_honoured_or_declined(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    subject, stepper = emad_evidence.subject, emad_evidence.subject.stepper

    def own(point: OperatingPoint) -> Decoder:
        decoder = WalkedDecoder(stepper, point, max_rows=BATCH_ROWS)
        return decoder if subject.audit_source_ids is None else FixedEncoderInput(decoder, subject.audit_source_ids)

    sizes = ModelDimensions(stepper.layers, stepper.vocabulary_size, int(stepper.unembedding.shape[1]))
    (prompt,), continuation = subject.draw_prompts_with_continuations(emad_rng, [LENGTH], FED)
    opened = partial(subject.open_decoder, max_rows=BATCH_ROWS)
    check = FieldsCheck(opened, own, subject.reference_lens, sizes, NEW, emad_rng, subject.tolerance)
    names = emad_rng.permutation(list(VARIANTS))[
        : subject.scale_by_audit_share(len(VARIANTS), len(VARIANTS) // FEWEST_PART)
    ]
    asked = {name: variant for name, variant in VARIANTS.items() if name in names}
    emad_audit(check.check_variants(prompt, continuation[0], asked))


def test_thresholds_are_compared_to_the_last_digit(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    if subject.stepper.layers < 2:
        pytest.skip("not applicable (a model of one layer has no probe)")
    batches = [
        subject.draw_prompts_with_continuations(emad_rng, subject.draw_short_lengths(emad_rng, ROWS, 1), 1)[0]
        for _ in range(BATCHES)
    ]
    opened, layers = partial(subject.open_decoder, max_rows=ROWS), subject.stepper.layers
    emad_audit(check_threshold_comparisons(opened, layers, batches))
    try:
        emad_audit(
            check_threshold_comparisons(opened, layers, batches, signal="softmax_response")
        )  # it rises: ≥ takes the place of ≤
    except Unsupported:
        return  # as ``test_every_field_of_a_point_is_honoured_or_declined`` says


@pytest.mark.parametrize("case", ["full", "forced", "probing"])
def test_as_many_logits_are_shown_as_are_wanted(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator, case: str
) -> None:
    """One row at full depth, where every head is counted; several rows at a point whose probes always run.

    Case ``full`` forces no depth; the others do so in every other feed.
    """
    subject, full = emad_evidence.subject, case != "probing"
    point = subject.full_depth_point if full else emad_evidence.replay_validity.probing_point
    lengths = subject.draw_short_lengths(emad_rng, 1 if full else ROWS, SHOWN)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, lengths, SHOWN, forces=case != "full") as opened:
        emad_audit(check_feed_last_argument(*opened, emad_rng))


def test_the_same_tokens_cost_the_same_at_every_point(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    point = emad_evidence.replay_validity.probing_point
    source = 0 if subject.audit_source_ids is None else len(subject.audit_source_ids)
    fed = min(COUNTED, subject.audited_window_size // 2)
    room = subject.audited_window_size - fed
    (prompt,), (continuation,) = subject.draw_prompts_with_continuations(
        emad_rng, [int(emad_rng.integers(room // 2, room))], fed
    )
    with subject.open_decoder(subject.full_depth_point) as full, subject.open_decoder(point) as exiting:
        emad_audit(check_full_and_exiting_work(full, exiting, prompt, continuation, fed, source))
