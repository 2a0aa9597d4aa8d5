"""What a case of requests judges of answers that were all decoded."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from pytest_emad.audit.finding import AuditRefutedError, FirstDifference, Tally
from pytest_emad.audit.request_cases import History, OpenedDecoder, RequestCases, SameTokens
from tests.decoders.audited_model import LAYERS, drawn, lens_of, tiny_neox
from tests.decoders.cached_decoder import CachedDecoder

NO_BENCH: Any = None  # no answer is left to judge


@pytest.mark.parametrize(("log_chance", "rare"), [(-0.7, False), (-18.0, False), (-19.0, True), (-math.inf, True)])
def test_seeds_that_draw_the_same_are_refuted_only_where_chance_does_not(log_chance: float, rare: bool) -> None:
    """A model that is sure of its text draws the same under any seed."""
    history, row = History({}), (b"prompt", (3, 1))
    history.equal_draws.append((1, 2, False, [row]))
    history.again[row] = log_chance
    said = ""
    try:
        RequestCases(NO_BENCH, Tally("requests", needed=0)).judge(history)
    except AuditRefutedError as complaint:
        said = str(complaint)
    assert ("seeds 1 and 2 drew the same tokens in 1 rows, which chance does once in" in said) is rare


def test_rows_that_all_draw_the_same_are_judged_together() -> None:
    history, rows = History({}), [(b"prompt", (number,)) for number in range(9)]
    history.equal_draws.append((1, 2, True, rows))
    history.again |= dict.fromkeys(rows, -3.0)
    with pytest.raises(AuditRefutedError, match=r"in 9 rows, which chance does once in 5e\+11 times"):
        RequestCases(NO_BENCH, Tally("requests", needed=0)).judge(history)


def test_an_answer_that_parts_from_the_one_alone_says_where_and_why() -> None:
    """The lens judges each answer; two that part are also held against each other."""
    (prompt,), _ = drawn((30,), 1)
    point, lens = full_depth(LAYERS), lens_of(tiny_neox())
    decoder = CachedDecoder(tiny_neox(), point)
    whole, cut = (
        decoder.generate([Prompt(tokens)], 6, frozenset()).emitted[0].tolist()
        for tokens in (prompt.tokens, prompt.tokens[-16:])
    )
    history, bench = History({}), SimpleNamespace(lens=lens, tolerance=1e-9)
    history.same.append(SameTokens("row 0, at once with others", OpenedDecoder(decoder, point), prompt, cut, whole))
    with (tally := Tally("requests")):
        RequestCases(bench, tally).judge(history)  # type: ignore[arg-type]
    at = next(at for at, (one, other) in enumerate(zip(cut, whole, strict=True)) if one != other)
    said = lens(np.array([*prompt.tokens, *whole[:at]])).last_layer[-1]
    expected = FirstDifference.from_logits(len(prompt.tokens) + at - 1, cut[at], whole[at], said)
    assert (tally.difference, expected.expected) == (expected, whole[at])
    assert tally.likely_cause is not None
    assert tally.likely_cause.kind == "prompt cut to 16 tokens"
    assert (tally.complaint or "").startswith("row 0, at once with others: other tokens than alone: row 0, new token")
