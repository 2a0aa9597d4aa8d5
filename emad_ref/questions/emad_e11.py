"""EMAD-E11: do flatter profiles gain less? What one model on one corpus adds to that trend. (EMAD, Limitations)

Two numbers without a threshold: the slope of the mean entropy profile, and the gain at equal quality, the largest net
reduction of any margin whose perplexity stays within the bounds. The trend over models and corpora is an ablation's
(``evidence.flatness.trend``). It does not apply to weights without quality, nor behind a decoder for which replay does
not speak.
"""

from __future__ import annotations

from dataclasses import dataclass

from emad_ref.evidence.flatness import gain_of
from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import quality_premise
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.interval import profile_slope
from emad_ref.verdict.legs import counted, estimated, row
from emad_ref.verdict.units import ByDocument


@dataclass(frozen=True)
class Found:
    """``entropy_sums`` [documents, L] nats, ``tokens`` [documents]; what ``margin`` gains, a share of FLOPs, net."""

    entropy_sums: ByDocument
    tokens: ByDocument
    margin: str
    gain: float


def decide(found: Found, asked: Asked) -> Verdict:
    """Both numbers, as measured."""
    slope = profile_slope(found.entropy_sums, found.tokens, threshold=0.0, rng=asked.rng)
    name = f"net reduction at equal quality ({found.margin})"
    legs = [
        counted(name, found.gain, len(found.tokens), asked.claim.unit),
        estimated("slope of the mean profile", slope),
    ]
    return row(asked.claim, asked.model, legs)


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """From the evaluation trace and the sweep of margins on it."""
    verdict = quality_premise(evidence, asked)
    if verdict is None:
        traces = evidence.traces
        verdict = decide(Found(traces.entropy_sums, traces.lengths, *gain_of(evidence.points)), asked)
    return Answer(verdict, evidence.corpus, evidence.fingerprint)


QUESTION = Question("EMAD-E11", "model", answer)
