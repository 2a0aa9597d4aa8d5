"""Planted defects of the cached decoder: one fault each, and the check that must catch it.

An override is a function ``f(original, self, *arguments)`` (``tests.mutants.mutant``). ``DEFECTS`` maps the name
of a defect to the decoder and to its check. Defects of the protocol alone (``PROTOCOL``) are the functions of
``tests.mutants``, applied here to a second decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from emad_ref.protocol import InadmissibleDepth, Prompt, Step
from emad_ref.record import Floats, Ints, Record, Work
from tests.decoders.audited_model import entropy_nats
from tests.decoders.cached_decoder import CachedDecoder, CachedSession, Row
from tests.mutants.decision_defects import (
    change_feed_step,
    cut_depths_and_signals,
    drop_logits_axis,
    replace_logits_by_nan,
)
from tests.mutants.mutant import override_methods
from tests.mutants.request_defects import drop_emitted_stop_tokens


def with_session(**overrides: Callable[..., Any]) -> type[CachedDecoder]:
    """Return the cached decoder with sessions that have these methods."""
    return type("Defective", (CachedDecoder,), {"session": override_methods(CachedSession, overrides)})


def with_generate(
    change: Callable[[Sequence[Prompt], int, frozenset[int]], tuple[Sequence[Prompt], int, frozenset[int]]],
) -> type[CachedDecoder]:
    """Return the cached decoder with a ``generate`` that answers ``change`` of the request."""

    def generate(original: Any, decoder: Any, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        return original(*change(prompts, max_new, stop))

    return override_methods(CachedDecoder, {"generate": generate})


def keep_entries(original: Any, session: CachedSession, length: Ints) -> None:
    """Rollback removes the tokens but keeps their K/V."""
    for row, held in zip(session.rows, length, strict=True):
        del row.tokens[held:], row.caps[held + 1 :]


def cut_relatively(original: Any, session: CachedSession, length: Ints) -> None:
    """Rollback cuts every layer by the same count instead of to the same length."""
    for row, held in zip(session.rows, length, strict=True):
        cut = len(row.tokens) - int(held)
        row.memory.layers = [
            kv and (kv[0][:, :, : max(kv[0].shape[2] - cut, 0)], kv[1][:, :, : max(kv[1].shape[2] - cut, 0)])
            for kv in row.memory.layers
        ]
    keep_entries(original, session, length)


def keep_cap(original: Any, session: CachedSession, length: Ints) -> None:
    caps = session.cap
    original(length)
    for row, cap in zip(session.rows, caps, strict=True):
        row.caps[-1] = int(cap)


def forget_work(original: Any, session: CachedSession, length: Ints) -> None:
    for row, held in zip(session.rows, length, strict=True):
        for depth in row.caps[held + 1 :]:
            session.work.tokens[:depth] -= 1
    original(length)


def free_the_cap(original: Any, session: CachedSession, length: Ints) -> None:
    for row in session.rows:
        session.free(row, row.caps[-1] - 1)


def empty_the_others(drop: Any, session: CachedSession, rows: Ints) -> None:
    """Zero the K/V of every other session of the model."""
    drop(rows)
    for other in OPEN:
        if other is not session and other.model is session.model:
            for row in other.rows:
                row.memory.layers = [kv and (kv[0], torch.zeros_like(kv[1])) for kv in row.memory.layers]


OPEN: WeakSet[CachedSession] = WeakSet()


def remember_open(prefill: Any, session: CachedSession, prompts: Sequence[Prompt]) -> Step:
    OPEN.add(session)
    step: Step = prefill(prompts)
    return step


def accept_rising(original: Any, session: CachedSession, depth: Ints) -> None:
    """Run any depth of the model, even over missing K/V."""
    if ((depth < 1) | (depth > session.point.ceiling)).any():
        raise InadmissibleDepth(f"depth={depth.tolist()}, but expected 1 to {session.point.ceiling}")


def refuse_late(original: Any, session: CachedSession, tokens: Ints, depth: Ints | None = None, *last: Any) -> Step:
    """Refuse an inadmissible depth only after earlier rows of the batch were fed."""
    if depth is not None and ((depth[:, 0] < 1) | (depth[:, 0] > session.cap)).any():
        with torch.inference_mode():
            session.obey(session.rows[0], int(tokens[0, 0]), 1)
    return original(tokens, depth, *last)


def shift_rows(original: Any, session: CachedSession, *arguments: Any) -> Step:
    step = original(*arguments)
    return Step(np.roll(step.logits, 1, axis=0), step.depth, step.signal)


def show_full_depth(original: Any, session: CachedSession, row: Row, hidden: Tensor, depth: int) -> Floats:
    """Run all layers and show full-depth logits under the shallow depth of the rule."""
    return session.logits(run_uncounted(session, row, hidden, depth))


def show_full_depth_in_generate(original: Any, session: CachedSession, *arguments: Any) -> Floats:
    return show_full_depth(original, session, *arguments) if session.generating else original(*arguments)


def route(original: Any, session: CachedSession, row: Row, hidden: Tensor, depth: int) -> Floats:
    """Run every layer at every step, apply routers afterwards, and do not count the blocks above."""
    run_uncounted(session, row, hidden, depth)
    return original(row, hidden, depth)


def run_uncounted(session: CachedSession, row: Row, hidden: Tensor, depth: int) -> Tensor:
    work, session.work = session.work, Work.none(session.point.layers)
    for layer in range(depth + 1, session.point.layers + 1):
        hidden = session.run(row, hidden, layer)
    session.work = work
    return hidden


def read_everywhere(original: Any, session: CachedSession, row: Row, hidden: Tensor, layer: int) -> Tensor:
    """Read the head after every layer, also where the rule needs none."""
    made: Tensor = original(row, hidden, layer)
    session.head(made)
    return made


def exit_together(original: Any, session: CachedSession, tokens: Ints, depth: Ints | None = None, *last: Any) -> Step:
    """Let all rows exit where the first one does."""
    if depth is not None or len(session.rows) == 1:
        return original(tokens, depth, *last)
    kept, counted = [(row.memory.layers[:], len(row.tokens)) for row in session.rows], session.work
    session.work = Work.none(session.point.layers)
    step = original(tokens)
    for row, (layers, length) in zip(session.rows, kept, strict=True):
        row.memory.layers = layers
        del row.tokens[length:], row.caps[length + 1 :]
    session.work = counted
    shallowest = np.full_like(step.depth, step.depth.min())
    obeyed = original(tokens, shallowest)
    signal = np.where(np.array(session.point.probes) > shallowest[..., None], np.nan, step.signal)
    return Step(obeyed.logits, obeyed.depth, signal)


# defects that only observed work shows: all their reports are consistent
AllLayersThenRoute, ReadsEveryLayer = with_session(shown=route), with_session(run=read_everywhere)

# by the functions that mutate the reference decoder
PROTOCOL: dict[str, tuple[type[CachedDecoder], str]] = {
    "logits that are NaN": (with_session(**change_feed_step(replace_logits_by_nan)), "sessions"),
    "logits that lack an axis": (with_session(**change_feed_step(drop_logits_axis)), "sessions"),
    "depths of the last tokens alone": (with_session(feed=cut_depths_and_signals), "last"),
    "stop tokens not emitted": (override_methods(CachedDecoder, {"generate": drop_emitted_stop_tokens}), "generation"),
}
DEFECTS: dict[str, tuple[type[CachedDecoder], str]] = {
    "stale K/V after rollback": (with_session(rollback=keep_entries), "sessions"),
    "relative cut of ragged K/V": (with_session(rollback=cut_relatively), "sessions"),
    "rollback forgets the cap": (with_session(rollback=keep_cap), "sessions"),
    "rolled-back work is forgotten": (with_session(rollback=forget_work), "sessions"),
    "commit frees the cap's layer": (with_session(commit=free_the_cap), "sessions"),
    "position off by one": (
        with_session(position=lambda original, session, row, n: len(row.tokens) + (n == 1)), "sessions"),
    "accepts a rising forced depth": (with_session(admit=accept_rising), "sessions"),
    "refuses after feeding": (with_session(feed=refuse_late), "sessions"),
    "wrong batch row": (with_session(feed=shift_rows), "sessions"),
    "drops the wrong row": (
        with_session(drop=lambda drop, session, rows: drop(len(session.rows) - 1 - np.atleast_1d(rows).astype(int))),
        "sessions"),
    "a drop empties the other sessions": (
        with_session(drop=empty_the_others, prefill=remember_open), "sessions"),
    "depth rises": (with_session(next_cap=lambda original, session, row, depth: session.point.ceiling), "decisions"),
    "depth rises behind a false cap": (
        with_session(ceiling_of=lambda original, session, row: session.point.ceiling), "decisions"),
    "probe without the final norm": (
        with_session(signal=lambda original, session, hidden: float(
            entropy_nats(session.head(hidden[0, -1]).numpy()))), "decisions"),
    "probes left out of the work": (
        with_session(count_readout=lambda count, session, layer, probe: None if probe else count(layer, probe)),
        "decisions"),
    "context left out of the work": (
        with_session(count_block=lambda count, session, layer, n, keys: count(layer, n, n)), "decisions"),
    "full-depth tokens under shallow depths": (with_session(shown=show_full_depth), "decisions"),
    "full-depth tokens in generate only": (with_session(shown=show_full_depth_in_generate), "generation"),
    "truncated generation": (with_generate(lambda prompts, new, stop: (prompts, new - 3, stop)), "generation"),
    "stop tokens ignored": (with_generate(lambda prompts, new, stop: (prompts, new, frozenset())), "generation"),
    "batch-wide exit": (with_session(feed=exit_together), "requests"),
    **PROTOCOL,
}  # fmt: skip
