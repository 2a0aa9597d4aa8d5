"""What a pair is asked: the world's tasks where the corpus is of the world, tasks of lm-eval's that the study names,
and, where neither is at hand, texts without a score.

Each is a ``Task``: items of a split, answered by a ``Way`` (``tasks.ways``). Validation items choose rules, evaluation
items judge them: the world makes both apart; a published task is dealt into halves (``tasks.pairs.half_of``).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from emad_ref.decoding.branching import Wanted
from emad_ref.errors import ends_the_run
from emad_ref.evidence.pair.answered import is_right, longest
from emad_ref.evidence.pair.marked import Marked
from emad_ref.evidence.pair.models import Models
from emad_ref.evidence.published import PublishedTask
from emad_ref.protocol import Unsupported
from emad_ref.record import Ints
from emad_ref.tasks.scoring import Item, clusters, item_of, majority
from emad_ref.tasks.ways import Way, Written
from emad_ref.text import world
from emad_ref.text.documents import Split
from emad_ref.verdict.units import ByItem

TEXTS = "plain documents"  # name of what is written on where there is no task
WORLD = "world tasks"  # what reports call them together


class Task(Protocol):
    """``generated``: whether answers are written; else options are read. ``scored``: whether they can be right."""

    @property
    def name(self) -> str: ...

    @property
    def generated(self) -> bool: ...

    @property
    def scored(self) -> bool: ...

    @property
    def guess(self) -> float:
        """Share that an honest guess gets right."""

    def texts(self, split: Split, count: int) -> list[Wanted]:
        """What is to be written for each item; raises Unsupported where options are read."""

    def answered(self, way: Way, split: Split, count: int) -> Marked:
        """At most ``count`` items of a split, the same for every way."""


class WorldTask:
    """A task of the world: ``seed`` makes its items."""

    generated, scored = True, True

    def __init__(self, name: str, models: Models, seed: int, guessed_on: int):
        self.name, self._models, self._seed, self._guessed_on = name, models, seed, guessed_on
        self._items: dict[tuple[Split, int], list[Item]] = {}

    def items(self, split: Split, count: int) -> list[Item]:
        key, large = (split, count), self._models.large.subject
        if key not in self._items:
            made = world.examples(self.name, split, count, self._seed)
            self._items[key] = [item_of(example, large.tokenizer, large.opening) for example in made]
        return self._items[key]

    @property
    def guess(self) -> float:
        """The better of two: from the input's own symbols, and the answer most frequent on validation."""
        examples = [item.example for item in self.items("validate", self._guessed_on)]
        return max(float(np.mean([example.chance for example in examples])), majority(examples, examples))

    def texts(self, split: Split, count: int) -> list[Wanted]:
        items = self.items(split, count)
        stop = frozenset(self._models.large.subject.tokenizer.encode("\n", add_special_tokens=False))
        return [Wanted(item.prompt, longest(items), stop) for item in items]

    def answered(self, way: Way, split: Split, count: int) -> Marked:
        written = way.write(self.texts(split, count))
        decode, items = self._models.large.subject.tokenizer.decode, self.items(split, count)
        right = [is_right(item, decode(one.tokens.tolist())) for item, one in zip(items, written, strict=True)]
        return Marked(ByItem(np.array(right, dtype=bool), clusters(items)), [[one] for one in written])


class NamedTask:
    """A task of lm-eval's that the user named, scored by lm-eval."""

    scored = True

    def __init__(self, task: PublishedTask, models: Models):
        self._task, self._models, self._study = task, models, models.large.subject.study
        self._texts: dict[tuple[Split, int], list[Wanted]] = {}

    @property
    def name(self) -> str:
        return self._task.name

    @property
    def guess(self) -> float:
        return self._task.guess

    @property
    def generated(self) -> bool:
        return self._task.metric != "acc"

    def texts(self, split: Split, count: int) -> list[Wanted]:
        if not self.generated:
            raise Unsupported(f"{self.name}: options are read, no text is written")
        if (split, count) not in self._texts:
            nothing = Way(lambda wanted: [Written(np.empty(0, dtype=np.int64), 0) for _ in wanted], None)
            self.answered(nothing, split, count)
        return self._texts[split, count]

    def answered(self, way: Way, split: Split, count: int) -> Marked:
        from emad_ref.tasks.pairs import answered, documents_of

        study, both = self._study, (self._models.small.loaded, self._models.large.loaded)
        with ends_the_run():
            documents = documents_of(self._task.members, split, count, data=study.data, limit=study.limit)
        if not documents:
            raise Unsupported(f"{self.name}: no document of {split} among {self._task.of}; name a larger file or limit")
        outcome = answered(way, documents, both, data=study.data, run_code=study.allow_code_execution)
        self._texts[split, count] = outcome.wanted
        # items of one text tell one thing, however often they are asked
        questions: Ints = np.unique([one.question for one in documents], return_inverse=True)[1].astype(np.int64)
        return Marked(ByItem(outcome.right, questions), outcome.written)


class Openings:
    """Openings of the large model's documents to be written on, ``new`` tokens each: nothing in them is right or wrong.

    The splits are made of different documents: the first half of those drawn, and the second.
    """

    name, generated, scored, guess = TEXTS, True, False, 0.0

    def __init__(self, models: Models):
        self._subject = models.large.subject
        self._new = models.large.subject.budget.new_tokens

    def texts(self, split: Split, count: int) -> list[Wanted]:
        room = self._subject.stepper.max_positions - self._new
        drawn = self._subject.prompts(2 * count, min(self._subject.budget.prompt_tokens, room))
        half = drawn[:count] if split == "validate" else drawn[count:]
        return [Wanted(prompt.tokens, self._new) for prompt in half]

    def answered(self, way: Way, split: Split, count: int) -> Marked:
        written = way.write(self.texts(split, count))
        return Marked(ByItem.distinct(np.zeros(len(written), dtype=bool)), [[one] for one in written])


def tasks_of(models: Models, seed: int, guessed_on: int) -> dict[str, Task]:
    """Every task that this run can score, by name; none where the corpus is not of the world and none is named.

    Args:
        guessed_on: validation items from which the most frequent answer is read.
    """
    subject, found = models.large.subject, {}
    if subject.corpus.startswith("world:"):
        found = {name: WorldTask(name, models, seed, guessed_on) for name in world.TASKS}
    published = models.large.scored.published
    named: dict[str, Task] = {name: NamedTask(published.scored[name], models) for name in published.answered}
    return {**found, **named}
