"""Benchmark: calibration against a plain forward pass over the same batches, with and without the heads it must run.

Run on request: ``pytest --run-slow -s tests/benchmarks/test_calibration.py``.

Thresholds need a readout at each probe and no layer above the last probe. With the default probes, calibration does
less than a plain forward unless a head costs several layers, as at Pythia-410M's shape. The curve of all layers takes L
heads, a plain forward one. Both follow from arithmetic; what calibration adds to its heads (entropies, histograms,
sums) is measured. An entropy reads V logits and a head computes each from D products, so this share falls as 1/D.
Process time, in pairs within one process. Another process that uses the cache still costs a small model a tenth, which
the bound allows for.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from emad_ref.calibration.entropy_statistics import EntropyStatistics, measure_batch_statistics
from emad_ref.calibration.trace import iterate_states_after
from emad_ref.calibration.windows import TokenSequence
from emad_ref.exit_rules import default_probes
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.loading import load
from emad_ref.point import ThresholdBinSpec
from pytest_emad.benchmark.clock import WARM_UP, time_pairs
from pytest_emad.run.suite_support import CLOCK, record_benchmark_samples
from pytest_emad.statistics.speedup import estimate_speedup_per_request
from pytest_emad.statistics.units import ByPair

pytestmark = [pytest.mark.slow, pytest.mark.benchmark(timer=CLOCK)]

WIDE = "two blocks of Pythia-1.4B's shape"
TIMED = {"emad-tiny": (16, 128, 20), "random:pythia-410m": (2, 128, 4)}  # windows per batch, tokens per window, pairs
BESIDE_HEADS = {  # the same, and minimum throughput; with a head per layer, fewer windows make a turn long enough
    "emad-tiny": (16, 128, 20, 0.7),
    "random:pythia-410m": (1, 65, 16, 0.9),
    WIDE: (1, 65, 40, 0.95),
}
LEAST = {"emad-tiny": 0.95, "random:pythia-410m": 0.6}  # throughput of the probes relative to a plain forward


def model_of(name):
    if name != WIDE:
        return load(name).model
    blocks = {"num_hidden_layers": 2, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 8192}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=50304, **blocks)).eval()


def allowed(geometry, probes, keys):
    """Return the throughput relative to a plain forward that blocks and heads alone allow, at ``keys`` per token."""
    block, head = geometry.block_flops() + geometry.attention_flops(keys), geometry.head_flops()
    return (geometry.layers * block + head) / (probes[-1] * block + len(probes) * head)


@pytest.mark.parametrize("name", TIMED)
def test_probes_are_calibrated_at_about_the_speed_of_a_plain_forward(benchmark, name):
    windows, length, pairs = TIMED[name]
    model = model_of(name)
    stepper = CausalStepper(model)
    probes = default_probes(stepper.layers)
    rows = np.random.default_rng(0).integers(1, stepper.vocabulary_size, (WARM_UP + pairs, windows, length))

    @torch.inference_mode()
    def plain(pair):
        model(torch.from_numpy(rows[pair, :, :-1]), use_cache=False)

    def calibrated(pair):
        measure_batch_statistics(stepper, [TokenSequence(row) for row in rows[pair]], ThresholdBinSpec(), None, probes)

    seconds = time_pairs({"plain": plain, "calibrated": calibrated}, pairs, np.random.default_rng(1)).process_seconds
    ratio = estimate_speedup_per_request(ByPair(seconds["plain"]), ByPair(seconds["calibrated"]), threshold=LEAST[name])
    benchmark.extra_info |= {"forward / calibration of probes": ratio.value}
    record_benchmark_samples(benchmark, seconds["calibrated"], f"{name}, probes")
    print(
        f"{name}: calibrating the probes {probes} of {stepper.layers} layers has {ratio.value:.3f} "
        f"[{ratio.low:.3f}, {ratio.high:.3f}] of a plain forward's throughput; FLOPs allow "
        f"{allowed(geometry_of(model.config), probes, length // 2):.3f}"
    )
    assert ratio.value >= LEAST[name]


@pytest.mark.parametrize("name", BESIDE_HEADS)
def test_calibration_costs_little_beyond_its_forward_and_heads(benchmark, name):
    windows, length, pairs, least = BESIDE_HEADS[name]
    model = model_of(name)
    stepper, plan = CausalStepper(model), ThresholdBinSpec()
    rng = np.random.default_rng(0)
    rows = rng.integers(1, stepper.vocabulary_size, (WARM_UP + pairs, windows, length))
    total, layers = [EntropyStatistics.empty(plan.bin_count, stepper.layers)], range(1, stepper.layers + 1)

    @torch.inference_mode()
    def plain(pair):
        model(torch.from_numpy(rows[pair, :, :-1]), use_cache=False)

    @torch.inference_mode()
    def with_heads(pair):
        for states in iterate_states_after(stepper, [TokenSequence(row) for row in rows[pair]]):
            stepper.logits(states)

    def calibrated(pair):
        batch = [TokenSequence(row) for row in rows[pair]]
        total[0] += measure_batch_statistics(stepper, batch, plan, None, layers)

    arms = {"plain": plain, "with heads": with_heads, "calibrated": calibrated}
    seconds = time_pairs(arms, pairs, np.random.default_rng(1)).process_seconds
    mine = ByPair(seconds["calibrated"])
    forward, heads = (
        estimate_speedup_per_request(ByPair(seconds[arm]), mine, threshold=least) for arm in ("plain", "with heads")
    )
    assert total[0].tokens.sum() == (pairs + 1) * windows * (length - 1)
    benchmark.extra_info |= {"forward / calibration": forward.value, "(forward + heads) / calibration": heads.value}
    record_benchmark_samples(benchmark, seconds["calibrated"], name)
    print(
        f"{name}: throughput of all layers {forward.value:.3f} of a plain forward's, "
        f"{heads.value:.3f} [{heads.low:.3f}, {heads.high:.3f}] of a forward's with a head after every layer"
    )
    assert heads.value >= least
