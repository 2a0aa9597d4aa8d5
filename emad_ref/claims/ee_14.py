"""EE-14: does runtime follow the FLOP saving? (Early-exit LLMs, Softmax Speed-Up, limitations)

A report: time and FLOPs of the same requests, rule by rule, in pairs against full depth, encoder included in both;
above 1 is a gain. It does not apply to decoder-only models, to random weights, nor to a model without room for the
paper's settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_answers import answer_on_items
from emad_ref.measurements.early_exits import EarlyExitMeasurements, flop_saving, time_rules, timed_flops
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import combine_verdict, count_leg, estimate_leg
from emad_ref.statistics.speedup import log_ratio
from emad_ref.statistics.units import ByPair
from emad_ref.statistics.verdicts import Leg, Verdict

TIMED = ("softmax", "softmax, fixed", "JSD", "JSD, adaptive")
NEW = 12
PAIRS = 30


@dataclass(frozen=True)
class RuleTiming:
    """One rule in pairs against full depth: ``full`` and ``own`` seconds, and how many times fewer FLOPs it runs."""

    rule: str
    full: ByPair
    own: ByPair
    saved: float


@dataclass(frozen=True)
class ExitRuntimeEvidence:
    """One entry per rule."""

    against: tuple[RuleTiming, ...]


def decide(found: ExitRuntimeEvidence, asked: ClaimContext) -> Verdict:
    """Speed, with the FLOP saving in its reason, and that saving itself; all only reported."""
    legs: list[Leg] = []
    for each in found.against:
        speed = log_ratio(each.full, each.own)
        legs.append(estimate_leg(f"{each.rule}: speed", speed, f"FLOPs {each.saved:.2f} ×"))
        legs.append(count_leg(f"{each.rule}: FLOPs", each.saved, len(each.own), "× fewer FLOPs"))
    return combine_verdict(asked.claim, asked.model, legs)


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From timed requests about the last task, at the least minimum layer."""
    return answer_on_items(evidence, asked, lambda: decide(ExitRuntimeEvidence(against_full(evidence.exits)), asked))


def against_full(exits: EarlyExitMeasurements) -> tuple[RuleTiming, ...]:
    """Every rule of ``TIMED``, timed together; then the FLOPs of the same requests, one rule after the other.

    Raises:
        Unsupported: the decoder under test declines a rule, or does not count its work.
    """
    subject, prompts = exits.subject, exits.prompts(exits.tasks[-1])
    points = {rule: exits.point(rule, exits.minima[0]) for rule in TIMED}
    seconds = time_rules(subject, prompts, points, PAIRS, NEW).seconds
    full = timed_flops(subject, prompts, exits.full, PAIRS, NEW)
    own = {rule: timed_flops(subject, prompts, point, PAIRS, NEW) for rule, point in points.items()}
    return tuple(
        RuleTiming(rule, ByPair(seconds["full"]), ByPair(seconds[rule]), flop_saving(full, own[rule]).together)
        for rule in TIMED
    )


QUESTION = Question("EE-14", "model", answer, measures=True)
