"""Ways of decoding whose truth is known: what each saves and loses on the same simulated documents."""

from __future__ import annotations

import math

import numpy as np

from emad_ref.statistics.rates import DocumentCosts, FullDepthBaseline
from emad_ref.statistics.units import ByDocument

EACH = 1000.0  # work of a token at full depth
LOSES, SAVES = 0.004, 0.05  # nats per token and share of work, between documents of one text


class Text:
    """``count`` documents of different length and level, and ways of decoding on them."""

    def __init__(self, rng: np.random.Generator, count: int):
        self._rng = rng
        self._tokens = rng.integers(100, 300, count)
        self._nll = self._tokens * rng.uniform(1.0, 3.0, count)
        full = DocumentCosts("full depth", *map(ByDocument.distinct, (self._nll, EACH * self._tokens)))
        self.measured = FullDepthBaseline(full, ByDocument.distinct(self._tokens))

    def spent(self, name: str, saves: float, rises: float) -> DocumentCosts:
        """One that saves this share and whose perplexity rises by so much, on average."""
        lost = math.log1p(rises) + LOSES * self._rng.standard_normal(len(self._tokens))
        share = saves + SAVES * self._rng.standard_normal(len(self._tokens))
        nll, work = self._nll + self._tokens * lost, EACH * self._tokens * (1 - share)
        return DocumentCosts(name, ByDocument.distinct(nll), ByDocument.distinct(work))
