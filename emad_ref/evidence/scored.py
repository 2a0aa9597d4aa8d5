"""Tasks of one model: items, and which of them are right at an operating point, by replay or by decoding.

Two kinds stand side by side: the world's own, where the corpus is of the world, and those of lm-eval's that
the study names (``published``). Both judge. A margin is chosen on the world's validation tasks alone: published
tasks have no split to spare for it, and a run without them must choose the same.

Whether a task counts at a point is said in one place, ``verdict.counting``; here is measured what it asks for: who is
right, what a guess gets right, what the point saves on the task's own sequences.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from emad_ref.calibration.trace import TokenSequence, Trace
from emad_ref.evidence.published import FOREIGN_ROWS, Published
from emad_ref.evidence.subject import Subject
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Bools
from emad_ref.replay import Ladder
from emad_ref.sweep.losses import full_flops, net_saving
from emad_ref.tasks.scoring import Item, clusters, correct, item_of, majority, runs, sequences_of
from emad_ref.text import world
from emad_ref.text.documents import Split
from emad_ref.verdict.counting import TaskAt
from emad_ref.verdict.units import ByItem

VALIDATED_ITEMS = 400  # per task, when a margin is chosen: steps of 0.25 points, where the bound is 0.5
ROWS = 32  # programs decoded together
GENERATED_LINE = 24  # new tokens that a one-line program may take


class Played:
    """Items of a task beside the trace of their reference answers: who is right, and what is saved, at any point.

    Programs are run, not replayed: of them the trace only says what is saved on lines like those they are asked for.
    """

    def __init__(self, items: list[Item], trace: Trace, geometry: Geometry):
        self.items, self.replayable = items, items[0].example.scoring != "runs"
        self._ladder, self._geometry, self._full = Ladder(trace), geometry, full_flops(trace, geometry)
        self._at: dict[OperatingPoint, tuple[ByItem | None, float]] = {}

    def right(self, point: OperatingPoint) -> ByItem:
        """[items] bool."""
        right, _ = self._play(point)
        assert right is not None, "a program is run, not replayed"
        return right

    def saving(self, point: OperatingPoint) -> float:
        """Net share of the decode FLOPs of these sequences."""
        return self._play(point)[1]

    def of(self, values: Bools) -> ByItem:
        """[items] ``values`` in the clusters of these items."""
        return ByItem(values, clusters(self.items))

    def _play(self, point: OperatingPoint) -> tuple[ByItem | None, float]:
        if point not in self._at:
            replayed, trace = self._ladder.replay(point), self._ladder.trace
            right = self.of(correct(self.items, trace, replayed.depth)) if self.replayable else None
            self._at[point] = right, net_saving(trace, self._geometry, replayed, self._full)
        return self._at[point]


class Scored:
    """Answers of one model, taken when first asked for and kept. ``published``: lm-eval's tasks."""

    def __init__(self, subject: Subject):
        self._subject, self.published = subject, Published(subject)
        self._generated: dict[tuple[str, OperatingPoint], ByItem] = {}

    @property
    def tasks(self) -> list[str]:
        """Every task of right and wrong answers that this run scores."""
        return [*self._own, *self.published.answered]

    @property
    def rows(self) -> int:
        """The most rows of one request whose answers are scored; 1 where all are replayed."""
        decoded = self._subject.corpus.startswith("world:")  # has programs
        return max(ROWS if decoded else 1, FOREIGN_ROWS if self._subject.study.tasks else 1)

    @property
    def replayed(self) -> list[str]:
        """The world's tasks that one trace decides at every point: neither its programs nor what lm-eval scores."""
        return [task for task, items in self._own.items() if items[0].example.scoring != "runs"]

    @property
    def sequences(self) -> list[TokenSequence]:
        """Reference answers behind their prompts, of all tasks that a trace decides."""
        return [each for task in self.replayed for each in sequences_of(self._own[task])]

    def at(self, task: str, point: OperatingPoint) -> TaskAt:
        """What says whether ``task`` counts at ``point``, and what it loses there."""
        full = self._subject.full
        return TaskAt(self.correct(task, full), self.correct(task, point), self.guess(task), self._saving(task, point))

    def correct(self, task: str, point: OperatingPoint) -> ByItem:
        """[items] bool, whether each item of ``task`` is right at ``point``: by replay, or by decoding for programs."""
        if task not in self._own:
            return self.published.correct(task, point)
        played, key = self._played[task], (task, point)
        if played.replayable:
            return played.right(point)
        if key not in self._generated:
            self._generated[key] = played.of(self._run_programs(played.items, point))
        return self._generated[key]

    def guess(self, task: str) -> float:
        """Share right by the better of two guesses: from the input's own symbols; always validation's majority."""
        if task not in self._own:
            return self.published.guess(task)
        return _guess(self._own[task], self._validation[task])

    def validation_drops(self, point: OperatingPoint) -> dict[str, float]:
        """Validation accuracy lost by each task that counts there at ``point``, a fraction; programs are left out.

        Point estimates, on 400 items a task: a bound of 0.5 % that no bad luck may cross would ask for 600 items of
        which not one is lost (rule of three), so that any margin that changes anything were refused. Whether a choice
        by point estimates holds elsewhere is what EMAD-E10 asks, on items of its own.
        """
        drops = {}
        for task, played in self._validated.items():
            guess = _guess(played.items, played.items)
            held = TaskAt(played.right(self._subject.full), played.right(point), guess, played.saving(point))
            if held.counts:
                full, adaptive = held.accuracy
                drops[task] = full - adaptive
        return drops

    # ------------------------------------------------------------ items and traces

    @cached_property
    def _own(self) -> dict[str, list[Item]]:
        """The world's tasks, where the corpus is of the world."""
        return self._items("evaluate", self._subject.budget.items)

    @cached_property
    def _validation(self) -> dict[str, list[Item]]:
        return self._items("validate", min(VALIDATED_ITEMS, self._subject.budget.items))

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
    def _played(self) -> dict[str, Played]:
        return {task: self._traced(items, task) for task, items in self._own.items()}

    @cached_property
    def _validated(self) -> dict[str, Played]:
        """The replayed tasks on the validation split: programs would cost a decode per margin."""
        return {task: self._traced(self._validation[task], f"validate, {task}") for task in self.replayed}

    def _traced(self, items: list[Item], what: str) -> Played:
        return Played(items, self._subject.trace(sequences_of(items), what), self._subject.loaded.geometry)

    def _saving(self, task: str, point: OperatingPoint) -> float:
        own = task in self._own
        return self._played[task].saving(point) if own else self.published.saving(task, point)

    def _run_programs(self, items: list[Item], point: OperatingPoint) -> Bools:
        tokenizer = self._subject.tokenizer
        newline = frozenset(tokenizer.encode("\n", add_special_tokens=False))
        right = []
        with self._subject.open_audited(point, max_rows=ROWS) as decoder:
            for start in range(0, len(items), ROWS):
                batch = items[start : start + ROWS]
                record = decoder.generate([Prompt(item.prompt) for item in batch], GENERATED_LINE, newline)
                right += [
                    runs(item.example, tokenizer.decode(emitted.tolist()))
                    for item, emitted in zip(batch, record.emitted, strict=True)
                ]
        return np.array(right, dtype=bool)


def _guess(items: list[Item], validation: list[Item]) -> float:
    examples, elsewhere = ([item.example for item in side] for side in (items, validation))
    return max(float(np.mean([example.chance for example in examples])), majority(examples, elsewhere))
