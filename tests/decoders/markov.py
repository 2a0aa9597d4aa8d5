"""A decoder whose next token depends on the last one alone: its law is a table, and thousands of rows cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emad_ref.point import full_depth
from emad_ref.protocol import Capabilities, Prompt, Step
from emad_ref.record import Floats, Ints, Record, Work

POINT = full_depth(1)


class MarkovSession:
    def __init__(self, decoder: MarkovDecoder, prompts: Sequence[Prompt]):
        self.decoder, self.history = decoder, [list(map(int, prompt.tokens)) for prompt in prompts]
        self.fed = sum(map(len, self.history))
        self.closed = False

    @property
    def length(self) -> Ints:
        return np.array([len(tokens) for tokens in self.history])

    @property
    def cap(self) -> Ints:
        return np.ones(len(self.history), dtype=np.int64)

    @property
    def work(self) -> Work | None:
        return replace(Work.none(1), tokens=np.array([self.fed])) if self.decoder.capabilities.counted else None

    def feed(self, tokens: Ints, depth: Ints | None = None) -> Step:
        assert tokens.shape[1] <= self.decoder.capabilities.max_feed
        assert depth is not None, "a point without thresholds is fed at its ceiling, in chunks"
        assert (depth == 1).all()
        for history, fed in zip(self.history, tokens.tolist(), strict=True):
            history.extend(fed)
        self.fed += tokens.size
        self.decoder.widths.append(tokens.shape[1])
        return self.decoder.read(tokens)

    def rollback(self, length: Ints) -> None:
        for tokens, held in zip(self.history, length, strict=True):
            assert 1 <= held <= len(tokens)
            del tokens[held:]

    def commit(self, length: Ints) -> None:
        """Nothing is held that could be freed."""

    def drop(self, rows: Ints) -> None:
        for row in sorted(map(int, rows), reverse=True):
            del self.history[row]

    def close(self) -> None:
        self.closed = True


class MarkovDecoder:
    """``logits`` [V, V]: row i holds the logits after token i. ``sessions``, ``widths``: what was opened and fed."""

    def __init__(self, logits: Floats, *, max_feed: int = 8, counted: bool = True):
        self.logits, self.capabilities = logits, Capabilities(max_feed=max_feed, counted=counted)
        self.sessions: list[MarkovSession] = []
        self.widths: list[int] = []

    def read(self, tokens: Ints) -> Step:
        return Step(self.logits[tokens], np.ones(tokens.shape, dtype=np.int64), np.empty((*tokens.shape, 0)))

    def start(self, prompts: Sequence[Prompt]) -> tuple[MarkovSession, Step]:
        self.sessions.append(MarkovSession(self, prompts))
        return self.sessions[-1], self.read(np.array([[int(prompt.tokens[-1])] for prompt in prompts]))

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        raise AssertionError("decoders that pair models use sessions only")

    def synchronize(self) -> None: ...

    def close(self) -> None: ...
