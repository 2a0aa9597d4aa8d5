"""Simulated readings of an energy counter with a known true ratio."""

from __future__ import annotations

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.benchmark.energy import EnergyResult, measure_energy_pairs
from pytest_emad.claims.energy import EnergyEvidence, make_energy_evidence_from_results
from pytest_emad.statistics.verdicts import Verdict
from tests.claims.simulation import Case
from tests.unit.test_energy import Board

# ---------------------------------------------------------------- EMAD-N1
#
# A simulated board draws known watts in each arm: its readings pass through ``benchmark.energy`` to
# ``decide``.

WATTS, SECONDS, TOKENS, NOISE = 300.0, 6.0, 100, 0.03


def read(*ratios: float, pairs: int = 30):
    """Return windows per batch size; the point draws ``ratio`` times full depth's watts. NaN: no reading."""

    def found(rng: np.random.Generator) -> EnergyEvidence:
        energies: dict[int, EnergyResult | Absent] = {}
        for batch, ratio in enumerate(ratios, start=1):
            board = Board()

            def arm(watts: float, board: Board = board):
                def work(pair: int, request: int) -> int:
                    board.spend(SECONDS, watts * float(np.exp(NOISE * rng.standard_normal())))
                    return TOKENS

                return work

            arms = {"full": arm(WATTS), "adaptive": arm(WATTS * ratio)}
            counter = Absent("no NVML device") if np.isnan(ratio) else board
            energies[batch] = measure_energy_pairs(arms, pairs, rng, counter, clock=board.clock)
        return make_energy_evidence_from_results(energies)

    return found


def says_why(verdict: Verdict) -> None:
    assert verdict.reason == "no NVML device"
    assert verdict.estimate is None


EMAD_N1 = [
    Case("a fifth less", "holds", read(0.8, 0.8), draws=10),
    Case("a fifth more", "fails", read(1.2), draws=10),
    Case("less for one row, more for four", "fails", read(0.8, 1.2), draws=10),
    Case("as much", "edge", read(1.0), draws=100),
    Case("no counter", "premise", read(np.nan), check=says_why),
    Case("one batch size of two could not be read", "premise", read(0.8, np.nan), check=says_why),
    Case("no batch size", "premise", read()),
]


CASES = {
    "EMAD-N1": EMAD_N1,
}
