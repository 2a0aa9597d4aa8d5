"""EMAD-E13, a premise of the method: is the unembedding tied to the embedding? (EMAD, Method, Problem setting)

The paper assumes one matrix for both. Read off the model's own description; it always applies.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict
from emad_ref.statistics.verdicts import Leg, Outcome, Verdict


@dataclass(frozen=True)
class TiedEmbeddingEvidence:
    """``tied``: whether embedding and unembedding are one matrix."""

    tied: bool


def decide(found: TiedEmbeddingEvidence, asked: ClaimContext) -> Verdict:
    """``survived`` where the premise holds, ``falsified`` where it does not."""
    outcome: Outcome = "survived" if found.tied else "falsified"
    said = "the premise holds" if found.tied else "the premise does not hold: embedding and unembedding are separate"
    leg = Leg("tied unembedding", outcome, float(found.tied), None, 1, 1.0, asked.claim.unit, said, good="higher")
    return combine_verdict(asked.claim, asked.model, [leg])


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the geometry of the model under test."""
    verdict = decide(TiedEmbeddingEvidence(evidence.loaded.geometry.tied), asked)
    return Answer(verdict, fingerprint=evidence.fingerprint)


QUESTIONS = (Question("EMAD-E13", "model", answer, decide=decide),)
