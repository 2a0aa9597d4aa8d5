"""Contrastive confidence: a deep readout minus a shallower one (early-exit LLMs, "Contrastive").

    H        {x : p_ℓ(x) ≥ α·max p_ℓ}, the plausible tokens           ``plausibility_mask``
    p_LCD    softmax(log p_ℓ − log p_m), normalised over H
    p_DCD    p_LCD on H, p_ℓ outside                                  ``contrast_log_p``
    c        top-1 minus top-2 of p_DCD

p_ℓ is the expert, the readout of the reached layer; p_m the amateur, of a layer m < ℓ of the same token:

    weighted   m = ⌊ℓ/2⌋
    JSD        m = argmax over j ≤ m < ℓ of JSD(p_ℓ, p_m) / (ℓ − m), j the minimum exit layer

p_DCD has mass 1 on H plus the mass of p_ℓ outside, so it is a score. ``rescale`` scales p_LCD to the mass of H, which
makes it a distribution. The authors' code does so for the weighted contrast; there its score is 0 outside H, which is
not implemented. For JSD it multiplies p_LCD by Σ p_ℓ over the whole vocabulary, which is 1. A smaller α includes more
tokens that are unlikely in both layers: α′ = α / (1 + rate·ℓ)·(1 − confidence) falls with depth and with the confidence
of p_ℓ.

Distributions are logarithms [rows, V], over the whole vocabulary or the same part of it in p_ℓ and p_m; a token at −inf
is in neither. Without an amateur (JSD after layer j, any layer below j) the signal is NaN, and no other rule replaces
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from emad_ref.point import ConfidenceParameters
from emad_ref.probes.signal_values import softmax_response
from emad_ref.signals import (
    HALF_DEPTH,
    SIGNALS,
    SINCE_MINIMUM,
    ProbeOutput,
    SignalInputRequirement,
    exp_log_probabilities,
    require_finite,
    top2_margin,
    upcast_to_float32,
)

ScoreFunction = Callable[[ConfidenceParameters, int, Tensor, Mapping[int, Tensor]], ProbeOutput]
"""(parameters, layer ℓ, logits z_ℓ [rows, n], {m: log p_m [rows, n]} of layers up to ℓ) → signal [rows] and logits."""


def plausibility_mask(log_p: Tensor, alpha: Tensor) -> Tensor:
    """bool [rows, V]: p ≥ α·max p; ``alpha`` [rows], 0 takes every token that has a probability."""
    least = alpha.log()[:, None] + log_p.amax(dim=-1, keepdim=True)
    return log_p >= least.clamp(min=torch.finfo(log_p.dtype).min)  # -inf ≥ -inf would let pruned tokens in


def plausibility_alpha(confidence: ConfidenceParameters, layer: int, logits: Tensor) -> Tensor:
    """α, or α′ with a decay rate: [rows], for expert logits [rows, V] after ``layer``."""
    response = softmax_response(logits)
    if confidence.alpha_decay is None:
        return torch.full_like(response, confidence.alpha)
    return confidence.alpha / (1 + confidence.alpha_decay * layer) * (1 - response)


def contrast_log_p(log_p: Tensor, log_q: Tensor, head: Tensor, rescale: bool) -> Tensor:
    """log p_DCD [rows, V] of the expert's and the amateur's log-probabilities, on ``head`` bool [rows, V] and off it.

    ``rescale``: scale the part on the head set to its mass under p.
    """
    score = torch.log_softmax(torch.where(head, log_p - log_q, -torch.inf), dim=-1)
    if rescale:
        score = score + torch.where(head, log_p, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.where(head, score, log_p)


def jensen_shannon_nats(log_p: Tensor, log_q: Tensor) -> Tensor:
    """JSD(p, q) = ½·KL(p ‖ m) + ½·KL(q ‖ m), m = ½(p + q), in nats: [..., V] → [...]; symmetric, 0 … ln 2."""
    limits = torch.finfo(log_p.dtype)
    p, q = exp_log_probabilities(log_p), exp_log_probabilities(log_q)
    log_m = ((p + q) / 2).clamp(min=limits.tiny).log()
    # a token without probability adds 0 times a finite number: −inf − (−inf) would be NaN
    divergences = p * (log_p.clamp(min=limits.min) - log_m) + q * (log_q.clamp(min=limits.min) - log_m)
    return divergences.sum(dim=-1) / 2


def most_divergent_layer_and_log_p(log_p: Tensor, amateurs: Mapping[int, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """(m int64 [rows], log p_m [rows, V]): per row, the amateur of largest JSD per layer of distance to ``layer``."""
    layers = torch.tensor(sorted(amateurs), device=log_p.device)
    candidates = torch.stack([amateurs[m] for m in sorted(amateurs)])  # [candidates, rows, V]
    per_layer = jensen_shannon_nats(log_p[None], candidates) / (layer - layers)[:, None]
    best = per_layer.argmax(dim=0)
    return layers[best], candidates[best, torch.arange(len(log_p), device=log_p.device)]


def compute_weighted_contrast_output(
    confidence: ConfidenceParameters, layer: int, logits: Tensor, log_probs: Mapping[int, Tensor]
) -> ProbeOutput:
    """Weighted contrast with the readout after ⌊ℓ/2⌋; NaN below the minimum layer, where p_ℓ is emitted."""
    if layer < confidence.minimum:
        return _undefined_output(logits, layer)
    return _contrast_with(confidence, layer, logits, log_probs[layer], log_probs[layer // 2])


def compute_jsd_contrast_output(
    confidence: ConfidenceParameters, layer: int, logits: Tensor, log_probs: Mapping[int, Tensor]
) -> ProbeOutput:
    """JSD contrast with one of the readouts since the minimum layer; NaN at that layer, where p_ℓ is emitted."""
    if layer <= confidence.minimum:
        return _undefined_output(logits, layer)
    amateurs = {m: log_q for m, log_q in log_probs.items() if confidence.minimum <= m < layer}
    log_p = log_probs[layer]
    return _contrast_with(confidence, layer, logits, log_p, most_divergent_layer_and_log_p(log_p, amateurs, layer)[1])


CONTRASTS: dict[SignalInputRequirement, ScoreFunction] = {
    HALF_DEPTH: compute_weighted_contrast_output,
    SINCE_MINIMUM: compute_jsd_contrast_output,
}


def get_score_function(signal: str) -> ScoreFunction:
    """The function of readouts for ``signal``: a contrast, or a score of one layer's logits, which emits p_ℓ."""
    row = SIGNALS[signal]
    if not row.is_single_layer:
        return CONTRASTS[row.needs]
    return lambda confidence, layer, logits, log_probs: _require_finite_output(
        ProbeOutput(row.compute_from_logits(logits), logits), layer
    )


def _contrast_with(
    confidence: ConfidenceParameters, layer: int, logits: Tensor, log_p: Tensor, log_q: Tensor
) -> ProbeOutput:
    head = plausibility_mask(log_p, plausibility_alpha(confidence, layer, logits))
    score = contrast_log_p(log_p, log_q, head, confidence.rescale)
    emitted = logits if confidence.emit == "expert" else score.to(logits.dtype)
    return _require_finite_output(ProbeOutput(top2_margin(score), emitted), layer)


def _undefined_output(logits: Tensor, layer: int) -> ProbeOutput:
    require_finite(logits.amax(dim=-1), f"after layer {layer}")
    return ProbeOutput(torch.full_like(upcast_to_float32(logits[:, 0]), torch.nan), logits)


def _require_finite_output(output: ProbeOutput, layer: int) -> ProbeOutput:
    require_finite(output.signal, f"after layer {layer}")
    return output
