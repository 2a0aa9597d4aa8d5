"""Premises that several claims share: a verdict that says why a claim cannot be judged, or None."""

from __future__ import annotations

from emad_ref.evidence.gathered import Evidence
from emad_ref.questions.asking import Answer, Asked
from emad_ref.verdict.claims import Verdict


def quality_premise(evidence: Evidence, asked: Asked) -> Verdict | None:
    """Weights that mean something, and a decoder for which replay speaks; else ``not applicable``."""
    if reason := evidence.subject.without_quality or evidence.bridging.refusal:
        return asked.not_applicable(reason)
    return None


def unanswered(evidence: Evidence) -> str:
    """Why the decoder under test leaves quality undecided that the weights have; empty where it does not."""
    return "" if evidence.subject.without_quality else evidence.bridging.refusal


def exit_premise(evidence: Evidence, asked: Asked) -> Verdict | None:
    """Weights that mean something, and an exit to look at; else a verdict that says what is absent."""
    if reason := evidence.subject.without_quality:
        return asked.not_applicable(reason)
    return asked.unmeasured(missing) if (missing := evidence.beyond.missing) else None


def exit_unjudged(evidence: Evidence, asked: Asked) -> Answer | None:
    """The answer where an exit cannot be judged, for ``exit_premise`` or because the decoder under test refuses it."""
    verdict, refused = exit_premise(evidence, asked), ""
    if verdict is None and (refused := evidence.beyond.refusal):
        verdict = asked.not_applicable(refused)
    return None if verdict is None else Answer(verdict, evidence.corpus, evidence.fingerprint, refused=refused)
