"""EMAD-F1-literal: at any point of the sweep that saves enough FLOPs, usable or not, does quality hold?

EMAD, Experiments, Falsification criteria, first item, read literally: it speaks of any operating point. Every margin of
the grid is judged by the rule of ``quality``, on the tasks that one trace decides at every point; programs and
lm-eval's tasks would have to be run at each. The verdict is its own. It does not apply to weights without quality,
behind a decoder for which replay does not speak, or where no margin saves that much.
"""

from __future__ import annotations

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import quality_premise
from emad_ref.questions.quality import Found, judged
from emad_ref.sweep.families import SETTINGS
from emad_ref.verdict.claims import Verdict

SHOWN = 20  # legs that are listed, worst first


def decide(found: Found, asked: Asked) -> Verdict:
    """Every point of the sweep; only the worst legs are listed."""
    return judged(found, asked, shown=SHOWN)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """EMAD at every margin of the grid, on the evaluation split."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        points, tasks = evidence.points, evidence.scored.replayed
        verdict = decide(Found([points.at(loss, tasks=tasks) for loss in points.emad_sweep]), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


QUESTION = Question("EMAD-F1-literal", "model", answer, legs=lambda study, layers: 2 * SETTINGS)
