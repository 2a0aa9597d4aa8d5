"""A worker of Dask keeps memory from one tensor to the next, as any other process does."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from emad_ref.workers.address import workers_at
from emad_ref.workers.handing import handed_out

distributed = pytest.importorskip("distributed", reason="extra cluster")
ours = pytest.importorskip("emad_ref.workers.dask")

CHILD = "import os; print(os.environ.get('MALLOC_TRIM_THRESHOLD_'))"
ROUNDS, SIZE = 100, 4 << 20


def faults_of_tensors(unit: int) -> tuple[int, str]:
    """Pages mapped anew while as many tensors of 4 MiB come and go; what a process started here finds set."""
    import torch

    def come_and_go() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(ROUNDS):
            torch.zeros(SIZE, dtype=torch.uint8)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with ThreadPoolExecutor(1) as thread:  # where Dask runs a unit
        pages = thread.submit(come_and_go).result()
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    return pages, child.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator, and Linux's count of pages")
@pytest.mark.parametrize(("set_to", "stays"), [(ours.NANNYS, False), ("131072", True)])
def test_only_the_nannys_own_threshold_is_undone(set_to: str, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ours.THRESHOLD, set_to)
    each = SIZE // os.sysconf("SC_PAGE_SIZE")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        pages, found = ours.Keeping(process).submit(faults_of_tensors, 0).result()
    assert found == (set_to if stays else "None")
    assert (pages > ROUNDS * each // 2) is stays
    assert os.environ[ours.THRESHOLD] == set_to


def test_the_nannys_threshold_is_the_one_that_is_known() -> None:
    import dask

    assert str(dask.config.get(f"distributed.nanny.pre-spawn-environ.{ours.THRESHOLD}")) == ours.NANNYS


def test_units_go_to_a_scheduler_and_come_back_in_order() -> None:
    two = {"n_workers": 1, "threads_per_worker": 2}
    with (
        distributed.LocalCluster(**two, processes=False, protocol="tcp", dashboard_address=":0") as cluster,
        workers_at(cluster.scheduler_address.replace("tcp://", "dask://")) as crew,
    ):
        assert crew is not None
        assert [result for _, result in handed_out(crew, abs, [-3, -1, -2])] == [3, 1, 2]
        assert crew.alone is not None
        assert [result for _, result in handed_out(crew.alone, abs, [-3, -1])] == [3, 1]
