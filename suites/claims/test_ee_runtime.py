"""EE-14: does runtime follow the FLOP saving? Time and FLOPs of the same requests, rule by rule, in pairs."""

from __future__ import annotations

import pytest

from emad_ref.verdict.interval import log_ratio
from emad_ref.verdict.legs import counted, estimated, row
from pytest_emad.exits import decide, ratio

TIMED = ("softmax", "softmax, fixed", "JSD", "JSD, adaptive")
NEW = 12
PAIRS = 30


@pytest.mark.emad(claim="EE-14", measures=True)
def test_runtime_against_flops(emad_evidence, emad_record, emad_register):
    """Against full depth, encoder included in both; above 1 is a gain."""
    evidence, claim = emad_evidence, emad_register["EE-14"]

    def judged():
        exits = evidence.exits
        minimum, task = exits.minima[0], exits.tasks[-1]
        points = {rule: exits.point(rule, minimum) for rule in TIMED}
        seconds = exits.timed(points, task, PAIRS, NEW).seconds
        full = exits.forced_costs(exits.full, task, PAIRS, NEW)
        legs = []
        for rule, point in points.items():
            own = exits.forced_costs(point, task, PAIRS, NEW)
            saved = ratio(full.together, own.together)
            legs.append(estimated(f"{rule}: speed", log_ratio(seconds["full"], seconds[rule]), f"FLOPs {saved:.2f} ×"))
            legs.append(counted(f"{rule}: FLOPs", saved, PAIRS, "× fewer FLOPs"))
        return row(claim, evidence.name, legs)

    decide(evidence, emad_record, claim, judged)
