"""Closed sessions give their memory back: memory in use does not grow with the number of sessions that there were.

Sessions are opened over the same prompts and closed, requests are generated, and memory is read before and after. What
their K/V would take if it were kept is known from the model's sizes; growth by half of that, counted at two bytes a
number, is too much to be anything else. K/V that one session keeps for itself are its own affair: ``commit`` allows it
to free them, and does not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emad_ref.audit.finding import Finding, Tally
from emad_ref.protocol import Decoder, Prompt

CHECK = "memory"
WARM_UP = 2  # sessions before memory is first read: buffers that belong to the decoder are made by then
MB = 2**20


def memory(
    decoder: Decoder, prompts: Sequence[Prompt], rounds: int, held_bytes: int, used_bytes: Callable[[], int]
) -> Finding:
    """Open and close ``rounds`` sessions over ``prompts``, and generate one token as often.

    Args:
        held_bytes: what K and V of ``prompts`` take at two bytes a number.
        used_bytes: reads the memory in use.
    """
    tally = Tally(CHECK, needed=0)
    with tally:
        for number in range(WARM_UP + rounds):
            if number == WARM_UP:
                before = used_bytes()
            session, _ = decoder.start(prompts)
            session.close()
            del session
            decoder.generate(prompts, 1, frozenset())
        grown, kept = used_bytes() - before, 2 * rounds * held_bytes
        tally.n = rounds * sum(len(prompt.tokens) for prompt in prompts)
        tally.require(
            grown <= kept / 2,
            f"memory grew by {grown // MB} MB over {2 * rounds} sessions that were closed or ended, whose K/V would "
            f"take {kept // MB} MB at two bytes a number: they are kept",
        )
    return tally.finding()
