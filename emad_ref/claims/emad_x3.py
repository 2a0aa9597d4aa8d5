"""EMAD-X3: is the exit that keeps quality at least 10 % faster than the fastest baseline, in wall-clock?

What EMAD-F2 asks of EMAD's own points, asked of the exit that was found for this model: the same baselines, paired
requests and legs (an intersection–union test over batch sizes and baselines; ``emad_f2`` has the reasons), and the same
look at what was emitted while the clock ran. The exit timed is one that EMAD-X1 lets survive; where it does not, a
speed-up counts for nothing, and the ratios are listed as numbers. Where there is no exit there is nothing to time.
"""

from __future__ import annotations

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.emad_f2 import SpeedupEvidence, decide, legs_of, speedup_evidence_at, speedup_exhibits
from emad_ref.claims.premises import exit_answer_absent
from emad_ref.measurements.model import ModelMeasurements

__all__ = ["QUESTIONS", "SpeedupEvidence", "answer", "decide"]


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """The exit's own point, beside full depth and the model's ``generate``."""
    if unjudged := exit_answer_absent(evidence, asked):
        return unjudged
    point = evidence.learned_exit.point
    if point is None:
        verdict = asked.not_applicable(f"no exit to time: {evidence.learned_exit.exit.why_none}")
        return Answer(verdict, evidence.corpus, evidence.fingerprint)
    x1 = asked.verdict_of("EMAD-X1", evidence)
    unusable = "" if x1.verdict == "survived" else f"no usable exit: {x1.id} is {x1.verdict} ({x1.reason})"
    found = speedup_evidence_at(evidence, point, unusable)
    return Answer(
        decide(found, asked), evidence.corpus, evidence.fingerprint, speedup_exhibits(found, evidence, point, asked)
    )


QUESTIONS = (
    Question(
        "EMAD-X3",
        "model",
        answer,
        legs=lambda study, layers: legs_of(study),
        measures=True,
        suite="cost",
        budget="standard",
        needs=("EMAD-X1",),
        decide=decide,
    ),
)
