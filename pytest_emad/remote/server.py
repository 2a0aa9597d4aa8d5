"""Server side of the wire protocol: answer the calls of one client (the judge) with decoders of any factory.

``DecoderServer`` knows no model: ``make`` turns a request into a decoder, or refuses. ``request.model.load()`` gives
the client's description of the model, a ``messages.RequestedModel``. An ``EmadError`` becomes a refusal of its kind.
Any other exception becomes a failure, with its traceback on standard error, and the loop continues.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from emad_ref.errors import BadArgument, EmadError, is_whole
from emad_ref.protocol import Decoder, InadmissibleDepth, Request, Session, Unsupported
from pytest_emad.remote.address import ServerLimits
from pytest_emad.remote.client import FAILURE, WIRE
from pytest_emad.remote.frames import WireFrame, encode_frame_to_buffers, read_frame
from pytest_emad.remote.json_fields import parse_count, parse_integer, parse_list, parse_optional, read_field
from pytest_emad.remote.messages import (
    capabilities_to_json,
    decode_open_decoder_request,
    decode_prompts,
    encode_record,
    encode_session_state,
    encode_step,
    read_int64_array,
)
from pytest_emad.remote.transport import Stream, StreamEnded

REFUSAL_KINDS: tuple[tuple[type[EmadError], str], ...] = (
    (Unsupported, "Unsupported"),
    (InadmissibleDepth, "InadmissibleDepth"),
    (BadArgument, "BadArgument"),
)

REQUEST_BYTES = 64 << 20  # most bytes of a request's arrays: tokens and depths, no logits
MESSAGE_CHARACTERS = 2000  # most characters of a refusal, which quotes the refused value

T = TypeVar("T")


class ClientIdleError(EmadError):
    """Raised if the client sent no call for longer than ``idle_s``."""


class LimitExceeded(EmadError):
    """Raised if a client exceeds a limit of the server: ``name=value, but expected <limit>; <remedy>``."""

    def __init__(self, name: str, value: int, most: int, option: str):
        remedy = f"close what is done with, or start the server with a larger {option}"
        super().__init__(f"{name}={value}, but expected at most {most} of one judge; {remedy}")


class DecoderServer:
    """The decoders and sessions of one client, by number.

    ``turn``: a context manager entered around each call, for example a lock on a model that several clients share.
    """

    def __init__(
        self,
        make: Callable[[Request], Decoder],
        name: str,
        turn: AbstractContextManager[Any] | None = None,
        limits: ServerLimits | None = None,
    ):
        self._make, self._name, self._turn, self._limits = make, name, turn or nullcontext(), limits or ServerLimits()
        self._numbers = itertools.count(1)
        self._decoders: dict[int, Decoder] = {}
        self._sessions: dict[int, tuple[int, Session]] = {}  # with the number of its decoder
        self._calls: dict[str, Callable[[WireFrame], WireFrame]] = {
            "hello": self._hello,
            "open": self._opened,
            "start": self._start,
            "feed": self._feed,
            "deepen": self._deepen,
            "rollback": lambda frame: self._moved(frame, "rollback"),
            "commit": lambda frame: self._moved(frame, "commit"),
            "drop": self._drop,
            "end": self._end,
            "generate": self._generate,
            "synchronize": self._synchronize,
            "close": self._close,
            "bye": lambda frame: WireFrame(),
        }

    def serve(self, stream: Stream) -> None:
        """Answer calls until ``bye``, or until the judge closes the stream between two of them.

        Raises:
            ClientIdleError: no call for too long.
            StreamTimedOut: a request is not sent to its end, or a reply not read, in time.
            StreamEnded: the stream ended within a request.
            BadFrame: other bytes than a request, after which reading is impossible.
            OSError: the client has stopped reading.
        """
        try:
            while True:
                _set_deadline(stream, self._limits.idle_s)
                if not stream.has_data_before_deadline():
                    raise ClientIdleError(f"no call for {self._limits.idle_s:g} s")
                _set_deadline(stream, self._limits.frame_s)
                try:
                    frame = read_frame(stream.read, REQUEST_BYTES)
                except StreamEnded as end:
                    if not end.received:
                        return
                    raise
                reply = self._answered(frame)
                _set_deadline(stream, self._limits.frame_s)
                stream.write(reply)
                if frame.header.get("call") == "bye":
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Close every session and decoder."""
        for number in list(self._decoders):
            self._closed(number)

    def _answered(self, frame: WireFrame) -> list[bytes | memoryview]:
        """The bytes of the reply, or of a refusal."""
        name = frame.header.get("call")
        try:
            if not isinstance(name, str) or name not in self._calls:
                raise BadArgument("call", name, f"one of {', '.join(self._calls)}")
            with self._turn:
                return encode_frame_to_buffers(WireFrame({"reply": name}) + self._calls[name](frame))
        except EmadError as error:
            kind = next((kind for family, kind in REFUSAL_KINDS if isinstance(error, family)), FAILURE)
            return _encode_refusal(kind, str(error) if kind != FAILURE else f"{type(error).__name__}: {error}")
        except Exception as error:  # from the decoder: the client gets the message, standard error the traceback
            traceback.print_exc(file=sys.stderr)
            return _encode_refusal(FAILURE, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------ calls

    def _hello(self, frame: WireFrame) -> WireFrame:
        if not is_whole(wire := frame.header.get("wire")) or wire != WIRE:
            raise BadArgument("wire", wire, f"{WIRE}, the version spoken here")
        return WireFrame({"wire": WIRE, "name": self._name})

    def _opened(self, frame: WireFrame) -> WireFrame:
        _require_within("decoders", len(self._decoders) + 1, self._limits.sessions, "--sessions")
        decoder = self._make(decode_open_decoder_request(frame))
        number = next(self._numbers)
        self._decoders[number] = decoder
        return WireFrame({"decoder": number, "capabilities": capabilities_to_json(decoder.capabilities)})

    def _start(self, frame: WireFrame) -> WireFrame:
        owner, decoder = self._decoder(frame)
        prompts = decode_prompts(frame)
        _require_within("sessions", len(self._sessions) + 1, self._limits.sessions, "--sessions")
        self._require_tokens(sum(len(prompt.tokens) for prompt in prompts))
        session, step = decoder.start(prompts)
        number = next(self._numbers)
        self._sessions[number] = owner, session
        return WireFrame({"session": number}) + _session_state_frame(session) + encode_step(step)

    def _feed(self, frame: WireFrame) -> WireFrame:
        session = self._session(frame)
        depth = read_int64_array(frame, "depth", None, None) if "depth" in frame.arrays else None
        last = read_field(frame.header, "last", parse_optional(parse_count))
        tokens = read_int64_array(frame, "tokens", None, None)
        self._require_tokens(tokens.size)
        step = session.feed(tokens, depth, last)
        return _session_state_frame(session) + encode_step(step)

    def _deepen(self, frame: WireFrame) -> WireFrame:
        session = self._session(frame)
        step = session.deepen(read_int64_array(frame, "length", None))
        return _session_state_frame(session) + encode_step(step)

    def _moved(self, frame: WireFrame, method: str) -> WireFrame:
        session = self._session(frame)
        getattr(session, method)(read_int64_array(frame, "length", None))
        return _session_state_frame(session)

    def _drop(self, frame: WireFrame) -> WireFrame:
        session = self._session(frame)
        session.drop(read_int64_array(frame, "rows", None))
        return _session_state_frame(session)

    def _end(self, frame: WireFrame) -> WireFrame:
        self._session(frame).close()
        del self._sessions[read_field(frame.header, "session", parse_count)]
        return WireFrame()

    def _generate(self, frame: WireFrame) -> WireFrame:
        _, decoder = self._decoder(frame)
        stop = read_field(frame.header, "stop", parse_list)
        if not all(is_whole(token) for token in stop):
            raise BadArgument("stop", stop, "a list of tokens")
        max_new = read_field(frame.header, "max_new", parse_integer)
        prompts = decode_prompts(frame)
        self._require_tokens(sum(len(prompt.tokens) + max(max_new, 0) for prompt in prompts))
        return encode_record(decoder.generate(prompts, max_new, frozenset(stop)))

    def _synchronize(self, frame: WireFrame) -> WireFrame:
        self._decoder(frame)[1].synchronize()
        return WireFrame()

    def _close(self, frame: WireFrame) -> WireFrame:
        self._closed(self._decoder(frame)[0])
        return WireFrame()

    # ------------------------------------------------------------ numbers

    def _require_tokens(self, more: int) -> None:
        held_tokens = sum(int(session.length.sum()) for _, session in self._sessions.values())
        _require_within("positions", held_tokens + more, self._limits.tokens, "--positions")

    def _decoder(self, frame: WireFrame) -> tuple[int, Decoder]:
        number = read_field(frame.header, "decoder", parse_count)
        return number, _lookup("decoder", number, self._decoders)

    def _session(self, frame: WireFrame) -> Session:
        return _lookup("session", read_field(frame.header, "session", parse_count), self._sessions)[1]

    def _closed(self, number: int) -> None:
        for mine in [session for session, (owner, _) in self._sessions.items() if owner == number]:
            self._sessions.pop(mine)[1].close()
        self._decoders.pop(number).close()


def _set_deadline(stream: Stream, seconds: float) -> None:
    stream.deadline = None if math.isinf(seconds) else time.monotonic() + seconds


def _require_within(name: str, value: int, most: int, option: str) -> None:
    if value > most:
        raise LimitExceeded(name, value, most, option)


def _encode_refusal(kind: str, message: str) -> list[bytes | memoryview]:
    cut = message if len(message) <= MESSAGE_CHARACTERS else f"{message[:MESSAGE_CHARACTERS]} …"
    return encode_frame_to_buffers(WireFrame({"error": kind, "message": cut}))


def _lookup(kind: str, number: int, table: dict[int, T]) -> T:
    if number not in table:
        raise BadArgument(kind, number, f"an open {kind}", f"open are {sorted(table) or 'none'}")
    return table[number]


def _session_state_frame(session: Session) -> WireFrame:
    return encode_session_state(session.length, session.cap, session.work)
