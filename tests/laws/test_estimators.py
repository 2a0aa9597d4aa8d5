"""Laws of the entropy estimators: exactness at K = V and r = E, bounds between estimates, and charged FLOPs."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.utils.flop_counter import FlopCounterMode

import emad_ref
from emad_ref.calibration.regression import LinearProbeFit, correct_estimator
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator
from emad_ref.probes.estimators import (
    ExactIndex,
    FaissIndex,
    LowRankEntropy,
    LowRankIndex,
    TopKEntropy,
    apply_softcap,
    estimate_entropy_and_top1_p,
    low_rank_factors,
    make_entropy_reader,
)
from emad_ref.probes.signal_values import entropy_nats
from emad_ref.text.corpora import iterate_corpus_documents
from pytest_emad.sweep.diagnostics import compare_estimators
from tests.small_models import small_model

ROUNDED = 1e-9  # float64 sums in a different order, entropies up to 5 nats
VOCABULARY, WIDTH = 211, 24
LOGITS = arrays.arrays(np.float64, st.integers(2, 40), elements=st.floats(-60, 60, width=64))
aten = torch.ops.aten


def bounded(logits, k):
    """Return (Ĥ, top-1 probability) with the ``k`` largest of float64 ``logits`` [V] retrieved exactly."""
    return (float(part) for part in estimate_entropy_and_top1_p(logits.topk(k).values, len(logits) - k))


@given(LOGITS, st.data())
def test_with_exact_retrieval_the_estimate_is_never_below_the_entropy(drawn, data):
    logits = torch.from_numpy(drawn)
    k = data.draw(st.integers(1, len(logits)))
    entropy, probability = bounded(logits, k)
    assert entropy >= float(entropy_nats(logits)) - ROUNDED
    assert probability <= float(logits.softmax(0).max()) + ROUNDED


@given(LOGITS)
def test_the_bound_never_loosens_as_more_is_retrieved(drawn):
    logits = torch.from_numpy(drawn)
    estimates = [next(bounded(logits, k)) for k in range(1, len(logits) + 1)]
    assert (np.diff(estimates) <= ROUNDED).all()
    assert estimates[0] == pytest.approx(math.log(len(logits)), abs=ROUNDED), "one logit gives no estimate"
    assert estimates[-1] == pytest.approx(float(entropy_nats(logits)), abs=ROUNDED)


@given(LOGITS, st.floats(1, 50), st.data())
def test_capping_after_retrieval_is_capping_before(drawn, cap, data):
    logits = torch.from_numpy(drawn)
    k = data.draw(st.integers(1, len(logits)))
    after, _ = estimate_entropy_and_top1_p(apply_softcap(logits.topk(k).values, cap), len(logits) - k)
    assert float(after) == pytest.approx(next(bounded(apply_softcap(logits, cap), k)), abs=ROUNDED)


def test_a_missed_top_token_breaks_the_bound():
    """Two tokens share all probability; retrieval misses one, and the estimate is 0."""
    logits = torch.tensor([20.0, 20.0, *[-20.0] * 98], dtype=torch.float64)
    seen, _ = estimate_entropy_and_top1_p(logits[[0, *range(2, 11)]], 90)
    assert float(entropy_nats(logits)) == pytest.approx(math.log(2))
    assert float(seen) < 1e-6


@pytest.fixture(scope="module")
def head():
    """Return (unembedding, bias, states) in float32, with entropies from near 0 to several nats."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(64, WIDTH, generator=generator) * torch.linspace(0.1, 3, 64)[:, None]
    rows = torch.randn(VOCABULARY, WIDTH, generator=generator) + torch.randn(WIDTH, generator=generator)
    return rows, torch.randn(VOCABULARY, generator=generator), states


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_all_logits_at_full_rank_give_the_full_entropy(head, softcap):
    """Within 1e-5 nats in float32: logits of magnitude 30, summed in a different order."""
    rows, bias, states = head
    logits = apply_softcap(states @ rows.T + bias, softcap)
    for estimate in (
        TopKEntropy(ExactIndex(rows, bias), VOCABULARY, VOCABULARY, softcap),
        TopKEntropy(FaissIndex(rows, bias), VOCABULARY, VOCABULARY, softcap),
        TopKEntropy(LowRankIndex(rows, low_rank_factors(rows, 3), bias), VOCABULARY, VOCABULARY, softcap),
        LowRankEntropy(low_rank_factors(rows, WIDTH), VOCABULARY, bias, softcap),
    ):
        entropy, token, probability = estimate(states)
        assert float((entropy - entropy_nats(logits)).abs().max()) <= 1e-5
        # not always the same token: where the cap saturates, the largest logits tie after rounding
        assert torch.allclose(logits.gather(1, token[:, None])[:, 0], logits.max(dim=1).values, atol=1e-5)
        assert float((probability - logits.softmax(1).max(dim=1).values).abs().max()) <= 1e-5


@pytest.mark.parametrize("k", [1, 8, 64])
def test_full_rank_with_few_logits_is_topk(head, k):
    rows, bias, states = head
    topk = TopKEntropy(ExactIndex(rows, bias), k, VOCABULARY)
    lowrank = LowRankEntropy(low_rank_factors(rows, WIDTH), k, bias)
    assert float((topk(states)[0] - lowrank(states)[0]).abs().max()) <= 1e-5


MACS = {
    aten.mv: lambda matrix, vector, *args, out_shape=None, **kwargs: 2 * math.prod(matrix),
}


@pytest.mark.parametrize("family", ["gpt_neox", "opt_350m"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(
    "estimator",
    [
        EntropyEstimator("topk", k=8),
        EntropyEstimator("topk", k=8, search="lowrank", rank=4),
        EntropyEstimator("lowrank", k=8, rank=4),
        EntropyEstimator("linear"),
    ],
    ids=lambda e: e.name if isinstance(e, EntropyEstimator) else None,
)
def test_a_reader_charges_what_pytorch_counts(family, rows, estimator):
    stepper = CausalStepper(small_model(family))
    width = stepper.unembedding.shape[1]
    if estimator.kind == "linear":
        estimator = EntropyEstimator("linear", weights=((0.0,) * (width + 1),))
    reader = make_entropy_reader(stepper, estimator, (2,))
    hidden = torch.ones(rows, stepper.geometry.hidden, dtype=torch.float64)
    with torch.inference_mode(), FlopCounterMode(display=False, custom_mapping=MACS) as counter:
        reader.read(hidden, 0)
    assert counter.get_total_flops() == 2 * rows * reader.macs_per_row


def test_an_index_of_exact_logits_charges_what_pytorch_counts(head):
    rows, bias, states = head
    index = LowRankIndex(rows, low_rank_factors(rows, 5), bias)
    with FlopCounterMode(display=False) as counter:
        index.search(states, 9)
    assert counter.get_total_flops() == 2 * len(states) * index.macs_per_row(9)


PROBES = (4, 8)
LEAST = {  # minimum Spearman's ρ on emad-tiny at both probes; measured on 150 documents
    "topk-64": 0.995,  # 0.998 and 0.999
    "lowrank-64 top-64": 0.95,  # 0.974 and 0.978: half the width
    "linear": 0.7,  # 0.80 and 0.80: half of all entropies are below 0.005 nats, where a line cannot follow them
}


@torch.inference_mode()
def test_estimators_keep_the_ranking_of_tokens_on_emad_tiny():
    loaded = emad_ref.load("emad-tiny")
    stepper = loaded.stepper
    fit, held_out, test = (states_of(loaded, split) for split in ("calibrate", "validate", "evaluate"))
    probes = LinearProbeFit(stepper, PROBES)
    for layer, states in zip(PROBES, fit, strict=True):
        probes(layer, states, entropy_nats(stepper.logits(states)))
    raw = {}
    for plain in (EntropyEstimator("topk", k=64), EntropyEstimator("lowrank", k=64, rank=64), probes.fit_estimator()):
        reader = make_entropy_reader(stepper, plain, PROBES)
        estimates = [
            np.stack([reader.read(h, i).entropy_nats for i, h in enumerate(part)], 1) for part in (held_out, test)
        ]
        raw[correct_estimator(plain, estimates[0], full_of(stepper, held_out))] = estimates[1]
    rows = compare_estimators(PROBES, full_of(stepper, test), raw)
    for row in rows:
        print(f"{row.estimator.name} after layer {row.probe}: ρ {row.spearman:.4f}, RMSE {row.rmse_nats:.3f} nats")
        assert row.spearman >= LEAST[row.estimator.name], (row.estimator.name, row.probe)
    error = {(row.estimator.kind, row.probe): row.rmse_nats for row in rows}
    assert all(error["topk", probe] < error["lowrank", probe] < error["linear", probe] for probe in PROBES)


def states_of(loaded, split, documents=12):
    """Return the states [tokens, D] after each probe, of the world's first documents of a split."""
    states = {probe: [] for probe in PROBES}
    for text in islice(iterate_corpus_documents("world:premise", split), documents):
        ids = np.array([loaded.opening_token_id, *loaded.tokenizer.encode(text, add_special_tokens=False)])[None]
        inputs = loaded.stepper.prepare_forward(np.arange(ids.shape[1])[None], None)
        hidden, at = loaded.stepper.embed(torch.from_numpy(ids), inputs), 0
        for probe in PROBES:
            hidden, at = loaded.stepper.run_layers(hidden, at, probe, inputs), probe
            states[probe].append(hidden[0])
    return [torch.cat(parts) for parts in states.values()]


def full_of(stepper, states):
    return np.stack([entropy_nats(stepper.logits(h)).numpy() for h in states], axis=1)
