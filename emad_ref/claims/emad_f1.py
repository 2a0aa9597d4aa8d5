"""EMAD-F1, falsifier: at every point put forward that saves enough FLOPs, does quality hold?

EMAD, Experiments, Falsification criteria, first item: a net FLOP reduction of 15 % that costs more than 1 % of
perplexity, or a point of accuracy on two or more tasks, refutes the method. Judged are the points a run puts forward as
usable: the calibrated default, the margin chosen on validation, the one the user names. The rule stands in ``quality``.
It does not apply to weights without quality, behind a decoder for which replay does not speak, or where no point saves
that much.
"""

from __future__ import annotations

from dataclasses import replace

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import decoder_refusal, quality_premise
from emad_ref.claims.quality import QualityEvidence, decide_quality, perplexity_leg
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.operating_points import PointMeasurements, point_attachments, task_attachments
from emad_ref.statistics.verdicts import Verdict
from emad_ref.sweep.losses import PointLoss


def decide(found: QualityEvidence, asked: ClaimContext) -> Verdict:
    """Every point put forward; a task asked for that could not be scored is a leg that was not seen."""
    return decide_quality(found, asked)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """The points put forward on the run's corpus and on every task; beside it the operating-point table.

    Raises:
        AuditRefutedError: the decoder under test does not give what is read for it (``ReplayValidity.spot_checked``).
    """
    verdict = quality_premise(evidence, asked)
    if verdict is not None:
        return Answer(verdict, evidence.corpus, evidence.fingerprint, refused=decoder_refusal(evidence))
    points, subject = evidence.points, evidence.subject
    windows = subject.sequences("evaluate", subject.budget.evaluate)
    for point in points.put_forward:
        evidence.replay_validity.spot_checked(point, windows, evidence.scored.sequences).require()
    found = QualityEvidence([at(evidence, loss) for loss in points.losses], evidence.scored.unmeasured)
    verdict = decide(found, asked)
    by_leg = {leg.name: leg.interval for leg in verdict.legs}
    names = [loss.point.name for loss in points.losses]
    intervals = {name: by_leg.get(perplexity_leg(name, evidence.corpus)) for name in names}
    exhibits = point_attachments(points, intervals) + task_attachments(points)
    return Answer(verdict, evidence.corpus, evidence.fingerprint, exhibits)


def at(evidence: ModelMeasurements, loss: PointLoss) -> PointMeasurements:
    """What is judged at a point: ``Points.at``, and lm-eval's perplexity tasks as further corpora."""
    held = evidence.points.at(loss)
    return replace(held, perplexity={**held.perplexity, **evidence.scored.published.corpora(loss.point)})


# Accuracy, and perplexity on the corpus and on each task that is one, of each of the points put forward.
QUESTIONS = (
    Question(
        "EMAD-F1",
        "model",
        answer,
        legs=lambda study, layers: (2 + len(study.tasks)) * (2 + (study.margin is not None)),
        decide=decide,
    ),
)
