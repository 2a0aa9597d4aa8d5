"""One constant of the rule put forward is varied, all else stays: what do large-model share and score become?

Validation items of the task most worth routing, against the rule as it was put forward, with the paper's own value of
the constant. Shared by EAD-A1 and EAD-A2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.pair.answered import table_row
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.questions.asking import Answer, Asked
from emad_ref.questions.paired import about, nothing_to_route
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.interval import accuracy_drop
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.units import ByItem


@dataclass(frozen=True)
class Varied:
    """Right [items] at one value, and the share of emitted tokens that the large model wrote."""

    right: ByItem
    large_share: float


@dataclass(frozen=True)
class Found:
    """``own``: right [items] under the rule put forward; ``varied``: value of the constant ``symbol`` → same items."""

    task: str
    symbol: str
    own: ByItem
    varied: Mapping[int, Varied]


def judged(found: Found, asked: Asked) -> Verdict:
    """Per value, the score lost against the rule put forward, and the large model's share."""
    legs: list[Leg] = []
    for value, varied in found.varied.items():
        leg = f"{found.task}, {found.symbol} = {value}"
        legs += [
            estimated(f"{leg}: score lost", accuracy_drop(found.own, varied.right, threshold=0.0)),
            counted(f"{leg}: large-model share", varied.large_share, len(varied.right), "share of tokens"),
        ]
    return row(asked.claim, asked.model, legs)


def answered(pair: Pair, asked: Asked, field: str, values: Sequence[int], symbol: str) -> Answer:
    """``field``: of ``SwitchingRule``; ``symbol``: the paper's name for it."""
    if absent := nothing_to_route(pair, asked):
        return absent
    task, rules = pair.rules.tasks[0], pair.rules
    base = rules.put_forward(task)
    changed: dict[int, dict[str, Any]] = {value: {field: value} for value in values}
    runs = {value: rules.validated(replace(base, **change), task) for value, change in changed.items()}
    varied = {value: Varied(run.right, run.large_share) for value, run in runs.items()}
    found = Found(task, symbol, rules.validated(base, task).right, varied)
    table = Table(f"{symbol} on {task}", [table_row(f"EAD, {symbol} = {value}", run) for value, run in runs.items()])
    return about(pair, judged(found, asked), Exhibits((table,)))
