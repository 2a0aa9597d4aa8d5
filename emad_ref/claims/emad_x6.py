"""EMAD-X6: which of EMAD's parts fails on this model: readout, criterion, monotone rule or K/V?

A report. EMAD as published reads the model's own head, leaves by the entropy profile, lets depth only fall and needs no
K/V above an exit. Each part is exchanged alone, in EMAD and among the others' better ones
(``ModelMeasurements.component_ablation``), and each way is set to lose at most 1 % of perplexity. The part whose
exchange gains most net saving is the one that fails; all are listed, the largest gain first. It does not apply to
weights without quality; no decoder is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import exit_premise
from emad_ref.measurements.learned_exit import ComponentExchange
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import combine_verdict, estimate_leg
from emad_ref.statistics.number_format import percent
from emad_ref.statistics.rates import DocumentCosts, FullDepthBaseline
from emad_ref.statistics.verdicts import Leg, Verdict


@dataclass(frozen=True)
class ComponentEvidence:
    """``full``: full depth, FLOPs as its work. ``exchanges``: one part each."""

    full: FullDepthBaseline
    exchanges: Sequence[ComponentExchange]


def decide(found: ComponentEvidence, asked: ClaimContext) -> Verdict:
    """Net saving that each exchange gains, the largest first, with what it loses of perplexity."""
    if not found.exchanges:
        return asked.unmeasured("no part was exchanged")
    gains = sorted(((each, _gain(found, each, asked)) for each in found.exchanges), key=lambda pair: -pair[1].value)
    return combine_verdict(asked.claim, asked.model, [_leg(found, each, gain, asked) for each, gain in gains])


def _gain(found: ComponentEvidence, each: ComponentExchange, asked: ClaimContext) -> Estimate:
    return found.full.saving(each.after, 0.0, asked.rng, against=each.before, unit=asked.claim.unit)


def _leg(found: ComponentEvidence, each: ComponentExchange, gain: Estimate, asked: ClaimContext) -> Leg:
    before, after = (_told(found, spent, asked) for spent in (each.before, each.after))
    return estimate_leg(f"{each.part}: {each.after.name} for {each.before.name}", gain, f"{before} → {after}")


def _told(found: ComponentEvidence, spent: DocumentCosts, asked: ClaimContext) -> str:
    """What it saves, and loses on the text judged."""
    saved = found.full.saving(spent, 0.0, asked.rng).value
    rise = found.full.rise(spent, 0.0, asked.rng).value
    return f"{percent(saved, 'z.1f')} net at {percent(rise)}"


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From traces of validation and evaluation text, by the model's own head and through the exit's lens."""
    verdict = exit_premise(evidence, asked)
    if verdict is None:
        verdict = decide(ComponentEvidence(evidence.learned_exit.full, evidence.component_ablation.exchanges), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


QUESTIONS = (Question("EMAD-X6", "model", answer, budget="standard", decide=decide),)
