"""EMAD-E2: does depth that never rises need no K/V backfill? Its question, on depth sequences that hypothesis draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked
from emad_ref.questions.emad_e2 import FED, QUESTION, SEEDS, answered, differences_at
from pytest_emad.asking import Ask
from pytest_emad.options import Settings
from pytest_emad.properties import declined_at_once, ending_the_search, property_settings


@pytest.mark.emad(claim="EMAD-E2")
def test_logits_at_any_admissible_depth_are_the_full_models(
    emad_evidence: Evidence, emad_settings: Settings, emad_ask: Ask
) -> None:
    layers = emad_evidence.subject.stepper.layers

    def answer(evidence: Evidence, asked: Asked) -> Answer:
        drawn = []

        @property_settings(emad_settings.budget)
        @given(st.lists(st.integers(1, layers), min_size=FED, max_size=FED), st.integers(0, SEEDS))
        def compare(falls: list[int], seed: int) -> None:
            with ending_the_search():
                drawn.append(differences_at(evidence, falls, seed))

        with declined_at_once():
            compare()
        return answered(evidence, asked, drawn)

    emad_ask("EMAD-E2", replace(QUESTION, answer=answer))
