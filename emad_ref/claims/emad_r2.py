"""EMAD-R2: at equal net FLOPs, is EMAD's perplexity below that of a fixed entropy threshold at its best?

EMAD, Experiments, Baselines. The rival exits at one threshold after every probe, without a profile.
``claims.baseline_comparison`` says what is compared, and when the claim does not apply.
"""

from __future__ import annotations

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.baseline_comparison import BaselineEvidence, answer_against_baseline, decide, legs
from emad_ref.measurements.model import ModelMeasurements

__all__ = ["QUESTIONS", "BaselineEvidence", "answer", "decide"]

FAMILY = "fixed entropy"


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Both sweeps by replay."""
    return answer_against_baseline(FAMILY, evidence, asked)


QUESTIONS = (Question("EMAD-R2", "model", answer, legs=legs, decide=decide),)
