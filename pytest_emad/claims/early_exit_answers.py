"""Early exits: answers to the same items under two rules, and the base of claims on items.

These claims do not apply to decoder-only models, random weights, or models too small for the paper's settings. A row
that compares scores or exits uses only tasks that the model solves. If both rules exit equally on every item, the leg
does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from emad_ref.exit_rules import PRUNINGS
from emad_ref.probes.pruned_vocabulary import vocabulary_size_at_confidence
from pytest_emad.claims.base import Answer, ClaimContext, Question, answer_question
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.early_exit_tasks import TASKS
from pytest_emad.measurements.early_exits import (
    AS_CODED,
    PRUNED_JSD_READINGS,
    EarlyExitMeasurements,
    ExitScores,
    scale_minimum_exit_layers,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.statistics.accuracy import estimate_paired_exit_depth_difference, estimate_score_difference
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import (
    build_measured_count_leg,
    build_measured_estimate_leg,
    unmeasured_leg,
)
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import Leg, Outcome, Verdict

EXIT_TASKS = 3  # question → answer, dialogue → summary, story → worked chain
EXIT_SETTINGS = 2 * EXIT_TASKS  # at two minimum exit layers
PAPER_KINDS = ("qa", "summary")  # of the paper's two tasks, SQuAD and SamSum


def make_unmet_early_exit_verdict(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """The verdict if claims about early exits cannot be judged on this model; None if they can."""
    absence = evidence.early_exits.absent_premise
    return None if absence is None else asked.lacking(absence)


def answer_early_exit_claim(
    evidence: ModelMeasurements,
    asked: ClaimContext,
    verdict: Callable[[], Verdict],
    tables: Callable[[], tuple[AttachedTable, ...]] = tuple,
) -> Answer:
    """The answer with ``verdict()`` and the items' corpus, or the reason for no items.

    Attaches notes on the items also if the decoder under test declines the rules.

    Raises:
        RunStopped: a file that does not fit; all files are read before decoding.
    """
    if absent := make_unmet_early_exit_verdict(evidence, asked):
        return Answer(absent, evidence.corpus, evidence.fingerprint)
    notes = Attachments(notes=tuple(evidence.early_exits.task_items.notes))

    def judged(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        return Answer(verdict(), evidence.early_exits.corpus, evidence.fingerprint, Attachments(tables()))

    said = answer_question(Question(asked.claim.id, "model", judged), evidence, asked)
    return replace(said, attachments=notes + said.attachments)


def make_early_exit_question(
    claim: str,
    gather: Callable[[EarlyExitMeasurements], Any],
    decide: Callable[[Any, ClaimContext], Verdict],
    *,
    tables: Callable[[EarlyExitMeasurements], AttachedTable] | None = None,
    legs: int = 0,
    measures: bool = False,
) -> Question[ModelMeasurements]:
    """Make the question of a claim on items: ``decide`` judges the result of ``gather``; ``tables``: attachments."""

    def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        exits = evidence.early_exits

        def shown() -> tuple[AttachedTable, ...]:
            return () if tables is None else (tables(exits),)

        return answer_early_exit_claim(evidence, asked, lambda: decide(gather(exits), asked), shown)

    return Question(claim, "model", answer, legs=lambda study, layers: legs, measures=measures, decide=decide)


def select_paper_tasks(tasks: Iterable[str]) -> list[str]:
    """Those of ``tasks`` that are of a kind with the paper's own."""
    return [task for task in tasks if TASKS[task].kind in PAPER_KINDS]


def make_missing_task_legs(missing: Mapping[str, Absent], unsolved: Mapping[str, Absent] | None = None) -> list[Leg]:
    """An unmeasured leg for each task that cannot be scored (task → why): the claim cannot survive without it.

    ``unsolved``: tasks that the model does not solve (task → why), on which exits cannot lower the score.
    """
    idle = [make_undecided_leg(task, absent.reason) for task, absent in (unsolved or {}).items()]
    return [*(unmeasured_leg(task, absent.reason) for task, absent in missing.items()), *idle]


def make_undecided_leg(name: str, reason: str, n: int = 0, outcome: Outcome = "not applicable") -> Leg:
    """A leg that these data cannot decide.

    ``outcome``: ``inconclusive`` if the row must not survive without it.
    """
    return Leg(name, outcome, None, None, n, None, "", reason)


BEST_SUMMARY_MINIMUM = 17  # of 24 layers: the paper's largest gain of ROUGE-L
ACTS = 0.05  # share of depth that a rule must save for a meaningful score
SAME_EXITS = "both exit after the same blocks on every item"
SAME_SCORES = "both score the same on every item"


@dataclass(frozen=True)
class RuleComparison:
    """The same items, in the same order, under two rules; ``where``: text with task and minimum layer.

    ``sizes``: text with the kept vocabulary of both; "" without pruning.
    """

    where: str
    ours: ExitScores
    theirs: ExitScores
    sizes: str = ""

    @property
    def has_same_depth_sums(self) -> bool:
        """Whether both sides have equal depths on every item, so that neither is earlier."""
        return self.ours.has_same_depth_sums(self.theirs)

    @property
    def has_same_scores(self) -> bool:
        """Whether both sides have the same score on every item."""
        return np.array_equal(self.ours.score.values, self.theirs.score.values)

    def estimate_blocks_earlier(self, layers: int, threshold: float, rng: np.random.Generator) -> Estimate:
        """Blocks by which the tested rule exits earlier; ``layers``: of the model."""
        blocks = self.ours.mean_exit_by_item, self.theirs.mean_exit_by_item
        return estimate_paired_exit_depth_difference(*blocks, layers=layers, threshold=threshold, rng=rng)

    def estimate_score_gain(self, threshold: float, rng: np.random.Generator, unit: str = "score gained") -> Estimate:
        """Score gain of the tested rule."""
        return estimate_score_difference(self.ours.score, self.theirs.score, threshold=threshold, rng=rng, unit=unit)

    def estimate_score_loss(self, threshold: float, rng: np.random.Generator) -> Estimate:
        """Score loss of the tested rule."""
        return estimate_score_difference(
            self.theirs.score, self.ours.score, threshold=threshold, rng=rng, unit="score lost"
        )


@dataclass(frozen=True)
class RuleComparisons:
    """``contests``: of a model of ``layers`` blocks, on tasks that it solves.

    ``missing``: unavailable task → reason; ``unsolved``: unsolved task → reason.
    """

    contests: tuple[RuleComparison, ...]
    layers: int
    missing: Mapping[str, Absent] = field(default_factory=dict)
    unsolved: Mapping[str, Absent] = field(default_factory=dict)

    @classmethod
    def from_comparisons(cls, exits: EarlyExitMeasurements, contests: Iterable[RuleComparison]) -> RuleComparisons:
        """``contests`` of the model of ``exits``, with its unavailable and unsolved tasks."""
        return cls(tuple(contests), exits.subject.stepper.layers, exits.absent_by_task, exits.unsolved_by_task)

    @property
    def left_out_legs(self) -> list[Leg]:
        """Legs of the tasks without a contest."""
        return make_missing_task_legs(self.missing, self.unsolved)


def make_rule_comparisons(
    exits: EarlyExitMeasurements, ours: str, theirs: str | None = None, other: EarlyExitMeasurements | None = None
) -> RuleComparisons:
    """Compare rule ``ours`` with ``theirs`` (None: full depth) at every minimum layer of every solved task.

    ``other``: the model of ``theirs``, if it differs.
    """
    return RuleComparisons.from_comparisons(
        exits, (make_rule_comparison(exits, *each, ours, theirs, other) for each in exits.solved_task_layer_pairs)
    )


def make_rule_comparison(
    exits: EarlyExitMeasurements,
    task: str,
    minimum: int,
    ours: str,
    theirs: str | None = None,
    other: EarlyExitMeasurements | None = None,
) -> RuleComparison:
    """One comparison of ``make_rule_comparisons``."""
    first, against = exits.answer_by_rule(task, ours, minimum), other or exits
    point = against.full_depth_point if theirs is None else against.make_point(theirs, minimum)
    return RuleComparison(f"{task}, j={minimum}", first.exited, against.answer_at_point(task, point).exited)


# ---------------------------------------------------------------- EE-3: JSD against softmax response

READINGS = 2  # of JSD: the paper's, and its authors' code


# (both rules may first exit at the same layer, as published: JSD may exit one layer later)
ContrastiveExits = tuple[RuleComparisons, RuleComparisons]


def decide_contrastive_exit(found: ContrastiveExits, asked: ClaimContext) -> Verdict:
    """EE-3: two legs per reading of JSD, task and minimum layer: blocks earlier, and score lost.

    In the paper's reading no layer can be contrasted at the minimum layer j, so JSD decides from j + 1 on, and so does
    softmax response here: one block of advantage would decide the row. In the authors' code amateurs start at layer 2,
    and JSD decides at j itself. The paper's own comparison, one block apart, is attached to both.
    """
    fair, published = found
    sooner, drop = asked.claim.thresholds["blocks_earlier"], asked.claim.thresholds["score_drop"]
    tests, beside = [], fair.left_out_legs
    for each in fair.contests:
        if each.has_same_depth_sums:
            beside.append(make_undecided_leg(each.where, SAME_EXITS, len(each.ours)))
            continue
        blocks = each.estimate_blocks_earlier(fair.layers, sooner, asked.rng)
        lost = each.estimate_score_loss(drop, asked.rng)
        tests.append(asked.make_leg_test(f"{each.where}: exit", blocks, "below", sooner))
        tests.append(asked.make_leg_test(f"{each.where}: score", lost, "above", drop))
    said = "softmax response may exit one block earlier by construction"
    for each in published.contests:
        blocks = each.estimate_blocks_earlier(published.layers, 0.0, asked.rng)
        beside.append(build_measured_estimate_leg(f"{each.where}, as published: exit", blocks, said))
    return asked.decide_tests(tests, beside)


def gather_contrastive_exits(exits: EarlyExitMeasurements) -> ContrastiveExits:
    """Gather both readings of JSD against softmax response, from the same layer or the same minimum layer on."""
    return RuleComparisons.from_comparisons(exits, iterate_jsd_comparisons(exits)), make_rule_comparisons(
        exits, "JSD", "softmax"
    )


def iterate_jsd_comparisons(exits: EarlyExitMeasurements) -> Iterator[RuleComparison]:
    """Iterate over both readings of JSD, each against softmax response from the same layer on."""
    for task, minimum in exits.solved_task_layer_pairs:
        for reading, rule, first in (("paper", "JSD", minimum + 1), ("as coded", AS_CODED, minimum)):
            jsd, softmax = exits.answer_by_rule(task, rule, minimum), exits.answer_by_rule(task, "softmax", first)
            yield RuleComparison(f"{task}, j={minimum}, {reading}", jsd.exited, softmax.exited)


# ---------------------------------------------------------------- EE-9: prunings under JSD

TABLE_1_MINIMA = (15, 17, 18, 19, 20)  # of 24 layers
RIVALS = {"fixed": "JSD, fixed", "decaying": "JSD, decaying"}  # pruning → rule


PrunedExits = tuple[RuleComparisons, RuleComparisons]  # in the paper's reading, and in the other one


def decide_adaptive_exit(found: PrunedExits, asked: ClaimContext) -> Verdict:
    """EE-9: a leg per task, minimum layer and rival: blocks earlier; a second number is the score gained.

    Questions and summaries have a further leg per rival: the mean over Table 1's minimum layers.

    The paper's reading decides, in which the contrast compares all tokens of the top-k. The other one compares only
    plausible tokens of the top-k, and is measured beside it. There prunings often exit equally on every item, since
    both normalisers cancel on the plausible tokens (``probes.contrast``). Then the leg gives the number of tokens that
    each keeps.
    """
    paper, other = found
    least = asked.claim.thresholds["blocks_earlier"]
    blocks, beside = {}, paper.left_out_legs
    for each in (*paper.contests, *other.contests):
        name = f"{each.where}: exit"
        if each.has_same_depth_sums:
            said = f"the prunings exit identically: {each.sizes}" if each.sizes else SAME_EXITS
            beside.append(make_undecided_leg(name, said, len(each.ours)))
            continue
        earlier = each.estimate_blocks_earlier(paper.layers, least, asked.rng)
        if each in paper.contests:
            blocks[name] = earlier
        else:
            beside.append(build_measured_estimate_leg(name, earlier))
        beside.append(build_measured_estimate_leg(f"{each.where}: score", each.estimate_score_gain(0.0, asked.rng)))
    return asked.judge_against_threshold(blocks, "below", least, beside)


def gather_pruned_jsd_exits(exits: EarlyExitMeasurements) -> PrunedExits:
    """Gather adaptive pruning against its rivals in both readings, and Table 1 in the paper's."""
    paper, other = (list(_iterate_pruning_comparisons(exits, *each)) for each in PRUNED_JSD_READINGS.items())
    paper += iterate_mean_exit_comparisons(exits)
    return RuleComparisons.from_comparisons(exits, paper), RuleComparisons.from_comparisons(exits, other)


def _iterate_pruning_comparisons(exits: EarlyExitMeasurements, reading: str, ending: str) -> Iterator[RuleComparison]:
    """Iterate over adaptive against fixed and decaying pruning, with the sizes that each keeps."""
    stepper = exits.subject.stepper
    for task, minimum in exits.solved_task_layer_pairs:
        ours = exits.answer_by_rule(task, f"JSD, adaptive{ending}", minimum).exited
        unsure, sure = compute_largest_smallest_adaptive_k(minimum, stepper.layers, stepper.vocabulary_size)
        for name, rival in RIVALS.items():
            kept = PRUNINGS[name](minimum, stepper.layers, stepper.vocabulary_size).kept
            sizes = f"k = {unsure}–{sure} (adaptive) and {', '.join(map(str, kept))} ({name})"
            theirs = exits.answer_by_rule(task, f"{rival}{ending}", minimum).exited
            yield RuleComparison(f"{task}, j={minimum}, {reading}, against {name}", ours, theirs, sizes)


def iterate_mean_exit_comparisons(exits: EarlyExitMeasurements) -> Iterator[RuleComparison]:
    """Iterate over Table 1: adaptive pruning against its rivals, by means over its minimum layers, on its two tasks."""
    minima = scale_minimum_exit_layers(exits.subject.stepper.layers, TABLE_1_MINIMA)
    for task in select_paper_tasks(exits.solved_task_names):
        ours, *theirs = (
            mean_exit_scores([exits.answer_by_rule(task, rule, minimum).exited for minimum in minima])
            for rule in ("JSD, adaptive", *RIVALS.values())
        )
        for name, rival in zip(RIVALS, theirs, strict=True):
            yield RuleComparison(f"{task}, mean of j={', '.join(map(str, minima))}, against {name}", ours, rival)


def mean_exit_scores(each: Sequence[ExitScores]) -> ExitScores:
    """The same items under several settings: means of their scores and of their mean exits."""
    score = each[0].score
    return ExitScores(
        score.with_values(np.mean([one.score.values for one in each], axis=0)),
        score.with_values(np.mean([one.mean_exit_by_item.values for one in each], axis=0)),
        score.with_values(np.ones(len(score))),
    )


def compute_largest_smallest_adaptive_k(minimum: int, layers: int, vocabulary: int) -> tuple[int, int]:
    """(k at confidence 0, k at confidence 1) of the adaptive pruning: the largest and the smallest."""
    shrink = PRUNINGS["adaptive"](minimum, layers, vocabulary).shrink
    assert shrink is not None, "the adaptive rule shrinks"
    return vocabulary_size_at_confidence(vocabulary, shrink, 0.0), vocabulary_size_at_confidence(
        vocabulary, shrink, 1.0
    )


def make_pruning_size_table(exits: EarlyExitMeasurements) -> AttachedTable:
    """k of each pruning at every minimum layer; of the adaptive one at confidence 0 and at 1."""
    layers, vocabulary = exits.subject.stepper.layers, exits.subject.stepper.vocabulary_size
    rows: list[dict[str, Any]] = []
    for minimum in exits.minimum_exit_layers:
        fixed, decaying = (PRUNINGS[name](minimum, layers, vocabulary).kept for name in ("fixed", "decaying"))
        unsure, sure = compute_largest_smallest_adaptive_k(minimum, layers, vocabulary)
        rows += [
            {
                "j": minimum,
                "layer": minimum + 1 + i,
                "fixed": fixed[i],
                "decaying": decaying[i],
                "adaptive, unsure": unsure,
                "adaptive, sure": sure,
            }
            for i in range(len(fixed))
        ]
    return AttachedTable("tokens kept by pruning, per layer", rows)


# ---------------------------------------------------------------- EE-10, 12, 13 and 15


def decide_weighted_contrast(found: RuleComparisons, asked: ClaimContext) -> Verdict:
    """EE-10: a report of blocks earlier and score gained, as the paper does not define "about"."""
    legs: list[Leg] = []
    for each in found.contests:
        legs.append(
            build_measured_estimate_leg(
                f"{each.where}: exit", each.estimate_blocks_earlier(found.layers, 0.0, asked.rng)
            )
        )
        legs.append(build_measured_estimate_leg(f"{each.where}: score", each.estimate_score_gain(0.0, asked.rng)))
    return asked.combine_legs([*legs, *found.left_out_legs])


# (state copying against deferred fill; per contest [items] bool: equal text under both)
StateCopies = tuple[RuleComparisons, Sequence[ByItem]]


def decide_state_copying(found: StateCopies, asked: ClaimContext) -> Verdict:
    """EE-12: a report per task and rule: score gained, blocks earlier, share of unchanged texts.

    Copied states may move later exits, so the report has both.
    """
    copied, texts = found
    legs: list[Leg] = []
    for each, same in zip(copied.contests, texts, strict=True):
        legs.append(
            build_measured_estimate_leg(
                f"{each.where}: score", each.estimate_score_gain(0.0, asked.rng, asked.claim.unit)
            )
        )
        legs.append(
            build_measured_estimate_leg(
                f"{each.where}: exit", each.estimate_blocks_earlier(copied.layers, 0.0, asked.rng)
            )
        )
        legs.append(build_measured_count_leg(f"{each.where}: same text", same.values.mean(), len(same), "share"))
    return asked.combine_legs(legs)


def gather_state_copies(exits: EarlyExitMeasurements) -> StateCopies:
    """Gather softmax response and JSD on every task, at the smallest minimum layer."""
    contests, texts, minimum = [], [], exits.minimum_exit_layers[0]
    for task in exits.task_names:
        for rule in ("softmax", "JSD"):
            copied = exits.answer_by_rule(task, rule, minimum)
            exact = exits.answer_by_rule(task, rule, minimum, schedule="free_deferred")
            same = np.array([a == b for a, b in zip(copied.texts, exact.texts, strict=True)])
            contests.append(RuleComparison(f"{task}, {rule}, j={minimum}", copied.exited, exact.exited))
            texts.append(copied.exited.score.with_values(same))
    return RuleComparisons(tuple(contests), exits.subject.stepper.layers), texts


def decide_earlier_exit_after_finetuning(found: RuleComparisons, asked: ClaimContext) -> Verdict:
    """EE-13: a leg per task and minimum layer: blocks earlier after tuning; attaches exits and scores of both models.

    It applies only to the bundled pair of T5s, the only model available before and after tuning.
    """
    least = asked.claim.thresholds["blocks_earlier"]
    blocks, beside = {}, found.left_out_legs
    for each in found.contests:
        if each.has_same_depth_sums:
            beside.append(make_undecided_leg(each.where, SAME_EXITS, len(each.ours)))
        else:
            blocks[each.where] = each.estimate_blocks_earlier(found.layers, least, asked.rng)
        for name, side in (("pre-trained", each.theirs), ("tuned", each.ours)):
            where = f"{each.where}, {name}"
            beside.append(build_measured_count_leg(f"{where}: mean exit", side.mean_exit_block, len(side), "blocks"))
            beside.append(build_measured_count_leg(f"{where}: score", side.score.values.mean(), len(side), "score"))
    return asked.judge_against_threshold(blocks, "below", least, beside)


def answer_earlier_exit_after_finetuning(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EE-13 from answers of both models under softmax response."""
    exits = evidence.early_exits

    def judged() -> Verdict:
        models = exits.models_before_and_after_tuning
        if isinstance(models, Absent):
            return asked.lacking(models)
        before, after = models
        return decide_earlier_exit_after_finetuning(make_rule_comparisons(after, "softmax", "softmax", before), asked)

    return answer_early_exit_claim(evidence, asked, judged)


def gather_contrastive_scores(exits: EarlyExitMeasurements) -> RuleComparisons:
    """Gather JSD against full depth, at the paper's minimum layers, and of summaries at the one of its largest gain."""
    found = make_rule_comparisons(exits, "JSD")
    (minimum,) = scale_minimum_exit_layers(exits.subject.stepper.layers, (BEST_SUMMARY_MINIMUM,))
    summaries = [task for task in exits.solved_task_names if TASKS[task].kind == "summary"]
    if minimum in exits.minimum_exit_layers:
        return found
    further = (make_rule_comparison(exits, task, minimum, "JSD") for task in summaries)
    return replace(found, contests=(*found.contests, *further))


def decide_contrastive_score(found: RuleComparisons, asked: ClaimContext) -> Verdict:
    """EE-15: a leg per task and minimum layer: score gained over full depth; attaches full depth's score.

    Summaries have one more, at layer 17 of 24 (almost 10 % of ROUGE-L in the paper).

    If JSD saves less than a twentieth of the depth, or changes no item's score, the leg cannot judge exits.
    """
    least = asked.claim.thresholds["score_gain"]
    gains, beside = {}, found.left_out_legs
    for each in found.contests:
        full, saved = each.theirs.score, 1 - each.ours.mean_exit_block / found.layers
        beside.append(
            build_measured_count_leg(f"{each.where}: score at full depth", full.values.mean(), len(full), "score")
        )
        if saved < ACTS:
            said = f"not exercised: exits save {saved:.1%} of the depth, less than {ACTS:.0%}"
            beside.append(make_undecided_leg(each.where, said, len(full)))
        elif each.has_same_scores:
            beside.append(make_undecided_leg(each.where, SAME_SCORES, len(full)))
        else:
            gains[each.where] = each.estimate_score_gain(least, asked.rng, asked.claim.unit)
    return asked.judge_against_threshold(gains, "below", least, beside)


QUESTIONS = (
    make_early_exit_question(
        "EE-3", gather_contrastive_exits, decide_contrastive_exit, legs=2 * READINGS * EXIT_SETTINGS
    ),
    make_early_exit_question(
        "EE-9",
        gather_pruned_jsd_exits,
        decide_adaptive_exit,
        tables=make_pruning_size_table,
        legs=len(RIVALS) * (EXIT_SETTINGS + len(PAPER_KINDS)),
    ),
    make_early_exit_question(
        "EE-10", lambda exits: make_rule_comparisons(exits, "weighted contrast", "softmax"), decide_weighted_contrast
    ),
    make_early_exit_question("EE-12", gather_state_copies, decide_state_copying),
    Question(
        "EE-13",
        "model",
        answer_earlier_exit_after_finetuning,
        legs=lambda study, layers: EXIT_SETTINGS,
        decide=decide_earlier_exit_after_finetuning,
    ),
    make_early_exit_question("EE-15", gather_contrastive_scores, decide_contrastive_score, legs=EXIT_SETTINGS + 1),
)
