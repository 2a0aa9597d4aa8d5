"""Benchmark: cost of probes every four layers in the decode loop, by estimator and retrieval (the paper: "negligible").

Random weights of Pythia-410M's geometry, batch 1, thresholds that never fire: every token runs to the last layer and
reads every probe. The baseline is full depth without probes on the same prompts. The cheapest probes are timed once
more, each alone against the baseline in shorter turns: a machine's load changes within seconds by more than they cost.
The accuracy of the estimates: ``test_entropy_estimator`` of ``suites/ablations``. Slow: ``pytest --run-slow -s``.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import emad_ref
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from pytest_emad.benchmark.clock import WARM_UP, time_pairs
from pytest_emad.statistics.speedup import estimate_speedup_per_request
from pytest_emad.statistics.units import ByPair

K, RANK = 64, 64
TIMED, TURNS = (12, 12), (60, 4)  # pairs, new tokens: of all estimators together, of one cheap one alone
ESTIMATORS = (
    EntropyEstimator(),
    EntropyEstimator("topk", k=K),
    EntropyEstimator("topk", k=K, search="faiss"),
    EntropyEstimator("topk", k=K, rank=RANK, search="lowrank"),
    EntropyEstimator("lowrank", k=K, rank=RANK),
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
def points(stepper):
    """Map the estimator's name, or ``no probes``, to a point that never exits."""
    layers, width = stepper.layers, stepper.unembedding.shape[1]
    probes = tuple(range(4, layers, 4))
    weights = tuple(map(tuple, np.random.default_rng(0).normal(size=(len(probes), width + 1))))
    never = ((-math.inf,) * len(probes),)
    return {"no probes": full_depth(layers)} | {
        estimator.name: OperatingPoint(estimator.name, "never", layers, layers, probes, never, estimator=estimator)
        for estimator in (*ESTIMATORS, EntropyEstimator("linear", weights=weights))
    }


def timed(stepper, points, pairs, new):
    """Return, and print, each estimator's decoding time over that without probes, with its interval."""
    prompts = np.random.default_rng(1).integers(0, stepper.vocabulary_size, WARM_UP + pairs)

    def arm(decoder):
        def run(pair):
            # one token: without a prompt all steps are alike
            decoder.generate([Prompt(prompts[[pair]])], new, frozenset())

        return run

    arms = {name: arm(WalkedDecoder(stepper, point)) for name, point in points.items()}
    seconds = time_pairs(arms, pairs, np.random.default_rng(2)).seconds
    ratios = {
        name: estimate_speedup_per_request(ByPair(seconds[name]), ByPair(seconds["no probes"]))
        for name in points
        if name != "no probes"
    }
    for name, ratio in ratios.items():
        print(f"{name:24s} {ratio.value:.3f} × a step without probes [{ratio.low:.3f}, {ratio.high:.3f}]")
    return ratios


@pytest.fixture(scope="module")
def ratios(stepper, points):
    return timed(stepper, points, *TIMED)


def test_every_estimator_is_timed_in_the_loop_with_its_retrieval(ratios):
    assert len(ratios) == len(ESTIMATORS) + 1


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_cheap_probe_costs_what_it_may(stepper, points, kind):
    chosen = {name: point for name, point in points.items() if name == "no probes" or name.startswith(kind)}
    (ratio,) = timed(stepper, chosen, *TURNS).values()
    assert ratio.value <= BOUNDS[kind]


def test_a_full_probe_costs_more_than_a_cheap_one(ratios):
    assert ratios["full"].low > max(ratios[name].value for name in ratios if name.startswith(tuple(BOUNDS)))
