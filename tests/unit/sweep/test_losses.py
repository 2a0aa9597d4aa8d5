"""The loss table equals sums written out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emad_ref.calibration.confidence_columns import ConfidenceColumns, ConfidenceColumnsKey
from emad_ref.calibration.trace import Trace
from emad_ref.flop_ledger import flops
from emad_ref.models.geometry import geometry_of
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.record import Work
from emad_ref.replay.grids import confidence_sweep
from emad_ref.replay.losses import depth_by_position, gross_saving, replay_losses, tokens_before_depth_by_sequence
from emad_ref.replay.replay import replay
from emad_ref.signals import ENTROPY
from tests.handmade_traces import layerwise
from tests.small_models import LAYERS, small_config

GEOMETRY = geometry_of(small_config("gpt_neox"))
ADAPTIVE = OperatingPoint("half", "emad", LAYERS, LAYERS, (2, 4), ((0.5, 0.5),))


@pytest.fixture(scope="module")
def trace():
    """Return two sequences, of 3 and 2 decided positions after prompts of 0 and 4."""
    entropy = np.full((5, LAYERS), 1.0, dtype=np.float32)
    entropy[1, 3] = 0.4  # position 1 exits at layer 4, hence position 2 as well
    entropy[3, 1] = 0.4  # the second sequence exits at layer 2 at once
    nll = np.arange(5 * LAYERS, dtype=np.float32).reshape(5, LAYERS) / 50
    number = np.arange(5)
    return Trace(
        signals=layerwise(entropy, nll),
        nll_nats=nll,
        top1=np.zeros((5, LAYERS), dtype=np.int32),
        top1_probability=nll,
        token=number,
        target=number,
        position=np.array([0, 1, 2, 4, 5]),
        starts=np.array([0, 3, 5]),
        first_decided=np.array([0, 4]),
    )


DEPTHS = [LAYERS, 4, 4, 2, 2]


def test_quality_is_that_of_the_depths_taken(trace):
    _, row = replay_losses(trace, GEOMETRY, [ADAPTIVE])
    at_depth = trace.nll_nats[np.arange(5), np.array(DEPTHS) - 1].astype(np.float64)
    at_full = trace.nll_nats[:, -1].astype(np.float64)
    assert row.nats == pytest.approx([at_depth[:3].sum(), at_depth[3:].sum()])
    assert row.perplexity == pytest.approx(np.exp(at_depth.sum() / 5))
    assert row.perplexity_rise == pytest.approx(np.exp(at_depth.mean()) / np.exp(at_full.mean()) - 1)
    assert row.point is ADAPTIVE


def test_depths_are_summed_by_document(trace):
    _, row = replay_losses(trace, GEOMETRY, [ADAPTIVE])
    assert row.mean_depth == pytest.approx(np.mean(DEPTHS))
    assert row.table.depth[1].tolist() == [sum(DEPTHS[:3]), sum(DEPTHS[3:])]


def test_wrong_tokens_are_those_told_at_the_depths_taken(trace):
    """Layer 4 predicts 7 at every position; layers 2 and 6 predict the next token except at the last position."""
    told = np.full((5, LAYERS), 7, dtype=np.int32)
    told[:4, [1, 5]] = trace.target[:4, None]
    _, row = replay_losses(replace(trace, top1=told), GEOMETRY, [ADAPTIVE])
    assert row.table.means("wrong")[1] == pytest.approx(3 / 5), "all but positions 0 and 4, at layers 6 and 2"


@pytest.mark.parametrize("signal", [ENTROPY.name, "agreement"])
def test_what_points_of_a_kind_compare_is_made_once(trace, monkeypatch, signal):
    """Agreement once recomputed the column of all layers for every probe of every point."""
    asked, made = [], Trace.rule_signal
    monkeypatch.setattr(Trace, "rule_signal", lambda self, point: (asked.append(point.name), made(self, point))[1])
    points = [replace(ADAPTIVE, name=f"{level}", signal=signal, thresholds=((level, level),)) for level in (0.2, 0.5)]
    replay_losses(trace, GEOMETRY, [*points, replace(points[0], name="others", probes=(2, 3))])
    assert asked == ["0.2", "others"]


def test_a_rule_that_lost_a_next_token_has_wrong_tokens_and_no_finite_perplexity(trace):
    """Its output and its cost are its own: k = 3 of 101 tokens after the minimum layer 2."""
    first, layers = confidence_sweep("softmax_response", LAYERS, 258, 2, "fixed").point(1.0), np.arange(1, LAYERS + 1)
    assert first.probes == (2, 3, 4, 5)
    columns = ConfidenceColumns.empty(trace.nll_nats, trace.top1)
    columns.signal[:, 2] = 1.0  # exits after layer 3
    columns.nll_nats[:, 2] = [0.5, 0.5, np.inf, 0.5, 0.5]
    columns.top1[:, 2] = [0, 1, 9, 9, 9]
    columns.macs[:, 2] = [30, 30, 30, 30, 50]
    columns.heads[0], columns.heads[-1] = layers == 2, layers == 3
    columns.shows[[1, 2]] = True
    traced = replace(trace, rules={ConfidenceColumnsKey.from_point(first): columns})
    _, row = replay_losses(traced, GEOMETRY, [replace(first, thresholds=((0.5,) * 4,))])
    assert row.mean_depth == 3.0
    assert (row.perplexity, row.perplexity_rise) == (np.inf, np.inf)
    assert (row.nats == [np.inf, 1.0]).all()
    assert row.table.means("wrong")[1] == pytest.approx(3 / 5)
    work, full = Work.none(LAYERS), work_by_hand([LAYERS] * 5, [[LAYERS]] * 5)
    for position in [0, 1, 2, 4, 5]:
        work.tokens[:3] += 1
        work.context[:3] += position + 1
    work.readout_rows[0, 1], work.readout_rows[-1, 2], work.readout_macs[-1, 2] = 5, 5, 170
    assert row.net_reduction == pytest.approx(1 - flops(work, GEOMETRY).total / full.total)


def work_by_hand(depths, reads):
    """Count single-token steps: a block per layer up to the depth, a context of position + 1, and executed readouts."""
    work = Work.none(LAYERS)
    for position, depth, layers in zip([0, 1, 2, 4, 5], depths, reads, strict=True):
        work.tokens[:depth] += 1
        work.context[:depth] += position + 1
        for layer in layers:
            work.readout_rows[0, layer - 1] += 1
    return flops(work, GEOMETRY)


def test_reductions_are_shares_of_full_depth_of_the_same_steps_and_net_charges_the_probes(trace):
    _, row = replay_losses(trace, GEOMETRY, [ADAPTIVE])
    full = work_by_hand([LAYERS] * 5, [[LAYERS]] * 5)
    mine = work_by_hand(DEPTHS, [[2, 4, 6], [2, 4], [2, 4], [2], [2]])
    gross = gross_saving(trace, GEOMETRY, replay(trace, ADAPTIVE))
    assert gross == pytest.approx(1 - mine.blocks_and_attention / full.blocks_and_attention)
    assert row.net_reduction == pytest.approx(1 - mine.total / full.total)
    assert row.net_reduction < gross


def test_full_depth_loses_and_saves_nothing(trace):
    _, row = replay_losses(trace, GEOMETRY, [full_depth(LAYERS)])
    assert (row.perplexity_rise, row.net_reduction) == (0.0, 0.0)
    assert gross_saving(trace, GEOMETRY, replay(trace, row.point)) == 0.0
    assert row.mean_depth == LAYERS


def test_probes_that_never_fire_cost_and_save_nothing(trace):
    _, row = replay_losses(trace, GEOMETRY, [replace(ADAPTIVE, thresholds=((-1.0, -1.0),))])
    assert row.perplexity_rise == 0.0
    assert gross_saving(trace, GEOMETRY, replay(trace, row.point)) == 0.0
    assert row.net_reduction < 0.0


def test_rows_come_in_the_order_of_the_points_behind_full_depth(trace):
    points = [truncated(LAYERS, 2), full_depth(LAYERS), ADAPTIVE, truncated(LAYERS, 5)]
    table = replay_losses(trace, GEOMETRY, iter(points))
    assert [row.point for row in table] == [full_depth(LAYERS), *points]
    assert table[1].mean_depth == 2.0
    assert table.of(ADAPTIVE).index == 3
    assert [row.point for row in table.select([0, 4]).join(table.select([3]))] == [points[1], points[3], ADAPTIVE]
    assert [row.point for row in replay_losses(trace, GEOMETRY, [])] == [full_depth(LAYERS)]


def test_sequences_of_one_document_are_summed(trace):
    whole = replay_losses(replace(trace, documents=np.array([9, 9])), GEOMETRY, [ADAPTIVE])
    apart = replay_losses(replace(trace, documents=np.array([9, 4])), GEOMETRY, [ADAPTIVE])
    assert (whole.cluster.tolist(), whole.tokens.tolist()) == ([9], [5])
    assert (apart.cluster.tolist(), apart.tokens.tolist()) == ([4, 9], [2, 3])
    for name in ("nats", "wrong", "flops", "depth"):
        assert getattr(whole, name)[:, 0] == pytest.approx(getattr(apart, name).sum(axis=1))


def test_tokens_before_a_layer_are_counted_from_each_sequences_first_decided_one(trace):
    assert tokens_before_depth_by_sequence(trace, np.array(DEPTHS), 2).tolist() == [np.inf, 0]
    assert tokens_before_depth_by_sequence(trace, np.array(DEPTHS), 4).tolist() == [1, 0]
    assert tokens_before_depth_by_sequence(trace, np.array(DEPTHS), LAYERS).tolist() == [0, 0]


def test_depth_by_position_leaves_out_spans_without_tokens(trace):
    assert depth_by_position(trace, np.array(DEPTHS)) == {"1–32": pytest.approx(np.mean(DEPTHS))}
    far = replace(trace, position=np.array([31, 32, 127, 128, 900]))
    assert depth_by_position(far, np.array([6, 5, 3, 2, 1])) == {"1–32": 6.0, "33–128": 4.0, "129+": 1.5}
