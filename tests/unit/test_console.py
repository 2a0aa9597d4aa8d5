"""Any text prints on a terminal of any encoding; the exit of a command."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from emad_ref.console import (
    INTERRUPTED,
    UnsafeTextEscapingStream,
    print_error,
    run_cli_command,
    set_stream_ascii_fallback,
    to_ascii,
)
from emad_ref.errors import LONGEST_MESSAGE, BadArgument, EmadError, escape_unsafe

EMAD = [sys.executable, "-m", "pytest_emad"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain × → é 日本\tline\nnext", "plain × → é 日本\tline\nnext"),
        ("\x1b[2J\x07\r\x00\x7f\x9b", r"\x1b[2J\x07\r\x00\x7f\x9b"),
        ("user\u202etxt.exe\u2066\u200e", r"user\u202etxt.exe\u2066\u200e"),
        ("bad \udcff name", r"bad \udcff name"),
        ("\u2028\u2029", r"\u2028\u2029"),
    ],
)
def test_unsafe_characters_become_escapes(text, shown):
    assert escape_unsafe(text) == shown


def test_long_text_is_cut_and_its_length_is_told():
    assert escape_unsafe("a" * 5000, 10) == "aaaaaaaaaa… (5000 characters)"


def test_a_long_message_keeps_its_argument_and_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    error = EmadError(f"profile.schema='{'a' * 9000}\x1b', but expected 5; calibrate again")
    print_error(error)
    for shown in (str(error), capsys.readouterr().err):
        assert "profile.schema='aaa" in shown
        assert re.search(r"a… \(90\d\d characters\) …a", shown)
        assert shown.rstrip("\n").endswith("a\\x1b', but expected 5; calibrate again")
        assert len(shown) <= LONGEST_MESSAGE + len("emad: \n")


def test_errors_escape_and_bound_what_they_quote():
    message = str(EmadError("decoder said \x1b[2J" + "x" * 10_000))
    assert message.startswith(r"decoder said \x1b[2Jxxx")
    assert len(message) < 4_100
    named = BadArgument("texts", "y" * 10_000, "a short one", "shorten it")
    assert str(named).endswith("… (10002 characters), but expected a short one; shorten it")


def test_signs_have_a_likeness_in_ascii():
    assert to_ascii("−0.5 ≤ τ_ℓ × ½ → ±3 … é █") == "-0.5 <= tau_l x 1/2 -> +-3 ... e #"
    assert to_ascii("日") == r"\u65e5"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "utf-8", "latin-1"])
def test_a_stream_of_any_encoding_takes_any_text(encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    set_stream_ascii_fallback(stream)
    stream.write("0.81× → 日 \udcff")
    stream.flush()
    assert raw.getvalue().decode(encoding).startswith(("0.81x -> ", "0.81× -> ", "0.81× → "))


def test_colours_pass_and_cursor_movements_do_not():
    raw = io.StringIO()
    UnsafeTextEscapingStream(raw).write("\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07")
    assert raw.getvalue() == "\x1b[31mred\x1b[0m " + r"\x1b[2J\x1b]0;title\x07"


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (EmadError("no such model"), 4, "emad: no such model\n"),
        (KeyboardInterrupt(), INTERRUPTED, "emad: interrupted\n"),
        (
            ConnectionRefusedError(111, "Connection refused"),
            1,
            "emad: ConnectionRefusedError: [Errno 111] Connection refused\n",
        ),
        (OSError(28, "No space left on device"), 1, "emad: output: No space left on device\n"),
    ],
)
def test_what_ends_a_command_is_one_line_and_a_status(capsys, raised, status, said):
    def body():
        raise raised

    assert run_cli_command(body) == status
    assert capsys.readouterr().err == said


def test_a_pipe_that_breaks_where_there_is_no_output_is_a_status(monkeypatch):
    def body():
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", None)
    assert run_cli_command(body) == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "status"), [("generate emad-nano Kai --max-new-tokens 1", 0), ("verify nowhere", 4)]
)
def test_a_closed_stream_is_no_traceback_and_goes_to_no_other(closed, arguments, status):
    words = f"{shlex.join(EMAD)} {arguments} {closed}"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert "Traceback" not in done.stderr
    assert done.returncode == status
    assert bool(done.stdout) == (status == 0 and closed == "2>&-")
    assert ("emad:" in done.stderr) == (status == 4 and closed == ">&-")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("arguments", [("world", "world:premise", "--documents", "1"), ("verify", "nowhere ×→\u202e")])
def test_verbs_print_under_any_code_page(encoding, arguments):
    environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
    done = subprocess.run([*EMAD, *arguments], capture_output=True, env=environment, cwd=ROOT)
    assert b"Traceback" not in done.stderr
    assert done.returncode == (0 if arguments[0] == "world" else 4)


def test_a_reader_that_leaves_costs_no_traceback():
    command = [*EMAD, "world", "world:premise", "--documents", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def heed_interrupts() -> None:
    """A shell starts background programs with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_is_one_line():
    command = [*EMAD, "world", "world:premise", "--documents", "1000000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, preexec_fn=heed_interrupts
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == b"emad: interrupted\n"
    assert process.returncode == INTERRUPTED
