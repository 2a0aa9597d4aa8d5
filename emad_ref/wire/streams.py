"""Bytes over a pair of descriptors, pipes or a socket, with an end to every wait."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from emad_ref.errors import EmadError

QUIET_MS = 100  # a line that is printed may come in several pieces
PIECE = 1 << 20  # bytes of one read or write: a wait is looked at after each


class Ended(EmadError):
    """The other side closed the stream, ``received`` bytes into what was read."""

    def __init__(self, received: bytes):
        self.received = received
        super().__init__(f"the stream ended after {len(received)} bytes")


class TimedOut(EmadError):
    """The deadline passed, ``received`` bytes into what was read."""

    def __init__(self, received: bytes):
        self.received = received
        super().__init__(f"the time limit passed after {len(received)} bytes")


class Stream:
    """Reads from ``incoming``, writes to ``outgoing``: descriptors that the caller owns and closes.

    ``deadline``: a value of ``time.monotonic`` at which every wait ends; None waits for ever. Writing keeps to it only
    where ``outgoing`` does not block.
    """

    def __init__(self, incoming: int, outgoing: int):
        self.incoming, self.outgoing = incoming, outgoing
        self.deadline: float | None = None

    def read(self, count: int) -> NDArray[np.uint8]:
        """Exactly ``count`` bytes, in memory of their own.

        Raises:
            Ended, TimedOut: with what came until then.
            OSError: the stream broke.
        """
        # pages are taken as they are written: a size that is announced and never sent costs nothing
        try:
            buffer = np.empty(count, dtype=np.uint8)
        except MemoryError as error:
            raise OSError(errno.ENOMEM, f"no memory for {count} bytes") from error
        view, at = buffer.data, 0
        while at < count:
            if not self._wait(self.incoming, select.POLLIN):
                raise TimedOut(buffer[: min(at, 80)].tobytes())
            try:
                got = os.readv(self.incoming, [view[at : at + PIECE]])
            except BlockingIOError:
                continue
            if got == 0:
                raise Ended(buffer[: min(at, 80)].tobytes())
            at += got
        return buffer

    def arrives(self) -> bool:
        """Whether something comes, or the other side closes, before the deadline."""
        return self._wait(self.incoming, select.POLLIN)

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """All bytes of all parts. Raises TimedOut, or OSError where nobody reads them."""
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                if not self._wait(self.outgoing, select.POLLOUT):
                    raise TimedOut(b"")
                try:
                    view = view[os.write(self.outgoing, view[:PIECE]) :]
                except BlockingIOError:
                    continue

    def rest(self, most: int = 80) -> bytes:
        """What else comes, until it is quiet for a moment: at most so many bytes. A broken stream holds none."""
        ready, found = select.poll(), b""
        ready.register(self.incoming, select.POLLIN)
        try:
            while len(found) < most and ready.poll(QUIET_MS):
                if not (piece := os.read(self.incoming, most - len(found))):
                    break
                found += piece
        except OSError:
            return found
        return found

    def _wait(self, descriptor: int, event: int) -> bool:
        """Whether ``descriptor`` is ready, or broken, before the deadline."""
        ready = select.poll()
        ready.register(descriptor, event)
        if self.deadline is None:
            return bool(ready.poll())
        return bool(ready.poll(max(self.deadline - time.monotonic(), 0) * 1000))
