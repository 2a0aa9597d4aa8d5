"""Two decoders that write one text: the common part of switching and speculation.

``Partner`` is a decoder with its operating point. ``TokenLoggingSession`` is a partner's session; it records
everything that it processes in a ``TokenLog``. A partner whose point lets no token exit reads a chunk in one forward,
at its ceiling; any other decides depths itself. Only the protocol is used, so any two decoders with the same token ids
can be paired (``shared_vocabulary_size``). Logits of embedding rows beyond the shared ids are dropped first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from emad_ref.errors import BadArgument
from emad_ref.point import OperatingPoint
from emad_ref.probes.signal_values import entropy_nats
from emad_ref.protocol import Decoder, Prompt, Step
from emad_ref.record import Floats, Ints, TokenLog, Work
from emad_ref.schedule.schedules import get_point_schedule
from emad_ref.signals import require_finite


@dataclass(frozen=True)
class Partner:
    """A decoder and its operating point, which a ``Decoder`` does not report.

    Attributes
    ----------
    decoder : Decoder
        Any decoder of the protocol.
    point : OperatingPoint
        The point that it was opened at.
    vocabulary : int or None
        Ids 0 … vocabulary − 1 are shared by all partners of a text; None: all of the decoder's.
    """

    decoder: Decoder
    point: OperatingPoint
    vocabulary: int | None = None

    @property
    def has_adaptive_depth(self) -> bool:
        """Whether the point's rule or schedule decides depth; else every token runs to the ceiling."""
        return self.point.has_adaptive_depth or get_point_schedule(self.point).ruleless

    def forced_feed_depth(self, shape: tuple[int, ...]) -> Ints | None:
        """Depths to force on a feed of this shape: the ceiling (one forward a chunk), or None if undecided."""
        return None if self.has_adaptive_depth else np.full(shape, self.point.ceiling, dtype=np.int64)


def entropy_bits(logits: Floats) -> Floats:
    """H = −Σ p·log₂ p of softmax(logits), before any temperature: [..., V] → float64 [...]."""
    return entropy_nats(torch.from_numpy(logits)).double().numpy() / math.log(2)


class TokenLoggingSession:
    """One partner's session; ``model`` is its index in the record, ``sequences`` the numbers of its rows.

    ``logits`` [rows, V] of the prompts' last positions; ``opening_work`` of opening the session; ``signal`` [rows, n,
    probes] of the last step. ``head``, ``last``: phases of the prompts' positions before the last, and of the last.
    """

    def __init__(
        self, partner: Partner, model: int, log: TokenLog, sequences: Sequence[int], prompts: Sequence[Prompt],
        head: int, last: int,
    ):  # fmt: skip
        self.partner, self.model, self.sequences = partner, model, list(sequences)
        self._log, self._schedule, probes = log, get_point_schedule(partner.point), len(partner.point.probes)
        self.session, step = partner.decoder.start(prompts)
        self.opening_work = self.work
        self._first_decided = [len(prompt.tokens) - 1 for prompt in prompts]
        self._trail: list[
            list[int]
        ] = []  # depths of the tokens in the cache, from which the schedule admits the next one
        for row, (sequence, prompt, before) in enumerate(
            zip(self.sequences, prompts, self._first_decided, strict=True)
        ):
            at_ceiling = np.full(before + 1, partner.point.ceiling)
            depth, signal = at_ceiling.copy(), np.full((before + 1, probes), np.nan)
            depth[-1], signal[-1] = step.depth[row, -1], step.signal[row, -1]
            log.extend(sequence, model, np.asarray(prompt.tokens), depth, at_ceiling, [head] * before + [last], signal)
            self._trail.append(depth.tolist())
        self.logits = self._readable(step)[:, -1]

    @property
    def length(self) -> Ints:
        return self.session.length

    @property
    def work(self) -> Work | None:
        """Executed so far; a copy."""
        work = self.session.work
        return None if work is None else work + Work.none(work.layers)

    def feed(self, tokens: Ints, phase: Sequence[int], *, depth: int | None = None, last: int | None = None) -> Floats:
        """Process ``tokens`` [rows, n] in chunks the decoder accepts; ``phase`` [n].

        ``depth``: forced on all of them; None: the partner decides. Returns logits [rows, last, V] of the ``last``
        tokens, by default all; the head runs for no others.
        """
        n, widest, logits = tokens.shape[1], self.partner.decoder.capabilities.max_feed, []
        unread = 0 if last is None else n - last
        for at in range(0, n, widest):
            piece = tokens[:, at : at + widest]
            forced = self.partner.forced_feed_depth(piece.shape) if depth is None else np.full(piece.shape, depth)
            step = self.session.feed(piece, forced, min(piece.shape[1], max(at + piece.shape[1] - unread, 0)))
            for row, sequence in enumerate(self.sequences):
                cap, phases = self._extend(row, step.depth[row]), phase[at : at + widest]
                self._log.extend(sequence, self.model, piece[row], step.depth[row], cap, phases, step.signal[row])
            logits.append(self._readable(step))
        return np.concatenate(logits, axis=1)

    def deepen(self, length: Ints, phase: int) -> Floats:
        """Run all tokens from ``length`` [rows] on to the ceiling; returns their logits there [rows, n, V].

        The log lists each token again, in ``phase`` at its new depth, and marks its first entry as not kept.
        """
        step = self.session.deepen(length)
        for row, (sequence, first) in enumerate(zip(self.sequences, length.tolist(), strict=True)):
            del self._trail[row][first:]
            cap = self._extend(row, step.depth[row])
            self._log.relog_deepened_tokens(sequence, self.model, first, step.depth[row], cap, phase, step.signal[row])
        return self._readable(step)

    def rollback(self, length: Ints) -> None:
        self.session.rollback(length)
        for sequence, trail, row_length in zip(self.sequences, self._trail, length.tolist(), strict=True):
            self._log.truncate(sequence, self.model, row_length)
            del trail[row_length:]

    def rollback_and_commit(self, length: Ints) -> None:
        """Roll back to ``length`` [rows] and commit it."""
        self.rollback(length)
        self.session.commit(length)

    def drop(self, rows: Ints) -> None:
        self.session.drop(rows)
        remaining = np.delete(np.arange(len(self.sequences)), rows).tolist()
        self.sequences = [self.sequences[row] for row in remaining]
        self._trail = [self._trail[row] for row in remaining]
        self._first_decided = [self._first_decided[row] for row in remaining]

    def close(self) -> None:
        self.session.close()

    def _extend(self, row: int, depth: Ints) -> Ints:
        """Lengthen a row's trail by tokens of ``depth`` [n]; returns their caps [n]."""
        trail, caps = self._trail[row], []
        for each in depth.tolist():
            caps.append(self._schedule.admit(self.partner.point, trail, self._first_decided[row], len(trail)).cap)
            trail.append(each)
        return np.array(caps, dtype=np.int64)

    def _readable(self, step: Step) -> Floats:
        """Logits over the shared ids; sets ``signal`` to this step's."""
        self.signal = step.signal
        shared = step.logits[..., : self.partner.vocabulary]
        require_finite(torch.from_numpy(shared.max(axis=-1)), f"of model {self.model}")
        return shared


def require_prompts(prompts: Sequence[Prompt]) -> None:
    """Raise BadArgument without a prompt."""
    if len(prompts) == 0:
        raise BadArgument("prompts", [], "at least one prompt")


def require_equal_logit_widths(first: Floats, second: Floats) -> None:
    """Refuse logits [..., V] of different V: the two decoders have different ids."""
    if first.shape[-1] != second.shape[-1]:
        raise BadArgument(
            "vocabularies",
            (first.shape[-1], second.shape[-1]),
            "two models over the same ids",
            "shared_vocabulary_size says whether two loaded models fit, and Partner takes the ids they share",
        )


def make_work_by_model_index(small: Work | None, large: Work | None) -> dict[int, Work] | None:
    """Work as a Record holds it; None unless both models count, since half a sum would be misleading."""
    return None if small is None or large is None else {0: small, 1: large}
