"""Estimator 2, top-K softmax: K retrieved logits and a bound on the rest (EMAD, "Entropy estimation at inference").

    z_1 ≥ … ≥ z_K   retrieved logits, from an ``Index`` over the unembedding;  floor f = z_K
    tail mass       (V − K)·e^f, as if each of the other V − K tokens had the floor's logit
    Ĥ               entropy of the V logits (z_1, …, z_K, f, …, f)

By the chain rule of entropy Ĥ is that of K + 1 groups, the tail being one of weight (V − K)·e^f, plus
p_tail·log(V − K): K + 1 terms in all.

What holds: with exact retrieval every true logit of the tail is ≤ f, raising it to f makes the distribution one that
the true one majorises, and entropy is Schur-concave. So Ĥ ≥ H, Ĥ never rises with K, and K = V gives H itself.
With approximate retrieval a missed token may stand above f, and Ĥ is an estimate, not a bound; report recall@K.
In either case the top-1 probability is taken under the same distribution: exact retrieval makes it a lower bound.

The softcap (Gemma 2) is monotone, so it is applied after retrieval, to K values instead of V.
Knows no probe, no threshold and no correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.readout.index import Index
from emad_ref.readout.signals import entropy_nats


def tail_bounded(values: Tensor, rest: int) -> tuple[Tensor, Tensor]:
    """(Ĥ in nats, top-1 probability), each [...], from retrieved logits [..., K], descending, and V − K = ``rest``.

    float32, or float64 for float64 logits. A logit that is no number gives an entropy that is none.
    """
    z = values if values.dtype == torch.float64 else values.float()
    if rest == 0:
        return entropy_nats(z), torch.softmax(z, dim=-1)[..., 0]
    groups = torch.cat([z, z[..., -1:] + math.log(rest)], dim=-1)
    p = torch.softmax(groups, dim=-1)
    return entropy_nats(groups) + math.log(rest) * p[..., -1], p[..., 0]


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c·tanh(z/c), or z itself without a cap c."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@dataclass(frozen=True, eq=False)
class TopK:
    """Ĥ from the ``k`` largest logits that ``index`` finds among ``vocabulary`` rows.

    Raises:
        BadArgument: k outside 1…the rows that every search is sure to find.
    """

    index: Index
    k: int
    vocabulary: int
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.index.found:
            raise BadArgument(
                "estimator.k", self.k, f"1–{self.index.found}, the rows that any search finds", "search more lists"
            )

    @property
    def macs_per_row(self) -> int:
        """Multiply-adds of one search: it computes the logits it returns."""
        return self.index.macs_per_row(self.k)

    def __call__(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(Ĥ in nats, top-1 token, top-1 probability), each [rows], of the head's input [rows, E]."""
        values, ids = self.index.search(normed, self.k)
        entropy, probability = tail_bounded(capped(values, self.softcap), self.vocabulary - self.k)
        return entropy, ids[:, 0], probability
