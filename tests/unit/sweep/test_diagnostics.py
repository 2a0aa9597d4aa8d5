"""Diagnostics on traces small enough to count by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from emad_ref.calibration.trace import Trace
from emad_ref.point import OperatingPoint
from emad_ref.replay.replay import replay_depths
from emad_ref.signals import ENTROPY
from pytest_emad.sweep.diagnostics import (
    depth_by_position_doubling,
    entropy_agreement_auroc_by_layer,
    final_layer_agreement_rate,
    input_echo_rate_by_layer,
    median_tokens_until_depth_collapse,
    replay_monotone_and_free_depths,
)
from tests.handmade_traces import layerwise

LAYERS = 4
POINT = OperatingPoint("p", "emad", LAYERS, LAYERS, (1, 2), ((0.5, 0.5),))


def trace_of(entropy, top1, token, lengths):
    """Return a trace of ``entropy`` and ``top1`` [tokens, 4]; ``lengths`` of the sequences."""
    entropy, rows = np.array(entropy, dtype=np.float32), len(token)
    return Trace(
        signals=layerwise(entropy, entropy),
        nll_nats=entropy,
        top1=np.array(top1, dtype=np.int32),
        top1_probability=entropy,
        token=np.array(token),
        target=np.zeros(rows, dtype=np.int64),
        position=np.concatenate([np.arange(n) for n in lengths]),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        first_decided=np.zeros(len(lengths), dtype=np.int64),
    )


@pytest.fixture(scope="module")
def echoing():
    """Layer 1 echoes three of four tokens and agrees with the last layer on one."""
    top1 = [[7, 9, 9, 9], [8, 8, 3, 3], [5, 5, 5, 5], [1, 2, 6, 6]]
    entropy = [[0.4, 0.1, 0.1, 0.0], [0.3, 0.9, 0.2, 0.0], [0.1, 0.2, 0.3, 0.0], [0.2, 0.8, 0.4, 0.0]]
    return trace_of(entropy, top1, [7, 8, 5, 0], [4])


def test_echo_is_the_share_of_tokens_that_a_layer_says_again(echoing):
    assert input_echo_rate_by_layer(echoing).tolist() == [0.75, 0.5, 0.25, 0.25]


def test_agreement_is_with_the_last_layer_which_agrees_with_itself(echoing):
    assert final_layer_agreement_rate(echoing).tolist() == [0.25, 0.5, 1.0, 1.0]


def test_auroc_is_the_share_of_pairs_that_low_entropy_puts_in_order(echoing):
    """Layer 1: the agreeing token has the lowest entropy. Layer 2: both agreeing tokens are below both others."""
    assert entropy_agreement_auroc_by_layer(echoing)[:2].tolist() == [1.0, 1.0]
    confident_and_wrong = replace(echoing, signals={ENTROPY.name: -echoing.entropy_nats})
    assert entropy_agreement_auroc_by_layer(confident_and_wrong)[:2].tolist() == [0.0, 0.0]
    blind = replace(echoing, signals={ENTROPY.name: np.ones_like(echoing.entropy_nats)})
    assert entropy_agreement_auroc_by_layer(blind)[:2].tolist() == [0.5, 0.5]


def test_auroc_is_scikit_learns_also_among_ties():
    rng = np.random.default_rng(0)
    entropy, top1 = rng.integers(0, 9, (200, LAYERS)) / 4, rng.integers(0, 2, (200, LAYERS))
    agrees = top1 == top1[:, -1:]
    theirs = [roc_auc_score(agrees[:, layer], -entropy[:, layer]) for layer in range(LAYERS - 1)]
    assert entropy_agreement_auroc_by_layer(trace_of(entropy, top1, [0] * 200, [200]))[:-1] == pytest.approx(
        theirs, abs=1e-12
    )


def test_auroc_is_undefined_and_not_a_half_where_all_agree(echoing):
    assert np.isnan(entropy_agreement_auroc_by_layer(echoing)[2:]).all()
    none = replace(echoing, top1=np.array([[1, 1, 1, 2]] * 4, dtype=np.int32))
    assert np.isnan(entropy_agreement_auroc_by_layer(none)[:3]).all()


@pytest.fixture(scope="module")
def falling():
    """Free depths 4 1 4 2 | 2 1, hence monotone ones 4 1 1 1 | 2 1."""
    deep, first, second = [1.0] * 4, [0.1] * 4, [1.0, 0.1, 1.0, 1.0]
    rows = [deep, first, deep, second, second, first]
    return trace_of(rows, np.zeros((6, LAYERS)), [0] * 6, [4, 2])


@pytest.mark.parametrize("schedule", ["monotone", "free_eager"])
def test_bound_and_free_are_the_rules_whatever_the_points_schedule(falling, schedule):
    bound, free = replay_monotone_and_free_depths(falling, replace(POINT, schedule=schedule))
    assert bound.tolist() == [4, 1, 1, 1, 2, 1]
    assert free.tolist() == [4, 1, 4, 2, 2, 1]


def test_a_rule_that_never_fires_leaves_nothing_above_its_bound(falling):
    bound, free = replay_monotone_and_free_depths(falling, replace(POINT, thresholds=((-1.0, -1.0),)))
    assert bound.tolist() == free.tolist() == [LAYERS] * 6


@pytest.mark.parametrize("schedule", ["monotone", "free_eager"])
def test_along_a_text_depth_is_told_in_doublings_of_the_position(falling, schedule):
    found = depth_by_position_doubling(falling, replace(POINT, schedule=schedule))
    assert [(part.first, part.last, part.tokens) for part in found] == [(1, 1, 2), (2, 2, 2), (3, 4, 2)]
    assert [(part.depth, part.free_depth) for part in found] == [(3.0, 3.0), (1.0, 1.0), (1.0, 3.0)]
    assert [part.entropy_nats for part in found] == pytest.approx([1.0, 0.1, 1.0])


def test_doublings_that_hold_no_token_are_left_out(falling):
    """Prompts shift every position: the decided ones are the 8th to the 11th, and the 8th and 9th."""
    found = depth_by_position_doubling(replace(falling, position=falling.position + 7), POINT)
    assert [(part.first, part.last, part.tokens) for part in found] == [(5, 8, 2), (9, 16, 4)]


def test_collapse_is_the_median_of_tokens_before_the_first_probe(falling):
    def collapse(trace, point):
        return median_tokens_until_depth_collapse(trace, replay_depths(trace, point), point.probes[0])

    assert collapse(falling, POINT) == 1.0
    three = trace_of([[1.0] * 4, [0.1] * 4, [1.0] * 4, [1.0] * 4, [1.0] * 4, [0.1] * 4], np.zeros((6, 4)), [0] * 6, [6])
    assert collapse(three, POINT) == 1.0
    assert collapse(three, replace(POINT, probes=(2, 3))) == 1.0


def test_collapse_is_infinite_where_most_sequences_never_get_there(falling):
    depth = replay_depths(falling, replace(POINT, thresholds=((-1.0, 0.5),)))
    assert median_tokens_until_depth_collapse(falling, depth, POINT.probes[0]) == math.inf
