"""EAD-A4: would entropy serve better inside speculation than between models? (EAD, reading notes, Insights)

Entropy-gated acceptance against switching, at no more tokens of the large model: of all widths and gates the one of
highest validation score that leaves it as little as EAD does. A speculated token counts as the large model's where no
draft stands for it. The verifier reads every draft all the same: FLOPs stand in the table. The row reports. It does not
apply to weights without quality, nor where the large model is not better on any task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from emad_ref.decoding.acceptance import Speculated
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.pair.answered import described, table_row
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.paired import about, nothing_to_route
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.interval import accuracy_drop
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.units import ByItem

WIDTHS = (2, 8)  # k
GATES = (None, 1.0)  # quantiles of the drafts' entropies: nothing refused is kept; everything is

Option = tuple[int, float | None]  # k, gate in bits


@dataclass(frozen=True)
class Way:
    """Right [items] when decoded so, and the share of emitted tokens that the large model wrote."""

    name: str
    right: ByItem
    large_share: float


@dataclass(frozen=True)
class Found:
    """``gated`` None: on ``tried`` validation items every gate leaves the large model more than ``allowed``, the share
    that EAD leaves it."""

    task: str
    switched: Way
    gated: Way | None
    allowed: float
    tried: int


def decide(found: Found, asked: Asked) -> Verdict:
    """The score lost by gating against switching, and both shares; where no gate is cheap enough, the share alone."""
    task, gated, switched = found.task, found.gated, found.switched
    if gated is None:
        none = f"{task}: no gate leaves the large model as little"
        return row(asked.claim, asked.model, [counted(none, found.allowed, found.tried, "share of tokens")])
    lost, n = accuracy_drop(switched.right, gated.right, threshold=0.0), len(gated.right)
    legs = [
        estimated(f"{task}: score lost by {gated.name} against {switched.name}", lost),
        counted(f"{task}: {gated.name}: large-model share", gated.large_share, n, "share of tokens"),
        counted(f"{task}: {switched.name}: large-model share", switched.large_share, n, "share of tokens"),
    ]
    return row(asked.claim, asked.model, legs)


def answer(pair: Pair, asked: Asked) -> Answer:
    """On the task most worth routing, against the rule put forward; beside it what both cost."""
    if absent := nothing_to_route(pair, asked):
        return absent
    task, exhibits = pair.rules.tasks[0], Exhibits()
    rule = pair.rules.put_forward(task)
    switched, allowed = pair.rules.judged(rule, task), pair.rules.validated(rule, task).large_share
    way, option = Way("EAD", switched.right, switched.large_share), _chosen(pair, task, allowed)
    gated = None
    if option is not None:
        k, gate = option
        done = pair.answers.speculated(task, "evaluate", pair.size.judged, k=k, gate_bits=gate)
        name = f"speculative, k = {k}" + ("" if gate is None else f", gate {gate:.3g} bits")
        gated = Way(name, done.right, done.large_share)
        rows = [table_row(name, done), table_row(f"EAD, {described(rule)}", switched)]
        exhibits = Exhibits((Table(f"entropy where speculation diverges, {task}", rows),))
    return about(pair, decide(Found(task, way, gated, allowed, pair.size.tried), asked), exhibits)


def _chosen(pair: Pair, task: str, allowed: float) -> Option | None:
    """Of the options that leave the large model at most ``allowed``, the one of highest validation score."""
    tried = {
        (k, gate): pair.answers.speculated(task, "validate", pair.size.tried, k=k, gate_bits=gate, padded=True)
        for k, gate in product(WIDTHS, _gates_bits(pair, task))
    }
    within = {option: run for option, run in tried.items() if run.large_share <= allowed}
    return max(within, key=lambda option: (within[option].score, -(option[1] or 0.0)), default=None)


def _gates_bits(pair: Pair, task: str) -> list[float | None]:
    """Gates from the drafts' entropies on validation; beyond the largest nothing is refused."""
    runs = pair.answers.speculated(task, "validate", pair.size.tried, padded=True).runs
    drawn = np.concatenate([run.drafts.entropy_bits for run in runs if isinstance(run, Speculated)])
    return [None if share is None else math.nextafter(float(np.quantile(drawn, share)), math.inf) for share in GATES]


QUESTION = Question("EAD-A4", "pair", answer)
