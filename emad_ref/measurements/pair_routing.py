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

from emad_ref.decoding.prefix_tree import SwitchedText
from emad_ref.decoding.switching import LARGE, MODELS, SMALL, SwitchingRule, rolling_means
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.operating_points import token_texts
from emad_ref.measurements.pair_answers import TEXTS, ItemAnswers, PairAnswers, describe_rule
from emad_ref.measurements.study import PairSizes
from emad_ref.record import Floats
from emad_ref.statistics.accuracy import estimate_accuracy_drop, guessing_pvalue
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import LEVEL
from emad_ref.statistics.units import ByItem
from emad_ref.sweep.front import RoutingMixture, RoutingRun, mix_rules, routing_front_indices, switching_thresholds

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
    def solved(self) -> bool:
        """Whether the large model is shown to beat the guess; a repeated item counts once."""
        return guessing_pvalue(self.large.right, self.guess) <= LEVEL

    @property
    def worth_routing(self) -> bool:
        return self.solved and self.gap.p_above <= LEVEL

    @property
    def standing(self) -> str:
        """``0.81 against 0.75, 6 points better [-2, 14]``, and what is missing."""
        scores = f"{self.large.score:.3f} against {self.small.score:.3f}"
        if not self.solved:
            return f"{scores}; not solved: a guess gets {self.guess:.3f}"
        return (
            f"{scores}, {100 * self.gap.value:.1f} points better [{100 * self.gap.low:.1f}, {100 * self.gap.high:.1f}]"
        )


@dataclass(frozen=True, eq=False)
class RoutedTask:
    """A task at a saving: each item by the first of ``rules`` with a probability, else by the second.

    ``score``     [items] of the judged ones; its mean is the expected score at exactly the saving there. ``dealt``:
                  right [items] with one rule drawn for each.
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

    def __init__(self, answers: PairAnswers, size: PairSizes, name: str, savings: tuple[float, ...]):
        self.answers, self.size, self.savings, self._name = answers, size, savings, name
        self._families: dict[tuple[str, SwitchingConstants], dict[SwitchingRule, ItemAnswers]] = {}

    # ------------------------------------------------------------ tasks

    @cached_property
    def compared(self) -> dict[str, PairComparison]:
        """Task → both models on validation."""
        return {task: self._compared(task) for task in self.answers.scored}

    def _compared(self, task: str) -> PairComparison:
        small, large = (self.answers.alone(model, task, "validate", self.size.compared) for model in (SMALL, LARGE))
        gap = estimate_accuracy_drop(large.right, small.right, threshold=WORTH_ROUTING)
        return PairComparison(small, large, self.answers.task(task).guess(), gap)

    @property
    def tasks(self) -> list[str]:
        """Tasks worth routing, the one of the largest gap first."""
        worth = [task for task, both in self.compared.items() if both.worth_routing]
        return sorted(worth, key=lambda task: -self.compared[task].gap.value)

    @property
    def written(self) -> list[str]:
        """The ``tasks`` with written answers instead of options."""
        return [task for task in self.tasks if self.answers.task(task).generated]

    @property
    def writable(self) -> list[str]:
        """What can be decoded: tasks worth routing first, then other tasks, then texts without a score. Never empty."""
        if self.answers.models.without_quality:
            return [TEXTS]
        others = [
            task
            for task, scored_task in self.answers.scored.items()
            if scored_task.generated and task not in self.tasks
        ]
        return [*self.written, *others, TEXTS]

    @property
    def note(self) -> str:
        """One sentence: tasks that cannot tell the models apart, with their interval."""
        reasons = "; ".join(
            f"{task} ({both.standing})" for task, both in self.compared.items() if task not in self.tasks
        )
        return (
            f"{self._name}: not shown on {self.size.compared} validation items that the large model beats a guess and "
            f"is {100 * WORTH_ROUTING:.0f} points better: {reasons or 'no task'}"
        )

    def missing(self) -> str:
        """Why there is no task; empty if there is one."""
        if self.answers.scored:
            return ""
        unmeasured = self.answers.models.large.scored.published.unmeasured
        unread = "; ".join(f"{task}: {reason}" for task, reason in unmeasured.items())
        return f"no task whose answers are right or wrong: name some with --emad-tasks ({unread or 'none is named'})"

    def premise(self) -> str:
        """Why EAD cannot be judged on this pair; empty if it can."""
        if reason := self.answers.models.without_quality or self.missing():
            return reason
        return "" if self.tasks else f"{self.note}; there is nothing to route"

    # ------------------------------------------------------------ families of rules

    def constants(self, task: str) -> SwitchingConstants:
        """The paper's w and d_min, shortened to a quarter of the median answer."""
        most = max(1, int(self.median_answer(task)) // LEAST_MULTIPLE)
        return SwitchingConstants(min(PAPER.window, most), min(PAPER.least_run, most))

    def median_answer(self, task: str) -> float:
        """Median tokens of the large model's own answers on validation, or of options."""
        alone = self.answers.alone(LARGE, task, "validate", self.size.tried)
        return float(np.median([len(bits) for bits in alone.entropy_bits]))

    def rolling_bits(self, task: str, window: int) -> Floats:
        """H̄ of the small model alone on the validation items, bits."""
        alone = self.answers.alone(SMALL, task, "validate", self.size.tried)
        return np.concatenate([rolling_means(bits.tolist(), window) for bits in alone.entropy_bits])

    def tried(self, task: str, constants: SwitchingConstants | None = None) -> dict[SwitchingRule, ItemAnswers]:
        """Rules of one w and d_min (by default those of ``constants(task)``) with their validation answers.

        τ goes by quantile with either model first; either model alone is included.
        """
        own = constants or self.constants(task)
        if (task, own) not in self._families:
            taus = switching_thresholds(self.rolling_bits(task, own.window), self.size.thresholds)
            rules = [SwitchingRule(tau, own.window, own.least_run, start) for start in (SMALL, LARGE) for tau in taus]
            rules += [self.answers.never(model) for model in (SMALL, LARGE)]
            done = self.answers.switched_all(rules, task, "validate", self.size.tried)
            self._families[task, own] = dict(zip(rules, done, strict=True))
        return self._families[task, own]

    def front(self, task: str, constants: SwitchingConstants | None = None) -> list[SwitchingRule]:
        """Rules whose mixtures score best on validation, by falling share of the large model."""
        tried = self.tried(task, constants)
        rules = list(tried)
        front = routing_front_indices([RoutingRun(done.large_share, done.score) for done in tried.values()])
        return [rules[index] for index in front]

    def routed(self, task: str, saving: float, constants: SwitchingConstants | None = None) -> RoutedTask | None:
        """The mixture of ``front`` that saves exactly ``saving`` on the judged items.

        None if not even the small model saves that much.
        """
        models = self.answers.models
        share = models.share_for(saving)
        if share < 0:
            return None
        rules, tried = self.front(task, constants), self.tried(task, constants)
        judged = self.answers.switched_all(rules, task, "evaluate", self.size.judged)
        rng = np.random.default_rng(self.answers.seed)
        chosen = mix_rules([tried[rule].ran for rule in rules], share, rng)
        mixture = mix_rules([done.ran for done in judged], share, rng, near=chosen.first)
        first, second = rules[mixture.first], rules[mixture.second]
        return RoutedTask(
            f"{mixture.probability:.0%} of items by {self.called(first)}, {1 - mixture.probability:.0%} by "
            f"{self.called(second)}",
            judged[0].right.with_values(mixture.score),
            judged[0].right.with_values(mixture.dealt == 1),
            models.saving(_mixture_share(chosen, judged)),
            (models.saving(judged[mixture.first].large_share), models.saving(judged[mixture.second].large_share)),
            (first, second),
        )

    def called(self, rule: SwitchingRule) -> str:
        """Name of a rule in sentences; the two ends of every family are a model alone."""
        for model, name in ((SMALL, "the small model alone"), (LARGE, "the large model alone")):
            if rule == self.answers.never(model):
                return name
        return describe_rule(rule)

    def put_forward(self, task: str) -> SwitchingRule:
        """One rule, no mixture: the best of those that switch and save the first of ``savings`` on validation.

        If none does, the cheapest.
        """
        tried = self._switching(task)
        most = self.answers.models.share_for(self.savings[0])
        enough = {rule: done for rule, done in tried.items() if done.large_share <= most}
        if enough:
            return max(enough, key=lambda rule: enough[rule].score)
        return min(tried, key=lambda rule: tried[rule].large_share)

    def nearest(self, task: str, saving: float) -> SwitchingRule:
        """One rule, without a score: of those that switch, the one with the nearest saving on validation."""
        tried = self._switching(task)
        share = self.answers.models.share_for(saving)
        return min(tried, key=lambda rule: abs(tried[rule].large_share - share))

    def _switching(self, task: str) -> dict[SwitchingRule, ItemAnswers]:
        alone = {self.answers.never(model) for model in (SMALL, LARGE)}
        tried = self.tried(task)
        return {rule: done for rule, done in tried.items() if rule not in alone} or tried

    # ------------------------------------------------------------ what they answer

    def validated(self, rule: SwitchingRule, task: str) -> ItemAnswers:
        return self.answers.switched(rule, task, "validate", self.size.tried)

    def judged(self, rule: SwitchingRule, task: str) -> ItemAnswers:
        return self.answers.switched(rule, task, "evaluate", self.size.judged)

    def judged_alone(self, model: int, task: str) -> ItemAnswers:
        """The items of ``judged``, answered by one model at full depth."""
        return self.answers.alone(model, task, "evaluate", self.size.judged)


def _mixture_share(mixture: RoutingMixture, judged: Sequence[ItemAnswers]) -> float:
    p, first, second = mixture.probability, judged[mixture.first], judged[mixture.second]
    by_large = p * first.by_large.sum() + (1 - p) * second.by_large.sum()
    return float(by_large / (p * first.emitted.sum() + (1 - p) * second.emitted.sum()))


TURNS = "model by token"  # a figure of ``report.figures``


def turn_table(rules: RoutingRules, task: str) -> Attachments:
    """A table of the first judged item of ``task`` that both models write on, else of the first; empty for options.

    Columns ``entropy, bits`` H_t and ``rolling, bits`` H̄_t, both None in the prompt; ``threshold, bits`` τ.
    """
    rule = rules.put_forward(task)
    walks = rules.judged(rule, task).walks
    if not walks:
        return Attachments()
    number = next((at for at, walk in enumerate(walks) if 0 < walk.large_model_token_count < len(walk.tokens)), 0)
    prompt = rules.answers.prompts(task, "evaluate", len(walks))[number]
    tokenizer = rules.answers.models.large.subject.loaded.tokenizer
    read = [
        _turn_row(piece, "prompt", MODELS[rule.start], None, None, rule.threshold_bits)
        for piece in token_texts(tokenizer, prompt.tokens)
    ]
    return Attachments(
        (
            AttachedTable(
                f"a text of {task}: {rules.called(rule)}",
                [*read, *_continuation_rows(walks[number], tokenizer, rule.threshold_bits)],
                TURNS,
            ),
        )
    )


def _continuation_rows(walk: SwitchedText, tokenizer: Any, threshold: float) -> list[dict[str, Any]]:
    columns = (token_texts(tokenizer, walk.tokens), walk.model, walk.entropy_bits, walk.rolling_bits)
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
