"""Oracle savings equal an exhaustive search over depths; copied K/V is charged as in decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.replay.replay import ReplayResult, replay
from pytest_emad.sweep.oracle_savings import (
    FINEST_THRESHOLD,
    oracle_divergence_point,
    oracle_losses,
    sequence_flops_with_fill_cost,
    with_oracle_signal,
)
from tests.plain_forms import compute_prompt_work
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

PROBES = (1, 3, 4)


@cache
def stepper() -> CausalStepper:
    return CausalStepper(small_model("gpt_neox", torch.float64))


@cache
def texts() -> tuple[TokenSequence, ...]:
    rng = np.random.default_rng(1)
    sizes = (30, 0), (24, 5), (8, 3)
    return tuple(TokenSequence(rng.integers(0, VOCABULARY, n), at, number) for number, (n, at) in enumerate(sizes))


@cache
def traced() -> Trace:
    return take_trace(stepper(), texts(), lens=attached(stepper(), range(1, LAYERS), 5), divergence=True)


def plainly(trace: Trace, threshold: float, probes: tuple[int, ...], monotone: bool) -> list[int]:
    depths = []
    for number in range(trace.n_sequences):
        cap = trace.layers
        for token in range(trace.starts[number], trace.starts[number + 1]):
            near = [p for p in probes if np.sqrt(trace.divergence()[token, p - 1]) <= np.float32(threshold)]
            depth = min([*near, trace.layers])
            cap = min(cap, depth) if monotone else depth
            depths.append(cap)
    return depths


@pytest.mark.parametrize("monotone", [False, True])
def test_a_token_leaves_at_the_first_probe_that_is_near_enough(monotone: bool) -> None:
    threshold = float(np.quantile(np.sqrt(traced().divergence()[:, 2]), 0.2))
    known = replay(with_oracle_signal(traced()), oracle_divergence_point(traced(), threshold, PROBES, monotone))
    assert known.depth.tolist() == plainly(traced(), threshold, PROBES, monotone)
    assert len(set(known.depth.tolist())) > 2
    found = oracle_losses(traced(), stepper().geometry, monotone=monotone, probes=PROBES, count=40)
    first, *points = found
    assert first.point.name == "full depth"
    for loss in points:
        setting = loss.point.thresholds[0][0]
        assert loss.mean_depth * len(traced()) == pytest.approx(sum(plainly(traced(), setting, PROBES, monotone)))


def prices(trace: Trace, count: int) -> list[float]:
    """Return the prices λ of an oracle with ``count`` settings at ``PROBES``."""
    largest = float(np.sqrt(trace.divergence()[:, [probe - 1 for probe in PROBES]].astype(np.float64)).max()) ** 2
    return [float(price) for price in np.geomspace(FINEST_THRESHOLD, max(largest, 2 * FINEST_THRESHOLD), count)]


@pytest.mark.parametrize("monotone", [False, True])
def test_at_a_price_no_other_depths_cost_less(monotone: bool) -> None:
    """Every choice for the four tokens of the last sequence, among four depths, is compared."""
    trace = traced().reorder_sequences(np.array([2, 0]))
    known, depths = trace.divergence().astype(np.float64), np.array([*PROBES, LAYERS])
    rows = np.arange(trace.starts[1])
    found = oracle_losses(trace, stepper().geometry, "price", monotone=monotone, probes=PROBES, count=25)
    taken = []
    for price, spent, nll in zip(prices(trace, 25), found.depth[1:, 1], found.nats[1:, 1], strict=True):
        ways = np.array([way for way in product(depths, repeat=len(rows)) if not monotone or (np.diff(way) <= 0).all()])
        cost = known[rows, ways - 1].sum(axis=1) + price * ways.sum(axis=1)
        best = ways[cost <= cost.min() + 1e-9]
        assert spent in best.sum(axis=1)
        assert np.abs(trace.nll_nats[rows, best - 1].sum(axis=1) - nll).min() < 1e-4  # float32 columns
        taken.append(spent)
    assert len(set(taken)) > 2


@pytest.mark.parametrize("monotone", [False, True])
def test_no_threshold_beats_the_price_at_any_price(monotone: bool) -> None:
    trace, depths = traced(), np.array([*PROBES, LAYERS])
    by_price = oracle_losses(trace, stepper().geometry, "price", monotone=monotone, probes=PROBES, count=25)
    for setting in np.quantile(np.sqrt(trace.divergence()), (0.1, 0.4, 0.7)):
        depth = replay(
            with_oracle_signal(trace), oracle_divergence_point(trace, float(setting), PROBES, monotone)
        ).depth
        lost = trace.divergence()[np.arange(len(trace)), depth - 1].sum(dtype=np.float64)
        for price, spent in zip(prices(trace, 25), by_price.totals("depth")[1:], strict=True):
            assert spent * price <= lost + price * depth.sum() + 1e-9  # its loss is not below 0
    assert depths[-1] * len(trace) == by_price.depth[0].sum()


def test_free_depth_costs_what_a_copying_decoder_is_charged() -> None:
    trace, geometry = traced(), stepper().geometry
    levels = tuple(float(np.quantile(trace.entropy_nats[:, probe - 1], 0.3)) for probe in PROBES)
    point = OperatingPoint("copied", "f", LAYERS, LAYERS, PROBES, (levels,), "copying", lens=trace.lens)
    for number, text in enumerate(texts()):
        start = text.first_decided
        session, step = WalkedDecoder(stepper(), point).start([Prompt(text.tokens[: start + 1])])
        depth = [int(step.depth[0, 0])]
        for token in text.tokens[start + 1 : -1]:
            depth.append(int(session.feed(np.array([[token]])).depth[0, 0]))
        one = trace.reorder_sequences(np.array([number]))
        free = replace(point, schedule="free_eager")
        spent = sequence_flops_with_fill_cost(
            one, ReplayResult(free, np.array(depth), np.zeros(len(one)), np.zeros(len(one), int)), geometry
        )
        assert len(set(depth)) > 1
        assert (
            flops(session.work, geometry).total
            == spent.sum() + flops(compute_prompt_work(one.first_decided, point), geometry).total
        )


def test_a_trace_without_divergences_is_refused() -> None:
    plain = replace(traced(), divergence_nats=None)
    with pytest.raises(BadArgument, match="divergence=True"):
        oracle_losses(plain, stepper().geometry)
