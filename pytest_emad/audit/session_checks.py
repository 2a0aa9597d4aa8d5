"""Check sessions: forced depths, rollback, commit and drop, several sessions at once, and ``last`` of ``feed``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt
from emad_ref.record import READOUTS, Ints, Work
from pytest_emad.audit.finding import MIN_DISCRIMINATING, Finding
from pytest_emad.audit.trajectory import (
    CheckedSession,
    DecoderUnderTest,
    Judge,
    count_logits_unlike_full_depth,
    make_feed_slices,
)

FULL = READOUTS.index("full")
SESSION_PHASES, MIN_PHASE_TOKENS = 3, 4  # least tokens fed to a row in each phase
KEPT_TOKENS = 2  # tokens that survive the rollback in the first row; row r keeps r more
WIDEST_PARTLY_SHOWN = 3  # most tokens of a feed tested under every ``last``


# ---------------------------------------------------------------- forced depths


def draw_admissible_depths(rng: np.random.Generator, cap: Ints, n: int, schedule: str) -> Ints:
    """[rows, n] admissible depths drawn uniformly below ``cap`` [rows].

    Under the monotone schedule each row's depth falls after 2 … n/2 + 1 tokens at its cap, so that only a later token
    that reaches a layer reads an earlier token's entries there.
    """
    depths = np.stack([rng.integers(1, top + 1, n) for top in cap])
    if schedule != "monotone":
        return depths
    depths = -np.sort(-depths, axis=1)
    stays = rng.integers(2, n // 2 + 2, len(cap))
    return np.where(np.arange(n) < stays[:, None], cap[:, None], depths)


def check_forced_depths(
    under_test: DecoderUnderTest,
    prompts: Sequence[Prompt],
    continuations: Ints,
    rng: np.random.Generator,
    *,
    needed: int = MIN_DISCRIMINATING,
) -> Finding:
    """Check that logits at forced admissible depths equal the lens (EMAD-E2), and that other depths are refused.

    ``prompts`` are followed by ``continuations`` int64 [rows, n] at depths drawn from ``rng``; meanwhile one row is
    dropped. Depths above a row's cap, above the ceiling and below 1 must raise InadmissibleDepth and leave the session
    unchanged. Discriminating positions have logits that differ from full depth's by more than ``tolerance`` (logits;
    raised to the decoder's declared noise). A point at full depth allows the most depths. A decoder without forced
    depths (``DecoderUnderTest.forces``) is fed the same tokens at full depth.
    """
    decoder, point = under_test.decoder, under_test.point
    judge = Judge.for_check("forced", under_test, _needed(needed, under_test))
    with judge.tally, CheckedSession(judge, decoder, prompts) as transcript:
        depth = draw_admissible_depths(rng, transcript.session.cap, continuations.shape[1], point.schedule)
        for turn, columns in enumerate(make_feed_slices(continuations.shape[1], decoder.capabilities.max_feed)):
            if turn == 3 and len(transcript.rows) > 1:
                transcript.drop(0)
            fed, obeyed = continuations[transcript.rows, columns], depth[transcript.rows, columns]
            for bad in _inadmissible(transcript.session.cap, point):
                transcript.require_inadmissible_depth_refused(fed[:, :1], bad)
            transcript.feed(fed, obeyed)
        judge.require_trajectories_match_lens(transcript.build_trajectories())
    return judge.tally.to_finding()


def _needed(needed: int, under_test: DecoderUnderTest) -> int:
    return needed if under_test.point.layers > 1 or not under_test.forces else 0  # one layer leaves no depth to choose


def _inadmissible(cap: Ints, point: OperatingPoint) -> list[Ints]:
    """[rows, 1] depths with one wrong row: above its cap, above the ceiling, below 1."""
    offers = []
    for row in {int(np.argmin(cap)), len(cap) - 1}:
        for wrong in (int(cap[row]) + 1, point.ceiling + 1, 0):
            offer = cap.copy()
            offer[row] = wrong
            offers.append(offer[:, None])
    return offers


# ---------------------------------------------------------------- rollback


def check_rollback(
    under_test: DecoderUnderTest, prompts: Sequence[Prompt], continuations: Ints, *, needed: int = MIN_DISCRIMINATING
) -> Finding:
    """Check that a rollback restores tokens, K/V and cap, and that the work stays counted.

    Rows fall to shallow depths over the first half of ``continuations`` int64 [rows, n], n ≥ 6, and are rolled back by
    different amounts. Then they are fed the second half at the deepest depths that the restored caps allow, which run
    the layers that the forgotten tokens skipped. Finally the rows are committed and continue. Discriminating are
    forgotten positions with a depth below the restored cap. Without forced depths every token runs all layers, and
    discriminating are forgotten positions that are fed another token instead.
    """
    decoder, point = under_test.decoder, under_test.point
    judge = Judge.for_check("rollback", under_test, _needed(needed, under_test))
    tally, half = judge.tally, continuations.shape[1] // 2
    with tally, CheckedSession(judge, decoder, prompts) as transcript:
        for at, depth in enumerate(np.linspace(transcript.session.cap, 1, half).round().astype(np.int64)):
            transcript.feed(continuations[:, at : at + 1], depth[:, None])
        for trajectory in transcript.build_trajectories():
            judge.require_trajectory_matches_lens(trajectory)
        spent, before = _executed_tokens(transcript.session.work), transcript.session.cap.copy()
        lengths = np.array([min(KEPT_TOKENS + row, half - 1) for row in range(len(prompts))])
        transcript.rollback(np.array([len(prompt.tokens) for prompt in prompts]) + lengths)
        if under_test.forces:
            tally.discriminating += int(((half - lengths) * (transcript.session.cap > before)).sum())
        for row, kept in enumerate(lengths if not under_test.forces else ()):
            again = continuations[row, half : half + half - kept]
            tally.discriminating += int((continuations[row, kept:half][: len(again)] != again).sum())
        _require_grown(judge, spent, _executed_tokens(transcript.session.work), 0, "rolling back")
        for at in range(half, continuations.shape[1]):
            spent = _executed_tokens(transcript.session.work)
            transcript.feed(continuations[:, at : at + 1], transcript.session.cap[:, None].copy())
            _require_grown(judge, spent, _executed_tokens(transcript.session.work), len(prompts), "feeding after it")
            if at == half:  # from here on the decoder may free the forgotten layers
                transcript.session.commit(transcript.session.length.copy())
        for trajectory in transcript.build_trajectories():
            differing = count_logits_unlike_full_depth(
                judge.require_trajectory_matches_lens(trajectory), trajectory, judge.tolerance
            )
            if differing == 0 and trajectory.depth.min() < point.layers:
                tally.notes.append(f"{trajectory.name}: depth makes no difference to its logits")
    return tally.to_finding()


def _executed_tokens(work: Work | None) -> Ints | None:
    """[L], copied, or None for a decoder that does not count."""
    return None if work is None else work.tokens.copy()


def _require_grown(judge: Judge, spent: Ints | None, now: Ints | None, rows: int, when: str) -> None:
    """Require that work never shrinks, and that layer 1 grew by at least the ``rows`` tokens."""
    if spent is None or now is None:
        return
    shrunk = f"{when}: work fell from {spent.tolist()} to {now.tolist()} tokens per layer"
    judge.tally.require(bool((now >= spent).all()), shrunk)
    grown = now[0] - spent[0]
    judge.tally.require(rows == 0 or grown >= rows, f"{when}: {rows} tokens ran, but work counts {grown}")


# ---------------------------------------------------------------- simultaneous sessions


def check_session_isolation(
    under_test: DecoderUnderTest,
    prompts: Sequence[Prompt],
    continuations: Ints,
    rng: np.random.Generator,
    *,
    needed: int = MIN_DISCRIMINATING,
) -> Finding:
    """Check that two sessions of one decoder do not disturb each other under commits, drops and closing.

    The sessions hold ``prompts``, and the last two of them in reverse order; they are fed ``continuations`` int64
    [rows, n], n ≥ 12, in turns. In the first, part of each row is committed and the rows are rolled back to there: the
    decoder may free the committed part above the cap at that position, not above the last cap. They continue at the
    depths that the restored caps allow. Then each session drops rows while the other is open, the second one is closed,
    and the first drops rows again: several in one call, in either order. ``rng`` draws the rows to keep and drop.
    Discriminating are positions as in ``check_forced_depths``.

    Raises:
        BadArgument: too few tokens to feed.
    """
    decoder, point = under_test.decoder, under_test.point
    phase = continuations.shape[1] // SESSION_PHASES
    if phase < MIN_PHASE_TOKENS:
        expected = f"at least {SESSION_PHASES * MIN_PHASE_TOKENS} tokens for each row"
        raise BadArgument("continuations", continuations.shape, expected)
    judge = Judge.for_check("sessions", under_test, _needed(needed, under_test))
    others = range(len(prompts) - 1, -1, -1)[:2]
    names = [f"second session, row {row}" for row in range(len(others))]
    with judge.tally, CheckedSession(judge, decoder, prompts) as transcript:
        with CheckedSession(judge, decoder, [prompts[row] for row in others], names) as other:
            asides = iter(np.flip(continuations[others], axis=1).T)

            def feed_at_cap(column: int) -> None:
                transcript.feed(continuations[transcript.rows, column, None], transcript.session.cap[:, None].copy())

            def in_turns(tokens: Ints) -> None:
                """Feed ``tokens`` [rows, n] at depths that fall from the caps, and as many to the other session."""
                depths = draw_admissible_depths(rng, transcript.session.cap, tokens.shape[1], point.schedule)
                for fed, depth in zip(tokens.T, depths.T, strict=True):
                    transcript.feed(fed[:, None], depth[:, None])
                    other.feed(next(asides)[:, None])

            in_turns(continuations[:, :phase])
            committed = np.array([len(prompt.tokens) for prompt in prompts]) + rng.integers(0, phase - 1, len(prompts))
            transcript.session.commit(committed)
            transcript.stage = other.stage = "after a commit of part of each row"
            feed_at_cap(phase)
            transcript.rollback(committed)
            transcript.stage = "after a rollback to what was committed"
            in_turns(continuations[:, phase + 1 : 2 * phase])
            beside, alone = np.array_split(np.arange(2 * phase + 1, 3 * phase), 2)
            _drop_two(transcript, rng, backwards=False)
            other.stage = "after rows of the first session were dropped"
            for column in beside:
                feed_at_cap(column)
                other.feed(next(asides)[: len(other.rows), None])
                if len(other.rows) > 1:
                    other.drop(0)
                    transcript.stage += ", and one of the second session"
            others_did = other.build_trajectories()
        transcript.stage = "after the other session was closed"
        feed_at_cap(2 * phase)
        _drop_two(transcript, rng, backwards=True)
        for column in alone:
            feed_at_cap(column)
        judge.require_trajectories_match_lens([*transcript.build_trajectories(), *others_did])
    return judge.tally.to_finding()


def _drop_two(transcript: CheckedSession, rng: np.random.Generator, *, backwards: bool) -> None:
    """Drop two random rows in one call, if more are left, by falling indices or by rising ones."""
    if len(transcript.rows) <= 2:
        return
    # ascending order keeps the last row, else shifting indices would still fit
    drawn_from = len(transcript.rows) if backwards else len(transcript.rows) - 1
    gone = sorted(rng.choice(drawn_from, 2, replace=False).tolist(), reverse=backwards)
    transcript.drop(*gone)
    transcript.stage = f"after rows {gone} were dropped at once"


# ---------------------------------------------------------------- requested logits


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
