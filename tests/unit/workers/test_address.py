"""Where workers are: what each address gives, and that a wrong one says what is right."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from emad_ref.errors import BadArgument
from emad_ref.workers.address import workers_at
from emad_ref.workers.handing import handed_out


def squared(unit: int) -> tuple[int, int]:
    return unit * unit, os.getpid()


def dies_once(unit: tuple[int, str]) -> int:
    """Ends its process at unit 2 where the file is not there yet."""
    number, flag = unit
    if number == 2 and not Path(flag).exists():
        Path(flag).touch()
        os._exit(9)
    return number


def test_here_is_nobody() -> None:
    with workers_at("here") as crew:
        assert crew is None


@pytest.mark.parametrize(
    "address",
    ["", "there", "processes", "processes:0", "processes:2x0", "processes:-1", "slurm://", "slurm://jobs?jobs=none"],
)
def test_an_address_of_no_form_is_refused_with_those_there_are(address: str) -> None:
    with pytest.raises(BadArgument, match="executor="), workers_at(address):
        pass


def test_a_scheduler_out_of_reach_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")

    def out_of_reach(*ignored: object, **options: object) -> None:
        raise OSError("nobody listens")

    monkeypatch.setattr(distributed, "Client", out_of_reach)
    with pytest.raises(BadArgument, match="a Dask scheduler within reach; OSError: nobody"), workers_at("dask://x:1"):
        pass


@pytest.mark.parametrize(("address", "package"), [("dask://x:1", "distributed"), ("slurm://jobs", "submitit")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    address: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "emad_ref.workers.slurm", raising=False)
    with pytest.raises(BadArgument, match=rf"the package {package}; pip install 'pytest-emad\["), workers_at(address):
        pass


def test_processes_are_others_and_their_results_come_in_order() -> None:
    with workers_at("processes:2") as crew:
        assert crew is not None
        results = [result for _, result in handed_out(crew, squared, range(5))]
    assert [square for square, _ in results] == [n * n for n in range(5)]
    assert os.getpid() not in {process for _, process in results}


def test_a_killed_process_costs_its_unit_only(tmp_path: Path) -> None:
    flag = str(tmp_path / "died")
    with workers_at("processes:2") as crew:
        assert crew is not None
        results = [result for _, result in handed_out(crew, dies_once, [(n, flag) for n in range(5)])]
    assert results == list(range(5))
    assert Path(flag).exists()


@pytest.mark.slow
def test_a_lost_job_of_a_cluster_costs_its_unit_only(tmp_path: Path) -> None:
    """submitit's own local cluster: jobs are processes, and logs and pickles files."""
    pytest.importorskip("submitit")
    flag = str(tmp_path / "died")
    address = f"slurm://{tmp_path}/jobs?cluster=local&jobs=2&timeout_min=2"
    with workers_at(address) as crew:
        assert crew is not None
        results = [result for _, result in handed_out(crew, dies_once, [(n, flag) for n in range(4)])]
    assert results == list(range(4))
