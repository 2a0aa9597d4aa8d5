"""Whether replay is valid for this decoder: teacher-forced depths and NLL are equal, generated tokens the argmax."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.audit.decoding_checks import check_generation
from pytest_emad.audit.positions import draw_short_lengths
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.suite_support import AuditFindingGate

NEW, ROWS = 24, 5
FEWEST_ROWS = 3


def test_teacher_forced_depths_and_losses_are_replays(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate
) -> None:
    emad_audit(emad_evidence.replay_validity.bridge_finding)


@pytest.mark.parametrize("kind", ["probing_point", "shallow_point"])
def test_generated_tokens_are_the_argmax_at_their_depths(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator, kind: str
) -> None:
    """Prompts have from one token to twice the tokens of a timed prompt."""
    subject = emad_evidence.subject
    point = getattr(emad_evidence.replay_validity, kind)
    longest = min(2 * subject.budget.prompt_tokens, subject.window_size - NEW)
    lengths = draw_short_lengths(emad_rng, subject.scale_by_audit_share(ROWS, FEWEST_ROWS), longest)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, lengths, 1) as (under_test, prompts, _):
        emad_audit(check_generation(under_test, prompts, NEW))
