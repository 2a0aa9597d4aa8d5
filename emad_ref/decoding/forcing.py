"""What a decoder makes of a given text: the depth and the loss of every token, fed one by one.

Needed where no replay can speak: under state copying, whose copies change later states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.calibration.trace import TokenSequence
from emad_ref.protocol import Decoder, Prompt, Step
from emad_ref.record import Floats, Ints, Work


@dataclass(frozen=True)
class ForcedText:
    """One text, fed. ``depth`` int64 and ``nll_nats`` float64 [decided positions]; ``work`` None if uncounted."""

    depth: Ints
    nll_nats: Floats
    work: Work | None


def teacher_forced(decoder: Decoder, sequence: TokenSequence) -> ForcedText:
    """Feed ``sequence`` token by token from its first decided position on; the last token is only predicted."""
    first, tokens = sequence.adaptive_from + 1, sequence.tokens
    session, step = decoder.start([Prompt(tokens[:first])])
    steps = [step, *(session.feed(token[None, None]) for token in tokens[first:-1])]
    work = session.work
    session.close()
    depth = np.array([int(each.depth[0, 0]) for each in steps])
    nll_nats = np.array([_nll(each, int(at)) for each, at in zip(steps, tokens[first:], strict=True)])
    return ForcedText(depth, nll_nats, work)


def _nll(step: Step, target: int) -> float:
    z = step.logits[0, 0] - step.logits[0, 0].max()
    return float(np.log(np.exp(z).sum()) - z[target])


def over(decoder: Decoder, sequences: Sequence[TokenSequence]) -> tuple[Floats, Ints]:
    """(NLL sums [sequences], decided tokens [sequences])."""
    forced = [teacher_forced(decoder, sequence) for sequence in sequences]
    return np.array([each.nll_nats.sum() for each in forced]), np.array([len(each.depth) for each in forced])
