"""Depth decisions: the rule's signals and depths, monotone depth, and counted work equal to executed work.

Prompts are drawn, one of a single token; there is one row more than in the largest timed batch. Cases ``full`` force no
depth: they judge sessions of a decoder that runs every layer for every token.
"""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.audit.decoding_checks import check_decisions, check_row_independence
from pytest_emad.audit.session_checks import check_forced_depths, check_rollback, check_session_isolation
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.suite_support import AuditFindingGate

ROWS, FED, NEW = 5, 12, 16
FORCES = pytest.mark.parametrize("forces", [False, True], ids=["full", "forced"])


def test_signals_depths_and_ledger_are_the_rules(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    subject, point = emad_evidence.subject, emad_evidence.replay_validity.probing_point
    lengths = subject.draw_short_lengths(emad_rng, ROWS, FED)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, lengths, FED) as (under_test, prompts, continuation):
        emad_audit(check_decisions(under_test, prompts, continuation))


@FORCES
def test_forced_depths_are_obeyed_and_rising_ones_refused(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator, forces: bool
) -> None:
    subject, point = emad_evidence.subject, emad_evidence.subject.full_depth_point
    lengths = subject.draw_short_lengths(emad_rng, ROWS, FED)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, lengths, FED, forces=forces) as opened:
        emad_audit(check_forced_depths(*opened, emad_rng))


@FORCES
def test_rollback_restores_tokens_cache_and_cap(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator, forces: bool
) -> None:
    subject, point = emad_evidence.subject, emad_evidence.subject.full_depth_point
    lengths = subject.draw_short_lengths(emad_rng, ROWS, FED)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, lengths, FED, forces=forces) as opened:
        emad_audit(check_rollback(*opened))


@FORCES
def test_sessions_side_by_side_keep_to_themselves(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator, forces: bool
) -> None:
    subject, point = emad_evidence.subject, emad_evidence.subject.full_depth_point
    lengths = subject.draw_short_lengths(emad_rng, ROWS, FED)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, lengths, FED, forces=forces) as opened:
        emad_audit(check_session_isolation(*opened, emad_rng))


def test_rows_of_a_batch_decide_alone(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    subject, point = emad_evidence.subject, emad_evidence.replay_validity.probing_point
    together = max(subject.budget.batch_sizes) + 1
    lengths = subject.draw_short_lengths(emad_rng, together, NEW)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, lengths, 1) as (under_test, prompts, _):
        emad_audit(check_row_independence(under_test, prompts, NEW))
