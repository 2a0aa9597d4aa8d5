"""EAD-A3: does averaging leave decisive tokens to the small model? (EAD, reading notes, Approaches)

A token is decisive where its own entropy reaches τ, whatever the window says; right is the large model's greedy choice
after the same history. It reports. It does not apply to weights without quality, nor where the large model is not
better on any task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.pair_answers import pair_answer, writing_answer_absent
from emad_ref.decoding.switching import SMALL
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.measurements.pair_answers import ItemAnswers, describe_rule
from emad_ref.record import Bools
from emad_ref.statistics.legs import combine_verdict, count_leg, estimate_leg
from emad_ref.statistics.rates import mean_rate
from emad_ref.statistics.units import ByItem
from emad_ref.statistics.verdicts import Leg, Verdict


@dataclass(frozen=True)
class DecisiveTokenEvidence:
    """Emitted tokens [items]: ``decisive``, those of them that the small model emitted, and those of these that are not
    the large model's choice (``wrong``); ``calm``: the small model's other tokens, and ``calm_wrong`` of them.

    ``name``: task and rule.
    """

    name: str
    decisive: ByItem
    decisive_small: ByItem
    wrong: ByItem
    calm: ByItem
    calm_wrong: ByItem


def decide(found: DecisiveTokenEvidence, asked: ClaimContext) -> Verdict:
    """Three shares, each over the items that have such tokens."""
    name = found.name
    shares = {
        f"{name}: decisive tokens emitted by the small model": (found.decisive_small, found.decisive),
        f"{name}: of them another than the large model's": (found.wrong, found.decisive_small),
        f"{name}: of its other tokens another than the large model's": (found.calm_wrong, found.calm),
    }
    legs = [_rate(leg, part, whole, asked.rng) for leg, (part, whole) in shares.items()]
    return combine_verdict(asked.claim, asked.model, legs)


def _rate(name: str, part: ByItem, whole: ByItem, rng: np.random.Generator) -> Leg:
    """Σ part / Σ whole with its interval over items; with a reason instead where every item has the same."""
    seen, unit = whole.values > 0, "share of tokens"
    if not seen.any():
        return replace(count_leg(name, 0, 0, unit, "there is no such token"), estimate=None)
    estimate = mean_rate(part.among(seen), whole.among(seen), threshold=0.0, rng=rng, unit=unit)
    return estimate_leg(name, estimate, "" if math.isfinite(estimate.low) else estimate.method)


def answer(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """From the judged run of the rule put forward, on the task most worth routing whose answers are written."""
    if absent := writing_answer_absent(pair, asked):
        return absent
    task = pair.rules.written[0]
    rule = pair.rules.put_forward(task)
    done = pair.rules.judged(rule, task)
    agrees = pair.answers.agreement(done, task, "evaluate", pair.size.judged)
    name = f"{task}, {describe_rule(rule)}"
    return pair_answer(pair, decide(_found(name, done, agrees, rule.threshold_bits), asked))


def _found(name: str, done: ItemAnswers, agrees: list[Bools], threshold_bits: float) -> DecisiveTokenEvidence:
    """``agrees``: per item, [emitted] whether the large model would have chosen the same."""
    high = [walk.entropy_bits >= threshold_bits for walk in done.walks]
    small = [walk.model == SMALL for walk in done.walks]

    def per_item(*columns: list[Bools]) -> ByItem:
        counts = [int(np.logical_and.reduce(item).sum()) for item in zip(*columns, strict=True)]
        return done.right.like(np.array(counts))

    low, differs = [~item for item in high], [~item for item in agrees]
    return DecisiveTokenEvidence(
        name,
        per_item(high),
        per_item(high, small),
        per_item(high, small, differs),
        per_item(low, small),
        per_item(low, small, differs),
    )


QUESTIONS = (Question("EAD-A3", "pair", answer, budget="standard", decide=decide),)
