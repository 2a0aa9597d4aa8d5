"""Decode and judge cases of a covering array of requests (``dimensions.REQUESTS``).

A case is decoded as a short history of requests, whose first tokens are drawn anew each time, so that a cache of an
earlier execution cannot hide a failure. Then the lens judges every answer; it does not know states that a schedule
copies or owes, so there the reference decoder is fed the emitted tokens. Draws are judged together, by temperature.
A failing case is decoded again at simpler values, and the complaint shows the simplest history that still fails.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import SystemRandom
from typing import Any

import numpy as np

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, GenerateArguments, Prompt, Unsupported
from emad_ref.record import Floats, Ints, Record, StopReason, make_fixed_depth_record
from pytest_emad.audit.decoding_checks import NO_STOP, extract_trajectories
from pytest_emad.audit.dimensions import Case
from pytest_emad.audit.finding import Tally, prefix_raised_complaints
from pytest_emad.audit.reference_logits import Lens
from pytest_emad.audit.requests import AbortingStopTokens, name_step, require_answers_match_lens
from pytest_emad.audit.sampling import (
    CHANCE,
    LEVEL,
    SampledRow,
    log_chance_of_drawing_again,
    require_not_greedy,
    require_rounding_explains_draw_changes,
    require_rows_drawn_at_temperature,
    require_temperatures,
    rounding_chance,
    rounding_chance_of_draws,
)
from pytest_emad.audit.spot_checks import AnsweredRequest
from pytest_emad.audit.token_comparison import (
    check_same_tokens,
    first_difference,
    is_next_token_tied,
    require_reference_step,
)
from pytest_emad.audit.tolerances import max_logit_error
from pytest_emad.audit.trajectory import CheckedSession, Judge, Trajectory, emitted_logits

BLOCK = 16  # positions of a K/V block of usual engines
UNSEEN = 4  # first tokens of a history that no cache holds
POSITION = 96  # where the first decided tokens of ``place`` "position 96" lie
FAR_SEED = 2**30  # seeds folded to fewer bits coincide
EARLIER_REQUESTS, EARLIER_SESSIONS = 256, 64
NEIGHBOURS = {  # steps in words
    "session": "open another session, which is fed in between",
    "65th session": f"open {EARLIER_SESSIONS} other sessions",
    "257th request": f"send requests for one token until {EARLIER_REQUESTS} are answered",
    "decoder": "open another decoder, which answers in between",
    "closed": "open and close other decoders in between",
    "raised": "send requests that raise, also in between",
}
BESIDE_NEW = 4  # new tokens of a request to another decoder
AT_ONCE = 8  # simultaneous requests at most
ALIKE = 5  # rows at most that are asked for again, sent otherwise or under another seed
SPECIAL = 2 / 5  # share of prompts that end in an id that a decoder may take for padding
OPENING = 1 / 8  # share of prompts that begin with one
LONGEST_RUN = 3  # times that such an id stands at the end of a prompt
STOPS = 21  # ids of the largest stop set
ID_BITS = (8, 16)  # bits of an id stored in one byte or two
KEPT_LOGITS = 2**27  # of sampled rows, held at once
SAME_SEED = ("equal", "between", "zero")  # values of ``seed`` with a second decoder under the same seed
TEMPERATURES = {"0": 0.0, "0.07": 0.07, "just off 1": 1.03, "1": 1.0, "2": 2.0}
LIKELY_CASES = 100  # of an array, among which the level of a test is divided
OTHERWISE = ("sent otherwise", "alone")
APPROXIMATE = ("free_deferred", "copying")  # schedules whose states the lens does not know


@dataclass(frozen=True)
class CaseBench:
    """Everything outside a case that decodes and judges it.

    ``open_decoder(point, max_rows=…, temperature=…, seed=…)`` opens the decoder under test. ``own(point)`` makes the
    reference decoder, for as many rows. ``points``: the operating point by the values of ``point`` and ``ceiling``.
    ``draw_texts(rng, lengths)``: texts of these lengths. ``window``: positions that histories reach. ``tolerance``: in
    logits and nats. ``special``: ids of openings, ends and padding.
    """

    open_decoder: Callable[..., AbstractContextManager[Decoder]]
    own: Callable[[OperatingPoint], Decoder]
    lens: Lens
    points: dict[tuple[str, str], OperatingPoint]
    draw_texts: Callable[[np.random.Generator, Sequence[int]], list[Ints]]
    vocabulary: int
    window: int
    tolerance: float
    special: tuple[int, ...] = ()

    def point_of(self, case: Case) -> OperatingPoint:
        return self.points[case["point"], case["ceiling"]]

    def make_judge(self, tally: Tally, decoder: Decoder, point: OperatingPoint) -> Judge:
        """A judge of ``decoder`` at ``point`` that counts in ``tally``."""
        capabilities = decoder.capabilities
        allowed = tally.tolerance_at_least_noise(self.tolerance, capabilities.logit_noise)
        return Judge(tally, self.lens, point, allowed, capabilities.counted)

    def draw_prompts(self, case: Case, rng: np.random.Generator, fed: int) -> list[Prompt]:
        """Prompts of a case, in random order, that leave room for ``fed`` tokens; the longest has the case's kind."""
        rows, kind = int(case["rows"]), case["prompt"]
        room = self.window - fed
        first = self._prompt_length(kind, case["place"], rng, room)
        lengths = [first] + [max(1, first - int(rng.integers(0, 4 if row % 2 else first))) for row in range(1, rows)]
        texts = self.draw_texts(rng, lengths)
        for text in texts:
            self.begin_with_unseen_tokens(text)
            self._put_special_ids(text, rng)
        if kind == "equal" and rows > 1:
            texts[1] = texts[0].copy()
        if kind == "prefix" and rows > 1:
            texts[1] = texts[0][: max(1, first - int(rng.integers(1, 4)))].copy()
        if kind == "prefix" and rows > 2:
            texts[2] = self.fork(texts[0], rng)
        return [Prompt(texts[row]) for row in rng.permutation(rows)]

    def draw_random_prompt(self, rng: np.random.Generator, length: int) -> Prompt:
        """A prompt of random tokens, of which no cache holds the first."""
        tokens = rng.integers(0, self.vocabulary, length)
        self.begin_with_unseen_tokens(tokens)
        return Prompt(tokens)

    def begin_with_unseen_tokens(self, tokens: Ints) -> None:
        """Replace the first ``UNSEEN`` of ``tokens`` int64 [n], all but the last, by some that no seed draws."""
        unseen = np.random.default_rng(SystemRandom().getrandbits(64))
        count = min(UNSEEN, len(tokens) - 1)
        tokens[:count] = unseen.integers(0, self.vocabulary, count)

    def _put_special_ids(self, text: Ints, rng: np.random.Generator) -> None:
        """End or begin some texts with ids that a decoder may take for padding, or for an opening that it adds."""
        ids, longest = (0, self.vocabulary - 1, *self.special), min(LONGEST_RUN, len(text))
        if rng.random() < SPECIAL:
            text[-int(rng.integers(1, longest + 1)) :] = ids[int(rng.integers(len(ids)))]
        if rng.random() < OPENING:
            text[0] = ids[int(rng.integers(len(ids)))]

    def open_offered(self, stack: ExitStack, kinds: Iterable[tuple[str, str]], max_rows: int) -> list[OpenedDecoder]:
        """Decoders at the points ``kinds`` (values of ``point`` and ``ceiling``) that exist and are not declined.

        Raises:
            Unsupported: the decoder declines all of them.
        """
        opened, refusals = list[OpenedDecoder](), list[Unsupported]()
        for point in (self.points[kind] for kind in kinds if kind in self.points):
            try:
                decoder = stack.enter_context(self.open_decoder(point, max_rows=max_rows))
            except Unsupported as refusal:
                refusals.append(refusal)
            else:
                opened.append(OpenedDecoder(decoder, point))
        if not opened:
            raise refusals[0]
        return opened

    def draw_most_rows(self, rows: int, rng: np.random.Generator) -> int:
        """The number of rows that a decoder of ``rows`` is opened for: as many, or a few more, which stay empty."""
        return max(2, rows + int(rng.integers(4)))

    def fork(self, tokens: Ints, rng: np.random.Generator) -> Ints:
        """A prompt as long as ``tokens`` that begins like it, and ends in random tokens."""
        forked = tokens.copy()
        kept = int(rng.integers(1, max(2, len(tokens))))
        forked[kept:] = rng.integers(0, self.vocabulary, len(tokens) - kept)
        return forked

    def _prompt_length(self, kind: str, place: str, rng: np.random.Generator, room: int) -> int:
        if place == "window's end":
            return max(1, room - (kind == "window − 1"))
        if place == "position 96":
            return min(room, POSITION + int(rng.integers(-2, 3)))
        length = {"one token": 1, "within a block": 7, "across a block": BLOCK + int(rng.integers(1, BLOCK))}
        near_blocks = (int(rng.integers(9, BLOCK)), BLOCK, BLOCK + 1, 2 * BLOCK)
        return min(room, length.get(kind, near_blocks[int(rng.integers(4))]))


def make_sent_prompts(case: Case, prompts: Sequence[Prompt]) -> list[Prompt]:
    """``prompts`` in arrays of their own, as the case's caller passes them: every second entry, if "strided"."""
    if case["prompt"] != "strided":
        return [Prompt(prompt.tokens.copy()) for prompt in prompts]
    apart = [np.stack([prompt.tokens, prompt.tokens[::-1]], axis=1).reshape(-1) for prompt in prompts]
    return [Prompt(each[::2]) for each in apart]


def divide_request(prompts: Sequence[Prompt], new: int, stop: frozenset[int]) -> list[GenerateArguments]:
    """Requests of one and of two of ``prompts`` in turn, with limits and stop sets that one may not take from another.

    Two equal prompts stay apart, so the first and second request always differ in both.
    """
    requests = list[GenerateArguments]()
    first = 0
    while first < len(prompts):
        number = len(requests)
        rows = list(prompts[first : first + 1 + number % 2 * (len(prompts) > 2)])
        requests.append((rows, max(1, new - number % 3), NO_STOP if number % 2 else stop))
        first += len(rows)
    return requests


def make_streamed_record(
    prompts: Sequence[Prompt], emitted: Sequence[Ints], stop: frozenset[int], point: OperatingPoint
) -> Record:
    """The record that a stream leaves out, at a ``point`` of fixed depth."""
    reasons: list[StopReason] = ["stop token" if stop & {*tokens[-1:].tolist()} else "length" for tokens in emitted]
    return make_fixed_depth_record([prompt.tokens for prompt in prompts], emitted, reasons, point.ceiling)


def take_first_rows(requests: Iterable[GenerateArguments], rows: int) -> list[GenerateArguments]:
    """The first ``rows`` rows of ``requests``, each in its place of its request."""
    taken = list[GenerateArguments]()
    for prompts, new, stop in requests:
        if rows > 0:
            taken.append((list(prompts[:rows]), new, stop))
            rows -= len(prompts)
    return taken


def draw_similar_ids(emitted: Sequence[int], others: Sequence[int]) -> list[int]:
    """One of the ``others`` for each of ``ID_BITS`` that agrees in its low bits with an ``emitted`` id.

    A decoder that stores the ids of a stop set in so few bits stops there.
    """
    low = {bits: {token % 2**bits for token in emitted} for bits in ID_BITS}
    found = (next((token for token in others if token % 2**bits in low[bits]), None) for bits in ID_BITS)
    return [token for token in found if token is not None]


def overwrite_arrays(case: Case, arrays: Iterable[Ints]) -> None:
    """Write zeros into ``arrays``, as a caller does that uses its buffers again, if the case says so."""
    for array in arrays if case["arrays"] == "overwritten" else ():
        if array.flags.writeable:
            array[...] = 0


@dataclass(frozen=True)
class OpenedDecoder:
    """A decoder at ``point``, under ``seed`` at ``temperature``."""

    decoder: Decoder
    point: OperatingPoint
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class RequestAnswer:
    """A request and its answer by ``by``, in step number ``step`` of a history.

    ``judges_draws``: no other answer draws its rows by the same random numbers, but for rows of the same number, of
    which one is judged. ``streamed``: the record is made of streamed tokens, and counts no work.
    """

    by: OpenedDecoder
    request: AnsweredRequest
    step: int
    judges_draws: bool = False
    streamed: bool = False


@dataclass(frozen=True)
class SameTokens:
    """New tokens ``found`` after ``prompt`` that must equal ``wanted``, up to a tie, or to rounding of a draw."""

    what: str
    by: OpenedDecoder
    prompt: Prompt
    found: list[int]
    wanted: list[int]


RowKey = tuple[bytes, tuple[int, ...]]  # bytes of a prompt, tokens emitted after it


@dataclass
class History:
    """What a case asked and got: ``steps`` in words, ``requests`` as a reader can send them again."""

    case: Case
    steps: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: list[RequestAnswer] = field(default_factory=list)
    same: list[SameTokens] = field(default_factory=list)
    trajectories: list[tuple[Judge, Trajectory]] = field(default_factory=list)
    pairs: list[tuple[Judge, Trajectory, Trajectory]] = field(default_factory=list)  # and the reference decoder's
    chances: dict[RowKey, float] = field(default_factory=dict)  # of rounding, by row
    again: dict[RowKey, float] = field(default_factory=dict)  # log of the chance that other numbers draw a row again
    # rows that two seeds drew alike, and whether these are all rows
    equal_draws: list[tuple[int, int, bool, list[RowKey]]] = field(default_factory=list)
    returned: list[tuple[str, Ints, Ints]] = field(default_factory=list)  # arrays as returned, and copies made at once

    def to_json(self) -> dict[str, Any]:
        """The history as JSON values: its case, steps and requests."""
        return {"case": dict(self.case), "steps": self.steps, "requests": self.requests}

    def add_request(
        self, by: OpenedDecoder, call: str, prompts: Sequence[Prompt], new: int, stop: frozenset[int], whose: str = ""
    ) -> None:
        """Write down a request that is about to be sent to ``by``, for a server as commands of a shell.

        ``whose``: words for a decoder that is not the case's.
        """
        lengths = ", ".join(str(len(prompt.tokens)) for prompt in prompts)
        ends = f", {len(stop)} stop ids" if stop else ""
        self.steps.append(f"{whose}{call} {new} new tokens after prompts of {lengths} tokens{ends}")
        tokens = [prompt.tokens.tolist() for prompt in prompts]
        request: dict[str, Any] = {"step": len(self.steps), "call": call, "prompts": tokens, "max_new": new}
        request["stop"] = sorted(stop)
        if (command := getattr(by.decoder, "curl_command", None)) is not None:
            request["curl"] = [command(each, row, new, stop, call == "stream") for row, each in enumerate(prompts)]
        self.requests.append(request)


class RequestCases:
    """Decodes cases of requests and judges them. Draws of all cases are judged together, by ``judge_draws``."""

    def __init__(self, bench: CaseBench, tally: Tally):
        self.bench, self.tally = bench, tally
        self._drawn: dict[float, list[SampledRow]] = {}
        self._parted: dict[float, list[str]] = {}
        self._chances: dict[float, list[float]] = {}

    # ------------------------------------------------------------ decoding

    def decode(self, history: History, seed: int) -> None:
        """Decode the case of ``history`` with numbers drawn by ``seed``.

        Raises:
            Unsupported: the decoder declines a part of it.
        """
        rng, case, bench = np.random.default_rng(seed), history.case, self.bench
        point, new, temperature = bench.point_of(case), int(case["new"]), TEMPERATURES[case["temperature"]]
        # some servers refuse a request whose prompt and new tokens together exceed the window
        prompts, own_seed = bench.draw_prompts(case, rng, new), int(rng.integers(1, FAR_SEED))
        most_rows = bench.draw_most_rows(len(prompts), rng)
        with ExitStack() as stack:

            def opened(by_seed: int) -> OpenedDecoder:
                history.steps.append(f"open {point.name}, temperature {temperature:g}, seed {by_seed}")
                sampled: dict[str, Any] = {"temperature": temperature} if temperature else {}
                made = bench.open_decoder(point, max_rows=most_rows, seed=by_seed, **sampled)
                return OpenedDecoder(stack.enter_context(made), point, temperature, by_seed)

            by = opened(0 if case["seed"] == "zero" else own_seed)
            with make_neighbours(bench, self.tally, history, by, prompts, rng) as act:
                stop, emitted, ended = self._choose_stops(history, by, prompts, new, rng)
                if case["prompt"] in ("equal", "prefix"):
                    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
                    self._ask(history, by, [self._earlier_prompt(case, longest, rng)], 1, NO_STOP)
                act()
                self.send(history, by, prompts, new, stop)
                if temperature and case["call"] == "generate":
                    self._compare_ended_rows(history, emitted)
                if temperature:
                    self._compare_seeds(history, opened, by)
                if stop:  # a remembered set ends this request, too
                    self._ask(history, by, [ended], new, NO_STOP)

    def _earlier_prompt(self, case: Case, prompt: Prompt, rng: np.random.Generator) -> Prompt:
        """The prompt of an earlier request: equal to ``prompt``, longer by a few tokens, or with another end."""
        if case["prompt"] == "prefix" and rng.integers(2):
            return Prompt(self.bench.fork(prompt.tokens, rng))
        longer = rng.integers(0, self.bench.vocabulary, 3)
        tokens = np.concatenate([prompt.tokens, longer])[: self.bench.window - 1]
        return prompt if case["prompt"] == "equal" else Prompt(tokens)

    def _choose_stops(
        self, history: History, by: OpenedDecoder, prompts: Sequence[Prompt], new: int, rng: np.random.Generator
    ) -> tuple[frozenset[int], list[list[int]], Prompt]:
        """The case's stop set, tokens of some rows without one, and the prompt that it is chosen for.

        Draws of ``generate`` are compared with those tokens: row 0 ends, and the first rows after it draw on.
        """
        kind = history.case["stops"]
        if kind == "none":
            return NO_STOP, [], prompts[0]
        if by.temperature:
            few = list(prompts[: ALIKE if history.case["call"] == "generate" else 1])
        else:
            few = [prompts[int(rng.integers(len(prompts)))]]
        emitted = [tokens.tolist() for tokens in self._ask(history, by, few, new, NO_STOP).emitted]
        everything = {token for tokens in emitted for token in tokens}
        row, prompt = emitted[0], few[0]
        ending = row[int(rng.integers(len(row)))]
        if kind == "in the prompt":
            idle = sorted({token for prompt in few for token in prompt.tokens.tolist()} - everything)
            return frozenset(idle[:2] or [ending]), emitted, prompt
        if kind == "21":
            others = [token for token in range(self.bench.vocabulary) if token not in everything]
            # ids below and above the one that ends a row: a set that keeps its smallest or largest ids loses it
            below, above = ([token for token in others if (token < ending) is side] for side in (True, False))
            ids = [ending, *draw_similar_ids(row[: row.index(ending)], others)]
            ids += [*(below if rng.integers(2) else above), *others]
            return frozenset(list(dict.fromkeys(ids))[:STOPS]), emitted, prompt
        return frozenset([row[0] if kind == "first" else ending]), emitted, prompt

    def _compare_ended_rows(self, history: History, emitted: Sequence[Sequence[int]]) -> None:
        """The first rows of the last request must draw the tokens ``emitted`` without a stop set, up to their ends."""
        answer = history.answers[-1]
        request = answer.request
        for row, (prompt, found, whole) in enumerate(
            zip(request.prompts, request.record.emitted, emitted, strict=False)
        ):
            end = next((at + 1 for at, token in enumerate(whole) if token in request.stop), len(whole))
            what = f"row {row}, with stop ids"
            history.same.append(SameTokens(what, answer.by, prompt, found.tolist(), list(whole[:end])))

    def _ask(
        self,
        history: History,
        by: OpenedDecoder,
        prompts: Sequence[Prompt],
        new: int,
        stop: frozenset[int],
        judges_draws: bool = False,
    ) -> Record:
        """Answer a request by ``generate``; it is judged with the history."""
        history.add_request(by, "generate", prompts, new, stop)
        sent = make_sent_prompts(history.case, prompts)
        returned = by.decoder.generate(sent, new, stop)
        record = copy.deepcopy(returned)
        overwrite_arrays(history.case, [*(prompt.tokens for prompt in sent), *returned.emitted])
        if history.case["arrays"] == "kept":
            number = len(history.requests)
            for row, arrays in enumerate(zip(returned.emitted, record.emitted, strict=False)):
                history.returned.append((f"the tokens emitted in row {row} of request {number}", *arrays))
        answer = AnsweredRequest(prompts, new, stop, record)
        history.answers.append(RequestAnswer(by, answer, len(history.steps), judges_draws))
        return record

    def offers_call(self, by: OpenedDecoder, call: str) -> bool:
        """Whether the decoder answers a small request that is sent in this way."""
        history = History({"call": call, "prompt": "within a block", "arrays": "kept"})
        try:
            self.send(history, by, [Prompt(np.zeros(2, dtype=np.int64))], 1, NO_STOP)
        except Unsupported:
            return False
        return True

    def send(
        self, history: History, by: OpenedDecoder, prompts: Sequence[Prompt], new: int, stop: frozenset[int]
    ) -> None:
        """Send the case's request in the way of its dimension ``call``; the answers are judged with the history.

        Raises:
            Unsupported: the decoder declines it.
            AuditRefutedError: another number of answers.
        """
        call = history.case["call"]
        if call == "generate":
            # row 0 alone is the first: other seeds and stop sets are compared with all rows of the last request
            overwritten = history.case["arrays"] == "overwritten"
            singles = [
                self._ask(history, by, prompts[:1], new, stop) for _ in range((len(prompts) > 1) + overwritten)
            ]  # twice, where a kept answer may have been overwritten
            record = self._ask(history, by, prompts, new, stop, judges_draws=True)
            for single in singles:
                tokens = [each.emitted[0].tolist() for each in (record, single)]
                history.same.append(SameTokens("row 0, beside others or later", by, prompts[0], *tokens))
            return
        method = {"stream": "token_arrivals", "at once": "generate_at_once"}[call]
        ask = getattr(by.decoder, method, None)
        if ask is None:
            raise Unsupported(f"the decoder has no {method}")
        if call == "at once" and len(prompts) == 1:
            prompts = [*prompts, *prompts]
        # a stream's rows draw as those of one request
        requests = [(list(prompts), new, stop)] if call == "stream" else divide_request(prompts, new, stop)
        # the lens judges all answers; draws are compared with those of whole answers, too, and exits with their depths
        depths_untold = call == "stream" and not by.point.has_fixed_depth
        draws_untold = by.temperature and history.case["seed"] not in SAME_SEED
        whole = requests if depths_untold else take_first_rows(requests, ALIKE if draws_untold else 0)
        separate = [self._ask(history, by, *request, judges_draws=call == "stream") for request in whole]
        history.add_request(by, call, prompts, new, stop)
        sent = [(make_sent_prompts(history.case, rows), limit, ends) for rows, limit, ends in requests]
        if call == "stream":
            found = [each.tokens for each in ask(*sent[0], True)]
            self.tally.live["streamed_tokens"] += sum(map(len, found))
            records = [make_streamed_record(prompts, found, stop, by.point)] if by.point.has_fixed_depth else []
        else:
            records = ask(sent, min(AT_ONCE, len(sent)))
            self.tally.require(len(records) == len(sent), f"{len(records)} answers to {len(sent)} requests (at once)")
            found = [tokens for record in records for tokens in record.emitted]
            self.tally.live["requests_at_once"] += len(records)
            self.tally.live["samples_at_once"] += sum(map(len, found)) if by.temperature else 0
        self.tally.require(len(found) == len(prompts), f"{len(found)} rows of answers to {len(prompts)} rows ({call})")
        for request, record in zip(requests, records, strict=False):  # a stream with exits has no record
            answer = AnsweredRequest(*request, copy.deepcopy(record))
            history.answers.append(RequestAnswer(by, answer, len(history.steps), True, call == "stream"))
        overwrite_arrays(history.case, (prompt.tokens for rows, *_ in sent for prompt in rows))
        wanted = [tokens.tolist() for record in separate for tokens in record.emitted]
        for row, (prompt, tokens, expected) in enumerate(zip(prompts, found, wanted, strict=False)):
            what = f"row {row}, {'streamed' if call == 'stream' else 'at once with others'}"
            history.same.append(SameTokens(what, by, prompt, tokens.tolist(), expected))

    def _compare_seeds(self, history: History, opened: Callable[[int], OpenedDecoder], by: OpenedDecoder) -> None:
        """Ask the last requests of ``by`` again of a decoder under the same seed, or one apart by ``FAR_SEED``.

        It must draw the same tokens, or others. Of many rows it is asked for the first.
        """
        kind, step = history.case["seed"], max(answer.step for answer in history.answers if answer.by is by)
        last = [answer.request for answer in history.answers if answer.by is by and answer.step == step]
        first = take_first_rows(((each.prompts, each.max_new, each.stop) for each in last), ALIKE)
        before = [tokens.tolist() for each in last for tokens in each.record.emitted]
        prompts = [prompt for rows, *_ in first for prompt in rows]

        def ask(seed: int) -> tuple[OpenedDecoder, list[list[int]]]:
            second = opened(seed)
            records = [self._ask(history, second, *each, judges_draws=seed != by.seed) for each in first]
            return second, [tokens.tolist() for record in records for tokens in record.emitted]

        if kind in ("apart", "between"):
            far = by.seed + (FAR_SEED if kind == "apart" else 1)
            rows = list(zip(prompts, before, ask(far)[1], strict=False))
            equal = [(prompt.tokens.tobytes(), tuple(one)) for prompt, one, found in rows if one == found]
            history.equal_draws.append((by.seed, far, len(equal) == len(rows), equal))
        if kind in SAME_SEED:
            second, drawn = ask(by.seed)
            for row, (prompt, one, found) in enumerate(zip(prompts, before, drawn, strict=False)):
                what = f"row {row}, of a second decoder under seed {by.seed}"
                history.same.append(SameTokens(what, second, prompt, found, one))

    # ------------------------------------------------------------ judging

    def judge(self, history: History) -> None:
        """Judge every answer of ``history``.

        Raises:
            AuditRefutedError: the first complaint.
        """
        for judge, trajectory in history.trajectories:
            judge.require_trajectory_matches_lens(trajectory)
        for what, returned, copied in history.returned:
            same = np.array_equal(returned, copied)
            self.tally.require(same, f"{what} have changed since they were returned: their memory is used again")
        greedy: dict[tuple[int, bool], tuple[Judge, list[RequestAnswer]]] = {}
        for answer in history.answers:
            judge = self.bench.make_judge(self.tally, answer.by.decoder, answer.by.point)
            judge = replace(judge, counted=judge.counted and not answer.streamed)
            if answer.by.temperature or answer.by.point.schedule in APPROXIMATE:
                with name_step(answer.step):
                    self._judge_rows(history, judge, answer)
            else:
                greedy.setdefault((id(answer.by), answer.streamed), (judge, []))[1].append(answer)
        for judge, answers in greedy.values():
            steps = [answer.step for answer in answers]
            require_answers_match_lens(judge, [answer.request for answer in answers], steps=steps)
        self._judge_same_tokens(history)
        for seed, other, all_rows, rows in history.equal_draws:
            logs = [history.again.get(row, 0.0) for row in rows]
            least = min([*logs, sum(logs) if all_rows else 0.0], default=0.0)
            drew = f"seeds {seed} and {other} drew the same tokens in {len(rows)} rows"
            rarely = f"{drew}, which chance does once in {math.exp(min(700.0, -least)):.0e} times"
            self.tally.require(least > math.log(CHANCE / LIKELY_CASES), rarely)

    def _judge_rows(self, history: History, judge: Judge, answer: RequestAnswer) -> None:
        """Judge the rows of an answer with draws, or with states that the lens does not know."""
        request, record, point = answer.request, answer.request.record, answer.by.point
        rows = extract_trajectories(self.tally, record, request.prompts, request.max_new, request.stop, point)
        self.tally.count_new_tokens(record.emitted, drawn=answer.by.temperature > 0)
        if point.schedule in APPROXIMATE:
            shown = self._follow_reference_decoder(judge, answer, rows)
        else:
            ahead = judge.with_lens_prefetch(rows)
            shown = [emitted_logits(ahead.require_trajectory_matches_lens(row), row) for row in rows]
        if answer.by.temperature:
            self._judge_draws_of(history, judge, answer, shown)

    def _judge_draws_of(self, history: History, judge: Judge, answer: RequestAnswer, shown: Sequence[Floats]) -> None:
        """Require that an answer is not greedy; keep its draws from logits ``shown`` for the tests over all cases."""
        temperature, noise = answer.by.temperature, max_logit_error(judge.point, judge.tolerance)
        prompts, emitted = answer.request.prompts, answer.request.record.emitted
        drawn = [
            SampledRow(answer.by.seed, row, emitted[row][: len(logits)], logits, prompts[row].tokens)
            for row, logits in enumerate(shown)
            if len(logits)
        ]
        require_not_greedy(self.tally, drawn, temperature, noise)
        for row in drawn:
            tokens = emitted[row.row]
            unknown = rounding_chance(noise / temperature, len(tokens) - len(row.logits))  # after a tie of a depth
            chance = min(1.0, rounding_chance_of_draws(row.logits, temperature, noise) + unknown)
            key = (row.prompt.tobytes(), tuple(tokens.tolist()))
            history.chances[key] = chance
            history.again[key] = log_chance_of_drawing_again(row, temperature, noise)
            if answer.judges_draws:
                self._keep_drawn(temperature, row)

    def _keep_drawn(self, temperature: float, row: SampledRow) -> None:
        kept = self._drawn.setdefault(temperature, [])
        if any((each.seed, each.row) == (row.seed, row.row) for each in kept):  # the same numbers, of seed 0
            return
        if sum(each.logits.size for each in kept) + row.logits.size <= KEPT_LOGITS // len(TEMPERATURES):
            kept.append(row)

    def _follow_reference_decoder(
        self, judge: Judge, answer: RequestAnswer, rows: Sequence[Trajectory]
    ) -> list[Floats]:
        """Feed the emitted tokens to the reference decoder; compare depths and greedy tokens.

        A row is compared up to the first tie of a depth, after which its states differ. Returns the logits [m, V]
        before each compared token of each row.
        """
        point, emitted = answer.by.point, answer.request.record.emitted
        shown: list[list[Floats]] = [[] for _ in rows]
        signals: list[list[Floats]] = [[] for _ in rows]
        left = list(range(len(rows)))  # rows of the session, in order
        session, step = self.bench.own(point).start(answer.request.prompts)
        with closing(session):
            for at in range(max(map(len, emitted))):
                ended = [index for index, row in enumerate(left) if at >= len(emitted[row]) or len(shown[row]) < at]
                if at and len(ended) == len(left):
                    break
                if ended:
                    session.drop(np.array(ended))
                    left = [row for index, row in enumerate(left) if index not in ended]
                if at:
                    step = session.feed(np.array([[emitted[row][at - 1]] for row in left]))
                for index, row in enumerate(left):
                    token = None if answer.by.temperature else int(emitted[row][at])
                    signals[row].append(step.signal[index, -1])
                    reference, depth = (int(step.depth[index, -1]), step.logits[index, -1]), int(rows[row].depth[at])
                    where, seen = rows[row].describe_position(at), np.array(signals[row])
                    position = rows[row].first + at
                    if require_reference_step(judge, where, seen, reference, depth, emitted=token, position=position):
                        shown[row].append(step.logits[index, -1])
        return [np.array(logits) for logits in shown]

    def _judge_same_tokens(self, history: History) -> None:
        """Require equal tokens of every pair: greedily up to a tie, of draws as often as rounding allows."""
        parted, chances, temperature = list[str](), list[float](), 0.0
        for same in history.same:
            differ, temperature = same.found != same.wanted, same.by.temperature
            if not temperature:
                if differ:
                    self._require_tied(same)
                continue
            rows = [(same.prompt.tokens.tobytes(), tuple(tokens)) for tokens in (same.wanted, same.found)]
            chances.append(next((history.chances[row] for row in rows if row in history.chances), 1.0))
            shared = first_difference(same.found, same.wanted)
            # a row that only ends elsewhere was not moved by rounding
            ends = differ and shared == min(len(same.found), len(same.wanted))
            lengths = f"{same.what}: {len(same.found)} tokens, but {len(same.wanted)} alone"
            self.tally.require(not ends, f"{lengths}; those of both are the same")
            if differ:
                parted.append(f"{same.what}, from new token {first_difference(same.found, same.wanted)} on")
        if chances:
            self._parted.setdefault(temperature, []).extend(parted)
            self._chances.setdefault(temperature, []).extend(chances)
            level = LEVEL / LIKELY_CASES
            require_rounding_explains_draw_changes(self.tally, parted, chances, temperature, *OTHERWISE, level)

    def _require_tied(self, same: SameTokens) -> None:
        point = same.by.point
        own = partial(is_next_token_tied, self.bench.own(point), point) if point.schedule in APPROXIMATE else None
        noise = same.by.decoder.capabilities.logit_noise
        finding = check_same_tokens(
            self.bench.lens, self.bench.tolerance, [same.prompt], [same.found], [same.wanted], point,
            declared=noise, most_ties=1.0, tied_when_decoded=own,
        )  # fmt: skip
        with prefix_raised_complaints(f"{same.what}: other tokens than alone: "):
            finding.require()
        self.tally.ties += 1

    def judge_draws(self, rng: np.random.Generator, noise: float) -> None:
        """Judge the draws of all cases, by temperature. ``noise``: the largest of a logit.

        Raises:
            AuditRefutedError: the first complaint.
        """
        for temperature, rows in sorted(self._drawn.items()):
            require_rows_drawn_at_temperature(self.tally, rows, temperature, rng, noise)
        require_temperatures(self._drawn, noise)
        for temperature, chances in sorted(self._chances.items()):
            parted = self._parted[temperature]
            require_rounding_explains_draw_changes(self.tally, parted, chances, temperature, *OTHERWISE)


# ---------------------------------------------------------------- neighbours


@contextmanager
def make_neighbours(
    bench: CaseBench,
    tally: Tally,
    history: History,
    by: OpenedDecoder,
    prompts: Sequence[Prompt],
    rng: np.random.Generator,
) -> Iterator[Callable[[], None]]:
    """Make the neighbours of a case on ``prompts`` before the block, and end them after it.

    The block gets a function that lets them act in between. Their own answers are judged, too; another decoder also
    answers a prompt of the case, before or after it: it must not share what it keeps of it.
    """
    kind, decoder = history.case["neighbours"], by.decoder
    shared = max(prompts, key=lambda prompt: len(prompt.tokens)).tokens[: bench.window - BESIDE_NEW]

    def draw_prompt(length: int) -> Prompt:
        return Prompt(rng.integers(0, bench.vocabulary, length))

    def request(asked: list[Prompt], of: OpenedDecoder, whose: str) -> None:
        history.add_request(of, "generate", asked, BESIDE_NEW, NO_STOP, whose)
        record = copy.deepcopy(of.decoder.generate(asked, BESIDE_NEW, NO_STOP))
        answer = AnsweredRequest(asked, BESIDE_NEW, NO_STOP, record)
        history.answers.append(RequestAnswer(of, answer, len(history.steps)))

    def ask(other: OpenedDecoder) -> None:
        is_first = all(answer.by is by for answer in history.answers)
        asked = [draw_prompt(6), draw_prompt(4) if is_first and rng.integers(2) else Prompt(shared.copy())]
        request(asked, other, f"another decoder, at {other.point.name}: ")

    def open_other(stack: ExitStack) -> OpenedDecoder:
        """A decoder at full depth, or at another point with the same probes."""
        kind = "full" if not by.point.probes or rng.integers(2) else "watching"
        point = bench.points[kind, "L"]
        return OpenedDecoder(stack.enter_context(bench.open_decoder(point, max_rows=2)), point)

    def close_other() -> None:
        with ExitStack() as opened:
            ask(open_other(opened))

    def raise_errors() -> None:
        """Requests that raise: at a token that does not exist, and by their own stop set after the first step."""
        sent = [decoder.generate]
        if history.case.get("call") == "stream":
            sent.append(partial(decoder.token_arrivals, stream=True))  # type: ignore[attr-defined]
        asked, stop = [draw_prompt(5), draw_prompt(3)], AbortingStopTokens([0])
        stop.most = len(asked)
        # an answer to a token that does not exist is not judged, nor the error's type
        for send in sent:
            for rows, ends in (([Prompt(np.array([bench.vocabulary + 3]))], NO_STOP), (asked, stop)):
                with suppress(Exception):
                    send(rows, BESIDE_NEW, ends)

    def feed_all() -> None:
        for session in beside:
            session.feed(rng.integers(0, bench.vocabulary, (len(session.rows), 1)))
            if len(session.rows) > 1:
                session.drop(0)
        if kind == "session":  # another one ends before later ones, and a request is answered
            passing.close()
            passing.callback(decoder.start([draw_prompt(3)])[0].close)
            request([draw_prompt(5)], by, "")

    beside: list[CheckedSession] = []
    passing = ExitStack()
    act: Callable[[], None] = feed_all if kind in ("session", "65th session") else lambda: None
    if kind != "none":
        history.steps.append(NEIGHBOURS[kind])
    with ExitStack() as stack, passing:
        if kind == "257th request":
            # all decoders of a server share what it counts
            for _ in range(EARLIER_REQUESTS - getattr(decoder, "answered_by_server", 0)):
                decoder.generate([draw_prompt(1)], 1, NO_STOP)
        elif kind in ("session", "65th session"):
            judge = bench.make_judge(tally, decoder, by.point)
            rows, last = (1, EARLIER_SESSIONS - 1) if kind == "65th session" else (len(prompts), 0)
            for number in range(last + 1):
                if number in (0, last):  # those between stay as they are
                    names = [f"other session {number}, row {row}" for row in range(rows)]
                    opened = CheckedSession(judge, decoder, [draw_prompt(6) for _ in range(rows)], names)
                    beside.append(stack.enter_context(opened))
                else:
                    stack.callback(decoder.start([draw_prompt(1)])[0].close)
        elif kind == "raised":
            act = raise_errors
        elif kind == "closed":
            act = close_other
        elif kind == "decoder":
            act = partial(ask, open_other(stack))
        act()
        yield act
        if kind != "raised":
            act()
        if by.point.schedule not in APPROXIMATE:
            history.trajectories += [(judge, row) for session in beside for row in session.build_trajectories()]
