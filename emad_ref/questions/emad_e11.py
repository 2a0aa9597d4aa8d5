"""EMAD-E11: do flatter profiles gain less? What one model on one corpus adds to that trend. (EMAD, Limitations)

Two numbers without a threshold: the slope of the mean entropy profile, and the gain at equal quality, what the margin
that saves most within the bounds of perplexity on validation saves on evaluation; beside them, what it loses there. The
trend over models and corpora is an ablation's (``evidence.flatness.trend``). It does not apply to weights without
quality, nor behind a decoder for which replay does not speak.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.evidence.flatness import Gain, gain_of
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.flop_counts import with_evidence
from emad_ref.questions.premises import quality_premise
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.rates import profile_slope
from emad_ref.verdict.units import ByDocument


@dataclass(frozen=True)
class Found:
    """``entropy_sums`` [documents, L] nats, ``tokens`` [documents], of the evaluation split; ``gain`` there."""

    entropy_sums: ByDocument
    tokens: ByDocument
    gain: Gain


def decide(found: Found, asked: Asked) -> Verdict:
    """The numbers, as measured."""
    slope = profile_slope(found.entropy_sums, found.tokens, threshold=0.0, rng=asked.rng)
    gain, documents = found.gain, len(found.tokens)
    chosen = f"{gain.point}, chosen on validation"
    legs = [
        counted(f"net reduction at equal quality ({chosen})", gain.saved, documents, asked.claim.unit),
        counted(f"perplexity at that point ({chosen})", gain.rise, documents, "relative rise"),
        estimated("slope of the mean profile", slope),
    ]
    return row(asked.claim, asked.model, legs)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From the evaluation trace, and the sweep of margins on validation."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        traces = evidence.traces
        verdict = decide(Found(traces.entropy_sums, traces.lengths, gain_of(evidence.rivals)), asked)
        verdict = with_evidence(verdict, evidence.witnessed)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


QUESTION = Question("EMAD-E11", "model", answer)
