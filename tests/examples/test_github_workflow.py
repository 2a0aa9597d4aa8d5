"""The GitHub workflow that gates a decoder: every step runs in a shell, in a repository with a base branch.

``gh``, expressions and actions are replaced by stubs; the actions only check out and store files. A stub of ``pip``
copies the decoder with its entry point to a folder on Python's path, as an installation would.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import emad_ref
from pytest_emad import cli
from pytest_emad.report.deselection import list_shipped_tests
from pytest_emad.report.schema import read_report
from pytest_emad.run.option_table import OPTIONS
from tests.examples.conftest import EXAMPLES, ROOT
from tests.unit.report.sample_report import foreign_report, passed, verdict, written
from tests.unit.report.test_verification import audit

GITHUB, PLUGIN = EXAMPLES / "github", EXAMPLES / "plugin"
PAGE = ROOT / "docs" / "gate-pull-request.md"
WORKFLOW = yaml.safe_load((GITHUB / "gate.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["judge"]["steps"]
RUNS = {step["name"]: step for step in STEPS if "run" in step}
ARGUMENTS = (GITHUB / "emad.args").read_text(encoding="utf-8").splitlines()
CONDITIONS = {"${{ !cancelled() }}", "${{ !cancelled() && github.event_name == 'pull_request' }}"}
VALUES = {"${{ github.token }}": "none", "${{ github.base_ref }}": "main"}

PIP = """
import pathlib, shutil, sys, tomllib
here = pathlib.Path(sys.argv[1])
words = sys.argv[2:]
assert words.pop(0) == "install", words
if "-c" in words:
    assert pathlib.Path(words.pop(words.index("-c") + 1)).is_file()
for source in (pathlib.Path(word) for word in words if word.startswith(".")):
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    installed = here / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    installed.mkdir(parents=True)
    points = [f"{name} = {module}" for name, module in project["entry-points"]["pytest11"].items()]
    (installed / "entry_points.txt").write_text("\\n".join(["[pytest11]", *points]))
    named = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    (installed / "METADATA").write_text("\\n".join(named))
    shutil.copy(source / "plain_decoder.py", here / "site")
"""
# An environment: {bin}/pip fills {bin}/site, and every program in {bin} imports from there.
PROGRAMS = {
    "pip": 'exec {python} -c "$PIP" "$here" "$@"',
    "python": 'if [ "$1 $2" = "-m venv" ]; then shift 2; for last; do :; done; mkdir -p "$last"; '
    'cp -R "$here" "$last/bin"; rm -rf "$last/bin/site"; exit; fi; exec {python} "$@"',
    "pytest": 'exec {python} -m pytest "$@"',
    "emad": 'exec {python} -m pytest_emad "$@"',
    "gh": 'if [ "$1 $2" = "run list" ]; then echo "$GH_LAST"; [ -n "$GH_LAST" ]; else cp -R "$GH_REPORT" base; fi',
}


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


class Runner:
    """A checkout of a pull request with its base branch, and a shell to run steps in."""

    def __init__(self, folder: Path):
        self.home, self.bin, self.summary = folder / "checkout", folder / "bin", folder / "summary.md"
        self.bin.mkdir()
        for name, body in PROGRAMS.items():
            lines = ["#!/bin/bash", 'here=$(cd "$(dirname "$0")" && pwd)', f'export PYTHONPATH="$here/site:{ROOT}"']
            program = self.bin / name
            program.write_text("\n".join([*lines, body.format(python=shlex.quote(sys.executable)), ""]))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        shutil.copytree(PLUGIN, self.home, ignore=shutil.ignore_patterns("__pycache__"))
        (self.home / "emad.args").write_text("\n".join(self._arguments()))
        shutil.copy(ROOT / "constraints.txt", self.home)
        shutil.copytree(GITHUB, self.home / ".github" / "workflows")
        self._git("init", "-q", "-b", "main")
        self._git("add", ".")
        self._git("-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "base")
        self._git("update-ref", "refs/remotes/origin/main", "HEAD")

    @staticmethod
    def _arguments() -> list[str]:
        """Keep the arguments, but use the checkout's suites (no wheel is installed) and the smallest model."""
        moved = {"--pyargs": f"-c{ROOT / 'pyproject.toml'}"}
        moved |= {f"pytest_emad.suites.{suite}": f"{ROOT}/suites/{suite}" for suite in ("fidelity", "invariants")}
        return [*(moved.get(line, line) for line in ARGUMENTS), "--emad-model=emad-nano", "-pno:cacheprovider"]

    def _git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.home, check=True)

    def run(self, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one step as GitHub runs ``shell: bash``."""
        step = RUNS[name]
        given = {key: VALUES.get(value, value) for key, value in {**WORKFLOW["env"], **step.get("env", {})}.items()}
        assert not any("${{" in value for value in (*given.values(), step["run"])), "an expression without a stand-in"
        dropped = ("CI", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
        around = {key: value for key, value in os.environ.items() if key not in dropped}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.home,
            env=around
            | {
                "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
                "PIP": PIP,
                "GITHUB_STEP_SUMMARY": str(self.summary),
            }
            | {"GH_LAST": "", "GH_REPORT": "", "HF_HUB_OFFLINE": "1"}
            | given
            | environment
            | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )


# ---------------------------------------------------------------- the text of the files


def test_the_workflow_is_one_that_github_reads() -> None:
    assert {"name", "permissions", "env", "jobs"} <= set(WORKFLOW)
    assert set(WORKFLOW[True]) == {"pull_request", "push", "workflow_dispatch"}  # YAML 1.1 parses `on` as true
    for step in STEPS:
        assert ("run" in step) != ("uses" in step)
        assert step.get("if", "${{ !cancelled() }}") in CONDITIONS
        assert "uses" not in step or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), "pinned by hash"
    assert WORKFLOW["concurrency"]["group"] == "gate-${{ github.ref }}"
    assert STEPS[0]["with"]["persist-credentials"] is False
    assert f"pytest-emad[models,report,suites]=={emad_ref.__version__}" in RUNS["Install"]["run"]
    assert [*RUNS] == ["Install", "Judge", "Verify", "Find or make the report of the base branch", "Compare"]
    (kept,) = [step["with"] for step in STEPS if step.get("uses", "").startswith("actions/upload-artifact")]
    assert kept["path"] == "report"
    assert f"--name {kept['name']} --dir base" in RUNS["Find or make the report of the base branch"]["run"]
    assert f"--workflow {WORKFLOW['name']} " in RUNS["Find or make the report of the base branch"]["run"]


def test_every_option_is_one_that_there_is() -> None:
    ours = {f"--emad-{option.name.replace('_', '-')}" for option in OPTIONS}
    text = "\n".join([*ARGUMENTS, *(step["run"] for step in RUNS.values()), PAGE.read_text()])
    used = set(re.findall(r"--emad-[a-z-]+", text))
    assert {"--emad-report", "--emad-gate", "--emad-backend", "--emad-expect-decoder"} <= used <= ours
    for step in ("Verify", "Compare"):
        verb, *words = shlex.split(RUNS[step]["run"].partition(" >> ")[0])
        assert verb == "emad"
        cli.build_parser().parse_args(words)  # exits where a word is unknown


def test_the_page_says_what_the_workflow_runs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "docs/gate-pull-request.md" in (GITHUB / "README.md").read_text(encoding="utf-8")
    for step in ("Judge", "Verify"):
        assert f"\n{RUNS[step]['run']}\n" in text
    assert f"\n{RUNS['Compare']['run'].partition(' --markdown')[0]}\n" in text


# ---------------------------------------------------------------- the effect of the steps


def whole(outcome: str = "survived", **changes: Any) -> dict[str, Any]:
    """Return a report of the plugin's suite, with one gate."""
    asked = "suites/fidelity", "suites/invariants"
    tests = [passed(name) for name in list_shipped_tests() if name.startswith(asked)]
    audits = [audit(test["nodeid"]) for test in tests]
    empty: Mapping[str, Any] = {"points": [], "waivers": [], "deselected": [], "audits": audits}
    run = foreign_report()["run"] | {"asked": [*asked]}
    return foreign_report(tests=tests, claims=[verdict(outcome)], run=run, settings={"models": []}) | empty | changes


def test_verify_and_compare_pass_a_whole_report_that_is_no_worse(runner: Runner) -> None:
    written(runner.home / "report", whole())
    written(runner.home / "base", whole())
    for step in ("Verify", "Compare"):
        done = runner.run(step)
        assert done.returncode == 0, done.stdout + done.stderr
    assert runner.summary.read_text(encoding="utf-8").startswith("### emad compare: 1 as before, ")


def test_verify_fails_a_report_that_is_missing_or_short_of_a_test(runner: Runner) -> None:
    assert runner.run("Verify").returncode == 4
    written(runner.home / "report", whole(tests=[]))
    done = runner.run("Verify")
    assert done.returncode == 1
    assert "no test of them was collected" in done.stderr


def test_compare_fails_and_shows_what_got_worse_than_the_base_branchs_last_run(runner: Runner, tmp_path: Path) -> None:
    last = written(tmp_path / "artifact", whole())
    found = runner.run("Find or make the report of the base branch", GH_LAST="17", GH_REPORT=str(last))
    assert found.returncode == 0, found.stderr
    assert found.stdout == "report of run 17\n"
    written(runner.home / "report", whole("falsified"))
    assert runner.run("Compare").returncode == 1
    text = runner.summary.read_text(encoding="utf-8")
    assert "| worse" in text
    assert re.search(r"\| survived,[^|]*\| falsified,", text)


def test_where_the_base_branch_left_no_report_its_decoder_is_judged(runner: Runner) -> None:
    """``gh`` fails. With ``--markers`` pytest judges nothing here; the slow test runs the judgment."""
    (runner.home / "emad.args").write_text("--markers\n")
    (runner.home / "plain_decoder.py").write_text("the pull request's\n")
    done = runner.run("Find or make the report of the base branch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no report of main to be had: judged here")
    installed = runner.home / "base-venv" / "bin" / "site"
    assert (installed / "plain_decoder.py").read_bytes() == (PLUGIN / "plain_decoder.py").read_bytes()
    assert list(installed.glob("plain_decoder-*.dist-info/entry_points.txt"))


def test_compare_is_status_4_without_a_base(runner: Runner) -> None:
    written(runner.home / "report", whole())
    done = runner.run("Compare")
    assert done.returncode == 4
    assert "base/report.json' cannot be read" in done.stderr


@pytest.mark.slow
def test_the_job_judges_the_decoder_and_its_base_and_passes(runner: Runner) -> None:
    """All steps, with both branches judged: the base branch's decoder is the one installed for it."""
    decoder = runner.home / "plain_decoder.py"
    decoder.write_text(decoder.read_text(encoding="utf-8") + 'emad_origin = "the pull request\'s"\n', encoding="utf-8")
    for step in RUNS:
        done = runner.run(step)
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"
    reports = {name: read_report(runner.home / name) for name in ("base", "report")}
    assert reports["report"]["decoder"]["name"] == "the pull request's"
    assert reports["base"]["decoder"]["name"] == "hook of plugin plain (plain_decoder, plain-decoder 0.1)"
    assert (runner.home / "report" / "report.md").is_file()
    summary = runner.summary.read_text(encoding="utf-8")
    assert re.search(r"^### emad compare: 1 as before, \d\d tests as before\n", summary, flags=re.MULTILINE), summary
    assert "Passes by --fail-on verdict" in summary
