"""Mean entropies → thresholds: τ_ℓ = isotonic(mean H_ℓ), non-increasing over probes (EMAD, "Calibration details")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sklearn.isotonic import IsotonicRegression

from emad_ref.errors import BadArgument
from emad_ref.record import Floats, Ints


def isotonic_targets(probes: Sequence[int], mean_nats: Floats, tokens: Ints) -> Floats:
    """[probes] the non-increasing curve nearest to ``mean_nats`` [probes] in least squares weighted by ``tokens``.

    Raises:
        BadArgument: lengths that differ, or a mean that is not a finite number.
    """
    if len(probes) != len(mean_nats) or len(probes) != len(tokens):
        raise BadArgument("mean_nats", np.shape(mean_nats), f"one mean and one token count per probe ({len(probes)})")
    if not np.isfinite(mean_nats).all():
        raise BadArgument("mean_nats", np.asarray(mean_nats).tolist(), "finite entropies", "take the trace again")
    if len(probes) == 0:
        return np.empty(0)
    fit = IsotonicRegression(increasing=False)
    return fit.fit_transform(np.asarray(probes, dtype=float), np.asarray(mean_nats, dtype=float), sample_weight=tokens)
