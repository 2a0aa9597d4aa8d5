"""Calibration by workers gives the profile and the trace of one process, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emad_ref.calibration.calibration_run import (
    CalibrationPlan,
    PackedStatistics,
    calibrate,
    iterate_worker_traces,
    worker_statistics_source,
)
from emad_ref.calibration.entropy_statistics import EntropyStatistics, compute_trace_statistics
from emad_ref.calibration.trace import take_trace, trace_and_assemble_batches
from emad_ref.models.loading import LoadedModel, load
from emad_ref.models.model_spec import FingerprintMismatch, ModelSpec, load_cached
from emad_ref.point import ThresholdBinSpec
from emad_ref.tuning import windows_of
from emad_ref.workers.dispatch import WorkerPool, open_workers

BINS = ThresholdBinSpec(("position", "top1_probability"))


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


@pytest.fixture
def crew() -> Iterator[WorkerPool]:
    """Return a pool of threads, which start at once and finish in any order."""
    with ThreadPoolExecutor(2) as executor:
        yield WorkerPool("threads", executor.submit, 3)


def plan_of(loaded: LoadedModel) -> CalibrationPlan:
    of = {"model": loaded.name, "fingerprint": loaded.fingerprint, "dtype": "float32", "window": 256}
    return CalibrationPlan(**of, probes=(2, 3), bins=BINS, documents=24, minimum_tokens=20, tokens_per_batch=160)


def corpora(loaded: LoadedModel, windows: int = 24) -> dict[str, Callable[[], object]]:
    return {"world:premise": lambda: windows_of(loaded, "world:premise", "calibrate", limit=windows)}


def test_a_profile_by_workers_is_the_profile_of_one_process_to_the_last_bit(
    nano: LoadedModel, crew: WorkerPool
) -> None:
    plan = plan_of(nano)
    alone = calibrate(nano.stepper, plan, corpora(nano))
    together = calibrate(
        nano.stepper, plan, corpora(nano), parts=worker_statistics_source(crew, ModelSpec.from_loaded(nano), plan)
    )
    assert together.statistics == alone.statistics
    assert together.to_json() == alone.to_json()


@pytest.mark.slow
def test_a_profile_by_two_processes_is_the_profile_of_one_to_the_last_bit(nano: LoadedModel) -> None:
    pytest.importorskip("distributed", reason="extra cluster")
    plan = plan_of(nano)
    with open_workers("processes:2") as pool:
        assert pool is not None
        parts = worker_statistics_source(pool, ModelSpec.from_loaded(nano), plan)
        together = calibrate(nano.stepper, plan, corpora(nano), parts=parts)
    assert together.to_json() == calibrate(nano.stepper, plan, corpora(nano)).to_json()


def test_a_run_that_was_interrupted_goes_on_with_workers(nano: LoadedModel, crew: WorkerPool, tmp_path: Path) -> None:
    plan, checkpoint = plan_of(nano), tmp_path / "checkpoint"
    alone = calibrate(nano.stepper, plan, corpora(nano))

    def cut_short(batches):  # type: ignore[no-untyped-def]
        for number, part in enumerate(worker_statistics_source(crew, ModelSpec.from_loaded(nano), plan)(batches)):
            if number == 1:
                raise EOFError("the power was cut")
            yield part

    with pytest.raises(EOFError):
        calibrate(nano.stepper, plan, corpora(nano), checkpoint=checkpoint, parts=cut_short)
    parts = worker_statistics_source(crew, ModelSpec.from_loaded(nano), plan)
    resumed = calibrate(nano.stepper, plan, corpora(nano), checkpoint=checkpoint, resume=True, parts=parts)
    assert resumed.statistics == alone.statistics


def test_a_trace_by_workers_is_the_trace_of_one_process(nano: LoadedModel, crew: WorkerPool) -> None:
    sequences = list(windows_of(nano, "world:premise", "validate", limit=40))
    alone = take_trace(nano.stepper, sequences)
    together = trace_and_assemble_batches(
        sequences, lambda ordered: iterate_worker_traces(crew, ModelSpec.from_loaded(nano), ordered)
    )
    for name in ("nll_nats", "top1", "token", "position", "starts"):
        assert np.array_equal(getattr(together, name), getattr(alone, name))
    assert all(np.array_equal(together.signals[name], alone.signals[name]) for name in alone.signals)


def test_nothing_of_the_statistics_is_lost_on_the_way(nano: LoadedModel) -> None:
    sequences = list(windows_of(nano, "world:premise", "calibrate", limit=6))
    batches = [compute_trace_statistics(take_trace(nano.stepper, sequences[at : at + 2]), BINS, 2) for at in (0, 2, 4)]
    packed = PackedStatistics.pack(batches)
    none = EntropyStatistics.empty(BINS.bin_count, nano.stepper.layers)
    assert sum(packed.unpack(), none) == sum(batches, none)
    assert len(packed.cells) < batches[0].histogram.size / 20


def test_a_worker_refuses_other_weights(nano: LoadedModel) -> None:
    with pytest.raises(FingerprintMismatch, match="loaded a second time"):
        load_cached(replace(ModelSpec.from_loaded(nano), fingerprint="0" * 64))


@pytest.mark.slow
def test_two_dask_workers_one_of_them_killed_give_the_same_profile(nano: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    plan = plan_of(nano)
    alone = calibrate(nano.stepper, plan, corpora(nano))
    told = tmp_path / "scheduler.json"
    python = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    scheduler = subprocess.Popen([*python, "--port", "0", "--no-dashboard", "--scheduler-file", str(told)])
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(told), "--no-nanny"]
    workers = [subprocess.Popen([*worker, "--nthreads", "1", "--no-dashboard"]) for _ in range(2)]
    try:
        address = scheduler_address(told, workers=2)
        with open_workers(address) as crew:
            assert crew is not None
            taken = worker_statistics_source(crew, ModelSpec.from_loaded(nano), plan)

            def killing(batches):  # type: ignore[no-untyped-def]
                for number, part in enumerate(taken(batches)):
                    if number == 0:
                        workers[0].send_signal(signal.SIGKILL)
                    yield part

            together = calibrate(nano.stepper, plan, corpora(nano), parts=killing)
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()
    assert workers[0].returncode == -signal.SIGKILL
    assert together.statistics == alone.statistics


def scheduler_address(told: Path, workers: int) -> str:
    from distributed import Client

    with Client(scheduler_file=str(told), timeout="60s") as client:
        client.wait_for_workers(workers, timeout=120)
        return client.scheduler.address.replace("tcp://", "dask://")
