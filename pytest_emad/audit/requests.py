"""Check requests as users send them: special tokens, requests at once, streamed answers. ``request_cases`` has more.

Each check sends requests that a decoder may confuse, and compares every row of every answer with the lens: depths,
signals and tokens, its end, and the work. No depth is forced. One pass of the lens serves rows with the same tokens.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.protocol import Decoder, GenerateArguments, Prompt, TokenArrivals, Unsupported
from emad_ref.record import Ints, Record
from pytest_emad.audit.decoding_checks import (
    NO_STOP,
    count_answer_lengths_and_stops,
    extract_trajectories,
    require_record_work,
)
from pytest_emad.audit.finding import MIN_DISCRIMINATING, AuditRefutedError, Finding, prefix_raised_complaints
from pytest_emad.audit.reference_logits import ProbeReadoutWork
from pytest_emad.audit.sampling import (
    SampledAnswer,
    require_rounding_explains_draw_changes,
    require_unaffected_samples,
    rounding_chance,
)
from pytest_emad.audit.spot_checks import AnsweredRequest
from pytest_emad.audit.token_comparison import check_same_tokens, first_difference
from pytest_emad.audit.tolerances import max_logit_error
from pytest_emad.audit.trajectory import DecoderUnderTest, Judge, Trajectory

AT_ONCE = (2, 8)  # requests at once
SENT = 2  # times that each request is sent with others
BESIDE_S, BESIDE_FACTOR = 60.0, 10.0  # how much longer greedy requests may take than simultaneous sampled ones
COOLER = 2.0  # factor between temperatures in one batch
OPEN_TOKENS = 20 * MIN_DISCRIMINATING  # least number of sampled tokens that are not certain
ABORTED_NEW, ABORTED_AFTER = 64, 2  # new tokens of an aborted stream, and those that arrive before
REPLACEMENT = "\ufffd"  # replacement of an incomplete character
SHOWN = 20  # most characters of a text in a complaint


def answer_request(
    decoder: Decoder, prompts: Sequence[Prompt], max_new: int, stop: Iterable[int] = ()
) -> AnsweredRequest:
    """Answer a request by ``generate``, and return both."""
    stops = frozenset(int(token) for token in stop)
    return AnsweredRequest(prompts, max_new, stops, decoder.generate(prompts, max_new, stops))


def require_answers_match_lens(
    judge: Judge,
    answers: Sequence[AnsweredRequest],
    session_rows: Sequence[Trajectory] = (),
    *,
    where: Sequence[str] = (),
) -> None:
    """Require right rows of ``answers`` and of sessions (``session_rows``), with one lens pass per history.

    ``where``: for each answer, the words before a complaint about it.

    Raises:
        AuditRefutedError: the first complaint.
    """
    assert judge.lens is not None, "rows are held against it"
    rows: list[tuple[Trajectory, Ints | None, int]] = []  # trajectory, its emitted tokens, and the index of its answer
    read = []
    for index, answer in enumerate(answers):
        request = answer.record, answer.prompts, answer.max_new, answer.stop
        with prefix_raised_complaints(where[index] if where else ""):
            trajectories = extract_trajectories(judge.tally, *request, judge.point)
        read.append(trajectories)
        count_answer_lengths_and_stops(judge.tally, answer.record, answer.prompts)
        rows += [(row, emitted, index) for row, emitted in zip(trajectories, answer.record.emitted, strict=True)]
    readouts: list[dict[str, ProbeReadoutWork]] = [{} for _ in answers]
    rows += [(trajectory, None, -1) for trajectory in session_rows]
    rows.sort(key=lambda row: -len(row[0].tokens))
    longest: dict[bytes, Trajectory] = {}  # longest row of each prompt, of which shorter ones are mostly prefixes
    for trajectory, _, _ in rows:
        longest.setdefault(_prompt_of(trajectory), trajectory)
    place = {prompt: at for at, prompt in enumerate(longest)}
    rows.sort(key=lambda row: place[_prompt_of(row[0])])
    judge = judge.with_lens_prefetch(longest.values())
    for trajectory, emitted, index in rows:
        with prefix_raised_complaints(where[index] if where and index >= 0 else ""):
            reference = judge.require_trajectory_matches_lens(trajectory)
            if emitted is not None:
                judge.require_tokens_are_argmax(trajectory, emitted, reference)
        if emitted is not None:
            readouts[index][trajectory.name] = reference.readouts
    if judge.counted:
        for answer, trajectories, of_rows in zip(answers, read, readouts, strict=True):
            require_record_work(
                judge, answer.record, trajectories, [of_rows[trajectory.name] for trajectory in trajectories]
            )


def _prompt_of(trajectory: Trajectory) -> bytes:
    return trajectory.tokens[: trajectory.first + 1].tobytes()


# ---------------------------------------------------------------- prompts with special tokens


def check_special_tokens(
    under_test: DecoderUnderTest, text: Ints, ids: Sequence[int], max_new: int, needed: int = MIN_DISCRIMINATING
) -> Finding:
    """Check prompts that begin or end with one or several of ``ids``, or hold one: alone, and in ragged requests.

    A decoder that pads rows may mask a prompt's own tokens of the padding's id; one that adds or strips an opening
    token may take the prompt's for its own. Discriminating are prompts whose answers differ from the answer to
    ``text`` int64 [n], for which a decoder that drops the token mistakes them.
    """
    judge = Judge.for_check("special tokens", under_test, needed, judges_work=True)
    with judge.tally:
        plain, answers = answer_request(under_test.decoder, [Prompt(text)], max_new), list[AnsweredRequest]()
        for id in ids:
            one, three = np.full(1, id), np.full(3, id)
            parts = [(text, one), (text, three), (one, text), (three, text), (text[:2], one, text[2:])]
            prompts = [Prompt(text), *(Prompt(np.concatenate(each)) for each in parts)]
            answers += [
                answer_request(under_test.decoder, rows, max_new) for rows in (prompts, *([p] for p in prompts))
            ]
            wanted = plain.record.emitted[0].tolist()
            judge.tally.discriminating += sum(
                row.tolist() != wanted for row in answers[-len(prompts) - 1].record.emitted
            )
        require_answers_match_lens(judge, [plain, *answers])
    return judge.tally.to_finding()


# ---------------------------------------------------------------- requests at once, and streamed ones


def check_simultaneous_requests(
    under_test: DecoderUnderTest,
    prompts: Sequence[Prompt],
    max_new: int,
    rng: np.random.Generator,
    at_once: Sequence[int] = AT_ONCE,
) -> Finding:
    """Check that a request sent at the same time as others, from its own thread, gets the same tokens as alone.

    The requests differ in length, ``max_new`` and stop set. Alone they are compared with the lens. Then each is sent
    twice in random order, for each number of ``at_once``; the two longest follow requests that share their first half.
    A difference from the answer alone must be a tie. Discriminating are requests with other tokens than the next.

    Raises:
        Unsupported: the decoder takes one request at a time.
        BadArgument: ``max_new`` below 3, or fewer than two prompts.
    """
    decoder = under_test.decoder
    if max_new < 3 or len(prompts) < 2:
        raise BadArgument("max_new, prompts", (max_new, len(prompts)), "at least 3 new tokens of 2 prompts")
    ask = getattr(decoder, "generate_at_once", None)
    if ask is None:
        raise Unsupported("the decoder takes one request at a time")
    judge = Judge.for_check("requests at once", under_test)
    with judge.tally:
        requests = _various_requests(decoder, prompts, max_new)
        alone = [answer_request(decoder, *request) for request in requests]
        require_answers_match_lens(judge, alone)
        for threads in at_once:
            chosen = [at for _ in range(SENT) for at in _sending_order(len(requests), rng)]
            with _refuted_by_errors(f"{threads} requests at once"):
                records = ask([requests[at] for at in chosen], threads)
            judge.tally.require(
                len(records) == len(chosen), f"{len(records)} answers to {len(chosen)} requests, {threads} at once"
            )
            for at, record in zip(chosen, records, strict=True):
                _judge_beside_others(judge, alone[at], record, f"{threads} requests at once, request {at}")
        emitted = [answer.record.emitted[0].tolist() for answer in alone]
        judge.tally.discriminating += sum(one != other for one, other in pairwise(emitted))
    return judge.tally.to_finding()


def check_simultaneous_samples(
    open_sampled: Callable[[int, float], AbstractContextManager[Decoder]],
    seeds: Sequence[int],
    greedy: DecoderUnderTest,
    prompts: Sequence[Prompt],
    max_new: int,
    temperature: float,
    rng: np.random.Generator,
    *,
    needed: int = OPEN_TOKENS,
) -> Finding:
    """Check that simultaneous sampled requests draw the same tokens as alone, from the stated distribution.

    ``open_sampled``: a decoder under a seed, at a temperature > 0. Request i holds all ``prompts``, the i-th first.
    Under the first of ``seeds`` each is answered alone, then together with the others for each number of ``AT_ONCE``;
    under other seeds only together. Meanwhile ``greedy`` answers the same requests, and must emit the same tokens as
    alone. So must, under the first seed, a decoder at ``temperature`` / ``COOLER``, whose rows share batches with
    hotter ones.

    Raises:
        Unsupported: the decoder takes one request at a time, or none at a temperature.
    """
    judge = Judge.for_check("sampled at once", greedy, needed)
    turned = [[*prompts[first:], *prompts[:first]] for first in range(len(prompts))]
    order = [*range(len(turned))] * SENT
    requests: list[GenerateArguments] = [(turned[at], max_new, NO_STOP) for at in order]
    alone: dict[float, list[SampledAnswer]] = {temperature: [], temperature / COOLER: []}
    beside: dict[float, list[SampledAnswer]] = {each: [] for each in alone}

    def sampled(seed: int, records: Iterable[Record], numbers: Sequence[int]) -> list[SampledAnswer]:
        return [SampledAnswer(at, seed, turned[at], record) for at, record in zip(numbers, records, strict=True)]

    with judge.tally:
        certain = [answer_request(greedy.decoder, rows, max_new) for rows in turned]
        require_answers_match_lens(judge, certain)
        for seed in seeds:
            first = seed == seeds[0]
            with ExitStack() as stack:
                opened = {
                    each: stack.enter_context(open_sampled(seed, each)) for each in (alone if first else [temperature])
                }
                if first:
                    for each, decoder in opened.items():
                        records = [decoder.generate(rows, max_new, NO_STOP) for rows in turned]
                        alone[each] += sampled(seed, records, range(len(turned)))
                hot, *cooler = opened.values()
                for threads in AT_ONCE if first else AT_ONCE[-1:]:
                    with (
                        _refuted_by_errors(f"{threads} sampled requests at once"),
                        _answered_beside([greedy.decoder, *cooler], requests) as (greedy_records, *cooler_records),
                    ):
                        records = list(hot.generate_at_once(requests, threads))  # type: ignore[attr-defined]
                    answered = [len(each) for each in (records, greedy_records, *cooler_records)]
                    judge.tally.require(
                        {*answered} == {len(requests)}, f"{answered} answers to {len(requests)} requests each"
                    )
                    for at, record in zip(order, greedy_records, strict=True):
                        name = f"greedy request {at} beside {threads} sampled ones"
                        _judge_beside_others(judge, certain[at], record, name)
                    for each, found in zip(opened, (records, *cooler_records), strict=True):
                        beside[each] += sampled(seed, found, order)
        for each in alone:
            require_unaffected_samples(judge, alone[each], beside[each], max_new, each, rng)
    return judge.tally.to_finding()


@contextmanager
def _answered_beside(
    decoders: Sequence[Decoder], requests: Sequence[GenerateArguments]
) -> Iterator[list[list[Record]]]:
    """Inside the block, a thread sends ``requests`` to each of ``decoders``, two at once; then the lists hold answers.

    Raises AuditRefutedError for an error, or far more time than the block.
    """
    answers, errors = [list[Record]() for _ in decoders], list[Exception]()

    def work(decoder: Decoder, records: list[Record]) -> None:
        try:
            records.extend(decoder.generate_at_once(requests, AT_ONCE[0]))  # type: ignore[attr-defined]
        except Exception as error:  # raised below, in the caller's thread
            errors.append(error)

    pairs, began = zip(decoders, answers, strict=True), time.monotonic()
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    yield answers
    seconds = BESIDE_S + BESIDE_FACTOR * (time.monotonic() - began)
    for thread in threads:
        thread.join(max(0.0, seconds - (time.monotonic() - began)))
    if any(thread.is_alive() for thread in threads):
        raise AuditRefutedError(f"requests beside sampled ones: no answer within {seconds:.0f} s")
    if errors:
        raise errors[0]


def _various_requests(decoder: Decoder, prompts: Sequence[Prompt], max_new: int) -> list[GenerateArguments]:
    """A request for each prompt, the longest first; one with the same first half precedes each of the first two."""
    longest = sorted(prompts, key=lambda prompt: -len(prompt.tokens))
    rows = []
    for prompt, other in zip(longest[:2], longest[1::-1], strict=True):
        half, length = prompt.tokens[: len(prompt.tokens) // 2], len(prompt.tokens)
        rows += [Prompt(np.resize(np.concatenate([half, other.tokens[::-1]]), length)), prompt]
    rows += longest[2:]
    requests: list[GenerateArguments] = []
    for at, prompt in enumerate(rows):
        new, stop = max_new - at % 3, frozenset[int]()
        if at % 3 == 1:
            emitted = decoder.generate([prompt], new, stop).emitted[0]
            stop = frozenset({int(emitted[len(emitted) // 2])})
        requests.append(([prompt], new, stop))
    return requests


def _sending_order(count: int, rng: np.random.Generator) -> list[int]:
    """``range(count)`` shuffled, in which 0 and 1, and 2 and 3, stay neighbours."""
    units = [[0, 1], [2, 3], *([at] for at in range(4, count))]
    return [at for unit in rng.permutation(len(units)) for at in units[unit]]


@contextmanager
def _refuted_by_errors(name: str) -> Iterator[None]:
    """Turn errors of the decoder, time limits included, into complaints: it answered these requests alone."""
    try:
        yield
    except (Unsupported, AuditRefutedError):
        raise
    except Exception as error:
        raise AuditRefutedError(f"{name}: {type(error).__name__}: {error}") from error


def _judge_beside_others(judge: Judge, alone: AnsweredRequest, record: Record, name: str) -> None:
    """Compare an answer given with simultaneous requests to the one given alone; a difference must be a tie."""
    beside = replace(alone, record=record)
    with prefix_raised_complaints(f"{name}: "):
        extract_trajectories(judge.tally, record, beside.prompts, beside.max_new, beside.stop, judge.point)
    same = [one.tolist() for one in record.emitted] == [one.tolist() for one in alone.record.emitted]
    if same:
        count_answer_lengths_and_stops(judge.tally, record, beside.prompts)
    else:
        with prefix_raised_complaints(f"{name}: other tokens than alone; "):
            require_answers_match_lens(judge, [beside])  # passes if both are the argmax up to the tolerance
    judge.tally.live["requests_at_once"] += 1


def check_and_time_streams(
    under_test: DecoderUnderTest, prompts: Sequence[Prompt], max_new: int, at_once: Sequence[int] = (1, *AT_ONCE)
) -> tuple[Finding, dict[int, list[TokenArrivals]]]:
    """Check that streamed tokens and text equal whole answers, with each of ``at_once`` simultaneous requests.

    Whole answers are compared with the lens, also those that follow an aborted stream. A streamed token that differs
    must be a tie, and no stream may be shorter or longer. Text is compared without incomplete characters at its end,
    which a stream need not send. Discriminating are answers that differ from the next.

    Also returns the answers by the number of requests at once; 0: unstreamed.

    Raises:
        Unsupported: the decoder streams nothing: it says so, or no streamed answer arrived in parts. A server that lags
            may put several tokens into a message, so a single answer decides nothing.
    """
    decoder, rows = under_test.decoder, range(len(prompts))
    ask = getattr(decoder, "token_arrivals", None)
    if ask is None:
        raise Unsupported("the decoder streams nothing")
    judge, arrivals = Judge.for_check("streams", under_test), dict[int, list[TokenArrivals]]()
    with judge.tally:
        alone = [answer_request(decoder, [prompt], max_new) for prompt in prompts]
        emitted = [answer.record.emitted[0] for answer in alone]
        middle = int(emitted[0][len(emitted[0]) // 2])
        alone.append(answer_request(decoder, prompts[:1], max_new, [middle]))
        require_answers_match_lens(judge, alone)
        whole = [each for row in rows for each in ask([prompts[row]], max_new, NO_STOP, False)]
        arrivals[0] = whole
        for row in rows:
            _judge_arrivals(judge, prompts[row], whole[row], emitted[row], f"row {row}, unstreamed")
        for count in at_once:
            arrivals[count] = []
            for first in [*range(0, len(prompts), count)] * SENT:
                chosen = [*rows, *rows][first : first + count]
                with _refuted_by_errors(f"rows {chosen}, {count} streams at once"):
                    streamed = ask([prompts[row] for row in chosen], max_new, NO_STOP, True)
                judge.tally.require(len(streamed) == len(chosen), f"{len(streamed)} streams for {len(chosen)} prompts")
                for row, each in zip(chosen, streamed, strict=True):
                    name = f"row {row}, streamed beside {count - 1}"
                    _judge_arrivals(judge, prompts[row], each, emitted[row], name, whole[row].text)
                    judge.tally.live["streamed_tokens"] += len(each.tokens)
                arrivals[count] += streamed
        if not any(each.came_in_parts for count in at_once for each in arrivals[count]):
            raise Unsupported("all tokens of each streamed answer arrive at once")
        _judge_after_abort(judge, decoder, prompts, max_new, emitted)
        (ended,) = ask(prompts[:1], max_new, frozenset({middle}), True)
        expected = alone[-1].record.emitted[0]
        _judge_arrivals(judge, prompts[0], ended, expected, "row 0, streamed to a stop token", ends=True)
        judge.tally.discriminating += sum(one.tolist() != other.tolist() for one, other in pairwise(emitted))
    return judge.tally.to_finding(), arrivals


def check_sampled_streams(
    open_sampled: Callable[[int], AbstractContextManager[Decoder]],
    seeds: Sequence[int],
    greedy: DecoderUnderTest,
    prompts: Sequence[Prompt],
    max_new: int,
    temperature: float,
) -> Finding:
    """Check that a sampled stream draws the same tokens as the whole answer under the same seed.

    ``open_sampled``: as in ``check_simultaneous_samples``. Each prompt is its request's first row, so that both draw by
    one seed. Discriminating are answers that differ from those of the seed before.

    Raises:
        Unsupported: the decoder streams nothing, or nothing at a temperature.
    """
    judge = Judge.for_check("sampled streams", greedy)
    parted, drawn, rows = list[str](), list[list[int]](), len(seeds) * len(prompts)
    with judge.tally:
        for seed in seeds:
            with open_sampled(seed) as decoder:
                for row, prompt in enumerate(prompts):
                    whole = decoder.generate([prompt], max_new, NO_STOP).emitted[0].tolist()
                    with _refuted_by_errors(f"row {row}, streamed at temperature {temperature:.2f}"):
                        (found,) = decoder.token_arrivals([prompt], max_new, NO_STOP, True)  # type: ignore[attr-defined]
                    streamed = found.tokens.tolist()
                    if streamed != whole:
                        at = first_difference(streamed, whole)
                        parted.append(f"row {row} under seed {seed}, from new token {at} on")
                    drawn.append(whole)
                    judge.tally.live["streamed_tokens"] += len(streamed)
        of_next_seed = drawn[len(prompts) :]
        judge.tally.discriminating += sum(one != other for one, other in zip(drawn, of_next_seed, strict=False))
        judge.tally.n += rows * max_new
        noise = max_logit_error(judge.point, judge.tolerance)
        chances = [rounding_chance(noise / temperature, max_new)] * rows
        require_rounding_explains_draw_changes(
            judge.tally, parted, chances, temperature, "streamed", "in whole answers"
        )
    return judge.tally.to_finding()


def _judge_after_abort(
    judge: Judge, decoder: Decoder, prompts: Sequence[Prompt], max_new: int, emitted: Sequence[Ints]
) -> None:
    """Abort a stream, then require whole and streamed answers as before. Each row takes the place of an aborted one,
    and again follows an aborted stream of the same request, whose beginning a decoder may have kept.

    Only for decoders that can close a stream (``abort_stream``). No stream requests more tokens than the window holds.
    """
    abort, ask = getattr(decoder, "abort_stream", None), decoder.token_arrivals  # type: ignore[attr-defined]
    if abort is None:
        judge.tally.notes.append("no stream was aborted: the decoder closes none")
        return
    window = judge.tally.window or sys.maxsize  # 0: unknown
    for row, (before, prompt) in enumerate(zip([prompts[-1], *prompts], prompts, strict=False)):
        with _refuted_by_errors(f"row {row}, after an aborted stream"):
            abort(before, min(max(ABORTED_NEW, max_new), window - len(before.tokens)), ABORTED_AFTER)
            for streamed in (False, True):
                (found,) = ask([prompt], max_new, NO_STOP, streamed)
                _judge_arrivals(judge, prompt, found, emitted[row], f"row {row}, after an aborted stream")
            abort(prompt, max_new, ABORTED_AFTER)
            (found,) = ask([prompt], max_new, NO_STOP, bool(row % 2))
            _judge_arrivals(judge, prompt, found, emitted[row], f"row {row}, after its own stream was aborted")
        judge.tally.live["aborted_streams"] += 1


def _judge_arrivals(
    judge: Judge,
    prompt: Prompt,
    found: TokenArrivals,
    expected: Ints,
    name: str,
    text: str | None = None,
    *,
    ends: bool = False,
) -> None:
    """Require the ``expected`` tokens, ``text`` unless that is None, and times that only rise.

    ``ends``: a stop token may end the row, so after a tie it may have another length.
    """
    assert judge.lens is not None, "a tie is one by the lens"
    tokens, wanted = found.tokens.tolist(), expected.tolist()
    judge.tally.n += len(wanted)
    if tokens != wanted:
        at = first_difference(tokens, wanted)
        where = f"{name}: {len(tokens)} tokens, but {len(wanted)} in the whole answer; they part at new token {at}"
        if text is not None and found.text is not None:
            same_text = found.text.rstrip(REPLACEMENT) == text.rstrip(REPLACEMENT)
            where += f", and the text is {'the same: ids alone are lost' if same_text else 'another, too'}"
        judge.tally.require(len(tokens) == len(wanted) or ends, where)
        same = check_same_tokens(judge.lens, judge.tolerance, [prompt], [tokens], [wanted], most_ties=1.0)
        judge.tally.require(same.passed is True, f"{name}: {same.detail}")
        judge.tally.ties += 1
    elif text is not None and found.text is not None:
        shown, told = found.text.rstrip(REPLACEMENT), text.rstrip(REPLACEMENT)
        at = first_difference(shown, told)
        judge.tally.require(
            shown == told,
            f"{name}: the same tokens, but other text from character {at} on: {shown[at : at + SHOWN]!r}, and "
            f"{told[at : at + SHOWN]!r} in the whole answer",
        )
    seconds = [*np.asarray(found.seconds, dtype=np.float64).tolist(), float(found.whole_s)]
    judge.tally.require(
        len(seconds) == len(tokens) + 1 and seconds[0] >= 0 and seconds == sorted(seconds),
        f"{name}: {len(seconds) - 1} arrivals for {len(tokens)} tokens, or times that do not rise",
    )


# ---------------------------------------------------------------- aborted requests


class AbortedRequestError(Exception):
    """A caller's own exception, raised from the stop set passed to ``generate``."""


class AbortingStopTokens(frozenset[int]):
    """A stop set that raises ``AbortedRequestError`` after ``most`` membership tests.

    A decoder that copies the set never notices, and answers.
    """

    most: int = 0

    def __contains__(self, token: object) -> bool:
        self.most -= 1
        if self.most < 0:
            raise AbortedRequestError
        return super().__contains__(token)
