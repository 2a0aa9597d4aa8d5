"""The decoder gate with an inference server named by its URL: live at full depth, failed for a planted fault.

``tests/unit/wire/test_inference_server.py`` tests the faults and the replies one by one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from emad_ref.report.tables import STREAM_TIMES
from tests.decoders.engine_server import Complete, EachThird, Engine, Hanging, NoStream, serve
from tests.suites.conftest import Run, text_of

SUITES = ("invariants", "fidelity")
TIER: dict[str, Any] = {"tier": "tokens", "expect_decoder": "foreign", "report": "report", "inconclusive": "fail"}
MODEL, WINDOW = "emad-nano", 512
LIVE = 12  # tests of the tier


def completing(longest: int = WINDOW) -> Complete:
    """The bundled model; it reads the last ``longest`` tokens of a prompt, and answers a resent request at once."""
    stepper = load(MODEL).stepper

    @cache
    def answer(
        prompt: tuple[int, ...], max_new: int, stop: frozenset[int], temperature: float, seed: int
    ) -> tuple[list[int], bool]:
        torch.set_num_threads(1)
        decoder = WalkedDecoder(stepper, full_depth(stepper.layers), seed=seed, temperature=temperature)
        record = decoder.generate([Prompt(np.array(prompt[-longest:]))], max_new, stop)
        return record.emitted[0].tolist(), record.stop[0] == "stop token"

    def complete(
        prompt: list[int], max_new: int, stop: frozenset[int], temperature: float, seed: int
    ) -> tuple[list[int], bool]:
        tokens, stopped = answer(tuple(prompt), max_new, stop, temperature, seed if temperature else 0)
        return [*tokens], stopped

    return complete


def losing(position: int) -> Complete:
    """The bundled model; rows that decode past ``position`` have lost that token."""
    complete = completing()

    def lose(
        prompt: list[int], max_new: int, stop: frozenset[int], temperature: float, seed: int
    ) -> tuple[list[int], bool]:
        found, stopped = complete(prompt, max_new, stop, temperature, seed)
        kept = position + 1 - len(prompt)
        if not 0 < kept < len(found):
            return found, stopped
        others, stopped = complete([*prompt, *found[: kept - 1], 0], max_new - kept, stop, temperature, seed)
        return [*found[:kept], *others], stopped

    return lose


def keeping_blocks(size: int) -> Complete:
    """The bundled model; it caches blocks of ``size`` tokens by their position and by the first block alone."""
    complete, kept = completing(), dict[Any, list[int]]()

    def answer(prompt: list[int], *rest: Any) -> tuple[list[int], bool]:
        whole = (len(prompt) - 1) // size * size
        blocks = [kept.setdefault((at, tuple(prompt[:size])), prompt[at : at + size]) for at in range(0, whole, size)]
        return complete([token for block in blocks for token in block] + prompt[whole:], *rest)

    return answer


# engine, and the summary of a run that passes without a waiver
RIGHT: dict[str, tuple[Callable[[], Engine], int, str]] = {
    "vllm": (lambda: Engine(completing(), window=WINDOW), LIVE, r"first token [\d.]+ \([\d.]+\)"),
    "llama.cpp, each third request put off": (
        lambda: EachThird(completing(), "llama.cpp", window=WINDOW),
        LIVE,
        r"\d{3} requests, \d{3} retried \(\d{3} status 503\); it serves model served, window 512",
    ),
    "without streams": (
        lambda: NoStream(completing(), window=WINDOW),
        LIVE - 1,
        "tier tokens \\(streams nothing\\); .*the decoder does not offer streaming: 1 tests do not apply",
    ),
}


# A run takes half a minute: one form of server and one fault stay in CI; test_inference_server.py has each.
SELDOM = (
    "llama.cpp, each third request put off",
    "without streams",
    "a position lost in decoding",
    "blocks of 128 tokens kept by the first",
    "a stream that hangs",
)


def each(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SELDOM else []) for name in table]


@pytest.mark.parametrize("server", each(RIGHT))
def test_a_right_server_is_judged_at_its_tier_without_a_waiver(
    pytester: pytest.Pytester, judge_apart: Run, server: str
) -> None:
    make, live, words = RIGHT[server]
    began = time.monotonic()
    with serve(make()) as url:
        result = judge_apart(*SUITES, model=MODEL, decoder=url, **TIER)
    report = json.loads((pytester.path / "report" / "report.json").read_text())
    passed = [test["nodeid"] for test in report["tests"] if test["outcome"] == "passed"]
    assert result.ret == 0, text_of(result)
    assert len(passed) == live, passed
    assert re.search(words, " ".join(text_of(result).split())), text_of(result)
    assert [table["title"] for table in report["tables"]] == [STREAM_TIMES] * (live == LIVE)
    assert time.monotonic() - began < 300


REQUESTS = "invariants/test_requests.py"
FAULTS: dict[str, tuple[Callable[[], Engine], str, str]] = {  # engine, file, and the message of its failed test
    "prompts cut": (lambda: Engine(completing(507), window=WINDOW), "invariants/test_positions.py", "emitted"),
    "a position lost in decoding": (
        lambda: Engine(losing(301), window=WINDOW),
        "invariants/test_positions.py",
        "emitted",
    ),
    "blocks of 128 tokens kept by the first": (
        lambda: Engine(keeping_blocks(128), window=WINDOW),
        REQUESTS,
        "emitted",
    ),
    "a stream that hangs": (lambda: Hanging(completing(), window=WINDOW), REQUESTS, "after 3 events of a stream"),
}


@pytest.mark.parametrize("fault", each(FAULTS))
def test_a_server_with_a_fault_is_red(judge_apart: Run, fault: str) -> None:
    make, file, words = FAULTS[fault]
    with serve(make()) as url:
        result = judge_apart(file, model=MODEL, decoder=url, decoder_timeout=4 if "hangs" in fault else 300, **TIER)
    said = " ".join(text_of(result).split())
    assert result.ret == 1
    assert re.search(r"FAILED: \d tests? failed", said)
    assert words in said
