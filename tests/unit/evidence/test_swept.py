"""Batch sizes that decide nothing: which they are, what is timed there, and what the row makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.claims import emad_f2
from emad_ref.measurements import latency
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.run_resources import RunResources
from emad_ref.measurements.study import BUDGETS
from emad_ref.models.causal import CausalStepper
from emad_ref.report.tables import plain_table
from tests.questions.simulation import asked
from tests.small import small_model
from tests.small_evidence import FEW, small_evidence
from tests.unit.evidence.test_stopwatch import another_token, lying

PAIRS, DECIDING = 2, 3


@pytest.mark.parametrize(
    ("name", "batches"), [("smoke", ()), ("standard", (2, 8)), ("full", (2, 4, 16))]
)  # fmt: skip
def test_batch_sizes_that_decide_are_not_timed_again_and_smoke_sweeps_none(name, batches):
    assert latency.extra_batch_sizes(BUDGETS[name]) == batches
    assert set(batches) | set(BUDGETS[name].batch_sizes) >= set(latency.SWEEP_BATCH_SIZES) or name == "smoke"


def sweeping(monkeypatch: pytest.MonkeyPatch, host: RunResources | None = None) -> ModelMeasurements:
    """A small model's short requests: 1 and 4 rows decide, 2, 8 and 16 stand beside, from fewer pairs."""
    monkeypatch.setattr(latency, "SWEEP_PAIRS", PAIRS)
    budget = replace(FEW, name="standard", pairs=DECIDING, batch_sizes=(1, 4), prompt_tokens=8, new_tokens=4)
    evidence = small_evidence(CausalStepper(small_model("gpt_neox")), host, budget=budget)
    evidence.loaded.model = evidence.subject.stepper.model
    evidence.latency.__dict__["request_shape"] = (8, 4)
    return evidence


def test_a_sweep_is_timed_once_from_few_pairs_looked_at_and_named(monkeypatch):
    evidence = sweeping(monkeypatch)
    point = evidence.traces.profile.point(0.0)
    timed = evidence.latency.swept(point)
    assert timed is evidence.latency.swept(point)
    assert list(timed) == [2, 8, 16]
    for rows, requests in timed.items():
        assert {arm: len(seconds) for arm, seconds in requests.seconds.items()} == dict.fromkeys(
            ("full", "adaptive", "generate"), PAIRS
        )
        assert {len(prompts) for prompts in requests.prompts} == {rows}
        assert evidence.latency.checked(requests, point).passed is True
    assert list(evidence.latency.timed(point)) == [1, 4], "what decides is what decided before"
    found = emad_f2.speedup_evidence_at(evidence, point, "")
    assert list(found.every) == [1, 2, 4, 8, 16]
    question = asked("EMAD-F2", np.random.default_rng(0))
    verdict = emad_f2.decide(found, question)
    legs = {leg.name: leg for leg in verdict.legs}
    assert (legs["batch 8, against generate"].outcome, legs["batch 8, against generate"].n) == ("measured", PAIRS)
    assert legs["batch 8: timed requests"].n > 0
    exhibits = emad_f2.speedup_exhibits(found, evidence, point, question)
    said = emad_f2.speedup_limit_of(found.every).said
    assert legs[emad_f2.ENDS].reason == said
    assert verdict.reason.endswith(said)
    assert any(note.endswith(said) for note in exhibits.notes)
    (table,) = exhibits.tables
    assert [row["batch"] for row in table.rows] == [1, 2, 4, 8, 16]
    assert [row["decides"] for row in table.rows] == [True, False, True, False, False]
    assert [row["pairs"] for row in table.rows] == [DECIDING, PAIRS, DECIDING, PAIRS, PAIRS]
    assert all(row[f"{arm}, ms"] > 0 for row in table.rows for arm in ("the point", "full depth", "generate"))
    assert "least sure against" in plain_table(table.rows)


def test_what_is_not_what_it_says_at_a_batch_size_of_the_sweep_falsifies(monkeypatch):
    """And its times end nowhere."""
    evidence = sweeping(monkeypatch, lying(another_token))
    point = evidence.traces.profile.point(0.0)
    found = emad_f2.speedup_evidence_at(evidence, point, "")
    honest = {rows: replace(timed, check=None) for rows, timed in found.batches.items()}
    verdict = emad_f2.decide(replace(found, batches=honest), asked("EMAD-F2", np.random.default_rng(0)))
    assert verdict.verdict == "falsified"
    assert "batch 2: timed requests" in {leg.name for leg in verdict.legs if leg.outcome == "falsified"}
    assert "vanishes" not in verdict.reason
    assert emad_f2.ENDS not in {leg.name for leg in verdict.legs}
