"""Real races in fresh processes with a busy neighbour on one core: the load changes no verdict of EMAD-F2.

The true result of each race is known: a point at full depth, one that does all of its work twice, and one that runs a
quarter of the layers. Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import emad_ref
from emad_ref.absent import Absent
from emad_ref.models.loading import load
from emad_ref.point import truncated
from emad_ref.protocol import Decoder, Request
from pytest_emad.claims.speedup import SpeedupEvidence, decide_speedup, make_timed_batch
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.process_replicates import run_task_file
from pytest_emad.measurements.run_resources import RunResources, SubprocessRunner, make_decoder_on_judge_model
from pytest_emad.measurements.study import BUDGETS, Study
from tests.claims.simulation import asked

BUDGET = replace(BUDGETS["smoke"], pairs=30, processes=5, batch_sizes=(1,), prompt_tokens=16, new_tokens=8)
NAME = "adaptive"  # of the point
SHARE = """import sys
from tests.laws.test_timing_beside_load import shared
shared(*sys.argv[1:])"""

# F2's verdict on each planted decoder
SAID = {"alike": {"falsified", "inconclusive"}, "slow": {"falsified"}, "fast": {"survived"}}


class Twice:
    """A decoder that does all of its work twice."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder

    def __getattr__(self, name: str):
        return getattr(self._decoder, name)

    def generate(self, *asked):
        self._decoder.generate(*asked)
        return self._decoder.generate(*asked)


def host_of(planted: str, afresh: SubprocessRunner | None = None) -> RunResources:
    def make(request: Request) -> Decoder:
        made = make_decoder_on_judge_model(request)
        return Twice(made) if planted == "slow" and request.point.name == NAME else made

    return RunResources(make, runner=afresh or SubprocessRunner(Absent("a share")))


def shared(planted: str, task: str) -> None:
    """Run one share of the race, in the fresh process."""
    run_task_file(Path(task), host_of(planted))


def verdict(planted: str) -> str:
    """Return F2's verdict on a race of ``planted`` against full depth and the model's ``generate``."""

    def start(task: Path, output: Path, seconds: float) -> int:
        root = str(Path(emad_ref.__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SHARE, planted, str(task)]
        with open(output, "wb") as file:
            return subprocess.run(
                command, cwd=root, env=environment, stdout=file, stderr=file, check=False, timeout=seconds
            ).returncode

    made = ModelMeasurements(
        load("emad-nano"), Study(corpus="world:premise", budget=BUDGET), host_of(planted, SubprocessRunner(start))
    )
    full = made.subject.full_depth_point
    point = replace(truncated(full.layers, 1) if planted == "fast" else full, name=NAME)
    made.latency._shape = BUDGET.prompt_tokens, BUDGET.new_tokens
    (timed,) = made.latency.time_point_by_batch_size(point).values()
    assert timed.paired_seconds_by_arm()["full"].process_count == BUDGET.processes
    found = SpeedupEvidence({1: make_timed_batch(timed, made.latency.check_point_outputs(timed, point))})
    return decide_speedup(found, asked("EMAD-F2", np.random.default_rng(0))).verdict


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Keep one core busy with other work."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        yield
        assert process.poll() is None, "the neighbour did not run all the time"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow  # starts ten processes
@pytest.mark.parametrize("planted", SAID)
def test_a_busy_neighbour_turns_no_verdict_round(planted):
    calm = verdict(planted)
    with busy_neighbour():
        busy = verdict(planted)
    assert {calm, busy} <= SAID[planted]
