"""Decoder behind a URL: an inference server that completes token ids over HTTP.

The server has one of two interfaces, by its answers:

    llama.cpp   ``GET /props`` answers; ``POST /completion`` takes ids as ``prompt`` and returns ``tokens``
    OpenAI      ``GET /v1/models`` answers; ``POST /v1/completions`` takes ids, as vLLM and SGLang serve it, and returns
                ``token_ids`` where ``return_token_ids`` is set

The client sends the rows of a batch at once, each in a separate request, so that the server batches them. Greedy
requests have temperature 0; no request uses top-k, top-p, penalties or the model's own generation config. Only the stop
ids of the request end a row, not the model's own end of text. llama.cpp takes no stop ids, so this client cuts its
answers after the first of them. If llama.cpp ignored its ends of text it would ban them, so the client lets them end an
answer and requests the rest again.

Each request has a time limit for its whole reply. ``EMAD_DECODER_TOKEN`` of the environment is sent as bearer token.

The client repeats a request, at most twice while no other one is answered, if the server defers it (status 429, 503) or
resets the connection before the first byte of its reply. It never repeats a request after the reply has begun.
``RequestCounts`` counts requests, and repetitions by reason. The client waits for a server that answers by status 503
while it loads its model.

A server that refuses (``REFUSALS``) streams, log-probabilities, only those of the prompt, or a temperature does not
offer them.

Streamed replies are server-sent events (``stream: true``). A token arrives when the event that holds it is whole.
"""

from __future__ import annotations

import copy
import http.client
import json
import math
import os
import re
import shlex
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from emad_ref.errors import BadArgument, is_number, is_whole
from emad_ref.protocol import DraftCounts, Prompt, Request, TokenArrivals, TokenLogProbs, Unsupported
from emad_ref.record import Ints
from pytest_emad.remote.address import UrlAddress
from pytest_emad.remote.client import TIMEOUT_REMEDY, DecoderFailed
from pytest_emad.remote.draft_counters import BadCounter, parse_draft_counts
from pytest_emad.remote.token_decoder import Completion, TokenDecoder, run_concurrently
from pytest_emad.remote.transport import EventStream, HttpReply, RequestCounts

TOKEN_VARIABLE = "EMAD_DECODER_TOKEN"
LARGEST_REPLY = 64 << 20  # bytes
QUOTED = 300  # most characters of a reply in a message
UNREACHED_REMEDY = "is it started, and is this its address?"
COUNTER_REMEDY = "restart the server, or mend its counters"
ENERGY_PATH, ENERGY_FIELD = "/energy_metrics", "total_energy_j"
SERVED_REMEDY = "docs/engines.md says what a server must answer"
TOKEN_ID = re.compile(r"(?:token_id|token):(\d+)")  # token names with ids, of vLLM and others
WAITS_S = (0.5, 2.0)  # seconds before a repetition, unless the server gives them (Retry-After)
PUT_OFF = (429, 503)  # statuses: too many requests, not ready
REFUSALS = (400, 404, 405, 415, 422, 501)  # statuses by which a server refuses a field of a request
LOADING, LOADING_S = 503, 2.0  # status of a server that loads its model, and seconds until the next request
EVENTS = "text/event-stream"
ALIVE_S = 10.0  # seconds for one token, after a request hung
SEED_STEP = 1_000_003  # between the seeds of two parts of an answer
SAME_VALUE = 1e-4  # nats; two reports of one log-probability may be rounded differently
UNFILTERED = {"top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


Reading = TypeVar("Reading")


class CompletionInterface(Protocol):
    """Requests and replies of one kind of server, and its description of its model.

    ``path``: of completions. ``model``: the server's name for it. ``window``: served positions, ``vocabulary``: its
    tokens; 0 if not reported. ``streamed``: additional body fields for a streamed reply.
    """

    path: str
    model: str
    window: int
    vocabulary: int
    streamed: Mapping[str, Any]

    def build_request_body(
        self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int
    ) -> dict[str, Any]:
        """The JSON body of one request."""

    def parse_completion(self, reply: Mapping[str, Any], stop: frozenset[int]) -> Completion:
        """The completion in a reply. Raises Unsupported, KeyError, TypeError, ValueError, IndexError."""

    def parse_text(self, reply: Mapping[str, Any]) -> str | None:
        """The text of a reply; None: it has none."""

    def parse_event_tokens(self, event: Mapping[str, Any]) -> list[int]:
        """Token ids in one event of a stream. Raises as ``parse_completion``."""

    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One reply from the ``events`` of a stream. Raises as ``parse_completion``, also for a stream cut off."""

    def is_unfinished(self, reply: Mapping[str, Any]) -> bool:
        """Whether the model's end of text, which the request lacks, ended the reply."""

    def parse_usage(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        """Token counts of a reply, if it has any: ``prompt_tokens``, ``completion_tokens``, ``total_tokens``."""

    def log_probs_request_fields(self, top: int) -> list[dict[str, Any]]:
        """Request fields for the ``top`` likeliest tokens, in variants to try in turn, the smallest last."""

    def parse_log_probs(self, reply: Mapping[str, Any], prompt: Ints, tokens: Ints, top: int) -> TokenLogProbs:
        """Log-probabilities of the ``tokens`` after ``prompt`` in a reply. Raises as ``parse_completion``."""


def _require_own(
    tokens: Ints, rivals: Sequence[Mapping[int, float]], ids: Sequence[Any] | None, own: Sequence[float | None] | None
) -> None:
    """Raise ValueError unless ``ids`` and log-probabilities (``own``) of the emitted ``tokens`` fit ``rivals``.

    A reply may lack either: None.
    """
    for what, told in (("token ids", ids), ("log-probabilities", own)):
        if told is not None and len(told) != len(tokens):
            raise InvalidReply(f"the reply gives {len(told)} {what} for {len(tokens)} emitted tokens")
    for at, (token, known) in enumerate(zip(tokens.tolist(), rivals, strict=True)):
        if ids is not None and ids[at] is not None and int(ids[at]) != token:
            raise InvalidReply(f"log-probability {at} is of token {ids[at]}, but token {token} was emitted")
        value = None if own is None else own[at]
        if value is not None and token in known and not math.isclose(value, known[token], abs_tol=SAME_VALUE):
            raise InvalidReply(
                f"emitted token {at} has log-probability {value}, but {known[token]} among the likeliest"
            )


class OpenAIInterface:
    """``/v1/completions`` of vLLM, SGLang and others."""

    path = "/v1/completions"
    vocabulary = 0
    streamed: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

    def __init__(self, model: str, window: int):
        self.model, self.window = model, window

    def build_request_body(
        self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int
    ) -> dict[str, Any]:
        return UNFILTERED | {
            "model": self.model,
            "prompt": prompt.tolist(),
            "max_tokens": max_new,
            "temperature": temperature,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "seed": seed,
            "stop_token_ids": sorted(stop),
            "ignore_eos": True,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    def parse_completion(self, reply: Mapping[str, Any], stop: frozenset[int]) -> Completion:
        choice = reply["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            raise Unsupported("the server returns text without token ids (choices[0].token_ids)")
        tokens = _token_array(ids)
        stopped, at = choice["finish_reason"] == "stop", choice.get("stop_reason")
        if stopped and is_whole(at) and (not len(tokens) or tokens[-1] != at):
            tokens = np.append(tokens, at)  # some servers omit the token that stopped the row
        return Completion(tokens, stopped)

    def parse_text(self, reply: Mapping[str, Any]) -> str | None:
        text = reply["choices"][0].get("text")
        return text if isinstance(text, str) else None

    def parse_event_tokens(self, event: Mapping[str, Any]) -> list[int]:
        choices = event["choices"]  # none in an event of usage alone
        ids: list[int] = _token_array((choices[0].get("token_ids") if choices else None) or []).tolist()
        return ids

    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        choices = [event["choices"][0] for event in events if event["choices"]]
        if not any(isinstance(choice.get("token_ids"), list) for choice in choices):
            raise Unsupported("the server streams text without token ids (choices[0].token_ids)")
        reasons = [choice for choice in choices if choice.get("finish_reason")]
        if not reasons:
            raise InvalidReply("the stream ended without a finish_reason")
        tokens = [token for event in events for token in self.parse_event_tokens(event)]
        ended = {name: reasons[-1].get(name) for name in ("finish_reason", "stop_reason")}
        text = "".join(choice.get("text") or "" for choice in choices)
        usages = [event["usage"] for event in events if event.get("usage")]
        return {"choices": [{"token_ids": tokens, "text": text} | ended], "usage": usages[-1] if usages else None}

    def is_unfinished(self, reply: Mapping[str, Any]) -> bool:
        return False  # it ignores them on request

    def parse_usage(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        return reply.get("usage") or {}

    def log_probs_request_fields(self, top: int) -> list[dict[str, Any]]:
        of_new = {"logprobs": top, "return_tokens_as_token_ids": True}
        return [of_new | {"prompt_logprobs": 1}, of_new]

    def parse_log_probs(self, reply: Mapping[str, Any], prompt: Ints, tokens: Ints, top: int) -> TokenLogProbs:
        choice = reply["choices"][0]
        shown = (choice.get("logprobs") or {}).get("top_logprobs")
        if shown is None:
            raise Unsupported("the server reports no log-probabilities (choices[0].logprobs.top_logprobs)")
        rivals = [
            {id: float(value) for name, value in each.items() if (id := _named_id(name)) is not None} for each in shown
        ]
        if any(len(known) < len(each) for known, each in zip(rivals, shown, strict=True)):
            raise Unsupported("the server reports log-probabilities by text, which does not tell token ids apart")
        named, own = (choice["logprobs"].get(name) for name in ("tokens", "token_logprobs"))
        ids = None if named is None else [_named_id(name) for name in named]
        _require_own(tokens, rivals, ids, own)
        told = choice.get("prompt_logprobs")
        if told is None:
            return TokenLogProbs.of_likeliest(tokens, rivals, top)
        known = [float(each[str(token)]["logprob"]) for token, each in zip(prompt[1:], told[1:], strict=True)]
        return TokenLogProbs.of_likeliest(tokens, rivals, top, np.array(known))


class LlamaCppInterface:
    """``/completion`` of llama.cpp's server."""

    path = "/completion"
    streamed: Mapping[str, Any] = {"stream": True}

    def __init__(self, model: str, window: int, vocabulary: int):
        self.model, self.window, self.vocabulary = model, window, vocabulary

    def build_request_body(
        self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int
    ) -> dict[str, Any]:
        return UNFILTERED | {
            "prompt": prompt.tolist(),
            "n_predict": max_new,
            "temperature": temperature,
            "top_k": 0 if temperature else 1,
            "typical_p": 1.0,
            "repeat_penalty": 1.0,
            "samplers": ["temperature"] if temperature else ["top_k"],
            "seed": seed,
            "ignore_eos": False,  # True bans them
            "return_tokens": True,
        }

    def parse_completion(self, reply: Mapping[str, Any], stop: frozenset[int]) -> Completion:
        if "tokens" not in reply:
            raise Unsupported("the server returns no token ids (tokens): it is older than return_tokens")
        return Completion.cut_at_stop(_token_array(reply["tokens"]), stop)

    def parse_text(self, reply: Mapping[str, Any]) -> str | None:
        text = reply.get("content")
        return text if isinstance(text, str) else None

    def parse_event_tokens(self, event: Mapping[str, Any]) -> list[int]:
        ids: list[int] = _token_array(event.get("tokens") or []).tolist()
        return ids

    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not events or not events[-1].get("stop"):
            raise InvalidReply("the stream ended without an event that says stop")
        tokens = [token for event in events for token in self.parse_event_tokens(event)]
        text = "".join(event.get("content") or "" for event in events)
        if text and not tokens:
            raise Unsupported("the server streams text without token ids (tokens)")
        return {"tokens": tokens, "content": text, "stop_type": events[-1].get("stop_type")}

    def is_unfinished(self, reply: Mapping[str, Any]) -> bool:
        return reply.get("stop_type") == "eos"

    def parse_usage(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}  # for prompts, releases count either cached or uncached tokens

    def log_probs_request_fields(self, top: int) -> list[dict[str, Any]]:
        return [{"n_probs": top, "post_sampling_probs": False}]

    def parse_log_probs(self, reply: Mapping[str, Any], prompt: Ints, tokens: Ints, top: int) -> TokenLogProbs:
        shown = reply.get("completion_probabilities")
        if not shown:
            raise Unsupported("the server reports no log-probabilities (completion_probabilities)")
        rivals = [{int(e["id"]): float(e["logprob"]) for e in each["top_logprobs"]} for each in shown]
        _require_own(tokens, rivals, *([each.get(name) for each in shown] for name in ("id", "logprob")))
        return TokenLogProbs.of_likeliest(tokens, rivals, top)


def _named_id(name: str) -> int | None:
    """The id in a token's ``name``; None if that is text."""
    found = TOKEN_ID.fullmatch(name)
    return int(found[1]) if found else None


def _error_message(answer: HttpReply) -> str:
    """The message of an error object, as OpenAI's interface, llama.cpp and FastAPI write it; else the beginning of the
    text."""
    try:
        error = json.loads(answer.text)
    except (ValueError, RecursionError):
        error = None
    for name in ("error", "message", "detail"):
        error = error.get(name, error) if isinstance(error, dict) else error
    return (error if isinstance(error, str) else answer.text)[:QUOTED]


def _token_array(ids: Any) -> Ints:
    if not isinstance(ids, list) or not all(map(is_whole, ids)):
        raise TypeError(f"token ids {str(ids)[:QUOTED]}, and not a list of integers")
    return np.array(ids, dtype=np.int64)


class InvalidReply(ValueError):
    """Raised for a reply whose parts contradict each other, or a stream without an end; the message quotes them."""


class RequestRefused(DecoderFailed):
    """Raised if the server answers by one of ``REFUSALS``."""


class ConnectionLostBeforeReply(OSError):
    """Raised if the connection breaks before the first byte of a reply."""


@dataclass(frozen=True)
class ParsedReply(Generic[Reading]):
    """Content of one reply: a ``reading`` of it, its ``tokens``, and whether to request the rest."""

    reading: Reading
    tokens: Ints
    is_unfinished: bool


class EngineClient:
    """The server at ``address``; ``seconds`` limit each of its replies. ``counts``: of requests, for the report."""

    def __init__(self, address: UrlAddress, seconds: float):
        self.address, self._seconds = address, seconds
        self.counts = RequestCounts()
        self._hung = ""  # the call that ran out of its time limit, unless the server has answered since
        self._wanted = ""  # the judge's name of the model
        self._samples = False  # whether the server has drawn a token
        self._loaded_by: float | None = None  # deadline for loading its model

    def open_decoder(self, request: Request, vocabulary: int, window: int, noise: float = 0.0) -> EngineDecoder:
        """A decoder for ``request`` of a model with ``window`` positions; ``noise``: of the precision that it states.

        Raises:
            Unsupported: exits, a source, or a temperature that the server refuses.
            DecoderFailed: no known server, a hanging one, one with fewer positions, or a model of another vocabulary.
        """
        decoder = EngineDecoder(self, request, vocabulary, noise)
        self._wanted = request.model.name
        served = self.interface
        self._require_alive()
        if 0 < served.window < window:
            came = f"the server serves {served.window} positions, but the suites ask for {window}"
            raise self._failed("open", came, "serve the model with its whole window")
        if served.vocabulary not in (0, vocabulary):
            came = f"the server says that its model has {served.vocabulary} tokens, but the folder has {vocabulary}"
            raise self._failed("open", came, "serve the model that --emad-model names")
        if request.temperature and not self._samples:
            self._require_sampling(request.temperature)
        return decoder

    def _require_sampling(self, temperature: float) -> None:
        """Request one sampled token. Raises Unsupported if the server refuses, and answers greedily."""
        token, none = np.zeros(1, dtype=np.int64), frozenset[int]()
        try:
            self.complete(token, 1, none, temperature, 0)
        except RequestRefused as refusal:
            self.complete(token, 1, none, 0.0, 0)  # fails unless the temperature is the reason
            raise Unsupported(f"the server refuses temperature {temperature:.2f} ({refusal.came})") from refusal
        self._samples = True

    def _require_alive(self) -> None:
        """Request one token after a call hung, so that a stuck server does not cost every test its time limit."""
        if not self._hung:
            return
        soon = copy.copy(self)
        soon._seconds = min(ALIVE_S, self._seconds)
        try:
            soon.complete(np.zeros(1, dtype=np.int64), 1, frozenset(), 0.0, 0)
        except DecoderFailed as error:
            came = f"the server is stuck since {self._hung}: asked for one token, it gave {error.came}"
            raise self._failed("open", came, "start it anew, and find out what it waits for") from error
        self._hung = ""

    @cached_property
    def interface(self) -> CompletionInterface:
        """Raises DecoderFailed: neither interface answers."""
        properties, served = self._described()
        llama = properties.get("default_generation_settings")
        try:
            first = self._wanted_model(served["data"])
            name, window = str(first["id"]), int(first.get("max_model_len") or 0)
            vocabulary = int((first.get("meta") or {}).get("n_vocab") or 0)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            if llama is None:
                came = f"neither /props nor /v1/models names a model ({str(served)[:QUOTED]})"
                raise self._failed("open", came, SERVED_REMEDY) from error
            name, window, vocabulary = "", 0, 0  # an older llama.cpp
        if llama is None:
            return OpenAIInterface(name, window)
        return LlamaCppInterface(name, int(llama.get("n_ctx") or 0), vocabulary)

    def _described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Answers of /props and /v1/models; {} for neither. Waits within the time limit while the server loads."""
        paths = "/props", "/v1/models"
        deadline = self._loaded_by = self._loaded_by or time.monotonic() + self._seconds
        known = False
        while True:
            answers = [self._send("GET", path, None) for path in paths]
            for path, answer in zip(paths, answers, strict=True):
                if answer.status in (401, 403):
                    remedy = f"set {TOKEN_VARIABLE} to the server's key"
                    raise self._failed(f"GET {path}", f"status {answer.status}", remedy)
            loading = [answer for answer in answers if answer.status == LOADING]
            if not loading or known:
                properties, served = (self._object(answer) or {} for answer in answers)
                return properties, served
            if time.monotonic() + LOADING_S >= deadline:
                came = f"status {LOADING} for {self._seconds:g} s: {_error_message(loading[0])!r}"
                raise self._failed("open", came, "wait until it has loaded its model")
            known = any(answer.status == 200 for answer in answers)  # then the other path may be ready, too
            time.sleep(0 if known else LOADING_S)

    def _wanted_model(self, models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The one of ``models`` that has the name or the folder of the judge's; else the first."""
        wanted = self._wanted.rstrip("/")
        for whole in (True, False):
            for model in models:
                names = [str(model.get(key) or "").rstrip("/") for key in ("id", "root")]
                if wanted in (names if whole else [name.rpartition("/")[2] for name in names]):
                    return model
            wanted = wanted.rpartition("/")[2]
        return models[0]

    def complete(self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int) -> Completion:
        """One row. Raises Unsupported, DecoderFailed."""

        def ask(history: Ints, left: int, seed: int) -> ParsedReply[Completion]:
            body = self.interface.build_request_body(history, left, stop, temperature, seed)

            def read(reply: Mapping[str, Any]) -> ParsedReply[Completion]:
                found = self._completion(reply, history, stop)
                return self._part(reply, found, found)

            return self._read(body, read)

        parts = self._parts(prompt, max_new, seed, ask)
        return Completion(np.concatenate([part.tokens for part in parts]), parts[-1].stopped)

    def log_probs(self, prompt: Ints, max_new: int, top: int) -> TokenLogProbs:
        """One greedy row with log-probabilities. Raises Unsupported, DecoderFailed."""
        for fields in self.interface.log_probs_request_fields(top):
            try:
                return self._log_probs(prompt, max_new, top, fields)
            except RequestRefused as error:
                refusal = error
        self.complete(prompt, max_new, frozenset(), 0.0, 0)  # fails unless log-probabilities are the reason
        raise Unsupported(f"the server refuses the {top} likeliest tokens ({refusal.came})") from refusal

    def _log_probs(self, prompt: Ints, max_new: int, top: int, fields: dict[str, Any]) -> TokenLogProbs:
        none: frozenset[int] = frozenset()

        def ask(history: Ints, left: int, seed: int) -> ParsedReply[TokenLogProbs]:
            body = self.interface.build_request_body(history, left, none, 0.0, seed) | fields

            def read(reply: Mapping[str, Any]) -> ParsedReply[TokenLogProbs]:
                found = self._completion(reply, history, none)
                return self._part(reply, found, self.interface.parse_log_probs(reply, history, found.tokens, top))

            return self._read(body, read)

        parts = self._parts(prompt, max_new, 0, ask)
        names = ("tokens", "ids", "log_probs")
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return TokenLogProbs(**columns, prompt=parts[0].prompt)

    def _part(self, reply: Mapping[str, Any], completion: Completion, reading: Reading) -> ParsedReply[Reading]:
        """``reading`` of ``reply``, which holds ``completion``."""
        unfinished = not completion.stopped and self.interface.is_unfinished(reply)
        return ParsedReply(reading, completion.tokens, unfinished)

    @staticmethod
    def _parts(
        prompt: Ints, max_new: int, seed: int, ask: Callable[[Ints, int, int], ParsedReply[Reading]]
    ) -> list[Reading]:
        """Parts of one answer: ``ask(history, tokens left, seed)`` until one is finished or there are ``max_new``.

        Each part has its own seed, so that it draws differently from the one before.
        """
        found: list[Reading] = []
        history, left = prompt, max_new
        while True:
            part = ask(history, left, (seed + SEED_STEP * len(found)) % 2**31)
            found.append(part.reading)
            history, left = np.concatenate([history, part.tokens]), left - len(part.tokens)
            if left <= 0 or not (part.is_unfinished and len(part.tokens)):
                return found

    def _completion(self, reply: Mapping[str, Any], prompt: Ints, stop: frozenset[int]) -> Completion:
        """``interface.parse_completion``; also raises ValueError if the reply counts another number of tokens."""
        completion, usage = self.interface.parse_completion(reply, stop), self.interface.parse_usage(reply)
        new = len(completion.tokens)
        # an omitted stop token may be counted or not
        counts = {"prompt_tokens": {len(prompt)}, "completion_tokens": {new, new - 1} if completion.stopped else {new}}
        for name, right in counts.items():
            if name in usage and usage[name] not in right:
                raise InvalidReply(f"usage.{name} is {usage[name]}, but there are {max(right)}")
        if {"total_tokens", *counts} <= usage.keys() and usage["total_tokens"] != sum(usage[name] for name in counts):
            raise InvalidReply(f"usage.total_tokens is {usage['total_tokens']}, and not the sum of {', '.join(counts)}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if cached > len(prompt):
            raise InvalidReply(f"usage says that {cached} tokens were cached of a prompt of {len(prompt)}")
        return completion

    def token_arrivals(
        self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int, stream: bool
    ) -> TokenArrivals:
        """Arrivals of one row. Raises Unsupported, DecoderFailed."""
        interface, began = self.interface, time.perf_counter()

        def ask(history: Ints, left: int, seed: int) -> ParsedReply[TokenArrivals]:
            body = interface.build_request_body(history, left, stop, temperature, seed)
            before_s = time.perf_counter() - began
            if not stream:

                def read(reply: Mapping[str, Any]) -> ParsedReply[TokenArrivals]:
                    whole_s, found = time.perf_counter() - began, self._completion(reply, history, stop)
                    at_end = np.full(len(found.tokens), whole_s)
                    arrivals = TokenArrivals(found.tokens, at_end, whole_s, interface.parse_text(reply))
                    return self._part(reply, found, arrivals)

                return self._read(body, read)
            received = EventStream()
            self._stream(body, received)
            whole_s = before_s + received.seconds_since_restart()
            with self._readable(received.events):
                timed = [(before_s + seconds, data) for seconds, data in received.events]
                return self._joined_arrivals(timed, history, stop, whole_s)

        parts = self._parts(prompt, max_new, seed, ask)
        tokens, seconds = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "seconds"))
        texts = [part.text for part in parts if part.text is not None]
        return TokenArrivals(tokens, seconds, parts[-1].whole_s, "".join(texts) if len(texts) == len(parts) else None)

    def abort_stream(self, prompt: Ints, max_new: int, after: int) -> None:
        """Request a greedy stream, and close the connection after ``after`` events.

        Raises Unsupported, DecoderFailed.
        """
        self._stream(self.interface.build_request_body(prompt, max_new, frozenset(), 0.0, 0), EventStream(after))

    def _stream(self, body: Mapping[str, Any], received: EventStream) -> None:
        """Request ``body`` as a stream. Raises Unsupported, DecoderFailed."""
        path = self.interface.path
        answer = self._send("POST", path, dict(body) | dict(self.interface.streamed), received)
        if answer.status in REFUSALS:
            raise Unsupported(f"the server refuses stream=true (status {answer.status}: {_error_message(answer)!r})")
        if answer.status != 200:
            raise self._bad_status(f"POST {path}", answer)
        if answer.media_type != EVENTS:
            raise Unsupported(
                f"the server answers stream=true with {answer.media_type or 'no media type'}, and not by events"
            )

    def _joined_arrivals(
        self, received: Sequence[tuple[float, str]], prompt: Ints, stop: frozenset[int], whole_s: float
    ) -> ParsedReply[TokenArrivals]:
        """Raises as ``CompletionInterface.join_events``."""
        timed = [(seconds, json.loads(data)) for seconds, data in received if data.strip() != "[DONE]"]
        for _, event in timed:
            if "error" in event:
                raise InvalidReply(f"an event says error={str(event['error'])[:QUOTED]}")
        reply = self.interface.join_events([event for _, event in timed])
        completion = self._completion(reply, prompt, stop)
        tokens = completion.tokens
        if completion.stopped != bool(len(tokens) and int(tokens[-1]) in stop):
            ended = "at a stop token" if completion.stopped else "by its length"
            raise InvalidReply(f"the stream says that it ended {ended}, but its last tokens are {tokens[-2:].tolist()}")
        held = [len(self.interface.parse_event_tokens(event)) for _, event in timed]
        seconds = np.repeat([seconds for seconds, _ in timed], held)
        # an omitted stop token is known when the last event arrives
        seconds = np.append(seconds, [timed[-1][0]] * max(0, len(tokens) - len(seconds)))[: len(tokens)]
        return self._part(reply, completion, TokenArrivals(tokens, seconds, whole_s, self.interface.parse_text(reply)))

    def draft_counts(self) -> DraftCounts:
        """Counters of drafts, summed over the engines of the server.

        Raises Unsupported if there are none, DecoderFailed if one is no count.
        """
        reply = self._ask_once("/metrics")
        if reply.status != 200:
            raise Unsupported(f"the server counts no drafts: /metrics has status {reply.status}")
        try:
            return parse_draft_counts(reply.text)
        except BadCounter as error:
            raise self._failed("GET /metrics", str(error), COUNTER_REMEDY) from error

    def energy_j(self) -> float:
        """Joules that the server has counted since a moment of its own (TensorRT-LLM's ``/energy_metrics``).

        Raises Unsupported if it counts none, DecoderFailed if that is no number of joules.
        """
        reply = self._ask_once(ENERGY_PATH)
        if reply.status != 200:
            refusal = f"{ENERGY_PATH} has status {reply.status} ({_error_message(reply)})"
            raise Unsupported(f"the server counts no energy: {refusal}")
        joules = (self._object(reply) or {}).get(ENERGY_FIELD)
        if not (is_number(joules) and 0 <= joules < math.inf):
            came = f"{ENERGY_FIELD} of {reply.text[:QUOTED]!r} is no number of joules ≥ 0"
            raise self._failed(f"GET {ENERGY_PATH}", came, COUNTER_REMEDY)
        return float(joules)

    def _ask_once(self, path: str) -> HttpReply:
        """The reply to GET ``path``, which is not repeated. Raises DecoderFailed."""
        try:
            return self._exchange("GET", path, None, time.monotonic() + self._seconds)
        except (OSError, http.client.HTTPException) as error:
            came = f"no whole reply ({type(error).__name__}: {error})"
            raise self._failed(f"GET {path}", came, UNREACHED_REMEDY) from error

    def _read(self, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Reading]) -> Reading:
        """Result of ``read`` on the reply to ``body``."""
        call, answer = f"POST {self.interface.path}", self._send("POST", self.interface.path, body)
        if answer.status != 200:
            raise self._bad_status(call, answer)
        reply = self._object(answer)
        if reply is None:
            raise self._failed(call, f"{answer.text[:QUOTED]!r} where a JSON object was expected", SERVED_REMEDY)
        with self._readable(reply):
            return read(reply)

    @contextmanager
    def _readable(self, reply: Any) -> Iterator[None]:
        """Turn a missing part of a reply into DecoderFailed inside the block."""
        try:
            yield
        except InvalidReply as error:
            raise self._failed("generate", f"an invalid reply: {error}", SERVED_REMEDY) from error
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            came = f"a reply without what was asked ({type(error).__name__}: {error}): {str(reply)[:QUOTED]}"
            raise self._failed("generate", came, SERVED_REMEDY) from error

    @staticmethod
    def _object(answer: HttpReply) -> dict[str, Any] | None:
        """The JSON object in ``answer``; None without one."""
        try:
            reply = json.loads(answer.text) if answer.status == 200 else None
        except (ValueError, RecursionError):
            return None
        return reply if isinstance(reply, dict) else None

    def _bad_status(self, call: str, answer: HttpReply) -> DecoderFailed:
        kind = RequestRefused if answer.status in REFUSALS else DecoderFailed
        came = f"status {answer.status}: {_error_message(answer)!r}"
        return kind(str(self.address), call, came, "the server's log may say why")

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, stream: EventStream | None = None
    ) -> HttpReply:
        """The reply to one request, repeated as in the module's docstring. The time limit covers all attempts."""
        call, deadline = f"{method} {path}", time.monotonic() + self._seconds
        if body is not None:
            self.counts.count_request()
        try:
            answered, put_off = self.counts.answered, 0
            while True:
                try:
                    answer = self._exchange(method, path, body, deadline, stream)
                except ConnectionLostBeforeReply:
                    if put_off >= len(WAITS_S):
                        raise
                    reason, asked = "connection reset", None
                else:
                    if answer.status == 200 and body is not None:
                        self.counts.count_answer()
                    if answered != self.counts.answered:  # the server is full, and answers other requests
                        answered, put_off = self.counts.answered, 0
                    if answer.status not in PUT_OFF or put_off >= len(WAITS_S):
                        return answer
                    reason, asked = f"status {answer.status}", answer.retry_after_s
                wait, put_off = WAITS_S[put_off], put_off + 1
                pause = wait if asked is None else asked
                if time.monotonic() + pause >= deadline:
                    came = f"{reason}, to be sent again after {pause:g} s, beyond the limit of {self._seconds:g} s"
                    raise self._failed(call, came, TIMEOUT_REMEDY)
                self.counts.count_retry(reason)
                time.sleep(pause)
        except TimeoutError as error:
            came = f"no whole reply within {self._seconds:g} s"
            if stream is not None and stream.events:
                came += f", after {len(stream.events)} events of a stream"
            self._hung = call
            raise self._failed(call, came, TIMEOUT_REMEDY) from error
        except (OSError, http.client.HTTPException) as error:
            came = f"no whole reply ({type(error).__name__}: {error})"
            raise self._failed(call, came, UNREACHED_REMEDY) from error

    def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        deadline: float,
        stream: EventStream | None = None,
    ) -> HttpReply:
        """One attempt; a ``stream`` takes each part as it arrives.

        The deadline covers the whole reply at any speed.
        """
        url, headers = self.address, {"Accept": "application/json" if stream is None else EVENTS}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        seconds = max(deadline - time.monotonic(), 1e-3)
        connection = (
            http.client.HTTPSConnection(url.host, url.port, timeout=seconds, context=ssl.create_default_context())
            if url.secure
            else http.client.HTTPConnection(url.host, url.port, timeout=seconds)
        )
        try:
            if body is not None:
                headers["Content-Type"] = "application/json"
            try:
                connection.connect()
                if stream is not None:
                    stream.restart()
                connection.request(method, url.path + path, None if body is None else json.dumps(body), headers)
                socket = connection.sock
                reply = connection.getresponse()
            except ConnectionRefusedError:
                raise
            except ConnectionError as error:
                raise ConnectionLostBeforeReply(str(error) or type(error).__name__) from error
            received = bytearray()
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if socket is not None:
                    socket.settimeout(left)
                part = reply.read1(1 << 16)
                if not part or (stream is not None and stream.has_enough_events):
                    if stream is not None:
                        stream.add_bytes(b"\n\n")  # the last event may lack its blank line
                    named = {name.lower(): value for name, value in reply.getheaders()}
                    return HttpReply(reply.status, named, received.decode("utf-8", "replace"))
                received += part
                if stream is not None:
                    stream.add_bytes(part)
                if len(received) > LARGEST_REPLY:
                    raise http.client.HTTPException(f"a reply of more than {LARGEST_REPLY >> 20} MiB")
        finally:
            connection.close()

    def _failed(self, call: str, came: str, remedy: str) -> DecoderFailed:
        return DecoderFailed(str(self.address), call, came, remedy)


class EngineDecoder(TokenDecoder):
    """A decoder at full depth with rows completed by ``client``'s server."""

    concurrent = True

    def __init__(self, client: EngineClient, request: Request, vocabulary: int, noise: float):
        super().__init__(request)
        self._client, self._vocabulary = client, vocabulary
        self.capabilities = replace(self.capabilities, logit_noise=noise)

    @property
    def answered_by_server(self) -> int:
        """Requests that the server has answered in this run, to all decoders."""
        return self._client.counts.answered

    def log_probs(self, prompts: Sequence[Prompt], max_new: int, top: int) -> list[TokenLogProbs]:
        """Raises Unsupported, DecoderFailed."""
        rows = [np.asarray(prompt.tokens, dtype=np.int64) for prompt in prompts]
        with ThreadPoolExecutor(len(rows)) as pool:
            return list(pool.map(lambda row: self._client.log_probs(row, max_new, top), rows))

    def token_arrivals(
        self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
    ) -> list[TokenArrivals]:
        """Raises Unsupported, DecoderFailed."""
        sampling = [(self.temperature, self.row_seed(row)) for row in range(len(prompts))]
        rows = [np.asarray(prompt.tokens, dtype=np.int64) for prompt in prompts]
        ask = self._client.token_arrivals
        calls = [partial(ask, row, max_new, stop, *given, stream) for row, given in zip(rows, sampling, strict=True)]
        return run_concurrently(calls, len(calls))

    def abort_stream(self, prompt: Prompt, max_new: int, after: int) -> None:
        """Raises Unsupported, DecoderFailed."""
        self._client.abort_stream(np.asarray(prompt.tokens, dtype=np.int64), max_new, after)

    def draft_counts(self) -> DraftCounts:
        """Raises Unsupported, DecoderFailed."""
        return self._client.draft_counts()

    def energy_j(self) -> float:
        """Raises Unsupported, DecoderFailed."""
        return self._client.energy_j()

    def curl_command(self, prompt: Prompt, row: int, max_new: int, stop: frozenset[int], stream: bool) -> str:
        """The shell command that sends ``prompt``, row ``row`` of a request, to the server by hand."""
        interface, address = self._client.interface, self._client.address
        tokens = np.asarray(prompt.tokens, dtype=np.int64)
        body = interface.build_request_body(tokens, max_new, stop, self.temperature, self.row_seed(row))
        body |= dict(interface.streamed) if stream else {}
        words = ["curl", "-s", f"{address}{interface.path}", "-H", "Content-Type: application/json"]
        return shlex.join([*words, "-d", json.dumps(body)])

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        """Raises Unsupported, DecoderFailed: as ``EngineClient.complete``; no id, or one outside the vocabulary."""
        if max_new < 1:
            raise BadArgument("max_new", max_new, "at least 1 new token")

        def one(row: int) -> Completion:
            return self._client.complete(prompts[row], max_new, stop, self.temperature, self.row_seed(row))

        with ThreadPoolExecutor(len(prompts)) as pool:
            completions = list(pool.map(one, range(len(prompts))))
        for completion in completions:
            outside = completion.tokens[(completion.tokens < 0) | (completion.tokens >= self._vocabulary)]
            if len(outside) or not len(completion.tokens):
                came = f"token {outside[0]}" if len(outside) else "no token"
                expected = f"{came}, but expected 1 to {max_new} ids in 0–{self._vocabulary - 1}"
                raise DecoderFailed(str(self._client.address), "generate", expected, "does it serve this model?")
        return completions
