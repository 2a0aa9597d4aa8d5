"""EAD-A4: would entropy serve better inside speculation than between models? (EAD, reading notes, Insights)

Entropy-gated acceptance against switching, at exactly the large model's share that the paper's first saving leaves: of
all widths and gates, and the large model alone, those on validation's front take turns by items as EAD's rules do
(``sweep.front``). A speculated token counts as the large model's where no draft stands for it. The verifier reads
every draft all the same, so that a share is no saving here: EAD-F1's table has the FLOPs. The row reports. It does not
apply to weights without quality, nor where the large model is not better on any task, nor where no answer is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.pair_answers import pair_answer, writing_answer_absent
from emad_ref.decoding.switching import LARGE, SwitchingRule
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.pair import PairMeasurements
from emad_ref.measurements.pair_answers import ItemAnswers, answer_row
from emad_ref.measurements.pair_routing import RoutedTask
from emad_ref.statistics.accuracy import score_difference
from emad_ref.statistics.legs import combine_verdict, count_leg, estimate_leg
from emad_ref.statistics.units import ByItem
from emad_ref.statistics.verdicts import Verdict
from emad_ref.sweep.front import RoutingRun, mix_rules, routing_front
from emad_ref.text.documents import Split

WIDTHS = (2, 8)  # k
GATES = (None, 0.5, 0.8, 1.0)  # quantiles of the drafts' entropies: nothing refused is kept; everything is

GateOption = tuple[int, float | None]  # k, gate in bits


@dataclass(frozen=True)
class GatedSpeculationEvidence:
    """[items] expected scores of switching and of gated speculation where the large model writes the share ``allowed``.

    ``gated`` None: every gate leaves it more. ``ways``: what takes turns in either.
    """

    task: str
    allowed: float
    switched: ByItem
    gated: ByItem | None
    ways: tuple[str, str]


def decide(found: GatedSpeculationEvidence, asked: ClaimContext) -> Verdict:
    """The score lost by gating against switching at one share; where no gate is cheap enough, the share alone."""
    task, gated, switched = found.task, found.gated, found.switched
    if gated is None:
        none = f"{task}: no gate leaves the large model as little as the paper's saving does"
        return combine_verdict(
            asked.claim, asked.model, [count_leg(none, found.allowed, len(switched), "share of tokens")]
        )
    lost = score_difference(switched, gated, threshold=0.0, rng=asked.rng, unit=asked.claim.unit)
    both = f"speculation ({found.ways[1]}) for EAD ({found.ways[0]})"
    legs = [
        estimate_leg(f"{task}: score lost at a large-model share of {found.allowed:.1%}", lost, both),
        count_leg(f"{task}: EAD's score", float(switched.values.mean()), len(switched), "score"),
        count_leg(f"{task}: gated speculation's score", float(gated.values.mean()), len(gated), "score"),
    ]
    return combine_verdict(asked.claim, asked.model, legs)


def answer(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """On the task most worth routing; beside it every way on the fronts and what it costs."""
    if absent := writing_answer_absent(pair, asked):
        return absent
    task, saving = pair.rules.written[0], pair.savings[0]
    routed, allowed = pair.rules.routed(task, saving), pair.models.share_for(saving)
    if routed is None:
        return pair_answer(pair, asked.not_applicable(f"{task}: not even the small model alone saves {saving:.1%}"))
    options = _front(pair, task)
    judged = {option: _speculated(pair, task, "evaluate", option) for option in options}
    least = min(done.large_share for done in judged.values())
    gated, name = None, ""
    if least <= allowed:
        mixture = mix_rules([done.ran for done in judged.values()], allowed, asked.rng)
        gated = routed.score.like(mixture.score)
        p, first, second = mixture.probability, options[mixture.first], options[mixture.second]
        name = f"{p:.0%} of items by {_called(first)}, {1 - p:.0%} by {_called(second)}"
    rows = [answer_row(_called(option), done) for option, done in judged.items()]
    rows += [answer_row(f"EAD, {pair.rules.called(rule)}", pair.rules.judged(rule, task)) for rule in _taken(routed)]
    table = AttachedTable(f"entropy where speculation diverges, {task}", rows)
    found = GatedSpeculationEvidence(task, allowed, routed.score, gated, (routed.name, name))
    return pair_answer(pair, decide(found, asked), Attachments((table,)))


def _taken(routed: RoutedTask) -> list[SwitchingRule]:
    return [routed.first, routed.second]


def _called(option: GateOption) -> str:
    k, gate = option
    if not k:
        return "the large model alone"
    return f"speculative, k = {k}" + ("" if gate is None else f", gate {gate:.3g} bits")


def _front(pair: PairMeasurements, task: str) -> list[GateOption]:
    """Widths and gates whose mixtures score best on validation, by falling share; k = 0 drafts nothing."""
    options: list[GateOption] = [(0, None), *product(WIDTHS, _gates_bits(pair, task))]
    tried = [_speculated(pair, task, "validate", option) for option in options]
    return [options[at] for at in routing_front([RoutingRun(done.large_share, done.score) for done in tried])]


def _speculated(pair: PairMeasurements, task: str, split: Split, option: GateOption) -> ItemAnswers:
    (k, gate), count = option, pair.size.tried if split == "validate" else pair.size.judged
    return pair.answers.gated(k, gate, task, split, count) if k else pair.answers.alone(LARGE, task, split, count)


def _gates_bits(pair: PairMeasurements, task: str) -> list[float | None]:
    """Gates from the entropies of drafts on validation; beyond the largest of all nothing is refused."""
    drafts = pair.answers.gated(max(WIDTHS), None, task, "validate", pair.size.tried).entropy_bits
    most = math.nextafter(math.log2(pair.models.vocabulary), math.inf)
    return [
        None if share is None else most if share == 1 else float(np.quantile(np.concatenate(drafts), share))
        for share in GATES
    ]


QUESTIONS = (Question("EAD-A4", "pair", answer, budget="standard", decide=decide),)
