"""Where workers are: what each address gives, and that a wrong one says what is right."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emad_ref.errors import BadArgument
from emad_ref.workers.dispatch import dispatch_in_order, open_workers

ROOT = Path(__file__).resolve().parents[3]


def squared(unit: int) -> tuple[int, int]:
    return unit * unit, os.getpid()


def dies_once(unit: tuple[int, str]) -> int:
    """Ends its process at unit 2 the first time; unit 1 takes until that has happened. Each beginning leaves a file."""
    number, folder = unit
    again = bool(list(Path(folder).glob("2-*")))
    Path(folder, f"{number}-{os.getpid()}").touch()
    if number == 2 and not again:
        os._exit(9)
    while number == 1 and not list(Path(folder).glob("2-*")):
        time.sleep(0.05)
    time.sleep(0.5 if number == 1 else 0)  # long enough for others to hear of it
    return number


def test_here_is_nobody() -> None:
    with open_workers("here") as crew:
        assert crew is None


@pytest.mark.parametrize(
    "address",
    ["", "there", "processes", "processes:0", "processes:2x0", "processes:-1", "slurm://", "slurm://jobs?jobs=none"],
)
def test_an_address_of_no_form_is_refused_with_those_there_are(address: str) -> None:
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
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    address: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for ours in ("dask_executor", "slurm_executor"):
        monkeypatch.delitem(sys.modules, f"emad_ref.workers.{ours}", raising=False)
    with pytest.raises(BadArgument, match=rf"the package {package}; pip install 'pytest-emad\["), open_workers(address):
        pass


def test_processes_are_others_and_their_results_come_in_order() -> None:
    with open_workers("processes:2") as crew:
        assert crew is not None
        results = [result for _, result in dispatch_in_order(crew, squared, range(5))]
    assert [square for square, _ in results] == [n * n for n in range(5)]
    assert os.getpid() not in {process for _, process in results}


def test_a_killed_process_costs_its_unit_only(tmp_path: Path) -> None:
    """Unit 1 is at work all the while, in the other process, and is not begun twice."""
    with open_workers("processes:2") as crew:
        assert crew is not None
        results = [result for _, result in dispatch_in_order(crew, dies_once, [(n, str(tmp_path)) for n in range(5)])]
    assert results == list(range(5))
    begun = [path.name.partition("-")[0] for path in tmp_path.iterdir()]
    assert sorted(begun) == ["0", "1", "2", "2", "3", "4"]


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """However that ends: nobody goes on working beside the run that is started next."""
    program = f"from tests.unit.workers.test_address import orphaned; orphaned({str(tmp_path)!r})"
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
    with open_workers("processes:1") as crew:
        assert crew is not None
        list(dispatch_in_order(crew, works_on, [folder]))


def works_on(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)


@pytest.mark.parametrize(
    ("address", "shared"), [("processes:1", False), ("processes:2", True), ("processes:2x3", True)]
)
def test_processes_of_a_machine_have_it_to_themselves_one_at_a_time(address: str, shared: bool) -> None:
    with open_workers(address) as crew:
        assert crew is not None
        assert (crew.alone is not None) is shared
        if crew.alone is not None:
            assert (crew.alone.name, crew.alone.alone) == ("1 processes", None)


@pytest.mark.parametrize(
    ("workers", "machines"),
    [
        ([("a", 1), ("b", 1)], None),
        ([("a", 1), ("a", 1), ("b", 1)], ["a", "b"]),
        ([("a", 8), ("b", 1)], ["a", "b"]),  # a worker of eight threads runs eight units at once
    ],
)
def test_workers_of_dask_that_share_a_host_measure_one_at_a_time(
    workers: list[tuple[str, int]], machines: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed, asked = pytest.importorskip("distributed"), []
    known = {str(number): {"host": host, "nthreads": threads} for number, (host, threads) in enumerate(workers)}

    class Client:
        def __init__(self, *ignored: object, **options: object): ...

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *ignored: object) -> None: ...

        def scheduler_info(self, n_workers: int) -> dict[str, object]:
            return {"workers": known}

        def get_executor(self, **options: object) -> ThreadPoolExecutor:
            asked.append(options["workers"])
            return ThreadPoolExecutor(1)

    monkeypatch.setattr(distributed, "Client", Client)
    with open_workers("dask://x:1") as crew:
        assert crew is not None
        assert (crew.alone is None) is (machines is None)
        if crew.alone is not None:
            assert [result for _, result in dispatch_in_order(crew.alone, abs, [-1, -2, -3])] == [1, 2, 3]
            assert asked == [[machine] for machine in machines or ()]


def test_jobs_that_measure_share_their_machine_with_none(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    with open_workers(f"slurm://{tmp_path}/jobs?cluster=debug&jobs=2&timeout_min=2") as crew:
        assert crew is not None
        assert crew.alone is not None
        executor = crew.alone.engage()
        assert executor.options["slurm_exclusive"] is True  # type: ignore[attr-defined]
    with open_workers(f"slurm://{tmp_path}/jobs?cluster=local&jobs=2") as crew:
        assert crew is not None
        assert crew.alone is not None
        assert crew.alone.ahead == 1


@pytest.mark.slow
def test_a_lost_job_of_a_cluster_costs_its_unit_only(tmp_path: Path) -> None:
    """submitit's own local cluster: jobs are processes, and logs and pickles files."""
    pytest.importorskip("submitit")
    address = f"slurm://{tmp_path}/jobs?cluster=local&jobs=2&timeout_min=2"
    with open_workers(address) as crew:
        assert crew is not None
        results = [result for _, result in dispatch_in_order(crew, dies_once, [(n, str(tmp_path)) for n in range(4)])]
    assert results == list(range(4))
