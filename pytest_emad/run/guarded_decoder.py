"""A foreign decoder with time limits on its calls, and counts of answered and declined features.

A call that takes too long raises ``DecoderTooSlowError`` in its test. Code that never returns to Python cannot be
interrupted; some seconds later the process ends, with its stack on standard error, and its report stays unfinished.
"""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType
from typing import Any, TextIO

import numpy as np

from emad_ref.errors import EmadError
from emad_ref.protocol import (
    Capabilities,
    Decoder,
    GenerateArguments,
    Prompt,
    Session,
    Step,
    TokenArrivals,
    TokenLogProbs,
    Unsupported,
)
from emad_ref.record import Ints, Record, TokenTable, Work
from pytest_emad.audit.log_probs import greedy_session_log_probs
from pytest_emad.report.provenance import CONCURRENCY, FORCED_DEPTHS, LOG_PROBS, SESSIONS, STREAMING

REQUIRED_CALLS = ("start", "generate", "synchronize", "close")  # methods of every decoder
GRACE_S = 30.0  # seconds after the limit for C code to return
CountFeature = Callable[[str, bool], None]  # (feature, whether it was declined)


class DecoderTooSlowError(EmadError):
    """Raised if a call of a decoder gives no answer within ``--emad-decoder-timeout``."""


class MalformedAnswerError(EmadError):
    """Raised if a decoder's answer lacks a part of the protocol, or has it in another form."""


def require_step(call: str, answer: Any) -> Step:
    """Return ``answer`` of ``call`` if it has the arrays of a ``Step``, with whole depths for each row and token.

    Raises:
        MalformedAnswerError: naming the call and its result.
    """
    for part in ("logits", "depth", "signal"):
        array = getattr(answer, part, None)
        if not isinstance(array, np.ndarray):
            raise _malformed(call, f"{part} as {type(array).__name__} in a {type(answer).__name__}", "a NumPy array")
    if answer.depth.dtype.kind not in "iu" or answer.depth.ndim != 2:
        found = f"depth as {answer.depth.dtype} of shape {list(answer.depth.shape)}"
        raise _malformed(call, found, "int64 [rows, tokens]")
    step: Step = answer
    return step


def require_record(call: str, answer: Any, vocabulary: int | None = None) -> Record:
    """Return ``answer`` of ``call`` if it has the parts of a ``Record``, lists with an entry per prompt among them.

    ``vocabulary``: every emitted id must be below it; None: any id is accepted.

    Raises:
        MalformedAnswerError: as ``require_step``.
    """
    for part in (each.name for each in fields(Record)):
        if not hasattr(answer, part):
            raise _malformed(call, f"a {type(answer).__name__} without {part}", "a Record")
    for part in ("emitted", "stop"):
        if not isinstance(getattr(answer, part), list | tuple | np.ndarray):  # rows of equal length may be one array
            raise _malformed(call, f"{part} as {type(getattr(answer, part)).__name__}", "a list with an entry a prompt")
    for row, each in enumerate(answer.emitted):
        tokens = require_integer_vector(call, each, f"emitted[{row}] as ")
        if vocabulary is not None and len(foreign := tokens[(tokens < 0) | (tokens >= vocabulary)]):
            raise _malformed(call, f"emitted[{row}] with the id {foreign[0]}", f"ids from 0 to {vocabulary - 1}")
    for column in (each.name for each in fields(TokenTable)):
        if not isinstance(found := getattr(answer.tokens, column, None), np.ndarray):
            raise _malformed(call, f"tokens.{column} as {type(found).__name__}", "a NumPy array")
    for part in ("work", "prompt_work"):
        if (counts := getattr(answer, part)) is not None and not _is_work_by_model(counts):
            raise _malformed(call, f"{part} as {type(counts).__name__}", "None, or a dict of model index to Work")
    record: Record = answer
    return record


def require_decoder(call: str, decoder: Any) -> None:
    """Refuse a result of the hook ``call`` that is no decoder: a class, a generator, a coroutine, another object.

    Raises:
        MalformedAnswerError: naming the type and its missing methods.
    """
    if isinstance(decoder, type):
        raise _malformed(call, f"the class {decoder.__name__}", "a decoder, an instance of it")
    lacking = [name for name in REQUIRED_CALLS if not callable(getattr(decoder, name, None))]
    if lacking:
        found = f"a {type(decoder).__name__} without {', '.join(lacking)}"
        raise _malformed(call, found, f"a decoder with {', '.join(REQUIRED_CALLS)}")


def require_integer_vector(call: str, value: Any, part: str = "") -> Ints:
    """Return ``value``, ``part`` of the answer of ``call``, if it is a one-dimensional array of whole numbers.

    Raises:
        MalformedAnswerError: as ``require_step``.
    """
    if not isinstance(value, np.ndarray):
        raise _malformed(call, f"{part}a {type(value).__name__}", "a NumPy array")
    if value.ndim != 1 or value.dtype.kind not in "iu":
        found = f"{part}an array of {value.dtype} of shape {list(value.shape)}"
        raise _malformed(call, found, "int64 in one dimension")
    numbers: Ints = value
    return numbers


def _is_work_by_model(counts: Any) -> bool:
    return isinstance(counts, Mapping) and all(isinstance(work, Work) for work in counts.values())


def require_wellformed_capabilities(decoder: Any) -> Capabilities:
    """The ``capabilities`` of ``decoder``.

    Raises:
        MalformedAnswerError: it has none, or an object of another type.
    """
    capabilities = getattr(decoder, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        found = "the class Capabilities" if capabilities is Capabilities else f"a {type(capabilities).__name__}"
        raise _malformed("capabilities of the decoder", found, "a Capabilities of emad_ref.protocol")
    return capabilities


def _malformed(call: str, found: str, expected: str) -> MalformedAnswerError:
    return MalformedAnswerError(f"{call} returned {found}, but expected {expected}; docs/protocol.md has the forms")


class CallTimeLimit:
    """Time limit of each call of the decoder ``name``; ``seconds`` None: none. ``stream``: for the final stack."""

    def __init__(self, name: str, seconds: float | None, stream: TextIO | None):
        self._name, self._seconds, self._stream = name, seconds, stream

    @contextmanager
    def __call__(self, call: str, times: int = 1) -> Iterator[None]:
        """Raise DecoderTooSlowError inside the block. Only a main thread of a POSIX system can be interrupted.

        ``times``: number of successive requests of the call, each with the time limit.
        """
        can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        if self._seconds is None or not can_interrupt:
            yield
            return
        seconds = self._seconds * times

        def expire(number: int, frame: FrameType | None) -> None:
            raise DecoderTooSlowError(
                f"{call} of {self._name} gave no answer within {seconds:g} s; find out what it waits for, or set "
                "--emad-decoder-timeout"
            )

        before = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if self._stream is not None:
            faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=self._stream)
        try:
            yield
        finally:
            if self._stream is not None:
                faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class GuardedDecoder:
    """``decoder`` under a time limit, whose ids are below ``vocabulary``. Other attributes are the decoder's own."""

    def __init__(self, decoder: Decoder, limit: CallTimeLimit, count: CountFeature, vocabulary: int | None = None):
        self._decoder, self._limit, self._count, self._vocabulary = decoder, limit, count, vocabulary

    @property
    def capabilities(self) -> Capabilities:
        return require_wellformed_capabilities(self._decoder)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._decoder, name)
        return self._limited(name, value) if name in ("draft_counts", "energy_j", "abort_stream") else value

    def _limited(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def limited(*arguments: Any) -> Any:
            with self._limit(name):
                return call(*arguments)

        return limited

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        with self._limit("generate"):
            return require_record("generate", self._decoder.generate(prompts, max_new, stop), self._vocabulary)

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        with self._limit("start"), count_feature_outcome(self._count, SESSIONS):
            answer: Any = self._decoder.start(prompts)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise _malformed("start", f"a {type(answer).__name__}", "a pair: the session, and its first step")
        return GuardedSession(answer[0], self._limit, self._count), require_step("start", answer[1])

    def log_probs(self, prompts: Sequence[Prompt], max_new: int, top: int) -> Sequence[TokenLogProbs]:
        ask = getattr(self._decoder, "log_probs", None)
        with count_feature_outcome(self._count, LOG_PROBS):
            if ask is None:
                return greedy_session_log_probs(self, prompts, max_new, top)
            with self._limit("log_probs"):
                return list(ask(prompts, max_new, top))

    def token_arrivals(
        self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
    ) -> Sequence[TokenArrivals]:
        """A streamed answer counts as offered if its tokens arrived in parts: several may share a message at times."""
        ask = getattr(self._decoder, "token_arrivals", None)
        try:
            with self._limit("token_arrivals"):
                if ask is None:
                    raise Unsupported("the decoder streams nothing")
                answers = list(ask(prompts, max_new, stop, stream))
        except Unsupported as refusal:
            self._count(STREAMING, True)
            refusal.features = (*(refusal.features or ()), STREAMING)
            raise
        if stream:
            self._count(STREAMING, not any(each.came_in_parts for each in answers))
        return answers

    def generate_at_once(self, requests: Sequence[GenerateArguments], at_once: int) -> Sequence[Record]:
        ask = getattr(self._decoder, "generate_at_once", None)
        with count_feature_outcome(self._count, CONCURRENCY), self._limit("generate_at_once", len(requests)):
            if ask is None:
                raise Unsupported("the decoder takes one request at a time")
            return [require_record("generate_at_once", each, self._vocabulary) for each in ask(requests, at_once)]

    def synchronize(self) -> None:
        with self._limit("synchronize"):
            self._decoder.synchronize()

    def close(self) -> None:
        with self._limit("close"):
            self._decoder.close()


class GuardedSession:
    """``session`` of a ``GuardedDecoder``."""

    def __init__(self, session: Session, limit: CallTimeLimit, count: CountFeature):
        self._session, self._limit, self._count = session, limit, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @property
    def length(self) -> Ints:
        return require_integer_vector("session.length", self._session.length)

    @property
    def cap(self) -> Ints:
        return require_integer_vector("session.cap", self._session.cap)

    @property
    def work(self) -> Work | None:
        if not isinstance(work := self._session.work, Work | None):
            raise _malformed("session.work", f"a {type(work).__name__}", "a Work, or None")
        return work

    def feed(self, tokens: Ints, depth: Ints | None = None, *last: int | None, **named: Any) -> Step:
        with self._limit("feed"):
            if depth is None:
                return require_step("feed", self._session.feed(tokens, depth, *last, **named))
            with count_feature_outcome(self._count, FORCED_DEPTHS):
                return require_step("feed", self._session.feed(tokens, depth, *last, **named))

    def deepen(self, length: Ints) -> Step:
        with self._limit("deepen"):
            return require_step("deepen", self._session.deepen(length))

    def rollback(self, length: Ints) -> None:
        with self._limit("rollback"):
            self._session.rollback(length)

    def commit(self, length: Ints) -> None:
        with self._limit("commit"):
            self._session.commit(length)

    def drop(self, rows: Ints) -> None:
        with self._limit("drop"):
            self._session.drop(rows)

    def close(self) -> None:
        with self._limit("close"):
            self._session.close()


@contextmanager
def count_feature_outcome(count: CountFeature, feature: str) -> Iterator[None]:
    """Count ``feature`` as answered, or as declined by a refusal that names it."""
    try:
        yield
    except Unsupported as refusal:
        count(feature, True)
        refusal.features = (*(refusal.features or ()), feature)
        raise
    count(feature, False)
