"""What EMAD-R1 to EMAD-R4 share: at equal net FLOPs, does EMAD have lower perplexity than a rival family of rules?

At every net saving that both sweeps reach on the validation split, the mixture of two of EMAD's points that saves
exactly that on the evaluation split meets the rival's (``sweep.front``). Which points stands on validation, and the
interval draws both splits anew (``statistics.fronts``). Sides that decide the same tie: neither is better. The claims
do not apply to weights without quality, behind a decoder for which replay does not speak, nor where no point of both
sweeps saves 15 % of FLOPs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from emad_ref.claims.base import Answer, ClaimContext
from emad_ref.claims.premises import quality_premise
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.study import Study
from emad_ref.signals import relative_rise
from emad_ref.statistics.fronts import (
    EqualFlopsComparison,
    PointFamily,
    at_equal_flops,
    comparison_leg,
    resamples_for_legs,
)
from emad_ref.statistics.legs import LegTest, combine_verdict, decide_legs
from emad_ref.statistics.verdicts import Verdict
from emad_ref.sweep.grids import EMAD_FAMILY, SAVING_LEVELS


@dataclass(frozen=True)
class BaselineEvidence:
    """Both families on the same documents of both splits; losses in nats."""

    ours: PointFamily
    rival: PointFamily


def decide(found: BaselineEvidence, asked: ClaimContext) -> Verdict:
    """A leg per net saving: relative rise of EMAD's perplexity over the rival's at exactly the same."""
    threshold = asked.claim.thresholds["perplexity_rise"]
    met = at_equal_flops(
        found.ours,
        found.rival,
        SAVING_LEVELS,
        threshold=math.log1p(threshold),
        rng=asked.rng,
        unit="nats per token",
        resamples=resamples_for_legs(len(SAVING_LEVELS) + asked.other_legs),
    )
    if not met:
        return asked.not_applicable("no point of both sweeps saves 15 % of FLOPs on validation")
    tests = [leg(each, asked, threshold) for each in met]
    return combine_verdict(asked.claim, asked.model, decide_legs(tests, asked.other_legs))


def leg(met: EqualFlopsComparison, asked: ClaimContext, threshold: float) -> LegTest:
    """One saving, before Holm; nats per token become a rise of perplexity."""
    estimate = met.estimate
    if estimate is not None:
        rise, low, high = (relative_rise(nats) for nats in (estimate.value, estimate.low, estimate.high))
        estimate = replace(estimate, value=rise, low=low, high=high, unit=asked.claim.unit)
    name = f"{met.level:.0%} net: {met.ours.name} against {met.rival.name}"
    return comparison_leg(name, met, estimate, threshold, asked.claim)


def answer_against_baseline(family: str, evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """EMAD as published against ``family``, a key of ``sweep.grids.point_families``."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        rivals = evidence.rivals
        verdict = decide(BaselineEvidence(rivals.family(EMAD_FAMILY), rivals.family(family)), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def legs(study: Study, layers: int) -> int:
    """Net savings at which rivals may meet."""
    return len(SAVING_LEVELS)
