"""Byte streams with deadlines, over a program's pipes or a socket, and replies over HTTP.

POSIX only: descriptors, process groups. Every wait ends at the stream's deadline. Once a stream breaks, its transport
reports how the other side ended. A program is killed with all that it started (``child_process.kill_process_tree``). A
thread reads its standard error, so that it never blocks, and keeps the last lines.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import EmadError
from emad_ref.workers.child_process import kill_process_tree
from pytest_emad.remote.address import ProgramAddress, ServerAddress, WireAddress

QUIET_MS = 100  # a printed line may come in several pieces
CHUNK_BYTES = 1 << 20  # bytes of one read or write: the deadline is checked before each


class StreamEnded(EmadError):
    """Raised if the other side closed the stream after ``received`` bytes of a read."""

    def __init__(self, received: bytes):
        self.received = received
        super().__init__(f"the stream ended after {len(received)} bytes")


class StreamTimedOut(EmadError):
    """Raised if the deadline passed after ``received`` bytes of a read."""

    def __init__(self, received: bytes):
        self.received = received
        super().__init__(f"the time limit passed after {len(received)} bytes")


class Stream:
    """Reads from ``incoming``, writes to ``outgoing``: descriptors that the caller owns and closes.

    ``deadline``: a value of ``time.monotonic`` at which every wait ends; None waits without limit. Writing respects it
    only if ``outgoing`` does not block.
    """

    def __init__(self, incoming: int, outgoing: int):
        self.incoming, self.outgoing = incoming, outgoing
        self.deadline: float | None = None

    def read(self, count: int) -> NDArray[np.uint8]:
        """Exactly ``count`` bytes, in separate memory.

        Raises:
            StreamEnded, StreamTimedOut: with the bytes received until then.
            OSError: the stream broke.
        """
        # memory is committed on writing, so an announced but unsent size costs none
        try:
            buffer = np.empty(count, dtype=np.uint8)
        except MemoryError as error:
            raise OSError(errno.ENOMEM, f"no memory for {count} bytes") from error
        view, at = buffer.data, 0
        while at < count:
            if not self._wait(self.incoming, select.POLLIN):
                raise StreamTimedOut(buffer[: min(at, 80)].tobytes())
            try:
                got = os.readv(self.incoming, [view[at : at + CHUNK_BYTES]])
            except BlockingIOError:
                continue
            if got == 0:
                raise StreamEnded(buffer[: min(at, 80)].tobytes())
            at += got
        return buffer

    def has_data_before_deadline(self) -> bool:
        """Whether bytes come, or the other side closes, before the deadline."""
        return self._wait(self.incoming, select.POLLIN)

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Write all parts. Raises StreamTimedOut, or OSError if the other side does not read."""
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                if not self._wait(self.outgoing, select.POLLOUT):
                    raise StreamTimedOut(b"")
                try:
                    view = view[os.write(self.outgoing, view[:CHUNK_BYTES]) :]
                except BlockingIOError:
                    continue

    def read_bytes_until_quiet(self, most: int = 80) -> bytes:
        """Further bytes, at most ``most``, until none come for ``QUIET_MS``; none from a broken stream."""
        ready, data = select.poll(), b""
        ready.register(self.incoming, select.POLLIN)
        try:
            while len(data) < most and ready.poll(QUIET_MS):
                if not (piece := os.read(self.incoming, most - len(data))):
                    break
                data += piece
        except OSError:
            return data
        return data

    def _wait(self, descriptor: int, event: int) -> bool:
        """Whether ``descriptor`` is ready, or broken, before the deadline."""
        ready = select.poll()
        ready.register(descriptor, event)
        if self.deadline is None:
            return bool(ready.poll())
        return bool(ready.poll(max(self.deadline - time.monotonic(), 0) * 1000))


LINES, LETTERS = 20, 400  # of standard error: the last lines, and letters of each
GRACE_S = 2.0  # seconds for a program to exit after its output has ended, and for its last bytes


class Transport(Protocol):
    stream: Stream

    def describe_end(self) -> str:
        """Text of the reason why the other side closed the stream."""

    def stderr_lines(self) -> list[str]:
        """The last lines of standard error, complete once the transport is closed; empty for a server."""

    def close(self, grace_s: float = 0.0) -> None:
        """Close every file and end the program, after ``grace_s`` for it to exit by itself. Idempotent."""


def open_transport(address: WireAddress, seconds: float) -> Transport:
    """Start the program, or connect within ``seconds``. Raises OSError."""
    return ProgramTransport(address) if isinstance(address, ProgramAddress) else SocketTransport(address, seconds)


class ProgramTransport:
    def __init__(self, program: ProgramAddress):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            program.words,
            cwd=program.folder,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
        )
        self._input, self._output, self._errors = map(
            _require_pipe, (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        os.set_blocking(self._input.fileno(), False)
        self.stream = Stream(self._output.fileno(), self._input.fileno())
        self._lines: deque[str] = deque(maxlen=LINES)
        self._drain = threading.Thread(target=self._drained, daemon=True, name="standard error of a decoder")
        self._drain.start()
        self._closed = False
        atexit.register(self.close)

    def describe_end(self) -> str:
        status = self._wait(GRACE_S)
        return "it closed its standard output and still runs" if status is None else _exit_text(status)

    def stderr_lines(self) -> list[str]:
        return list(self._lines)

    def close(self, grace_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._input.close()  # a program that reads may then end by itself
        if grace_s:
            self._wait(grace_s)
        kill_process_tree(self._process)
        self._output.close()
        self._drain.join(GRACE_S)
        if not self._drain.is_alive():  # otherwise a process outside the group holds the other end of the pipe
            self._errors.close()

    def _wait(self, seconds: float) -> int | None:
        """The exit status, if the program ends within ``seconds``."""
        until = time.monotonic() + seconds
        while (status := self._process.poll()) is None and time.monotonic() < until:
            time.sleep(0.005)
        return status

    def _drained(self) -> None:
        rest, descriptor = b"", self._errors.fileno()
        while piece := os.read(descriptor, 65536):
            *lines, rest = (rest + piece).split(b"\n")
            self._lines.extend(_decode_line(line) for line in lines)
            rest = rest[-4 * LETTERS :]
        if rest:
            self._lines.append(_decode_line(rest))


def _require_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "Popen made all three pipes"
    return pipe


def _decode_line(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")[:LETTERS]


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was killed by signal {-status}"


class SocketTransport:
    def __init__(self, server: ServerAddress, seconds: float):
        self._socket = socket.create_connection((server.host, server.port), timeout=seconds)
        # a call is a small request and a small reply: send them at once
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self.stream = Stream(self._socket.fileno(), self._socket.fileno())

    def describe_end(self) -> str:
        return "the server closed the connection"

    def stderr_lines(self) -> list[str]:
        return []

    def close(self, grace_s: float = 0.0) -> None:
        self._socket.close()


# ---------------------------------------------------------------- HTTP


class RequestCounts:
    """Requests to a server, and repeated ones by reason. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = 0
        self.answered = 0  # replies with status 200
        self.reasons: Counter[str] = Counter()

    @property
    def retry_count(self) -> int:
        return self.reasons.total()

    def count_request(self) -> None:
        with self._lock:
            self.requests += 1

    def count_answer(self) -> None:
        with self._lock:
            self.answered += 1

    def count_retry(self, reason: str) -> None:
        with self._lock:
            self.reasons[reason] += 1


@dataclass(frozen=True)
class HttpReply:
    """``headers`` by name in lower case. ``media_type``: the media type of the body."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def retry_after_s(self) -> float | None:
        """Seconds of ``Retry-After``, which may be a date; None without a readable value."""
        value = self.headers.get("retry-after", "").strip()
        try:
            return max(0.0, float(value))
        except ValueError:
            pass
        try:
            until = parsedate_to_datetime(value)
        except ValueError:
            return None
        return max(0.0, (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


class EventStream:
    """Server-sent events of one reply, as its bytes arrive. ``events``: (seconds since ``restart``, data).

    ``most``: events after which the reader aborts; None: it reads all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.restart()

    @property
    def has_enough_events(self) -> bool:
        return self._most is not None and len(self.events) >= self._most

    def restart(self) -> None:
        """Forget all data, as the request is sent now."""
        self._began, self._rest = time.perf_counter(), b""
        self._data: list[str] = []
        self.events: list[tuple[float, str]] = []

    def add_bytes(self, part: bytes) -> None:
        """Read whole lines of the received bytes; a line may be cut anywhere, also inside a character."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            self._take_line(line.rstrip(b"\r").decode("utf-8", "replace"))

    def seconds_since_restart(self) -> float:
        return time.perf_counter() - self._began

    def _take_line(self, line: str) -> None:
        if line.startswith("data:"):
            self._data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and self._data:
            self.events.append((self.seconds_since_restart(), "\n".join(self._data)))
            self._data = []
