"""The judge's side: ``Decoder`` and ``Session`` of ``emad_ref.protocol`` over a connection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.protocol import Capabilities, Prompt, Request, Step
from emad_ref.record import Ints, Record, Work
from emad_ref.wire.address import Address
from emad_ref.wire.connection import Connection
from emad_ref.wire.fields import count, field
from emad_ref.wire.frames import Frame
from emad_ref.wire.messages import (
    Model,
    Sizes,
    State,
    capabilities_of,
    integers,
    prompts_frame,
    record_of,
    request_frame,
    sizes_of,
    state_of,
    step_of,
)


class Remote:
    """Opens decoders over one connection, which is made when first needed, and anew after one that broke.

    ``seconds``: the time limit of each call.
    """

    def __init__(self, address: Address, seconds: float):
        self.address, self._seconds = address, seconds
        self._connection: Connection | None = None

    def open(self, request: Request, model: Model, vocabulary: int) -> RemoteDecoder:
        """A decoder for ``request``; ``vocabulary``: V of its logits.

        Raises:
            Unsupported: the decoder declines.
            BadArgument: it cannot serve such a request.
            DecoderFailed: it cannot be reached, or fails.
        """
        if self._connection is None or not self._connection.usable:
            self.close()
            self._connection = Connection(self.address, self._seconds)
        return RemoteDecoder(self._connection, request, model, vocabulary)

    def close(self) -> None:
        """End the connection and the program behind it. Idempotent."""
        if self._connection is not None:
            self._connection.close()


class RemoteDecoder:
    def __init__(self, connection: Connection, request: Request, model: Model, vocabulary: int):
        def opened(reply: Frame) -> tuple[int, Capabilities]:
            return field(reply.header, "decoder", count), capabilities_of(reply.header)

        self._connection, self.is_open = connection, True
        self._id, self.capabilities = connection.call("open", request_frame(request, model), opened)
        self._sizes = sizes_of(request.point, vocabulary, self.capabilities)

    def start(self, prompts: Sequence[Prompt]) -> tuple[RemoteSession, Step]:
        def started(reply: Frame) -> tuple[int, State, Step]:
            rows = len(prompts)
            state, step = state_of(reply, rows, self._sizes), step_of(reply, rows, 1, 1, self._sizes)
            return field(reply.header, "session", count), state, step

        self._require_open()
        number, state, step = self._connection.call("start", self._asked() + prompts_frame(prompts), started)
        return RemoteSession(self, self._connection, number, self._sizes, state), step

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        self._require_open()
        tokens = sorted(int(integers("stop", token)) for token in stop)
        asked = {"max_new": int(integers("max_new", max_new)), "stop": tokens}
        frame = self._asked() + Frame(asked) + prompts_frame(prompts)
        return self._connection.call("generate", frame, lambda reply: record_of(reply, len(prompts), self._sizes))

    def synchronize(self) -> None:
        self._require_open()
        self._connection.call("synchronize", self._asked(), lambda reply: None)

    def close(self) -> None:
        """Idempotent; after a failure there is nothing left to close."""
        if self.is_open and self._connection.usable:
            self._connection.call("close", self._asked(), lambda reply: None)
        self.is_open = False

    def _asked(self) -> Frame:
        return Frame({"decoder": self._id})

    def _require_open(self) -> None:
        if not self.is_open:
            raise BadArgument("decoder", "closed", "an open one", "make another")


class RemoteSession:
    """Rows of one batch elsewhere. Length, cap and work are those that came with the last reply."""

    def __init__(self, decoder: RemoteDecoder, connection: Connection, number: int, sizes: Sizes, state: State):
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
        tokens = integers("tokens", tokens)
        if tokens.ndim != 2:
            raise BadArgument("tokens", tokens.shape, f"shape [{self._rows}, n ≥ 1]")
        arrays = {"tokens": tokens} | ({} if depth is None else {"depth": integers("depth", depth)})
        read = tokens.shape[1] if last is None else int(integers("last", last))
        return self._stepped("feed", Frame({"last": None if last is None else read}, arrays), tokens.shape[1], read)

    def deepen(self, length: Ints) -> Step:
        length = integers("length", length)
        shallow = self._state.length - length if length.shape == self._state.length.shape else np.zeros(1, np.int64)
        n = max(int(shallow[0]), 0)  # where rows differ the decoder refuses
        return self._stepped("deepen", Frame(arrays={"length": length}), n, n)

    def rollback(self, length: Ints) -> None:
        self._changed("rollback", Frame(arrays={"length": integers("length", length)}), self._rows)

    def commit(self, length: Ints) -> None:
        self._changed("commit", Frame(arrays={"length": integers("length", length)}), self._rows)

    def drop(self, rows: Ints) -> None:
        gone = np.atleast_1d(integers("rows", rows))
        self._changed("drop", Frame(arrays={"rows": gone}), self._rows - len(np.unique(gone)))

    def close(self) -> None:
        """Idempotent; after a failure, or with its decoder closed, there is nothing left to end."""
        if self._open and self._decoder.is_open and self._connection.usable:
            self._connection.call("end", self._asked(), lambda reply: None)
        self._open = False

    @property
    def _rows(self) -> int:
        return len(self._state.length)

    def _stepped(self, call: str, frame: Frame, n: int, read: int) -> Step:
        def stepped(reply: Frame) -> tuple[State, Step]:
            return state_of(reply, self._rows, self._sizes), step_of(reply, self._rows, n, read, self._sizes)

        self._require_open()
        self._state, step = self._connection.call(call, self._asked() + frame, stepped)
        return step

    def _changed(self, call: str, frame: Frame, rows: int) -> None:
        self._require_open()
        self._state = self._connection.call(
            call, self._asked() + frame, lambda reply: state_of(reply, rows, self._sizes)
        )

    def _asked(self) -> Frame:
        return Frame({"session": self._id})

    def _require_open(self) -> None:
        if not self._open:
            raise BadArgument("session", "closed", "an open one", "start() a new one")
