"""Depth decisions on given tokens: the rule's signals and depths, monotone depth, and counted work of sessions.

Prompts are drawn, one of a single token; there is one row more than in the largest timed batch. ``test_pairs`` asks
sessions about all else.
"""

from __future__ import annotations

import numpy as np

from pytest_emad.audit.decoding_checks import check_decisions
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.suite_support import AuditFindingGate

ROWS, FED = 5, 12


def test_signals_depths_and_ledger_are_the_rules(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, emad_rng: np.random.Generator
) -> None:
    subject, point = emad_evidence.subject, emad_evidence.replay_validity.probing_point
    lengths = subject.draw_short_lengths(emad_rng, ROWS, FED)
    with subject.open_decoder_and_draw_prompts(point, emad_rng, lengths, FED) as (under_test, prompts, continuation):
        emad_audit(check_decisions(under_test, prompts, continuation))
