"""Does the decoder decide as the rule says: same signals, same depths, never rising, and counted as executed?"""

from __future__ import annotations

import numpy as np

from emad_ref.audit.decisions import decisions
from emad_ref.audit.forced import forced
from emad_ref.audit.rollback import rollback
from emad_ref.audit.rows import rows
from emad_ref.evidence.gathered import Evidence
from pytest_emad.auditing import Auditor

ROWS, FED, NEW = 3, 12, 12


def test_signals_depths_and_ledger_are_the_rules(emad_evidence: Evidence, emad_audit: Auditor) -> None:
    subject = emad_evidence.subject
    point = emad_evidence.bridging.probing_point
    prompts, continuation = subject.rows(1, FED)
    with subject.open(point) as decoder:
        emad_audit(
            decisions(decoder, subject.lens, point, prompts, continuation, subject.tolerance, exact_context=False)
        )


def test_forced_depths_are_obeyed_and_rising_ones_refused(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    point = subject.full
    prompts, continuation = subject.rows(ROWS, FED)
    with subject.open(point, max_rows=ROWS) as decoder:
        emad_audit(forced(decoder, subject.lens, point, prompts, continuation, emad_rng, subject.tolerance))


def test_rollback_restores_tokens_cache_and_cap(emad_evidence: Evidence, emad_audit: Auditor) -> None:
    subject = emad_evidence.subject
    point = subject.full
    prompts, continuation = subject.rows(ROWS, FED)
    with subject.open(point, max_rows=ROWS) as decoder:
        emad_audit(rollback(decoder, subject.lens, point, prompts, continuation, subject.tolerance))


def test_rows_of_a_batch_decide_alone(emad_evidence: Evidence, emad_audit: Auditor) -> None:
    subject = emad_evidence.subject
    point = emad_evidence.bridging.probing_point
    prompts, _ = subject.rows(ROWS, 1)
    with subject.open(point, max_rows=ROWS) as decoder:
        emad_audit(rows(decoder, subject.lens, point, prompts, NEW, subject.tolerance))
