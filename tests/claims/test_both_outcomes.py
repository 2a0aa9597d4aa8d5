"""Every gating row and every rival row can survive and can be falsified; a row with one possible outcome tests nothing.

The simulated cases show it for every such row. The record shows both outcomes, too: those of real models, and the
simulated verdicts under ``simulated: holds`` and ``simulated: fails`` for rows on which all bundled models agree. A
person records them and reads the diff, as for every record::

    pytest tests/claims/test_both_outcomes.py --emad-update-golden --emad-golden golden
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pytest_emad.claims.base import find_question_of_claim
from pytest_emad.run.options import RunSettings
from pytest_emad.statistics.goldens import (
    KnownVerdicts,
    VerdictConditions,
    load_known_verdicts_from_folders,
    record_verdict,
    summarise_seed_outcomes,
    verdict_key_fields,
)
from pytest_emad.statistics.verdicts import load_register
from tests.claims.simulation import SEED, WANTED, Case, Truth, asked
from tests.claims.test_simulated_truth import simulations

REGISTER = load_register()
RIVALS = ("EMAD-R1", "EMAD-R2", "EMAD-R3", "EMAD-R4", "EMAD-R5")
ROWS = tuple(name for name, row in REGISTER.items() if row.gate or name in RIVALS)
SIDES: tuple[Truth, ...] = ("holds", "fails")
SEEDS = (0, 1, 2)
CORPUS, BUDGET = "simulated", "simulated"


def outcomes(claim: str, case: Case) -> dict[str, str]:
    """Map each seed to the claim's verdict on a draw of ``case``."""
    decide = find_question_of_claim(claim).decide
    return {
        str(seed): decide(
            case.found(np.random.default_rng([SEED, seed])), asked(claim, np.random.default_rng([SEED, seed, 1]))
        ).verdict
        for seed in SEEDS
    }


def decided(claim: str, truth: Truth) -> dict[str, str]:
    """Return the first case of ``truth`` with the same verdict for all three seeds. Asserts that there is one."""
    cases = [case for case in simulations()[claim] if case.truth == truth]
    for case in cases:
        found = outcomes(claim, case)
        if summarise_seed_outcomes(found) in WANTED[truth]:
            return found
    pytest.fail(f"{claim}: of {len(cases)} simulated cases in which it {truth}, none says so with seeds {SEEDS}")


def key(claim: str, truth: Truth) -> dict[str, str]:
    return verdict_key_fields(claim, f"simulated: {truth}", CORPUS, VerdictConditions(0, BUDGET))


@pytest.fixture
def known(emad_settings: RunSettings) -> KnownVerdicts:
    return load_known_verdicts_from_folders([emad_settings.golden or Path(__file__).parents[2] / "golden"])


def test_the_rows_are_the_gates_of_the_papers_and_the_rivals() -> None:
    assert ("EMAD-F1", "EMAD-F2", "EMAD-E2", "EMAD-E5", *RIVALS, "EAD-H1") == ROWS


@pytest.mark.parametrize("truth", SIDES)
@pytest.mark.parametrize("claim", ROWS)
def test_the_row_is_seen_to_survive_and_to_fail(
    claim: str, truth: Truth, known: KnownVerdicts, emad_settings: RunSettings
) -> None:
    """On simulated evidence, with three seeds; the record has the same outcomes."""
    found = decided(claim, truth)
    if emad_settings.update_golden:
        for seed, outcome in found.items():
            record_verdict(emad_settings.golden, key(claim, truth), f"simulated: {truth}", int(seed), outcome)
        return
    expected = known.find_outcome(key(claim, truth), SEEDS[0])
    assert expected is not None, f"{claim}: 'simulated: {truth}' is not on record; see the head of this file"
    assert expected.outcomes == set(found.values()), f"the record says {expected.label}"


def on_record(claim: str, outcome: str, known: KnownVerdicts) -> list[str]:
    """Return everything with ``outcome`` for every seed: bundled models first, then the simulated evidence."""
    entries = [entry for entry in known.entries if entry["claim"] == claim and entry["verdict"] == outcome]
    return sorted({f"{entry['name']} on {entry['corpus'] or 'no text'}" for entry in entries})


@pytest.mark.parametrize("claim", ROWS)
def test_the_record_holds_both_outcomes(claim: str, known: KnownVerdicts) -> None:
    """``-rP`` lists the models with either outcome, and so the rows with simulated evidence alone."""
    for truth in SIDES:
        (outcome,) = WANTED[truth]
        witnesses = on_record(claim, outcome, known)
        print(f"{claim} {outcome}: {'; '.join(witnesses)}")
        assert witnesses, f"{claim}: no settled {outcome} on record; see the head of this file"
