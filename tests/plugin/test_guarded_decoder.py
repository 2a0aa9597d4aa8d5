"""The guard around a foreign decoder: time limits on calls, and counts of answered and declined features."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.protocol import Capabilities, Prompt, Step, TokenArrivals, Unsupported
from emad_ref.record import Record, TokenTable, Work
from pytest_emad.run.guarded_decoder import (
    CallTimeLimit,
    DecoderTooSlowError,
    GuardedDecoder,
    GuardedSession,
    MalformedAnswerError,
)

PROMPTS = [Prompt(np.arange(3))]
NO_LIMIT = CallTimeLimit("mine", None, None)
STEP = Step(np.zeros((1, 1, 5)), np.ones((1, 1), dtype=np.int64), np.empty((1, 1, 0)))
NO_TOKENS = TokenTable(*(np.empty(0, dtype=np.int64) for _ in range(7)), np.empty(0, dtype=bool))
RECORD = Record(NO_TOKENS, np.empty((0, 0)), [np.ones(1, dtype=np.int64)], ["length"])
WORK = Work.none(2)


class Slow:
    capabilities = Capabilities()

    def generate(self, prompts: Any, max_new: int, stop: Any) -> Any:
        time.sleep(20)

    def start(self, prompts: Any) -> Any:
        return Fixed(), STEP

    def token_arrivals(self, prompts: Any, max_new: int, stop: Any, stream: bool) -> Any:
        return self.generate(prompts, max_new, stop) if stream else ["whole"]

    def generate_at_once(self, requests: Any, at_once: int) -> Any:
        return self.generate(requests, 1, None)

    def draft_counts(self) -> Any:
        return self.generate(None, 1, None)


class Fixed:
    length = np.arange(1)

    def close(self) -> None:
        time.sleep(20)

    def feed(self, tokens: Any, depth: Any = None, last: Any = None) -> Any:
        if depth is not None:
            raise Unsupported("no depths")
        return STEP


class Declines(Slow):
    def token_arrivals(self, prompts: Any, max_new: int, stop: Any, stream: bool) -> Any:
        raise Unsupported("no streams")

    def start(self, prompts: Any) -> Any:
        raise Unsupported("no sessions")


CALLS: dict[str, Callable[[Any], Any]] = {
    "generate": lambda decoder: decoder.generate(PROMPTS, 1),
    "token_arrivals": lambda decoder: decoder.token_arrivals(PROMPTS, 1, frozenset(), True),
    "generate_at_once": lambda decoder: decoder.generate_at_once([(PROMPTS, 1, frozenset())], 2),
    "draft_counts": lambda decoder: decoder.draft_counts(),
    "close": lambda decoder: decoder.start(PROMPTS)[0].close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_hangs_ends_in_time_by_name(call: str) -> None:
    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    decoder = GuardedDecoder(Slow(), CallTimeLimit("hook of mine", 0.2, None), lambda *seen: None)  # type: ignore[arg-type]
    with pytest.raises(DecoderTooSlowError, match=rf"{call} of hook of mine gave no answer within 0\.2 s"):
        CALLS[call](decoder)
    assert time.monotonic() - began < 10
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_code_that_never_returns_ends_the_process() -> None:
    """A loop in C cannot be interrupted: the guard writes the stack and ends the process."""
    code = (
        "import sys, pytest_emad.run.guarded_decoder as g; g.GRACE_S = 0.1\n"
        "with g.CallTimeLimit('mine', 0.1, sys.__stderr__)('generate'): sum(range(10**12))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_features_are_counted_where_they_are_answered_or_declined() -> None:
    counts: list[tuple[str, bool]] = []
    decoder = GuardedDecoder(Slow(), NO_LIMIT, lambda *seen: counts.append(seen))  # type: ignore[arg-type]
    session, step = decoder.start(PROMPTS)
    assert (decoder.capabilities, session.length, step) == (Slow.capabilities, Fixed.length, STEP)
    assert session.feed(np.zeros((1, 1)), last=1) is STEP
    with pytest.raises(Unsupported) as refusal:
        session.feed(np.zeros((1, 1)), np.ones((1, 1)))
    assert refusal.value.features == ("forced depths",)
    with pytest.raises(Unsupported):
        GuardedDecoder(Declines(), NO_LIMIT, lambda *seen: counts.append(seen)).start(PROMPTS)  # type: ignore[arg-type]
    assert counts == [("sessions", False), ("forced depths", True), ("sessions", True)]


class Answers:
    """A decoder whose every call, and whose session's every attribute, returns one object."""

    def __init__(self, answer: Any):
        self.answer = self.length = self.cap = self.work = answer

    def start(self, prompts: Any) -> Any:
        return self.answer if self.answer is None or isinstance(self.answer, list) else (self, self.answer)

    def feed(self, tokens: Any, depth: Any = None, last: Any = None) -> Any:
        return self.answer

    def generate(self, prompts: Any, max_new: int, stop: Any) -> Any:
        return self.answer

    def generate_at_once(self, requests: Any, at_once: int) -> Any:
        return [self.answer]


MALFORMED: list[tuple[str, Any, str]] = [
    (
        "start",
        None,
        "start returned a NoneType, but expected a pair: the session, and its first step; docs/protocol.md",
    ),
    ("start", [1], "start returned a list, but expected a pair"),
    ("start", (1, 2, 3), "start returned logits as NoneType in a tuple, but expected a NumPy array"),
    (
        "feed",
        replace(STEP, depth=STEP.depth.tolist()),
        "feed returned depth as list in a Step, but expected a NumPy arr",
    ),
    (
        "feed",
        replace(STEP, depth=STEP.depth * 1.0),
        "depth as float64 of shape [1, 1], but expected int64 [rows, tokens]",
    ),
    ("feed", replace(STEP, depth=STEP.depth[0]), "depth as int64 of shape [1], but expected int64 [rows, tokens]"),
    ("generate", None, "generate returned a NoneType without tokens, but expected a Record"),
    ("generate", {"tokens": 1}, "generate returned a dict without tokens, but expected a Record"),
    (
        "generate",
        replace(RECORD, emitted=iter(RECORD.emitted)),
        "generate returned emitted as list_iterator, but expected a list with an entry a prompt",
    ),
    ("generate", replace(RECORD, emitted=[[1]]), "generate returned emitted[0] as a list, but expected a NumPy array"),
    (
        "generate",
        replace(RECORD, emitted=[np.ones(1)]),
        "generate returned emitted[0] as an array of float64 of shape [1], but expected int64 in one dimension",
    ),
    (
        "generate",
        replace(RECORD, tokens=replace(NO_TOKENS, cap=[])),
        "generate returned tokens.cap as list, but expected a NumPy array",
    ),
    (
        "generate",
        replace(RECORD, work={0: WORK}, prompt_work=WORK),
        "generate returned prompt_work as Work, but expected None, or a dict of model index to Work",
    ),
    (
        "generate",
        replace(RECORD, work={0: {"tokens": WORK.tokens}}),
        "generate returned work as dict, but expected None, or a dict of model index to Work",
    ),
    ("generate_at_once", WORK, "generate_at_once returned a Work without signal, but expected a Record"),
    ("length", [3], "session.length returned a list, but expected a NumPy array"),
    ("cap", np.ones(1), "session.cap returned an array of float64 of shape [1], but expected int64 in one dimension"),
    ("work", {0: WORK}, "session.work returned a dict, but expected a Work, or None"),
]


@pytest.mark.parametrize(("call", "answer", "said"), MALFORMED, ids=[said[:40] for *_, said in MALFORMED])
def test_an_answer_of_another_form_is_named(call: str, answer: Any, said: str) -> None:
    asked = Answers(answer)
    decoder = GuardedDecoder(asked, NO_LIMIT, lambda *seen: None)  # type: ignore[arg-type]
    session = GuardedSession(asked, NO_LIMIT, lambda *seen: None)  # type: ignore[arg-type]
    calls: dict[str, Callable[[], Any]] = {
        "start": lambda: decoder.start(PROMPTS),
        "feed": lambda: session.feed(np.zeros((1, 1))),
        "generate": lambda: decoder.generate(PROMPTS, 1),
        "generate_at_once": lambda: decoder.generate_at_once([(PROMPTS, 1, frozenset())], 2),
        **{name: partial(getattr, session, name) for name in ("length", "cap", "work")},
    }
    with pytest.raises(MalformedAnswerError) as refused:
        calls[call]()
    assert said in str(refused.value)


@pytest.mark.parametrize("token", [-1, 7])
def test_an_id_outside_the_vocabulary_is_named(token: int) -> None:
    """An engine gave its padding as a token, and each audit ended in an IndexError of torch."""
    answers = Answers(replace(RECORD, emitted=[np.array([6, token])]))
    decoder = GuardedDecoder(answers, NO_LIMIT, lambda *seen: None, vocabulary=7)  # type: ignore[arg-type]
    for ask in (
        lambda: decoder.generate(PROMPTS, 2),
        lambda: decoder.generate_at_once([(PROMPTS, 2, frozenset())], 2),
    ):
        with pytest.raises(MalformedAnswerError) as refused:
            ask()
        assert f"returned emitted[0] with the id {token}, but expected ids from 0 to 6" in str(refused.value)


@pytest.mark.parametrize(
    ("declared", "said"),
    [({"max_feed": 1}, "a dict"), ([], "a list"), (None, "a NoneType"), (Capabilities, "the class Capabilities")],
)
def test_capabilities_of_another_type_are_named(declared: Any, said: str) -> None:
    """Such runs once ended in AttributeErrors: 'dict' object has no attribute 'max_feed'."""
    asked = Answers(STEP)
    asked.capabilities = declared  # type: ignore[attr-defined]
    decoder = GuardedDecoder(asked, NO_LIMIT, lambda *seen: None)  # type: ignore[arg-type]
    with pytest.raises(MalformedAnswerError) as refused:
        decoder.capabilities  # noqa: B018  # reading them is what fails
    assert str(refused.value) == (
        f"capabilities of the decoder returned {said}, but expected a Capabilities of emad_ref.protocol; "
        "docs/protocol.md has the forms"
    )


def test_answers_of_the_right_form_pass_as_they_are() -> None:
    for depth in (STEP.depth, STEP.depth.astype(np.int32)):
        step = replace(STEP, depth=depth)
        assert GuardedDecoder(Answers(step), NO_LIMIT, lambda *seen: None).start(PROMPTS)[1] is step  # type: ignore[arg-type]
    assert GuardedDecoder(Answers(RECORD), NO_LIMIT, lambda *seen: None).generate(PROMPTS, 1) is RECORD  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "feature"), [("token_arrivals", "streaming"), ("generate_at_once", "requests at once")]
)
def test_a_decoder_without_streams_or_threads_declines_by_name(call: str, feature: str) -> None:
    counts: list[tuple[str, bool]] = []
    decoder = GuardedDecoder(Fixed(), NO_LIMIT, lambda *seen: counts.append(seen))  # type: ignore[arg-type]
    with pytest.raises(Unsupported) as refusal:
        CALLS[call](decoder)
    assert refusal.value.features == (feature,)
    assert counts == [(feature, True)]
    assert not hasattr(decoder, "draft_counts"), "a missing feature must be absent"


@pytest.mark.parametrize(("seconds", "declined"), [((0.1, 0.2), False), ((0.2, 0.2), True)])
def test_an_answer_counts_as_streamed_if_it_arrives_in_parts(seconds: tuple[float, float], declined: bool) -> None:
    """A feature that is answered once is offered, so answers that arrive at once at times do no harm."""
    counts: list[tuple[str, bool]] = []
    found = [TokenArrivals(np.arange(2), np.array(seconds), 0.3)]
    streams = SimpleNamespace(token_arrivals=lambda *request: found)
    decoder = GuardedDecoder(streams, NO_LIMIT, lambda *seen: counts.append(seen))  # type: ignore[arg-type]
    assert decoder.token_arrivals(PROMPTS, 2, frozenset(), True) == found
    assert counts == [("streaming", declined)]


def test_whole_answers_of_a_decoder_that_streams_count_as_no_stream() -> None:
    counts: list[tuple[str, bool]] = []
    decoder = GuardedDecoder(Slow(), NO_LIMIT, lambda *seen: counts.append(seen))  # type: ignore[arg-type]
    assert decoder.token_arrivals(PROMPTS, 1, frozenset(), False) == ["whole"]
    assert counts == []
    with pytest.raises(Unsupported):
        GuardedDecoder(Declines(), NO_LIMIT, lambda *seen: counts.append(seen)).token_arrivals(  # type: ignore[arg-type]
            PROMPTS, 1, frozenset(), False
        )
    assert counts == [("streaming", True)]
