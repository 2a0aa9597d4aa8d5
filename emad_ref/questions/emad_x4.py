"""EMAD-X4: does a model that drafts for itself give its own output, at least 10 % faster than the fastest baseline?

The lossless mode: a shallow layer drafts through a lens while its gate is confident, the layers above verify the run in
one pass (``decoding.drafting``). Two things are judged:

output  what was emitted while the clock ran is the model's own at full depth, token for token, ties by rounding counted
        (``audit.timed``). One token that is not falsifies the row, whatever the times are.
time    of one request at a time, against each of EMAD-F2's baselines: an intersection–union test, as there. Drafting
        spends arithmetic that one row leaves idle, and several rows leave less: larger batches are raced too, their
        output is judged, and their ratios say where the gain ends.

Other ways to the same output stand beside and decide nothing: prompt lookup, and drafts by the model's own head without
a gate. Random weights draft as fast as trained ones and are never right: the row does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from emad_ref.evidence.drafted import WAYS, Drafted
from emad_ref.evidence.exhibits import Exhibits
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions import emad_f2
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import exit_premise
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import counted, estimated
from emad_ref.verdict.times import total_ratio
from emad_ref.verdict.units import ByPair


@dataclass(frozen=True)
class Found:
    """``raced``: the drafting arm as EMAD-F2's ``adaptive``, and its baselines.

    ``beside``     batch size → other lossless ways → seconds [pairs] of the same requests.
    ``stood``      batch size → share of verified tokens that stand.
    """

    raced: emad_f2.Found
    beside: Mapping[int, Mapping[str, ByPair]] = field(default_factory=dict)
    stood: Mapping[int, float] = field(default_factory=dict)


def decide(found: Found, asked: Asked) -> Verdict:
    """Legs of time and of what was emitted; larger batches and other lossless ways as numbers; how much was kept."""
    batches, threshold = found.raced.batches, asked.claim.thresholds["speedup_ratio"]
    alone = min(batches, default=0)
    # what is not the model's own output decides at any batch size
    deciding = {rows: timed for rows, timed in batches.items() if rows == alone or _differs(timed)}
    verdict = emad_f2.decide(replace(found.raced, batches=deciding), asked)
    larger = [
        estimated(f"batch {rows}, against {name}", total_ratio(seconds, timed.adaptive, threshold=threshold))
        for rows, timed in batches.items()
        if rows not in deciding
        for name, seconds in timed.baselines.items()
    ]
    return replace(verdict, legs=(*verdict.legs, *larger, *_beside(found)))


def _differs(timed: emad_f2.Timed) -> bool:
    return timed.check is not None and timed.check.passed is False


def _beside(found: Found) -> list[Leg]:
    """How many times faster drafting is than each other way to the same output."""
    legs = [
        estimated(f"batch {batch}, against {name}", total_ratio(seconds, found.raced.batches[batch].adaptive))
        for batch, ways in found.beside.items()
        for name, seconds in ways.items()
    ]
    for batch, share in found.stood.items():
        pairs = len(found.raced.batches[batch].adaptive)
        legs.append(counted(f"batch {batch}: verified tokens that stand", share, pairs, "share of tokens"))
    return legs


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """With the exit's own way of drafting, over the judge's model: whose decoder is under test does not matter here."""
    verdict, exhibits = exit_premise(evidence, asked), Exhibits()
    if verdict is None and evidence.drafted.drafting is None:
        verdict = asked.not_applicable("the exit holds no way to draft: none was predicted to pay")
    if verdict is None:
        stopwatch, drafted = evidence.stopwatch, evidence.drafted
        verdict = decide(found_of(drafted, stopwatch.without_compiled), asked)
        exhibits = Exhibits(notes=(stopwatch.told("drafts of the exit", drafted.timed),))
    return Answer(verdict, evidence.corpus, evidence.fingerprint, exhibits)


def found_of(drafted: Drafted, uncompiled: str) -> Found:
    """What was timed, and looked at afterwards, as ``decide`` takes it."""
    raced = {rows: emad_f2.timed_of(requests, drafted.checked(rows)) for rows, requests in drafted.timed.items()}
    seconds = {rows: each.by_pair() for rows, each in drafted.timed.items()}
    beside = {rows: {way: arms[way] for way in WAYS if way in arms} for rows, arms in seconds.items()}
    stood = {rows: drafted.stood(rows) for rows in drafted.timed}
    return Found(emad_f2.Found(raced, "", uncompiled), beside, stood)


QUESTION = Question(
    "EMAD-X4",
    "model",
    answer,
    legs=lambda study, layers: emad_f2.baselines_of(study),
    measures=True,
    suite="cost",
    budget="standard",
)
