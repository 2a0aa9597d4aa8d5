"""EAD-F2: does switching beat speculation with the same pair, which loses nothing? (EAD, reading notes, Thoughts)

The rule put forward, whatever it scores, against speculation, which scores as the large model: batch 1, in time and in
FLOPs. It does not apply to weights without quality, nor where the large model is not better on any task; it is
unmeasured where a decoder of the pair does not count its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from emad_ref.decoding.switching import LARGE
from emad_ref.evidence.pair.answered import described
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.paired import Raced, about, nothing_to_route, raced, speed_leg
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.interval import accuracy_drop, log_ratio
from emad_ref.verdict.legs import corrected, estimated, row, weighed
from emad_ref.verdict.units import ByItem

ARMS = ("large", "EAD", "speculative")


@dataclass(frozen=True)
class Found:
    """``arms``: each of ``ARMS`` on the same requests of ``new`` tokens. ``rule`` on ``task``: right [items] under it
    and by the large model ``alone``."""

    arms: Mapping[str, Raced]
    new: int
    task: str
    rule: str
    right: ByItem
    alone: ByItem


def decide(found: Found, asked: Asked) -> Verdict:
    """A leg for wall-clock, one for FLOPs; speeds and the score lost are listed as measured."""
    ead, speculative = found.arms["EAD"], found.arms["speculative"]
    if ead.spent is None or speculative.spent is None:
        return asked.unmeasured("a decoder of the pair does not count its work")
    fastest, fewest = asked.claim.thresholds["speedup_ratio"], asked.claim.thresholds["flop_ratio"]
    time = log_ratio(speculative.seconds, ead.seconds, threshold=fastest)
    work = log_ratio(speculative.spent, ead.spent, threshold=fewest)
    tests = [
        weighed("wall-clock", time, "below", fastest, asked.claim.minimum),
        weighed("FLOPs", replace(work, unit="× fewer FLOPs"), "below", fewest, asked.claim.minimum),
    ]
    beside = [speed_leg(arm, found.new, found.arms[arm].seconds) for arm in ARMS]
    lost = accuracy_drop(found.alone, found.right, threshold=0.0)
    beside.append(estimated(f"score lost on {found.task} by {found.rule}; speculation loses none", lost))
    return row(asked.claim, asked.model, [*corrected(tests, asked.other_legs), *beside])


def answer(pair: Pair, asked: Asked) -> Answer:
    """From the timed rivals of the task most worth routing."""
    if absent := nothing_to_route(pair, asked):
        return absent
    timed, task = pair.timing.rivals, pair.timing.task
    rule = pair.rules.put_forward(task)
    right, alone = pair.rules.judged(rule, task).right, pair.rules.judged_alone(LARGE, task).right
    found = Found(raced(pair, timed, ARMS), timed.new, task, described(rule), right, alone)
    return about(pair, decide(found, asked))


QUESTION = Question("EAD-F2", "pair", answer, legs=lambda study, layers: 2, measures=True)
