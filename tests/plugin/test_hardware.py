"""``python -m pytest_emad.hardware`` on an unknown machine: it records each measurement at once and each failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emad_ref.errors import EmadError
from emad_ref.files import require_replaceable_file
from emad_ref.models.fast.graph_capture import GraphCaptureWarning
from emad_ref.protocol import Unsupported
from emad_ref.workers import child_process
from pytest_emad import hardware
from pytest_emad.benchmark import machine
from pytest_emad.measurements.hardware import (
    CHECKED,
    TIMED,
    compare_cached_steps,
    compare_captured_steps,
    measure_relative_weight_bandwidth,
)
from tests.cpu_graphs import TapeEngine, capturing


@pytest.fixture
def chosen(tmp_path: Path) -> Any:
    return hardware.build_argument_parser().parse_args(["emad-nano", "--out", str(tmp_path), "--device", "cpu"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_copy_bandwidth", lambda device: 1e9)


def given(*found: Any) -> Any:
    """Return steps with these results or exceptions."""

    def step(number: int, value: Any) -> hardware.MachineMeasurement:
        def measure(left: float) -> dict[str, Any]:
            if isinstance(value, Exception):
                raise value
            return value

        return hardware.MachineMeasurement("cost", f"model-{number}", "float32", measure)

    return lambda chosen: (step(number, value) for number, value in enumerate(found))


def test_each_step_is_on_record_before_the_next_begins(chosen, tmp_path, monkeypatch):
    seen: list[list[str]] = []

    def looking(left: float) -> dict[str, Any]:
        seen.append([*json.loads((tmp_path / "record.json").read_text())])
        return {}

    said = {"a": lambda left: {"x": 1}, "b": looking}
    steps = [hardware.MachineMeasurement("cost", name, "float32", measure) for name, measure in said.items()]
    monkeypatch.setattr(hardware, "plan_machine_measurements", lambda chosen: iter(steps))
    hardware.run_and_record_measurements(chosen)
    assert seen == [["machine", "cost a float32"]]
    assert json.loads((tmp_path / "record.json").read_text())["cost a float32"]["x"] == 1
    require_replaceable_file(tmp_path / "record.json", "--out", "a record", hardware.RECORD_START)


def test_a_step_that_is_refused_takes_no_other_down(chosen, monkeypatch):
    monkeypatch.setattr(
        hardware, "plan_machine_measurements", given(EmadError("no such kernel here"), {"exit status": 0})
    )
    record = hardware.run_and_record_measurements(chosen)
    assert record["cost model-0 float32"]["reason"] == "no such kernel here"
    assert record["cost model-1 float32"]["status"] == "done"
    assert hardware.failed_steps(record) == ["cost model-0 float32"]


def test_what_does_not_apply_to_a_device_is_on_record_and_no_failure(chosen):
    chosen.models, chosen.dtypes, chosen.steps = ["emad-nano"], ["float32"], ["graphs"]
    record = hardware.run_and_record_measurements(chosen)
    found = record["graphs emad-nano float32"]
    assert (found["status"], found["reason"]) == (
        "not applicable",
        "no step of emad-nano is captured on cpu: it runs by fast",
    )
    assert hardware.failed_steps(record) == []


def test_a_suite_run_is_not_begun_where_no_time_is_left(chosen, monkeypatch):
    monkeypatch.setattr(hardware, "plan_machine_measurements", given({}, {}))
    now = iter([0.0, 1.0, 2.0, 475.0, 476.0])  # of eight minutes; the second suite run would have five seconds
    record = hardware.run_and_record_measurements(chosen, clock=lambda: next(now))
    assert record["cost model-0 float32"]["status"] == "done"
    assert record["cost model-1 float32"]["status"] == "not begun"
    assert hardware.failed_steps(record) == ["cost model-1 float32"]


def test_a_run_that_takes_too_long_is_ended_and_says_so(chosen, monkeypatch):
    def endless(module: str, words: list[str], log: Path, seconds: float) -> Any:
        raise subprocess.TimeoutExpired([module, *words], seconds)

    monkeypatch.setattr(child_process, "run_module_for_status", endless)
    found = hardware.run_suite_to_summary("cost", "emad-nano", "float32", chosen, 100.0)
    assert (found["status"], found["reason"]) == ("ended", "not done after 50 s")
    assert "cannot be read" in found["report"]


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        ({"status": "done"}, False),
        ({"status": "done", "exit status": 0}, False),
        ({"status": "done", "exit status": 1}, True),
        ({"status": "done", "largest difference": 0.1, "bound": 0.2}, False),
        ({"status": "done", "largest difference": 0.3, "bound": 0.2}, True),
        ({"status": "ended"}, True),
        ({"status": "not applicable", "reason": "no engine"}, False),
    ],
)
def test_what_is_no_good_end(found: dict[str, Any], bad: bool):
    assert hardware.failed_steps({"machine": {}, "step": found}) == ["step"] * bad


def test_a_suite_run_is_asked_for_in_words_that_pytest_does_not_take_for_paths(chosen, tmp_path):
    asked = hardware.build_suite_command("cost", "random:pythia-410m", "bfloat16", chosen, tmp_path)
    assert [word for word in asked if word.startswith(str(tmp_path))] == []
    assert f"--emad-report={tmp_path}" in asked
    assert "--emad-only=EMAD-F2,EMAD-N1" in asked
    assert "--emad-only=EMAD-F2,EMAD-N1" not in hardware.build_suite_command(
        "decoders", "m", "float32", chosen, tmp_path
    )


def test_differences_are_measured_beside_their_bound():
    found = compare_cached_steps("emad-nano", "float32", "cpu")
    assert 0 < found["largest difference"] <= found["bound"]
    assert found["layers"] == 4


def test_a_token_reads_all_weights_but_the_embedding():
    found = measure_relative_weight_bandwidth("emad-nano", "float32", "cpu")
    from emad_ref.models.loading import load

    model = load("emad-nano").model
    untied = model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight.numel() if untied else 0
    assert found["bytes a token"] == 4 * (sum(each.numel() for each in model.parameters()) - embedding)
    assert found["share of bandwidth"] == pytest.approx(found["bytes/s"] / 1e9)


def test_captured_steps_are_held_against_eager_ones_and_timed_beside_them(monkeypatch):
    engines = capturing(monkeypatch)
    found = compare_captured_steps("emad-nano", "float32", "cpu")
    assert 0 < found["largest difference"] <= found["bound"]
    assert found["backend"] == "fast, captured graphs"
    assert len(engines) == 1, "the other is eager"
    assert engines[0].replays > TIMED
    for name in ("eager", "generate"):
        value, low, high = found[f"captured against {name}"]
        assert low < value < high
        assert found[f"{name}, seconds a token"] > 0


def test_captures_that_are_given_up_are_not_timed_as_captured_ones(monkeypatch):
    capturing(monkeypatch)
    capture = TapeEngine.capture

    def tires(engine: TapeEngine, function: Any) -> Any:
        engine.refuses = "no memory" if engine.replays > 1.5 * CHECKED else ""  # a step and a readout for most tokens
        return capture(engine, function)

    monkeypatch.setattr(TapeEngine, "capture", tires)
    with pytest.warns(GraphCaptureWarning), pytest.raises(Unsupported, match=r"given up on cpu: .* no memory"):
        compare_captured_steps("emad-nano", "float32", "cpu")


def test_without_the_device_it_says_so_at_once(tmp_path, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        hardware.main(["emad-nano", "--out", str(tmp_path)])
    assert "--device=cuda, but torch sees no CUDA device" in capsys.readouterr().err


def test_a_file_of_another_kind_is_not_replaced(tmp_path, capsys):
    (tmp_path / "record.json").write_text('{"mine": 1}')
    with pytest.raises(SystemExit):
        hardware.main(["emad-nano", "--device", "cpu", "--out", str(tmp_path)])
    assert "record.json', but expected a new file, or a record of this command to replace" in capsys.readouterr().err
    assert (tmp_path / "record.json").read_text() == '{"mine": 1}'


# ---------------------------------------------------------------- the machine


def test_copies_are_counted_read_and_written(monkeypatch):
    monkeypatch.undo()
    ticks = iter(range(10_000))
    assert machine.measure_copy_bandwidth("cpu", size=500, clock=lambda: next(ticks) / 10) == pytest.approx(
        2 * 500 / 0.1
    )


def test_a_board_is_read_as_far_as_it_answers(monkeypatch):
    class NVMLError(Exception):
        pass

    def refuses(handle: str, kind: int) -> int:
        raise NVMLError("Not Supported")

    board = SimpleNamespace(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlSystemGetDriverVersion=lambda: b"570.1",
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetMaxClockInfo=refuses, nvmlDeviceGetTemperature=lambda handle, kind: 41,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", board)
    said = machine._nvml_facts("GPU-1")
    assert (said["driver"], said["power limit, W"], said["memory clock, MHz"]) == ("570.1", 700.0, 3201.0)
    assert said["largest SM clock, MHz"] == "unread: Not Supported"


def test_a_board_that_cannot_be_opened_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "the package nvidia-ml-py is not installed" in machine._nvml_facts("GPU-1")["driver"]
