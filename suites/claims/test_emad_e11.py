"""EMAD-E11: do flatter profiles gain less? What this model and corpus contribute; several models make a trend."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.replay import sums
from emad_ref.sweep.select import cheapest_within_bounds
from emad_ref.verdict.interval import profile_slope
from emad_ref.verdict.legs import counted, estimated, row
from pytest_emad.premises import quality_premise


@pytest.mark.emad(claim="EMAD-E11")
def test_slope_of_the_profile_beside_the_gain(emad_evidence, emad_record, emad_register, emad_rng):
    """Gain at equal quality: the largest net reduction whose validation perplexity stays within the bounds."""
    evidence, claim = emad_evidence, emad_register["EMAD-E11"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = quality_premise(evidence, claim)
        if verdict is None:
            trace = evidence.evaluation
            entropy = np.stack([sums(trace, trace.entropy_nats[:, layer]) for layer in range(trace.layers)], axis=1)
            entropy, tokens = evidence.by_document(entropy), evidence.by_document(trace.lengths)
            slope = profile_slope(entropy, tokens, threshold=0.0, rng=emad_rng)
            best = cheapest_within_bounds(evidence.emad_sweep, evidence.full_loss.perplexity)
            gain = 0.0 if best is None else max(best.net_reduction, 0.0)
            point = "no margin" if best is None else best.point.name
            legs = [
                counted(f"net reduction at equal quality ({point})", gain, len(tokens), claim.unit),
                estimated("slope of the mean profile", slope),
            ]
            verdict = row(claim, evidence.name, legs)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)
