"""Replay equals teacher-forced decoding in depths and losses, and the Work it derives equals the counted Work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from emad_ref.calibration.trace import compute_layer_logits, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.flop_ledger import flops
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec, full_depth, truncated
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE
from emad_ref.replay.replay import (
    compute_decode_flops_by_sequence,
    compute_decode_work,
    replay,
    top1_tokens_at_depth,
)
from emad_ref.signals import LAYERWISE
from tests.plain_forms import decode_and_prompt_work, monotone_depths_from_signal

pytestmark = pytest.mark.each_value

LAYERS, VOCABULARY, PROBES = 6, 97, (2, 4)
TOPK = EntropyEstimator("topk", k=12, correction=((1.1, -0.1), (0.9, 0.2)))
LOWRANK = EntropyEstimator("lowrank", k=12, rank=8)
ESTIMATED = {TOPK: PROBES, LOWRANK: PROBES}
ROUNDING = 1e-5  # traces hold float32


@pytest.fixture(scope="module")
def stepper():
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return CausalStepper(GPTNeoXForCausalLM(config).double().eval())


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(1)
    return [TokenSequence(rng.integers(0, VOCABULARY, n), start) for n, start in ((30, 0), (24, 5), (37, 11), (12, 3))]


@pytest.fixture(scope="module")
def trace(stepper, sequences):
    return take_trace(stepper, sequences, estimators=ESTIMATED)


def quantile_point(trace, quantile, schedule="monotone"):
    thresholds = tuple(float(np.quantile(trace.entropy_nats[:, p - 1], quantile)) for p in PROBES)
    return OperatingPoint("quantile", "quantile", LAYERS, LAYERS, PROBES, (thresholds,), schedule)


KINDS = [
    "full", "truncated", "rare", "often", "free", "deferred", "chunked", "positional", "position", "top1_probability",
    "between", "topk", "lowrank", *LAYERWISE,
]  # fmt: skip


def binned(trace, feature):
    wide = quantile_point(trace, 0.4)
    rows = tuple(tuple(t * share for t in wide.thresholds[0]) for share in (1.0, 0.9, 0.0))
    return replace(
        wide,
        thresholds=rows,
        bins=ThresholdBinSpec((feature,), position_edges=(8, 20), top1_probability_edges=(0.1, 0.2)),
    )


def estimated(trace, estimator):
    levels = tuple(float(np.quantile(trace.estimates[estimator][:, p - 1], 0.4)) for p in PROBES)
    return OperatingPoint(estimator.name, "quantile", LAYERS, LAYERS, PROBES, (levels,), estimator=estimator)


def between(trace):
    """Return probes with layers between them, and rising thresholds that lines cross there."""
    levels = tuple(float(np.quantile(trace.entropy_nats[:, p - 1], q)) for p, q in ((1, 0.02), (3, 0.02), (5, 0.9)))
    return OperatingPoint("between", "quantile", LAYERS, LAYERS, (1, 3, 5), (levels,), interpolate=True)


def compared(trace, name):
    """Return thresholds that three tokens in ten pass, for every signal of one layer."""
    share = 0.3 if LAYERWISE[name].sense == "falls" else 0.7
    levels = tuple(float(np.quantile(trace.signal_at_every_layer(name)[:, p - 1], share)) for p in PROBES)
    return OperatingPoint(name, "quantile", LAYERS, LAYERS, PROBES, (levels,), signal=name)


@pytest.fixture(params=KINDS)
def point(request, trace):
    return {
        "full": lambda: full_depth(LAYERS),
        "truncated": lambda: truncated(LAYERS, 3),
        "rare": lambda: quantile_point(trace, 0.05),
        "often": lambda: quantile_point(trace, 0.4),
        "free": lambda: quantile_point(trace, 0.4, "free_eager"),
        "deferred": lambda: quantile_point(trace, 0.4, "free_deferred"),
        "chunked": lambda: replace(quantile_point(trace, 0.4, "free_deferred"), schedule="chunked", period=4),
        "positional": lambda: OperatingPoint(
            "falls", "positional", LAYERS, LAYERS, (), ((),), "positional", period=12, floor=2
        ),
        "position": lambda: binned(trace, "position"),
        "top1_probability": lambda: binned(trace, "top1_probability"),
        "between": lambda: between(trace),
        "topk": lambda: estimated(trace, TOPK),
        "lowrank": lambda: estimated(trace, LOWRANK),
        **{name: lambda: compared(trace, request.param) for name in LAYERWISE},
    }[request.param]()


def nll(logits, target):
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target])


def test_teacher_forced_decoding_is_replay_token_by_token(stepper, sequences, trace, point):
    expected = replay(trace, point)
    for number, sequence in enumerate(sequences):
        rows = slice(trace.starts[number], trace.starts[number + 1])
        decoder = WalkedDecoder(stepper, point)
        start = sequence.first_decided
        session, step = decoder.start([Prompt(sequence.tokens[: start + 1])])
        depths, losses = [], []
        for at in range(start, len(sequence.tokens) - 1):
            depths.append(int(step.depth[0, 0]))
            losses.append(nll(step.logits[0, 0], sequence.tokens[at + 1]))
            if at + 2 < len(sequence.tokens):
                step = session.feed(sequence.tokens[at + 1][None, None])
        assert depths == expected.depth[rows].tolist()
        assert np.abs(np.array(losses) - expected.nll_nats[rows]).max() < ROUNDING


def test_every_kind_of_point_reaches_several_depths(trace, point):
    """A point of constant depth would test nothing below; one that interpolates also exits between probes."""
    reached = set(replay(trace, point).depth.tolist())
    if point.family in ("full", "truncation"):
        assert len(reached) == 1
    else:
        assert len(reached) > 1
    if point.interpolate:
        assert reached - {1, 3, 5, LAYERS}


def test_derived_work_is_counted_work(stepper, sequences, trace, point):
    expected = replay(trace, point)
    decode, prompt = decode_and_prompt_work(trace, point, expected.depth, expected.macs_per_row)
    counted = None
    for sequence in sequences:
        start = sequence.first_decided
        session, _ = WalkedDecoder(stepper, point).start([Prompt(sequence.tokens[: start + 1])])
        for token in sequence.tokens[start + 1 : -1]:
            session.feed(token[None, None])
        counted = session.work if counted is None else counted + session.work
    assert counted == decode + prompt, counted.describe_difference(decode + prompt)


def test_flops_by_sequence_are_those_of_the_work_of_each_sequence_alone(stepper, sequences, trace, point):
    expected, geometry = replay(trace, point), stepper.geometry
    by_sequence = compute_decode_flops_by_sequence(trace, expected, geometry)
    assert (
        by_sequence.sum()
        == flops(compute_decode_work(trace, expected.depth, point, expected.macs_per_row), geometry).total
    )
    for number in range(len(sequences)):
        alone = trace.reorder_sequences(np.array([number]))
        depth = expected.depth[trace.starts[number] : trace.starts[number + 1]]
        assert (
            by_sequence[number]
            == flops(compute_decode_work(alone, depth, point, expected.macs_per_row), geometry).total
        )


def test_emitted_tokens_are_the_argmax_that_replay_sees(stepper, trace, point):
    prompt = np.array([5, 9, 2, 44])
    record = WalkedDecoder(stepper, point).generate([Prompt(prompt)], 25, frozenset())
    history = np.concatenate([prompt, record.emitted[0]])
    seen = take_trace(stepper, [TokenSequence(history, len(prompt) - 1)], estimators=ESTIMATED)
    expected = replay(seen, point)
    assert record.tokens.select_sequence(0, DECODE).depth.tolist() == expected.depth.tolist()
    assert top1_tokens_at_depth(seen, expected.depth).tolist() == record.emitted[0].tolist()
    assert (
        record.work[0] - record.prompt_work[0]
        == decode_and_prompt_work(seen, point, expected.depth, expected.macs_per_row)[0]
    )


def test_rows_of_a_batch_are_the_rows_alone(stepper, point):
    prompts = [Prompt(np.array(p)) for p in ([5, 9, 2, 44], [7], [3, 1, 4, 1, 5, 9, 2], [8, 8])]
    together = WalkedDecoder(stepper, point, max_rows=4).generate(prompts, 20, frozenset({11}))
    for row, prompt in enumerate(prompts):
        alone = WalkedDecoder(stepper, point).generate([prompt], 20, frozenset({11}))
        assert together.emitted[row].tolist() == alone.emitted[0].tolist()
        assert (
            together.tokens.select_sequence(row, DECODE).depth.tolist()
            == alone.tokens.select_sequence(0, DECODE).depth.tolist()
        )
        assert together.stop[row] == alone.stop[0]


def test_full_depth_adaptive_is_the_models_own_greedy_decoding(stepper):
    prompt = torch.tensor([[5, 9, 2, 44]])
    own = stepper.model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    record = WalkedDecoder(stepper, full_depth(LAYERS)).generate([Prompt(prompt[0].numpy())], 20, frozenset())
    assert record.emitted[0].tolist() == own[0, 4:].tolist()


def test_trace_in_a_batch_is_the_trace_alone_and_the_lens(stepper, sequences, trace):
    alone = take_trace(stepper, sequences[1:2])
    rows = slice(trace.starts[1], trace.starts[2])
    assert np.abs(trace.entropy_nats[rows] - alone.entropy_nats).max() < ROUNDING
    logits = compute_layer_logits(stepper, sequences[1].tokens)[5:-1]
    assert logits.argmax(-1).tolist() == alone.top1.tolist()


def test_free_depth_leaves_the_full_models_cache(stepper, trace):
    """Eager backfill: after any depths the next full-depth logits are the full model's."""
    point = quantile_point(trace, 0.5, "free_eager")
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, 20)
    session, step = WalkedDecoder(stepper, point).start([Prompt(tokens[:3])])
    reference = compute_layer_logits(stepper, tokens)
    depths = []
    for at in range(2, 20):
        depth = int(step.depth[0, 0])
        depths.append(depth)
        assert np.abs(step.logits[0, 0] - reference[at, depth - 1]).max() < 1e-9
        if at < 19:
            step = session.feed(tokens[at + 1][None, None])
    assert depths != sorted(depths, reverse=True), "the drawn case must rise and fall"


@pytest.mark.parametrize("quantile", [0.02, 0.2, 0.6])
def test_grid_of_all_sequences_is_the_plain_recursion_in_each(trace, quantile):
    point = quantile_point(trace, quantile)
    probes = np.array(point.probes, dtype=np.int64)
    thresholds = np.array(point.thresholds[0], dtype=np.float32)
    plain = [
        monotone_depths_from_signal(trace.entropy_nats[start:end][:, probes - 1], thresholds, probes, point.ceiling)
        for start, end in pairwise(trace.starts)
    ]
    assert np.concatenate(plain).tolist() == replay(trace, point).depth.tolist()
