"""Signal values of logits and states, and reading of many rows block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from emad_ref.signals import ENTROPY, RESPONSE, exp_log_probabilities, log_probabilities, upcast_to_float32


def entropy_nats(logits: Tensor) -> Tensor:
    """Entropy of softmax(z), in nats; logits [..., V] → float32 [...] (float64 for float64 logits)."""
    return ENTROPY.compute_from_logits(logits)


def softmax_response(logits: Tensor) -> Tensor:
    """Top-1 minus top-2 probability (CALM); logits [..., V] → float32 or float64 [...]."""
    return RESPONSE.compute_from_logits(logits)


def hidden_state_cosine(hidden: Tensor, below: Tensor) -> Tensor:
    """cos(h_ℓ, h_{ℓ−1}) (CALM, "hidden-state saturation"); states [..., D] of one token → float32 [...].

    float64 for float64 states. A zero state, such as a padding token's embedding at the first position, gives 0, as in
    PyTorch's ``cosine_similarity``. A state that is not finite gives NaN.
    """
    here, there = upcast_to_float32(hidden), upcast_to_float32(below)
    lengths = torch.linalg.vector_norm(here, dim=-1) * torch.linalg.vector_norm(there, dim=-1)
    cosine: Tensor = (here * there).sum(dim=-1) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
    return cosine


def kl_divergence_nats(final_log_p: Tensor, logits: Tensor) -> Tensor:
    """KL(final ‖ softmax(logits)) in nats [tokens], never below 0, of ``final_log_p`` and ``logits`` [tokens, V]."""
    return kl_from_log_probs(final_log_p, log_probabilities(logits))


def kl_from_log_probs(final_log_p: Tensor, log_q: Tensor) -> Tensor:
    """``kl_divergence_nats`` of log-probabilities ``log_q`` [tokens, V]."""
    terms = (final_log_p - log_q).mul_(exp_log_probabilities(final_log_p))
    if final_log_p.amin() == -math.inf:  # a mask costs as much as the terms, and few heads need one
        # a term with final probability zero is 0, but 0·(−inf) would be NaN
        terms = terms.masked_fill(final_log_p == -math.inf, 0.0)
    return terms.sum(dim=-1).clamp_min(0.0)  # rounding leaves a few 1e-7 below zero


CACHED_BYTES = 2**18  # bytes of logits: with log-probabilities, probabilities and their product they fill 1 MiB


def iterate_row_slices(logits: Tensor, cached: int | None = None) -> Iterator[slice]:
    """Slices of the rows of ``logits`` [n, V], in order, each of two or more rows, with ``cached`` bytes per thread.

    ``cached``: ``CACHED_BYTES`` by default. Blocks have at least two rows if there are two: PyTorch splits the sum over
    a single row among threads, in another order. Devices other than CPUs take all rows at once.
    """
    rows, at_once = len(logits), len(logits)
    if logits.device.type == "cpu":
        block_bytes = CACHED_BYTES if cached is None else cached
        at_once = max(2, block_bytes * torch.get_num_threads() // (logits.shape[1] * logits.element_size()))
    firsts = list(range(0, max(rows - 1, 1), at_once))  # a single last row joins the block before it
    for first, end in zip(firsts, [*firsts[1:], rows], strict=True):
        yield slice(first, end)


def apply_in_row_blocks(logits: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    """``read(logits)`` [n, …] of ``logits`` [n ≥ 1, V]."""
    return torch.cat([read(logits[rows]) for rows in iterate_row_slices(logits)])
