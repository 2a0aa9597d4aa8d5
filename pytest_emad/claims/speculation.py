"""Speculative decoding of a pair: switching against it (EAD-F2), EMAD against it (EMAD-R5) and within it (EMAD-E8).

Time and FLOPs of a mix of requests are totals (``statistics.speedup``). No claim here applies to weights without
quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from emad_ref.absent import Absent, reason_if_absent
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.switching import LARGE
from emad_ref.models.generation import LOOKUP
from emad_ref.text import world
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.token_comparison import check_same_tokens
from pytest_emad.claims.base import Answer, ClaimContext, Question
from pytest_emad.claims.pair_answers import (
    TimedArm,
    answer_unmet_writing_premise,
    make_acceptance_leg,
    make_answer_from_pair_verdict,
    make_skipped_arm_legs,
    make_timed_arms,
    make_tokens_per_second_leg,
)
from pytest_emad.claims.speedup import choose_point_to_time
from pytest_emad.claims.switching import RESULTS
from pytest_emad.measurements.attachments import Attachments
from pytest_emad.measurements.pair_answers import describe_rule
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.pair_models import DRAFT_TOKENS, make_speculative_decoder
from pytest_emad.measurements.pair_timing import TRANSFORMERS_NAMES, make_speculative_arm
from pytest_emad.screening.drafts import ASSISTED
from pytest_emad.statistics.accuracy import TaskAccuracy, estimate_accuracy_drop, estimate_retained_share
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import build_measured_count_leg, build_measured_estimate_leg, decide_legs
from pytest_emad.statistics.speedup import estimate_total_speedup, estimate_work_ratio
from pytest_emad.statistics.units import ByItem, ByPair
from pytest_emad.statistics.verdicts import Leg, Verdict

SWITCHING_ARMS = ("large", "EAD", "speculative", *TRANSFORMERS_NAMES)
SPECULATING = {"speculative": "wall-clock", ASSISTED: "wall-clock, against assisted generation"}  # arm → its leg


@dataclass(frozen=True)
class SwitchingScore:
    """``rule`` on ``task``: right [items] under it and by the large model ``alone``, and its ``saving`` there.

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
class SwitchingVsSpeculationEvidence:
    """``arms``: those of ``SWITCHING_ARMS`` that ran, on the same requests of ``new`` tokens.

    ``score``: of the timed rule. ``absent``: arm of transformers that did not run → why.
    """

    arms: Mapping[str, TimedArm]
    new: int
    score: SwitchingScore
    absent: Mapping[str, Absent] = field(default_factory=dict)


def decide_switching_vs_speculation_speed(found: SwitchingVsSpeculationEvidence, asked: ClaimContext) -> Verdict:
    """EAD-F2: legs for wall-clock against each speculation of the pair, for FLOPs, and for the score, at batch 1.

    Transformers' assisted generation is speculation of the same pair in another implementation, so each is a leg for
    time (intersection–union, as in EMAD-F2); its FLOPs are not counted. Prompt lookup, which needs no second model, is
    only listed.

    The score is decided first, as in EAD-F1: if it is proven lost, the row does not apply, and lists its ratios, since
    a decoder that may lose any score beats any other. If it is not proven to hold, the row cannot survive. The same
    holds if no task has written answers; then the rule nearest to the paper's first saving is timed.
    """
    ead, speculative = found.arms["EAD"], found.arms["speculative"]
    if ead.spent is None or speculative.spent is None:
        return asked.unmeasured("a decoder of the pair does not count its work")
    gains = _gains(found.arms, asked)
    beside = _switching_beside(found.arms, found.new, found.absent)
    held = estimate_retained_share(found.score.right, found.score.alone, found.score.kept)
    score = _score_leg(found.score, held, asked)
    if score.outcome == "falsified":
        shown = build_measured_estimate_leg(score.name, held, score.reason, found.score.kept)
        return asked.not_applicable(_score_not_kept(found.score, held), [*_numbers(gains), shown, *beside])
    tests = [asked.make_leg_test(name, gain, "below", threshold) for name, (gain, threshold) in gains.items()]
    return asked.decide_tests(tests, [score, *beside])


def make_unscored_timing_legs(
    arms: Mapping[str, TimedArm], new: int, asked: ClaimContext, absent: Mapping[str, Absent]
) -> tuple[Leg, ...]:
    """Legs of time ratios and speeds for a pair without a score; none of them decides."""
    return (*_numbers(_gains(arms, asked)), *_switching_beside(arms, new, absent))


def _gains(arms: Mapping[str, TimedArm], asked: ClaimContext) -> dict[str, tuple[Estimate, float]]:
    """(Speed and FLOP ratios of switching against each speculation, FLOPs if both are counted; thresholds)."""
    ead, speculative = arms["EAD"], arms["speculative"]
    fastest, fewest = asked.claim.thresholds["speedup_ratio"], asked.claim.thresholds["flop_ratio"]
    gains = {
        leg: (estimate_total_speedup(arms[arm].seconds, ead.seconds, threshold=fastest), fastest)
        for arm, leg in SPECULATING.items()
        if arm in arms
    }
    if ead.spent is not None and speculative.spent is not None:
        gains["FLOPs"] = estimate_work_ratio(speculative.spent, ead.spent, threshold=fewest), fewest
    return gains


def _switching_beside(arms: Mapping[str, TimedArm], new: int, absent: Mapping[str, Absent]) -> list[Leg]:
    """Listed legs: ratio to prompt lookup, arms that did not run, and the speeds of all arms."""
    ead, ratios = arms["EAD"].seconds, []
    if lookup := arms.get(LOOKUP):
        ratios.append(
            build_measured_estimate_leg(
                "wall-clock, against prompt lookup", estimate_total_speedup(lookup.seconds, ead)
            )
        )
    speeds = [make_tokens_per_second_leg(arm, new, arms[arm].seconds) for arm in SWITCHING_ARMS if arm in arms]
    return [*ratios, *make_skipped_arm_legs(absent), *speeds]


def _numbers(gains: Mapping[str, tuple[Estimate, float]]) -> list[Leg]:
    return [build_measured_estimate_leg(name, gain, threshold=threshold) for name, (gain, threshold) in gains.items()]


def _score_leg(score: SwitchingScore, held: Estimate, asked: ClaimContext) -> Leg:
    """Leg about the score at the paper's saving: survived if it is proven to hold, falsified if proven not to.

    It is the claim's premise and no leg of it: at 5 % on either side, without correction.
    """
    name = f"score kept on {score.task} by {score.rule}; speculation loses none"
    short = "" if score.saving >= score.wanted else f"saves only {score.saving:.1%}, not {score.wanted:.1%}"
    test = replace(asked.make_leg_test(name, held, "below", score.kept), cannot_survive=short)
    (leg,) = decide_legs([test])
    return leg


def _score_not_kept(score: SwitchingScore, held: Estimate) -> str:
    return (
        f"the score does not hold: {score.rule} keeps {held.value:.1%} [{held.low:.1%}, {held.high:.1%}] of the large "
        f"model's score on {score.task}, the paper {score.kept:.1%}"
    )


def answer_switching_vs_speculation_speed(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Answer EAD-F2 from the timed rivals on the task most worth routing; without one, list their ratios."""
    if pair.models.absent_quality and (unscored := answer_unmet_writing_premise(pair, asked)):
        return unscored  # the weights decide which model writes which token, and so the time

    def time_switching_arms() -> Mapping[str, TimedArm]:
        return make_timed_arms(pair, pair.latency.switching_timings, SWITCHING_ARMS)

    def measure_unscored_legs() -> Sequence[Leg]:
        absent = pair.latency.transformers_arms.absent
        return make_unscored_timing_legs(time_switching_arms(), pair.latency.n_new_tokens, asked, absent)

    answer = answer_unmet_writing_premise(pair, asked, measure_unscored_legs)
    if answer is None:
        arms, not_run = time_switching_arms(), pair.latency.transformers_arms.absent
        score = _switching_score(pair, asked)
        found = SwitchingVsSpeculationEvidence(arms, pair.latency.n_new_tokens, score, not_run)
        answer = make_answer_from_pair_verdict(pair, decide_switching_vs_speculation_speed(found, asked))
    note = pair.latency.describe_timing(pair.latency.switching_timings)
    return replace(answer, attachments=Attachments(notes=(note,)))


def _switching_score(pair: PairMeasurements, asked: ClaimContext) -> SwitchingScore:
    """Score of the timed rule on the judged items of the timed task."""
    task, first, paper = pair.latency.task_to_time, RESULTS[0], asked.row_of("EAD-F1").thresholds
    rule = pair.latency.timed_switching_rule
    done = pair.routing_rules.answer_judged_items(rule, task)
    alone = pair.routing_rules.answer_judged_items_alone(LARGE, task)
    saving = pair.models.compute_paper_saving(done.large_share)
    kept = paper[f"retained_{first}"]
    wanted = paper[f"saving_{first}"]
    return SwitchingScore(task, describe_rule(rule), done.right, alone.right, saving, kept, wanted)


# ---------------------------------------------------------------- EMAD-R5: EMAD of the large model


LOSSLESS = ("speculative", "self-speculative")
EMAD_ARMS = ("large", "EMAD", *LOSSLESS, *TRANSFORMERS_NAMES)
AGAINST = {"speculative": f"speculation, k = {DRAFT_TOKENS}", ASSISTED: "assisted generation"}  # arms that decide


@dataclass(frozen=True)
class SpeculationEvidence:
    """``arms``: the timed ones of ``EMAD_ARMS``, on the same requests of ``new`` tokens.

    ``point``: EMAD's name; ``exit_layer``: draft layer of the large model's self-speculation, None if it cannot.
    ``tasks``: those of the large model, counting or not. ``unusable``: why no speed-up of the point counts; None:
    it does. ``absent``: arm of transformers that did not run → why.
    """

    arms: Mapping[str, TimedArm]
    new: int
    point: str
    exit_layer: int | None
    tasks: Mapping[str, TaskAccuracy]
    unusable: Absent | None = None
    absent: Mapping[str, Absent] = field(default_factory=dict)


def decide_against_speculation(found: SpeculationEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-R5: a leg for time against each speculation, one for accuracy on each counting task.

    A mixture that gives a request to EMAD's point with probability w, else to full depth, is itself a decoder. If
    speculation saves less than the point, w makes their FLOPs equal, and time and accuracy are the mixture's; otherwise
    the point itself is compared. Assisted generation's FLOPs are not counted, so it uses the w of the project's
    speculation.

    If no task counts at the point, no accuracy can be lost, and the row does not apply; nor does it without a point
    that survives F1. Then the times are only listed. Self-speculation at EMAD's first probe and prompt lookup are
    listed.
    """
    claim, weight = asked.claim, compute_equal_flop_request_share(found.arms)
    fastest, most = claim.thresholds["speedup_ratio"], claim.thresholds["accuracy_drop"]
    name = found.point if weight == 1 else f"{found.point} on {weight:.0%} of requests, full depth on the others"
    emad = _mixed(found.arms, weight)
    speeds = {
        f"{name} against {said}": estimate_total_speedup(found.arms[arm].seconds, emad, threshold=fastest)
        for arm, said in AGAINST.items()
        if arm in found.arms
    }
    drops = {task: _mixture_drop(held, weight, most) for task, held in found.tasks.items() if held.is_counted}
    beside = [*_idle_tasks(found), *_speculation_beside(found, emad)]
    if lacking := found.unusable or _absent_stake(found):
        numbers = [build_measured_estimate_leg(against, speed, threshold=fastest) for against, speed in speeds.items()]
        return asked.lacking(lacking, [*numbers, *beside])
    tests = [asked.make_leg_test(against, speed, "below", fastest) for against, speed in speeds.items()]
    tests += [asked.make_leg_test(f"{name}: accuracy on {task}", drop, "above", most) for task, drop in drops.items()]
    return asked.decide_tests(tests, beside)


def compute_equal_flop_request_share(arms: Mapping[str, TimedArm]) -> float:
    """Share w of requests under EMAD, the rest at full depth, that costs speculation's FLOPs; 1 if none does.

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
    return point if weight == 1 else point.with_values(weight * point.values + (1 - weight) * full.values)


def _mixture_drop(held: TaskAccuracy, weight: float, most: float) -> Estimate:
    """Leg of the mixture, which loses ``weight`` times the point's loss: tests the point against most / weight."""
    drop = estimate_accuracy_drop(held.full, held.adaptive, threshold=most / weight)
    return replace(drop, value=weight * drop.value, low=weight * drop.low, high=weight * drop.high)


def _absent_stake(found: SpeculationEvidence) -> Absent | None:
    """Why accuracy cannot fall at the point; None if it can."""
    if any(held.is_counted for held in found.tasks.values()):
        return None
    said = "; ".join(f"{task} ({reason_if_absent(held.exclusion)})" for task, held in found.tasks.items())
    why = f"no task counts at {found.point}, so that nothing could be lost: {said or 'none was scored'}"
    return Absent(why, "premise")


def _idle_tasks(found: SpeculationEvidence) -> list[Leg]:
    """Legs of tasks that do not count, each with the reason."""
    return [
        build_measured_estimate_leg(
            f"{found.point}: accuracy on {task}", _mixture_drop(held, 1, 0.0), reason_if_absent(held.exclusion)
        )
        for task, held in found.tasks.items()
        if not held.is_counted
    ]


def _speculation_beside(found: SpeculationEvidence, emad: ByPair) -> list[Leg]:
    """Listed legs: speeds of all arms, self-speculation, acceptance, and counted FLOPs."""
    legs = [make_tokens_per_second_leg(name, found.new, arm.seconds) for name, arm in found.arms.items()]
    legs += make_skipped_arm_legs(found.absent)
    if lookup := found.arms.get(LOOKUP):
        legs.append(
            build_measured_estimate_leg(f"{found.point} against {LOOKUP}", estimate_total_speedup(lookup.seconds, emad))
        )
    if own := found.arms.get("self-speculative"):
        name = f"{found.point} against self-speculation after layer {found.exit_layer}, k = {DRAFT_TOKENS}"
        legs.append(build_measured_estimate_leg(name, estimate_total_speedup(own.seconds, emad)))
    for name in LOSSLESS:
        if name in found.arms:
            legs += _drafted(name, found.arms[name], found.arms["EMAD"])
    weight = compute_equal_flop_request_share(found.arms)
    if weight < 1:
        legs.append(
            build_measured_count_leg("share of requests at the point, for equal FLOPs", weight, len(emad), "share")
        )
    return legs


def _drafted(name: str, arm: TimedArm, emad: TimedArm) -> list[Leg]:
    """Acceptance of a speculating arm and, if both count, its FLOPs over those of EMAD at its point."""
    legs = [make_acceptance_leg(name, arm.accepted)]
    if arm.spent is not None and emad.spent is not None:
        legs.append(build_measured_estimate_leg(f"FLOPs against {name}", estimate_work_ratio(arm.spent, emad.spent)))
    return legs


def answer_against_speculation(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-R5 at the large model's most saving point that survives F1; accuracy as in F1."""
    if absent := pair.models.absent_quality:
        return make_answer_from_pair_verdict(pair, asked.lacking(absent))
    point, unusable = choose_point_to_time(pair.large, asked)
    timed = pair.latency.time_emad_arms(point)
    scored = pair.large.task_scores
    tasks = {task: scored.measure_accuracy_against_full_depth(task, point) for task in scored.accuracy_tasks}
    exit_layer = next(iter(pair.models.drafting_exit_layers), None)
    arms, not_run = make_timed_arms(pair, timed, EMAD_ARMS), pair.latency.transformers_arms.absent
    found = SpeculationEvidence(arms, pair.latency.n_new_tokens, point.name, exit_layer, tasks, unusable, not_run)
    return make_answer_from_pair_verdict(
        pair, decide_against_speculation(found, asked), Attachments(notes=(pair.latency.describe_timing(timed),))
    )


# ---------------------------------------------------------------- EMAD-E8: EMAD within speculation


CHECKED = 4  # prompts for comparing the output token by token
NONE = "no EMAD"


# (place of EMAD → speculation there, ``NONE`` included; new tokens of a request; compared rows of each)
ComposedSpeculation = tuple[Mapping[str, TimedArm], int, int]


def decide_composed_speculation(found: ComposedSpeculation, asked: ClaimContext) -> Verdict:
    """EMAD-E8: a report per place of EMAD: speed against none, tokens per second, acceptance, compared rows.

    Before timing, the output is compared with the verifier's own; a difference that no tie excuses raises.
    """
    legs: list[Leg] = []
    arms, new, same = found
    for name, arm in sorted(arms.items(), key=lambda item: item[0]):  # adaptive depth first: the row quotes its leg
        legs += [
            build_measured_estimate_leg(
                f"{name}: speed against none", estimate_total_speedup(arms[NONE].seconds, arm.seconds)
            ),
            make_tokens_per_second_leg(name, new, arm.seconds),
            make_acceptance_leg(name, arm.accepted),
            build_measured_count_leg(
                f"{name}: rows whose output is the verifier's own", same, same, "rows, up to ties"
            ),
        ]
    return asked.combine_legs(legs)


def answer_composed_speculation(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-E8. Raises AuditRefutedError if speculation's output differs from its verifier's beyond ties."""
    if absent := pair.models.absent_quality:
        return make_answer_from_pair_verdict(pair, asked.lacking(absent))
    full, emad = (pair.small.subject.full_depth_point, pair.large.subject.full_depth_point), pair.latency.emad_point
    depths = {
        NONE: full,
        "EMAD in the verifier": (full[0], emad),
        "EMAD in draft and verifier": (pair.small.traces.profile.point(0.0), emad),
    }
    with ExitStack() as stack:
        partners = {
            name: stack.enter_context(pair.models.open_partners(*points, rows=CHECKED))
            for name, points in depths.items()
        }
        same = [check_speculation_keeps_output(pair, *both) for both in partners.values()]
        for finding in same:
            finding.require()
        timed = pair.latency.time_arms(
            {name: make_speculative_arm(*both) for name, both in partners.items()}, pair.size.reported
        )
    verdict = decide_composed_speculation(
        (make_timed_arms(pair, timed, depths), pair.latency.n_new_tokens, CHECKED), asked
    )
    return make_answer_from_pair_verdict(
        pair, verdict, Attachments(notes=tuple(finding.detail for finding in same if finding.ties))
    )


def check_speculation_keeps_output(pair: PairMeasurements, draft: Partner, verifier: Partner) -> Finding:
    """Check that speculation emits its verifier's own output, up to ties of the large model's logits and signals."""
    prompts, new, large = pair.latency.make_prompts(CHECKED), pair.latency.n_new_tokens, pair.large.subject
    own = verifier.decoder.generate(prompts, new, frozenset())
    found = make_speculative_decoder(draft, verifier).generate(prompts, new, frozenset())
    theirs, mine = ([tokens.tolist() for tokens in record.emitted] for record in (found, own))
    declared = verifier.decoder.capabilities.logit_noise
    return check_same_tokens(
        large.reference_lens, large.tolerance, prompts, theirs, mine, verifier.point, declared=declared
    )


QUESTIONS = (
    # Time against each speculation, and FLOPs.
    Question(
        "EAD-F2",
        "pair",
        answer_switching_vs_speculation_speed,
        legs=lambda study, layers: len(SPECULATING) + 1,
        measures=True,
        budget="standard",
        decide=decide_switching_vs_speculation_speed,
        needs=("EAD-F1",),
    ),
    # Time against each speculation, and accuracy on each scored task of the large model.
    Question(
        "EMAD-R5",
        "pair",
        answer_against_speculation,
        legs=lambda study, layers: len(AGAINST) + len(world.TASKS) + study.lm_eval_task_count,
        measures=True,
        budget="standard",
        decide=decide_against_speculation,
        needs=("EMAD-F1",),
    ),
    Question(
        "EMAD-E8",
        "pair",
        answer_composed_speculation,
        measures=True,
        budget="standard",
        decide=decide_composed_speculation,
    ),
)
