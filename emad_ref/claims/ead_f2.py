"""EAD-F2: does switching beat speculation with the same pair, which loses nothing? (EAD, reading notes, Thoughts)

The rule put forward against speculation, which scores as the large model: batch 1, in time and in FLOPs. The time of a
mix of requests is their total, and so are its FLOPs (``speedup.total_ratio``, ``speedup.work_ratio``).

What the claim names is speculative decoding of the same pair, and not ours: transformers' assisted generation is the
same by another implementation, and whoever wants the large model's output takes the faster of the two. Which that is
nobody knows beforehand, so in time each is a leg (an intersection–union test, as in ``emad_f2``). Its FLOPs are not
counted: that leg has ours alone. Prompt lookup gives the same output too, and drafts without a second model: it is no
speculation of the pair, and so a number beside.

It is asked first whether the rule's score holds, as EAD-F1 asks: what share of the large model's score it keeps, at
the first saving that the paper reports. Where that is shown to be less than the paper keeps, the row does not apply,
and its ratios are listed as numbers: whoever may lose as much as he likes beats any decoder. Where it is not shown to
hold, the row cannot survive.

It does not apply where the large model is not better on any task that is written; time and FLOPs need no score, so the
ratios of the rule that comes nearest to the paper's first saving are listed there as numbers. Nor does it apply to
weights without quality; it is unmeasured where a decoder of the pair does not count its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.ead_f1 import RESULTS
from emad_ref.claims.pair_answers import (
    TimedArm,
    pair_answer,
    skipped_arm_legs,
    speed_leg,
    timed_arms,
    writing_answer_absent,
)
from emad_ref.decoding.switching import LARGE
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.measurements.pair_answers import describe_rule
from emad_ref.measurements.pair_timing import TRANSFORMERS_NAMES
from emad_ref.screening.drafts import ASSISTED, LOOKUP
from emad_ref.statistics.accuracy import retained_share
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import combine_verdict, decide_legs, estimate_leg, leg_test
from emad_ref.statistics.speedup import total_ratio, work_ratio
from emad_ref.statistics.units import ByItem
from emad_ref.statistics.verdicts import Leg, Verdict

ARMS = ("large", "EAD", "speculative", *TRANSFORMERS_NAMES)
SPECULATING = {"speculative": "wall-clock", ASSISTED: "wall-clock, against assisted generation"}  # arm → its leg


@dataclass(frozen=True)
class SwitchingScore:
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
class SwitchingSpeedEvidence:
    """``arms``: those of ``ARMS`` that ran, on the same requests of ``new`` tokens; ``score``: of the rule that was
    timed; ``absent``: arm of transformers that did not run → why.
    """

    arms: Mapping[str, TimedArm]
    new: int
    score: SwitchingScore
    absent: Mapping[str, str] = field(default_factory=dict)


def decide(found: SwitchingSpeedEvidence, asked: ClaimContext) -> Verdict:
    """A leg for wall-clock against each speculation of the pair, one for FLOPs, one for the score, which cannot be
    falsified; prompt lookup and speeds are listed.
    """
    ead, speculative, claim = found.arms["EAD"], found.arms["speculative"], asked.claim
    if ead.spent is None or speculative.spent is None:
        return asked.unmeasured("a decoder of the pair does not count its work")
    gains = _gains(found.arms, asked)
    beside = _beside(found.arms, found.new, found.absent)
    held = retained_share(found.score.right, found.score.alone, found.score.kept)
    score = _score_leg(found.score, held, asked)
    if score.outcome == "falsified":
        shown = estimate_leg(score.name, held, score.reason, found.score.kept)
        return replace(asked.not_applicable(_lost(found.score, held)), legs=(*_numbers(gains), shown, *beside))
    tests = [leg_test(name, gain, "below", threshold, claim.minimum) for name, (gain, threshold) in gains.items()]
    return combine_verdict(claim, asked.model, [*decide_legs(tests, asked.other_legs), score, *beside])


def as_numbers(
    arms: Mapping[str, TimedArm], new: int, asked: ClaimContext, absent: Mapping[str, str]
) -> tuple[Leg, ...]:
    """What was timed where no score can be asked: ratios and speeds, none of which decides anything."""
    return (*_numbers(_gains(arms, asked)), *_beside(arms, new, absent))


def _gains(arms: Mapping[str, TimedArm], asked: ClaimContext) -> dict[str, tuple[Estimate, float]]:
    """Switching against speculation: how much faster than each, in how many fewer FLOPs where both are counted; and
    thresholds.
    """
    ead, speculative = arms["EAD"], arms["speculative"]
    fastest, fewest = asked.claim.thresholds["speedup_ratio"], asked.claim.thresholds["flop_ratio"]
    gains = {
        leg: (total_ratio(arms[arm].seconds, ead.seconds, threshold=fastest), fastest)
        for arm, leg in SPECULATING.items()
        if arm in arms
    }
    if ead.spent is not None and speculative.spent is not None:
        gains["FLOPs"] = work_ratio(speculative.spent, ead.spent, threshold=fewest), fewest
    return gains


def _beside(arms: Mapping[str, TimedArm], new: int, absent: Mapping[str, str]) -> list[Leg]:
    """How much faster than prompt lookup, what did not run, and the speeds of all arms."""
    ead, ratios = arms["EAD"].seconds, []
    if lookup := arms.get(LOOKUP):
        ratios.append(estimate_leg("wall-clock, against prompt lookup", total_ratio(lookup.seconds, ead)))
    speeds = [speed_leg(arm, new, arms[arm].seconds) for arm in ARMS if arm in arms]
    return [*ratios, *skipped_arm_legs(absent), *speeds]


def _numbers(gains: Mapping[str, tuple[Estimate, float]]) -> list[Leg]:
    return [estimate_leg(name, gain, threshold=threshold) for name, (gain, threshold) in gains.items()]


def _score_leg(score: SwitchingScore, held: Estimate, asked: ClaimContext) -> Leg:
    """Survived where the score is shown to hold at the paper's saving, falsified where it is shown not to.

    No leg of the claim, but its premise: at 5 % on either side, without correction.
    """
    name = f"score kept on {score.task} by {score.rule}; speculation loses none"
    (leg,) = decide_legs([leg_test(name, held, "below", score.kept, asked.claim.minimum)])
    if leg.outcome == "survived" and score.saving < score.wanted:
        return replace(leg, outcome="inconclusive", reason=f"saves only {score.saving:.1%}, not {score.wanted:.1%}")
    return leg


def _lost(score: SwitchingScore, held: Estimate) -> str:
    return (
        f"the score does not hold: {score.rule} keeps {held.value:.1%} [{held.low:.1%}, {held.high:.1%}] of the large "
        f"model's score on {score.task}, the paper {score.kept:.1%}"
    )


def answer(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """From the timed rivals of the task most worth routing; where there is none, their ratios as numbers."""
    absent = writing_answer_absent(pair, asked)
    if absent and pair.models.without_quality:
        return absent  # which model writes which token follows from the weights, and so does the time
    timed = pair.timing.rivals
    arms, not_run = timed_arms(pair, timed, ARMS), pair.timing.library.absent
    exhibits = Attachments(notes=(pair.timing.description(timed),))
    if absent:
        verdict = replace(absent.verdict, legs=as_numbers(arms, pair.timing.new, asked, not_run))
        return pair_answer(pair, verdict, exhibits)
    return pair_answer(
        pair, decide(SwitchingSpeedEvidence(arms, pair.timing.new, _score(pair, asked), not_run), asked), exhibits
    )


def _score(pair: PairMeasurements, asked: ClaimContext) -> SwitchingScore:
    """What the rule that was timed scores on the judged items of the timed task."""
    task, first, paper = pair.timing.task, RESULTS[0], asked.row_of("EAD-F1").thresholds
    rule = pair.timing.rule
    done, alone = pair.rules.judged(rule, task), pair.rules.judged_alone(LARGE, task)
    saving, kept, wanted = pair.models.saving(done.large_share), paper[f"retained_{first}"], paper[f"saving_{first}"]
    return SwitchingScore(task, describe_rule(rule), done.right, alone.right, saving, kept, wanted)


# Time against each speculation, and FLOPs.
QUESTIONS = (
    Question(
        "EAD-F2",
        "pair",
        answer,
        legs=lambda study, layers: len(SPECULATING) + 1,
        measures=True,
        budget="standard",
        needs=("EAD-F1",),
        decide=decide,
    ),
)
