"""One lap: every part of a decoding step of one row timed once, in random order, each where a real pass has it.

    pass of n      token (frame and embedding) · blocks 1…L over n tokens / L · head over n tokens
    one far away   the same for one token that attends to more keys
    beside one     lens · gate with its norm · pruned heads · K/V fills of all layers / L · translators / L
    in a row       blocks 1…e for one token after another, a draft's readout in between
    a loop         the decoder with probes of both kinds and without, over a stepper whose passes take no time
    whole          the decoder itself, at full depth

Weights of a large model come from memory in every pass, since the pass before it drove them out; the shallow ones in a
row may stay. A small one keeps more in caches from pass to pass than it does when parts take turns: its passes run
several times in a row, and the first is not counted; and its loop, which would find more in caches if there were no
passes, runs with them. Knows no medians over laps: ``costing`` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.models.cache import Cache
from emad_ref.models.stepper import Frame, Stepper
from emad_ref.point import Estimator, OperatingPoint, full_depth
from emad_ref.protocol import Prompt
from emad_ref.readout.estimate import Reader, reader_of
from emad_ref.screening.hollow import hollow


class Kind(StrEnum):
    """What is timed in a lap; ``SIZED`` ones at several sizes."""

    TOKEN, BLOCK, HEAD = "token", "block", "head"  # of a pass of so many tokens
    FAR_TOKEN, FAR_BLOCK, FAR_HEAD = "far token", "far", "far head"  # of one token with more keys
    LENS, GATE, FILL, TRANSLATOR = "lens", "gate", "fill", "translator"
    PRUNED = "pruned"  # a head over so many rows
    AGAIN = "again"  # so many blocks, one token after another
    LOOP, PROBING, GATING, WHOLE = "loop", "probing", "gating", "whole"  # of a decoder


SIZED = (Kind.TOKEN, Kind.BLOCK, Kind.HEAD, Kind.PRUNED, Kind.AGAIN)


class Part(NamedTuple):
    """One thing that a lap times: ``size`` is tokens of a pass, rows of a head or layers; 1 where there is but one."""

    kind: Kind
    size: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.kind in SIZED else str(self.kind)


REPEATS = 4  # shallow passes in a row, the first of which is not counted
LOOPED, WHOLE = 16, 3  # tokens that a decoder decodes without passes, and with them
MOST_PROBES = 3
OPENING = Prompt(np.zeros(1, dtype=np.int64))


@dataclass(frozen=True)
class Course:
    """What is timed in every lap; arguments as ``costing.measure_costs`` has them, checked there.

    ``turns``: times that each pass runs in a row, the first of several not counted.
    """

    stepper: Stepper
    lengths: tuple[int, ...]
    draft_layers: tuple[int, ...]
    heads: tuple[int, ...]
    lens: Callable[[Tensor], Tensor]
    translator: Callable[[Tensor], Tensor] | None
    keys: tuple[int, int]
    clock: Callable[[], float]
    turns: int = 1

    @torch.inference_mode()
    def lap(self, rng: np.random.Generator) -> dict[Part, float]:
        """Part → seconds."""
        near, far = self.keys
        arms: list[Callable[[dict[Part, float]], None]] = [
            *(partial(self._pass, n, near) for n in self.lengths),
            partial(self._pass, 1, far),
            *(partial(self._in_a_row, layer) for layer in self.draft_layers),
            *(partial(self._loop, kind, decoder) for kind, decoder in self._decoders.items()),
        ]
        parts: dict[Part, float] = {}
        for chosen in rng.permutation(len(arms)).tolist():
            arms[chosen](parts)
        return parts

    # ------------------------------------------------------------ arms

    def _pass(self, n: int, keys: int, parts: dict[Part, float]) -> None:
        """``n`` tokens through all blocks and the head; beside a single one whatever else may be run for it."""
        stepper, layers, far = self.stepper, self.stepper.layers, keys == self.keys[1]
        turns: list[dict[Part, float]] = []
        for _ in range(self.turns):
            turns.append({})
            with self._timed(turns[-1], Part(Kind.FAR_TOKEN if far else Kind.TOKEN, n)):
                cache, frame, hidden = self._start(n, keys)
            with self._timed(turns[-1], Part(Kind.FAR_BLOCK if far else Kind.BLOCK, n), layers):
                hidden = stepper.run(hidden, 0, layers, frame, cache)
            with self._timed(turns[-1], Part(Kind.FAR_HEAD if far else Kind.HEAD, n)):
                logits = stepper.logits(hidden)
            logits.argmax(dim=-1).tolist()
        parts |= _steady(turns)
        if n == 1 and not far:
            self._beside(hidden, cache, frame, parts)

    def _beside(self, hidden: Tensor, cache: Cache, frame: Frame, parts: dict[Part, float]) -> None:
        stepper, layers = self.stepper, self.stepper.layers
        with self._timed(parts, Part(Kind.LENS)):
            read = self.lens(hidden)
        with self._timed(parts, Part(Kind.GATE)):
            self._gate.read(hidden[:, -1], 0).entropy_nats.item()
        for rows, weights in self._pruned.items():
            with self._timed(parts, Part(Kind.PRUNED, rows)):
                F.linear(stepper.normed(read), weights)
        cache.truncate(np.array(frame.starts))
        with self._timed(parts, Part(Kind.FILL), layers):
            for layer in range(1, layers + 1):
                stepper.fill(hidden, layer, frame, cache)
        if self.translator is not None:
            with self._timed(parts, Part(Kind.TRANSLATOR)):
                self.translator(hidden)

    def _in_a_row(self, last: int, parts: dict[Part, float]) -> None:
        """Shallow passes as drafting has them: the next begins where the draft's readout ended."""
        turns: list[dict[Part, float]] = []
        near = self.keys[0]
        cache, frame, hidden = self._start(1, near)
        for turn in range(REPEATS):
            turns.append({})
            with self._timed(turns[-1], Part(Kind.AGAIN, last), last):
                hidden = self.stepper.run(hidden, 0, last, frame, cache)
            if self._pruned:
                F.linear(self.stepper.normed(self.lens(hidden)), self._pruned[min(self._pruned)])
            frame = self.stepper.frame(np.array([[near + turn + 1]]), cache)
            hidden = self.stepper.embed(self._zeros[:, :1], frame)
        parts |= _steady(turns)

    def _loop(self, kind: Kind, decoder: WalkedDecoder, parts: dict[Part, float]) -> None:
        tokens = WHOLE if kind is Kind.WHOLE and not self.brief else LOOPED
        with self._timed(parts, Part(kind), tokens):
            decoder.generate([OPENING], tokens, frozenset())

    # ------------------------------------------------------------ what arms need

    def _start(self, n: int, keys: int) -> tuple[Cache, Frame, Tensor]:
        """The cache that holds ``keys`` tokens, the frame of ``n`` more, and their embeddings."""
        cache = self._caches[keys]
        cache.truncate(np.array([keys]))
        frame = self.stepper.frame(keys + np.arange(n)[None], cache)
        return cache, frame, self.stepper.embed(self._zeros[:, :n], frame)

    @contextmanager
    def _timed(self, parts: dict[Part, float], part: Part, times: int = 1) -> Iterator[None]:
        self._wait()
        start = self.clock()
        yield
        self._wait()
        parts[part] = (self.clock() - start) / times

    def _wait(self) -> None:
        for device in {self.stepper.device, *self.stepper.places}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    @cached_property
    def _zeros(self) -> Tensor:
        return torch.zeros(1, max(self.lengths), dtype=torch.int64, device=self.stepper.device)

    @cached_property
    def _caches(self) -> dict[int, Cache]:
        return {keys: self._filled(keys) for keys in self.keys}

    def _filled(self, keys: int) -> Cache:
        """K/V of one row with ``keys`` entries in every layer: copies of the first, whose values do not matter."""
        stepper = self.stepper
        cache = stepper.new_cache(1, keys + max(*self.lengths, REPEATS))
        frame = stepper.frame(np.zeros((1, 1), dtype=np.int64), cache)
        stepper.run(stepper.embed(self._zeros[:, :1], frame), 0, stepper.layers, frame, cache)
        if keys > 1:
            rest = stepper.frame(np.arange(1, keys)[None], cache)
            for layer in cache.layers:
                first, other = (held.expand(-1, keys - 1, -1)[None] for held in layer.entries(0))
                layer.write(first, other, rest)
        return cache

    @cached_property
    def _pruned(self) -> dict[int, Tensor]:
        """Rows read → those rows of the head, spread over the vocabulary."""
        weights, vocabulary = self.stepper.unembedding.detach(), self.stepper.vocabulary
        at = {rows: np.linspace(0, vocabulary - 1, rows).astype(np.int64) for rows in self.heads}
        return {rows: weights[torch.from_numpy(ids).to(weights.device)] for rows, ids in at.items()}

    @cached_property
    def _gate(self) -> Reader:
        return reader_of(self.stepper, idle_gate(self.stepper, 1), (1,))

    @cached_property
    def _decoders(self) -> dict[Kind, WalkedDecoder]:
        """Our decoder whole; and at full depth with probes that never fire, of both kinds and none, of a model that is
        not brief over a stepper whose passes take no time."""
        layers, stepper = self.stepper.layers, self.stepper if self.brief else hollow(self.stepper)
        full = full_depth(layers)
        decoders = {Kind.WHOLE: WalkedDecoder(self.stepper, full), Kind.LOOP: WalkedDecoder(stepper, full)}
        gate = idle_gate(self.stepper, len(self.probes))
        for kind, estimator in ((Kind.PROBING, Estimator()), (Kind.GATING, gate)):
            decoders[kind] = WalkedDecoder(stepper, never_left(kind, layers, self.probes, estimator))
        return decoders

    @property
    def brief(self) -> bool:
        """Whether passes are so short that the loop around them, too, has to be timed with them."""
        return self.turns > 1

    @property
    def probes(self) -> tuple[int, ...]:
        """Layers after which the decoders without passes read."""
        return tuple(range(1, self.stepper.layers))[:MOST_PROBES]


def idle_gate(stepper: Stepper, probes: int) -> Estimator:
    """A linear gate at so many probes, which costs what one does and says nothing."""
    return Estimator("linear", weights=((0.0,) * (stepper.unembedding.shape[1] + 1),) * probes)


def never_left(name: str, layers: int, probes: tuple[int, ...], estimator: Estimator) -> OperatingPoint:
    """Full depth, ``estimator`` asked after each of ``probes``, which never fires."""
    never = ((-math.inf,) * len(probes),)
    return OperatingPoint(name, "never", layers, layers, probes, never, estimator=estimator)


def _steady(turns: list[dict[Part, float]]) -> dict[Part, float]:
    """Mean seconds of each part over ``turns`` but the first, which found what others left in the caches."""
    counted = turns[1:] or turns
    return {name: float(np.mean([turn[name] for turn in counted])) for name in counted[0]}
