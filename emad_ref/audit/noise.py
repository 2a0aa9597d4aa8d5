"""How much noise a decoder may declare: no more than the least precise dtype can honestly need.

``Capabilities.logit_noise`` widens every comparison, so a decoder that declares too much is compared with nothing. What
rounding does to a logit grows with the logits themselves: a table gives, by dtype, half a unit in the last place as a
share of the number, ``ROUNDINGS`` of which an honest decoder may accumulate on the largest logit of all layers. On the
bundled model (12 layers, logits up to 38) bfloat16 took 7 of them and float16 11; what is seen does not grow beyond the
middle layers. A decoder does not say in which dtype it computes: the least precise one bounds them all.

Half a unit in the last place is 2⁻ⁿ of the number, n the bits of its significand.
"""

from __future__ import annotations

import numpy as np

from emad_ref.audit.finding import Finding
from emad_ref.audit.lens import Lens
from emad_ref.record import Ints

CHECK = "noise"
ROUNDINGS = 16
ROUNDING: dict[str, float] = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST_PRECISE = max(ROUNDING, key=ROUNDING.__getitem__)


def largest_noise(lens: Lens, tokens: Ints, tolerance: float) -> float:
    """The most that a decoder may declare, in logits; at least ``tolerance``.

    ``tokens`` int64 [n]: text on which the largest logit is looked for.
    """
    return max(tolerance, ROUNDINGS * ROUNDING[LEAST_PRECISE] * float(np.abs(lens(tokens)).max()))


def honest(noise: float, largest: float) -> Finding:
    """Whether ``noise``, as a decoder declares it, is a number ≥ 0 and at most ``largest``."""
    if not 0 <= noise <= largest:
        complaint = (
            f"the decoder declares logit_noise={noise:g}, but {LEAST_PRECISE}, the least precise dtype, honestly "
            f"needs {largest:g} at most on this model"
        )
        return Finding(CHECK, False, complaint, 1, 0)
    return Finding(CHECK, True, f"logit_noise={noise:g} of {largest:g} at most", 1, 0)
