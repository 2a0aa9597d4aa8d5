"""An HTTP server that imitates vLLM and llama.cpp and answers from a decoder in this process."""

from __future__ import annotations

import codecs
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any, ClassVar, NoReturn

Complete = Callable[[list[int], int, frozenset[int], float, int], tuple[list[int], bool]]


@dataclass
class Engine:
    """``complete(prompt, max_new, stop, temperature, seed)`` → (tokens, stopped). ``bodies``: the received requests.

    ``score(tokens)`` → log-probabilities [n, V] after each of ``tokens``; None: the server reports none. ``window``:
    the number of positions that it declares. ``vocabulary``: the tokens of its model, if declared (llama.cpp).
    ``ends``: tokens that end every answer of llama.cpp. ``closed``: set when its server closes.
    """

    complete: Complete
    kind: str = "vllm"
    score: Callable[[list[int]], Any] | None = None
    window: int = 256
    vocabulary: int = 0
    ends: frozenset[int] = frozenset()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: threading.Event = field(default_factory=threading.Event)

    def hang(self) -> NoReturn:
        """Wait until the server closes. A thread that sleeps longer would run torch while the interpreter exits."""
        self.closed.wait()
        raise ConnectionAbortedError("the server is closed")

    def get(self, path: str) -> tuple[int, Any]:
        if self.kind == "llama.cpp" and path == "/props":
            return 200, {"default_generation_settings": {"n_ctx": self.window}, "total_slots": 4}
        if path == "/v1/models":
            meta = {"meta": {"n_vocab": self.vocabulary}} if self.vocabulary else {}
            model = {"id": "served", "object": "model", "max_model_len": self.window}
            return 200, {"object": "list", "data": [model | meta]}
        return 404, {"error": "not found"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:  # one model, whose caches are not thread-safe
            self.bodies.append(body)
            if self.kind == "llama.cpp":
                assert path == "/completion", path
                assert not body["ignore_eos"], "the server would ban these tokens"
                tokens, ended = self.complete(
                    body["prompt"], body["n_predict"], self.ends, body["temperature"], body["seed"]
                )
                if body.get("stream"):
                    return 200, self.stream(tokens, ended)
                reply = {"content": text_of_tokens(tokens), "stop": True, "stop_type": "eos" if ended else "limit"}
                reply |= {"tokens": tokens} if body.get("return_tokens") else {}
                if self.score is not None and body.get("n_probs"):
                    reply["completion_probabilities"] = [
                        {
                            "id": token,
                            "logprob": likeliest.get(token, -99.0),
                            "top_logprobs": [{"id": i, "token": "?", "logprob": p} for i, p in likeliest.items()],
                        }
                        for token, likeliest in zip(tokens, self.likeliest(body, tokens, body["n_probs"]), strict=True)
                    ]
                return 200, reply
            assert path == "/v1/completions", path
            stop = frozenset(body["stop_token_ids"])
            tokens, stopped = self.complete(body["prompt"], body["max_tokens"], stop, body["temperature"], body["seed"])
        if body.get("stream"):
            counted = (body.get("stream_options") or {}).get("include_usage")
            return 200, self.stream(tokens, stopped, self.usage(body, tokens) if counted else None)
        choice = {"index": 0, "text": text_of_tokens(tokens), "finish_reason": "stop" if stopped else "length"}
        choice |= {"stop_reason": tokens[-1] if stopped else None}
        if self.score is not None and body.get("logprobs"):
            named = [
                {f"token_id:{token}": value for token, value in each.items()}
                for each in self.likeliest(body, tokens, body["logprobs"])
            ]
            own = [each.get(f"token_id:{token}", -99.0) for token, each in zip(tokens, named, strict=True)]
            ids = [f"token_id:{token}" for token in tokens]
            choice |= {"logprobs": {"top_logprobs": named, "tokens": ids, "token_logprobs": own}}
            scored = self.score(body["prompt"])
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": float(scored[at, token]), "rank": 1}}
                for at, token in enumerate(body["prompt"][1:])
            ]
        choice |= {"token_ids": tokens} if body.get("return_token_ids") else {}
        return 200, {"choices": [choice], "usage": self.usage(body, tokens)}

    def usage(self, body: dict[str, Any], tokens: list[int]) -> dict[str, int]:
        """Return the token counts of the request; ``sent``: its prompt, if a defect reads another one."""
        return {"prompt_tokens": len(body.get("sent", body["prompt"])), "completion_tokens": len(tokens)}

    def parts(self, tokens: list[int]) -> Iterator[tuple[list[int], str]]:
        """Return (ids, text) of each event of a stream: one token each, and text up to the last whole character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield [token], decoder.decode(bytes_of_token(token))
        yield [], decoder.decode(b"", True)

    def stream(self, tokens: list[int], stopped: bool, usage: Any = None) -> Iterator[bytes]:
        """Write server-sent events in the format of this kind of server."""
        llama = self.kind == "llama.cpp"
        for ids, text in self.parts(tokens):
            choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None}
            yield event({"content": text, "tokens": ids, "stop": False} if llama else {"choices": [choice]})
        if llama:
            yield event({"content": "", "tokens": [], "stop": True, "stop_type": "eos" if stopped else "limit"})
            return
        ended = {"finish_reason": "stop" if stopped else "length", "stop_reason": tokens[-1] if stopped else None}
        yield event({"choices": [{"index": 0, "text": "", "token_ids": None} | ended]})
        if usage is not None:
            yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def likeliest(self, body: dict[str, Any], tokens: list[int], top: int) -> list[dict[int, float]]:
        """Return the ``top`` likeliest ids at each new token, the likeliest first."""
        assert self.score is not None, "the engine does not score"
        scored = self.score([*body["prompt"], *tokens[:-1]])[len(body["prompt"]) - 1 :]
        return [{int(i): float(row[i]) for i in (-row).argsort(kind="stable")[:top]} for row in scored]


@dataclass
class EachThird(Engine):
    """Refuse each third request with a retry; with ``forgets``, the resent request keeps one token of its prompt."""

    forgets: bool = False
    served: int = 0
    put_off: list[dict[str, Any]] = field(default_factory=list)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.lock:
            again = body in self.put_off
            self.served += not again
            if not again and self.served % 3 == 0:
                self.put_off.append(body)
                return 503, {"error": "busy"}, {"Retry-After": "0"}
            if again:
                self.put_off.remove(body)
        forgotten = {"prompt": body["prompt"][:1], "sent": body["prompt"]}
        return super().post(path, body | (forgotten if again and self.forgets else {}))


@dataclass
class NoStream(Engine):
    """Answer a request for a stream according to ``how``."""

    how: str = "whole"

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("stream") and self.how == "refused":
            return 400, {"error": "stream is not supported"}
        return super().post(path, body | {"stream": body.get("stream") and self.how != "whole"})

    def parts(self, tokens: list[int]) -> Any:
        parts = list(super().parts(tokens))
        return iter([(None if self.how == "text" else tokens, "".join(text for _, text in parts))])


class Hanging(Engine):
    """Stop a stream after three events, and keep the connection open."""

    def stream(self, tokens: list[int], *rest: Any) -> Any:
        yield from islice(super().stream(tokens, *rest), 3)
        self.hang()


def bytes_of_token(token: int) -> bytes:
    """Return a letter and half of a two-byte character: in most texts two tokens share a character."""
    letter = bytes([97 + token % 26])
    return b"\xa9" + letter if token % 2 else letter + b"\xc3"


def text_of_tokens(tokens: list[int]) -> str:
    return b"".join(map(bytes_of_token, tokens)).decode("utf-8", "replace")


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


CLOSE = 0  # a status: close the connection without a reply, or in the middle of one that begins with the value


class _Handler(BaseHTTPRequestHandler):
    engine: ClassVar[Any]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as in inference servers: else each event waits 40 ms for an acknowledgement

    def do_GET(self) -> None:
        self.engine.headers.append(dict(self.headers))
        self.reply(*self.engine.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(*self.engine.post(self.path, body))

    def reply(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        if status == CLOSE:
            self.close_connection = True
            if value is not None:  # half a reply
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + value)
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(value, Iterator):
            self.stream(value)
            return
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, parts: Iterator[bytes]) -> None:
        """Write HTTP chunks: each event is cut in two, inside a character if it has one."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            cut = next((at + 1 for at, byte in enumerate(part) if byte > 0xC0), len(part) // 2)
            for piece in (part[:cut], part[cut:]):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the access log."""


POLL_S = 0.02  # seconds that closing a server may wait, default 0.5: hundreds of tests open one


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing joins them
    request_queue_size = 128  # rows of one call connect at once; a busy machine may reset more than five, the default

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a client that has disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def in_thread(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serve in a thread of this process until the block ends."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve(engine: Any) -> Iterator[str]:
    """Yield the URL of a server that answers with ``engine`` until the block ends; no thread of it remains.

    ``engine`` has ``get``, ``post``, ``headers`` and ``closed``.
    """
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"engine": engine}))
    with in_thread(server):
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            engine.closed.set()
