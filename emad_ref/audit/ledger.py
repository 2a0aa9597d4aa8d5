"""The work that a row's decisions imply, and a decoder's count held against it.

Derived from depths alone, for single-token steps after a prompt of n tokens whose first n − 1 run in one forward at
the ceiling:

    tokens[ℓ]   (n − 1) + #{t : D_t ≥ ℓ}
    context[ℓ]  (n − 1)² + Σ_{t : D_t ≥ ℓ} (position_t + 1)
    readout[ℓ]  #{t : the signal at ℓ was read, or D_t = ℓ}      a full probe's readout doubles as the exit's

What a probe runs, and whether that doubles, is the rule's (``lens.Readouts``): estimates and pruned vocabularies are
readouts of their own kind, with multiply-adds of their own; a tuned lens adds some to every full head below the last
layer. A rule that compares several layers reads every one of its probes up to the exit, whether or not it decides
there.

Where nothing can exit below the ceiling, the whole prompt may run in one forward: context[ℓ] is then larger by n − 1.

Under ``free_eager`` layers above D_t still owe K and V: tokens + fills cover every position up to the ceiling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.audit.finding import Tally
from emad_ref.audit.lens import Readouts
from emad_ref.audit.trajectory import Trajectory
from emad_ref.point import OperatingPoint
from emad_ref.record import READOUTS, Bools, Work

FULL = READOUTS.index("full")


def implied(trajectory: Trajectory, readouts: Readouts, point: OperatingPoint, *, masked_prompt: bool = True) -> Work:
    """Work of one row alone; ``masked_prompt`` False counts only the causal half of the prompt's attention."""
    work = Work.none(point.layers)
    prompt = trajectory.first
    position = prompt + np.arange(len(trajectory.depth))
    read = _read(trajectory, point)
    for layer in range(1, point.layers + 1):
        ran = trajectory.depth >= layer
        work.tokens[layer - 1] = ran.sum()
        work.context[layer - 1] = (position[ran] + 1).sum()
        probed = read[:, point.probes.index(layer)] if layer in point.probes else np.zeros(len(ran), dtype=bool)
        kinds = readouts.heads[:, layer - 1]
        work.readout_rows[kinds, layer - 1] = probed.sum()
        work.readout_macs[kinds, layer - 1] = readouts.macs[:, layer - 1].sum(where=probed)
        alone = ((trajectory.depth == layer) & ~(probed & readouts.shows[layer - 1])).sum()
        work.readout_rows[FULL, layer - 1] += alone
        work.readout_macs[FULL, layer - 1] += alone * (0 if readouts.ahead is None else readouts.ahead[layer - 1])
    work.tokens[: point.ceiling] += prompt
    work.context[: point.ceiling] += prompt**2 if masked_prompt else prompt * (prompt + 1) // 2
    return work


def _read(trajectory: Trajectory, point: OperatingPoint) -> Bools:
    """[m, probes] which were read: those that show a signal, or all up to the exit of a rule that needs them all."""
    if point.confidence is None:
        return ~np.isnan(trajectory.signal)
    upto = np.asarray(point.probes, dtype=np.int64) <= trajectory.depth[:, None]
    return np.asarray(upto & trajectory.chosen[:, None])


def judge_ledger(
    tally: Tally,
    work: Work | None,
    trajectories: list[Trajectory],
    readouts: Sequence[Readouts],
    point: OperatingPoint,
    *,
    exact_context: bool,
) -> None:
    """``work`` equals what one row implies; for several rows, or padded keys, it is at least that much."""
    who = ", ".join(trajectory.name for trajectory in trajectories)
    tally.require(work is not None, f"{who}: the decoder says it counts its work, but reports none")
    assert work is not None
    tally.require(work.layers == point.layers, f"{who}: work of {work.layers} layers, but the model has {point.layers}")
    alone = len(trajectories) == 1
    least = Work.none(point.layers)
    for trajectory, each in zip(trajectories, readouts, strict=True):
        least = least + implied(trajectory, each, point, masked_prompt=alone and exact_context)
    free = point.schedule == "free_eager"
    covered, owed = work.tokens, least.tokens
    if free:
        covered = work.tokens + work.fills.sum(axis=0)
        owed = np.where(np.arange(point.layers) < point.ceiling, max(least.tokens), 0)
    elif alone:
        tally.require(not work.fills.any(), f"{who}: K/V fills counted, but a monotone schedule owes none")
    for name, counted, expected, equal in (
        ("tokens", covered, owed, alone),
        ("context", work.context, least.context, alone and exact_context and not free),
        ("readout_rows", work.readout_rows[FULL], least.readout_rows[FULL], alone),
        ("readout_macs in front of full heads", work.readout_macs[FULL], least.readout_macs[FULL], alone),
        *(
            (f"{name} of {kind}", getattr(work, name)[i], getattr(least, name)[i], alone)
            for i, kind in enumerate(READOUTS)
            for name in ("readout_rows", "readout_macs")
            if i != FULL
        ),
    ):
        holds = np.array_equal(counted, expected) if equal else bool((counted >= expected).all())
        if equal and name == "context" and not point.probes:
            holds = holds or np.array_equal(counted, expected + np.where(expected > 0, trajectories[0].first, 0))
        relation = "its decisions imply" if equal else "its decisions imply at least"
        tally.require(holds, f"{who}: work.{name} per layer {counted.tolist()}, but {relation} {expected.tolist()}")
