"""What drafting is predicted to do after prompts of each length, and over all of them."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cache

import numpy as np
import pytest

from emad_ref.calibration.trace import TokenSequence
from emad_ref.decoding.self_speculation import Drafting
from emad_ref.errors import BadArgument
from emad_ref.screening.drafts import (
    AfterPrompt,
    DraftColumns,
    SelfDraftingResult,
    nearest,
    predict_after_prompts,
    read_after_prompts,
    seconds_per_token_drafting,
    select_texts,
    simulate_rounds,
)
from emad_ref.screening.prediction import measure_costs
from emad_ref.screening.timing import full_seconds
from tests.ticking import ticking

WAY = Drafting(2, 3)
NEW = {8: 12, 20: 10}  # prompt → tokens that follow
ROW = AfterPrompt(16, 4, 400, 0.5, 2.0, 0.25, 0.5)


@cache
def costs():
    stepper = ticking(per_key=0.01)
    return measure_costs(stepper, clock=stepper.clock, seconds=1.0)


def texts():
    return [TokenSequence(np.zeros(prompt + new), prompt - 1) for prompt, new in NEW.items() for _ in range(3)]


def columns():
    """Of the longer prompts' texts every draft is right, of the others' every second."""
    starts = np.cumsum([0, *(len(text.tokens) - 1 - text.adaptive_from for text in texts())])
    right = np.arange(starts[-1]) % 2 == 0
    right[starts[3] :] = True
    return DraftColumns(WAY, right, None, starts, np.full(starts[-1], -1))


def test_columns_of_some_texts_are_those_of_these_texts_alone():
    some = select_texts(columns(), [4, 1])
    assert some.starts.tolist() == [0, 10, 22]
    assert some.agrees.tolist() == [True] * 10 + columns().agrees[12:24].tolist()
    assert select_texts(columns(), range(6)).agrees.tolist() == columns().agrees.tolist()


def test_every_length_of_prompt_has_a_row_of_its_own_texts_at_its_own_keys():
    rows = predict_after_prompts(costs(), WAY, texts(), columns())
    assert [(row.prompt, row.texts, row.emitted) for row in rows] == [(8, 3, 33), (20, 3, 27)]
    for row, which, keys in zip(rows, ([0, 1, 2], [3, 4, 5]), (14.0, 25.0), strict=True):
        rounds = simulate_rounds(select_texts(columns(), which), math.inf, WAY.longest)
        assert row.tokens == rounds.tokens
        assert row.seconds == seconds_per_token_drafting(costs(), WAY, rounds, keys=keys)
        assert row.full == full_seconds(costs(), keys) > full_seconds(costs(), keys - 1)
    assert rows[1].agreement == 1.0
    assert rows[0].fast < rows[1].fast


def test_over_all_of_them_it_takes_what_they_take_together():
    rows = predict_after_prompts(costs(), WAY, texts(), columns())
    found = SelfDraftingResult(WAY, WAY, "", after=rows)
    assert found.tokens == pytest.approx(simulate_rounds(columns(), math.inf, WAY.longest).tokens)
    assert found.seconds == pytest.approx((33 * rows[0].seconds + 27 * rows[1].seconds) / 60)
    assert found.fast == pytest.approx((33 * rows[0].full + 27 * rows[1].full) / 60 / found.seconds)
    assert f"{rows[0].fast:.2f}× after 8, {rows[1].fast:.2f}× after 20 tokens of prompt" in found.said


def test_a_record_gives_them_back_and_one_without_gives_none():
    record = {"drafts": {"after": [asdict(ROW) | {"fast": ROW.fast}]}}
    assert read_after_prompts(record) == (ROW,)
    assert read_after_prompts({"drafts": {}}) == read_after_prompts({}) == ()
    assert ROW.fast == 2.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"seconds": 0.0}, "after prompts: seconds=0.0, but expected a number above 0; screen the model again"),
        ({"prompt": "16"}, "after prompts: prompt='16'"),
        ({"full": math.inf}, "after prompts: full=inf"),
        ({"agreement": None}, "after prompts: agreement=None, but expected a share"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_the_name_of_its_field(wrong, said):
    with pytest.raises(BadArgument, match=said):
        AfterPrompt.from_json(asdict(ROW) | wrong)


def test_the_nearest_length_is_so_in_proportion():
    rows = [AfterPrompt(prompt, 4, 400, 0.5, 2.0, 0.25, 0.5) for prompt in (16, 64, 128)]
    assert [nearest(rows, prompt).prompt for prompt in (1, 31, 33, 64, 95, 256)] == [16, 16, 64, 64, 128, 128]
    assert nearest([], 64) is None
