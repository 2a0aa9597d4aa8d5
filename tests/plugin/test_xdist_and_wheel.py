"""Behaviour in separate processes: xdist, the layout of a wheel, and the imports of the plugin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import emad_ref
from tests.plugin.conftest import Run, report_of

USAGE = pytest.ExitCode.USAGE_ERROR
ROOT = Path(emad_ref.__file__).parents[1]


def test_importing_the_plugin_imports_neither_torch_nor_hypothesis() -> None:
    heavy = {"torch", "transformers", "hypothesis", "scipy", "sklearn"}
    program = f"import sys, pytest_emad.plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


LOADED = """
import json, sys
from _pytest.config import get_config
get_config()
before = set(sys.modules)
import pytest_emad.plugin
print(json.dumps(sorted(set(sys.modules) - before)))
"""
MOST_MODULES = 60  # 55 of them took a quarter of the time that pytest itself needs to start; 30 % are too much


def test_the_plugin_adds_little_to_the_start_of_any_run() -> None:
    """Counted, not timed: modules beyond those that pytest imports are ours, few, and known by name."""
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    foreign = {name.partition(".")[0] for name in loaded} - {"emad_ref", "pytest_emad"}
    assert foreign <= {"tomllib"}
    assert len(loaded) <= MOST_MODULES, loaded


def test_a_run_without_our_suites_reads_no_register(project: pytest.Pytester, run_apart: Run) -> None:
    project.makeconftest("from pytest_emad.run import options\noptions.load_register = None")
    project.makepyfile("def test(): pass")
    run_apart().assert_outcomes(passed=1)


def test_a_run_without_our_suites_imports_no_torch(project: pytest.Pytester, run_apart: Run) -> None:
    project.makepyfile("import sys\ndef test(emad_record): assert 'torch' not in sys.modules")
    run_apart("--emad-report", "out").assert_outcomes(passed=1)


RECORDS = """
import pytest
from verdicts import verdict
@pytest.mark.parametrize("claim", ["EMAD-F1", "EMAD-F2", "EMAD-E1", "EMAD-E3"])
def test_claim(emad_record, claim):
    emad_record.record_point({"model": "emad-tiny", "name": f"point of {claim}", "digest": claim})
    emad_record.record_claim(verdict("falsified" if claim == "EMAD-F2" else "survived", claim))
"""


def test_verdicts_cross_to_the_xdist_controller(project: pytest.Pytester, run_apart: Run) -> None:
    project.makepyfile(RECORDS)
    result = run_apart("-n", 2, "--emad-report", "out")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["  EMAD-F2 *falsified*", "gates: 1 of 2 hold, 1 falsified", "  EMAD-F2  *: falsified"])
    parallel = report_of(project.path / "out")
    run_apart("-n", 0, "--emad-report", "out")
    alone = report_of(project.path / "out")
    for part in ("claims", "points"):
        assert sorted(map(str, parallel[part])) == sorted(map(str, alone[part]))
    assert len(parallel["claims"]) == 4


MEASURES = """
import pytest
@pytest.mark.emad(measures=True)
def test_time(): pass
def test_other(): pass
"""


def test_measuring_in_parallel_stops_the_run(project: pytest.Pytester, run_apart: Run) -> None:
    project.makepyfile(MEASURES)
    result = run_apart("-n", 2)
    assert result.ret == USAGE
    text = result.stdout.str() + result.stderr.str()
    assert "test_time measures time or energy, which needs the machine to itself; use -n 0" in text
    assert "passed" not in text


@pytest.mark.parametrize("workers", [0, 1])
def test_measuring_alone_runs(project: pytest.Pytester, run_apart: Run, workers: int) -> None:
    project.makepyfile(MEASURES)
    run_apart("-n", workers).assert_outcomes(passed=2)


def test_deselected_measuring_tests_do_not_stop_a_parallel_run(project: pytest.Pytester, run_apart: Run) -> None:
    project.makepyfile(MEASURES.replace("measures=True", "measures=True, budget='full'"))
    run_apart("-n", 2).assert_outcomes(passed=1)


def test_measuring_tests_that_are_left_out_by_their_mark_do_not_stop_it_either(
    project: pytest.Pytester, run_apart: Run
) -> None:
    project.makepyfile(MEASURES)
    run_apart("-n", 2, "-m", "not emad(measures=True)").assert_outcomes(passed=1)


FORKING = """
def pytest_addoption(parser):
    parser.addoption("--forked", action="store_true")
def pytest_configure(config):
    config.addinivalue_line("markers", "forked: run in a child process")
"""
FORKED = """
import pytest
{mark}
def test_ours(emad_settings): pass
def test_other(): pass
"""


@pytest.mark.parametrize(("mark", "given"), [("", ["--forked"]), ("@pytest.mark.forked", [])])
def test_a_test_of_ours_in_a_forked_child_stops_the_run(
    project: pytest.Pytester, run: Run, mark: str, given: list[str]
) -> None:
    """pytest-forked runs it so: its records would be lost."""
    project.makeconftest(FORKING)
    project.makepyfile(FORKED.format(mark=mark))
    result = run(*given)
    assert result.ret == USAGE
    assert f"{(given or [mark])[0]}: test_a_test_of_ours" in result.stderr.str()
    assert "::test_ours would run in a child process" in result.stderr.str()
    run(*given, "-k", "other").assert_outcomes(passed=1)


@pytest.mark.parametrize("given", [{"flag": "-O"}, {"PYTHONOPTIMIZE": "2"}], ids=str)
def test_a_python_without_assert_statements_stops_the_run(
    project: pytest.Pytester, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Audits use assert: without it, a wrong decoder would pass."""
    project.makepyfile("def test_ours(emad_settings): assert False\ndef test_other(): pass")
    monkeypatch.setenv("PYTHONOPTIMIZE", given.get("PYTHONOPTIMIZE", ""))
    words = [sys.executable, *([given["flag"]] if "flag" in given else []), "-m", "pytest", "--assert=plain"]
    done = subprocess.run([*words, "-q", "-p", "no:cacheprovider"], cwd=project.path, capture_output=True, text=True)
    assert done.returncode == USAGE, done.stdout + done.stderr
    assert "::test_ours would run without assert statements" in done.stderr
    done = subprocess.run([*words, "-k", "other"], cwd=project.path, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


DEVICES = """
import os, sys, types
def seen():
    return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(","))
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(device_count=seen), get_num_threads=lambda: 1)
"""
SEEN = """
import os, pytest, time
@pytest.mark.emad()
@pytest.mark.parametrize("number", range(8))
def test_it(number, emad_settings, worker_id):
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    open(f"seen-{worker_id}-{seen}-{emad_settings.study.device}", "w").close()
    time.sleep(0.3)  # so that no worker is done before another begins
"""


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["-n", 2, "--emad-device=cuda"], ["gw0-0-cuda", "gw1-1-cuda"]),
        (["-n", 2], ["gw0-all-cpu", "gw1-all-cpu"]),
        (["--emad-device=cuda"], ["master-all-cuda"]),
    ],
)
def test_each_worker_has_a_gpu_of_its_own(
    words: list[object], seen: list[str], project: pytest.Pytester, run_apart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makeconftest(DEVICES)
    project.makepyfile(SEEN)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run_apart(*words).assert_outcomes(passed=8)
    assert sorted(path.name for path in project.path.glob("seen-*")) == [f"seen-{name}" for name in seen]


def test_updates_are_refused_under_xdist(project: pytest.Pytester, run_apart: Run) -> None:
    (project.path / "goldens").mkdir()
    result = run_apart("-n", 2, "--emad-golden", "goldens", "--emad-update-golden")
    assert result.ret == USAGE
    assert "but expected one process; run again with -n 0" in result.stderr.str()


@pytest.mark.slow
def test_installed_suites_run_by_pyargs(wheel_layout: Path, project: pytest.Pytester) -> None:
    arguments = ["-p", "no:cacheprovider", "--pyargs"]
    project.runpytest_subprocess(*arguments, "pytest_emad.suites").assert_outcomes(passed=2)
    project.runpytest_subprocess(*arguments, "pytest_emad.suites.claims", "-n", "2").assert_outcomes(passed=1)


def test_suites_cost_refuses_company_even_unmarked(wheel_layout: Path, project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("-p", "no:cacheprovider", "--pyargs", "pytest_emad.suites", "-n", "2")
    assert result.ret == USAGE
    said = result.stdout.str() + result.stderr.str()
    assert "use -n 0 or -n 1, or ask in parallel for what measures nothing: suites/claims" in said


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_collection_guard_sees_installed_suites(wheel_layout: Path, project: pytest.Pytester, workers: str) -> None:
    """pytest finds the user's own test and alone would exit 0."""
    project.makepyfile(check_own="def test_own(): pass")
    result = project.runpytest_subprocess(
        *("-p", "no:cacheprovider", "--pyargs", "-n", workers, "-o", "python_files=check_*.py"),
        *("pytest_emad.suites.claims", "check_own.py"),
    )
    assert result.ret == USAGE
    assert "pytest_emad.suites.claims: pytest collected none" in result.stdout.str() + result.stderr.str()


LEFT_THREAD = """
import threading, time
def loop():
    time.sleep({seconds})
def pytest_sessionfinish(session):
    threading.Thread(target=loop, name="engine loop").start()
"""


@pytest.mark.parametrize(("seconds", "named"), [(8, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_a_thread_that_keeps_the_process_alive_is_named(
    project: pytest.Pytester, run_apart: Run, seconds: int, named: bool
) -> None:
    """Threads that end by themselves, such as a pool's, are not named; no thread is stopped."""
    project.makepyfile(left=LEFT_THREAD.format(seconds=seconds))
    result = run_apart(ROOT / "suites/claims/test_tables.py", "--co", "-p", "left", "--emad-model", "emad-nano")
    assert result.ret == 0
    said = [line for line in result.errlines if "engine loop" in line]
    assert len(said) == named
    for line in said:
        assert line.startswith("emad: the run is over, but thread 'engine loop' keeps its process alive, at ")
        assert line.endswith("left.py:3, in loop; end it in the decoder's close(), or make it a daemon thread")
