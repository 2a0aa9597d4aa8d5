"""Does replay speak for this decoder? Teacher-forced depths and NLL must be replay's, generated tokens their argmax."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.audit.decoding_checks import generation
from emad_ref.audit.positions import short_lengths
from emad_ref.measurements.model import ModelMeasurements
from pytest_emad.suite_support import Auditor

NEW, ROWS = 24, 5


def test_teacher_forced_depths_and_losses_are_replays(emad_evidence: ModelMeasurements, emad_audit: Auditor) -> None:
    emad_audit(emad_evidence.replay_validity.bridge)


@pytest.mark.parametrize("kind", ["probing_point", "shallow_point"])
def test_generated_tokens_are_the_argmax_at_their_depths(
    emad_evidence: ModelMeasurements, emad_audit: Auditor, emad_rng: np.random.Generator, kind: str
) -> None:
    """After prompts of one token up to twice those that are timed."""
    subject = emad_evidence.subject
    point = getattr(emad_evidence.replay_validity, kind)
    longest = min(2 * subject.budget.prompt_tokens, subject.window - NEW)
    prompts, _ = subject.drawn_rows(emad_rng, short_lengths(emad_rng, ROWS, longest), 1)
    with subject.open(point, max_rows=ROWS) as decoder:
        emad_audit(generation(subject.under_test(decoder, point), prompts, NEW))
