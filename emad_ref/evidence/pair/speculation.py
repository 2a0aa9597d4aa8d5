"""Speculative decoding seen as a decoder of its verifier's point, which is what it promises to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from emad_ref.decoding.acceptance import Speculated
from emad_ref.decoding.pair import Partner
from emad_ref.decoding.selfdraft import self_speculate
from emad_ref.decoding.speculative import VERIFIER, speculate
from emad_ref.protocol import Capabilities, Prompt, Session, Step, Unsupported
from emad_ref.record import DRAFT, Bools, Record, Tokens

DRAFTED = 4  # k of speculative decoding where none is named


@dataclass(frozen=True)
class Speculation:
    """``decode``: what emits; ``promised``: which rows of its record are the verifier's, for drafts are no part of the
    promise. Its ledger is not the verifier's alone, so it does not claim to count.
    """

    verifier: Partner
    decode: Callable[[Sequence[Prompt], int, frozenset[int]], Speculated]
    promised: Callable[[Tokens], Bools]

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.verifier.decoder.capabilities, counted=False, deepens=False)

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        raise Unsupported("speculative decoding has no session of its own: judge what it generates")

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        record = self.decode(prompts, max_new, stop).record
        mine, table = self.promised(record.tokens), record.tokens
        columns = {field.name: getattr(table, field.name)[mine] for field in fields(Tokens)}
        tokens = Tokens(**columns | {"model": np.zeros(int(mine.sum()), dtype=np.int64)})
        signal = record.signal[mine][:, : len(self.verifier.point.probes)]
        return Record(tokens, signal, record.emitted, record.stop)

    def synchronize(self) -> None:
        self.verifier.decoder.synchronize()

    def close(self) -> None:
        """The partners belong to the caller."""


def speculation(draft: Partner, verifier: Partner, k: int = DRAFTED) -> Speculation:
    """One model drafts, another verifies."""
    return Speculation(
        verifier,
        lambda prompts, new, stop: speculate(draft, verifier, prompts, new, k=k, stop=stop),
        lambda tokens: tokens.model == VERIFIER,
    )


def self_speculation(model: Partner, exit_layer: int, k: int = DRAFTED) -> Speculation:
    """One model drafts after ``exit_layer`` and verifies at its ceiling."""
    return Speculation(
        model,
        lambda prompts, new, stop: self_speculate(model, exit_layer, prompts, new, k=k, stop=stop),
        lambda tokens: tokens.phase != DRAFT,
    )
