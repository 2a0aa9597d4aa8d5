"""What probes every four layers cost in the decode loop, by estimator, retrieval included; the paper says "negligible".

Random weights of Pythia-410M's geometry, batch 1, thresholds that never fire: every token runs to the last layer and
reads every probe, beside full depth without probes on the same prompts. How good each estimate is stands in
``suites/ablations/test_estimator.py``. Slow; run by ``pytest --run-slow -s``.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import emad_ref
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.meters.clock import paired
from emad_ref.point import Estimator, OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.verdict.times import log_ratio
from emad_ref.verdict.units import ByPair

PAIRS, NEW, K, RANK = 12, 12, 64, 64
ESTIMATORS = (
    Estimator(),
    Estimator("topk", k=K),
    Estimator("topk", k=K, search="ivf"),
    Estimator("topk", k=K, rank=RANK, search="lowrank"),
    Estimator("lowrank", k=K, rank=RANK),
)
BOUNDS = {"lowrank": 1.2, "linear": 1.03}  # × the time of a step without probes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stepper():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield emad_ref.load("random:pythia-410m").stepper
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ratios(stepper):
    """Estimator's name → time of decoding over that without probes, with its interval."""
    layers, width = stepper.layers, stepper.unembedding.shape[1]
    probes = tuple(range(4, layers, 4))
    weights = tuple(map(tuple, np.random.default_rng(0).normal(size=(len(probes), width + 1))))
    never = ((-math.inf,) * len(probes),)
    points = {"no probes": full_depth(layers)} | {
        estimator.name: OperatingPoint(estimator.name, "never", layers, layers, probes, never, estimator=estimator)
        for estimator in (*ESTIMATORS, Estimator("linear", weights=weights))
    }
    prompts = np.random.default_rng(1).integers(0, stepper.vocabulary, PAIRS + 1)
    decoders = {name: WalkedDecoder(stepper, point) for name, point in points.items()}

    def arm(decoder):
        def run(pair):
            decoder.generate(
                [Prompt(prompts[[pair]])], NEW, frozenset()
            )  # one token: without a prompt all steps are alike

        return run

    timings = paired({name: arm(decoder) for name, decoder in decoders.items()}, PAIRS, np.random.default_rng(2))
    seconds = timings.seconds
    return {
        name: log_ratio(ByPair(seconds[name]), ByPair(seconds["no probes"])) for name in points if name != "no probes"
    }


def test_every_estimator_is_timed_in_the_loop_with_its_retrieval(ratios):
    for name, ratio in ratios.items():
        print(f"{name:24s} {ratio.value:.3f} × a step without probes [{ratio.low:.3f}, {ratio.high:.3f}]")
    assert len(ratios) == len(ESTIMATORS) + 1


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_cheap_probe_costs_what_it_may(ratios, kind):
    (name,) = (name for name in ratios if name.startswith(kind))
    assert ratios[name].value <= BOUNDS[kind], f"{name}: {ratios[name].value:.3f} ×"


def test_a_full_probe_costs_more_than_a_cheap_one(ratios):
    assert ratios["full"].low > max(ratios[name].value for name in ratios if name.startswith(tuple(BOUNDS)))
