"""Addresses of decoders: read without starting anything, refused with what is wrong and what to do."""

from __future__ import annotations

import sys

import pytest

from emad_ref.errors import BadArgument
from emad_ref.wire.address import ProgramAddress, ServerAddress, parse_address


@pytest.fixture
def folder(tmp_path):
    """With a program, and a file that is none."""
    program = tmp_path / "de coder"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


def test_a_program_is_split_as_a_shell_would_and_found_from_its_folder(folder):
    found = parse_address("exec:'./de coder' --threads 1 \"a b\" $HOME", folder, "--emad-decoder")
    words = (str(folder / "de coder"), "--threads", "1", "a b", "$HOME")
    assert found == ProgramAddress("exec:'./de coder' --threads 1 \"a b\" $HOME", words, folder)
    assert str(found) == "exec:'./de coder' --threads 1 \"a b\" $HOME"


def test_a_bare_name_is_looked_up_along_the_path(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    assert parse_address("exec:'de coder'", folder.parent, "x").words == (str(folder / "de coder"),)
    assert parse_address(f"exec:{sys.executable} -V", folder, "x").words == (sys.executable, "-V")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("tcp:127.0.0.1:7007", "127.0.0.1", 7007), ("tcp:[::1]:1", "::1", 1), ("tcp:box:65535", "box", 65535)],
)
def test_a_server_is_a_host_and_a_port(folder, text, host, port):
    assert parse_address(text, folder, "x") == ServerAddress(text, host, port)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "but expected exec:COMMAND or tcp:HOST:PORT"),
        ("./decoder", "but expected exec:COMMAND or tcp:HOST:PORT"),
        ("udp:127.0.0.1:7007", "but expected exec:COMMAND or tcp:HOST:PORT"),
        ("exec:", "a command behind exec:"),
        ("exec:  ", "a command behind exec:"),
        ("exec:''", "a command behind exec:"),
        ("exec:'./decoder", "a command with its quotes closed; No closing quotation"),
        ("exec:./nowhere", "a program that is there and can be run; looked at"),
        ("exec:./notes.txt", "a program that is there and can be run; looked at"),
        ("exec:./", "a program that is there and can be run; looked at"),
        ("exec:no-such-program-anywhere", "looked along PATH; ./NAME means this folder"),
        ("tcp:7007", "name both"),
        ("tcp::7007", "name both"),
        ("tcp:127.0.0.1:", "a port in 1–65535"),
        ("tcp:127.0.0.1:0", "a port in 1–65535"),
        ("tcp:127.0.0.1:65536", "a port in 1–65535"),
        ("tcp:127.0.0.1:-1", "a port in 1–65535"),
        ("tcp:127.0.0.1:seven", "a port in 1–65535"),
        ("tcp:127.0.0.1:" + "9" * 5000, "a port in 1–65535"),
        ("tcp:127.0.0.1:²", "a port in 1–65535"),
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_address_is_refused(folder, text, said):
    with pytest.raises(BadArgument, match=r"^--emad-decoder=") as refused:
        parse_address(text, folder, "--emad-decoder")
    assert said in str(refused.value)
