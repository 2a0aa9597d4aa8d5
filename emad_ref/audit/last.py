"""``last`` of ``feed``: so many logits at the end, those of the last tokens, and no head that serves no other purpose.

Every number of tokens up to three is fed with every ``last`` from 0 to it, half of them at forced depths. Depths and
signals must be those of all tokens all the same, and what is shown the readout of the tokens at the end. One row alone
at full depth counts one head for each position whose logits were wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.audit.finding import Finding, Tally
from emad_ref.audit.lens import Lens
from emad_ref.audit.rule import emission_noise
from emad_ref.audit.trajectory import Trajectory, emitted_at, hold_against
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Step
from emad_ref.record import READOUTS, Floats, Ints

CHECK = "last"
WIDEST = 3  # tokens of a feed at most
FULL = READOUTS.index("full")


def feeds(widest: int) -> list[tuple[int, int]]:
    """(tokens, last) of all feeds: every pair up to ``WIDEST``, or to ``widest`` where a decoder takes fewer."""
    return [(n, last) for n in range(1, min(WIDEST, widest) + 1) for last in range(n + 1)]


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
    tally = Tally(CHECK)
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    plan = feeds(decoder.capabilities.max_feed)
    tally.needed = min(tally.needed, sum(last < n for n, last in plan))  # all there are, of a decoder of narrow feeds
    order = rng.permutation(len(plan))
    with tally:
        session, step = decoder.start(prompts)
        said = [_Row(prompt) for prompt in prompts]
        _write(tally, said, step, 1, 1, chosen=True)
        at = 0
        for number, (n, last) in enumerate(plan[turn] for turn in order):
            tokens, depth = continuations[:, at : at + n], None
            if number % 2:
                depth = np.repeat(session.cap[:, None], n, axis=1)
            step = session.feed(tokens, depth, last)
            for row, fed in zip(said, tokens.tolist(), strict=True):
                row.tokens += fed
            _write(tally, said, step, n, last, chosen=depth is None)
            tally.discriminating += int(last < n)
            at += n
        if point.fixed and len(prompts) == 1 and session.work is not None:
            heads, wanted = int(session.work.readout_rows[FULL].sum()), 1 + sum(last for _, last in plan)
            tally.require(
                heads == wanted, f"work counts {heads} heads, but the logits of {wanted} positions were asked for"
            )
        session.close()
        for number, row in enumerate(said):
            _judge(tally, f"row {number}", row, lens, point, tolerance)
    return tally.finding()


class _Row:
    """What was fed to one row, and what was said of each position decided."""

    def __init__(self, prompt: Prompt) -> None:
        self.tokens = [int(token) for token in prompt.tokens]
        self.first = len(self.tokens) - 1
        self.depth: list[int] = []
        self.signal: list[Floats] = []
        self.chosen: list[bool] = []
        self.logits: dict[int, Floats] = {}  # place among the decided ones → what was shown


def _write(tally: Tally, rows: Sequence[_Row], step: Step, n: int, last: int, *, chosen: bool) -> None:
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


def _judge(tally: Tally, name: str, row: _Row, lens: Lens, point: OperatingPoint, tolerance: float) -> None:
    trajectory = Trajectory(
        name,
        np.array(row.tokens, dtype=np.int64),
        row.first,
        np.array(row.depth, dtype=np.int64),
        np.array(row.signal).reshape(len(row.depth), len(point.probes)),
        np.array(row.chosen),
    )
    wanted = emitted_at(hold_against(tally, trajectory, lens, point, tolerance), trajectory)
    allowed = tolerance * emission_noise(point)
    for at, logits in row.logits.items():
        off = float(np.abs(logits - wanted[at]).max())
        tally.require(off <= allowed, f"{trajectory.place(at)}: logits off by {off:.2g}, more than {allowed:g}")
