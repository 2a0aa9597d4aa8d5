"""Readouts of all tokens or of a few, and the choice of the few: pruned vocabularies (early-exit LLMs, "Softmax").

    z_S = W_S·norm(h)     S the tokens still in the race, per row; k = |S| inner products instead of |V|

S at the next layer is the best k of S by logit: of all of V after the minimum layer j, whose head is the last full one
below the exit. "Best" is by logit and never by id, and what was pruned is not read again. Rows differ in S, and under
the adaptive rule in k: each row gathers its own rows of W.

Every readout charges the ledger what it executed, k·E multiply-adds a row. Choosing the best k compares numbers; it
multiplies nothing. Which k stands in the operating point; nothing here knows thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emad_ref.models.stepper import Stepper
from emad_ref.readout.topk import capped
from emad_ref.record import READOUTS, Work

FULL, SUBSET = READOUTS.index("full"), READOUTS.index("subset")


def full_head(stepper: Stepper, hidden: Tensor, layer: int, work: Work) -> Tensor:
    """Logits [..., V] of states [..., D] after ``layer``; charged as full heads."""
    work.readout_rows[FULL, layer - 1] += hidden.shape[:-1].numel()
    return stepper.logits(hidden)


def subset_head(stepper: Stepper, hidden: Tensor, tokens: Sequence[Tensor], layer: int, work: Work) -> list[Tensor]:
    """Logits [k_row] of each state of ``hidden`` [rows, D] after ``layer``, for its ``tokens`` int64 [k_row].

    Charges k·E a row, and the projection in front of the head in families that have one (OPT-350m, D ≠ E).
    """
    wide, narrow = stepper.geometry.hidden, stepper.geometry.embedding_width
    projection = wide * narrow if wide != narrow else 0
    work.readout_rows[SUBSET, layer - 1] += len(tokens)
    work.readout_macs[SUBSET, layer - 1] += sum(len(ids) * narrow + projection for ids in tokens)
    return [_inner_products(stepper, state, ids) for state, ids in zip(stepper.normed(hidden), tokens, strict=True)]


def _inner_products(stepper: Stepper, normed: Tensor, ids: Tensor) -> Tensor:
    logits = torch.mm(stepper.unembedding[ids], normed[:, None])[:, 0]
    if stepper.unembedding_bias is not None:
        logits = logits + stepper.unembedding_bias[ids]
    return capped(logits, stepper.softcap)


def best(logits: Tensor, k: int) -> Tensor:
    """int64 [min(k, n)]: places of the k largest of ``logits`` [n], in ascending order of place."""
    return logits.topk(min(k, len(logits))).indices.sort().values


def adaptive_size(vocabulary: int, shrink: float, confidence: float) -> int:
    """k = ⌊|V|·(1 − s·c)⌋, c ∈ [0, 1] the confidence at the layer below."""
    return math.floor(vocabulary * (1 - shrink * confidence))


def spread(logits: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """[V] with ``logits`` [k] at the token ids ``ids`` [k] and −inf elsewhere: what was pruned cannot be emitted."""
    return logits.new_full((vocabulary,), -torch.inf).scatter(0, ids, logits)


@dataclass(frozen=True, eq=False)
class Candidates:
    """One row's tokens still in the race: ``ids`` int64 [k], and their logits [k] after each layer read so far."""

    ids: Tensor
    logits: dict[int, Tensor]

    def narrowed(self, k: int) -> Candidates:
        """The best k by the logits of the deepest layer read."""
        if k >= len(self.ids):
            return self
        chosen = best(self.logits[max(self.logits)], k)
        return Candidates(self.ids[chosen], {layer: z[chosen] for layer, z in self.logits.items()})

    def read(self, layer: int, logits: Tensor) -> Candidates:
        """With the logits [k] after one more layer."""
        return Candidates(self.ids, {**self.logits, layer: logits})
