"""EMAD-R1 … R4: at equal net FLOPs, does EMAD have lower perplexity than each rival? One sweep, one Pareto table."""

from __future__ import annotations

import pytest

from emad_ref.verdict.legs import judge_side, not_applicable
from pytest_emad.family import other_legs
from pytest_emad.premises import quality_premise

RIVALS = {
    "EMAD-R1": "fixed truncation",
    "EMAD-R2": "fixed entropy",
    "EMAD-R3": "softmax response",
    "EMAD-R4": "chunked",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.emad(claim=name)) for name in RIVALS])
def test_emad_beats_its_rival_at_equal_flops(name, emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    evidence, claim, rival = emad_evidence, emad_register[name], RIVALS[name]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = quality_premise(evidence, claim)
        if verdict is None:
            estimates = {
                f"{duel.reduction:.0%} net: {duel.ours.name} against {duel.rival.name}": evidence.rivals.compared(
                    duel, emad_rng
                )
                for duel in evidence.rivals.duels(rival)
            }
            others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
            verdict = (
                judge_side(claim, evidence.name, estimates, "above", 0.0, "documents", other_legs=others)
                if estimates
                else not_applicable(claim, evidence.name, "no point of both sweeps saves 15 % of FLOPs on validation")
            )
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def test_pareto_table(emad_evidence, emad_record):
    """Every family on one table: the best point on validation at each net reduction, judged on the evaluation split.

    Early exits stand on it by replay as well, on the first windows of both splits, monotone as the others.
    """
    evidence = emad_evidence
    if reason := evidence.without_quality:
        pytest.skip(f"not applicable ({reason})")
    rows = evidence.rivals.table()
    for name, reason in evidence.rivals.confident.refused.items():
        emad_record.note(f"{evidence.name}: early exit: {name} is not on the Pareto table: {reason}")
    if not rows:
        emad_record.note(f"{evidence.name}: no point of any sweep saves 15 % of FLOPs net")
        return
    title = f"best perplexity at equal net FLOPs on {evidence.corpus}"
    emad_record.table(title, evidence.name, rows, figure="pareto")
    if any(row["perplexity"] is None for row in rows):
        emad_record.note(f"{evidence.name}: no perplexity: a pruned vocabulary lost a next token, and it is infinite")
    assert {row["net reduction ≥ %"] for row in rows} <= {0.15, 0.30, 0.45, 0.60}
