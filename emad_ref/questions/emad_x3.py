"""EMAD-X3: is the exit that keeps quality at least 10 % faster than the fastest baseline, in wall-clock?

What EMAD-F2 asks of EMAD's own points, asked of the exit that was found for this model: the same baselines, paired
requests and legs (an intersection–union test over batch sizes and baselines; ``emad_f2`` has the reasons), and the same
look at what was emitted while the clock ran. The exit timed is one that EMAD-X1 lets survive; where it does not, a
speed-up counts for nothing, and the ratios are listed as numbers. Where there is no exit there is nothing to time.
"""

from __future__ import annotations

from emad_ref.evidence.exhibits import Exhibits
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions import emad_x1
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.emad_f2 import Found, decide, legs_of, timed_of
from emad_ref.questions.premises import exit_premise

__all__ = ["QUESTION", "Found", "answer", "decide"]


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """The exit's own point, beside full depth and the model's ``generate``."""
    verdict, refused = exit_premise(evidence, asked), ""
    if verdict is None and (refused := evidence.beyond.refusal):
        verdict = asked.not_applicable(refused)
    if verdict is None and evidence.beyond.point is None:
        verdict = asked.not_applicable(f"no exit to time: {evidence.beyond.exit.why_none}")
    if verdict is not None:
        return Answer(verdict, evidence.corpus, evidence.fingerprint, refused=refused)
    return timed(evidence, asked)


def timed(evidence: Evidence, asked: Asked) -> Answer:
    """Of an exit that has a point."""
    point, stopwatch = evidence.beyond.point, evidence.stopwatch
    assert point is not None
    x1 = emad_x1.answer(evidence, asked.also("EMAD-X1")).verdict
    unusable = "" if x1.verdict == "survived" else f"no usable exit: {x1.id} is {x1.verdict} ({x1.reason})"
    batches = {
        rows: timed_of(requests, stopwatch.checked(point, rows)) for rows, requests in stopwatch.timed(point).items()
    }
    found = Found(batches, unusable, stopwatch.without_compiled)
    legs = sum(len(timed.baselines) for timed in batches.values()) + asked.other_legs
    note = stopwatch.note(point, asked.claim.thresholds["speedup_ratio"], legs)
    exhibits = Exhibits(notes=(note, stopwatch.apart(point)))
    return Answer(decide(found, asked), evidence.corpus, evidence.fingerprint, exhibits)


QUESTION = Question(
    "EMAD-X3",
    "model",
    answer,
    legs=lambda study, layers: legs_of(study),
    measures=True,
    suite="cost",
    budget="standard",
)
