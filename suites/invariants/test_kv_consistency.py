"""EMAD-E2, monotone depth needs no K/V backfill: decided on depth sequences drawn by Hypothesis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.record import Floats
from pytest_emad.claims.base import Answer, ClaimContext, find_question_of_claim
from pytest_emad.claims.identities import (
    FED,
    PROMPT,
    SEEDS,
    answer_from_differences,
    measure_forced_logit_differences,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.hypothesis_profile import end_at_kept_failure, property_test_settings, stop_search_on_refusal
from pytest_emad.run.options import RunSettings
from pytest_emad.run.suite_support import Ask


@pytest.mark.emad(claim="EMAD-E2")
def test_logits_at_any_admissible_depth_are_the_full_models(
    emad_evidence: ModelMeasurements, emad_settings: RunSettings, emad_ask: Ask
) -> None:
    """The property asserts, so Hypothesis shrinks a failing sequence of depths; the verdict's reason shows it."""
    subject = emad_evidence.subject

    def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        drawn: list[Floats] = []
        failing: list[str] = []  # the last one is the simplest
        allowed = subject.compute_allowed_difference(subject.capabilities)

        @property_test_settings(emad_settings.budget)
        @given(st.lists(st.integers(1, subject.stepper.layers), min_size=1, max_size=FED), st.integers(0, SEEDS))
        def compare(falls: list[int], seed: int) -> None:
            with stop_search_on_refusal():
                drawn.append(measure_forced_logit_differences(evidence, falls, seed))
            worst = float(drawn[-1].max())
            depths = np.minimum.accumulate(falls).tolist()
            if worst > allowed or np.isnan(worst):
                fed = f"{PROMPT} tokens drawn by seed {seed}, then {len(falls)} more at depths {depths}"
                failing.append(f"{fed}: logits off by {worst:.2g}")
                raise AssertionError(failing[-1])

        with end_at_kept_failure(failing):
            compare()
        return answer_from_differences(evidence, asked, drawn, failing[-1] if failing else "")

    emad_ask("EMAD-E2", replace(find_question_of_claim("EMAD-E2"), answer=answer))
