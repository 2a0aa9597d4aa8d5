"""Items answered by a way of decoding: which are right, who emitted what, and what it cost; everything off records.

Score is the share of items answered right by greedy generation. Nothing is derived from what a run should have done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emad_ref.decoding.acceptance import ACCEPTED, Speculated
from emad_ref.decoding.branching import Walk
from emad_ref.decoding.switching import Switched, SwitchingRule
from emad_ref.evidence.pair.marked import Marked
from emad_ref.evidence.scored import GENERATED_LINE
from emad_ref.record import Floats, Ints, Record
from emad_ref.sweep.routing import Ran
from emad_ref.tasks.scoring import Item, runs
from emad_ref.verdict.units import ByItem

Result = Switched | Speculated | Record


@dataclass(frozen=True, eq=False)  # holds arrays: a result is itself, not its values
class Answered:
    """How items were answered: ``right`` [items] bool; int64 [items] tokens ``emitted``, and those ``by_large``.

    ``flops`` executed, prompts included; None where a decoder does not count. ``runs``: the results they came from;
    ``walks``: of switching, one per item; both empty where options were read. ``entropy_bits``: per text or option
    [its tokens], of whoever was in charge; empty where the way does not tell.
    """

    right: ByItem
    emitted: Ints
    by_large: Ints
    flops: int | None
    runs: tuple[Result, ...] = ()
    walks: tuple[Walk, ...] = ()
    entropy_bits: tuple[Floats, ...] = ()

    @classmethod
    def of(
        cls, marked: Marked, flops: int | None, runs: tuple[Result, ...] = (), walks: tuple[Walk, ...] = ()
    ) -> Answered:
        """Items as a task marked them: of options, the tokens of all of them are read, and count."""
        emitted = [sum(len(one.tokens) for one in item) for item in marked.written]
        by_large = [sum(one.by_large for one in item) for item in marked.written]
        told = tuple(one.entropy_bits for item in marked.written for one in item if one.entropy_bits is not None)
        return cls(marked.right, np.array(emitted), np.array(by_large), flops, runs, walks, told)

    @property
    def ran(self) -> Ran:
        """What a mixture by items takes in."""
        return Ran(self.right.values.astype(np.float64), self.emitted, self.by_large)

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
        runs = [one for one in self.runs if isinstance(one, Speculated)]
        judged = sum(one.judged for one in runs)
        return sum(int(one.drafted(ACCEPTED).sum()) for one in runs) / judged if judged else None


def record_of(result: Result) -> Record:
    return result if isinstance(result, Record) else result.record


def is_right(item: Item, text: str) -> bool:
    """Whether ``text``, generated greedily after the item's prompt, answers it: by its beginning, or as a program."""
    return runs(item.example, text) if item.example.scoring == "runs" else text.startswith(item.example.answer)


def longest(items: Sequence[Item]) -> int:
    """New tokens that the longest right answer takes; of a program, a line."""
    if any(item.example.scoring == "runs" for item in items):
        return GENERATED_LINE
    return max(len(continuation) for item in items for continuation in item.continuations)


def described(rule: SwitchingRule) -> str:
    """``τ = 0.27 bits, w = 5, d_min = 10, small first``."""
    first = ("small", "large")[rule.start]
    return f"τ = {rule.threshold_bits:.3g} bits, w = {rule.window}, d_min = {rule.least_run}, {first} first"


def table_row(name: str, done: Answered, **more: Any) -> dict[str, Any]:
    """A row of the table of ways to answer: everything off records; ``more`` columns stand last."""
    return {
        "decoding": name,
        "score": done.score,
        "large-model share %": done.large_share,
        "MFLOPs per token": None if done.flops_per_token is None else done.flops_per_token / 1e6,
        "items": len(done.right),
    } | more
