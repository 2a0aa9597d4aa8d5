"""EMAD-E11: do flatter profiles gain less? What this model and corpus add to the trend in ``suites/ablations``."""

from __future__ import annotations

import pytest

from emad_ref.verdict.legs import counted, estimated, row
from pytest_emad.flatness import flatness
from pytest_emad.premises import quality_premise


@pytest.mark.emad(claim="EMAD-E11")
def test_slope_of_the_profile_beside_the_gain(emad_evidence, emad_record, emad_register, emad_rng):
    """Gain at equal quality: the largest net reduction of any margin whose perplexity stays within the bounds."""
    evidence, claim = emad_evidence, emad_register["EMAD-E11"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = quality_premise(evidence, claim)
        if verdict is None:
            dot = flatness(evidence, emad_rng)
            legs = [
                counted(f"net reduction at equal quality ({dot.point})", dot.gain, dot.documents, claim.unit),
                estimated("slope of the mean profile", dot.slope),
            ]
            verdict = row(claim, evidence.name, legs)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)
