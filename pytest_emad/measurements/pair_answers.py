"""Answers to task items by either model alone, by switching, by speculation, and by self-speculation.

Each way is decoded once and kept. Switching and the single models share texts in a prefix tree
(``decoding.prefix_tree``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from emad_ref.decoding.prefix_tree import PrefixTrees, SwitchedText, TextGenerationRequest
from emad_ref.decoding.self_speculation import self_speculate
from emad_ref.decoding.speculation import ACCEPTED, GATED, SpeculationResult, speculate
from emad_ref.decoding.switching import LARGE, SwitchingRule
from emad_ref.errors import stop_run_on_error
from emad_ref.models.tokenizers import decode_tokens
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import Bools, Floats, Ints
from emad_ref.text import world
from emad_ref.text.documents import Split
from pytest_emad.measurements.latency import Decoding
from pytest_emad.measurements.pair_models import DRAFT_TOKENS, PairModels
from pytest_emad.measurements.task_scores import LmEvalTaskMetadata
from pytest_emad.statistics.units import ByItem
from pytest_emad.sweep.front import RoutedTaskItems
from pytest_emad.tasks.answers import GENERATED_LINE
from pytest_emad.tasks.scoring import (
    Continuations,
    EncodedTaskItem,
    OptionScore,
    PairAnswerFunctions,
    PairAnswerTokens,
    cluster_duplicate_items,
    encode_item,
    is_code_completion_correct,
    majority_accuracy,
)

PAIR_ROWS = 64
TEXTS = "plain documents"  # replaces a task if there is none
WORLD = "world tasks"  # common name in reports
MarkedItems = tuple[ByItem, list[list[PairAnswerTokens]]]  # right [items] bool; per item a text, or every option


@dataclass(frozen=True, eq=False)  # holds arrays: results compare by identity
class ItemAnswers:
    """Answers to items by one way of decoding: ``right`` [items] bool; int64 [items] tokens ``emitted``, ``by_large``.

    ``flops`` executed, prompts included; None if a decoder does not count. ``runs``: the decoded outputs; ``walks``:
    switched texts, one per item; both empty if options were scored. ``entropy_bits``: per text or option [its tokens],
    of the model that wrote each; empty if the way does not record it.
    """

    right: ByItem
    emitted: Ints
    by_large: Ints
    flops: int | None
    runs: tuple[Decoding, ...] = ()
    walks: tuple[SwitchedText, ...] = ()
    entropy_bits: tuple[Floats, ...] = ()

    @classmethod
    def from_marked_items(
        cls,
        marked: MarkedItems,
        flops: int | None,
        runs: tuple[Decoding, ...] = (),
        walks: tuple[SwitchedText, ...] = (),
    ) -> ItemAnswers:
        """Items as a task marked them; for options all tokens count."""
        right, written = marked
        emitted = [sum(len(one.tokens) for one in item) for item in written]
        by_large = [sum(one.by_large for one in item) for item in written]
        entropies = tuple(one.entropy_bits for item in written for one in item if one.entropy_bits is not None)
        return cls(right, np.array(emitted), np.array(by_large), flops, runs, walks, entropies)

    @property
    def item_scores_and_token_counts(self) -> RoutedTaskItems:
        """Input of a mixture by items."""
        return RoutedTaskItems(self.right.values.astype(np.float64), self.emitted, self.by_large)

    @property
    def mean_score(self) -> float:
        return float(self.right.values.mean())

    @property
    def large_share(self) -> float:
        return float(self.by_large.sum() / self.emitted.sum())

    @property
    def flops_per_token(self) -> float | None:
        return None if self.flops is None else self.flops / int(self.emitted.sum())

    @property
    def accepted_share(self) -> float | None:
        """Accepted over judged drafts of all runs; None without drafts."""
        runs = [one for one in self.runs if isinstance(one, SpeculationResult)]
        judged = sum(one.judged_count for one in runs)
        return sum(int(one.count_drafts_by_sequence(ACCEPTED).sum()) for one in runs) / judged if judged else None


def is_right(item: EncodedTaskItem, text: str) -> bool:
    """Whether ``text``, generated greedily after the item's prompt, answers it: by its beginning, or as a program."""
    return (
        is_code_completion_correct(item.example, text)
        if item.example.scoring == "runs"
        else text.startswith(item.example.answer)
    )


def compute_max_answer_tokens(items: Sequence[EncodedTaskItem]) -> int:
    """Number of new tokens of the longest right answer; for a program, of a line."""
    if any(item.example.scoring == "runs" for item in items):
        return GENERATED_LINE
    return max(len(continuation) for item in items for continuation in item.continuations)


def describe_rule(rule: SwitchingRule) -> str:
    """``τ = 0.27 bits, w = 5, d_min = 10, small first``."""
    first = ("small", "large")[rule.start]
    return f"τ = {rule.threshold_bits:.3g} bits, w = {rule.window}, d_min = {rule.least_run}, {first} first"


def make_answer_row(name: str, done: ItemAnswers, **more: Any) -> dict[str, Any]:
    """A row of the table of ways to answer, all from records; ``more`` columns come last."""
    return {
        "decoding": name,
        "score": done.mean_score,
        "large-model share %": done.large_share,
        "MFLOPs per token": None if done.flops_per_token is None else done.flops_per_token / 1e6,
        "items": len(done.right),
    } | more


@dataclass(frozen=True, eq=False)
class PairTask:
    """A task for pairs; ``generated``: answers are written, else options are scored.

    ``guess``      accuracy of an honest guess.
    ``texts``      (split, count) → requests for each item. Raises Unsupported if options are scored.
    ``answered``   (way, split, count) → at most ``count`` items of a split, the same for every way.
    ``published``  whether lm-eval scores it.
    """

    name: str
    guess: Callable[[], float]
    texts: Callable[[Split, int], list[TextGenerationRequest]]
    answered: Callable[[PairAnswerFunctions, Split, int], MarkedItems]
    generated: bool = True
    published: bool = False


def make_world_task(name: str, models: PairModels, seed: int, guessed_on: int) -> PairTask:
    """A task of the world; ``seed`` makes its items, ``guessed_on`` validation items give the most frequent answer."""
    large = models.large.subject

    @cache
    def items(split: Split, count: int) -> list[EncodedTaskItem]:
        examples = world.generate_examples(name, split, count, seed)
        return [encode_item(example, large.tokenizer, large.opening_token) for example in examples]

    def guess() -> float:
        """The better of two guesses: from the input's own symbols, and the most frequent answer on validation."""
        examples = [item.example for item in items("validate", guessed_on)]
        return max(
            float(np.mean([example.chance_accuracy for example in examples])), majority_accuracy(examples, examples)
        )

    def texts(split: Split, count: int) -> list[TextGenerationRequest]:
        stop = frozenset(large.tokenizer.encode("\n", add_special_tokens=False))
        most = compute_max_answer_tokens(items(split, count))
        return [TextGenerationRequest(item.prompt, most, stop) for item in items(split, count)]

    def answered(way: PairAnswerFunctions, split: Split, count: int) -> MarkedItems:
        written, asked = way.write(texts(split, count)), items(split, count)
        decoded = [decode_tokens(large.tokenizer, one.tokens.tolist()) for one in written]
        right = np.array([is_right(*each) for each in zip(asked, decoded, strict=True)], dtype=bool)
        return ByItem(right, cluster_duplicate_items(asked)), [[one] for one in written]

    return PairTask(name, guess, texts, answered)


def make_lm_eval_task(task: LmEvalTaskMetadata, models: PairModels) -> PairTask:
    """A task of lm-eval's that the user named, scored by lm-eval."""
    study, generated = models.large.subject.study, task.metric != "acc"
    requests: dict[tuple[Split, int], list[TextGenerationRequest]] = {}

    def texts(split: Split, count: int) -> list[TextGenerationRequest]:
        if not generated:
            raise Unsupported(f"{task.name}: options are read, no text is written")
        if (split, count) not in requests:
            empty = PairAnswerTokens(np.empty(0, dtype=np.int64), 0)
            answered(PairAnswerFunctions(lambda wanted: [empty for _ in wanted], None), split, count)
        return requests[split, count]

    def answered(way: PairAnswerFunctions, split: Split, count: int) -> MarkedItems:
        from pytest_emad.tasks.pair_lm_eval_model import answer_documents, select_task_documents

        both = models.small.loaded, models.large.loaded
        with stop_run_on_error():
            documents = select_task_documents(
                task.members, split, count, data=study.data, definitions=study.task_path, limit=study.limit
            )
        if not documents:
            raise Unsupported(f"{task.name}: no document of {split} among {task.of}; name a larger file or limit")
        outcome = answer_documents(
            way,
            documents,
            both,
            data=study.data,
            definitions=study.task_path,
            run_code=study.allow_code_execution,
        )
        requests[split, count] = outcome.wanted
        # items of one text depend on each other
        questions: Ints = np.unique([one.question for one in documents], return_inverse=True)[1].astype(np.int64)
        return ByItem(outcome.right, questions), outcome.written

    return PairTask(task.name, lambda: task.guess, texts, answered, generated, published=True)


def make_openings_task(models: PairModels) -> PairTask:
    """Openings of the large model's documents, to be continued; answers are not scored.

    The splits have different documents: the first half of those drawn, and the second.
    """
    subject = models.large.subject
    budget = subject.budget

    def texts(split: Split, count: int) -> list[TextGenerationRequest]:
        room = subject.stepper.max_positions - budget.new_tokens
        prompts = subject.make_equal_prompts(2 * count, min(budget.prompt_tokens, room))
        half = prompts[:count] if split == "validate" else prompts[count:]
        return [TextGenerationRequest(prompt.tokens, budget.new_tokens) for prompt in half]

    def answered(way: PairAnswerFunctions, split: Split, count: int) -> MarkedItems:
        written = way.write(texts(split, count))
        return ByItem.from_independent_items(np.zeros(len(written), dtype=bool)), [[one] for one in written]

    return PairTask(TEXTS, lambda: 0.0, texts, answered)


def group_by_prompt_length(items: Sequence[TextGenerationRequest]) -> list[list[int]]:
    """Indices of items in groups of equally long prompts, at most ``PAIR_ROWS`` each."""
    groups: list[list[int]] = []
    for index in sorted(range(len(items)), key=lambda index: len(items[index].prompt)):
        last = groups[-1] if groups else []
        if last and len(items[last[0]].prompt) == len(items[index].prompt) and len(last) < PAIR_ROWS:
            last.append(index)
        else:
            groups.append([index])
    return groups


def decode_groups(
    items: Sequence[TextGenerationRequest],
    groups: list[list[int]],
    decode: Callable[[list[Prompt], TextGenerationRequest], SpeculationResult],
) -> tuple[list[Ints], list[SpeculationResult]]:
    """Emitted tokens per item, and the result of each of ``groups``.

    ``decode`` takes prompts and one text request, since all of one task stop alike.
    """
    results = []
    emitted: list[Ints] = [np.empty(0, dtype=np.int64)] * len(items)
    for rows in groups:
        done = decode([Prompt(items[row].prompt) for row in rows], items[rows[0]])
        results.append(done)
        for row, tokens in zip(rows, done.record.emitted, strict=True):
            emitted[row] = tokens
    return emitted, results


class PairAnswers:
    """Answers of a pair. Each request names a task, a split and a number of items.

    ``guessed_on``: validation items that give a task's most frequent answer.
    """

    def __init__(self, models: PairModels, seed: int, guessed_on: int):
        self.models, self.seed, self._guessed_on = models, seed, guessed_on
        self._answers: dict[tuple[object, ...], ItemAnswers] = {}
        self._texts = PrefixTrees(PAIR_ROWS)

    @cached_property
    def scorable_tasks(self) -> dict[str, PairTask]:
        """The tasks that this run can score, by name; empty for another corpus than the world's and no named task."""
        tasks = {}
        if self.models.large.corpus.startswith("world:"):
            tasks = {name: make_world_task(name, self.models, self.seed, self._guessed_on) for name in world.TASKS}
        published = self.models.large.task_scores.published
        return tasks | {
            name: make_lm_eval_task(published.scorable_tasks[name], self.models) for name in published.accuracy_tasks
        }

    @cached_property
    def _unscored(self) -> PairTask:
        return make_openings_task(self.models)

    def get_task(self, name: str) -> PairTask:
        """A task of this run, or the texts that replace it if there is none."""
        return self._unscored if name == TEXTS else self.scorable_tasks[name]

    def make_prompts(self, task: str, split: Split, count: int) -> list[Prompt]:
        """Prompts of at most ``count`` items. Raises Unsupported if options are scored."""
        return [Prompt(text.prompt) for text in self.get_task(task).texts(split, count)]

    # ------------------------------------------------------------ ways to answer

    def answer_by_one_model(self, model: int, task: str, split: Split, count: int) -> ItemAnswers:
        """Items answered by one model of the pair alone, at full depth."""
        return self.answer_by_switching(self.make_single_model_rule(model), task, split, count)

    def make_single_model_rule(self, model: int) -> SwitchingRule:
        """The rule under which ``model`` writes everything: it starts, and τ is 0 or above every entropy."""
        # a uniform distribution reaches log₂ V, and one token alone never ends a run this long
        longest = min(evidence.subject.stepper.max_positions for evidence in self.models.both)
        bits = 0.0 if model == LARGE else float(np.log2(self.models.vocabulary))
        return SwitchingRule(bits, window=1, least_run=longest, start=model)

    def answer_by_switching(self, rule: SwitchingRule, task: str, split: Split, count: int) -> ItemAnswers:
        """Items answered by EAD, both models at full depth."""
        return self.answer_by_switching_rules([rule], task, split, count)[0]

    def answer_by_switching_rules(
        self, rules: Sequence[SwitchingRule], task: str, split: Split, count: int
    ) -> list[ItemAnswers]:
        """``answer_by_switching`` for several rules: common prefixes are decoded once, and in full batches."""
        scored_task = self.get_task(task)
        new = [rule for rule in rules if self._key(rule, task, split, count) not in self._answers]
        if scored_task.generated and len(new) > 1:
            texts = scored_task.texts(split, count)
            with self.models.open_partners(rows=PAIR_ROWS, audited=True) as partners:
                self._texts.generate_switched(partners, [(text, rule) for rule in new for text in texts])
        return [self._switched(rule, task, split, count) for rule in rules]

    def _key(self, rule: SwitchingRule, task: str, split: Split, count: int) -> tuple[object, ...]:
        return ("switched", rule, task, split, count)

    def _switched(self, rule: SwitchingRule, task: str, split: Split, count: int) -> ItemAnswers:
        walks: list[SwitchedText] = []

        def write(requests: Sequence[TextGenerationRequest]) -> list[PairAnswerTokens]:
            with self.models.open_partners(rows=PAIR_ROWS, audited=True) as partners:
                walks[:] = self._texts.generate_switched(partners, [(text, rule) for text in requests])
            return [PairAnswerTokens(walk.tokens, walk.large_model_token_count, walk.entropy_bits) for walk in walks]

        def read(options: Continuations) -> list[OptionScore]:
            with self.models.open_partners() as partners:
                answers = self._texts.score_continuations(partners, options, rule)
            return [
                OptionScore(
                    float(walk.log_p.sum()),
                    bool(walk.greedy.all()),
                    PairAnswerTokens(tokens, int(walk.model.sum()), walk.entropy_bits),
                )
                for (_, tokens), walk in zip(options, answers, strict=True)
            ]

        def run() -> ItemAnswers:
            marked = self.get_task(task).answered(PairAnswerFunctions(write, read), split, count)
            flops = self.models.compute_switched_flops(walks) if walks and self.models.has_work_counts else None
            return ItemAnswers.from_marked_items(marked, flops, (), tuple(walks))

        return self._cached(self._key(rule, task, split, count), run)

    def answer_by_speculation(
        self,
        task: str,
        split: Split,
        count: int,
        *,
        k: int = DRAFT_TOKENS,
        gate_bits: float | None = None,
    ) -> ItemAnswers:
        """Items answered by speculative decoding, both models at full depth.

        Tokens without a draft count as the large model's, whether the gate or the verifier accepted the others. Options
        are scored as by the large model alone, since speculation is lossless.

        Raises:
            Unsupported: options with a gate, since scoring them drafts no token.
        """

        def generated(requests: Sequence[TextGenerationRequest]) -> tuple[list[PairAnswerTokens], list[Decoding]]:
            groups = group_by_prompt_length(requests)
            with self.models.open_partners(rows=PAIR_ROWS, audited=True) as (small, large):

                def decode(prompts: list[Prompt], text: TextGenerationRequest) -> SpeculationResult:
                    return speculate(
                        small, large, prompts, text.most, k=k, stop=text.stop, gate_bits=gate_bits, ended=text.ended
                    )

                emitted, done = decode_groups(requests, groups, decode)
            by_large = np.array([len(tokens) for tokens in emitted])
            for rows, one in zip(groups, done, strict=True):
                by_large[rows] -= one.count_drafts_by_sequence(ACCEPTED) + one.count_drafts_by_sequence(GATED)
            return [PairAnswerTokens(*both) for both in zip(emitted, by_large.tolist(), strict=True)], list(done)

        if gate_bits is None and not self.get_task(task).generated:
            return self.answer_by_one_model(LARGE, task, split, count)
        return self._decoded(("speculated", k, gate_bits, task, split, count), generated)

    def answer_by_speculation_without_flops(
        self, k: int, gate_bits: float | None, task: str, split: Split, count: int
    ) -> ItemAnswers:
        """Tokens and shares of ``answer_by_speculation``, read from the texts that rules share; without its work.

        ``entropy_bits``: of the drafts that were judged.
        """

        def write(requests: Sequence[TextGenerationRequest]) -> list[PairAnswerTokens]:
            with self.models.open_partners(rows=PAIR_ROWS, audited=True) as partners:
                spoken = self._texts.generate_speculative(partners, requests, k, gate_bits)
            return [PairAnswerTokens(one.tokens, int(one.model.sum()), one.entropy_bits) for one in spoken]

        def run() -> ItemAnswers:
            return ItemAnswers.from_marked_items(
                self.get_task(task).answered(PairAnswerFunctions(write, None), split, count), None
            )

        return self._cached(("gated", k, gate_bits, task, split, count), run)

    def answer_by_self_speculation(self, exit_layer: int, task: str, split: Split, count: int) -> ItemAnswers:
        """Items answered by the large model, which drafts for itself after ``exit_layer``: all tokens are its own."""

        def generated(requests: Sequence[TextGenerationRequest]) -> tuple[list[PairAnswerTokens], list[Decoding]]:
            with self.models.open_self_drafter(rows=PAIR_ROWS) as model:

                def decode(prompts: list[Prompt], text: TextGenerationRequest) -> SpeculationResult:
                    return self_speculate(
                        model, exit_layer, prompts, text.most, k=DRAFT_TOKENS, stop=text.stop, ended=text.ended
                    )

                emitted, done = decode_groups(requests, group_by_prompt_length(requests), decode)
            return [PairAnswerTokens(tokens, len(tokens)) for tokens in emitted], list(done)

        if not self.get_task(task).generated:
            return self.answer_by_one_model(LARGE, task, split, count)
        return self._decoded(("self-speculated", exit_layer, task, split, count), generated)

    def _decoded(
        self,
        key: tuple[object, ...],
        generated: Callable[[Sequence[TextGenerationRequest]], tuple[list[PairAnswerTokens], list[Decoding]]],
    ) -> ItemAnswers:
        """Answers whose work is read from records; ``key`` ends with task, split and number of items."""
        runs: list[Decoding] = []

        def write(requests: Sequence[TextGenerationRequest]) -> list[PairAnswerTokens]:
            written, done = generated(requests)
            runs.extend(done)
            return written

        def run() -> ItemAnswers:
            task, split, count = key[-3:]
            marked = self.get_task(str(task)).answered(PairAnswerFunctions(write, None), split, count)  # type: ignore[arg-type]
            spent = self.models.compute_flops_per_decoding(runs)
            return ItemAnswers.from_marked_items(marked, None if spent is None else int(spent.sum()), tuple(runs))

        return self._cached(key, run)

    def _cached(self, key: tuple[object, ...], run: Callable[[], ItemAnswers]) -> ItemAnswers:
        if key not in self._answers:
            self._answers[key] = run()
        return self._answers[key]

    # ------------------------------------------------------------ greedy choices of either model

    def make_greedy_choice_masks(
        self, model: int, done: ItemAnswers, task: str, split: Split, count: int
    ) -> list[Bools]:
        """Per item, [emitted] whether each token of a walk is the greedy choice of ``model`` there."""
        with self.models.open_partners(rows=PAIR_ROWS, audited=True) as partners:
            return [
                self._texts.greedy_choice_mask(partners, text, walk, model)
                for text, walk in zip(self.get_task(task).texts(split, count), done.walks, strict=True)
            ]
