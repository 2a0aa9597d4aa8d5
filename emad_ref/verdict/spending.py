"""What a way of decoding lost and spent on documents, against full depth on the same ones: two estimates by document.

    rise    exp(Σ (c_i − r_i) / Σ n_i) − 1        of perplexity, c and r in nats, n tokens
    saving  1 − Σ f_i / Σ F_i                     net share of FLOPs, or share of blocks where f and F count those

Both resample documents, together: whoever shares ``draws`` looks at one set of samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emad_ref.record import Floats
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.rates import mean_rate, perplexity_rise
from emad_ref.verdict.units import ByDocument

NET = "net FLOP reduction"


@dataclass(frozen=True, eq=False)
class Spent:
    """Sums over each document's decided tokens: ``nll_nats``, and ``work``, in FLOPs or in blocks."""

    name: str
    nll_nats: ByDocument
    work: ByDocument


@dataclass(frozen=True, eq=False)
class Measured:
    """Full depth on the documents of ``tokens`` [documents], and what others are held against."""

    full: Spent
    tokens: ByDocument

    def rise(self, one: Spent, threshold: float, rng: np.random.Generator, draws: Floats | None = None) -> Estimate:
        """Relative rise of perplexity. Raises BadArgument as ``rates.perplexity_rise``."""
        arms = one.nll_nats, self.full.nll_nats, self.tokens
        return perplexity_rise(*arms, threshold=threshold, rng=rng, draws=draws)

    def saving(
        self,
        one: Spent,
        threshold: float,
        rng: np.random.Generator,
        draws: Floats | None = None,
        *,
        against: Spent | None = None,
        unit: str = NET,
    ) -> Estimate:
        """Share of full depth's work that ``one`` saves; ``against`` another: by how much that share is larger.

        Raises:
            BadArgument: as ``rates.mean_rate``.
        """
        whole, other = self.full.work, (against or self.full).work
        saved = whole.like(other.values - one.work.values)
        return mean_rate(saved, whole, threshold=threshold, rng=rng, draws=draws, unit=unit)
