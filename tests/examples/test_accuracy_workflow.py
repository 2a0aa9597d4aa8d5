"""The GitHub workflow that gates a pull request on accuracy: its steps run in a shell; and the four-bit copy."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import emad_ref
from pytest_emad import cli
from tests.evaluation_folders import write_choice_pair
from tests.examples.conftest import EXAMPLES, ROOT

ACCURACY = EXAMPLES / "accuracy"
WORKFLOW = yaml.safe_load((ACCURACY / "gate.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["compare"]["steps"]
RUNS = {step["name"]: step for step in STEPS if "run" in step}
BASE = "Find or make the evaluation of the base branch"


def run_step(name: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one step as GitHub runs ``shell: bash``; ``emad`` is this checkout's, ``gh`` a stub."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    bodies = {
        "emad": f'PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} -m pytest_emad "$@"',
        "gh": 'if [ "$1 $2" = "run list" ]; then echo "$GH_LAST"; else cp -R "$GH_EVALUATION" base; fi',
    }
    for program, body in bodies.items():
        (programs / program).write_text(f"#!/bin/bash\n{body}\n")
        (programs / program).chmod(0o755)
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", RUNS[name]["run"]],
        cwd=folder,
        env={
            **os.environ,
            **WORKFLOW["env"],
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            "BASE": "main",
            **environment,
        },
        capture_output=True,
        text=True,
    )


def test_actions_are_pinned_and_names_agree() -> None:
    for step in STEPS:
        assert ("run" in step) != ("uses" in step)
        assert "uses" not in step or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), "pinned by hash"
    assert [*RUNS] == ["Install", "Evaluate", BASE, "Compare"]
    assert f"pytest-emad[report,tasks]=={emad_ref.__version__}" in RUNS["Install"]["run"]
    kept = [step["with"] for step in STEPS if step.get("uses", "").startswith("actions/upload-artifact")]
    assert [(each["name"], each["path"]) for each in kept] == [
        ("evaluation", "candidate"),
        ("accuracy", "accuracy.html"),
    ]
    assert "--name evaluation --dir base" in RUNS[BASE]["run"]
    assert f"--workflow {WORKFLOW['name']} " in RUNS[BASE]["run"]


def test_every_option_is_one_that_there_is() -> None:
    words = shlex.split(RUNS["Compare"]["run"].replace("\\\n", " ").partition("|")[0])
    assert words.pop(0) == "emad"
    args = cli.build_parser().parse_args([word.replace("$MARGIN", WORKFLOW["env"]["MARGIN"]) for word in words])
    assert (args.margin, args.inconclusive) == (0.01, "fail")
    text = (ACCURACY / "README.md").read_text(encoding="utf-8")
    assert "`emad accuracy base candidate --largest-drop 1% --inconclusive fail`" in text
    assert len(text.splitlines()) <= 40
    assert "--log_samples" in (ACCURACY / "evaluate.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize(("numbers", "status"), [((2000, 5, 5), 0), ((2000, 100, 5), 1), ((300, 6, 3), 1)])
def test_compare_ends_with_the_verdict_and_writes_the_summary(
    tmp_path: Path, numbers: tuple[int, int, int], status: int
) -> None:
    pytest.importorskip("jinja2", reason="the extra `report` is not installed")
    write_choice_pair(tmp_path, *numbers)
    done = run_step("Compare", tmp_path)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == done.stdout
    assert done.stdout.startswith("### emad accuracy: ")
    assert (tmp_path / "accuracy.html").is_file()


def test_the_base_is_the_last_runs_artifact(tmp_path: Path) -> None:
    base, _ = write_choice_pair(tmp_path / "artifact", 20)
    done = run_step(BASE, tmp_path, GH_LAST="17", GH_EVALUATION=str(base))
    assert (done.returncode, done.stdout) == (0, "evaluation of run 17\n")
    assert list((tmp_path / "base").glob("*/samples_*.jsonl"))


def test_without_an_artifact_the_base_branch_is_evaluated(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "base"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    subprocess.run([*git, "update-ref", "refs/remotes/origin/main", "HEAD"], cwd=tmp_path, check=True)
    script = tmp_path / "evaluate.sh"
    script.write_text('#!/bin/bash\nmkdir "$1" && pwd > "$1/where"\n')
    script.chmod(0o755)
    done = run_step(BASE, tmp_path, GH_LAST="", GH_EVALUATION="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no evaluation of main to be had: evaluated here\n")
    assert (tmp_path / "base" / "where").read_text().strip() == str(tmp_path / "base-tree")


def test_the_copy_has_four_bits_in_its_blocks_and_nothing_else_changed(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    target = tmp_path / "copy"
    script = [sys.executable, ACCURACY / "four_bit_copy.py", "emad-nano", target]
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    before = load_file(emad_ref.weights_folder() / "emad-nano" / "model.safetensors")
    after = load_file(target / "model.safetensors")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if ".layers." in name and before[name].ndim == 2}
    assert done.stdout == f"{target}: {len(changed)} matrices in four bits\n"
    for name in changed:
        blocks = after[name].reshape(-1, 32)
        assert max(len(np.unique(block)) for block in blocks) <= 16
