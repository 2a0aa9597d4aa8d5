"""Our decoder with places where a defect can be put in: its session, its K/V, its stepper, its rule, its draws.

It walks the copy of the model that decoders are lent, so the judge takes it for anybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emad_ref.decoding.walked import WalkedDecoder, WalkedSession
from emad_ref.models.cache import LayerCache, Writing
from emad_ref.models.stepper import Stepper
from emad_ref.planted.entry import Make
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt, Request


class PlantedSession(WalkedSession):
    """``keeper``: what keeps K/V of layer ``number``, from 1."""

    def __init__(self, walker: Any, prompts: Sequence[Prompt], capacity: int):
        super().__init__(walker, prompts, capacity)
        cache = self._store.cache
        cache.layers[:] = [self.keeper(layer + 1, cache.rows, capacity) for layer in range(len(cache.layers))]

    def keeper(self, number: int, rows: int, capacity: int) -> LayerCache:
        return LayerCache(number, rows, capacity)


class Careless(LayerCache):
    """Runs over whatever it holds: a decoder that does not notice missing entries."""

    def require(self, frame: Writing) -> None:
        """Nothing is required."""


class PlantedDecoder(WalkedDecoder):
    """``walks``: what walks the model; ``prepare``: after everything is made."""

    session = PlantedSession

    def __init__(
        self, stepper: Stepper, point: OperatingPoint, *, seed: int = 0, max_rows: int = 1, temperature: float = 0.0
    ):
        super().__init__(self.walks(stepper), point, seed=seed, max_rows=max_rows, temperature=temperature)
        self.prepare()

    def walks(self, stepper: Stepper) -> Stepper:
        return stepper

    def prepare(self) -> None:
        """Nothing by default."""


def made(kind: type[PlantedDecoder]) -> Make:
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


def with_session(session: type[PlantedSession]) -> Make:
    """A decoder that opens such sessions."""
    return made(type(session.__name__, (PlantedDecoder,), {"session": session}))


def keeping(keeper: type[LayerCache]) -> Make:
    """A decoder all of whose layers keep K/V in such a way."""

    def keep(self: PlantedSession, number: int, rows: int, capacity: int) -> LayerCache:
        return keeper(number, rows, capacity)

    return with_session(type(keeper.__name__, (PlantedSession,), {"keeper": keep}))
