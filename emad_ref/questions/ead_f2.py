"""EAD-F2: does switching beat speculation with the same pair, which loses nothing? (EAD, reading notes, Thoughts)

The rule put forward against speculation, which scores as the large model: batch 1, in time and in FLOPs. The time of a
mix of requests is their total, and so are its FLOPs (``interval.total_ratio``).

It is asked first whether the rule's score holds, as EAD-F1 asks: what share of the large model's score it keeps, at
the first saving that the paper reports. Where that is shown to be less than the paper keeps, the row does not apply,
and its ratios are listed as numbers: whoever may lose as much as he likes beats any decoder. Where it is not shown to
hold, the row cannot survive.

It does not apply to weights without quality, nor where the large model is not better on any task; it is unmeasured
where a decoder of the pair does not count its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from emad_ref.decoding.switching import LARGE
from emad_ref.evidence.pair.answered import described
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.ead_f1 import RESULTS
from emad_ref.questions.paired import Raced, about, nothing_to_route, raced, speed_leg
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.interval import Estimate, retained, total_ratio
from emad_ref.verdict.legs import corrected, estimated, row, weighed
from emad_ref.verdict.units import ByItem

ARMS = ("large", "EAD", "speculative")


@dataclass(frozen=True)
class Score:
    """``rule`` on ``task``: right [items] under it and by the large model ``alone``, and the ``saving`` it has there.

    ``kept``: share of the large model's score that the paper keeps at a saving of ``wanted``.
    """

    task: str
    rule: str
    right: ByItem
    alone: ByItem
    saving: float
    kept: float
    wanted: float


@dataclass(frozen=True)
class Found:
    """``arms``: each of ``ARMS`` on the same requests of ``new`` tokens; ``score``: of the rule that was timed."""

    arms: Mapping[str, Raced]
    new: int
    score: Score


def decide(found: Found, asked: Asked) -> Verdict:
    """A leg for wall-clock, one for FLOPs, one for the score, which cannot be falsified; speeds are listed."""
    ead, speculative, claim = found.arms["EAD"], found.arms["speculative"], asked.claim
    if ead.spent is None or speculative.spent is None:
        return asked.unmeasured("a decoder of the pair does not count its work")
    fastest, fewest = claim.thresholds["speedup_ratio"], claim.thresholds["flop_ratio"]
    time = total_ratio(speculative.seconds, ead.seconds, threshold=fastest)
    work = replace(total_ratio(speculative.spent, ead.spent, threshold=fewest), unit="× fewer FLOPs")
    beside = [speed_leg(arm, found.new, found.arms[arm].seconds) for arm in ARMS]
    held = retained(found.score.right, found.score.alone, found.score.kept)
    score = _score_leg(found.score, held, asked)
    if score.outcome == "falsified":
        numbers = [estimated("wall-clock", time, threshold=fastest), estimated("FLOPs", work, threshold=fewest)]
        shown = estimated(score.name, held, score.reason, found.score.kept)
        return replace(asked.not_applicable(_lost(found.score, held)), legs=(*numbers, shown, *beside))
    tests = [
        weighed("wall-clock", time, "below", fastest, claim.minimum),
        weighed("FLOPs", work, "below", fewest, claim.minimum),
    ]
    return row(claim, asked.model, [*corrected(tests, asked.other_legs), score, *beside])


def _score_leg(score: Score, held: Estimate, asked: Asked) -> Leg:
    """Survived where the score is shown to hold at the paper's saving, falsified where it is shown not to.

    No leg of the claim, but its premise: at 5 % on either side, without correction.
    """
    name = f"score kept on {score.task} by {score.rule}; speculation loses none"
    (leg,) = corrected([weighed(name, held, "below", score.kept, asked.claim.minimum)])
    if leg.outcome == "survived" and score.saving < score.wanted:
        return replace(leg, outcome="inconclusive", reason=f"saves only {score.saving:.1%}, not {score.wanted:.1%}")
    return leg


def _lost(score: Score, held: Estimate) -> str:
    return (
        f"the score does not hold: {score.rule} keeps {held.value:.1%} [{held.low:.1%}, {held.high:.1%}] of the large "
        f"model's score on {score.task}, the paper {score.kept:.1%}"
    )


def answer(pair: Pair, asked: Asked) -> Answer:
    """From the timed rivals of the task most worth routing."""
    if absent := nothing_to_route(pair, asked):
        return absent
    timed, task, first = pair.timing.rivals, pair.timing.task, RESULTS[0]
    rule, paper = pair.rules.put_forward(task), asked.also("EAD-F1").claim.thresholds
    done, alone = pair.rules.judged(rule, task), pair.rules.judged_alone(LARGE, task)
    saving, kept, wanted = pair.models.saving(done.large_share), paper[f"retained_{first}"], paper[f"saving_{first}"]
    score = Score(task, described(rule), done.right, alone.right, saving, kept, wanted)
    return about(pair, decide(Found(raced(pair, timed, ARMS), timed.new, score), asked))


QUESTION = Question("EAD-F2", "pair", answer, legs=lambda study, layers: 2, measures=True)
