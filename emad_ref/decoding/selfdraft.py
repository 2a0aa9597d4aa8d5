"""Self-speculative decoding: a model drafts by leaving early, and goes on with the same tokens to verify them.

    draft    (last token, d_1 … d_k), one feed each, to layer e; d_i from the head there
    verify   those k + 1 tokens run on in one chunk, layers e + 1 … ceiling, over their states and K/V after layer e
    accept, emit (rule: ``acceptance``); take back what does not stand

Symbols: ``exit_layer`` is e. One session, one cache: K and V below the exit, and the states there, are written by the
draft and reused by the verification, so no token runs a layer twice. The point is one of schedule ``free_deferred``,
under which a token that stopped early keeps its state (``schedule.free``) and ``Session.deepen`` takes it up.

What is promised: the model's own output at the point's ceiling, whatever e is; e and k change the cost only. In the
record (model 0) every token of a round stands twice: as ``draft`` at depth e, not kept once it went on, and as
``verify`` at the ceiling. What a layer ran is therefore

    ℓ ≤ e   draft rows and the opening's        ℓ > e   verify rows and the opening's

and heads: one per verify row, one per draft row but the last of each round, whose proposal nobody would ask for.

Any decoder whose capabilities say ``deepens`` will do; this module knows no model and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from emad_ref.decoding.acceptance import (
    Continuation,
    Ended,
    Options,
    Speculated,
    speculated,
    speculating,
    standing,
    unending,
)
from emad_ref.decoding.pair import Log, Partner, Seat, require_prompts
from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import DECODE, DRAFT, PROMPT, VERIFY

MODEL = 0


def drafting_point(layers: int) -> OperatingPoint:
    """Full depth for every token that is not told to stop early, and what is needed to take up those that are."""
    return replace(full_depth(layers), name="self-drafting", schedule="free_deferred")


def self_speculate(
    model: Partner,
    exit_layer: int,
    prompts: Sequence[Prompt],
    max_new: int,
    *,
    k: int = 4,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
    gate_bits: float | None = None,
    ended: Ended = unending,
) -> Speculated:
    """Emit up to ``max_new`` tokens per prompt; a stop token is emitted and ends its row.

    Options, rows and room are those of ``speculative.speculate``, of which this is the case "itself, shallower".

    Raises:
        Unsupported: a decoder that cannot take a stopped token up again.
        BadArgument: an exit layer outside 1 … ceiling − 1, a point that decides depth by itself, and what ``speculate``
            refuses.
        NotFinite: logits hold NaN or +inf.
    """
    options = Options(max_new, k, stop, temperature, seed, gate_bits, ended)
    require_prompts(prompts)
    _require_drafting(model, exit_layer)
    log = Log()
    with closing(Seat(model, MODEL, log, range(len(prompts)), prompts, PROMPT, DECODE)) as seat:
        rows = speculating(prompts, seat.logits, options, (seat,), lambda alive: _round(alive, seat, exit_layer))
        work, opening = seat.work, seat.opening_work
    return speculated(rows, log, None if work is None else {MODEL: work}, None if opening is None else {MODEL: opening})


def _round(rows: Sequence[Continuation], seat: Seat, exit_layer: int) -> None:
    """Draft, go on, take back: afterwards the session holds all tokens of each row but the last, at the ceiling."""
    width, before = max(row.width for row in rows), seat.length
    for at in range(width + 1):
        tokens = np.array([[row.padded(at)[-1]] for row in rows], dtype=np.int64)
        # the last draft of a round is only taken along: a head on it would propose what the verification emits
        logits = seat.feed(tokens, [DRAFT], depth=exit_layer, last=int(at < width))
        for row, z in zip(rows, logits, strict=True):
            if at < row.width:
                row.propose(z[-1])
    for row, logits in zip(rows, seat.deepen(before, VERIFY), strict=True):
        row.verify(logits)
    seat.keep(standing(rows))


def _require_drafting(model: Partner, exit_layer: int) -> None:
    if not model.decoder.capabilities.deepens:
        raise Unsupported(
            f"self-speculation with schedule={model.point.schedule!r}, but the decoder's capabilities do not say that "
            "it deepens; open it at drafting_point(layers) if it can under any schedule"
        )
    if model.undecided:
        raise BadArgument(
            "model.point", model.point.name, "a point under which no token leaves by itself", "see drafting_point"
        )
    if not 1 <= exit_layer < model.point.ceiling:
        raise BadArgument(
            "exit_layer",
            exit_layer,
            f"a layer in 1–{model.point.ceiling - 1}",
            "at the ceiling nothing is left to verify",
        )
