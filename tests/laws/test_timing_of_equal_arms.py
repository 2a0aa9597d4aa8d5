"""A/A timing: an arm against itself, on simulated machines that drift, jump and favour the second arm.

Over the simulated runs the interval covers 1.00 at its stated rate, and no speedup of EMAD-F2 survives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from pytest_emad.benchmark.clock import time_pairs
from pytest_emad.claims.speedup import SpeedupEvidence, TimedBatch, decide_speedup
from pytest_emad.statistics.speedup import estimate_total_speedup
from pytest_emad.statistics.units import ByPair
from tests.claims.simulation import asked

RUNS, JUDGED, PAIRS, LEVEL = 200, 60, 30, 0.95
LEAST = LEVEL - 4 * math.sqrt(LEVEL * (1 - LEVEL) / RUNS)  # four standard errors of a share of this many runs
ARMS = ("adaptive", "full depth", "generate")


@dataclass
class Machine:
    """A clock with a varying machine: each request takes its second times ``drift``, ``noise``, ``jumps``, ``warmth``.

    ``drift``   spread of the step of a random walk of the log speed. ``noise``  of each request independently.
    ``jumps``   share of requests that are interrupted and take five times as long.
    ``warmth``  extra time of a pair's first arm, which fills caches for the second.
    """

    rng: np.random.Generator
    drift: float = 0.0
    noise: float = 0.02
    jumps: float = 0.0
    warmth: float = 0.0
    now: float = 0.0
    speed: float = 0.0
    met: int = -1

    def __call__(self) -> float:
        return self.now

    def run(self, pair: int) -> None:
        self.speed += self.drift * self.rng.standard_normal()
        cold, self.met = self.warmth * (pair != self.met), pair
        interrupted = 5.0 if self.rng.random() < self.jumps else 1.0
        self.now += interrupted * (1 + cold) * math.exp(self.speed + self.noise * self.rng.standard_normal())


MACHINES = {
    "calm": {},
    "drifting": {"drift": 0.05},
    "jumping": {"jumps": 0.03},
    "warming": {"warmth": 0.1},
    "all at once": {"drift": 0.03, "jumps": 0.03, "warmth": 0.05, "noise": 0.05},
}


def seconds(options, run: int) -> dict[str, ByPair]:
    """Return one run of ``PAIRS`` pairs of equal arms."""
    rng = np.random.default_rng([run, *map(ord, str(sorted(options)))])
    machine = Machine(rng, **options)
    taken = time_pairs(dict.fromkeys(ARMS, machine.run), PAIRS, rng, clock=machine, process_clock=machine).seconds
    return {arm: ByPair(each) for arm, each in taken.items()}


@pytest.mark.parametrize("name", MACHINES)
def test_the_interval_of_an_arm_against_itself_covers_one(name):
    inside = 0
    for run in range(RUNS):
        taken = seconds(MACHINES[name], run)
        found = estimate_total_speedup(taken["full depth"], taken["adaptive"])
        inside += found.low <= 1.0 <= found.high
    assert inside / RUNS >= LEAST


@pytest.mark.slow  # half a minute of simulated verdicts: `tox -e rates`
@pytest.mark.parametrize("name", MACHINES)
def test_no_run_of_arms_that_do_the_same_lets_a_speed_up_survive(name):
    for run in range(JUDGED):
        batches = {}
        for batch in (1, 4):
            taken = seconds(MACHINES[name], 2 * run + (batch > 1))
            batches[batch] = TimedBatch(taken.pop("adaptive"), taken)
        verdict = decide_speedup(SpeedupEvidence(batches), asked("EMAD-F2", np.random.default_rng(run)))
        assert verdict.verdict != "survived", (run, verdict.reason)
