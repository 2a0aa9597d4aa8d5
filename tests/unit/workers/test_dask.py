"""A worker of Dask keeps memory from one tensor to the next, as any other process does."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emad_ref.workers.dispatch import dispatch_in_order, open_workers

distributed = pytest.importorskip("distributed", reason="extra cluster")
ours = pytest.importorskip("emad_ref.workers.dask_executor")

CHILD = "import os; print(os.environ.get('MALLOC_TRIM_THRESHOLD_'))"
ROUNDS, SIZE = 100, 4 << 20
ROOT = Path(__file__).resolve().parents[3]
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def pages_of_tensors() -> int:
    """Pages mapped anew while as many tensors come and go as there are rounds.

    Each is a page larger than the one before, so that it fits into no gap: it stands at the end of what glibc holds,
    from where memory is given back.
    """
    import torch

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(ROUNDS):
        torch.zeros(SIZE + number * PAGE, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def as_a_worker() -> None:
    """Of a process that a nanny started: a unit in a thread, then what a process started here finds set."""
    with ThreadPoolExecutor(1) as thread:
        pages = ours.MemoryKeepingExecutor(thread).submit(pages_of_tensors).result()
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    print(pages, child.stdout.strip())


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator, and Linux's count of pages")
@pytest.mark.parametrize(("set_to", "stays"), [(ours.NANNYS, False), ("131072", True)])
def test_only_the_nannys_own_threshold_is_undone(set_to: str, stays: bool) -> None:
    started = os.environ | {ours.THRESHOLD: set_to}
    worker = f"from {__name__} import as_a_worker; as_a_worker()"
    done = subprocess.run([sys.executable, "-c", worker], cwd=ROOT, env=started, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    pages, found = done.stdout.split()
    assert found == (set_to if stays else "None")
    assert (int(pages) > ROUNDS * SIZE // PAGE // 2) is stays


def test_two_threads_of_one_worker_may_undo_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherThreadWasFaster:
        def mallopt(self, *_: int) -> None:
            os.environ.pop(ours.THRESHOLD, None)

    monkeypatch.setenv(ours.THRESHOLD, ours.NANNYS)
    monkeypatch.setattr(ours.platform, "libc_ver", lambda: ("glibc", "2"))
    monkeypatch.setattr(ours.ctypes, "CDLL", lambda _: OtherThreadWasFaster())
    ours.keep_memory()
    assert ours.THRESHOLD not in os.environ


def test_the_nannys_threshold_is_the_one_that_is_known() -> None:
    import dask

    assert str(dask.config.get(f"distributed.nanny.pre-spawn-environ.{ours.THRESHOLD}")) == ours.NANNYS


def test_units_go_to_a_scheduler_and_come_back_in_order() -> None:
    two = {"n_workers": 1, "threads_per_worker": 2}
    with (
        distributed.LocalCluster(**two, processes=False, protocol="tcp", dashboard_address=":0") as cluster,
        open_workers(cluster.scheduler_address.replace("tcp://", "dask://")) as crew,
    ):
        assert crew is not None
        assert [result for _, result in dispatch_in_order(crew, abs, [-3, -1, -2])] == [3, 1, 2]
        assert crew.alone is not None
        assert [result for _, result in dispatch_in_order(crew.alone, abs, [-3, -1])] == [3, 1]
