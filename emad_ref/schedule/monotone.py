"""Monotone non-increasing depth (EMAD, "KV-consistent scheduling"): D_t = min(D_{t-1}, first fire of t).

A token exits at the smallest probe ℓ ≤ D_{t-1} whose rule fires, else at the cap D_{t-1}. Because D never rises
again, every layer a later token runs holds K and V of all earlier tokens: nothing is ever owed.

Since a fire at a probe above the cap changes nothing, the recursion is a running minimum of first fires.
"""

from __future__ import annotations

import numpy as np

from emad_ref.record import Bools, Floats, Ints


def first_fires(fires: Bools, probes: Ints, ceiling: int) -> Ints:
    """[n] smallest probe that fires, ``ceiling`` where none does; ``fires`` [n, probes] with ``probes`` ascending."""
    if len(probes) == 0:
        return np.full(len(fires), ceiling, dtype=np.int64)
    first = np.argmax(fires, axis=1)
    return np.where(fires.any(axis=1), np.asarray(probes, dtype=np.int64)[first], ceiling)


def depths(signal: Floats, thresholds: Floats, probes: Ints, ceiling: int) -> Ints:
    """Depths [n] of one sequence that starts at ``ceiling``.

    ``signal`` [n, probes] complete (a probe that is never read in decoding may hold any value, NaN included: NaN
    never fires); ``thresholds`` [probes] or [n, probes].
    """
    return np.minimum.accumulate(first_fires(signal <= thresholds, probes, ceiling))
