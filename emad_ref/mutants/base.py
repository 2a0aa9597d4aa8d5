"""Our decoder with places where a defect can be put in: its session, its K/V, its stepper, its rule, its draws.

It walks the copy of the model that decoders are lent, so the judge takes it for anybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emad_ref.decoding.reference import ReferenceSession, WalkedDecoder
from emad_ref.models.kv_cache import CacheWrite, LayerKVCache
from emad_ref.models.stepper import Stepper
from emad_ref.mutants.mutant import MutantFactory
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Request


class MutantSession(ReferenceSession):
    """``keeper``: what keeps K/V of layer ``number``, from 1."""

    def __init__(self, walker: Any, prompts: Sequence[Prompt], capacity: int):
        super().__init__(walker, prompts, capacity)
        cache = self._store.cache
        cache.layers[:] = [self.keeper(layer + 1, cache.rows, capacity) for layer in range(len(cache.layers))]

    def keeper(self, number: int, rows: int, capacity: int) -> LayerKVCache:
        return LayerKVCache(number, rows, capacity)


class UncheckedCache(LayerKVCache):
    """Runs over whatever it holds: a decoder that does not notice missing entries."""

    def require(self, frame: CacheWrite) -> None:
        """Nothing is required."""


class MutantDecoder(WalkedDecoder):
    """``walks``: what walks the model; ``prepare``: after everything is made."""

    session = MutantSession

    def __init__(
        self, stepper: Stepper, point: OperatingPoint, *, seed: int = 0, max_rows: int = 1, temperature: float = 0.0
    ):
        super().__init__(self.walks(stepper), point, seed=seed, max_rows=max_rows, temperature=temperature)
        self.prepare()

    def walks(self, stepper: Stepper) -> Stepper:
        return stepper

    def prepare(self) -> None:
        """Nothing by default."""


def decoder_factory(kind: type[MutantDecoder]) -> MutantFactory:
    """``kind`` for a request."""

    def make(request: Request) -> Decoder:
        return kind(
            request.model.load().stepper,
            request.point,
            seed=request.seed,
            max_rows=request.max_rows,
            temperature=request.temperature,
        )

    return make


def session_factory(session: type[MutantSession]) -> MutantFactory:
    """A decoder that opens such sessions."""
    return decoder_factory(type(session.__name__, (MutantDecoder,), {"session": session}))


def cache_factory(keeper: type[LayerKVCache]) -> MutantFactory:
    """A decoder all of whose layers keep K/V in such a way."""

    def keep(self: MutantSession, number: int, rows: int, capacity: int) -> LayerKVCache:
        return keeper(number, rows, capacity)

    return session_factory(type(keeper.__name__, (MutantSession,), {"keeper": keep}))
