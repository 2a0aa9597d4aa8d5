"""Benchmark: speed of the reference decoder as ratios within one run, recorded by pytest-benchmark.

Run on request: ``pytest --run-slow -s tests/benchmarks``.

Absolute times differ between machines; these ratios do not. ``benchmark.clock`` takes samples in pairs and passes them
to pytest-benchmark, whose JSON has the ratio in ``extra_info``.
"""

from __future__ import annotations

import copy
import itertools
import time

import numpy as np
import pytest
import torch

from emad_ref.calibration.trace import concatenate_traces, stream_traces
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.models.loading import load
from emad_ref.point import OperatingPoint, full_depth, truncated
from emad_ref.protocol import Prompt
from emad_ref.replay.losses import replay_losses
from emad_ref.replay.replay import iterate_point_replays
from pytest_emad.benchmark.clock import WARM_UP, OwnSeconds, time_pairs
from pytest_emad.run.suite_support import CLOCK, record_benchmark_samples
from pytest_emad.statistics.speedup import estimate_speedup_per_request
from pytest_emad.statistics.units import ByPair

pytestmark = [pytest.mark.slow, pytest.mark.benchmark(timer=CLOCK)]

SHAPES = {  # pairs, prompt tokens, new tokens, minimum ratio; slow models take more and shorter turns
    "emad-tiny": (40, 32, 48, 1.9),
    "random:pythia-410m": (30, 4, 8, 1.05),
}
SHARES = {"three quarters": 3, "half": 2, "a quarter": 1}  # shares of the layers, in quarters
MOST_OVER = 1.05  # × the straight line
COLD = 2**24  # bytes written between two tokens: several times what a core's own cache holds
SWEPT_TOKENS, SWEPT_POINTS = {"emad-tiny": 50_000, "random:pythia-410m": 1_000}, 1000
SWEPT_SCHEDULES = ("monotone", "free_eager", "free_deferred", "chunked")
MOST_OF_A_PASS = 0.2  # 1,000 points and the pass: 1.2 passes
SLOW_TOKEN_S = 1e-3


@pytest.fixture(scope="module", params=list(SHAPES))
def loaded(request):
    return load(request.param)


def generate(model, ids, new):
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)


@pytest.fixture(scope="module")
def samples(loaded):
    """Return paired seconds of the model's ``generate`` and of the reference decoder at full depth."""
    pairs, _, new, _ = SHAPES[loaded.name]
    model, stepper = loaded.model, loaded.stepper
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    rng, prompts = drawn(loaded)
    decoder = WalkedDecoder(stepper, full_depth(stepper.layers))
    arms = {
        "full": lambda pair: decoder.generate([Prompt(prompts[pair])], new, frozenset()),
        "generate": lambda pair: generate(model, torch.from_numpy(prompts[pair])[None], new),
    }
    return time_pairs(arms, pairs, rng).seconds


@pytest.fixture(scope="module", params=["cold", "as they come"])
def shared(request, loaded):
    """Return paired seconds of the reference decoder at full depth, at shares of the layers and at one layer.

    ``cold``: before each token the core's cache is overwritten, as the weights of all layers together overwrite it.
    Otherwise the one layer of a small model stays in the cache, takes less time than any layer of a whole model, and
    makes the fitted line too low; that case is timed and printed, too.
    """
    pairs, _, new, _ = SHAPES[loaded.name]
    layers = loaded.stepper.layers
    points = {"full": full_depth(layers), "one": truncated(layers, 1)}
    points |= {share: truncated(layers, layers * quarters // 4) for share, quarters in SHARES.items()}
    rng, prompts = drawn(loaded)
    stepper = copy.copy(loaded.stepper)
    buffer, spent = torch.zeros(COLD if request.param == "cold" else 0, dtype=torch.uint8), [0.0]

    def embed(tokens, inputs):
        began = time.perf_counter()
        buffer.add_(1)
        spent[0] += time.perf_counter() - began
        return loaded.stepper.embed(tokens, inputs)

    stepper.embed = embed

    def arm(decoder):
        def run(pair):
            spent[0], began = 0.0, time.perf_counter()
            decoder.generate([Prompt(prompts[pair])], new, frozenset())
            return OwnSeconds(time.perf_counter() - began - spent[0])

        return run

    arms = {name: arm(WalkedDecoder(stepper, point)) for name, point in points.items()}
    return request.param, time_pairs(arms, pairs, rng).seconds


def drawn(loaded):
    pairs, prompt, _, _ = SHAPES[loaded.name]
    rng = np.random.default_rng(0)
    return rng, rng.integers(1, loaded.stepper.vocabulary_size, (WARM_UP + pairs, prompt))


def test_full_depth_is_no_slower_than_generate(benchmark, loaded, samples):
    least = SHAPES[loaded.name][-1]
    ratio = estimate_speedup_per_request(ByPair(samples["generate"]), ByPair(samples["full"]), threshold=least)
    benchmark.extra_info["generate / full depth"] = ratio.value
    record_benchmark_samples(benchmark, samples["full"], loaded.name)
    print(f"{loaded.name}: generate / full depth = {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")
    assert ratio.value >= least


@pytest.mark.parametrize("share", SHARES)
def test_a_share_of_the_layers_takes_that_share_of_the_blocks_time(benchmark, loaded, shared, share):
    """Time at depth d is embedding + head + d blocks: a straight line through depth 1 and full depth."""
    layers, (weights, samples) = loaded.stepper.layers, shared
    per_block = (samples["full"] - samples["one"]) / (layers - 1)
    line = samples["one"] + (layers * SHARES[share] // 4 - 1) * per_block
    ratio = estimate_speedup_per_request(ByPair(samples[share]), ByPair(line), threshold=MOST_OVER)
    benchmark.extra_info[f"{share} of the layers / (embedding + head + that share of the blocks)"] = ratio.value
    record_benchmark_samples(benchmark, samples[share], loaded.name)
    told = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    print(f"{loaded.name}, weights {weights}: {share} / its share = {told}")
    if weights == "cold":
        assert ratio.value <= MOST_OVER


def swept(trace):
    """Return ``SWEPT_POINTS`` points: thresholds × probe sets × schedules that replay supports."""
    layers, rng = trace.layers, np.random.default_rng(1)
    every = [tuple(range(stride, layers, stride)) for stride in (1, 2, 3, 4)] + [(layers // 3, 2 * layers // 3)]
    grid = list(itertools.product(SWEPT_SCHEDULES, every))
    levels = np.quantile(trace.entropy_nats[:2000], np.linspace(0.001, 0.5, 100), axis=0)
    for number in range(SWEPT_POINTS):
        schedule, probes = grid[number % len(grid)]
        taus = levels[rng.integers(len(levels)), np.array(probes) - 1]
        period = 8 if schedule == "chunked" else None
        yield OperatingPoint(
            f"{number}", "swept", layers, layers, probes, (tuple(taus.tolist()),), schedule=schedule, period=period
        )


@pytest.mark.parametrize("name", SWEPT_TOKENS)
def test_a_thousand_points_cost_a_fifth_of_one_pass(benchmark, name):
    """Replay gives depth, loss and token at every position; the baseline is a plain forward pass without exits.

    A loss table (sums, FLOPs, quantiles) may add a fifth of the traced pass, with a head after every layer; a fifth of
    the plain pass, too, where a token takes milliseconds.
    """
    loaded = load(name)
    stepper, length = loaded.stepper, 128
    rows = np.random.default_rng(0).integers(
        1, stepper.vocabulary_size, (SWEPT_TOKENS[name] // (length - 1) + 1, length)
    )

    @torch.inference_mode()
    def forward(rows):
        for at in range(0, len(rows), 16):
            loaded.model(torch.from_numpy(rows[at : at + 16, :-1]), use_cache=False)

    forward(rows[:1])  # warm-up
    parts = []
    tracing = seconds_of(lambda: parts.extend(stream_traces(stepper, map(TokenSequence, rows))))
    trace = concatenate_traces(parts)
    points = list(swept(trace))
    plain, replayed, tabled = 0.0, [], 0.0
    replays = iterate_point_replays(trace, points)
    quarter = -(-len(rows) // 4)
    for part in range(4):  # interleaved, because a machine's load changes within minutes
        plain += seconds_of(lambda part=part: forward(rows[part * quarter : (part + 1) * quarter]))
        for _ in range(SWEPT_POINTS // 4):
            replayed.append(seconds_of(lambda: next(replays)))
        tabled += seconds_of(lambda part=part: replay_losses(trace, stepper.geometry, points[part::4]))
    shares = {
        "replay / pass": sum(replayed) / plain,
        "loss table / pass": tabled / plain,
        "trace / pass": tracing / plain,
        "replay / trace": sum(replayed) / tracing,
        "loss table / trace": tabled / tracing,
    }
    benchmark.extra_info |= shares
    record_benchmark_samples(benchmark, replayed, f"replay of one point, {name}")
    told = ", ".join(f"{what} {share:.3f}" for what, share in shares.items())
    print(f"{name}, {len(trace)} tokens: plain pass {plain:.2f} s of one core; {SWEPT_POINTS} points: {told}")
    assert shares["replay / pass"] <= MOST_OF_A_PASS
    assert shares["loss table / trace"] <= MOST_OF_A_PASS
    if plain / len(trace) > SLOW_TOKEN_S:
        assert shares["loss table / pass"] <= MOST_OF_A_PASS


def seconds_of(run):
    """Return the CPU seconds of this process."""
    start = time.process_time()
    run()
    return time.process_time() - start
