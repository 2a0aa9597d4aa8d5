"""Published tasks under the decoder under test: what ``--emad-tasks`` names, scored by lm-eval, as legs of EMAD-F1.

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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.record import Bools
from emad_ref.tasks.datasets import TaskDataUnavailable
from emad_ref.tasks.logs import lm_eval_quiet
from emad_ref.tasks.sandbox import availability
from emad_ref.text import world
from emad_ref.verdict.judge import NllPair
from pytest_emad import progress
from pytest_emad.recording import Recorder
from pytest_emad.stopping import ends_the_run

if TYPE_CHECKING:
    from emad_ref.tasks.evaluation import TaskResult
    from emad_ref.tasks.harness import EmadLM
    from pytest_emad.session import Evidence

RIGHT_OR_WRONG = frozenset({"acc", "exact_match", "exact", "pass@1"})  # lm-eval's metrics that are 0 or 1 per document
PERPLEXITIES = frozenset({"word_perplexity"})
FOREIGN_ROWS = 32  # what a decoder of somebody else's is asked to take at once


@dataclass(frozen=True)
class Published:
    """A task as this run scores it.

    ``members``    lm-eval's names of it: several for a group, else its own.
    ``documents``  how many are scored, ``of`` how many there are.
    ``metric``     lm-eval's name of the first metric of the first member.
    ``chance``     share that guessing gets right: mean of 1/options, 0 where the answer is written.
    """

    name: str
    members: tuple[str, ...]
    documents: int
    of: int
    metric: str
    chance: float


class Harnessed:
    """The tasks that one model's settings name, scored when first asked for and kept."""

    def __init__(self, evidence: Evidence):
        self._evidence, self._settings = evidence, evidence.settings
        self._results: dict[tuple[str, OperatingPoint], TaskResult] = {}

    # ------------------------------------------------------------ which tasks

    @cached_property
    def _asked(self) -> dict[str, tuple[str, ...]]:
        """Task → lm-eval's names of it. What would be counted twice is left to the task that has it already.

        Raises:
            BadArgument: the extra is missing, or a name that lm-eval does not find among our definitions.
        """
        from emad_ref.tasks.evaluation import task_manager

        manager = task_manager(None)
        names = sorted(self._settings.tasks)
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
        own = {f"world_{task}" for task in world.TASKS} if self._evidence.corpus.startswith("world:") else set()
        return set(asked) & (grouped | own)

    @cached_property
    def _found(self) -> tuple[dict[str, Published], dict[str, str]]:
        """Tasks that can be scored, and of the others why not. An error in either ends the run, once."""
        if not self._settings.tasks:
            return {}, {}
        with ends_the_run():
            if find_spec("lm_eval") is None:
                names = ",".join(sorted(self._settings.tasks))
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

    def _read(self, name: str, members: tuple[str, ...]) -> Published | str:
        """Definition and documents of a task; a sentence if this model or run cannot score it."""
        from emad_ref.tasks.evaluation import task_manager

        with lm_eval_quiet():
            tasks = task_manager(self._settings.data).load(list(members))["tasks"]
        for task in tasks.values():
            if reason := self._obstacle(task):
                return reason
        chances = [_guess(task, document) for task in tasks.values() for document in islice(task.eval_docs, self.limit)]
        everything = sum(len(task.eval_docs) for task in tasks.values())
        metric = str(tasks[members[0]].config.metric_list[0]["metric"])
        return Published(name, members, len(chances), everything, metric, float(np.mean(chances)))

    def _obstacle(self, task: Any) -> str:
        tokenizer, positions = self._evidence.loaded.tokenizer, self._evidence.stepper.max_positions
        if tokenizer is None or tokenizer.eos_token_id is None:
            return "the model came without a tokenizer that has an end-of-text token"
        if task.get_config("unsafe_code"):
            if not self._settings.allow_code_execution:
                return "it runs generated programs: --emad-allow-code-execution allows that, in a sandbox"
            if refusal := availability():
                return f"it runs generated programs, and they cannot be confined here: {refusal}"
        wanted = _new_tokens(task)
        return f"it takes {wanted} new tokens, and the model has {positions} positions" if wanted >= positions else ""

    def check(self) -> None:
        """Every task asked for is known and its data fits, or the run ends here (``stopping.RunStopped``)."""
        assert self._found is not None

    @property
    def limit(self) -> int | None:
        """Documents per task: as many as asked for, else all; the smallest budget stops at its number of items."""
        if self._settings.limit is not None:
            return self._settings.limit
        return self._evidence.budget.items if self._evidence.budget.rank == 0 else None

    @property
    def scored(self) -> dict[str, Published]:
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

    def correct(self, name: str, point: OperatingPoint) -> Bools:
        """[documents] whether each is right under ``point``."""
        right: Bools = self.result(name, point).scores == 1
        return right

    def chance(self, name: str) -> float:
        return self.scored[name].chance

    def corpora(self, point: OperatingPoint) -> dict[str, NllPair]:
        """Perplexity tasks: Σ nats under ``point`` and at full depth, tokens; [documents] each."""
        pairs = {}
        for name, task in self.scored.items():
            if task.metric in PERPLEXITIES:
                result, full = self.result(name, point), self.result(name, self._evidence.full)
                assert result.items == full.items
                assert result.tokens is not None
                pairs[f"lm-eval's {name}"] = (result.scores, full.scores, result.tokens)
        return pairs

    def result(self, name: str, point: OperatingPoint) -> TaskResult:
        """One task at one point; the same documents in the same order at every point."""
        key = (name, point)
        if key not in self._results:
            self._results[key] = self._evaluate(self.scored[name], point)
        return self._results[key]

    def _evaluate(self, task: Published, point: OperatingPoint) -> TaskResult:
        from emad_ref.tasks.evaluation import evaluate_tasks

        with self._model(point) as lm:
            results = evaluate_tasks(
                lm,
                task.members,
                data=self._settings.data,
                limit=self.limit,
                run_code=self._settings.allow_code_execution,
            )
        return _together(task, [results[member] for member in task.members])

    @contextmanager
    def _model(self, point: OperatingPoint) -> Iterator[EmadLM]:
        """What lm-eval asks: our own by passes and replay, anybody else's decoder token by token.

        Only ours has a fingerprint to keep results under, hence the journal.
        """
        from emad_ref.tasks.harness import EmadLM

        with self._evidence.open(point, max_rows=FOREIGN_ROWS) as decoder:
            if type(decoder) is WalkedDecoder and decoder.stepper is self._evidence.stepper:
                report = self._settings.report
                ours: dict[str, Any] = {"journal": None if report is None else report / "journal"}
            else:
                ours = {"decoder": decoder, "batch_size": FOREIGN_ROWS}
            yield EmadLM(self._evidence.loaded, point=point, progress=progress.stream(), **ours)


def _new_tokens(task: Any) -> int:
    """How many a document's answer may take; 0 where nothing is generated."""
    from emad_ref.tasks.harness import NEW_TOKENS

    if task.OUTPUT_TYPE != "generate_until":
        return 0
    return int(task.get_config("generation_kwargs").get("max_gen_toks", NEW_TOKENS))


def _guess(task: Any, document: Any) -> float:
    """Chance of guessing one document's answer."""
    return 1 / len(task.doc_to_choice(document)) if task.OUTPUT_TYPE == "multiple_choice" else 0.0


def _together(task: Published, results: list[TaskResult]) -> TaskResult:
    """Members of a group as one task; each document weighs the same, as in lm-eval's ``weight_by_size``."""
    from emad_ref.tasks.evaluation import TaskResult

    if len(results) == 1:
        return results[0]
    scores = np.concatenate([result.scores for result in results])
    items = tuple(item for result in results for item in result.items)
    cut = sum(result.cut for result in results)
    return TaskResult(task.name, results[0].metric, results[0].filter, scores, items, cut=cut)


# ---------------------------------------------------------------- what a reader needs


def report_tasks(evidence: Evidence, record: Recorder) -> None:
    """Put every task at every point put forward on record, and what was scored."""
    harnessed = evidence.scored.harnessed
    rows = []
    for name, task in harnessed.scored.items():
        full = harnessed.result(name, evidence.full)
        for point in evidence.points:
            result = harnessed.result(name, point)
            rows.append(
                {
                    "task": name,
                    "metric": task.metric,
                    "documents": task.documents,
                    "point": point.name,
                    "full depth": full.value,
                    "at the point": result.value,
                    "standard error": result.standard_error,
                }
            )
    if rows:
        record.table("lm-eval's tasks at the points put forward", evidence.name, rows)
        record.note(_scored_note(evidence))


def _scored_note(evidence: Evidence) -> str:
    harnessed = evidence.scored.harnessed
    tasks = ", ".join(f"{task.name} ({task.documents} of {task.of} documents)" for task in harnessed.scored.values())
    counts = {name: harnessed.result(name, evidence.full).cut for name in harnessed.scored}
    cut = ", ".join(f"{count} of {name}'s requests" for name, count in counts.items() if count) or "none did"
    left_out = any(task.documents < task.of for task in harnessed.scored.values())
    bounded = left_out and evidence.settings.limit is None
    bound = f"; --emad-budget smoke stops at {harnessed.limit}, --emad-limit sets another number" if bounded else ""
    return (
        f"{evidence.name}: lm-eval's {tasks}: contexts of up to {evidence.stepper.max_positions} tokens, longer ones "
        f"lose their beginning ({cut}); no margin is chosen on them{bound}"
    )
