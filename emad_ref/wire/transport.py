"""What a connection runs over: a program that is started for it, or a socket. POSIX alone: descriptors, process groups.

Both offer a ``stream`` and say, once it breaks, how the other side ended. A program dies with all that it started, also
in sessions of their own (``supervisor``; systems other than Linux know its process group alone). Its standard error is
drained all the time, so that it never waits for a reader, and the end of it is kept.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from typing import IO, Protocol

from emad_ref.wire.address import Address, Program, Server
from emad_ref.wire.streams import Stream
from emad_ref.workers import supervisor

LINES, LETTERS = 20, 400  # of standard error: the last lines, and as much of each
GRACE_S = 2.0  # for a program whose output has ended to end, too, and for what it wrote last to arrive


class Transport(Protocol):
    stream: Stream

    def ended(self) -> str:
        """How the other side came to close the stream, in words."""

    def said(self) -> list[str]:
        """The last lines of standard error, where there is one; complete once the transport is closed."""

    def close(self, grace_s: float = 0.0) -> None:
        """Leave nothing running and nothing open, after ``grace_s`` for the other side to go by itself. Idempotent."""


def opened(address: Address, seconds: float) -> Transport:
    """Start the program, or connect within ``seconds``. Raises OSError."""
    return Child(address) if isinstance(address, Program) else Socket(address, seconds)


class Child:
    def __init__(self, program: Program):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            supervisor.command(program.words),
            cwd=program.folder,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
        )
        self._input, self._output, self._errors = map(
            _held, (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        os.set_blocking(self._input.fileno(), False)
        self.stream = Stream(self._output.fileno(), self._input.fileno())
        self._lines: deque[str] = deque(maxlen=LINES)
        self._drain = threading.Thread(target=self._drained, daemon=True, name="standard error of a decoder")
        self._drain.start()
        self._closed = False
        atexit.register(self.close)

    def ended(self) -> str:
        status = self._wait(GRACE_S)
        return "it closed its standard output and runs on" if status is None else _status(status)

    def said(self) -> list[str]:
        return list(self._lines)

    def close(self, grace_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._input.close()  # a program that reads may end by itself
        if grace_s:
            self._wait(grace_s)
        self._kill()
        self._process.wait()
        self._output.close()
        self._drain.join(GRACE_S)
        if not self._drain.is_alive():  # else somebody outside the group holds the other end, and the thread the pipe
            self._errors.close()

    def _wait(self, seconds: float) -> int | None:
        """The exit status, if the program ends within ``seconds``."""
        until = time.monotonic() + seconds
        while (status := self._process.poll()) is None and time.monotonic() < until:
            time.sleep(0.005)
        return status

    def _kill(self) -> None:
        """What the program started goes with it: on Linux all of it, elsewhere its group.

        The group is left where its supervisor was killed: by the program itself, or for want of memory.
        """
        if supervisor.is_available():
            supervisor.end(self._process)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _drained(self) -> None:
        rest, descriptor = b"", self._errors.fileno()
        while piece := os.read(descriptor, 65536):
            *lines, rest = (rest + piece).split(b"\n")
            self._lines.extend(_readable(line) for line in lines)
            rest = rest[-4 * LETTERS :]
        if rest:
            self._lines.append(_readable(rest))


def _held(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "each of the three was asked for"
    return pipe


def _readable(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")[:LETTERS]


def _status(status: int) -> str:
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was killed by signal {-status}"


class Socket:
    def __init__(self, server: Server, seconds: float):
        self._socket = socket.create_connection((server.host, server.port), timeout=seconds)
        # a call is a small request and a small reply: neither may wait for more to send
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self.stream = Stream(self._socket.fileno(), self._socket.fileno())

    def ended(self) -> str:
        return "the server closed the connection"

    def said(self) -> list[str]:
        return []

    def close(self, grace_s: float = 0.0) -> None:
        self._socket.close()
