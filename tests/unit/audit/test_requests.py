"""Requests as users send them: right decoders of other makes pass, each check has power, and says where it has none.

Planted defects are tried in ``tests/suites/test_planted.py``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from emad_ref.audit.finding import Finding
from emad_ref.audit.lens import PrefixLens
from emad_ref.audit.requests import (
    MAX_STOP_TOKENS,
    VARIATIONS,
    batches,
    draw_stop_tokens,
    endings,
    interleaved,
    prefixes,
    prompt_variations,
    simultaneous,
    streams,
)
from emad_ref.audit.trajectory import DecoderUnderTest
from emad_ref.errors import BadArgument
from emad_ref.point import full_depth
from emad_ref.protocol import ModelRef, Prompt, Request, Step, TokenArrivals, Unsupported
from emad_ref.record import Ints, Record
from emad_ref.token_decoder import Completion, TokenDecoder
from tests.decoders.cached import CachedDecoder, CachedSession
from tests.decoders.foreign import ForeignDecoder
from tests.decoders.subject import LAYERS, VOCABULARY, drawn, lens_of, spread_point, tiny_neox, under_test

TOLERANCE, NEW = 1e-9, 6
LENGTHS = (4, 1, 6, 3, 2, 5, 7)
PROMPTS, CONTINUATION = drawn(LENGTHS, 8)
POINT = spread_point()
CHECKS = ("batches", "endings", "prefixes", "interleaved")


def checked(check: str, made: type[CachedDecoder] | type[ForeignDecoder]) -> Finding:
    rng = np.random.default_rng(0)
    if check == "batches":
        return batches(under_test(made, POINT), PROMPTS, [7, 2], NEW)
    if check == "endings":
        return endings(under_test(made, POINT), PROMPTS, NEW, rng)
    if check == "prefixes":
        text, others = np.random.default_rng(1).integers(0, VOCABULARY, (2, 10))
        return prefixes(under_test(made, POINT), text, others, NEW, rng)
    both = [under_test(made, full_depth(LAYERS)), under_test(made, POINT)]
    return interleaved(both, PROMPTS[:4], CONTINUATION[:4], NEW)


class Unforced(CachedSession):
    """Depths are the rule's alone."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        if depth is not None:
            raise Unsupported("depths cannot be forced")
        return super().feed(tokens, depth, last)


class DeclinesForcedDepth(CachedDecoder):
    session = Unforced


class Wraps(CachedDecoder):
    """What goes wrong in a request is an error of its own."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        try:
            return super().generate(prompts, max_new, stop)
        except Exception as error:
            raise RuntimeError("the request failed") from error


@pytest.mark.parametrize("made", [CachedDecoder, ForeignDecoder, DeclinesForcedDepth, Wraps])
@pytest.mark.parametrize("check", CHECKS)
def test_a_right_decoder_passes(check: str, made: type[CachedDecoder] | type[ForeignDecoder]) -> None:
    finding = checked(check, made)
    assert finding.passed is True, finding.detail


def test_rows_that_are_all_alike_are_inconclusive() -> None:
    finding = batches(under_test(CachedDecoder, POINT), [PROMPTS[0]] * 7, [7], NEW)
    assert finding.passed is None, finding.detail
    finding = endings(under_test(CachedDecoder, POINT), [PROMPTS[0]] * 3, NEW, np.random.default_rng(0))
    assert finding.passed is None, finding.detail


def test_prompts_that_cannot_be_told_apart_are_inconclusive() -> None:
    same = np.full(10, 3)
    finding = prefixes(under_test(CachedDecoder, POINT), same, same, NEW, np.random.default_rng(0))
    assert finding.passed is None, finding.detail


def test_too_little_to_ask_about_is_one_clear_error() -> None:
    decoder, rng, few = under_test(CachedDecoder, POINT), np.random.default_rng(0), np.arange(7)
    with pytest.raises(BadArgument, match="counts"):
        batches(decoder, PROMPTS, [8], NEW)
    with pytest.raises(BadArgument, match="max_new"):
        endings(decoder, PROMPTS, 2, rng)
    with pytest.raises(BadArgument, match="text"):
        prefixes(decoder, few, few, NEW, rng)
    with pytest.raises(BadArgument, match="continuations"):
        interleaved([decoder], PROMPTS[:3], CONTINUATION[:3], NEW)


def test_a_stop_set_ends_rows_by_several_ids_and_holds_ends_of_prompts() -> None:
    emitted = [np.arange(10 * row, 10 * row + 8) for row in range(20)]
    prompts = [Prompt(np.array([900 + row])) for row in range(20)]
    for seed in range(20):
        stops = draw_stop_tokens(emitted, prompts, np.random.default_rng(seed))
        assert len(stops) == MAX_STOP_TOKENS
        assert len(stops & {900, 901, *range(902, 920)}) == 2
        assert any(int(tokens[0]) in stops for tokens in emitted)
        assert any(stop % 10 for stop in stops if stop < 900)


def test_variations_are_those_that_keys_of_a_cache_mix_up() -> None:
    text, others = np.arange(10), np.arange(50, 60)
    varied = [each.tolist() for each in prompt_variations(text, others)]
    assert len(varied) == VARIATIONS
    assert varied[0] == varied[1] == text.tolist()
    alike = [each for each in varied[2:] if len(each) == 10]
    assert len({tuple(each) for each in alike}) == 5
    assert any(sorted(each) == text.tolist() for each in alike)
    assert any(each[:-1] == text[:-1].tolist() for each in alike)
    assert any(each[1:] == text[1:].tolist() for each in alike)
    assert text[:5].tolist() in varied
    assert any(each[:10] == text.tolist() and len(each) == 15 for each in varied)


def test_a_beginning_is_read_out_of_the_last_answer() -> None:
    asked: list[int] = []
    lens = lens_of(tiny_neox())

    class Counting:
        def __call__(self, tokens: Ints, first: int = 0) -> np.ndarray:
            asked.append(len(tokens))
            return lens(tokens, first)

        lead = lens.lead

    remembering, tokens = PrefixLens(Counting()), np.arange(9)
    whole = remembering(tokens, 2)
    np.testing.assert_allclose(remembering(tokens[:6], 3), whole[1:4])
    np.testing.assert_allclose(remembering(tokens[:6], 3), lens(tokens[:6], 3), atol=1e-9)
    assert asked == [9]
    remembering(np.arange(1, 7), 3)
    remembering(tokens, 1)
    assert asked == [9, 6, 9]


# ---------------------------------------------------------------- decoders in this process that take threads, or stream


class Threaded(TokenDecoder):
    """A right one."""

    concurrent = True

    def __init__(self) -> None:
        point = full_depth(LAYERS)
        super().__init__(Request(ModelRef("m", lambda: None), point, max_rows=len(PROMPTS)))
        self.now: Prompt | None = None

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        record = CachedDecoder(tiny_neox(), full_depth(LAYERS)).generate(list(map(Prompt, prompts)), max_new, stop)
        return [Completion(row, why == "stop token") for row, why in zip(record.emitted, record.stop, strict=True)]

    def token_arrivals(
        self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
    ) -> list[TokenArrivals]:
        rows = [row.tokens for row in self.complete([prompt.tokens for prompt in prompts], max_new, stop)]
        return [TokenArrivals(row, np.arange(len(row)) / 100, len(row) / 100) for row in rows]


class Racing(Threaded):
    """A request is kept where the next one finds it."""

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        self.kept = prompts
        time.sleep(0.005)
        return super().complete(self.kept, max_new, stop)


class Crashing(Racing):
    """Notices it."""

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        answers = super().complete(prompts, max_new, stop)
        if self.kept is not prompts:
            raise RuntimeError("two requests at once")
        return answers


class FallingTimes(Threaded):
    def token_arrivals(self, *arguments: Any) -> list[TokenArrivals]:
        return [replace(each, seconds=each.seconds[::-1]) for each in super().token_arrivals(*arguments)]


class FewerTimes(Threaded):
    def token_arrivals(self, *arguments: Any) -> list[TokenArrivals]:
        return [replace(each, seconds=each.seconds[1:]) for each in super().token_arrivals(*arguments)]


@pytest.mark.parametrize(
    ("made", "check", "words"),
    [
        (Threaded, "at once", ""),
        (Threaded, "streams", ""),
        (Racing, "at once", r"\d requests at once, request \d+: "),
        (Crashing, "at once", "RuntimeError: two requests at once"),
        (FallingTimes, "streams", "times that do not rise"),
        (FewerTimes, "streams", "5 arrivals for 6 tokens"),
    ],
)
def test_threads_and_streams_of_a_decoder_in_this_process(made: type[Threaded], check: str, words: str) -> None:
    asked = DecoderUnderTest(made(), lens_of(tiny_neox()), full_depth(LAYERS), TOLERANCE)
    if check == "streams":
        finding, _ = streams(asked, PROMPTS, NEW)
    else:
        finding = simultaneous(asked, PROMPTS, NEW, np.random.default_rng(0))
    assert finding.passed is not bool(words), finding.detail
    assert re.search(words, finding.detail), finding.detail


def test_what_takes_one_request_at_a_time_and_streams_nothing_declines() -> None:
    plain = under_test(CachedDecoder, full_depth(LAYERS))
    rng = np.random.default_rng(0)
    for decoder in (plain, replace(plain, decoder=GenerateAlone())):
        with pytest.raises(Unsupported, match="one request at a time"):
            simultaneous(decoder, PROMPTS, NEW, rng)
        with pytest.raises(Unsupported, match="streams n"):
            streams(decoder, PROMPTS, NEW)
    for prompts, new in ((PROMPTS[:1], NEW), (PROMPTS, 2)):
        with pytest.raises(BadArgument, match="max_new, prompts"):
            simultaneous(plain, prompts, new, rng)


class GenerateAlone(Threaded):
    concurrent = False
    token_arrivals = TokenDecoder.token_arrivals  # type: ignore[assignment]
