"""The oracle of every check: what the model itself says after each layer.

A *lens* maps one sequence to its reference logits after every layer, from one plain pass over the whole sequence: no
cache, no exits, no other rows. A decoder with a monotone schedule must agree with it at the depths it took, because
every layer a token runs has run for all tokens before it (EMAD, "KV-consistent scheduling").

This module knows arrays, not models: who builds the lens decides what "the model" is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints

Lens = Callable[[Ints], Floats]
"""tokens int64 [n] → logits float64 [n, L, V]; entry [t, ℓ − 1] is the readout of position t after layer ℓ."""


def consult(lens: Lens, tokens: Ints, layers: int) -> Floats:
    """The lens' answer [n, layers, V] for ``tokens`` [n].

    Raises:
        BadArgument: the answer has another shape or dtype, or is not finite.
    """
    logits = lens(np.asarray(tokens, dtype=np.int64))
    if logits.ndim != 3 or logits.shape[:2] != (len(tokens), layers):
        expected = f"logits of shape ({len(tokens)}, {layers}, V)"
        raise BadArgument("lens", logits.shape, expected, "one entry per token and layer")
    if logits.dtype != np.float64:
        raise BadArgument("lens", logits.dtype.name, "float64 logits", "convert after the forward pass")
    if not np.isfinite(logits).all():
        raise BadArgument("lens", "NaN or infinite logits", "finite logits", "check the weights and the dtype")
    return logits


def entropy_nats(logits: Floats) -> Floats:
    """H = log Z − Σ p z of softmax(z), in nats: logits [..., V] → [...]."""
    z = logits - logits.max(axis=-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    entropy: Floats = -(np.exp(log_p) * log_p).sum(axis=-1)
    return entropy


def signals(logits: Floats, point: OperatingPoint) -> Floats:
    """Reference signals [n, probes] at the point's probes, from lens logits [n, L, V].

    Raises:
        BadArgument: the point compares something else than the full readout's entropy.
    """
    asked = (point.signal, point.estimator.name, point.bins.name)
    if asked != ("entropy_nats", "full", "none") or point.interpolate:
        named = "/".join(asked) + (" between probes" if point.interpolate else "")
        expected = "signal/estimator/bins entropy_nats/full/none, exits at probes"
        raise BadArgument("point", named, expected, "the audit knows no other oracle yet")
    return entropy_nats(logits[:, np.asarray(point.probes, dtype=np.int64) - 1])
