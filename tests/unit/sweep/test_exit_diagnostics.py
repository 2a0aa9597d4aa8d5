"""Token ranks, calibration errors, and the arithmetic of tokens that never exit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.exit_rules import early_exit_point, kept_vocabulary_size
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import published_geometry
from emad_ref.protocol import Prompt
from pytest_emad.sweep.diagnostics import (
    efficiency_gain_bound,
    expected_calibration_error,
    final_token_ranks,
    layer_reliability,
    published_efficiency_gain,
    quantiles_of_ranks_by_layer,
    token_work_without_exit,
)
from tests.small_models import LAYERS, VOCABULARY, small_model

RULES = [
    ("softmax_response", "none"),
    ("softmax_response", "decaying"),
    ("softmax_response", "adaptive"),
    ("saturation", "none"),
    ("weighted_contrast", "none"),
    ("jsd_contrast", "none"),
    ("jsd_contrast", "adaptive"),
]


def test_the_last_layer_ranks_its_own_token_first() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 3, 7))
    assert (final_token_ranks(logits)[:, -1] == 1).all()


def test_a_rank_counts_the_tokens_that_lie_above() -> None:
    """The last layer predicts token 2; before it two tokens rank above, then one and an equal one."""
    logits = np.array([[[9.0, 8.0, 1.0, 0.0], [5.0, 4.0, 4.0, 0.0], [0.0, 0.0, 3.0, 0.0]]])
    assert final_token_ranks(logits).tolist() == [[3, 2, 1]]


def test_quantiles_of_ranks_are_ranks_that_occur() -> None:
    ranks = np.array([[1, 1], [10, 1], [100, 1], [1000, 2]])
    assert quantiles_of_ranks_by_layer(ranks, (0.5, 1.0)).tolist() == [[10.0, 1000.0], [1.0, 2.0]]


def test_calibration_error_of_the_sure_and_wrong_is_their_confidence() -> None:
    confidence = np.array([0.95, 0.91, 0.05])
    correct = np.array([False, True, False])
    # the two certain ones share a bin: |1/2 − 0.93| · 2/3, and 0.05 · 1/3
    assert expected_calibration_error(confidence, correct) == pytest.approx((0.86 + 0.05) / 3)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 12))
def test_one_bin_gives_the_least_calibration_error(tokens: list[tuple[float, bool]], bins: int) -> None:
    """Within a bin errors of opposite sign cancel; more bins can only cancel less."""
    confidence, correct = np.array([c for c, _ in tokens]), np.array([r for _, r in tokens])
    coarse, fine = (expected_calibration_error(confidence, correct, n) for n in (1, bins))
    assert coarse == pytest.approx(abs(correct.mean() - confidence.mean()), abs=1e-12)
    assert coarse <= fine + 1e-12 <= 1 + 2e-12


def test_reliability_speaks_of_each_layer_alone() -> None:
    confidence = np.array([[0.9, 0.2], [0.9, 0.2]])
    correct = np.array([[False, True], [False, False]])
    early, late = layer_reliability(confidence, correct)
    assert (early.layer, early.confidence, early.accuracy) == (1, pytest.approx(0.9), 0.0)
    assert (late.layer, late.confidence, late.accuracy) == (2, pytest.approx(0.2), 0.5)


@pytest.mark.parametrize(("signal", "pruning"), RULES)
def test_a_token_that_never_exits_costs_what_a_decoder_counts(signal: str, pruning: str) -> None:
    """Threshold above 1: every probe is read. Adaptive sizes depend on the text, so only their rows are compared."""
    stepper = CausalStepper(small_model("llama", torch.float32))
    vocabulary = 10 * VOCABULARY if pruning == "decaying" else VOCABULARY  # k* of such a small vocabulary is below 2
    point = early_exit_point(signal, LAYERS, vocabulary, 2, 1.5, pruning=pruning)
    decoder = WalkedDecoder(stepper, point)
    session, _ = decoder.start([Prompt(np.array([3, 1, 4]))])
    before = session.work
    session.feed(np.array([[1]]))
    counted, expected = session.work - before, token_work_without_exit(point, stepper.geometry, keys=4)
    assert np.array_equal(counted.tokens, expected.tokens)
    assert np.array_equal(counted.context, expected.context)
    assert np.array_equal(counted.readout_rows, expected.readout_rows)
    if pruning != "adaptive":
        assert np.array_equal(counted.readout_macs, expected.readout_macs)


def test_t5_large_saves_by_pruning_what_its_full_heads_allow() -> None:
    """Two full heads remain, after j and at the last layer: no k makes the confidence cheaper."""
    geometry = published_geometry("t5-large")
    plain, pruned = (
        token_work_without_exit(early_exit_point("softmax_response", 24, 32_128, 7, 2.0, pruning=name), geometry)
        for name in ("none", "fixed")
    )
    heads = [sum(flops(work, geometry).readouts.values()) / geometry.head_flops() for work in (plain, pruned)]
    assert heads[0] == 18
    assert heads[1] == pytest.approx(2 + 16 * kept_vocabulary_size(7, 24, 32_128) / 32_128)


@pytest.mark.parametrize(("minimum", "bound"), [(2, 12.0), (7, 3.43), (19, 1.26)])
def test_the_published_formula_is_bounded_by_depth_over_minimum(minimum: int, bound: float) -> None:
    k = kept_vocabulary_size(minimum, 24, 32_128)
    assert efficiency_gain_bound(24, minimum) == pytest.approx(bound, abs=0.005)
    assert 1 < published_efficiency_gain(24, 32_128, minimum, k) < efficiency_gain_bound(24, minimum)
    assert published_efficiency_gain(24, 32_128, minimum, 32_128) == 1
