"""Task evaluation: one score per document, so that two operating points can be compared item by item.

    full, adaptive = (evaluate_tasks(EmadLM(model, point=p), ["arc_easy"], data=folder)["arc_easy"] for p in points)
    drop = full.scores - adaptive.scores          # paired: full.items == adaptive.items

lm-eval builds the prompts, applies the filters and scores each document; means and standard errors are computed here
from the documents. So WikiText, for which lm-eval gives no standard error, has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from emad_ref.errors import BadArgument, EmadError, suggest_nearest
from emad_ref.record import Floats, Ints
from emad_ref.signals import perplexity_from_nats
from pytest_emad.tasks.datasets import TaskDataUnavailable
from pytest_emad.tasks.lm_eval_settings import TASK_FOLDER, lm_eval_quiet
from pytest_emad.tasks.sandbox import CodeExecution

FEWSHOT_SEED = 1234  # lm-eval's own, so that prompts have the same examples as in its published numbers


@dataclass(frozen=True)
class TaskResult:
    """One task at one operating point.

    ``metric`` and ``filter`` as lm-eval names them: the first of each in the task's definition.
    ``scores``   float64 [n]: each document's metric in 0–1; for perplexity, its Σ −log p in nats.
    ``tokens``   int64 [n] tokens predicted per document, and ``units`` int64 [n] words; perplexity only, else None.
    ``items``    sha256 per document, in order: results are paired only if these agree.
    ``texts``    the text of each document's question, or its ``items``: documents of one text depend on each other.
    ``others``   the task's further metrics, float64 [n] by (metric, filter).
    ``cut``      requests whose context lost its beginning, because it exceeded the model's window.
    ``prompts``  the context of each document's first request; ``answers``: the generated text, or the likeliest option.
    """

    task: str
    metric: str
    filter: str
    scores: Floats
    items: tuple[str, ...]
    texts: tuple[str, ...]
    tokens: Ints | None = None
    units: Ints | None = None
    others: dict[tuple[str, str], Floats] = field(default_factory=dict)
    cut: int = 0
    prompts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def value(self) -> float:
        """The metric as lm-eval reports it: the mean, or exp(Σ nats / Σ words)."""
        if self.units is None:
            return float(self.scores.mean())
        return perplexity_from_nats(float(self.scores.sum() / self.units.sum()))

    @property
    def standard_error(self) -> float | None:
        """Standard error of ``value``, from the documents; None for one document, which has no spread.

        That of a mean is s/√n. That of a perplexity is the error of the ratio Σ nats / Σ words (linearised: residuals
        of each document from the common rate), times the perplexity itself.
        """
        if self.n < 2:
            return None
        if self.units is None:
            return float(self.scores.std(ddof=1) / math.sqrt(self.n))
        rate = self.scores.sum() / self.units.sum()
        residual = self.scores - rate * self.units
        return float(self.value * math.sqrt(self.n / (self.n - 1) * (residual**2).sum()) / self.units.sum())


def evaluate_tasks(
    lm: LM,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    definitions: Path | None = None,
    limit: int | None = None,
    run_code: CodeExecution | None = None,
    documents: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, TaskResult]:
    """Results by task; a group (``hendrycks_math``) gives one per member.

    ``lm`` any lm-eval model: an ``EmadLM`` of an operating point, with the reference or a user's decoder. ``data`` the
    folder in place of the hub, None uses the hub. ``definitions``: a folder of task files of your own (lm-eval's YAML).
    ``limit`` takes that many documents of each task, its first.
    ``run_code`` allows tasks that run generated programs, and says how. ``documents``: of each task those of these
    indices, instead of a limit.

    Raises:
        BadArgument: an unknown task, no tasks, a limit below 1, missing or unusable data, or a task that runs programs
            without permission.
        TaskDataUnavailable: no data folder, and the hub does not give the data; lm-eval cannot make a task from its
            definition.
    """
    if limit is not None and limit < 1:
        raise BadArgument("limit", limit, "a count of documents ≥ 1", "None takes all")
    manager = make_task_manager(data, definitions, tasks)
    loaded = load_tasks(manager, _require_known(tasks, manager))
    for name, task in loaded["tasks"].items():
        if task.get_config("unsafe_code"):
            if run_code is None:
                raise BadArgument("run_code", None, f"'confined' for {name}", "it runs generated programs")
            task.set_config("process_results", partial(task.get_config("process_results"), execution=run_code))
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(FEWSHOT_SEED)
    before = _cut_requests(lm)
    with lm_eval_quiet():
        results = evaluate(
            lm,
            loaded,
            limit=limit,
            samples=None if documents is None else {name: list(indices) for name, indices in documents.items()},
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=run_code is not None,
        )
    cut = {name: count - before.get(name, 0) for name, count in _cut_requests(lm).items()}
    return {
        name: replace(_task_result(name, task, results["samples"][name], lm), cut=cut.get(name, 0))
        for name, task in loaded["tasks"].items()
    }


def _cut_requests(lm: LM) -> dict[str, int]:
    """Task → requests cut so far; empty for models other than ``EmadLM``."""
    return dict(getattr(lm, "cut", {}))


def make_task_manager(
    data: Path | None = None, definitions: Path | None = None, names: Iterable[str] = ()
) -> TaskManager:
    """lm-eval's task manager with this project's definitions, and those in the folder ``definitions``.

    A definition there goes before ours, and ours before lm-eval's of the same name. lm-eval's own take 8 s to find
    (ours 2 ms), so they are read only if one of ``names`` is in neither folder.
    """
    ours = _task_manager(data, definitions, with_defaults=False)
    return ours if set(names) <= set(ours.all_tasks) else _task_manager(data, definitions, with_defaults=True)


@cache
def _task_manager(data: Path | None, definitions: Path | None, *, with_defaults: bool) -> TaskManager:
    metadata = {} if data is None else {"data": str(data)}
    folders = [str(folder) for folder in (TASK_FOLDER, definitions) if folder is not None]
    with lm_eval_quiet():
        return TaskManager(include_path=folders, include_defaults=with_defaults, metadata=metadata)


def load_tasks(manager: TaskManager, names: Sequence[str]) -> dict[str, Any]:
    """lm-eval's tasks and groups of ``names``, as ``TaskManager.load`` returns them.

    Raises:
        EmadError: this project's own reader refuses the data.
        TaskDataUnavailable: a definition or its data cannot be used.
    """
    try:
        with lm_eval_quiet():
            loaded: dict[str, Any] = manager.load(list(names))
    except EmadError:
        raise
    except Exception as error:  # the code of a definition, of `datasets` or of a hub: anything
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise TaskDataUnavailable(f"lm-eval cannot make {', '.join(names)}: {said}") from error
    return loaded


def expand_task_tags(names: Iterable[str], manager: TaskManager) -> list[str]:
    """``names`` with every tag replaced by its tasks, each once; a group stays one task, an unknown name itself."""
    members = (sorted(manager.task_index[name].tags) if name in manager.all_tags else [name] for name in names)
    return list(dict.fromkeys(chain.from_iterable(members)))


def list_available_task_names() -> tuple[str, ...]:
    """Names of this project's own definitions: tasks, groups and tags. ``evaluate_tasks`` also takes lm-eval's."""
    return tuple(make_task_manager().all_tasks)


def require_known_task(name: str, manager: TaskManager, argument: str) -> None:
    """Raise BadArgument for a name that ``manager`` does not have; ``argument`` names what gave it."""
    if name not in manager.all_tasks:
        expected = f"a task of lm-eval, of a folder of your own, or one of {', '.join(list_available_task_names())}"
        raise BadArgument(argument, name, expected, suggest_nearest(name, manager.all_tasks))


def _require_known(tasks: Sequence[str], manager: TaskManager) -> list[str]:
    if not tasks:
        raise BadArgument("tasks", [], "at least one name")
    for name in tasks:
        require_known_task(name, manager, "tasks")
    return list(tasks)


def _task_result(task_name: str, task: Any, samples: Sequence[dict[str, Any]], lm: LM) -> TaskResult:
    metric, chosen = task.config.metric_list[0]["metric"], samples[0]["filter"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for sample in sorted(samples, key=lambda sample: int(sample["doc_id"])):
        rows.setdefault(sample["filter"], []).append(sample)
    first = rows[chosen]
    columns = {
        (name, f): np.array([row[name] for row in rows[f]], dtype=np.float64)
        for f in rows
        for name in first[0]["metrics"]
    }
    main = columns.pop((metric, chosen))
    items = tuple(str(row["doc_hash"]) for row in first)
    texts = tuple(str(row["doc"].get("context", row["doc_hash"])) for row in first)  # SQuAD's paragraph
    if main.ndim == 1:
        prompts = tuple(str(row["arguments"][0][0]) for row in first)
        answers = tuple(_answer(row) for row in first)
        return TaskResult(
            task_name, metric, chosen, main, items, texts, others=columns, prompts=prompts, answers=answers
        )
    tokens = np.array([len(lm.tok_encode(row["arguments"][0][0])) for row in first], dtype=np.int64)
    return TaskResult(
        task_name, metric, chosen, -main[:, 0], items, texts, tokens=tokens, units=main[:, 1].astype(np.int64)
    )


def _answer(sample: Mapping[str, Any]) -> str:
    """The filtered generated text of a document, or its option of the highest log-likelihood.

    Of a single continuation lm-eval keeps its log-likelihood and whether greedy decoding writes it.
    """
    found, requests = sample["filtered_resps"], sample["arguments"]
    if all(isinstance(each, (tuple, list)) and len(each) == 2 and not isinstance(each[0], str) for each in found):
        likeliest = max(range(len(found)), key=lambda option: float(found[option][0]))
        if len(found) > 1 or found[0][1]:
            return str(requests[likeliest][1]).strip()
        return "another continuation"
    text = found[0]
    while isinstance(text, (tuple, list)):  # programs: one list per repeat
        text = text[0]
    return str(text)
