"""Closed sessions give their memory back: memory in use does not grow with the number of sessions that there were.

Sessions are opened over the same prompts and closed, requests are generated, and memory is read before and after; then
one long session is fed and rolled back again and again. What their K/V would take if it were kept is known from the
model's sizes; growth by half of that, counted at two bytes a number, is too much to be anything else. Tokens that a
session still holds are its own affair: ``commit`` allows it to free some of their K/V, and does not ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from emad_ref.audit.finding import Finding, Tally
from emad_ref.protocol import Decoder, Prompt

CHECK = "memory"
WARM_UP = 2  # sessions before memory is first read: buffers that belong to the decoder are made by then
OPENING, WIDEST = 8, 32  # tokens of the long session's prompts, and of one of its feeds
MB = 2**20


def memory(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    rounds: int,
    fed: int,
    token_bytes: int,
    used_bytes: Callable[[], int],
) -> Finding:
    """Open and close ``rounds`` sessions over ``prompts``, generate as often; feed one session ``fed`` tokens a row.

    Args:
        fed: to each row, at most as many at once as a feed may hold, each feed rolled back.
        token_bytes: what K and V of a token take at two bytes a number.
        used_bytes: reads the memory in use.
    """
    tally, held = Tally(CHECK, needed=0), sum(len(prompt.tokens) for prompt in prompts)
    with tally:
        for number in range(WARM_UP + rounds):
            if number == WARM_UP:
                before = used_bytes()
            session, _ = decoder.start(prompts)
            session.close()
            del session
            decoder.generate(prompts, 1, frozenset())
        grown, kept = used_bytes() - before, 2 * rounds * held * token_bytes
        _require_bounded(tally, grown, kept, f"over {2 * rounds} sessions that were closed or ended")
        tally.n = 2 * rounds * held
        grown, kept = _grown_in_one_session(decoder, prompts, fed, used_bytes), fed * len(prompts) * token_bytes
        _require_bounded(tally, grown, kept, f"in one session, while {fed} tokens a row were fed and rolled back")
        tally.n += fed * len(prompts)
    return tally.finding()


def _grown_in_one_session(decoder: Decoder, prompts: Sequence[Prompt], fed: int, used_bytes: Callable[[], int]) -> int:
    session, _ = decoder.start([Prompt(prompt.tokens[:OPENING], prompt.source) for prompt in prompts])
    held, widest = session.length.copy(), min(decoder.capabilities.max_feed, WIDEST)
    piece = np.stack([np.resize(prompt.tokens, widest) for prompt in prompts])
    before = 0
    for number in range(WARM_UP + math.ceil(fed / widest)):
        if number == WARM_UP:
            before = used_bytes()
        session.feed(piece, None, 0)
        session.rollback(held)
    grown = used_bytes() - before
    session.close()
    return grown


def _require_bounded(tally: Tally, grown: int, kept: int, when: str) -> None:
    tally.notes.append(f"grown by {grown / MB:.1f} MB {when}")
    said = f"memory grew by {grown // MB} MB {when}; their K/V take {kept // MB} MB at two bytes a number"
    tally.require(grown <= kept / 2, said)
