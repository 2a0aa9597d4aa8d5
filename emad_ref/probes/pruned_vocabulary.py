"""Pruned vocabularies (early-exit LLMs, "Softmax"): readouts of all tokens or of a few, and the choice of the few.

    z_S = W_S·norm(h)     S the candidate tokens, per row; k = |S| inner products instead of |V|

S at the next layer is the best k of S by logit, starting from all of V after the minimum layer j, whose head is the
last full one below the exit. Pruned tokens are not read again. Rows differ in S, and under the adaptive rule in k: each
row gathers its own rows of W, and rows of equal k share one batched product (``UncachedHeads``). Rows are not padded to
the k of others, since padding would be executed. A trace of thousands of rows counts no executed work; there one
product with all of W is faster and gives the same logits (``CachedFullLogitHeads``).

Every readout counts k·E multiply-adds a row. The operating point holds k; thresholds are handled elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from emad_ref.models.geometry import Geometry
from emad_ref.models.stepper import Stepper
from emad_ref.probes.estimators import apply_softcap
from emad_ref.record import Ints, Work

# Entries of W gathered per product. A CPU multiplies them in its cache: one buffer of 1 MB of float32 is up to 4 times
# as fast as new memory for all of k = V rows. An accelerator is as fast with 16 MB as with more.
GATHERED_ENTRIES = 2**18
ACCELERATOR_ENTRIES = 2**22


class ReadoutHeads(Protocol):
    """Computation of readouts; all implementations count the same work."""

    stepper: Stepper

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states [..., D]."""

    def pruned_logits(self, hidden: Tensor, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        """Logits [rows, widest] of states [rows, D] for each row's first k = sizes[row] of ``ids``, −inf beyond."""


class UncachedHeads:
    """Executes the counted work: V·E multiply-adds a row for a full head, k·E for a pruned one."""

    def __init__(self, stepper: Stepper):
        self.stepper = stepper

    def full_logits(self, hidden: Tensor) -> Tensor:
        return self.stepper.logits(hidden)

    def pruned_logits(self, hidden: Tensor, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        normed = self.stepper.apply_final_norm(hidden)
        if len(set(sizes)) == 1:
            return _inner_products(self.stepper, normed, ids)
        order = sorted(range(len(sizes)), key=sizes.__getitem__)  # rows of equal k side by side: slices, no copies
        normed, ids = normed[order], ids[order]
        logits, first = normed.new_full(ids.shape, -torch.inf), 0
        for k, alike in groupby(sizes[row] for row in order):
            rows = slice(first, first := first + len(list(alike)))
            logits[rows, :k] = _inner_products(self.stepper, normed[rows], ids[rows, :k])
        return logits[np.argsort(order)]


class CachedFullLogitHeads:
    """One full head for consecutive readouts of the same states, for many rules on thousands of tokens.

    Pruned logits are picked from it, so executed work differs from the counted work.
    """

    def __init__(self, stepper: Stepper):
        self.stepper = stepper
        self._of: Tensor | None = None

    def full_logits(self, hidden: Tensor) -> Tensor:
        if hidden is not self._of:
            self._of, self._logits = hidden, self.stepper.logits(hidden)
        return self._logits

    def pruned_logits(self, hidden: Tensor, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        whole = self.full_logits(hidden)
        none = whole.new_full((len(whole), 1), -torch.inf)  # the logit of id V, a placeholder for no token
        return torch.cat([whole, none], dim=1).gather(1, ids)


def vocabulary_size_at_confidence(vocabulary: int, shrink: float, confidence: float) -> int:
    """k = ⌊|V|·(1 − s·c)⌋, c ∈ [0, 1] the confidence at the layer below."""
    return math.floor(vocabulary * (1 - shrink * confidence))


@dataclass(frozen=True, eq=False)
class CandidateTokens:
    """Each row's candidate tokens, and their logits after each layer read so far.

    ``ids`` int64 [rows, widest], the best by the layer below first; ``sizes`` k of each row; ``logits``: layer →
    [rows, widest]. From place k of a row on there is no token: its id is ``vocabulary``, its logits −inf.
    """

    vocabulary: int
    ids: Tensor
    sizes: tuple[int, ...]
    logits: Mapping[int, Tensor]

    @staticmethod
    def start_with_all_tokens(layer: int, logits: Tensor) -> CandidateTokens:
        """Every token of the vocabulary, by ``logits`` [rows, V] of a full head after ``layer``."""
        rows, vocabulary = logits.shape
        ids = torch.arange(vocabulary, device=logits.device).expand(rows, vocabulary)
        return CandidateTokens(vocabulary, ids, (vocabulary,) * rows, {layer: logits})

    def __len__(self) -> int:
        return len(self.sizes)

    def narrow_to(self, sizes: Sequence[int]) -> CandidateTokens:
        """The best ``sizes`` [rows] by the logits of the deepest layer read; a row with fewer keeps them all."""
        new_sizes = tuple(min(size, own) for size, own in zip(sizes, self.sizes, strict=True))
        if new_sizes == self.sizes:
            return self
        best = self.logits[max(self.logits)].topk(max(new_sizes)).indices
        ids = self.ids.gather(1, best)
        logits = {layer: z.gather(1, best) for layer, z in self.logits.items()}
        if min(new_sizes) < max(new_sizes):
            none = (
                torch.arange(max(new_sizes), device=ids.device) >= torch.tensor(new_sizes, device=ids.device)[:, None]
            )
            ids = ids.masked_fill(none, self.vocabulary)
            logits = {layer: z.masked_fill(none, -torch.inf) for layer, z in logits.items()}
        return CandidateTokens(self.vocabulary, ids, new_sizes, logits)

    def add_logits_of_layer(self, heads: ReadoutHeads, hidden: Tensor, layer: int, work: Work) -> CandidateTokens:
        """Add the logits of states ``hidden`` [rows, D] after one more ``layer``; counted as pruned readouts."""
        work.count_readout("subset", layer, len(self), int(self.macs_per_row(heads.stepper.geometry).sum()))
        logits = heads.pruned_logits(hidden, self.ids, self.sizes)
        return CandidateTokens(self.vocabulary, self.ids, self.sizes, {**self.logits, layer: logits})

    def macs_per_row(self, geometry: Geometry) -> Ints:
        """int64 [rows] multiply-adds of one readout: k·E, plus the projection if D ≠ E (OPT-350m)."""
        wide, narrow = geometry.hidden, geometry.embedding_width
        return np.array(self.sizes) * narrow + (wide * narrow if wide != narrow else 0)

    def keep_rows(self, rows: Tensor) -> CandidateTokens:
        """Only these rows (int64 indices)."""
        sizes = tuple(self.sizes[row] for row in rows.tolist())
        widest = max(sizes)  # the widest row may have stopped
        logits = {layer: z[rows, :widest] for layer, z in self.logits.items()}
        return CandidateTokens(self.vocabulary, self.ids[rows, :widest], sizes, logits)

    def scatter_to_vocabulary(self, scores: Tensor) -> Tensor:
        """[rows, V] with ``scores`` [rows, widest] at their ids and −inf elsewhere."""
        room = scores.new_full((len(self), self.vocabulary + 1), -torch.inf)  # the last column is for no token
        return room.scatter(1, self.ids, scores)[:, :-1]


def _inner_products(stepper: Stepper, normed: Tensor, ids: Tensor) -> Tensor:
    """Logits [rows, k] of head inputs [rows, E] for ``ids`` [rows, k]."""
    weight, (rows, k), width = stepper.unembedding, ids.shape, normed.shape[1]
    entries = GATHERED_ENTRIES if weight.device.type == "cpu" else ACCELERATOR_ENTRIES
    tokens = min(k, max(1, entries // width))  # a part of one row's entries if they are many, else several rows at once
    together = max(1, entries // (tokens * width))
    buffer = weight.new_empty(min(rows, together) * tokens * width)
    logits = torch.empty_like(ids, dtype=normed.dtype)
    for row in range(0, rows, together):
        states = normed[row : row + together, :, None]
        for first in range(0, k, tokens):
            some = ids[row : row + together, first : first + tokens]
            gathered = buffer[: some.numel() * width].view(-1, width)
            torch.index_select(weight.detach(), 0, some.flatten(), out=gathered)
            logits[row : row + together, first : first + tokens] = torch.bmm(gathered.view(*some.shape, width), states)[
                ..., 0
            ]
    if stepper.unembedding_bias is not None:
        logits = logits + stepper.unembedding_bias[ids]
    return apply_softcap(logits, stepper.logit_softcap)
