"""The decoder reports the model's log-probabilities."""

from __future__ import annotations

import numpy as np

from pytest_emad.audit.log_probs import check_log_probs
from pytest_emad.audit.positions import draw_long_lengths
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.suite_support import AuditFindingGate

ROWS, NEW = 6, 8
TOP = 5  # likeliest tokens: what every interface of completions allows


def test_log_probabilities_are_the_models(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    """Ragged rows, one of a single token, and one prompt near the end of the window."""
    subject = emad_evidence.subject
    lengths = [
        *subject.draw_short_lengths(emad_rng, ROWS, NEW),
        max(draw_long_lengths(emad_rng, subject.audited_window_size - NEW)),
    ]
    with subject.open_decoder_and_draw_prompts(subject.full_depth_point, emad_rng, lengths, 1) as (
        under_test,
        prompts,
        _,
    ):
        emad_audit(check_log_probs(under_test, prompts, NEW, min(TOP, subject.stepper.vocabulary_size)))
