"""What EMAD-R1 to EMAD-R4 share: at equal net FLOPs, does EMAD have lower perplexity than a rival family of rules?

At every net reduction that both sweeps reach on the validation split, the best point of each side there meets the
other's on the evaluation split. The claims do not apply to weights without quality, behind a decoder for which replay
does not speak, nor where no point of both sweeps saves 15 % of FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.study import Study
from emad_ref.point import OperatingPoint
from emad_ref.questions.asking import Answer, Asked
from emad_ref.questions.premises import quality_premise
from emad_ref.sweep.pareto import LEVELS
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.interval import perplexity_rise
from emad_ref.verdict.legs import judge_side
from emad_ref.verdict.units import ByDocument


@dataclass(frozen=True)
class Side:
    """One side's point of a duel: its name and its NLL sums on the evaluation split, nats [documents]."""

    name: str
    nll_nats: ByDocument


@dataclass(frozen=True)
class Met:
    """Two points that both save at least ``reduction`` of net FLOPs on the validation split."""

    reduction: float
    ours: Side
    rival: Side


@dataclass(frozen=True)
class Found:
    """``tokens`` [documents] of the evaluation split; no duel where no net reduction is reached by both."""

    duels: Sequence[Met]
    tokens: ByDocument


def decide(found: Found, asked: Asked) -> Verdict:
    """A leg per duel: relative rise of EMAD's perplexity over the rival's, paired by document."""
    if not found.duels:
        return asked.not_applicable("no point of both sweeps saves 15 % of FLOPs on validation")
    threshold = asked.claim.thresholds["perplexity_rise"]
    legs = {
        f"{met.reduction:.0%} net: {met.ours.name} against {met.rival.name}": perplexity_rise(
            met.ours.nll_nats, met.rival.nll_nats, found.tokens, threshold=threshold, rng=asked.rng
        )
        for met in found.duels
    }
    return judge_side(asked.claim, asked.model, legs, "above", threshold, other_legs=asked.other_legs)


def answer_against(family: str, evidence: Evidence, asked: Asked) -> Answer:
    """EMAD as published against ``family``, a key of ``sweep.families.families``."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        rivals, traces = evidence.rivals, evidence.traces

        def side(point: OperatingPoint) -> Side:
            return Side(point.name, traces.by_document(rivals.evaluated(point).nll_nats))

        met = [Met(duel.reduction, side(duel.ours), side(duel.rival)) for duel in rivals.duels(family)]
        verdict = decide(Found(met, traces.lengths), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


def legs(study: Study, layers: int) -> int:
    """Net reductions at which rivals may meet."""
    return len(LEVELS)
