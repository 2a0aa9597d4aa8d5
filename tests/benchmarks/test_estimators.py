"""Benchmark: the cost of a probe in the decode loop, in multiples of one Transformer block, by entropy estimator.

Run on request: ``pytest --run-slow -s tests/benchmarks/test_estimators.py``.

One state at a time, one thread, at the shape of Pythia-410M (V = 50,304, D = 1024; two blocks are enough). Arms are
timed in pairs, in random order, so that every arm meets the same cache.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf

from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator
from emad_ref.probes.estimators import (
    LowRankEntropy,
    LowRankIndex,
    TopKEntropy,
    low_rank_factors,
    make_entropy_reader,
)
from pytest_emad.benchmark.clock import WARM_UP, time_pairs
from pytest_emad.run.suite_support import CLOCK, record_benchmark_samples
from pytest_emad.statistics.speedup import estimate_speedup_per_request
from pytest_emad.statistics.units import ByPair

pytestmark = [pytest.mark.slow, pytest.mark.benchmark(timer=CLOCK)]

VOCABULARY, WIDTH, BLOCKS, CONTEXT, K = 50_304, 1024, 2, 64, 64
PAIRS = 40
MOST = {  # blocks; measured on one thread of a shared machine, with an allowance for noise
    "lowrank 64": 0.4,  # 0.12
    "lowrank 128": 0.7,  # 0.29
    "lowrank 64, exact logits": 0.5,  # 0.14
    "linear": 0.05,  # 0.01
}


@pytest.fixture(scope="module")
def stepper():
    config = hf.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=16,
        max_position_embeddings=2 * CONTEXT,
    )
    torch.manual_seed(0)  # random weights: their values do not affect the time
    return CausalStepper(hf.GPTNeoXForCausalLM(config).eval())


@pytest.fixture(scope="module")
def samples(stepper):
    """Return paired seconds of one block and of one reading by each estimator."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(WARM_UP + PAIRS, 1, WIDTH, generator=generator)
    with torch.inference_mode():
        rows = stepper.unembedding
        weights = ((0.01,) * (WIDTH + 1),)
        linear = make_entropy_reader(stepper, EntropyEstimator("linear", weights=weights), (1,))
        readers = {
            "full softmax": make_entropy_reader(stepper, EntropyEstimator(), (1,)).read_uncorrected,
            "topk exact": make_entropy_reader(stepper, EntropyEstimator("topk", k=K), (1,)).read_uncorrected,
            "linear": lambda hidden: linear.read(hidden, 0),
        }
        parts = {rank: low_rank_factors(rows, rank) for rank in (64, 128)}
        for rank, found in parts.items():
            readers[f"lowrank {rank}"] = normed(stepper, LowRankEntropy(found, K))
        exact = TopKEntropy(LowRankIndex(rows, parts[64]), K, VOCABULARY)
        readers["lowrank 64, exact logits"] = normed(stepper, exact)
        readers["lowrank 64, stored [V, r]"] = normed(stepper, WrongWayRound(stepper.unembedding, parts[64]))
        arms = {name: lambda pair, read=read: read(states[pair]) for name, read in readers.items()}
        arms["one block"] = one_block(stepper, states)
        return time_pairs(arms, PAIRS, np.random.default_rng(0)).seconds


class WrongWayRound:
    """The same readout with the large factor stored as [V, r], to measure the effect of the layout."""

    def __init__(self, rows, found):
        self.inner, self.outer = found.a, found.b.T.contiguous()

    def __call__(self, x):
        return ((x @ self.inner) @ self.outer.T).topk(K)


def normed(stepper, estimate):
    return lambda hidden: estimate(stepper.apply_final_norm(hidden))


def one_block(stepper, states):
    """Run one decode step of one block against CONTEXT keys; the blocks alternate, so that none stays in the cache."""
    cache = stepper.new_cache(1, 2 * CONTEXT)
    ids = torch.arange(CONTEXT)[None]
    prompt = stepper.prepare_forward(np.arange(CONTEXT)[None], cache)
    stepper.run_layers(stepper.embed(ids, prompt), 0, BLOCKS, prompt)

    def run(pair):
        cache.truncate(np.array([CONTEXT]))
        inputs = stepper.prepare_forward(np.array([[CONTEXT]]), cache)
        stepper.run_layers(states[pair][None], 0, BLOCKS, inputs)

    return run


def test_a_cheap_probe_is_a_fraction_of_a_block(benchmark, samples):
    block = samples.pop("one block") / BLOCKS
    for name, seconds in samples.items():
        ratio = estimate_speedup_per_request(ByPair(seconds), ByPair(block), threshold=1.0)
        benchmark.extra_info[name] = ratio.value
        print(f"{name:28s} {ratio.value:6.3f} blocks [{ratio.low:.3f}, {ratio.high:.3f}]")
    record_benchmark_samples(benchmark, samples["lowrank 64"], "lowrank 64")
    for name, most in MOST.items():
        assert estimate_speedup_per_request(ByPair(samples[name]), ByPair(block), threshold=1.0).value <= most, name
