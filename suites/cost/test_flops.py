"""EMAD-E5: is the block compute of a run E[D_t]/L of full depth's, exactly, by the decoder's own count?"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.verdict.judge import judge_exact

NEW, LENGTH = 24, 8


@pytest.mark.emad(claim="EMAD-E5")
def test_block_compute_is_mean_depth_over_layers(emad_evidence, emad_record, emad_register):
    evidence = emad_evidence
    with emad_record.unless_unsupported("EMAD-E5", evidence.name):
        layers, point = evidence.stepper.layers, evidence.probing_point
        prompts = evidence.prompts(2, LENGTH)
        with evidence.open(point) as decoder:
            if not decoder.capabilities.counted:
                emad_record.not_applicable("EMAD-E5", evidence.name, "the decoder does not count its work")
                return
            records = [decoder.generate([prompt], NEW, frozenset()) for prompt in prompts]
        counted = np.array([(r.work[0] - r.prompt_work[0]).tokens.sum() for r in records])
        decided = np.array([r.tokens.of(0, phase=1).depth.sum() for r in records])
        full = np.array([len(r.tokens.of(0, phase=1)) * layers for r in records])
        errors = {
            "counted blocks = Σ D_t": np.abs(counted - decided).astype(float),
            "counted share = E[D_t]/L": np.abs(counted / full - decided / full),
        }
        verdict = judge_exact(emad_register["EMAD-E5"], evidence.name, errors, 0.0)
        emad_record.claim(verdict, fingerprint=evidence.fingerprint)
