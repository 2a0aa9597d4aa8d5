"""Closed sessions give their memory back: memory in use does not grow with the number of sessions that there were.

Sessions are opened over the same prompts, fed, rolled back, committed, dropped row by row and closed, requests are
generated, and memory is read before and after; then one long session is fed and rolled back again and again. What their
K/V would take if it were kept is known from the model's sizes, counted at two bytes a number. It is read in two ways:

in use   memory of the process or device, wherever it is held. Growth by half of all K/V is too much to be anything else
tensors  what tensors that Python still reaches hold, to the byte: growth by an eighth of *one layer's* K/V is too much

Tokens that a session still holds are its own affair: ``commit`` and ``drop`` allow it to free K/V, and do not ask for
it before ``close``. K/V of one layer that no tensor of this process holds are not seen (docs/trust.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from emad_ref.audit.finding import Finding, Tally
from emad_ref.protocol import Decoder, Prompt

WARM_UP = 2  # sessions before memory is first read: buffers that belong to the decoder are made by then
OPENING, WIDEST = 8, 32  # tokens of the long session's prompts, and of one of its feeds
OF_A_LAYER = 8  # a part of one layer's K/V by which tensors may grow: they are read to the byte
MB = 2**20


MemoryReading = tuple[int, int]  # bytes in use in all, and in tensors that Python reaches


def memory(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    rounds: int,
    fed: int,
    token_bytes: int,
    layers: int,
    read: Callable[[], MemoryReading],
) -> Finding:
    """Open and close ``rounds`` sessions over ``prompts``, generate as often; feed one session ``fed`` tokens a row.

    Args:
        fed: to each row, at most as many at once as a feed may hold, each feed rolled back.
        token_bytes: what K and V of a token take at two bytes a number, in all of ``layers``.
        read: reads the memory.
    """
    tally, held = Tally("memory", needed=0), sum(len(prompt.tokens) for prompt in prompts)
    with tally:
        for number in range(WARM_UP + rounds):
            if number == WARM_UP:
                before = read()
            _exercise_session(decoder, prompts, drops=number % 2 == 0)
            decoder.generate(prompts, 2, frozenset())
        grown, kept = _growth(before, read()), 2 * rounds * held * token_bytes
        _require_bounded(tally, grown, kept, layers, f"over {2 * rounds} sessions that were closed or ended")
        tally.n = 2 * rounds * held
        grown, kept = _growth_in_one_session(decoder, prompts, fed, read), fed * len(prompts) * token_bytes
        when = f"in one session, while {fed} tokens a row were fed and rolled back"
        _require_bounded(tally, grown, kept, layers, when)
        tally.n += fed * len(prompts)
    return tally.finding()


def _exercise_session(decoder: Decoder, prompts: Sequence[Prompt], *, drops: bool) -> None:
    """A session that is asked for all that a session can do; one that ``drops`` closes over its first row alone."""
    session, _ = decoder.start(prompts)
    held = session.length.copy()
    session.feed(np.stack([prompt.tokens[-1:] for prompt in prompts]), None, 0)
    session.rollback(held)
    session.feed(np.stack([prompt.tokens[-1:] for prompt in prompts]), None, 0)
    session.commit(session.length.copy())
    if drops and len(prompts) > 1:
        session.drop(np.arange(1, len(prompts)))
    session.close()


def _growth_in_one_session(
    decoder: Decoder, prompts: Sequence[Prompt], fed: int, read: Callable[[], MemoryReading]
) -> MemoryReading:
    session, _ = decoder.start([Prompt(prompt.tokens[:OPENING], prompt.source) for prompt in prompts])
    held, widest = session.length.copy(), min(decoder.capabilities.max_feed, WIDEST)
    piece = np.stack([np.resize(prompt.tokens, widest) for prompt in prompts])
    for number in range(WARM_UP + math.ceil(fed / widest)):
        if number == WARM_UP:
            before = read()
        session.feed(piece, None, 0)
        session.rollback(held)
    grown = _growth(before, read())
    session.close()
    return grown


def _growth(before: MemoryReading, after: MemoryReading) -> MemoryReading:
    return after[0] - before[0], after[1] - before[1]


def _require_bounded(tally: Tally, grown: MemoryReading, kept: int, layers: int, when: str) -> None:
    (in_use, tensors), layer = grown, kept / layers
    tally.notes.append(f"grown by {in_use / MB:.1f} MB, tensors by {tensors / MB:.1f} MB {when}")
    complaint = f"memory grew by {in_use // MB} MB {when}; their K/V take {kept // MB} MB at two bytes a number"
    tally.require(in_use <= kept / 2, complaint)
    complaint = (
        f"memory grew by {tensors / MB:.1f} MB {when}: so much more is in tensors that are still reached; K/V of "
        f"one of {layers} layers take {layer / MB:.1f} MB"
    )
    tally.require(tensors <= layer / OF_A_LAYER, complaint)
