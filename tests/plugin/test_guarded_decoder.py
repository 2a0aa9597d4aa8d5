"""A foreign decoder is asked through a guard: calls end in time, and what it answers or declines is counted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from emad_ref.protocol import Prompt, Unsupported
from pytest_emad.guarded_decoder import CallLimit, DecoderTooSlowError, GuardedDecoder

PROMPTS = [Prompt(np.arange(3))]
NO_LIMIT = CallLimit("mine", None, None)


class Slow:
    capabilities = "mine"

    def generate(self, prompts: Any, max_new: int, stop: Any) -> Any:
        time.sleep(20)

    def start(self, prompts: Any) -> Any:
        return Fixed(), "step"


class Fixed:
    length = "length"

    def feed(self, tokens: Any, depth: Any = None, last: Any = None) -> Any:
        if depth is not None:
            raise Unsupported("no depths")
        return "step"


class Declines(Slow):
    def start(self, prompts: Any) -> Any:
        raise Unsupported("no sessions")


def test_a_call_that_hangs_ends_in_time_by_name() -> None:
    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    decoder = GuardedDecoder(Slow(), CallLimit("hook of mine", 0.2, None), print)  # type: ignore[arg-type]
    with pytest.raises(DecoderTooSlowError, match=r"generate of hook of mine gave no answer within 0\.2 s"):
        decoder.generate(PROMPTS, 1)
    assert time.monotonic() - began < 10
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_code_that_never_returns_ends_the_process() -> None:
    """A loop in C cannot be interrupted: the stack is written and the process ends."""
    code = (
        "import sys, pytest_emad.guarded_decoder as g; g.GRACE_S = 0.1\n"
        "with g.CallLimit('mine', 0.1, sys.__stderr__)('generate'): sum(range(10**12))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_features_are_counted_where_they_are_answered_or_declined() -> None:
    counts: list[tuple[str, bool]] = []
    decoder = GuardedDecoder(Slow(), NO_LIMIT, lambda *seen: counts.append(seen))  # type: ignore[arg-type]
    session, step = decoder.start(PROMPTS)
    assert (decoder.capabilities, session.length, step) == ("mine", "length", "step")
    assert session.feed(np.zeros((1, 1)), last=1) == "step"
    with pytest.raises(Unsupported) as refusal:
        session.feed(np.zeros((1, 1)), np.ones((1, 1)))
    assert refusal.value.features == ("forced depths",)
    with pytest.raises(Unsupported):
        GuardedDecoder(Declines(), NO_LIMIT, lambda *seen: counts.append(seen)).start(PROMPTS)  # type: ignore[arg-type]
    assert counts == [("sessions", False), ("forced depths", True), ("sessions", True)]
