"""Acceptance length on record: one entry of a golden curve, or one clear reason why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from emad_ref.errors import BadArgument
from pytest_emad.measurements.acceptance_record import AcceptanceRecord, parse_acceptance_record

CURVE = """
# any comment
my-llama:
  thinking_on:
    1: 1.75
    3: 2.5
  thinking_off:
    3: 4
other:
  thinking_off:
    2: 2.25
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "curve.yaml").write_text(CURVE)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("curve.yaml,my-llama,thinking_on,3", AcceptanceRecord(2.5, 3, "my-llama, thinking_on, 3")),
        ("curve.yaml, my-llama, thinking_on, 1", AcceptanceRecord(1.75, 1, "my-llama, thinking_on, 1")),
        ("curve.yaml,my-llama,thinking_off", AcceptanceRecord(4.0, 3, "my-llama, thinking_off, 3")),
        ("curve.yaml,other", AcceptanceRecord(2.25, 2, "other, thinking_off, 2")),
    ],
)
def test_an_entry_is_named_as_far_as_there_are_others(folder: Path, text: str, record: AcceptanceRecord) -> None:
    assert parse_acceptance_record(text, folder, "--x") == record


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("curve.yaml", "the model of --x=None, but expected one of my-llama, other; e.g. curve.yaml,my-llama"),
        ("curve.yaml,my-lama", "the model of --x='my-lama', but expected one of my-llama, other; nearest: my-llama"),
        ("curve.yaml,my-llama", "the thinking mode of --x=None, but expected one of thinking_on, thinking_off"),
        ("curve.yaml,my-llama,thinking_on", "the number of drafted tokens of --x=None, but expected one of 1, 3"),
        ("curve.yaml,my-llama,thinking_on,2", "the number of drafted tokens of --x='2', but expected one of 1, 3"),
        ("curve.yaml,a,b,c,d", "but expected FILE[,MODEL[,MODE[,DRAFTED]]]"),
        ("curve.yaml,,thinking_on", "but expected FILE[,MODEL[,MODE[,DRAFTED]]]"),
        ("absent.yaml", "of an existing file; looked at "),
        (",other", "of an existing file; looked at "),
    ],
)
def test_an_entry_that_is_not_there_is_refused(folder: Path, text: str, said: str) -> None:
    with pytest.raises(BadArgument) as refusal:
        parse_acceptance_record(text, folder, "--x")
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ("a: {b: {3: 4.5}}", "4.5, but expected a length from 1 to drafted tokens + 1 below curve.yaml → a → b → 3"),
        ("a: {b: {3: 0.9}}", "but expected a length from 1 to drafted tokens + 1"),
        ("a: {b: {3: .nan}}", "but expected a length from 1 to drafted tokens + 1"),
        ("a: {b: {three: 2}}", "but expected a length from 1 to drafted tokens + 1"),
        ("a: {b: {0: 1}}", "but expected a length from 1 to drafted tokens + 1"),
        ("a: {b: {3: two}}", "but expected a length from 1 to drafted tokens + 1"),
        ("a: {b: 2.5}", "but expected a number of drafted tokens below curve.yaml → a → b"),
        ("a: {}", "but expected a thinking mode below curve.yaml → a"),
        ("- a", "but expected a model below curve.yaml"),
        ("", "but expected a model below curve.yaml"),
        ("a: [", "but expected a curve in YAML"),
        ("a: !!python/object/apply:os.getcwd []", "but expected a curve in YAML"),
    ],
)
def test_a_file_of_another_form_is_refused(folder: Path, curve: str, said: str) -> None:
    (folder / "curve.yaml").write_text(curve)
    with pytest.raises(BadArgument) as refusal:
        parse_acceptance_record("curve.yaml", folder, "--x")
    assert said in str(refusal.value)
