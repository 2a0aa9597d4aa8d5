"""The timed path tells the truth: emitted tokens are, through the lens, the argmax at the depths it claims.

A decoder may be honest in ``feed`` and emit full-depth tokens in ``generate``; so the record of ``generate`` is judged
by itself: depths are the rule's, each token the argmax at its depth, ``max_new`` and stop tokens respected, the work
what the decisions imply. The test has no power where depth makes no difference to the argmax: below ``needed`` such
positions it says inconclusive; run it on random weights too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from emad_ref.audit.finding import NEEDED, Finding, Tally
from emad_ref.audit.ledger import judge_ledger
from emad_ref.audit.lens import Lens, Readouts, read_from_logits
from emad_ref.audit.trajectory import Trajectory, differing_tokens, hold_against, judge_tokens
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import PROMPT, Ints, Record


def generation(
    decoder: Decoder,
    lens: Lens,
    point: OperatingPoint,
    prompts: Sequence[Prompt],
    max_new: int,
    tolerance: float,
    *,
    stop: frozenset[int] = frozenset(),
    needed: int = NEEDED,
    exact_context: bool = True,
) -> Finding:
    """Check greedy ``generate`` on all ``prompts`` together, on the first alone, and with a stop token.

    The stop token of the last run is one that the first row emitted half-way, so that stopping is really exercised.
    ``tolerance`` and ``exact_context`` as in ``decisions``.
    """
    tally = Tally("generation", needed if point.adaptive else 0)
    tolerance = tally.allow(tolerance, decoder.capabilities.logit_noise)
    if not decoder.capabilities.counted:
        tally.notes.append("ledger not checked: the decoder does not count its work")
    with tally:
        together = decoder.generate(prompts, max_new, stop)
        halfway = int(together.emitted[0][len(together.emitted[0]) // 2]) if len(together.emitted[0]) else 0
        for record, asked, stops in (
            (together, prompts, stop),
            (decoder.generate(prompts[:1], max_new, stop), prompts[:1], stop),
            (decoder.generate(prompts, max_new, stop | {halfway}), prompts, stop | {halfway}),
        ):
            counted = decoder.capabilities.counted
            judge_record(
                tally, record, asked, max_new, stops, point, lens, tolerance,
                counted=counted, exact_context=exact_context,
            )  # fmt: skip
    return tally.finding()


def judge_record(
    tally: Tally,
    record: Record,
    prompts: Sequence[Prompt],
    max_new: int,
    stop: frozenset[int],
    point: OperatingPoint,
    lens: Lens,
    tolerance: float,
    *,
    counted: bool,
    exact_context: bool,
    rows: Collection[int] | None = None,
) -> None:
    """One record of ``generate``: complete, depths the rule's, tokens the argmax there, work what they imply.

    ``rows``: which of them are held against the lens, for a batch of many; None: all. Everything else, the ledger
    included, is required of every row all the same.

    Raises:
        BadArgument: some rows only of a point whose readouts the lens has to count.
    """
    trajectories = read_record(tally, record, prompts, max_new, stop, point)
    looked_at = range(len(prompts)) if rows is None else rows
    if len(looked_at) < len(prompts) and not read_from_logits(point):
        raise BadArgument("rows", sorted(looked_at), "None", f"what {point.name!r} reads is counted by the lens alone")
    readouts = [Readouts.whole(point, len(trajectory.depth)) for trajectory in trajectories]
    for row in looked_at:
        reference = hold_against(tally, trajectories[row], lens, point, tolerance)
        judge_tokens(tally, trajectories[row], record.emitted[row], reference, point, tolerance)
        tally.discriminating += differing_tokens(reference, trajectories[row])
        readouts[row] = reference.readouts
    if counted:
        judge_work(tally, record, trajectories, readouts, point, exact_context=exact_context)


def read_record(
    tally: Tally,
    record: Record,
    prompts: Sequence[Prompt],
    max_new: int,
    stop: frozenset[int],
    point: OperatingPoint,
) -> list[Trajectory]:
    """One trajectory per prompt, after requiring that the record is complete and consistent with itself."""
    tally.require(
        len(record.emitted) == len(record.stop) == len(prompts),
        f"{len(record.emitted)} rows emitted and {len(record.stop)} stop reasons for {len(prompts)} prompts",
    )
    tally.require(
        record.signal.shape == (len(record.tokens), len(point.probes)),
        f"record.signal has shape {record.signal.shape} for {len(record.tokens)} tokens and {len(point.probes)} probes",
    )
    rows = []
    for row, (prompt, emitted, reason) in enumerate(zip(prompts, record.emitted, record.stop, strict=True)):
        judge_ending(tally, f"row {row}", emitted, reason, max_new, stop)
        rows.append(_row(tally, record, row, prompt.tokens, emitted, point))
    return rows


def judge_ending(tally: Tally, row: str, emitted: Ints, reason: str, max_new: int, stop: frozenset[int]) -> None:
    """The row ends with its first stop token, or at ``max_new`` tokens, and says which."""
    first = next((at for at, token in enumerate(emitted) if int(token) in stop), None)
    length, why = (max_new, "length") if first is None else (first + 1, "stop token")
    said, expected = f"{len(emitted)} tokens and {reason!r}", f"{length} tokens and {why!r}"
    tally.require(said == expected, f"{row}: {said}, but max_new={max_new} and the stop tokens give {expected}")


def judge_work(
    tally: Tally,
    record: Record,
    trajectories: list[Trajectory],
    readouts: Sequence[Readouts],
    point: OperatingPoint,
    *,
    exact_context: bool,
) -> None:
    """The record's work is what its decisions imply, its prompt part what the prompts imply."""
    tally.require(
        record.work is not None and set(record.work) == {0},
        f"work of models {sorted(record.work or {})}, but a decoder that counts reports model 0",
    )
    assert record.work is not None
    judge_ledger(tally, record.work[0], trajectories, readouts, point, exact_context=exact_context)
    if record.prompt_work is None:
        return
    models = set(record.prompt_work)
    tally.require(models == {0}, f"prompt work of models {sorted(models)}, but work of model 0")
    spent, owed = record.prompt_work[0].tokens, sum(trajectory.first for trajectory in trajectories)
    deepest = np.where(np.arange(point.layers) < point.ceiling, owed, 0)
    holds = np.array_equal(spent, deepest) if len(trajectories) == 1 else bool((spent >= deepest).all())
    tally.require(holds, f"prompt_work.tokens per layer {spent.tolist()}, but the prompts imply {deepest.tolist()}")


def _row(tally: Tally, record: Record, row: int, prompt: Ints, emitted: Ints, point: OperatingPoint) -> Trajectory:
    """The kept tokens of one row as a trajectory: the prompt, then every emitted token but the last, each fed once."""
    table = record.tokens
    mine = table.kept_of(row)
    history = np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(emitted[:-1], dtype=np.int64)])
    first = len(prompt) - 1
    tally.require(
        np.array_equal(table.position[mine], np.arange(len(history))) and np.array_equal(table.token[mine], history),
        f"row {row}: the record's kept tokens are not the prompt followed by all emitted tokens but the last",
    )
    before, decided = mine[:first], mine[first:]
    tally.require(
        bool((table.phase[before] == PROMPT).all() and (table.depth[before] == point.ceiling).all()),
        f"row {row}: prompt positions before the last must be recorded in phase prompt at depth {point.ceiling}",
    )
    tally.require(
        bool((table.phase[decided] != PROMPT).all()),
        f"row {row}: the prompt's last position is a decoding step, not prompt",
    )
    trajectory = Trajectory(
        f"row {row}", history, first, table.depth[decided], record.signal[decided], np.ones(len(decided), dtype=bool)
    )
    claimed, allowed = table.cap[decided].tolist(), trajectory.caps(point).tolist()
    tally.require(claimed == allowed, f"row {row}: caps {claimed}, but the depths before them allow {allowed}")
    return trajectory
