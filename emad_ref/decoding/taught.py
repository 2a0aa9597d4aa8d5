"""Given text fed to our own decoder, in batches: at every step what the decoder says of the token that comes next.

Rows of a batch take one step together, and leave it one by one as their texts end. What is fed is the text, whatever
the decoder would have said (teacher forcing); the last token of a row is only predicted. What a step is read for is
the caller's: losses and work (``sweep.decoded``), depths and signals (``screening.watching``). ``decoding.forcing``
feeds decoders of any making, a row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from emad_ref.calibration.trace import TokenSequence, padded
from emad_ref.decoding.adaptive import Arrival
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.protocol import Prompt
from emad_ref.record import Ints, Work

ROWS = 32  # of one batch: a step of so many small rows costs twice a step of one


@dataclass(frozen=True)
class Lesson:
    """Step ``at`` (from 0) of a batch. ``rows`` int64 [going on]: which of its rows take it.

    ``arrival``  what the decoder makes of their tokens so far, in its last column.
    ``target``   int64 [going on] the tokens that follow, on the decoder's device.
    ``work``     of decode steps up to here: without what prompt positions before the last cost.
    """

    at: int
    rows: Ints
    arrival: Arrival
    target: Tensor
    work: Work


def alike(sequences: Sequence[TokenSequence], rows: int = ROWS) -> Iterator[list[int]]:
    """Indices of all ``sequences``, at most ``rows`` at a time, those of like length together.

    Rows that start together share their masks; rows that end together are together to the end.
    """
    order = iter(sorted(range(len(sequences)), key=lambda i: (sequences[i].adaptive_from, len(sequences[i].tokens))))
    while chosen := list(islice(order, rows)):
        yield chosen


@torch.inference_mode()
def taught(decoder: WalkedDecoder, batch: Sequence[TokenSequence]) -> Iterator[Lesson]:
    """The steps of feeding ``batch``: each has a decided position, and at most ``decoder.max_rows`` are fed together.

    Raises:
        BadArgument: what the decoder refuses of these texts.
        NotFinite: logits hold NaN or +inf.
    """
    prompts = [Prompt(text.tokens[: text.adaptive_from + 1], text.source) for text in batch]
    following, lengths = padded([TokenSequence(text.tokens[text.adaptive_from + 1 :]) for text in batch])
    targets = torch.from_numpy(following).to(decoder.stepper.device)
    room = max(len(text.tokens) for text in batch) - max(len(prompt.tokens) for prompt in prompts)
    session, arrival = decoder.begin(prompts, room)
    before = decoder.prompt_work(prompts)
    rows = np.arange(len(batch))
    for at in count():
        target = targets[torch.from_numpy(rows).to(targets.device), at]
        yield Lesson(at, rows, arrival, target, session.work - before)
        going = at + 1 < lengths[rows]
        if not going.any():
            break
        if not going.all():
            session.drop(np.flatnonzero(~going))
            rows, target = rows[going], target[torch.from_numpy(going).to(target.device)]
        session.commit(session.length)
        arrival = session.advance(target[:, None], None)
    session.close()
