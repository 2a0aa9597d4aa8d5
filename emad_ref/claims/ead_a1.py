"""EAD-A1: what does the rolling window w do to large-model share and score? (EAD, reading notes, Evaluation)

Score at equal saving, τ chosen anew for each value; share at the same τ (``one_constant``). It reports. It does not
apply to weights without quality, nor where the large model is not better on any task.
"""

from __future__ import annotations

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.constant_variation import ConstantEvidence, answer_constant, decide_constant
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.statistics.verdicts import Verdict

TOKENS = (1, 2, 5, 10, 20)


def decide(found: ConstantEvidence, asked: ClaimContext) -> Verdict:
    """Two legs per value of w but the one in force."""
    return decide_constant(found, asked)


def answer(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Beside it a table of the runs."""
    return answer_constant(pair, asked, "window", TOKENS, "w")


QUESTIONS = (Question("EAD-A1", "pair", answer, budget="standard", decide=decide),)
