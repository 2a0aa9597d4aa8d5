"""Savings of exits on this model: by any criterion (EMAD-X1), by an oracle (X5), with one part of EMAD exchanged (X6).

No claim here applies to weights without quality. EMAD-X2 is in ``calibration_promises``, EMAD-X3 and X4 are in
``speedup``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from emad_ref.absent import Absent, reason_if_absent
from emad_ref.record import Floats
from emad_ref.replay.losses import PointLoss
from pytest_emad.claims.base import (
    Answer,
    ClaimContext,
    Question,
    answer_unmet_learned_exit_premise,
    make_model_question,
    make_unmet_learned_exit_verdict,
)
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.learned_exit import ComponentExchange, ExitEvaluation
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.screening.ranking import compute_savings_figure_and_table
from pytest_emad.statistics.accuracy import TaskAccuracy, estimate_accuracy_drop
from pytest_emad.statistics.estimate import Estimate, needed_sample_range, needed_sample_size
from pytest_emad.statistics.legs import (
    LEVEL,
    LegTest,
    Side,
    build_measured_count_leg,
    build_measured_estimate_leg,
    decide_legs,
)
from pytest_emad.statistics.number_format import format_percent
from pytest_emad.statistics.rates import (
    draw_document_counts,
    estimate_point_rise,
    estimate_saving,
    required_resamples,
)
from pytest_emad.statistics.verdicts import Leg, LegIdentity, Verdict

SIDES = 2  # a criterion fails by its saving or by its loss


@dataclass(frozen=True)
class CriterionEvidence:
    """``documents``: number of the evaluated ones.

    ``chosen``     the point chosen on validation, decoded, or why there is none.
    ``criteria``   all screened criteria, at their best setting.
    ``slack``      the largest net share that an oracle saves at the threshold's loss; None: not measured.
    ``task_legs``  measures the loss of each task at the chosen point, for a row that applies.
    """

    documents: int
    chosen: PointLoss | Absent
    criteria: Sequence[PointLoss]
    slack: float | None
    task_legs: Callable[[], Sequence[Leg]] = tuple


def decide_any_criterion_saves(found: CriterionEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-X1: saving and loss of the chosen point, and whether any criterion can succeed; or that there is no slack.

    survived   the point chosen on validation saves and loses enough: only it is tested, on both sides
               (intersection–union), with all executed work charged.
    falsified  no screened criterion does: each is tested twice (Bonferroni), and the row has the largest p-value.
               Criteria have their best setting, with exact K/V at the cost of copied ones.

    An oracle (EMAD-X5) bounds them all: if it saves at most ``slack``, the claim does not apply. Between ``slack`` and
    the threshold it is listed. The decoded loss of each task at the chosen point is listed and decides nothing.
    """
    most = asked.claim.thresholds["slack"]
    beside = [] if found.slack is None else [_oracle_leg(found.slack, found.documents, asked)]
    if found.slack is not None and found.slack <= most:
        said = f"no slack: an oracle saves {100 * found.slack:.1f} % net at that loss, {100 * most:g} % is none"
        return asked.not_applicable(f"{said}; leave this model alone", beside)
    resamples = required_resamples(1 + asked.other_legs)
    draws = draw_document_counts(found.documents, resamples, asked.rng)
    chosen = _chosen_point(found, asked, draws)
    legs = decide_legs(chosen)
    if found.criteria or isinstance(found.chosen, Absent):
        legs += decide_legs([_any_left(found, asked, draws, chosen)], asked.other_legs)
    return asked.combine_legs([*legs, *beside, *found.task_legs()])


def _chosen_point(found: CriterionEvidence, asked: ClaimContext, draws: Floats) -> list[LegTest]:
    """Legs for both sides of the chosen point; neither can falsify a claim about all criteria."""
    if isinstance(found.chosen, Absent):
        return []
    name, point, (saving, rise) = found.chosen.point.name, found.chosen.point.digest, _sides(found.chosen, asked, draws)
    tests = [
        asked.make_leg_test(f"{name}: net saving", saving, "below", _least(asked), point=point, kind="reduction"),
        asked.make_leg_test(f"{name}: perplexity", rise, "above", _most(asked), point=point, kind="perplexity"),
    ]
    return [replace(test, leg=_falsifies_none(test.leg)) for test in tests]


def _falsifies_none(leg: Leg) -> Leg:
    """The leg of one point, never falsified, since other criteria remain; its reason mentions a failure."""
    if leg.p_falsify is None:
        return leg
    failing = leg.p_falsify <= LEVEL
    return replace(leg, p_falsify=1.0, reason="this one is shown to fail; others may not" if failing else leg.reason)


def _any_left(found: CriterionEvidence, asked: ClaimContext, draws: Floats, chosen: Sequence[LegTest]) -> LegTest:
    """Leg on whether any criterion can succeed, by the one least certain to fail."""
    name, shown = f"any of {len(found.criteria)} criteria", [test.leg.p_survive for test in chosen]
    survive = max((1.0 if p is None else p for p in shown), default=1.0)
    if not found.criteria:
        said = found.chosen.reason if isinstance(found.chosen, Absent) else "nothing was screened"
        unscreened = Leg(name, "inconclusive", None, None, found.documents, None, "", said)
        return LegTest(unscreened, "documents", lambda error: None)  # more documents do not decide it
    sides = [(one, *_sides(one, asked, draws)) for one in found.criteria]
    nearest, saving, rise = max(sides, key=lambda each: min(1.0, SIDES * min(each[1].p_below, each[2].p_above)))
    by_saving = saving.p_below < rise.p_above  # the side on which it fails
    seen, p = saving if by_saving else rise, min(1.0, SIDES * min(saving.p_below, rise.p_above))
    bad: Side = "below" if by_saving else "above"
    threshold = _least(asked) if by_saving else _most(asked)
    tested = asked.make_leg_test(name, seen, bad, threshold)
    said = f"{nearest.point.name} is least sure to fail"
    if isinstance(found.chosen, Absent):
        said += f"; {found.chosen.reason}"
    if tested.leg.p_falsify is None:  # too few documents; its reason mentions it
        return tested
    leg = replace(tested.leg, p_falsify=p, p_survive=survive, reason=said)
    return replace(
        tested,
        leg=leg,
        needed=lambda error: needed_sample_size(seen, error / SIDES),
        needed_range=lambda error: needed_sample_range(seen, error / SIDES),
    )


def _sides(one: PointLoss, asked: ClaimContext, draws: Floats) -> tuple[Estimate, Estimate]:
    saving = estimate_saving(one, threshold=_least(asked), rng=asked.rng, draws=draws)
    return saving, estimate_point_rise(one, threshold=_most(asked), rng=asked.rng, draws=draws)


def _least(asked: ClaimContext) -> float:
    return asked.claim.thresholds["flop_reduction"]


def _most(asked: ClaimContext) -> float:
    return asked.claim.thresholds["perplexity_rise"]


def _oracle_leg(slack: float, documents: int, asked: ClaimContext) -> Leg:
    room = "others may be left" if slack >= _least(asked) else "no criterion on this lens can reach the threshold"
    return build_measured_count_leg("an oracle's net saving at that loss", slack, documents, "net FLOP reduction", room)


def answer_any_criterion_saves(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-X1 from the exit's decoded point, every replayed criterion, and the oracle."""
    if unjudged := answer_unmet_learned_exit_premise(evidence, asked):
        return unjudged
    found = replace(gather_criterion_evidence(evidence.exit_evaluation), task_legs=partial(_task_legs, evidence))
    return Answer(decide_any_criterion_saves(found, asked), evidence.corpus, evidence.fingerprint)


def _task_legs(evidence: ModelMeasurements) -> tuple[Leg, ...]:
    """Estimated loss of each task, without programs, at the chosen point; empty without one."""
    point = evidence.exit_evaluation.recommended_point
    if isinstance(point, Absent):
        return ()
    legs = []
    for task in evidence.task_scores.replayed_task_names:
        full, adaptive = evidence.task_scores.decode_full_and_adaptive_correctness(task, point)
        scores = TaskAccuracy(
            full, adaptive, evidence.task_scores.compute_chance_or_majority_accuracy(task), saving=1.0
        )
        drop = estimate_accuracy_drop(full, adaptive, threshold=0.0)
        identity = LegIdentity(point=point.digest, kind="task", on=task)
        why = reason_if_absent(scores.exclusion)
        legs.append(build_measured_estimate_leg(f"{point.name}: {task}", drop, why, **identity))
    return tuple(legs)


def gather_criterion_evidence(beyond: ExitEvaluation) -> CriterionEvidence:
    """Evidence for EMAD-X1 from the evaluation of an exit."""
    return CriterionEvidence(
        len(beyond.full_depth_loss.nats),
        beyond.recommended_point_loss,
        beyond.criterion_losses,
        beyond.oracle_saving_bound,
    )


# ---------------------------------------------------------------- EMAD-X5: the oracle


OracleLosses = Sequence[
    tuple[float, PointLoss]
]  # a rise of perplexity, the row's first, and an oracle's setting within


def decide_oracle_savings(found: OracleLosses, asked: ClaimContext) -> Verdict:
    """EMAD-X5: a report of the shares of blocks that oracles save at each loss (``sweep.oracle_savings``)."""
    if not found:
        return asked.unmeasured("no oracle was asked")
    legs = []
    for level, loss in found:
        saving = estimate_saving(loss, threshold=0.0, rng=asked.rng, cost="depth", unit=asked.claim.unit)
        rise = estimate_point_rise(loss, threshold=level, rng=asked.rng)
        said = f"perplexity rises by {100 * rise.value:.2f} % here"
        legs.append(build_measured_estimate_leg(f"{loss.point.name}, at {100 * level:g} %", saving, said))
    return asked.combine_legs(legs)


def answer_oracle_savings(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-X5 from traces of the evaluated text, through the exit's lens and the model's own head."""
    verdict, shown = make_unmet_learned_exit_verdict(evidence, asked), Attachments()
    if verdict is None:
        beyond = evidence.exit_evaluation
        ceilings = [
            (level, beyond.choose_oracle_setting(losses, level, "depth").named(name))
            for level in beyond.perplexity_rise_levels
            for name, losses in beyond.oracle_losses.items()
        ]
        verdict = decide_oracle_savings(ceilings, asked)
        shown = _slack_exhibits(beyond, asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint, shown)


def _slack_exhibits(beyond: ExitEvaluation, asked: ClaimContext) -> Attachments:
    """Figure and table of criteria on the exit's lens below the oracles, at equal losses."""
    geometry = beyond.subject.loaded.geometry
    found = compute_savings_figure_and_table(
        beyond.validation_traces, beyond.evaluation_traces, beyond.exit.fitted, geometry, asked.rng
    )
    where = f"on {beyond.subject.corpus}"
    return Attachments(
        (
            AttachedTable(
                f"saving against loss {where}: criteria below those who know", found.figure, "saving against loss"
            ),
            AttachedTable(f"what they save at exactly the same loss {where}", found.table),
        )
    )


# ---------------------------------------------------------------- EMAD-X6: one part exchanged


def decide_component_exchange_gains(found: Sequence[ComponentExchange], asked: ClaimContext) -> Verdict:
    """EMAD-X6: a report of the net saving that each exchange gains, the largest first, and its loss."""
    if not found:
        return asked.unmeasured("no part was exchanged")

    def gain(exchange: ComponentExchange) -> Estimate:
        _, before, after = exchange
        return estimate_saving(after, threshold=0.0, rng=asked.rng, against=before, unit=asked.claim.unit)

    gains = sorted(((each, gain(each)) for each in found), key=lambda pair: -pair[1].value)
    legs = []
    for (part, before, after), gained in gains:
        said = " → ".join(_saving_and_loss(each, asked) for each in (before, after))
        name = f"{part}: {after.point.name} for {before.point.name}"
        legs.append(build_measured_estimate_leg(name, gained, said))
    return asked.combine_legs(legs)


def _saving_and_loss(loss: PointLoss, asked: ClaimContext) -> str:
    """Its saving, and its loss on the judged text."""
    saved = estimate_saving(loss, threshold=0.0, rng=asked.rng).value
    rise = estimate_point_rise(loss, threshold=0.0, rng=asked.rng).value
    return f"{format_percent(saved, 'z.1f')} net at {format_percent(rise)}"


QUESTIONS = (
    Question(
        "EMAD-X1",
        "model",
        answer_any_criterion_saves,
        legs=lambda study, layers: 1,
        budget="standard",
        decide=decide_any_criterion_saves,
    ),
    Question("EMAD-X5", "model", answer_oracle_savings, budget="standard", decide=decide_oracle_savings),
    make_model_question(
        "EMAD-X6",
        lambda evidence: evidence.component_exchanges,
        decide_component_exchange_gains,
        premise=make_unmet_learned_exit_verdict,
        budget="standard",
    ),
)
