"""EMAD-R5: is EMAD a better use of a large model than speculative decoding, which is lossless? (EMAD, Experiments)

EMAD of the large model at its calibrated default; the small model drafts for the same large model. Beside it, without
judging: the large model drafts for itself at EMAD's first probe and verifies from there on. The same exits, no second
model, no loss. It does not apply to weights without quality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from emad_ref.decoding.switching import LARGE
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.evidence.pair.speculation import DRAFTED
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.paired import Raced, about, acceptance_leg, raced, speed_leg
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.interval import accuracy_drop, log_ratio
from emad_ref.verdict.legs import corrected, estimated, row, weighed
from emad_ref.verdict.units import ByItem

LOSSLESS = ("speculative", "self-speculative")
ARMS = ("large", "EMAD", *LOSSLESS)


@dataclass(frozen=True)
class Found:
    """``arms``: those of ``ARMS`` that could be timed, on the same requests of ``new`` tokens. ``point``: EMAD's name;
    ``exit_layer``: after which the large model drafts for itself, None where it cannot.

    ``full``, ``adaptive``: right [items] of ``task`` at full depth and at the point.
    """

    arms: Mapping[str, Raced]
    new: int
    point: str
    exit_layer: int | None
    task: str
    full: ByItem
    adaptive: ByItem


def decide(found: Found, asked: Asked) -> Verdict:
    """A leg for time against speculation, one for accuracy; self-speculation, acceptance and FLOPs only report."""
    claim, point = asked.claim, found.point
    fastest, most = claim.thresholds["speedup_ratio"], claim.thresholds["accuracy_drop"]
    emad, speculative = found.arms["EMAD"], found.arms["speculative"]
    speed = log_ratio(speculative.seconds, emad.seconds, threshold=fastest)
    drop = accuracy_drop(found.full, found.adaptive, threshold=most)
    tests = [
        weighed(f"{point} against speculation, k = {DRAFTED}", speed, "below", fastest, claim.minimum),
        weighed(f"{point}: accuracy on {found.task}", drop, "above", most, claim.minimum),
    ]
    beside = [speed_leg(name, found.new, arm.seconds) for name, arm in found.arms.items()]
    if own := found.arms.get("self-speculative"):
        name = f"{point} against self-speculation after layer {found.exit_layer}, k = {DRAFTED}"
        beside.append(estimated(name, log_ratio(own.seconds, emad.seconds)))
    beside += [leg for name in LOSSLESS if name in found.arms for leg in _drafted(name, found.arms[name], emad)]
    return row(claim, asked.model, [*corrected(tests, asked.other_legs), *beside])


def _drafted(name: str, arm: Raced, emad: Raced) -> list[Leg]:
    """Acceptance of a speculating arm and, where both count, its FLOPs over EMAD's."""
    legs = [acceptance_leg(name, arm.accepted)]
    if arm.spent is not None and emad.spent is not None:
        fewer = replace(log_ratio(arm.spent, emad.spent), unit="× fewer FLOPs")
        legs.append(estimated(f"FLOPs against {name}", fewer))
    return legs


def answer(pair: Pair, asked: Asked) -> Answer:
    """From the timed rivals; accuracy on the task whose prompts were timed."""
    if reason := pair.models.without_quality:
        return about(pair, asked.not_applicable(reason))
    timed, task, point = pair.timing.rivals, pair.timing.task, pair.timing.emad_point
    full, adaptive = (
        pair.answers.alone(LARGE, task, "evaluate", pair.size.judged, chosen).right
        for chosen in (pair.large.subject.full, point)
    )
    exit_layer = next(iter(pair.models.exit_layers), None)
    found = Found(raced(pair, timed, ARMS), timed.new, point.name, exit_layer, task, full, adaptive)
    return about(pair, decide(found, asked))


QUESTION = Question("EMAD-R5", "pair", answer, legs=lambda study, layers: 2, measures=True)
