"""A stand-in for vLLM's completions: its fields, limits, errors, batches and streams, on a Transformers model.

``VLLMServer`` refuses what vLLM 0.32 refuses, with its error object. With ``strict`` it also refuses two things that
some releases refuse and others accept: fields that vLLM does not know, and more tokens than the window holds.

Requests that wait together share a batch of ``Model.step``, padded on the left, as one forward of Transformers. Its
answers so differ with their neighbours by rounding, in float32 and in bfloat16, as an engine's do. A stream merges all
tokens that arrived since its last event, as vLLM does when its HTTP process lags behind its engine.

``FAULTS`` plants one defect each, in a method of ``VLLMServer`` or ``Model``.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from emad_ref.models.loading import load
from tests.decoders.engine_server import Engine, bytes_of_token, event

SMALLEST_TEMPERATURE, GREEDY = 1e-2, 1e-5  # vLLM raises colder ones to the first, and decodes greedily below the second
HOTTEST, MOST_LOGPROBS = 2.0, 20
SEEDS = -(2**63), 2**63 - 1
BATCH, GATHERED_S = 16, 0.003  # most rows of a forward, and the time in which rows join the next one
EACH_LAGS = 5  # one of so many streams lags behind the engine
WAIT_S = 0.05  # between looks at whether the server has closed

# the fields that vLLM reads, as far as requests by ids have a use for them, and their defaults
FIELDS: dict[str, Any] = {
    "model": None, "prompt": None, "echo": False, "frequency_penalty": 0.0, "logprobs": None, "max_tokens": 16, "n": 1,
    "presence_penalty": 0.0, "seed": None, "stream": False, "stream_options": None, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": (), "ignore_eos": False, "min_tokens": 0,
    "prompt_logprobs": None, "return_tokens_as_token_ids": False, "return_token_ids": False,
    "skip_special_tokens": True, "add_special_tokens": True, "request_id": None, "user": None,
}  # fmt: skip
NEUTRAL = ("frequency_penalty", "presence_penalty", "repetition_penalty", "top_p", "top_k", "min_p", "min_tokens")


class Refused(Exception):
    """Raised for a request that vLLM refuses; ``param``: the field that its error object names."""

    def __init__(self, message: str, param: str | None = None, kind: str = "BadRequestError", status: int = 400):
        super().__init__(message)
        self.status = status
        self.reply = {"error": {"message": message, "type": kind, "param": param, "code": status}}

    @classmethod
    def as_schema(cls, kind: str, name: str, told: str) -> Refused:
        """The error of a value that does not fit the schema of requests."""
        errors = f"1 validation error:\n  {{'type': {kind!r}, 'loc': 'body.{name}', 'msg': {told!r}}}"
        return cls(errors, f"body.{name}", "Bad Request")


@dataclass
class Row:
    """One row in the engine. ``prompt``: as sent; ``read``: as the engine reads it, the same unless a defect cuts it.

    ``put``: where its tokens go, each as (id, log-probabilities or None, reason of its end or None).
    """

    prompt: list[int]
    new: int
    temperature: float
    stop: frozenset[int]
    ends: frozenset[int]
    generator: torch.Generator | None
    logprobs: int | None
    prompt_logprobs: int | None
    emitted: list[int] = field(default_factory=list)
    put: queue.SimpleQueue[tuple[int, Any, str | None]] = field(default_factory=queue.SimpleQueue)
    scored_prompt: list[Any] | None = None
    aborted: bool = False

    def __post_init__(self) -> None:
        self.read = list(self.prompt)


@dataclass
class Model:
    """A bundled model in ``dtype``, on one thread."""

    name: str
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        loaded = load(self.name, dtype=self.dtype)
        self.module, self.vocabulary = loaded.model, int(loaded.model.config.vocab_size)
        self.end, self.begin = frozenset(loaded.end_token_ids), loaded.opening_token_id

    def run(self, rows: Sequence[Row]) -> None:
        """Run ``rows`` to their ends, in one batch."""
        torch.set_num_threads(1)
        cache, rows = self.cache(), list(rows)
        widest = max(len(row.read) for row in rows)
        tokens = torch.tensor([[0] * (widest - len(row.read)) + row.read for row in rows])
        mask = torch.stack([self.mask_of(row, widest) for row in rows])
        while rows:
            positions = (mask.cumsum(-1) - 1).clip(min=0)[:, -tokens.shape[1] :]
            scored = any(row.prompt_logprobs is not None and not row.emitted for row in rows)
            with torch.inference_mode():
                logits = self.module(
                    tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                    logits_to_keep=0 if scored else 1,
                ).logits.float()  # fmt: skip
            self.round_cache(cache)
            for at, row in enumerate(rows):
                if row.prompt_logprobs is not None and not row.emitted:
                    before = logits[at, -len(row.read) :].log_softmax(-1)
                    row.scored_prompt = [
                        None,
                        *(
                            likeliest(each, token, row.prompt_logprobs)
                            for each, token in zip(before, row.read[1:], strict=False)
                        ),
                    ]
            drawn = [self.draw(row, logits[at, -1]) for at, row in enumerate(rows)]
            shown = [self.shown(rows, at, logits, token) for at, token in enumerate(drawn)]
            kept = []
            for at, (row, token, told) in enumerate(zip(rows, drawn, shown, strict=True)):
                row.emitted.append(token)
                ended = self.end_of(rows, row, token)
                row.put.put((token, told, ended))
                if ended is None and not row.aborted:
                    kept.append(at)
            tokens = torch.tensor([[drawn[at]] for at in kept])
            if len(kept) < len(rows):
                rows = [rows[at] for at in kept]
                if rows:
                    cache.batch_select_indices(torch.tensor(kept))
                mask = mask[kept]
            mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=mask.dtype)], dim=1)

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.module.config)

    def round_cache(self, cache: DynamicCache) -> None:
        """Change K and V after each forward; nothing here."""

    def mask_of(self, row: Row, widest: int) -> torch.Tensor:
        """Return int64 [widest], 0 where attention reads nothing: padding on the left."""
        return torch.tensor([0] * (widest - len(row.read)) + [1] * len(row.read))

    def draw(self, row: Row, logits: torch.Tensor) -> int:
        """One token of float32 ``logits`` [V]: the argmax, or p/q's with q ~ Exp(1), as vLLM draws."""
        if row.temperature < GREEDY:
            return int(logits.argmax())
        p = (logits / row.temperature).softmax(-1)
        return int((p / torch.empty_like(p).exponential_(generator=row.generator)).argmax())

    def shown(self, rows: Sequence[Row], at: int, logits: torch.Tensor, token: int) -> dict[int, float] | None:
        """Log-probabilities of row ``at`` of ``rows``, before any temperature, its ``token`` first."""
        top = rows[at].logprobs
        return None if top is None else likeliest(logits[at, -1].log_softmax(-1), token, top)

    def end_of(self, rows: Sequence[Row], row: Row, token: int) -> str | None:
        """Why ``row`` ends after ``token``: a stop id, the model's end of text, its length; None: it does not end."""
        if token in row.stop or token in row.ends:
            return "stop"
        return "length" if len(row.emitted) >= row.new else None


def likeliest(log_p: torch.Tensor, token: int, top: int) -> dict[int, float]:
    """Return the log-probability of ``token``, then those of the ``top`` likeliest ids."""
    values, ids = log_p.topk(top) if top else (log_p[:0], log_p[:0].long())
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return {token: float(log_p[token])} | found


class VLLMServer(Engine):
    """An ``Engine`` that behaves as vLLM, on ``model``.

    ``window``: its positions. ``lags``: whether some streams send all their tokens in one event. ``strict``: as in the
    module's docstring.
    """

    def __init__(self, model: Model, window: int, *, lags: bool = True, strict: bool = True):
        super().__init__(_no_completions, window=window)
        self.model, self.lags, self.strict = model, lags, strict
        self.waiting: queue.SimpleQueue[Row] = queue.SimpleQueue()
        self._numbers, self._ids, self._thread = count(), count(), threading.Thread(target=self._run, name="engine")
        self.sizes: list[int] = []  # rows of each batch
        self.merged = 0  # events with more than one token

    # ------------------------------------------------------------ engine

    def _run(self) -> None:
        while not self.closed.is_set():
            try:
                rows = [self.waiting.get(timeout=WAIT_S)]
            except queue.Empty:
                continue
            time.sleep(GATHERED_S)
            while len(rows) < BATCH and not self.waiting.empty():
                rows.append(self.waiting.get())
            self.sizes.append(len(rows))
            try:
                self.model.run(self.admit(rows))
            except BaseException:
                self.closed.set()  # else its clients wait for ever
                raise

    def admit(self, rows: list[Row]) -> list[Row]:
        """Change the ``rows`` of a batch before it runs; nothing here."""
        return rows

    def _taken(self, row: Row) -> list[tuple[int, Any, str | None]]:
        """Wait for tokens of ``row``, and return all that have arrived."""
        while True:
            try:
                parts = [row.put.get(timeout=WAIT_S)]
            except queue.Empty:
                if self.closed.is_set():
                    raise ConnectionAbortedError("the server is closed") from None
                continue
            while not row.put.empty():
                parts.append(row.put.get())
            return parts

    # ------------------------------------------------------------ HTTP

    def get(self, path: str) -> tuple[int, Any]:
        if path in ("/health", "/metrics"):
            return 200, b'vllm:num_requests_running{engine="0",model_name="served"} 0.0\n' if "metrics" in path else b""
        if path == "/v1/models":
            card = {
                "id": "served",
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": "served",
            }
            return 200, {"object": "list", "data": [card | {"parent": None, "max_model_len": self.window}]}
        return 404, Refused("Not Found", None, "NotFoundError", 404).reply

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.bodies.append(body)
            if self._thread.ident is None:
                self._thread.start()
        if path != "/v1/completions":
            return 404, Refused("Not Found", None, "NotFoundError", 404).reply
        try:
            asked = self.read(body)
            rows = [
                self.row(asked, prompt, choice)
                for prompt in prompts_of(asked["prompt"])
                for choice in range(asked["n"])
            ]
        except Refused as refusal:
            return refusal.status, refusal.reply
        for row in rows:
            self.waiting.put(row)
        return 200, self._streamed(asked, rows) if asked["stream"] else self._whole(asked, rows)

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        """The fields of a request, checked. Raises Refused."""
        unknown = sorted(body.keys() - FIELDS.keys())
        if unknown and self.strict:
            raise Refused.as_schema("extra_forbidden", unknown[0], "Extra inputs are not permitted")
        asked = FIELDS | {name: value for name, value in body.items() if value is not None}
        for name, default in FIELDS.items():
            number = isinstance(default, int | float) and not isinstance(default, bool)
            if (number or name == "seed") and not isinstance(asked[name] or 0, int | float):
                raise Refused.as_schema("number_type", name, "Input should be a valid number")
        if not SEEDS[0] <= (asked["seed"] or 0) <= SEEDS[1]:
            raise Refused.as_schema("less_than_equal", "seed", f"Input should be from {SEEDS[0]} to {SEEDS[1]}")
        if asked["model"] not in (None, "served"):
            told = f"The model `{asked['model']}` does not exist. Valid aliases: served."
            raise Refused(told, "model", "NotFoundError", 404)
        for refused, message, param in self.rules(asked):
            if refused:
                shown = f"{message} (parameter={param}, value={asked.get(param)})" if param else message
                raise Refused(shown, param)
        return asked

    def rules(self, asked: dict[str, Any]) -> Iterator[tuple[bool, str, str | None]]:
        """(whether a rule of vLLM refuses the request, its message, the field that it names), in vLLM's order."""
        a, streams = asked, asked["stream"]
        for name in ("prompt_logprobs", "logprobs"):
            yield a[name] is not None and a[name] < -1, f"`{name}` must be a positive value or -1.", name
        yield (
            bool(streams and a["prompt_logprobs"]),
            "`prompt_logprobs` are not available when `stream=True`.",
            "prompt_logprobs",
        )
        yield (
            bool(a["stream_options"]) and not streams,
            "Stream options can only be defined when `stream=True`.",
            "stream_options",
        )
        yield (
            not a["prompt"] and a["prompt"] != [],
            "Either prompt or prompt_embeds must be provided and non-empty.",
            "prompt",
        )
        yield a["prompt"] == [], "You must pass at least one prompt", None
        told = f"max_tokens={a['max_tokens']} cannot be greater than max_model_len={self.window}. "
        yield a["max_tokens"] > self.window, f"{told}Please request fewer output tokens.", "max_tokens"
        for prompt in prompts_of(a["prompt"]):
            outside = [token for token in prompt if not 0 <= token < self.model.vocabulary]
            yield bool(outside), f"Token id {max(outside, default=0)} is out of vocabulary", None
            yield not prompt, "The decoder prompt cannot be empty", None
            longest = self.window - (a["max_tokens"] if self.strict else 1)
            told = f"This model's maximum context length is {self.window} tokens. However, you requested "
            told += f"{a['max_tokens']} output tokens and your prompt contains {len(prompt)} input tokens"
            yield len(prompt) > longest, f"{told}. Please reduce the length of the input prompt.", "input_tokens"
        yield a["n"] < 1, f"n must be at least 1, got {a['n']}.", None
        for name in ("presence_penalty", "frequency_penalty"):
            yield not -2.0 <= a[name] <= 2.0, f"{name} must be in [-2, 2], got {a[name]}.", None
        yield (
            a["repetition_penalty"] <= 0,
            f"repetition_penalty must be greater than zero, got {a['repetition_penalty']}.",
            None,
        )
        t = a["temperature"]
        yield not math.isfinite(t), f"temperature must be a finite number, got {t}.", "temperature"
        yield t < 0.0, f"temperature must be non-negative, got {t}.", "temperature"
        yield t > HOTTEST, f"temperature must be in [0, 2], got {t}.", "temperature"
        yield not 0.0 < a["top_p"] <= 1.0, f"top_p must be in (0, 1], got {a['top_p']}.", "top_p"
        yield a["top_k"] < -1, f"top_k must be 0 (disable), or at least 1, got {a['top_k']}.", None
        yield not 0.0 <= a["min_p"] <= 1.0, f"min_p must be in [0, 1], got {a['min_p']}.", None
        yield a["max_tokens"] < 1, f"max_tokens must be at least 1, got {a['max_tokens']}.", "max_tokens"
        yield t < GREEDY and a["n"] > 1, f"n must be 1 when using greedy sampling, got {a['n']}.", None
        for name, kind in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            most = self.model.vocabulary if a[name] == -1 else a[name] or 0
            told = f"Requested {kind} logprobs of {most}, which is greater than max allowed: {MOST_LOGPROBS}"
            yield most > MOST_LOGPROBS, told, name
        beyond = [token for token in a["stop_token_ids"] if not 0 <= token < self.model.vocabulary]
        told = f"token_id(s) {beyond} in stop_token_ids contain out-of-vocab token ids. Vocabulary size: "
        yield bool(beyond), f"{told}{self.model.vocabulary}", "stop_token_ids"

    def row(self, asked: dict[str, Any], prompt: list[int], choice: int) -> Row:
        """The row of one prompt and choice; each choice has a seed of its own."""
        unlike = {name: asked[name] for name in NEUTRAL if asked[name] not in (FIELDS[name], -1)}
        assert not unlike, f"this server does not apply {unlike}"
        t, seed, generator = asked["temperature"], asked["seed"], None
        if t >= GREEDY and seed not in (None, -1):
            generator = torch.Generator().manual_seed((seed + choice) % 2**63)
        return Row(
            list(prompt), min(asked["max_tokens"], self.window - len(prompt)),
            0.0 if t < GREEDY else max(t, SMALLEST_TEMPERATURE), frozenset(asked["stop_token_ids"]),
            frozenset() if asked["ignore_eos"] else self.model.end, generator, asked["logprobs"],
            asked["logprobs"] if asked["echo"] and asked["prompt_logprobs"] is None else asked["prompt_logprobs"],
        )  # fmt: skip

    # ------------------------------------------------------------ replies

    def _whole(self, asked: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
        choices = []
        for index, row in enumerate(rows):
            parts: list[tuple[int, Any, str | None]] = []
            while not parts or parts[-1][2] is None:
                parts += self._taken(row)
            choice = self._choice(asked, index, row, parts, row.prompt if asked["echo"] else [])
            told = None if row.scored_prompt is None else [each and _ranked(each) for each in row.scored_prompt]
            choices.append(choice | {"text": text_of(choice.pop("shown")), "prompt_logprobs": told})
        return self._reply(choices) | {"usage": self._counts(asked, rows), "kv_transfer_params": None}

    def _streamed(self, asked: dict[str, Any], rows: Sequence[Row]) -> Iterator[bytes]:
        """Events of all rows, in turns; each has all tokens that arrived since the row's last one."""
        lagging = self.lags and next(self._numbers) % EACH_LAGS == 0
        try:
            running, sent = dict(enumerate(rows)), dict.fromkeys(range(len(rows)), "")
            first, seen = set(running), {index: list[int]() for index in running}
            while running:
                for index, row in [*running.items()]:
                    parts = self._taken(row)
                    while lagging and parts[-1][2] is None:
                        parts += self._taken(row)
                    self.merged += len(parts) > 1
                    choice = self._choice(
                        asked, index, row, parts, row.prompt if asked["echo"] and index in first else []
                    )
                    seen[index] += choice.pop("shown")
                    text = text_of(seen[index], whole=choice["finish_reason"] is not None)
                    choice, sent[index] = choice | {"text": text.removeprefix(sent[index])}, text
                    if index not in first:
                        choice.pop("prompt_token_ids")
                    first.discard(index)
                    yield event(self._reply([choice]))
                    if choice["finish_reason"] is not None:
                        del running[index]
            if (asked["stream_options"] or {}).get("include_usage"):
                yield event(self._reply([]) | {"usage": self._counts(asked, rows)})
            yield b"data: [DONE]\n\n"
        finally:
            for row in rows:
                row.aborted = True  # the client has left, or all has been sent

    def _choice(
        self,
        asked: dict[str, Any],
        index: int,
        row: Row,
        parts: Sequence[tuple[int, Any, str | None]],
        echoed: list[int],
    ) -> dict[str, Any]:
        """One choice of a reply or an event with the tokens of ``parts``, after the ``echoed`` ones of its prompt."""
        tokens, ended = [token for token, _, _ in parts], parts[-1][2]
        by_stop = ended == "stop" and tokens[-1] in row.stop
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": ended,
            "stop_reason": tokens[-1] if by_stop else None,
            "logprobs": None,
        }
        if asked["logprobs"] is not None:
            told = [*(row.scored_prompt or [None])[: len(echoed)], *(each for _, each, _ in parts)]
            choice["logprobs"] = named_log_probs([*echoed, *tokens], told, bool(asked["return_tokens_as_token_ids"]))
        ids = asked["return_token_ids"]
        choice |= {"token_ids": tokens if ids else None, "prompt_token_ids": row.prompt if ids else None}
        return choice | {"shown": [*echoed, *tokens]}

    def _reply(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        reply = {"id": f"cmpl-{next(self._ids)}", "object": "text_completion", "created": int(time.time())}
        return reply | {"model": "served", "choices": choices, "service_tier": None, "system_fingerprint": "stand-in"}

    def _counts(self, asked: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
        prompt, new = sum(map(len, prompts_of(asked["prompt"]))), sum(len(row.emitted) for row in rows)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return counts | {"prompt_tokens_details": None}


def _no_completions(*_: Any) -> Any:
    raise AssertionError("a VLLMServer runs its model")


def prompts_of(prompt: Any) -> list[list[int]]:
    """The prompts of a request: a list of ids, or a list of such lists."""
    return prompt if prompt and isinstance(prompt[0], list) else [prompt]


def text_of(tokens: Sequence[int], *, whole: bool = True) -> str:
    """Text of ``tokens``; unless ``whole``, without a character that its last byte only begins."""
    data = b"".join(map(bytes_of_token, tokens))
    return data.decode("utf-8", "replace") if whole else data.removesuffix(b"\xc3").decode("utf-8", "replace")


def _ranked(shown: dict[int, float]) -> dict[str, Any]:
    """Prompt log-probabilities as vLLM writes them."""
    order = sorted(shown.values(), reverse=True)
    return {
        str(token): {"logprob": value, "rank": order.index(value) + 1, "decoded_token": text_of([token])}
        for token, value in shown.items()
    }


def named_log_probs(tokens: Sequence[int], told: Sequence[dict[int, float] | None], as_ids: bool) -> dict[str, Any]:
    """``logprobs`` of a choice; ``told``: log-probabilities by id at each of ``tokens``, its own first."""
    name: Callable[[int], str] = "token_id:{}".format if as_ids else lambda token: text_of([token])
    names = [name(token) for token in tokens]
    return {
        "tokens": names,
        "token_logprobs": [each and each[token] for token, each in zip(tokens, told, strict=True)],
        "top_logprobs": [each and {name(token): value for token, value in each.items()} for each in told],
        "text_offset": np.cumsum([0, *map(len, names[:-1])]).tolist(),
    }


# ---------------------------------------------------------------- planted faults


class TemperatureIgnored(VLLMServer):
    def row(self, asked: dict[str, Any], prompt: list[int], choice: int) -> Row:
        return super().row(asked | ({"temperature": 1.0} if asked["temperature"] else {}), prompt, choice)


class TemperatureInTenths(VLLMServer):
    def row(self, asked: dict[str, Any], prompt: list[int], choice: int) -> Row:
        tenths = round(asked["temperature"], 1)
        return super().row(asked | ({"temperature": max(tenths, 0.1)} if asked["temperature"] else {}), prompt, choice)


class SeedIgnored(VLLMServer):
    def row(self, asked: dict[str, Any], prompt: list[int], choice: int) -> Row:
        return super().row(asked | {"seed": next(self._ids)}, prompt, choice)


class StopsOfTheFirst(VLLMServer):
    """All rows of a batch end by the stop ids of its first one."""

    def admit(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            row.stop = rows[0].stop
        return rows


class PrefixByItsFirstBlock(VLLMServer):
    """Keeps blocks of 16 tokens by their place and the first block, and reads those instead of a prompt's own."""

    def admit(self, rows: list[Row]) -> list[Row]:
        self.kept: dict[Any, list[int]] = getattr(self, "kept", {})
        for row in rows:
            read, whole = row.read, (len(row.read) - 1) // 16 * 16
            for at in range(0, whole, 16):
                read[at : at + 16] = self.kept.setdefault((at, tuple(read[:16])), read[at : at + 16])
        return rows


class PromptCut(VLLMServer):
    """Reads the last 500 tokens of a prompt."""

    def admit(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            row.read = row.read[-500:]
        return rows


class BeginDropped(VLLMServer):
    """Reads a prompt that begins with the model's own first token without it."""

    def admit(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            if len(row.prompt) > 1 and row.prompt[0] == self.model.begin:
                row.read = row.read[1:]
        return rows


class OneTokenAfterASharedPrefix(VLLMServer):
    """One new token of a prompt that begins another one of its batch: drawn one position too early."""

    def admit(self, rows: list[Row]) -> list[Row]:
        prompts = [row.prompt for row in rows]
        for row in rows:
            longer = [each for each in prompts if len(each) > len(row.prompt) and each[: len(row.prompt)] == row.prompt]
            if longer and row.new == 1 and len(row.prompt) > 1:
                row.read = row.read[:-1]
        return rows


class EndedNearTheWindow(VLLMServer):
    """A row whose limit reaches the last 8 positions of the window ends 2 tokens earlier."""

    def admit(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            if len(row.prompt) + row.new > self.window - 8:
                row.new = max(1, row.new - 2)
        return rows


class NeighboursLogProbs(Model):
    """Shows the log-probabilities of the row before it in the batch."""

    def shown(self, rows: Sequence[Row], at: int, logits: torch.Tensor, token: int) -> dict[int, float] | None:
        return super().shown(rows, at, logits.roll(1, 0), token)


class HalfCache(Model):
    """Keeps K and V in float16."""

    def round_cache(self, cache: DynamicCache) -> None:
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.keys, layer.values = (each.half().to(self.dtype) for each in (layer.keys, layer.values))


class EndsMasked(Model):
    """Tokens at the end of a prompt that equal the id of padding, the model's end of text, are not attended to."""

    def mask_of(self, row: Row, widest: int) -> torch.Tensor:
        mask = super().mask_of(row, widest)
        for back, token in enumerate(reversed(row.read[1:]), 1):
            if token not in self.end:
                break
            mask[-back] = 0
        return mask


FAULTS: dict[str, type[VLLMServer | Model]] = {
    "temperature ignored": TemperatureIgnored,
    "temperature rounded to tenths": TemperatureInTenths,
    "seed ignored": SeedIgnored,
    "stops of another request": StopsOfTheFirst,
    "a prefix kept by its first block": PrefixByItsFirstBlock,
    "prompt cut": PromptCut,
    "first token dropped": BeginDropped,
    "one token after a shared prefix": OneTokenAfterASharedPrefix,
    "ended near the window's end": EndedNearTheWindow,
    "log-probabilities of another row": NeighboursLogProbs,
    "K and V in float16": HalfCache,
    "padding masked": EndsMasked,
}


def make_server(
    name: str, window: int, fault: str = "", dtype: torch.dtype = torch.float32, **options: bool
) -> VLLMServer:
    """Return a server of the bundled model ``name``, honest unless ``fault`` names one of ``FAULTS``."""
    made = FAULTS.get(fault, VLLMServer)
    model, server = (made, VLLMServer) if issubclass(made, Model) else (Model, made)
    return server(model(name, dtype), window, **options)
