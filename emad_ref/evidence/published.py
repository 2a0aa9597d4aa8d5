"""Published tasks under the decoder under test: those the study names, scored by lm-eval, as legs of EMAD-F1.

Each task gives one score per document and operating point (``emad_ref.tasks.evaluation``), paired with full depth:

accuracy, exact match, pass@1   right or wrong: a task beside the world's own
perplexity                      Σ −log p in nats and tokens: one more corpus
anything else (ROUGE)           shown, judged by nothing: the claim speaks of accuracy and exact match

A group, such as MATH with its subjects, is one task: "two or more tasks" counts benchmarks, not their parts. A task
that cannot be scored here (data out of reach, programs that may not be run) keeps the reason, which becomes a leg.
Tasks judge; no margin is chosen on them. Prompts, filters and metrics are lm-eval's: this module knows none of them.

lm-eval is an extra and slow to import: it is imported when the first task is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from emad_ref.calibration.trace import TokenSequence, Trace
from emad_ref.errors import BadArgument, ends_the_run
from emad_ref.evidence.subject import Subject
from emad_ref.point import OperatingPoint
from emad_ref.replay import replay
from emad_ref.sweep.losses import full_flops, net_saving
from emad_ref.tasks.datasets import TaskDataUnavailable
from emad_ref.tasks.logs import lm_eval_quiet
from emad_ref.tasks.sandbox import availability
from emad_ref.text import world
from emad_ref.verdict.units import ByDocument, ByItem, DocumentOf

if TYPE_CHECKING:  # lm-eval is an extra, and slow
    from emad_ref.tasks.evaluation import TaskResult
    from emad_ref.tasks.harness import EmadLM

RIGHT_OR_WRONG = frozenset({"acc", "exact_match", "exact", "pass@1"})  # lm-eval's metrics that are 0 or 1 per document
PERPLEXITIES = frozenset({"word_perplexity"})
REPLAYED = 200  # requests of a task, from which is read what a point saves on it
FOREIGN_ROWS = 32  # what a decoder of somebody else's is asked to take at once


@dataclass(frozen=True)
class PublishedTask:
    """A task as this run scores it.

    ``members``    lm-eval's names of it: several for a group, else its own.
    ``documents``  how many are scored, ``of`` how many there are.
    ``metric``     lm-eval's name of the first metric of the first member.
    ``guess``      share that guessing gets right: by chance among the options, or by the answer that is most frequent
                   among the documents scored. No guesser knows that one, so the rate is rather too high than too low.
    """

    name: str
    members: tuple[str, ...]
    documents: int
    of: int
    metric: str
    guess: float


class Published:
    """The tasks that one model's study names, scored when first asked for and kept."""

    def __init__(self, subject: Subject):
        self._subject, self._study = subject, subject.study
        self._results: dict[tuple[str, OperatingPoint], TaskResult] = {}
        self._asked_at_full: dict[str, list[TokenSequence]] = {}
        self._traces: dict[str, Trace] = {}

    # ------------------------------------------------------------ which tasks

    @cached_property
    def _asked(self) -> dict[str, tuple[str, ...]]:
        """Task → lm-eval's names of it. What would be counted twice is left to the task that has it already.

        Raises:
            BadArgument: the extra is missing, or a name that lm-eval does not find among our definitions.
        """
        from emad_ref.tasks.evaluation import task_manager

        manager = task_manager(None)
        names = sorted(self._study.tasks)
        for name in names:
            if name not in manager.all_tasks:
                raise BadArgument("--emad-tasks", name, f"some of {', '.join(manager.all_tasks)}")
        asked: dict[str, tuple[str, ...]] = {}
        for name in names:
            entry = manager.task_index[name]
            if name in manager.all_groups:
                asked[name] = tuple(entry.cfg["task"])
            else:
                asked |= {member: (member,) for member in (sorted(entry.tags) if name in manager.all_tags else [name])}
        return {name: members for name, members in asked.items() if name not in self._twice(asked)}

    def _twice(self, asked: Mapping[str, tuple[str, ...]]) -> set[str]:
        """Names that others cover: subjects of a group asked for, the world's tasks on a corpus of the world."""
        grouped = {member for name, members in asked.items() if members != (name,) for member in members}
        own = {f"world_{task}" for task in world.TASKS} if self._subject.corpus.startswith("world:") else set()
        return set(asked) & (grouped | own)

    @cached_property
    def _found(self) -> tuple[dict[str, PublishedTask], dict[str, str]]:
        """Tasks that can be scored, and of the others why not. An error in either ends the run, once."""
        if not self._study.tasks:
            return {}, {}
        with ends_the_run():
            if find_spec("lm_eval") is None:
                names = ",".join(sorted(self._study.tasks))
                remedy = "pip install 'pytest-emad[tasks]', or leave the option out"
                raise BadArgument("--emad-tasks", names, "the extra `tasks`, which brings lm-eval", remedy)
            scored, unmeasured = {}, {}
            for name, members in self._asked.items():
                try:
                    found = self._read(name, members)
                except TaskDataUnavailable as error:
                    found = str(error)
                if isinstance(found, str):
                    unmeasured[name] = found
                else:
                    scored[name] = found
            return scored, unmeasured

    def _read(self, name: str, members: tuple[str, ...]) -> PublishedTask | str:
        """Definition and documents of a task; a sentence if this model or run cannot score it."""
        from emad_ref.tasks.evaluation import task_manager

        with lm_eval_quiet():
            tasks = task_manager(self._study.data).load(list(members))["tasks"]
        for task in tasks.values():
            if reason := self._obstacle(task):
                return reason
        read = [(task, document) for task in tasks.values() for document in islice(task.eval_docs, self.limit)]
        guess = max(float(np.mean([_chance(*each) for each in read])), _majority(read))
        everything = sum(len(task.eval_docs) for task in tasks.values())
        metric = str(tasks[members[0]].config.metric_list[0]["metric"])
        return PublishedTask(name, members, len(read), everything, metric, guess)

    def _obstacle(self, task: Any) -> str:
        loaded, positions = self._subject.loaded, self._subject.stepper.max_positions
        if loaded.tokenizer is None or not loaded.ends:
            return "the model came without a tokenizer, or without an end-of-text token"
        if task.get_config("unsafe_code"):
            if not self._study.allow_code_execution:
                return "it runs generated programs: --emad-allow-code-execution allows that, in a sandbox"
            if refusal := availability():
                return f"it runs generated programs, and they cannot be confined here: {refusal}"
        wanted = _new_tokens(task)
        return f"it takes {wanted} new tokens, and the model has {positions} positions" if wanted >= positions else ""

    def check(self) -> None:
        """Every task asked for is known and its data fits, or the run ends here (``errors.RunStopped``)."""
        assert self._found is not None

    @property
    def limit(self) -> int | None:
        """Documents per task: as many as asked for, else all; the smallest budget stops at its number of items."""
        if self._study.limit is not None:
            return self._study.limit
        return self._subject.budget.items if self._subject.budget.rank == 0 else None

    @property
    def scored(self) -> dict[str, PublishedTask]:
        return self._found[0]

    @property
    def unmeasured(self) -> dict[str, str]:
        """Task → why it cannot be scored here."""
        return self._found[1]

    @property
    def answered(self) -> list[str]:
        """Tasks whose documents are right or wrong."""
        return [name for name, task in self.scored.items() if task.metric in RIGHT_OR_WRONG]

    # ------------------------------------------------------------ scores

    def correct(self, name: str, point: OperatingPoint) -> ByItem:
        """[documents] bool, whether each is right under ``point``; questions about one text share a cluster."""
        result = self.result(name, point)
        return ByItem(result.scores == 1, np.unique(result.texts, return_inverse=True)[1].astype(np.int64))

    def guess(self, name: str) -> float:
        return self.scored[name].guess

    def saving(self, name: str, point: OperatingPoint) -> float:
        """Net share of decode FLOPs that ``point`` saves on the requests of this task, by replay.

        Teacher-forced on at most ``REPLAYED`` of them, evenly spread: on options and texts as asked for, on what full
        depth wrote where answers are generated.
        """
        if name not in self._traces:
            self.result(name, self._subject.full)
            asked = self._asked_at_full[name]
            spread = np.unique(np.linspace(0, len(asked) - 1, min(REPLAYED, len(asked))).astype(int))
            self._traces[name] = self._subject.trace([asked[i] for i in spread], f"{name}, what is saved")
        trace, geometry = self._traces[name], self._subject.loaded.geometry
        return net_saving(trace, geometry, replay(trace, point), full_flops(trace, geometry))

    def corpora(self, point: OperatingPoint) -> dict[str, tuple[ByDocument, ByDocument, ByDocument]]:
        """Perplexity tasks: Σ nats under ``point`` and at full depth, tokens."""
        pairs = {}
        for name, task in self.scored.items():
            if task.metric in PERPLEXITIES:
                result, full = self.result(name, point), self.result(name, self._subject.full)
                assert result.items == full.items
                assert result.tokens is not None
                documents = DocumentOf(np.unique(result.texts, return_inverse=True)[1].astype(np.int64))
                columns = (result.scores, full.scores, result.tokens)
                nll, reference, tokens = (ByDocument.summed(column, documents) for column in columns)
                pairs[f"lm-eval's {name}"] = nll, reference, tokens
        return pairs

    def result(self, name: str, point: OperatingPoint) -> TaskResult:
        """One task at one point; the same documents in the same order at every point."""
        key = (name, point)
        if key not in self._results:
            self._results[key] = self._evaluate(self.scored[name], point)
        return self._results[key]

    def _evaluate(self, task: PublishedTask, point: OperatingPoint) -> TaskResult:
        from emad_ref.tasks.evaluation import evaluate_tasks

        with self._model(point) as lm:
            results = evaluate_tasks(
                lm,
                task.members,
                data=self._study.data,
                limit=self.limit,
                run_code=self._study.allow_code_execution,
            )
            if point == self._subject.full:
                self._asked_at_full[task.name] = lm.decided
        return _together(task, [results[member] for member in task.members])

    @contextmanager
    def _model(self, point: OperatingPoint) -> Iterator[EmadLM]:
        """What lm-eval asks: our own by passes and replay, anybody else's decoder token by token.

        Only ours has a fingerprint to keep results under, hence the journal.
        """
        from emad_ref.tasks.harness import EmadLM

        with self._subject.open_audited(point, max_rows=FOREIGN_ROWS) as decoder:
            if self._subject.is_ours(decoder):
                ours: dict[str, Any] = {"journal": self._study.journal}
            else:
                ours = {"decoder": decoder, "batch_size": FOREIGN_ROWS}
            yield EmadLM(self._subject.loaded, point=point, progress=self._subject.bars(), **ours)

    # ------------------------------------------------------------ what a reader needs

    def rows(self, points: Sequence[OperatingPoint]) -> list[dict[str, Any]]:
        """Every task at every one of ``points``, beside full depth; none where no task is scored."""
        return [
            {
                "task": name,
                "metric": task.metric,
                "documents": task.documents,
                "point": point.name,
                "full depth": self.result(name, self._subject.full).value,
                "at the point": (result := self.result(name, point)).value,
                "standard error": result.standard_error,
            }
            for name, task in self.scored.items()
            for point in points
        ]

    @property
    def note(self) -> str:
        """One sentence: how many documents of each task were scored, and what they lost."""
        tasks = ", ".join(f"{task.name} ({task.documents} of {task.of} documents)" for task in self.scored.values())
        counts = {name: self.result(name, self._subject.full).cut for name in self.scored}
        cut = ", ".join(f"{count} of {name}'s requests" for name, count in counts.items() if count) or "none did"
        left_out = any(task.documents < task.of for task in self.scored.values())
        bounded = left_out and self._study.limit is None
        bound = f"; --emad-budget smoke stops at {self.limit}, --emad-limit sets another number" if bounded else ""
        return (
            f"{self._subject.name}: lm-eval's {tasks}: contexts of up to {self._subject.stepper.max_positions} tokens, "
            f"longer ones lose their beginning ({cut}); no margin is chosen on them{bound}{self._ended}"
        )

    @property
    def _ended(self) -> str:
        """How many generated programs were ended in the sandbox, which is not what a wrong answer is."""
        from emad_ref.tasks.humaneval import ENDED

        said = [
            f"{int(scores.sum())} of {name}'s programs {ENDED[metric]}"
            for name in self.scored
            for (metric, _), scores in self.result(name, self._subject.full).others.items()
            if metric in ENDED and scores.any()
        ]
        return f"; at full depth {', '.join(said)}, which counts as not solved" if said else ""


def _new_tokens(task: Any) -> int:
    """How many a document's answer may take; 0 where nothing is generated."""
    from emad_ref.tasks.harness import NEW_TOKENS

    if task.OUTPUT_TYPE != "generate_until":
        return 0
    return int(task.get_config("generation_kwargs").get("max_gen_toks", NEW_TOKENS))


def _chance(task: Any, document: Any) -> float:
    """Chance of guessing one document's answer from the document itself."""
    if "guess" in document:  # the world's own tasks say it
        return float(document["guess"])
    return 1 / len(task.doc_to_choice(document)) if task.OUTPUT_TYPE == "multiple_choice" else 0.0


def _majority(read: Sequence[tuple[Any, Any]]) -> float:
    """Share of the most frequent answer: the place of the right option, or the text as the task's filter reads it."""
    answers = [_answer(task, document) for task, document in read]
    return max(Counter(answers).values()) / len(answers)


def _answer(task: Any, document: Any) -> str:
    target = str(task.doc_to_target(document))
    if task.OUTPUT_TYPE != "generate_until" or not task._filters:
        return target
    kept: Any = [[target]]
    for read in task._filters[0].filters:
        kept = list(read().apply(kept, [document]))
    return str(kept[0])


def _together(task: PublishedTask, results: list[TaskResult]) -> TaskResult:
    """Members of a group as one task; each document weighs the same, as in lm-eval's ``weight_by_size``."""
    from emad_ref.tasks.evaluation import TaskResult

    if len(results) == 1:
        return results[0]
    scores = np.concatenate([result.scores for result in results])
    items = tuple(item for result in results for item in result.items)
    texts = tuple(text for result in results for text in result.texts)
    cut = sum(result.cut for result in results)
    return TaskResult(task.name, results[0].metric, results[0].filter, scores, items, texts, cut=cut)
