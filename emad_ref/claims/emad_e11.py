"""EMAD-E11: do flatter profiles gain less? What one model on one corpus adds to that trend. (EMAD, Limitations)

Two numbers without a threshold: the slope of the mean entropy profile, and the gain at equal quality, what the margin
that saves most within the bounds of perplexity on validation saves on evaluation; beside them, what it loses there. The
trend over models and corpora is an ablation's (``measurements.pareto.flatness_trend``). It does not apply to weights
without quality, nor behind a decoder for which replay does not speak.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import quality_premise, with_flop_evidence
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.pareto import MarginGain, margin_gain
from emad_ref.statistics.legs import combine_verdict, count_leg, estimate_leg
from emad_ref.statistics.rates import profile_slope
from emad_ref.statistics.units import ByDocument
from emad_ref.statistics.verdicts import Verdict


@dataclass(frozen=True)
class FlatProfileEvidence:
    """``entropy_sums`` [documents, L] nats, ``tokens`` [documents], of the evaluation split; ``gain`` there."""

    entropy_sums: ByDocument
    tokens: ByDocument
    gain: MarginGain


def decide(found: FlatProfileEvidence, asked: ClaimContext) -> Verdict:
    """The numbers, as measured."""
    slope = profile_slope(found.entropy_sums, found.tokens, threshold=0.0, rng=asked.rng)
    gain, documents = found.gain, len(found.tokens)
    chosen = f"{gain.point}, chosen on validation"
    legs = [
        count_leg(f"net reduction at equal quality ({chosen})", gain.saved, documents, asked.claim.unit),
        count_leg(f"perplexity at that point ({chosen})", gain.rise, documents, "relative rise"),
        estimate_leg("slope of the mean profile", slope),
    ]
    return combine_verdict(asked.claim, asked.model, legs)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the evaluation trace, and the sweep of margins on validation."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        traces = evidence.traces
        verdict = decide(FlatProfileEvidence(traces.entropy_sums, traces.lengths, margin_gain(evidence.rivals)), asked)
        verdict = with_flop_evidence(verdict, evidence.flop_verification)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


QUESTIONS = (Question("EMAD-E11", "model", answer, decide=decide),)
