"""Defects of sessions that show only for two values of their dimensions together; ``pair_defects`` has requests'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.models.stepper import Stepper
from emad_ref.protocol import Prompt, Step
from emad_ref.record import Ints
from emad_ref.schedule.schedules import ExitFlow, TokenDepthCap
from tests.mutants.cache_defects import FIELDS, UNCHECKED, Write, Written
from tests.mutants.mutant import Mutant, MutantFactory, Overrides, ServingDecoder, make_stepper_override, mutate
from tests.mutants.pair_defects import (
    bin_all_rows_as_first,
    change_prompts,
    fill_states_of_first_row,
    make_pair_mutants,
    read_without_strides,
    remember_sessions,
    serve,
    shift_far_exits_of_batches,
    take_lowest_cap_of_nine,
    use_newest_of_process,
)
from tests.mutants.request_defects import leaked_items, shared_buffer_overrides, zero_row_kv

PAGE = 16  # positions


# ---------------------------------------------------------------- feeds


def check_first_column(original: Any, session: Any, depth: Ints, shape: tuple[int, ...]) -> Ints:
    original(np.repeat(depth[:, :1], shape[1], axis=1), shape)
    return np.array(depth)


def check_first_two_columns(original: Any, session: Any, depth: Ints, shape: tuple[int, ...]) -> Ints:
    original(np.array(depth)[:, np.minimum(np.arange(shape[1]), 1)], shape)
    return np.array(depth)


def check_first_row(original: Any, session: Any, depth: Ints, shape: tuple[int, ...]) -> Ints:
    admissible = np.ones_like(depth)
    admissible[0] = depth[0]
    original(admissible, shape)
    return np.array(depth)


def check_upper_bound(original: Any, session: Any, depth: Ints, shape: tuple[int, ...]) -> Ints:
    checked: Ints = original(np.maximum(depth, 1), shape)
    return checked


def claim_forced_depths(session: Any, step: Step, depth: Ints) -> Step:
    """``step`` with ``depth`` as the depths taken."""
    for trail, depths in zip(session._trail, np.asarray(depth).tolist(), strict=True):
        trail[-len(depths) :] = depths
    return replace(step, depth=np.array(depth))


def change_forced_depths(change: Callable[[Ints], Ints]) -> Overrides:
    """Feeds run to ``change(depth)`` and claim ``depth``."""

    def feed(original: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step: Step = original(tokens, None if depth is None else change(np.array(depth)), last)
        return step if depth is None else claim_forced_depths(session, step, depth)

    return {"feed": feed}


def start_wide_feeds_at_first_row(prepare: Any, stepper: Stepper, positions: Ints, *given: Any, **named: Any) -> Any:
    """Wide feeds of more than eight rows start at row 0's position."""
    if positions.shape[0] > 8 and positions.shape[1] > 1 and "lengths" not in named:
        positions = np.repeat(positions[:1], len(positions), axis=0)
    return prepare(positions, *given, **named)


def change_fed_tokens(change: Callable[[Ints], Ints]) -> Overrides:
    """A feed reads ``change(tokens)``."""
    return {"feed": lambda feed, session, tokens, *given: feed(change(np.array(tokens)), *given)}


def read_feed_without_strides(feed: Any, session: Any, tokens: Ints, *given: Any) -> Step:
    packed = tokens.shape[1] * tokens.itemsize, tokens.itemsize
    apart = tokens.shape[1] > 1 and tokens.strides[1] > tokens.itemsize
    return feed(np.lib.stride_tricks.as_strided(tokens, strides=packed).copy() if apart else tokens, *given)  # type: ignore[no-any-return]


def take_first_depth_when_copying(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    """Under copying all tokens of a feed take the first one's depth."""
    if depth is not None or session._point.schedule != "copying" or tokens.shape[1] == 1:
        return feed(tokens, depth, last)  # type: ignore[no-any-return]
    first = feed(tokens[:, :1])
    rest = feed(tokens[:, 1:], np.repeat(first.depth, tokens.shape[1] - 1, axis=1))
    parts = (np.concatenate([getattr(one, part) for one in (first, rest)], axis=1)
             for part in ("logits", "depth", "signal"))  # fmt: skip
    step = Step(*parts)
    return step if last is None else replace(step, logits=step.logits[:, tokens.shape[1] - last :])


@torch.inference_mode()
def skip_last_layer_without_logits(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    """Tokens without logits leave the last layer's entries empty."""
    held = session.length
    step: Step = feed(tokens, depth, last)
    layer = session._store.cache.layers[session._point.ceiling - 1]
    for row, first in enumerate(held.tolist() if last == 0 else ()):
        if row in layer.row_ids and layer.row_lengths[layer.row_ids == row] > first:
            for entries in layer.row_kv(row):
                entries[:, first:] = 0
    return step


def show_first_tokens_as_last(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    """Of feeds of 8 tokens and more the first tokens' logits are shown."""
    if last is None or tokens.shape[1] < 8:
        return feed(tokens, depth, last)  # type: ignore[no-any-return]
    step: Step = feed(tokens, depth)
    return replace(step, logits=step.logits[:, :last])


def run_to_cap_without_logits(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    """Tokens without logits are not decided."""
    capped = np.repeat(session.cap[:, None], tokens.shape[1], axis=1)
    return feed(tokens, capped if last == 0 and depth is None else depth, last)  # type: ignore[no-any-return]


def keep_cap_after_forced_depths(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    """After a forced depth the rule stops no token of that session."""
    forced, session.forced = vars(session).get("forced", False), depth is not None or vars(session).get("forced")
    capped = np.repeat(session.cap[:, None], tokens.shape[1], axis=1) if forced and depth is None else depth
    return feed(tokens, capped, last)  # type: ignore[no-any-return]


def leave_gap_under_forced_depths(decoder: Any) -> None:
    """Under free depth a forced depth leaves the layers above it unwritten."""
    forward, run = decoder._forward, decoder._forward.run_step

    def run_step(step: Any) -> Any:
        schedule = forward.schedule
        if not step.inputs.running.reads_rule:
            forward.schedule = replace(schedule, flow=ExitFlow)
        try:
            return run(step)
        finally:
            forward.schedule = schedule

    forward.run_step = run_step


def divide_by_temperature(step: Step, decoder: Any) -> Step:
    return replace(step, logits=step.logits / decoder.temperature) if decoder.temperature else step


def start_at_temperature(start: Any, decoder: Any, prompts: Sequence[Prompt]) -> Any:
    """Sessions of a decoder at a temperature show logits / T."""
    session, step = start(prompts)
    feed = session.feed
    session.feed = lambda *given: divide_by_temperature(feed(*given), decoder)
    return session, divide_by_temperature(step, decoder)


# ---------------------------------------------------------------- rollback, commit, drop


def keep_sixteen_caps(rollback: Any, session: Any, length: Ints) -> None:
    """Caps of the last 16 positions are kept; before them the cap is the model's last layer."""
    lost = session.length - np.asarray(length) > 16
    rollback(length)
    session.lost = np.where(lost, length, -1)


def admit_all_layers_where_lost(original: Any, session: Any, length: Ints | None = None) -> list[TokenDepthCap]:
    admitted: list[TokenDepthCap] = original(length)
    lost = vars(session).get("lost", np.zeros(0))
    if len(lost) != len(admitted):
        return admitted
    now = session.length if length is None else length
    return [TokenDepthCap(session._stepper.layers) if held == at else one
            for one, held, at in zip(admitted, now, lost, strict=True)]  # fmt: skip


def forget_ceiling_in_prompt(original: Any, session: Any, length: Ints | None = None) -> list[TokenDepthCap]:
    """After a rollback into the prompt the cap is the model's last layer."""
    admitted, at = original(length), session.length if length is None else length
    return [TokenDepthCap(session._stepper.layers) if vars(session).get("rolled") and held == first else one
            for one, held, first in zip(admitted, at, session._first_decided, strict=True)]  # fmt: skip


def mark_rollback(rollback: Any, session: Any, length: Ints) -> None:
    rollback(length)
    session.rolled = True


def roll_back_as_first_row(rollback: Any, session: Any, length: Ints) -> None:
    """All rows forget as many tokens as the first one."""
    rollback(np.maximum(1, session.length - (session.length[0] - np.asarray(length)[0])))


def skip_rollback_for_last_row(rollback: Any, session: Any, length: Ints) -> None:
    """If the last row forgets nothing, none does."""
    if np.asarray(length)[-1] < session.length[-1]:
        rollback(length)


@torch.inference_mode()
def free_page_before_its_end(rollback: Any, session: Any, length: Ints) -> None:
    """A rollback to the end of a page frees that page."""
    rollback(length)
    for layer in session._store.cache.layers:
        for row, held in zip(layer.row_ids.tolist(), layer.row_lengths.tolist(), strict=True):
            if held and held == length[row] and held % PAGE == 0:
                for entries in layer.row_kv(row):
                    entries[:, -PAGE:] = 0


@torch.inference_mode()
def remember_entries_beyond_sixteen(rollback: Any, session: Any, length: Ints) -> None:
    for layer in session._store.cache.layers:
        held = zip(layer.row_ids.tolist(), layer.row_lengths.tolist(), strict=True)
        layer.stale = {row: (int(length[row]), [each[:, length[row] : n - 16].clone() for each in layer.row_kv(row)])
                       for row, n in held if n - 16 > length[row]}  # fmt: skip
    rollback(length)


def write_entries_beyond_sixteen_again(write: Write, cache: Any, keys: Tensor, values: Tensor, running: Any) -> Written:
    """Of more than 16 tokens that were rolled back the first ones stay in the cache."""
    for place, (row, start) in enumerate(zip(running.rows, running.starts, strict=True)):
        first, old = vars(cache).get("stale", {}).get(row, (0, ()))
        for new, kept in zip((keys, values), old, strict=False):
            for at in range(new.shape[2]):
                if 0 <= start + at - first < kept.shape[1]:
                    new[place, :, at] = kept[:, start + at - first]
    return write(keys, values, running)


def keep_lengths_by_reference(rollback: Any, session: Any, length: Ints) -> None:
    """``length`` is the array that the last rollback got, until more is fed."""
    rollback(length)
    session.kept = length, np.array(length)


def report_kept_length(original: Any, session: Any) -> Ints:
    now, (kept, then) = original(), vars(session).get("kept", (None, None))
    return kept if kept is not None and np.array_equal(now, then) else now  # type: ignore[no-any-return]


def free_by_lowest_cap(commit: Any, session: Any, length: Ints) -> None:
    """Commit frees the entries above the lowest cap of the batch."""
    commit(length)
    for row in range(len(session._trail)):
        zero_row_kv(session._store.cache.layers[int(session.cap.min()) :], row)


def free_by_cap_of_now(commit: Any, session: Any, length: Ints) -> None:
    """Commit of a part frees by the cap after the last token."""
    commit(length)
    for row, cap in enumerate(session.cap.tolist()):
        zero_row_kv(session._store.cache.layers[cap:], row)


def free_by_numbers_before_drop(commit: Any, session: Any, length: Ints) -> None:
    """Commit frees by the numbers that rows had before a drop."""
    commit(length)
    caps = session.cap.tolist()
    for cap, number in zip(caps, vars(session).get("numbers", ()), strict=False):
        if number < len(caps):
            zero_row_kv(session._store.cache.layers[cap:], number)


def remember_numbers(drop: Any, session: Any, rows: Ints) -> None:
    present, gone = vars(session).get("numbers", range(len(session._trail))), set(np.atleast_1d(rows).tolist())
    session.numbers = [number for index, number in enumerate(present) if index not in gone]
    drop(rows)


@torch.inference_mode()
def commit_in_one_byte(commit: Any, session: Any, length: Ints) -> None:
    """Committed lengths are kept in one byte: beyond 256 positions the first ones are freed."""
    commit(length)
    for row, held in enumerate(np.asarray(length).tolist()):
        for layer in session._store.cache.layers if held >= 256 else ():
            if row in layer.row_ids:
                for entries in layer.row_kv(row):
                    entries[:, : held - 256] = 0


def drop_all_for_none(drop: Any, session: Any, rows: Ints) -> None:
    if len(np.atleast_1d(rows)):
        drop(rows)
    else:
        session._trail, session._first_decided = [], []


def drop_last_for_none(drop: Any, session: Any, rows: Ints) -> None:
    drop(rows if len(np.atleast_1d(rows)) or len(session._trail) == 1 else np.array([len(session._trail) - 1]))


def keep_caps_by_number(drop: Any, session: Any, rows: Ints) -> None:
    """After a drop a row has the cap of the row that had its number."""
    before = [trail[-1] for trail in session._trail]
    drop(rows)
    for trail, cap in zip(session._trail, before, strict=False):
        trail[-1] = min(cap, trail[-1])


def keep_waiting_states_by_number(drop: Any, session: Any, rows: Ints) -> None:
    """After a drop states of tokens that stopped early are those of the row that had the number."""
    before = [list(states.values()) for states in session._store.deferred.waiting]
    drop(rows)
    for states, others in zip(session._store.deferred.waiting, before, strict=False):
        states |= dict(zip(states, others, strict=False))


# ---------------------------------------------------------------- what is shared


class PromptsDecoder(ServingDecoder):
    """Sessions know their prompts, as ``asked``."""

    def _open(self, prompts: Sequence[Prompt], capacity: int) -> Any:
        session: Any = super()._open(prompts, capacity)
        session.asked = [np.ascontiguousarray(prompt.tokens).tobytes() for prompt in prompts]
        return session


def share_page_of_equal_prompts(write: Write, cache: Any, keys: Tensor, values: Tensor, running: Any) -> Written:
    """Rows with equal prompts share the page in which these end: the last row's entries count."""
    groups = defaultdict[bytes, list[int]](list)
    for place, row in enumerate(running.rows):
        if running.starts[place] > 0:
            groups[cache.owner.asked[row]].append(place)
    for prompt, (*places, last) in groups.items():
        end = -(-(len(prompt) // 8) // PAGE) * PAGE
        for place in places if running.starts[last] < end else ():
            shared = slice(0, end - running.starts[last])
            keys[place, :, shared], values[place, :, shared] = keys[last, :, shared], values[last, :, shared]
    return write(keys, values, running)


def share_slots_of_sessions(slots: int) -> MutantFactory:
    """Sessions have so many slots: one more takes the entries of the oldest."""

    def start(original: Any, decoder: Any, prompts: Sequence[Prompt]) -> Any:
        session, step = original(prompts)
        opened = leaked_items(decoder, "opened")
        opened.append(session)
        for oldest in opened[-slots - 1 : -slots]:
            for row in range(len(oldest._trail)):
                zero_row_kv(oldest._store.cache.layers, row)
        return session, step

    return serve(start=start)


def share_buffers_of_as_many_rows() -> MutantFactory:
    """Sessions of one decoder with as many rows share their buffers."""

    def pool_of(cache: Any) -> Any:
        pools = vars(cache.owner._forward).setdefault("pools", defaultdict(dict))
        return pools[len(cache._rows)]

    return serve(cache=shared_buffer_overrides(pool_of))


def keep_forced_depths_by_reference(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    """The depths that the caller forced are kept in its own array."""
    kept = vars(session).get("forced")
    if kept is not None and len(kept) == len(session._trail) and session._point.schedule == "monotone":
        for trail, now in zip(session._trail, np.asarray(kept)[:, -1].tolist(), strict=True):
            trail[-1] = max(1, min(trail[-1], now))
    step: Step = feed(tokens, depth, last)
    session.forced = depth
    return step


def end_newest_session(close: Any, session: Any) -> None:
    """Closing a session empties the newest one that is open."""
    opened = leaked_items(session.of, "opened")
    opened.remove(session)
    for newest in opened[-1:]:
        for row in range(len(newest._trail)):
            zero_row_kv(newest._store.cache.layers, row)
    close()


def remember_decoder(start: Any, decoder: Any, prompts: Sequence[Prompt]) -> Any:
    session, step = remember_sessions(start, decoder, prompts)
    session.of = decoder
    return session, step


# ---------------------------------------------------------------- fields of a point in a batch


def keep_remembered_layers_in_place(decoder: Any) -> None:
    """Layers that a probe remembers are not moved up where rows stop."""
    read = decoder._forward.probe.read
    decoder._forward.probe.read = lambda hidden, column, work, ids: read(hidden, column, work, np.arange(len(ids)))


MUTANTS = (
    *make_pair_mutants("sessions",
        ("depths-of-first-column", "a forced depth that rises within one feed is accepted",
         serve(session={"_checked_depth": check_first_column}, cache=UNCHECKED)),
        ("depths-of-two-columns", "a forced depth that rises after the second token is accepted",
         serve(session={"_checked_depth": check_first_two_columns}, cache=UNCHECKED)),
        ("depths-of-first-row", "forced depths of other rows than the first are not checked",
         serve(session={"_checked_depth": check_first_row}, cache=UNCHECKED)),
        ("depths-of-zero", "a forced depth of 0 is accepted", serve(session={"_checked_depth": check_upper_bound})),
        ("depths-as-first-row's", "all rows run to the first row's forced depths",
         serve(session=change_forced_depths(lambda depth: np.minimum(depth, depth[:1])))),
        ("depths-as-last-token's", "all tokens of a feed run to the last one's forced depth",
         serve(session=change_forced_depths(lambda depth: np.repeat(depth[:, -1:], depth.shape[1], axis=1)))),
        ("rule-off-after-forced", "after a forced depth the rule stops no token",
         serve(session={"feed": keep_cap_after_forced_depths})),
        ("forced-gap", "under free depth a forced depth leaves the layers above it unwritten",
         serve(prepare=leave_gap_under_forced_depths, cache=UNCHECKED)),
        ("wide-feeds-of-nine", "wide feeds of more than 8 rows start at row 0's position",
         serve(stepper=make_stepper_override(prepare_forward=start_wide_feeds_at_first_row), cache=UNCHECKED)),
        ("feed-of-16", "a feed has a buffer of 16 tokens",
         serve(session=change_fed_tokens(lambda tokens: tokens[:, np.arange(tokens.shape[1]) % 16]))),
        ("feed-in-a-byte", "tokens of wide feeds are kept in one byte",
         serve(session=change_fed_tokens(lambda tokens: tokens if tokens.shape[1] == 1 else tokens % 256))),
        ("feed-strides", "an array of tokens with strides is read as if it had none",
         serve(session={"feed": read_feed_without_strides})),
        ("strides", "a prompt array with strides is read as if it had none", change_prompts(read_without_strides)),
        ("copying-first-depth", "under copying all tokens of a feed take the first one's depth",
         serve(session={"feed": take_first_depth_when_copying})),
        ("unshown-last-layer", "tokens without logits leave the last layer empty",
         serve(session={"feed": skip_last_layer_without_logits})),
        ("unshown-undecided", "tokens without logits are not decided",
         serve(session={"feed": run_to_cap_without_logits})),
        ("first-shown-as-last", "of feeds of 8 tokens and more the first tokens' logits are shown",
         serve(session={"feed": show_first_tokens_as_last})),
        ("logits-of-draws", "sessions of a decoder at a temperature show logits / T",
         serve(start=start_at_temperature)),
        ("rollback-to-a-page's-end", "a rollback to a multiple of 16 frees the page before it",
         serve(session={"rollback": free_page_before_its_end})),
        ("rollback-beyond-16", "of more than 16 tokens rolled back the first ones stay in the cache",
         serve(session={"rollback": remember_entries_beyond_sixteen},
               cache={"write": write_entries_beyond_sixteen_again})),
        ("commit-by-lowest-cap", "commit frees above the lowest cap of the batch",
         serve(session={"commit": free_by_lowest_cap})),
        ("commit-by-cap-of-now", "commit of a part frees by the cap after the last token",
         serve(session={"commit": free_by_cap_of_now})),
        ("commit-after-drop", "commit frees by the numbers that rows had before a drop",
         serve(session={"commit": free_by_numbers_before_drop, "drop": remember_numbers})),
        ("commit-in-a-byte", "committed lengths are kept in one byte", serve(session={"commit": commit_in_one_byte})),
        ("drop-keeps-waiting", "after a drop waiting states are those of the rows that had the number",
         serve(session={"drop": keep_waiting_states_by_number})),
        ("equal-prompts-share-a-page", "equal prompts of one session share a half-filled page",
         mutate(base=PromptsDecoder, cache={"write": share_page_of_equal_prompts})),
        ("slots-of-64", "the 65th session takes the slot of the first", share_slots_of_sessions(64)),
        ("buffers-by-rows", "sessions with as many rows share their buffers", share_buffers_of_as_many_rows()),
        ("close-empties-newest", "closing a session empties the newest one",
         serve(start=remember_decoder, session={"close": end_newest_session})),
        ("session-fills-of-first-row", "entries above an exit are those of the first row's state",
         serve(stepper=make_stepper_override(write_kv=fill_states_of_first_row))),
        ("session-bin-of-first-row", "a batch takes the bin of its first row", serve(prepare=bin_all_rows_as_first)),
        ("session-far-exits", "exits are read 0.3 too high from position 96 on, in batches of three and more",
         serve(prepare=shift_far_exits_of_batches)),
        ("caps-of-16", "caps of the last 16 positions are kept",
         serve(session={"rollback": keep_sixteen_caps, "_admissions": admit_all_layers_where_lost}, cache=UNCHECKED)),
        ("ceiling-forgotten", "a rollback into the prompt forgets the ceiling",
         serve(session={"rollback": mark_rollback, "_admissions": forget_ceiling_in_prompt}, cache=UNCHECKED)),
        ("rollback-in-a-byte", "lengths of a rollback are kept in one byte",
         serve(session={"rollback": lambda rollback, session, length: rollback(
             np.maximum(session._committed, np.maximum(1, np.asarray(length) % 256)))})),
        ("rollback-as-first-row", "all rows roll back as many tokens as the first",
         serve(session={"rollback": roll_back_as_first_row})),
        ("rollback-as-last-row", "if the last row forgets nothing, none does",
         serve(session={"rollback": skip_rollback_for_last_row})),
        ("drop-of-none-is-all", "drop([]) drops every row", serve(session={"drop": drop_all_for_none})),
        ("drop-of-none-is-last", "drop([]) drops the last row", serve(session={"drop": drop_last_for_none})),
        ("drop-keeps-caps", "after a drop a row has the cap of the row that had its number",
         serve(session={"drop": keep_caps_by_number})),
        ("session-lowest-cap-of-nine", "more than eight rows have the lowest cap of all",
         serve(session={"_admissions": take_lowest_cap_of_nine})),
        ("depths-by-reference", "forced depths are kept in the caller's array",
         serve(session={"feed": keep_forced_depths_by_reference})),
        ("lengths-by-reference", "the lengths of a rollback are kept in the caller's array",
         serve(session={"rollback": keep_lengths_by_reference, "length": report_kept_length})),
        ("session-at-newest-point", "decoders of one process decode at the point of the newest",
         use_newest_of_process("_forward", "_open"))),
    Mutant("batch-remembers-in-place", "pairs", "layers that a probe remembers stay in place where rows stop",
           mutate(prepare=keep_remembered_layers_in_place), FIELDS, r"row \d, position \d+"),
    Mutant("batch-bin-of-first-row", "pairs", "a batch takes the bin of its first row",
           mutate(prepare=bin_all_rows_as_first), FIELDS, r"bins of .*row \d, position \d+"),
)  # fmt: skip
