"""Exchanges of EMAD's parts (``sweep.parts``) as a table with intervals by document: what each way saves, and gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emad_ref.record import Floats
from emad_ref.sweep.ceilings import JUDGED
from emad_ref.sweep.parts import EMAD, Exchange, Set
from emad_ref.verdict.bootstrap import RESAMPLES, document_draws
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.rates import mean_rate, perplexity_rise
from emad_ref.verdict.units import ByDocument, DocumentOf


def exchange_rows(
    found: Sequence[Exchange], tokens: Floats, documents: DocumentOf, rng: np.random.Generator, level: float = JUDGED
) -> list[dict[str, Any]]:
    """A row per exchange, in order, and first one of each way that parts were exchanged in; shares are fractions.

    Where both ways decide the same of every document, there is no interval: None.

    ``tokens`` [sequences] of the judged text; ``documents``: which of them each sequence was cut from. All intervals
    are of the same samples of documents.

    Raises:
        BadArgument: columns of other sequences than ``documents``.
    """
    draws = document_draws(len(np.unique(documents.number)), RESAMPLES, rng)

    def by(values: Floats) -> ByDocument:
        return ByDocument.summed(values, documents)

    def gained(before: Set, after: Set) -> Estimate:
        """Net saving of ``after`` less that of ``before``, both shares of full depth's FLOPs."""
        full, spent = after.columns.flops[:, 0], before.columns.flops[:, 1] - after.columns.flops[:, 1]
        return mean_rate(by(spent), by(full), threshold=0.0, rng=rng, unit="share saved", draws=draws)

    def saved(each: Set) -> dict[str, Any]:
        flops, nll = each.columns.flops, each.columns.nll_nats
        net = mean_rate(
            by(flops[:, 0] - flops[:, 1]), by(flops[:, 0]), threshold=0.0, rng=rng, unit="share saved", draws=draws
        )
        rise = perplexity_rise(by(nll[:, 1]), by(nll[:, 0]), by(tokens), threshold=level, rng=rng, draws=draws)
        full, depth = each.columns.depth.sum(axis=0)[[0, 1]]
        return {
            "way": each.way.name,
            "point": each.point.name,
            "net reduction %": net.value,
            "net interval": _bounded(net),
            "blocks %": float(1 - depth / full),
            "rise %": rise.value,
            "rise interval": _bounded(rise),
        }

    rows, told = [], set()
    for each in found:
        if each.before.way not in told:
            told.add(each.before.way)
            rows.append(
                {"exchanged": "nothing", "from": "", **saved(each.before), "gain %": None, "gain interval": None}
            )
        gain = gained(each.before, each.after)
        origin = "EMAD as published" if each.before.way == EMAD else "the best, back" if each.back else "the best"
        own = {"exchanged": each.part, "from": origin, **saved(each.after)}
        rows.append(own | {"gain %": gain.value, "gain interval": _bounded(gain)})
    return rows


def _bounded(estimate: Estimate) -> list[float] | None:
    """[low, high]; None where documents bound nothing, as where both ways are full depth."""
    ends = [estimate.low, estimate.high]
    return ends if np.isfinite(ends).all() else None
