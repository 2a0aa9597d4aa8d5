"""A scripted decoder for the far end of a connection; honest unless a test changes its script."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, ModelRef, Request, Step
from emad_ref.record import Record, TokenTable, Work
from pytest_emad.remote.address import Address, parse_address
from pytest_emad.remote.frames import WireFrame, encode_frame_to_buffers, read_frame
from pytest_emad.remote.messages import (
    RequestedModel,
    capabilities_to_json,
    encode_record,
    encode_session_state,
    encode_step,
)
from pytest_emad.remote.transport import Stream, StreamEnded

LAYERS, VOCABULARY, ROWS = 4, 7, 2
POINT = OperatingPoint("p", "emad", LAYERS, LAYERS, (2,), ((0.5,),))
MODEL = RequestedModel("m", "/m", "f00d", "float32", "cpu")
REQUEST = Request(ModelRef("m", lambda: MODEL), POINT, max_rows=ROWS)

Reply = WireFrame | bytes | Callable[[socket.socket], None]


def work() -> Work:
    return Work.none(LAYERS) + Work(*(np.asarray(part) + 1 for part in vars(Work.none(LAYERS)).values()))


def state(length: int = 3, rows: int = ROWS) -> WireFrame:
    return encode_session_state(np.full(rows, length), np.full(rows, LAYERS), work())


def step(rows: int = ROWS, n: int = 1) -> WireFrame:
    logits = np.arange(rows * n * VOCABULARY, dtype=np.float32).reshape(rows, n, VOCABULARY)
    return encode_step(Step(logits, np.full((rows, n), LAYERS), np.full((rows, n, 1), np.nan)))


def record(rows: int = ROWS) -> Record:
    order = np.arange(rows, dtype=np.int64)
    ones = np.ones(rows, dtype=np.int64)
    tokens = TokenTable(order, ones, ones, ones * 2, ones * 4, ones, ones * 0, np.arange(rows) % 2 == 0)
    emitted = [np.arange(row + 1, dtype=np.int64) for row in range(rows)]
    return Record(tokens, np.full((rows, 1), 0.25), emitted, ["stop token", "length"][:rows], {0: work()}, {0: work()})


def honest() -> dict[str, WireFrame]:
    """Return the reply to each call of a session of two rows."""
    capabilities = capabilities_to_json(Capabilities(max_feed=8, deepens=True))
    replies = {
        "hello": WireFrame({"wire": 1, "name": "fake"}),
        "open": WireFrame({"decoder": 5, "capabilities": capabilities}),
        "start": WireFrame({"session": 6}) + state() + step(),
        "feed": state(5) + step(n=2),
        "deepen": state(3) + step(n=1),
        "rollback": state(2),
        "commit": state(2),
        "drop": state(2, rows=1),
        "end": WireFrame(),
        "generate": encode_record(record()),
        "synchronize": WireFrame(),
        "close": WireFrame(),
        "bye": WireFrame(),
    }
    return {call: WireFrame({"reply": call}) + reply for call, reply in replies.items()}


@contextmanager
def listening(**replies: Reply) -> Iterator[tuple[Address, list[WireFrame]]]:
    """Yield a server's address and its received requests. ``replies`` replace the honest ones, by call.

    A reply is a frame, bytes sent unchanged, or a function of the socket.
    """
    answers: dict[str, Reply] = honest() | replies
    asked: list[WireFrame] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                judge, _ = listener.accept()
            except OSError:  # the test has ended
                return
            threading.Thread(target=answer, args=(judge,), daemon=True).start()

    def answer(judge: socket.socket) -> None:
        stream = Stream(judge.fileno(), judge.fileno())
        with judge:
            while True:
                try:
                    frame = read_frame(stream.read)
                except (StreamEnded, OSError):
                    return
                asked.append(frame)
                reply = answers[frame.header["call"]]
                if callable(reply):
                    reply(judge)
                    return
                stream.write([reply] if isinstance(reply, bytes) else encode_frame_to_buffers(reply))

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield parse_address(f"tcp:127.0.0.1:{listener.getsockname()[1]}", Path.cwd(), "decoder"), asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
