"""Decoders with nothing wrong, each another one than the reference: none may be complained about."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.models.stepper import Stepper
from emad_ref.mutants.base import MutantDecoder, MutantSession, decoder_factory
from emad_ref.mutants.mutant import Mutant
from emad_ref.protocol import Prompt
from emad_ref.record import Ints, Work
from emad_ref.schedule.interface import count_blocks

ALL_SUITES = "invariants fidelity"
DECLARED_NOISE = 0.02  # logits
CHUNK = 16  # tokens


class SingleTokenDecoder(MutantDecoder):
    """One token a feed, and depth that only falls."""

    def prepare(self) -> None:
        self.capabilities = replace(self.capabilities, max_feed=1, schedules=frozenset({"monotone"}))


class NoisyDecoder(MutantDecoder):
    """Logits are off by up to ``NOISE``, and say so; the same call twice gives the same numbers."""

    def walks(self, stepper: Stepper) -> Stepper:
        def off(hidden: Tensor) -> Tensor:
            exact = stepper.logits(hidden)
            return exact + 0.9 * DECLARED_NOISE * torch.sin(1e5 * exact)  # a tenth is left for rounding proper

        changed: Any = copy.copy(stepper)
        changed.logits = off
        return changed  # type: ignore[no-any-return]  # a stepper like the one it was copied from

    def prepare(self) -> None:
        self.capabilities = replace(self.capabilities, logit_noise=DECLARED_NOISE)


def pieces(lengths: Ints) -> Iterator[tuple[Ints, int, Ints]]:
    """(rows, first position, tokens of each) of prompts of ``lengths``, ``CHUNK`` positions at once."""
    for first in range(0, int(lengths.max(initial=0)), CHUNK):
        rows = np.flatnonzero(lengths > first)
        yield rows, first, np.minimum(lengths[rows] - first, CHUNK)


class ChunkedPromptSession(MutantSession):
    """Prompts are read in pieces, each over the K/V of those before it."""

    def _run_prompts(self, heads: Any, lengths: Ints) -> Tensor:
        stepper, store, ceiling = self._stepper, self._store, self._point.ceiling
        present = np.flatnonzero(lengths > 0)
        states: Tensor | None = None
        for rows, first, held in pieces(lengths):
            tokens = np.zeros((len(rows), int(held.max())), dtype=np.int64)
            for i, (row, n) in enumerate(zip(rows.tolist(), held.tolist(), strict=True)):
                tokens[i, :n] = heads[row][first : first + n]
            positions = np.broadcast_to(first + np.arange(tokens.shape[1]), tokens.shape)
            frame = stepper.frame(positions, store.cache, rows=rows, lengths=held)
            hidden = stepper.embed(torch.from_numpy(tokens).to(stepper.device), frame)
            hidden = stepper.run(hidden, 0, ceiling, frame, store.cache)
            count_blocks(store.work, 0, ceiling, len(rows), tokens.shape[1], frame.executed)
            if states is None:
                states = hidden.new_zeros(len(present), int(lengths.max()), hidden.shape[-1])
            places = torch.from_numpy(np.searchsorted(present, rows)).to(states.device)
            states[places, first : first + tokens.shape[1]] = hidden
        for row in present.tolist():
            self._trail[row].extend([ceiling] * int(lengths[row]))
        assert states is not None, "some prompt has a position before its last"
        return states


class ChunkedPromptDecoder(MutantDecoder):
    session = ChunkedPromptSession

    def prompt_work(self, prompts: Sequence[Prompt]) -> Work:
        work, before = Work.none(self.stepper.layers), np.array([len(prompt.tokens) - 1 for prompt in prompts])
        for rows, first, held in pieces(before):
            count_blocks(work, 0, self.point.ceiling, len(rows), int(held.max()), first + int(held.max()))
        return self._with_sources(work, prompts)


PLANTED = (
    Mutant(
        "honest",
        "honest",
        "ours, over the copy of the model that decoders are lent",
        decoder_factory(MutantDecoder),
        ALL_SUITES,
    ),
    Mutant(
        "honest-by-the-token",
        "honest",
        "one token a feed, and the monotone schedule alone",
        decoder_factory(SingleTokenDecoder),
        ALL_SUITES,
    ),
    Mutant(
        "honest-in-chunks",
        "honest",
        "prompts are read in chunks of 16 tokens",
        decoder_factory(ChunkedPromptDecoder),
        ALL_SUITES,
    ),
    Mutant(
        "honest-noise",
        "honest",
        "logits are off by up to 0.02, which is declared",
        decoder_factory(NoisyDecoder),
        ALL_SUITES,
    ),
)
