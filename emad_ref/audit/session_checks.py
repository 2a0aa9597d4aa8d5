"""Check sessions: forced depths, rollback, commit and drop, several sessions at once, and the ``last`` argument of
feed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.audit.finding import MIN_DISCRIMINATING, Finding, Tally
from emad_ref.audit.lens import Lens, emission_noise
from emad_ref.audit.trajectory import (
    Trajectory,
    Transcript,
    count_differing_logits,
    emitted_logits,
    feed_slices,
    judge_trajectories,
    judge_trajectory,
)
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Step
from emad_ref.record import READOUTS, Floats, Ints, Work


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
    needed: int = MIN_DISCRIMINATING,
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
        for turn, columns in enumerate(feed_slices(continuations.shape[1], decoder.capabilities.max_feed)):
            if turn == 3 and len(talk.rows) > 1:
                talk.drop(0)
            fed, obeyed = continuations[talk.rows, columns], depth[talk.rows, columns]
            for bad in _inadmissible(talk.session.cap, point):
                talk.refuse(fed[:, :1], bad)
            talk.feed(fed, obeyed)
        judge_trajectories(tally, talk.trajectories(), lens, point, tolerance)
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


KEPT_TOKENS = 2  # tokens that survive the rollback in the first row; row r keeps r more


def rollback(
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    continuations: Ints,
    tolerance: float,
    *,
    needed: int = MIN_DISCRIMINATING,
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
            judge_trajectory(tally, trajectory, lens, point, tolerance)
        spent, before = _executed_tokens(talk.session.work), talk.session.cap.copy()
        kept = np.array([min(KEPT_TOKENS + row, half - 1) for row in range(len(prompts))])
        talk.rollback(np.array([len(prompt.tokens) for prompt in prompts]) + kept)
        tally.discriminating += int(((half - kept) * (talk.session.cap > before)).sum())
        _require_grown(tally, spent, _executed_tokens(talk.session.work), 0, "rolling back")
        for at in range(half, continuations.shape[1]):
            spent = _executed_tokens(talk.session.work)
            talk.feed(continuations[:, at : at + 1], talk.session.cap[:, None].copy())
            _require_grown(tally, spent, _executed_tokens(talk.session.work), len(prompts), "feeding after it")
            if at == half:  # from here on the forgotten layers may be freed for good
                talk.session.commit(talk.session.length.copy())
        for trajectory in talk.trajectories():
            reference = judge_trajectory(tally, trajectory, lens, point, tolerance)
            if count_differing_logits(reference, trajectory, tolerance) == 0 and trajectory.depth.min() < point.layers:
                tally.notes.append(f"{trajectory.name}: depth makes no difference to its logits")
    return tally.finding()


def _staircase(cap: Ints, n: int) -> Ints:
    """[n, rows] depths that fall from each row's cap to 1."""
    return np.linspace(cap, 1, n).round().astype(np.int64)


def _executed_tokens(work: Work | None) -> Ints | None:
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


PHASES = 3
MIN_PHASE_TOKENS = 4  # tokens fed to a row in each phase


def sessions(
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    continuations: Ints,
    rng: np.random.Generator,
    tolerance: float,
    *,
    needed: int = MIN_DISCRIMINATING,
) -> Finding:
    """Check two sessions on ``prompts`` followed by ``continuations`` int64 [rows, n], n ≥ 12.

    The second session holds the last two prompts, in reverse order. What is kept and dropped is drawn from ``rng``.
    Discriminating are positions as in ``forced``; ``tolerance`` likewise.

    Raises:
        BadArgument: too few tokens to feed.
    """
    phase = continuations.shape[1] // PHASES
    if phase < MIN_PHASE_TOKENS:
        raise BadArgument(
            "continuations", continuations.shape, f"at least {PHASES * MIN_PHASE_TOKENS} tokens for each row"
        )
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
        judge_trajectories(tally, [*talk.trajectories(), *spoken], lens, point, tolerance)
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


LAST_CHECK = "last"
WIDEST_PARTLY_SHOWN = 3  # tokens of a feed at most
FULL = READOUTS.index("full")


def partly_shown_feeds(widest: int) -> list[tuple[int, int]]:
    """(tokens, last) of all feeds: every pair up to ``WIDEST``, or to ``widest`` where a decoder takes fewer."""
    return [(n, last) for n in range(1, min(WIDEST_PARTLY_SHOWN, widest) + 1) for last in range(n + 1)]


def last_logits(
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    continuations: Ints,
    rng: np.random.Generator,
    tolerance: float,
) -> Finding:
    """Check ``last`` on ``prompts`` followed by ``continuations`` int64 [rows, n], n ≥ 20, in an order ``rng`` draws.

    ``tolerance`` in logits and nats, raised to the decoder's declared noise. Discriminating are feeds that show fewer
    logits than tokens.
    """
    tally = Tally(LAST_CHECK)
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    plan = partly_shown_feeds(decoder.capabilities.max_feed)
    tally.needed = min(tally.needed, sum(last < n for n, last in plan))  # all there are, of a decoder of narrow feeds
    order = rng.permutation(len(plan))
    with tally:
        session, step = decoder.start(prompts)
        said = [_FedRow(prompt) for prompt in prompts]
        _write_step(tally, said, step, 1, 1, chosen=True)
        at = 0
        for number, (n, last) in enumerate(plan[turn] for turn in order):
            tokens, depth = continuations[:, at : at + n], None
            if number % 2:
                depth = np.repeat(session.cap[:, None], n, axis=1)
            step = session.feed(tokens, depth, last)
            for row, fed in zip(said, tokens.tolist(), strict=True):
                row.tokens += fed
            _write_step(tally, said, step, n, last, chosen=depth is None)
            tally.discriminating += int(last < n)
            at += n
        if point.fixed and len(prompts) == 1 and session.work is not None:
            heads, wanted = int(session.work.readout_rows[FULL].sum()), 1 + sum(last for _, last in plan)
            tally.require(
                heads == wanted, f"work counts {heads} heads, but the logits of {wanted} positions were asked for"
            )
        session.close()
        for number, row in enumerate(said):
            _judge_fed_row(tally, f"row {number}", row, lens, point, tolerance)
    return tally.finding()


class _FedRow:
    """What was fed to one row, and what was said of each position decided."""

    def __init__(self, prompt: Prompt) -> None:
        self.tokens = [int(token) for token in prompt.tokens]
        self.first = len(self.tokens) - 1
        self.depth: list[int] = []
        self.signal: list[Floats] = []
        self.chosen: list[bool] = []
        self.logits: dict[int, Floats] = {}  # place among the decided ones → what was shown


def _write_step(tally: Tally, rows: Sequence[_FedRow], step: Step, n: int, last: int, *, chosen: bool) -> None:
    shown, told = step.logits.shape[:2], (step.depth.shape, step.signal.shape[:2])
    asked = f"a feed of {n} tokens with last={last}"
    tally.require(shown == (len(rows), last), f"{asked} shows logits of shape {step.logits.shape}")
    tally.require(
        told == ((len(rows), n),) * 2, f"{asked} tells depths of shape {told[0]} and signals of {step.signal.shape}"
    )
    for index, row in enumerate(rows):
        for at in range(n):
            if at >= n - last:
                row.logits[len(row.depth)] = np.array(step.logits[index, at - (n - last)], dtype=np.float64)
            row.depth.append(int(step.depth[index, at]))
            row.signal.append(np.array(step.signal[index, at], dtype=np.float64))
            row.chosen.append(chosen)


def _judge_fed_row(tally: Tally, name: str, row: _FedRow, lens: Lens, point: OperatingPoint, tolerance: float) -> None:
    trajectory = Trajectory(
        name,
        np.array(row.tokens, dtype=np.int64),
        row.first,
        np.array(row.depth, dtype=np.int64),
        np.array(row.signal).reshape(len(row.depth), len(point.probes)),
        np.array(row.chosen),
    )
    wanted = emitted_logits(judge_trajectory(tally, trajectory, lens, point, tolerance), trajectory)
    allowed = tolerance * emission_noise(point)
    for at, logits in row.logits.items():
        off = float(np.abs(logits - wanted[at]).max())
        tally.require(off <= allowed, f"{trajectory.place(at)}: logits off by {off:.2g}, more than {allowed:g}")
