"""Dispatch: results in the order of units, lost units run again, failed functions do not; executor addresses."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from emad_ref.errors import BadArgument
from emad_ref.workers.dispatch import (
    MAX_LOSSES,
    NANNY_TRIM_THRESHOLD,
    WorkerPool,
    WorkersLost,
    dispatch_in_order,
    dispatch_timed_units_after_others,
    keep_freed_memory,
    open_workers,
)

ROOT = Path(__file__).resolve().parents[3]


def threads(ahead: int = 3) -> WorkerPool:
    return WorkerPool("threads", lambda: ThreadPoolExecutor(3), ahead)


class DyingExecutor(Executor):
    """Runs a unit when it is submitted, or loses a worker on it; the others continue."""

    def __init__(self, deadly: Callable[[Any], bool]):
        self._deadly = deadly

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._deadly(args[0]):
            future.set_exception(BrokenExecutor("its worker was killed"))
        else:
            future.set_result(fn(*args))
        return future


def test_results_come_in_the_order_of_units() -> None:
    def slow_at_first(unit: int) -> int:
        Event().wait(0.05 if unit == 0 else 0.0)
        return -unit

    assert list(dispatch_in_order(threads(), slow_at_first, range(7))) == [(n, -n) for n in range(7)]


def test_no_more_units_are_out_than_the_pool_allows() -> None:
    taken = 0

    def units() -> Any:
        nonlocal taken
        for unit in count():
            taken += 1
            yield unit

    results = dispatch_in_order(threads(ahead=4), lambda unit: unit, units())
    for done in range(1, 6):
        next(results)
        assert taken <= done + 3
    results.close()


@pytest.mark.parametrize("killed", [0, 1, 4])
def test_the_unit_of_a_dead_worker_runs_again_and_no_finished_one(killed: int) -> None:
    runs: list[int] = []
    deaths = [killed]

    def deadly(unit: int) -> bool:
        return unit in deaths and not deaths.remove(unit)  # type: ignore[func-returns-value]

    def function(unit: int) -> int:
        runs.append(unit)
        return unit * unit

    pool = WorkerPool("mortals", lambda: DyingExecutor(deadly), 3)
    assert [result for _, result in dispatch_in_order(pool, function, range(6))] == [n * n for n in range(6)]
    assert sorted(runs) == list(range(6))


def test_a_unit_that_kills_every_worker_is_an_error() -> None:
    asked: list[int] = []

    def deadly(unit: int) -> bool:
        asked.append(unit)
        return unit == 2

    results = dispatch_in_order(WorkerPool("mortals", lambda: DyingExecutor(deadly), 2), lambda unit: unit, range(5))
    assert [next(results), next(results)] == [(0, 0), (1, 1)]
    with pytest.raises(WorkersLost, match=rf"mortals: workers died {MAX_LOSSES} times in a row.*resume the command"):
        next(results)
    assert asked.count(2) == MAX_LOSSES


def test_losses_are_counted_in_a_row() -> None:
    left = dict.fromkeys(range(5), MAX_LOSSES - 1)

    def deadly(unit: int) -> bool:
        left[unit] -= 1
        return left[unit] >= 0

    pool = WorkerPool("mortals", lambda: DyingExecutor(deadly), 1)
    assert [result for _, result in dispatch_in_order(pool, lambda unit: unit, range(5))] == list(range(5))


def test_an_error_of_the_function_is_raised_at_once() -> None:
    asked = []

    def fails(unit: int) -> int:
        asked.append(unit)
        if unit == 1:
            raise ZeroDivisionError("of this unit")
        return unit

    results = dispatch_in_order(WorkerPool("threads", lambda: ThreadPoolExecutor(1), 1), fails, range(5))
    assert next(results) == (0, 0)
    with pytest.raises(ZeroDivisionError, match="of this unit"):
        next(results)
    assert asked == [0, 1]


def test_units_that_measure_run_last_and_alone() -> None:
    at_work, beside = set[int](), dict[int, set[int]]()

    def noted(unit: int) -> int:
        at_work.add(unit)
        Event().wait(0.02)
        beside[unit] = at_work - {unit}
        at_work.discard(unit)
        return unit

    found = [
        unit for unit, _ in dispatch_timed_units_after_others(threads(), noted, range(9), lambda unit: unit % 3 == 0)
    ]
    assert found == [1, 2, 4, 5, 7, 8, 0, 3, 6]
    assert [beside[unit] for unit in (0, 3, 6)] == [set(), set(), set()]
    assert any(beside[unit] for unit in (1, 2, 4, 5, 7, 8)), "units that measure nothing run in parallel"


# ---------------------------------------------------------------- addresses


def dies_once(unit: tuple[int, str]) -> tuple[int, int]:
    """Return the unit's number and the process, which exits at unit 2 the first time."""
    number, folder = unit
    first = Path(folder, "died")
    if number == 2 and not first.exists():
        first.touch()
        os._exit(9)
    return number, os.getpid()


def test_here_is_no_pool() -> None:
    with open_workers("here") as pool:
        assert pool is None


@pytest.mark.parametrize(
    "address",
    ["", "there", "processes", "processes:0", "processes:2x0", "processes:-1", "slurm://", "slurm://jobs?jobs=none"],
)
def test_an_unknown_address_is_refused_with_the_known_forms(address: str) -> None:
    if address.startswith("slurm"):
        pytest.importorskip("submitit")
    with pytest.raises(BadArgument, match="executor="), open_workers(address):
        pass


def test_a_scheduler_out_of_reach_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")

    def out_of_reach(*ignored: object, **options: object) -> None:
        raise OSError("nobody listens")

    monkeypatch.setattr(distributed, "Client", out_of_reach)
    with pytest.raises(BadArgument, match="a Dask scheduler within reach; OSError: nobody"), open_workers("dask://x:1"):
        pass


@pytest.mark.parametrize(("address", "package"), [("dask://x:1", "distributed"), ("slurm://jobs", "submitit")])
def test_a_missing_package_is_named_with_its_extra(address: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadArgument, match=rf"the package {package}; pip install 'pytest-emad\["), open_workers(address):
        pass


def test_processes_are_others_and_a_killed_one_costs_no_result(tmp_path: Path) -> None:
    with open_workers("processes:2") as pool:
        assert pool is not None
        results = [result for _, result in dispatch_in_order(pool, dies_once, [(n, str(tmp_path)) for n in range(5)])]
    assert (tmp_path / "died").exists()
    assert [number for number, _ in results] == [*range(5)]
    assert os.getpid() not in {process for _, process in results}


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """After any end of the parent, no worker runs beside the next run."""
    program = f"from tests.unit.workers.test_dispatch import orphaned; orphaned({str(tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as started:
        while not (found := list(tmp_path.iterdir())):
            time.sleep(0.05)
        started.kill()
    worker = int(found[0].name)
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}").exists()


def orphaned(folder: str) -> None:
    with open_workers("processes:1") as pool:
        assert pool is not None
        list(dispatch_in_order(pool, works_on, [folder]))


def works_on(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)


def test_units_go_to_a_dask_scheduler_and_come_back_in_order() -> None:
    distributed = pytest.importorskip("distributed", reason="extra cluster")
    two = {"n_workers": 1, "threads_per_worker": 2}
    with (
        distributed.LocalCluster(**two, processes=False, protocol="tcp", dashboard_address=":0") as cluster,
        open_workers(cluster.scheduler_address.replace("tcp://", "dask://")) as pool,
    ):
        assert pool is not None
        assert pool.ahead == 8
        assert [result for _, result in dispatch_in_order(pool, abs, [-3, -1, -2])] == [3, 1, 2]


@pytest.mark.parametrize(("threshold", "calls"), [(NANNY_TRIM_THRESHOLD, 2), ("131072", 0), (None, 0)])
def test_only_the_threshold_of_dasks_nanny_is_undone(
    threshold: str | None, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *option: made.append(option)))
    if threshold is None:
        monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    else:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", threshold)
    keep_freed_memory()
    assert len(made) == calls
    assert os.environ.get("MALLOC_TRIM_THRESHOLD_") == (None if calls else threshold)


def test_the_known_threshold_is_dasks_default() -> None:
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    assert str(dask.config.get("distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_")) == NANNY_TRIM_THRESHOLD


@pytest.mark.slow
def test_a_lost_job_of_a_cluster_runs_again(tmp_path: Path) -> None:
    """submitit's own local cluster: jobs are processes, and logs and pickles files."""
    pytest.importorskip("submitit")
    with open_workers(f"slurm://{tmp_path}/jobs?cluster=local&jobs=2&timeout_min=2") as pool:
        assert pool is not None
        results = [result for _, result in dispatch_in_order(pool, dies_once, [(n, str(tmp_path)) for n in range(4)])]
    assert [number for number, _ in results] == list(range(4))
