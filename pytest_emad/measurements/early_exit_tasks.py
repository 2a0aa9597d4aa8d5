"""Tasks for early exits: which tasks a model gets, their items, and the score of an answer.

The bundled T5s get the world's own pairs, on which they were trained. Any other T5 gets SQuAD and SamSum from the files
of ``--emad-data DIR``. Without files it gets no task, and its rows give the reason, as for every omitted task.

Judged items come from the evaluation split. Calibration (EE-7), and the constant answer of an honest guess, use items
about other texts: the world's calibration split, or rows of the file that are not judged. Items about one text, such as
questions about a paragraph, share a cluster.

An honest guess is the better of two without a model: the most frequent answer elsewhere, or one from the source (a
random word or number of it, or its first words, as many as a summary has).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from emad_ref.errors import stop_run_on_error
from emad_ref.record import Floats, Ints
from emad_ref.text.seq2seq_pairs import SourceTarget, TextTask, generate_source_target_pairs
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.statistics.units import ByItem
from pytest_emad.tasks.datasets import PUBLISHED, PublishedPairs, has_task_file, load_seq2seq_pairs, task_file_names
from pytest_emad.tasks.metrics import compute_samsum_metrics, compute_squad_metrics

WORLD = "world:pairs"
ITEMS = {"smoke": 100, "standard": 200, "full": 500}
GUESSED_FROM = 100  # unjudged items for the most frequent answer
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class EarlyExitTask:
    """A task. ``kind``: question answering, summary, or a worked chain that ends with a number.

    ``new``: tokens of an answer.
    """

    corpus: str
    kind: TextTask
    new: int


TASKS: dict[str, EarlyExitTask] = {
    "qa": EarlyExitTask(WORLD, "qa", 8),  # the longest target has 4 tokens
    "summary": EarlyExitTask(WORLD, "summary", 44),  # 38
    "count": EarlyExitTask(WORLD, "count", 44),  # 40
    "squad": EarlyExitTask("squad", "qa", 30),  # as in the SQuAD scripts of BERT and transformers
    "samsum": EarlyExitTask("samsum", "summary", 128),  # as in LongBench for SamSum (tasks/local/samsum.yaml)
}


@dataclass(frozen=True, eq=False)
class TaskItems:
    """Items of one task, the same for every rule.

    ``sources``: int64 [s] each, cut to the window; ``targets``: int64 [n] each, cut to an answer's length. ``cut``:
    number of truncated sources and targets. ``drawn``: text about their origin; "" for the world's.
    """

    pairs: tuple[SourceTarget, ...]
    sources: tuple[Ints, ...]
    targets: tuple[Ints, ...]
    cut: tuple[int, int]
    drawn: str

    @cached_property
    def text_ids(self) -> Ints:
        """int64 [items]: items about the same text have the same number."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(pair.text, len(numbers)) for pair in self.pairs], dtype=np.int64)

    def cluster_values_by_text(self, values: Any) -> ByItem:
        """``values`` [items, …] of these items, in their order."""
        return ByItem(np.asarray(values), self.text_ids)


class EarlyExitTasks:
    """Tasks of one encoder-decoder; their items are read on first use."""

    def __init__(self, subject: ModelUnderTest):
        self._subject = subject
        self._items: dict[str, TaskItems] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Available tasks."""
        return tuple(name for name, absent in self._candidates.items() if absent is None)

    @property
    def absent_by_task(self) -> dict[str, Absent]:
        """Unavailable task → why; each becomes an unmeasured leg, so that the row cannot survive."""
        return {name: absent for name, absent in self._candidates.items() if absent is not None}

    @property
    def absent_tasks(self) -> Absent | None:
        """Why no task is available; None if one is."""
        if self.names:
            return None
        return Absent("; ".join(dict.fromkeys(absent.reason for absent in self.absent_by_task.values())))

    @property
    def corpus(self) -> str:
        """``world:pairs``, ``squad``, ``samsum`` or ``squad+samsum``."""
        return "+".join(dict.fromkeys(TASKS[name].corpus for name in self.names))

    def format_title(self, name: str) -> str:
        """Title with task and corpus."""
        corpus = TASKS[name].corpus
        return name if name == corpus else f"{corpus}, {name}"

    @cached_property
    def _candidates(self) -> dict[str, Absent | None]:
        """Each task of this kind of model → why it is unavailable; None: it is available."""
        candidates = [name for name, task in TASKS.items() if (task.corpus == WORLD) == self._subject.loaded.bundled]
        return {name: self._absent_task(name) for name in candidates}

    def _absent_task(self, name: str) -> Absent | None:
        task, data = TASKS[name], self._subject.data
        if task.corpus != WORLD:
            if data is None:
                every = ", ".join(" or ".join(task_file_names(published)) for published in PUBLISHED)
                return Absent(f"no SQuAD/SamSum files; --emad-data DIR holds {every}")
            if not has_task_file(name, data):
                return Absent(f"no {' or '.join(task_file_names(name))} in --emad-data {data}")
        if task.kind == "summary" and not find_spec("rouge_score"):
            return Absent("its scorer rouge-score is not installed: pip install 'pytest-emad[tasks]'")
        return None

    # ------------------------------------------------------------ items

    def load_items(self, name: str) -> TaskItems:
        """The evaluated items of ``name``. An unusable file ends the run (``errors.RunStopped``)."""
        if name not in self._items:
            self._items[name] = self._read(name)
        return self._items[name]

    @property
    def notes(self) -> list[str]:
        """Notes on the origin of the items, and the number of truncated ones."""
        subject = self._subject
        notes = [f"{subject.name}: {name}: {note}" for name in self.names if (note := self._note(name))]
        data = subject.data
        if subject.loaded.bundled and data is not None and any(has_task_file(name, data) for name in PUBLISHED):
            notes.append(f"{subject.name}: asked {WORLD}, for which it was trained, and not the files of --emad-data")
        return notes

    def _note(self, name: str) -> str:
        items = self.load_items(name)
        sources, targets = items.cut
        if not (items.drawn or sources or targets):
            return ""
        origin = items.drawn or f"{len(items.pairs)} pairs"
        return (
            f"{origin}; {sources} sources cut to {self._subject.window_size} tokens, {targets} references to "
            f"{TASKS[name].new}"
        )

    def load_items_of_other_texts(self, name: str, count: int, by: int = 1) -> TaskItems:
        """Up to ``count`` items about texts that are not judged, each about another text; a multiple of ``by``.

        An unusable file ends the run.
        """
        subject = self._subject
        if TASKS[name].corpus == WORLD:
            stream = generate_source_target_pairs(TASKS[name].kind, "calibrate", None, subject.seed)
        else:
            judged = {pair.text for pair in self.load_items(name).pairs}
            stream = (pair for pair in self._published(name, None).pairs if pair.text not in judged)
        chosen = tuple(islice(_one_per_text(stream), count))
        return self._tokenised(name, chosen[: len(chosen) // by * by], "")

    def compute_guess_scores(self, name: str) -> Floats:
        """float64 [items] expected score of an honest guess without a model.

        It is the most frequent answer elsewhere or one from the source, by the better average.
        """
        judged, others = self.load_items(name).pairs, self.load_items_of_other_texts(name, GUESSED_FROM).pairs
        length = int(np.median([len(pair.target.split()) for pair in others or judged]))
        common = [answer for answer, _ in Counter(pair.target for pair in others).most_common(1)]
        offers = GUESSES[TASKS[name].kind]
        each = [(common, offers(pair.text, length)) for pair in judged]
        expected = np.array(
            [
                [np.mean([score_answer(name, guess, pair.answers) for guess in guesses or [""]]) for guesses in kinds]
                for pair, kinds in zip(judged, each, strict=True)
            ]
        )
        best: Floats = expected[:, expected.mean(axis=0).argmax()]
        return best

    def _read(self, name: str) -> TaskItems:
        subject, count = self._subject, ITEMS[self._subject.budget.name]
        if TASKS[name].corpus == WORLD:
            return self._tokenised(
                name, tuple(generate_source_target_pairs(TASKS[name].kind, "evaluate", count, subject.seed)), ""
            )
        published = self._published(name, count)
        return self._tokenised(
            name, published.pairs, f"{len(published.pairs)} of {published.of:,} pairs of {published.file.name}"
        )

    def _published(self, name: str, count: int | None) -> PublishedPairs:
        assert self._subject.data is not None, "without a folder no published task is asked"
        with stop_run_on_error():
            return load_seq2seq_pairs(name, self._subject.data, count, self._subject.seed)

    def _tokenised(self, name: str, chosen: tuple[SourceTarget, ...], origin: str) -> TaskItems:
        window, new = self._subject.window_size, TASKS[name].new
        sources = [self._tokens(pair.source) for pair in chosen]
        targets = [self._tokens(pair.target) for pair in chosen]
        cut = sum(len(ids) > window for ids in sources), sum(len(ids) > new for ids in targets)
        # a source keeps its end token; a reference has only writable tokens
        cut_sources = [
            ids if len(ids) <= window else self._tokens(pair.source, truncation=True, max_length=window)
            for pair, ids in zip(chosen, sources, strict=True)
        ]
        return TaskItems(chosen, tuple(cut_sources), tuple(ids[:new] for ids in targets), cut, origin)

    def _tokens(self, text: str, **options: Any) -> Ints:
        ids: Ints = np.array(self._subject.tokenizer.encode(text, **options), dtype=np.int64)
        return ids


def _one_per_text(stream: Iterable[SourceTarget]) -> Iterator[SourceTarget]:
    texts: set[str] = set()
    for pair in stream:
        if pair.text not in texts:
            texts.add(pair.text)
            yield pair


# ---------------------------------------------------------------- scores


def score_answer(name: str, text: str, answers: Sequence[str]) -> float:
    """The best score of ``text`` over the reference answers, in 0–1.

    Token F1 of an answer, ROUGE-L of a summary, the last number of a worked chain.
    """
    return SCORES[TASKS[name].kind](text, answers)


def exact_match(name: str, text: str, answers: Sequence[str]) -> float | None:
    """1 if ``text`` equals an answer except for case, punctuation and articles, else 0; None for a summary."""
    if TASKS[name].kind == "summary":
        return None
    return compute_squad_metrics({"answers": {"text": answers}}, [text])["exact"]


def _last_number(text: str) -> str:
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def _chain_ends(text: str, answers: Sequence[str]) -> float:
    return float(any(_last_number(answer) == _last_number(text) != "" for answer in answers))


SCORES: dict[TextTask, Callable[[str, Sequence[str]], float]] = {
    "qa": lambda text, answers: compute_squad_metrics({"answers": {"text": answers}}, [text])["f1"],
    "summary": lambda text, answers: max(
        compute_samsum_metrics({"summary": answer}, [text])["rougeL"] for answer in answers
    ),
    "count": _chain_ends,
}
# (text, words of a usual answer) → equally likely candidate answers in the text
GUESSES: dict[TextTask, Callable[[str, int], Sequence[str]]] = {
    "qa": lambda text, length: sorted(set(re.findall(r"\w+", text))),
    "summary": lambda text, length: [" ".join(text.split()[:length])],
    "count": lambda text, length: NUMBER.findall(text),
}
