"""Measurements of a small random model that counts as trained: six layers, random documents, its own probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.stepper import Stepper
from pytest_emad.audit.finding import Finding
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from tests.small_models import VOCABULARY, small_config, small_model

PROBES = (2, 4)
WINDOW = 24
DOCUMENTS = 34  # two windows of every second document, which resampling must keep together
FEW = replace(BUDGETS["smoke"], calibrate=24, validate=20, evaluate=60)


def documents(split: str) -> list[np.ndarray]:
    """Return documents; half fit into one window, half fill two; the tokens of the splits differ."""
    rng = np.random.default_rng(["calibrate", "validate", "evaluate"].index(split))
    return [rng.integers(0, VOCABULARY, 46 if number % 2 else 9 + number % 7) for number in range(DOCUMENTS)]


def small_evidence(
    stepper: Stepper | None = None,
    host: RunResources | None = None,
    texts: Callable[[str], list[np.ndarray]] = documents,
    **study: Any,
) -> ModelMeasurements:
    """Return measurements on ``texts`` in windows of ``WINDOW`` tokens, by default under ``FEW``."""
    stepper = CausalStepper(small_model("gpt_neox")) if stepper is None else stepper
    loaded = SimpleNamespace(
        name="small", model=stepper.model, stepper=stepper, geometry=geometry_of(small_config("gpt_neox")),
        trained=True, opening_token_id=0, end_token_ids=frozenset({0}), tokenizer=None, bundled=False, fingerprint="f",
    )  # fmt: skip
    made = ModelMeasurements(loaded, Study(**{"corpus": "self", "budget": FEW} | study), host or RunResources())
    made.subject.iterate_documents = texts
    made.subject.window_size = WINDOW
    made.traces.profile = made.traces.calibrate_profile(PROBES)
    return made


def refuted(evidence: ModelMeasurements, detail: str = "depth 3, not 2") -> ModelMeasurements:
    """Return ``evidence`` with a failed bridge."""
    evidence.replay_validity.bridge_finding = Finding("bridge", False, detail, 10, 0)
    return evidence
