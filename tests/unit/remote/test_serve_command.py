"""``emad serve``: access, standard output, and termination. ``tests/laws/test_wire.py`` tests its answers."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest

from emad_ref.protocol import Unsupported
from pytest_emad import cli
from pytest_emad.cli import server
from pytest_emad.remote.address import ServerAddress, ServerLimits
from pytest_emad.remote.client import Connection, DecoderFailed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tcp", "0.0.0.0:0"], "--tcp='0.0.0.0:0', but expected an address of the loopback interface"),
        (["--tcp", "[::]:0"], "--tcp='[::]:0', but expected an address of the loopback interface"),
        (["--tcp", "7007"], "--tcp='7007', but expected HOST:PORT; name both, e.g. 127.0.0.1:7007\n"),
        (["--lens", "nowhere"], "emad: lens='nowhere' cannot be read (No such file or directory); fit it again"),
        (
            ["--exit", "nowhere"],
            "emad: --exit='nowhere', but expected an existing file; looked at",
        ),
        (["--tcp", "127.0.0.1:seven"], "a port in 0–65535"),
        (["--tcp", "no.such.host.invalid:7007"], "an address to listen on"),
        (["--tcp", "192.0.2.1:7007", "--anywhere"], "an address to listen on"),
        (["--threads", "0"], "threads=0, but expected a number from 1 to 4,096"),
        (["--connections", "0"], "connections=0, but expected a number from 1 to 1,000,000,000"),
        (["--sessions", "-1"], "sessions=-1, but expected a number from 1 to"),
        (["--positions", "99999999999"], "--positions=99999999999, but expected a number from"),
        (["--idle", "0"], "idle=0.0, but expected a number from 0.001 to"),
        (["--idle", "nan"], "idle=nan, but expected a number from 0.001 to"),
        (["--positions", "0"], "--positions=0, but expected a number from 1 to"),
        (["--threads", "99999999999"], "threads=99999999999, but expected a number from 1 to 4,096"),
        (["--device", "meta"], "--device='meta', but expected a torch device that computes"),
        (["--device", "cpu:99"], "--device='cpu:99', but expected a torch device that computes"),
        (["no-such-model"], "name='no-such-model', but expected one of"),
        (["--device", "cuda:99"], "device='cuda:99', but expected a device of this machine"),
    ],
    ids=str,
)
def test_bad_input_exits_1_and_says_why_on_stderr_alone(capfd, arguments, said):
    assert cli.main(["serve", "emad-nano", *arguments]) == 4
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("emad: ")
    assert said in err
    assert "Traceback" not in err
    assert "add --anywhere" in err or "loopback interface" not in err


def test_a_blank_path_is_a_usage_error(capsys):
    """For every verb, an unset variable is no file. One message names every refused value."""
    assert cli.main(["serve", "emad-nano", "--lens", " ", "--exit", " ", "--threads", "0"]) == 4
    said = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("emad: ").partition(";")[0] for line in said] == [
        "--lens=' ', but expected a path",
        "--exit=' ', but expected a name",
        "--threads=0, but expected a number from 1 to 4,096",
    ]


@pytest.mark.parametrize(("text", "anywhere"), [("127.0.0.1:0", False), ("localhost:0", False), ("0.0.0.0:0", True)])
def test_a_listener_has_a_port_of_its_own(text, anywhere):
    with server._open_listener(text, anywhere) as listener:
        assert listener.getsockname()[1] > 0


def test_a_port_that_is_taken_is_a_clear_error(capfd):
    with server._open_listener("127.0.0.1:0", False) as listener:
        port = listener.getsockname()[1]
        assert cli.main(["serve", "emad-nano", "--tcp", f"127.0.0.1:{port}"]) == 4
    assert "an address to listen on" in capfd.readouterr().err


def test_over_a_pipe_standard_output_belongs_to_replies(capfd):
    with server._reserve_stdout() as replies:
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
    with pytest.raises(server.ServerStopped), server._stop_on_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    assert not issubclass(server.ServerStopped, Exception), "a call would answer it, and the loop would continue"


# ---------------------------------------------------------------- several judges


@pytest.fixture
def port():
    """Return the port of a service for two judges that serves no model."""
    listener, stopped = server._open_listener("127.0.0.1:0", False), []

    def refuse(request):
        raise Unsupported("nothing is served here")

    def serve():
        try:
            server._serve_clients(listener, refuse, 2, ServerLimits(idle_s=20))
        except OSError as error:
            stopped.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert stopped
    listener.close()


def greeted(port):
    return Connection(ServerAddress("tcp", "127.0.0.1", port), 10)


def test_one_judge_too_many_is_told_so_and_has_its_turn_once_another_leaves(port, capfd):
    first, second = greeted(port), greeted(port)
    with pytest.raises(DecoderFailed, match="all 2 connections are in use; start emad serve with more --connections"):
        greeted(port)
    first.close()
    deadline = time.monotonic() + 5
    while True:
        with suppress(DecoderFailed):  # its thread may take a moment to end
            greeted(port).close()
            break
        assert time.monotonic() < deadline
    second.close()
    assert "a client was refused" in capfd.readouterr().err


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOMEM])
def test_a_connection_that_cannot_be_taken_ends_no_service(monkeypatch, capfd, number):
    monkeypatch.setattr(server, "PAUSE_S", 0.01)
    answers = [OSError(number, os.strerror(number))] * 3 + [("a judge", "its address")]

    class Listener:
        def accept(self):
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return answer

    assert server._accept(Listener()) == "a judge"
    assert capfd.readouterr().err.count("a connection could not be accepted") == 1


def test_a_listener_that_is_gone_is_the_end(monkeypatch):
    with server._open_listener("127.0.0.1:0", False) as listener:
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        server._accept(listener)


def test_a_service_without_descriptors_serves_on_once_there_are_some(port, monkeypatch):
    """The kernel's own error: descriptors of this process run out, and are freed again."""
    monkeypatch.setattr(server, "PAUSE_S", 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours = [greeted(port)]  # already accepted: the other side has its descriptor
    spare = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(n) for n in os.listdir("/proc/self/fd")) + 8, hard))
    try:
        with suppress(OSError):
            while True:
                spare.append(os.dup(0))
        os.close(spare.pop())  # for our end; there is none for the server's
        ours.append(socket.create_connection(("127.0.0.1", port)))
        time.sleep(0.3)
    finally:
        for descriptor in spare:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ours.pop(0).close()
    ours.pop(0).close()
    deadline = time.monotonic() + 5
    while True:
        with suppress(DecoderFailed):
            greeted(port).close()
            break
        assert time.monotonic() < deadline


def test_without_another_thread_a_judge_is_turned_away(port, monkeypatch, capfd):
    def start(self, original=threading.Thread.start):
        if self._target is server._serve_client:
            raise RuntimeError("can't start new thread")
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(DecoderFailed, match="can't start new thread"):
        greeted(port)
    monkeypatch.undo()
    greeted(port).close()
