"""A decoder of an encoder-decoder model that reads one fixed source wherever a prompt brings none.

Audits and invariants speak of tokens and depths; a source is one more argument of the model, held fixed as its weights
are. What they feed is then a decoder's text after that source, and the lens is asked with the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from emad_ref.protocol import Capabilities, Decoder, Prompt, Session, Step
from emad_ref.record import Ints, Record


class Sourced:
    """``decoder`` with ``source`` int64 [s] put into every prompt that has none; everything else as it is."""

    def __init__(self, decoder: Decoder, source: Ints):
        self._decoder, self._source = decoder, source

    @property
    def wrapped(self) -> Decoder:
        return self._decoder

    @property
    def capabilities(self) -> Capabilities:
        return self._decoder.capabilities

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        return self._decoder.start(self._complete(prompts))

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        return self._decoder.generate(self._complete(prompts), max_new, stop)

    def synchronize(self) -> None:
        self._decoder.synchronize()

    def close(self) -> None:
        self._decoder.close()

    def _complete(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [replace(prompt, source=self._source) if prompt.source is None else prompt for prompt in prompts]
