"""Premises that several claims share, and the leg that says on what a verdict about FLOPs rests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.model_measurements import ModelMeasurements
from emad_ref.measurements.model_under_test import ENCODER_DECODER_REFUSAL
from emad_ref.measurements.verification import FlopVerification
from emad_ref.statistics.legs import count_leg
from emad_ref.statistics.verdicts import Verdict


def quality_premise(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """Weights that mean something, and a decoder for which replay speaks; else ``not applicable``."""
    if reason := evidence.subject.without_quality or evidence.replay_validity.refusal:
        return asked.not_applicable(reason)
    return None


def model_row(
    claim: str,
    gather: Callable[[ModelMeasurements], Any],
    decide: Callable[[Any, ClaimContext], Verdict],
    *,
    premise: Callable[[ModelMeasurements, ClaimContext], Verdict | None] = quality_premise,
    attach: Callable[[ModelMeasurements], Attachments] = lambda evidence: Attachments(),
    **options: Any,
) -> Question[ModelMeasurements]:
    """The row of a claim on one model's measurements: ``decide`` what ``gather`` takes where ``premise`` allows it.

    ``premise``: a verdict without them, or None. ``attach``: what stands beside one. ``options``: of ``Question``.
    """

    def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
        if absent := premise(evidence, asked):
            return Answer(absent, evidence.corpus, evidence.fingerprint)
        verdict = decide(gather(evidence), asked)
        return Answer(verdict, evidence.corpus, evidence.fingerprint, attach(evidence))

    return Question(claim, "model", answer, decide=decide, **options)


def decoder_refusal(evidence: ModelMeasurements) -> str:
    """Why the decoder under test leaves quality undecided that the weights have; empty where it does not."""
    return "" if evidence.subject.without_quality else evidence.replay_validity.refusal


def decoder_only_premise(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """A model that continues plain documents; else ``not applicable``."""
    return asked.not_applicable(ENCODER_DECODER_REFUSAL) if evidence.subject.seq2seq else None


def exit_premise(evidence: ModelMeasurements, asked: ClaimContext) -> Verdict | None:
    """Weights that mean something, and an exit to look at; else a verdict that says what is absent."""
    if reason := evidence.subject.without_quality:
        return asked.not_applicable(reason)
    return asked.unmeasured(missing) if (missing := evidence.learned_exit.missing) else None


def exit_answer_absent(evidence: ModelMeasurements, asked: ClaimContext) -> Answer | None:
    """The answer where an exit cannot be judged, for ``exit_premise`` or because the decoder under test refuses it."""
    verdict, refused = exit_premise(evidence, asked), ""
    if verdict is None and (refused := evidence.learned_exit.refusal):
        verdict = asked.not_applicable(refused)
    return None if verdict is None else Answer(verdict, evidence.corpus, evidence.fingerprint, refused=refused)


def with_flop_evidence(verdict: Verdict, witnessed: FlopVerification) -> Verdict:
    """``verdict`` with that leg last; as it is where nothing was counted."""
    if verdict.verdict in ("not applicable", "unmeasured"):
        return verdict
    finding = witnessed.finding
    leg = count_leg(f"evidence: {witnessed.evidence}", finding.n, finding.n, "looked at", finding.detail)
    return replace(verdict, legs=(*verdict.legs, leg))
