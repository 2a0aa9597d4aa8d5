"""Judging all bundled models in one command: it records verdicts seed by seed, then compares them with the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from emad_ref.models.bundled import bundled_model_names
from pytest_emad.run import rejudge
from pytest_emad.statistics.goldens import load_known_verdicts_from_folders

SUITE = """
import pytest
from pytest_emad.statistics.verdicts import Verdict

@pytest.mark.emad(claim="EMAD-E13")
def test_it(emad_record, emad_settings, pytestconfig):
    (model,), seed = emad_settings.models, emad_settings.study.seed
    outcome = (pytestconfig.rootpath / "outcome.txt").read_text().split()[seed]
    emad_record.record_claim(Verdict("EMAD-E13", model, outcome, 1.0, None, 1, 1.0, "1 = tied", False, ""), "text")

@pytest.mark.emad(claim="EMAD-F2", measures=True)
def test_timed():
    raise AssertionError("a row on time was run")
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command in a new folder with one suite, whose verdict with seed n is the n-th word of a file."""
    for name in (*rejudge.JUDGED_FOLDERS, "golden"):
        (tmp_path / ("golden" if name == "golden" else f"suites/{name}")).mkdir(parents=True)
    (tmp_path / "suites/claims/test_stub.py").write_text(SUITE)
    for file in rejudge.PAIR_SUITES:
        (tmp_path / "suites" / file).write_text(SUITE.replace('"text"', '"text of a pair"'))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    monkeypatch.chdir(tmp_path)

    def run(*more: str, outcomes: str = "survived survived survived") -> int:
        (tmp_path / "outcome.txt").write_text(outcomes)
        return rejudge.main([*more, "--out", str(tmp_path / "out")])

    return run


def entries(folder: Path) -> dict[str, str]:
    return {
        entry["corpus"]: entry["verdict"] for entry in load_known_verdicts_from_folders([folder / "golden"]).entries
    }


def test_three_seeds_are_recorded_and_then_hold(asked, tmp_path, capsys) -> None:
    model = "emad-t5-tiny"
    assert asked(model, "pair", "--update", "--seeds", "0") == 0
    assert entries(tmp_path) == {"text": "unsettled", "text of a pair": "unsettled"}
    assert asked(model, "pair", "--update", "--seeds", "1", "2") == 0
    assert entries(tmp_path) == {"text": "survived", "text of a pair": "survived"}
    capsys.readouterr()
    assert asked(model, "--seeds", "0", "7", outcomes="survived " * 8) == 0
    assert capsys.readouterr().out.splitlines() == [f"{model}-seed-{seed}: as recorded" for seed in (0, 7)]
    assert asked(model, "--seeds", "1", outcomes="survived falsified survived") == 1
    assert f"{model}-seed-1: 1 failed, see" in capsys.readouterr().out  # the files of the first time are replaced


def test_a_run_that_cannot_be_made_is_status_four(asked, tmp_path, capsys) -> None:
    (tmp_path / "suites/claims/test_stub.py").write_text("def test_it(: pass")
    assert asked("emad-t5-tiny", "--seeds", "0") == 4
    assert "emad-t5-tiny-seed-0: status 2, see" in capsys.readouterr().out


def test_a_test_that_fails_is_seen_in_an_update_too(asked, tmp_path, capsys) -> None:
    (tmp_path / "suites/cost/test_more.py").write_text("def test_more(): assert False")
    assert asked("emad-t5-tiny", "--update", "--seeds", "0") == 1
    assert "1 failed" in capsys.readouterr().out


def test_every_bundled_model_and_the_pair_are_asked_on_every_text() -> None:
    names = [run.name for run in rejudge.plan_runs((*bundled_model_names(), rejudge.PAIR), (0, 1))]
    assert len(names) == len(set(names))
    for model in bundled_model_names():
        texts = [""] if model.startswith("emad-t5") else ["-world-premise", "-world-mixed"]
        assert {f"{model}{text}-seed-{seed}" for text in texts for seed in (0, 1)} <= set(names)
    assert {"pair-seed-0", "pair-seed-1"} <= set(names)


def test_a_downloaded_model_is_judged_on_natural_text_without_slow_claims(tmp_path: Path) -> None:
    model = "smollm2-135m"
    chosen = rejudge.build_argument_parser().parse_args([model, "--data", "texts", "--out", str(tmp_path)])
    runs = list(rejudge.plan_runs(chosen.models, (0,)))
    assert [run.name for run in runs] == [f"{model}-gsm8k-seed-0", f"{model}-wikitext-seed-0"]
    words = rejudge.pytest_arguments(runs[0], chosen)
    assert "--emad-all-claims" not in words
    assert {"--emad-data=texts", "--emad-corpus=gsm8k"} <= set(words)
    assert "--emad-all-claims" in rejudge.pytest_arguments(rejudge.RejudgeRun("emad-tiny", "world:mixed", 0), chosen)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["emad-huge"], "MODEL='emad-huge'"),
        (["--suites", "no"], "no is no folder"),
        (["smollm2-135m"], "--data is missing"),
    ],
)
def test_what_is_not_there_is_refused(asked, capsys, more: list[str], said: str) -> None:
    with pytest.raises(SystemExit):
        asked(*more)
    assert said in capsys.readouterr().err


def test_a_file_of_another_kind_is_not_replaced(asked, tmp_path: Path, capsys) -> None:
    file = tmp_path / "out" / "emad-t5-tiny-seed-0.xml"
    file.parent.mkdir()
    file.write_text("<notes/>")
    with pytest.raises(SystemExit):
        asked("emad-t5-tiny")
    assert "expected a new file, or a run's tests as JUnit to replace" in capsys.readouterr().err
    assert file.read_text() == "<notes/>"
