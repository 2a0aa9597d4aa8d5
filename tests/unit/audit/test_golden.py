"""Goldens: what is held against them, and which differences rounding excuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from emad_ref.audit.token_comparison import (
    BadGoldenError,
    GoldenTokens,
    compare_golden,
    emitted_depths,
    golden_key,
    logit_margins,
    threshold_distances,
)
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from tests.small import LAYERS, small_model

TOLERANCE = 1e-3
GOLDEN = GoldenTokens(
    np.array([[5, 6, 7], [8, 9, 1]]),
    np.array([[4, 4, 2], [4, 2, 2]]),
    np.array([[1.0, 1e-3, 1.0], [1.0, 1.0, 1.0]]),
    np.array([[1.0, 1.0, np.inf], [1.0, 5e-4, 1.0]]),
)


def other(name: str, row: int, at: int, value: int) -> GoldenTokens:
    changed = getattr(GOLDEN, name).copy()
    changed[row, at:] = value
    return replace(GOLDEN, **{name: changed})


def test_the_same_is_the_same_through_json() -> None:
    stored = GoldenTokens.from_json(json.loads(json.dumps(GOLDEN.to_json(), allow_nan=False)))
    finding = compare_golden(stored, GOLDEN, TOLERANCE)
    assert (finding.passed, finding.n, finding.ties) == (True, 6, 0)
    assert stored.room[0, 2] == np.inf


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (other("token", 0, 0, 3), r"row 0, new token 0: 3 \(4\), but the golden has 5 \(4\), by a margin of 1 logits"),
        (other("token", 0, 2, 3), r"row 0, new token 2: 3 \(2\), but the golden has 7 \(2\)"),
        (
            other("depth", 0, 1, 3),
            r"row 0, new token 1: 6 \(3\), but the golden has 6 \(4\)",
        ),
        (other("depth", 1, 0, 3), r"row 1, new token 0: 8 \(3\)"),
        (replace(GOLDEN, token=GOLDEN.token[:1]), r"but the golden holds \(2, 3\)"),
    ],
)
def test_what_no_rounding_excuses_is_named(found: GoldenTokens, said: str) -> None:
    finding = compare_golden(GOLDEN, found, TOLERANCE)
    assert finding.passed is False
    assert re.search(said, finding.detail), finding.detail


@pytest.mark.parametrize(
    "found",
    [
        other("token", 0, 1, 3),  # both logits may be off: twice the tolerance
        other("depth", 1, 1, 4),  # a signal next to its threshold
        other("token", 1, 2, 3),  # after such a one the caches differ
    ],
)
def test_what_rounding_excuses_is_a_tie(found: GoldenTokens) -> None:
    finding = compare_golden(GOLDEN, found, TOLERANCE)
    assert (finding.passed, finding.ties) == (True, 1)
    assert "1 of 2 rows part from the golden at a tie" in finding.detail
    assert compare_golden(GOLDEN, found, TOLERANCE / 4).passed is False


def test_a_signal_may_be_further_off_than_a_logit() -> None:
    found = other("depth", 1, 1, 4)
    assert compare_golden(GOLDEN, found, TOLERANCE / 4, noise=2.0).passed is True


def test_many_ties_are_no_longer_rounding() -> None:
    near = replace(GOLDEN, margin=np.zeros((2, 3)))
    found = replace(near, token=near.token + 1)
    finding = compare_golden(near, found, TOLERANCE)
    assert finding.passed is False
    assert "2 of 2 rows part from the golden at a tie" in finding.detail
    assert compare_golden(near, found, TOLERANCE, declared=2 * TOLERANCE).passed is True, "but where noise is declared"


@pytest.mark.parametrize("damage", [{"token": None}, {"depth": [[1]]}, {"room": "far"}, {"margin": {}}])
def test_what_is_no_golden_is_said(damage: dict[str, object]) -> None:
    with pytest.raises(BadGoldenError, match="record it anew"):
        GoldenTokens.from_json(GOLDEN.to_json() | damage)
    with pytest.raises(BadGoldenError, match="record it anew"):
        GoldenTokens.from_json({})


def test_ids_tell_what_was_drawn_by_whom() -> None:
    assert golden_key("ab", "float32", "self", 0, "full") == "ab-float32-self-seed-0-full"
    assert golden_key("ab", "float32", "self", 0, "drawn", "torch-2.13") == "ab-float32-self-seed-0-drawn-torch-2.13"


def test_what_is_taken_is_what_was_shown_and_compared() -> None:
    """Margins and rooms by hand: from logits and signals of a session fed the same tokens."""
    point = OperatingPoint("half", "fixed_entropy", LAYERS, LAYERS, (1, 2), ((3.0, 3.5),))
    decoder = WalkedDecoder(CausalStepper(small_model("gpt_neox")), point, max_rows=2)
    prompts = [Prompt(np.arange(5)), Prompt(np.arange(3))]
    record = decoder.generate(prompts, 6, frozenset())
    margin, room, depth = (
        logit_margins(decoder, prompts, record.emitted),
        threshold_distances(record, point),
        emitted_depths(record),
    )
    for row, prompt in enumerate(prompts):
        session, step = decoder.start([prompt])
        for at, token in enumerate(record.emitted[row]):
            best = torch.tensor(step.logits[0, -1]).topk(2)
            assert int(best.indices[0]) == token
            assert margin[row, at] == pytest.approx(float(best.values[0] - best.values[1]))
            assert depth[row, at] == step.depth[0, -1]
            read = np.abs(step.signal[0, -1] - np.array(point.thresholds[0]))
            assert room[row, at] == pytest.approx(np.nanmin(np.append(read, np.inf)))
            step = session.feed(np.array([[token]]))
