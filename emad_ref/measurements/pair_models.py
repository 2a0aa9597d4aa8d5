"""The two models of a pair: shared vocabulary, decoders, FLOPs, the tasks they are given and the answers to their
items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from emad_ref.benchmark.flops import flops, token_share_cost
from emad_ref.decoding.pair import Partner, shared_vocabulary
from emad_ref.decoding.prefix_tree import SwitchedText, TextRequest
from emad_ref.decoding.self_speculation import drafting_point, self_speculate
from emad_ref.decoding.speculation import ACCEPTED, VERIFIER, SpeculationResult, speculate
from emad_ref.decoding.switching import LARGE, SMALL, SwitchingResult, SwitchingRule
from emad_ref.errors import BadArgument, stop_run_on_error
from emad_ref.exit_rules.rules import default_probes
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.run_resources import RunResources
from emad_ref.measurements.study import PairSizes, Study
from emad_ref.measurements.task_scores import GENERATED_LINE, PublishedTask
from emad_ref.models.loading import LoadedModel
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, Prompt, Session, Step, Unsupported
from emad_ref.record import DRAFT, Bools, Floats, Ints, Record, Tokens, Work
from emad_ref.statistics.units import ByItem
from emad_ref.sweep.front import RoutedItems
from emad_ref.tasks.scoring import (
    AnswerStrategy,
    TaskItem,
    WrittenAnswer,
    encode_item,
    item_clusters,
    majority_accuracy,
    passes_asserts,
)
from emad_ref.text import world
from emad_ref.text.documents import Split


@dataclass(frozen=True, eq=False)
class MarkedItems:
    """Items of one task as some way answered them: ``right`` [items] bool, and per item what was written, a text or
    every option."""

    right: ByItem
    written: list[list[WrittenAnswer]]


PairResult = SwitchingResult | SpeculationResult | Record


@dataclass(frozen=True, eq=False)  # holds arrays: a result is itself, not its values
class ItemAnswers:
    """How items were answered: ``right`` [items] bool; int64 [items] tokens ``emitted``, and those ``by_large``.

    ``flops`` executed, prompts included; None where a decoder does not count. ``runs``: the results they came from;
    ``walks``: of switching, one per item; both empty where options were read. ``entropy_bits``: per text or option
    [its tokens], of whoever was in charge; empty where the way does not tell.
    """

    right: ByItem
    emitted: Ints
    by_large: Ints
    flops: int | None
    runs: tuple[PairResult, ...] = ()
    walks: tuple[SwitchedText, ...] = ()
    entropy_bits: tuple[Floats, ...] = ()

    @classmethod
    def of(
        cls,
        marked: MarkedItems,
        flops: int | None,
        runs: tuple[PairResult, ...] = (),
        walks: tuple[SwitchedText, ...] = (),
    ) -> ItemAnswers:
        """Items as a task marked them: of options, the tokens of all of them are read, and count."""
        emitted = [sum(len(one.tokens) for one in item) for item in marked.written]
        by_large = [sum(one.by_large for one in item) for item in marked.written]
        told = tuple(one.entropy_bits for item in marked.written for one in item if one.entropy_bits is not None)
        return cls(marked.right, np.array(emitted), np.array(by_large), flops, runs, walks, told)

    @property
    def ran(self) -> RoutedItems:
        """What a mixture by items takes in."""
        return RoutedItems(self.right.values.astype(np.float64), self.emitted, self.by_large)

    @property
    def score(self) -> float:
        return float(self.right.values.mean())

    @property
    def large_share(self) -> float:
        return float(self.by_large.sum() / self.emitted.sum())

    @property
    def flops_per_token(self) -> float | None:
        return None if self.flops is None else self.flops / int(self.emitted.sum())

    @property
    def acceptance(self) -> float | None:
        """Accepted over judged drafts of all runs; None where nothing was drafted."""
        runs = [one for one in self.runs if isinstance(one, SpeculationResult)]
        judged = sum(one.judged for one in runs)
        return sum(int(one.drafted(ACCEPTED).sum()) for one in runs) / judged if judged else None


def record_of(result: PairResult) -> Record:
    return result if isinstance(result, Record) else result.record


def is_right(item: TaskItem, text: str) -> bool:
    """Whether ``text``, generated greedily after the item's prompt, answers it: by its beginning, or as a program."""
    return (
        passes_asserts(item.example, text) if item.example.scoring == "runs" else text.startswith(item.example.answer)
    )


def max_answer_tokens(items: Sequence[TaskItem]) -> int:
    """New tokens that the longest right answer takes; of a program, a line."""
    if any(item.example.scoring == "runs" for item in items):
        return GENERATED_LINE
    return max(len(continuation) for item in items for continuation in item.continuations)


def describe_rule(rule: SwitchingRule) -> str:
    """``τ = 0.27 bits, w = 5, d_min = 10, small first``."""
    first = ("small", "large")[rule.start]
    return f"τ = {rule.threshold_bits:.3g} bits, w = {rule.window}, d_min = {rule.least_run}, {first} first"


def answer_row(name: str, done: ItemAnswers, **more: Any) -> dict[str, Any]:
    """A row of the table of ways to answer: everything off records; ``more`` columns stand last."""
    return {
        "decoding": name,
        "score": done.score,
        "large-model share %": done.large_share,
        "MFLOPs per token": None if done.flops_per_token is None else done.flops_per_token / 1e6,
        "items": len(done.right),
    } | more


DRAFT_TOKENS = 4  # k of speculative decoding where none is named


@dataclass(frozen=True)
class VerifierDecoder:
    """``decode``: what emits; ``promised``: which rows of its record are the verifier's, for drafts are no part of the
    promise. Its ledger is not the verifier's alone, so it does not claim to count.
    """

    verifier: Partner
    decode: Callable[[Sequence[Prompt], int, frozenset[int]], SpeculationResult]
    promised: Callable[[Tokens], Bools]

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.verifier.decoder.capabilities, counted=False, deepens=False)

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        raise Unsupported("speculative decoding has no session of its own: judge what it generates")

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        record = self.decode(prompts, max_new, stop).record
        mine, table = self.promised(record.tokens), record.tokens
        columns = {field.name: getattr(table, field.name)[mine] for field in fields(Tokens)}
        tokens = Tokens(**columns | {"model": np.zeros(int(mine.sum()), dtype=np.int64)})
        signal = record.signal[mine][:, : len(self.verifier.point.probes)]
        return Record(tokens, signal, record.emitted, record.stop)

    def synchronize(self) -> None:
        self.verifier.decoder.synchronize()

    def close(self) -> None:
        """The partners belong to the caller."""


def speculative_decoder(draft: Partner, verifier: Partner, k: int = DRAFT_TOKENS) -> VerifierDecoder:
    """One model drafts, another verifies."""
    return VerifierDecoder(
        verifier,
        lambda prompts, new, stop: speculate(draft, verifier, prompts, new, k=k, stop=stop),
        lambda tokens: tokens.model == VERIFIER,
    )


def self_speculative_decoder(model: Partner, exit_layer: int, k: int = DRAFT_TOKENS) -> VerifierDecoder:
    """One model drafts after ``exit_layer`` and verifies at its ceiling."""
    return VerifierDecoder(
        model,
        lambda prompts, new, stop: self_speculate(model, exit_layer, prompts, new, k=k, stop=stop),
        lambda tokens: tokens.phase != DRAFT,
    )


PAIR_OPTION = "--emad-pair"


class PairModels:
    """``small`` and ``large``: the evidence of each, which read the same ids. ``parameters``: of both, by argument.

    Raises:
        BadArgument: tokenizers that differ or are missing, an encoder-decoder, or a small model that is not smaller.
    """

    def __init__(self, small: LoadedModel, large: LoadedModel, study: Study, host: RunResources, size: PairSizes):
        _require_decoders(small, large)
        self.vocabulary = shared_vocabulary(small, large)
        parameters = small.geometry.parameters(), large.geometry.parameters()
        if parameters[0] >= parameters[1]:
            raise BadArgument(
                PAIR_OPTION,
                f"{small.name} ({parameters[0]:,} parameters), {large.name} ({parameters[1]:,})",
                "the small model to have fewer parameters than the large one",
                "name them the other way round, or take another pair",
            )
        self.parameters = {"small_parameters": float(parameters[0]), "large_parameters": float(parameters[1])}
        # a profile or margin of the study belongs to the model under test
        budget = replace(study.budget, calibrate=size.calibrate)
        own = replace(study, profile=None, margin=None, budget=budget)
        self.small, self.large = (ModelMeasurements(loaded, own, host) for loaded in (small, large))

    @property
    def both(self) -> tuple[ModelMeasurements, ModelMeasurements]:
        """In the order of ``switching.SMALL`` and ``LARGE``."""
        return self.small, self.large

    @property
    def fingerprint(self) -> str:
        return "+".join(evidence.fingerprint for evidence in self.both)

    @property
    def without_quality(self) -> str:
        """Why scores mean nothing; empty where they do."""
        return self.small.subject.without_quality or self.large.subject.without_quality

    # ------------------------------------------------------------ cost

    def saving(self, large_share: float) -> float:
        """The paper's: tokens weighted by parameters, catch-up left out."""
        return 1 - token_share_cost(large_share, **self.parameters)

    def share_for(self, saving: float) -> float:
        """The largest share of the large model that saves ``saving`` by the paper's cost; below 0 where none does."""
        ratio = self.parameters["small_parameters"] / self.parameters["large_parameters"]
        return (1 - saving - ratio) / (1 - ratio)

    @cached_property
    def counted(self) -> bool:
        """Whether both decoders count their work, so that the ledger speaks for them."""
        with self.partners() as both:
            return all(partner.decoder.capabilities.counted for partner in both)

    def flops(self, work: Mapping[int, Work]) -> int:
        """FLOPs of what the models executed, by their numbers."""
        return sum(flops(part, self.both[model].loaded.geometry).total for model, part in work.items())

    def walked(self, walks: Sequence[SwitchedText], opening: bool = False) -> int:
        """FLOPs of ``walks``, or of ``opening`` them with the prompts alone, by what our full depth executes."""
        layers = [evidence.subject.stepper.layers for evidence in self.both]
        return sum(
            self.flops({model: walk.work(model, layers[model], opening)}) for walk in walks for model in (SMALL, LARGE)
        )

    def spent(self, results: Sequence[PairResult], model: int = LARGE) -> Floats | None:
        """FLOPs of each result, prompts included; None if a decoder does not count.

        Where one model alone did the work, it was ``model``.
        """
        spent = []
        for one in results:
            work = record_of(one).work
            if work is None:
                return None
            spent.append(self.flops({model: work[0]} if len(work) == 1 else work))
        return np.array(spent, dtype=np.float64)

    # ------------------------------------------------------------ decoders

    @contextmanager
    def partners(
        self,
        small: OperatingPoint | None = None,
        large: OperatingPoint | None = None,
        rows: int = 1,
        *,
        audited: bool = False,
    ) -> Iterator[tuple[Partner, Partner]]:
        """Decoders of both models from the host, at full depth unless points are given, open as long as the block.

        ``audited``: a verdict reads what they answer, which costs too much to watch where it is timed.

        Raises:
            AuditRefutedError: as ``Subject.open_audited``.
        """
        points = small or self.small.subject.full, large or self.large.subject.full
        with ExitStack() as stack:
            made = [
                (evidence.subject.open_audited if audited else evidence.subject.open)(point, max_rows=rows)
                for evidence, point in zip(self.both, points, strict=True)
            ]
            one, other = (
                Partner(stack.enter_context(each), point, self.vocabulary)
                for each, point in zip(made, points, strict=True)
            )
            yield one, other

    @contextmanager
    def drafting(self, rows: int = 1) -> Iterator[Partner]:
        """The large model at full depth, able to draft for itself, open as long as the block.

        Raises:
            Unsupported: its decoder does not take up tokens that stopped early.
        """
        point = drafting_point(self.large.subject.stepper.layers)
        with self.large.subject.open(point, max_rows=rows) as decoder:
            if not decoder.capabilities.deepens:
                raise Unsupported("the decoder does not take up tokens that stopped early: it cannot draft for itself")
            yield Partner(decoder, point, self.vocabulary)

    @cached_property
    def without_drafting(self) -> str:
        """Why the large model cannot draft for itself; empty where it can."""
        try:
            with self.drafting():
                return ""
        except Unsupported as refusal:
            return str(refusal)

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """After which layers the large model drafts for itself: its default probes; none where it cannot."""
        return () if self.without_drafting else default_probes(self.large.subject.stepper.layers)


def _require_decoders(*models: LoadedModel) -> None:
    readers = [model.name for model in models if model.geometry.encoder_layers]
    if readers:
        raise BadArgument(PAIR_OPTION, ", ".join(readers), "decoder-only models", "tasks have no source")


TEXTS = "plain documents"  # name of what is written on where there is no task
WORLD = "world tasks"  # what reports call them together


class PairTask(Protocol):
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

    def texts(self, split: Split, count: int) -> list[TextRequest]:
        """What is to be written for each item; raises Unsupported where options are read."""

    def answered(self, way: AnswerStrategy, split: Split, count: int) -> MarkedItems:
        """At most ``count`` items of a split, the same for every way."""


class WorldTask:
    """A task of the world: ``seed`` makes its items."""

    generated, scored = True, True

    def __init__(self, name: str, models: PairModels, seed: int, guessed_on: int):
        self.name, self._models, self._seed, self._guessed_on = name, models, seed, guessed_on
        self._items: dict[tuple[Split, int], list[TaskItem]] = {}

    def items(self, split: Split, count: int) -> list[TaskItem]:
        key, large = (split, count), self._models.large.subject
        if key not in self._items:
            made = world.examples(self.name, split, count, self._seed)
            self._items[key] = [encode_item(example, large.tokenizer, large.opening) for example in made]
        return self._items[key]

    @property
    def guess(self) -> float:
        """The better of two: from the input's own symbols, and the answer most frequent on validation."""
        examples = [item.example for item in self.items("validate", self._guessed_on)]
        return max(float(np.mean([example.chance for example in examples])), majority_accuracy(examples, examples))

    def texts(self, split: Split, count: int) -> list[TextRequest]:
        items = self.items(split, count)
        stop = frozenset(self._models.large.subject.tokenizer.encode("\n", add_special_tokens=False))
        return [TextRequest(item.prompt, max_answer_tokens(items), stop) for item in items]

    def answered(self, way: AnswerStrategy, split: Split, count: int) -> MarkedItems:
        written = way.write(self.texts(split, count))
        decode, items = self._models.large.subject.tokenizer.decode, self.items(split, count)
        right = [is_right(item, decode(one.tokens.tolist())) for item, one in zip(items, written, strict=True)]
        return MarkedItems(ByItem(np.array(right, dtype=bool), item_clusters(items)), [[one] for one in written])


class LmEvalPairTask:
    """A task of lm-eval's that the user named, scored by lm-eval."""

    scored = True

    def __init__(self, task: PublishedTask, models: PairModels):
        self._task, self._models, self._study = task, models, models.large.subject.study
        self._texts: dict[tuple[Split, int], list[TextRequest]] = {}

    @property
    def name(self) -> str:
        return self._task.name

    @property
    def guess(self) -> float:
        return self._task.guess

    @property
    def generated(self) -> bool:
        return self._task.metric != "acc"

    def texts(self, split: Split, count: int) -> list[TextRequest]:
        if not self.generated:
            raise Unsupported(f"{self.name}: options are read, no text is written")
        if (split, count) not in self._texts:
            nothing = AnswerStrategy(
                lambda wanted: [WrittenAnswer(np.empty(0, dtype=np.int64), 0) for _ in wanted], None
            )
            self.answered(nothing, split, count)
        return self._texts[split, count]

    def answered(self, way: AnswerStrategy, split: Split, count: int) -> MarkedItems:
        from emad_ref.tasks.pair_harness import answer_documents, task_documents

        study, both = self._study, (self._models.small.loaded, self._models.large.loaded)
        with stop_run_on_error():
            documents = task_documents(self._task.members, split, count, data=study.data, limit=study.limit)
        if not documents:
            raise Unsupported(f"{self.name}: no document of {split} among {self._task.of}; name a larger file or limit")
        outcome = answer_documents(way, documents, both, data=study.data, run_code=study.allow_code_execution)
        self._texts[split, count] = outcome.wanted
        # items of one text tell one thing, however often they are asked
        questions: Ints = np.unique([one.question for one in documents], return_inverse=True)[1].astype(np.int64)
        return MarkedItems(ByItem(outcome.right, questions), outcome.written)


class DocumentOpenings:
    """Openings of the large model's documents to be written on, ``new`` tokens each: nothing in them is right or wrong.

    The splits are made of different documents: the first half of those drawn, and the second.
    """

    name, generated, scored, guess = TEXTS, True, False, 0.0

    def __init__(self, models: PairModels):
        self._subject = models.large.subject
        self._new = models.large.subject.budget.new_tokens

    def texts(self, split: Split, count: int) -> list[TextRequest]:
        room = self._subject.stepper.max_positions - self._new
        drawn = self._subject.prompts(2 * count, min(self._subject.budget.prompt_tokens, room))
        half = drawn[:count] if split == "validate" else drawn[count:]
        return [TextRequest(prompt.tokens, self._new) for prompt in half]

    def answered(self, way: AnswerStrategy, split: Split, count: int) -> MarkedItems:
        written = way.write(self.texts(split, count))
        return MarkedItems(ByItem.distinct(np.zeros(len(written), dtype=bool)), [[one] for one in written])


def pair_tasks(models: PairModels, seed: int, guessed_on: int) -> dict[str, PairTask]:
    """Every task that this run can score, by name; none where the corpus is not of the world and none is named.

    Args:
        guessed_on: validation items from which the most frequent answer is read.
    """
    subject, found = models.large.subject, {}
    if subject.corpus.startswith("world:"):
        found = {name: WorldTask(name, models, seed, guessed_on) for name in world.TASKS}
    published = models.large.scored.published
    named: dict[str, PairTask] = {name: LmEvalPairTask(published.scored[name], models) for name in published.answered}
    return {**found, **named}
