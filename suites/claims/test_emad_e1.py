"""EMAD-E1: does mean entropy under teacher forcing fall from each layer to the next?"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.replay import sums
from emad_ref.sweep.diagnostics import agreement_auroc, agreement_rate, echo_rate
from emad_ref.verdict.judge import judge_e1
from emad_ref.verdict.legs import not_applicable
from pytest_emad.family import other_legs


@pytest.mark.emad(claim="EMAD-E1")
def test_entropy_falls_with_depth(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    evidence, claim = emad_evidence, emad_register["EMAD-E1"]
    if reason := evidence.without_quality:
        emad_record.claim(not_applicable(claim, evidence.name, reason), evidence.corpus, evidence.fingerprint)
        return
    trace = evidence.evaluation
    entropy = np.stack([sums(trace, trace.entropy_nats[:, layer]) for layer in range(trace.layers)], axis=1)
    entropy, tokens = evidence.by_document(entropy), evidence.by_document(trace.lengths)
    others = other_legs("EMAD-E1", emad_settings, emad_register, trace.layers)
    verdict = judge_e1(entropy, tokens, claim, evidence.name, emad_rng, other_legs=others)
    rows = readouts(trace, dict(zip(evidence.profile.probes, evidence.profile.targets_nats, strict=True)))
    emad_record.table(f"readouts by layer on {evidence.corpus}", evidence.name, rows, figure="entropy profile")
    emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def readouts(trace, targets):
    """Why low entropy may mislead: how often a layer echoes its input, and how often it agrees with the last.

    ``targets``: probe layer → isotonic target of the calibration text.
    """
    columns = zip(
        trace.entropy_nats.mean(axis=0), echo_rate(trace), agreement_rate(trace), agreement_auroc(trace), strict=True
    )
    return [
        {
            "layer": layer,
            "mean entropy, nats": float(entropy),
            "target, nats": targets.get(layer),
            "echo %": float(echo),
            "agrees with last %": float(agrees),
            "AUROC of low entropy for that": None if np.isnan(auroc) else float(auroc),
        }
        for layer, (entropy, echo, agrees, auroc) in enumerate(columns, start=1)
    ]
