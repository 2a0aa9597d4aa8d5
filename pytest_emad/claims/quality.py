"""Quality at operating points: EMAD-F1, its literal reading, and EMAD-E10, a margin chosen on validation.

EMAD-F1 and its literal reading judge every operating point that saves enough FLOPs. Legs per judged point: one per
corpus (perplexity rise), one for accuracy. Points that save less are listed as not applicable. Without a judged point
the row is not applicable.

The accuracy leg tests whether two or more of the k tasks that count at the point lose more than the threshold. A task
counts if full depth beats a guess by a point of accuracy and the operating point saves 5 % of the task's own FLOPs
(``statistics.accuracy``). Tasks are judged one by one, never pooled or averaged; each is listed as measured, with a
reason if it does not count. The p-values are partial conjunctions (Benjamini & Heller 2008, Simes form; tasks
share no items, so that given the point their p-values are independent):

falsify   Simes of all but the smallest of "the drop exceeds the threshold"
survive   Simes of the two largest of "the drop stays below it": all tasks but one are shown to hold

A task below the minimum of items shows neither. With only one counting task the leg is inconclusive and gives that
task's loss: text without its own tasks has one, continuation choice. With none the leg is unmeasured. So the row cannot
survive on perplexity alone, or on one task among others that cannot fall. Every verdict's reason names the worst
counting task and its loss.

No claim here applies to weights without quality, or to a decoder for which replay is not valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from scipy.stats import false_discovery_control

from emad_ref.absent import Absent, reason_if_absent
from emad_ref.errors import BadArgument
from emad_ref.replay.grids import SETTINGS_PER_FAMILY
from emad_ref.replay.losses import PointLoss
from emad_ref.text import world
from pytest_emad.claims.base import (
    Answer,
    ClaimContext,
    Question,
    absent_for_decoder,
    make_model_question,
    make_unmet_quality_verdict,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.operating_points import (
    NllPair,
    PointMeasurements,
    make_point_attachments,
    make_task_attachments,
)
from pytest_emad.statistics.accuracy import FEWEST, TaskAccuracy, estimate_accuracy_drop, items_needed_to_decide
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import (
    LegTest,
    build_measured_estimate_leg,
    decide_legs,
    interval_if_finite,
    unmeasured_leg,
)
from pytest_emad.statistics.number_format import format_value
from pytest_emad.statistics.rates import (
    draw_document_counts,
    estimate_perplexity_rise,
    nll_pair_by_document,
    required_resamples,
)
from pytest_emad.statistics.verdicts import Claim, Leg, LegIdentity, Verdict

SHOWN = 20  # number of listed legs, worst first
USEFUL = 0.15  # net FLOP reduction below which the paper makes no claim about a point


@dataclass(frozen=True)
class QualityEvidence:
    """``points``: proposed ones, or a whole sweep. ``unmeasured``: requested task → why it has no score."""

    points: Sequence[PointMeasurements]
    unmeasured: Mapping[str, Absent] = field(default_factory=dict)


def decide_quality(found: QualityEvidence, asked: ClaimContext, shown: int | None = None) -> Verdict:
    """EMAD-F1: whether quality holds at every proposed point that saves enough FLOPs.

    Points and corpora with equally many documents share their bootstrap samples. A requested task without a score is
    an unmeasured leg.

    Args:
        shown: number of worst legs to keep; the verdict's ``n`` then counts the judged legs.

    Raises:
        BadArgument: a net reduction that is no share, and as in ``rates`` and ``shares``.
    """
    smallest = asked.claim.thresholds["flop_reduction"]
    if not found.points:
        return asked.not_applicable("no operating point was put forward")
    _require_shares(found.points)
    saving = [point for point in found.points if point.net_reduction >= smallest]
    idle = [_too_small(point, smallest) for point in found.points if point.net_reduction < smallest]
    if not saving:
        best = max(point.net_reduction for point in found.points)
        said = (
            f"none of {len(found.points)} points saves {100 * smallest:g} % of FLOPs; the best {100 * best:.1f} % net"
        )
        return asked.not_applicable(said, idle)
    tests, listed = _quality_legs(saving, asked)
    # a requested task without a score is a leg, so that the row cannot survive
    missing = [unmeasured_leg(f"task {name}", absent.reason) for name, absent in found.unmeasured.items()]
    legs = [*decide_legs(tests, asked.other_legs), *idle, *listed, *missing]
    return asked.combine_legs(legs, notes=[_describe_worst_task(saving)], listed=shown)


def _require_shares(points: Sequence[PointMeasurements]) -> None:
    for point in points:
        if not point.net_reduction <= 1:
            raise BadArgument(
                "net_reduction", point.net_reduction, "a share of at most 1", f"look at point {point.name!r}"
            )


def _too_small(point: PointMeasurements, smallest: float) -> Leg:
    reason = f"saves {100 * point.net_reduction:.1f} % net, less than {100 * smallest:g} %"
    name, unit = f"{point.name}: reduction", "net FLOP reduction"
    identity = LegIdentity(point=point.digest, kind="reduction")
    return Leg(name, "not applicable", point.net_reduction, None, 0, smallest, unit, reason, **identity)


def _quality_legs(points: Sequence[PointMeasurements], asked: ClaimContext) -> tuple[list[LegTest], list[Leg]]:
    """(Legs in Holm's correction, other legs)."""
    claim, bound = asked.claim, asked.claim.thresholds["perplexity_rise"]
    # enough samples for Holm's smallest level
    resamples = required_resamples(sum(len(point.perplexity) + 1 for point in points) + asked.other_legs)
    draws = cache(lambda documents: draw_document_counts(documents, resamples, asked.rng))  # points share them
    tests: list[LegTest] = []
    listed: list[Leg] = []
    for point in points:
        for corpus, arms in point.perplexity.items():
            rise = estimate_perplexity_rise(*arms, threshold=bound, rng=asked.rng, draws=draws(len(arms[2])))
            identity = LegIdentity(point=point.digest, kind="perplexity", on=corpus)
            name = f"{point.name}: perplexity on {corpus}"
            tests.append(asked.make_leg_test(name, rise, "above", bound, **identity))
        if not point.perplexity:
            name = f"{point.name}: perplexity"
            listed.append(unmeasured_leg(name, "no corpus was scored", point=point.digest, kind="perplexity"))
        accuracy, tasks = _accuracy(point, claim)
        listed += tasks
        if isinstance(accuracy, LegTest):
            tests.append(accuracy)
        else:
            listed.append(accuracy)
    return tests, listed


def _accuracy(point: PointMeasurements, claim: Claim) -> tuple[LegTest | Leg, list[Leg]]:
    """(The accuracy leg of one point, a reporting leg for each task)."""
    name, threshold = f"{point.name}: accuracy on two or more tasks", claim.thresholds["accuracy_drop"]
    drops = {task: estimate_task_drop(held, threshold) for task, held in point.tasks.items()}
    tasks = [
        build_measured_estimate_leg(
            f"{point.name}: {task}",
            drop,
            reason_if_absent(point.tasks[task].exclusion),
            threshold,
            point=point.digest,
            kind="task",
            on=task,
        )
        for task, drop in drops.items()
    ]
    identity = LegIdentity(point=point.digest, kind="accuracy")
    counting = {task: drop for task, drop in drops.items() if point.tasks[task].is_counted}
    if not counting:
        said = f"{describe_uncounted_tasks(point.tasks)}; the criterion requires two"
        return unmeasured_leg(name, said, **identity), tasks
    if len(counting) < FEWEST:
        (drop,) = counting.values()
        remedy = "name a second task that counts: --emad-tasks"
        said = f"{describe_uncounted_tasks(point.tasks)}; the criterion requires two; {remedy}"
        alone = Leg(
            name,
            "inconclusive",
            drop.value,
            interval_if_finite(drop),
            drop.n,
            threshold,
            drop.unit,
            "; ".join(filter(None, (said, drop.note))),
            good="lower",
            remedy=remedy,
            **identity,
        )
        return alone, tasks
    return _partial_conjunction(name, identity, counting, point.tasks, claim), tasks


def estimate_task_drop(task: TaskAccuracy, threshold: float) -> Estimate:
    """Loss of one task."""
    return estimate_accuracy_drop(task.full, task.adaptive, threshold=threshold)


def describe_uncounted_tasks(tasks: Mapping[str, TaskAccuracy]) -> str:
    """Text about the number of counting tasks, and the reasons of the others."""
    if not tasks:
        return "no task was scored"
    why = "; ".join(f"{task} {held.exclusion.reason}" for task, held in tasks.items() if held.exclusion)
    counting = sum(held.is_counted for held in tasks.values())
    return f"{counting or 'none'} of {len(tasks)} tasks count{'s' * (counting == 1)}" + (f": {why}" if why else "")


def _partial_conjunction(
    name: str, identity: LegIdentity, drops: Mapping[str, Estimate], tasks: Mapping[str, TaskAccuracy], claim: Claim
) -> LegTest:
    """Test whether two or more counting tasks lose more than the threshold; the value is the second-worst loss."""
    threshold, least = claim.thresholds["accuracy_drop"], claim.minimum.get("items", 0)
    small = {task: drop.n for task, drop in drops.items() if drop.n < least}
    second, worst = sorted(drops, key=lambda task: drops[task].value)[-2:]
    above = sorted(1.0 if task in small else drop.p_above for task, drop in drops.items())
    below = sorted(1.0 if task in small else drop.p_below for task, drop in drops.items())
    leg = Leg(
        name,
        "inconclusive",
        drops[second].value,
        interval_if_finite(drops[second]),
        drops[second].n,
        threshold,
        "accuracy drop",
        f"{second}, the second-worst of {len(drops)} tasks that count; one may lose: {worst}, the worst, loses "
        f"{format_value(drops[worst].value, 'accuracy drop')}"
        + "".join(f"; {task} has {n} items, at least {least} are needed" for task, n in small.items()),
        p_falsify=simes_pvalue(above[1:]),
        p_survive=simes_pvalue(below[-2:]),
        good="lower",
        **identity,
    )

    def needed(error: float) -> int | None:
        items = [
            items_needed_to_decide(tasks[task].full, tasks[task].adaptive, threshold=threshold, error=error / 2)
            for task in drops
        ]
        reachable = sorted(number for number in items if number is not None)
        return reachable[len(drops) - 2] if len(reachable) > len(drops) - 2 else None

    return LegTest(leg, "items per task", needed)


def simes_pvalue(pvalues: Sequence[float]) -> float:
    """Simes' p-value of the hypothesis that no effect exists: the smallest of n · p₍ᵢ₎ / i.

    Raises:
        BadArgument: no p-value.
    """
    if not len(pvalues):
        raise BadArgument("pvalues", list(pvalues), "at least one")
    return float(false_discovery_control(np.asarray(pvalues, dtype=np.float64), method="bh").min())


def _describe_worst_task(points: Sequence[PointMeasurements]) -> str:
    """The counting task with the largest loss at any point; "" without one."""
    losses = [
        (full - adaptive, task, point.name)
        for point in points
        for task, held in point.tasks.items()
        if held.is_counted
        for full, adaptive in [held.accuracies]
    ]
    if not losses:
        return ""
    loss, task, name = max(losses)
    return f"worst task that counts: {task} loses {100 * loss:z.1f} points at {name}"


# ---------------------------------------------------------------- EMAD-F1 and its literal reading


def answer_quality(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-F1 on proposed points, the run's corpus and every task; attaches the operating-point table.

    Raises:
        AuditRefutedError: replay does not hold for the decoder under test (``ReplayValidity.spot_check_bridge``).
    """
    verdict = make_unmet_quality_verdict(evidence, asked)
    if verdict is not None:
        return Answer(verdict, evidence.corpus, evidence.fingerprint, refused=absent_for_decoder(evidence))
    points, subject = evidence.points, evidence.subject
    windows = subject.cut_windows("evaluate", subject.budget.evaluate)
    for point in points.selected_points:
        evidence.replay_validity.spot_check_bridge(
            point, windows, evidence.task_scores.replayed_task_reference_sequences
        ).require()
    found = QualityEvidence(
        [measure_point_on_all_corpora(evidence, loss) for loss in points.selected_evaluation_losses],
        evidence.task_scores.absent_by_task,
    )
    verdict = decide_quality(found, asked)
    intervals = {
        leg.point: leg.interval for leg in verdict.legs if (leg.kind, leg.on) == ("perplexity", evidence.corpus)
    }
    attachments = make_point_attachments(points, intervals) + make_task_attachments(points)
    return Answer(verdict, evidence.corpus, evidence.fingerprint, attachments)


def measure_point_on_all_corpora(evidence: ModelMeasurements, loss: PointLoss) -> PointMeasurements:
    """``CandidatePoints.measure_point`` with the perplexity tasks of lm-eval as further corpora."""
    held = evidence.points.measure_point(loss)
    return replace(
        held, perplexity={**held.perplexity, **evidence.task_scores.published.compute_document_nlls_by_task(loss.point)}
    )


def decide_quality_at_every_margin(found: QualityEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-F1-literal: every margin of the grid by the rule of EMAD-F1, on tasks that one trace replays.

    Excludes programs and lm-eval's tasks, which would have to run at each margin. Lists only the worst legs.
    """
    return decide_quality(found, asked, shown=SHOWN)


def measure_every_margin(evidence: ModelMeasurements) -> QualityEvidence:
    """EMAD at every margin of the grid, on the evaluation split."""
    points, tasks = evidence.points, evidence.task_scores.replayed_task_names
    return QualityEvidence([points.measure_point(loss, tasks=tasks) for loss in list(points.emad_sweep_losses)[1:]])


# ---------------------------------------------------------------- EMAD-E10: the margin chosen on validation


@dataclass(frozen=True)
class SelectedMarginEvidence:
    """The cheapest margin within bounds on validation (``name`` and ``digest``, "" for none), and its savings there.

    On the test split: ``sums`` there and at full depth, None without a ``USEFUL`` selection; ``perplexity`` of full
    depth; the replayed ``tasks`` at the margin, counting or not.
    """

    name: str = ""
    digest: str = ""
    net_reduction: float = 0.0
    sums: NllPair | None = None
    perplexity: float = math.nan
    tasks: Mapping[str, TaskAccuracy] = field(default_factory=dict)


def decide_selected_margin(found: SelectedMarginEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-E10: a leg for perplexity, within the stricter of two bounds, and one for each replayed task that counts.

    Tasks are judged one by one, since pooled tasks on which the rule never acts would hide the loss of one task. If
    fewer than two scored tasks count, the accuracy leg is unmeasured, so that perplexity or one task can falsify the
    claim, but not let it survive.
    """
    if found.net_reduction < USEFUL:
        saved = f"{found.name} ({found.net_reduction:+.1%} net)" if found.name else "none at all"
        return asked.not_applicable(
            f"no margin that saves {USEFUL:.0%} holds the bounds on validation; selected: {saved}"
        )
    assert found.sums is not None, "a useful margin is tested"
    claim = asked.claim
    bound = min(claim.thresholds["perplexity_points"] / found.perplexity, claim.thresholds["perplexity_rise"])
    rise = estimate_perplexity_rise(*found.sums, threshold=bound, rng=asked.rng)
    point, digest = found.name, found.digest
    legs = [asked.make_leg_test(f"{point}: perplexity", rise, "above", bound, point=digest, kind="perplexity")]
    least = claim.thresholds["accuracy_drop"]
    drops = {task: estimate_task_drop(held, least) for task, held in found.tasks.items()}
    counting = [task for task, held in found.tasks.items() if held.is_counted]
    at_task = {task: LegIdentity(point=digest, kind="task", on=task) for task in found.tasks}
    legs += [asked.make_leg_test(f"{point}: {task}", drops[task], "above", least, **at_task[task]) for task in counting]
    beside = [
        build_measured_estimate_leg(f"{point}: {task}", drops[task], held.exclusion.reason, least, **at_task[task])
        for task, held in found.tasks.items()
        if held.exclusion
    ]
    if found.tasks and len(counting) < FEWEST:
        said = describe_uncounted_tasks(found.tasks)
        beside.append(unmeasured_leg(f"{point}: accuracy", said, point=digest, kind="accuracy"))
    return asked.decide_tests(legs, beside)


def gather_selected_margin(evidence: ModelMeasurements) -> SelectedMarginEvidence:
    """Gather replays of the selected margin on the evaluation split."""
    chosen, points, scored = evidence.points.selected_margin_loss, evidence.points, evidence.task_scores
    if isinstance(chosen, Absent):
        return SelectedMarginEvidence()
    named = chosen.point.name, chosen.point.digest, chosen.net_reduction
    if chosen.net_reduction < USEFUL:
        return SelectedMarginEvidence(*named)
    sums = nll_pair_by_document(points.emad_sweep_losses.of(chosen.point))
    tasks = {
        task: scored.measure_accuracy_against_full_depth(task, chosen.point) for task in scored.replayed_task_names
    }
    return SelectedMarginEvidence(*named, sums, points.full_loss.perplexity, tasks)


QUESTIONS = (
    # Legs of each proposed point: accuracy, and perplexity on the corpus and on each perplexity task. Points: margin 0,
    # the margin chosen on validation and --emad-margin (``CandidatePoints.selected_points``).
    Question(
        "EMAD-F1",
        "model",
        answer_quality,
        legs=lambda study, layers: (2 + study.lm_eval_task_count) * (2 + (study.margin is not None)),
        decide=decide_quality,
    ),
    make_model_question(
        "EMAD-F1-literal",
        measure_every_margin,
        decide_quality_at_every_margin,
        legs=lambda study, layers: 2 * SETTINGS_PER_FAMILY,
    ),
    make_model_question(
        "EMAD-E10", gather_selected_margin, decide_selected_margin, legs=lambda study, layers: 1 + len(world.TASKS)
    ),
)
