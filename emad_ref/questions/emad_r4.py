"""EMAD-R4: at equal net FLOPs, is EMAD's perplexity below that of depth held for chunks of tokens?

EMAD, Experiments, Baselines. The rival decides by EMAD's profile, but only once per chunk.
``questions.duels`` says what is compared, and when the claim does not apply.
"""

from __future__ import annotations

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.duels import Found, answer_against, decide, legs

__all__ = ["QUESTION", "Found", "answer", "decide"]

FAMILY = "chunked"


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """Both sweeps by replay."""
    return answer_against(FAMILY, evidence, asked)


QUESTION = Question("EMAD-R4", "model", answer, legs=legs)
