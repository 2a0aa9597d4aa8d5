"""Teacher forcing: the depth and the loss of every token of a given text.

``teacher_force`` feeds any decoder, token by token, through the protocol. ``teacher_force_batch`` feeds the reference
decoder in batches. Both serve points that replay cannot decide, such as state copying.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from emad_ref.calibration.windows import TokenSequence, pad_right
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.step import StepOutput
from emad_ref.protocol import Decoder, Prompt, Step
from emad_ref.record import Floats, Ints, Work


@dataclass(frozen=True)
class TeacherForcedText:
    """One fed text. ``depth`` int64 and ``nll_nats`` float64 [decided positions]; ``work`` None if uncounted."""

    depth: Ints
    nll_nats: Floats
    work: Work | None


def teacher_force(decoder: Decoder, sequence: TokenSequence) -> TeacherForcedText:
    """Feed ``sequence`` token by token from its first decided position on; the last token is only predicted."""
    first, tokens = sequence.adaptive_from + 1, sequence.tokens
    session, step = decoder.start([Prompt(tokens[:first])])
    steps = [step, *(session.feed(token[None, None]) for token in tokens[first:-1])]
    work = session.work
    session.close()
    depth = np.array([int(each.depth[0, 0]) for each in steps])
    nll_nats = np.array([_nll_nats(each, int(at)) for each, at in zip(steps, tokens[first:], strict=True)])
    return TeacherForcedText(depth, nll_nats, work)


def _nll_nats(step: Step, target: int) -> float:
    z = step.logits[0, 0] - step.logits[0, 0].max()
    return float(np.log(np.exp(z).sum()) - z[target])


def teacher_forced_sums(decoder: Decoder, sequences: Sequence[TokenSequence]) -> tuple[Floats, Ints]:
    """(NLL sums [sequences], decided tokens [sequences])."""
    forced = [teacher_force(decoder, sequence) for sequence in sequences]
    return np.array([each.nll_nats.sum() for each in forced]), np.array([len(each.depth) for each in forced])


BATCH_ROWS = 32  # rows per batch: a step of so many small rows costs twice a step of one


@dataclass(frozen=True)
class TeacherForcedStep:
    """Step ``at`` (from 0) of a batch. ``rows`` int64 [continuing]: its remaining rows.

    ``output``   of their latest tokens, in the last column.
    ``target``   int64 [continuing] the next tokens, on the decoder's device.
    ``work``     of decode steps so far, without that of prompt positions before the last.
    """

    at: int
    rows: Ints
    output: StepOutput
    target: Tensor
    work: Work


def batches_by_length(sequences: Sequence[TokenSequence], rows: int = BATCH_ROWS) -> Iterator[list[int]]:
    """Indices of all ``sequences``, at most ``rows`` at a time, similar lengths together.

    Rows that start together share their masks; rows that end together stay together to the end.
    """
    order = iter(sorted(range(len(sequences)), key=lambda i: (sequences[i].adaptive_from, len(sequences[i].tokens))))
    while chosen := list(islice(order, rows)):
        yield chosen


@torch.inference_mode()
def teacher_force_batch(decoder: WalkedDecoder, batch: Sequence[TokenSequence]) -> Iterator[TeacherForcedStep]:
    """The steps of feeding ``batch``, at most ``decoder.max_rows`` sequences.

    Each sequence has a decided position.

    Raises:
        BadArgument: as the decoder raises for these texts.
        NotFinite: logits hold NaN or +inf.
    """
    prompts = [Prompt(text.tokens[: text.adaptive_from + 1], text.source) for text in batch]
    following, lengths = pad_right([TokenSequence(text.tokens[text.adaptive_from + 1 :]) for text in batch])
    targets = torch.from_numpy(following).to(decoder.stepper.device)
    room = max(len(text.tokens) for text in batch) - max(len(prompt.tokens) for prompt in prompts)
    session, output = decoder.begin(prompts, room)
    before = decoder.prompt_work(prompts)
    rows = np.arange(len(batch))
    for at in count():
        target = targets[torch.from_numpy(rows).to(targets.device), at]
        yield TeacherForcedStep(at, rows, output, target, session.work - before)
        going = at + 1 < lengths[rows]
        if not going.any():
            break
        if not going.all():
            session.drop(np.flatnonzero(~going))
            rows, target = rows[going], target[torch.from_numpy(going).to(target.device)]
        session.commit(session.length)
        output = session.advance(target[:, None], None)
    session.close()
