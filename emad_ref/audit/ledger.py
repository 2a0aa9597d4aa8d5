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

A count that is too high is as wrong: savings are shares of it. Of several rows no block runs for more tokens
than if all of them, padded to a power of two, went as far as the deepest at every step, or in every feed; where layers
are deferred, stacks of several rows have no such bound. A query meets no more keys than a buffer holds that grows by
doubling, or one of constant size; and no layer meets more than the one below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from emad_ref.audit.finding import Tally
from emad_ref.audit.lens import Readouts
from emad_ref.audit.trajectory import Trajectory
from emad_ref.point import OperatingPoint
from emad_ref.record import READOUTS, Bools, Ints, Work

FULL = READOUTS.index("full")
BUFFER = 256  # keys that a query may meet in a padded buffer, however short its row is


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
    widest: int = 1,
) -> None:
    """``work`` equals what one row implies; for several rows, or padded keys, it is at least that much.

    ``widest``: tokens of a row that were fed at once, at most; a block may run all of them as deep as the deepest.
    """
    who = ", ".join(trajectory.name for trajectory in trajectories)
    tally.require(work is not None, f"{who}: the decoder says it counts its work, but reports none")
    assert work is not None
    tally.require(work.layers == point.layers, f"{who}: work of {work.layers} layers, but the model has {point.layers}")
    alone = len(trajectories) == 1
    least = Work.none(point.layers)
    for trajectory, each in zip(trajectories, readouts, strict=True):
        least = least + implied(trajectory, each, point, masked_prompt=alone and exact_context)
    free = point.schedule == "free_eager"
    if point.schedule != "translated":
        tally.require(not work.fill_macs.any(), f"{who}: work.fill_macs counted, but no states are translated")
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
    _judge_most(tally, who, work, covered, trajectories, least, point, widest)


def _judge_most(
    tally: Tally,
    who: str,
    work: Work,
    covered: Ints,
    trajectories: list[Trajectory],
    least: Work,
    point: OperatingPoint,
    widest: int,
) -> None:
    """No more than padding explains: ``covered`` [L] tokens, the keys they met, and the heads that were read."""
    slots = 1 << (len(trajectories) - 1).bit_length()
    longest, steps = max(each.first for each in trajectories), max(len(each.depth) for each in trajectories)
    deepest = np.zeros(steps, dtype=np.int64)  # of all rows, by decoding step
    for each in trajectories:
        deepest[: len(each.depth)] = np.maximum(deepest[: len(each.depth)], each.depth)
    for _ in range(1, widest):
        deepest[1:] = np.maximum(deepest[1:], deepest[:-1])
    layers = np.arange(1, point.layers + 1)
    below, ran = layers <= point.ceiling, (deepest[:, None] >= layers).sum(axis=0)
    most = slots * (longest * below + (steps * below if point.schedule == "free_eager" else ran))
    if point.schedule == "free_deferred" and len(trajectories) > 1:
        # rows make up for deferred layers together, each as often as the longest of their stacks: no simple bound
        most = np.maximum(most, covered)
    keys = most_keys(longest + steps)
    for name, counted, bound in (
        ("tokens", covered, most),
        ("readout_rows", work.readout_rows[FULL], slots * steps * below),
        *((f"readout_rows of {kind}", work.readout_rows[i], slots * least.readout_rows[i])
          for i, kind in enumerate(READOUTS) if i != FULL),
        *((f"readout_macs of {kind}", work.readout_macs[i], slots * least.readout_macs[i])
          for i, kind in enumerate(READOUTS)),
    ):  # fmt: skip
        complaint = f"{who}: work.{name} per layer {counted.tolist()}, but its decisions imply at most {bound.tolist()}"
        tally.require(bool((counted <= bound).all()), complaint)
    bound = work.tokens * keys
    tally.require(
        bool(constant_keys(work, {0, longest} if len(trajectories) == 1 else {0}))
        or bool((work.context <= bound).all()),
        f"{who}: work.context per layer {work.context.tolist()}, but {work.tokens.tolist()} tokens that met at most "
        f"{keys} keys each imply at most {bound.tolist()}",
    )
    if point.schedule in ("monotone", "positional"):  # whatever ran a layer has run those below it, over as many keys
        grows = (np.flatnonzero(np.diff(work.context) > 0) + 2).tolist()
        tally.require(not grows, f"{who}: work.context grows at layers {grows}: {work.context.tolist()} per layer")


def most_keys(length: int) -> int:
    """Keys of a query of a row of ``length`` tokens, in a buffer that grows by doubling; at least ``BUFFER``."""
    return max(BUFFER, 1 << (length - 1).bit_length())


def constant_keys(work: Work, prompts: Iterable[int]) -> set[int]:
    """How many keys every query met, masked ones included, where that is one number in all layers; else empty.

    Of a prompt of each of ``prompts`` tokens the queries may have met the prompt's own keys instead.
    """
    ran = work.tokens > 0
    found: set[int] = set()
    for prompt in prompts:
        steps, context = work.tokens[ran] - prompt, work.context[ran] - prompt**2
        if (steps >= 1).all():
            keys, rest = np.divmod(context, steps)
            found |= set(keys.tolist()) if not rest.any() and len(set(keys.tolist())) == 1 else set()
    return found
