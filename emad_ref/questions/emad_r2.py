"""EMAD-R2: at equal net FLOPs, is EMAD's perplexity below that of a fixed entropy threshold at its best?

EMAD, Experiments, Baselines. The rival exits at one threshold after every probe, without a profile.
``questions.duels`` says what is compared, and when the claim does not apply.
"""

from __future__ import annotations

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.duels import Found, answer_against, decide, legs

__all__ = ["QUESTION", "Found", "answer", "decide"]

FAMILY = "fixed entropy"


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """Both sweeps by replay."""
    return answer_against(FAMILY, evidence, asked)


QUESTION = Question("EMAD-R2", "model", answer, legs=legs)
