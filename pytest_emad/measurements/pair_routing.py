"""Tasks on which a pair is worth routing, and the switching rules that validation selects for a saving.

Two neighbouring rules of validation's front (``sweep.front``) take turns by items, so a saving is met exactly. w and
d_min are the paper's if answers are long enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from emad_ref.decoding.prefix_tree import SwitchedText
from emad_ref.decoding.switching import LARGE, MODELS, SMALL, SwitchingRule, rolling_means
from emad_ref.record import Floats
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.operating_points import decode_tokens_singly
from pytest_emad.measurements.pair_answers import TEXTS, ItemAnswers, PairAnswers, describe_rule
from pytest_emad.measurements.study import PairSampleSizes
from pytest_emad.statistics.accuracy import estimate_accuracy_drop, guessing_pvalue
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import LEVEL
from pytest_emad.statistics.units import ByItem
from pytest_emad.sweep.front import (
    RoutingMixtureItemScores,
    RoutingShareAndScore,
    mix_runs_to_large_share,
    routing_front_indices,
    switching_thresholds,
)

WORTH_ROUTING = 0.10  # minimum gain of accuracy by the large model on a task
LEAST_MULTIPLE = 4  # w and d_min must fit at least this many times into an answer


@dataclass(frozen=True)
class SwitchingConstants:
    """w and d_min of a family of rules, in tokens."""

    window: int
    least_run: int


PAPER = SwitchingConstants(window=5, least_run=10)


@dataclass(frozen=True, eq=False)
class PairComparison:
    """Both models alone on validation items of one task; ``guess``: accuracy of an honest guess.

    ``gap``: gain of the large model, against ``WORTH_ROUTING``.
    """

    small: ItemAnswers
    large: ItemAnswers
    guess: float
    gap: Estimate

    @property
    def is_solved(self) -> bool:
        """Whether the large model is shown to beat the guess; a repeated item counts once."""
        return guessing_pvalue(self.large.right, self.guess) <= LEVEL

    @property
    def is_worth_routing(self) -> bool:
        return self.is_solved and self.gap.p_above <= LEVEL

    @property
    def summary(self) -> str:
        """``0.81 against 0.75, 6 points better [-2, 14]``, and what is missing."""
        scores = f"{self.large.mean_score:.3f} against {self.small.mean_score:.3f}"
        if not self.is_solved:
            return f"{scores}; not solved: a guess gets {self.guess:.3f}"
        return (
            f"{scores}, {100 * self.gap.value:.1f} points better [{100 * self.gap.low:.1f}, {100 * self.gap.high:.1f}]"
        )


@dataclass(frozen=True, eq=False)
class RuleMixtureScores:
    """A task at a saving: each item by the first of ``rules`` with a probability, else by the second.

    ``score``     [items] of the judged ones; its mean is the expected score at exactly this saving. ``dealt``: right
                  [items] with one rule drawn for each.
    ``attained``  the saving there of the probability that saves as much on validation; ``neighbours``: of either rule.
    """

    name: str
    score: ByItem
    dealt: ByItem
    attained: float
    neighbours: tuple[float, float]
    rules: tuple[SwitchingRule, ...] = ()


class RoutingRules:
    """Switching rules of a pair. ``name``: the pair's, in sentences.

    ``savings``: those of the paper's scores, by its own cost; the proposed rule must save the first.
    """

    def __init__(self, answers: PairAnswers, size: PairSampleSizes, name: str, savings: tuple[float, ...]):
        self.answers, self.size, self.savings, self._name = answers, size, savings, name
        self._families: dict[tuple[str, SwitchingConstants], dict[SwitchingRule, ItemAnswers]] = {}

    # ------------------------------------------------------------ tasks

    @cached_property
    def comparisons(self) -> dict[str, PairComparison]:
        """Task → both models on validation."""
        return {task: self._compared(task) for task in self.answers.scorable_tasks}

    def _compared(self, task: str) -> PairComparison:
        small, large = (
            self.answers.answer_by_one_model(model, task, "validate", self.size.compared) for model in (SMALL, LARGE)
        )
        gap = estimate_accuracy_drop(large.right, small.right, threshold=WORTH_ROUTING)
        return PairComparison(small, large, self.answers.get_task(task).guess(), gap)

    @property
    def tasks_worth_routing(self) -> list[str]:
        """Tasks worth routing, the one of the largest gap first."""
        worth = [task for task, both in self.comparisons.items() if both.is_worth_routing]
        return sorted(worth, key=lambda task: -self.comparisons[task].gap.value)

    @property
    def written_tasks_worth_routing(self) -> list[str]:
        """The ``tasks_worth_routing`` with written answers instead of options."""
        return [task for task in self.tasks_worth_routing if self.answers.get_task(task).generated]

    @property
    def decodable_tasks(self) -> list[str]:
        """Decodable tasks: those worth routing first, then others, then texts without a score. Never empty."""
        if self.answers.models.absent_quality is not None:
            return [TEXTS]
        others = [
            task
            for task, scored_task in self.answers.scorable_tasks.items()
            if scored_task.generated and task not in self.tasks_worth_routing
        ]
        return [*self.written_tasks_worth_routing, *others, TEXTS]

    @property
    def tasks_not_worth_routing_note(self) -> str:
        """One sentence about tasks that cannot distinguish the models, with their intervals."""
        reasons = "; ".join(
            f"{task} ({both.summary})"
            for task, both in self.comparisons.items()
            if task not in self.tasks_worth_routing
        )
        return (
            f"{self._name}: not shown on {self.size.compared} validation items that the large model beats a guess and "
            f"is {100 * WORTH_ROUTING:.0f} points better: {reasons or 'no task'}"
        )

    def absent_tasks(self) -> Absent | None:
        """Why no task can be scored; None if one can."""
        if self.answers.scorable_tasks:
            return None
        unmeasured = self.answers.models.large.task_scores.published.absent_by_task
        unread = "; ".join(f"{task}: {absent.reason}" for task, absent in unmeasured.items())
        named = f"name some with --emad-tasks ({unread or 'none is named'})"
        return Absent(f"no task whose answers are right or wrong: {named}")

    def absent_premise(self) -> Absent | None:
        """Why EAD cannot be judged on this pair; None if it can."""
        if absent := self.answers.models.absent_quality or self.absent_tasks():
            return absent
        if self.tasks_worth_routing:
            return None
        return Absent(f"{self.tasks_not_worth_routing_note}; there is nothing to route", "premise")

    # ------------------------------------------------------------ families of rules

    def scale_paper_constants(self, task: str) -> SwitchingConstants:
        """The paper's w and d_min, shortened to a quarter of the median answer."""
        most = max(1, int(self.large_model_median_answer_tokens(task)) // LEAST_MULTIPLE)
        return SwitchingConstants(min(PAPER.window, most), min(PAPER.least_run, most))

    def large_model_median_answer_tokens(self, task: str) -> float:
        """Median tokens of the large model's own answers on validation, or of options."""
        alone = self.answers.answer_by_one_model(LARGE, task, "validate", self.size.tried)
        return float(np.median([len(bits) for bits in alone.entropy_bits]))

    def rolling_entropy_bits(self, task: str, window: int) -> Floats:
        """H̄ of the small model alone on the validation items, bits."""
        alone = self.answers.answer_by_one_model(SMALL, task, "validate", self.size.tried)
        return np.concatenate([rolling_means(bits.tolist(), window) for bits in alone.entropy_bits])

    def try_rules(self, task: str, constants: SwitchingConstants | None = None) -> dict[SwitchingRule, ItemAnswers]:
        """Rules of one w and d_min (by default those of ``constants(task)``) with their validation answers.

        τ takes quantiles, with either model first; each model alone is included.
        """
        own = constants or self.scale_paper_constants(task)
        if (task, own) not in self._families:
            taus = switching_thresholds(self.rolling_entropy_bits(task, own.window), self.size.thresholds)
            rules = [SwitchingRule(tau, own.window, own.least_run, start) for start in (SMALL, LARGE) for tau in taus]
            rules += [self.answers.make_single_model_rule(model) for model in (SMALL, LARGE)]
            done = self.answers.answer_by_switching_rules(rules, task, "validate", self.size.tried)
            self._families[task, own] = dict(zip(rules, done, strict=True))
        return self._families[task, own]

    def find_front_rules(self, task: str, constants: SwitchingConstants | None = None) -> list[SwitchingRule]:
        """Rules whose mixtures score best on validation, by falling share of the large model."""
        tried = self.try_rules(task, constants)
        rules = list(tried)
        front = routing_front_indices(
            [RoutingShareAndScore(done.large_share, done.mean_score) for done in tried.values()]
        )
        return [rules[index] for index in front]

    def evaluate_mixture_at_saving(
        self, task: str, saving: float, constants: SwitchingConstants | None = None
    ) -> RuleMixtureScores | None:
        """The mixture of ``find_front_rules`` that saves exactly ``saving`` on the judged items.

        None if not even the small model saves that much.
        """
        share = self.answers.models.large_share_at_saving(saving)
        return None if share < 0 else self.evaluate_mixture_at_large_share(task, share, constants)

    def evaluate_mixture_at_large_share(
        self, task: str, share: float, constants: SwitchingConstants | None = None
    ) -> RuleMixtureScores:
        """The mixture of ``find_front_rules`` with exactly ``share`` of the judged tokens by the large model."""
        models = self.answers.models
        rules, tried = self.find_front_rules(task, constants), self.try_rules(task, constants)
        judged = self.answers.answer_by_switching_rules(rules, task, "evaluate", self.size.judged)
        rng = np.random.default_rng(self.answers.seed)
        chosen = mix_runs_to_large_share([tried[rule].item_scores_and_token_counts for rule in rules], share, rng)
        mixture = mix_runs_to_large_share(
            [done.item_scores_and_token_counts for done in judged], share, rng, near=chosen.first
        )
        first, second = rules[mixture.first], rules[mixture.second]
        return RuleMixtureScores(
            f"{mixture.probability:.0%} of items by {self.format_rule_name(first)}, {1 - mixture.probability:.0%} by "
            f"{self.format_rule_name(second)}",
            judged[0].right.with_values(mixture.score),
            judged[0].right.with_values(mixture.dealt == 1),
            models.compute_paper_saving(_mixture_share(chosen, judged)),
            (
                models.compute_paper_saving(judged[mixture.first].large_share),
                models.compute_paper_saving(judged[mixture.second].large_share),
            ),
            (first, second),
        )

    def format_rule_name(self, rule: SwitchingRule) -> str:
        """Name of a rule in sentences; the two ends of every family are a model alone."""
        for model, name in ((SMALL, "the small model alone"), (LARGE, "the large model alone")):
            if rule == self.answers.make_single_model_rule(model):
                return name
        return describe_rule(rule)

    def select_rule_for_paper_saving(self, task: str) -> SwitchingRule:
        """One rule, no mixture: the best of those that switch and save the first of ``savings`` on validation.

        If none does, the cheapest.
        """
        tried = self._switching(task)
        most = self.answers.models.large_share_at_saving(self.savings[0])
        enough = {rule: done for rule, done in tried.items() if done.large_share <= most}
        if enough:
            return max(enough, key=lambda rule: enough[rule].mean_score)
        return min(tried, key=lambda rule: tried[rule].large_share)

    def find_rule_nearest_saving(self, task: str, saving: float) -> SwitchingRule:
        """One rule, without a score: of those that switch, the one with the nearest saving on validation."""
        tried = self._switching(task)
        share = self.answers.models.large_share_at_saving(saving)
        return min(tried, key=lambda rule: abs(tried[rule].large_share - share))

    def _switching(self, task: str) -> dict[SwitchingRule, ItemAnswers]:
        alone = {self.answers.make_single_model_rule(model) for model in (SMALL, LARGE)}
        tried = self.try_rules(task)
        return {rule: done for rule, done in tried.items() if rule not in alone} or tried

    # ------------------------------------------------------------ answers

    def answer_validation_items(self, rule: SwitchingRule, task: str) -> ItemAnswers:
        return self.answers.answer_by_switching(rule, task, "validate", self.size.tried)

    def answer_judged_items(self, rule: SwitchingRule, task: str) -> ItemAnswers:
        return self.answers.answer_by_switching(rule, task, "evaluate", self.size.judged)

    def answer_judged_items_alone(self, model: int, task: str) -> ItemAnswers:
        """The items of ``answer_judged_items``, answered by one model at full depth."""
        return self.answers.answer_by_one_model(model, task, "evaluate", self.size.judged)


def _mixture_share(mixture: RoutingMixtureItemScores, judged: Sequence[ItemAnswers]) -> float:
    p, first, second = mixture.probability, judged[mixture.first], judged[mixture.second]
    by_large = p * first.by_large.sum() + (1 - p) * second.by_large.sum()
    return float(by_large / (p * first.emitted.sum() + (1 - p) * second.emitted.sum()))


TURNS = "model by token"  # a figure of ``report.figures``


def make_item_switching_token_table(rules: RoutingRules, task: str) -> Attachments:
    """A table of the first judged item of ``task`` that both models write on, else of the first; empty for options.

    Columns ``entropy, bits`` H_t and ``rolling, bits`` H̄_t, both None in the prompt; ``threshold, bits`` τ.
    """
    rule = rules.select_rule_for_paper_saving(task)
    walks = rules.answer_judged_items(rule, task).walks
    if not walks:
        return Attachments()
    number = next((at for at, walk in enumerate(walks) if 0 < walk.large_model_token_count < len(walk.tokens)), 0)
    prompt = rules.answers.make_prompts(task, "evaluate", len(walks))[number]
    tokenizer = rules.answers.models.large.subject.loaded.tokenizer
    read = [
        _turn_row(piece, "prompt", MODELS[rule.start], None, None, rule.threshold_bits)
        for piece in decode_tokens_singly(tokenizer, prompt.tokens)
    ]
    return Attachments(
        (
            AttachedTable(
                f"a text of {task}: {rules.format_rule_name(rule)}",
                [*read, *_continuation_rows(walks[number], tokenizer, rule.threshold_bits)],
                TURNS,
            ),
        )
    )


def _continuation_rows(walk: SwitchedText, tokenizer: Any, threshold: float) -> list[dict[str, Any]]:
    columns = (decode_tokens_singly(tokenizer, walk.tokens), walk.model, walk.entropy_bits, walk.rolling_bits)
    return [
        _turn_row(piece, "continuation", MODELS[model], float(entropy), float(rolling), threshold)
        for piece, model, entropy, rolling in zip(*columns, strict=True)
    ]


def _turn_row(
    piece: str, part: str, model: str, entropy: float | None, rolling: float | None, threshold: float
) -> dict[str, Any]:
    return {
        "token": piece,
        "part": part,
        "model": model,
        "entropy, bits": entropy,
        "rolling, bits": rolling,
        "threshold, bits": threshold,
    }
