"""README.md keeps its word: shown verdicts are those on record, shown options, commands and snippets exist and run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from emad_ref.cli import parser
from emad_ref.models.loading import load
from emad_ref.verdict.claims import load_register
from emad_ref.verdict.known import MACHINE_BOUND, Circumstances, key_of, known_verdicts, shipped
from pytest_emad.options import OPTIONS

README = Path(__file__).parents[1] / "README.md"
if not README.is_file():
    pytest.skip("README.md is not part of an installed package", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")
SHOWN = re.findall(r"<!-- output: (\S+)(?: on (\S+))? -->\n```text\n(.*?)\n```", TEXT, flags=re.DOTALL)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", TEXT, flags=re.DOTALL)


def verdicts(output: str) -> dict[str, str]:
    """id → verdict of the claims table; continuation lines of a cell start with a space."""
    table = output.partition("= emad claims =")[2]
    rows = re.findall(
        r"^((?:EMAD|EAD|EE)-\S+?)\*? +(?:\S+ \+ \S+ +|\S+ +)?"
        r"(survived|falsified|inconclusive|not applicable|unmeasured|measured) ",
        table,
        re.M,
    )
    return dict(rows)


def test_three_outputs_are_shown():
    assert [(model, corpus) for model, corpus, _ in SHOWN] == [
        ("emad-tiny", ""),
        ("emad-tiny-plain", ""),
        ("emad-tiny", "world:mixed"),
    ]


@pytest.mark.parametrize(("model", "corpus", "output"), SHOWN, ids=lambda value: value[:20])
def test_shown_verdicts_are_those_on_record(model, corpus, output):
    register, fingerprint = load_register(), load(model).fingerprint
    known, run = known_verdicts([shipped()]), Circumstances(0, "smoke")
    shown = verdicts(output)
    pair = "+".join(load(name).fingerprint for name in ("emad-nano", "emad-tiny"))
    assert {"EMAD-F1", "EMAD-F2", "EMAD-E2", "EMAD-E5"} <= set(shown) <= set(register)
    compared = 0
    for claim, verdict in shown.items():
        if register[claim].requires in MACHINE_BOUND:
            continue
        keys = [
            key_of(claim, name, read, run)
            for name in (fingerprint, model, pair, "emad-nano + emad-tiny")
            for read in (corpus or "world:premise", "world tasks", "")
        ]
        on_record = [found for key in keys if (found := known.expected(key, run.seed)) is not None]
        assert any(verdict in found.outcomes for found in on_record), claim
        compared += 1
    assert compared >= 6


def test_every_option_named_exists():
    flags = {option.flag for option in OPTIONS}
    assert set(re.findall(r"--emad-[a-z-]*[a-z]", TEXT)) <= flags


def test_every_emad_command_parses():
    commands = [
        line for block in blocks("sh") for line in block.splitlines() if re.match(r"(emad|python -m emad_ref) ", line)
    ]
    assert commands
    for line in commands:
        words = shlex.split(line, comments=True)
        parser().parse_args(words[3:] if words[0] == "python" else words[1:])


def test_snippets_run(capsys):
    for block in blocks("python"):
        code = compile(block, "README.md", "exec")
        if block.startswith("import emad_ref"):
            exec(code, {})
    assert capsys.readouterr().out.split()
