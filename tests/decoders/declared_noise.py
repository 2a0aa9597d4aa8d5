"""An honest decoder with rounding noise: its logits differ by up to ``noise``, and differently in other batches.

It imitates a decoder in half precision under a judge's model in float32. The noise is deterministic: the same call
gives the same numbers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from emad_ref.record import Floats
from tests.decoders.cached_decoder import CachedDecoder, CachedSession


class NoisySession(CachedSession):
    noise = 0.0

    def logits(self, hidden: Tensor) -> Floats:
        exact = super().logits(hidden)
        return exact + np.float32(self.noise) * np.sin(1e5 * exact + len(self.rows))


def noisy(noise: float, declared: float) -> type[CachedDecoder]:
    """Return a decoder with up to ``noise`` in each logit that declares ``declared``."""
    session = type("NoisySession", (NoisySession,), {"noise": noise})
    capabilities = replace(CachedDecoder.capabilities, logit_noise=declared)
    return type("NoisyDecoder", (CachedDecoder,), {"session": session, "capabilities": capabilities})
