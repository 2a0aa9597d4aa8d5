"""One unit of judging: it runs once, is stored with its arguments, and runs again if either changes or is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from emad_ref.workers import child_process
from pytest_emad.report.suite_parts import DECIDED_STATUSES, DONE_FILE, LOG_FILE, SuitePart, model_folder_name
from tests.unit.report.sample_report import report_2, written


class Runs:
    """Replaces processes: each run writes a report and exits with the next of ``statuses``, or is killed."""

    def __init__(self, *statuses: int | None):
        self.left, self.made = list(statuses), 0

    def __call__(self, module: str, words: tuple[str, ...], log: Path, *, folder: Path) -> int:
        assert (module, words, log.name, folder) == ("pytest", ("suites",), LOG_FILE, Path("start"))
        self.made += 1
        written(log.parent, report_2())
        status = self.left.pop(0)
        if status is None:
            raise KeyboardInterrupt
        return status


def unit(folder: Path, budget: str = "smoke") -> SuitePart:
    return SuitePart("m", "claims", False, ("suites",), folder / "m" / "claims", Path("start"), {"budget": budget})


@pytest.mark.parametrize("status", DECIDED_STATUSES)
def test_what_reached_its_verdicts_is_not_run_again(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "run_module_for_status", runs := Runs(status))
    assert unit(tmp_path).earlier_exit_status() is None
    assert [unit(tmp_path).run_or_reuse(), unit(tmp_path).run_or_reuse(), unit(tmp_path).earlier_exit_status()] == [
        status
    ] * 3
    assert runs.made == 1


def test_what_did_not_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "run_module_for_status", Runs(4, 0))
    assert [unit(tmp_path).run_or_reuse(), unit(tmp_path).run_or_reuse()] == [4, 0]


def test_what_was_asked_otherwise_or_lost_its_report_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "run_module_for_status", runs := Runs(0, 1, 0))
    assert unit(tmp_path).run_or_reuse() == 0
    assert unit(tmp_path, "full").earlier_exit_status() is None
    assert unit(tmp_path, "full").run_or_reuse() == 1
    (tmp_path / "m" / "claims" / "report.json").unlink()
    assert unit(tmp_path, "full").run_or_reuse() == 0
    assert runs.made == 3


def test_what_was_done_and_is_killed_when_it_is_run_again_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a new report, but of a run that never ended."""
    monkeypatch.setattr(child_process, "run_module_for_status", Runs(0, None))
    unit(tmp_path).run_or_reuse()
    (tmp_path / "m" / "claims" / "report.json").write_text("{")
    with pytest.raises(KeyboardInterrupt):
        unit(tmp_path).run_or_reuse()
    assert not (tmp_path / "m" / "claims" / DONE_FILE).exists()
    assert unit(tmp_path).earlier_exit_status() is None


def test_names_of_models_are_folders() -> None:
    assert [model_folder_name(name) for name in ("emad-tiny", "EleutherAI/pythia-410m@main", "./x", "…")] == [
        "emad-tiny", "EleutherAI-pythia-410m-main", "x", "model",
    ]  # fmt: skip
