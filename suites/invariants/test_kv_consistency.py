"""EMAD-E2: does monotone non-increasing depth need no K/V backfill?

Logits of token t under ANY admissible depth sequence must equal the full model's readout at depth D_t. Depth sequences
are drawn by hypothesis; the largest difference over all of them is the verdict's estimate.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.protocol import Prompt
from emad_ref.verdict.judge import judge_exact

PROMPT, FED = 6, 8


@pytest.mark.emad(claim="EMAD-E2")
def test_logits_at_any_admissible_depth_are_the_full_models(emad_evidence, emad_record, emad_register):
    evidence, differences = emad_evidence, []
    layers = evidence.stepper.layers

    @given(st.lists(st.integers(1, layers), min_size=FED, max_size=FED), st.integers(0, 2**16))
    def compare(falls, seed):
        tokens = np.random.default_rng(seed).integers(0, evidence.stepper.vocabulary, PROMPT + FED)
        depths = np.minimum.accumulate(falls)
        reference = evidence.lens(tokens)
        decoder = evidence.decoder(evidence.full)
        session, step = decoder.start([Prompt(tokens[:PROMPT])])
        differences.append(np.abs(step.logits[0, 0] - reference[PROMPT - 1, layers - 1]).max())
        for i, depth in enumerate(depths):
            at = PROMPT + i
            step = session.feed(tokens[at : at + 1][None], np.array([[depth]]))
            differences.append(np.abs(step.logits[0, 0] - reference[at, depth - 1]).max())
        session.close()
        decoder.close()

    with emad_record.unless_unsupported("EMAD-E2", evidence.name):
        compare()
        tolerance = evidence.tolerance
        errors = {"logits under drawn depths": np.array(differences)}
        verdict = judge_exact(emad_register["EMAD-E2"], evidence.name, errors, tolerance)
        emad_record.claim(verdict, fingerprint=evidence.fingerprint)
