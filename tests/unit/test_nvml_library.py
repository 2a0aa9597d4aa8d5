"""The energy meter through the real nvidia-ml-py, against a compiled stand-in for NVIDIA's library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "standins" / "nvml.c"
BOARD = "GPU-11111111-2222-3333-4444-555555555555"

MEASURE = """
import json, os, sys, time
import numpy as np
from emad_ref.absent import Absent
from pytest_emad.benchmark import energy

def arm(pair, request):
    time.sleep(0.005)
    return 1

results = {}
for faults in json.loads(sys.argv[1]):
    os.environ["STANDIN_FAULTS"] = faults
    with energy.open_nvml_counter(sys.argv[2]) as counter:
        name = getattr(counter, "device", "")
        taken = energy.measure_energy_pairs({"full": arm, "early": arm}, 1, np.random.default_rng(0), counter,
                              min_seconds=0.12, spare=0)
        idle = counter if isinstance(counter, Absent) else energy.measure_idle_watts(counter, seconds=0.12)
    if isinstance(taken, Absent):
        results[faults] = {"device": name, "reason": taken.reason}
    else:
        watts = [float((taken.joules[each] / taken.seconds[each])[0]) for each in taken.joules]
        results[faults] = {"device": name, "watts": watts, "source": taken.source, "caveats": taken.caveats,
                           "idle": idle if isinstance(idle, float) else idle.reason,
                           "celsius": getattr(taken.temperature_c, "reason", taken.temperature_c)}
print(json.dumps(results))
"""

# fault → words of the reason; None: a measurement of 250 W
FAULTS: dict[str, str | None] = {
    "": None,
    "name-latin1": None,
    "name-control": None,
    "name-unknown": None,
    "shutdown-fails": None,
    "mig-unsupported": None,
    "no-processes": None,
    "in-container": None,
    "no-counter": None,
    "slices": "MIG is enabled on this board",
    "version-mismatch": "driver and its library differ in version",
    "version-mismatch bad-error-text": "driver and its library differ in version",
    "init-unknown": "NVML error 999",
    "no-counter no-power": "not supported by this device",
    "energy-forbidden": "no permission to read the device",
    "device-lost": "the device was lost",
    "no-temperature": None,
    "counter-stands": "the energy counter stood still",
    "counter-resets": "the energy counter went back",
    "throttled": "hardware thermal slowdown",
    "desktop": "other processes on the device: 77",
}


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process that loads the stand-in as ``libnvidia-ml.so.1``."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py, which the extra gpu installs")
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux, where nvidia-ml-py loads libnvidia-ml.so.1 by name")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def results(standin: dict[str, str]) -> dict[str, dict[str, object]]:
    command = [sys.executable, "-c", MEASURE, json.dumps(list(FAULTS)), BOARD]
    done = subprocess.run(command, env=standin, capture_output=True, text=True, check=True)
    loaded: dict[str, dict[str, object]] = json.loads(done.stdout)
    return loaded


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_a_measurement_or_a_reason(results, fault):
    result, reason = results[fault], FAULTS[fault]
    if reason is None:
        assert result.get("reason") is None
        assert result["watts"] == pytest.approx([250.0, 250.0], rel=0.1)
        assert result["idle"] == pytest.approx(250.0, rel=0.1), "the stand-in never rests"
    else:
        assert reason in result["reason"]


def test_the_temperature_is_on_record_or_its_absence(results):
    before, after = results[""]["celsius"]
    assert after == before + 1, "the stand-in is warmer at each reading"
    assert results["no-temperature"]["celsius"] == "nvmlDeviceGetTemperature: not supported by this device"


def test_a_name_that_is_not_utf8_is_said_and_costs_no_measurement(results):
    assert results["name-latin1"]["device"].startswith("GPU whose name cannot be read (nvmlDeviceGetName: Unicode")


def test_a_device_that_lists_no_process_leaves_sharing_open(results):
    assert "sharing cannot be ruled out" in results["no-processes"]["caveats"][0]


def test_a_driver_version_that_is_not_utf8_leaves_the_other_facts(standin):
    code = (
        f"import json; from pytest_emad.benchmark.machine import _nvml_facts; print(json.dumps(_nvml_facts({BOARD!r})))"
    )
    environment = standin | {"STANDIN_FAULTS": "driver-latin1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["driver"].startswith("unread: 'utf-8' codec")
    assert (facts["power limit, W"], facts["SM clock, MHz"]) == (300.0, 1400.0)


def test_the_older_package_of_that_name_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "pynvml").mkdir()
    (tmp_path / "pynvml" / "__init__.py").write_text("def nvmlInit(): raise SystemExit('must not be called')\n")
    code = "from pytest_emad.benchmark import energy\nwith energy.open_nvml_counter('aaaa') as it: print(it.reason)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "the deprecated package pynvml, but nvidia-ml-py is expected; pip uninstall pynvml" in done.stdout


@pytest.mark.parametrize(
    ("source", "reason"),
    [("raise ValueError('half installed')", "cannot be imported: ValueError: half installed"),
     ("def nvmlInit(): raise OSError('ctypes')", "nvmlInit: OSError: ctypes")],
)  # fmt: skip
def test_bindings_that_fail_in_ways_of_their_own_become_a_reason(tmp_path, source, reason):
    (tmp_path / "pynvml.py").write_text(source + "\n")
    code = "from pytest_emad.benchmark import energy\nwith energy.open_nvml_counter('aaaa') as it: print(it.reason)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert reason in done.stdout


# The decoder here uses the stand-in's device; windows are short, so that thirty pairs take seconds.
PLUGIN = """
from functools import partial

from pytest_emad.claims import energy

energy.find_device_uuid = lambda device: {board!r}
energy.measure_energy_pairs = partial(energy.measure_energy_pairs, min_seconds=0.1)
energy.measure_idle_watts = partial(energy.measure_idle_watts, seconds=0.1)
energy.SMOKE_PAIRS = 30
"""


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "reason"), [("", None), ("device-lost", "the device was lost")])
def test_energy_per_token_is_judged_end_to_end(standin, tmp_path, faults, reason):
    (tmp_path / "standin_device.py").write_text(PLUGIN.format(board=BOARD))
    search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = ["-m", "pytest", "-p", "standin_device", "suites/cost/test_claims.py", "--emad-only", "EMAD-N1"]
    options = ["--emad-model", "emad-nano", "--emad-report", str(tmp_path / "report"), "-p", "no:cacheprovider"]
    environment = standin | {"PYTHONPATH": search, "STANDIN_FAULTS": faults}
    checkout = Path(__file__).parents[2]
    command = [sys.executable, *run, *options]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    (claim,) = report["claims"]
    assert "1 passed" in done.stdout, done.stdout[-2000:]
    assert done.returncode == 0, done.stdout[-2000:]
    if reason is None:
        assert claim["verdict"] in ("survived", "falsified", "inconclusive")
        assert claim["estimate"] > 0
        assert claim["n"] == 30
        (table,) = (table for table in report["tables"] if table["title"].startswith("Energy of requests"))
        assert [(row["batch"], row["arm"]) for row in table["rows"]] == [
            (rows, arm) for rows in (1, 4) for arm in ("full", "adaptive")
        ]
        for row in table["rows"]:
            assert row["idle, W"] == pytest.approx(250, rel=0.1)
            assert row["after, °C"] > row["before, °C"]
            assert 0 < row["J per input or output token"] < row["J per output token"]
    else:
        assert claim["verdict"] == "unmeasured"
        assert reason in claim["reason"]
