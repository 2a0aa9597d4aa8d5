"""Cost claims: counted FLOPs, time and energy. No test may run beside them."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_emad.audit.finding import Finding
from pytest_emad.claims.base import RunPlan
from pytest_emad.claims.speedup import time_chosen_point
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.environment import has_pytest_benchmark
from pytest_emad.run.selection import claim_pytest_params
from pytest_emad.run.suite_support import CLOCK, Ask, AuditFindingGate, record_benchmark_samples


@pytest.mark.parametrize("claim", claim_pytest_params("cost", "model"))
def test_claim(emad_ask: Ask, claim: str) -> None:
    emad_ask(claim)


@pytest.mark.emad(measures=True)
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("arm", ["full", "adaptive", "generate"])
def test_samples_are_recorded_as_benchmarks(
    request: pytest.FixtureRequest,
    emad_evidence: ModelMeasurements,
    emad_docket: RunPlan,
    emad_audit: AuditFindingGate,
    arm: str,
) -> None:
    """Hand the samples of the paired run to pytest-benchmark's tables and JSON; nothing is timed again."""
    if not has_pytest_benchmark(request.config):
        pytest.skip("pytest-benchmark is switched off; report.json holds the times")
    asked = emad_docket.make_context("EMAD-F2", emad_evidence.name, emad_evidence.subject.stepper.layers)
    _, _, timed = time_chosen_point(emad_evidence, asked)
    batch = min(timed)
    seconds = timed[batch].seconds[arm]
    # asked for here: that plugin warns of a fixture that a failed test did not use
    record_benchmark_samples(
        request.getfixturevalue("benchmark"), seconds.tolist(), f"{emad_evidence.name}, batch {batch}"
    )
    detail = f"{len(seconds)} requests of arm {arm} at batch {batch}, {seconds.min():.3g} s to {seconds.max():.3g} s"
    emad_audit(Finding("samples", bool(np.isfinite(seconds).all() and (seconds > 0).all()), detail, len(seconds), 0))
