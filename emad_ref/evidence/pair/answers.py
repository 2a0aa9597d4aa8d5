"""Items of tasks answered by either model alone, by switching, by speculation, and by the large model drafting itself.

Work, shares and acceptance are read off records; each way to answer is decoded once and kept. Switching runs row by row
(``decoding.switching``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from emad_ref.decoding.acceptance import ACCEPTED, GATED, Speculated
from emad_ref.decoding.pair import Log, Seat
from emad_ref.decoding.selfdraft import self_speculate
from emad_ref.decoding.speculative import speculate
from emad_ref.decoding.switching import LARGE, Switched, SwitchingRule, switch
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.pair.answered import Answered, Result, is_right, longest
from emad_ref.evidence.pair.batches import ROWS, equal, full, in_groups, prompts_of
from emad_ref.evidence.pair.models import Models
from emad_ref.evidence.pair.speculation import DRAFTED
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE, PROMPT, Bools, Ints, Record
from emad_ref.tasks.scoring import Item, item_of
from emad_ref.text import world
from emad_ref.text.documents import Split
from emad_ref.verdict.units import ByItem


class Answers:
    """Every request names a task, a split and how many of its items."""

    def __init__(self, models: Models, seed: int):
        self.models, self._seed = models, seed
        self._items: dict[tuple[str, Split, int], list[Item]] = {}
        self._answers: dict[tuple[object, ...], Answered] = {}

    def items(self, task: str, split: Split, count: int) -> list[Item]:
        key, large = (task, split, count), self.models.large.subject
        if key not in self._items:
            made = world.examples(task, split, count, self._seed)
            self._items[key] = [item_of(example, large.tokenizer, large.opening) for example in made]
        return self._items[key]

    @cached_property
    def stop(self) -> frozenset[int]:
        return frozenset(self.models.large.subject.tokenizer.encode("\n", add_special_tokens=False))

    # ------------------------------------------------------------ ways to answer

    def score(self, model: int, task: str, split: Split, count: int) -> float:
        """Share that the ``SMALL`` or the ``LARGE`` model answers right alone at full depth, whatever it costs."""
        items, evidence = self.items(task, split, count), self.models.both[model]
        emitted, _ = self._generated(evidence, evidence.subject.full, items, full(items))
        return float(self._right(items, emitted).values.mean())

    def alone(self, model: int, task: str, split: Split, count: int, point: OperatingPoint | None = None) -> Answered:
        """Items answered by the ``SMALL`` or the ``LARGE`` model alone, at full depth or at ``point``."""
        evidence = self.models.both[model]
        chosen = point or evidence.subject.full

        def run() -> Answered:
            items = self.items(task, split, count)
            emitted, done = self._generated(evidence, chosen, items, equal(items))
            lengths = np.array([len(tokens) for tokens in emitted])
            by_large = lengths if model == LARGE else np.zeros_like(lengths)
            return Answered(self._right(items, emitted), lengths, by_large, self._total(done, model), tuple(done))

        return self._kept(("alone", model, chosen, task, split, count), run)

    def _generated(
        self, evidence: Evidence, point: OperatingPoint, items: Sequence[Item], groups: list[list[int]]
    ) -> tuple[list[Ints], list[Record]]:
        with evidence.subject.open(point, max_rows=ROWS) as decoder:
            return in_groups(items, groups, lambda prompts, new: decoder.generate(prompts, new, self.stop))

    def switched(self, rule: SwitchingRule, task: str, split: Split, count: int) -> Answered:
        """Items answered by EAD, both models at full depth."""

        def run() -> Answered:
            items = self.items(task, split, count)
            with self.models.partners() as (small, large):
                done = switch(small, large, rule, prompts_of(items), longest(items), stop=self.stop)
            lengths = np.array([len(models) for models in done.model])
            by_large = np.array([int(models.sum()) for models in done.model])
            right = self._right(items, done.record.emitted)
            return Answered(right, lengths, by_large, self._total([done]), (done,))

        return self._kept(("switched", rule, task, split, count), run)

    def speculated(
        self,
        task: str,
        split: Split,
        count: int,
        *,
        k: int = DRAFTED,
        gate_bits: float | None = None,
        padded: bool = False,
    ) -> Answered:
        """Items answered by speculative decoding, both models at full depth; ``padded``: in full batches, where FLOPs
        do not matter.

        The large model's tokens are those that no draft stands for, whether accepted or waved through by the gate.
        """

        def run() -> Answered:
            items = self.items(task, split, count)
            groups = full(items) if padded else equal(items)
            with self.models.partners(rows=ROWS) as (small, large):

                def decode(prompts: list[Prompt], new: int) -> Speculated:
                    return speculate(small, large, prompts, new, k=k, stop=self.stop, gate_bits=gate_bits)

                emitted, done = in_groups(items, groups, decode)
            lengths = np.array([len(tokens) for tokens in emitted])
            by_large = lengths.copy()
            for rows, one in zip(groups, done, strict=True):
                by_large[rows] -= one.drafted(ACCEPTED) + one.drafted(GATED)
            return Answered(self._right(items, emitted), lengths, by_large, self._total(done), tuple(done))

        return self._kept(("speculated", k, gate_bits, padded, task, split, count), run)

    def self_speculated(self, exit_layer: int, task: str, split: Split, count: int, *, k: int = DRAFTED) -> Answered:
        """Items answered by the large model, which drafts for itself after ``exit_layer``: all tokens are its own."""

        def run() -> Answered:
            items = self.items(task, split, count)
            with self.models.drafting(rows=ROWS) as model:

                def decode(prompts: list[Prompt], new: int) -> Speculated:
                    return self_speculate(model, exit_layer, prompts, new, k=k, stop=self.stop)

                emitted, done = in_groups(items, equal(items), decode)
            lengths = np.array([len(tokens) for tokens in emitted])
            return Answered(self._right(items, emitted), lengths, lengths, self._total(done), tuple(done))

        return self._kept(("self-speculated", exit_layer, k, task, split, count), run)

    def _kept(self, key: tuple[object, ...], run: Callable[[], Answered]) -> Answered:
        if key not in self._answers:
            self._answers[key] = run()
        return self._answers[key]

    def _total(self, results: Sequence[Result], model: int = LARGE) -> int | None:
        spent = self.models.spent(results, model)
        return None if spent is None else int(spent.sum())

    def _right(self, items: Sequence[Item], emitted: Sequence[Ints]) -> ByItem:
        texts = [self.models.large.subject.tokenizer.decode(tokens.tolist()) for tokens in emitted]
        right = [is_right(item, text) for item, text in zip(items, texts, strict=True)]
        return ByItem.distinct(np.array(right, dtype=bool))

    # ------------------------------------------------------------ greedy choices of the large model

    def agreement(self, done: Switched, items: Sequence[Item]) -> list[Bools]:
        """Per item, [emitted] whether each emitted token is the large model's greedy choice after the same history."""
        found = []
        with self.models.partners() as (_, large):
            for item, emitted in zip(items, done.record.emitted, strict=True):
                seat = Seat(large, LARGE, Log(), [0], [Prompt(item.prompt)], PROMPT, DECODE)
                logits = seat.logits[:, None]
                if len(emitted) > 1:
                    read = seat.feed(emitted[None, :-1], [DECODE] * (len(emitted) - 1))
                    logits = np.concatenate([logits, read], axis=1)
                seat.close()
                found.append(logits[0].argmax(axis=-1) == emitted)
        return found
