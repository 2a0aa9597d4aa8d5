"""Sessions live side by side, and rows come and go: nothing that happens to one may show in another.

Two sessions of one decoder are fed in turns. In the first, part of each row is committed, and the rows are rolled back
to there: what was committed may be freed above the cap of *that* time, not of this. Then they go on at the depths which
the restored caps allow, the second session is closed, and several rows are dropped in one call, in either order.
Whatever is said meanwhile is held against the lens, row by row; complaints name what had happened last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.audit.finding import NEEDED, Finding, Tally
from emad_ref.audit.forced import falling_depths
from emad_ref.audit.lens import Lens
from emad_ref.audit.trajectory import hold_all_against
from emad_ref.audit.transcript import Transcript
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import Ints

PHASES = 3
FEWEST = 4  # tokens fed to a row in each phase


def sessions(
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
    """Check two sessions on ``prompts`` followed by ``continuations`` int64 [rows, n], n ≥ 12.

    The second session holds the last two prompts, in reverse order. What is kept and dropped is drawn from ``rng``.
    Discriminating are positions as in ``forced``; ``tolerance`` likewise.

    Raises:
        BadArgument: too few tokens to feed.
    """
    phase = continuations.shape[1] // PHASES
    if phase < FEWEST:
        raise BadArgument("continuations", continuations.shape, f"at least {PHASES * FEWEST} tokens for each row")
    tally = Tally("sessions", needed if point.layers > 1 else 0)  # one layer leaves no depth to choose
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    others = range(len(prompts) - 1, -1, -1)[:2]
    names = [f"second session, row {row}" for row in range(len(others))]
    with tally, Transcript(tally, decoder, prompts, point) as talk:
        with Transcript(tally, decoder, [prompts[row] for row in others], point, names) as other:
            asides = iter(np.flip(continuations[others], axis=1).T)

            def in_turns(tokens: Ints) -> None:
                """Feed ``tokens`` [rows, n] at depths that fall from the caps, and as many to the other session."""
                depths = falling_depths(rng, talk.session.cap, tokens.shape[1], point.schedule)
                for fed, depth in zip(tokens.T, depths.T, strict=True):
                    talk.feed(fed[:, None], depth[:, None])
                    other.feed(next(asides)[:, None])

            in_turns(continuations[:, :phase])
            committed = np.array([len(prompt.tokens) for prompt in prompts]) + rng.integers(0, phase - 1, len(prompts))
            talk.session.commit(committed)
            talk.stage = other.stage = "after a commit of part of each row"
            talk.feed(continuations[:, phase : phase + 1], talk.session.cap[:, None].copy())
            talk.rollback(committed)
            talk.stage = "after a rollback to what was committed"
            in_turns(continuations[:, phase + 1 : 2 * phase])
            spoken = other.trajectories()
        talk.stage = "after the other session was closed"
        talk.feed(continuations[:, 2 * phase : 2 * phase + 1], talk.session.cap[:, None].copy())
        halves = np.array_split(np.arange(2 * phase + 1, 3 * phase), 2)
        for columns, backwards in zip(halves, (False, True), strict=True):
            _drop_two(talk, rng, backwards=backwards)
            for fed in continuations[talk.rows][:, columns].T:
                talk.feed(fed[:, None], talk.session.cap[:, None].copy())
        hold_all_against(tally, [*talk.trajectories(), *spoken], lens, point, tolerance)
    return tally.finding()


def _drop_two(talk: Transcript, rng: np.random.Generator, *, backwards: bool) -> None:
    """Drop two drawn rows in one call, where more are left, by falling indices or by rising ones."""
    if len(talk.rows) <= 2:
        return
    # forwards the last stays, or indices that shift would still fit
    drawn_from = len(talk.rows) if backwards else len(talk.rows) - 1
    gone = sorted(rng.choice(drawn_from, 2, replace=False).tolist(), reverse=backwards)
    talk.drop(*gone)
    talk.stage = f"after rows {gone} were dropped at once"
