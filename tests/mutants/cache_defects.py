"""Defects of K/V entries: unwritten, stale, of another row or position, or of wrong hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from emad_ref.models.stepper import Stepper
from emad_ref.protocol import Decoder, Request
from emad_ref.schedule.schedules import ExitFlow
from tests.mutants.mutant import (
    HONEST_FACTORY,
    Mutant,
    MutantNotApplicable,
    declare_capabilities,
    make_mutants_for_test,
    make_stepper_override,
    mutate,
)

PAIRS = "invariants/test_pairs.py::test_every_pair_of_values_is_asked_and_answered"
# Which case fails first depends on the draws, and so does its complaint; a pair that was never answered is none.
OF_PAIRS = r"audit pairs of (requests|sessions): (?!\d+ of \d+ pairs)"
POSITIONS = "invariants/test_positions.py::test_every_position_is_written_and_read"
FIELDS = "invariants/test_fields.py::test_every_field_of_a_point_is_honoured_or_declined"
GOLDEN = "fidelity/test_golden.py::test_tokens_and_depths_are_the_golden_ones"
LOGITS = r"row \d+, position \d+, depth \d+.*: (logits|signal) off by"
UNCHECKED = {"require_earlier_entries": lambda *_: None}  # a cache that does not notice missing entries

Written = tuple[Tensor, Tensor]
Write = Callable[[Tensor, Tensor, Any], Written]


# ---------------------------------------------------------------- positions


def shift_positions(first: int) -> Callable[[Stepper], Stepper]:
    """Moves the tables of positions by one row from ``first`` on."""

    def move(table: Tensor, axis: int, start: int) -> Tensor:
        rows = torch.arange(table.shape[axis], device=table.device)
        return table.index_select(axis, (rows + (rows >= start)).clamp(max=len(rows) - 1))

    def change(stepper: Any) -> Stepper:
        require_window_beyond_position(stepper, first)
        changed = copy.copy(stepper)
        learned, rotary = getattr(stepper, "_positions", None), getattr(stepper, "rotary", None)
        if rotary is not None:
            changed.rotary_table = lambda place, positions: tuple(
                move(table, 1, first) for table in stepper.rotary_table(place, positions + 1)
            )
        elif learned is not None:
            changed._positions = copy.copy(learned)
            weight = move(learned.weight.data, 0, first + stepper.anatomy.position_offset)
            changed._positions._parameters = {"weight": weight}
        else:
            raise MutantNotApplicable(
                "this family has no table of positions: distances, or positions inside its blocks"
            )
        return changed  # type: ignore[no-any-return]  # the type of the copied stepper

    return change


def require_window_beyond_position(stepper: Stepper, positions: int) -> None:
    """Raise MutantNotApplicable if the window ends before the defect begins."""
    if stepper.max_positions < positions + 32:
        raise MutantNotApplicable(
            f"the model's window of {stepper.max_positions} ends before position {positions} matters"
        )


# ---------------------------------------------------------------- written entries


def write_zero_kv_from_40(write: Write, cache: Any, keys: Tensor, values: Tensor, running: Any) -> Written:
    """The last layer writes zeros for K and V from position 40 on."""
    if cache._number < cache.owner._stepper.layers:
        return write(keys, values, running)
    beyond = (running.positions_on(keys.device) >= 40)[:, None, :, None]
    return write(keys.masked_fill(beyond, 0), values.masked_fill(beyond, 0), running)


def write_stale_kv(is_stale: Callable[[Any, int, int], bool]) -> dict[str, Callable[..., Any]]:
    """Single tokens write the K/V of the previous token again, if ``is_stale(cache, row, position)``."""

    def write(original: Write, cache: Any, keys: Tensor, values: Tensor, running: Any) -> Written:
        cache.steps = vars(cache).get("steps", 0) + (running.queries == 1)
        for place, (row, start) in enumerate(zip(running.rows, running.starts, strict=True)):
            if running.queries == 1 and start > 0 and is_stale(cache, row, start):
                keys[place, :, 0], values[place, :, 0] = [entry[:, start - 1].clone() for entry in cache.row_kv(row)]
        return original(keys, values, running)

    return {"write": write}


def zero_kv_beyond_block_end(write: Write, cache: Any, keys: Tensor, values: Tensor, running: Any) -> Written:
    """Loses tokens of one write beyond the end of a block of 32."""
    slots = running.positions_on(keys.device)
    if running.queries > 1 and all(start > 0 for start in running.starts):
        lost = (slots // 32 != slots[:, :1] // 32)[:, None, :, None]
        keys, values = keys.masked_fill(lost, 0), values.masked_fill(lost, 0)
    return write(keys, values, running)


def zero_kv_at_block_end(write: Write, cache: Any, keys: Tensor, values: Tensor, running: Any) -> Written:
    for place, (start, end) in enumerate(zip(running.starts, running.ends, strict=True)):
        if start == 0 and end % 48 == 0 and end > 0:
            keys, values = keys.clone(), values.clone()
            keys[place, :, end - 1], values[place, :, end - 1] = 0, 0
    return write(keys, values, running)


def remember_truncated_kv(truncate: Any, cache: Any, length: Any) -> None:
    held = {row: cache.row_kv(row) for row, n in zip(cache._rows, cache._length, strict=True) if n}
    cache.written = {row: (keys.clone(), values.clone()) for row, (keys, values) in held.items()}
    truncate(length)


def write_kv_from_before_rollback(write: Write, cache: Any, keys: Tensor, values: Tensor, running: Any) -> Written:
    """Writes the K/V from before a rollback again, in place of the new ones."""
    for place, (row, start, end) in enumerate(zip(running.rows, running.starts, running.ends, strict=True)):
        for new, old in zip((keys, values), vars(cache).get("written", {}).get(row, ()), strict=False):
            kept = old[:, start:end]
            new[place, :, : kept.shape[1]] = kept
    return write(keys, values, running)


def clear_remembered_kv(keep: Any, cache: Any, rows: Any, numbers: Any) -> None:
    cache.written = {}
    keep(rows, numbers)


def skip_backfill(decoder: Any) -> None:
    """Exits backfill no K/V in the layers above, although the row may go deeper later."""
    if decoder.point.schedule != "monotone":
        decoder._forward.schedule = replace(decoder._forward.schedule, flow=ExitFlow)


def fill_distorted_states(fill: Any, stepper: Stepper, hidden: Tensor, *given: Any) -> None:
    fill(hidden + hidden.roll(1, -1) / 8, *given)


def distort_copied_states(request: Request) -> Decoder:
    """Honest under schedules that copy no states."""
    is_copying = request.point.schedule == "copying"
    return (mutate(stepper=make_stepper_override(write_kv=fill_distorted_states)) if is_copying else HONEST_FACTORY)(
        request
    )


# ---------------------------------------------------------------- executed layers


def skip_upper_layers_of_prompts(run: Any, stepper: Any, hidden: Tensor, first: int, last: int, inputs: Any) -> Tensor:
    """For prompts of 40 or more tokens the upper half of the layers only writes K/V."""
    half = max(1, stepper.layers // 2)
    if first or last <= half or inputs.running.queries < 40:
        unchanged: Tensor = run(hidden, first, last, inputs)
        return unchanged
    require_window_beyond_position(stepper, 40)
    hidden = run(hidden, 0, half, inputs)
    for layer in range(half + 1, last + 1):
        stepper.write_kv(hidden, layer, inputs)
    return hidden


def mix_last_layer_output(run: Any, stepper: Any, hidden: Tensor, first: int, last: int, inputs: Any) -> Tensor:
    """Adds a quarter of the last layer's output, shifted, to itself."""
    output: Tensor = run(hidden, first, last, inputs)
    return output + output.roll(1, -1) / 4 if last == stepper.layers else output


MUTANTS = (
    *make_mutants_for_test("positions", PAIRS, OF_PAIRS,
        ("positions-from-64", "positions are one too far from 64 on", mutate(stepper=shift_positions(64))),
        ("positions-from-128", "positions are one too far from 128 on", mutate(stepper=shift_positions(128))),
        case="sessions"),
    Mutant("positions-from-1", "positions", "all positions but the first are one too far",
           mutate(stepper=shift_positions(1)), PAIRS, OF_PAIRS, case="sessions"),
    Mutant("kv-last-layer-unwritten", "K/V", "the last layer writes nothing from position 40 on",
           mutate(cache={"write": write_zero_kv_from_40}), PAIRS, OF_PAIRS, case="sessions"),
    Mutant("kv-stale-in-later-rows", "K/V", "rows but the first write old K/V from position 30 on",
           mutate(cache=write_stale_kv(lambda cache, row, at: row > 0 and at >= 30)), PAIRS,
           OF_PAIRS, case="sessions"),
    Mutant("kv-stale-late", "K/V", "after 40 steps old K/V are written",
           mutate(cache=write_stale_kv(lambda cache, row, at: cache.steps > 40),
           prepare=declare_capabilities(max_feed=1)), PAIRS,
           OF_PAIRS, case="sessions"),
    Mutant("kv-lost-at-a-buffer's-edge", "K/V", "position 127 holds what 126 holds",
           mutate(cache=write_stale_kv(lambda cache, row, at: at == 127)), PAIRS,
           OF_PAIRS, case="sessions"),
    Mutant("kv-of-other-rows", "K/V", "rows write one another's K/V",
           mutate(cache={"write": lambda write, cache, k, v, at: write(k.roll(1, 0), v.roll(1, 0), at)}), PAIRS,
           OF_PAIRS, case="sessions"),
    Mutant("kv-stale-after-rollback", "K/V", "what was rolled back is not overwritten",
           mutate(cache={"write": write_kv_from_before_rollback, "truncate": remember_truncated_kv,
           "keep_rows": clear_remembered_kv,
           **UNCHECKED}),
           PAIRS, OF_PAIRS, case="sessions"),
    Mutant("kv-fills-of-zeros", "K/V", "K/V owed to skipped layers are filled with nothing",
           mutate(stepper=make_stepper_override(
               write_kv=lambda fill, stepper, hidden, *given: fill(torch.zeros_like(hidden), *given))),
           GOLDEN, r"audit golden: row \d", case="copying"),
    Mutant("kv-copies-askew", "K/V", "states copied to skipped layers are a little off",
           distort_copied_states, FIELDS, r"copied states: fed token \d+ of row \d+: logits off by"),
    Mutant("backfill-missing", "K/V", "a schedule that rises leaves unwritten what it skipped",
           mutate(cache=UNCHECKED, prepare=skip_backfill), GOLDEN, r"audit golden: row \d", case="eager"),
    Mutant("prompts-shallow", "prompts", "the upper half of the layers never runs for prompts of 40 tokens and more",
           mutate(stepper=make_stepper_override(run_layers=skip_upper_layers_of_prompts)), PAIRS, OF_PAIRS,
           case="sessions"),
    Mutant("last-layer-mixed", "weights", "what the last layer gives is mixed up a little",
           mutate(stepper=make_stepper_override(run_layers=mix_last_layer_output)), PAIRS, OF_PAIRS, case="sessions"),
    *make_mutants_for_test("pages", POSITIONS, LOGITS,
        ("pages-of-16", "the last position of every block of 16 holds what the one before it holds",
         mutate(cache=write_stale_kv(lambda cache, row, at: (at + 1) % 16 == 0))),
        ("pages-of-48", "the same with blocks of 48",
         mutate(cache=write_stale_kv(lambda cache, row, at: (at + 1) % 48 == 0))),
        ("pages-first-of-100", "position 99 holds what 98 holds",
         mutate(cache=write_stale_kv(lambda cache, row, at: at == 99))),
        ("pages-crossed-at-once", "tokens fed at once across the end of a block of 32 are lost beyond it",
         mutate(cache={"write": zero_kv_beyond_block_end})),
        ("pages-full-prompts", "a prompt that fills its last block of 48 loses its last position",
         mutate(cache={"write": zero_kv_at_block_end}))),
)  # fmt: skip
