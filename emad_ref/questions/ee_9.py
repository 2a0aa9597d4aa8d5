"""EE-9: with JSD, does adaptive pruning exit earlier than fixed and decaying pruning?
(Early-exit LLMs, Best JSD Pruning Combination, Table 1)

It does not apply to decoder-only models, to random weights, nor to a model without room for the paper's settings.
"""

from __future__ import annotations

from typing import Any

from emad_ref.evidence.exhibits import Table
from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.gathered import Evidence
from emad_ref.policy.early_exit import PRUNINGS
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import EXIT_SETTINGS, Contested, contests, on_items, unasked
from emad_ref.readout.subset import adaptive_size
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.legs import estimated, judge_side

RIVALS = "JSD, fixed", "JSD, decaying"


def decide(found: Contested, asked: Asked) -> Verdict:
    """One leg per task, minimum layer and rival: blocks earlier; the score gained stands beside it."""
    least = asked.claim.thresholds["blocks_earlier"]
    blocks, beside = {}, []
    for each in found.contests:
        blocks[f"{each.where}: exit"] = each.earlier(found.layers, least, asked.rng)
        beside.append(estimated(f"{each.where}: score", each.gained(0.0, asked.rng)))
    beside += unasked(found.missing)
    return judge_side(asked.claim, asked.model, blocks, "below", least, other_legs=asked.other_legs, beside=beside)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From answers under the three prunings; how many tokens each keeps on a table."""
    exits = evidence.exits

    def judged() -> Verdict:
        return decide(contests(exits, "JSD, adaptive", *RIVALS), asked)

    return on_items(evidence, asked, judged, lambda: (sizes(exits),))


def sizes(exits: Exits) -> Table:
    """k of each pruning after the least minimum layer; the adaptive one if nothing, or everything, were sure."""
    stepper, minimum = exits.subject.stepper, exits.minima[0]
    layers, vocabulary = stepper.layers, stepper.vocabulary
    fixed, decaying = (PRUNINGS[name](minimum, layers, vocabulary).kept for name in ("fixed", "decaying"))
    shrink = PRUNINGS["adaptive"](minimum, layers, vocabulary).shrink
    assert shrink is not None, "the adaptive rule shrinks"
    rows: list[dict[str, Any]] = [
        {
            "layer": minimum + 1 + i,
            "fixed": fixed[i],
            "decaying": decaying[i],
            "adaptive, unsure": adaptive_size(vocabulary, shrink, 0.0),
            "adaptive, sure": adaptive_size(vocabulary, shrink, 1.0),
        }
        for i in range(len(fixed))
    ]
    return Table("tokens kept by pruning, per layer", rows)


QUESTION = Question("EE-9", "model", answer, legs=lambda study, layers: 2 * EXIT_SETTINGS)
