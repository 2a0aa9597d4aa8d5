"""Tasks of one model: items, and which of them are right at an operating point, by replay or by decoding.

Two kinds stand side by side: the world's own, where the corpus is of the world, and those of lm-eval's that
the study names (``published``). Both judge. A margin is chosen on the world's validation tasks alone: published
tasks have no split to spare for it, and a run without them must choose the same.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.evidence.published import Published
from emad_ref.evidence.subject import Subject
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Bools
from emad_ref.replay import depths
from emad_ref.tasks.scoring import Item, correct, item_of, runs, sequences_of
from emad_ref.text import world
from emad_ref.text.documents import Split
from emad_ref.verdict.units import ByItem

VALIDATED_ITEMS = 150  # per task, when a margin is chosen
GENERATED_LINE = 24  # new tokens that a one-line program may take


class Scored:
    """Answers of one model, taken when first asked for and kept. ``published``: lm-eval's tasks."""

    def __init__(self, subject: Subject):
        self._subject, self.published = subject, Published(subject)

    @property
    def tasks(self) -> list[str]:
        """Every task of right and wrong answers that this run scores."""
        return [*self._own, *self.published.answered]

    @cached_property
    def _own(self) -> dict[str, list[Item]]:
        """The world's tasks, where the corpus is of the world."""
        return self._items("evaluate", self._subject.budget.items)

    def _items(self, split: Split, count: int) -> dict[str, list[Item]]:
        if not self._subject.corpus.startswith("world:"):
            return {}
        return {
            task: [
                item_of(example, self._subject.tokenizer, self._subject.opening)
                for example in world.examples(task, split, count, self._subject.seed)
            ]
            for task in world.TASKS
        }

    @cached_property
    def _task_traces(self) -> dict[str, Trace]:
        return {
            task: self._subject.trace(sequences_of(items), task)
            for task, items in self._own.items()
            if items[0].example.scoring != "runs"
        }

    @cached_property
    def validated(self) -> list[tuple[list[Item], Trace]]:
        """Items and traces of the replayed tasks on the validation split: programs would cost a decode per margin."""
        count = min(VALIDATED_ITEMS, self._subject.budget.items)
        return [
            (items, self._subject.trace(sequences_of(items), f"validate, {task}"))
            for task, items in self._items("validate", count).items()
            if items[0].example.scoring != "runs"
        ]

    def validation_drop(self, point: OperatingPoint) -> float:
        """Validation accuracy lost, mean over tasks: one task of 150 items moves in steps larger than the bound."""
        drops = []
        for items, trace in self.validated:
            full, adaptive = (correct(items, trace, depths(trace, p)).mean() for p in (self._subject.full, point))
            drops.append(float(full - adaptive))
        return float(np.mean(drops))

    @cached_property
    def _generated(self) -> dict[tuple[str, OperatingPoint], ByItem]:
        return {}

    def correct(self, task: str, point: OperatingPoint) -> ByItem:
        """[items] bool, whether each item of ``task`` is right at ``point``: by replay, or by decoding for programs."""
        if task not in self._own:
            return self.published.correct(task, point)
        items = self._own[task]
        if task in self._task_traces:
            trace = self._task_traces[task]
            return ByItem.distinct(correct(items, trace, depths(trace, point)))
        key = (task, point)
        if key not in self._generated:
            self._generated[key] = ByItem.distinct(self._run_programs(items, point))
        return self._generated[key]

    @property
    def replayed(self) -> list[str]:
        """The world's tasks that one trace decides at every point: neither its programs nor what lm-eval scores."""
        return list(self._task_traces)

    def accuracy(self, point: OperatingPoint) -> dict[str, tuple[float, float]]:
        """task → (accuracy at full depth, accuracy under ``point``)."""
        return {
            task: (
                float(self.correct(task, self._subject.full).values.mean()),
                float(self.correct(task, point).values.mean()),
            )
            for task in self.tasks
        }

    def _run_programs(self, items: list[Item], point: OperatingPoint) -> Bools:
        tokenizer = self._subject.tokenizer
        newline = frozenset(tokenizer.encode("\n", add_special_tokens=False))
        right = []
        with self._subject.open(point, max_rows=32) as decoder:
            for start in range(0, len(items), 32):
                batch = items[start : start + 32]
                record = decoder.generate([Prompt(item.prompt) for item in batch], GENERATED_LINE, newline)
                right += [
                    runs(item.example, tokenizer.decode(emitted.tolist()))
                    for item, emitted in zip(batch, record.emitted, strict=True)
                ]
        return np.array(right, dtype=bool)

    def chance(self, task: str) -> float:
        """Accuracy of guessing."""
        if task not in self._own:
            return self.published.chance(task)
        return float(np.mean([item.example.chance for item in self._own[task]]))
