"""Items of tasks answered by either model alone, by switching, by speculation, and by self-speculation of the large
model.

Each way is decoded once and kept. Switching and the single models walk through texts that all rules share
(``decoding.prefix_tree``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from emad_ref.decoding.prefix_tree import PrefixTrees, SwitchedText, TextRequest
from emad_ref.decoding.self_speculation import self_speculate
from emad_ref.decoding.speculation import ACCEPTED, GATED, SpeculationResult, speculate
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule
from emad_ref.measurements import pair_models
from emad_ref.measurements.pair_models import (
    DRAFT_TOKENS,
    ItemAnswers,
    PairModels,
    PairResult,
    PairTask,
    pair_tasks,
    record_of,
)
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Bools, Ints, Record
from emad_ref.tasks.scoring import AnswerStrategy, Continuations, OptionScore, WrittenAnswer
from emad_ref.text.documents import Split

PAIR_ROWS = 64
GroupResult = TypeVar("GroupResult", SpeculationResult, Record)


def equal_length_groups(items: Sequence[TextRequest]) -> list[list[int]]:
    """Indices of items in groups of equally long prompts, at most ``ROWS`` each."""
    groups: list[list[int]] = []
    for index in _by_length(items):
        last = groups[-1] if groups else []
        if last and len(items[last[0]].prompt) == len(items[index].prompt) and len(last) < PAIR_ROWS:
            last.append(index)
        else:
            groups.append([index])
    return groups


def _by_length(items: Sequence[TextRequest]) -> list[int]:
    return sorted(range(len(items)), key=lambda index: len(items[index].prompt))


def decode_groups(
    items: Sequence[TextRequest], groups: list[list[int]], decode: Callable[[list[Prompt], TextRequest], GroupResult]
) -> tuple[list[Ints], list[GroupResult]]:
    """Emitted tokens per item, and the result of each of ``groups``; ``decode`` takes prompts, and a text of those
    wanted: all of one task stop alike."""
    results = []
    emitted: list[Ints] = [np.empty(0, dtype=np.int64)] * len(items)
    for rows in groups:
        done = decode([Prompt(items[row].prompt) for row in rows], items[rows[0]])
        results.append(done)
        for row, tokens in zip(rows, record_of(done).emitted, strict=True):
            emitted[row] = tokens
    return emitted, results


class PairAnswers:
    """Every request names a task, a split and how many of its items. ``guessed_on``: validation items from which a
    task's most frequent answer is read."""

    def __init__(self, models: PairModels, seed: int, guessed_on: int):
        self.models, self.seed, self._guessed_on = models, seed, guessed_on
        self._answers: dict[tuple[object, ...], ItemAnswers] = {}
        self._texts = PrefixTrees(PAIR_ROWS)

    @cached_property
    def scored(self) -> dict[str, PairTask]:
        """The tasks of this run, by name."""
        return pair_tasks(self.models, self.seed, self._guessed_on)

    @cached_property
    def _unscored(self) -> PairTask:
        return pair_models.DocumentOpenings(self.models)

    def task(self, name: str) -> PairTask:
        """A task of this run, or the texts that stand in where it has none."""
        return self._unscored if name == pair_models.TEXTS else self.scored[name]

    def prompts(self, task: str, split: Split, count: int) -> list[Prompt]:
        """Of at most ``count`` items. Raises Unsupported where nothing is written."""
        return [Prompt(text.prompt) for text in self.task(task).texts(split, count)]

    # ------------------------------------------------------------ ways to answer

    def alone(
        self, model: int, task: str, split: Split, count: int, point: OperatingPoint | None = None
    ) -> ItemAnswers:
        """Items answered by the ``SMALL`` or the ``LARGE`` model alone, at full depth or at ``point``."""
        if point is None:
            return self.switched(self.never(model), task, split, count)
        return self._decoded(
            ("alone", model, point, task, split, count), lambda wanted: self._generated(model, point, wanted)
        )

    def never(self, model: int) -> SwitchingRule:
        """The rule under which ``model`` writes everything: τ = 0, or the most that any distribution has, and it
        starts."""
        # log₂ V itself is reached by a uniform distribution, and one token alone never ends a run that long
        longest = min(evidence.subject.stepper.max_positions for evidence in self.models.both)
        bits = 0.0 if model == LARGE else float(np.log2(self.models.vocabulary))
        return SwitchingRule(bits, window=1, least_run=longest, start=model)

    def switched(self, rule: SwitchingRule, task: str, split: Split, count: int) -> ItemAnswers:
        """Items answered by EAD, both models at full depth."""
        return self.switched_all([rule], task, split, count)[0]

    def switched_all(self, rules: Sequence[SwitchingRule], task: str, split: Split, count: int) -> list[ItemAnswers]:
        """As ``switched``, of several rules: what they share is decoded once, and in full batches."""
        given = self.task(task)
        new = [rule for rule in rules if self._key(rule, task, split, count) not in self._answers]
        if given.generated and len(new) > 1:
            texts = given.texts(split, count)
            with self.models.partners(rows=PAIR_ROWS, audited=True) as partners:
                self._texts.walks(partners, [(text, rule) for rule in new for text in texts])
        return [self._switched(rule, task, split, count) for rule in rules]

    def _key(self, rule: SwitchingRule, task: str, split: Split, count: int) -> tuple[object, ...]:
        return ("switched", rule, task, split, count)

    def _switched(self, rule: SwitchingRule, task: str, split: Split, count: int) -> ItemAnswers:
        walks: list[SwitchedText] = []

        def write(wanted: Sequence[TextRequest]) -> list[WrittenAnswer]:
            with self.models.partners(rows=PAIR_ROWS, audited=True) as partners:
                walks[:] = self._texts.walks(partners, [(text, rule) for text in wanted])
            return [WrittenAnswer(walk.tokens, walk.by_large, walk.entropy_bits) for walk in walks]

        def read(options: Continuations) -> list[OptionScore]:
            with self.models.partners() as partners:
                found = self._texts.scored(partners, options, rule)
            return [
                OptionScore(
                    float(heard.log_p.sum()),
                    bool(heard.greedy.all()),
                    WrittenAnswer(tokens, int(heard.model.sum()), heard.entropy_bits),
                )
                for (_, tokens), heard in zip(options, found, strict=True)
            ]

        def run() -> ItemAnswers:
            marked = self.task(task).answered(AnswerStrategy(write, read), split, count)
            flops = self.models.walked(walks) if walks and self.models.counted else None
            return ItemAnswers.of(marked, flops, (), tuple(walks))

        return self._kept(self._key(rule, task, split, count), run)

    def speculated(
        self,
        task: str,
        split: Split,
        count: int,
        *,
        k: int = DRAFT_TOKENS,
        gate_bits: float | None = None,
    ) -> ItemAnswers:
        """Items answered by speculative decoding, both models at full depth.

        The large model's tokens are those that no draft stands for, whether accepted or waved through by the gate.
        Options, which are read and not written, it ranks as the large model alone: it is lossless.

        Raises:
            Unsupported: options are to be ranked behind a gate, which no draft of them passes.
        """

        def generated(wanted: Sequence[TextRequest]) -> tuple[list[WrittenAnswer], list[PairResult]]:
            groups = equal_length_groups(wanted)
            with self.models.partners(rows=PAIR_ROWS, audited=True) as (small, large):

                def decode(prompts: list[Prompt], text: TextRequest) -> SpeculationResult:
                    return speculate(
                        small, large, prompts, text.most, k=k, stop=text.stop, gate_bits=gate_bits, ended=text.ended
                    )

                emitted, done = decode_groups(wanted, groups, decode)
            by_large = np.array([len(tokens) for tokens in emitted])
            for rows, one in zip(groups, done, strict=True):
                by_large[rows] -= one.drafted(ACCEPTED) + one.drafted(GATED)
            return [WrittenAnswer(*both) for both in zip(emitted, by_large.tolist(), strict=True)], list(done)

        if gate_bits is None and not self.task(task).generated:
            return self.alone(LARGE, task, split, count)
        return self._decoded(("speculated", k, gate_bits, task, split, count), generated)

    def gated(self, k: int, gate_bits: float | None, task: str, split: Split, count: int) -> ItemAnswers:
        """Tokens and shares of ``speculated``, read off the texts that rules share; its work is not told.

        ``entropy_bits``: of the drafts that were judged.
        """

        def write(wanted: Sequence[TextRequest]) -> list[WrittenAnswer]:
            with self.models.partners(rows=PAIR_ROWS, audited=True) as partners:
                spoken = self._texts.spoken(partners, wanted, k, gate_bits)
            return [WrittenAnswer(one.tokens, int(one.model.sum()), one.entropy_bits) for one in spoken]

        def run() -> ItemAnswers:
            return ItemAnswers.of(self.task(task).answered(AnswerStrategy(write, None), split, count), None)

        return self._kept(("gated", k, gate_bits, task, split, count), run)

    def self_speculated(
        self, exit_layer: int, task: str, split: Split, count: int, *, k: int = DRAFT_TOKENS
    ) -> ItemAnswers:
        """Items answered by the large model, which drafts for itself after ``exit_layer``: all tokens are its own."""

        def generated(wanted: Sequence[TextRequest]) -> tuple[list[WrittenAnswer], list[PairResult]]:
            with self.models.drafting(rows=PAIR_ROWS) as model:

                def decode(prompts: list[Prompt], text: TextRequest) -> SpeculationResult:
                    return self_speculate(model, exit_layer, prompts, text.most, k=k, stop=text.stop, ended=text.ended)

                emitted, done = decode_groups(wanted, equal_length_groups(wanted), decode)
            return [WrittenAnswer(tokens, len(tokens)) for tokens in emitted], list(done)

        if not self.task(task).generated:
            return self.alone(LARGE, task, split, count)
        return self._decoded(("self-speculated", exit_layer, k, task, split, count), generated)

    def _generated(
        self, model: int, point: OperatingPoint, wanted: Sequence[TextRequest]
    ) -> tuple[list[WrittenAnswer], list[PairResult]]:
        """By one model alone. What a text's own ``ended`` calls over is cut there, and was paid for."""
        with self.models.both[model].subject.open_audited(point, max_rows=PAIR_ROWS) as decoder:

            def decode(prompts: list[Prompt], text: TextRequest) -> Record:
                return decoder.generate(prompts, text.most, text.stop)

            emitted, done = decode_groups(wanted, equal_length_groups(wanted), decode)
        ended = [_cut_at_end(tokens, text) for tokens, text in zip(emitted, wanted, strict=True)]
        return [WrittenAnswer(tokens, len(tokens) if model == LARGE else 0) for tokens in ended], list(done)

    def _decoded(
        self,
        key: tuple[object, ...],
        generated: Callable[[Sequence[TextRequest]], tuple[list[WrittenAnswer], list[PairResult]]],
    ) -> ItemAnswers:
        """Answers whose work is read off records. ``key`` ends with task, split and number of items, and holds, behind
        its first entry, which model worked where only one did."""
        runs: list[PairResult] = []

        def write(wanted: Sequence[TextRequest]) -> list[WrittenAnswer]:
            written, done = generated(wanted)
            runs.extend(done)
            return written

        def run() -> ItemAnswers:
            task, split, count = key[-3:]
            marked = self.task(str(task)).answered(AnswerStrategy(write, None), split, count)  # type: ignore[arg-type]
            spent = self.models.spent(runs, SMALL if key[:2] == ("alone", SMALL) else LARGE)
            return ItemAnswers.of(marked, None if spent is None else int(spent.sum()), tuple(runs))

        return self._kept(key, run)

    def _kept(self, key: tuple[object, ...], run: Callable[[], ItemAnswers]) -> ItemAnswers:
        if key not in self._answers:
            self._answers[key] = run()
        return self._answers[key]

    # ------------------------------------------------------------ greedy choices of the large model

    def agreement(self, done: ItemAnswers, task: str, split: Split, count: int) -> list[Bools]:
        """Per item, [emitted] whether each token of a walk is the large model's greedy choice after the same
        history."""
        with self.models.partners(rows=PAIR_ROWS, audited=True) as partners:
            return [
                self._texts.choices(partners, text, walk, LARGE)
                for text, walk in zip(self.task(task).texts(split, count), done.walks, strict=True)
            ]


def _cut_at_end(tokens: Ints, text: TextRequest) -> Ints:
    return next((tokens[:n] for n in range(1, len(tokens)) if text.ended(tokens[:n].tolist())), tokens)
