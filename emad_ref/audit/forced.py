"""At forced admissible depths, logits equal the lens at those depths (claim EMAD-E2); inadmissible depths are refused.

Several ragged rows stay at their cap for a while, where every layer reads what it wrote, and then take random falling
depths, each its own; half-way one row is dropped. Along the way depths above a row's cap, above the ceiling and below 1
are offered: each must raise InadmissibleDepth and leave the session as it was, which the logits that follow prove.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.audit.finding import NEEDED, Finding, Tally
from emad_ref.audit.lens import Lens
from emad_ref.audit.trajectory import hold_all_against
from emad_ref.audit.transcript import Transcript, slices
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints


def falling_depths(rng: np.random.Generator, cap: Ints, n: int, schedule: str) -> Ints:
    """[rows, n] admissible depths drawn uniformly below ``cap`` [rows].

    Under the monotone schedule each row's fall, after it has stayed at its cap for 2 … n/2 + 1 tokens: what a token
    writes in a layer is read by a later one that gets there, and by no other.
    """
    drawn = np.stack([rng.integers(1, top + 1, n) for top in cap])
    if schedule != "monotone":
        return drawn
    drawn = -np.sort(-drawn, axis=1)
    stays = rng.integers(2, n // 2 + 2, len(cap))
    return np.where(np.arange(n) < stays[:, None], cap[:, None], drawn)


def forced(
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    continuations: Ints,
    rng: np.random.Generator,
    tolerance: float,
    *,
    needed: int = NEEDED,
) -> Finding:
    """Check forced depths on ``prompts`` followed by ``continuations`` int64 [rows, n], depths drawn from ``rng``.

    The caps start where the point's rule leaves them at each prompt's last position: a point at full depth gives the
    depths most room. Discriminating are positions whose logits differ from full depth's by more than ``tolerance``
    (logits; raised to the decoder's declared noise).
    """
    tally = Tally("forced", needed if point.layers > 1 else 0)  # one layer leaves no depth to choose
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    with tally, Transcript(tally, decoder, prompts, point) as talk:
        depth = falling_depths(rng, talk.session.cap, continuations.shape[1], point.schedule)
        for turn, columns in enumerate(slices(continuations.shape[1], decoder.capabilities.max_feed)):
            if turn == 3 and len(talk.rows) > 1:
                talk.drop(0)
            fed, obeyed = continuations[talk.rows, columns], depth[talk.rows, columns]
            for bad in _inadmissible(talk.session.cap, point):
                talk.refuse(fed[:, :1], bad)
            talk.feed(fed, obeyed)
        hold_all_against(tally, talk.trajectories(), lens, point, tolerance)
    return tally.finding()


def _inadmissible(cap: Ints, point: OperatingPoint) -> list[Ints]:
    """[rows, 1] depths that are wrong in one row only: above its cap, above the ceiling, below 1."""
    offers = []
    for row in {int(np.argmin(cap)), len(cap) - 1}:
        for wrong in (int(cap[row]) + 1, point.ceiling + 1, 0):
            offer = cap.copy()
            offer[row] = wrong
            offers.append(offer[:, None])
    return offers
