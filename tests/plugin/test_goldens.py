"""Goldens: a missing one reads as None, a damaged one is an error, and an update always reports its changes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_emad.statistics.goldens import (
    SCHEMA,
    VERDICTS,
    DamagedGolden,
    Goldens,
    VerdictConditions,
    load_known_verdicts_from_folders,
    record_verdict,
    verdict_key_fields,
)
from tests.plugin.conftest import Run, report_of


def written(folder: Path, name: str = "tokens/abc", value: object = (1, 2)) -> Goldens:
    folder.mkdir(exist_ok=True)
    goldens = Goldens((folder,), folder)
    goldens.update(name, value, {"seed": 0})
    return goldens


def test_what_is_not_listed_reads_as_none(tmp_path: Path) -> None:
    assert Goldens((tmp_path,)).read("tokens/abc") is None
    assert written(tmp_path).read("tokens/xyz") is None


def test_what_was_written_reads_back(tmp_path: Path) -> None:
    assert written(tmp_path).read("tokens/abc") == [1, 2]
    (entry,) = json.loads((tmp_path / "index.json").read_text())
    assert set(entry) == {"id", "file", "sha256", "provenance"}
    assert entry["provenance"] == {"seed": 0}


def test_ids_that_look_alike_in_file_names_stay_apart(tmp_path: Path) -> None:
    goldens = written(tmp_path, "a/b", 1)
    goldens.update("a b", 2, {})
    assert (goldens.read("a/b"), goldens.read("a b")) == (1, 2)


def test_updates_say_what_they_did(tmp_path: Path) -> None:
    goldens = Goldens((tmp_path,), tmp_path)
    assert [goldens.update("x", value, {}) for value in (1, 1, 2)] == ["added", "unchanged", "changed"]


def test_the_first_folder_that_lists_an_id_answers(tmp_path: Path) -> None:
    written(tmp_path / "own", "x", "own")
    written(tmp_path / "shipped", "x", "shipped")
    written(tmp_path / "shipped", "y", "shipped")
    both = Goldens((tmp_path / "own", tmp_path / "shipped"))
    assert (both.read("x"), both.read("y")) == ("own", "shipped")


@pytest.mark.parametrize("damage", ["missing", "altered", "index", "entry"])
def test_damage_is_an_error(tmp_path: Path, damage: str) -> None:
    goldens = written(tmp_path)
    (file,) = (path for path in tmp_path.iterdir() if path.name != "index.json")
    if damage == "missing":
        file.unlink()
    elif damage == "altered":
        file.write_text("[1, 3]\n")
    else:
        (tmp_path / "index.json").write_text("{" if damage == "index" else '[{"id": "tokens/abc"}]')
    with pytest.raises(DamagedGolden):
        goldens.read("tokens/abc")


@pytest.mark.parametrize(
    "file", ["../secret.json", "/etc/passwd", "a/b.json", "..", "", "index.json", "a\0b", "a" * 999, 3, None]
)
def test_the_index_names_plain_files_of_its_folder_only(tmp_path: Path, file: object) -> None:
    entry = {"id": "tokens/abc", "file": file, "sha256": "0", "provenance": {}}
    (tmp_path / "index.json").write_text(json.dumps([entry]))
    with pytest.raises(DamagedGolden, match=r"index\.json: entry 0: file=.*, but expected"):
        Goldens((tmp_path,)).read("tokens/abc")


@pytest.mark.parametrize("content", ["{}", "3", '[["id", "file", "sha256", "provenance"]]', "[" * 100_000, "9" * 5000])
def test_an_index_that_is_none_is_damage(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(DamagedGolden, match=r"index\.json"):
        Goldens((tmp_path,)).verify_checksums()


KEY = verdict_key_fields("EMAD-F1", "m", "c", VerdictConditions(0, "smoke"))


def test_the_nearest_record_of_a_verdict_counts(tmp_path: Path) -> None:
    for folder, verdict in (("own", "survived"), ("shipped", "falsified")):
        (tmp_path / folder).mkdir()
        record_verdict(tmp_path / folder, KEY, "m", 0, verdict)
    known = load_known_verdicts_from_folders([tmp_path / "own", tmp_path / "shipped"])
    assert known.find_outcome(KEY, 0).outcomes == {"survived"}


def test_seeds_gather_in_one_entry(tmp_path: Path) -> None:
    given = [(0, "survived"), (1, "survived"), (1, "survived"), (2, "survived"), (1, "falsified"), (0, "falsified")]
    changes = [record_verdict(tmp_path, KEY, "m", seed, outcome) for seed, outcome in given]
    assert changes == ["added", "added", "unchanged", "added", "changed", "changed"]
    stored = json.loads((tmp_path / VERDICTS).read_text())
    assert stored["schema"] == SCHEMA
    (entry,) = stored["verdicts"]
    assert entry["seeds"] == {"0": "falsified", "1": "falsified", "2": "survived"}
    assert entry["verdict"] == "seed-dependent"


def test_runs_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    """Three seeds in parallel repeatedly read, change and write the same file."""

    def record(seed: int) -> None:
        for number in range(12):
            record_verdict(tmp_path, KEY | {"claim": f"MY-{number}"}, "m", seed, "survived")

    with ThreadPoolExecutor(3) as runs:
        list(runs.map(record, range(3)))
    entries = load_known_verdicts_from_folders([tmp_path]).entries
    assert len(entries) == 12
    assert {entry["verdict"] for entry in entries} == {"survived"}, "an entry lacks a seed"
    assert [path.name for path in tmp_path.iterdir()] == [VERDICTS]


SUITE = """
from verdicts import verdict
def test_golden(emad_record):
    stored = emad_record.load_golden("tokens/abc", {value})
    assert stored in (None, {value})
    emad_record.record_claim(verdict("survived"), "world:premise")
"""


def update(project: pytest.Pytester, run: Run, value: object) -> pytest.RunResult:
    project.makepyfile(test_it=SUITE.format(value=value))
    (project.path / "goldens").mkdir(exist_ok=True)
    return run("--emad-golden", "goldens", "--emad-update-golden")


def test_an_update_fails_the_run_and_lists_what_changed(project: pytest.Pytester, run: Run) -> None:
    result = update(project, run, [1, 2])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*emad goldens updated*",
            "added: golden tokens/abc",
            "added: verdict EMAD-F1 of emad-tiny, seed 0: survived",
            "*FAILED: goldens updated: read the diff and run again",
            "*1 passed*",
        ]
    )
    assert run("--emad-golden", "goldens", "--emad-gate", "known", "--emad-require", "golden").ret == pytest.ExitCode.OK
    result = update(project, run, [1, 3])
    result.stdout.fnmatch_lines(["changed: golden tokens/abc"])
    assert "verdict EMAD-F1" not in "\n".join(line for line in result.outlines if line.startswith(("added", "changed")))


def test_an_update_that_changes_nothing_passes(project: pytest.Pytester, run: Run) -> None:
    update(project, run, [1, 2])
    assert update(project, run, [1, 2]).ret == pytest.ExitCode.OK


def test_an_update_accepts_a_changed_verdict_but_not_a_falsified_gate(project: pytest.Pytester, run: Run) -> None:
    update(project, run, [1, 2])
    project.makepyfile(test_it=SUITE.format(value=[1, 2]).replace("survived", "falsified"))
    run("--emad-golden", "goldens", "--emad-update-golden").assert_outcomes(failed=1)
    run("--emad-golden", "goldens", "--emad-gate", "known").assert_outcomes(passed=1)


def test_a_verdict_on_time_never_goes_on_record(project: pytest.Pytester, run: Run) -> None:
    """It depends on the machine: on record, it would fail on every other one."""
    project.makepyfile(test_it=SUITE.format(value=[1, 2]).replace('"survived"', '"survived", claim="EMAD-F2"'))
    (project.path / "goldens").mkdir()
    run("--emad-golden", "goldens", "--emad-update-golden").stdout.fnmatch_lines(["added: golden tokens/abc"])
    assert not (project.path / "goldens" / "verdicts.json").exists()


def test_no_golden_recorded_is_not_a_failure_unless_required(project: pytest.Pytester, run: Run) -> None:
    project.makepyfile("def test(emad_record): assert emad_record.load_golden('never/recorded', [1]) is None")
    assert run("--emad-report", "out").ret == pytest.ExitCode.OK
    assert report_of(project.path / "out")["goldens"] == [{"id": "never/recorded", "outcome": "absent"}]
    result = run("--emad-require", "golden")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no golden recorded for never/recorded*"])


def test_a_damaged_golden_ends_the_run(project: pytest.Pytester, run: Run) -> None:
    update(project, run, [1, 2])
    for path in (project.path / "goldens").glob("tokens*"):
        path.unlink()
    result = run("--emad-golden", "goldens")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*golden 'tokens/abc' is listed in*is missing; restore it*"])
