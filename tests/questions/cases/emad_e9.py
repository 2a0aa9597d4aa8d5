"""Texts whose entropy changes by a known number of nats with every doubling of the position."""

from __future__ import annotations

import numpy as np

from emad_ref.questions.emad_e9 import Found
from emad_ref.verdict.claims import Verdict
from emad_ref.verdict.units import ByDocument, DocumentOf
from tests.questions.simulation import Case

LENGTH = 32
CAPPED = 0.25  # share of tokens above the cap
DEEPER = 0.5  # layers per doubling


def along(slope: float, documents: int = 30):
    """``slope`` nats per doubling; documents of one length have levels of their own."""

    def found(rng: np.random.Generator) -> Found:
        doublings = np.tile(np.log2(np.arange(LENGTH) + 1.0), documents)
        document = np.repeat(np.arange(documents), LENGTH)
        level = rng.standard_normal(documents)[document]
        entropy = 5.0 + slope * doublings + 0.5 * level + 0.5 * rng.standard_normal(len(document))
        capped = rng.binomial(LENGTH, CAPPED, documents)
        depth = 4.0 + DEEPER * doublings + rng.standard_normal(len(document))
        tokens = np.full(documents, LENGTH)
        return Found(doublings, entropy, depth, DocumentOf(document), ByDocument(capped), ByDocument(tokens))

    return found


def reports_depth_and_cap(verdict: Verdict) -> None:
    depth, cap = (leg for leg in verdict.legs if leg.outcome == "measured")
    assert abs(depth.estimate - DEEPER) < 0.1
    assert abs(cap.estimate - CAPPED) < 0.03
    assert depth.unit == "layers per doubling"


CASES = [
    Case("entropy falls", "holds", along(-0.3), draws=5, check=reports_depth_and_cap),
    Case("entropy rises", "fails", along(0.3), draws=5),
    Case("entropy is the same everywhere", "edge", along(0.0), draws=40),
]
