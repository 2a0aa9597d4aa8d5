"""Everything of one encoder-decoder's early exits, decoded and read when first asked for, and kept.

Every item is decoded under every rule that a claim asks about, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from emad_ref.evidence.exits.answers import Answered, decoded, prompts
from emad_ref.evidence.exits.reading import Read, read
from emad_ref.evidence.exits.rules import LEAST_LAYERS, LEAST_VOCABULARY, RULES, THRESHOLD, has_room, minimum_layers
from emad_ref.evidence.exits.tasks import ExitTasks
from emad_ref.evidence.subject import Subject
from emad_ref.models.loading import bundled_names
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.policy.early_exit import early_exit
from emad_ref.protocol import Prompt

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

    @property
    def full(self) -> OperatingPoint:
        return self.subject.full

    def point(
        self, rule: str, minimum: int, threshold: float = THRESHOLD, schedule: ScheduleName = "copying"
    ) -> OperatingPoint:
        """The point of a row of ``RULES``."""
        signal, pruning = RULES[rule]
        stepper = self.subject.stepper
        return early_exit(
            signal, stepper.layers, stepper.vocabulary, minimum, threshold, pruning=pruning, schedule=schedule
        )

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
            targets = self.asked.items(task).targets
            self._read[task] = read(self.subject, self.prompts(task), targets, self.minima[0])
        return self._read[task]

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
