"""Check requests as users send them: many rows, several stop tokens, common prefixes, sessions in between.

Each check sends requests that differ in what a decoder may remember or mix up, and compares every row of every answer
with the lens: its depths, signals and tokens, its end, and the work. No depth is forced. Rows with the same tokens are
judged in one pass of the lens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from emad_ref.audit.answers import AnsweredRequest
from emad_ref.audit.decoding_checks import count_answer, judge_work, read_record
from emad_ref.audit.finding import MIN_DISCRIMINATING, Finding, Tally
from emad_ref.audit.lens import PrefixLens, ProbeReadouts
from emad_ref.audit.trajectory import DecoderUnderTest, Judge, Trajectory, Transcript
from emad_ref.errors import BadArgument
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints, Record

MAX_STOP_TOKENS = 12  # ids of the largest stop set: more than fit a buffer of one, two, four or eight
FED_TOKENS = 3  # tokens that a session is fed after a prompt, besides the requests of ``generate``
MIN_PROMPT = 8  # tokens of a prompt that the others vary
VARIATIONS = 9  # variations of it, itself included
MIN_ENDING_IDS = 3  # different ids of the largest stop set that must end a row


def generate_answer(
    decoder: Decoder, prompts: Sequence[Prompt], max_new: int, stop: Iterable[int] = ()
) -> AnsweredRequest:
    """``generate`` with its request."""
    stops = frozenset(int(token) for token in stop)
    return AnsweredRequest(prompts, max_new, stops, decoder.generate(prompts, max_new, stops))


def judge_answers(judge: Judge, answers: Sequence[AnsweredRequest], session_rows: Sequence[Trajectory] = ()) -> None:
    """Judge every row of ``answers`` and of sessions (``session_rows``), with one lens pass per history.

    Raises:
        AuditRefutedError: the first complaint.
    """
    assert judge.lens is not None, "rows are held against it"
    rows: list[tuple[Trajectory, Ints | None, int]] = []  # trajectory, its emitted tokens, and the index of its answer
    read = []
    for index, answer in enumerate(answers):
        request = answer.record, answer.prompts, answer.max_new, answer.stop
        trajectories = read_record(judge.tally, *request, judge.point)
        read.append(trajectories)
        count_answer(judge.tally, answer.record, answer.prompts)
        rows += [(row, emitted, index) for row, emitted in zip(trajectories, answer.record.emitted, strict=True)]
    readouts: list[dict[str, ProbeReadouts]] = [{} for _ in answers]
    rows += [(trajectory, None, -1) for trajectory in session_rows]
    shared, remembering = None, judge
    for trajectory, emitted, index in sorted(rows, key=_longest_of_each_prompt):
        prompt = trajectory.tokens[: trajectory.first + 1].tobytes()
        if prompt != shared:
            shared, remembering = prompt, replace(judge, lens=PrefixLens(judge.lens))
        reference = remembering.trajectory(trajectory)
        if emitted is not None:
            remembering.tokens(trajectory, emitted, reference)
            readouts[index][trajectory.name] = reference.readouts
    if judge.counted:
        for answer, trajectories, of_rows in zip(answers, read, readouts, strict=True):
            judge_work(judge, answer.record, trajectories, [of_rows[trajectory.name] for trajectory in trajectories])


def _longest_of_each_prompt(row: tuple[Trajectory, Ints | None, int]) -> tuple[bytes, int]:
    trajectory = row[0]
    return trajectory.tokens[: trajectory.first + 1].tobytes(), -len(trajectory.tokens)


# ---------------------------------------------------------------- many rows


def batches(
    under_test: DecoderUnderTest,
    prompts: Sequence[Prompt],
    counts: Sequence[int],
    max_new: int,
    *,
    sessions: bool = True,
) -> Finding:
    """Check ``generate`` and a session on the first ``counts`` rows of ``prompts``, a request for each of ``counts``.

    The session is fed the tokens that ``generate`` emitted; ``sessions`` False leaves it out. Discriminating are rows
    whose tokens or depths differ from those of the row before: otherwise a row that follows its neighbour goes
    unnoticed.

    Raises:
        BadArgument: a count that ``prompts`` do not have.
    """
    decoder, point = under_test.decoder, under_test.point
    if not counts or not 1 <= min(counts) <= max(counts) <= len(prompts):
        raise BadArgument("counts", list(counts), f"numbers of rows from 1 to {len(prompts)}")
    judge = Judge.of("batches", under_test, judges_work=True)
    with judge.tally:
        for count in counts:
            answer = generate_answer(decoder, prompts[:count], max_new)
            record, fed = answer.record, min(FED_TOKENS, max_new - 1) if sessions else 0
            read_record(judge.tally, record, answer.prompts, max_new, answer.stop, point)
            session_rows: list[Trajectory] = []
            if fed:
                names = [f"row {row} in a session" for row in range(count)]
                with Transcript(judge, decoder, answer.prompts, names) as transcript:
                    for column in range(fed):
                        transcript.feed(np.array([[emitted[column]] for emitted in record.emitted]))
                    session_rows = transcript.trajectories()
            judge_answers(judge, [answer], session_rows)
            outcomes = [
                (*emitted.tolist(), *record.tokens.of(row, phase=1).depth.tolist())
                for row, emitted in enumerate(record.emitted)
            ]
            judge.tally.discriminating += sum(one != other for one, other in pairwise(outcomes))
    return judge.tally.finding()


# ---------------------------------------------------------------- where rows end


def endings(under_test: DecoderUnderTest, prompts: Sequence[Prompt], max_new: int, rng: np.random.Generator) -> Finding:
    """Check the ends of the rows of ``generate``, under stop sets drawn from what ``prompts`` emit without one.

    The largest set ends different rows by different ids, some by the first new token, and holds tokens of prompts,
    which end nothing. Discriminating are its ids that end a row: an overlooked one shows only there. The last request
    has no stop token again, so a remembered set shows.

    Raises:
        BadArgument: ``max_new`` below 3: no room for an end between the first and the last token.
    """
    decoder, point = under_test.decoder, under_test.point
    if max_new < 3:
        raise BadArgument("max_new", max_new, "at least 3 new tokens")
    judge = Judge.of("endings", under_test, MIN_ENDING_IDS, judges_work=True)
    with judge.tally:
        plain = generate_answer(decoder, prompts, max_new)
        read_record(judge.tally, plain.record, prompts, max_new, frozenset(), point)
        emitted = plain.record.emitted
        several = draw_stop_tokens(emitted, prompts, rng)
        first = {int(tokens[0]) for tokens in emitted}
        answers = [
            plain,
            generate_answer(decoder, prompts, max_new, several),
            generate_answer(decoder, prompts, max_new, [emitted[int(rng.integers(len(emitted)))][0]]),
            generate_answer(decoder, prompts, max_new, first),  # all rows at once
            generate_answer(decoder, prompts, 1),
            generate_answer(decoder, prompts, 1, several),
            generate_answer(decoder, prompts[:2], max_new),
        ]
        judge_answers(judge, answers)
        ended = [tokens for tokens in answers[1].record.emitted if int(tokens[-1]) in several]
        judge.tally.discriminating += len({int(tokens[-1]) for tokens in ended})
    return judge.tally.finding()


def draw_stop_tokens(emitted: Sequence[Ints], prompts: Sequence[Prompt], rng: np.random.Generator) -> frozenset[int]:
    """At most ``MAX_STOP_TOKENS`` ids for a stop set.

    They are tokens that end rows of ``emitted`` at random places, one of them its first, and two tokens that end a
    prompt and are not emitted.
    """
    stops: set[int] = set()
    for at, row in enumerate(rng.permutation(len(emitted)).tolist()):
        tokens = emitted[row].tolist()
        place = 0 if at == 0 else int(rng.integers(1, len(tokens)))
        if len(stops) < MAX_STOP_TOKENS - 2 and not stops & set(tokens[:place]):
            stops.add(tokens[place])
    everything = set(np.concatenate(list(emitted)).tolist())
    idle = {int(prompt.tokens[-1]) for prompt in prompts} - everything
    return frozenset(stops | set(sorted(idle)[:2]))


# ---------------------------------------------------------------- prompts that share a beginning


def prefixes(
    under_test: DecoderUnderTest,
    text: Ints,
    others: Ints,
    max_new: int,
    rng: np.random.Generator,
    *,
    sessions: bool = True,
    needed: int = MIN_DISCRIMINATING,
) -> Finding:
    """Check prompts that vary ``text`` int64 [n], n ≥ 8, by tokens of ``others`` int64 [n]: ``prompt_variations``.

    Each is requested alone, in random order and from one array that is overwritten between requests, then all together,
    then by simultaneous sessions, unless ``sessions`` is False. Discriminating are variations whose signals or tokens
    differ from those of ``text``: for the others a cached answer for ``text`` would be right.

    Raises:
        BadArgument: too few tokens to vary.
    """
    decoder = under_test.decoder
    if min(len(text), len(others)) < MIN_PROMPT:
        raise BadArgument("text", (len(text), len(others)), f"at least {MIN_PROMPT} tokens of each")
    judge = Judge.of("prefixes", under_test, needed, judges_work=True)
    varied = prompt_variations(text, others)
    with judge.tally:
        answers, buffers = [], {len(each): np.empty(len(each), dtype=np.int64) for each in varied}
        for index in [0, *rng.permutation(len(varied)).tolist()]:
            tokens = varied[index]
            buffers[len(tokens)][:] = tokens
            answer = generate_answer(decoder, [Prompt(buffers[len(tokens)])], max_new)
            answers.append(replace(answer, prompts=[Prompt(tokens)]))
        prompts = [Prompt(tokens) for tokens in varied]
        answers.append(generate_answer(decoder, prompts, max_new))
        emitted = answers[-1].record.emitted
        session_rows = _in_open_sessions(judge, decoder, prompts, emitted) if sessions else []
        judge_answers(judge, answers, session_rows)
        judge.tally.discriminating += _count_distinct_rows(answers[-1].record, judge.tolerance)
    return judge.tally.finding()


def prompt_variations(text: Ints, others: Ints) -> list[Ints]:
    """Variations of ``text``: itself twice, ``others``, and edited copies.

    Edits replace the last, a middle or the first token, exchange two tokens, shorten, and continue the text.
    """
    n, middle = len(text), len(text) // 2
    varied = [text.copy(), text.copy(), others[:n].copy()]
    for at in (n - 1, middle, 0):
        changed = text.copy()
        changed[at] = next((token for token in others if token != text[at]), text[at])
        varied.append(changed)
    exchanged = text.copy()
    later = next((at for at in range(n - 2, 0, -1) if text[at] != text[1]), 1)
    exchanged[[1, later]] = exchanged[[later, 1]]
    return [*varied, exchanged, text[:middle].copy(), np.concatenate([text, others[:middle]])]


def _in_open_sessions(
    judge: Judge, decoder: Decoder, prompts: Sequence[Prompt], emitted: Sequence[Ints]
) -> list[Trajectory]:
    """A session for each prompt, all open at once and closed in opening order, fed the tokens of ``generate``."""
    transcripts = [Transcript(judge, decoder, [prompt], [f"session {index}"]) for index, prompt in enumerate(prompts)]
    try:
        for transcript, tokens in zip(transcripts, emitted, strict=True):
            for token in tokens[: min(FED_TOKENS, len(tokens) - 1)]:
                transcript.feed(np.array([[token]]))
        return [trajectory for transcript in transcripts for trajectory in transcript.trajectories()]
    finally:
        for transcript in transcripts:
            transcript.session.close()


def _count_distinct_rows(record: Record, tolerance: float) -> int:
    """Rows after the first whose signals, depths or tokens differ from those of the first, all rows of one length."""
    decided = np.stack([record.tokens.kept_of(row)[-len(tokens) :] for row, tokens in enumerate(record.emitted)])
    signal, depth, tokens = record.signal[decided], record.tokens.depth[decided], np.stack(record.emitted)
    off = (np.abs(signal - signal[0]) > tolerance) | (np.isnan(signal) != np.isnan(signal[0]))
    return int((off.any(axis=(1, 2)) | ((depth != depth[0]) | (tokens != tokens[0])).any(axis=1)).sum())


# ---------------------------------------------------------------- the same rows again


def repetitions(
    under_test: DecoderUnderTest, prompts: Sequence[Prompt], max_new: int, rng: np.random.Generator
) -> Finding:
    """Check ``generate`` on ``prompts`` of different lengths: together, again, reordered, alone, in smaller batches.

    The smaller batches drop the first row of the one before, so the longest row and the padding change. Discriminating
    are rows whose tokens differ from those of the row before.
    """
    judge = Judge.of("repetitions", under_test, judges_work=True)
    shuffled = [prompts[row] for row in rng.permutation(len(prompts))]
    requests = [prompts, prompts, shuffled, *([prompt] for prompt in prompts)]
    requests += [shuffled[first:] for first in range(1, len(prompts) - 1)]
    with judge.tally:
        answers = [generate_answer(under_test.decoder, request, max_new) for request in requests]
        judge_answers(judge, answers)
        emitted = [tokens.tolist() for tokens in answers[0].record.emitted]
        judge.tally.discriminating += sum(one != other for one, other in pairwise(emitted))
    return judge.tally.finding()


# ---------------------------------------------------------------- sessions and decoders side by side


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


def abort_request(decoder: Decoder, prompts: Sequence[Prompt], max_new: int) -> bool:
    """Whether ``generate`` ended by its caller's exception, or one caused by it, after the first step."""
    stop = AbortingStopTokens(prompt.tokens[0] for prompt in prompts)
    stop.most = len(prompts)
    try:
        decoder.generate(prompts, max_new, stop)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, AbortedRequestError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return True
    return False


def interleaved(
    decoders: Sequence[DecoderUnderTest], prompts: Sequence[Prompt], continuations: Ints, max_new: int
) -> Finding:
    """Check two sessions of each of ``decoders``, each at its own point, with requests between their steps.

    All are fed in turns, ``prompts`` followed by ``continuations`` int64 [rows, n], n ≥ 6. Meanwhile each decoder
    answers requests of ``generate``, one of which is aborted. Then the first sessions are closed, and new ones are
    opened beside the others. Discriminating are positions as ``Judge.count_reading_context`` counts them.

    Raises:
        BadArgument: too few rows or tokens.
    """
    if len(prompts) < 4 or continuations.shape[1] < 6:
        raise BadArgument("continuations", continuations.shape, "at least 4 rows of at least 6 tokens")
    tally = Tally("interleaved")
    judges = [replace(Judge.of("interleaved", each), tally=tally) for each in decoders]
    tally.noisy = any(judge.tolerance > each.tolerance for judge, each in zip(judges, decoders, strict=True))
    half = len(prompts) // 2
    groups = (slice(0, half), slice(half, None))
    session_rows: list[list[Trajectory]] = [[] for _ in decoders]
    answers: list[list[AnsweredRequest]] = [[] for _ in decoders]

    def opened(rows: slice, name: str) -> list[Transcript]:
        """A session of every decoder on ``rows`` of ``prompts``."""
        names = [f"{name} session, row {row}" for row in range(len(prompts[rows]))]
        return [
            Transcript(judge, each.decoder, prompts[rows], names) for judge, each in zip(judges, decoders, strict=True)
        ]

    def step(transcripts: Sequence[Transcript], rows: slice, column: int) -> None:
        for transcript in transcripts:
            transcript.feed(continuations[rows, column : column + 1])

    def requests(rows: slice) -> None:
        for each, answered in zip(decoders, answers, strict=True):
            answered.append(generate_answer(each.decoder, prompts[rows], max_new))

    def close(transcripts: Sequence[Transcript]) -> None:
        for index, transcript in enumerate(transcripts):
            session_rows[index] += transcript.trajectories()
            transcript.session.close()

    def stage(transcripts: Sequence[Transcript], after: str) -> None:
        for transcript in transcripts:
            transcript.stage = after

    with tally:
        first = opened(groups[0], "first")
        step(first, groups[0], 0)
        requests(groups[1])
        stage(first, "after a request of the same decoder")
        step(first, groups[0], 1)
        second = opened(groups[1], "second")
        step(first, groups[0], 2)
        step(second, groups[1], 0)
        given_up = sum(abort_request(each.decoder, prompts[groups[1]], max_new) for each in decoders)
        stage([*first, *second], "after a request that was aborted")
        step(first, groups[0], 3)
        step(second, groups[1], 1)
        close(first)
        stage(second, "after the session opened before it was closed")
        third = opened(groups[0], "third")
        for column in range(2, 5):
            step(second, groups[1], column)
            step(third, groups[0], column - 2)
        requests(groups[0])
        close(third)
        step(second, groups[1], 5)
        close(second)
        requests(groups[1])
        for judge, answered, trajectories in zip(judges, answers, session_rows, strict=True):
            judge_answers(judge, answered)
            for trajectory in trajectories:
                tally.discriminating += judge.count_reading_context(trajectory, judge.trajectory(trajectory))
        tally.notes.append(f"{given_up} of {len(decoders)} requests left half-way")
    return tally.finding()
