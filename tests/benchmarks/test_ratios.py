"""Speed of our own code as ratios within one run, recorded by pytest-benchmark.

Run on request: ``pytest --run-slow -s tests/benchmarks``.

Absolute times do not travel between machines; these ratios do. Samples are taken in pairs by ``meters.clock`` and
handed to pytest-benchmark, whose JSON carries the ratio in ``extra_info``.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import TokenSequence, joined, stream
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.meters.clock import paired
from emad_ref.models.loading import load
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.protocol import Prompt
from emad_ref.replay import replay_all
from emad_ref.verdict.times import log_ratio
from emad_ref.verdict.units import ByPair
from pytest_emad.replayclock import CLOCK, record_samples

pytestmark = [pytest.mark.slow, pytest.mark.benchmark(timer=CLOCK)]

PROMPT = 32
SHAPES = {"emad-tiny": (40, 48, 1.5), "random:pythia-410m": (10, 24, 1.0)}  # pairs, new tokens, least ratio
SHARES = {"three quarters": 3, "half": 2, "a quarter": 1}  # of the layers, in quarters
MOST_OVER = 1.05  # × the straight line
SWEPT_TOKENS, SWEPT_POINTS = 100_000, 1000


@pytest.fixture(scope="module", params=list(SHAPES))
def loaded(request):
    return load(request.param)


def generate(model, ids, new):
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)


@pytest.fixture(scope="module")
def samples(loaded):
    """Paired seconds of the model's generate and of our decoder at full depth, shares of the layers and one layer."""
    pairs, new, _ = SHAPES[loaded.name]
    model, layers = loaded.model, loaded.stepper.layers
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, loaded.stepper.vocabulary, (pairs + 2, PROMPT))
    points = {"full": full_depth(layers), "one": truncated(layers, 1)}
    points |= {share: truncated(layers, layers * quarters // 4) for share, quarters in SHARES.items()}
    decoders = {name: WalkedDecoder(loaded.stepper, point) for name, point in points.items()}
    arms = {
        name: lambda pair, decoder=decoder: void(decoder.generate([Prompt(prompts[pair])], new, frozenset()))
        for name, decoder in decoders.items()
    }
    arms["generate"] = lambda pair: generate(model, torch.from_numpy(prompts[pair])[None], new)
    return paired(arms, pairs, rng, warm_up=2).seconds


def void(_):
    """A timed arm returns nothing: a number would be taken as its own measurement."""


def test_full_depth_is_no_slower_than_generate(benchmark, loaded, samples):
    least = SHAPES[loaded.name][2]
    ratio = log_ratio(ByPair(samples["generate"]), ByPair(samples["full"]), threshold=least)
    benchmark.extra_info["generate / full depth"] = ratio.value
    record_samples(benchmark, samples["full"], loaded.name)
    print(f"{loaded.name}: generate / full depth = {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")
    assert ratio.value >= least


@pytest.mark.parametrize("share", SHARES)
def test_a_share_of_the_layers_takes_that_share_of_the_blocks_time(benchmark, loaded, samples, share):
    """Time at depth d is embedding + head + d blocks: a straight line through depth 1 and full depth."""
    layers = loaded.stepper.layers
    per_block = (samples["full"] - samples["one"]) / (layers - 1)
    line = samples["one"] + (layers * SHARES[share] // 4 - 1) * per_block
    ratio = log_ratio(ByPair(samples[share]), ByPair(line), threshold=MOST_OVER)
    benchmark.extra_info[f"{share} of the layers / (embedding + head + that share of the blocks)"] = ratio.value
    record_samples(benchmark, samples[share], loaded.name)
    print(f"{loaded.name}: {share} / its share = {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")
    assert ratio.value <= MOST_OVER


def test_a_thousand_points_cost_a_fifth_of_one_pass(benchmark):
    loaded = load("emad-tiny")
    stepper, length = loaded.stepper, 128
    rng = np.random.default_rng(0)
    rows = rng.integers(1, stepper.vocabulary, (SWEPT_TOKENS // (length - 1) + 1, length))
    with torch.inference_mode():
        loaded.model(torch.from_numpy(rows[:16]), use_cache=False)  # warm-up
        start = time.perf_counter()
        for at in range(0, len(rows), 16):
            loaded.model(torch.from_numpy(rows[at : at + 16]), use_cache=False)
        plain = time.perf_counter() - start
    start = time.perf_counter()
    trace = joined(list(stream(stepper, (TokenSequence(row) for row in rows))))
    tracing = time.perf_counter() - start
    low, high = np.quantile(trace.entropy_nats[:, [3, 7]], [0.01, 0.99])
    thresholds = rng.uniform(low, high, (SWEPT_POINTS, 2))
    layers = stepper.layers
    points = [
        OperatingPoint(f"{i}", "quantile", layers, layers, (4, 8), (tuple(row),)) for i, row in enumerate(thresholds)
    ]
    seconds = []
    for replayed in timed(replay_all(trace, points), seconds):
        assert len(replayed.depth) == len(trace)
    benchmark.extra_info |= {"replay / pass": sum(seconds) / plain, "trace / pass": tracing / plain}
    record_samples(benchmark, seconds, "replay of one point")
    print(
        f"{len(trace)} tokens: plain pass {plain:.2f} s, trace {tracing / plain:.2f} passes, "
        f"{SWEPT_POINTS} points {sum(seconds) / plain:.3f} passes"
    )
    assert sum(seconds) <= 0.2 * plain


def timed(items, seconds):
    """Yield items; append to ``seconds`` what each took to make."""
    iterator = iter(items)
    while True:
        start = time.perf_counter()
        try:
            item = next(iterator)
        except StopIteration:
            return
        seconds.append(time.perf_counter() - start)
        yield item
