"""One constant of EAD's rules is varied, all else stays: what becomes of the score at equal saving, and of the share?

On judged items of the task most worth routing. Every value has a front of its own, τ chosen anew on validation, and is
read at exactly the saving at which the paper's own value is read: so one score is compared with another and not with
another price. Beside it what the large model writes where τ stays as it was. The value in force is the reference, and
is not compared with itself. Shared by EAD-A1 and EAD-A2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.questions.asking import Answer, Asked
from emad_ref.questions.paired import about, nothing_to_route
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.scores import difference
from emad_ref.verdict.units import ByItem


@dataclass(frozen=True)
class Varied:
    """[items] expected score at one value, at the common saving, and the large model's share of tokens at the τ of the
    rule put forward."""

    score: ByItem
    large_share: float


@dataclass(frozen=True)
class Found:
    """``own``: the same of the value in force, ``reference``; ``varied``: other value of the constant ``symbol`` → the
    same items. All scores are at the saving ``saving``."""

    task: str
    symbol: str
    saving: float
    reference: int
    own: Varied
    varied: Mapping[int, Varied]


def judged(found: Found, asked: Asked) -> Verdict:
    """Per value, the score lost against the value in force, and the large model's share beside what it was."""
    legs: list[Leg] = []
    for value, varied in found.varied.items():
        leg = f"{found.task}, {found.symbol} = {value} for {found.reference}"
        lost = difference(found.own.score, varied.score, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
        share = f"{leg}: large-model share at the same τ, {found.own.large_share:.1%} before"
        legs += [
            estimated(f"{leg}: score lost at a saving of {found.saving:.1%}", lost),
            counted(share, varied.large_share, len(varied.score), "share of tokens"),
        ]
    return row(asked.claim, asked.model, legs)


def answered(pair: Pair, asked: Asked, field: str, values: Sequence[int], symbol: str) -> Answer:
    """``field``: of ``SwitchingRule`` and ``Constants``; ``symbol``: the paper's name for it."""
    if absent := nothing_to_route(pair, asked):
        return absent
    task, saving = pair.rules.tasks[0], pair.savings[0]
    reference = getattr(pair.rules.constants(task), field)
    others = {value: varied for value in values if value != reference and (varied := _at(pair, task, {field: value}))}
    own = _at(pair, task, {field: reference})
    if own is None:
        reason = f"{task}: not even the small model alone saves {saving:.1%}: there is no equal saving to compare at"
        return about(pair, asked.not_applicable(reason))
    rows = [
        {
            symbol: value,
            f"score at a saving of {saving:.1%}": float(varied.score.values.mean()),
            "large-model share % at the same τ": varied.large_share,
            "items": len(varied.score),
        }
        for value, varied in sorted({reference: own, **others}.items())
    ]
    found = Found(task, symbol, saving, reference, own, others)
    return about(pair, judged(found, asked), Exhibits((Table(f"{symbol} on {task}", rows),)))


def _at(pair: Pair, task: str, change: Mapping[str, Any]) -> Varied | None:
    rules = pair.rules
    routed = rules.routed(task, pair.savings[0], replace(rules.constants(task), **change))
    same_tau = rules.judged(replace(rules.put_forward(task), **change), task)
    return None if routed is None else Varied(routed.score, same_tau.large_share)
