"""Premises that several claims share: a verdict that says why a claim cannot be judged, or None."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emad_ref.verdict.claims import Claim, Verdict
from emad_ref.verdict.legs import not_applicable, unmeasured

if TYPE_CHECKING:
    from pytest_emad.session import Evidence


def quality_premise(evidence: Evidence, claim: Claim) -> Verdict | None:
    """Weights that mean something, and a decoder for which replay speaks."""
    if reason := evidence.without_quality:
        return not_applicable(claim, evidence.name, reason)
    if evidence.bridge.passed is False:
        return unmeasured(claim, evidence.name, f"replay does not speak for this decoder: {evidence.bridge.detail}")
    return None
