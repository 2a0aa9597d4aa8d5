"""How long timed requests are: shortened where a model is slow, prompt and new tokens alike; and what is handed on."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.evidence.stopwatch import FEWEST_NEW, FEWEST_PROMPT, TIMING_SECONDS, affordable, by_pair
from emad_ref.meters.clock import Timings
from emad_ref.verdict.interval import log_ratio

PAIRS, BATCHES = 30, (1, 4)


def seconds(prompt: int, new: int, prefill_per_token: float, step: float) -> float:
    return PAIRS * 3 * (sum(BATCHES) * prompt * prefill_per_token + len(BATCHES) * new * step)


def test_a_fast_model_keeps_the_budgets_request():
    assert affordable(64, 32, prefill=0.002, step=0.001, pairs=PAIRS, batch_sizes=BATCHES) == (64, 32)


@pytest.mark.parametrize(("per_token", "step"), [(0.004, 0.02), (0.02, 0.001), (0.0001, 0.08)])
def test_a_slow_models_prompts_are_paid_for_too(per_token, step):
    prompt, new = affordable(64, 32, prefill=64 * per_token, step=step, pairs=PAIRS, batch_sizes=BATCHES)
    assert seconds(64, 32, per_token, step) > TIMING_SECONDS
    assert seconds(prompt, new, per_token, step) <= TIMING_SECONDS or (prompt, new) == (FEWEST_PROMPT, FEWEST_NEW)


def test_no_request_is_shorter_than_decoding_needs_nor_longer_than_asked():
    assert affordable(64, 32, prefill=1e3, step=1e3, pairs=PAIRS, batch_sizes=BATCHES) == (FEWEST_PROMPT, FEWEST_NEW)
    assert affordable(5, 3, prefill=1e3, step=1e3, pairs=PAIRS, batch_sizes=BATCHES) == (5, 3)


def test_timings_become_pairs_for_intervals():
    seconds = {"full": np.array([2.0, 4.0, 3.0]), "adaptive": np.array([1.0, 2.0, 1.0])}
    arms = by_pair(Timings(seconds, seconds, ("full", "adaptive", "full")))
    assert list(arms) == ["full", "adaptive"]
    ratio = log_ratio(arms["full"], arms["adaptive"])
    assert (ratio.n, ratio.noun) == (3, "pairs")
    assert ratio.value == pytest.approx(12 ** (1 / 3))
