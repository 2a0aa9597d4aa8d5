"""Sampling: the argmax, or draws from the softmax, independent for each row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from emad_ref.decoding.reference import Sampler
from emad_ref.errors import BadArgument

LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
CHANCE = 1e-4  # probability that a correct sampler fails; the seeds are fixed, so the result is deterministic


def draws(logits, temperature, count=4000, seed=3, rows=1):
    sampler = Sampler(rows, temperature, seed)
    batch = logits.repeat(rows, 1)
    return np.array([sampler.pick_next_tokens(batch, list(range(rows))).tolist() for _ in range(count)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_softmax_at_the_temperature(temperature):
    seen = np.bincount(draws(LOGITS, temperature)[:, 0], minlength=5)
    expected = torch.softmax(LOGITS.double() / temperature, -1).numpy() * seen.sum()
    assert stats.chisquare(seen, expected).pvalue > CHANCE
    flat = np.full(5, seen.sum() / 5)
    assert stats.chisquare(seen, flat).pvalue < CHANCE, "the test must be able to tell distributions apart"


def test_temperature_zero_is_the_argmax():
    assert set(draws(LOGITS, 0.0, 5)[:, 0]) == {3}
    assert Sampler(2).pick_next_tokens(torch.stack([LOGITS, -LOGITS]), [0, 1]).tolist() == [3, 2]


def test_a_masked_token_is_never_drawn():
    masked = LOGITS.clone()
    masked[3] = -torch.inf
    assert 3 not in draws(masked, 1.0, 500)


def test_the_seed_decides_and_rows_differ():
    first = draws(LOGITS, 1.0, 100, rows=2)
    assert (first == draws(LOGITS, 1.0, 100, rows=2)).all()
    assert (first != draws(LOGITS, 1.0, 100, seed=4, rows=2)).any()
    assert (first[:, 0] != first[:, 1]).any()


def test_a_row_draws_the_same_whatever_its_neighbours_do():
    alone = Sampler(3, 1.0, 7)
    together = Sampler(3, 1.0, 7)
    one = [int(alone.pick_next_tokens(LOGITS[None], [2])) for _ in range(30)]
    both = [together.pick_next_tokens(LOGITS.repeat(2, 1), [0, 2]).tolist()[1] for _ in range(30)]
    assert one == both


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(BadArgument, match="a finite number ≥ 0; 0 decodes greedily"):
        Sampler(1, temperature)
