"""Subprocesses use the same decoder from any provider; a provider that cannot reach another process is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.plugin.conftest import Run

TASKS = """
import os
import time
from dataclasses import dataclass
from types import SimpleNamespace

@dataclass
class Asking:
    "Who makes decoders where it is carried out, and where that is; or what else a process may come to."
    then: str = "answer"

    def __call__(self, host):
        if self.then == "raise":
            raise RuntimeError("out of beans")
        if self.then == "hang":
            print("a decoder that never answers", flush=True)
            time.sleep(600)
        point = SimpleNamespace(is_full_depth=True)
        decoder = host.make_decoder(SimpleNamespace(point=point, temperature=0.0))
        return decoder, os.getpid()
"""
PROVIDES = """
import os
if "NOT_HERE" not in os.environ:
    def pytest_emad_make_decoder(config, request):
        return config.getoption("--seen") + " by the conftest"

def pytest_addoption(parser):
    parser.addoption("--seen", default="nothing")
"""
ASKS = """
import os
import pytest
from pytest_emad.measurements.process_replicates import SubprocessFailed, run_in_subprocess
from tasks import Asking

def test_the_same_decoder(emad_host, emad_settings):
    report = lambda: {path: path.read_bytes() for path in emad_settings.report.iterdir() if path.is_file()}
    before = report()
    decoder, process = run_in_subprocess(emad_host.runner, Asking(), 1.0)
    assert before
    assert report() == before
    assert decoder == "an option seen by the conftest"
    assert process != os.getpid()

def test_failure(emad_host):
    with pytest.raises(SubprocessFailed, match="ended with status 1.*RuntimeError: out of beans"):
        run_in_subprocess(emad_host.runner, Asking("raise"), 1.0)

def test_another_decoder(emad_host, monkeypatch):
    monkeypatch.setenv("NOT_HERE", "1")
    with pytest.raises(SubprocessFailed, match="this process has the providers emad-walked, but the run .*conftest.py"):
        run_in_subprocess(emad_host.runner, Asking(), 1.0)
"""


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.parametrize(
    ("chosen", "passed", "kept"),
    [
        ("same_decoder", 1, 0),
        # Failures stay in CI in tests/unit/measurements/test_process_replicates.py.
        pytest.param("test", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_process_is_started_as_the_run_was(
    project: pytest.Pytester, run_apart: Run, tmp_path: Path, chosen: str, passed: int, kept: int
) -> None:
    """It has the run's conftest and options, writes no report, and keeps only its failure."""
    project.makeconftest(PROVIDES)
    project.makepyfile(ASKS, tasks=TASKS)
    options = ("--seen", "an option seen", "--emad-report", "out", "--junitxml", "junit.xml")
    run_apart(*options, "-k", chosen).assert_outcomes(passed=passed, deselected=3 - passed)
    assert len(list(tmp_path.glob("emad-afresh-*/output"))) == kept


HANGS = """
import pytest
from pytest_emad.measurements.process_replicates import SubprocessFailed, run_in_subprocess
from tasks import Asking

def test_one_that_hangs(emad_host):
    with pytest.raises(SubprocessFailed, match=r"ended after 25 s: 20 s .* time.sleep\\(600\\) / KeyboardInterrupt;"):
        run_in_subprocess(emad_host.runner, Asking("hang"), 0.5)
"""


@pytest.mark.slow  # a wait longer than the start of a process
def test_a_process_that_hangs_is_ended_and_says_where_it_was(
    project: pytest.Pytester, run_apart: Run, tmp_path: Path
) -> None:
    project.makepyfile(HANGS, tasks=TASKS)
    run_apart("--emad-process-timeout", 20).assert_outcomes(passed=1)
    (kept,) = tmp_path.glob("emad-afresh-*/output")
    assert "a decoder that never answers" in kept.read_text()


# ------------------------------------------------------------ no subprocess


WITHOUT = "def test(emad_host): assert {} in emad_host.runner.start.reason"


def test_plugins_that_are_objects_reach_no_other_process(project: pytest.Pytester, run: Run) -> None:
    """Such as pytester's own plugins."""
    project.makepyfile(WITHOUT.format("'with plugin objects'"))
    run().assert_outcomes(passed=1)


def test_a_decoder_behind_a_port_is_one_process(project: pytest.Pytester, run: Run) -> None:
    """Every process would start the program anew; here the run's own plugins prevent it."""
    for address, why in (("tcp:127.0.0.1:9", "is one running process"), (f"exec:{sys.executable}", "plugin objects")):
        project.makepyfile(WITHOUT.format(repr(why)))
        run("--emad-decoder", address).assert_outcomes(passed=1)


@pytest.mark.slow  # two processes more
def test_a_worker_of_xdist_starts_no_process(project: pytest.Pytester, run_apart: Run) -> None:
    project.makepyfile(WITHOUT.format("'xdist'"))
    run_apart("-n", 1).assert_outcomes(passed=1)


def test_a_provider_that_is_found_at_collection_is_found_by_no_start(project: pytest.Pytester, run_apart: Run) -> None:
    """The reference decoder, timed instead, would pass for it."""
    folder = project.mkpydir("judged")
    (folder / "conftest.py").write_text("def pytest_emad_make_decoder(config, request): pass")
    (folder / "test_it.py").write_text(WITHOUT.format("'loaded during collection'"))
    run_apart().assert_outcomes(passed=1)


# ------------------------------------------------------------ a race


RACES = """
from dataclasses import replace
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.study import BUDGETS
from pytest_emad.measurements.model_under_test import open_model
from emad_ref.point import OperatingPoint

BUDGET = replace(BUDGETS["smoke"], pairs=4, processes=2, batch_sizes=(1,), prompt_tokens=8, new_tokens=3)

def test_race(emad_host, emad_settings):
    study = replace(emad_settings.study, budget=BUDGET, corpus="world:premise")
    with open_model("emad-nano", study) as loaded:
        stopwatch = ModelMeasurements(loaded, study, emad_host).latency
        layers = loaded.stepper.layers
        point = OperatingPoint("fixed", "fixed_entropy", layers, layers, (2,), ((1.0,),))
        timed = stopwatch.time_point_by_batch_size(point)[1]
        assert stopwatch.check_point_outputs(timed, point).passed is True
        assert timed.process.tolist() == [0, 0, 1, 1]
        assert "4 pairs in 2 fresh processes of 2 pairs each" in stopwatch.format_timing_note(point, 1.1, 4)
"""
COUNTS = """
import os
from pathlib import Path
from emad_ref import WalkedDecoder

class Counting(WalkedDecoder):
    "Ours, and a line for every process in which it decodes."
    def generate(self, *asked):
        with open(Path(__file__).parent / "decoded", "a") as file:
            print(os.getpid(), file=file)
        return super().generate(*asked)

def pytest_emad_make_decoder(config, request):
    return Counting(request.model.load().stepper, request.point, max_rows=request.max_rows)
"""


@pytest.mark.slow  # loads torch and a model three times
def test_a_decoder_of_a_conftest_is_the_one_that_is_timed(project: pytest.Pytester, run_apart: Run) -> None:
    project.makeconftest(COUNTS)
    project.makepyfile(RACES)
    run_apart().assert_outcomes(passed=1)
    assert len(set((project.path / "decoded").read_text().split())) == 3
