"""After a rollback a session is what it was: tokens, K/V and cap; only the work stays spent.

Ragged rows fall to shallow depths, are rolled back by different amounts, and are then fed other tokens at the deepest
depth the restored cap allows: those run the layers that the forgotten tokens skipped, over the K/V of the kept ones
alone. The lens on the new history is the fresh history to compare with. Last, the rows are committed and go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.audit.finding import NEEDED, Finding, Tally
from emad_ref.audit.lens import Lens
from emad_ref.audit.trajectory import differing_logits, hold_against
from emad_ref.audit.transcript import Transcript
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints, Work

KEPT = 2  # tokens that survive the rollback in the first row; row r keeps r more


def rollback(
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    continuations: Ints,
    tolerance: float,
    *,
    needed: int = NEEDED,
) -> Finding:
    """Check rollback on ``prompts`` followed by ``continuations`` int64 [rows, n], n ≥ 6.

    The first half of the columns is fed and rolled back, the second half fed afterwards. Discriminating are forgotten
    positions whose depth lay below the restored cap. ``tolerance`` as in ``forced``.
    """
    tally = Tally("rollback", needed if point.layers > 1 else 0)  # one layer leaves no depth to choose
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    half = continuations.shape[1] // 2
    with tally, Transcript(tally, decoder, prompts, point) as talk:
        for at, depth in enumerate(_staircase(talk.session.cap, half)):
            talk.feed(continuations[:, at : at + 1], depth[:, None])
        for trajectory in talk.trajectories():
            hold_against(tally, trajectory, lens, point, tolerance)
        spent, before = _totals(talk.session.work), talk.session.cap.copy()
        kept = np.array([min(KEPT + row, half - 1) for row in range(len(prompts))])
        talk.rollback(np.array([len(prompt.tokens) for prompt in prompts]) + kept)
        tally.discriminating += int(((half - kept) * (talk.session.cap > before)).sum())
        _require_grown(tally, spent, _totals(talk.session.work), 0, "rolling back")
        for at in range(half, continuations.shape[1]):
            spent = _totals(talk.session.work)
            talk.feed(continuations[:, at : at + 1], talk.session.cap[:, None].copy())
            _require_grown(tally, spent, _totals(talk.session.work), len(prompts), "feeding after it")
            if at == half:  # from here on the forgotten layers may be freed for good
                talk.session.commit(talk.session.length.copy())
        for trajectory in talk.trajectories():
            reference = hold_against(tally, trajectory, lens, point, tolerance)
            if differing_logits(reference, trajectory, tolerance) == 0 and trajectory.depth.min() < point.layers:
                tally.notes.append(f"{trajectory.name}: depth makes no difference to its logits")
    return tally.finding()


def _staircase(cap: Ints, n: int) -> Ints:
    """[n, rows] depths that fall from each row's cap to 1."""
    return np.linspace(cap, 1, n).round().astype(np.int64)


def _totals(work: Work | None) -> Ints | None:
    """[L] executed tokens, copied, or None for a decoder that does not count."""
    return None if work is None else work.tokens.copy()


def _require_grown(tally: Tally, spent: Ints | None, now: Ints | None, rows: int, when: str) -> None:
    """Work never shrinks; where ``rows`` tokens ran, layer 1 has grown by at least as many."""
    if spent is None or now is None:
        return
    shrunk = f"{when}: work fell from {spent.tolist()} to {now.tolist()} tokens per layer"
    tally.require(bool((now >= spent).all()), shrunk)
    tally.require(
        rows == 0 or now[0] - spent[0] >= rows, f"{when}: {rows} tokens ran, but work counts {now[0] - spent[0]}"
    )
