"""All items of one task decoded under one rule: texts, scores, exit blocks and FLOPs.

Answers are written by greedy decoding from the decoder's start token to the stop token. Items are decoded together, a
few rows at a time; item i of every rule is item i, so that rules are compared item by item.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.evidence.exits.costs import Costs, costs
from emad_ref.evidence.exits.tasks import TASKS, Items, exactly, scored
from emad_ref.evidence.subject import Subject
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import Ints, Work
from emad_ref.verdict.units import ByItem

ROWS = 25  # items decoded together


@dataclass(frozen=True, eq=False)
class Exited:
    """How well and how early each item was answered: ``score`` in 0–1, ``depth_sums`` Σ D_t, ``tokens`` decided."""

    score: ByItem
    depth_sums: ByItem
    tokens: ByItem

    def __len__(self) -> int:
        return len(self.score)

    @property
    def exit_block(self) -> ByItem:
        """Mean exit block of each item's tokens."""
        return self.depth_sums.like(self.depth_sums.values / self.tokens.values)

    def exits_as(self, other: Exited) -> bool:
        """Whether every item was answered in as many tokens and blocks as in ``other``."""
        same = np.array_equal(self.depth_sums.values, other.depth_sums.values)
        return same and np.array_equal(self.tokens.values, other.tokens.values)

    @property
    def mean_exit(self) -> float:
        """Blocks per token, over all items."""
        return float(self.depth_sums.values.sum() / self.tokens.values.sum())


@dataclass(frozen=True, eq=False)
class Answered:
    """All items of one task under ``point``, in their order.

    ``counted``: the decoder's work on all of them; None where it does not count.
    ``exact``: share of answers that are a reference word for word; None for a task without right answers.
    """

    point: OperatingPoint
    texts: tuple[str, ...]
    exited: Exited
    counted: Work | None
    exact: float | None = None

    def costs(self, geometry: Geometry) -> Costs:
        """FLOPs per item.

        Raises:
            Unsupported: the decoder does not count its work.
        """
        if self.counted is None:
            raise Unsupported("the decoder does not count its work")
        return costs(self.counted, geometry, len(self.texts))


def prompts(subject: Subject, items: Items) -> list[Prompt]:
    """The decoder's start token, after each item's source."""
    assert subject.opening is not None, "an encoder-decoder has a start token"
    return [Prompt(np.array([subject.opening], dtype=np.int64), source) for source in items.sources]


def decoded(subject: Subject, task: str, items: Items, point: OperatingPoint) -> Answered:
    """Every item of ``task`` under ``point``.

    Raises:
        Unsupported: the decoder under test declines the point.
    """
    asked = prompts(subject, items)
    texts: list[str] = []
    depths: list[Ints] = []
    work: Work | None = Work.none(subject.stepper.layers)
    with subject.open_audited(point, max_rows=ROWS) as decoder:
        for start in range(0, len(asked), ROWS):
            batch = asked[start : start + ROWS]
            record = decoder.generate(batch, TASKS[task].new, subject.stop)
            work = work + record.work[0] if work is not None and record.work is not None else None
            depths += [record.tokens.of(row, phase=1).depth for row in range(len(batch))]
            texts += [
                subject.tokenizer.decode(emitted.tolist(), skip_special_tokens=True).strip()
                for emitted in record.emitted
            ]
    references = [item.answers for item in items.pairs]
    exited = Exited(
        items.column([scored(task, text, answers) for text, answers in zip(texts, references, strict=True)]),
        items.column([float(depth.sum()) for depth in depths]),
        items.column([len(depth) for depth in depths]),
    )
    return Answered(point, tuple(texts), exited, work, _exact(task, texts, references))


def _exact(task: str, texts: list[str], references: list[tuple[str, ...]]) -> float | None:
    right = [exactly(task, text, answers) for text, answers in zip(texts, references, strict=True)]
    known = [share for share in right if share is not None]
    return float(np.mean(known)) if len(known) == len(right) else None
