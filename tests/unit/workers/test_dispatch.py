"""Dispatch: results in the order of units, lost units run again, failed functions do not; executor addresses."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from emad_ref.errors import BadArgument, MissingExtra
from emad_ref.workers import dispatch
from emad_ref.workers.dispatch import (
    DEATHS_ALLOWED,
    NANNY_TRIM_THRESHOLD,
    WorkerPool,
    WorkersLost,
    dispatch_in_order,
    dispatch_timed_units_after_others,
    keep_freed_memory,
    open_workers,
)
from tests.unit.workers.test_child_process import gone

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def threads() -> Iterator[Callable[[int], WorkerPool]]:
    """Return a function that makes a pool of threads with so many units ahead."""
    with ThreadPoolExecutor(3) as executor:
        yield lambda ahead: WorkerPool("threads", executor.submit, ahead)


def test_results_come_in_the_order_of_units(threads) -> None:
    def slow_at_first(unit: int) -> int:
        Event().wait(0.05 if unit == 0 else 0.0)
        return -unit

    assert list(dispatch_in_order(threads(3), slow_at_first, range(7))) == [(n, -n) for n in range(7)]


def test_no_more_units_are_out_than_the_pool_allows(threads) -> None:
    taken = 0

    def units() -> Any:
        nonlocal taken
        for unit in count():
            taken += 1
            yield unit

    results = dispatch_in_order(threads(4), lambda unit: unit, units())
    for done in range(1, 6):
        next(results)
        assert taken <= done + 3
    results.close()


def test_an_error_of_the_function_is_raised_with_its_unit_and_cancels_the_others() -> None:
    asked = []

    def fails(unit: int) -> int:
        asked.append(unit)
        if unit == 1:
            raise ZeroDivisionError("of this unit")
        Event().wait(0.5 if unit > 1 else 0.0)
        return unit

    with ThreadPoolExecutor(1) as one:
        results = dispatch_in_order(WorkerPool("one thread", one.submit, 3), fails, range(9))
        assert next(results) == (0, 0)
        with pytest.raises(ZeroDivisionError, match="of this unit") as raised:
            next(results)
    assert raised.value.__notes__ == ["unit 2 of one thread"]
    assert 3 not in asked


def test_a_unit_on_which_workers_died_is_an_error_with_its_cause() -> None:
    class Died(Exception):
        pass

    def dies(unit: int) -> int:
        if unit == 2:
            raise Died("three workers died. Ask the manual")
        return unit

    with ThreadPoolExecutor(1) as one:
        results = dispatch_in_order(WorkerPool("mortals", one.submit, 2, deaths=(Died,)), dies, range(5))
        assert [next(results), next(results)] == [(0, 0), (1, 1)]
        with pytest.raises(WorkersLost, match=r"mortals: unit 3 got no result \(Died: three workers died\); .*resume"):
            next(results)


def test_units_that_measure_run_last_and_alone(threads) -> None:
    at_work, beside = set[int](), dict[int, set[int]]()

    def noted(unit: int) -> int:
        at_work.add(unit)
        Event().wait(0.02)
        beside[unit] = at_work - {unit}
        at_work.discard(unit)
        return unit

    found = [
        unit for unit, _ in dispatch_timed_units_after_others(threads(3), noted, range(9), lambda unit: unit % 3 == 0)
    ]
    assert found == [1, 2, 4, 5, 7, 8, 0, 3, 6]
    assert [beside[unit] for unit in (0, 3, 6)] == [set(), set(), set()]
    assert any(beside[unit] for unit in (1, 2, 4, 5, 7, 8)), "units that measure nothing run in parallel"


# ---------------------------------------------------------------- addresses


def test_here_is_no_pool() -> None:
    with open_workers("here") as pool:
        assert pool is None


@pytest.mark.parametrize(
    "address", ["", "there", "processes", "processes:0", "processes:2x0", "processes:-1", "tcp://x:1"]
)
def test_an_unknown_address_is_refused_with_the_known_forms(address: str) -> None:
    known = "one of here, processes:N, processes:NxTHREADS, dask://HOST:PORT"
    with pytest.raises(BadArgument, match=f"executor=.*{known}"), open_workers(address):
        pass


def test_a_scheduler_out_of_reach_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed", reason="extra cluster")

    def out_of_reach(*ignored: object, **options: object) -> None:
        raise OSError("nobody listens")

    monkeypatch.setattr(distributed, "Client", out_of_reach)
    with pytest.raises(BadArgument, match="a Dask scheduler within reach; OSError: nobody"), open_workers("dask://x:1"):
        pass


@pytest.mark.parametrize("address", ["dask://x:1", "processes:2"])
def test_without_dask_the_error_names_the_extra(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    said = r"needs distributed, not installed here; pip install 'pytest-emad\[cluster\]'"
    with pytest.raises(MissingExtra, match=said), open_workers(address):
        pass


def process_and_threads(number: int) -> tuple[int, int, str | None, int]:
    import torch

    time.sleep(0.5)  # long enough that no process takes all units
    return number, os.getpid(), os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()


def listening_hosts(process: psutil.Process) -> set[str]:
    return {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(("address", "threads"), [("processes:2", 1), ("processes:2x2", 2)])
def test_processes_are_others_with_so_many_threads_and_ports_of_this_machine_alone(address: str, threads: int) -> None:
    pytest.importorskip("distributed", reason="extra cluster")
    before, ours = dict(os.environ), psutil.Process()
    hosts = listening_hosts(ours)
    with open_workers(address) as pool:
        assert pool is not None
        assert pool.ahead == 8
        results = [result for _, result in dispatch_in_order(pool, process_and_threads, range(6))]
        workers = {process for _, process, _, _ in results}
        assert listening_hosts(ours) - hosts <= {"127.0.0.1"}
        assert [listening_hosts(psutil.Process(each)) for each in workers] == [{"127.0.0.1"}] * 2
    assert [number for number, _, _, _ in results] == [*range(6)]
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert {(said, used) for _, _, said, used in results} == {(str(threads), threads)}
    assert not any(psutil.pid_exists(each) for each in workers)
    assert dict(os.environ) == before


def dies(unit: tuple[int, str, int]) -> int:
    """Return the unit's number; unit 2 ends its process the first times, and leaves a file each time."""
    number, folder, deaths = unit
    before = len(list(Path(folder).iterdir()))
    if number == 2 and before < deaths:
        Path(folder, f"died {before}").touch()
        os._exit(9)
    return number


def test_a_killed_process_costs_no_result(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="extra cluster")
    units = [(number, str(tmp_path), 1) for number in range(5)]
    with open_workers("processes:2") as pool:
        assert pool is not None
        assert [result for _, result in dispatch_in_order(pool, dies, units)] == [*range(5)]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_unit_that_kills_every_process_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="extra cluster")
    units = [(number, str(tmp_path), 99) for number in range(5)]
    with open_workers("processes:2") as pool:
        assert pool is not None
        results = dispatch_in_order(pool, dies, units)
        assert [result for _, (_, result) in zip(range(2), results, strict=False)] == [0, 1]
        with pytest.raises(WorkersLost, match=r"^processes:2: unit 3 got no result \(KilledWorker: Attempted to run "):
            next(results)
    assert len(list(tmp_path.iterdir())) == DEATHS_ALLOWED + 1


def test_a_run_whose_processes_are_not_replaced_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="extra cluster")
    short = {"distributed.deploy.lost-worker-timeout": "1ms", "distributed.scheduler.no-workers-timeout": "2s"}
    monkeypatch.setattr(dispatch, "LOCAL_SETTINGS", dispatch.LOCAL_SETTINGS | short)
    with open_workers("processes:1") as pool:
        assert pool is not None
        with pytest.raises(WorkersLost, match=r"unit 1 got no result \(NoWorkerError: .* without any running workers"):
            list(dispatch_in_order(pool, dies, [(2, str(tmp_path), 1)]))


def refuses(unit: int) -> int:
    if unit == 1:
        raise BadArgument("layer", 13, "1 to 12")
    return unit


def test_an_error_in_a_process_is_the_callers_and_names_the_unit() -> None:
    pytest.importorskip("distributed", reason="extra cluster")
    with open_workers("processes:1") as pool:
        assert pool is not None
        with pytest.raises(BadArgument, match="layer=13, but expected 1 to 12") as raised:
            list(dispatch_in_order(pool, refuses, range(3)))
    assert raised.value.__notes__ == ["unit 2 of processes:1"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_processes_end_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    """After any end of the parent, no worker runs beside the next run. Ctrl-C reaches the whole group."""
    pytest.importorskip("distributed", reason="extra cluster")
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{hears}\nfrom tests.unit.workers.test_dispatch import waits; waits({str(tmp_path)!r})"
    line = [sys.executable, "-c", program]
    with subprocess.Popen(line, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True) as started:
        while len(found := list(tmp_path.iterdir())) < 2:
            assert started.poll() is None
            time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(started.pid, number)
        else:
            started.kill()
        _, said = started.communicate(timeout=60)
    assert started.returncode == -number
    assert said.count("Traceback") == (number == signal.SIGINT), "the parent alone reports Ctrl-C"
    assert all(gone(int(path.name)) for path in found)


def waits(folder: str) -> None:
    with open_workers("processes:2") as pool:
        assert pool is not None
        list(dispatch_in_order(pool, sleeps, [folder] * 120))


def sleeps(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(1)


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
