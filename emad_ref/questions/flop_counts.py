"""On what a verdict about FLOPs stands: a leg that says witnessed, timed or claimed (``evidence.witnessed``)."""

from __future__ import annotations

from dataclasses import replace

from emad_ref.evidence.witnessed import Witnessed
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.legs import counted


def with_evidence(verdict: Verdict, witnessed: Witnessed) -> Verdict:
    """``verdict`` with that leg last; as it is where nothing was counted."""
    if verdict.verdict in ("not applicable", "unmeasured"):
        return verdict
    finding = witnessed.finding
    leg = counted(f"evidence: {witnessed.evidence}", finding.n, finding.n, "looked at", finding.detail)
    return replace(verdict, legs=(*verdict.legs, leg))
