"""The gate of a decoder over an inference server that is named by its URL: live at full depth, red for a planted fault.

``tests/unit/wire/test_engine.py`` has the faults and the replies one by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from tests.decoders.engine_server import Complete, Engine, serve
from tests.suites.conftest import Run, text_of

FILES = (
    "fidelity/test_full_depth.py",
    "fidelity/test_sampling.py",
    "invariants/test_positions.py",
    "invariants/test_requests.py",
)
GATE: dict[str, Any] = {"gate": "decoder", "inconclusive": "fail", "expect_decoder": "foreign", "report": "report"}
LIVE = 9  # tests at full depth of generate alone, sampling at two temperatures and the declared noise among them


def completing(folder: Path, longest: int) -> Complete:
    """The model of ``folder``; it reads the last ``longest`` tokens of a prompt."""
    stepper = load(str(folder)).stepper

    def complete(
        prompt: list[int], max_new: int, stop: frozenset[int], temperature: float, seed: int
    ) -> tuple[list[int], bool]:
        torch.set_num_threads(1)
        decoder = WalkedDecoder(stepper, full_depth(stepper.layers), seed=seed, temperature=temperature)
        record = decoder.generate([Prompt(np.array(prompt[-longest:]))], max_new, stop)
        return record.emitted[0].tolist(), record.stop[0] == "stop token"

    return complete


def test_a_right_server_passes_and_every_test_at_full_depth_is_live(
    pytester: pytest.Pytester, judge_apart: Run, tiny: Path
) -> None:
    with serve(Engine(completing(tiny, 96))) as url:
        result = judge_apart(*FILES, model=tiny, decoder=url, **GATE)
    report = json.loads((pytester.path / "report" / "report.json").read_text())
    passed = [test["nodeid"] for test in report["tests"] if test["outcome"] == "passed"]
    assert result.ret == 0, text_of(result)
    assert len(passed) == LIVE, passed
    assert f"server {url}" in text_of(result)


def test_a_server_that_cuts_prompts_is_red(pytester: pytest.Pytester, judge_apart: Run, tiny: Path) -> None:
    with serve(Engine(completing(tiny, 64))) as url:
        result = judge_apart(*FILES, model=tiny, decoder=url, **GATE)
    assert result.ret == 1
    assert "emitted" in text_of(result)
