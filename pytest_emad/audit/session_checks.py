"""Check ``last`` of ``feed``: the number of logits that are shown. ``session_cases`` has the rest of sessions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.protocol import Prompt
from emad_ref.record import READOUTS, Ints
from pytest_emad.audit.finding import MIN_DISCRIMINATING, Finding
from pytest_emad.audit.trajectory import CheckedSession, DecoderUnderTest, Judge

FULL = READOUTS.index("full")
WIDEST_PARTLY_SHOWN = 3  # most tokens of a feed tested under every ``last``


def plan_feeds_with_last_logits(widest: int) -> list[tuple[int, int]]:
    """(tokens, last) of feeds: every pair up to ``WIDEST_PARTLY_SHOWN`` tokens, or up to ``widest`` if that is less."""
    return [(n, last) for n in range(1, min(WIDEST_PARTLY_SHOWN, widest) + 1) for last in range(n + 1)]


def check_feed_last_argument(
    under_test: DecoderUnderTest, prompts: Sequence[Prompt], continuations: Ints, rng: np.random.Generator
) -> Finding:
    """Check that a feed with ``last`` returns the logits of the last tokens, and runs no unneeded head.

    Every number of tokens up to three is fed with every ``last`` from 0 to it, in random order (``rng``), every other
    feed at forced depths; ``continuations`` int64 [rows, n], n ≥ 20. Depths and signals must be those of all tokens.
    One row alone at full depth counts one head per requested position. Discriminating are feeds with fewer logits than
    tokens.
    """
    decoder, point = under_test.decoder, under_test.point
    plan = plan_feeds_with_last_logits(decoder.capabilities.max_feed)
    partial = sum(last < n for n, last in plan)  # all pairs, for a decoder of narrow feeds
    judge = Judge.for_check("last", under_test, min(MIN_DISCRIMINATING, partial))
    tally, at = judge.tally, 0
    with tally, CheckedSession(judge, decoder, prompts) as transcript:
        for number, (n, last) in enumerate(plan[turn] for turn in rng.permutation(len(plan))):
            depth = np.repeat(transcript.session.cap[:, None], n, axis=1) if number % 2 else None
            transcript.feed(continuations[:, at : at + n], depth, last)
            tally.discriminating += int(last < n)
            at += n
        if point.has_fixed_depth and len(prompts) == 1 and transcript.session.work is not None:
            heads, expected = int(transcript.session.work.readout_rows[FULL].sum()), 1 + sum(last for _, last in plan)
            tally.require(
                heads == expected, f"work counts {heads} heads, but the logits of {expected} positions were asked for"
            )
        for trajectory in transcript.build_trajectories():
            judge.require_trajectory_matches_lens(trajectory)
    return tally.to_finding()
