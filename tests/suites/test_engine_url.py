"""The decoder gate with an inference server named by its URL: live at full depth, failed for a planted fault.

``tests/unit/remote/test_inference_server.py`` tests the faults and the replies one by one. The stand-in for vLLM
decodes by Transformers, so that the run compares this project's lens with another implementation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from pytest_emad import cli
from pytest_emad.report.tables import STREAM_TIMES
from tests.decoders.engine_server import Complete, EachThird, Engine, Hanging, NoStream, serve
from tests.decoders.vllm_server import FAULTS as PLANTED
from tests.decoders.vllm_server import make_server
from tests.suites.conftest import Run, text_of

SUITES = ("invariants", "fidelity")
TIER: dict[str, Any] = {"tier": "tokens", "expect_decoder": "foreign", "report": "report", "inconclusive": "fail"}
LOG_PROBS = {"tier": "logprobs"}
MODEL, WINDOW = "emad-nano", 512
LIVE = {"tokens": 13, "logprobs": 14}  # tests of each tier


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


# engine, options, and the summary of a run that passes without a waiver
RIGHT: dict[str, tuple[Callable[[], Engine], dict[str, Any], str]] = {
    "vllm": (lambda: make_server(MODEL, WINDOW), LOG_PROBS, r"tier logprobs; .*first token [\d.]+ \([\d.]+\)"),
    "vllm in bfloat16": (
        lambda: make_server(MODEL, WINDOW, dtype=torch.bfloat16),
        LOG_PROBS | {"decoder_dtype": "bfloat16"},
        "tier logprobs; ",
    ),
    "vllm, a model of twelve layers": (
        lambda: make_server("emad-tiny", WINDOW),
        LOG_PROBS | {"model": "emad-tiny"},
        "tier logprobs; ",
    ),
    "vllm in bfloat16, a model of twelve layers": (
        lambda: make_server("emad-tiny", WINDOW, dtype=torch.bfloat16),
        LOG_PROBS | {"model": "emad-tiny", "decoder_dtype": "bfloat16"},
        "tier logprobs; ",
    ),
    "llama.cpp, each third request put off": (
        lambda: EachThird(completing(), "llama.cpp", window=WINDOW),
        {},
        r"\d{3,4} requests, \d{3} retried \(\d{3} status 503\); it serves model served, window 512",
    ),
    "without streams": (
        lambda: NoStream(completing(), window=WINDOW),
        {},
        "tier tokens \\(streams nothing\\); .*the decoder does not offer streaming: 1 tests do not apply",
    ),
}


# A run takes a minute: one form of server and few faults stay in CI; test_inference_server.py has each.
OFTEN = ("vllm", "prompt cut", "log-probabilities of another row")


def each(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in table]


@pytest.mark.parametrize("server", each(RIGHT))
def test_a_right_server_is_judged_at_its_tier_without_a_waiver(
    pytester: pytest.Pytester, judge_apart: Run, server: str
) -> None:
    make, options, words = RIGHT[server]
    asked = TIER | {"model": MODEL} | options
    with serve(make()) as url:
        result = judge_apart(*SUITES, decoder=url, **asked)
    report = json.loads((pytester.path / "report" / "report.json").read_text())
    passed = [test["nodeid"] for test in report["tests"] if test["outcome"] == "passed"]
    streams = server != "without streams"
    assert result.ret == 0, text_of(result)
    assert len(passed) == LIVE[asked["tier"]] - (not streams), passed
    assert re.search(words, " ".join(text_of(result).split())), text_of(result)
    titles = ["Pairs of requests asked"] + [STREAM_TIMES] * streams
    assert [table["title"] for table in report["tables"]] == titles
    required = ["--tier", asked["tier"], "--expect-decoder", "foreign"]
    assert cli.main(["verify", str(pytester.path / "report"), *required]) == 0


POSITIONS, REQUESTS = "invariants/test_positions.py", "invariants/test_requests.py"
PAIRS = "invariants/test_pairs.py"
SAMPLING, SHOWN = "fidelity/test_sampling.py", "fidelity/test_log_probs.py"
FAULTS: dict[str, tuple[Callable[[], Engine], str, str]] = {  # engine, file, and the message of its failed test
    "a position lost in decoding": (lambda: Engine(losing(301), window=WINDOW), POSITIONS, "emitted"),
    "blocks of 128 tokens kept by the first": (
        lambda: Engine(keeping_blocks(128), window=WINDOW),
        REQUESTS,
        "emitted",
    ),
    "a stream that hangs": (lambda: Hanging(completing(), window=WINDOW), REQUESTS, "after 3 events of a stream"),
}
OF_VLLM = {  # defect of the stand-in for vLLM, file, message
    "prompt cut": (POSITIONS, "it looks like a prompt cut to its last 500 tokens"),
    "ended near the window's end": (POSITIONS, "and the stop tokens give"),
    "temperature ignored": (SAMPLING, "of all temperatures"),
    "temperature rounded to tenths": (SAMPLING, "temperature"),
    "seed ignored": (PAIRS, "under the same seed"),
    "stops of another request": (PAIRS, "and the stop tokens give"),
    "a prefix kept by its first block": (REQUESTS, "emitted"),
    "one token after a shared prefix": (REQUESTS, "emitted"),
    "first token dropped": (PAIRS, "emitted"),
    "padding masked": (PAIRS, "emitted"),
    "log-probabilities of another row": (SHOWN, "audit log-probabilities"),
    "K and V in float16": (SHOWN, "off by"),
}
FAULTS |= {name: (partial(make_server, MODEL, WINDOW, name), *told) for name, told in OF_VLLM.items()}


def test_each_defect_of_the_stand_in_is_planted() -> None:
    assert OF_VLLM.keys() == PLANTED.keys()


@pytest.mark.parametrize("fault", each(FAULTS))
def test_a_server_with_a_fault_is_red(judge_apart: Run, fault: str) -> None:
    make, file, words = FAULTS[fault]
    asked = TIER | (LOG_PROBS if file == SHOWN else {}) | {"decoder_timeout": 4 if "hangs" in fault else 300}
    with serve(make()) as url:
        result = judge_apart(file, model=MODEL, decoder=url, **asked)
    said = " ".join(text_of(result).split())
    assert result.ret == 1
    assert re.search(r"FAILED: \d tests? failed", said)
    assert words in said
