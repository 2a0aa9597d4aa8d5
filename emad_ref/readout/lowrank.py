"""Estimator 3, low-rank readout: logits through r dimensions (EMAD, "Entropy estimation at inference").

    U = 1·μᵀ + W·S·Qᵀ          μ [E] the mean row of the unembedding U [V, E], W·S·Qᵀ the SVD of what remains
    z ≈ x·μ + (x·A)·B + b      A = Q_r [E, r],  B = (U − 1·μᵀ)·Q_r, stored transposed as [r, V]
    Ĥ                          from the K largest approximate logits and their tail, as in ``topk``

x·μ is the same for every token and so without effect on the softmax, yet it tends to be U's largest component: taking
it out first leaves all r dimensions to what tells tokens apart. Only a softcap sees it, so it is added back.
Q are eigenvectors of the E × E Gram matrix in float64: the same factors as the SVD's at a V/E of its cost, and
rank r = E gives U itself. B is [r, V], not [V, r]: each of its r rows is one stride through memory.

Ĥ bounds the entropy of the *approximate* logits, nothing about the true ones. The paper's "compute top-K as above" can
also mean that the r dimensions only find the K rows, whose logits are then computed exactly: ``LowRankIndex``, for
K·E multiply-adds more. Knows no probe and no correction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.readout.topk import capped, tail_bounded

CHUNK = 8192  # rows raised to float64 at a time: all of a Llama's would take 4 GB
GATHERED = 2**24  # entries of gathered rows at a time


@dataclass(frozen=True, eq=False)
class Factors:
    """``inner`` A [E, r], ``outer`` B [r, V] contiguous, ``mean`` μ [E], in the unembedding's dtype."""

    inner: Tensor
    outer: Tensor
    mean: Tensor


def factors(unembedding: Tensor, rank: int) -> Factors:
    """The best rank-``rank`` factors of ``unembedding`` [V, E] less its mean row, in least squares.

    Raises:
        BadArgument: a rank outside 1…E.
    """
    width = unembedding.shape[1]
    if not 1 <= rank <= width:
        raise BadArgument("estimator.rank", rank, f"1–{width}, the width of the unembedding")
    mean = unembedding.mean(dim=0, dtype=torch.float64)
    gram = torch.zeros(width, width, dtype=torch.float64, device=unembedding.device)
    for rows in torch.split(unembedding, CHUNK):
        gram += (rows - mean).T @ (rows - mean)
    inner = torch.linalg.eigh(gram).eigenvectors.flip(-1)[:, :rank]
    outer = torch.cat([((rows - mean) @ inner).T.to(rows.dtype) for rows in torch.split(unembedding, CHUNK)], dim=1)
    return Factors(inner.to(unembedding.dtype).contiguous(), outer, mean.to(unembedding.dtype))


def approximate(factors: Factors, normed: Tensor, bias: Tensor | None) -> Tensor:
    """(x·A)·B + b, [rows, V]: the approximate logits less x·μ, which is the same for all tokens."""
    logits = (normed @ factors.inner) @ factors.outer
    return logits if bias is None else logits + bias


@dataclass(frozen=True, eq=False)
class LowRankIndex:
    """Exact logits of the rows whose approximate logits are largest; ``rows`` [V, E], ``bias`` [V] or None."""

    rows: Tensor
    factors: Factors
    bias: Tensor | None = None

    def macs_per_row(self, k: int) -> int:
        """E·r + r·V to find, K·E for the logits."""
        return self.factors.inner.numel() + self.factors.outer.numel() + k * self.rows.shape[1]

    @property
    def found(self) -> int:
        return len(self.rows)

    def wide_enough(self, k: int) -> LowRankIndex:
        return self

    def search(self, states: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = approximate(self.factors, states, self.bias).topk(k, dim=-1).indices
        share = max(1, GATHERED // (k * self.rows.shape[1]))
        pairs = zip(torch.split(states, share), torch.split(ids, share), strict=True)
        values = torch.cat([(self.rows[found] @ x[:, :, None])[..., 0] for x, found in pairs])
        best = (values if self.bias is None else values + self.bias[ids]).sort(dim=1, descending=True)
        return best.values, ids.gather(1, best.indices)


@dataclass(frozen=True, eq=False)
class LowRank:
    """Ĥ from the ``k`` largest approximate logits; ``bias`` [V] or None.

    Raises:
        BadArgument: k outside 1…V.
    """

    factors: Factors
    k: int
    bias: Tensor | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        vocabulary = self.factors.outer.shape[1]
        if not 1 <= self.k <= vocabulary:
            raise BadArgument("estimator.k", self.k, f"1–{vocabulary}, the size of the vocabulary")

    @property
    def macs_per_row(self) -> int:
        """E·r + r·V for the factors, E for the mean row."""
        return self.factors.inner.numel() + self.factors.outer.numel() + self.factors.mean.numel()

    def __call__(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(Ĥ in nats, top-1 token, top-1 probability), each [rows], of the head's input [rows, E]."""
        logits = approximate(self.factors, normed, self.bias)
        best = logits.topk(self.k, dim=-1)
        values = best.values + (normed @ self.factors.mean)[:, None]
        entropy, probability = tail_bounded(capped(values, self.softcap), logits.shape[-1] - self.k)
        return entropy, best.indices[:, 0], probability
