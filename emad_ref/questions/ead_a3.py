"""EAD-A3: does averaging leave decisive tokens to the small model? (EAD, reading notes, Approaches)

A token is decisive where its own entropy reaches τ, whatever the window says; right is the large model's greedy choice
after the same history. It reports. It does not apply to weights without quality, nor where the large model is not
better on any task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.decoding.switching import SMALL
from emad_ref.evidence.pair.answered import Answered, described
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.paired import about, nothing_written
from emad_ref.record import Bools
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.rates import mean_rate
from emad_ref.verdict.units import ByItem


@dataclass(frozen=True)
class Found:
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


def decide(found: Found, asked: Asked) -> Verdict:
    """Three shares, each over the items that have such tokens."""
    name = found.name
    shares = {
        f"{name}: decisive tokens emitted by the small model": (found.decisive_small, found.decisive),
        f"{name}: of them another than the large model's": (found.wrong, found.decisive_small),
        f"{name}: of its other tokens another than the large model's": (found.calm_wrong, found.calm),
    }
    legs = [_rate(leg, part, whole, asked.rng) for leg, (part, whole) in shares.items()]
    return row(asked.claim, asked.model, legs)


def _rate(name: str, part: ByItem, whole: ByItem, rng: np.random.Generator) -> Leg:
    """Σ part / Σ whole with its interval over items; with a reason instead where every item has the same."""
    seen, unit = whole.values > 0, "share of tokens"
    if not seen.any():
        return replace(counted(name, 0, 0, unit, "there is no such token"), estimate=None)
    estimate = mean_rate(part.among(seen), whole.among(seen), threshold=0.0, rng=rng, unit=unit)
    return estimated(name, estimate, "" if math.isfinite(estimate.low) else estimate.method)


def answer(pair: Pair, asked: Asked) -> Answer:
    """From the judged run of the rule put forward, on the task most worth routing whose answers are written."""
    if absent := nothing_written(pair, asked):
        return absent
    task = pair.rules.written[0]
    rule = pair.rules.put_forward(task)
    done = pair.rules.judged(rule, task)
    agrees = pair.answers.agreement(done, task, "evaluate", pair.size.judged)
    name = f"{task}, {described(rule)}"
    return about(pair, decide(_found(name, done, agrees, rule.threshold_bits), asked))


def _found(name: str, done: Answered, agrees: list[Bools], threshold_bits: float) -> Found:
    """``agrees``: per item, [emitted] whether the large model would have chosen the same."""
    high = [walk.entropy_bits >= threshold_bits for walk in done.walks]
    small = [walk.model == SMALL for walk in done.walks]

    def per_item(*columns: list[Bools]) -> ByItem:
        counts = [int(np.logical_and.reduce(item).sum()) for item in zip(*columns, strict=True)]
        return done.right.like(np.array(counts))

    low, differs = [~item for item in high], [~item for item in agrees]
    return Found(
        name,
        per_item(high),
        per_item(high, small),
        per_item(high, small, differs),
        per_item(low, small),
        per_item(low, small, differs),
    )


QUESTION = Question("EAD-A3", "pair", answer, budget="standard")
