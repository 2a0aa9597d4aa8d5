"""Contrastive scores equal the paper's formulas, written a second time in NumPy."""

from __future__ import annotations

import math
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from emad_ref.point import ConfidenceParameters
from emad_ref.probes.contrast import (
    contrast_log_p,
    get_score_function,
    jensen_shannon_nats,
    most_divergent_layer_and_log_p,
    plausibility_alpha,
    plausibility_mask,
)
from emad_ref.probes.signal_values import softmax_response
from emad_ref.signals import SIGNALS, NotFinite, log_probabilities

ROUNDED = 1e-12  # float64 sums of a hundred terms in a different order
V = 50
LOGITS = arrays.arrays(np.float64, (2, 20), elements=st.floats(-30, 30, width=64))
NONE = MappingProxyType({})


def drawn(*layers: int, rows: int = 7) -> dict[int, torch.Tensor]:
    """Return peaked random logits [rows, V] after each of ``layers``."""
    generator = torch.Generator().manual_seed(len(layers))
    return {layer: 4 * torch.randn(rows, V, generator=generator, dtype=torch.float64) for layer in layers}


def of_logits(logits: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {layer: log_probabilities(z) for layer, z in logits.items()}


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def p_dcd(p: np.ndarray, q: np.ndarray, alpha: float, rescale: bool) -> np.ndarray:
    """Compute one row by the paper's formula; ``rescale`` as in the authors' code."""
    head = p >= alpha * p.max()
    ratio = p[head] / q[head]
    score = p.copy()
    score[head] = ratio / ratio.sum() * (p[head].sum() if rescale else 1.0)
    return score


def gap(score: np.ndarray) -> float:
    second, first = np.sort(score)[-2:]
    return float(first - second)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("rescale", [False, True])
def test_the_score_is_the_papers_formula(alpha: float, rescale: bool) -> None:
    z = drawn(2, 5)
    log_p, log_q = (torch.log_softmax(z[layer], dim=-1) for layer in (5, 2))
    head = plausibility_mask(log_p, torch.full((7,), alpha, dtype=torch.float64))
    mine = contrast_log_p(log_p, log_q, head, rescale).exp().numpy()
    for row in range(7):
        expected = p_dcd(softmax(z[5][row].numpy()), softmax(z[2][row].numpy()), alpha, rescale)
        assert np.abs(mine[row] - expected).max() < ROUNDED


def test_rescaled_it_is_a_distribution_and_otherwise_holds_more_than_one() -> None:
    log_p, log_q = (torch.log_softmax(z, dim=-1) for z in drawn(2, 5).values())
    head = plausibility_mask(log_p, torch.full((7,), 0.1, dtype=torch.float64))
    outside = (log_p.exp() * ~head).sum(dim=-1)
    assert (outside > 1e-3).all(), "the drawn case must have tokens outside the head set"
    assert torch.allclose(contrast_log_p(log_p, log_q, head, True).exp().sum(dim=-1), torch.ones(7).double())
    assert torch.allclose(contrast_log_p(log_p, log_q, head, False).exp().sum(dim=-1), 1 + outside)


def test_the_head_set_holds_the_plausible_tokens() -> None:
    p = torch.tensor([[0.5, 0.3, 0.06, 0.14]], dtype=torch.float64)
    assert plausibility_mask(p.log(), torch.tensor([0.2]).double()).tolist() == [[True, True, False, True]]
    assert plausibility_mask(p.log(), torch.tensor([1.0]).double()).tolist() == [[True, False, False, False]]
    assert plausibility_mask(p.log(), torch.tensor([0.0]).double()).all(), "α = 0 takes every token"


@given(LOGITS)
def test_the_divergence_is_symmetric_and_lies_between_0_and_ln_2(logits: np.ndarray) -> None:
    log_p, log_q = torch.log_softmax(torch.from_numpy(logits), dim=-1)
    there, back = jensen_shannon_nats(log_p, log_q), jensen_shannon_nats(log_q, log_p)
    assert there == back
    assert -ROUNDED <= float(there) <= math.log(2) + ROUNDED
    assert abs(float(jensen_shannon_nats(log_p, log_p))) <= ROUNDED


def test_distributions_without_common_tokens_are_ln_2_apart() -> None:
    p = torch.tensor([[0.25, 0.75, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    assert float(jensen_shannon_nats(p.log(), q.log())) == pytest.approx(math.log(2), abs=ROUNDED)
    m = (0.3 + 0.5) / 2  # p = (0.3, 0.7), q = (0.5, 0.5)
    known = (0.3 * math.log(0.3 / m) + 0.7 * math.log(0.7 / (1 - m)) + 0.5 * math.log(0.25 / m / (1 - m))) / 2
    pair = torch.tensor([[0.3, 0.7], [0.5, 0.5]], dtype=torch.float64).log()
    assert float(jensen_shannon_nats(pair[0], pair[1])) == pytest.approx(known, abs=ROUNDED)


def test_the_amateur_is_the_most_different_layer_per_layer_of_distance() -> None:
    z = {layer: torch.log_softmax(logits, dim=-1) for layer, logits in drawn(2, 3, 4, 7).items()}
    z[3] = z[7] + 0.0  # identical to the expert: never chosen
    layers, chosen = most_divergent_layer_and_log_p(z[7], {m: z[m] for m in (2, 3, 4)}, 7)
    for row in range(7):
        divergence = {m: float(jensen_shannon_nats(z[7][row], z[m][row])) / (7 - m) for m in (2, 3, 4)}
        expected = max(divergence, key=lambda m: divergence[m])
        assert layers[row] == expected
        assert torch.equal(chosen[row], z[expected][row])


def test_distance_is_discounted() -> None:
    """Layer 2 differs most from layer 6, but less than four times as much as layer 5 does."""
    expert, far, near = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.9, 0.1], [0.1, 0.9], [0.5, 0.5]))
    assert jensen_shannon_nats(expert, far) > jensen_shannon_nats(expert, near)
    assert most_divergent_layer_and_log_p(expert, {2: far, 5: near}, 6)[0].tolist() == [5]
    assert most_divergent_layer_and_log_p(expert, {4: far, 5: near}, 6)[0].tolist() == [4]


def test_a_decaying_share_falls_with_depth_and_confidence() -> None:
    logits = drawn(4)[4]
    response = softmax_response(logits).numpy()
    plain = plausibility_alpha(ConfidenceParameters(2, alpha=0.1), 4, logits)
    assert plain.tolist() == [0.1] * 7
    for layer, rate in ((4, 0.5), (9, 0.5), (4, 0.0)):
        share = plausibility_alpha(ConfidenceParameters(2, alpha=0.1, alpha_decay=rate), layer, logits).numpy()
        assert np.abs(share - 0.1 / (1 + rate * layer) * (1 - response)).max() < ROUNDED


@pytest.mark.parametrize("rescale", [False, True])
def test_the_weighted_amateur_stands_halfway(rescale: bool) -> None:
    z = drawn(1, 2, 3, 4, 5)
    confidence = ConfidenceParameters(4, rescale=rescale)
    for layer in (4, 5):  # both have ⌊ℓ/2⌋ = 2
        seen = get_score_function("weighted_contrast")(confidence, layer, z[layer], of_logits(z))
        for row in range(7):
            score = p_dcd(softmax(z[layer][row].numpy()), softmax(z[2][row].numpy()), 0.1, rescale)
            assert float(seen.signal[row]) == pytest.approx(gap(score), abs=ROUNDED)
            assert np.abs(seen.logits[row].exp().numpy() - score).max() < ROUNDED


def test_the_divergent_amateur_is_sought_from_the_minimum_layer_on() -> None:
    z = drawn(1, 2, 3, 4, 5)
    z[3], z[4] = (z[5] + 0.1 * z[m] for m in (3, 4))  # similar to the expert
    z[2] = -z[5]  # maximally different, but below the minimum layer
    seen = get_score_function("jsd_contrast")(ConfidenceParameters(3), 5, z[5], of_logits(z))
    only = get_score_function("jsd_contrast")(ConfidenceParameters(3), 5, z[5], of_logits({m: z[m] for m in (3, 4, 5)}))
    wider = get_score_function("jsd_contrast")(ConfidenceParameters(2), 5, z[5], of_logits(z))
    assert torch.equal(seen.signal, only.signal)
    assert not torch.allclose(seen.signal, wider.signal, atol=0.1)


@pytest.mark.parametrize(("signal", "undefined", "defined"), [("weighted_contrast", 3, 4), ("jsd_contrast", 4, 5)])
def test_where_there_is_nothing_to_contrast_with_the_signal_is_no_number(
    signal: str, undefined: int, defined: int
) -> None:
    z = drawn(2, 3, 4, 5)
    seen = get_score_function(signal)(ConfidenceParameters(4), undefined, z[undefined], of_logits(z))
    assert torch.isnan(seen.signal).all()
    assert seen.logits is z[undefined]
    assert torch.isfinite(
        get_score_function(signal)(ConfidenceParameters(4), defined, z[defined], of_logits(z)).signal
    ).all()


def test_the_expert_may_speak_while_the_contrast_decides() -> None:
    z = drawn(4, 5)
    score = get_score_function("jsd_contrast")(ConfidenceParameters(4), 5, z[5], of_logits(z))
    expert = get_score_function("jsd_contrast")(ConfidenceParameters(4, emit="expert"), 5, z[5], of_logits(z))
    assert torch.equal(score.signal, expert.signal)
    assert expert.logits is z[5]
    assert (score.logits.argmax(dim=-1) != z[5].argmax(dim=-1)).any(), "the drawn case must tell them apart"


@pytest.mark.parametrize(
    "signal", [name for name, signal in SIGNALS.items() if signal.is_single_layer or signal.is_contrastive]
)
@pytest.mark.parametrize("layer", [3, 4, 5])
def test_logits_that_are_no_numbers_are_refused_wherever_they_appear(signal: str, layer: int) -> None:
    z = drawn(2, 3, 4, 5)
    z[layer][1, 3] = torch.nan
    with pytest.raises(NotFinite, match=f"after layer {layer}"):
        get_score_function(signal)(
            ConfidenceParameters(4), layer, z[layer], of_logits({m: z[m] for m in range(2, layer + 1)})
        )


def test_half_precision_is_raised_for_the_score_and_given_back() -> None:
    z = {layer: logits.to(torch.bfloat16) for layer, logits in drawn(4, 5).items()}
    seen = get_score_function("jsd_contrast")(ConfidenceParameters(4), 5, z[5], of_logits(z))
    exact = get_score_function("jsd_contrast")(
        ConfidenceParameters(4), 5, z[5].double(), of_logits({m: z[m].double() for m in z})
    )
    assert (seen.signal.dtype, seen.logits.dtype) == (torch.float32, torch.bfloat16)
    assert torch.allclose(seen.signal.double(), exact.signal, atol=1e-5)  # float32 log-softmax of logits up to 15


def test_softmax_response_asks_no_other_layer() -> None:
    z = drawn(4)[4]
    seen = get_score_function("softmax_response")(ConfidenceParameters(4, kept=(8,)), 4, z, NONE)
    assert torch.equal(seen.signal, softmax_response(z))
    assert seen.logits is z
