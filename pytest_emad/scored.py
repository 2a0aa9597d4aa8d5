"""Tasks of one model: items, and which of them are right at an operating point, by replay or by decoding.

Two kinds stand side by side: the world's own, where the corpus is of the world, and those of lm-eval's that
``--emad-tasks`` names (``harnessed``). Both judge. A margin is chosen on the world's validation tasks alone: published
tasks have no split to spare for it, and a run without them must choose the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Bools
from emad_ref.replay import depths
from emad_ref.sweep.losses import Loss
from emad_ref.tasks.scoring import Item, correct, item_of, runs, sequences_of
from emad_ref.text import world
from emad_ref.text.documents import Split
from emad_ref.verdict.claims import Claim, Verdict
from emad_ref.verdict.judge import PointEvidence
from emad_ref.verdict.legs import row, unseen
from pytest_emad.harnessed import Harnessed

if TYPE_CHECKING:
    from pytest_emad.session import Evidence

VALIDATED_ITEMS = 150  # per task, when a margin is chosen
GENERATED_LINE = 24  # new tokens that a one-line program may take


class Scored:
    """Answers of one model's evidence, taken when first asked for and kept."""

    def __init__(self, evidence: Evidence):
        self._evidence = evidence

    @cached_property
    def harnessed(self) -> Harnessed:
        """Published tasks, by lm-eval."""
        return Harnessed(self._evidence)

    @property
    def tasks(self) -> list[str]:
        """Every task of right and wrong answers that this run scores."""
        return [*self._own, *self.harnessed.answered]

    def judged(self, loss: Loss) -> PointEvidence:
        """What F1 judges at a point put forward: ``Evidence.at``, and perplexity tasks as further corpora."""
        held = self._evidence.at(loss)
        return replace(held, perplexity={**held.perplexity, **self.harnessed.corpora(loss.point)})

    def with_unmeasured(self, verdict: Verdict, claim: Claim) -> Verdict:
        """The verdict with a leg for every task asked for that could not be scored: unseen is not survived."""
        unmeasured = self.harnessed.unmeasured
        if verdict.verdict == "not applicable" or not unmeasured:
            return verdict
        missing = [unseen(f"task {name}", reason) for name, reason in unmeasured.items()]
        return row(claim, verdict.model, [*verdict.legs, *missing])

    @cached_property
    def _own(self) -> dict[str, list[Item]]:
        """The world's tasks, where the corpus is of the world."""
        return self._items("evaluate", self._evidence.budget.items)

    def _items(self, split: Split, count: int) -> dict[str, list[Item]]:
        if not self._evidence.corpus.startswith("world:"):
            return {}
        return {
            task: [
                item_of(example, self._evidence.tokenizer, self._evidence.opening)
                for example in world.examples(task, split, count, self._evidence.seed)
            ]
            for task in world.TASKS
        }

    @cached_property
    def _task_traces(self) -> dict[str, Trace]:
        return {
            task: self._evidence.trace(sequences_of(items), task)
            for task, items in self._own.items()
            if items[0].example.scoring != "runs"
        }

    @cached_property
    def validated(self) -> list[tuple[list[Item], Trace]]:
        """Items and traces of the replayed tasks on the validation split: programs would cost a decode per margin."""
        count = min(VALIDATED_ITEMS, self._evidence.budget.items)
        return [
            (items, self._evidence.trace(sequences_of(items), f"validate, {task}"))
            for task, items in self._items("validate", count).items()
            if items[0].example.scoring != "runs"
        ]

    def validation_drop(self, point: OperatingPoint) -> float:
        """Validation accuracy lost, mean over tasks: one task of 150 items moves in steps larger than the bound."""
        drops = []
        for items, trace in self.validated:
            full, adaptive = (correct(items, trace, depths(trace, p)).mean() for p in (self._evidence.full, point))
            drops.append(float(full - adaptive))
        return float(np.mean(drops))

    @cached_property
    def _generated(self) -> dict[tuple[str, OperatingPoint], Bools]:
        return {}

    def correct(self, task: str, point: OperatingPoint) -> Bools:
        """[items] whether each item of ``task`` is right under ``point``: by replay, or by decoding for programs."""
        if task not in self._own:
            return self.harnessed.correct(task, point)
        items = self._own[task]
        if task in self._task_traces:
            trace = self._task_traces[task]
            return correct(items, trace, depths(trace, point))
        key = (task, point)
        if key not in self._generated:
            self._generated[key] = self._run_programs(items, point)
        return self._generated[key]

    @property
    def replayed(self) -> list[str]:
        """The world's tasks that one trace decides at every point: neither its programs nor what lm-eval scores."""
        return list(self._task_traces)

    def accuracy(self, point: OperatingPoint) -> dict[str, tuple[float, float]]:
        """task → (accuracy at full depth, accuracy under ``point``)."""
        return {
            task: (float(self.correct(task, self._evidence.full).mean()), float(self.correct(task, point).mean()))
            for task in self.tasks
        }

    def _run_programs(self, items: list[Item], point: OperatingPoint) -> Bools:
        tokenizer = self._evidence.tokenizer
        newline = frozenset(tokenizer.encode("\n", add_special_tokens=False))
        right = []
        with self._evidence.open(point, max_rows=32) as decoder:
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
            return self.harnessed.chance(task)
        return float(np.mean([item.example.chance for item in self._own[task]]))
