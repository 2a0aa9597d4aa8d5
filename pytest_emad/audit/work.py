"""Check counted work against the decisions that imply it, between points, and against observed matrix products.

The work of a row follows from depths alone, for single-token steps after a prompt of n tokens whose first n − 1 run in
one forward at the ceiling:

    tokens[ℓ]   (n − 1) + #{t : D_t ≥ ℓ}
    context[ℓ]  (n − 1)² + Σ_{t : D_t ≥ ℓ} (position_t + 1)
    readout[ℓ]  #{t : the signal at ℓ was read, or D_t = ℓ}      a full probe's readout also serves the exit

The rule determines a probe's cost, and whether it also serves the exit (``lens.ProbeReadoutWork``). Estimates and
pruned vocabularies are separate kinds of readouts with their own multiply-adds; a tuned lens adds some to every full
head below the last layer. A rule that compares several layers reads every one of its probes up to the exit. If no
token can exit below the ceiling, the whole prompt may run in one forward, and context[ℓ] is larger by n − 1. Under
``free_eager`` layers above D_t still need K and V, so tokens + fills cover every position up to the ceiling.

A count that is too high is also wrong, since savings are shares of it. For several rows, no block may run more tokens
than if all rows, padded to a power of two, ran as deep as the deepest at every step, or in every feed; stacks of
deferred layers over several rows have no such bound. A query may meet at most the keys of a buffer that grows by
doubling, or has constant size; and no layer may meet more keys than the one below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import HEAD, READOUTS, Bools, Ints, Work
from pytest_emad.audit.finding import Finding, Tally
from pytest_emad.audit.reference_logits import ProbeReadoutWork
from pytest_emad.audit.tolerances import signal_noise_factor
from pytest_emad.audit.trajectory import Judge, Trajectory

FULL = READOUTS.index("full")
MIN_BUFFER_KEYS = 256  # keys that a query may meet in a padded buffer of a short row
ROW_ROUNDING = 0.01  # rows; shares of sliced matrices are not exact in binary

MatrixRows = Mapping[tuple[int, str], float]  # (layer, matrix) → rows multiplied with it


# ---------------------------------------------------------------- work implied by decisions


def implied_work(
    trajectory: Trajectory, readouts: ProbeReadoutWork, point: OperatingPoint, *, masked_prompt: bool = True
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
        lens_macs = 0 if readouts.lens_macs is None else readouts.lens_macs[layer - 1]
        work.readout_macs[FULL, layer - 1] += alone * lens_macs
    work.tokens[: point.ceiling] += prompt
    work.context[: point.ceiling] += prompt**2 if masked_prompt else prompt * (prompt + 1) // 2
    return work


def _read_probes(trajectory: Trajectory, point: OperatingPoint) -> Bools:
    """Mask [m, probes] of read probes: those with a signal, or all up to the exit for a rule that needs all."""
    if point.confidence is None:
        return ~np.isnan(trajectory.signal)
    upto = np.asarray(point.probes, dtype=np.int64) <= trajectory.depth[:, None]
    return np.asarray(upto & trajectory.chosen[:, None])


def require_counted_work(
    judge: Judge,
    work: Work | None,
    trajectories: list[Trajectory],
    readouts: Sequence[ProbeReadoutWork],
    *,
    widest: int = 1,
) -> None:
    """Require that ``work`` equals one row's implied work; for several rows, or padded keys, at least that much.

    ``widest``: tokens of a row fed at once, at most; a block may run all of them as deep as the deepest.
    """
    tally, point, label = judge.tally, judge.point, ", ".join(trajectory.name for trajectory in trajectories)
    tally.require(work is not None, f"{label}: the decoder says it counts its work, but reports none")
    assert work is not None
    tally.require(
        work.layers == point.layers, f"{label}: work of {work.layers} layers, but the model has {point.layers}"
    )
    alone = len(trajectories) == 1
    least, most = Work.none(point.layers), Work.none(point.layers)
    error = signal_noise_factor(point) * judge.tolerance
    for trajectory, each in zip(trajectories, readouts, strict=True):
        masked = alone and judge.exact_context
        smallest, largest = (
            implied_work(trajectory, one, point, masked_prompt=masked) for one in each.work_bounds(error)
        )
        least, most = least + smallest, most + largest
    free = point.schedule == "free_eager"
    if point.schedule != "translated":
        tally.require(not work.fill_macs.any(), f"{label}: work.fill_macs counted, but no states are translated")
    covered, minimum = work.tokens, least.tokens
    if free:
        covered = work.tokens + work.fills.sum(axis=0)
        minimum = np.where(np.arange(point.layers) < point.ceiling, max(least.tokens), 0)
    elif alone:
        tally.require(not work.fills.any(), f"{label}: K/V fills counted, but a monotone schedule owes none")
    for name, counted, expected, highest in (
        ("tokens", covered, minimum, minimum),
        ("context", work.context, least.context, least.context if judge.exact_context and not free else None),
        ("readout_rows", work.readout_rows[FULL], least.readout_rows[FULL], most.readout_rows[FULL]),
        ("readout_macs in front of full heads", work.readout_macs[FULL], least.readout_macs[FULL],
         most.readout_macs[FULL]),
        *(
            (f"{name} of {kind}", *(getattr(each, name)[i] for each in (work, least, most)))
            for i, kind in enumerate(READOUTS)
            for name in ("readout_rows", "readout_macs")
            if i != FULL
        ),
    ):  # fmt: skip
        equal = alone and highest is not None
        is_valid = bool((counted >= expected).all() and (not equal or (counted <= highest).all()))
        if equal and name == "context" and not point.probes:
            is_valid = is_valid or np.array_equal(counted, expected + np.where(expected > 0, trajectories[0].first, 0))
        relation = "its decisions imply" if equal else "its decisions imply at least"
        upto = f" to {highest.tolist()}" if equal and not np.array_equal(expected, highest) else ""
        tally.require(
            is_valid, f"{label}: work.{name} per layer {counted.tolist()}, but {relation} {expected.tolist()}{upto}"
        )
    _judge_upper_bounds(judge, label, work, covered, trajectories, most, widest)


def _judge_upper_bounds(
    judge: Judge, label: str, work: Work, covered: Ints, trajectories: list[Trajectory], implied: Work, widest: int
) -> None:
    """Require at most the work that padding explains: ``covered`` [L] tokens, their keys, and the read heads.

    ``implied``: the most work that the decisions imply of each row alone.
    """
    tally, point = judge.tally, judge.point
    slots = 1 << (len(trajectories) - 1).bit_length()
    longest, steps = max(each.first for each in trajectories), max(len(each.depth) for each in trajectories)
    deepest = np.zeros(steps, dtype=np.int64)  # deepest token of all rows, by decoding step
    for each in trajectories:
        deepest[: len(each.depth)] = np.maximum(deepest[: len(each.depth)], each.depth)
    for _ in range(1, widest):
        deepest[1:] = np.maximum(deepest[1:], deepest[:-1])
    layers = np.arange(1, point.layers + 1)
    below, ran = layers <= point.ceiling, (deepest[:, None] >= layers).sum(axis=0)
    most = slots * (longest * below + (steps * below if point.schedule == "free_eager" else ran))
    if point.schedule == "free_deferred" and len(trajectories) > 1:
        # rows complete deferred layers together, each as often as their longest stack, without a simple bound
        most = np.maximum(most, covered)
    bounds = [("tokens", covered, most), ("readout_rows", work.readout_rows[FULL], slots * steps * below)]
    for i, kind in enumerate(READOUTS):
        if i != FULL:
            bounds.append((f"readout_rows of {kind}", work.readout_rows[i], slots * implied.readout_rows[i]))
        bounds.append((f"readout_macs of {kind}", work.readout_macs[i], slots * implied.readout_macs[i]))
    for name, counted, bound in bounds:
        complaint = (
            f"{label}: work.{name} per layer {counted.tolist()}, but its decisions imply at most {bound.tolist()}"
        )
        tally.require(bool((counted <= bound).all()), complaint)
    keys = max_keys_per_query(longest + steps)
    bound = work.tokens * keys
    tally.require(
        bool(constant_keys_per_query(work, {0, longest} if len(trajectories) == 1 else {0}))
        or bool((work.context <= bound).all()),
        f"{label}: work.context per layer {work.context.tolist()}, but {work.tokens.tolist()} tokens that met at most "
        f"{keys} keys each imply at most {bound.tolist()}",
    )
    if point.schedule in (
        "monotone",
        "positional",
    ):  # a token in a layer has run the layers below it, over as many keys
        grows = (np.flatnonzero(np.diff(work.context) > 0) + 2).tolist()
        tally.require(not grows, f"{label}: work.context grows at layers {grows}: {work.context.tolist()} per layer")


def max_keys_per_query(length: int) -> int:
    """Keys of a query in a row of ``length`` tokens, whose buffer grows by doubling; at least ``MIN_BUFFER_KEYS``."""
    return max(MIN_BUFFER_KEYS, 1 << (length - 1).bit_length())


def constant_keys_per_query(work: Work, prompts: Iterable[int]) -> set[int]:
    """Common number of keys per query, masked ones included, if it is constant in all layers; else empty.

    Queries of a prompt may have met the prompt's own keys instead.
    """
    ran = work.tokens > 0
    counts: set[int] = set()
    for prompt in prompts:
        steps, context = work.tokens[ran] - prompt, work.context[ran] - prompt**2
        if (steps >= 1).all():
            keys, rest = np.divmod(context, steps)
            counts |= set(keys.tolist()) if not rest.any() and len(set(keys.tolist())) == 1 else set()
    return counts


# ---------------------------------------------------------------- the same tokens at two points


def check_full_and_exiting_work(
    full: Decoder, exiting: Decoder, prompt: Prompt, continuation: Ints, new: int, source: int
) -> Finding:
    """Check that equal layers and tokens cost the same at full depth and at a point with exits.

    Layer 1 runs for every token under any rule, so a higher count at full depth would claim unrealised savings. One row
    is fed ``continuation`` int64 [n], and ``new`` tokens are generated. The prompt may run in one forward at full
    depth, but without its last position at a point, so keys may differ by two more rows of the prompt's attention.
    ``source``: encoder tokens besides the prompt; 0: no encoder.
    """
    tally = Tally("counters", needed=1)
    if not (full.capabilities.counted and exiting.capabilities.counted):
        return Finding("counters", True, "nothing to check: the decoder does not count its work", 0, 0)
    both = {"at full depth": full, "at a point with exits": exiting}
    with tally:
        fed = {name: _work_fed(each, prompt, continuation) for name, each in both.items()}
        by_point = {name: _work_generated(each, prompt, new) for name, each in both.items()}
        ways = (f"fed {len(continuation)}", fed, len(continuation) + 1), (f"generated {new}", by_point, new)
        for how, works, steps in ways:
            for name, work in works.items():
                _judge_encoder_work(tally, f"{how} tokens {name}", work, source)
            (here, one), (there, other) = works.items()
            tally.require(
                one.tokens[0] == other.tokens[0],
                f"{how} tokens: layer 1 ran for {one.tokens[0]} tokens {here}, but for {other.tokens[0]} {there}",
            )
            length = len(prompt.tokens) + steps
            prompts = {0, len(prompt.tokens), len(prompt.tokens) - 1}
            keys = max(
                {max_keys_per_query(length)}
                | constant_keys_per_query(one, prompts) & constant_keys_per_query(other, prompts)
            )
            apart, slack = abs(int(one.context[0] - other.context[0])), 2 * keys
            tally.require(
                apart <= slack,
                f"{how} tokens: layer 1 counts {one.context[0]} keys {here}, but {other.context[0]} {there}",
            )
            tally.n += 2 * length
            tally.discriminating += int(one.context[0] > 2 * slack)
    return tally.to_finding()


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
    """Judge encoder and cross-attention: no work without a source; with one, each state is written once per layer."""
    ran = work.tokens > 0
    for name, counted, least, most in (
        ("encoder_tokens", work.encoder_tokens, source, source),
        ("encoder_context", work.encoder_context, source**2, source**2),
        ("cross_fills", work.cross_fills, source * ran, source * np.ones_like(ran)),
        ("cross_context", work.cross_context, work.tokens * source, work.tokens * source),
    ):
        is_valid = bool(np.all((counted >= least) & (counted <= most)))
        actual, expected = np.asarray(counted).tolist(), np.asarray(most).tolist()
        tally.require(
            is_valid, f"{what}: work.{name} counts {actual}, but a source of {source} tokens implies {expected}"
        )


# ---------------------------------------------------------------- observed matrix products


@dataclass(frozen=True, eq=False)
class ObservedRequest:
    """One ``generate`` of ``prompts``: the ``rows`` multiplied with each matrix, and the ``work`` of its record."""

    prompts: Sequence[Prompt]
    rows: MatrixRows
    work: Work


def check_observed_work(requests: Sequence[ObservedRequest]) -> Finding:
    """Compare observed work with the work that the records of ``requests`` count.

    For a layer ℓ with tokens[ℓ] runs and fills[ℓ] K/V-only passes in a record:

    refuted       a matrix met more rows than tokens[ℓ] + fills[ℓ], or each of them more than tokens[ℓ]: blocks ran
                  uncounted, for example all layers at every step with a router that chooses among them afterwards
    refuted       the head met more than two rows per readout, besides the prompt's: two, since a decoder may recompute
                  a deciding readout for output; a plain forward also computes the prompt's logits
    passed        the busiest matrix of every layer met tokens[ℓ] + fills[ℓ] rows, in every request
    inconclusive  fewer were observed: the rest ran elsewhere (custom kernels, another process)
    """
    tally, unseen = Tally("witness", needed=0), []
    with tally:
        for number, request in enumerate(requests):
            label = f"request {number}"
            _judge_head(tally, label, request)
            for layer in range(1, request.work.layers + 1):
                counted, most = _judge_layer(tally, label, request, layer)
                tally.n += counted
                if most < counted - ROW_ROUNDING:
                    unseen.append(f"{label}: of {counted} runs of layer {layer}, {most:g} were seen")
    if tally.complaint is not None:
        return Finding("witness", False, tally.complaint, tally.n, 0)
    if unseen:
        return Finding("witness", None, f"part of its work ran unobserved ({unseen[0]})", tally.n, 0)
    return Finding("witness", True, f"{tally.n} runs of blocks seen, as many as were counted", tally.n, 0)


def _judge_layer(tally: Tally, label: str, request: ObservedRequest, layer: int) -> tuple[int, float]:
    """(recorded runs and fills, rows through the busiest matrix)."""
    rows = {matrix: rows_met for (where, matrix), rows_met in request.rows.items() if where == layer}
    ran, filled = int(request.work.tokens[layer - 1]), int(request.work.fills[:, layer - 1].sum())
    busiest = max(rows, key=lambda matrix: rows[matrix])
    stored = f" and {filled} fills" if filled else ""
    for rows_met, most, where in (
        (rows[busiest], ran + filled, f"through {busiest}"),
        (min(rows.values()), ran, "through every matrix"),
    ):
        complaint = f"{label}: layer {layer} ran for {rows_met:g} tokens ({where}), but its record counts {ran}{stored}"
        tally.require(rows_met <= most + ROW_ROUNDING, complaint)
    return ran + filled, rows[busiest]


def _judge_head(tally: Tally, label: str, request: ObservedRequest) -> None:
    read = int(request.work.readout_rows[FULL].sum())
    prompt = sum(len(prompt.tokens) for prompt in request.prompts)
    rows_met = max(rows for (layer, _), rows in request.rows.items() if layer == HEAD)
    tally.require(
        rows_met <= 2 * read + prompt + ROW_ROUNDING,
        f"{label}: the head ran for {rows_met:g} rows, but its record counts {read} readouts (of {prompt} prompt "
        "tokens besides, at most)",
    )
