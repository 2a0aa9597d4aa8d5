"""Feeding a chunk in one pass equals token-by-token feeding: logits, depths, signals, caps and later steps."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.step import AdaptiveForward
from emad_ref.exit_rules import early_exit_point, threshold_point
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.signals import SIGNALS
from tests.small_models import LAYERS, VOCABULARY, small_model

EXACT = 1e-9  # float64
PROBES = (2, 4)
PROMPTS = [[5, 9, 2, 44], [7], [3, 1, 4, 1, 5, 9, 2], [8, 8]]


@pytest.fixture(scope="module", params=["gpt_neox", "llama", "opt"])
def stepper(request):
    return CausalStepper(small_model(request.param, seed=5))


@pytest.fixture(scope="module")
def point(stepper):
    """Return a point with thresholds that rarely fire, so that depth falls within chunks."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4, 60))
    entropy = take_trace(stepper, [TokenSequence(row) for row in tokens]).entropy_nats
    levels = tuple(float(np.quantile(entropy[:, probe - 1], 0.04)) for probe in PROBES)
    return OperatingPoint("rare", "quantile", LAYERS, LAYERS, PROBES, (levels,))


@pytest.mark.parametrize("seed", range(6))
def test_one_pass_is_token_by_token(stepper, point, seed):
    assert AdaptiveForward(stepper, point).can_decide_chunks
    require_alike(stepper, point, seed)


def require_alike(stepper, point, seed):
    """Compare chunks fed whole with the same tokens fed one by one."""
    rng = np.random.default_rng(seed)
    chunks = [rng.integers(0, VOCABULARY, (4, width)) for width in (7, 1, 5)]
    whole, _ = WalkedDecoder(stepper, point, max_rows=4).start([Prompt(np.array(p)) for p in PROMPTS])
    single, _ = WalkedDecoder(stepper, point, max_rows=4).start([Prompt(np.array(p)) for p in PROMPTS])
    for chunk in chunks:
        together = whole.feed(chunk)
        columns = [single.feed(chunk[:, [i]]) for i in range(chunk.shape[1])]
        depth = np.concatenate([step.depth for step in columns], axis=1)
        assert together.depth.tolist() == depth.tolist()
        logits = np.concatenate([step.logits for step in columns], axis=1)
        np.testing.assert_allclose(together.logits, logits, atol=EXACT, rtol=0)  # −inf where tokens were pruned
        signal = np.concatenate([step.signal for step in columns], axis=1)
        assert np.array_equal(np.isnan(together.signal), np.isnan(signal))
        assert np.nanmax(np.abs(together.signal - signal), initial=0.0) < EXACT
        assert whole.cap.tolist() == single.cap.tolist()
    assert whole.work.readout_rows.tolist() == single.work.readout_rows.tolist()


@pytest.mark.parametrize(
    "point",
    [
        early_exit_point("saturation", LAYERS, VOCABULARY, 2, 0.9, schedule="monotone"),
        early_exit_point("weighted_contrast", LAYERS, VOCABULARY, 2, 0.3, schedule="monotone"),
        early_exit_point("jsd_contrast", LAYERS, VOCABULARY, 2, 0.3, pruning="adaptive", schedule="monotone"),
        early_exit_point("softmax_response", LAYERS, VOCABULARY, 2, 0.1, schedule="monotone", decay=(9.0, 8.0)),
        *(
            threshold_point(signal, LAYERS, range(2, LAYERS), 1e-6)
            for signal in SIGNALS.values()
            if signal.needs_only_thresholds and not signal.is_single_layer
        ),
    ],
    ids=lambda point: point.name,
)
def test_what_remembers_shallower_layers_or_counts_decided_tokens_is_fed_one_by_one(stepper, point):
    """A row that leaves a chunk would leave the probe's memory behind; a falling threshold differs by token."""
    assert not AdaptiveForward(stepper, point).can_decide_chunks
    require_alike(stepper, point, 0)


def test_depth_came_down_within_chunks(stepper, point):
    """The law above would be trivial at a point of constant depth."""
    moved = 0
    for seed in range(6):
        chunk = np.random.default_rng(seed).integers(0, VOCABULARY, (4, 7))
        session, _ = WalkedDecoder(stepper, point, max_rows=4).start([Prompt(np.array(p)) for p in PROMPTS])
        moved += int((np.ptp(session.feed(chunk).depth, axis=1) > 0).sum())
    assert moved >= 3


def test_rolling_back_into_a_chunk_restores_the_cap(stepper, point):
    chunk = np.random.default_rng(3).integers(0, VOCABULARY, (4, 9))
    session, _ = WalkedDecoder(stepper, point, max_rows=4).start([Prompt(np.array(p)) for p in PROMPTS])
    held = session.length
    first = session.feed(chunk)
    session.rollback(held + np.array([2, 5, 0, 9]))
    session.rollback(held)
    second = session.feed(chunk)
    assert first.depth.tolist() == second.depth.tolist()
    assert np.abs(first.logits - second.logits).max() < EXACT
