"""Tasks at a decoded point: what full depth answers right, and the point does not.

The tasks and their scores are those of EMAD-F1 (``tasks.scoring``), on fewer items: the five of the synthetic world for
its corpora, continuation choice for any other text. Full depth is read from one trace, and the point is decoded token
by token. Programs are written by both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.absent import Absent
from emad_ref.calibration.trace import take_trace
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.loading import LoadedModel
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.record import Bools
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.traces import MIN_DOCUMENTS, ScreeningText
from pytest_emad.statistics.accuracy import AT_STAKE, TaskAccuracy, estimate_accuracy_drop
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.units import ByItem
from pytest_emad.tasks.answers import write_programs
from pytest_emad.tasks.continuation_scoring import mark_correct_items_by_decoding
from pytest_emad.tasks.datasets import TaskDataUnavailable
from pytest_emad.tasks.scoring import (
    CONTINUATION_CHOICE,
    EncodedTaskItem,
    cluster_duplicate_items,
    guess_accuracy,
    make_continuation_items,
    make_world_items,
    mark_correct_items_from_trace,
    to_token_sequences,
)

ITEMS = 60  # of each task: of five tasks, one that loses six answers is shown to lose more than a point
ROWS = 32  # items decoded together


@dataclass(frozen=True)
class ScreenedTask:
    """One task at ``point`` and at full depth, on the same items.

    ``scores``: whether full depth solves it. ``drop``: the paired loss of accuracy, tested against ``AT_STAKE``.
    """

    point: OperatingPoint
    task: str
    scores: TaskAccuracy
    drop: Estimate


def judge_tasks(
    model: LoadedModel, points: list[OperatingPoint], text: ScreeningText, settings: ScreeningSettings
) -> list[ScreenedTask] | Absent:
    """Score every task of the corpus at every point, which has its lens and translators attached.

    ``text``: the evaluation text, whose documents give the items of continuation choice. Empty without points.
    """
    if not points:
        return []
    try:
        items, guesses = _items_and_guesses(model, text, settings)
    except TaskDataUnavailable as error:
        return Absent(str(error))
    full, found = full_depth(model.stepper.layers), []
    for task, own in items.items():
        right = ByItem(_mark_at_full_depth(model, own, full), cluster_duplicate_items(own))
        for point in points:
            scores = TaskAccuracy(right, right.with_values(_mark_by_decoding(model, own, point)), guesses[task], 1.0)
            drop = estimate_accuracy_drop(scores.full, scores.adaptive, threshold=AT_STAKE)
            found.append(ScreenedTask(point, task, scores, drop))
    return found


def _items_and_guesses(
    model: LoadedModel, text: ScreeningText, settings: ScreeningSettings
) -> tuple[dict[str, list[EncodedTaskItem]], dict[str, float]]:
    """Items of every task, and what guessing answers right of them. Raises TaskDataUnavailable."""
    count, opening = settings.scale_amount_by_documents(ITEMS, MIN_DOCUMENTS), model.opening_token_id
    if settings.corpus.startswith("world:"):
        assert model.tokenizer is not None, "text was read with it"
        items, others = (
            make_world_items(split, count, settings.seed, model.tokenizer, opening)
            for split in ("evaluate", "validate")
        )
        return items, {task: guess_accuracy(own, others[task]) for task, own in items.items()}
    first = {window.document: window.tokens for window in reversed(text.windows)}
    choices = make_continuation_items(
        [tokens if opening is None else tokens[1:] for _, tokens in sorted(first.items())],
        count,
        text=settings.text_description,
        opening=opening,
        rng=np.random.default_rng(settings.seed),
    )
    return {CONTINUATION_CHOICE: choices}, {CONTINUATION_CHOICE: guess_accuracy(choices, choices)}


def _mark_at_full_depth(model: LoadedModel, items: list[EncodedTaskItem], full: OperatingPoint) -> Bools:
    """[items] right at full depth, by one trace; programs are written."""
    if items[0].example.scoring == "runs":
        return _mark_by_decoding(model, items, full)
    trace = take_trace(model.stepper, to_token_sequences(items), layers=())
    return mark_correct_items_from_trace(items, trace, np.full(len(trace), full.layers))


def _mark_by_decoding(model: LoadedModel, items: list[EncodedTaskItem], point: OperatingPoint) -> Bools:
    decoder = WalkedDecoder(model.stepper, point, max_rows=ROWS)
    if items[0].example.scoring == "runs":
        return np.array([right for _, right in write_programs(decoder, items, model.tokenizer, ROWS)], dtype=bool)
    return mark_correct_items_by_decoding(decoder, items, ROWS)
