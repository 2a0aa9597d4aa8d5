"""The server loop of a decoder factory: each call reaches its decoder or session, each error keeps its kind."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from emad_ref.errors import BadArgument, EmadError
from emad_ref.protocol import Capabilities, InadmissibleDepth, Prompt, Step, Unsupported
from pytest_emad.remote.address import ServerLimits
from pytest_emad.remote.frames import FRAME_SIZES, MAGIC, BadFrame, WireFrame, encode_frame_to_buffers, read_frame
from pytest_emad.remote.messages import encode_open_decoder_request, encode_prompts
from pytest_emad.remote.server import ClientIdleError, DecoderServer
from pytest_emad.remote.transport import Stream, StreamEnded, StreamTimedOut
from tests.unit.remote.scripted_decoder import LAYERS, MODEL, REQUEST, VOCABULARY, record, work


class StubSession:
    def __init__(self, decoder, rows):
        self.decoder, self.length, self.cap, self.work = decoder, np.full(rows, 1), np.full(rows, LAYERS), work()

    def feed(self, tokens, depth=None, last=None):
        self.decoder.heard.append((tokens.tolist(), None if depth is None else depth.tolist(), last))
        if depth is not None:
            raise InadmissibleDepth("depth[0, 0]=9, but row 0 admits 1–4")
        self.length = self.length + tokens.shape[1]
        return shown(*tokens.shape)

    def deepen(self, length):
        raise ZeroDivisionError("a slip of a decoder")

    def rollback(self, length):
        raise BadArgument("length", length.tolist(), "less")

    def commit(self, length):
        raise Strange("a decoder's own error")

    def drop(self, rows):
        self.length = np.delete(self.length, rows)
        self.cap = np.delete(self.cap, rows)

    def close(self):
        self.decoder.heard.append("session closed")


class Strange(EmadError):
    pass


class StubDecoder:
    capabilities = Capabilities(max_feed=3)

    def __init__(self):
        self.heard = []

    def start(self, prompts):
        self.heard.append([prompt.tokens.tolist() for prompt in prompts])
        return StubSession(self, len(prompts)), shown(len(prompts), 1)

    def generate(self, prompts, max_new, stop):
        self.heard.append((len(prompts), max_new, stop))
        return record(len(prompts))

    def synchronize(self):
        self.heard.append("synchronized")

    def close(self):
        self.heard.append("closed")


def shown(rows, n):
    return Step(np.zeros((rows, n, VOCABULARY)), np.ones((rows, n), np.int64), np.zeros((rows, n, 1)))


class Judge:
    """The other end of a serving loop; ``decoders`` made so far, and the error that ended it."""

    def __init__(self, served):
        ours, theirs = socket.socketpair()
        self.socket, self.stream, self.decoders, self.ended = ours, Stream(ours.fileno(), ours.fileno()), [], None
        self.other = theirs

        def make(request):
            if request.seed == 13:
                raise Unsupported("not with this seed")
            self.decoders.append(StubDecoder())
            return self.decoders[-1]

        def serve():
            try:
                with theirs:
                    served(make, "stub").serve(Stream(theirs.fileno(), theirs.fileno()))
            except (EmadError, OSError) as error:
                self.ended = error

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()

    def __call__(self, call, *frames, **header):
        self.stream.write(encode_frame_to_buffers(sum(frames, WireFrame({"call": call})) + WireFrame(header)))
        return read_frame(self.stream.read)

    def wait(self):
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def serving(served=DecoderServer):
    judge = Judge(served)
    try:
        yield judge
    finally:
        judge.socket.close()
        judge.wait()


@pytest.fixture
def judge():
    with serving() as judge:
        yield judge


@pytest.fixture
def decoder(judge):
    """Return the number of an open decoder."""
    return judge("open", encode_open_decoder_request(REQUEST, MODEL)).header["decoder"]


@pytest.fixture
def session(judge, decoder):
    """Return the number of an open session of two rows."""
    prompts = encode_prompts([Prompt(np.array([1, 2])), Prompt(np.array([3]))])
    return judge("start", prompts, decoder=decoder).header["session"]


def ints(**arrays):
    return WireFrame(arrays={name: np.array(values, dtype=np.int64) for name, values in arrays.items()})


def refused(reply):
    return reply.header["error"], reply.header["message"]


def test_hello_says_who_and_which_version(judge):
    assert judge("hello", wire=1).header == {"reply": "hello", "wire": 1, "name": "stub"}
    assert refused(judge("hello", wire=2)) == ("BadArgument", "wire=2, but expected 1, the version spoken here")
    assert refused(judge("hello", wire=True)) == ("BadArgument", "wire=True, but expected 1, the version spoken here")


def test_every_call_reaches_its_decoder(judge, decoder, session):
    started, stub = judge.decoders[0].heard[0], judge.decoders[0]
    assert started == [[1, 2], [3]]
    fed = judge("feed", ints(tokens=[[5, 6], [7, 8]]), session=session, last=1)
    assert stub.heard[-1] == ([[5, 6], [7, 8]], None, 1)
    assert fed.header["reply"] == "feed"
    assert fed.arrays["length"].tolist() == [3, 3]
    assert fed.arrays["logits"].shape == (2, 2, VOCABULARY)
    assert judge("drop", ints(rows=[1]), session=session).arrays["length"].tolist() == [3]
    judge("generate", encode_prompts([Prompt(np.array([1]))]), decoder=decoder, max_new=4, stop=[9, 8])
    assert stub.heard[-1] == (1, 4, frozenset({8, 9}))
    judge("synchronize", decoder=decoder)
    assert stub.heard[-1] == "synchronized"


def test_errors_come_back_as_their_kinds(judge, session):
    depths = ints(tokens=[[1], [2]], depth=[[9], [9]])
    assert refused(judge("feed", depths, session=session))[0] == "InadmissibleDepth"
    assert refused(judge("rollback", ints(length=[1, 1]), session=session)) == (
        "BadArgument",
        "length=[1, 1], but expected less",
    )
    assert refused(judge("open", encode_open_decoder_request(REQUEST, MODEL), seed=13)) == (
        "Unsupported",
        "not with this seed",
    )
    assert refused(judge("commit", ints(length=[1, 1]), session=session)) == (
        "Failure",
        "Strange: a decoder's own error",
    )


def test_an_error_of_any_other_kind_is_a_failure_whose_place_is_shown(judge, session, capfd):
    reply = judge("deepen", ints(length=[1, 1]), session=session)
    assert refused(reply) == ("Failure", "ZeroDivisionError: a slip of a decoder")
    assert "in deepen" in capfd.readouterr().err
    judge("hello", wire=1)  # the loop continues


@pytest.mark.parametrize(
    ("call", "header", "said"),
    [
        ("dance", {}, "call='dance', but expected one of hello, open, start"),
        (None, {}, "call=None, but expected one of"),
        (["feed"], {}, "call=['feed']"),
        ("start", {}, "decoder=None, but expected a whole number ≥ 0"),
        ("start", {"decoder": 99}, "decoder=99, but expected an open decoder; open are [1]"),
        ("feed", {"session": 1}, "session=1, but expected an open session; open are [2]"),
        ("feed", {"session": "2"}, "session='2', but expected a whole number"),
        ("feed", {"session": 2}, "tokens=None, but expected an array, int64 [n, n]"),
        ("rollback", {"session": 2}, "length=None, but expected an array, int64 [n]"),
        ("generate", {"decoder": 1}, "stop=None, but expected a list"),
        ("generate", {"decoder": 1, "stop": ["a"]}, "stop=['a'], but expected a list of tokens"),
        ("generate", {"decoder": 1, "stop": [], "max_new": 1.5}, "max_new=1.5, but expected a whole number"),
    ],
    ids=str,
)
def test_a_request_that_is_none_is_a_bad_argument(judge, session, call, header, said):
    kind, message = refused(judge(call, **header))
    assert kind == "BadArgument"
    assert said in message


def test_arrays_of_another_kind_are_bad_arguments(judge, session):
    kind, message = refused(judge("feed", WireFrame(arrays={"tokens": np.zeros((2, 1))}), session=session))
    assert (kind, message) == ("BadArgument", "tokens='float64 [2, 1]', but expected int64 [n, n]")
    kind, message = refused(judge("feed", ints(tokens=[[1], [2]]), session=session, last=-1))
    assert "last=-1" in message


def test_sessions_end_by_themselves_and_with_their_decoder(judge, decoder, session):
    other = judge("open", encode_open_decoder_request(REQUEST, MODEL)).header["decoder"]
    prompt = encode_prompts([Prompt(np.array([1]))])
    kept = judge("start", prompt, decoder=other).header["session"]
    second = judge("start", prompt, decoder=decoder).header["session"]
    assert len({decoder, other, session, second, kept}) == 5
    judge("end", session=session)
    assert judge.decoders[0].heard[-1] == "session closed"
    assert "an open session" in refused(judge("end", session=session))[1]
    judge("close", decoder=decoder)
    assert judge.decoders[0].heard[-2:] == ["session closed", "closed"]
    assert "an open session" in refused(judge("feed", ints(tokens=[[1]]), session=second))[1]
    assert "an open decoder" in refused(judge("close", decoder=decoder))[1]
    assert judge("feed", ints(tokens=[[1]]), session=kept).header["reply"] == "feed"


def test_bye_and_a_closed_stream_close_everything():
    for farewell in (lambda judge: judge("bye"), lambda judge: judge.socket.shutdown(socket.SHUT_WR)):
        with serving() as judge:
            number = judge("open", encode_open_decoder_request(REQUEST, MODEL)).header["decoder"]
            judge("start", encode_prompts([Prompt(np.array([1]))]), decoder=number)
            farewell(judge)
            judge.wait()
            assert judge.decoders[0].heard[-2:] == ["session closed", "closed"]
            assert judge.ended is None


@pytest.mark.parametrize(("sent", "error"), [(b"GET / HTTP/1.1\r\n", BadFrame), (b"EMW1\0", StreamEnded)])
def test_after_something_else_than_a_request_nothing_can_be_read(sent, error):
    with serving() as judge:
        judge("open", encode_open_decoder_request(REQUEST, MODEL))
        judge.socket.sendall(sent)
        judge.socket.shutdown(socket.SHUT_WR)
        judge.wait()
        assert isinstance(judge.ended, error)
        assert judge.decoders[0].heard == ["closed"]


def test_calls_take_turns():
    """``turn`` is entered around each call, and left if one fails."""
    turn = threading.Lock()
    with serving(lambda make, name: DecoderServer(make, name, turn)) as judge:
        judge("dance")
        judge("hello", wire=1)
        assert not turn.locked()
        with turn:
            judge.stream.write(encode_frame_to_buffers(WireFrame({"call": "hello", "wire": 1})))
            judge.socket.settimeout(0.2)
            with pytest.raises(TimeoutError):
                judge.socket.recv(1)
        judge.socket.settimeout(None)
        assert read_frame(judge.stream.read).header["name"] == "stub"


# ---------------------------------------------------------------- limits for one judge


def limited(**limits):
    return serving(lambda make, name: DecoderServer(make, name, limits=ServerLimits(**limits)))


PROMPT = encode_prompts([Prompt(np.array([1, 2]))])


def test_sessions_and_decoders_are_counted_and_closed_ones_are_not():
    with limited(sessions=2) as judge:
        decoders = [judge("open", encode_open_decoder_request(REQUEST, MODEL)).header["decoder"] for _ in range(2)]
        kind, said = refused(judge("open", encode_open_decoder_request(REQUEST, MODEL)))
        assert (kind, said) == ("Failure", f"LimitExceeded: decoders=3, but {MOST_OF_ONE.format(2, '--sessions')}")
        sessions = [judge("start", PROMPT, decoder=decoders[0]).header["session"] for _ in range(2)]
        assert refused(judge("start", PROMPT, decoder=decoders[1]))[1].startswith("LimitExceeded: sessions=3, but")
        judge("end", session=sessions[0])
        assert "session" in judge("start", PROMPT, decoder=decoders[1]).header
        judge("close", decoder=decoders[0])
        assert "decoder" in judge("open", encode_open_decoder_request(REQUEST, MODEL)).header


MOST_OF_ONE = "expected at most {} of one judge; close what is done with, or start the server with a larger {}"


def test_tokens_are_counted_before_they_are_read():
    with limited(tokens=6) as judge:
        decoder = judge("open", encode_open_decoder_request(REQUEST, MODEL)).header["decoder"]
        session = judge("start", PROMPT, decoder=decoder).header["session"]  # the stub already holds one position of it
        assert "length" in judge("feed", ints(tokens=[[1, 2, 3, 4, 5]]), session=session).arrays
        kind, said = refused(judge("feed", ints(tokens=[[1]]), session=session))
        assert (kind, said) == ("Failure", f"LimitExceeded: positions=7, but {MOST_OF_ONE.format(6, '--positions')}")
        assert "positions=8" in refused(judge("start", PROMPT, decoder=decoder))[1]
        judge("end", session=session)
        for max_new, held in ((5, 7), (10**9, 10**9 + 2)):
            assert (
                f"positions={held}," in refused(judge("generate", PROMPT, decoder=decoder, max_new=max_new, stop=[]))[1]
            )
        assert "stop" in judge("generate", PROMPT, decoder=decoder, max_new=4, stop=[]).header
        assert judge.decoders[0].heard[-1] == (1, 4, frozenset())


def test_a_request_larger_than_any_list_of_tokens_is_refused_before_it_is_read(judge):
    judge.socket.sendall(
        MAGIC + FRAME_SIZES.pack(2, (64 << 20) + 1) + b"{}"
    )  # at once: the judge closes the connection on reading the sizes
    judge.wait()
    assert "a payload of 67108865 bytes, but at most 67108864" in str(judge.ended)


def test_a_refusal_quotes_so_much_and_no_more(judge):
    kind, said = refused(judge("x" * 1_000_000))
    assert kind == "BadArgument"
    assert len(said) < 2100


@pytest.mark.parametrize("sent", [b"", b"E", b"EMW1", MAGIC + FRAME_SIZES.pack(100, 0) + b"{"])
def test_a_judge_that_is_silent_or_stops_half_way_is_let_go(sent):
    with limited(idle_s=0.15, frame_s=0.15) as judge:
        judge("open", encode_open_decoder_request(REQUEST, MODEL))
        judge.socket.sendall(sent)
        judge.wait()
        assert isinstance(judge.ended, StreamTimedOut if sent else ClientIdleError)
        assert judge.decoders[0].heard == ["closed"]


def test_drops_of_a_frame_do_not_make_more_time():
    """Each byte comes soon after the previous one, but the whole frame has a time limit."""
    with limited(frame_s=0.3) as judge:
        began = time.monotonic()
        with suppress(OSError):
            for byte in MAGIC + FRAME_SIZES.pack(1000, 0) + b" " * 1000:
                judge.socket.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - began < 5
        judge.wait()
        assert isinstance(judge.ended, StreamTimedOut)


def test_a_judge_that_reads_no_replies_is_let_go():
    with limited(frame_s=0.3) as judge:
        judge.other.setblocking(False)
        request = b"".join(map(bytes, encode_frame_to_buffers(WireFrame({"call": "x" * 100_000}))))
        judge.socket.settimeout(0.05)
        with suppress(OSError):
            for _ in range(1000):
                judge.socket.sendall(request)
        judge.wait()
        assert isinstance(judge.ended, StreamTimedOut)


def test_memory_that_is_not_there_ends_one_connection(monkeypatch):
    def empty(size, dtype, original=np.empty):
        if size > 1000:
            raise MemoryError
        return original(size, dtype)

    with serving() as judge:
        judge("hello", wire=1)
        monkeypatch.setattr(np, "empty", empty)
        judge.socket.sendall(MAGIC + FRAME_SIZES.pack(2000, 0))
        judge.wait()
        assert "no memory for 2000 bytes" in str(judge.ended)
