"""A decoder of a Markov chain: a table gives the distribution of the next token, so thousands of rows cost nothing.

With several tables it has as many layers, each with its own distribution, and supports self-speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from scipy import stats

from emad_ref.decoding.self_speculation import drafting_point
from emad_ref.point import full_depth
from emad_ref.protocol import Capabilities, Prompt, Step
from emad_ref.record import Floats, Ints, Record, Work

POINT, DRAFTING = full_depth(1), drafting_point(2)
V = 6
SUCCESSOR = np.roll(np.eye(V), 1, axis=1) * 5.0  # after i comes i + 1 (mod V), nearly always


def prompt(*tokens: int) -> Prompt:
    return Prompt(np.array(tokens))


def wrong_after(*tokens: int) -> Floats:
    """Return the successor table, except that ``tokens`` are followed by themselves."""
    table = SUCCESSOR.copy()
    table[list(tokens)] = np.eye(V)[list(tokens)] * 5.0
    return table


TEXTS, TEXT_LENGTH = 4000, 3  # number of texts that show a distribution, and their tokens


def draw_two_laws() -> tuple[Floats, Floats]:
    """Return logits [4, 4] after each token of two chains; the first's likeliest token is right about half the time."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(4, 4)) * 1.2, rng.normal(size=(4, 4)) * 1.2


def chance(texts: Ints, logits: Floats, temperature: float) -> float:
    """Return the p-value that ``texts`` [samples, n] after token 0 come from the chain of ``logits`` [V, V]."""
    samples, length = texts.shape
    p = np.exp(logits / temperature)
    p /= p.sum(axis=-1, keepdims=True)
    cells = list(product(range(len(p)), repeat=length))
    expected = np.array([np.prod(p[[0, *cell[:-1]], list(cell)]) for cell in cells])
    counts = np.bincount(texts @ len(p) ** np.arange(length)[::-1], minlength=len(cells))
    enough = expected * samples >= 5  # minimum for the chi-square approximation; rarer texts are merged into one cell
    observed, share = counts[enough], expected[enough]
    if not enough.all():
        observed, share = np.append(observed, counts[~enough].sum()), np.append(share, expected[~enough].sum())
    return float(stats.chisquare(observed, share * samples).pvalue)


class MarkovSession:
    def __init__(self, decoder: MarkovDecoder, prompts: Sequence[Prompt]):
        self.decoder, self.history = decoder, [list(map(int, prompt.tokens)) for prompt in prompts]
        self.depth = [[decoder.layers] * len(tokens) for tokens in self.history]
        if decoder.gate is not None:
            for depths in self.depth:
                depths[-1] = 1
        self.fed = sum(map(len, self.history))
        self.ran, self.read = np.full(decoder.layers, self.fed), np.zeros(decoder.layers, dtype=np.int64)
        if decoder.gate is not None:
            self.ran[1:] -= len(prompts)
        self.closed = False

    @property
    def length(self) -> Ints:
        return np.array([len(tokens) for tokens in self.history])

    @property
    def cap(self) -> Ints:
        return np.full(len(self.history), self.decoder.layers)

    @property
    def work(self) -> Work | None:
        counted = replace(Work.none(self.decoder.layers), tokens=self.ran.copy())
        counted.readout_rows[0] = self.read
        return counted if self.decoder.capabilities.counted else None

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        assert tokens.shape[1] <= self.decoder.capabilities.max_feed
        asked = depth is None
        if depth is None:
            assert self.decoder.gate is not None, "a point without thresholds is fed at its ceiling, in chunks"
            depth = np.ones_like(tokens)
        for history, depths, fed, to in zip(self.history, self.depth, tokens.tolist(), depth.tolist(), strict=True):
            history.extend(fed)
            depths.extend(to)
        self.fed += tokens.size
        self.decoder.widths.append(tokens.shape[1])
        wanted = tokens.shape[1] if last is None else last
        for layer in range(1, self.decoder.layers + 1):
            self.ran[layer - 1] += int((depth >= layer).sum())
            self.read[layer - 1] += int((depth[:, tokens.shape[1] - wanted :] == layer).sum())
        return self.decoder.shown(tokens, depth, wanted, asked)

    def deepen(self, length: Ints) -> Step:
        assert self.decoder.capabilities.deepens
        beyond = zip(self.history, self.depth, length.tolist(), strict=True)
        tokens, depth = (np.array(part) for part in zip(*((h[n:], d[n:]) for h, d, n in beyond), strict=True))
        assert (depth < self.decoder.layers).all()
        assert tokens.shape[1] > 0
        for layer in range(1, self.decoder.layers + 1):
            self.ran[layer - 1] += int((depth < layer).sum())
        self.read[-1] += tokens.size
        for depths, n in zip(self.depth, length.tolist(), strict=True):
            depths[n:] = [self.decoder.layers] * (len(depths) - n)
        return self.decoder.shown(tokens, np.full(tokens.shape, self.decoder.layers), tokens.shape[1])

    def rollback(self, length: Ints) -> None:
        for tokens, depths, held in zip(self.history, self.depth, length, strict=True):
            assert 1 <= held <= len(tokens)
            del tokens[held:], depths[held:]

    def commit(self, length: Ints) -> None:
        """Do nothing: no K/V is held."""

    def drop(self, rows: Ints) -> None:
        for row in sorted(map(int, rows), reverse=True):
            del self.history[row], self.depth[row]

    def close(self) -> None:
        self.closed = True


class MarkovDecoder:
    """``logits`` [V, V] of the last layer: row i holds the logits after token i; ``shallow``: of the layers before it.

    ``gate`` [V]: the value of a gate after layer 1 for each token; every token without a forced depth stops there.
    ``sessions``, ``widths``: the opened sessions and fed widths.
    """

    def __init__(
        self, logits: Floats, *shallow: Floats, max_feed: int = 8, counted: bool = True, deepens: bool | None = None,
        gate: Floats | None = None,
    ):  # fmt: skip
        self.gate = gate
        self.tables = [*shallow, logits]
        self.layers = len(self.tables)
        able = bool(shallow) if deepens is None else deepens
        self.capabilities = Capabilities(max_feed=max_feed, counted=counted, deepens=able)
        self.sessions: list[MarkovSession] = []
        self.widths: list[int] = []

    def shown(self, tokens: Ints, depth: Ints, last: int, asked: bool = False) -> Step:
        logits = np.array(self.tables)[depth - 1, tokens][:, tokens.shape[1] - last :]
        signal = np.full((*tokens.shape, 0 if self.gate is None else 1), np.nan)
        if asked and self.gate is not None:
            signal = self.gate[tokens][..., None]
        return Step(logits, depth, signal)

    def start(self, prompts: Sequence[Prompt]) -> tuple[MarkovSession, Step]:
        self.sessions.append(MarkovSession(self, prompts))
        last = np.array([[int(prompt.tokens[-1])] for prompt in prompts])
        stops = self.layers if self.gate is None else 1
        self.sessions[-1].read[stops - 1] += len(prompts)
        return self.sessions[-1], self.shown(last, np.full(last.shape, stops), 1, self.gate is not None)

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        raise AssertionError("decoders that pair models use sessions only")

    def synchronize(self) -> None: ...

    def close(self) -> None: ...
