"""Inference servers at a URL: a correct one passes every audit of requests, and each planted fault is refuted."""

from __future__ import annotations

import itertools
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.protocol import ModelRef, Prompt, Request, Unsupported
from pytest_emad.audit.decoding_checks import check_generation
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.log_probs import check_log_probs
from pytest_emad.audit.request_cases import TEMPERATURES
from pytest_emad.audit.requests import (
    ABORTED_AFTER,
    check_and_time_streams,
    check_temperatures_at_once,
)
from pytest_emad.audit.sampling import check_sampling
from pytest_emad.audit.shared_prefixes import VARIATIONS, check_shared_prefixes
from pytest_emad.audit.trajectory import DecoderUnderTest
from pytest_emad.remote.address import UrlAddress, parse_address
from pytest_emad.remote.client import DecoderFailed
from pytest_emad.remote.engine import TOKEN_VARIABLE, EngineClient, EngineDecoder
from tests.decoders.audited_model import LAYERS, VOCABULARY, drawn, lens_of, spread_point, tiny_neox
from tests.decoders.cached_decoder import CachedDecoder
from tests.decoders.covering_cases import check_small_cases
from tests.decoders.engine_server import (
    CLOSE,
    Complete,
    EachThird,
    Engine,
    Hanging,
    NoStream,
    bytes_of_token,
    serve,
)

FULL, NEW, HOT, TOLERANCE = full_depth(LAYERS), 6, 12.0, 1e-9
WINDOW, TOP = 64, 5
PROMPTS, _ = drawn((4, 1, 26, 3, 2, 5, 17), 1)


def decoded(
    prompt: Sequence[int], max_new: int, stop: frozenset[int], temperature: float, seed: int
) -> tuple[list[int], bool]:
    decoder = CachedDecoder(tiny_neox(), FULL, temperature, seed)
    record = decoder.generate([Prompt(np.array(prompt))], max_new, stop)
    return record.emitted[0].tolist(), record.stop[0] == "stop token"


once = cache(decoded)  # cached: the tests below send the same requests


def complete(
    prompt: list[int], max_new: int, stop: frozenset[int], temperature: float, seed: int
) -> tuple[list[int], bool]:
    tokens, stopped = once(tuple(prompt), max_new, stop, temperature, seed if temperature else 0)
    return [*tokens], stopped


def opened(url: str, temperature: float = 0.0, seed: int = 0, seconds: float = 60.0) -> EngineDecoder:
    address = parse_address(url, Path(), "decoder")
    assert isinstance(address, UrlAddress)
    request = Request(ModelRef("served", lambda: None), FULL, seed, VARIATIONS, temperature)
    return EngineClient(address, seconds).open_decoder(request, VOCABULARY, WINDOW)


def checked(check: str, url: str, seconds: float = 60.0) -> Finding:
    rng = np.random.default_rng(0)
    if check == "sampling":
        prompts = [PROMPTS[0], PROMPTS[3], PROMPTS[2]]
        records = [(seed, opened(url, HOT, seed).generate(prompts, 12)) for seed in (1, 2, 3, 4)]
        said = EngineDecoder.capabilities
        lens = lens_of(tiny_neox())
        return check_sampling(records, lens, FULL, prompts, 12, HOT, said, rng, TOLERANCE, needed=50)
    under_test = DecoderUnderTest(opened(url, seconds=seconds), lens_of(tiny_neox()), FULL, TOLERANCE)
    if check in ("requests", "at once"):

        def made(point: OperatingPoint) -> EngineDecoder:
            return opened(url, seconds=seconds)

        values: dict[str, tuple[str, ...]] = {"point": ("full",), "neighbours": ("none",), "arrays": ("kept",)}
        values |= {"call": ("at once",), "prompt": ("prefix",)} if check == "at once" else {}
        return check_small_cases("requests", made, lens_of(tiny_neox()), spread_point(), TOLERANCE, **values)
    if check == "log-probabilities":
        return check_log_probs(under_test, PROMPTS, NEW, TOP)
    if check == "temperatures at once":
        return check_temperatures_at_once(
            lambda temperature: closing(opened(url, temperature, 1)), under_test, PROMPTS[:4], NEW, HOT
        )
    if check == "streams":
        finding, arrivals = check_and_time_streams(under_test, PROMPTS, 2 * NEW)
        assert list(arrivals) == [0, 1, 2, 8] or not finding.passed
        return finding
    if check == "halves":
        text, others = np.random.default_rng(1).integers(0, VOCABULARY, (2, 18))
        return check_shared_prefixes(under_test, text, others, NEW, rng, sessions=False, halves=True)
    if check == "generation":
        return check_generation(under_test, PROMPTS, NEW)
    text, others = np.random.default_rng(1).integers(0, VOCABULARY, (2, 10))
    return check_shared_prefixes(under_test, text, others, NEW, rng, sessions=False)


CHECKS = ["requests", "prefixes", "halves", "generation", "sampling", "at once", "temperatures at once", "streams"]


# The next test needs llama.cpp's answers in parts.
@pytest.mark.parametrize("kind", ["vllm", pytest.param("llama.cpp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CHECKS)
def test_a_right_server_passes(check: str, kind: str) -> None:
    with serve(Engine(complete, kind)) as url:
        finding = checked(check, url)
    assert finding.passed is True, finding.detail


ENDS = frozenset(range(0, VOCABULARY, 3))


@pytest.mark.parametrize("check", CHECKS)
def test_what_follows_an_end_of_text_of_llama_cpp_is_asked_for(check: str) -> None:
    with serve(engine := Engine(complete, "llama.cpp", ends=ENDS)) as url:
        finding = checked(check, url)
    assert finding.passed is True, finding.detail
    assert any(body["n_predict"] < NEW for body in engine.bodies)


def test_an_answer_in_parts_is_one_answer() -> None:
    """Its log-probabilities, times and text are joined, too; each part has its own seed."""
    with serve(Engine(complete, "llama.cpp", score=score)) as url:
        rows = opened(url).log_probs(PROMPTS, NEW, TOP)
    with serve(parted := Engine(complete, "llama.cpp", score=score, ends=ENDS)) as url:
        decoder = opened(url)
        found = decoder.log_probs(PROMPTS, NEW, TOP)
        seeds = {body["seed"] for body in parted.bodies}
        streamed, at_end = (decoder.token_arrivals(PROMPTS, NEW, frozenset(), stream) for stream in (True, False))
    assert len(seeds) > 1
    for row, other, arrivals, whole in zip(rows, found, streamed, at_end, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens)
        np.testing.assert_array_equal(row.ids, other.ids)
        np.testing.assert_allclose(row.log_probs, other.log_probs)
        np.testing.assert_array_equal(row.tokens, arrivals.tokens)
        assert (np.diff(arrivals.seconds) >= 0).all()
        assert arrivals.seconds[-1] <= arrivals.whole_s
        assert arrivals.text == whole.text


def test_an_answer_that_ends_early_by_its_length_is_not_asked_on() -> None:
    def short(prompt: list[int], max_new: int, *rest: Any) -> tuple[list[int], bool]:
        return complete(prompt, max(1, max_new - 1), *rest)

    with serve(Engine(short, "llama.cpp", ends=ENDS)) as url:
        assert checked("generation", url).passed is False


def cut_prompt(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
    return complete(prompt[-16:], *rest)


def padded_without_mask(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
    return complete([0] * (-len(prompt) % 8) + prompt, *rest)


def ignored_stop(prompt: list[int], max_new: int, stop: frozenset[int], *rest: Any) -> tuple[list[int], bool]:
    return complete(prompt, max_new, frozenset(), *rest)


def first_stop_alone(prompt: list[int], max_new: int, stop: frozenset[int], *rest: Any) -> tuple[list[int], bool]:
    return complete(prompt, max_new, frozenset(sorted(stop)[:1]), *rest)


def own_end_of_text(prompt: list[int], max_new: int, stop: frozenset[int], *rest: Any) -> tuple[list[int], bool]:
    return complete(prompt, max_new, stop | frozenset(range(0, VOCABULARY, 7)), *rest)


def one_token_more(prompt: list[int], max_new: int, *rest: Any) -> tuple[list[int], bool]:
    return complete(prompt, max_new + 1, *rest)


def another_temperature(
    prompt: list[int], max_new: int, stop: frozenset[int], temperature: float, seed: int
) -> tuple[list[int], bool]:
    return complete(prompt, max_new, stop, temperature / 12, seed)


def greedy_always(
    prompt: list[int], max_new: int, stop: frozenset[int], temperature: float, seed: int
) -> tuple[list[int], bool]:
    return complete(prompt, max_new, stop, 0.0, seed)


def ignored_seed(
    prompt: list[int], max_new: int, stop: frozenset[int], temperature: float, seed: int
) -> tuple[list[int], bool]:
    return complete(prompt, max_new, stop, temperature, next(_SEEDS))


_SEEDS = itertools.count(1)


def stale_prefix() -> Complete:
    """Caches answers by the first four tokens and the length of a prompt."""
    kept: dict[Any, tuple[list[int], bool]] = {}

    def answer(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
        key = (*prompt[:4], len(prompt), *rest)
        if key not in kept:
            kept[key] = complete(prompt, *rest)
        return kept[key]

    return answer


def stale_blocks(key: Callable[[list[int]], Any]) -> Callable[[], Complete]:
    """Caches blocks of four tokens by their start and ``key``; the last token is read anew."""

    def make() -> Complete:
        kept: dict[Any, list[int]] = {}

        def answer(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
            starts = range(0, len(prompt), 4)
            blocks = [kept.setdefault((at, key(prompt[at : at + 4])), prompt[at : at + 4]) for at in starts]
            return complete([*itertools.chain(*blocks)][: len(prompt) - 1] + prompt[-1:], *rest)

        return answer

    return make


def longest_shared() -> Complete:
    """The last prompt with the same first five tokens, if shorter, replaces the beginning of the next one."""
    kept: dict[Any, list[int]] = {}

    def answer(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
        known = kept.get(tuple(prompt[:5]), [])
        kept[tuple(prompt[:5])] = prompt
        return complete(known[:-1] + prompt[len(known) - 1 :] if 5 < len(known) < len(prompt) else prompt, *rest)

    return answer


def slowly(parts: Iterable[Any]) -> Iterator[Any]:
    """Give the server time to notice, when it sends something, that a client has left."""
    for at, part in enumerate(parts):
        if at > ABORTED_AFTER:
            time.sleep(0.01)
        yield part


class AbortedSlot(Engine):
    """After a stream that its client left, the next prompt begins as that one did."""

    left: list[int] | None = None

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.05)  # until the server notices that a client has left
        with self.lock:
            left, self.left = self.left, None
        if left:
            shared = min(len(left), len(body["prompt"]) - 1)
            body = body | {"prompt": left[:shared] + body["prompt"][shared:]}
        status, reply = super().post(path, body)
        return status, self.watched(reply, body["prompt"]) if body.get("stream") else reply

    def watched(self, parts: Any, prompt: list[int]) -> Any:
        try:
            yield from slowly(parts)
        except GeneratorExit:  # the client did not read it to its end
            self.left = prompt
            raise


class AbortedAnswer(Engine):
    """The part of a stream that its client read is stored as the answer to that request."""

    def __init__(self) -> None:
        super().__init__(complete)
        self.left: set[tuple[int, ...]] = set()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = tuple(body["prompt"])
        time.sleep(0.05)  # until the server notices that a client has left
        left = prompt in self.left and body["max_tokens"] == 2 * NEW
        status, reply = super().post(path, body | ({"max_tokens": ABORTED_AFTER} if left else {}))
        return status, self.watched(reply, prompt) if body.get("stream") and not left else reply

    def watched(self, parts: Any, prompt: tuple[int, ...]) -> Any:
        try:
            yield from slowly(parts)
        except GeneratorExit:
            self.left.add(prompt)
            raise


class Padding(Engine):
    """Counts the padding of its prompts."""

    def usage(self, body: dict[str, Any], tokens: list[int]) -> dict[str, int]:
        return super().usage(body, tokens) | {"prompt_tokens": -(-len(body["prompt"]) // 8) * 8}


class DoubleCounted(Engine):
    """Counts each new token twice."""

    def usage(self, body: dict[str, Any], tokens: list[int]) -> dict[str, int]:
        return super().usage(body, tokens) | {"completion_tokens": 2 * len(tokens)}


def skipped_layer(prompt: list[int], max_new: int, *rest: Any) -> tuple[list[int], bool]:
    """Another model of the same vocabulary and window."""
    decoder = CachedDecoder(tiny_neox(), truncated(LAYERS, LAYERS - 1))
    return decoder.generate([Prompt(np.array(prompt))], max_new, frozenset()).emitted[0].tolist(), False


class Crowded(Engine):
    """``mixed(body, other)`` changes a request while another one runs; alone, it is answered correctly."""

    def __init__(self) -> None:
        super().__init__(decoded)  # with slow answers, so that requests overlap
        self.flying: dict[int, dict[str, Any]] = {}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.flying[id(body)] = body
        try:
            time.sleep(0.02)
            others = [each for each in list(self.flying.values()) if each is not body]
            answered = self.mixed(body, others[0]) | {"sent": body["prompt"]} if others else body
            return super().post(path, answered)
        finally:
            self.flying.pop(id(body), None)

    def mixed(self, body: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return body | {"prompt": other["prompt"]}


class SharedStops(Crowded):
    def mixed(self, body: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return body | {"stop_token_ids": other["stop_token_ids"]}


class SharedPrefix(Crowded):
    def mixed(self, body: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        half = len(body["prompt"]) // 2
        same = [each["prompt"] for each in list(self.flying.values()) if each["prompt"][:half] == body["prompt"][:half]]
        return body | {"prompt": next((prompt for prompt in same if len(prompt) == 2 * half), body["prompt"])}


class Deadlock(Crowded):
    """Two simultaneous requests wait for each other."""

    def mixed(self, body: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        self.hang()


class Uncounted(Engine):
    """Counts no tokens, so that only its streams show them."""

    def usage(self, body: dict[str, Any], tokens: list[int]) -> dict[str, int]:
        return {}


class Dropping(Uncounted):
    """Loses each fourth event of a stream."""

    def parts(self, tokens: list[int]) -> Any:
        return (part for at, part in enumerate(super().parts(tokens)) if at % 4 != 3)


class Doubling(Uncounted):
    """Repeats the end of one chunk at the start of the next."""

    def parts(self, tokens: list[int]) -> Any:
        for at, part in enumerate(super().parts(tokens)):
            yield from [part] * (2 if at == 5 else 1)


class SplitCharacters(Engine):
    """Decodes each token's bytes separately."""

    def parts(self, tokens: list[int]) -> Any:
        return (([token], bytes_of_token(token).decode("utf-8", "replace")) for token in tokens)


class WholeCharacters(Uncounted):
    """Loses ids of tokens that end no character, as llama.cpp does."""

    def parts(self, tokens: list[int]) -> Any:
        return (([token for token in ids if token % 2], text) for ids, text in super().parts(tokens))


class Stuck(Deadlock):
    """Stops answering after two simultaneous requests."""

    stuck = False

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.stuck:
            self.hang()
        return super().post(path, body)

    def mixed(self, body: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        self.stuck = True
        return super().mixed(body, other)


def test_a_server_that_is_stuck_is_named_by_the_next_test_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_emad.remote.engine.ALIVE_S", 0.3)
    with serve(engine := Stuck()) as url:
        decoder = opened(url, seconds=1.0)
        client, began = decoder._client, time.monotonic()
        request = Request(ModelRef("served", lambda: None), FULL, 0, 2)
        with pytest.raises(DecoderFailed, match="within 1 s"):
            decoder.generate(PROMPTS[:2], 2)
        with pytest.raises(DecoderFailed, match=r"stuck since POST .*one token, .*within 0\.3 s"):
            client.open_decoder(request, VOCABULARY, WINDOW)
        assert time.monotonic() - began < 10
        engine.stuck = False
        engine.flying.clear()
        monkeypatch.undo()  # a busy machine has all its time for the answer
        client.open_decoder(request, VOCABULARY, WINDOW)


class CutOff(Engine):
    """Ends a stream early, as if it were whole."""

    def stream(self, tokens: list[int], *rest: Any) -> Any:
        return itertools.islice(super().stream(tokens, *rest), 3)


class ErrorEvent(Engine):
    def stream(self, tokens: list[int], *rest: Any) -> Any:
        yield next(super().stream(tokens, *rest))
        yield b'data: {"error": {"message": "out of memory"}}\n\n'


class MixedStreams(Crowded):
    """Sends only streamed answers to another client."""

    def mixed(self, body: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return super().mixed(body, other) if body.get("stream") else body


# fault → engine, the check that refutes it, words of the complaint
FAULTS: dict[str, tuple[Callable[[], Complete | Engine], str, str]] = {
    "prompts cut to 16 tokens": (lambda: cut_prompt, "generation", "row 2, position 25"),
    "padding without a mask": (lambda: padded_without_mask, "requests", r"row \d, position \d+, depth 8: emitted"),
    "stop ids ignored": (lambda: ignored_stop, "requests", "stop tokens give"),
    "only the first stop id": (lambda: first_stop_alone, "requests", "stop tokens give"),
    "the model's own end of text": (lambda: own_end_of_text, "generation", "max_new=6 and the stop tokens give"),
    "one token too many": (lambda: one_token_more, "generation", "7 tokens"),
    "answers kept by a shared beginning": (stale_prefix, "prefixes", "row 0, position"),
    "blocks kept by the sum of their tokens": (stale_blocks(sum), "prefixes", r"row \d+, position"),
    "a kept beginning of a shorter prompt": (longest_shared, "prefixes", r"row \d+, position"),
    "a beginning of an aborted stream": (lambda: AbortedSlot(decoded), "streams", "after an aborted stream"),
    "the beginning of an answer to an aborted stream": (
        AbortedAnswer,
        "streams",
        "after its own stream was aborted: 2 tokens, but 12 in the whole answer",
    ),
    "another temperature": (lambda: another_temperature, "sampling", "of all temperatures"),
    "greedy where sampling was asked": (lambda: greedy_always, "sampling", "argmax|same 12 tokens"),
    "seeds ignored": (lambda: ignored_seed, "temperatures at once", "under the same seed"),
    "another model": (lambda: skipped_layer, "generation", "but the argmax"),
    "tokens of another request": (Crowded, "at once", "emitted"),
    "stop ids of another request": (SharedStops, "at once", "stop tokens give"),
    "a beginning of another request": (SharedPrefix, "at once", "emitted"),
    "a deadlock": (Deadlock, "at once", r"DecoderFailed: .*no whole reply within 1 s"),
    "events lost": (lambda: Dropping(complete), "streams", "9 tokens, but 12 in the whole answer; .* new token 3"),
    "an event sent twice": (lambda: Doubling(complete), "streams", "13 tokens, but 12 in the whole answer"),
    "characters cut between tokens": (lambda: SplitCharacters(complete), "streams", "the same tokens, but other text"),
    "ids of unfinished characters": (lambda: WholeCharacters(complete), "streams", "ids alone are lost"),
    "a stream that hangs": (lambda: Hanging(complete), "streams", "within 1 s, after 3 events of a stream"),
    "a stream cut off": (lambda: CutOff(complete), "streams", "the stream ended without a finish_reason"),
    "an error inside a stream": (lambda: ErrorEvent(complete), "streams", "an event says error=.*out of memory"),
    "streams mixed up": (MixedStreams, "streams", r"row \d, streamed beside [17]: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refuted(fault: str) -> None:
    make, check, words = FAULTS[fault]
    made = make()
    with serve(made if isinstance(made, Engine) else Engine(made)) as url:
        finding = checked(check, url, seconds=1.0 if isinstance(made, Deadlock | Hanging) else 60.0)
    assert not [each.name for each in threading.enumerate() if "process_request" in each.name], "left by the server"
    assert finding.passed is False
    assert re.search(words, finding.detail), finding.detail


class TotalOff(Engine):
    def usage(self, body: dict[str, Any], tokens: list[int]) -> dict[str, int]:
        return super().usage(body, tokens) | {"total_tokens": len(body["prompt"])}


class CachedMore(Engine):
    def usage(self, body: dict[str, Any], tokens: list[int]) -> Any:
        return super().usage(body, tokens) | {"prompt_tokens_details": {"cached_tokens": 16}}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Padding, "usage.prompt_tokens is 8, but there are 4"),
        (TotalOff, "usage.total_tokens is 4, and not the sum of prompt_tokens, completion_tokens"),
        (CachedMore, "16 tokens were cached of a prompt of 4"),
        (DoubleCounted, "usage.completion_tokens is 4, but there are 2"),
    ],
)
@pytest.mark.parametrize("stream", [None, False, True])
def test_a_reply_that_counts_other_tokens_is_refused(made: type[Engine], words: str, stream: bool | None) -> None:
    with serve(made(complete)) as url:
        decoder, nothing = opened(url), frozenset[int]()
        ask = partial(decoder.generate, PROMPTS[:1], 2, nothing)
        streamed = partial(decoder.token_arrivals, PROMPTS[:1], 2, nothing, bool(stream))
        with pytest.raises(DecoderFailed, match=words) as caught:
            (ask if stream is None else streamed)()
    assert "token_ids" not in str(caught.value), "the reply stands beside what is wrong with it"


class OtherReason(Engine):
    """Exchanges stop token and length as the reason for the end of a stream."""

    def stream(self, tokens: list[int], stopped: bool, usage: Any = None) -> Any:
        return super().stream(tokens, not stopped, usage)


@pytest.mark.parametrize(("stopped", "words"), [(True, "ended by its length"), (False, "ended at a stop token")])
def test_a_stream_that_gives_another_reason_is_refused(stopped: bool, words: str) -> None:
    with serve(OtherReason(complete)) as url:
        decoder = opened(url)
        emitted = decoder.generate(PROMPTS[:1], NEW, frozenset()).emitted[0]
        with pytest.raises(DecoderFailed, match=words):
            decoder.token_arrivals(PROMPTS[:1], NEW, frozenset({int(emitted[2])} if stopped else ()), True)


class WarmStreams(Engine):
    """Draws streamed tokens at another temperature."""

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return super().post(path, body | ({"temperature": 1.0} if body.get("stream") and body["temperature"] else {}))


class SeedlessStreams(Engine):
    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return super().post(path, body | ({"seed": 0} if body.get("stream") else {}))


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("made", [Engine, WarmStreams, SeedlessStreams])
def test_a_sampled_stream_draws_what_the_whole_answer_draws(
    monkeypatch: pytest.MonkeyPatch, made: type[Engine], kind: str
) -> None:
    """Of a second decoder, under the same seed."""
    monkeypatch.setitem(TEMPERATURES, "2", HOT)
    with serve(made(complete, kind)) as url:

        def opened_hot(point: OperatingPoint, temperature: float = 0.0, seed: int = 0) -> EngineDecoder:
            return opened(url, temperature, seed)

        values = {"call": ("stream",), "temperature": ("2",), "seed": ("equal",), "neighbours": ("none",)}
        finding = check_small_cases(
            "requests", opened_hot, lens_of(tiny_neox()), spread_point(), TOLERANCE, point=("full",), **values
        )
    assert finding.passed is (made is Engine), finding.detail
    assert finding.passed or "rows sent otherwise draw other tokens than alone under the same seed" in finding.detail


class Strict(Engine):
    """Refuses a request that exceeds its window."""

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["prompt"]) + body["max_tokens"] > self.window:
            return 400, {"error": f"at most {self.window} tokens"}
        return super().post(path, body)


def test_no_stream_asks_for_more_than_the_window_holds() -> None:
    with serve(Strict(complete, window=WINDOW)) as url:
        under_test = DecoderUnderTest(opened(url), lens_of(tiny_neox()), FULL, TOLERANCE, window=WINDOW)
        try:
            finding, _ = check_and_time_streams(under_test, PROMPTS, NEW)
        except Unsupported as refusal:
            pytest.fail(f"a server that streams was told to stream nothing: {refusal}")
    assert finding.passed is True, finding.detail


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_an_aborted_stream_is_closed_before_its_end(kind: str) -> None:
    class Endless(Engine):
        def stream(self, tokens: list[int], *rest: Any) -> Any:
            yield from itertools.islice(super().stream(tokens, *rest), 3)
            self.hang()

    with serve(Endless(complete, kind)) as url:
        began = time.monotonic()
        opened(url).abort_stream(PROMPTS[0], NEW, 2)
        assert time.monotonic() - began < 30


def score(tokens: list[int]) -> np.ndarray:
    """Return [n, V] log-probabilities of the last layer's logits."""
    scored: np.ndarray = log_softmax(lens_of(tiny_neox())(np.array(tokens))[:, -1], axis=-1)
    return scored


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_log_probabilities_of_a_right_server_are_the_models(kind: str) -> None:
    with serve(Engine(complete, kind, score)) as url:
        finding = checked("log-probabilities", url)
    assert finding.passed is True, finding.detail
    assert finding.live["log_probs"] == len(PROMPTS) * NEW * TOP
    assert ("prompt_log_probs" in finding.live) is (kind == "vllm")


def renormalised(tokens: list[int]) -> np.ndarray:
    """Renormalise over the likeliest eight."""
    scored = score(tokens)
    scored[scored < np.sort(scored, axis=-1)[:, [-8]]] = -np.inf
    renormal: np.ndarray = log_softmax(scored, axis=-1)
    return renormal


WRONG_SCORES: dict[str, tuple[Callable[[list[int]], np.ndarray], str]] = {
    "noise of half precision": (lambda tokens: score(tokens) + 0.01 * np.cos(np.arange(VOCABULARY)), "off by"),
    "the likeliest alone in the normaliser": (renormalised, "off by"),
    "after a temperature": (lambda tokens: log_softmax(score(tokens) / 0.9, axis=-1), "off by"),
    "of another first token": (lambda tokens: score([0, *tokens[1:]]), "likeliest|among|off by"),
    "other ids": (lambda tokens: np.roll(score(tokens), 1, axis=-1), "not among|off by"),
}


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("fault", WRONG_SCORES)
def test_wrong_log_probabilities_are_refuted(fault: str, kind: str) -> None:
    scores, words = WRONG_SCORES[fault]
    with serve(Engine(complete, kind, scores)) as url:
        finding = checked("log-probabilities", url)
    assert finding.passed is False
    assert re.search(words, finding.detail), finding.detail


def wrong_own(**changed: Any) -> type[Engine]:
    """Report emitted tokens or log-probabilities that differ from those among the likeliest."""

    class Told(Engine):
        def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            status, reply = super().post(path, body)
            if self.kind == "vllm":
                reply["choices"][0]["logprobs"] |= changed
            else:
                for at, each in enumerate(reply["completion_probabilities"]):
                    each |= {"id": int(changed["tokens"][at].removeprefix("token_id:"))} if "tokens" in changed else {}
                    each |= {"logprob": changed["token_logprobs"][at]} if "token_logprobs" in changed else {}
            return status, reply

    return Told


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokens": ["token_id:70"] * NEW}, "log-probability 0 is of token 70, but token"),
        ({"token_logprobs": [-0.5] * NEW}, "emitted token 0 has log-probability -0.5, but"),
    ],
)
def test_log_probabilities_of_the_emitted_tokens_are_those_among_the_likeliest(
    changed: dict[str, Any], words: str, kind: str
) -> None:
    with serve(wrong_own(**changed)(complete, kind, score)) as url, pytest.raises(DecoderFailed, match=words):
        opened(url).log_probs(PROMPTS, NEW, TOP)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokens": ["token_id:70"] * (NEW - 1)}, f"the reply gives {NEW - 1} token ids for {NEW} emitted tokens"),
        ({"token_logprobs": [-0.5] * (NEW + 1)}, f"the reply gives {NEW + 1} log-probabilities for {NEW} emitted"),
    ],
)
def test_each_emitted_token_has_its_log_probability(changed: dict[str, Any], words: str) -> None:
    with serve(wrong_own(**changed)(complete, "vllm", score)) as url, pytest.raises(DecoderFailed, match=words):
        opened(url).log_probs(PROMPTS, NEW, TOP)


def test_a_server_without_log_probabilities_declines() -> None:
    for kind, words in (("vllm", "top_logprobs"), ("llama.cpp", "completion_probabilities")):
        with serve(Engine(complete, kind)) as url, pytest.raises(Unsupported, match=words):
            opened(url).log_probs(PROMPTS, NEW, TOP)


class Refusing(Engine):
    """Answers 400 to a request that ``refuses`` selects."""

    refuses: Callable[[dict[str, Any]], Any]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"error": "not supported"}) if self.refuses(body) else super().post(path, body)


def refusing(refuses: Callable[[dict[str, Any]], Any], kind: str = "vllm") -> Refusing:
    engine = Refusing(complete, kind, score=score)
    engine.refuses = refuses
    return engine


@pytest.mark.parametrize(("kind", "field"), [("vllm", "logprobs"), ("llama.cpp", "n_probs")])
def test_log_probabilities_that_the_server_refuses_are_declined(kind: str, field: str) -> None:
    with (
        serve(refusing(lambda body: body.get(field), kind)) as url,
        pytest.raises(Unsupported, match=r"refuses the 5 likeliest tokens .status 400: .*not supported"),
    ):
        opened(url).log_probs(PROMPTS, NEW, TOP)


def test_log_probabilities_of_prompts_that_the_server_refuses_are_not_asked_for() -> None:
    with serve(refusing(lambda body: body.get("prompt_logprobs"))) as url:
        finding = checked("log-probabilities", url)
    assert finding.passed is True, finding.detail


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_a_temperature_that_the_server_refuses_is_declined(kind: str) -> None:
    with serve(refusing(lambda body: body["temperature"], kind)) as url:
        with pytest.raises(Unsupported, match=r"refuses temperature 1.50 .status 400: .*not supported"):
            opened(url, 1.5)
        assert checked("generation", url).passed is True


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"error": {"message": "must be in [0, 2]", "type": "BadRequestError", "code": 400}}, "'must be in [0, 2]'"),
        ({"object": "error", "message": "must be in [0, 2]", "code": 400}, "'must be in [0, 2]'"),  # vLLM before 0.10
        ({"error": {"code": 400, "message": "must be in [0, 2]"}}, "'must be in [0, 2]'"),  # llama.cpp
        ({"detail": "must be in [0, 2]"}, "'must be in [0, 2]'"),  # FastAPI
        ({"detail": [{"loc": ["body", "t"]}]}, """'{"detail": [{"loc": ["body", "t"]}]}'"""),
        (b"<html>", "'<html>'"),
        (b"[" * 5000, f"'{'[' * 300}'"),
    ],
)
def test_a_refusal_is_told_in_the_servers_words_alone(error: Any, said: str) -> None:
    engine = Broken(complete)
    engine.reply = 400, error
    with serve(engine) as url, pytest.raises(DecoderFailed) as caught:
        opened(url).generate(PROMPTS[:1], 2)
    assert f"status 400: {said}" in str(caught.value)


def test_a_server_that_refuses_every_request_declines_nothing() -> None:
    with serve(refusing(lambda body: True)) as url:
        with pytest.raises(DecoderFailed, match="status 400"):
            opened(url, 1.5)
        with pytest.raises(DecoderFailed, match="status 400"):
            opened(url).log_probs(PROMPTS, NEW, TOP)


def test_log_probabilities_may_name_ids_by_another_word() -> None:
    class Named(Engine):
        def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            status, reply = super().post(path, body)
            return status, json.loads(json.dumps(reply).replace("token_id:", "token:"))

    with serve(Named(complete, score=score)) as url:
        assert checked("log-probabilities", url).passed is True


def test_log_probabilities_by_text_are_declined() -> None:
    """Two ids may have the same text."""

    class ByText(Engine):
        def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            status, reply = super().post(path, body)
            reply["choices"][0]["logprobs"]["top_logprobs"] = [{"a": -0.1, "b": -0.2}] * NEW
            return status, reply

    with serve(ByText(complete, score=score)) as url, pytest.raises(Unsupported, match="by text"):
        opened(url).log_probs(PROMPTS, NEW, TOP)


@pytest.mark.parametrize("named", ["served", "org/served"])
@pytest.mark.parametrize("key", ["id", "root"])
def test_of_several_models_the_one_that_is_judged_is_asked(key: str, named: str) -> None:
    class Several(Engine):
        def get(self, path: str) -> tuple[int, Any]:
            models = [{"id": "other", "max_model_len": 9}, {"id": "mine", "max_model_len": WINDOW, key: named}]
            return (200, {"data": models}) if path == "/v1/models" else super().get(path)

    with serve(engine := Several(complete)) as url:
        opened(url).generate(PROMPTS[:1], NEW)
    assert engine.bodies[0]["model"] == (named if key == "id" else "mine")


class Loading(Engine):
    """Reports 503 for the next ``left`` requests."""

    left = 9

    def get(self, path: str) -> tuple[int, Any]:
        self.left -= 1
        return (503, {"error": "Loading model"}) if self.left >= 0 else super().get(path)


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_a_server_that_loads_its_model_is_waited_for(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("pytest_emad.remote.engine.WAITS_S", (0.0, 0.0))
    monkeypatch.setattr("pytest_emad.remote.engine.LOADING_S", 0.01)
    with serve(Loading(complete, kind)) as url:
        assert len(opened(url).generate(PROMPTS[:1], NEW).emitted[0]) == NEW


def test_a_server_that_never_loads_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_emad.remote.engine.WAITS_S", (0.0, 0.0))
    monkeypatch.setattr("pytest_emad.remote.engine.LOADING_S", 0.01)
    engine = Loading(complete)
    engine.left = 10**9
    with serve(engine) as url:
        client = EngineClient(parse_address(url, Path(), "decoder"), 0.5)  # type: ignore[arg-type]
        request = Request(ModelRef("served", lambda: None), FULL)
        began = time.monotonic()
        for _ in range(9):
            with pytest.raises(DecoderFailed, match=r"status 503 for 0.5 s: .*Loading model.*; wait until"):
                client.open_decoder(request, VOCABULARY, WINDOW)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_a_server_of_a_shorter_window_is_named(kind: str) -> None:
    with serve(Engine(complete, kind, window=WINDOW - 1)) as url, pytest.raises(DecoderFailed, match="63 positions"):
        opened(url)


def test_a_served_vocabulary_of_another_size_is_named() -> None:
    with serve(Engine(complete, "llama.cpp", vocabulary=VOCABULARY)) as url:
        opened(url)
    with (
        serve(Engine(complete, "llama.cpp", vocabulary=VOCABULARY + 1)) as url,
        pytest.raises(DecoderFailed, match=f"its model has {VOCABULARY + 1} tokens, but the folder has {VOCABULARY}"),
    ):
        opened(url)


class Busy(Engine):
    """``replies``: the answers to the first requests; later ones are served."""

    replies: tuple[Any, ...] = ()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.lock:
            self.bodies.append(body)
            at = len(self.bodies) - 1
        return self.replies[at] if at < len(self.replies) else (200, {"choices": [DONE]})


DONE = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [1, 2]}
BUSY, SOON, GONE = (503, {"error": "busy"}), (429, {}, {"Retry-After": "0.2"}), (CLOSE, None)
LATER = (503, {"error": "busy"}, {"Retry-After": "Thu, 01 Jan 2099 00:00:00 GMT"})
PUT_OFF: dict[str, tuple[tuple[Any, ...], str, dict[str, int]]] = {  # replies, error or "", and retries by reason
    "busy once": ((BUSY,), "", {"status 503": 1}),
    "busy, then reset": ((BUSY, GONE), "", {"status 503": 1, "connection reset": 1}),
    "put off for a while": ((SOON,), "", {"status 429": 1}),
    "busy three times": ((BUSY,) * 3, "status 503: .*busy", {"status 503": 2}),
    "reset three times": ((GONE,) * 3, "no whole reply .ConnectionLostBeforeReply", {"connection reset": 2}),
    "put off for too long": ((LATER,), "status 503, to be sent again after .* beyond the limit of 60 s", {}),
    "failed": (((500, {}),), "status 500", {}),
}


@pytest.mark.parametrize("case", PUT_OFF)
def test_a_request_that_is_put_off_or_reset_is_sent_again_and_counted(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr("pytest_emad.remote.engine.WAITS_S", (0.0, 0.0))
    replies, error, reasons = PUT_OFF[case]
    engine = Busy(complete)
    engine.replies = replies
    began = time.monotonic()
    with serve(engine) as url:
        decoder = opened(url)
        if error:
            with pytest.raises(DecoderFailed, match=error):
                decoder.generate(PROMPTS[:1], 2)
        else:
            assert decoder.generate(PROMPTS[:1], 2).emitted[0].tolist() == [1, 2]
    assert (decoder._client.counts.requests, decoder._client.counts.reasons) == (1, reasons)
    assert time.monotonic() - began >= (0.2 if SOON in replies else 0)


class Narrow(Engine):
    """Refuses each request beyond ``slots`` at once, with a retry."""

    slots = 2
    taken = 0

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.lock:
            if self.taken >= self.slots:
                return 429, {"error": "busy"}, {"Retry-After": "0.1"}
            self.taken += 1
        try:
            time.sleep(0.1)
            return super().post(path, body)
        finally:
            with self.lock:
                self.taken -= 1


def test_rows_beyond_what_a_server_takes_at_once_wait_their_turn() -> None:
    with serve(Narrow(complete)) as url:
        decoder = opened(url)
        assert len(decoder.generate([*PROMPTS, *PROMPTS], 2).emitted) == 2 * len(PROMPTS)
    assert decoder._client.counts.reasons["status 429"] > 2 * len(PROMPTS)


WRONG_AT_FIRST: dict[str, tuple[Any, ...]] = {
    "other tokens": (200, {"choices": [DONE | {"token_ids": [3, 3]}]}),
    "no JSON": (200, b"<html>"),
    "half a reply": (CLOSE, b'{"choices": ['),
}


@pytest.mark.parametrize("fault", WRONG_AT_FIRST)
def test_a_reply_is_never_asked_for_again(fault: str) -> None:
    """An answer that is right at the second attempt was wrong at the first."""
    engine = Busy(complete)
    engine.replies = (WRONG_AT_FIRST[fault],)
    with serve(engine) as url:
        decoder = opened(url)
        if fault == "other tokens":
            assert decoder.generate(PROMPTS[:1], 2).emitted[0].tolist() == [3, 3]
        else:
            with pytest.raises(DecoderFailed):
                decoder.generate(PROMPTS[:1], 2)
    assert (len(engine.bodies), decoder._client.counts.retry_count) == (1, 0)


@pytest.mark.parametrize("forgets", [False, True])
def test_another_answer_after_a_retry_is_refuted(forgets: bool) -> None:
    engine = EachThird(complete, forgets=forgets)
    with serve(engine) as url:
        finding = checked("requests", url)
    assert finding.passed is not forgets, finding.detail
    assert engine.served > 20


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("whole", "answers stream=true with application/json"),
        ("refused", "refuses stream=true .status 400"),
        ("text", "streams text without token ids"),
        ("one event", "all tokens of each streamed answer arrive at once"),
    ],
)
@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_a_server_that_streams_nothing_says_so(kind: str, how: str, words: str) -> None:
    with serve(NoStream(complete, kind, how=how)) as url, pytest.raises(Unsupported, match=words):
        checked("streams", url)


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_no_request_leaves_a_sampling_setting_to_the_server(kind: str) -> None:
    """A served model's generation config may contain top-k, penalties and end tokens."""
    with serve(engine := Engine(complete, kind)) as url:
        opened(url).generate(PROMPTS[:1], 2)
        opened(url, 1.5).generate(PROMPTS[:1], 2)
    greedy, *first, drawn_body = engine.bodies
    assert len(first) == 1, "one token shows whether the server samples"
    penalty, end = ("repetition_penalty", -1) if kind == "vllm" else ("repeat_penalty", 0)
    assert (greedy["temperature"], drawn_body["temperature"]) == (0.0, 1.5)
    assert (drawn_body["top_p"], drawn_body["min_p"], drawn_body[penalty], drawn_body["top_k"]) == (1.0, 0.0, 1.0, end)
    assert greedy["ignore_eos"] is (kind == "vllm")
    assert greedy["prompt"] == PROMPTS[0].tokens.tolist()


def test_a_stop_token_that_the_server_leaves_out_is_put_back() -> None:
    class Cutting(Engine):
        def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            status, reply = super().post(path, body)
            if reply["choices"][0]["finish_reason"] == "stop":
                reply["choices"][0]["token_ids"].pop()
            return status, reply

    with serve(Cutting(complete)) as url:
        assert checked("requests", url).passed is True


def test_exits_sessions_and_sources_are_declined() -> None:
    with serve(Engine(complete)) as url:
        address = parse_address(url, Path(), "decoder")
        assert isinstance(address, UrlAddress)
        for point in (spread_point(), truncated(LAYERS, LAYERS - 1)):
            with pytest.raises(Unsupported, match="every layer for every token"):
                EngineClient(address, 9.0).open_decoder(Request(ModelRef("m", lambda: None), point), VOCABULARY, WINDOW)
        decoder = opened(url)
        with pytest.raises(Unsupported, match="no sessions"):
            decoder.start(PROMPTS[:1])
        with pytest.raises(Unsupported, match="decoder-only"):
            decoder.generate([Prompt(np.array([1]), np.array([2]))], 1)
        with pytest.raises(BadArgument, match="max_rows"):
            decoder.generate(PROMPTS * (VARIATIONS // len(PROMPTS) + 1), 1)
        with pytest.raises(BadArgument, match="max_new"):
            decoder.generate(PROMPTS[:1], 0)


class Broken(Engine):
    """``reply``: the answer to every completion."""

    reply: tuple[int, Any] = (200, {})

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self.reply


BROKEN: dict[str, tuple[tuple[int, Any], type[Exception], str]] = {
    "an error": ((500, {"error": "out of memory"}), DecoderFailed, "status 500: .*out of memory"),
    "no JSON": ((200, b"<html>"), DecoderFailed, "<html>.* where a JSON object was expected"),
    "deep JSON": ((200, b"[" * 100_000), DecoderFailed, "where a JSON object was expected"),
    "no choices": ((200, {"choices": []}), DecoderFailed, "a reply without what was asked"),
    "text alone": ((200, {"choices": [{"text": "a", "finish_reason": "length"}]}), Unsupported, "without token ids"),
    "ids as text": ((200, {"choices": [{"token_ids": "12", "finish_reason": "length"}]}), DecoderFailed, "list of int"),
    "booleans": ((200, {"choices": [{"token_ids": [True], "finish_reason": "length"}]}), DecoderFailed, "list of int"),
    "a large id": ((200, {"choices": [{"token_ids": [101], "finish_reason": "length"}]}), DecoderFailed, "token 101"),
    "a negative id": ((200, {"choices": [{"token_ids": [-1], "finish_reason": "length"}]}), DecoderFailed, "token -1"),
    "a stop reason that is no token": (
        (200, {"choices": [{"token_ids": [], "finish_reason": "stop", "stop_reason": True}]}),
        DecoderFailed,
        "no token",
    ),
    "nothing": ((200, {"choices": [{"token_ids": [], "finish_reason": "length"}]}), DecoderFailed, "no token"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_reply_that_holds_no_tokens_is_one_clear_error(fault: str) -> None:
    reply, error, words = BROKEN[fault]
    engine = Broken(complete)
    engine.reply = reply
    with serve(engine) as url, pytest.raises(error, match=words):
        opened(url).generate(PROMPTS[:2], 3)


def test_the_key_comes_from_the_environment_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Locked(Engine):
        def get(self, path: str) -> tuple[int, Any]:
            return super().get(path) if self.headers[-1].get("Authorization") == "Bearer secret" else (401, {})

    with serve(Locked(complete)) as url:
        with pytest.raises(DecoderFailed, match=f"status 401; set {TOKEN_VARIABLE}"):
            opened(url)
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        opened(url)


def test_a_server_of_another_kind_and_none_at_all_are_named() -> None:
    class Website(Engine):
        def get(self, path: str) -> tuple[int, Any]:
            return 200, b"<html>"

    with (
        serve(Website(complete)) as url,
        pytest.raises(DecoderFailed, match="neither /props nor /v1/models names a model"),
    ):
        opened(url)
    with pytest.raises(DecoderFailed, match="is it started"):
        opened(url)


def test_a_reply_that_never_ends_is_given_up_at_the_time_limit() -> None:
    """Each byte comes in time, but the whole reply does not."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for _ in range(100):
                    try:
                        connection.sendall(b" ")
                    except OSError:  # the client has given up
                        return
                    time.sleep(0.1)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(DecoderFailed, match=r"no whole reply within 0\.5 s"):
            opened(f"http://127.0.0.1:{listening.getsockname()[1]}", seconds=0.5)
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_in_the_version(path: str) -> None:
    assert parse_address(f"https://host:8443{path}", Path(), "decoder") == UrlAddress(
        f"https://host:8443{path}", "host", 8443, "", True
    )


@pytest.mark.parametrize("text", ["http://", "http://:80", "http://u:p@host", "http://host?a=1", "http://host:99999"])
def test_a_url_that_names_no_server_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="decoder="):
        parse_address(text, Path(), "decoder")


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="served"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="served"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="served"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="served"} 13.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="served",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="served",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="served",position="0"} 1.0
"""


class Metered(Engine):
    """A server that also answers ``/metrics``."""

    metrics: bytes = METRICS.encode()

    def get(self, path: str) -> tuple[int, Any]:
        return (200, self.metrics) if path == "/metrics" else super().get(path)


def test_counters_of_drafts_are_summed_by_position() -> None:
    with serve(Metered(complete)) as url:
        counts = opened(url).draft_counts()
    assert counts.drafts == 12
    assert counts.accepted.tolist() == [9, 5]


def test_a_counter_that_is_no_count_fails_with_its_name() -> None:
    server = Metered(complete)
    server.metrics = METRICS.replace(" 10.0", " ten").encode()
    with serve(server) as url, pytest.raises(DecoderFailed, match="spec_decode_num_drafts of /metrics is 'ten'"):
        opened(url).draft_counts()


def test_a_server_without_counters_of_drafts_declines() -> None:
    with serve(Engine(complete)) as url, pytest.raises(Unsupported, match="counts no drafts"):
        opened(url).draft_counts()


class CountsEnergy(Engine):
    """TensorRT-LLM's ``/energy_metrics``."""

    energy: tuple[int, Any] = (200, {"total_energy_j": 812.5, "query_time": 17.25})

    def get(self, path: str) -> tuple[int, Any]:
        return self.energy if path == "/energy_metrics" else super().get(path)


def test_the_joules_of_a_server_are_read() -> None:
    with serve(CountsEnergy(complete)) as url:
        assert opened(url).energy_j() == 812.5


@pytest.mark.parametrize(
    ("status", "reply", "said"),
    [
        (503, {"error": "Failed to read GPU energy"}, r"/energy_metrics has status 503 \(Failed to read GPU energy\)"),
        (404, {"error": "not found"}, "counts no energy: /energy_metrics has status 404"),
    ],
)
def test_a_server_without_a_counter_of_energy_declines(status: int, reply: Any, said: str) -> None:
    server = CountsEnergy(complete)
    server.energy = status, reply
    with serve(server) as url, pytest.raises(Unsupported, match=said):
        opened(url).energy_j()


@pytest.mark.parametrize(
    "reply", [{}, [], b"812.5 J", *({"total_energy_j": value} for value in (None, "812.5", -1, True, math.nan))]
)
def test_a_counter_of_energy_that_is_no_number_of_joules_fails(reply: Any) -> None:
    server = CountsEnergy(complete)
    server.energy = 200, reply
    with serve(server) as url, pytest.raises(DecoderFailed, match="is no number of joules ≥ 0"):
        opened(url).energy_j()


def test_a_counter_of_energy_that_breaks_off_fails() -> None:
    server = CountsEnergy(complete)
    server.energy = CLOSE, None
    with serve(server) as url, pytest.raises(DecoderFailed, match=r"GET /energy_metrics.*no whole reply"):
        opened(url).energy_j()
