"""Client of a remote decoder: addresses, replies, refusals, and broken connections."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.protocol import InadmissibleDepth, Prompt, Unsupported
from pytest_emad.remote.address import ProgramAddress, ServerAddress, parse_address
from pytest_emad.remote.client import Connection, DecoderClient, DecoderFailed
from pytest_emad.remote.frames import WireFrame, encode_frame_to_buffers
from tests.unit.remote.scripted_decoder import (
    LAYERS,
    MODEL,
    REQUEST,
    ROWS,
    VOCABULARY,
    honest,
    listening,
    state,
    step,
    work,
)
from tests.unit.workers.test_child_process import gone

PROMPTS = [Prompt(np.array([1, 2, 3]))] * ROWS
TOKENS = np.array([[1, 2], [3, 4]])
SECONDS = 20.0  # only a hang takes as long


def frame_bytes(frame):
    return b"".join(bytes(part) for part in encode_frame_to_buffers(frame))


@contextmanager
def opened(seconds=SECONDS, **replies):
    """Yield a client and one of its decoders; the server sends ``replies``."""
    with listening(**replies) as (where, asked):
        remote = DecoderClient(where, seconds)
        try:
            yield remote, remote.open_decoder(REQUEST, MODEL, VOCABULARY), asked
        finally:
            remote.close()


@contextmanager
def session_of(seconds=SECONDS, **replies):
    with opened(seconds, **replies) as (remote, decoder, asked):
        yield remote, decoder.start(PROMPTS)[0], asked


def changed(call, name, value=None):
    """Return the honest reply to ``call`` with an array replaced or removed."""
    reply = honest()[call]
    kept = {other: array for other, array in reply.arrays.items() if other != name}
    return WireFrame(reply.header, kept if value is None else kept | {name: value})


# ---------------------------------------------------------------- an honest server


def test_a_session_shows_what_came_with_the_last_reply():
    with session_of() as (_, session, asked):
        assert (session.length.tolist(), session.cap.tolist(), session.work) == ([3, 3], [LAYERS] * 2, work())
        fed = session.feed(TOKENS, np.ones((2, 2), np.int64))
        assert fed.logits.shape == (ROWS, 2, VOCABULARY)
        assert session.length.tolist() == [5, 5]
        assert session.deepen(np.array([4, 4])).depth.tolist() == [[LAYERS], [LAYERS]]
        session.rollback(np.array([2, 2]))
        session.commit(np.array([2, 2]))
        session.drop(np.array([0]))
        assert session.length.tolist() == [2]
        session.close()
        session.close()
        calls = [frame.header["call"] for frame in asked]
        assert calls == ["hello", "open", "start", "feed", "deepen", "rollback", "commit", "drop", "end"]
        assert asked[3].header["session"] == 6
        assert asked[3].arrays["depth"].tolist() == [[1, 1], [1, 1]]
        assert asked[7].arrays["rows"].tolist() == [0]
        with pytest.raises(BadArgument, match="session='closed'"):
            session.feed(TOKENS)


def test_what_is_asked_of_logits_alone_is_said():
    only = step(ROWS, 2).arrays | {"logits": np.zeros((ROWS, 1, VOCABULARY), np.float32)}
    with session_of(feed=WireFrame({"reply": "feed"}) + state() + WireFrame(arrays=only)) as (_, session, asked):
        assert session.feed(TOKENS, last=1).logits.shape == (ROWS, 1, VOCABULARY)
        assert asked[-1].header["last"] == 1
        assert "depth" not in asked[-1].arrays


def test_properties_are_copies():
    with session_of() as (_, session, _):
        session.length[:] = 99
        session.cap[:] = 99
        session.work.tokens[:] = 99
        assert (session.length.tolist(), session.cap.tolist(), session.work) == ([3, 3], [LAYERS] * 2, work())


def test_generate_synchronize_and_close():
    with opened() as (remote, decoder, asked):
        record = decoder.generate(PROMPTS, 2, frozenset({5, 4}))
        assert record.stop == ["stop token", "length"]
        assert (asked[-1].header["max_new"], asked[-1].header["stop"]) == (2, [4, 5])
        decoder.synchronize()
        decoder.close()
        decoder.close()
        with pytest.raises(BadArgument, match="decoder='closed'"):
            decoder.generate(PROMPTS, 2)
        remote.close()
        remote.close()
        assert [frame.header["call"] for frame in asked][-4:] == ["generate", "synchronize", "close", "bye"]


def test_decoders_of_one_remote_share_a_connection_and_a_session_ends_with_its_decoder():
    with opened() as (remote, decoder, asked):
        session, _ = decoder.start(PROMPTS)
        remote.open_decoder(REQUEST, MODEL, VOCABULARY)
        decoder.close()
        session.close()
        assert [frame.header["call"] for frame in asked] == ["hello", "open", "start", "open", "close"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [("Unsupported", Unsupported), ("InadmissibleDepth", InadmissibleDepth), ("BadArgument", BadArgument)],
)
def test_a_refusal_is_an_answer(kind, error):
    with session_of(feed=WireFrame({"error": kind, "message": "not so"})) as (_, session, _):
        with pytest.raises(error, match=r"^not so$"):
            session.feed(TOKENS)
        assert session.length.tolist() == [3, 3]
        session.rollback(np.array([2, 2]))  # the connection stays open


def test_a_failure_that_is_told_leaves_the_connection():
    with session_of(feed=WireFrame({"error": "Failure", "message": "NotFinite: layer 3"})) as (_, session, _):
        with pytest.raises(DecoderFailed, match="call 'feed': the decoder reports a failure: NotFinite: layer 3"):
            session.feed(TOKENS)
        session.rollback(np.array([2, 2]))


def test_what_is_no_argument_is_not_sent():
    with session_of() as (_, session, asked):
        sent = len(asked)
        for call in (
            lambda: session.feed(np.array([1, 2])),
            lambda: session.feed(np.array([[0.5]])),
            lambda: session.feed(TOKENS, depth=np.full((2, 2), np.nan)),
            lambda: session.rollback(np.array([1.0, 2.0])),
            lambda: session.drop(np.array([True, False])),
            lambda: session.feed(TOKENS, last=1.5),
        ):
            with pytest.raises(BadArgument):
                call()
        assert len(asked) == sent


# ---------------------------------------------------------------- a hostile server


def closes(judge):
    judge.shutdown(socket.SHUT_RDWR)


def resets(judge):
    judge.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def sends_half(judge):
    judge.sendall(frame_bytes(honest()["feed"])[:-8])


def sends_a_line(judge):
    judge.sendall(b"INFO decoder ready\n")
    time.sleep(1)


HOSTILE = {
    "wrong magic": (b"Hello, I am a log line\n", "b'Hello, I am a log line\\n' where a frame begins with b'EMW1'"),
    "a print and no more": (sends_a_line, "b'INFO decoder ready\\n' where a frame begins"),
    "header too large": (b"EMW1" + b"\xff" * 12, "a frame with a header of 4294967295 bytes"),
    "not JSON": (b"EMW1" + (3).to_bytes(4, "little") + bytes(8) + b"{x}", "a frame with a header that is not JSON"),
    "sizes that do not add up": (
        frame_bytes(honest()["feed"]).replace(b'"shape": [2, 2, 7]', b'"shape": [2, 2, 8]'),
        "bytes, but its arrays take",
    ),
    "unknown dtype": (frame_bytes(honest()["feed"]).replace(b"float32", b"float16"), "dtype='float16', but expected"),
    "no reply at all": (WireFrame({"wire": 1}), "a reply to None"),
    "a reply to another call": (honest()["rollback"], "a reply to 'rollback'"),
    "an unknown kind of error": (WireFrame({"error": "Ouch", "message": "x"}), "error='Ouch', but expected one of"),
    "an error without a message": (WireFrame({"error": "Failure"}), "with a message"),
    "no logits": (changed("feed", "logits"), "logits=None, but expected an array, float32 or float64 [2, 2, 7]"),
    "no signal": (changed("feed", "signal"), "signal=None"),
    "no state": (changed("feed", "length"), "length=None, but expected an array, int64 [2]"),
    "no work": (changed("feed", "work.fills"), "work.fills=None, but expected an array, int64 [2, 4]"),
    "logits of another vocabulary": (
        changed("feed", "logits", np.zeros((2, 2, 9))),
        "logits='float64 [2, 2, 9]', but expected float32 or float64 [2, 2, 7]",
    ),
    "logits of the last token alone": (changed("feed", "logits", np.zeros((2, 1, 7))), "[2, 1, 7]"),
    "depths of another shape": (changed("feed", "depth", np.ones((2, 1), np.int64)), "depth='int64 [2, 1]'"),
    "NaN depths": (changed("feed", "depth", np.full((2, 2), np.nan)), "depth='float64 [2, 2]', but expected int64"),
    "depths that no layer has": (changed("feed", "depth", np.full((2, 2), 5)), "depth=5, but expected 1–4"),
    "caps that no layer has": (changed("feed", "cap", np.zeros(2, np.int64)), "cap=0, but expected 1–4"),
    "a closed socket": (closes, "no reply: the server closed the connection"),
    "a reset socket": (resets, "no reply: the server closed the connection"),
    "half a frame": (sends_half, "no reply: the server closed the connection"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_comes_in_place_of_a_reply_is_one_clear_error(kind):
    reply, said = HOSTILE[kind]
    with session_of(feed=reply) as (remote, session, asked):
        with pytest.raises(DecoderFailed) as failed:
            session.feed(TOKENS)
        assert str(failed.value).startswith(f"decoder={remote.address}: call 'feed': ")
        assert said in str(failed.value)
        # that connection is closed for good …
        with pytest.raises(DecoderFailed, match="call 'rollback': the connection broke before, in call 'feed'"):
            session.rollback(np.array([2, 2]))
        sent = len(asked)
        session.close()
        assert len(asked) == sent
        # … and the next decoder opens its own
        decoder = remote.open_decoder(REQUEST, MODEL, VOCABULARY)
        assert decoder.start(PROMPTS)[0].length.tolist() == [3, 3]
        assert [frame.header["call"] for frame in asked[sent:]] == ["hello", "open", "start"]


def test_a_hang_ends_with_the_time_limit():
    with session_of(seconds=0.3, feed=lambda judge: time.sleep(3)) as (_, session, _):
        began = time.monotonic()
        with pytest.raises(DecoderFailed, match=r"no reply within 0\.3 s; raise the time limit"):
            session.feed(TOKENS)
        assert time.monotonic() - began < 2


def test_a_reply_that_stalls_ends_with_the_time_limit():
    def stalls(judge):
        judge.sendall(b"EM")
        time.sleep(3)

    said = r"no reply within 0\.3 s, b'EM' so far"
    with session_of(seconds=0.3, feed=stalls) as (_, session, _), pytest.raises(DecoderFailed, match=said):
        session.feed(TOKENS)


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (
            WireFrame({"reply": "hello", "wire": 2, "name": "x"}),
            "it speaks version 2 of the wire protocol; pytest-emad",
        ),
        (WireFrame({"reply": "hello", "name": "x"}), "it speaks version None"),
        (WireFrame({"reply": "hello", "wire": 1}), "name=None, but expected how reports call the decoder"),
        (
            WireFrame({"error": "BadArgument", "message": "wire=1, but expected 2"}),
            "it refuses: wire=1, but expected 2",
        ),
    ],
)
def test_another_version_is_a_clear_error(hello, said):
    with listening(hello=hello) as (where, _), pytest.raises(DecoderFailed, match="call 'hello': ") as failed:
        Connection(where, SECONDS)
    assert said in str(failed.value)


def test_nobody_listening_is_a_clear_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DecoderFailed, match=r"call 'hello': no connection \(.*refused\); is it started"):
        Connection(parse_address(f"tcp:127.0.0.1:{port}", tmp_path, "x"), SECONDS)


# ---------------------------------------------------------------- programs

HELLO = """
import os, signal, subprocess, sys, time
def told(text): print(text, file=sys.stderr, flush=True)
def request():
    head = sys.stdin.buffer.read(16)
    if not head: sys.exit(0)
    sys.stdin.buffer.read(int.from_bytes(head[4:8], "little") + int.from_bytes(head[8:], "little"))
def reply(text):
    frame = b"EMW1" + len(text).to_bytes(4, "little") + bytes(8) + text
    os.write(1, frame)
request()
reply(b'{"reply": "hello", "wire": 1, "name": "script", "arrays": []}')
request()
"""


@contextmanager
def script(tmp_path, lines, seconds=SECONDS, hello=HELLO):
    """Connect to a program that greets and then does ``lines`` at the next call."""
    (tmp_path / "decoder.py").write_text(hello + lines)
    program = parse_address(f"exec:{sys.executable} -S decoder.py", tmp_path, "x")
    connection = Connection(program, seconds)
    try:
        yield connection
    finally:
        connection.close()


def failing(connection):
    with pytest.raises(DecoderFailed) as failed:
        connection.call("synchronize", WireFrame({"decoder": 1}), lambda reply: None)
    assert not connection.is_usable
    return str(failed.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("told('out of memory'); os.kill(os.getpid(), signal.SIGKILL)", "no reply: it was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "no reply: it was killed by SIGSEGV"),
        ("sys.exit(3)", "no reply: it ended with status 3"),
        ("sys.exit(0)", "no reply: it ended with status 0"),
        ("os.write(1, b'EMW1abc'); sys.exit(1)", "it ended with status 1 after b'abc'"),
        ("print('loading weights'); sys.stdout.flush(); time.sleep(9)", "b'loading weights\\n' where a frame begins"),
    ],
    ids=str,
)
def test_how_a_program_ended_is_said(tmp_path, lines, said):
    with script(tmp_path, lines) as connection:
        assert said in failing(connection)


def test_the_last_lines_of_standard_error_are_shown(tmp_path):
    lines = "for i in range(5000): told(f'line {i}')\nsys.stderr.write('no newline'); sys.stderr.flush(); os._exit(1)"
    with script(tmp_path, lines) as connection:
        shown = failing(connection).partition("last lines of its standard error:\n")[2].splitlines()
    assert [line.strip() for line in shown] == [f"line {i}" for i in range(4981, 5000)] + ["no newline"]


def test_a_program_that_writes_without_end_to_standard_error_is_not_held_up(tmp_path):
    """More than a pipe holds, and a line without an end."""
    lines = 'sys.stderr.write(\'x\' * 500_000); reply(b\'{"reply": "synchronize", "arrays": []}\'); request()'
    with script(tmp_path, lines) as connection:
        connection.call("synchronize", WireFrame({"decoder": 1}), lambda reply: None)


def test_a_program_that_hangs_is_killed_with_all_it_started(tmp_path):
    lines = "child = subprocess.Popen(['sleep', '60']); told(f'{os.getpid()} {child.pid}'); time.sleep(60)"
    with script(tmp_path, lines, seconds=1.0) as connection:
        said = failing(connection)
        assert "no reply within 1 s" in said
        for pid in said.splitlines()[-1].split():
            assert gone(int(pid)), pid  # before either side closes anything


def test_a_program_that_closes_its_output_and_runs_on_is_killed(tmp_path):
    with script(tmp_path, "told(os.getpid()); os.close(1); time.sleep(60)") as connection:
        said = failing(connection)
        assert "no reply: it closed its standard output and still runs" in said
        assert gone(int(said.splitlines()[-1]))


def test_a_program_that_does_not_read_is_a_hang(tmp_path):
    """A request larger than a pipe, which the program does not read."""
    hello = HELLO.rpartition("request()")[0] + "time.sleep(60)"
    with script(tmp_path, "", seconds=0.5, hello=hello) as connection, pytest.raises(DecoderFailed, match="no reply"):
        connection.call("feed", WireFrame(arrays={"tokens": np.zeros(1 << 20)}), lambda reply: None)


def test_a_program_says_goodbye_and_goes_by_itself(tmp_path):
    lines = "reply(b'{\"reply\": \"bye\", \"arrays\": []}'); time.sleep(0.1); open('went', 'w').close()"
    with script(tmp_path, lines):
        pass
    assert (tmp_path / "went").exists()


def test_a_program_that_ignores_the_goodbye_is_killed(tmp_path):
    hello = HELLO.rpartition("request()")[0] + "open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    with script(tmp_path, "", seconds=0.3, hello=hello):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_program_that_cannot_be_started_is_a_clear_error(tmp_path):
    program = tmp_path / "decoder"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    with pytest.raises(DecoderFailed, match=r"call 'hello': it cannot be started \(.*Exec format error"):
        Connection(ProgramAddress("exec:./decoder", (str(program),), tmp_path), SECONDS)


@pytest.mark.parametrize(
    ("leaves", "last"),
    [
        ("if not os.fork(): stay()\n    os._exit(0)", "time.sleep(60)"),
        ("if not os.fork(): stay()\n    os._exit(0)", "sys.exit(3)"),
        ("os.setsid(); stay()", "time.sleep(60)"),
    ],
    ids=["orphan, hangs", "orphan, ends", "own session, hangs"],
)
def test_what_a_program_started_ends_with_it(tmp_path, leaves, last):
    """Except a process that has left its parent and its session."""
    lines = (
        "one, other = os.pipe()\n"
        "def stay(): os.write(other, b'%d' % os.getpid()); time.sleep(60)\n"
        "if not os.fork():\n"
        f"    {leaves}\n"
        f"told(os.read(one, 20).decode()); {last}"
    )
    with script(tmp_path, lines, seconds=1.0) as connection:
        said = failing(connection)
        assert gone(int(said.splitlines()[-1]))


def test_an_interrupted_call_breaks_the_connection(tmp_path):
    """The next message would be the reply to the previous call. Workers of xdist ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with script(tmp_path, f"os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)") as connection:
        with pytest.raises(KeyboardInterrupt):
            connection.call("synchronize", WireFrame({"decoder": 1}), lambda reply: None)
        assert not connection.is_usable
    signal.signal(signal.SIGINT, before)


def test_nothing_is_left_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with script(tmp_path, "sys.exit(1)") as connection:
            failing(connection)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a program, and a file that is no program."""
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
        ("", "but expected exec:COMMAND, tcp:HOST:PORT or http(s)://HOST:PORT"),
        ("./decoder", "but expected exec:COMMAND, tcp:HOST:PORT or http(s)://HOST:PORT"),
        ("udp:127.0.0.1:7007", "but expected exec:COMMAND, tcp:HOST:PORT or http(s)://HOST:PORT"),
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
