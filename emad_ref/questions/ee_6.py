"""EE-6: does the rank of the final token fall with depth?
(Early-exit LLMs, Early Exiting Via the Softmax Approach, Figure 1)

A report, read under teacher forcing: the rank that each layer gives to the token which the last layer prefers. It does
not apply to decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from emad_ref.evidence.exhibits import Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import Readings, on_items, readings
from emad_ref.sweep.exits import QUANTILES, rank_quantiles
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.rates import profile_slope

MEDIAN = QUANTILES.index(0.5)


def decide(found: Readings, asked: Asked) -> Verdict:
    """Per task the slope of log2 rank over the layers, resampled by item, and the median rank after each layer."""
    legs: list[Leg] = []
    for task, read in found.read.items():
        slope = profile_slope(read.by_item(np.log2(read.ranks)), read.tokens, threshold=0.0, rng=asked.rng)
        slope = replace(slope, unit="doublings of the rank per layer")
        legs.append(estimated(f"{task}: slope of log2 rank", slope))
        for layer, ranks in enumerate(rank_quantiles(read.ranks), start=1):
            legs.append(counted(f"{task}, layer {layer}: median", ranks[MEDIAN], len(read.item), asked.claim.unit))
    return row(asked.claim, asked.model, legs)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From the readings of every task; the quantiles of the rank after every layer on a table."""
    exits = evidence.exits
    return on_items(evidence, asked, lambda: decide(readings(exits), asked), lambda: (layers(readings(exits)),))


def layers(found: Readings) -> Table:
    """Quantiles of the final token's rank after every layer."""
    rows: list[dict[str, Any]] = [
        {"task": task, "layer": layer, **dict(zip((f"{q:.0%}" for q in QUANTILES), ranks.tolist(), strict=True))}
        for task, each in found.read.items()
        for layer, ranks in enumerate(rank_quantiles(each.ranks), start=1)
    ]
    return Table("rank of the final token per layer", rows, "final token rank")


QUESTION = Question("EE-6", "model", answer)
