"""EE-9: with JSD, does adaptive pruning exit earlier than fixed and decaying pruning?
(Early-exit LLMs, Best JSD Pruning Combination, Table 1)

It does not apply to decoder-only models, to random weights, to a model without room for the paper's settings, nor to a
task that the model does not solve; where two prunings exit alike on every item the data could not tell them apart, and
the leg says how many tokens each keeps. That is the rule, not the exception: a contrast compares the plausible tokens
alone (p ≥ α·max p), on which both normalisers cancel (``probes.contrast``). A pruning acts only where it drops one of
those, or where it makes another layer look most different.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import (
    EXIT_SETTINGS,
    RuleComparison,
    RuleComparisons,
    answer_on_items,
    inapplicable_leg,
)
from emad_ref.exit_rules.rules import PRUNINGS
from emad_ref.measurements.attachments import AttachedTable
from emad_ref.measurements.early_exits import EarlyExitMeasurements
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.probes.pruned_vocabulary import adaptive_size
from emad_ref.statistics.legs import estimate_leg, judge_side
from emad_ref.statistics.verdicts import Verdict

RIVALS = "JSD, fixed", "JSD, decaying"


def decide(found: RuleComparisons, asked: ClaimContext) -> Verdict:
    """One leg per task, minimum layer and rival: blocks earlier; the score gained stands beside it."""
    least = asked.claim.thresholds["blocks_earlier"]
    blocks, beside = {}, found.left_out
    for each in found.contests:
        if each.exits_alike:
            said = f"the prunings exit identically: {each.sizes}"
            beside.append(inapplicable_leg(f"{each.where}: exit", said, len(each.ours)))
            continue
        blocks[f"{each.where}: exit"] = each.earlier(found.layers, least, asked.rng)
        beside.append(estimate_leg(f"{each.where}: score", each.gained(0.0, asked.rng)))
    return judge_side(asked.claim, asked.model, blocks, "below", least, other_legs=asked.other_legs, beside=beside)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From answers under the three prunings; how many tokens each keeps on a table."""
    exits = evidence.exits

    def judged() -> Verdict:
        return decide(RuleComparisons.of(exits, rivals(exits)), asked)

    return answer_on_items(evidence, asked, judged, lambda: (sizes(exits),))


def rivals(exits: EarlyExitMeasurements) -> Iterator[RuleComparison]:
    """Adaptive against fixed and decaying pruning, with the sizes that each keeps."""
    stepper = exits.subject.stepper
    for task, minimum in exits.counting:
        ours = exits.answered(task, "JSD, adaptive", minimum).exited
        unsure, sure = adaptive_sizes(minimum, stepper.layers, stepper.vocabulary)
        for rival in RIVALS:
            name = rival.removeprefix("JSD, ")
            kept = PRUNINGS[name](minimum, stepper.layers, stepper.vocabulary).kept
            sizes = f"k = {unsure}–{sure} (adaptive) and {', '.join(map(str, kept))} ({name})"
            theirs = exits.answered(task, rival, minimum).exited
            yield RuleComparison(f"{task}, j={minimum}, against {name}", ours, theirs, sizes)


def adaptive_sizes(minimum: int, layers: int, vocabulary: int) -> tuple[int, int]:
    """k of the adaptive pruning if nothing, and if everything, were sure."""
    shrink = PRUNINGS["adaptive"](minimum, layers, vocabulary).shrink
    assert shrink is not None, "the adaptive rule shrinks"
    return adaptive_size(vocabulary, shrink, 0.0), adaptive_size(vocabulary, shrink, 1.0)


def sizes(exits: EarlyExitMeasurements) -> AttachedTable:
    """k of each pruning after every minimum layer; the adaptive one if nothing, or everything, were sure."""
    layers, vocabulary = exits.subject.stepper.layers, exits.subject.stepper.vocabulary
    rows: list[dict[str, Any]] = []
    for minimum in exits.minima:
        fixed, decaying = (PRUNINGS[name](minimum, layers, vocabulary).kept for name in ("fixed", "decaying"))
        unsure, sure = adaptive_sizes(minimum, layers, vocabulary)
        rows += [
            {
                "j": minimum,
                "layer": minimum + 1 + i,
                "fixed": fixed[i],
                "decaying": decaying[i],
                "adaptive, unsure": unsure,
                "adaptive, sure": sure,
            }
            for i in range(len(fixed))
        ]
    return AttachedTable("tokens kept by pruning, per layer", rows)


QUESTION = Question("EE-9", "model", answer, legs=lambda study, layers: 2 * EXIT_SETTINGS)
