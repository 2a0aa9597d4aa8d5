"""Decoder behind a URL: an inference server that completes token ids over HTTP.

The server says which of two interfaces it has:

    llama.cpp   ``GET /props`` answers; ``POST /completion`` takes ids as ``prompt`` and returns ``tokens``
    OpenAI      ``GET /v1/models`` answers; ``POST /v1/completions`` takes ids, as vLLM and SGLang serve it, and returns
                ``token_ids`` where ``return_token_ids`` is set

The rows of a batch are sent at once, each in a request of its own, so that the server batches them. Greedy requests
have temperature 0; no request uses top-k, top-p, penalties or the model's own generation config. A model's own end of
text ends no row: only the stop ids of the request do. llama.cpp takes no stop ids, so this client cuts its answers
behind the first of them.

Each request has a time limit for its whole reply. ``EMAD_DECODER_TOKEN`` of the environment is sent as bearer token.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.protocol import DraftCounts, Prompt, Request, TokenLogProbs, Unsupported
from emad_ref.record import Floats, Ints
from emad_ref.token_decoder import Completion, TokenDecoder
from emad_ref.wire.address import UrlAddress
from emad_ref.wire.client import TIMEOUT_REMEDY, DecoderFailed

TOKEN_VARIABLE = "EMAD_DECODER_TOKEN"
LARGEST_REPLY = 64 << 20  # bytes
QUOTED = 300  # characters of a reply that a message shows
SERVED_REMEDY = "docs/engines.md says what a server must answer"
TOKEN_ID = "token_id:"  # how vLLM names a token whose id was asked for
WAITS_S = (0.5, 2.0)  # before a request that the server put off is sent again
PUT_OFF = (429, 503)  # statuses: too many requests, not ready
UNFILTERED = {"top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts(?:_total)?\{[^}]*\} (\S+)$", re.MULTILINE)
ACCEPTED = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?\{[^}]*\bposition="(\d+)"[^}]*\} (\S+)$', re.MULTILINE
)

Reading = TypeVar("Reading")


class CompletionInterface(Protocol):
    """How one kind of server is asked. ``path``: of completions; ``window``: positions it serves, 0 if it says none."""

    path: str
    window: int

    def body(self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int) -> dict[str, Any]:
        """The JSON body of one request."""

    def completion(self, reply: Mapping[str, Any], stop: frozenset[int]) -> Completion:
        """What a reply holds. Raises Unsupported, KeyError, TypeError, ValueError, IndexError."""

    def log_probs_body(self, top: int) -> dict[str, Any]:
        """What a body has besides, so that the reply holds the ``top`` likeliest tokens."""

    def log_probs(self, reply: Mapping[str, Any], prompt: Ints, tokens: Ints, top: int) -> TokenLogProbs:
        """What a reply holds about the ``tokens`` after ``prompt``. Raises as ``completion``."""


def _sorted_log_probs(
    tokens: Ints, rivals: Sequence[Mapping[int, float]], top: int, prompt: Floats | None
) -> TokenLogProbs:
    """The ``top`` entries of each of ``rivals``, the likeliest first; ids break ties."""
    best = [sorted(each.items(), key=lambda entry: (-entry[1], entry[0]))[:top] for each in rivals]
    if len(best) != len(tokens) or any(len(row) < top for row in best):
        raise ValueError(f"fewer than {top} log-probabilities for each of {len(tokens)} tokens")
    ids = np.array([[token for token, _ in row] for row in best], dtype=np.int64)
    return TokenLogProbs(tokens, ids, np.array([[value for _, value in row] for row in best]), prompt)


class OpenAIInterface:
    """``/v1/completions`` of vLLM, SGLang and others. ``model``: the name that the server gives its model."""

    path = "/v1/completions"

    def __init__(self, model: str, window: int):
        self._model, self.window = model, window

    def body(self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int) -> dict[str, Any]:
        return UNFILTERED | {
            "model": self._model,
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

    def completion(self, reply: Mapping[str, Any], stop: frozenset[int]) -> Completion:
        choice = reply["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            raise Unsupported("the server returns text without token ids (choices[0].token_ids)")
        tokens = _token_array(ids)
        stopped, at = choice["finish_reason"] == "stop", choice.get("stop_reason")
        if stopped and isinstance(at, int) and (not len(tokens) or tokens[-1] != at):
            tokens = np.append(tokens, at)  # some servers leave out the token that stopped the row
        return Completion(tokens, stopped)

    def log_probs_body(self, top: int) -> dict[str, Any]:
        return {"logprobs": top, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}

    def log_probs(self, reply: Mapping[str, Any], prompt: Ints, tokens: Ints, top: int) -> TokenLogProbs:
        choice = reply["choices"][0]
        shown = (choice.get("logprobs") or {}).get("top_logprobs")
        if shown is None:
            raise Unsupported("the server reports no log-probabilities (choices[0].logprobs.top_logprobs)")
        if any(not name.startswith(TOKEN_ID) for each in shown for name in each):
            raise Unsupported("the server reports log-probabilities by text, which does not tell token ids apart")
        rivals = [{int(name.removeprefix(TOKEN_ID)): float(value) for name, value in each.items()} for each in shown]
        told = choice.get("prompt_logprobs")
        if told is None:
            return _sorted_log_probs(tokens, rivals, top, None)
        own = [float(each[str(token)]["logprob"]) for token, each in zip(prompt[1:], told[1:], strict=True)]
        return _sorted_log_probs(tokens, rivals, top, np.array(own))


class LlamaCppInterface:
    """``/completion`` of llama.cpp's server."""

    path = "/completion"

    def __init__(self, window: int):
        self.window = window

    def body(self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int) -> dict[str, Any]:
        return UNFILTERED | {
            "prompt": prompt.tolist(),
            "n_predict": max_new,
            "temperature": temperature,
            "top_k": 0 if temperature else 1,
            "typical_p": 1.0,
            "repeat_penalty": 1.0,
            "samplers": ["temperature"] if temperature else ["top_k"],
            "seed": seed,
            "ignore_eos": True,
            "return_tokens": True,
        }

    def completion(self, reply: Mapping[str, Any], stop: frozenset[int]) -> Completion:
        if "tokens" not in reply:
            raise Unsupported("the server returns no token ids (tokens): it is older than return_tokens")
        tokens = _token_array(reply["tokens"])
        at = np.flatnonzero(np.isin(tokens, sorted(stop)))
        return Completion(tokens[: at[0] + 1], True) if len(at) else Completion(tokens, False)

    def log_probs_body(self, top: int) -> dict[str, Any]:
        return {"n_probs": top, "post_sampling_probs": False}

    def log_probs(self, reply: Mapping[str, Any], prompt: Ints, tokens: Ints, top: int) -> TokenLogProbs:
        shown = reply.get("completion_probabilities")
        if not shown:
            raise Unsupported("the server reports no log-probabilities (completion_probabilities)")
        rivals = [{int(e["id"]): float(e["logprob"]) for e in each["top_logprobs"]} for each in shown]
        return _sorted_log_probs(tokens, rivals, top, None)


def _token_array(ids: Any) -> Ints:
    if not isinstance(ids, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise TypeError(f"token ids {str(ids)[:QUOTED]}, and not a list of integers")
    return np.array(ids, dtype=np.int64)


class EngineClient:
    """The server at ``address``; ``seconds`` limit each of its replies. ``retries``: requests that were sent again."""

    def __init__(self, address: UrlAddress, seconds: float):
        self.address, self._seconds = address, seconds
        self.retries = 0

    def open(self, request: Request, vocabulary: int, window: int, noise: float = 0.0) -> EngineDecoder:
        """A decoder for ``request`` of a model with ``window`` positions; ``noise``: of the precision that it states.

        Raises:
            Unsupported: exits, or a source.
            DecoderFailed: no known server, or one that serves fewer positions.
        """
        decoder = EngineDecoder(self, request, vocabulary, noise)
        if 0 < self.interface.window < window:
            came = f"the server serves {self.interface.window} positions, but the suites ask for {window}"
            raise self._failed("open", came, "serve the model with its whole window")
        return decoder

    @cached_property
    def interface(self) -> CompletionInterface:
        """Raises DecoderFailed: neither interface answers."""
        properties = self._call("GET", "/props", None, optional=True)
        if properties is not None and "default_generation_settings" in properties:
            return LlamaCppInterface(int(properties["default_generation_settings"].get("n_ctx") or 0))
        served = self._call("GET", "/v1/models", None, optional=True)
        try:
            first = served["data"][0]  # type: ignore[index]  # None is caught as the rest
            return OpenAIInterface(str(first["id"]), int(first.get("max_model_len") or 0))
        except (KeyError, IndexError, TypeError) as error:
            came = f"neither /props nor /v1/models names a model ({str(served)[:QUOTED]})"
            raise self._failed("open", came, SERVED_REMEDY) from error

    def complete(self, prompt: Ints, max_new: int, stop: frozenset[int], temperature: float, seed: int) -> Completion:
        """One row. Raises Unsupported, DecoderFailed."""
        body = self.interface.body(prompt, max_new, stop, temperature, seed)
        return self._read(body, lambda reply: self.interface.completion(reply, stop))

    def log_probs(self, prompt: Ints, max_new: int, top: int) -> TokenLogProbs:
        """One greedy row with log-probabilities. Raises Unsupported, DecoderFailed."""
        body = self.interface.body(prompt, max_new, frozenset(), 0.0, 0) | self.interface.log_probs_body(top)

        def read(reply: Mapping[str, Any]) -> TokenLogProbs:
            tokens = self.interface.completion(reply, frozenset()).tokens
            return self.interface.log_probs(reply, prompt, tokens, top)

        return self._read(body, read)

    def draft_counts(self) -> DraftCounts:
        """Counters of drafts as vLLM exports them, summed over its engines. Raises Unsupported: the server has none."""
        status, text = self._exchange("GET", "/metrics", None, time.monotonic() + self._seconds)
        drafts, accepted = DRAFTS.findall(text), ACCEPTED.findall(text)
        if status != 200 or not drafts:
            raise Unsupported("the server counts no drafts (vllm:spec_decode_num_drafts of /metrics)")
        counts = np.zeros(1 + max((int(at) for at, _ in accepted), default=-1), dtype=np.int64)
        for at, value in accepted:
            counts[int(at)] += int(float(value))
        return DraftCounts(sum(int(float(value)) for value in drafts), counts)

    def _read(self, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Reading]) -> Reading:
        """What ``read`` makes of the reply to ``body``."""
        reply = self._call("POST", self.interface.path, body)
        assert reply is not None, "only an optional call may be missing"
        try:
            return read(reply)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            came = f"a reply without what was asked ({type(error).__name__}: {error}): {str(reply)[:QUOTED]}"
            raise self._failed("generate", came, SERVED_REMEDY) from error

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, optional: bool = False
    ) -> dict[str, Any] | None:
        """The JSON object that ``path`` answers; None where an ``optional`` path is not served."""
        call, deadline = f"{method} {path}", time.monotonic() + self._seconds
        try:
            status, text = self._exchange(method, path, body, deadline)
            for wait in WAITS_S if status in PUT_OFF and not optional else ():
                self.retries += 1
                time.sleep(min(wait, max(0.0, deadline - time.monotonic())))
                status, text = self._exchange(method, path, body, deadline)
                if status not in PUT_OFF:
                    break
        except TimeoutError as error:
            raise self._failed(call, f"no whole reply within {self._seconds:g} s", TIMEOUT_REMEDY) from error
        except (OSError, http.client.HTTPException) as error:
            came = f"no reply ({type(error).__name__}: {error})"
            raise self._failed(call, came, "is it started, and is this its address?") from error
        if optional and status in (401, 403):
            raise self._failed(call, f"status {status}", f"set {TOKEN_VARIABLE} to the server's key")
        if optional and status != 200:
            return None
        if status != 200:
            raise self._failed(call, f"status {status}: {text[:QUOTED]!r}", "the server's log may say why")
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            reply = error
        if isinstance(reply, dict):
            return reply
        if optional:
            return None
        raise self._failed(call, f"{text[:QUOTED]!r} where a JSON object was expected", SERVED_REMEDY)

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> tuple[int, str]:
        """Status and text. The deadline holds for the whole reply, however slowly it comes."""
        url, headers = self.address, {"Accept": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        seconds = deadline - time.monotonic()
        connection = (
            http.client.HTTPSConnection(url.host, url.port, timeout=seconds, context=ssl.create_default_context())
            if url.secure
            else http.client.HTTPConnection(url.host, url.port, timeout=seconds)
        )
        try:
            if body is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, url.path + path, None if body is None else json.dumps(body), headers)
            socket = connection.sock
            reply = connection.getresponse()
            received = bytearray()
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if socket is not None:
                    socket.settimeout(left)
                part = reply.read1(1 << 16)
                if not part:
                    return reply.status, received.decode("utf-8", "replace")
                received += part
                if len(received) > LARGEST_REPLY:
                    raise http.client.HTTPException(f"a reply of more than {LARGEST_REPLY >> 20} MiB")
        finally:
            connection.close()

    def _failed(self, call: str, came: str, remedy: str) -> DecoderFailed:
        return DecoderFailed(str(self.address), call, came, remedy)


class EngineDecoder(TokenDecoder):
    """A decoder at full depth, of which ``client``'s server completes the rows."""

    def __init__(self, client: EngineClient, request: Request, vocabulary: int, noise: float):
        super().__init__(request)
        self._client, self._vocabulary = client, vocabulary
        self.capabilities = replace(self.capabilities, logit_noise=noise)

    def log_probs(self, prompts: Sequence[Prompt], max_new: int, top: int) -> list[TokenLogProbs]:
        """Raises Unsupported, DecoderFailed."""
        rows = [np.asarray(prompt.tokens, dtype=np.int64) for prompt in prompts]
        with ThreadPoolExecutor(len(rows)) as pool:
            return list(pool.map(lambda row: self._client.log_probs(row, max_new, top), rows))

    def draft_counts(self) -> DraftCounts:
        """Raises Unsupported."""
        return self._client.draft_counts()

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
