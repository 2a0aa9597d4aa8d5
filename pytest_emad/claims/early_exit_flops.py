"""Early exits: FLOPs that a pruned readout saves, and whether time follows.

FLOPs are counted at one operating point on these items, so such a leg has no interval. The claims also list a token
that never exits, by arithmetic, on the model under test and on the paper's T5-large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from emad_ref.absent import Absent
from emad_ref.exit_rules import early_exit_point, kept_vocabulary_size
from emad_ref.models.geometry import Geometry, published_geometry
from pytest_emad.claims.base import Answer, ClaimContext, Question, make_context_with_flop_evidence
from pytest_emad.claims.early_exit_answers import (
    EXIT_SETTINGS,
    SAME_SCORES,
    answer_early_exit_claim,
    make_early_exit_question,
    make_missing_task_legs,
    make_undecided_leg,
)
from pytest_emad.measurements.early_exits import (
    PRUNED_JSD_READINGS,
    PUBLISHED_MINIMA,
    RULES,
    EarlyExitMeasurements,
    FlopSaving,
    can_use_paper_settings,
    compute_flop_ratios,
    count_timed_flops,
    scale_minimum_exit_layers,
    split_flops_per_item,
    time_rules,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.statistics.accuracy import estimate_score_difference
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import build_measured_count_leg, build_measured_estimate_leg, decide_legs
from pytest_emad.statistics.speedup import estimate_speedup_per_request
from pytest_emad.statistics.units import ByItem, ByPair
from pytest_emad.statistics.verdicts import Leg, Outcome, Verdict
from pytest_emad.sweep.diagnostics import efficiency_gain_bound, published_efficiency_gain, token_work_without_exit

PAPERS = "t5-large"
CONTEXT = {"keys": 16, "source_keys": 128}  # from a short answer to a paragraph
UNIT = "× fewer FLOPs"
NEVER = 2.0  # a threshold that no confidence reaches


@dataclass(frozen=True)
class PruningComparison:
    """Scores of the same items under a rule (``before``) and under its pruned version (``after``)."""

    where: str
    saved: FlopSaving
    before: ByItem
    after: ByItem

    @property
    def has_same_scores(self) -> bool:
        """Whether pruning changes no item's score, so that no loss is possible."""
        return np.array_equal(self.before.values, self.after.values)

    def estimate_score_loss(self, threshold: float, rng: np.random.Generator) -> Estimate:
        """Score that pruning costs."""
        return estimate_score_difference(self.before, self.after, threshold=threshold, rng=rng, unit="score lost")


# place → saving of pruning for a token that never exits; adaptive sizes at confidence 1
NeverExiting = Mapping[str, FlopSaving]


def make_pruning_comparisons(
    exits: EarlyExitMeasurements, before: str, after: Mapping[str, str], settings: Iterable[tuple[str, int]]
) -> tuple[PruningComparison, ...]:
    """Rule ``before`` and each pruned one of ``after`` (name's ending → rule) at each (task, minimum layer).

    Raises:
        Unsupported: the decoder under test does not count its work, or declines a rule.
    """
    geometry, found = exits.subject.loaded.geometry, []
    for (task, minimum), (reading, pruned) in product(settings, after.items()):
        first, second = (exits.answer_by_rule(task, rule, minimum) for rule in (before, pruned))
        saved = compute_flop_ratios(first.compute_flops_per_item(geometry), second.compute_flops_per_item(geometry))
        where = f"{task}, j={minimum}{reading}"
        found.append(PruningComparison(where, saved, first.exited.score, second.exited.score))
    return tuple(found)


def compute_pruning_ratios_without_exit(subject: ModelUnderTest, before: str, after: str) -> NeverExiting:
    """Ratios on the model under test, at the paper's minimum layers; empty for a model too small for them."""
    geometry = subject.loaded.geometry
    if not subject.is_seq2seq or not can_use_paper_settings(geometry):
        return {}
    return compute_token_ratios_without_exit(
        subject.name, geometry, scale_minimum_exit_layers(geometry.layers), before, after
    )


def compute_paper_model_ratios(before: str, after: str) -> NeverExiting:
    """FLOP ratios of a token that never exits, on the paper's own model."""
    return compute_token_ratios_without_exit(PAPERS, published_geometry(PAPERS), PUBLISHED_MINIMA, before, after)


def compute_token_ratios_without_exit(
    name: str, geometry: Geometry, minima: Iterable[int], before: str, after: str
) -> NeverExiting:
    """FLOP ratios of one token of ``geometry`` that never exits, under two rules of ``RULES``."""
    found = {}
    for minimum in minima:
        rules = (RULES[rule] for rule in (before, after))
        points = (
            early_exit_point(signal, geometry.layers, geometry.vocabulary, minimum, NEVER, pruning=pruning, alpha=alpha)
            for signal, pruning, alpha in rules
        )
        parts = [
            split_flops_per_item(token_work_without_exit(point, geometry, **CONTEXT), geometry) for point in points
        ]
        found[f"{name}, never exiting, j={minimum}"] = compute_flop_ratios(*parts)
    return found


def make_flop_legs_by_part(found: PruningComparison, least: float | None) -> list[Leg]:
    """Legs for FLOP ratios of the three parts; judges the confidence part if there is a threshold."""
    items, (confidence, decoding, together) = len(found.before), found.saved
    return [
        make_count_threshold_leg(f"{found.where}: confidence FLOPs", confidence, items, least),
        build_measured_count_leg(f"{found.where}: decoder and confidence FLOPs", decoding, items, UNIT),
        build_measured_count_leg(f"{found.where}: all FLOPs, encoder included", together, items, UNIT),
    ]


def make_ratio_legs_without_exit(found: NeverExiting, least: float | None) -> list[Leg]:
    """Legs for both parts that a rule changes, for one token; judges the confidence part if there is a threshold."""
    legs = []
    for where, (confidence, decoding, _) in found.items():
        legs.append(make_count_threshold_leg(f"{where}: confidence FLOPs", confidence, 1, least))
        legs.append(build_measured_count_leg(f"{where}: decoder and confidence FLOPs", decoding, 1, UNIT))
    return legs


def make_count_threshold_leg(name: str, value: float, n: int, least: float | None) -> Leg:
    """A leg for a counted number against a threshold; only measured without one."""
    if least is None:
        return build_measured_count_leg(name, value, n, UNIT)
    outcome: Outcome = "survived" if value >= least else "falsified"
    return Leg(name, outcome, float(value), None, n, least, UNIT, "counted", good="higher")


# ---------------------------------------------------------------- EE-1, 2 and 4: a pruned readout


@dataclass(frozen=True)
class PruningEvidence:
    """``pruned``: () if no item could be decoded. ``missing``: unavailable task or items → reason; ``unsolved``:
    unsolved task → reason.

    ``never``: a token that never exits, of the model under test; ``papers``: of the paper's model. Empty for claims
    without arithmetic.
    """

    pruned: tuple[PruningComparison, ...] = ()
    never: NeverExiting = field(default_factory=dict)
    papers: NeverExiting = field(default_factory=dict)
    missing: Mapping[str, Absent] = field(default_factory=dict)
    unsolved: Mapping[str, Absent] = field(default_factory=dict)


def decide_fixed_pruning(found: PruningEvidence, asked: ClaimContext) -> Verdict:
    """EE-1: counted confidence FLOPs against the threshold, and a test of the score lost per task and minimum layer.

    If items cannot be decoded, only geometry decides, which is valid also for random weights. If pruning changes no
    score, its cost cannot be tested, and the row does not survive. Falsified counts come first.
    """
    least, drop = asked.claim.thresholds["flop_ratio"], asked.claim.thresholds["score_drop"]
    legs = [
        *make_ratio_legs_without_exit(found.never, None if found.pruned else least),
        *make_ratio_legs_without_exit(found.papers, None),
    ]
    tests, beside = [], make_missing_task_legs(found.missing, found.unsolved)
    for each in found.pruned:
        legs += make_flop_legs_by_part(each, least)
        score = f"{each.where}: score"
        if each.has_same_scores:
            beside.append(make_undecided_leg(score, SAME_SCORES, len(each.before), "inconclusive"))
        else:
            tests.append(asked.make_leg_test(score, each.estimate_score_loss(drop, asked.rng), "above", drop))
    if found.pruned:
        legs.sort(key=lambda leg: leg.outcome != "falsified")
    return asked.combine_legs([*legs, *decide_legs(tests, asked.other_legs), *beside])


def decide_pruning_costs(found: PruningEvidence, asked: ClaimContext) -> Verdict:
    """EE-2, EE-4: a report, three FLOP ratios and the score lost, per task and minimum layer.

    EE-4 has them for both readings of JSD with pruning. It also lists the arithmetic of a token that never exits, or
    only that if items cannot be decoded.
    """
    legs: list[Leg] = []
    for each in found.pruned:
        legs += make_flop_legs_by_part(each, None)
        legs.append(build_measured_estimate_leg(f"{each.where}: score lost", each.estimate_score_loss(0.0, asked.rng)))
    never = make_ratio_legs_without_exit({**found.never, **found.papers}, None)
    return asked.combine_legs([*legs, *never, *make_missing_task_legs(found.missing)])


def make_pruning_question(
    claim: str,
    decide: Callable[[PruningEvidence, ClaimContext], Verdict],
    before: str,
    after: Mapping[str, str],
    *,
    arithmetic: bool = True,
    scores: bool = False,
) -> Question[ModelMeasurements]:
    """The question of a claim on a rule with less pruning and with more.

    Args:
        before, after: as of ``make_pruning_comparisons``; the first of ``after`` is a row of ``RULES``.
        arithmetic: whether the claim includes a token that never exits.
        scores: whether scores decide, so that unsolved tasks do not count.
    """

    rules = before, next(iter(after.values()))

    def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        exits, absence = evidence.early_exits, evidence.early_exits.absent_premise
        never = compute_pruning_ratios_without_exit(evidence.subject, *rules) if arithmetic else {}
        papers = compute_paper_model_ratios(*rules) if arithmetic else {}
        if absence is not None and never:
            missing = {"items": absence} if absence.lacking == "data" else {}
            alone = PruningEvidence(never=never, papers=papers, missing=missing)
            return Answer(decide(alone, asked), evidence.corpus, evidence.fingerprint)

        def judged() -> Verdict:
            pruned = make_pruning_comparisons(
                exits, before, after, exits.solved_task_layer_pairs if scores else exits.task_layer_pairs
            )
            left_out = (exits.absent_by_task, exits.unsolved_by_task) if scores else ()
            witnessed = make_context_with_flop_evidence(evidence, asked)
            return decide(PruningEvidence(pruned, never, papers, *left_out), witnessed)

        return answer_early_exit_claim(evidence, asked, judged)

    legs = EXIT_SETTINGS if scores else 0
    return Question(claim, "model", answer, legs=lambda study, layers: legs, decide=decide)


# ---------------------------------------------------------------- EE-8: the paper's formula

MINIMA = (2, 7, 19)


PrunedModel = tuple[int, int, int, int]  # layers, vocabulary, minimum layer, tokens kept


def decide_pruning_gain_by_formula(found: tuple[Iterable[PrunedModel], NeverExiting], asked: ClaimContext) -> Verdict:
    """EE-8: an exact leg per minimum layer: the paper's formula on T5-large; attaches its bound and executed FLOPs."""
    legs: list[Leg] = []
    pruned, never = found
    for layers, vocabulary, minimum, kept in pruned:
        where, gain = f"{PAPERS}, j={minimum}", published_efficiency_gain(layers, vocabulary, minimum, kept)
        legs.append(
            make_count_threshold_leg(f"{where}: formula at k={kept:,}", gain, 1, asked.claim.thresholds["flop_ratio"])
        )
        legs.append(
            build_measured_count_leg(
                f"{where}: bound L/j", efficiency_gain_bound(layers, minimum), 1, UNIT, "the formula at k = 0"
            )
        )
    return asked.combine_legs([*legs, *make_ratio_legs_without_exit(never, None)])


def answer_pruning_gain_by_formula(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EE-8 from the paper's geometry, without text."""
    if not evidence.subject.is_seq2seq:
        reason = "the claim needs an encoder-decoder model, not a decoder-only model"
        return Answer(asked.not_applicable(reason))
    geometry = published_geometry(PAPERS)
    pruned = [make_published_pruning_setting(minimum, geometry.layers, geometry.vocabulary) for minimum in MINIMA]
    verdict = decide_pruning_gain_by_formula((pruned, compute_paper_model_ratios("softmax", "softmax, fixed")), asked)
    return Answer(verdict, fingerprint=evidence.fingerprint)


def make_published_pruning_setting(minimum: int, layers: int, vocabulary: int) -> PrunedModel:
    """(layers, vocabulary, minimum layer, kept tokens), with the published k* of ``minimum``."""
    return layers, vocabulary, minimum, kept_vocabulary_size(minimum, layers, vocabulary)


# ---------------------------------------------------------------- EE-14: time

TIMED = ("softmax", "softmax, fixed", "JSD", "JSD, adaptive")
NEW = 12
PAIRS = 30


# rule → (seconds [pairs] of full depth and of the rule, ratio of their FLOPs)
RuleTimings = Mapping[str, tuple[ByPair, ByPair, float]]


def decide_exit_runtime(found: RuleTimings, asked: ClaimContext) -> Verdict:
    """EE-14: a report per rule: speed and FLOP ratio against full depth, encoder included; above 1 is a gain."""
    legs: list[Leg] = []
    for rule, (full, own, saved) in found.items():
        legs.append(
            build_measured_estimate_leg(
                f"{rule}: speed", estimate_speedup_per_request(full, own), f"FLOPs {saved:.2f} ×"
            )
        )
        legs.append(build_measured_count_leg(f"{rule}: FLOPs", saved, len(own), "× fewer FLOPs"))
    return asked.combine_legs(legs)


def measure_rule_times_and_flops(exits: EarlyExitMeasurements) -> RuleTimings:
    """Time every rule of ``TIMED`` together; then count the FLOPs of the same requests, one rule after the other.

    Requests are of the last task, at the smallest minimum layer.

    Raises:
        Unsupported: the decoder under test declines a rule, or does not count its work.
    """
    subject, prompts = exits.subject, exits.make_prompts(exits.task_names[-1])
    points = {rule: exits.make_point(rule, exits.minimum_exit_layers[0]) for rule in TIMED}
    seconds = {arm: ByPair(each) for arm, each in time_rules(subject, prompts, points, PAIRS, NEW).seconds.items()}
    full = count_timed_flops(subject, prompts, exits.full_depth_point, PAIRS, NEW)
    own = {rule: count_timed_flops(subject, prompts, point, PAIRS, NEW) for rule, point in points.items()}
    return {rule: (seconds["full"], seconds[rule], compute_flop_ratios(full, own[rule])[-1]) for rule in TIMED}


QUESTIONS = (
    make_pruning_question("EE-1", decide_fixed_pruning, "softmax", {"": "softmax, fixed"}, scores=True),
    make_pruning_question("EE-2", decide_pruning_costs, "softmax, fixed", {"": "softmax, decaying"}, arithmetic=False),
    make_pruning_question(
        "EE-4",
        decide_pruning_costs,
        "JSD",
        {f", {reading}": f"JSD, adaptive{ending}" for reading, ending in PRUNED_JSD_READINGS.items()},
    ),
    Question("EE-8", "model", answer_pruning_gain_by_formula, decide=decide_pruning_gain_by_formula),
    make_early_exit_question("EE-14", measure_rule_times_and_flops, decide_exit_runtime, measures=True),
)
