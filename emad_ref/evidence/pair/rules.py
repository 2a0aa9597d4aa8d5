"""Which tasks a pair is worth routing on, and which switching rule validation puts forward for a saving.

    validation   which tasks the large model is better at; τ for several shares of the large model; what each costs
    evaluation   the points so chosen, speculative decoding (drafted by the small model, or by the first layers of the
                 large one) and the large model alone, on the same items

Nothing is chosen on what is judged.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from emad_ref.decoding.switching import LARGE, SMALL, Switched, SwitchingRule
from emad_ref.evidence.pair.answered import Answered
from emad_ref.evidence.pair.answers import Answers
from emad_ref.evidence.pair.sizes import Sizes
from emad_ref.record import Floats
from emad_ref.sweep.routing import Routing, best_within_share, threshold_for_share
from emad_ref.text import world

WORTH_ROUTING = 0.10  # accuracy by which the large model must be better on a task
SHARES = (0.1, 0.5, 0.9)  # of the small model's rolling entropies above τ: thresholds tried on validation


class Rules:
    """``name``: the pair's, in sentences. ``savings``: at which the paper reports scores, by its own cost; the rule put
    forward must save the first."""

    def __init__(self, answers: Answers, size: Sizes, name: str, savings: tuple[float, ...]):
        self.answers, self.size, self.savings, self._name = answers, size, savings, name
        self._rolling_bits: dict[str, Floats] = {}

    # ------------------------------------------------------------ tasks

    @cached_property
    def compared(self) -> dict[str, tuple[float, float]]:
        """Task → validation score of the small and of the large model."""
        count, score = self.size.compared, self.answers.score
        return {
            task: (score(SMALL, task, "validate", count), score(LARGE, task, "validate", count)) for task in world.TASKS
        }

    @property
    def tasks(self) -> list[str]:
        """Tasks worth routing, the one of the largest gap first."""
        gaps = {task: large - small for task, (small, large) in self.compared.items()}
        return sorted((task for task in gaps if gaps[task] >= WORTH_ROUTING), key=lambda task: -gaps[task])

    @property
    def note(self) -> str:
        """One sentence: where the pair is useless."""
        said = ", ".join(
            f"{task} ({large:.3f} against {small:.3f})"
            for task, (small, large) in self.compared.items()
            if task not in self.tasks
        )
        return (
            f"{self._name}: the pair is useless on {said or 'no task'}: the large model is not "
            f"{100 * WORTH_ROUTING:.0f} points better there on {self.size.compared} validation items"
        )

    def premise(self) -> str:
        """Why EAD cannot be judged on this pair; empty where it can."""
        if reason := self.answers.models.without_quality:
            return reason
        return "" if self.tasks else f"{self.note}; there is nothing to route"

    # ------------------------------------------------------------ thresholds

    def rolling_bits(self, task: str) -> Floats:
        """H̄ of the small model alone on the validation items, bits."""
        if task not in self._rolling_bits:
            never = SwitchingRule(float(np.log2(self.answers.models.vocabulary)), start=SMALL)
            (done,) = self.validated(never, task).runs
            assert isinstance(done, Switched)
            self._rolling_bits[task] = np.concatenate(done.rolling_bits)
        return self._rolling_bits[task]

    def tried(self, task: str) -> dict[SwitchingRule, Routing]:
        """Rules with the paper's w and d_min, τ for several shares and either model first, as validation found them."""
        thresholds = [threshold_for_share(self.rolling_bits(task), share) for share in SHARES]
        rules = [SwitchingRule(tau, start=start) for start in (SMALL, LARGE) for tau in thresholds]
        found = {rule: self.validated(rule, task) for rule in rules}
        return {rule: Routing(rule.threshold_bits, done.large_share, done.score) for rule, done in found.items()}

    def chosen(self, task: str, saving: float) -> SwitchingRule | None:
        """The rule of highest validation score among those that save at least ``saving``; None where none does."""
        tried = self.tried(task)
        best = best_within_share(list(tried.values()), self.answers.models.share_for(saving))
        return next((rule for rule, routing in tried.items() if routing is best), None)

    def put_forward(self, task: str) -> SwitchingRule:
        """The rule of highest validation score that saves the first of ``savings``; where none does, the cheapest."""
        rule = self.chosen(task, self.savings[0])
        return rule or min(self.tried(task).items(), key=lambda tried: tried[1].large_share)[0]

    # ------------------------------------------------------------ what they answer

    def validated(self, rule: SwitchingRule, task: str) -> Answered:
        return self.answers.switched(rule, task, "validate", self.size.tried)

    def judged(self, rule: SwitchingRule, task: str) -> Answered:
        return self.answers.switched(rule, task, "evaluate", self.size.judged)

    def judged_alone(self, model: int, task: str) -> Answered:
        """The items of ``judged``, answered by one model at full depth."""
        return self.answers.alone(model, task, "evaluate", self.size.judged)
