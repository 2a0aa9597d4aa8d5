"""EMAD-E2, monotone depth needs no K/V backfill: decided on depth sequences drawn by Hypothesis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_emad.claims.base import Answer, ClaimContext, find_question_of_claim
from pytest_emad.claims.identities import FED, SEEDS, answer_from_differences, measure_forced_logit_differences
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.run.hypothesis_profile import property_test_settings, reraise_refusal, stop_search_on_refusal
from pytest_emad.run.options import RunSettings
from pytest_emad.run.suite_support import Ask


@pytest.mark.emad(claim="EMAD-E2")
def test_logits_at_any_admissible_depth_are_the_full_models(
    emad_evidence: ModelMeasurements, emad_settings: RunSettings, emad_ask: Ask
) -> None:
    layers = emad_evidence.subject.stepper.layers

    def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        drawn = []

        @property_test_settings(emad_settings.budget)
        @given(st.lists(st.integers(1, layers), min_size=FED, max_size=FED), st.integers(0, SEEDS))
        def compare(falls: list[int], seed: int) -> None:
            with stop_search_on_refusal():
                drawn.append(measure_forced_logit_differences(evidence, falls, seed))

        with reraise_refusal():
            compare()
        return answer_from_differences(evidence, asked, drawn)

    emad_ask("EMAD-E2", replace(find_question_of_claim("EMAD-E2"), answer=answer))
