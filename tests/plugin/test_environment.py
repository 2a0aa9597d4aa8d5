"""Environment of a run: rootdir and options that pytest misreads, and one GPU per xdist worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emad_ref.errors import BadArgument
from pytest_emad.run import environment
from pytest_emad.run.environment import VISIBLE_DEVICES, select_gpu
from tests.plugin.conftest import Run

USAGE = pytest.ExitCode.USAGE_ERROR
PLAIN = "def test_one(): pass\n"
SETTINGS = "def test_settings(emad_settings): pass\n"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Return a folder of data outside the project."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def suites(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the plugin takes for its own suites."""
    folder = project.path / "suites" / "claims"
    folder.mkdir(parents=True)
    (folder / "test_one.py").write_text(PLAIN)
    monkeypatch.setattr(environment, "SUITES", (project.path / "suites",))
    return project.path / "suites"


def said(result: pytest.RunResult) -> str:
    return result.stdout.str() + result.stderr.str()


def test_the_value_of_an_option_does_not_move_the_root(
    project: pytest.Pytester, wheel_layout: Path, elsewhere: Path
) -> None:
    result = project.runpytest_subprocess("--pyargs", "pytest_emad.suites.claims", "--emad-data", elsewhere)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"rootdir: {project.path}"])
    assert list(elsewhere.iterdir()) == []
    assert (project.path / ".pytest_cache").is_dir()


def test_installed_suites_named_by_their_path_do_not_move_the_root(
    project: pytest.Pytester, wheel_layout: Path
) -> None:
    result = project.runpytest_subprocess(wheel_layout / "claims")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"rootdir: {project.path}"])
    assert list(wheel_layout.parents[1].rglob(".pytest_cache")) == []


def test_a_configuration_that_was_not_read_stops_the_run(
    project: pytest.Pytester, wheel_layout: Path, elsewhere: Path
) -> None:
    """pytest has already acted on its absence, which no plugin can undo."""
    project.makeini("[pytest]\naddopts = -q\n")
    suites = ("--pyargs", "pytest_emad.suites.claims")
    result = project.runpytest_subprocess(*suites, "--emad-data", elsewhere)
    assert result.ret == USAGE
    (line,) = [line for line in result.errlines if line]
    assert line.startswith(f"ERROR: --emad-data {elsewhere}: pytest took {elsewhere} for a test path, and the config")
    assert line.endswith(f"write --emad-data={elsewhere}")
    project.runpytest_subprocess(*suites, f"--emad-data={elsewhere}").assert_outcomes(passed=1)


def test_a_root_that_was_chosen_stays(project: pytest.Pytester, wheel_layout: Path, elsewhere: Path) -> None:
    result = project.runpytest_subprocess("--rootdir", elsewhere, "--pyargs", "pytest_emad.suites.claims")
    result.stdout.fnmatch_lines([f"rootdir: {elsewhere}"])


PROPERTY = """
from hypothesis import given, strategies as st
from hypothesis.configuration import storage_directory
@given(st.text())
def test_property(text): pass
def test_where_hypothesis_stores():
    assert "emad-hypothesis" in str(storage_directory("unicode_data").path)
"""


@pytest.mark.parametrize("cache", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_of_the_suites_leaves_nothing_beside_pytests_cache(
    project: pytest.Pytester, wheel_layout: Path, cache: bool
) -> None:
    (wheel_layout / "claims" / "test_property.py").write_text(PROPERTY)
    off = [] if cache else ["-p", "no:cacheprovider"]
    before = set(project.path.iterdir())
    project.runpytest_subprocess(*off, "--pyargs", "pytest_emad.suites.claims").assert_outcomes(passed=3)
    left = {path.name for path in set(project.path.iterdir()) - before if path.name.startswith(".")}
    assert left == ({".pytest_cache"} if cache else set())


@pytest.mark.parametrize(
    ("pasted", "meant"),
    [
        ("−−emad-margin=−0.1", "--emad-margin=−0.1"),
        ("—emad-only=EMAD-F1", "--emad-only=EMAD-F1"),
        ("--emad‑seed=3", "--emad-seed=3"),
    ],
)
def test_pasted_dashes_are_named(run: Run, pasted: str, meant: str) -> None:
    result = run(pasted)
    assert result.ret == USAGE
    assert f"{pasted}: its dashes are typographic" in said(result)
    assert f"write {meant}" in said(result)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        (["--emad-modle", "x"], "--emad-modle; nearest: --emad-model"),
        (["--emad-raport=out"], "--emad-raport; nearest: --emad-report"),
        (["--emad-qqqq"], "--emad-qqqq; pytest --help lists them"),
    ],
)
def test_an_unknown_option_of_ours_gets_the_nearest(run: Run, given: list[str], nearest: str) -> None:
    result = run(*given)
    assert result.ret == USAGE
    assert f"unrecognized arguments: {nearest}" in said(result)


def test_an_option_that_a_conftest_adds_is_its_own(project: pytest.Pytester, run: Run) -> None:
    project.makeconftest("def pytest_addoption(parser): parser.addoption('--emad-modle')")
    project.makepyfile("def test_own(request): assert request.config.getoption('--emad-modle') == 'x'")
    run("--emad-modle", "x").assert_outcomes(passed=1)
    assert run("--emad-modle", "x", "--help").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("workers", [["-n", "2"], ["-n2"], ["--numprocesses=2"]])
def test_workers_without_xdist_are_a_usage_error_of_the_suites(
    suites: Path, run_apart: Run, workers: list[str]
) -> None:
    result = run_apart("-p", "no:xdist.plugin", "--emad-seed=0", *workers)
    assert result.ret == USAGE
    assert "pytest-xdist, which runs tests in several processes, is not installed; leave -" in said(result)


@pytest.mark.parametrize("option", ["--dist=each", "--testmon"])
def test_an_option_of_another_plugin_that_contradicts_a_gate_is_a_usage_error(
    suites: Path, project: pytest.Pytester, run: Run, option: str
) -> None:
    """A test that ran twice has two verdicts; a test that its plugin skipped has none."""
    project.makeconftest("def pytest_addoption(parser): parser.addoption('--testmon', action='store_true')")
    project.makepyfile(test_plain=PLAIN)
    result = run("suites", option)
    assert result.ret == USAGE
    assert f"ERROR: {option.replace('=', ' ')}: pytest-" in said(result)
    assert run("test_plain.py", option).ret == pytest.ExitCode.OK


def test_suites_without_the_plugin_say_so(project: pytest.Pytester, wheel_layout: Path) -> None:
    source = Path(environment.__file__).parents[2] / "suites" / "conftest.py"
    (wheel_layout / "conftest.py").write_text(source.read_text())
    for arguments in (["--pyargs", "pytest_emad.suites.claims"], [str(wheel_layout)]):
        result = project.runpytest_subprocess("-p", "no:emad", "-p", "no:pytest_emad.plugin", *arguments)
        assert result.ret == USAGE
        assert said(result).count("need its plugin, which is not loaded: leave -p no:emad out") == 1
        assert "fixture 'emad" not in said(result)


def test_the_header_appears_where_something_of_ours_runs(suites: Path, project: pytest.Pytester, run: Run) -> None:
    project.makepyfile(test_plain=PLAIN, test_ours=SETTINGS)
    header = "emad: model emad-tiny;"
    assert header not in run("test_plain.py").stdout.str()
    for asked in ("suites", "test_ours.py", "."):
        assert run(asked).stdout.str().count(header) == 1, asked


@pytest.mark.parametrize(
    ("load", "imported", "chosen", "policy"),
    [
        (1e4, set(), {}, "PASSIVE"),
        (0.0, set(), {}, None),
        (1e4, {"torch"}, {}, None),
        (1e4, set(), {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        (1e4, set(), {"OMP_NUM_THREADS": "2"}, None),
    ],
)
def test_on_a_busy_machine_waiting_threads_sleep(
    suites: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    load: float,
    imported: set[str],
    chosen: dict[str, str],
    policy: str | None,
) -> None:
    """Where torch runs already, or the user chose, nothing is set."""
    monkeypatch.setattr(environment, "sys", SimpleNamespace(modules=imported))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    (suites / "claims" / "test_one.py").write_text(
        f"import os\ndef test_one(): assert os.environ.get('OMP_WAIT_POLICY') == {policy!r}\n"
    )
    result = run("suites")
    result.assert_outcomes(passed=1)
    busy = "emad: busy machine, load average 10000.0 on "
    assert (busy in result.stdout.str()) == (policy == "PASSIVE")
    assert os.environ.get("OMP_WAIT_POLICY") == chosen.get("OMP_WAIT_POLICY"), "restored"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str | None], None]:
    """``machine(GPUs, visible ones by name)`` simulates a machine."""

    def of(count: int, visible: str | None) -> None:
        def seen() -> int:
            names = os.environ.get(VISIBLE_DEVICES)
            return count if names is None else len(names.split(","))

        monkeypatch.setattr(torch.cuda, "device_count", seen)
        monkeypatch.setenv(VISIBLE_DEVICES, visible or "")  # restored afterwards, whatever the worker sets
        if visible is None:
            monkeypatch.delenv(VISIBLE_DEVICES)

    return of


@pytest.mark.parametrize(
    ("count", "visible", "worker", "taken"),
    [
        (4, None, 0, "0"),
        (4, None, 3, "3"),
        (4, None, 6, "2"),
        (8, "5, 7", 1, "7"),
        (8, "GPU-8932f937,MIG-0c757cd7", 2, "GPU-8932f937"),
        (1, None, 1, None),
        (0, None, 1, None),
        (4, "3", 1, "3"),
    ],
)
def test_a_worker_takes_the_gpu_of_its_number(
    machine: Callable[..., None], count: int, visible: str | None, worker: int, taken: str | None
) -> None:
    machine(count, visible)
    select_gpu(worker)
    assert os.environ.get(VISIBLE_DEVICES) == taken


def test_a_worker_whose_gpus_somebody_else_has_started_says_so(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(2, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadArgument, match="expected that worker 1 sees GPU 1 alone, and not all 2"):
        select_gpu(1)
