"""Criteria on one readout: what each lets go, from nobody to everybody, and what it has to be given."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import TokenSequence, Trace, take_trace
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.point import Estimator
from emad_ref.protocol import Prompt
from emad_ref.replay import replay
from emad_ref.signals import swept_signals
from emad_ref.sweep.components import criterion_points, gate_at_probes, saturation_point
from tests.lenses import attached
from tests.small import LAYERS, VOCABULARY, small_model

PROBES = (1, 3, 4)
BELOW = tuple(range(1, LAYERS))
GATE = Estimator("linear", weights=tuple(map(tuple, np.random.default_rng(3).normal(0, 0.3, (5, 33)).tolist())))


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
    return take_trace(stepper(), texts(), estimators={GATE: BELOW}, rules=[saturation_point(LAYERS, lens)], lens=lens)


def test_every_criterion_goes_from_hardly_any_token_to_all() -> None:
    trace, gate = gate_at_probes(traced(), GATE, BELOW, PROBES)
    found = criterion_points(trace, PROBES, gate, count=12)
    assert list(found) == [signal.label for signal in swept_signals("criterion")]
    for name, points in found.items():
        depths = [replay(trace, point).depth for point in points]
        assert (np.diff([depth.sum() for depth in depths]) <= 0).all(), name
        first = min(probe for probe in PROBES if name != "saturation" or probe > 1)
        assert set(depths[-1].tolist()) == {first}, name
        assert np.mean(depths[0] == LAYERS) > 0.8, name
        assert {depth for each in depths for depth in each.tolist()} <= {*PROBES, LAYERS}, name
        assert len({point.name for point in points}) == len(points) > 2, name
        assert {point.lens for point in points} == {trace.lens}


def test_they_decode_as_they_are_replayed() -> None:
    trace, gate = gate_at_probes(traced(), GATE, BELOW, PROBES)
    for points in criterion_points(trace, PROBES, gate, count=6).values():
        point = replace(points[2], schedule="free_eager")
        expected, text = replay(trace, point).depth[: trace.starts[1]], texts()[0]
        session, step = WalkedDecoder(stepper(), point).start([Prompt(text.tokens[:1])])
        depth = [int(step.depth[0, 0])]
        for token in text.tokens[1:-1]:
            depth.append(int(session.feed(np.array([[token]])).depth[0, 0]))
        assert depth == expected.tolist()


def test_what_is_not_on_record_is_left_out_or_refused() -> None:
    plain = take_trace(stepper(), texts())
    assert list(criterion_points(plain, PROBES, count=4)) == ["entropy", "softmax response", "agreement"]
    with pytest.raises(BadArgument, match=r"probes=\[3\], but expected layers of the gate \(1, 4\)"):
        gate_at_probes(traced(), GATE, (1, 4), PROBES)
    with pytest.raises(BadArgument, match="in a trace that records it"):
        gate_at_probes(plain, GATE, BELOW, PROBES)
