"""A stand-in for inference servers: it answers over HTTP as vLLM and llama.cpp do, from a decoder in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

Complete = Callable[[list[int], int, frozenset[int], float, int], tuple[list[int], bool]]


@dataclass
class Engine:
    """``complete(prompt, max_new, stop, temperature, seed)`` → (tokens, stopped). ``bodies``: requests as they came.

    ``score(tokens)`` → log-probabilities [n, V] after each of ``tokens``; None: the server reports none. ``window``:
    the positions that it says it serves.
    """

    complete: Complete
    kind: str = "vllm"
    score: Callable[[list[int]], Any] | None = None
    window: int = 256
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str) -> tuple[int, Any]:
        if self.kind == "llama.cpp" and path == "/props":
            return 200, {"default_generation_settings": {"n_ctx": self.window}, "total_slots": 4}
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "served", "object": "model", "max_model_len": self.window}]}
        return 404, {"error": "not found"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:  # one model, whose caches are not meant for threads
            self.bodies.append(body)
            if self.kind == "llama.cpp":
                assert path == "/completion", path
                tokens, _ = self.complete(
                    body["prompt"], body["n_predict"], frozenset(), body["temperature"], body["seed"]
                )
                reply = {"content": "", "stop": True, "stop_type": "limit"}
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
        choice = {"index": 0, "text": "", "finish_reason": "stop" if stopped else "length"}
        choice |= {"stop_reason": tokens[-1] if stopped else None}
        if self.score is not None and body.get("logprobs"):
            named = [
                {f"token_id:{token}": value for token, value in each.items()}
                for each in self.likeliest(body, tokens, body["logprobs"])
            ]
            choice |= {"logprobs": {"top_logprobs": named}}
            scored = self.score(body["prompt"])
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": float(scored[at, token]), "rank": 1}}
                for at, token in enumerate(body["prompt"][1:])
            ]
        return 200, {"choices": [choice | ({"token_ids": tokens} if body.get("return_token_ids") else {})]}

    def likeliest(self, body: dict[str, Any], tokens: list[int], top: int) -> list[dict[int, float]]:
        """The ``top`` likeliest ids at each new token, the likeliest first."""
        assert self.score is not None, "asked of an engine that scores"
        scored = self.score([*body["prompt"], *tokens[:-1]])[len(body["prompt"]) - 1 :]
        return [{int(i): float(row[i]) for i in (-row).argsort(kind="stable")[:top]} for row in scored]


class _Handler(BaseHTTPRequestHandler):
    engine: ClassVar[Any]

    def do_GET(self) -> None:
        self.engine.headers.append(dict(self.headers))
        self.reply(*self.engine.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(*self.engine.post(self.path, body))

    def reply(self, status: int, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read no access log."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # rows of one call connect at once; five, the default, may be reset on a busy machine


@contextmanager
def serve(engine: Any) -> Iterator[str]:
    """The URL of a server that answers as ``engine`` (``get``, ``post``, ``headers``), until the block ends."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"engine": engine}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
