"""``emad`` help: every argument has a description and an example; versions, completion, suggestions, colours."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import shtab

from emad_ref import __version__
from emad_ref.console import USAGE_ERROR
from pytest_emad import cli
from pytest_emad.cli.arguments import SHELLS, pytest_to_verb_option_names
from pytest_emad.cli.generation import (
    colour_by_depth,
    detect_colour_mode,
    escape_control_characters,
    format_depth_legend,
    format_pair_legend,
)
from pytest_emad.cli.judgment import add_same_arguments
from pytest_emad.screening.exit import save_exit
from tests.unit.measurements.test_learned_exit import found_exit


def examples_of(parser):
    """Return the command lines in the parser's help."""
    return [line.strip() for line in (parser.epilog or "").splitlines()[1:]]


TOP = cli.build_parser()
(VERBS,) = (action for action in TOP._actions if isinstance(action, argparse._SubParsersAction))
PARSERS = {"emad": TOP, **VERBS.choices}
EXAMPLES = [(name, line) for name, parser in PARSERS.items() for line in examples_of(parser)]


def arguments(parser):
    return [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]


def words_of(line):
    """Return the words before the first pipe or redirection, without ``emad``."""
    words = shlex.split(line)
    end = next((i for i, word in enumerate(words) if word in ("|", ">", ">>")), len(words))
    return words[1:end]


def test_the_walk_finds_every_verb():
    assert set(cli.VERBS) == set(VERBS.choices)
    assert all(choice.help for choice in VERBS._choices_actions)


def test_the_help_names_the_folder_of_the_pages_that_messages_name():
    words = " ".join(TOP.format_help().split())
    folder = Path(re.search(r"that messages name are in (.+?)\. ", words)[1])
    assert (folder / "claims.md").is_file()


def test_the_help_shows_each_verb_once_under_its_purpose():
    lines = TOP.format_help().splitlines()
    purposes = [lines.index(f"  {purpose}:") for purpose in cli.VERB_GROUPS]
    places = {
        verb: next(i for i, line in enumerate(lines) if line.startswith(f"    {verb} ")) for verb in VERBS.choices
    }
    for start, end, group in zip(purposes, [*purposes[1:], len(lines)], cli.VERB_GROUPS.values(), strict=True):
        assert {verb for verb, place in places.items() if start < place < end} == set(group)


@pytest.mark.parametrize("name", PARSERS)
def test_every_argument_has_help_and_stands_in_an_example(name):
    parser = PARSERS[name]
    shown = {word.partition("=")[0] for line in examples_of(parser) for word in words_of(line)}
    assert examples_of(parser), "no example"
    for action in arguments(parser):
        assert action.help, f"{name} {action.dest}: no help"
        if action.option_strings and action.dest != "help":
            assert shown & set(action.option_strings), f"{name} {action.option_strings}: in no example"


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_every_example_is_taken_by_the_parser_it_stands_under(name, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("profile.json", "tiny.exit", "exit.safetensors", "mine.toml", "notes.txt", "texts.jsonl", "gaps.toml"):
        (tmp_path / file).touch()
    (tmp_path / "curve.yaml").write_text("llama:\n  thinking_off:\n    3: 3.08\n", encoding="utf-8")
    for folder in ("data", "golden", "llama"):
        (tmp_path / folder).mkdir()
    (tmp_path / "emad").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")  # `exec:emad …` must find one
    assert line.startswith("emad "), line
    if name == "emad" and words_of(line)[0].startswith("--"):
        with pytest.raises(SystemExit, match=r"^0$"):
            TOP.parse_args(words_of(line))
    else:
        assert name in ("emad", TOP.parse_args(words_of(line)).verb)


def test_help_shows_the_examples_as_they_are_typed(capsys):
    with pytest.raises(SystemExit):
        TOP.parse_args(["generate", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {line}\n" in out for line in examples_of(PARSERS["generate"]))


def test_version_names_ours_and_the_libraries_without_importing_them():
    code = (
        "import sys\nfrom pytest_emad.cli import main\n"
        "try:\n main(['--version'])\nfinally:\n print([n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[:3] == [f"emad {__version__}", f"torch {version('torch')}", f"transformers {version('transformers')}"]
    assert out[-1] == "[]"


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["generat"], "generate"),
        (["cal"], "calibrate"),
        (["REPLAY"], "replay"),
        (["generate", "emad-tiny", "hi", "--max-nwe-tokens", "3"], "--max-new-tokens"),
    ],
)
def test_what_is_unknown_gets_the_nearest_match(argv, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        TOP.parse_args(argv)
    assert ended.value.code == 4
    said = capsys.readouterr().err
    assert meant in said.splitlines()[-1].rpartition("ou mean")[2] or f"meant '{meant}'" in said


MEANINGLESS = [  # command line, and end of its error
    *(
        (
            ["generate", "emad-nano", "hi", "--max-new-tokens", text],
            f"--max-new-tokens={text!r}, but expected a whole number in plain",
        )
        for text in ("٣", "1_0", "0x10", "1.5", "", " ", "²")
    ),
    *(
        (
            ["generate", "emad-nano", "hi", "--margin", text],
            f"--margin={text!r}, but expected a number of nats",
        )
        for text in ("٣", "1_0", "", " ", "much")
    ),
    (
        ["generate", "emad-nano", "hi", "--seed", "9" * 5000],
        "--seed='9999999999999999999999999999999999999999', but expected",
    ),
    *(
        (argv, "'', but expected a path; name a file or a folder")  # "$UNSET" would be the current folder
        for argv in (
            ["report", ""],
            ["report", "a", "--out", ""],
            ["verify", ""],
            ["compare", "", "b"],
            ["replay", "", "EMAD-F1"],
            ["merge", "", "a"],
            ["calibrate", "emad-nano", ""],
        )
    ),
    *(
        (argv, f"{argv[-2]}='', but expected a name; leave the option out")
        for argv in (["generate", "emad-nano", "hi", "--profile", ""], ["sweep", "emad-nano", "--data", ""])
    ),
    (["compare", "a\0b", "b"], "'a\\x00b', but expected a path"),
    *(
        ([*argv, "--data", "nowhere"], "--data='nowhere', but expected an existing folder; looked at")
        for argv in (["calibrate", "m", "p"], ["lens", "m", "l"], ["screen", "m", "e"], ["sweep", "m"])
    ),
    *(
        ([*argv, text], f"{argv[-1]}")  # "$UNSET" would require nothing
        for argv in (
            ["verify", "report", "--require-suite"],
            ["judge", "m", "--require"],
            ["judge", "m", "--gate-claims"],
            ["judge", "m", "--only"],
        )
        for text in ("", " ", ",")
    ),
    (["judge", "m", "--decoder-timeout", "1_0"], "--decoder-timeout='1_0', but expected a number of seconds"),
]


@pytest.mark.parametrize(("argv", "said"), MEANINGLESS, ids=[" ".join(argv)[:40] for argv, _ in MEANINGLESS])
def test_a_value_that_means_nothing_is_a_usage_error(argv, said, capsys):
    assert cli.main(argv) == USAGE_ERROR
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said", "own"),
    [
        (add_same_arguments, "(--emad-decoder-timeout)", "(--decoder-timeout)"),
        (add_same_arguments, "--emad-decoder-dtype=1", "--decoder-dtype=1"),
        (add_same_arguments, "--emad-budget smoke", "--emad-budget of pytest smoke"),
        (add_same_arguments, "see `pytest --emad-report DIR`", "see `pytest --emad-report DIR`"),
    ],
)
def test_a_verb_names_its_own_options(arguments, said, own):
    """Its measurements have pytest's names."""
    assert pytest_to_verb_option_names(said, arguments) == own


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate", "emad-nano", "hi", "--exit", "{exit}"), "lens.fingerprint="),
        (("same", "emad-nano", "exec:sleep 60", "--decoder-timeout", "1"), "raise the time limit (--decoder-timeout)"),
    ],
)
def test_an_error_from_below_names_the_options_of_the_verb(words, said, tmp_path, capsys):
    exit = tmp_path / "some.exit"
    save_exit(exit, found_exit())
    assert cli.main([word.format(exit=exit) for word in words]) == USAGE_ERROR
    last = capsys.readouterr().err
    assert said in last
    assert "--emad-" not in last


def test_without_a_verb_the_error_says_what_lists_them(capsys):
    with pytest.raises(SystemExit):
        TOP.parse_args([])
    assert capsys.readouterr().err.endswith("required: VERB; emad --help lists them\n")


def test_what_is_like_nothing_gets_no_match(capsys):
    with pytest.raises(SystemExit):
        TOP.parse_args(["generate", "emad-tiny", "hi", "--qqqqq"])
    assert "mean" not in capsys.readouterr().err


def test_completion_is_offered_for_the_shells_that_shtab_knows():
    assert list(SHELLS) == shtab.SUPPORTED_SHELLS


def completed(*words):
    """Return bash's completions of the last word, with the script that ``emad`` prints."""
    script = subprocess.run(
        [sys.executable, "-m", "pytest_emad", "--print-completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    line = ["emad", *words]
    ask = (
        f"COMP_WORDS=({shlex.join(line[:-1])} {shlex.quote(line[-1])}); COMP_CWORD={len(line) - 1}; COMP_TYPE=9\n"
        'compopt() { :; }\n_shtab_emad\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    return subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, check=True).stdout.split()


def test_the_completion_script_completes_verbs_options_and_choices():
    assert completed("ge") == ["generate"]
    assert set(VERBS.choices) <= set(completed(""))
    assert "--small-model" in completed("generate", "--sm")
    assert completed("judge", "emad-tiny", "--budget", "st") == ["standard"]


@pytest.mark.parametrize(
    ("environment", "terminal", "expected"),
    [
        ({"COLORTERM": "truecolor"}, True, "true"),
        ({"COLORTERM": "24bit"}, True, "true"),
        ({"TERM": "xterm-256color"}, True, "256"),
        ({"COLORTERM": "truecolor", "NO_COLOR": "1"}, True, "none"),
        ({"COLORTERM": "truecolor", "NO_COLOR": ""}, True, "true"),  # no-color.org: when present and not empty
        ({"TERM": "dumb"}, True, "none"),
        ({"COLORTERM": "truecolor"}, False, "none"),
    ],
)
def test_colours_are_what_the_terminal_has(environment, terminal, expected):
    assert detect_colour_mode(environment, terminal) == expected


def test_depths_get_the_scale_from_end_to_end():
    assert colour_by_depth("a", 1, 12, "true") == "\x1b[38;2;38;139;210ma\x1b[39m"
    assert colour_by_depth("a", 12, 12, "true") == "\x1b[38;2;220;40;47ma\x1b[39m"
    assert colour_by_depth("a", 1, 1, "256") == "\x1b[38;5;32ma\x1b[39m"
    assert colour_by_depth("a", 5, 12, "none") == "a"
    assert len({colour_by_depth("a", depth, 12, "true") for depth in range(1, 13)}) == 12
    assert len({colour_by_depth("a", depth, 6, "256") for depth in range(1, 7)}) == 6


@pytest.mark.parametrize("width", [20, 40, 80])
@pytest.mark.parametrize("layers", [1, 12, 96])
def test_a_legend_is_never_wider_than_the_terminal(layers, width):
    line = format_depth_legend(layers, "none", width)
    assert len(line) <= width
    assert line.startswith("depth 1 █")
    assert line.endswith(f"█ {layers} layers")
    assert len(format_pair_legend(("a" * 30, "b" * 30), "none", width)) <= width


def test_control_characters_command_no_terminal():
    assert escape_control_characters("a\x1b[2Jb\x9bc\r\n\td\u00e9") == "a\\x1b[2Jb\\x9bc\\x0d\n\td\u00e9"
