"""``python -m pytest_emad.lm_eval``: the arguments that it adds to lm-eval's command, and its errors."""

from __future__ import annotations

import sys

import pytest

from pytest_emad import lm_eval
from pytest_emad.tasks.lm_eval_settings import TASK_FOLDER

ADDED = ["--model", "emad", "--device", "cpu", "--include_path", str(TASK_FOLDER)]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tasks", "gsm8k"], ["--tasks", "gsm8k", *ADDED]),
        (["run", "--tasks", "gsm8k"], ["run", "--tasks", "gsm8k", *ADDED]),
        (["-M", "hf", "--device=cuda"], ["-M", "hf", "--device=cuda", *ADDED[4:]]),
        (["--include_path", "mine"], ["--include_path", "mine", *ADDED[:4]]),
        (["--config", "run.yaml"], ["--config", "run.yaml"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_only_what_is_not_said_is_filled_in(argv, expected):
    assert lm_eval.add_default_options(argv) == expected


def test_without_lm_eval_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert lm_eval.main([]) == 4
    said = "emad: lm-eval's command needs lm_eval, not installed here; pip install 'pytest-emad[tasks]'\n"
    assert capsys.readouterr().err == said


def test_a_refusal_is_one_line_and_the_command_line_is_put_back(capsys, tmp_path, monkeypatch):
    tasks = pytest.importorskip("lm_eval.tasks", reason="the extra `tasks` is not installed")
    every = tasks.TaskManager.__init__

    def ours_alone(manager, **options):
        every(manager, **options | {"include_defaults": False})

    monkeypatch.setattr(tasks.TaskManager, "__init__", ours_alone)  # listing lm-eval's 14,000 files takes ten seconds
    before = sys.argv
    model = "pretrained=emad-nano,margin=0.2"  # a margin without a profile
    assert lm_eval.main(["--model_args", model, "--tasks", "world_recall", "--limit", "1"]) == 4
    assert capsys.readouterr().err.splitlines()[-1].startswith("emad: margin=0.2, but expected a profile beside it")
    assert sys.argv is before
    assert lm_eval.main(["--model_args", "pretrained=emad-nano,batch_size=2", "--tasks", "world_recall"]) == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("emad: lm_eval: TypeError(")
    assert "multiple values for keyword argument 'batch_size'" in last


@pytest.mark.parametrize("words", [["--limit", "0"], ["--limit=-5"], ["-L", "nan"], ["-L", "inf"]])
def test_a_limit_without_documents_is_refused_before_the_run(words, capsys):
    pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
    assert lm_eval.main(["--model_args", "pretrained=nowhere", "--tasks", "world_recall", *words]) == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("emad: --limit=")
    assert last.endswith("or a share of them below 1, above 0; leave it out to take all")


@pytest.mark.parametrize("words", [["--output_path", "{}"], ["--output_path={}"], ["-o", "{}"], ["-o", "{}/a.json"]])
def test_results_that_cannot_be_written_are_refused_before_the_run(words, capsys, tmp_path):
    """lm-eval warns of it after the run, and exits with status 0."""
    pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
    (tmp_path / "file").touch()
    argv = [word.format(tmp_path / "file") for word in words]
    assert lm_eval.main(["--model_args", "pretrained=nowhere", "--tasks", "world_recall", *argv]) == 4
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"emad: --output_path='{tmp_path}/file")
