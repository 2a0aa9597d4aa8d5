"""One name, one meaning: ``--NAME`` of a verb is ``--emad-NAME`` of pytest, and the ``--NAME`` of every other verb."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from typing import Any, NamedTuple

import pytest

from emad_ref.console import USAGE_ERROR
from pytest_emad import cli
from pytest_emad.cli.judgment import build_pytest_arguments
from pytest_emad.measurements.option_values import make_choice_parser, parse_seconds
from pytest_emad.run.option_table import OPTIONS

STEM_END = re.compile(r"[,;:(]")  # what follows is about one verb, or names the default
(VERBS,) = (action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction))
# one value that the reader of each option of pytest takes, where the option has no choices
VALUES = {
    "only": "EMAD-F1,EMAD-R*", "pair": "emad-nano,emad-tiny", "waive": "EMAD-F2=no time yet", "corpus": "self",
    "device": "cpu", "decoder": "tcp:127.0.0.1:7007", "decoder-timeout": "30", "process-timeout": "60", "margin": "0.2",
    "decoder-baseline": "http://127.0.0.1:8001",
    "require": "quality", "seed": "3", "limit": "4", "data": ".", "task-path": ".", "golden": ".", "report": "out",
    "profile": "file", "exit": "file", "register": "file",
    "known-gaps": "file", "acceptance-record": "curve.yaml",
}  # fmt: skip


class Meaning(NamedTuple):
    """What is the same wherever an option has this name."""

    stem: str
    metavar: str | None
    choices: tuple[str, ...]


def stem(help: str) -> str:
    return STEM_END.split(help.replace("--emad-", "--"))[0].strip()


def meanings() -> dict[str, dict[Meaning, list[str]]]:
    """Option name → its meanings → the commands that give it this meaning."""
    table: dict[str, dict[Meaning, list[str]]] = defaultdict(lambda: defaultdict(list))
    for option in OPTIONS:
        table[option.name][Meaning(stem(option.help), option.metavar, option.choices)].append("pytest")
    for verb, parser in VERBS.choices.items():
        for action in parser._actions:
            for name in (text.removeprefix("--") for text in action.option_strings if text.startswith("--")):
                metavar = None if action.nargs == 0 else action.metavar
                meaning = Meaning(
                    stem(action.help or ""), str(metavar) if metavar else None, tuple(action.choices or ())
                )
                table[name][meaning].append(verb)
    switches = {option.name for option in OPTIONS if option.switch}
    return {
        name: {meaning._replace(metavar=None) if name in switches else meaning: at for meaning, at in found.items()}
        for name, found in table.items()
    }


def test_a_name_has_one_meaning_over_pytest_and_all_verbs() -> None:
    assert {name: dict(found) for name, found in meanings().items() if len(found) > 1} == {}


def test_what_two_commands_say_in_the_same_words_has_one_name() -> None:
    names: dict[str, set[str]] = defaultdict(set)
    for name, found in meanings().items():
        for meaning in found:
            names[meaning.stem].add(name)
    assert {said: found for said, found in names.items() if len(found) > 1} == {}


def parsed(*words: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(words)


def test_judge_hands_every_option_of_pytest_to_pytest(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "curve.yaml").write_text("m: {thinking_off: {3: 2.5}}")
    given, passed = [], ["--emad-model=a", "--emad-model=b"]
    for option in OPTIONS:
        if option.name == "model":
            continue
        value = option.choices[0] if option.choices else VALUES.get(option.name, "name")
        given.append(f"--{option.name}" if option.switch else f"--{option.name}={value}")
        passed.append(option.flag if option.switch else f"{option.flag}={value}")
    _, *words = build_pytest_arguments(parsed("judge", "a", "b", *given, "--", "-x", "--", "-k", "name"))
    assert words == [*passed, "-x", "--", "-k", "name"]
    _, *words = build_pytest_arguments(parsed("judge", "a"))
    assert words == ["--emad-model=a"], "what is not given stays pytest's to choose, by its ini file"


def test_all_refused_values_are_told_at_once_in_pytests_words(capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["--budget=smoek", "--decoder-timeout=soon", "--gate=papers"]
    assert cli.main(["judge", "emad-nano", *bad]) == USAGE_ERROR
    said = capsys.readouterr().err.removeprefix("emad: ").splitlines()
    expected = []
    for name, text, read in (
        ("--budget", "smoek", make_choice_parser(("smoke", "standard", "full"))),
        ("--decoder-timeout", "soon", parse_seconds),
        ("--gate", "papers", make_choice_parser(("paper", "decoder", "known"))),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011  # BadArgument, whose text is compared
            read(text, None, name)
        expected.append(str(refused.value))
    assert said == expected
