"""Requests that were timed, looked at after the clock: did each arm do the work whose time it is?

A decoder could be honest wherever it is audited and hurry where it is timed. So what is judged here was made while the
clock ran, and nothing is decoded anew:

lengths  each row of every request holds as many new tokens as were asked for
tokens   of the requests at hand (a random subset): each is the argmax at the depth claimed for it, the depths are the
         rule's, the work is what they imply (``generation``)
work     an arm is no faster than the same decoder at full depth by more than the work it left out explains
others   arms that keep no record, such as the model's ``generate``, are taken at full depth

Ties are counted and excused, however many: a few hundred tokens cannot show a share of 1 % (METHODS, "Tolerances"). The
checks of fidelity see to that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.audit.finding import Finding, Tally, prefix_complaints
from emad_ref.audit.generation import judge_record
from emad_ref.audit.lens import Lens
from emad_ref.audit.trajectory import Trajectory, hold_against, judge_tokens
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import Floats, Ints, Record

CHECK = "timed"
# How many times the ratio of work a ratio of times may be. Where every kind of work costs some time, and whatever does
# not depend on depth costs some more, a ratio of times lies below the largest ratio of any kind of work: sums of
# non-negative parts differ by no more than their most different part. What runs fewer layers finds more of their
# weights and K/V in caches, which makes what is left faster, too: half as fast again is room for that, and for noise.
UNEXPLAINED = 1.5

Emitted = Sequence[Ints]  # [rows] of new tokens


@dataclass(frozen=True, eq=False)
class TimedRequest:
    """One request as timed: ``prompts`` [rows], and what each arm made of them.

    ``records``: arm → its record; ``emitted``: arm that keeps none → its tokens.
    """

    prompts: Sequence[Prompt]
    records: Mapping[str, Record]
    emitted: Mapping[str, Emitted]


def lengths(emitted: Mapping[str, Sequence[Emitted]], rows: int, new: int) -> Finding:
    """Whether every arm emitted ``new`` tokens in each of ``rows`` rows, in all requests."""
    tally = Tally(CHECK, needed=0)
    with tally:
        for arm, requests in emitted.items():
            for request, each in enumerate(requests):
                found = [len(tokens) for tokens in each]
                tally.require(
                    found == [new] * rows, f"{arm}, request {request}: {found} new tokens, but {new} in each of {rows}"
                )
                tally.n += sum(found)
    return tally.finding()


def no_faster_than_work(
    arm: str, full: str, rows: int, seconds: Mapping[str, Floats], executed: Mapping[str, Floats]
) -> Finding:
    """Whether ``arm`` is at most ``UNEXPLAINED`` times faster than ``full``, full depth, than its work is less.

    Args:
        seconds: arm → [pairs], of one decoder; the median ratio over pairs counts, which a pause of the machine in one
            of them does not move.
        executed: arm → [pairs, kinds] work of each kind, NaN where it cannot be told.
    """
    pairs = len(seconds[arm])
    ratios = executed[full].sum(axis=0) / np.maximum(executed[arm].sum(axis=0), 1.0)
    if not np.isfinite(ratios).all():
        return Finding(CHECK, True, f"{arm}: what it ran says nothing of time", pairs, 0)
    faster, explained = float(np.median(seconds[full] / seconds[arm])), max(1.0, float(ratios.max()))
    said = f"{arm}, batch {rows}: {faster:.2f}× as fast as full depth by the same decoder; its work is {explained:.2f}×"
    most = UNEXPLAINED * explained
    if faster > most:
        complaint = f"{said} less, which explains at most {most:.2f}×: full depth is slowed, or work ran unsaid"
        return Finding(CHECK, False, complaint, pairs, 0)
    return Finding(CHECK, True, f"{said} less", pairs, 0)


def requests(
    timed: Sequence[TimedRequest],
    points: Mapping[str, OperatingPoint],
    new: int,
    lens: Lens,
    tolerance: Mapping[str, float],
    *,
    counted: bool,
    rows: Collection[int] | None = None,
) -> Finding:
    """Whether the tokens, depths and work of ``timed`` are what they are said to be.

    Args:
        points: at which each arm with records decodes; the others decode at full depth.
        new: tokens asked for in each row.
        tolerance: largest honest difference of a logit, by arm.
        counted: whether the decoder counts its work.
        rows: those held against the lens where a batch has many; None: all.

    Raises:
        BadArgument: as ``generation.judge_record``.
    """
    tally = Tally(CHECK, needed=0)
    with tally:
        for request in timed:
            for arm, record in request.records.items():
                with prefix_complaints(f"{arm}, "):
                    judge_record(
                        tally, record, request.prompts, new, frozenset(), points[arm], lens, tolerance[arm],
                        counted=counted, exact_context=False, rows=rows,
                    )  # fmt: skip
            full = full_depth(next(iter(points.values())).layers)
            for arm, emitted in request.emitted.items():
                with prefix_complaints(f"{arm}, "):
                    for row in range(len(request.prompts)) if rows is None else rows:
                        _judge_full(tally, f"row {row}", request.prompts[row], emitted[row], full, lens, tolerance[arm])
    if tally.complaint is not None:
        return Finding(CHECK, False, tally.complaint, tally.n, tally.ties)
    return Finding(CHECK, True, f"{tally.n} positions compared, {tally.ties} ties", tally.n, tally.ties)


def _judge_full(
    tally: Tally, name: str, prompt: Prompt, emitted: Ints, full: OperatingPoint, lens: Lens, tolerance: float
) -> None:
    history = np.concatenate([prompt.tokens, np.asarray(emitted[:-1], dtype=np.int64)])
    decided = len(emitted)
    trajectory = Trajectory(
        name,
        history,
        len(prompt.tokens) - 1,
        np.full(decided, full.layers, dtype=np.int64),
        np.empty((decided, 0)),
        np.ones(decided, dtype=bool),
    )
    judge_tokens(tally, trajectory, emitted, hold_against(tally, trajectory, lens, full, tolerance), full, tolerance)
