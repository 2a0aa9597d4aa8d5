"""Exit criteria on one readout: each runs from no exit to all, and needs certain columns."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator
from emad_ref.protocol import Prompt
from emad_ref.replay.replay import replay
from emad_ref.signals import signals_in_sweep
from pytest_emad.sweep.components import (
    no_exit_saturation_operating_point,
    points_by_criterion,
    restrict_trace_gate_to_probes,
)
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

PROBES = (1, 3, 4)
BELOW = tuple(range(1, LAYERS))
GATE = EntropyEstimator("linear", weights=tuple(map(tuple, np.random.default_rng(3).normal(0, 0.3, (5, 33)).tolist())))


@cache
def stepper() -> CausalStepper:
    return CausalStepper(small_model("gpt_neox", torch.float64))


@cache
def texts() -> tuple[TokenSequence, ...]:
    rng = np.random.default_rng(1)
    return tuple(TokenSequence(rng.integers(0, VOCABULARY, n), at) for n, at in ((30, 0), (24, 5), (8, 3)))


@cache
def traced() -> Trace:
    lens = attached(stepper(), BELOW, 5)
    return take_trace(
        stepper(),
        texts(),
        estimators={GATE: BELOW},
        rules=[no_exit_saturation_operating_point(LAYERS, lens)],
        lens=lens,
    )


@pytest.fixture(params=[signal.label for signal in signals_in_sweep("criterion")])
def criterion(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_signal_whose_row_says_so_is_a_criterion_and_no_other() -> None:
    trace, gate = restrict_trace_gate_to_probes(traced(), GATE, BELOW, PROBES)
    compared = list(points_by_criterion(trace, PROBES, gate, count=2))
    assert compared == [signal.label for signal in signals_in_sweep("criterion")]


def test_a_criterion_goes_from_hardly_any_token_to_all(criterion: str) -> None:
    trace, gate = restrict_trace_gate_to_probes(traced(), GATE, BELOW, PROBES)
    points = points_by_criterion(trace, PROBES, gate, count=12)[criterion]
    depths = [replay(trace, point).depth for point in points]
    assert (np.diff([depth.sum() for depth in depths]) <= 0).all()
    first = min(probe for probe in PROBES if criterion != "saturation" or probe > 1)
    assert set(depths[-1].tolist()) == {first}
    assert np.mean(depths[0] == LAYERS) > 0.8
    assert {depth for each in depths for depth in each.tolist()} <= {*PROBES, LAYERS}
    assert len({point.name for point in points}) == len(points) > 2
    assert {point.lens for point in points} == {trace.lens}


def test_a_criterion_decodes_as_it_is_replayed(criterion: str) -> None:
    trace, gate = restrict_trace_gate_to_probes(traced(), GATE, BELOW, PROBES)
    point = replace(points_by_criterion(trace, PROBES, gate, count=6)[criterion][2], schedule="free_eager")
    expected, text = replay(trace, point).depth[: trace.starts[1]], texts()[0]
    session, step = WalkedDecoder(stepper(), point).start([Prompt(text.tokens[:1])])
    depth = [int(step.depth[0, 0])]
    for token in text.tokens[1:-1]:
        depth.append(int(session.feed(np.array([[token]])).depth[0, 0]))
    assert depth == expected.tolist()


def test_what_is_not_on_record_is_left_out() -> None:
    plain = take_trace(stepper(), texts())
    recorded = [signal.label for signal in signals_in_sweep("criterion") if signal.needs_only_thresholds]
    assert list(points_by_criterion(plain, PROBES, count=4)) == recorded
