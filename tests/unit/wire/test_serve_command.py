"""``emad serve``: who may reach it, what reaches standard output, how it ends. What it answers, laws say."""

from __future__ import annotations

import os
import signal

import pytest

from emad_ref import cli
from emad_ref.cli import serving


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tcp", "0.0.0.0:0"], "--tcp='0.0.0.0:0', but expected an address of the loopback interface"),
        (["--tcp", "[::]:0"], "--tcp='[::]:0', but expected an address of the loopback interface"),
        (["--tcp", "7007"], "--tcp='7007', but expected"),
        (["--tcp", "127.0.0.1:seven"], "a port in 0–65535"),
        (["--tcp", "no.such.host.invalid:7007"], "an address to listen on"),
        (["--tcp", "192.0.2.1:7007", "--anywhere"], "an address to listen on"),
        (["--threads", "0"], "--threads=0, but expected a whole number ≥ 1"),
        (["no-such-model"], "name='no-such-model', but expected one of"),
        (["--device", "cuda:99"], "device='cuda:99', but expected a device of this machine"),
    ],
    ids=str,
)
def test_bad_input_exits_1_and_says_why_on_stderr_alone(capfd, arguments, said):
    assert cli.main(["serve", "emad-nano", *arguments]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("emad: ")
    assert said in err
    assert "Traceback" not in err
    assert "add --anywhere" in err or "loopback interface" not in err


@pytest.mark.parametrize(("text", "anywhere"), [("127.0.0.1:0", False), ("localhost:0", False), ("0.0.0.0:0", True)])
def test_a_listener_has_a_port_of_its_own(text, anywhere):
    with serving._listener(text, anywhere) as listener:
        assert listener.getsockname()[1] > 0


def test_a_port_that_is_taken_is_a_clear_error(capfd):
    with serving._listener("127.0.0.1:0", False) as listener:
        port = listener.getsockname()[1]
        assert cli.main(["serve", "emad-nano", "--tcp", f"127.0.0.1:{port}"]) == 1
    assert "an address to listen on" in capfd.readouterr().err


def test_over_a_pipe_standard_output_belongs_to_replies(capfd):
    with serving._replies_alone() as replies:
        print("a library says hello")
        os.write(1, b"a native library, too\n")
        os.write(replies, b"EMW1")
    out, err = capfd.readouterr()
    assert out == "EMW1"
    assert {"a library says hello", "a native library, too"} <= set(err.splitlines())
    print("as before")
    assert capfd.readouterr().out == "as before\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_nothing_else(number):
    before = signal.getsignal(number)
    with pytest.raises(serving.Stopped), serving._stops_on_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    assert not issubclass(serving.Stopped, Exception), "a call would answer it, and the loop go on"
