"""Check what the cases of a covering array do not ask: temperatures at once, text, times and aborts of streams.

``request_cases`` has all else of requests. Greedy answers are compared with the lens, row by row: depths, signals and
tokens, its end, and the work. One pass of the lens serves rows with the same tokens.
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

from emad_ref.protocol import Decoder, GenerateArguments, Prompt, TokenArrivals, Unsupported
from emad_ref.record import Ints, Record
from pytest_emad.audit.decoding_checks import (
    NO_STOP,
    extract_trajectories,
    require_record_work,
)
from pytest_emad.audit.finding import AuditRefutedError, Finding, Tally, prefix_raised_complaints
from pytest_emad.audit.reference_logits import ProbeReadoutWork
from pytest_emad.audit.sampling import require_rounding_explains_draw_changes, rounding_chance
from pytest_emad.audit.spot_checks import AnsweredRequest
from pytest_emad.audit.token_comparison import check_same_tokens, first_difference
from pytest_emad.audit.tolerances import max_logit_error
from pytest_emad.audit.trajectory import DecoderUnderTest, Judge, Trajectory

AT_ONCE, BESIDE = 8, 2  # requests at once, and those at other temperatures beside them
STREAMS = (1, 2, 8)  # streams at once
BESIDE_S, BESIDE_FACTOR = 60.0, 10.0  # how much longer greedy requests may take than simultaneous sampled ones
COOLER = 2.0  # factor between temperatures in one batch
ABORTED_NEW, ABORTED_AFTER = 64, 2  # new tokens of an aborted stream, and those that arrive before
ABORTED_ROWS = 3  # rows that take the place of aborted ones
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
    steps: Sequence[int] = (),
) -> None:
    """Require right rows of ``answers`` and of sessions (``session_rows``), with one lens pass per history.

    ``steps``: of each answer, the number of its step in a history, which a complaint names.

    Raises:
        AuditRefutedError: the first complaint.
    """
    assert judge.lens is not None, "rows are held against it"
    rows: list[tuple[Trajectory, Ints | None, int]] = []  # trajectory, its emitted tokens, and the index of its answer
    read = []
    for index, answer in enumerate(answers):
        request = answer.record, answer.prompts, answer.max_new, answer.stop
        with name_step(steps[index] if steps else 0):
            trajectories = extract_trajectories(judge.tally, *request, judge.point)
        read.append(trajectories)
        judge.tally.count_new_tokens(answer.record.emitted)
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
        with name_step(steps[index] if steps and index >= 0 else 0):
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


def name_step(step: int) -> AbstractContextManager[None]:
    """Name ``step`` of a history in a complaint that is raised inside the block; 0: none."""
    return prefix_raised_complaints(f"step {step}, " if step else "", step)


def _prompt_of(trajectory: Trajectory) -> bytes:
    return trajectory.tokens[: trajectory.first + 1].tobytes()


# ---------------------------------------------------------------- requests at once, and streamed ones


def check_temperatures_at_once(
    open_sampled: Callable[[float], AbstractContextManager[Decoder]],
    greedy: DecoderUnderTest,
    prompts: Sequence[Prompt],
    max_new: int,
    temperature: float,
) -> Finding:
    """Check that simultaneous requests at several temperatures get the same tokens as each alone.

    Each of ``prompts`` and the next one are a request. ``AT_ONCE`` requests at ``temperature`` are sent at once, beside
    greedy ones and some at ``temperature`` / ``COOLER``, which share the server's batches. ``open_sampled`` opens a
    decoder at a temperature, each time under the same seed. Discriminating are rows whose draws differ from the greedy
    tokens. ``request_cases`` tests the distribution of draws at once.

    Raises:
        Unsupported: the decoder takes one request at a time, or none at a temperature.
    """
    judge = Judge.for_check("temperatures at once", greedy)
    tally, noise = judge.tally, max_logit_error(judge.point, judge.tolerance)
    requests: list[GenerateArguments] = [
        (list(pair), max_new, NO_STOP) for pair in zip(prompts, [*prompts[1:], *prompts[:1]], strict=True)
    ]
    sent = (requests * AT_ONCE)[: max(AT_ONCE, len(requests))]
    with tally, ExitStack() as stack:
        hot, cooler = (stack.enter_context(open_sampled(each)) for each in (temperature, temperature / COOLER))
        if getattr(hot, "generate_at_once", None) is None:
            raise Unsupported("the decoder takes one request at a time")
        alone = [[answer_request(decoder, *each) for each in requests] for decoder in (hot, cooler, greedy.decoder)]
        require_answers_match_lens(judge, alone[-1])
        with (
            _refuted_by_errors(f"{AT_ONCE} sampled requests at once"),
            _answered_beside([cooler, greedy.decoder], sent) as beside,
        ):
            records = list(hot.generate_at_once(sent, AT_ONCE))  # type: ignore[attr-defined]
        found = [records, *beside]
        answered = [len(records) for records in found]
        tally.require({*answered} == {len(sent)}, f"{answered} answers to {len(sent)} requests each")
        for number, record in enumerate(found[-1]):
            name = f"greedy request {number} beside {AT_ONCE} sampled ones"
            _judge_beside_others(judge, alone[-1][number % len(requests)], record, name)
        for asked, wanted, records in zip((temperature, temperature / COOLER), alone, found, strict=False):
            _require_same_draws(tally, wanted, records, asked, noise)
        tally.discriminating += sum(
            one.tolist() != other.tolist()
            for drawn, certain in zip(alone[0], alone[-1], strict=True)
            for one, other in zip(drawn.record.emitted, certain.record.emitted, strict=True)
        )
    return tally.to_finding()


def _require_same_draws(
    tally: Tally, alone: Sequence[AnsweredRequest], records: Sequence[Record], temperature: float, noise: float
) -> None:
    """Require that ``records``, the answers to ``alone`` in turn, draw the same tokens, up to ``noise`` of a logit."""
    parted, chances = list[str](), list[float]()
    for number, record in enumerate(records):
        wanted = alone[number % len(alone)]
        tally.count_new_tokens(record.emitted, drawn=True)
        tally.live["samples_at_once"] += sum(map(len, record.emitted))
        tally.n += sum(map(len, record.emitted))
        for row, (tokens, expected) in enumerate(zip(record.emitted, wanted.record.emitted, strict=True)):
            chances.append(rounding_chance(noise / temperature, wanted.max_new))
            if not np.array_equal(tokens, expected):
                at = first_difference(tokens.tolist(), expected.tolist())
                parted.append(f"row {row} of request {number}, from new token {at} on")
    require_rounding_explains_draw_changes(tally, parted, chances, temperature, "of requests at once", "alone")


@contextmanager
def _answered_beside(
    decoders: Sequence[Decoder], requests: Sequence[GenerateArguments]
) -> Iterator[list[list[Record]]]:
    """Inside the block, a thread sends ``requests`` to each of ``decoders``, two at once; the lists hold the answers.

    Raises AuditRefutedError for an error, or far more time than the block.
    """
    answers, errors = [list[Record]() for _ in decoders], list[Exception]()

    def work(decoder: Decoder, records: list[Record]) -> None:
        try:
            records.extend(decoder.generate_at_once(requests, BESIDE))  # type: ignore[attr-defined]
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
        judge.tally.count_new_tokens(record.emitted)
    else:
        with prefix_raised_complaints(f"{name}: other tokens than alone; "):
            require_answers_match_lens(judge, [beside])  # passes if both are the argmax up to the tolerance
    judge.tally.live["requests_at_once"] += 1


def check_and_time_streams(
    under_test: DecoderUnderTest, prompts: Sequence[Prompt], max_new: int, at_once: Sequence[int] = STREAMS
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
            for first in range(0, len(prompts), count):
                chosen = [row % len(prompts) for row in range(first, first + count)]
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


def _judge_after_abort(
    judge: Judge, decoder: Decoder, prompts: Sequence[Prompt], max_new: int, emitted: Sequence[Ints]
) -> None:
    """Abort a stream, then require whole and streamed answers as before. Some rows take the place of an aborted one,
    and again follow an aborted stream of the same request, whose beginning a decoder may have kept.

    Only for decoders that can close a stream (``abort_stream``). No stream requests more tokens than the window holds.
    """
    abort, ask = getattr(decoder, "abort_stream", None), decoder.token_arrivals  # type: ignore[attr-defined]
    if abort is None:
        judge.tally.notes.append("no stream was aborted: the decoder closes none")
        return
    window = judge.tally.window or sys.maxsize  # 0: unknown
    for row, (before, prompt) in enumerate(zip([prompts[-1], *prompts], prompts[:ABORTED_ROWS], strict=False)):
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
        differ = at < min(len(tokens), len(wanted))  # else one is the other's beginning
        if differ:
            same = check_same_tokens(judge.lens, judge.tolerance, [prompt], [tokens], [wanted], most_ties=1.0)
            with prefix_raised_complaints(f"{where}: "):
                same.require()
        judge.tally.require(differ and (len(tokens) == len(wanted) or ends), where)
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
