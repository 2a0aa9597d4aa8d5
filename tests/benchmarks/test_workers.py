"""Benchmark: two Dask workers against one, and against two independent processes on the same cores.

Run on request: ``pytest --run-slow -s tests/benchmarks/test_workers.py``.

Two cores that share a cache or run other work do less than twice the work of one, so the throughput of two independent
processes is the upper bound for two workers. All four are timed next to each other, turn by turn.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from emad_ref.calibration.calibration_run import (
    BATCHES_PER_SHARD,
    CalibrationPlan,
    calibrate,
    local_statistics_source,
    worker_statistics_source,
)
from emad_ref.calibration.windows import TokenSequence, iterate_batches
from emad_ref.models.loading import load
from emad_ref.models.model_spec import ModelSpec, load_cached
from emad_ref.workers.dispatch import open_workers
from pytest_emad.benchmark.clock import OwnSeconds, time_pairs
from pytest_emad.run.suite_support import CLOCK, record_benchmark_samples
from pytest_emad.statistics.speedup import estimate_speedup_per_request
from pytest_emad.statistics.units import ByPair

pytestmark = [pytest.mark.slow, pytest.mark.benchmark(timer=CLOCK)]

LENGTH, WINDOWS = 128, 16  # tokens per window, windows per batch
UNITS, TURNS = 6, 5
LEAST_GAIN = 1.7
LEAST_OF_TWO = LEAST_GAIN / 2  # share of the throughput of two processes, which is twice as much on two whole cores


@pytest.fixture(scope="module")
def loaded():
    return load("emad-tiny")


@pytest.fixture(scope="module")
def plan(loaded):
    of = {"model": loaded.name, "fingerprint": loaded.fingerprint, "dtype": "float32", "window": LENGTH}
    return CalibrationPlan(**of, probes=(4, 8), every_layer=True)


@pytest.fixture(scope="module")
def rows(loaded):
    return np.random.default_rng(0).integers(
        1, loaded.stepper.vocabulary_size, (UNITS * BATCHES_PER_SHARD * WINDOWS, LENGTH)
    )


def calibrated(loaded, plan, rows, crew=None):
    parts = worker_statistics_source(crew, ModelSpec.from_loaded(loaded), plan) if crew else None
    return calibrate(loaded.stepper, plan, {"random": lambda: map(TokenSequence, rows)}, parts=parts)


def read(whence, plan, rows):
    """Run a worker's share without returning results."""
    torch.set_num_threads(1)
    for _ in local_statistics_source(load_cached(whence).stepper, plan)(
        iterate_batches(map(TokenSequence, rows), plan.tokens_per_batch)
    ):
        pass


def test_two_workers_get_done_what_two_processes_do(benchmark, loaded, plan, rows):
    distributed = pytest.importorskip("distributed", reason="extra cluster")
    whence, profiles, fresh = ModelSpec.from_loaded(loaded), {}, multiprocessing.get_context("spawn")

    def by(cluster, name):
        address = cluster.scheduler_address.replace("tcp://", "dask://")

        def run(_):
            with open_workers(address) as crew:
                began = time.perf_counter()
                profiles[name] = calibrated(loaded, plan, rows, crew).to_json()
                return OwnSeconds(time.perf_counter() - began)

        return run

    def apart(*processes):
        def run(_):
            shares = np.array_split(rows, len(processes))
            for done in [one.submit(read, whence, plan, share) for one, share in zip(processes, shares, strict=True)]:
                done.result()

        return run

    each = {"threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        ProcessPoolExecutor(1, mp_context=fresh) as left,
        ProcessPoolExecutor(1, mp_context=fresh) as right,
    ):
        apart(left, right)(0)  # before a nanny sets the environment of its workers in this process
        with (
            distributed.LocalCluster(n_workers=1, **each) as one,
            distributed.LocalCluster(n_workers=2, **each) as two,
        ):
            arms = {
                "one worker": by(one, "one"),
                "two workers": by(two, "two"),
                "one process": apart(left),
                "two processes": apart(left, right),
            }
            taken = time_pairs(arms, TURNS, np.random.default_rng(1)).seconds
    assert profiles["one"] == profiles["two"]
    seconds = {arm: ByPair(found) for arm, found in taken.items()}
    gain = estimate_speedup_per_request(seconds["one worker"], seconds["two workers"], threshold=LEAST_GAIN)
    most = estimate_speedup_per_request(seconds["one process"], seconds["two processes"])
    benchmark.extra_info |= {"gain of two workers": gain.value, "gain of two processes": most.value}
    record_benchmark_samples(benchmark, taken["two workers"], "two workers")
    for arm, found in taken.items():
        print(f"{arm}: {', '.join(f'{second:.1f}' for second in found)} s")
    print(f"two workers are {gain.value:.3f} [{gain.low:.3f}, {gain.high:.3f}] × as fast as one")
    print(f"two processes that share nothing: {most.value:.3f} [{most.low:.3f}, {most.high:.3f}] × as fast as one")
    assert gain.value / most.value >= LEAST_OF_TWO


def test_two_workers_are_not_held_up_by_who_cuts_and_adds(benchmark, loaded, plan, rows):
    """With a share s of the time in the dispatching process, two workers give a speedup of 1 / (s + 1/2) at most."""

    def seconds_of(crew=None):
        start = time.process_time()  # of this process, without the workers
        profile = calibrated(loaded, plan, rows, crew)
        return profile.to_json(), time.process_time() - start

    alone, whole = seconds_of()
    with open_workers("processes:1") as crew:
        by_worker, left = seconds_of(crew)
    assert by_worker == alone
    most = 1 / (left / whole + 1 / 2)
    benchmark.extra_info |= {"most that two workers can gain": most}
    record_benchmark_samples(benchmark, [left], "cutting and adding")
    print(f"{left:.2f} s of {whole:.2f} s stay behind: two workers can be {most:.2f} × as fast as one")
    assert most >= LEAST_GAIN
