"""Items that the candidate lost or gained, in the order in which a reader learns most from them.

Every task takes turns, and within a task lost and gained ones do, so that the first ones show many kinds. Among items
of one kind those come first whose answers are equal on both sides though their scores differ; then the largest
difference of scores; then the largest change of the target's lead in log-likelihood, since a small one is a tie that
rounding decides; then the shortest prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pytest_emad.accuracy.decision import ScoreTest
from pytest_emad.accuracy.items import ItemTexts
from pytest_emad.accuracy.pairing import PairedScores

OUTCOMES = ("falsified", "inconclusive", "survived")


@dataclass(frozen=True)
class DifferingItem:
    """An item with another score on the candidate's side, and its texts on both sides."""

    task: str
    metric: str
    filter: str
    id: str
    base_score: float
    candidate_score: float
    base: ItemTexts
    candidate: ItemTexts

    @property
    def change(self) -> str:
        return "lost" if self.candidate_score < self.base_score else "gained"

    @property
    def lead_change(self) -> float | None:
        """Nats by which the target's lead over the other choices changed; None without choices."""
        if self.base.lead is None or self.candidate.lead is None:
            return None
        return self.candidate.lead - self.base.lead

    @property
    def has_equal_answers(self) -> bool:
        """Whether both sides gave the same answer, as far as the files say what they gave."""
        return bool(self.base.answer) and (self.base.answer, self.base.response) == (
            self.candidate.answer,
            self.candidate.response,
        )


def list_differing_items(tests: Sequence[ScoreTest]) -> list[DifferingItem]:
    """Every item with another score, once per task, the most instructive first."""
    queues: defaultdict[tuple[str, str], list[DifferingItem]] = defaultdict(list)
    listed: set[tuple[str, str]] = set()
    ordered = sorted(tests, key=lambda test: OUTCOMES.index(test.leg.outcome))
    for scores in (scores for test in ordered for scores in test.scores):
        for item in _iterate_items(scores):
            if (item.task, item.id) not in listed:
                listed.add((item.task, item.id))
                queues[item.task, item.change].append(item)
    kinds = sorted(
        queues, key=lambda kind: (list(dict.fromkeys(task for task, _ in queues)).index(kind[0]), kind[1] != "lost")
    )
    turns = [(rank, order, item) for order, kind in enumerate(kinds) for rank, item in enumerate(_ranked(queues[kind]))]
    return [item for _, _, item in sorted(turns, key=lambda turn: turn[:2])]


def _iterate_items(scores: PairedScores) -> Iterator[DifferingItem]:
    differing = [int(index) for index in np.flatnonzero(scores.base != scores.candidate)]
    for index, (base, candidate) in zip(differing, scores.read_texts(differing), strict=True):
        yield DifferingItem(
            scores.task,
            scores.metric,
            scores.filter,
            scores.ids[index],
            float(scores.base[index]),
            float(scores.candidate[index]),
            base,
            candidate,
        )


def _ranked(items: Sequence[DifferingItem]) -> list[DifferingItem]:
    return sorted(
        items,
        key=lambda item: (
            not item.has_equal_answers,
            -abs(item.candidate_score - item.base_score),
            -abs(item.lead_change or 0.0),
            len(item.base.prompt),
        ),
    )
