"""EMAD-R5: is EMAD a better use of a large model than speculative decoding, which is lossless? (EMAD, Experiments)

EMAD of the large model, at a point that EMAD-F1 lets stand (as EMAD-F2 times one); the small model drafts for the same
large model. Both sides spend the same where that can be: full depth belongs to EMAD's family, and a mixture that gives
a request to the point with probability w, to full depth otherwise, is itself a decoder. Where speculation saves less
than the point, w makes their FLOPs equal, and time and accuracy are the mixture's. Where speculation saves nothing, or
more than the point, no mixture spends as much, and the point is compared as it is; FLOPs stand beside.

Speculation by transformers, assisted generation of the same two models, is speculative decoding of this model as well:
the same mixture has to be faster than it, too, in a leg of its own (an intersection–union test, as in ``emad_f2``). Its
FLOPs are not counted, so that w stays what makes them equal to our speculation's. Prompt lookup, which no small model
drafts for, is a number beside.

Accuracy is judged on every task that counts at the point (``statistics.accuracy``), each a leg. Where none does,
nothing could be lost, and the row does not apply; nor does it where F1 lets no point stand, or to weights without
quality. The times are then listed as numbers.

Beside it, without judging: the large model drafts for itself at EMAD's first probe and verifies from there on. The same
exits, no second model, no loss. The time of a mix of requests is their total (``speedup.total_ratio``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.emad_f2 import usable_point
from emad_ref.claims.pair_answers import TimedArm, acceptance_leg, pair_answer, skipped_arm_legs, speed_leg, timed_arms
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.measurements.pair_models import DRAFT_TOKENS
from emad_ref.measurements.pair_timing import TRANSFORMERS_NAMES
from emad_ref.screening.drafts import ASSISTED, LOOKUP
from emad_ref.statistics.accuracy import TaskAccuracy, accuracy_drop
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import combine_verdict, count_leg, decide_legs, estimate_leg, leg_test
from emad_ref.statistics.speedup import total_ratio, work_ratio
from emad_ref.statistics.units import ByPair
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.text import world

LOSSLESS = ("speculative", "self-speculative")
ARMS = ("large", "EMAD", *LOSSLESS, *TRANSFORMERS_NAMES)
AGAINST = {"speculative": f"speculation, k = {DRAFT_TOKENS}", ASSISTED: "assisted generation"}  # arms that decide


@dataclass(frozen=True)
class SpeculationEvidence:
    """``arms``: those of ``ARMS`` that could be timed, on the same requests of ``new`` tokens. ``point``: EMAD's name;
    ``exit_layer``: after which the large model drafts for itself, None where it cannot.

    ``tasks``: those of the large model, whether or not they count. ``unusable``: why no speed-up of the point counts.
    ``absent``: arm of transformers that did not run → why.
    """

    arms: Mapping[str, TimedArm]
    new: int
    point: str
    exit_layer: int | None
    tasks: Mapping[str, TaskAccuracy]
    unusable: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)


def decide(found: SpeculationEvidence, asked: ClaimContext) -> Verdict:
    """A leg for time against each speculation, one for accuracy on each counting task; everything else only reports."""
    claim, weight = asked.claim, share_at_point(found.arms)
    fastest, most = claim.thresholds["speedup_ratio"], claim.thresholds["accuracy_drop"]
    name = found.point if weight == 1 else f"{found.point} on {weight:.0%} of requests, full depth on the others"
    emad = _mixed(found.arms, weight)
    speeds = {
        f"{name} against {said}": total_ratio(found.arms[arm].seconds, emad, threshold=fastest)
        for arm, said in AGAINST.items()
        if arm in found.arms
    }
    drops = {task: _drop(held, weight, most) for task, held in found.tasks.items() if held.counts}
    beside = [*_idle(found), *_beside(found, emad)]
    if reason := found.unusable or _nothing_to_lose(found):
        numbers = [estimate_leg(against, speed, threshold=fastest) for against, speed in speeds.items()]
        return replace(asked.not_applicable(reason), legs=(*numbers, *beside))
    tests = [leg_test(against, speed, "below", fastest, claim.minimum) for against, speed in speeds.items()]
    tests += [
        leg_test(f"{name}: accuracy on {task}", drop, "above", most, claim.minimum) for task, drop in drops.items()
    ]
    return combine_verdict(claim, asked.model, [*decide_legs(tests, asked.other_legs), *beside])


def share_at_point(arms: Mapping[str, TimedArm]) -> float:
    """w: the share of requests at the point that makes EMAD's FLOPs speculation's; 1 where no share does.

    Full depth costs F, the point E, speculation S: w E + (1 − w) F = S.
    """
    spent = [arms[name].spent for name in ("large", "EMAD", "speculative")]
    if any(column is None for column in spent):
        return 1.0
    full, point, speculation = (float(column.values.sum()) for column in spent if column is not None)
    return (full - speculation) / (full - point) if point < speculation < full else 1.0


def _mixed(arms: Mapping[str, TimedArm], weight: float) -> ByPair:
    """Expected seconds [pairs] of the mixture."""
    point, full = arms["EMAD"].seconds, arms["large"].seconds
    return point if weight == 1 else point.like(weight * point.values + (1 - weight) * full.values)


def _drop(held: TaskAccuracy, weight: float, most: float) -> Estimate:
    """Of the mixture: it loses ``weight`` of what the point loses, and stands to ``most`` as the point to most / w."""
    drop = accuracy_drop(held.full, held.adaptive, threshold=most / weight)
    return replace(drop, value=weight * drop.value, low=weight * drop.low, high=weight * drop.high)


def _nothing_to_lose(found: SpeculationEvidence) -> str:
    """Why accuracy cannot fall at the point; empty where it can."""
    if any(held.counts for held in found.tasks.values()):
        return ""
    said = "; ".join(f"{task} ({held.standing})" for task, held in found.tasks.items())
    return f"no task counts at {found.point}, so that nothing could be lost: {said or 'none was scored'}"


def _idle(found: SpeculationEvidence) -> list[Leg]:
    """Tasks that do not count, each with the reason."""
    return [
        replace(estimate_leg(f"{found.point}: accuracy on {task}", _drop(held, 1, 0.0)), reason=held.standing)
        for task, held in found.tasks.items()
        if not held.counts
    ]


def _beside(found: SpeculationEvidence, emad: ByPair) -> list[Leg]:
    """Speeds of all arms, self-speculation, acceptance, and FLOPs where they are counted."""
    legs = [speed_leg(name, found.new, arm.seconds) for name, arm in found.arms.items()]
    legs += skipped_arm_legs(found.absent)
    if lookup := found.arms.get(LOOKUP):
        legs.append(estimate_leg(f"{found.point} against {LOOKUP}", total_ratio(lookup.seconds, emad)))
    if own := found.arms.get("self-speculative"):
        name = f"{found.point} against self-speculation after layer {found.exit_layer}, k = {DRAFT_TOKENS}"
        legs.append(estimate_leg(name, total_ratio(own.seconds, emad)))
    for name in LOSSLESS:
        if name in found.arms:
            legs += _drafted(name, found.arms[name], found.arms["EMAD"])
    weight = share_at_point(found.arms)
    if weight < 1:
        legs.append(count_leg("share of requests at the point, for equal FLOPs", weight, len(emad), "share"))
    return legs


def _drafted(name: str, arm: TimedArm, emad: TimedArm) -> list[Leg]:
    """Acceptance of a speculating arm and, where both count, its FLOPs over those of EMAD at its point."""
    legs = [acceptance_leg(name, arm.accepted)]
    if arm.spent is not None and emad.spent is not None:
        legs.append(estimate_leg(f"FLOPs against {name}", work_ratio(arm.spent, emad.spent)))
    return legs


def answer(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """At the point of the large model that F1 lets stand and that saves most; accuracy as F1 reads it there."""
    if reason := pair.models.without_quality:
        return pair_answer(pair, asked.not_applicable(reason))
    point, unusable = usable_point(pair.large, asked)
    timed = pair.timing.emad_rivals(point)
    scored = pair.large.scored
    tasks = {task: scored.at(task, point) for task in scored.tasks}
    exit_layer = next(iter(pair.models.exit_layers), None)
    arms, absent = timed_arms(pair, timed, ARMS), pair.timing.library.absent
    found = SpeculationEvidence(arms, pair.timing.new, point.name, exit_layer, tasks, unusable, absent)
    return pair_answer(pair, decide(found, asked), Attachments(notes=(pair.timing.description(timed),)))


# Time against each speculation, and accuracy on each task that the large model is scored on.
QUESTIONS = (
    Question(
        "EMAD-R5",
        "pair",
        answer,
        legs=lambda study, layers: len(AGAINST) + len(world.TASKS) + len(study.tasks),
        measures=True,
        budget="standard",
        needs=("EMAD-F1",),
        decide=decide,
    ),
)
