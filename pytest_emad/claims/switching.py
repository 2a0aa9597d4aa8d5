"""Switching between a small and a large model: its score at the paper's savings (EAD-F1), and its parts (EAD-A1 to A4).

No claim here applies to weights without quality, or if the large model is not better on any task. Without tasks each is
unmeasured. EAD-A1 to A4 report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from emad_ref.decoding.switching import LARGE, SMALL
from emad_ref.record import Bools
from emad_ref.text import world
from emad_ref.text.documents import Split
from pytest_emad.claims.base import Answer, ClaimContext, Question
from pytest_emad.claims.pair_answers import (
    answer_unmet_routing_premise,
    answer_unmet_writing_premise,
    make_answer_from_pair_verdict,
)
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.pair_answers import ItemAnswers, describe_rule, make_answer_row
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.pair_models import DRAFT_TOKENS
from pytest_emad.measurements.pair_routing import PAPER, RuleMixtureScores, make_item_switching_token_table
from pytest_emad.statistics.accuracy import estimate_retained_share, estimate_score_difference
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import (
    build_measured_count_leg,
    build_measured_estimate_leg,
    interval_if_finite,
    unmeasured_leg,
)
from pytest_emad.statistics.rates import mean_rate
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import Claim, Leg, Verdict
from pytest_emad.sweep.front import RoutingShareAndScore, mix_runs_to_large_share, routing_front_indices

RESULTS = ("llama", "qwen")  # the paper's two: names of thresholds
NEAR = 0.05  # largest distance of a rule's saving from the paper's


def get_reported_savings(claim: Claim) -> tuple[float, ...]:
    """Savings at which the paper reports scores, from the row in force."""
    return tuple(claim.thresholds[f"saving_{result}"] for result in RESULTS)


@dataclass(frozen=True)
class SwitchingScoreEvidence:
    """``routed``: (task, one of ``RESULTS``) → routed items, and right [items] by the large model alone.

    The value is None if not even the small model alone saves as much.

    ``unrouted``: task that does not count → advantage of the large model, and the reason.
    """

    routed: Mapping[tuple[str, str], tuple[RuleMixtureScores, ByItem] | None]
    unrouted: tuple[tuple[str, Estimate, str], ...] = ()


def decide_switching_score(found: SwitchingScoreEvidence, asked: ClaimContext) -> Verdict:
    """EAD-F1: a leg per task and result: the share of the large model's score kept at the paper's saving.

    Rules chosen on validation take turns by items, so that their saving is exact (``measurements.pair_routing``). Both
    scores are samples. Tasks that cannot distinguish the models are listed.
    """
    tests, beside = [], []
    for (task, result), both in found.routed.items():
        wanted, kept = (asked.claim.thresholds[f"{what}_{result}"] for what in ("saving", "retained"))
        name = f"{task}, −{wanted:.1%}"
        if both is None:
            beside.append(unmeasured_leg(name, "not even the small model alone saves as much by parameters"))
            continue
        judged, alone = both
        if not alone.values.any():
            beside.append(
                unmeasured_leg(name, "the large model answers no judged item right: there is no score to keep")
            )
            continue
        estimate = _share_kept(judged, alone, kept)
        tests.append(asked.make_leg_test(name, estimate, "below", kept))
        saved = build_measured_count_leg(
            f"{name}: saving", judged.attained, len(judged.score), "saving", _turns(judged, wanted)
        )
        beside.append(replace(saved, threshold=wanted))
    beside += [
        Leg(f"{task}: the large model is better by", "not applicable", gap.value, interval_if_finite(gap), gap.n, None,
            "accuracy", why)
        for task, gap, why in found.unrouted
    ]  # fmt: skip
    return asked.decide_tests(tests, beside)


def _share_kept(judged: RuleMixtureScores, alone: ByItem, kept: float) -> Estimate:
    """Leg for the kept share of the large model's score at exactly the saving (``sweep.front``).

    It is a t test on the expected score of each item, whose spread includes that of the proportion. If only a few items
    are lost, the t test is too certain: with 5 of 200 a rule at the threshold survived 9 % of the time, with 20 of 800
    7 % (2,500 simulations). So survival also needs exact tests on the items as dealt: the larger p-value and the lower
    bound count. For falsification the t test kept its level.
    """
    dealt = estimate_retained_share(judged.dealt, alone, kept)
    score, right = judged.score.independent_values, alone.independent_values.astype(np.float64)
    away, ratio = score - kept * right, float(score.sum() / right.sum())
    if len(away) < 2 or not np.ptp(away):
        return replace(dealt, value=ratio)
    above, below = (stats.ttest_1samp(away, 0.0, alternative=side).pvalue for side in ("greater", "less"))
    bounds = stats.ttest_1samp(score - ratio * right, 0.0).confidence_interval()
    low, high = (ratio + float(bound) / right.mean() for bound in bounds)
    return replace(
        dealt,
        value=ratio,
        low=min(dealt.low, low),
        high=high,
        p_above=max(dealt.p_above, float(above)),
        p_below=float(below),
        method=f"paired t on the expected score; to survive also {dealt.method}, items dealt out",
    )


def _turns(judged: RuleMixtureScores, wanted: float) -> str:
    """Text: the rules that take turns, and whether they are near the paper's saving."""
    low, high = sorted(judged.neighbours)
    said = f"{judged.name}; score read at exactly −{wanted:.1%}"
    if min(abs(saved - wanted) for saved in judged.neighbours) > NEAR:
        said += f"; no rule comes within {100 * NEAR:.0f} points: one saves {low:.1%}, the other {high:.1%}"
    return said


def answer_switching_score(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Answer EAD-F1; attaches all tried rules, and score against cost of every way to decode the judged items."""
    if absent := answer_unmet_routing_premise(pair, asked):
        return absent
    tasks, rules = pair.routing_rules.tasks_worth_routing, pair.routing_rules
    routed = {
        (task, result): (found, rules.answer_judged_items_alone(LARGE, task).right) if found else None
        for task in tasks
        for result in RESULTS
        for found in [rules.evaluate_mixture_at_saving(task, asked.claim.thresholds[f"saving_{result}"])]
    }
    unrouted = tuple((task, both.gap, both.summary) for task, both in rules.comparisons.items() if task not in tasks)
    verdict = decide_switching_score(SwitchingScoreEvidence(routed, unrouted), asked)
    attachments = Attachments(
        notes=(rules.tasks_not_worth_routing_note, *(note for task in tasks if (note := _shortened(pair, task))))
    )
    for task in tasks:
        tried = [make_answer_row(rules.format_rule_name(rule), done) for rule, done in rules.try_rules(task).items()]
        attachments += Attachments((AttachedTable(f"rules tried on {task}", tried),))
        if task in rules.written_tasks_worth_routing:
            rows = _cost_rows(pair, task)
            attachments += Attachments((AttachedTable(f"score against cost on {task}", rows, "score against cost"),))
    if written := [task for task in tasks if task in rules.written_tasks_worth_routing]:
        attachments += make_item_switching_token_table(rules, written[0])
    return make_answer_from_pair_verdict(pair, verdict, attachments)


def _shortened(pair: PairMeasurements, task: str) -> str:
    """A sentence if answers are too short for the paper's w and d_min."""
    own, median = (
        pair.routing_rules.scale_paper_constants(task),
        pair.routing_rules.large_model_median_answer_tokens(task),
    )
    if own == PAPER:
        return ""
    return (
        f"{pair.name}: {task}: answers of {median:.0f} tokens (median) are too short for the paper's "
        f"w = {PAPER.window}, d_min = {PAPER.least_run}: w = {own.window}, d_min = {own.least_run}"
    )


def _cost_rows(pair: PairMeasurements, task: str) -> list[dict[str, Any]]:
    """Rows of the same items: both models alone, every rule on the front, speculative decoding."""
    rules = pair.routing_rules
    rows = {
        rules.format_rule_name(rule): rules.answer_judged_items(rule, task)
        for rule in reversed(rules.find_front_rules(task))
    }
    rows |= {
        rules.format_rule_name(pair.answers.make_single_model_rule(model)): rules.answer_judged_items_alone(model, task)
        for model in (SMALL, LARGE)
    }
    rows |= {f"speculative, k = {DRAFT_TOKENS}": pair.answers.answer_by_speculation(task, "evaluate", pair.size.judged)}
    return [make_answer_row(name, done) for name, done in rows.items()]


# ---------------------------------------------------------------- EAD-A1 and A2: one constant is varied


# ([items] expected score at one value, at the common saving; the large model's token share at the chosen rule's τ)
VariedScore = tuple[ByItem, float]


@dataclass(frozen=True)
class ConstantEvidence:
    """``own``: of the value in force, ``reference``; ``varied``: other value of the constant ``symbol`` → the same
    items. All scores are at ``saving``."""

    task: str
    symbol: str
    saving: float
    reference: int
    own: VariedScore
    varied: Mapping[int, VariedScore]


def decide_constant(found: ConstantEvidence, asked: ClaimContext) -> Verdict:
    """EAD-A1, A2: per value, the score lost against the value in force, and the large model's shares.

    Every value has its own front, with τ chosen on validation, and is read at exactly one saving, so that scores
    compare at equal cost. The value in force is not compared with itself.
    """
    legs: list[Leg] = []
    own_score, own_share = found.own
    for value, (varied, large_share) in found.varied.items():
        leg = f"{found.task}, {found.symbol} = {value} for {found.reference}"
        lost = estimate_score_difference(own_score, varied, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
        share = f"{leg}: large-model share at the same τ, {own_share:.1%} before"
        legs += [
            build_measured_estimate_leg(f"{leg}: score lost at a saving of {found.saving:.1%}", lost),
            build_measured_count_leg(share, large_share, len(varied), "share of tokens"),
        ]
    return asked.combine_legs(legs)


def answer_constant(
    pair: PairMeasurements, asked: ClaimContext, field: str, values: Sequence[int], symbol: str
) -> Answer:
    """Answer for the constant ``field`` of ``SwitchingRule`` and ``SwitchingConstants``, ``symbol`` in the paper."""
    if absent := answer_unmet_routing_premise(pair, asked):
        return absent
    task, saving = pair.routing_rules.tasks_worth_routing[0], pair.savings[0]
    reference = getattr(pair.routing_rules.scale_paper_constants(task), field)
    others = {
        value: varied
        for value in values
        if value != reference and (varied := _varied_score(pair, task, {field: value}))
    }
    own = _varied_score(pair, task, {field: reference})
    if own is None:
        reason = f"{task}: not even the small model alone saves {saving:.1%}: there is no equal saving to compare at"
        return make_answer_from_pair_verdict(pair, asked.not_applicable(reason))
    rows = [
        {
            symbol: value,
            f"score at a saving of {saving:.1%}": float(score.values.mean()),
            "large-model share % at the same τ": large_share,
            "items": len(score),
        }
        for value, (score, large_share) in sorted({reference: own, **others}.items(), key=lambda item: item[0])
    ]
    found = ConstantEvidence(task, symbol, saving, reference, own, others)
    return make_answer_from_pair_verdict(
        pair, decide_constant(found, asked), Attachments((AttachedTable(f"{symbol} on {task}", rows),))
    )


def _varied_score(pair: PairMeasurements, task: str, change: Mapping[str, Any]) -> VariedScore | None:
    rules = pair.routing_rules
    routed = rules.evaluate_mixture_at_saving(
        task, pair.savings[0], replace(rules.scale_paper_constants(task), **change)
    )
    same_tau = rules.answer_judged_items(replace(rules.select_rule_for_paper_saving(task), **change), task)
    return None if routed is None else (routed.score, same_tau.large_share)


def make_constant_question(claim: str, field: str, symbol: str, values: Sequence[int]) -> Question[PairMeasurements]:
    """Make a question about ``field`` of ``SwitchingRule`` and ``SwitchingConstants``, ``symbol`` in the paper."""

    answer = partial(answer_constant, field=field, values=values, symbol=symbol)
    return Question(claim, "pair", answer, budget="standard", decide=decide_constant)


# ---------------------------------------------------------------- EAD-A3: decisive tokens


@dataclass(frozen=True)
class HighEntropyErrorEvidence:
    """Emitted tokens [items], and those that are not the large model's choice.

    ``decisive_small``: the ``decisive`` ones by the small model; ``wrong``: of these, not the large model's choice.
    ``calm``: the small model's other tokens; ``calm_wrong``: of these, the wrong ones. ``name``: task and rule.
    """

    name: str
    decisive: ByItem
    decisive_small: ByItem
    wrong: ByItem
    calm: ByItem
    calm_wrong: ByItem


def decide_high_entropy_token_errors(found: HighEntropyErrorEvidence, asked: ClaimContext) -> Verdict:
    """EAD-A3: three shares of tokens, each over the items that have such tokens.

    A token is decisive if its own entropy reaches τ, and right if it is the large model's greedy choice after the same
    history.
    """
    name = found.name
    shares = {
        f"{name}: decisive tokens emitted by the small model": (found.decisive_small, found.decisive),
        f"{name}: of them another than the large model's": (found.wrong, found.decisive_small),
        f"{name}: of its other tokens another than the large model's": (found.calm_wrong, found.calm),
    }
    legs = [_token_share(leg, part, whole, asked.rng) for leg, (part, whole) in shares.items()]
    return asked.combine_legs(legs)


def _token_share(name: str, part: ByItem, whole: ByItem, rng: np.random.Generator) -> Leg:
    """Leg of Σ part / Σ whole with its interval over items; with a reason instead if all items are equal."""
    seen, unit = whole.values > 0, "share of tokens"
    if not seen.any():
        return replace(build_measured_count_leg(name, 0, 0, unit, "there is no such token"), estimate=None)
    estimate = mean_rate(part.select(seen), whole.select(seen), threshold=0.0, rng=rng, unit=unit)
    return build_measured_estimate_leg(name, estimate, "" if math.isfinite(estimate.low) else estimate.method)


def answer_high_entropy_token_errors(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Answer EAD-A3 from the judged run of the chosen rule, on the written task most worth routing."""
    if absent := answer_unmet_writing_premise(pair, asked):
        return absent
    task = pair.routing_rules.written_tasks_worth_routing[0]
    rule = pair.routing_rules.select_rule_for_paper_saving(task)
    done = pair.routing_rules.answer_judged_items(rule, task)
    agrees = pair.answers.make_greedy_choice_masks(LARGE, done, task, "evaluate", pair.size.judged)
    name = f"{task}, {describe_rule(rule)}"
    return make_answer_from_pair_verdict(
        pair,
        decide_high_entropy_token_errors(
            count_high_entropy_token_errors(name, done, agrees, rule.threshold_bits), asked
        ),
    )


def count_high_entropy_token_errors(
    name: str, done: ItemAnswers, agrees: list[Bools], threshold_bits: float
) -> HighEntropyErrorEvidence:
    """Count decisive tokens. ``agrees``: per item, [emitted] whether the large model chooses the same."""
    high = [walk.entropy_bits >= threshold_bits for walk in done.walks]
    small = [walk.model == SMALL for walk in done.walks]

    def per_item(*columns: list[Bools]) -> ByItem:
        counts = [int(np.logical_and.reduce(item).sum()) for item in zip(*columns, strict=True)]
        return done.right.with_values(np.array(counts))

    low, differs = [~item for item in high], [~item for item in agrees]
    return HighEntropyErrorEvidence(
        name,
        per_item(high),
        per_item(high, small),
        per_item(high, small, differs),
        per_item(low, small),
        per_item(low, small, differs),
    )


# ---------------------------------------------------------------- EAD-A4: entropy inside speculation


WIDTHS = (2, 8)  # k
GATES = (None, 0.5, 0.8, 1.0)  # quantiles of the drafts' entropies: from keeping no refused draft to keeping all
GateOption = tuple[int, float | None]  # k, gate in bits


@dataclass(frozen=True)
class GatedSpeculationEvidence:
    """[items] expected scores of switching and of gated speculation at the large model's share ``allowed``.

    ``gated`` None: with every gate it writes more. ``ways``: the mixed settings of both.
    """

    task: str
    allowed: float
    switched: ByItem
    gated: ByItem | None
    ways: tuple[str, str]


def decide_gated_speculation_vs_switching(found: GatedSpeculationEvidence, asked: ClaimContext) -> Verdict:
    """EAD-A4: the score lost by gating against switching at one share; only the share if no gate is cheap enough.

    Among all widths and gates, and the large model alone, those on validation's front take turns by items like EAD's
    rules (``sweep.front``). The verifier reads every draft, so a share is no saving here.
    """
    task, gated, switched = found.task, found.gated, found.switched
    if gated is None:
        none = f"{task}: no gate leaves the large model as little as the paper's saving does"
        return asked.combine_legs([build_measured_count_leg(none, found.allowed, len(switched), "share of tokens")])
    lost = estimate_score_difference(switched, gated, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
    both = f"speculation ({found.ways[1]}) for EAD ({found.ways[0]})"
    legs = [
        build_measured_estimate_leg(f"{task}: score lost at a large-model share of {found.allowed:.1%}", lost, both),
        build_measured_count_leg(f"{task}: EAD's score", float(switched.values.mean()), len(switched), "score"),
        build_measured_count_leg(f"{task}: gated speculation's score", float(gated.values.mean()), len(gated), "score"),
    ]
    return asked.combine_legs(legs)


def answer_gated_speculation_vs_switching(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Answer EAD-A4 on the task most worth routing; attaches every setting on the fronts with its cost."""
    if absent := answer_unmet_writing_premise(pair, asked):
        return absent
    task, saving = pair.routing_rules.written_tasks_worth_routing[0], pair.savings[0]
    routed, allowed = (
        pair.routing_rules.evaluate_mixture_at_saving(task, saving),
        pair.models.large_share_at_saving(saving),
    )
    if routed is None:
        return make_answer_from_pair_verdict(
            pair, asked.not_applicable(f"{task}: not even the small model alone saves {saving:.1%}")
        )
    options = find_pareto_gate_options(pair, task)
    judged = {option: _speculated(pair, task, "evaluate", option) for option in options}
    least = min(done.large_share for done in judged.values())
    gated, name = None, ""
    if least <= allowed:
        mixture = mix_runs_to_large_share(
            [done.item_scores_and_token_counts for done in judged.values()], allowed, asked.rng
        )
        gated = routed.score.with_values(mixture.score)
        p, first, second = mixture.probability, options[mixture.first], options[mixture.second]
        name = f"{p:.0%} of items by {_gate_name(first)}, {1 - p:.0%} by {_gate_name(second)}"
    rows = [make_answer_row(_gate_name(option), done) for option, done in judged.items()]
    rows += [
        make_answer_row(
            f"EAD, {pair.routing_rules.format_rule_name(rule)}", pair.routing_rules.answer_judged_items(rule, task)
        )
        for rule in routed.rules
    ]
    table = AttachedTable(f"entropy where speculation diverges, {task}", rows)
    found = GatedSpeculationEvidence(task, allowed, routed.score, gated, (routed.name, name))
    return make_answer_from_pair_verdict(
        pair, decide_gated_speculation_vs_switching(found, asked), Attachments((table,))
    )


def _gate_name(option: GateOption) -> str:
    k, gate = option
    if not k:
        return "the large model alone"
    return f"speculative, k = {k}" + ("" if gate is None else f", gate {gate:.3g} bits")


def find_pareto_gate_options(pair: PairMeasurements, task: str) -> list[GateOption]:
    """Widths and gates whose mixtures score best on validation, by falling share; k = 0 drafts nothing."""
    options: list[GateOption] = [(0, None), *product(WIDTHS, choose_entropy_gates(pair, task))]
    tried = [_speculated(pair, task, "validate", option) for option in options]
    return [
        options[at]
        for at in routing_front_indices([RoutingShareAndScore(done.large_share, done.mean_score) for done in tried])
    ]


def _speculated(pair: PairMeasurements, task: str, split: Split, option: GateOption) -> ItemAnswers:
    (k, gate), count = option, pair.size.tried if split == "validate" else pair.size.judged
    return (
        pair.answers.answer_by_speculation_without_flops(k, gate, task, split, count)
        if k
        else pair.answers.answer_by_one_model(LARGE, task, split, count)
    )


def choose_entropy_gates(pair: PairMeasurements, task: str) -> list[float | None]:
    """Entropy gates in bits: None, quantiles of drafts on validation, and one above every entropy."""
    drafts = pair.answers.answer_by_speculation_without_flops(
        max(WIDTHS), None, task, "validate", pair.size.tried
    ).entropy_bits
    most = math.nextafter(math.log2(pair.models.vocabulary), math.inf)
    return [
        None if share is None else most if share == 1 else float(np.quantile(np.concatenate(drafts), share))
        for share in GATES
    ]


QUESTIONS = (
    Question(
        "EAD-F1",
        "pair",
        answer_switching_score,
        # only validation shows the number of tasks worth routing, at most all
        legs=lambda study, layers: len(RESULTS) * (len(world.TASKS) + study.lm_eval_task_count),
        budget="standard",
        decide=decide_switching_score,
    ),
    make_constant_question("EAD-A1", "window", "w", (1, 2, 5, 10, 20)),
    make_constant_question("EAD-A2", "least_run", "d_min", (1, 5, 10, 20, 40)),
    Question(
        "EAD-A3", "pair", answer_high_entropy_token_errors, budget="standard", decide=decide_high_entropy_token_errors
    ),
    Question(
        "EAD-A4",
        "pair",
        answer_gated_speculation_vs_switching,
        budget="standard",
        decide=decide_gated_speculation_vs_switching,
    ),
)
