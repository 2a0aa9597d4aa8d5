"""Does the decoder decide as the rule says: same signals, same depths, never rising, and counted as executed?"""

from __future__ import annotations

from emad_ref.audit.decisions import decisions
from emad_ref.audit.forced import forced
from emad_ref.audit.rollback import rollback
from emad_ref.audit.rows import rows

ROWS, FED, NEW = 3, 12, 12


def test_signals_depths_and_ledger_are_the_rules(emad_evidence, emad_audit):
    point = emad_evidence.probing_point
    prompts, continuation = emad_evidence.rows(1, FED)
    with emad_evidence.open(point) as decoder:
        emad_audit(
            decisions(
                decoder, emad_evidence.lens, point, prompts, continuation, emad_evidence.tolerance, exact_context=False
            )
        )


def test_forced_depths_are_obeyed_and_rising_ones_refused(emad_evidence, emad_audit, emad_rng):
    point = emad_evidence.full
    prompts, continuation = emad_evidence.rows(ROWS, FED)
    with emad_evidence.open(point, max_rows=ROWS) as decoder:
        emad_audit(forced(decoder, emad_evidence.lens, point, prompts, continuation, emad_rng, emad_evidence.tolerance))


def test_rollback_restores_tokens_cache_and_cap(emad_evidence, emad_audit):
    point = emad_evidence.full
    prompts, continuation = emad_evidence.rows(ROWS, FED)
    with emad_evidence.open(point, max_rows=ROWS) as decoder:
        emad_audit(rollback(decoder, emad_evidence.lens, point, prompts, continuation, emad_evidence.tolerance))


def test_rows_of_a_batch_decide_alone(emad_evidence, emad_audit):
    point = emad_evidence.probing_point
    prompts, _ = emad_evidence.rows(ROWS, 1)
    with emad_evidence.open(point, max_rows=ROWS) as decoder:
        emad_audit(rows(decoder, emad_evidence.lens, point, prompts, NEW, emad_evidence.tolerance))
