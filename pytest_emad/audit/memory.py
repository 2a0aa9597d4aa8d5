"""Check that closed sessions free their memory: memory in use does not grow with the number of past sessions.

Sessions are opened over the same prompts, fed, rolled back, committed, dropped row by row and closed, requests are
generated, and memory is read before and after. Then one long session is fed and rolled back repeatedly. The model's
sizes give the memory of unfreed K/V, at two bytes a number. Memory is read in two ways:

in use   all memory of the process or device. Growth by half of all K/V is too much for other causes
tensors  bytes of the tensors that Python can reach: growth by an eighth of *one layer's* K/V is too much

What is forgotten never ends to grow, while a prefix cache has a size. So growth is looked for in up to ``STRETCHES``
stretches, and one without it is enough.

``commit`` and ``drop`` allow a session to free K/V; only ``close`` requires it. The check does not detect K/V of a
single layer outside the tensors of this process (docs/trust.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from emad_ref.protocol import Decoder, Prompt
from pytest_emad.audit.finding import Finding, Tally

WARM_UP = 2  # sessions before memory is first read, to create the decoder's own buffers
STRETCHES = 4  # of ``rounds``; one without growth clears a decoder, whose prefix cache may fill up before
OPENING, WIDEST = 8, 32  # tokens of the long session's prompts, and of one of its feeds
OF_A_LAYER = 8  # fraction of one layer's K/V by which tensors may grow; their size is exact
MB = 2**20


MemoryReading = tuple[int, int]  # (bytes in use, bytes in tensors that Python reaches)


def check_session_memory_leak(
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
        fed: tokens for each row, in feeds of allowed width, each rolled back.
        token_bytes: K and V of a token at two bytes a number, in all of ``layers``.
        read: reads the memory.
    """
    tally, prompt_tokens = Tally("memory", needed=0), sum(len(prompt.tokens) for prompt in prompts)
    with tally:
        _exercise_sessions(decoder, prompts, WARM_UP)
        kv_bytes = 2 * rounds * prompt_tokens * token_bytes
        for _ in range(STRETCHES):
            before = read()
            _exercise_sessions(decoder, prompts, rounds)
            grown, tally.n = _growth(before, read()), tally.n + 2 * rounds * prompt_tokens
            if all(grew <= most for grew, most in zip(grown, _allowed_growth(kv_bytes, layers), strict=True)):
                break
        _require_bounded(tally, grown, kv_bytes, layers, f"over {2 * rounds} sessions that were closed or ended")
        grown, kv_bytes = _growth_in_one_session(decoder, prompts, fed, read), fed * len(prompts) * token_bytes
        when = f"in one session, while {fed} tokens a row were fed and rolled back"
        _require_bounded(tally, grown, kv_bytes, layers, when)
        tally.n += fed * len(prompts)
    return tally.to_finding()


def _exercise_sessions(decoder: Decoder, prompts: Sequence[Prompt], count: int) -> None:
    """``count`` sessions, and requests, over the same ``prompts``."""
    for number in range(count):
        _exercise_session(decoder, prompts, drops=number % 2 == 0)
        decoder.generate(prompts, 2, frozenset())


def _exercise_session(decoder: Decoder, prompts: Sequence[Prompt], *, drops: bool) -> None:
    """Use every method of a session; one that ``drops`` closes with only its first row."""
    session, _ = decoder.start(prompts)
    before = session.length.copy()
    session.feed(np.stack([prompt.tokens[-1:] for prompt in prompts]), None, 0)
    session.rollback(before)
    session.feed(np.stack([prompt.tokens[-1:] for prompt in prompts]), None, 0)
    session.commit(session.length.copy())
    if drops and len(prompts) > 1:
        session.drop(np.arange(1, len(prompts)))
    session.close()


def _growth_in_one_session(
    decoder: Decoder, prompts: Sequence[Prompt], fed: int, read: Callable[[], MemoryReading]
) -> MemoryReading:
    session, _ = decoder.start([Prompt(prompt.tokens[:OPENING], prompt.source) for prompt in prompts])
    lengths, widest = session.length.copy(), min(decoder.capabilities.max_feed, WIDEST)
    piece = np.stack([np.resize(prompt.tokens, widest) for prompt in prompts])
    for number in range(WARM_UP + math.ceil(fed / widest)):
        if number == WARM_UP:
            before = read()
        session.feed(piece, None, 0)
        session.rollback(lengths)
    grown = _growth(before, read())
    session.close()
    return grown


def _growth(before: MemoryReading, after: MemoryReading) -> MemoryReading:
    return after[0] - before[0], after[1] - before[1]


def _allowed_growth(kv_bytes: int, layers: int) -> tuple[float, float]:
    return kv_bytes / 2, kv_bytes / layers / OF_A_LAYER


def _require_bounded(tally: Tally, grown: MemoryReading, kv_bytes: int, layers: int, when: str) -> None:
    (in_use, tensors), layer = grown, kv_bytes / layers
    most_in_use, most_tensors = _allowed_growth(kv_bytes, layers)
    tally.notes.append(f"grown by {in_use / MB:.1f} MB, tensors by {tensors / MB:.1f} MB {when}")
    complaint = f"memory grew by {in_use // MB} MB {when}; their K/V take {kv_bytes // MB} MB at two bytes a number"
    tally.require(in_use <= most_in_use, complaint)
    complaint = (
        f"memory grew by {tensors / MB:.1f} MB {when}: so much more is in tensors that are still reached; K/V of "
        f"one of {layers} layers take {layer / MB:.1f} MB"
    )
    tally.require(tensors <= most_tensors, complaint)
