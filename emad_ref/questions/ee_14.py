"""EE-14: does runtime follow the FLOP saving? (Early-exit LLMs, Softmax Speed-Up, limitations)

A report: time and FLOPs of the same requests, rule by rule, in pairs against full depth, encoder included in both;
above 1 is a gain. It does not apply to decoder-only models, to random weights, nor to a model without room for the
paper's settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.evidence.exits.costs import saving
from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.exits.timing import forced_costs, timed
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.early_exits import on_items
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.times import log_ratio
from emad_ref.verdict.units import ByPair

TIMED = ("softmax", "softmax, fixed", "JSD", "JSD, adaptive")
NEW = 12
PAIRS = 30


@dataclass(frozen=True)
class Against:
    """One rule in pairs against full depth: ``full`` and ``own`` seconds, and how many times fewer FLOPs it runs."""

    rule: str
    full: ByPair
    own: ByPair
    saved: float


@dataclass(frozen=True)
class Found:
    """One entry per rule."""

    against: tuple[Against, ...]


def decide(found: Found, asked: Asked) -> Verdict:
    """Speed, with the FLOP saving in its reason, and that saving itself; all only reported."""
    legs: list[Leg] = []
    for each in found.against:
        speed = log_ratio(each.full, each.own)
        legs.append(estimated(f"{each.rule}: speed", speed, f"FLOPs {each.saved:.2f} ×"))
        legs.append(counted(f"{each.rule}: FLOPs", each.saved, len(each.own), "× fewer FLOPs"))
    return row(asked.claim, asked.model, legs)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From timed requests about the last task, at the least minimum layer."""
    return on_items(evidence, asked, lambda: decide(Found(against_full(evidence.exits)), asked))


def against_full(exits: Exits) -> tuple[Against, ...]:
    """Every rule of ``TIMED``, timed together; then the FLOPs of the same requests, one rule after the other.

    Raises:
        Unsupported: the decoder under test declines a rule, or does not count its work.
    """
    subject, prompts = exits.subject, exits.prompts(exits.tasks[-1])
    points = {rule: exits.point(rule, exits.minima[0]) for rule in TIMED}
    seconds = timed(subject, prompts, points, PAIRS, NEW).seconds
    full = forced_costs(subject, prompts, exits.full, PAIRS, NEW)
    own = {rule: forced_costs(subject, prompts, point, PAIRS, NEW) for rule, point in points.items()}
    return tuple(
        Against(rule, ByPair(seconds["full"]), ByPair(seconds[rule]), saving(full, own[rule]).together)
        for rule in TIMED
    )


QUESTION = Question("EE-14", "model", answer, measures=True)
