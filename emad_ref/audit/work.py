"""Check counted work: against the decisions it follows from, between points, and against observed matrix products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.audit.finding import Finding, Tally
from emad_ref.audit.lens import ProbeReadouts
from emad_ref.audit.trajectory import Trajectory
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import HEAD, READOUTS, Bools, Ints, Work

FULL = READOUTS.index("full")
MIN_BUFFER_KEYS = 256  # keys that a query may meet in a padded buffer, however short its row is


def implied_work(
    trajectory: Trajectory, readouts: ProbeReadouts, point: OperatingPoint, *, masked_prompt: bool = True
) -> Work:
    """Work of one row alone; ``masked_prompt`` False counts only the causal half of the prompt's attention."""
    work = Work.none(point.layers)
    prompt = trajectory.first
    position = prompt + np.arange(len(trajectory.depth))
    read = _read_probes(trajectory, point)
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


def _read_probes(trajectory: Trajectory, point: OperatingPoint) -> Bools:
    """[m, probes] which were read: those that show a signal, or all up to the exit of a rule that needs them all."""
    if point.confidence is None:
        return ~np.isnan(trajectory.signal)
    upto = np.asarray(point.probes, dtype=np.int64) <= trajectory.depth[:, None]
    return np.asarray(upto & trajectory.chosen[:, None])


def judge_ledger(
    tally: Tally,
    work: Work | None,
    trajectories: list[Trajectory],
    readouts: Sequence[ProbeReadouts],
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
        least = least + implied_work(trajectory, each, point, masked_prompt=alone and exact_context)
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
    _judge_upper_bounds(tally, who, work, covered, trajectories, least, point, widest)


def _judge_upper_bounds(
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
    keys = max_keys(longest + steps)
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


def max_keys(length: int) -> int:
    """Keys of a query of a row of ``length`` tokens, in a buffer that grows by doubling; at least
    ``MIN_BUFFER_KEYS``."""
    return max(MIN_BUFFER_KEYS, 1 << (length - 1).bit_length())


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


COUNTERS_CHECK = "counters"
AT_FULL_DEPTH, AT_EXITING_POINT = "at full depth", "at a point with exits"


def counters(full: Decoder, exiting: Decoder, prompt: Prompt, continuation: Ints, new: int, source: int) -> Finding:
    """Compare what both count of ``prompt`` followed by ``continuation`` int64 [n], and of ``new`` tokens generated.

    ``source``: tokens that an encoder-decoder reads beside the prompt; 0: the model has no encoder.
    """
    tally = Tally(COUNTERS_CHECK, needed=1)
    if not (full.capabilities.counted and exiting.capabilities.counted):
        return Finding(COUNTERS_CHECK, True, "nothing to check: the decoder does not count its work", 0, 0)
    with tally:
        fed = {
            name: _work_fed(each, prompt, continuation)
            for name, each in ((AT_FULL_DEPTH, full), (AT_EXITING_POINT, exiting))
        }
        made = {
            name: _work_generated(each, prompt, new)
            for name, each in ((AT_FULL_DEPTH, full), (AT_EXITING_POINT, exiting))
        }
        ways = (f"fed {len(continuation)}", fed, len(continuation) + 1), (f"generated {new}", made, new)
        for how, works, steps in ways:
            for name, work in works.items():
                _judge_encoder_work(tally, f"{how} tokens {name}", work, source)
            one, other = works[AT_FULL_DEPTH], works[AT_EXITING_POINT]
            tally.require(
                one.tokens[0] == other.tokens[0],
                f"{how} tokens: layer 1 ran for {one.tokens[0]} tokens {AT_FULL_DEPTH}, but for {other.tokens[0]} "
                f"{AT_EXITING_POINT}",
            )
            length = len(prompt.tokens) + steps
            prompts = {0, len(prompt.tokens), len(prompt.tokens) - 1}
            keys = max({max_keys(length)} | constant_keys(one, prompts) & constant_keys(other, prompts))
            apart, slack = abs(int(one.context[0] - other.context[0])), 2 * keys
            tally.require(
                apart <= slack,
                f"{how} tokens: layer 1 counts {one.context[0]} keys {AT_FULL_DEPTH}, but {other.context[0]} "
                f"{AT_EXITING_POINT}",
            )
            tally.n += 2 * length
            tally.discriminating += int(one.context[0] > 2 * slack)
    return tally.finding()


def _work_fed(decoder: Decoder, prompt: Prompt, continuation: Ints) -> Work:
    session, _ = decoder.start([prompt])
    for token in continuation:
        session.feed(np.array([[token]]))
    work = session.work
    session.close()
    assert work is not None, "only of decoders that count"
    return work


def _work_generated(decoder: Decoder, prompt: Prompt, new: int) -> Work:
    work = decoder.generate([prompt], new, frozenset()).work
    assert work is not None, "only of decoders that count"
    return work[0]


def _judge_encoder_work(tally: Tally, what: str, work: Work, source: int) -> None:
    """Encoder and cross-attention: nothing without a source; with one, each of its states written once a layer."""
    ran = work.tokens > 0
    for name, counted, least, most in (
        ("encoder_tokens", work.encoder_tokens, source, source),
        ("encoder_context", work.encoder_context, source**2, source**2),
        ("cross_fills", work.cross_fills, source * ran, source * np.ones_like(ran)),
        ("cross_context", work.cross_context, work.tokens * source, work.tokens * source),
    ):
        holds = bool(np.all((counted >= least) & (counted <= most)))
        told, expected = np.asarray(counted).tolist(), np.asarray(most).tolist()
        tally.require(holds, f"{what}: work.{name} counts {told}, but a source of {source} tokens implies {expected}")


WITNESS_CHECK = "witness"
ROW_ROUNDING = 0.01  # rows; shares of sliced matrices are no exact binary fractions
FULL_HEAD = READOUTS.index("full")

MatrixRows = Mapping[tuple[int, str], float]  # (layer, matrix) → rows that met it


@dataclass(frozen=True, eq=False)
class ObservedRequest:
    """One ``generate`` of ``prompts``: the ``rows`` that were seen, and the ``work`` that its record says."""

    prompts: Sequence[Prompt]
    rows: MatrixRows
    work: Work


def witness(requests: Sequence[ObservedRequest]) -> Finding:
    """Whether what was seen of ``requests`` is what they say of themselves; None where too little was seen."""
    tally, unseen = Tally(WITNESS_CHECK, needed=0), []
    with tally:
        for number, request in enumerate(requests):
            who = f"request {number}"
            _judge_head(tally, who, request)
            for layer in range(1, request.work.layers + 1):
                said, most = _judge_layer(tally, who, request, layer)
                tally.n += said
                if most < said - ROW_ROUNDING:
                    unseen.append(f"{who}: of {said} runs of layer {layer}, {most:g} were seen")
    if tally.complaint is not None:
        return Finding(WITNESS_CHECK, False, tally.complaint, tally.n, 0)
    if unseen:
        return Finding(WITNESS_CHECK, None, f"it runs where nobody looks ({unseen[0]})", tally.n, 0)
    return Finding(WITNESS_CHECK, True, f"{tally.n} runs of blocks seen, as many as were counted", tally.n, 0)


def _judge_layer(tally: Tally, who: str, request: ObservedRequest, layer: int) -> tuple[int, float]:
    """(runs and fills that the record says, rows through the busiest matrix)."""
    rows = {matrix: met for (where, matrix), met in request.rows.items() if where == layer}
    ran, filled = int(request.work.tokens[layer - 1]), int(request.work.fills[:, layer - 1].sum())
    busiest = max(rows, key=lambda matrix: rows[matrix])
    stored = f" and {filled} fills" if filled else ""
    for met, most, where in (
        (rows[busiest], ran + filled, f"through {busiest}"),
        (min(rows.values()), ran, "through every matrix"),
    ):
        complaint = f"{who}: layer {layer} ran for {met:g} tokens ({where}), but its record counts {ran}{stored}"
        tally.require(met <= most + ROW_ROUNDING, complaint)
    return ran + filled, rows[busiest]


def _judge_head(tally: Tally, who: str, request: ObservedRequest) -> None:
    read = int(request.work.readout_rows[FULL_HEAD].sum())
    prompt = sum(len(prompt.tokens) for prompt in request.prompts)
    met = max(rows for (layer, _), rows in request.rows.items() if layer == HEAD)
    tally.require(
        met <= 2 * read + prompt + ROW_ROUNDING,
        f"{who}: the head ran for {met:g} rows, but its record counts {read} readouts (of {prompt} prompt tokens "
        "besides, at most)",
    )
