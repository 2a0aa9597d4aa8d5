"""``emad judge`` decides the same claims as the suites: the same table, row for row, and the same exit status."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from pytest_emad.cli import main
from pytest_emad.measurements import model_measurements as model
from pytest_emad.statistics.goldens import VERDICTS
from tests.suites.conftest import Run, only

CLAIMS = ("EMAD-F1", "EMAD-F1-literal", "EMAD-E1", "EMAD-E3", "EMAD-E9", "EMAD-E13", "EMAD-R1", "EE-8", "EAD-H1")
PAIR = "emad-nano,emad-tiny"
TABLE = re.compile(r"^(claim +.*?)\n(?:\n|=|\Z)", re.DOTALL | re.MULTILINE)


def rows(text: str) -> list[str]:
    """Return the claims table, line by line."""
    found = TABLE.search(text.replace("\r", ""))
    assert found, text
    return [line.rstrip() for line in found[1].splitlines() if line.strip()]


def test_the_table_is_that_of_the_suites(
    judge: Run, reader: Path, ungated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1 has no gate here, so both have status 0."""
    monkeypatch.setenv("COLUMNS", "150")  # tables are as wide as the terminal
    files = ("claims/test_model.py", "claims/test_pair.py::test_claim_of_names")
    suites = judge(*files, model=reader, pair=PAIR, corpus="self", claims=ungated, more=("-v", *only(*CLAIMS)))
    assert suites.ret == pytest.ExitCode.OK
    capsys.readouterr()
    arguments = ["judge", str(reader), "--pair", PAIR, "--corpus", "self", "--only", ",".join(CLAIMS)]
    arguments += ["--register", str(ungated)]
    assert main(arguments) == 0
    mine, theirs = rows(capsys.readouterr().out), rows(suites.stdout.str())
    assert len(mine) > len(CLAIMS)
    assert mine[:2] == theirs[:2]
    assert sorted(mine) == sorted(theirs), "the suites decide gating rows first"


def test_a_pair_is_asked_about_where_one_was_named(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a user's own model no pair is meant: a note says so, or an error if nothing else was selected."""
    skipped = (
        '(EAD-H1) and "What reading tokens twice takes off the saving" (EAD-H2): no pair was named; name one by --pair'
    )
    asked = ["judge", str(reader), "--corpus", "self", "--only"]
    assert main([*asked, "EE-8,EAD-H*"]) == 0
    said = capsys.readouterr()
    assert " ".join(said.err.split()).count(skipped) == 1
    assert "EAD-H1" not in said.out
    assert main([*asked, "EAD-H1"]) == 4
    assert "--pair=None, but expected SMALL,LARGE; EAD-H1 needs a pair of models" in capsys.readouterr().err
    assert main([*asked, "EAD-H1", "--small-model", "emad-nano", "--large-model", "emad-tiny"]) == 0
    assert "EAD-H1" in capsys.readouterr().out


def test_a_falsified_gate_is_status_1_and_a_bad_claim_4(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["judge", str(reader), "--corpus", "self", "--claims", "EMAD-E13"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("PASSED: no claim of this run is a gate\n"), (
        "the first line gives the result"
    )
    assert main([*arguments, "--gate-claims", "EMAD-E13"]) == 1
    said = capsys.readouterr()
    assert "EMAD-E13" in said.err
    assert said.out.startswith("FAILED: 1 of 1 gate does not hold\n")
    assert main([*arguments[:-1], "EMAD-X9"]) == 4
    assert "--claims='EMAD-X9', but expected an id of the register" in capsys.readouterr().err


def test_a_decoder_elsewhere_is_asked_in_place_of_ours(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The address has no listener, which ends the run."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    asked = ["judge", str(reader), "--corpus", "self", "--claims", "EMAD-E5", "--decoder-timeout", "5"]
    assert main([*asked, "--decoder", where]) == 4
    assert f"emad: decoder={where}: call 'hello': no connection" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--decoder", "udp:1"])
    assert (
        "--decoder='udp:1', but expected exec:COMMAND, tcp:HOST:PORT or http(s)://HOST:PORT" in capsys.readouterr().err
    )


def test_the_record_is_asked_as_the_suites_ask_it(
    judge: Run, reader: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``emad judge`` compares itself with the suites' record, and a change is status 1."""
    golden, claims = tmp_path / "golden", ("EMAD-E13", "EE-8")
    golden.mkdir()
    files = ("claims/test_model.py",)
    more = ("--emad-update-golden", *only(*claims))
    judge(*files, model=reader, corpus="self", golden=golden, more=more)
    asked = ["judge", str(reader), "--corpus", "self", "--claims", ",".join(claims), "--golden", str(golden)]
    known = [*asked, "--gate", "known"]
    assert main(known) == 0
    assert "2 verdicts compared with the record: 2 as recorded" in capsys.readouterr().out
    assert judge(*files, model=reader, corpus="self", golden=golden, gate="known", more=only(*claims)).ret == 0
    capsys.readouterr()
    assert main([*known, "--seed", "1"]) == 1
    assert "gate known: nothing was compared" in capsys.readouterr().err
    record = golden / VERDICTS
    record.write_text(record.read_text().replace("falsified", "survived"))
    assert main(known) == 1
    assert "The verdict on record is survived: gate known fails on any change." in capsys.readouterr().err
    assert main(asked) == 0, "gate paper needs no record"
    record.write_text("[")
    assert main(known) == 4
    assert "verdicts.json cannot be read as JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--corpus", "nowhere.txt"], "an existing file; looked at"),
        (["--data", "nowhere"], "an existing folder"),
        (["--margin", "wide"], "a number of nats"),
        (["--seed", "-1"], "a whole number ≥ 0"),
        (["--require", "sped"], "a comma list of energy, speed, quality, golden"),
    ],
)
def test_bad_values_are_refused_before_anything_is_loaded(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["judge", "emad-tiny", *arguments])
    assert stopped.value.code == 4
    assert said in " ".join(capsys.readouterr().err.split())


def test_without_what_it_needs_one_clear_error(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A corpus of text and no tokenizer."""
    assert main(["judge", str(tiny), "--corpus", "world:mixed", "--claims", "EMAD-E1"]) == 4
    assert "came without a tokenizer" in capsys.readouterr().err


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
    assert re.search(r"^KL at float32 +falsified ", text, re.MULTILINE)


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
