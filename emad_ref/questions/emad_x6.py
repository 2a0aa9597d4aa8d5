"""EMAD-X6: which of EMAD's parts fails on this model: readout, criterion, monotone rule or K/V?

A report. EMAD as published reads the model's own head, leaves by the entropy profile, lets depth only fall and needs no
K/V above an exit. Each part is exchanged alone, in EMAD and among the others' better ones (``evidence.exchanged``), and
each way is set to lose at most 1 % of perplexity. The part whose exchange gains most net saving is the one that fails;
all are listed, the largest gain first. It does not apply to weights without quality; no decoder is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emad_ref.evidence.exchanged import Exchange
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import exit_premise
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.legs import estimated, row
from emad_ref.verdict.numbers import percent
from emad_ref.verdict.spending import Measured, Spent


@dataclass(frozen=True)
class Found:
    """``full``: full depth, FLOPs as its work. ``exchanges``: one part each."""

    full: Measured
    exchanges: Sequence[Exchange]


def decide(found: Found, asked: Asked) -> Verdict:
    """Net saving that each exchange gains, the largest first, with what it loses of perplexity."""
    if not found.exchanges:
        return asked.unmeasured("no part was exchanged")
    gains = sorted(((each, _gain(found, each, asked)) for each in found.exchanges), key=lambda pair: -pair[1].value)
    return row(asked.claim, asked.model, [_leg(found, each, gain, asked) for each, gain in gains])


def _gain(found: Found, each: Exchange, asked: Asked) -> Estimate:
    return found.full.saving(each.after, 0.0, asked.rng, against=each.before, unit=asked.claim.unit)


def _leg(found: Found, each: Exchange, gain: Estimate, asked: Asked) -> Leg:
    before, after = (_told(found, spent, asked) for spent in (each.before, each.after))
    return estimated(f"{each.part}: {each.after.name} for {each.before.name}", gain, f"{before} → {after}")


def _told(found: Found, spent: Spent, asked: Asked) -> str:
    """What it saves, and loses on the text judged."""
    saved = found.full.saving(spent, 0.0, asked.rng).value
    rise = found.full.rise(spent, 0.0, asked.rng).value
    return f"{percent(saved, 'z.1f')} net at {percent(rise)}"


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From traces of validation and evaluation text, by the model's own head and through the exit's lens."""
    verdict = exit_premise(evidence, asked)
    if verdict is None:
        verdict = decide(Found(evidence.beyond.full, evidence.exchanged.exchanges), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


QUESTION = Question("EMAD-X6", "model", answer, budget="standard")
