"""Task accuracy of one model at an operating point: the tasks of its corpus, and lm-eval's that the study names.

A corpus of the world has five tasks. Any other text has one, continuation choice (``tasks.scoring``), from the
documents that judge perplexity. Only validation items of these choose a margin.

lm-eval is an extra and slow to import: it is imported when the first of its tasks is scored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from emad_ref.absent import Absent
from emad_ref.calibration.trace import Trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import stop_run_on_error
from emad_ref.exit_rules import default_probes
from emad_ref.models.geometry import Geometry
from emad_ref.models.tokenizers import decode_tokens
from emad_ref.point import OperatingPoint
from emad_ref.record import Bools, Ints
from emad_ref.replay.grids import NetSavingFunction
from emad_ref.text import world
from emad_ref.text.documents import SPLITS, Split
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.statistics.accuracy import TaskAccuracy
from pytest_emad.statistics.units import ByDocument, ByItem, DocumentMembership
from pytest_emad.tasks.answers import (
    Decode,
    LostAnswer,
    TaskAnswer,
    answers_from_trace,
    lost_answers,
    write_programs,
)
from pytest_emad.tasks.continuation_scoring import mark_correct_items_by_decoding, required_layers
from pytest_emad.tasks.datasets import TaskDataUnavailable
from pytest_emad.tasks.sandbox import absent_sandbox
from pytest_emad.tasks.scoring import (
    CONTEXT_TOKENS,
    CONTINUATION_CHOICE,
    CONTINUATION_TOKENS,
    OPTIONS,
    EncodedTaskItem,
    cluster_duplicate_items,
    guess_accuracy,
    make_continuation_items,
    make_world_items,
    mark_correct_items_from_trace,
    to_token_sequences,
)

if TYPE_CHECKING:
    from pytest_emad.tasks.evaluation import TaskResult
    from pytest_emad.tasks.lm_eval_model import EmadLM


RIGHT_OR_WRONG = frozenset({"acc", "exact_match", "exact", "pass@1"})  # lm-eval's metrics that are 0 or 1 per document
READ_OUTPUT_TYPES = ("multiple_choice", "generate_until", "loglikelihood", "loglikelihood_rolling")
PERPLEXITIES = frozenset({"word_perplexity"})
REPLAYED = 200  # replayed requests of a task for its saving
FOREIGN_ROWS = 32  # most rows of a request to a foreign decoder


@dataclass(frozen=True)
class LmEvalTaskMetadata:
    """An lm-eval task as scored in this run: ``documents`` of ``of``, by ``metric``, the first of the first member.

    ``members``: lm-eval's names, several for a group. A group is one task: benchmarks count, not their parts.
    ``guess``: share right by chance among the options, or by the most frequent answer of the scored documents.
    """

    name: str
    members: tuple[str, ...]
    documents: int
    of: int
    metric: str
    guess: float


class LmEvalTaskScorer:
    """lm-eval tasks of one model's study, each scored on first use.

    Accuracy, exact match and pass@1 are right or wrong per document. Perplexity is one more corpus. Any other metric,
    such as ROUGE, is shown and does not decide. ``absent_by_task`` has each task that cannot be scored here.
    """

    def __init__(self, subject: ModelUnderTest):
        self._subject, self._study = subject, subject.study
        self._results: dict[tuple[str, OperatingPoint], TaskResult] = {}
        self._asked_at_full: dict[str, list[TokenSequence]] = {}
        self._traces: dict[str, Trace] = {}

    # ------------------------------------------------------------ which tasks

    @cached_property
    def _members(self) -> dict[str, tuple[str, ...]]:
        """Task → its lm-eval names, without tasks that others cover. Raises BadArgument for an unknown name."""
        from pytest_emad.tasks.evaluation import expand_task_tags, make_task_manager

        self._study.require_known_tasks()
        names = sorted(self._study.tasks)
        manager = make_task_manager(None, self._study.task_path, names)
        by_task = {
            name: tuple(manager.task_index[name].cfg["task"]) if name in manager.all_groups else (name,)
            for name in expand_task_tags(names, manager)
        }
        return {name: members for name, members in by_task.items() if name not in self._twice(by_task)}

    def _twice(self, members_by_task: Mapping[str, tuple[str, ...]]) -> set[str]:
        grouped = {member for name, members in members_by_task.items() if members != (name,) for member in members}
        own = {f"world_{task}" for task in world.TASKS} if self._subject.corpus.startswith("world:") else set()
        return set(members_by_task) & (grouped | own)

    @cached_property
    def _asked(self) -> dict[str, LmEvalTaskMetadata | Absent]:
        """Requested task → its definition and documents, or why it cannot be scored. An error ends the run."""
        if not self._study.tasks:
            return {}
        with stop_run_on_error():
            self._study.require_extras()
            return {name: self._read(name, members) for name, members in self._members.items()}

    def _read(self, name: str, members: tuple[str, ...]) -> LmEvalTaskMetadata | Absent:
        """Definition and documents of a task."""
        from pytest_emad.tasks.evaluation import load_tasks, make_task_manager

        try:
            tasks = load_tasks(make_task_manager(self._study.data, self._study.task_path, members), members)["tasks"]
        except TaskDataUnavailable as error:
            return Absent(str(error))
        for task in tasks.values():
            if absent := self._absent_score(task):
                return absent
        read = [
            (task, document) for task in tasks.values() for document in islice(task.eval_docs, self.documents_per_task)
        ]
        guess = max(float(np.mean([_guess_chance(*each) for each in read])), _majority_share(read))
        everything = sum(len(task.eval_docs) for task in tasks.values())
        metric = str(tasks[members[0]].config.metric_list[0]["metric"])
        return LmEvalTaskMetadata(name, members, len(read), everything, metric, guess)

    def _absent_score(self, task: Any) -> Absent | None:
        """Why ``task`` cannot be scored here; None if it can."""
        loaded, positions = self._subject.loaded, self._subject.stepper.max_positions
        if loaded.tokenizer is None or not loaded.end_token_ids:
            return Absent("the model came without a tokenizer, or without an end-of-text token")
        if task.get_config("unsafe_code"):
            if self._study.allow_code_execution is None:
                return Absent("it runs generated programs: --emad-allow-code-execution allows that, in a sandbox")
            if self._study.allow_code_execution == "confined" and (absent := absent_sandbox()):
                return absent
        if task.OUTPUT_TYPE not in READ_OUTPUT_TYPES:
            return Absent(f"its output type is {task.OUTPUT_TYPE!r}; {', '.join(READ_OUTPUT_TYPES)} are scored here")
        new_tokens = _new_tokens(task)
        if new_tokens < positions:
            return None
        return Absent(f"it takes {new_tokens} new tokens, and the model has {positions} positions")

    def require_known_tasks(self) -> None:
        """Raise RunStopped for an unknown task or unusable data."""
        assert self._asked is not None

    @property
    def documents_per_task(self) -> int | None:
        """Documents per task: the study's limit, else all; the smallest budget uses its number of items."""
        if self._study.limit is not None:
            return self._study.limit
        return self._subject.budget.items if self._subject.budget.rank == 0 else None

    @property
    def scorable_tasks(self) -> dict[str, LmEvalTaskMetadata]:
        return {name: task for name, task in self._asked.items() if not isinstance(task, Absent)}

    @property
    def absent_by_task(self) -> dict[str, Absent]:
        """Task → why it cannot be scored here."""
        return {name: task for name, task in self._asked.items() if isinstance(task, Absent)}

    @property
    def accuracy_tasks(self) -> list[str]:
        """Tasks with right or wrong documents."""
        return [name for name, task in self.scorable_tasks.items() if task.metric in RIGHT_OR_WRONG]

    # ------------------------------------------------------------ scores

    def correctness_by_item(self, name: str, point: OperatingPoint) -> ByItem:
        """[documents] bool, right under ``point``; questions about one text share a cluster."""
        result = self.evaluate_task(name, point)
        return ByItem(result.scores == 1, np.unique(result.texts, return_inverse=True)[1].astype(np.int64))

    def get_chance_or_majority_accuracy(self, name: str) -> float:
        return self.scorable_tasks[name].guess

    def compute_flop_saving(self, name: str, point: OperatingPoint) -> float:
        """Net share of decode FLOPs that ``point`` saves, by replay of at most ``REPLAYED`` evenly spread requests.

        Generated answers are replayed with the tokens of full depth.
        """
        if name not in self._traces:
            self.evaluate_task(name, self._subject.full_depth_point)
            requests = self._asked_at_full[name]
            spread = np.unique(np.linspace(0, len(requests) - 1, min(REPLAYED, len(requests))).astype(int))
            self._traces[name] = self._subject.take_lens_trace([requests[i] for i in spread], f"{name}, what is saved")
        return NetSavingFunction(self._traces[name], self._subject.loaded.geometry)(point)

    def compute_document_nlls_by_task(
        self, point: OperatingPoint
    ) -> dict[str, tuple[ByDocument, ByDocument, ByDocument]]:
        """Perplexity tasks: Σ nats under ``point`` and at full depth, tokens."""
        pairs = {}
        for name, task in self.scorable_tasks.items():
            if task.metric in PERPLEXITIES:
                result, full = self.evaluate_task(name, point), self.evaluate_task(name, self._subject.full_depth_point)
                assert result.items == full.items
                assert result.tokens is not None
                documents = DocumentMembership(np.unique(result.texts, return_inverse=True)[1].astype(np.int64))
                columns = (result.scores, full.scores, result.tokens)
                nll, reference, tokens = (ByDocument.from_summed_windows(column, documents) for column in columns)
                pairs[f"lm-eval's {name}"] = nll, reference, tokens
        return pairs

    def evaluate_task(self, name: str, point: OperatingPoint) -> TaskResult:
        """One task at one point; the same documents in the same order at every point."""
        key = (name, point)
        if key not in self._results:
            self._results[key] = self._evaluate(self.scorable_tasks[name], point)
        return self._results[key]

    def _evaluate(self, task: LmEvalTaskMetadata, point: OperatingPoint) -> TaskResult:
        from pytest_emad.tasks.evaluation import evaluate_tasks

        with self._model(point) as lm:
            results = evaluate_tasks(
                lm,
                task.members,
                data=self._study.data,
                definitions=self._study.task_path,
                limit=self.documents_per_task,
                run_code=self._study.allow_code_execution,
            )
            if point == self._subject.full_depth_point:
                self._asked_at_full[task.name] = lm.decided
        return _merge_results(task, [results[member] for member in task.members])

    @contextmanager
    def _model(self, point: OperatingPoint) -> Iterator[EmadLM]:
        """The model that lm-eval queries: the reference decoder by passes and replay, any other token by token."""
        from pytest_emad.tasks.lm_eval_model import EmadLM

        with self._subject.open_audited_decoder(point, max_rows=FOREIGN_ROWS) as decoder:
            foreign: dict[str, Any] = {}
            if not self._subject.is_reference_decoder(decoder):
                foreign = {"decoder": decoder, "batch_size": FOREIGN_ROWS}
            yield EmadLM(self._subject.loaded, point=point, progress=self._subject.get_progress_stream(), **foreign)

    # ------------------------------------------------------------ report rows and notes

    def make_task_rows(self, points: Sequence[OperatingPoint]) -> list[dict[str, Any]]:
        """Rows of every task at each of ``points`` and at full depth."""
        return [
            {
                "task": name,
                "metric": task.metric,
                "documents": task.documents,
                "point": point.name,
                "full depth": self.evaluate_task(name, self._subject.full_depth_point).value,
                "at the point": (result := self.evaluate_task(name, point)).value,
                "standard error": result.standard_error,
            }
            for name, task in self.scorable_tasks.items()
            for point in points
        ]

    @property
    def scored_documents_note(self) -> str:
        """One sentence: documents scored per task, and contexts cut."""
        tasks = ", ".join(
            f"{task.name} ({task.documents} of {task.of} documents)" for task in self.scorable_tasks.values()
        )
        counts = {name: self.evaluate_task(name, self._subject.full_depth_point).cut for name in self.scorable_tasks}
        cut = ", ".join(f"{count} of {name}'s requests" for name, count in counts.items() if count) or "none did"
        left_out = any(task.documents < task.of for task in self.scorable_tasks.values())
        bounded = left_out and self._study.limit is None
        bound = (
            f"; --emad-budget smoke stops at {self.documents_per_task}, --emad-limit sets another number"
            if bounded
            else ""
        )
        return (
            f"{self._subject.name}: lm-eval's {tasks}: contexts of up to {self._subject.stepper.max_positions} tokens, "
            f"longer ones lose their beginning ({cut}); no margin is chosen on them{bound}{self._ended}"
        )

    @property
    def _ended(self) -> str:
        """Number of generated programs that a limit ended, as distinct from wrong answers."""
        from pytest_emad.tasks.metrics import ENDING_TEXT

        parts = [
            f"{int(scores.sum())} of {name}'s programs {ENDING_TEXT[metric]}"
            for name in self.scorable_tasks
            for (metric, _), scores in self.evaluate_task(name, self._subject.full_depth_point).others.items()
            if metric in ENDING_TEXT and scores.any()
        ]
        return f"; at full depth {', '.join(parts)}, which counts as not solved" if parts else ""


def _new_tokens(task: Any) -> int:
    from pytest_emad.tasks.lm_eval_model import NEW_TOKENS

    if task.OUTPUT_TYPE != "generate_until":
        return 0
    return int(task.get_config("generation_kwargs").get("max_gen_toks", NEW_TOKENS))


def _guess_chance(task: Any, document: Any) -> float:
    if "guess" in document:  # set by the world's own tasks
        return float(document["guess"])
    return 1 / len(task.doc_to_choice(document)) if task.OUTPUT_TYPE == "multiple_choice" else 0.0


def _majority_share(read: Sequence[tuple[Any, Any]]) -> float:
    answers = [_answer(task, document) for task, document in read]
    return max(Counter(answers).values()) / len(answers)


def _answer(task: Any, document: Any) -> str:
    target = str(task.doc_to_target(document))
    if task.OUTPUT_TYPE != "generate_until" or not task._filters:
        return target
    values: Any = [[target]]
    for read in task._filters[0].filters:
        values = list(read().apply(values, [document]))
    return str(values[0])


def _merge_results(task: LmEvalTaskMetadata, results: list[TaskResult]) -> TaskResult:
    """Members of a group as one task; each document has equal weight, as in lm-eval's ``weight_by_size``."""
    from pytest_emad.tasks.evaluation import TaskResult

    if len(results) == 1:
        return results[0]
    scores = np.concatenate([result.scores for result in results])
    items = tuple(item for result in results for item in result.items)
    texts = tuple(text for result in results for text in result.texts)
    prompts, answers = (
        tuple(text for result in results for text in getattr(result, part)) for part in ("prompts", "answers")
    )
    cut = sum(result.cut for result in results)
    return TaskResult(
        task.name, results[0].metric, results[0].filter, scores, items, texts, cut=cut, prompts=prompts, answers=answers
    )


VALIDATED_ITEMS = 400  # items per task for choosing a margin: steps of 0.25 points, against a bound of 0.5
DECODED_ITEMS = 100  # items per task if every option is decoded token by token
ROWS = 32  # programs decoded together


class ReplayedTask:
    """Items of a task and the trace of their reference answers, which gives accuracy and saving at any point.

    Programs run and are not replayed; their trace gives only savings. ``trace`` is taken again with more layers if a
    point has other probes than the default ones.
    """

    def __init__(self, items: list[EncodedTaskItem], trace: Callable[[Sequence[int]], Trace], geometry: Geometry):
        self.items, self.replayable = items, items[0].example.scoring != "runs"
        self._take, self._geometry = trace, geometry
        self._layers: set[int] = set()
        self._saved: NetSavingFunction | None = None
        self._at: dict[OperatingPoint, tuple[ByItem | None, float]] = {}

    def correctness_by_item(self, point: OperatingPoint) -> ByItem:
        """[items] bool."""
        right, _ = self._play(point)
        assert right is not None, "a program is run, not replayed"
        return right

    def correctness_at_chosen_layers(self, layers: Sequence[int], choose: Callable[[Trace], Ints]) -> ByItem:
        """[items] bool, right if each token is read after the layer that ``choose`` gives it, one of ``layers``."""
        trace = self._take(layers)
        return self.cluster_values_by_text(mark_correct_items_from_trace(self.items, trace, choose(trace)))

    def compute_flop_saving(self, point: OperatingPoint) -> float:
        """Net share of the decode FLOPs of these sequences."""
        return self._play(point)[1]

    def answers(self, point: OperatingPoint, decode: Decode) -> list[TaskAnswer]:
        """The answer to each item; not of programs, which are run."""
        replayer = self._reading(point).replayer
        return answers_from_trace(self.items, replayer.trace, replayer.compute_depths(point), decode)

    def cluster_values_by_text(self, values: Bools) -> ByItem:
        return ByItem(values, cluster_duplicate_items(self.items))

    def _play(self, point: OperatingPoint) -> tuple[ByItem | None, float]:
        if point not in self._at:
            saved = self._reading(point)
            trace, depth = saved.replayer.trace, saved.replayer.compute_depths(point)
            right = (
                self.cluster_values_by_text(mark_correct_items_from_trace(self.items, trace, depth))
                if self.replayable
                else None
            )
            self._at[point] = right, saved(point)
        return self._at[point]

    def _reading(self, point: OperatingPoint) -> NetSavingFunction:
        """The net savings on a trace that holds every layer ``point`` reads."""
        layers = set(required_layers(point))
        if self._saved is None or not layers <= self._layers:
            self._layers |= layers | set(default_probes(point.layers))
            self._saved = NetSavingFunction(self._take(sorted(self._layers)), self._geometry)
        return self._saved


class TaskScores:
    """Answers of one model, kept: the tasks of its corpus, and ``published`` ones.

    ``statistics.accuracy`` decides whether a task counts at a point; this class measures its inputs.
    """

    def __init__(self, subject: ModelUnderTest):
        self._subject, self.published = subject, LmEvalTaskScorer(subject)
        self._generated: dict[tuple[str, OperatingPoint], list[tuple[TaskAnswer, bool]]] = {}
        self._items: dict[Split, dict[str, list[EncodedTaskItem] | Absent]] = {}

    @property
    def accuracy_tasks(self) -> list[str]:
        """Every task with right and wrong answers."""
        return [*self._own, *self.published.accuracy_tasks]

    @property
    def absent_by_task(self) -> dict[str, Absent]:
        """Task → why it cannot be scored here."""
        own = self._items_of("evaluate")
        return {name: items for name, items in own.items() if isinstance(items, Absent)} | self.published.absent_by_task

    @property
    def continuation_choice_note(self) -> str:
        """One sentence about the items of continuation choice; "" without that task."""
        items = self._own.get(CONTINUATION_CHOICE, [])
        if not items:
            return ""
        return (
            f"{self._subject.name}: {CONTINUATION_CHOICE} on {self._subject.corpus}, {len(items)} items, one per "
            f"document: which of {OPTIONS} pieces of {CONTINUATION_TOKENS} tokens follows the first {CONTEXT_TOKENS}? "
            f"{OPTIONS - 1} are of other documents; log-likelihood per token decides"
        )

    @property
    def replayed_task_names(self) -> list[str]:
        """The corpus's tasks but programs: one trace decides them at every point."""
        return [task for task, items in self._own.items() if items[0].example.scoring != "runs"]

    @property
    def replayed_task_reference_sequences(self) -> list[TokenSequence]:
        """Reference answers behind their prompts, of all replayed tasks."""
        return [each for task in self.replayed_task_names for each in to_token_sequences(self._own[task])]

    def measure_accuracy_against_full_depth(self, task: str, point: OperatingPoint) -> TaskAccuracy:
        """Accuracy of ``task`` at ``point`` and at full depth, and whether it counts there."""
        full = self._subject.full_depth_point
        return TaskAccuracy(
            self.correctness_by_item(task, full),
            self.correctness_by_item(task, point),
            self.compute_chance_or_majority_accuracy(task),
            self._saving(task, point),
        )

    def correctness_by_item(self, task: str, point: OperatingPoint) -> ByItem:
        """[items] bool, right at ``point``: by replay, or by decoding for programs."""
        if task in self.published.scorable_tasks:
            return self.published.correctness_by_item(task, point)
        played = self._played[task]
        if played.replayable:
            return played.correctness_by_item(point)
        return played.cluster_values_by_text(np.array([right for _, right in self._programs(task, point)], dtype=bool))

    def correctness_at_chosen_layers(self, task: str, layers: Sequence[int], choose: Callable[[Trace], Ints]) -> ByItem:
        """As ``ReplayedTask.correctness_at_chosen_layers``; ``task``: of ``replayed_task_names``."""
        return self._played[task].correctness_at_chosen_layers(layers, choose)

    def lost_answers(self, task: str, point: OperatingPoint) -> tuple[int, list[LostAnswer]]:
        """(Number of items that full depth answers right and ``point`` does not, the first of them)."""
        full = self._subject.full_depth_point
        lost = self.correctness_by_item(task, full).values & ~self.correctness_by_item(task, point).values
        if not lost.any():
            return 0, []
        right, wrong = self._answers(task, full), self._answers(task, point)
        return int(lost.sum()), lost_answers(self._prompts(task), right, wrong, lost)

    def _answers(self, task: str, point: OperatingPoint) -> Sequence[TaskAnswer]:
        if task in self.published.scorable_tasks:
            return [TaskAnswer(text) for text in self.published.evaluate_task(task, point).answers]
        played = self._played[task]
        if played.replayable:
            return played.answers(point, self._decode)
        return [answer for answer, _ in self._programs(task, point)]

    def _prompts(self, task: str) -> Sequence[str]:
        if task in self.published.scorable_tasks:
            return self.published.evaluate_task(task, self._subject.full_depth_point).prompts
        opening = self._subject.opening_token
        return [self._decode(item.prompt[int(item.prompt[0] == opening) :].tolist()) for item in self._own[task]]

    def _decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``; their ids for a model without a tokenizer."""
        tokenizer = self._subject.loaded.tokenizer
        return " ".join(map(str, tokens)) if tokenizer is None else decode_tokens(tokenizer, list(tokens))

    def decode_full_and_adaptive_correctness(self, task: str, point: OperatingPoint) -> tuple[ByItem, ByItem]:
        """[items] bool, right at full depth and at ``point``, of at most ``DECODED_ITEMS``.

        The reference decoder reads every option token by token, to include points that replay does not cover: a lens,
        copied K and V.
        """
        played = self._played[task]
        items = played.items[:DECODED_ITEMS]
        decoder = WalkedDecoder(self._subject.stepper, point, max_rows=ROWS)
        kept = np.arange(len(played.items)) < len(items)
        full = played.correctness_by_item(self._subject.full_depth_point).select(kept)
        return full, full.with_values(mark_correct_items_by_decoding(decoder, items, ROWS))

    def compute_chance_or_majority_accuracy(self, task: str) -> float:
        """Share right by the better of two guesses: from the input's own symbols, or validation's majority."""
        if task in self.published.scorable_tasks:
            return self.published.get_chance_or_majority_accuracy(task)
        return guess_accuracy(self._own[task], self._validation.get(task, self._own[task]))

    def compute_validation_drop_by_task(self, point: OperatingPoint) -> dict[str, float]:
        """Validation accuracy, a fraction, lost at ``point`` by each task that counts there, without programs.

        These are point estimates on 400 items a task, since proving a bound of 0.5 % takes 600 items without a loss
        (rule of three). EMAD-E10 tests on other items whether a choice by point estimates holds.
        """
        drops = {}
        for task, played in self._validated.items():
            guess = guess_accuracy(played.items, played.items)
            scores = TaskAccuracy(
                played.correctness_by_item(self._subject.full_depth_point),
                played.correctness_by_item(point),
                guess,
                played.compute_flop_saving(point),
            )
            if scores.is_counted:
                full, adaptive = scores.accuracies
                drops[task] = full - adaptive
        return drops

    # ------------------------------------------------------------ items and traces

    @property
    def _own(self) -> dict[str, list[EncodedTaskItem]]:
        return self._available_items("evaluate")

    @property
    def _validation(self) -> dict[str, list[EncodedTaskItem]]:
        return self._available_items("validate")

    def _available_items(self, split: Split) -> dict[str, list[EncodedTaskItem]]:
        return {task: items for task, items in self._items_of(split).items() if not isinstance(items, Absent)}

    def _items_of(self, split: Split) -> dict[str, list[EncodedTaskItem] | Absent]:
        """Task of the corpus → items, or why there are none."""
        if split not in self._items:
            self._items[split] = self._make_items(split)
        return self._items[split]

    def _make_items(self, split: Split) -> dict[str, list[EncodedTaskItem] | Absent]:
        subject = self._subject
        if subject.absent_quality is not None:
            return {}
        if subject.corpus.startswith("world:"):
            count = subject.budget.items if split == "evaluate" else min(VALIDATED_ITEMS, subject.budget.items)
            return {**make_world_items(split, count, subject.seed, subject.tokenizer, subject.opening_token)}
        try:
            return {CONTINUATION_CHOICE: self._continuations(split)}
        except TaskDataUnavailable as error:
            return {CONTINUATION_CHOICE: Absent(str(error))}

    def _continuations(self, split: Split) -> list[EncodedTaskItem]:
        """Continuation items of as many documents of ``split`` as for perplexity. Raises TaskDataUnavailable."""
        subject, n_tokens = self._subject, CONTEXT_TOKENS + CONTINUATION_TOKENS + 1
        if subject.window_size < n_tokens:
            problem = f"it reads {n_tokens} tokens, and {subject.name!r} has {subject.window_size} positions"
            raise TaskDataUnavailable(f"{CONTINUATION_CHOICE}: {problem}; judge a model that sees more")
        return make_continuation_items(
            subject.iterate_documents(split),
            subject.budget.evaluate if split == "evaluate" else subject.budget.validate,
            text=f"corpus={subject.corpus!r}, {split}",
            opening=subject.opening_token,
            rng=np.random.default_rng([subject.seed, SPLITS.index(split)]),
            group_of=subject.get_group_numbering(split),
        )

    @cached_property
    def _played(self) -> dict[str, ReplayedTask]:
        return {task: self._traced(items, task) for task, items in self._own.items()}

    @cached_property
    def _validated(self) -> dict[str, ReplayedTask]:
        items = {task: self._validation[task] for task in self.replayed_task_names if task in self._validation}
        return {task: self._traced(each, f"validate, {task}") for task, each in items.items()}

    def _traced(self, items: list[EncodedTaskItem], what: str) -> ReplayedTask:
        sequences = to_token_sequences(items)

        def trace(layers: Sequence[int]) -> Trace:
            return self._subject.take_lens_trace(sequences, what, layers=layers)

        return ReplayedTask(items, trace, self._subject.loaded.geometry)

    def _saving(self, task: str, point: OperatingPoint) -> float:
        if task in self.published.scorable_tasks:
            return self.published.compute_flop_saving(task, point)
        return self._played[task].compute_flop_saving(point)

    def _programs(self, task: str, point: OperatingPoint) -> list[tuple[TaskAnswer, bool]]:
        """What the decoder writes for each item, and whether it runs right."""
        if (task, point) not in self._generated:
            self._generated[task, point] = self._run_programs(self._played[task].items, point)
        return self._generated[task, point]

    def _run_programs(self, items: list[EncodedTaskItem], point: OperatingPoint) -> list[tuple[TaskAnswer, bool]]:
        with self._subject.open_audited_decoder(point, max_rows=ROWS) as decoder:
            return write_programs(decoder, items, self._subject.tokenizer, ROWS)
