"""Losses of documents in a bounded range, as a theorem for finite n needs them, each in its own unit.

    excess   c = clip((nll_λ − nll_full) / tokens, 0, B)    nats per token that leaving early added to a document's NLL
    changed  c = tokens whose greedy token is another than full depth's / tokens

What ``excess`` means for perplexity. What a document gained counts as nothing, so that E[c] ≤ δ bounds the mean over
documents of the rise of log-perplexity by δ: rises have a geometric mean of at most e^δ, less what was cut off above B.
A corpus' own rise weighs documents by their tokens n, Σn·c / Σn = E[c] + Cov(n, c)/E[n]: the same where documents are
of like length, and never more than longest/mean times δ. What B cuts off is not bounded, how often it does is: at most
a share δ/B of documents reaches B (Markov).

Constants are fixed before any data, for this reason: no valid test certifies anything on fewer than ln ε / ln(1 − δ/B)
documents; betting takes 4/3 of that without any loss, about 8/3 where half of δ is spent. B = 0.2 nats per token (a
document's perplexity up by 22 %, twenty times δ) makes these 59, 79 and about 160: within the 200 documents that a
perplexity row needs to survive anyway. A larger B lets fewer documents be ruined unseen, and needs as many times more
of them to say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from emad_ref.verdict.units import ByDocument


@dataclass(frozen=True)
class BoundedLoss:
    """A loss in 0–``cap``; ``risk``: δ where nothing else is asked for. ``told``: what a mean of it is, in words."""

    name: str
    cap: float
    risk: float
    told: str


EXCESS = BoundedLoss("excess", 0.2, math.log(1.01), "nats per token above full depth")
CHANGED = BoundedLoss("changed", 1.0, 0.05, "of tokens told otherwise than at full depth")
LOSSES = {each.name: each for each in (EXCESS, CHANGED)}


def excess(nll_nats: ByDocument, full_nats: ByDocument, tokens: ByDocument) -> ByDocument:
    """[documents, λ] nats per token that leaving early added, clipped to 0–B.

    Args:
        nll_nats: [documents, λ] sums over each document's tokens at its depths; inf counts as B.
        full_nats: [documents] sums at full depth.
        tokens: [documents] decided tokens.

    Raises:
        BadArgument: of different documents, a document without tokens, or what is not a number.
    """
    return nll_nats.like(np.clip(_each(nll_nats, tokens, full_nats), 0.0, EXCESS.cap))


def changed(changed_tokens: ByDocument, tokens: ByDocument) -> ByDocument:
    """[documents, λ] share of tokens that are others than full depth's, of ``changed_tokens`` [documents, λ] counts.

    Raises:
        BadArgument: as ``excess``; more than there are tokens.
    """
    return changed_tokens.like(_each(changed_tokens, tokens))


def _each(sums: ByDocument, tokens: ByDocument, less: ByDocument | None = None) -> Floats:
    for name, other in (("tokens", tokens), *([("full_nats", less)] if less is not None else [])):
        if not np.array_equal(sums.number, other.number):
            raise BadArgument(name, len(other), f"the same {len(sums)} documents in the same order")
    if (tokens.values < 1).any():
        raise BadArgument("tokens", int(tokens.values.min()), "at least one token in every document", "leave it out")
    if less is not None and not np.isfinite(less.values).all():
        raise BadArgument("full_nats", "inf or NaN", "finite numbers", "full depth loses no token")
    base = 0.0 if less is None else less.values[:, None]
    each = (np.asarray(sums.values, dtype=np.float64) - base) / tokens.values[:, None]
    if np.isnan(each).any():
        raise BadArgument("sums", "NaN", "numbers")
    return np.asarray(each, dtype=np.float64)
