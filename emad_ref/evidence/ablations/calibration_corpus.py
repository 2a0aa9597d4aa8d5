"""Calibration corpus: what does a profile of corpus A do on corpus B? (EMAD, "Calibration stability")"""

from __future__ import annotations

import numpy as np

from emad_ref.evidence.ablations.rows import Rows, points, require_quality
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.protocol import Unsupported

MARGINS_NATS = (0.0, 0.2)  # a margin is one of the paper's remedies for a shift


def ablation(evidence: Evidence, rng: np.random.Generator) -> Exhibits:
    """Every profile on every corpus at hand; on its own corpus a profile is the reference for the others.

    Raises:
        Unsupported: as ``require_quality``; there is no second corpus.
    """
    require_quality(evidence.subject, evidence.bridging)
    if evidence.shifted is None:
        raise Unsupported(f"no second corpus beside {evidence.corpus}")
    at_hand, shown = (evidence, evidence.shifted), []
    profiles = {other.corpus: other.traces.calibrated() for other in at_hand}
    for judged in at_hand:
        rows = Rows(judged, rng)
        shown.append(rows.full({"text": judged.corpus, "profile": "none"}))
        for corpus, profile in profiles.items():
            shown += rows.at(points(profile, MARGINS_NATS), {"text": judged.corpus, "profile": corpus})
    return Exhibits((Table("ablation, calibration corpus", shown),))
