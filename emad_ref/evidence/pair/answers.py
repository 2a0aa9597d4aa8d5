"""Items of tasks answered by either model alone, by switching, by speculation, and by the large model drafting itself.

Each way to answer is decoded once and kept. At full depth switching, and either model alone, are walks through texts
that all rules share (``decoding.branching``): tokens, shares and work are those of decoding under that rule.
Speculation is decoded, its work read off records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from emad_ref.decoding.acceptance import ACCEPTED, GATED, Speculated
from emad_ref.decoding.branching import Texts, Walk, Wanted
from emad_ref.decoding.selfdraft import self_speculate
from emad_ref.decoding.speculative import speculate
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule
from emad_ref.evidence.pair import asked
from emad_ref.evidence.pair.answered import Answered, Result
from emad_ref.evidence.pair.asked import Task, tasks_of
from emad_ref.evidence.pair.batches import ROWS, equal, in_groups
from emad_ref.evidence.pair.models import Models
from emad_ref.evidence.pair.speculation import DRAFTED
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import Bools, Ints, Record
from emad_ref.tasks.ways import Continuations, Read, Way, Written
from emad_ref.text.documents import Split


class Answers:
    """Every request names a task, a split and how many of its items. ``guessed_on``: validation items from which a
    task's most frequent answer is read."""

    def __init__(self, models: Models, seed: int, guessed_on: int):
        self.models, self.seed, self._guessed_on = models, seed, guessed_on
        self._answers: dict[tuple[object, ...], Answered] = {}
        self._texts = Texts(ROWS)

    @cached_property
    def scored(self) -> dict[str, Task]:
        """The tasks of this run, by name."""
        return tasks_of(self.models, self.seed, self._guessed_on)

    @cached_property
    def _unscored(self) -> Task:
        return asked.Openings(self.models)

    def task(self, name: str) -> Task:
        """A task of this run, or the texts that stand in where it has none."""
        return self._unscored if name == asked.TEXTS else self.scored[name]

    def prompts(self, task: str, split: Split, count: int) -> list[Prompt]:
        """Of at most ``count`` items. Raises Unsupported where nothing is written."""
        return [Prompt(text.prompt) for text in self.task(task).texts(split, count)]

    # ------------------------------------------------------------ ways to answer

    def alone(self, model: int, task: str, split: Split, count: int, point: OperatingPoint | None = None) -> Answered:
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

    def switched(self, rule: SwitchingRule, task: str, split: Split, count: int) -> Answered:
        """Items answered by EAD, both models at full depth."""
        return self.switched_all([rule], task, split, count)[0]

    def switched_all(self, rules: Sequence[SwitchingRule], task: str, split: Split, count: int) -> list[Answered]:
        """As ``switched``, of several rules: what they share is decoded once, and in full batches."""
        given = self.task(task)
        new = [rule for rule in rules if self._key(rule, task, split, count) not in self._answers]
        if given.generated and len(new) > 1:
            texts = given.texts(split, count)
            with self.models.partners(rows=ROWS, audited=True) as partners:
                self._texts.walks(partners, [(text, rule) for rule in new for text in texts])
        return [self._switched(rule, task, split, count) for rule in rules]

    def _key(self, rule: SwitchingRule, task: str, split: Split, count: int) -> tuple[object, ...]:
        return ("switched", rule, task, split, count)

    def _switched(self, rule: SwitchingRule, task: str, split: Split, count: int) -> Answered:
        walks: list[Walk] = []

        def write(wanted: Sequence[Wanted]) -> list[Written]:
            with self.models.partners(rows=ROWS, audited=True) as partners:
                walks[:] = self._texts.walks(partners, [(text, rule) for text in wanted])
            return [Written(walk.tokens, walk.by_large, walk.entropy_bits) for walk in walks]

        def read(options: Continuations) -> list[Read]:
            with self.models.partners() as partners:
                found = self._texts.scored(partners, options, rule)
            return [
                Read(
                    float(heard.log_p.sum()),
                    bool(heard.greedy.all()),
                    Written(tokens, int(heard.model.sum()), heard.entropy_bits),
                )
                for (_, tokens), heard in zip(options, found, strict=True)
            ]

        def run() -> Answered:
            marked = self.task(task).answered(Way(write, read), split, count)
            flops = self.models.walked(walks) if walks and self.models.counted else None
            return Answered.of(marked, flops, (), tuple(walks))

        return self._kept(self._key(rule, task, split, count), run)

    def speculated(
        self,
        task: str,
        split: Split,
        count: int,
        *,
        k: int = DRAFTED,
        gate_bits: float | None = None,
    ) -> Answered:
        """Items answered by speculative decoding, both models at full depth.

        The large model's tokens are those that no draft stands for, whether accepted or waved through by the gate.
        Options, which are read and not written, it ranks as the large model alone: it is lossless.

        Raises:
            Unsupported: options are to be ranked behind a gate, which no draft of them passes.
        """

        def generated(wanted: Sequence[Wanted]) -> tuple[list[Written], list[Result]]:
            groups = equal(wanted)
            with self.models.partners(rows=ROWS, audited=True) as (small, large):

                def decode(prompts: list[Prompt], text: Wanted) -> Speculated:
                    return speculate(
                        small, large, prompts, text.most, k=k, stop=text.stop, gate_bits=gate_bits, ended=text.ended
                    )

                emitted, done = in_groups(wanted, groups, decode)
            by_large = np.array([len(tokens) for tokens in emitted])
            for rows, one in zip(groups, done, strict=True):
                by_large[rows] -= one.drafted(ACCEPTED) + one.drafted(GATED)
            return [Written(*both) for both in zip(emitted, by_large.tolist(), strict=True)], list(done)

        if gate_bits is None and not self.task(task).generated:
            return self.alone(LARGE, task, split, count)
        return self._decoded(("speculated", k, gate_bits, task, split, count), generated)

    def gated(self, k: int, gate_bits: float | None, task: str, split: Split, count: int) -> Answered:
        """Tokens and shares of ``speculated``, read off the texts that rules share; its work is not told.

        ``entropy_bits``: of the drafts that were judged.
        """

        def write(wanted: Sequence[Wanted]) -> list[Written]:
            with self.models.partners(rows=ROWS, audited=True) as partners:
                spoken = self._texts.spoken(partners, wanted, k, gate_bits)
            return [Written(one.tokens, int(one.model.sum()), one.entropy_bits) for one in spoken]

        def run() -> Answered:
            return Answered.of(self.task(task).answered(Way(write, None), split, count), None)

        return self._kept(("gated", k, gate_bits, task, split, count), run)

    def self_speculated(self, exit_layer: int, task: str, split: Split, count: int, *, k: int = DRAFTED) -> Answered:
        """Items answered by the large model, which drafts for itself after ``exit_layer``: all tokens are its own."""

        def generated(wanted: Sequence[Wanted]) -> tuple[list[Written], list[Result]]:
            with self.models.drafting(rows=ROWS) as model:

                def decode(prompts: list[Prompt], text: Wanted) -> Speculated:
                    return self_speculate(model, exit_layer, prompts, text.most, k=k, stop=text.stop, ended=text.ended)

                emitted, done = in_groups(wanted, equal(wanted), decode)
            return [Written(tokens, len(tokens)) for tokens in emitted], list(done)

        if not self.task(task).generated:
            return self.alone(LARGE, task, split, count)
        return self._decoded(("self-speculated", exit_layer, k, task, split, count), generated)

    def _generated(
        self, model: int, point: OperatingPoint, wanted: Sequence[Wanted]
    ) -> tuple[list[Written], list[Result]]:
        """By one model alone. What a text's own ``ended`` calls over is cut there, and was paid for."""
        with self.models.both[model].subject.open_audited(point, max_rows=ROWS) as decoder:

            def decode(prompts: list[Prompt], text: Wanted) -> Record:
                return decoder.generate(prompts, text.most, text.stop)

            emitted, done = in_groups(wanted, equal(wanted), decode)
        ended = [_cut(tokens, text) for tokens, text in zip(emitted, wanted, strict=True)]
        return [Written(tokens, len(tokens) if model == LARGE else 0) for tokens in ended], list(done)

    def _decoded(
        self, key: tuple[object, ...], generated: Callable[[Sequence[Wanted]], tuple[list[Written], list[Result]]]
    ) -> Answered:
        """Answers whose work is read off records. ``key`` ends with task, split and number of items, and holds, behind
        its first entry, which model worked where only one did."""
        runs: list[Result] = []

        def write(wanted: Sequence[Wanted]) -> list[Written]:
            written, done = generated(wanted)
            runs.extend(done)
            return written

        def run() -> Answered:
            task, split, count = key[-3:]
            marked = self.task(str(task)).answered(Way(write, None), split, count)  # type: ignore[arg-type]
            spent = self.models.spent(runs, SMALL if key[:2] == ("alone", SMALL) else LARGE)
            return Answered.of(marked, None if spent is None else int(spent.sum()), tuple(runs))

        return self._kept(key, run)

    def _kept(self, key: tuple[object, ...], run: Callable[[], Answered]) -> Answered:
        if key not in self._answers:
            self._answers[key] = run()
        return self._answers[key]

    # ------------------------------------------------------------ greedy choices of the large model

    def agreement(self, done: Answered, task: str, split: Split, count: int) -> list[Bools]:
        """Per item, [emitted] whether each token of a walk is the large model's greedy choice after the same
        history."""
        with self.models.partners(rows=ROWS, audited=True) as partners:
            return [
                self._texts.choices(partners, text, walk, LARGE)
                for text, walk in zip(self.task(task).texts(split, count), done.walks, strict=True)
            ]


def _cut(tokens: Ints, text: Wanted) -> Ints:
    return next((tokens[:n] for n in range(1, len(tokens)) if text.ended(tokens[:n].tolist())), tokens)
