"""What EMAD-R1 to EMAD-R4 share: at equal net FLOPs, does EMAD have lower perplexity than a rival family of rules?

At every net saving that both sweeps reach on the validation split, the mixture of two of EMAD's points that saves
exactly that on the evaluation split meets the rival's (``sweep.front``). Which points stands on validation, and the
interval draws both splits anew (``verdict.dominance``). Sides that decide the same tie: neither is better. The claims
do not apply to weights without quality, behind a decoder for which replay does not speak, nor where no point of both
sweeps saves 15 % of FLOPs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.study import Study
from emad_ref.questions.asking import Answer, Asked
from emad_ref.questions.premises import quality_premise
from emad_ref.signals import relative_rise
from emad_ref.sweep.families import EMAD, LEVELS
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.dominance import Family, Met, as_leg, at_equal_flops, enough_for
from emad_ref.verdict.legs import Tested, corrected, row


@dataclass(frozen=True)
class Found:
    """Both families on the same documents of both splits; losses in nats."""

    ours: Family
    rival: Family


def decide(found: Found, asked: Asked) -> Verdict:
    """A leg per net saving: relative rise of EMAD's perplexity over the rival's at exactly the same."""
    threshold = asked.claim.thresholds["perplexity_rise"]
    met = at_equal_flops(
        found.ours,
        found.rival,
        LEVELS,
        threshold=math.log1p(threshold),
        rng=asked.rng,
        unit="nats per token",
        resamples=enough_for(len(LEVELS) + asked.other_legs),
    )
    if not met:
        return asked.not_applicable("no point of both sweeps saves 15 % of FLOPs on validation")
    tests = [leg(each, asked, threshold) for each in met]
    return row(asked.claim, asked.model, corrected(tests, asked.other_legs))


def leg(met: Met, asked: Asked, threshold: float) -> Tested:
    """One saving, before Holm; nats per token become a rise of perplexity."""
    estimate = met.estimate
    if estimate is not None:
        rise, low, high = (relative_rise(nats) for nats in (estimate.value, estimate.low, estimate.high))
        estimate = replace(estimate, value=rise, low=low, high=high, unit=asked.claim.unit)
    name = f"{met.level:.0%} net: {met.ours.name} against {met.rival.name}"
    return as_leg(name, met, estimate, threshold, asked.claim)


def answer_against(family: str, evidence: Evidence, asked: Asked) -> Answer:
    """EMAD as published against ``family``, a key of ``sweep.families.families``."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        rivals = evidence.rivals
        verdict = decide(Found(rivals.family(EMAD), rivals.family(family)), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def legs(study: Study, layers: int) -> int:
    """Net savings at which rivals may meet."""
    return len(LEVELS)
