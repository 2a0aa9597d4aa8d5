"""Client side of the wire protocol: ``Decoder`` and ``Session`` of ``emad_ref.protocol`` in another process.

Each call has a time limit. Any bytes other than its reply end the connection, because later bytes cannot be assigned to
a call: the client stops reading and kills a program with all processes that it started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from emad_ref.errors import BadArgument, EmadError, is_whole
from emad_ref.protocol import Capabilities, InadmissibleDepth, Prompt, Request, Step, Unsupported, as_int64
from emad_ref.record import Ints, Record, Work
from pytest_emad.remote.address import ProgramAddress, WireAddress
from pytest_emad.remote.frames import MAGIC, BadFrame, NotAFrame, WireFrame, encode_frame_to_buffers, read_frame
from pytest_emad.remote.json_fields import parse_count, read_field
from pytest_emad.remote.messages import (
    RemoteSessionState,
    ReplyShapes,
    RequestedModel,
    capabilities_from_header,
    decode_record,
    decode_session_state,
    decode_step,
    encode_open_decoder_request,
    encode_prompts,
    reply_shapes,
)
from pytest_emad.remote.transport import StreamEnded, StreamTimedOut, Transport, open_transport


class DecoderFailed(EmadError):
    """Raised if a call gets no valid reply; the message has address, call, received data and a remedy.

    ``said``: the last lines of the program's standard error; empty for a server.
    """

    def __init__(self, where: str, call: str, came: str, remedy: str, said: Sequence[str] = ()):
        self.where, self.call, self.came = where, call, came
        lines = "".join(f"\n  {line}" for line in said)
        stderr_text = f"\nlast lines of its standard error:{lines}" if said else ""
        super().__init__(f"decoder={where}: call {call!r}: {came}; {remedy}{stderr_text}")


WIRE = 1  # version of docs/wire.md
BYE_TIMEOUT_S = 5.0  # for the last call, and for a program to end after it

T = TypeVar("T")

TIMEOUT_REMEDY = "raise the time limit (--emad-decoder-timeout), or fix the decoder if it hangs"
ENDED_REMEDY = "its standard error may say why"
GARBAGE_REMEDY = "write only frames there; send prints and logs to standard error"
MISFIT_REMEDY = "docs/wire.md says what each reply holds"


class DecoderRefusal(BadArgument):
    """A ``BadArgument`` whose message comes from the remote decoder."""

    def __init__(self, message: str):
        self.name, self.value = "request", None
        EmadError.__init__(self, message)


class ConnectionBroken(EmadError):
    """Reason for the end of a connection; ``came``: the data received instead of a reply.

    ``Connection`` adds call and address.
    """

    def __init__(self, came: str, remedy: str):
        self.came, self.remedy = came, remedy
        super().__init__(f"{came}; {remedy}")


REFUSALS: dict[str, Callable[[str], EmadError]] = {
    "Unsupported": Unsupported,
    "InadmissibleDepth": InadmissibleDepth,
    "BadArgument": DecoderRefusal,
}
FAILURE = "Failure"


class Connection:
    """A connection to the decoder at ``address``, from ``hello`` to ``bye``. ``name``: the decoder's own name.

    Raises:
        DecoderFailed: the program cannot be started, no server listens, or the other side has another version.
    """

    def __init__(self, address: WireAddress, seconds: float):
        self.address, self._seconds = address, seconds
        self.failed: DecoderFailed | None = None
        try:
            self._transport: Transport = open_transport(address, seconds)
        except OSError as error:
            came, remedy = f"no connection ({error})", "is it started, and is this its address?"
            if isinstance(address, ProgramAddress):
                came, remedy = f"it cannot be started ({error})", "is it a program for this system?"
            raise DecoderFailed(str(address), "hello", came, remedy) from error
        self._closed = False
        try:
            self.name = self.call("hello", WireFrame({"wire": WIRE}), _parse_hello)
        except EmadError as error:
            if self.failed is None:  # the decoder refused
                raise self._broken("hello", ConnectionBroken(f"it refuses: {error}", MISFIT_REMEDY)) from error
            raise

    @property
    def is_usable(self) -> bool:
        return not self._closed and self.failed is None

    def call(self, name: str, frame: WireFrame, read: Callable[[WireFrame], T], seconds: float | None = None) -> T:
        """Send ``frame`` as the call ``name``, and ``read`` the reply.

        Raises:
            Unsupported, InadmissibleDepth, BadArgument: the decoder refuses; the connection stays usable.
            DecoderFailed: the decoder reports a failure, and stays usable; or the connection broke, now or earlier.
        """
        if self.failed is not None:
            came = f"the connection broke before, in call {self.failed.call!r}: {self.failed.came}"
            raise DecoderFailed(str(self.address), name, came, "open a decoder anew")
        if self._closed:
            raise DecoderFailed(str(self.address), name, "the connection is closed", "open a decoder anew")
        parts = encode_frame_to_buffers(
            WireFrame({"call": name}) + frame
        )  # an unencodable call leaves the connection intact
        try:
            reply = self._exchanged(name, parts, self._seconds if seconds is None else seconds)
            refusal = _parse_refusal(reply)
            value = read(reply) if refusal is None else None
        except ConnectionBroken as error:
            raise self._broken(name, error) from error
        except BadArgument as error:
            raise self._broken(name, ConnectionBroken(f"a reply in which {error}", MISFIT_REMEDY)) from error
        except BaseException:
            # interrupted half way through: the next bytes still belong to this call
            self._broken(name, ConnectionBroken("it was interrupted", "open a decoder anew"))
            raise
        if refusal is not None:
            kind, message = refusal
            if kind in REFUSALS:
                raise REFUSALS[kind](message)
            raise DecoderFailed(str(self.address), name, f"the decoder reports a failure: {message}", "see its own log")
        return value  # type: ignore[return-value]  # None only where a refusal was raised

    def close(self) -> None:
        """Send ``bye`` and end the program. Idempotent; errors of the other side are ignored."""
        if self._closed:
            return
        grace_s = BYE_TIMEOUT_S
        try:
            if self.failed is None:
                self.call("bye", WireFrame(), lambda reply: None, min(self._seconds, BYE_TIMEOUT_S))
        except EmadError:
            grace_s = 0.0  # end it at once
        finally:
            self._closed = True
            self._transport.close(grace_s)

    def _exchanged(self, name: str, parts: list[bytes | memoryview], seconds: float) -> WireFrame:
        stream = self._transport.stream
        stream.deadline = time.monotonic() + seconds
        try:
            stream.write(parts)
            reply = read_frame(stream.read)
        except StreamTimedOut as error:
            so_far = f", {error.received!r} so far" if error.received else ""
            raise ConnectionBroken(f"no reply within {seconds:g} s{so_far}", TIMEOUT_REMEDY) from error
        except NotAFrame as error:
            raise ConnectionBroken(
                f"{error.magic + stream.read_bytes_until_quiet()!r} where a frame begins with {MAGIC!r}", GARBAGE_REMEDY
            ) from error
        except BadFrame as error:
            raise ConnectionBroken(f"a frame with {error}", MISFIT_REMEDY) from error
        except StreamEnded as error:
            so_far = f" after {error.received!r}" if error.received else ""
            raise ConnectionBroken(f"no reply: {self._transport.describe_end()}{so_far}", ENDED_REMEDY) from error
        except OSError as error:  # the other side does not read, or the socket was closed
            raise ConnectionBroken(f"no reply: {self._transport.describe_end()} ({error})", ENDED_REMEDY) from error
        if reply.header.get("reply") != name and "error" not in reply.header:
            raise ConnectionBroken(f"a reply to {reply.header.get('reply')!r}", MISFIT_REMEDY)
        return reply

    def _broken(self, call: str, why: ConnectionBroken) -> DecoderFailed:
        self._transport.close()
        self.failed = DecoderFailed(str(self.address), call, why.came, why.remedy, self._transport.stderr_lines())
        return self.failed


def _parse_refusal(reply: WireFrame) -> tuple[str, str] | None:
    """(kind, message) of a refusal; None for any other reply."""
    if "error" not in reply.header:
        return None
    kind, message = reply.header["error"], reply.header.get("message")
    kinds = (*REFUSALS, FAILURE)
    if kind not in kinds or not isinstance(message, str):
        raise BadArgument("error", kind, f"one of {', '.join(kinds)}, with a message")
    return kind, message


def _parse_hello(reply: WireFrame) -> str:
    wire, name = reply.header.get("wire"), reply.header.get("name")
    if not is_whole(wire) or wire != WIRE:
        raise ConnectionBroken(
            f"it speaks version {wire!r} of the wire protocol",
            f"pytest-emad speaks version {WIRE}: install versions that fit",
        )
    if not isinstance(name, str):
        raise BadArgument("name", name, "how reports call the decoder")
    return name


class DecoderClient:
    """Opens decoders over one connection, which is made on first use and again after a break.

    ``seconds``: time limit of each call.
    """

    def __init__(self, address: WireAddress, seconds: float):
        self.address, self._seconds = address, seconds
        self._connection: Connection | None = None

    def open_decoder(self, request: Request, model: RequestedModel, vocabulary: int) -> RemoteDecoder:
        """Open a decoder for ``request``; ``vocabulary``: V of its logits.

        Raises:
            Unsupported: the decoder declines.
            BadArgument: it cannot serve such a request.
            DecoderFailed: it is unreachable, or it failed.
        """
        if self._connection is None or not self._connection.is_usable:
            self.close()
            self._connection = Connection(self.address, self._seconds)
        return RemoteDecoder(self._connection, request, model, vocabulary)

    def close(self) -> None:
        """End the connection and the program behind it. Idempotent."""
        if self._connection is not None:
            self._connection.close()


class RemoteDecoder:
    def __init__(self, connection: Connection, request: Request, model: RequestedModel, vocabulary: int):
        def opened(reply: WireFrame) -> tuple[int, Capabilities]:
            return read_field(reply.header, "decoder", parse_count), capabilities_from_header(reply.header)

        self._connection, self.is_open = connection, True
        self._id, self.capabilities = connection.call("open", encode_open_decoder_request(request, model), opened)
        self._sizes = reply_shapes(request.point, vocabulary, self.capabilities)

    def start(self, prompts: Sequence[Prompt]) -> tuple[RemoteSession, Step]:
        def started(reply: WireFrame) -> tuple[int, RemoteSessionState, Step]:
            rows = len(prompts)
            state, step = decode_session_state(reply, rows, self._sizes), decode_step(reply, rows, 1, 1, self._sizes)
            return read_field(reply.header, "session", parse_count), state, step

        self._require_open()
        number, state, step = self._connection.call("start", self._address() + encode_prompts(prompts), started)
        return RemoteSession(self, self._connection, number, self._sizes, state), step

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        self._require_open()
        tokens = sorted(int(as_int64("stop", token)) for token in stop)
        arguments = {"max_new": int(as_int64("max_new", max_new)), "stop": tokens}
        frame = self._address() + WireFrame(arguments) + encode_prompts(prompts)
        return self._connection.call("generate", frame, lambda reply: decode_record(reply, len(prompts), self._sizes))

    def synchronize(self) -> None:
        self._require_open()
        self._connection.call("synchronize", self._address(), lambda reply: None)

    def close(self) -> None:
        """Idempotent; does nothing after a failure."""
        if self.is_open and self._connection.is_usable:
            self._connection.call("close", self._address(), lambda reply: None)
        self.is_open = False

    def _address(self) -> WireFrame:
        return WireFrame({"decoder": self._id})

    def _require_open(self) -> None:
        if not self.is_open:
            raise BadArgument("decoder", "closed", "an open one", "make another")


class RemoteSession:
    """A session of a remote decoder. Length, cap and work are those of the last reply."""

    def __init__(
        self, decoder: RemoteDecoder, connection: Connection, number: int, sizes: ReplyShapes, state: RemoteSessionState
    ):
        self._decoder, self._connection, self._id = decoder, connection, number
        self._sizes, self._state, self._open = sizes, state, True

    @property
    def length(self) -> Ints:
        return self._state.length.copy()

    @property
    def cap(self) -> Ints:
        return self._state.cap.copy()

    @property
    def work(self) -> Work | None:
        work = self._state.work
        return None if work is None else work + Work.none(work.layers)

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        tokens = as_int64("tokens", tokens)
        if tokens.ndim != 2:
            raise BadArgument("tokens", tokens.shape, f"shape [{self._rows}, n ≥ 1]")
        arrays = {"tokens": tokens} | ({} if depth is None else {"depth": as_int64("depth", depth)})
        read = tokens.shape[1] if last is None else int(as_int64("last", last))
        return self._stepped("feed", WireFrame({"last": None if last is None else read}, arrays), tokens.shape[1], read)

    def deepen(self, length: Ints) -> Step:
        length = as_int64("length", length)
        shallow = self._state.length - length if length.shape == self._state.length.shape else np.zeros(1, np.int64)
        n = max(int(shallow[0]), 0)  # if rows differ the decoder refuses
        return self._stepped("deepen", WireFrame(arrays={"length": length}), n, n)

    def rollback(self, length: Ints) -> None:
        self._changed("rollback", WireFrame(arrays={"length": as_int64("length", length)}), self._rows)

    def commit(self, length: Ints) -> None:
        self._changed("commit", WireFrame(arrays={"length": as_int64("length", length)}), self._rows)

    def drop(self, rows: Ints) -> None:
        gone = np.atleast_1d(as_int64("rows", rows))
        self._changed("drop", WireFrame(arrays={"rows": gone}), self._rows - len(np.unique(gone)))

    def close(self) -> None:
        """Idempotent; does nothing after a failure or once the decoder is closed."""
        if self._open and self._decoder.is_open and self._connection.is_usable:
            self._connection.call("end", self._address(), lambda reply: None)
        self._open = False

    @property
    def _rows(self) -> int:
        return len(self._state.length)

    def _stepped(self, call: str, frame: WireFrame, n: int, read: int) -> Step:
        def stepped(reply: WireFrame) -> tuple[RemoteSessionState, Step]:
            return decode_session_state(reply, self._rows, self._sizes), decode_step(
                reply, self._rows, n, read, self._sizes
            )

        self._require_open()
        self._state, step = self._connection.call(call, self._address() + frame, stepped)
        return step

    def _changed(self, call: str, frame: WireFrame, rows: int) -> None:
        self._require_open()
        self._state = self._connection.call(
            call, self._address() + frame, lambda reply: decode_session_state(reply, rows, self._sizes)
        )

    def _address(self) -> WireFrame:
        return WireFrame({"session": self._id})

    def _require_open(self) -> None:
        if not self._open:
            raise BadArgument("session", "closed", "an open one", "start() a new one")
