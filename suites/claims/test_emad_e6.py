"""EMAD-E6: does conditioning lower the damage that a profile from another corpus does?"""

from __future__ import annotations

import pytest

from emad_ref.point import BinSpec
from emad_ref.verdict.interval import mean_rate
from emad_ref.verdict.legs import counted, judge_side, unmeasured
from pytest_emad.family import other_legs
from pytest_emad.premises import quality_premise

CONDITIONINGS = (("position",), ("confidence",), ("position", "confidence"))
MARGIN = 0.2  # nats: the paper's other remedy, listed beside


@pytest.mark.emad(claim="EMAD-E6")
def test_conditioning_mitigates_calibration_shift(emad_evidence, emad_record, emad_register, emad_rng, emad_settings):
    """Damage: nats per token lost by the foreign profile's point over the own profile's, on the same text."""
    evidence, claim = emad_evidence, emad_register["EMAD-E6"]
    with emad_record.unless_unsupported(claim.id, evidence.name):
        verdict = quality_premise(evidence, claim)
        if verdict is None and evidence.shifted is None:
            verdict = unmeasured(claim, evidence.name, f"no second corpus beside {evidence.corpus}")
        if verdict is None:
            others = other_legs(claim.id, emad_settings, emad_register, evidence.stepper.layers)
            verdict = judged(evidence, claim, emad_rng, others)
        emad_record.claim(verdict, corpus=evidence.corpus, fingerprint=evidence.fingerprint)


def judged(evidence, claim, rng, others):
    tokens = evidence.by_document(evidence.evaluation.lengths)
    plain, _ = damage(evidence, ())
    legs, beside = {}, []
    for features in CONDITIONINGS:
        conditioned, saved = damage(evidence, features)
        name = f"{BinSpec(features).name} against none, profile of {evidence.shifted.corpus}"
        legs[name] = mean_rate(conditioned - plain, tokens, threshold=0.0, rng=rng, unit=claim.unit)
        beside.append(counted(f"{BinSpec(features).name}: foreign profile", saved, len(tokens), "net FLOP reduction"))
    return judge_side(claim, evidence.name, legs, "above", 0.0, "documents", other_legs=others, beside=beside)


def damage(evidence, features):
    """([documents] NLL lost by the foreign profile, net reduction under it)."""
    own, foreign = (
        evidence.rivals.evaluated(profile.point(0.0))
        for profile in (evidence.calibrated(features=features), evidence.shifted.calibrated(features=features))
    )
    return evidence.by_document(foreign.nll_nats) - evidence.by_document(own.nll_nats), foreign.net_reduction
