"""EAD-A4: would entropy serve better inside speculation than between models? (EAD, reading notes, Insights)

Entropy-gated acceptance against switching, at exactly the large model's share that the paper's first saving leaves: of
all widths and gates, and the large model alone, those on validation's front take turns by items as EAD's rules do
(``sweep.routing``). A speculated token counts as the large model's where no draft stands for it. The verifier reads
every draft all the same, so that a share is no saving here: EAD-F1's table has the FLOPs. The row reports. It does not
apply to weights without quality, nor where the large model is not better on any task, nor where no answer is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from emad_ref.decoding.switching import LARGE, SwitchingRule
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.pair.answered import Answered, table_row
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.evidence.pair.rules import Routed
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.paired import about, nothing_written
from emad_ref.sweep.routing import Routing, front, mixed
from emad_ref.text.documents import Split
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.scores import difference
from emad_ref.verdict.units import ByItem

WIDTHS = (2, 8)  # k
GATES = (None, 0.5, 0.8, 1.0)  # quantiles of the drafts' entropies: nothing refused is kept; everything is

Option = tuple[int, float | None]  # k, gate in bits


@dataclass(frozen=True)
class Found:
    """[items] expected scores of switching and of gated speculation where the large model writes the share ``allowed``.

    ``gated`` None: every gate leaves it more. ``ways``: what takes turns in either.
    """

    task: str
    allowed: float
    switched: ByItem
    gated: ByItem | None
    ways: tuple[str, str]


def decide(found: Found, asked: Asked) -> Verdict:
    """The score lost by gating against switching at one share; where no gate is cheap enough, the share alone."""
    task, gated, switched = found.task, found.gated, found.switched
    if gated is None:
        none = f"{task}: no gate leaves the large model as little as the paper's saving does"
        return row(asked.claim, asked.model, [counted(none, found.allowed, len(switched), "share of tokens")])
    lost = difference(switched, gated, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
    both = f"speculation ({found.ways[1]}) for EAD ({found.ways[0]})"
    legs = [
        estimated(f"{task}: score lost at a large-model share of {found.allowed:.1%}", lost, both),
        counted(f"{task}: EAD's score", float(switched.values.mean()), len(switched), "score"),
        counted(f"{task}: gated speculation's score", float(gated.values.mean()), len(gated), "score"),
    ]
    return row(asked.claim, asked.model, legs)


def answer(pair: Pair, asked: Asked) -> Answer:
    """On the task most worth routing; beside it every way on the fronts and what it costs."""
    if absent := nothing_written(pair, asked):
        return absent
    task, saving = pair.rules.written[0], pair.savings[0]
    routed, allowed = pair.rules.routed(task, saving), pair.models.share_for(saving)
    if routed is None:
        return about(pair, asked.not_applicable(f"{task}: not even the small model alone saves {saving:.1%}"))
    options = _front(pair, task)
    judged = {option: _speculated(pair, task, "evaluate", option) for option in options}
    least = min(done.large_share for done in judged.values())
    gated, name = None, ""
    if least <= allowed:
        mixture = mixed([done.ran for done in judged.values()], allowed, asked.rng)
        gated = routed.score.like(mixture.score)
        p, first, second = mixture.probability, options[mixture.first], options[mixture.second]
        name = f"{p:.0%} of items by {_called(first)}, {1 - p:.0%} by {_called(second)}"
    rows = [table_row(_called(option), done) for option, done in judged.items()]
    rows += [table_row(f"EAD, {pair.rules.called(rule)}", pair.rules.judged(rule, task)) for rule in _taken(routed)]
    table = Table(f"entropy where speculation diverges, {task}", rows)
    found = Found(task, allowed, routed.score, gated, (routed.name, name))
    return about(pair, decide(found, asked), Exhibits((table,)))


def _taken(routed: Routed) -> list[SwitchingRule]:
    return [routed.first, routed.second]


def _called(option: Option) -> str:
    k, gate = option
    if not k:
        return "the large model alone"
    return f"speculative, k = {k}" + ("" if gate is None else f", gate {gate:.3g} bits")


def _front(pair: Pair, task: str) -> list[Option]:
    """Widths and gates whose mixtures score best on validation, by falling share; k = 0 drafts nothing."""
    options: list[Option] = [(0, None), *product(WIDTHS, _gates_bits(pair, task))]
    tried = [_speculated(pair, task, "validate", option) for option in options]
    return [options[at] for at in front([Routing(done.large_share, done.score) for done in tried])]


def _speculated(pair: Pair, task: str, split: Split, option: Option) -> Answered:
    (k, gate), count = option, pair.size.tried if split == "validate" else pair.size.judged
    return pair.answers.gated(k, gate, task, split, count) if k else pair.answers.alone(LARGE, task, split, count)


def _gates_bits(pair: Pair, task: str) -> list[float | None]:
    """Gates from the entropies of drafts on validation; beyond the largest of all nothing is refused."""
    drafts = pair.answers.gated(max(WIDTHS), None, task, "validate", pair.size.tried).entropy_bits
    most = math.nextafter(math.log2(pair.models.vocabulary), math.inf)
    return [
        None if share is None else most if share == 1 else float(np.quantile(np.concatenate(drafts), share))
        for share in GATES
    ]


QUESTION = Question("EAD-A4", "pair", answer, budget="standard")
