"""Everything of one encoder-decoder's early exits, decoded and read when first asked for, and kept.

Every item is decoded under every rule that a claim asks about, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from emad_ref.evidence.exits.answers import Answered, decoded, prompts
from emad_ref.evidence.exits.consistency import SET_SIZE, SETS, Consistency, different
from emad_ref.evidence.exits.reading import Read, read
from emad_ref.evidence.exits.rules import (
    AS_CODED,
    LEAST_LAYERS,
    LEAST_VOCABULARY,
    RULES,
    THRESHOLD,
    first_amateur,
    has_room,
    minimum_layers,
)
from emad_ref.evidence.exits.tasks import ExitTasks
from emad_ref.evidence.subject import Subject
from emad_ref.models.bundled import bundled_names
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.policy.early_exit import early_exit
from emad_ref.protocol import Prompt
from emad_ref.verdict.scores import difference

SOLVED = 0.05  # level at which full depth must beat an honest guess
PRETRAINED = "emad-t5-tiny"
TWINS = {PRETRAINED: "emad-t5-tiny-tuned", "emad-t5-tiny-tuned": PRETRAINED}


@dataclass(frozen=True)
class Absence:
    """Why no item can be asked: a premise is absent (``not applicable``), or data is (``unmeasured``)."""

    outcome: Literal["not applicable", "unmeasured"]
    reason: str


class Exits:
    """Answers and readings of one encoder-decoder.

    ``beside``: gives the same of another model, by name, under the same study.
    """

    def __init__(self, subject: Subject, beside: Callable[[str], Exits]):
        self.subject, self._beside = subject, beside
        self.asked = ExitTasks(subject)
        self._answered: dict[tuple[str, OperatingPoint], Answered] = {}
        self._read: dict[str, Read] = {}

    @property
    def absence(self) -> Absence | None:
        """What is absent, the first of what every claim about early exits needs; None where items can be asked."""
        loaded = self.subject.loaded
        if not self.subject.seq2seq:
            return Absence("not applicable", "a decoder-only model: the claim is about encoder-decoders")
        if not loaded.trained:
            return Absence("not applicable", "random weights: confidence and score of noise say nothing")
        if loaded.tokenizer is None:
            return Absence("unmeasured", "the model came without a tokenizer, and the tasks are text")
        if not has_room(loaded.geometry):
            few = f"fewer than {LEAST_LAYERS} decoder layers or {LEAST_VOCABULARY} tokens"
            return Absence("not applicable", f"{few}: no room for the paper's settings")
        return Absence("unmeasured", none) if (none := self.asked.none) else None

    # ------------------------------------------------------------ tasks and rules

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that can be asked."""
        return self.asked.names

    @property
    def missing(self) -> Mapping[str, str]:
        """Task that cannot be asked → why."""
        return self.asked.missing

    @property
    def corpus(self) -> str:
        """What verdicts are decided on."""
        return self.asked.corpus

    @property
    def minima(self) -> tuple[int, ...]:
        """The paper's minimum layers at this depth."""
        return minimum_layers(self.subject.stepper.layers)

    @property
    def settings(self) -> list[tuple[str, int]]:
        """(task, minimum layer) of every comparison."""
        return [(task, minimum) for task in self.tasks for minimum in self.minima]

    @cached_property
    def unsolved(self) -> Mapping[str, str]:
        """Task on which full depth is not shown to beat an honest guess → why: no exit can cost anything there."""
        reasons = {task: self._not_solved(task) for task in self.tasks}
        return {task: reason for task, reason in reasons.items() if reason}

    def _not_solved(self, task: str) -> str:
        score, guess = self.under(task, self.full).exited.score, self.asked.guessed(task)
        rng = np.random.default_rng(self.subject.seed)
        beaten = difference(score, score.like(guess), threshold=0.0, rng=rng, unit="score above a guess")
        if beaten.p_above <= SOLVED:
            return ""
        return f"not solved: full depth scores {score.values.mean():.3f}, an honest guess {guess.mean():.3f}"

    @property
    def counting(self) -> list[tuple[str, int]]:
        """``settings`` of the tasks that are solved."""
        return [(task, minimum) for task, minimum in self.settings if task not in self.unsolved]

    @property
    def full(self) -> OperatingPoint:
        return self.subject.full

    def point(
        self, rule: str, minimum: int, threshold: float = THRESHOLD, schedule: ScheduleName = "copying"
    ) -> OperatingPoint:
        """The point of a row of ``RULES``, or of JSD ``AS_CODED``."""
        stepper = self.subject.stepper
        sizes = stepper.layers, stepper.vocabulary
        if rule == AS_CODED:
            first = first_amateur(minimum)
            return early_exit(
                "jsd_contrast", *sizes, minimum, threshold, schedule=schedule, emit="expert", amateurs_from=first
            )
        signal, pruning = RULES[rule]
        return early_exit(signal, *sizes, minimum, threshold, pruning=pruning, schedule=schedule)

    # ------------------------------------------------------------ decoded and read

    def prompts(self, task: str) -> list[Prompt]:
        """The decoder's start token, after each item's source."""
        return prompts(self.subject, self.asked.items(task))

    def answered(
        self, task: str, rule: str, minimum: int, threshold: float = THRESHOLD, schedule: ScheduleName = "copying"
    ) -> Answered:
        """All items of ``task`` under a row of ``RULES``."""
        return self.under(task, self.point(rule, minimum, threshold, schedule))

    def under(self, task: str, point: OperatingPoint) -> Answered:
        """All items of ``task`` under ``point``."""
        if (task, point) not in self._answered:
            self._answered[task, point] = decoded(self.subject, task, self.asked.items(task), point)
        return self._answered[task, point]

    def read(self, task: str) -> Read:
        """What every layer says of the reference answers; contrasts from the least minimum layer on."""
        if task not in self._read:
            self._read[task] = read(self.subject, self.prompts(task), self.asked.items(task), self.minima[0])
        return self._read[task]

    def consistency(self, task: str, thresholds: tuple[float, ...]) -> Consistency:
        """How far softmax response at ``thresholds`` strays from full depth: on judged items, and in sets of others.

        Judged items about a text that another is about are left out, so that what is drawn is independent.
        """
        points = [self.point("softmax", self.minima[0], threshold) for threshold in thresholds]
        early = [self.under(task, point) for point in points]
        _, first = np.unique(self.asked.items(task).cluster, return_index=True)
        pool = different(task, self.under(task, self.full), early)[first]
        others = self.asked.elsewhere(task, SET_SIZE * SETS[self.subject.budget.name], by=SET_SIZE)
        sets = np.empty((0, SET_SIZE, len(points)))
        if others.pairs:
            full, *apart = (decoded(self.subject, task, others, point) for point in (self.full, *points))
            sets = different(task, full, apart).reshape(-1, SET_SIZE, len(points))
        return Consistency(pool, sets, np.array([one.exited.mean_exit for one in early]))

    # ------------------------------------------------------------ the same model before or after tuning

    @property
    def pretrained(self) -> bool:
        """Whether this is the model before tuning."""
        return self.subject.name == PRETRAINED

    @cached_property
    def twin(self) -> Exits | str:
        """The same model before or after tuning; or why there is none."""
        name = TWINS.get(self.subject.name)
        if name is None:
            return f"only {' and '.join(TWINS)} are one model before and after tuning"
        if name not in bundled_names():
            return f"{name} does not come with this package"
        return self._beside(name)
