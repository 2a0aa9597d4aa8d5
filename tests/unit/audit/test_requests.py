"""Audits of generation requests: correct decoders of other designs pass, each check has power or says why it has none.

``tests/suites/test_planted_defects.py`` tests the planted defects.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from emad_ref.point import full_depth
from emad_ref.protocol import ModelRef, Prompt, Request, Step, TokenArrivals, Unsupported
from emad_ref.record import Ints, Record
from pytest_emad.audit.finding import Finding
from pytest_emad.audit.reference_logits import PrefixCachingLens
from pytest_emad.audit.request_cases import draw_similar_ids
from pytest_emad.audit.requests import check_and_time_streams, check_temperatures_at_once
from pytest_emad.audit.shared_prefixes import (
    VARIATIONS,
    check_shared_prefixes,
    prompt_variations,
    swapped_half_variations,
)
from pytest_emad.audit.trajectory import DecoderUnderTest
from pytest_emad.remote.token_decoder import Completion, TokenDecoder
from tests.decoders.audited_model import LAYERS, VOCABULARY, drawn, lens_of, spread_point, tiny_neox, under_test
from tests.decoders.cached_decoder import CachedDecoder, CachedSession
from tests.decoders.covering_cases import check_small_cases
from tests.decoders.foreign_decoder import ForeignDecoder

TOLERANCE, NEW = 1e-9, 6
LENGTHS = (4, 1, 6, 3, 2, 5, 7)
PROMPTS, _ = drawn(LENGTHS, 1)
POINT = spread_point()
CHECKS = ("requests", "prefixes")


def checked(check: str, made: type[CachedDecoder] | type[ForeignDecoder]) -> Finding:
    if check == "prefixes":
        rng, (text, others) = np.random.default_rng(0), np.random.default_rng(1).integers(0, VOCABULARY, (2, 10))
        return check_shared_prefixes(under_test(made, POINT), text, others, NEW, rng)
    model = tiny_neox()
    return check_small_cases(check, partial(made, model), lens_of(model), POINT, TOLERANCE, neighbours=("raised",))


class Unforced(CachedSession):
    """A decoder without forced depths."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        if depth is not None:
            raise Unsupported("depths cannot be forced")
        return super().feed(tokens, depth, last)


class DeclinesForcedDepth(CachedDecoder):
    session = Unforced


class Wraps(CachedDecoder):
    """Wraps errors within a request into its own error type."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        try:
            return super().generate(prompts, max_new, stop)
        except Exception as error:
            raise RuntimeError("the request failed") from error


@pytest.mark.parametrize(
    "made",
    [
        CachedDecoder,
        DeclinesForcedDepth,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (ForeignDecoder, Wraps)),
    ],
)
@pytest.mark.parametrize("check", CHECKS)
def test_a_right_decoder_passes(check: str, made: type[CachedDecoder] | type[ForeignDecoder]) -> None:
    finding = checked(check, made)
    assert finding.passed is True, finding.detail


def test_similar_ids_agree_with_an_emitted_one_in_their_low_bits() -> None:
    assert draw_similar_ids([300, 2**16 + 5], range(44, 300)) == [44]
    assert draw_similar_ids([300, 2**16 + 5], [5, 44]) == [5, 5]
    assert draw_similar_ids([], range(300)) == []


def test_prompts_that_cannot_be_told_apart_are_inconclusive() -> None:
    same = np.full(10, 3)
    finding = check_shared_prefixes(under_test(CachedDecoder, POINT), same, same, NEW, np.random.default_rng(0))
    assert finding.passed is None, finding.detail


def test_too_little_to_ask_about_is_one_clear_error() -> None:
    decoder, rng, few = under_test(CachedDecoder, POINT), np.random.default_rng(0), np.arange(7)
    with pytest.raises(BadArgument, match="text"):
        check_shared_prefixes(decoder, few, few, NEW, rng)


def test_variations_are_those_that_keys_of_a_cache_mix_up() -> None:
    text, others = np.arange(10), np.arange(50, 60)
    varied = [each.tolist() for each in prompt_variations(text, others)]
    assert len(varied) == VARIATIONS - 1  # no two ids agree in eight bits
    assert varied[0] == varied[1] == text.tolist()
    alike = [each for each in varied[2:] if len(each) == 10]
    assert len({tuple(each) for each in alike}) == 8
    assert [0, 1, 2, 3, 3, 3, 6, 7, 8, 9] in alike
    assert [3] * 10 in alike
    of_blocks = [each for each in varied if each[:7] == text[:7].tolist() and each[8:] == [8]]
    assert [each[7] for each in of_blocks] == [50, 51, 52, 53]
    ends = [each for each in varied if each[7:] == text[7:9].tolist()]
    assert [[at for at in range(7) if each[at] != at] for each in ends] == [[4], [0], [5], [2]]
    assert [0, 1, 3, 2, 5, 4, 7, 6, 8, 9] in alike
    assert [0, 8, 2, 3, 4, 5, 6, 7, 1, 9] in alike
    parted = [each for each in varied if each[:5] == text[:5].tolist() and each[5:6] not in ([], [text[5]])]
    assert sorted(len(each) for each in parted) == [9, 9, 10, 15]  # a token is replaced inside a block
    assert any(each[:-1] == text[:-1].tolist() for each in alike)
    assert any(each[1:] == text[1:].tolist() for each in alike)
    assert text[:5].tolist() in varied
    assert any(each[:10] == text.tolist() and len(each) == 15 for each in varied)


def test_halves_share_a_beginning_or_an_end_that_begins_with_a_block() -> None:
    for n, at in ((10, 4), (264, 128), (319, 128)):
        text, others = np.arange(n), np.arange(1000, 1000 + n)
        one, other, ours, theirs, *shorter = (each.tolist() for each in swapped_half_variations(text, others))
        assert (one, other) == (text.tolist(), others.tolist())
        assert ours == one[:at] + other[at:]
        assert theirs == other[:at] + one[at:]
        assert shorter == [each[: n - n // 8] for each in (one, other, ours, theirs)]


def test_a_variation_differs_in_high_bits_of_an_id_alone() -> None:
    text, others = np.arange(10), np.array([50, 51, 256 + 4, 53, 54, 2**16 + 5, 512 + 3, 57, 58, 59])
    varied = [each.tolist() for each in prompt_variations(text, others)]
    assert len(varied) == VARIATIONS
    assert [0, 1, 2, 3, 4, 2**16 + 5, 6, 7, 8] in varied  # the id with the most equal bits


def test_a_beginning_is_read_out_of_the_last_answer() -> None:
    asked: list[int] = []
    lens = lens_of(tiny_neox())

    class Counting:
        def __call__(self, tokens: Ints, first: int = 0) -> np.ndarray:
            asked.append(len(tokens))
            return lens(tokens, first)

        lead = lens.read_rule

    remembering, tokens = PrefixCachingLens(Counting()), np.arange(9)
    whole = remembering(tokens, 2)
    np.testing.assert_allclose(remembering(tokens[:6], 3), whole[1:4])
    np.testing.assert_allclose(remembering(tokens[:6], 3), lens(tokens[:6], 3), atol=1e-9)
    assert asked == [9]
    remembering(np.arange(1, 7), 3)
    remembering(tokens, 1)
    assert asked == [9, 6, 9]
    both = PrefixCachingLens(Counting(), kept=2)
    for sequence in (tokens, np.arange(1, 7), tokens[:5], np.arange(1, 5)):
        both(sequence, 3)
    assert asked == [9, 6, 9, 9, 6]


# ---------------------------------------------------------------- in-process decoders with threads or streams


class Threaded(TokenDecoder):
    """A correct decoder with threads."""

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
    """Stores a request where the next one overwrites it."""

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        self.kept = prompts
        time.sleep(0.005)
        return super().complete(self.kept, max_new, stop)


class Crashing(Racing):
    """Raises an error when that happens."""

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
        (Racing, "at once", r"emitted \d+, but the argmax"),
        (Crashing, "at once", "RuntimeError: two requests at once"),
        (FallingTimes, "streams", "times that do not rise"),
        (FewerTimes, "streams", "5 arrivals for 6 tokens"),
    ],
)
def test_threads_and_streams_of_a_decoder_in_this_process(made: type[Threaded], check: str, words: str) -> None:
    asked = DecoderUnderTest(made(), lens_of(tiny_neox()), full_depth(LAYERS), TOLERANCE)
    if check == "streams":
        finding, _ = check_and_time_streams(asked, PROMPTS, NEW)
    else:
        finding = check_small_cases(
            "requests", lambda point: made(), asked.lens, POINT, TOLERANCE, call=("at once",), point=("full",),
            neighbours=("none",), prompt=("within a block",), arrays=("kept",),
        )  # fmt: skip
    assert finding.passed is not bool(words), finding.detail
    assert re.search(words, finding.detail), finding.detail


class Merging(Threaded):
    """All tokens of a streamed answer arrive at once, but for the answer of number ``but`` among all."""

    def __init__(self, but: int | None) -> None:
        super().__init__()
        self.but, self.answered = but, 0

    def token_arrivals(self, *arguments: Any) -> list[TokenArrivals]:
        found = []
        for each in super().token_arrivals(*arguments):
            self.answered += 1
            merged = replace(each, seconds=np.full(len(each.tokens), each.whole_s))
            found.append(each if self.answered == self.but else merged)
        return found


def test_streams_are_judged_over_all_answers_of_a_test() -> None:
    """A process that lags merges tokens: one answer in parts among many shows that the decoder streams."""
    asked = DecoderUnderTest(Merging(30), lens_of(tiny_neox()), full_depth(LAYERS), TOLERANCE)
    try:
        finding, arrivals = check_and_time_streams(asked, PROMPTS, 2 * NEW)
    except Unsupported as refusal:
        pytest.fail(str(refusal))  # the plugin would turn it into a skip
    assert finding.passed, finding.detail
    assert sum(each.came_in_parts for count, rows in arrivals.items() if count for each in rows) == 1
    with pytest.raises(Unsupported, match="arrive at once"):
        check_and_time_streams(replace(asked, decoder=Merging(None)), PROMPTS, 2 * NEW)


class CuttingStreams(Threaded):
    """Streams the answer to the last ``KEPT`` tokens of a prompt, without ``lost`` of its tokens."""

    KEPT = 16

    def __init__(self, lost: int) -> None:
        super().__init__()
        self.lost = lost

    def token_arrivals(
        self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
    ) -> list[TokenArrivals]:
        read = [Prompt(prompt.tokens[-self.KEPT :]) for prompt in prompts] if stream else prompts
        return super().token_arrivals(read, max_new - self.lost * stream, stop, stream)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stream_that_parts_says_where_and_why(lost: int) -> None:
    long = drawn((30, 26), 1)[0]
    asked = DecoderUnderTest(CuttingStreams(lost), lens_of(tiny_neox()), full_depth(LAYERS), TOLERANCE)
    finding, _ = check_and_time_streams(asked, long, NEW)
    assert finding.passed is False
    told = f"row 0, streamed beside 0: {NEW - lost} tokens, but {NEW} in the whole answer; they part at new token "
    assert finding.complaint.startswith(told)
    assert finding.difference is not None
    new = finding.difference.position - len(long[0].tokens) + 1
    assert finding.complaint.startswith(f"{told}{new}: ")
    assert finding.likely_cause is not None
    assert finding.likely_cause.kind == "prompt cut to 16 tokens"
    assert finding.complaint.endswith(str(finding.likely_cause))


def test_what_takes_one_request_at_a_time_and_streams_nothing_declines() -> None:
    plain = under_test(CachedDecoder, full_depth(LAYERS))
    for decoder in (plain, replace(plain, decoder=GenerateAlone())):

        def opened(temperature: float, kept: Any = decoder.decoder) -> nullcontext[Any]:
            return nullcontext(kept)

        with pytest.raises(Unsupported, match="one request at a time"):
            check_temperatures_at_once(opened, decoder, PROMPTS[:3], NEW, HOT)
        with pytest.raises(Unsupported, match="streams n"):
            check_and_time_streams(decoder, PROMPTS, NEW)


class GenerateAlone(Threaded):
    concurrent = False
    token_arrivals = TokenDecoder.token_arrivals  # type: ignore[assignment]


# ---------------------------------------------------------------- simultaneous sampled requests

HOT, SAMPLED_NEW, SEED = 12.0, 6, 1  # the tiny model's logits are wide: only at this temperature do draws vary


@cache  # cached: every test below sends most requests several times, alone and together
def answered(
    temperature: float, seed: int, prompts: tuple[tuple[int, ...], ...], max_new: int, stop: frozenset[int]
) -> list[tuple[Ints, bool]]:
    decoder = CachedDecoder(tiny_neox(), full_depth(LAYERS), temperature, seed)
    record = decoder.generate([Prompt(np.array(prompt)) for prompt in prompts], max_new, stop)
    return [(row, why == "stop token") for row, why in zip(record.emitted, record.stop, strict=True)]


class Sampling(Threaded):
    """A correct decoder at a temperature. Requests of one class meet in ``kind.running``."""

    lock = threading.Lock()
    running: list[Sampling]
    answered = staticmethod(answered)

    def __init__(self, temperature: float, seed: int):
        super().__init__()
        self.temperature, self.seed = temperature, seed

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        with self.lock:
            self.running.append(self)
        time.sleep(0.005)  # other requests start in this time
        with self.lock:
            temperature, seed = self.drawn_by(list(self.running))
        found = self.answered(temperature, seed if temperature else 0, tuple(map(tuple, prompts)), max_new, stop)
        with self.lock:
            self.running.remove(self)
        return [Completion(row.copy(), stopped) for row, stopped in found]

    def drawn_by(self, running: Sequence[Sampling]) -> tuple[float, int]:
        return self.temperature, self.seed


class SharedGenerator(Sampling):
    """Simultaneous requests draw from one generator."""

    drawn = 1000

    def drawn_by(self, running: Sequence[Sampling]) -> tuple[float, int]:
        type(self).drawn += 1
        return self.temperature, self.seed if len(running) == 1 else self.drawn


class OneSeed(Sampling):
    """Simultaneous requests draw equal numbers for any seed; each request alone has the right distribution."""

    def drawn_by(self, running: Sequence[Sampling]) -> tuple[float, int]:
        return self.temperature, self.seed if len(running) == 1 else 99


class OneTemperature(Sampling):
    """Simultaneous requests have the temperature of the first."""

    answered = staticmethod(answered.__wrapped__)  # uncached, so slow enough for greedy requests to meet sampled ones

    def drawn_by(self, running: Sequence[Sampling]) -> tuple[float, int]:
        return running[0].temperature, self.seed


class HottestOfAll(Sampling):
    """Simultaneous sampled requests have the highest of their temperatures; greedy ones stay greedy."""

    def drawn_by(self, running: Sequence[Sampling]) -> tuple[float, int]:
        return (max(each.temperature for each in running) if self.temperature else 0.0), self.seed


class ColderAtOnce(Sampling):
    """A request together with others is sampled at temperature 1."""

    def drawn_by(self, running: Sequence[Sampling]) -> tuple[float, int]:
        return self.temperature / (12 if len(running) > 1 else 1), self.seed


class Unanswered(Sampling):
    """Greedy requests together with sampled ones are lost."""

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> list[Completion]:
        while not self.temperature and any(each.temperature for each in self.running):
            time.sleep(0.01)
        if not self.temperature and threading.current_thread() is not threading.main_thread():
            time.sleep(2)
        return super().complete(prompts, max_new, stop)


def judged_samples(made: type[Sampling]) -> Finding:
    class Kind(made):  # type: ignore[misc, valid-type]
        running: list[Sampling] = []  # noqa: RUF012  # one list of this kind

    greedy = DecoderUnderTest(Kind(0.0, 0), lens_of(tiny_neox()), full_depth(LAYERS), TOLERANCE)
    return check_temperatures_at_once(
        lambda temperature: closing(Kind(temperature, SEED)), greedy, PROMPTS[:4], SAMPLED_NEW, HOT
    )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Sampling, ""),
        pytest.param(
            SharedGenerator,
            "rows of requests at once draw other tokens than alone under the same seed",
            marks=pytest.mark.slow,  # OneSeed is refuted in the same words, and so are the next two
        ),
        (OneSeed, "draw other tokens than alone under the same seed"),
        (OneTemperature, "greedy request . beside . sampled ones: |other tokens than alone"),
        pytest.param(HottestOfAll, "draw other tokens than alone under the same seed", marks=pytest.mark.slow),
        pytest.param(ColderAtOnce, "draw other tokens than alone under the same seed", marks=pytest.mark.slow),
        (Unanswered, "requests beside sampled ones: no answer within"),
    ],
)
def test_requests_sampled_at_once_draw_what_each_draws_alone(
    monkeypatch: pytest.MonkeyPatch, made: type[Sampling], words: str
) -> None:
    if made is Unanswered:
        monkeypatch.setattr("pytest_emad.audit.requests.BESIDE_S", 0.1)
        monkeypatch.setattr("pytest_emad.audit.requests.BESIDE_FACTOR", 0.0)
    finding = judged_samples(made)
    assert finding.passed is not bool(words), finding.detail
    assert re.search(words, finding.detail), finding.detail
