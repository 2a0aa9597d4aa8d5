"""Four pages of docs/ keep their word: what stands there runs, in an empty folder, and prints what is shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from emad_ref.cli import main

DOCS = Path(__file__).parents[1] / "docs"
if not DOCS.is_dir():
    pytest.skip("docs/ is not part of an installed package", allow_module_level=True)
BLOCK = re.compile(r"```(sh|python)\n(.*?)\n```", flags=re.DOTALL)


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def blocks(page):
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def run_in_shell(block):
    for line in block.splitlines():
        words = shlex.split(line)
        assert words[0] == "emad", line
        assert main(words[1:]) == 0


def test_the_ten_lines_of_python_print_what_is_shown(capsys):
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    ((_, block),) = blocks("python.md")
    assert len([line for line in block.splitlines() if line]) <= 10
    exec(compile(block, "python.md", "exec"), {})
    first, *printed = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(r"<!-- output: ten lines -->\n```text\n(.*?)\n```", page, flags=re.DOTALL)
    shown_first, *rest = shown.splitlines()
    assert printed == rest
    # percentages may differ in their last digit from one processor to the next
    assert re.sub(r"[-+\d.]+ ?%", "%", first) == re.sub(r"[-+\d.]+ ?%", "%", shown_first)


def test_transformers_page_runs_from_top_to_bottom(capsys):
    for language, block in blocks("transformers.md"):
        if language == "sh":
            run_in_shell(block)
        else:
            exec(compile(block, "transformers.md", "exec"), {})
    depths = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"\[(\d+, )*\d+\]", depths)


def test_lm_eval_page_runs_where_no_network_is_needed(capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
    from emad_ref.lm_eval import main as lm_eval

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # asks pip for seconds
    ran = 0
    for _, block in blocks("lm-eval.md"):
        for line in block.splitlines():
            words = shlex.split(line)
            if words[0] == "emad":
                assert main(words[1:]) == 0
                continue
            assert words[:3] == ["python", "-m", "emad_ref.lm_eval"]
            if "pythia" in line:  # its weights and data are not bundled
                continue
            assert lm_eval(words[3:]) == 0
            assert re.search(r"\|world_recall\|.*\|acc ", capsys.readouterr().out), line
            ran += 1
    assert ran == 2
    (written,) = Path("results").rglob("results_*.json")
    assert '"emad m=0.20"' in written.read_text(encoding="utf-8")


def test_the_command_line_page_runs_and_shows_what_a_pipe_gets(capsys):
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    for _, block in blocks("command-line.md"):
        for line in block.splitlines():
            if ">" in line:
                with pytest.raises(SystemExit, match=r"^0$"):
                    main(shlex.split(line.partition(">")[0])[1:])
            else:
                run_in_shell(line)
    printed = capsys.readouterr().out.splitlines()
    for shown in re.findall(r"^\{.*\}$", page, flags=re.MULTILINE):
        assert shown in printed
