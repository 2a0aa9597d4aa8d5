"""Early exits: what the text of the paper says of its settings λ, j and k (EE-16).

Each sentence has its own legs, whose claim is a sign. A sentence that the model cannot show is ``not applicable``: a
task that full depth does not solve, a confidence that is lowest after the first layer, a model without a tuned twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from emad_ref.absent import Absent
from emad_ref.exit_rules import kept_vocabulary_size
from pytest_emad.claims.base import ClaimContext
from pytest_emad.claims.early_exit_answers import (
    PAPER_KINDS,
    SAME_EXITS,
    SAME_SCORES,
    RuleComparison,
    RuleComparisons,
    make_early_exit_question,
    make_undecided_leg,
    select_paper_tasks,
)
from pytest_emad.measurements.early_exit_tasks import TASKS
from pytest_emad.measurements.early_exits import PRUNED_JSD_READINGS, THRESHOLD, EarlyExitMeasurements
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.rates import mean_rate
from pytest_emad.statistics.units import ByItem
from pytest_emad.statistics.verdicts import Verdict

LOWER_THRESHOLD = 0.5  # λ; the paper lowers its 0.9 and names no value
AGGRESSIVE = 2  # the share of k* that a more aggressive pruning keeps: one in two


@dataclass(frozen=True)
class SettingsEvidence:
    """``lowered``: rules at a lower λ (ours) against the paper's. ``since_lowest``: softmax response from the layer of
    lowest confidence on (ours) against from the first on. ``adaptive``: JSD with adaptive pruning (ours) against
    softmax response, on questions.

    ``lost``: place → tokens [items] that the pre-trained and the tuned model lose to a more aggressive k, and all
    tokens; or why there are none. ``absent_layers``: task without a layer of lowest confidence → why.
    """

    lowered: RuleComparisons
    since_lowest: RuleComparisons
    adaptive: RuleComparisons
    lost: Mapping[str, tuple[ByItem, ByItem, ByItem]] | Absent
    absent_layers: Mapping[str, Absent] = field(default_factory=dict)


def decide_settings(found: SettingsEvidence, asked: ClaimContext) -> Verdict:
    """EE-16: legs per sentence and task.

    - a lower λ exits earlier, and scores worse;
    - deciding only from the layer of lowest mean confidence on scores better than deciding from the first layer on;
    - JSD with adaptive pruning scores better than softmax response on questions (1.9 % in the paper);
    - a tuned model bears a smaller k: half of k* loses fewer of its final tokens than of the pre-trained model's.
    """
    tests, beside = [], found.lowered.left_out_legs
    beside += [make_undecided_leg(f"{task}: lowest", absent.reason) for task, absent in found.absent_layers.items()]
    if isinstance(found.lost, Absent):
        beside.append(make_undecided_leg("k of a tuned model", found.lost.reason))
    for sign in _iterate_signs(found, asked.claim.thresholds):
        if sign.tied:
            beside.append(make_undecided_leg(sign.name, sign.tied))
        else:
            estimate = sign.estimate(sign.threshold, asked.rng)
            tests.append(asked.make_leg_test(sign.name, estimate, "below", sign.threshold))
    return asked.decide_tests(tests, beside)


@dataclass(frozen=True)
class _Sign:
    """A difference that has to lie above its threshold; ``tied``: why it cannot; "" if it can."""

    name: str
    tied: str
    estimate: Callable[[float, np.random.Generator], Estimate]
    threshold: float


def _iterate_signs(found: SettingsEvidence, thresholds: Mapping[str, float]) -> Iterator[_Sign]:
    """The signs of all four sentences."""
    blocks, score, share = (thresholds[name] for name in ("blocks_earlier", "score_difference", "share_of_tokens"))
    for each in found.lowered.contests:
        exits, scores = SAME_EXITS * each.has_same_depth_sums, SAME_SCORES * each.has_same_scores
        earlier = partial(each.estimate_blocks_earlier, found.lowered.layers)
        yield _Sign(f"{each.where}: exit", exits, earlier, blocks)
        yield _Sign(f"{each.where}: score", scores, each.estimate_score_loss, score)
    for each in (*found.since_lowest.contests, *found.adaptive.contests):
        yield _Sign(f"{each.where}: score", SAME_SCORES * each.has_same_scores, each.estimate_score_gain, score)
    if not isinstance(found.lost, Absent):
        for where, (before, after, tokens) in found.lost.items():
            fewer = before.with_values(before.values - after.values)
            tied = "" if fewer.values.any() else "both models lose the same tokens of every item"
            yield _Sign(where, tied, partial(_share_of_tokens, fewer, tokens), share)


def _share_of_tokens(part: ByItem, tokens: ByItem, threshold: float, rng: np.random.Generator) -> Estimate:
    return mean_rate(part, tokens, threshold=threshold, rng=rng, unit="share of tokens")


def gather_settings(exits: EarlyExitMeasurements) -> SettingsEvidence:
    """Gather all four sentences at the smallest minimum layer, where a setting decides most.

    Tasks are those of a kind with the paper's. Only solved ones have a score to compare.
    """
    minimum, solved = exits.minimum_exit_layers[0], select_paper_tasks(exits.solved_task_names)
    lowest = {task: exits.find_layer_of_lowest_confidence(task) for task in solved}
    since = {task: layer for task, layer in lowest.items() if not isinstance(layer, Absent)}
    return SettingsEvidence(
        RuleComparisons.from_comparisons(exits, _iterate_lowered(exits, solved, minimum)),
        RuleComparisons.from_comparisons(exits, _iterate_since_lowest(exits, since)),
        RuleComparisons.from_comparisons(exits, _iterate_adaptive(exits, solved, minimum)),
        _lost_tokens(exits, minimum),
        {task: layer for task, layer in lowest.items() if isinstance(layer, Absent)},
    )


def _iterate_lowered(exits: EarlyExitMeasurements, tasks: Iterable[str], minimum: int) -> Iterator[RuleComparison]:
    for task in tasks:
        lower, own = (exits.answer_by_rule(task, "softmax", minimum, at).exited for at in (LOWER_THRESHOLD, THRESHOLD))
        yield RuleComparison(f"{task}, j={minimum}, λ={LOWER_THRESHOLD:g} for {THRESHOLD:g}", lower, own)


def _iterate_since_lowest(exits: EarlyExitMeasurements, since: Mapping[str, int]) -> Iterator[RuleComparison]:
    for task, layer in since.items():
        ours, first = (exits.answer_by_rule(task, "softmax", minimum).exited for minimum in (layer, 1))
        yield RuleComparison(f"{task}, j={layer} of lowest confidence for 1", ours, first)


def _iterate_adaptive(exits: EarlyExitMeasurements, tasks: Iterable[str], minimum: int) -> Iterator[RuleComparison]:
    for task in (task for task in tasks if TASKS[task].kind == "qa"):
        softmax = exits.answer_by_rule(task, "softmax", minimum).exited
        for reading, ending in PRUNED_JSD_READINGS.items():
            ours = exits.answer_by_rule(task, f"JSD, adaptive{ending}", minimum).exited
            yield RuleComparison(f"{task}, j={minimum}, {reading}, against softmax response", ours, softmax)


def _lost_tokens(exits: EarlyExitMeasurements, minimum: int) -> Mapping[str, tuple[ByItem, ByItem, ByItem]] | Absent:
    """Per task, the final tokens that rank below half of k* after the ``minimum`` layer."""
    models = exits.models_before_and_after_tuning
    if isinstance(models, Absent):
        return models
    stepper, found = exits.subject.stepper, {}
    k = kept_vocabulary_size(minimum, stepper.layers, stepper.vocabulary_size) // AGGRESSIVE
    for task in select_paper_tasks(exits.task_names):
        reads = [model.read_layers(task) for model in models]
        before, after = (read.sum_by_item((read.ranks[:, minimum - 1] > k).astype(np.float64)) for read in reads)
        found[f"{task}, j={minimum}, k={k}: fewer tokens lost after tuning"] = before, after, reads[0].token_counts
    return found


QUESTIONS = (
    make_early_exit_question(
        "EE-16",
        gather_settings,
        decide_settings,
        legs=4 * len(PAPER_KINDS) + len(PRUNED_JSD_READINGS),
    ),
)
