"""EE-8: does the paper's own efficiency formula support a hundredfold saving?
(Early-exit LLMs, Early Exiting Via the Softmax Approach, and Softmax Speed-Up)

Arithmetic on T5-large, whatever encoder-decoder is under test: the formula, its bound L/j, and what would be executed.
It is not asked of decoder-only models.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.early_exit_flops import (
    PAPERS,
    UNIT,
    NeverExitingToken,
    judged_count,
    never_legs,
    paper_never_exiting,
)
from emad_ref.exit_rules.rules import kept_vocabulary
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.models.geometry import geometry_named
from emad_ref.statistics.legs import combine_verdict, count_leg
from emad_ref.statistics.verdicts import Leg, Verdict
from emad_ref.sweep.diagnostics import gain_bound, published_gain

MINIMA = (2, 7, 19)


@dataclass(frozen=True)
class FormulaGain:
    """What the formula promises at minimum layer ``minimum`` and ``kept`` tokens, and what it cannot exceed."""

    minimum: int
    kept: int
    gain: float
    bound: float


@dataclass(frozen=True)
class GainFormulaEvidence:
    """``never``: what a token that never exits would execute."""

    gains: tuple[FormulaGain, ...]
    never: tuple[NeverExitingToken, ...] = ()


def decide(found: GainFormulaEvidence, asked: ClaimContext) -> Verdict:
    """One exact leg per minimum layer: the formula against the threshold; its bound and executed FLOPs beside it."""
    legs: list[Leg] = []
    for each in found.gains:
        where = f"{PAPERS}, j={each.minimum}"
        formula = f"{where}: formula at k={each.kept:,}"
        legs.append(judged_count(formula, each.gain, 1, asked.claim.thresholds["flop_ratio"]))
        legs.append(count_leg(f"{where}: bound L/j", each.bound, 1, UNIT, "the formula at k = 0"))
    return combine_verdict(asked.claim, asked.model, [*legs, *never_legs(found.never, None)])


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """From the paper's geometry; no text is read."""
    if not evidence.subject.seq2seq:
        reason = "the claim needs an encoder-decoder model, not a decoder-only model"
        return Answer(asked.not_applicable(reason))
    geometry = geometry_named(PAPERS)
    gains = tuple(gain_at(minimum, geometry.layers, geometry.vocabulary) for minimum in MINIMA)
    verdict = decide(GainFormulaEvidence(gains, paper_never_exiting("softmax", "softmax, fixed")), asked)
    return Answer(verdict, fingerprint=evidence.fingerprint)


def gain_at(minimum: int, layers: int, vocabulary: int) -> FormulaGain:
    """The formula at the published k* of ``minimum``."""
    kept = kept_vocabulary(minimum, layers, vocabulary)
    return FormulaGain(minimum, kept, published_gain(layers, vocabulary, minimum, kept), gain_bound(layers, minimum))


QUESTION = Question("EE-8", "model", answer)
