"""EAD-A2: what does the minimum duration d_min do to large-model share and score? (EAD, reading notes, Evaluation)

Score at equal saving, τ chosen anew for each value; share at the same τ (``one_constant``). It reports. It does not
apply to weights without quality, nor where the large model is not better on any task.
"""

from __future__ import annotations

from emad_ref.evidence.pair.gathered import Pair
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.one_constant import Found, answered, judged
from emad_ref.verdict.claims import Verdict

TOKENS = (1, 5, 10, 20, 40)


def decide(found: Found, asked: Asked) -> Verdict:
    """Two legs per value of d_min but the one in force."""
    return judged(found, asked)


def answer(pair: Pair, asked: Asked) -> Answer:
    """Beside it a table of the runs."""
    return answered(pair, asked, "least_run", TOKENS, "d_min")


QUESTION = Question("EAD-A2", "pair", answer, budget="standard")
