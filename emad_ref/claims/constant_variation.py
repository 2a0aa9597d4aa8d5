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

from emad_ref.claims.base import Answer, ClaimContext
from emad_ref.claims.pair_answers import pair_answer, routing_answer_absent
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.statistics.accuracy import score_difference
from emad_ref.statistics.legs import combine_verdict, count_leg, estimate_leg
from emad_ref.statistics.units import ByItem
from emad_ref.statistics.verdicts import Leg, Verdict


@dataclass(frozen=True)
class VariedScore:
    """[items] expected score at one value, at the common saving, and the large model's share of tokens at the τ of the
    rule put forward."""

    score: ByItem
    large_share: float


@dataclass(frozen=True)
class ConstantEvidence:
    """``own``: the same of the value in force, ``reference``; ``varied``: other value of the constant ``symbol`` → the
    same items. All scores are at the saving ``saving``."""

    task: str
    symbol: str
    saving: float
    reference: int
    own: VariedScore
    varied: Mapping[int, VariedScore]


def decide_constant(found: ConstantEvidence, asked: ClaimContext) -> Verdict:
    """Per value, the score lost against the value in force, and the large model's share beside what it was."""
    legs: list[Leg] = []
    for value, varied in found.varied.items():
        leg = f"{found.task}, {found.symbol} = {value} for {found.reference}"
        lost = score_difference(found.own.score, varied.score, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
        share = f"{leg}: large-model share at the same τ, {found.own.large_share:.1%} before"
        legs += [
            estimate_leg(f"{leg}: score lost at a saving of {found.saving:.1%}", lost),
            count_leg(share, varied.large_share, len(varied.score), "share of tokens"),
        ]
    return combine_verdict(asked.claim, asked.model, legs)


def answer_constant(
    pair: PairMeasurements, asked: ClaimContext, field: str, values: Sequence[int], symbol: str
) -> Answer:
    """``field``: of ``SwitchingRule`` and ``SwitchingConstants``; ``symbol``: the paper's name for it."""
    if absent := routing_answer_absent(pair, asked):
        return absent
    task, saving = pair.rules.tasks[0], pair.savings[0]
    reference = getattr(pair.rules.constants(task), field)
    others = {value: varied for value in values if value != reference and (varied := _at(pair, task, {field: value}))}
    own = _at(pair, task, {field: reference})
    if own is None:
        reason = f"{task}: not even the small model alone saves {saving:.1%}: there is no equal saving to compare at"
        return pair_answer(pair, asked.not_applicable(reason))
    rows = [
        {
            symbol: value,
            f"score at a saving of {saving:.1%}": float(varied.score.values.mean()),
            "large-model share % at the same τ": varied.large_share,
            "items": len(varied.score),
        }
        for value, varied in sorted({reference: own, **others}.items())
    ]
    found = ConstantEvidence(task, symbol, saving, reference, own, others)
    return pair_answer(pair, decide_constant(found, asked), Attachments((AttachedTable(f"{symbol} on {task}", rows),)))


def _at(pair: PairMeasurements, task: str, change: Mapping[str, Any]) -> VariedScore | None:
    rules = pair.rules
    routed = rules.routed(task, pair.savings[0], replace(rules.constants(task), **change))
    same_tau = rules.judged(replace(rules.put_forward(task), **change), task)
    return None if routed is None else VariedScore(routed.score, same_tau.large_share)
