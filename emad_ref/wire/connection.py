"""One connection to a decoder: a call, its reply, the next call; and what becomes of it when one fails.

Each call has a time limit. Whatever comes in place of its reply breaks the connection for good: what was sent since
cannot be told from what was meant, so nothing is read from it again, and a program is killed with all it started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from emad_ref.errors import BadArgument, EmadError
from emad_ref.protocol import InadmissibleDepth, Unsupported
from emad_ref.wire.address import Address
from emad_ref.wire.failure import DecoderFailed
from emad_ref.wire.frames import MAGIC, BadFrame, Frame, NoFrame, encoded, read_frame
from emad_ref.wire.streams import Ended, TimedOut
from emad_ref.wire.transport import Transport, opened

WIRE = 1  # version of docs/wire.md
FAREWELL_S = 5.0  # for the last call, and for a program to end after it

T = TypeVar("T")

TIMED_OUT = "raise the time limit (--emad-decoder-timeout), or mend what hangs"
ENDED = "what it wrote to standard error may say why"
GARBAGE = "nothing but frames may be written there: send prints and logs to standard error"
MISFIT = "docs/wire.md says what each reply holds"


class Refused(BadArgument):
    """``BadArgument`` in the words of a decoder elsewhere."""

    def __init__(self, message: str):
        self.name, self.value = "request", None
        EmadError.__init__(self, message)


class Broken(EmadError):
    """What ended a connection, before it has a call and an address: ``came`` and ``remedy``."""

    def __init__(self, came: str, remedy: str):
        self.came, self.remedy = came, remedy
        super().__init__(f"{came}; {remedy}")


REFUSALS: dict[str, Callable[[str], EmadError]] = {
    "Unsupported": Unsupported,
    "InadmissibleDepth": InadmissibleDepth,
    "BadArgument": Refused,
}
FAILURE = "Failure"


class Connection:
    """From ``hello`` to ``bye`` with the decoder at ``address``. ``name``: how it calls itself.

    Raises:
        DecoderFailed: the program cannot be started, nobody listens, or hello is answered by another version.
    """

    def __init__(self, address: Address, seconds: float):
        self.address, self._seconds = address, seconds
        self.failed: DecoderFailed | None = None
        try:
            self._transport: Transport = opened(address, seconds)
        except OSError as error:
            remedy = "is it started, and is this its address?"
            raise DecoderFailed(str(address), "hello", f"no connection ({error})", remedy) from error
        self._closed = False
        try:
            self.name = self.call("hello", Frame({"wire": WIRE}), _name_of)
        except EmadError as error:
            if self.failed is None:  # it answers, and says no
                raise self._broken("hello", Broken(f"it refuses: {error}", MISFIT)) from error
            raise

    @property
    def usable(self) -> bool:
        return not self._closed and self.failed is None

    def call(self, name: str, frame: Frame, read: Callable[[Frame], T], seconds: float | None = None) -> T:
        """Send ``frame`` as the call ``name``, and ``read`` the reply.

        Raises:
            Unsupported, InadmissibleDepth, BadArgument: the decoder refuses; the connection stays.
            DecoderFailed: it says that it failed, and stays; or it broke, now or in an earlier call.
        """
        if self.failed is not None:
            came = f"the connection broke before, in call {self.failed.call!r}: {self.failed.came}"
            raise DecoderFailed(str(self.address), name, came, "open a decoder anew")
        if self._closed:
            raise DecoderFailed(str(self.address), name, "the connection is closed", "open a decoder anew")
        parts = encoded(Frame({"call": name}) + frame)  # what cannot be sent breaks nothing
        try:
            reply = self._exchanged(name, parts, self._seconds if seconds is None else seconds)
            refusal = _refusal(reply)
            found = read(reply) if refusal is None else None
        except Broken as error:
            raise self._broken(name, error) from error
        except BadArgument as error:
            raise self._broken(name, Broken(f"a reply in which {error}", MISFIT)) from error
        except BaseException:
            # interrupted half way through: whatever comes next belongs to this call
            self._broken(name, Broken("it was interrupted", "open a decoder anew"))
            raise
        if refusal is not None:
            kind, message = refusal
            if kind in REFUSALS:
                raise REFUSALS[kind](message)
            raise DecoderFailed(str(self.address), name, f"it says that it failed: {message}", "see its own log")
        return found  # type: ignore[return-value]  # None only where a refusal was raised

    def close(self) -> None:
        """Say goodbye, leave nothing running. Idempotent; whatever the other side makes of it."""
        if self._closed:
            return
        grace_s = FAREWELL_S
        try:
            if self.failed is None:
                self.call("bye", Frame(), lambda reply: None, min(self._seconds, FAREWELL_S))
        except EmadError:
            grace_s = 0.0  # whatever it has to say, it goes
        finally:
            self._closed = True
            self._transport.close(grace_s)

    def _exchanged(self, name: str, parts: list[bytes | memoryview], seconds: float) -> Frame:
        stream = self._transport.stream
        stream.deadline = time.monotonic() + seconds
        try:
            stream.write(parts)
            reply = read_frame(stream.read)
        except TimedOut as error:
            so_far = f", {error.received!r} so far" if error.received else ""
            raise Broken(f"no reply within {seconds:g} s{so_far}", TIMED_OUT) from error
        except NoFrame as error:
            raise Broken(f"{error.magic + stream.rest()!r} where a frame begins with {MAGIC!r}", GARBAGE) from error
        except BadFrame as error:
            raise Broken(f"a frame with {error}", MISFIT) from error
        except Ended as error:
            so_far = f" after {error.received!r}" if error.received else ""
            raise Broken(f"no reply: {self._transport.ended()}{so_far}", ENDED) from error
        except OSError as error:  # nobody reads, or the socket was torn down
            raise Broken(f"no reply: {self._transport.ended()} ({error})", ENDED) from error
        if reply.header.get("reply") != name and "error" not in reply.header:
            raise Broken(f"a reply to {reply.header.get('reply')!r}", MISFIT)
        return reply

    def _broken(self, call: str, why: Broken) -> DecoderFailed:
        self._transport.close()
        self.failed = DecoderFailed(str(self.address), call, why.came, why.remedy, self._transport.said())
        return self.failed


def _refusal(reply: Frame) -> tuple[str, str] | None:
    """(kind, message) of a reply that says no."""
    if "error" not in reply.header:
        return None
    kind, message = reply.header["error"], reply.header.get("message")
    known = (*REFUSALS, FAILURE)
    if kind not in known or not isinstance(message, str):
        raise BadArgument("error", kind, f"one of {', '.join(known)}, with a message")
    return kind, message


def _name_of(reply: Frame) -> str:
    wire, name = reply.header.get("wire"), reply.header.get("name")
    if wire != WIRE or isinstance(wire, bool):
        raise Broken(f"it speaks version {wire!r} of the wire protocol", f"this judge speaks {WIRE}: install what fits")
    if not isinstance(name, str):
        raise BadArgument("name", name, "how reports call the decoder")
    return name
