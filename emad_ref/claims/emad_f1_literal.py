"""EMAD-F1-literal: at any point of the sweep that saves enough FLOPs, usable or not, does quality hold?

EMAD, Experiments, Falsification criteria, first item, read literally: it speaks of any operating point. Every margin of
the grid is judged by the rule of ``quality``, on the tasks that one trace decides at every point; programs and
lm-eval's tasks would have to be run at each. The verdict is its own. It does not apply to weights without quality,
behind a decoder for which replay does not speak, or where no margin saves that much.
"""

from __future__ import annotations

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import quality_premise
from emad_ref.claims.quality import QualityEvidence, decide_quality
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.verdicts import Verdict
from emad_ref.sweep.grids import SETTINGS_PER_FAMILY

SHOWN = 20  # legs that are listed, worst first


def decide(found: QualityEvidence, asked: ClaimContext) -> Verdict:
    """Every point of the sweep; only the worst legs are listed."""
    return decide_quality(found, asked, shown=SHOWN)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """EMAD at every margin of the grid, on the evaluation split."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        points, tasks = evidence.points, evidence.scored.replayed
        verdict = decide(QualityEvidence([points.at(loss, tasks=tasks) for loss in points.emad_sweep]), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


QUESTIONS = (
    Question("EMAD-F1-literal", "model", answer, legs=lambda study, layers: 2 * SETTINGS_PER_FAMILY, decide=decide),
)
