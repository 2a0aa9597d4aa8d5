"""EMAD-X4: does a model that drafts for itself give its own output, at least 10 % faster than the fastest baseline?

The lossless mode: what followed where the text's last tokens stood before is copied; elsewhere a shallow layer drafts
through a lens while its gate is confident, and the layers above verify the run in one pass
(``decoding.self_speculation``). Two things are judged:

output  what was emitted while the clock ran is the model's own at full depth, token for token, ties by rounding counted
        (``audit.answers``). One token that is not falsifies the row, whatever the times are.
time    of one request at a time, against each of EMAD-F2's baselines: an intersection–union test, as there. Drafting
        spends arithmetic that one row leaves idle, and several rows leave less: larger batches are raced too, their
        output is judged, and their ratios say where the gain ends.

Other ways to the same output stand beside and decide nothing: prompt lookup and assisted generation, drafts by the
model's own head without a gate, and copies and drafts each alone, so that it shows which of them gains. Random
weights draft as fast as trained ones and are never right: the row does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from emad_ref.claims import emad_f2
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import exit_premise
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.latency import ADAPTIVE
from emad_ref.measurements.learned_exit import SelfSpeculationTiming
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.legs import count_leg, estimate_leg
from emad_ref.statistics.speedup import total_ratio
from emad_ref.statistics.units import ByPair
from emad_ref.statistics.verdicts import Leg, Verdict


@dataclass(frozen=True)
class SelfSpeculationEvidence:
    """``raced``: the drafting arm as EMAD-F2's ``adaptive``, and its baselines.

    ``beside``     other lossless ways, and drafting as ``adaptive`` → seconds [pairs] of the same requests of one row.
    ``stood``      batch size → share of verified tokens that stand.
    """

    raced: emad_f2.SpeedupEvidence
    beside: Mapping[str, ByPair] = field(default_factory=dict)
    stood: Mapping[int, float] = field(default_factory=dict)


def decide(found: SelfSpeculationEvidence, asked: ClaimContext) -> Verdict:
    """Legs of time and of what was emitted; larger batches and other lossless ways as numbers; how much was kept."""
    verdict = emad_f2.decide(_alone(found.raced), asked)
    return replace(verdict, legs=(*verdict.legs, *_beside(found)))


def _alone(raced: emad_f2.SpeedupEvidence) -> emad_f2.SpeedupEvidence:
    """One request at a time decides; larger batches are its sweep."""
    first = min(raced.batches, default=0)
    larger = {rows: timed for rows, timed in raced.batches.items() if rows != first}
    return replace(raced, batches={first: raced.batches[first]} if raced.batches else {}, swept=larger)


def _beside(found: SelfSpeculationEvidence) -> list[Leg]:
    """How many times faster drafting is than each other way to the same output."""
    legs = [
        estimate_leg(f"batch 1, against {name}", total_ratio(seconds, found.beside[ADAPTIVE]))
        for name, seconds in found.beside.items()
        if name != ADAPTIVE
    ]
    for batch, share in found.stood.items():
        pairs = len(found.raced.batches[batch].adaptive)
        legs.append(count_leg(f"batch {batch}: verified tokens that stand", share, pairs, "share of tokens"))
    return legs


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """With the exit's own way of drafting, over the judge's model: whose decoder is under test does not matter here."""
    verdict, exhibits = exit_premise(evidence, asked), Attachments()
    if verdict is None and evidence.self_speculation.drafting is None:
        verdict = asked.not_applicable("the exit holds no way to draft: none was found to pay")
    if verdict is None:
        latency, speculation = evidence.latency, evidence.self_speculation
        found = found_of(speculation, latency.without_compiled)
        verdict = decide(found, asked)
        times = AttachedTable(f"{asked.claim.id}: time by batch size", emad_f2.time_rows(_alone(found.raced)))
        exhibits = Attachments((times,), (latency.description("drafts of the exit", speculation.timed),))
    return Answer(verdict, evidence.corpus, evidence.fingerprint, exhibits)


def found_of(speculation: SelfSpeculationTiming, uncompiled: str) -> SelfSpeculationEvidence:
    """What was timed, and looked at afterwards, as ``decide`` takes it."""
    raced = {rows: emad_f2.timed_batch(timed, speculation.checked(rows)) for rows, timed in speculation.timed.items()}
    stood = {rows: speculation.accepted_share(rows) for rows in speculation.timed}
    return SelfSpeculationEvidence(emad_f2.SpeedupEvidence(raced, "", uncompiled), speculation.beside.by_pair(), stood)


QUESTIONS = (
    Question(
        "EMAD-X4",
        "model",
        answer,
        legs=lambda study, layers: emad_f2.baselines_of(study),
        measures=True,
        suite="cost",
        budget="standard",
        decide=decide,
    ),
)
