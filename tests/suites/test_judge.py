"""``emad judge`` is pytest on the shipped suites; ``emad same`` decides ENG-1 by itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from emad_ref.console import USAGE_ERROR
from pytest_emad.cli import main
from pytest_emad.measurements import model_measurements as model

FALSIFIED = ("judge", "emad-nano", "--only", "EMAD-E13", "--gate-claims", "EMAD-E13")


def test_a_falsified_gate_is_pytests_status_and_pytest_gets_the_words_after_the_dashes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*FALSIFIED, "--report", "out", "--", "-q", "-p", "no:cacheprovider"]) == pytest.ExitCode.TESTS_FAILED
    command, *said = capfd.readouterr().out.splitlines()
    suites = Path(__file__).parents[2] / "suites"
    options = "--emad-model=emad-nano --emad-only=EMAD-E13 --emad-report=out --emad-gate-claims=EMAD-E13"
    assert command == f"pytest {suites} {options} -q -p no:cacheprovider"
    assert "FAILED: 1 of 1 gate does not hold" in said
    assert main(["verify", "out"]) == 1, "the report is that of the run"


def test_what_pytest_refuses_is_its_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "emad-nona", "--only", "EMAD-E13"]) == USAGE_ERROR
    assert "name='emad-nona', but expected one of emad-nano," in capfd.readouterr().err


def same(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return exit status and output of ``emad same``."""
    status = main(["same", *words])
    return status, "".join(capsys.readouterr())


def test_a_model_is_the_same_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = same(capsys, "emad-nano", "emad-nano")
    assert status == 0
    assert "emad-nano and emad-nano: the same model" in text
    assert re.search(r"^top-1 agreement +measured +1 ", text, re.MULTILINE)


def test_few_documents_of_a_server_are_inconclusive(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "DOCUMENTS", 0)  # the budget's alone
    server = f"exec:{sys.executable} -m pytest_emad serve emad-nano"
    status, text = same(capsys, "emad-nano", server)
    assert status == 1
    assert f"emad-nano and {server}: inconclusive" in text
    assert re.search(r"^top-1 agreement +measured +1 ", text, re.MULTILINE)


def test_other_weights_of_one_tokenizer_are_not_the_same_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "DOCUMENTS", 0)  # the budget's alone
    status, text = same(capsys, "emad-nano", "emad-tiny")
    assert status == 1
    assert "emad-nano and emad-tiny: NOT the same model" in text
    assert re.search(r"^KL at float32, beyond twice its own +falsified ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("emad-nano", "emad-nona"), "name='emad-nona', but expected one of "),
        (("emad-nona", "emad-nano"), "name='emad-nona', but expected one of "),
        (("emad-nano", "emad-t5-tiny"), "but expected the same tokenizer"),
        (("emad-nano", "http://"), "OTHER='http://', but expected http(s)://HOST:PORT"),
    ],
)
def test_what_cannot_be_compared_is_status_4(
    capsys: pytest.CaptureFixture[str], words: tuple[str, str], message: str
) -> None:
    status, text = same(capsys, *words)
    assert status == 4
    assert message in text
