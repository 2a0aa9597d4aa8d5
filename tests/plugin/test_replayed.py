"""``emad replay`` runs the recorded test in the recorded folder with the recorded decoder, or refuses to run it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_emad.cli.replay import replay_test
from tests.plugin.conftest import Run

PROVIDER = "def pytest_emad_make_decoder(config, request): return config.getoption('--answer')\n"
CONFTEST = f"""
def pytest_addoption(parser):
    parser.addoption("--answer", default="nothing")

{PROVIDER}"""
# the test leaves a trace of each call
TESTS = """
from pathlib import Path
from types import SimpleNamespace
import pytest
from emad_ref.models.fast.product_table import choose_product
from emad_ref.point import full_depth
from emad_ref.protocol import ModelRef, Request
from pytest_emad.run.decoder_providers import make_decoder

REQUEST = Request(ModelRef("m", lambda: SimpleNamespace(stepper="weights")), full_depth(2))

@pytest.mark.emad
@pytest.mark.parametrize("part", ["one", "one more"])
def test_decoder(request, part):
    with open(Path(__file__).with_name("calls.txt"), "a") as calls:
        calls.write(part + ";")
    measured = Path(__file__).with_name("measured.txt").read_text()
    assert choose_product("a class", ("blas", "linear"), lambda: measured) == "blas"
    assert make_decoder(request.config, REQUEST) == Path(__file__).with_name("answer.txt").read_text()
"""
NODE = "test_it.py::test_decoder[one]"


@pytest.fixture
def judged(project: pytest.Pytester) -> Path:
    """Return a project whose conftest provides the decoder; an option and a file decide whether its test passes."""
    project.makeconftest(CONFTEST)
    project.makepyfile(test_it=TESTS)
    (project.path / "answer.txt").write_text("right")
    (project.path / "measured.txt").write_text("blas")
    return project.path


@pytest.fixture
def record(judged: Path, run: Run) -> Callable[..., dict[str, Any]]:
    """Run all tests with these arguments; returns the report."""

    def record(*arguments: str) -> dict[str, Any]:
        run("--emad-report=report", "--answer", "right", *arguments, "test_it.py")
        (judged / "calls.txt").unlink()
        found: dict[str, Any] = json.loads((judged / "report" / "report.json").read_text())
        return found

    return record


def asked(folder: Path, report: dict[str, Any], test: str = NODE) -> str:
    """Return the argument of a replay of ``test``."""
    file = folder / f"asked-{len(list(folder.glob('asked-*')))}.json"
    file.write_text(json.dumps({"test": test, "report": report}))
    return f"--emad-replay={file}"


def test_what_decides_a_test_is_recorded_and_the_rest_named(
    judged: Path, record: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values come from the command line, the environment and the ini file, whatever their form."""
    (judged / "pytest.ini").write_text("[pytest]\naddopts = --junitxml=ini.xml --emad-seed 3 -W error::FutureWarning\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--durations 3 --emad-update-golden --emad-golden .")
    kept = record("--log-file", "log.txt", "-opython_functions=test", "-o", "junit_logging=all", "-kone", "--rootdir=.")
    entry = kept["run"]["replay"]
    assert entry["folder"] == str(judged)
    words = entry["arguments"]
    assert {"--rootdir=.", "--emad-seed=3", "--emad-golden=.", "test_it.py"} <= set(words)
    for pair in (("-p", "no:cacheprovider"), ("-W", "error::FutureWarning"), ("-o", "python_functions=test")):
        assert any(words[at : at + 2] == [*pair] for at in range(len(words))), pair
    assert words[words.index("--answer") + 1] == "right", "the decoder's own option"
    assert sorted(entry["left_out"]) == sorted(
        [
            *("--durations 3", "--emad-update-golden", "--junitxml=ini.xml", "--emad-report=report"),
            *("--log-file log.txt", "-o junit_logging=all", "-kone"),
        ]
    )


def test_a_replay_runs_one_test_alone(judged: Path, record: Callable[..., dict[str, Any]], run: Run) -> None:
    report = record("--emad-tier=tokens", "--emad-expect-decoder=foreign", "--emad-require=energy")
    again = [*report["run"]["replay"]["arguments"], asked(judged, report), "--emad-report=again"]
    run(*again).assert_outcomes(passed=1, deselected=1)
    assert (judged / "calls.txt").read_text() == "one;"
    found = json.loads((judged / "again" / "report.json").read_text())
    assert (found["run"]["exit_status"], found["run"]["failures"]) == (0, []), "demands on all tests are left out"
    assert found["settings"]["gate"] == report["settings"]["gate"] == "decoder", "what the tier implies stays"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"conftest.py": CONFTEST.replace(PROVIDER, "")}, "the recorded decoder is hook of conftest.py"),
        (
            {"conftest.py": CONFTEST.replace(PROVIDER, "pytest_plugins = ['mine']"), "mine.py": PROVIDER},
            "but here it is hook of plugin mine",
        ),
        ({"pytest.ini": "[pytest]\nemad_seed = 3\n"}, "the recorded run had seed=0, but now it is 3"),
        (
            {"test_it.py": TESTS.replace("test_decoder", "test_other")},
            "collected 2 tests here and not test_it",
        ),
        ({"../pytest.ini": "[pytest]\n"}, "the recorded root folder is"),
    ],
    ids=["no decoder", "another decoder", "another setting", "no such test", "another root"],
)
def test_a_replay_under_other_conditions_is_refused_before_the_test(
    judged: Path, record: Callable[..., dict[str, Any]], run: Run, change: dict[str, str], said: str
) -> None:
    report = record()
    for file, text in change.items():
        (judged / file).write_text(text)
    try:
        result = run(*report["run"]["replay"]["arguments"], asked(judged, report))
    finally:
        (judged / "../pytest.ini").unlink(missing_ok=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in "\n".join([*result.outlines, *result.errlines])
    assert not (judged / "calls.txt").exists()


def test_the_command_replays_from_anywhere_writes_nothing_there_and_fails_unless_as_recorded(
    judged: Path,
    run_apart: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A replay once overwrote the file of --junitxml, judged our decoder from another folder, and ended with 0."""
    (judged / "pytest.ini").write_text("[pytest]\naddopts = --junitxml=ini.xml\nlog_file = log.txt\n")
    run_apart("--emad-report=report", "--answer=right", "--basetemp=base", "test_it.py").assert_outcomes(passed=2)
    for written in ("ini.xml", "log.txt"):
        (judged / written).write_text("kept")
    (judged / "calls.txt").unlink()
    (judged / "measured.txt").write_text("linear")  # a replay takes the products on record
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(judged / "ini.xml"))
    capfd.readouterr()

    def replayed() -> tuple[int, str]:
        chosen = argparse.Namespace(report=judged / "report", row="test_decoder[one]", keep=Path("again"), pdb=False)
        return replay_test(chosen), capfd.readouterr().out

    before = {file: file.read_bytes() for file in judged.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    status, said = replayed()
    assert (status, (judged / "calls.txt").read_text()) == (0, "one;")
    assert "As recorded.\n  recorded: passed\n  replayed: passed\n" in said
    (left_out,) = (line for line in said.splitlines() if line.startswith("left out: --junitxml=ini.xml "))
    assert left_out.endswith(" --emad-report=report --basetemp=base")
    after = {file: file.read_bytes() for file in judged.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert {file.name for file in after if after[file] != before.get(file)} == {"calls.txt"}
    (judged / "answer.txt").write_text("wrong")
    status, said = replayed()
    assert status == 1
    assert "\nNot as recorded.\n" in said
    (judged / "conftest.py").write_text(CONFTEST.replace(PROVIDER, ""))
    status, said = replayed()
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "\nNot replayed: pytest stopped before the test" in said, (
        "and not compared with the earlier report in --keep"
    )
