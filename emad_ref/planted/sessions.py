"""Sessions that share, keep, lose or give away what is theirs: commit, rollback, drop, buffers, memory, arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.walked import WalkedSession
from emad_ref.models.cache import LayerCache
from emad_ref.planted.base import PlantedDecoder, PlantedSession, made, with_session
from emad_ref.planted.entry import Planted
from emad_ref.planted.keys import LOGITS, ROLLBACK
from emad_ref.protocol import Prompt, Step
from emad_ref.record import Floats, Ints

SESSIONS = "invariants/test_depth.py::test_sessions_side_by_side_keep_to_themselves"
MEMORY = "invariants/test_memory.py::test_what_is_closed_or_rolled_back_gives_its_memory_back"
MACHINE = "invariants/test_session_machine.py::test_session_survives_any_order_of_operations"


@torch.inference_mode()
def blank(layers: Sequence[LayerCache], row: int) -> None:
    """Zeros in the place of what ``layers`` hold of ``row``."""
    for layer in layers:
        if row in layer.rows and layer.length[layer.rows == row].any():
            for entries in layer.entries(row):
                entries.zero_()


class FreesTooMuch(PlantedSession):
    """Commit frees the layer of the cap itself."""

    def commit(self, length: Ints) -> None:
        super().commit(length)
        for row, cap in enumerate(self.cap.tolist()):
            blank(self._store.cache.layers[cap - 1 :], row)


class FreesByTheCapOfNow(PlantedSession):
    """Commit of part of a row frees what the cap of now, not that of then, leaves unread."""

    def commit(self, length: Ints) -> None:
        super().commit(length)
        for row, cap in enumerate(self.cap.tolist()):
            blank(self._store.cache.layers[cap:], row)


class DropsFromTheEnd(PlantedSession):
    """Rows are counted from the end."""

    def drop(self, rows: Ints) -> None:
        super().drop(np.array([len(self._trail) - 1 - int(row) for row in np.atleast_1d(rows)]))


class ShiftingIndices(PlantedSession):
    """Rows are dropped one after the other, by indices that were those of all."""

    def drop(self, rows: Ints) -> None:
        for row in np.atleast_1d(rows).tolist():
            super().drop(np.array([min(row, len(self._trail) - 1)]))


class Pooled(LayerCache):
    """Buffers belong to the decoder: the next session begins where the last one still is."""

    def __init__(self, number: int, rows: int, capacity: int, pool: dict[int, tuple[Tensor, Tensor]]):
        super().__init__(number, rows, capacity)
        self.pool = pool

    def _make_room(self, like: Tensor, slots: int) -> None:
        held, rows = self.pool.get(self._number), len(self._rows)
        if self._keys is None and held and held[0].shape[0] >= rows and held[0].shape[2] >= slots:
            self._keys, self._values = held[0][:rows], held[1][:rows]
            return
        super()._make_room(like, slots)
        assert self._keys is not None
        assert self._values is not None
        self.pool[self._number] = self._keys, self._values


class SharedBuffers(PlantedSession):
    def keeper(self, number: int, rows: int, capacity: int) -> LayerCache:
        return Pooled(number, rows, capacity, vars(self._walker).setdefault("pool", {}))


class KeepsForEver(PlantedDecoder):
    """What sessions held is kept after they are closed."""

    def prepare(self) -> None:
        self.kept: list[Any] = []

    def _open(self, prompts: Sequence[Prompt], capacity: int) -> WalkedSession:
        session = super()._open(prompts, capacity)
        self.kept.append(session._store)
        return session


class KeepsWhatIsRolledBack(PlantedSession):
    """In case it were asked for once more."""

    def rollback(self, length: Ints) -> None:
        kept_beside: list[Tensor] = self.__dict__.setdefault("kept_beside", [])
        for row, kept in enumerate(length.tolist()):
            for layer in self._store.cache.layers:
                if row in layer.rows:
                    kept_beside.extend(entries[:, kept:].clone() for entries in layer.entries(row))
        super().rollback(length)


class ReusedLogits(PlantedSession):
    """Each step's logits are written where the last ones were."""

    buffer: Floats | None = None

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        if self.buffer is None or self.buffer.shape != step.logits.shape:
            self.buffer = step.logits
        self.buffer[...] = step.logits
        return replace(step, logits=self.buffer)


class LiveLength(PlantedSession):
    """``length`` is the session's own array."""

    @property
    def length(self) -> Ints:
        now = np.array([len(trail) for trail in self._trail], dtype=np.int64)
        live: Ints = self.__dict__.setdefault("live", now)
        if len(live) != len(now):
            live = self.__dict__["live"] = now
        live[...] = now
        return live


class ForgetsOneToken(PlantedSession):
    """Rollback goes one token too far, where it can."""

    def rollback(self, length: Ints) -> None:
        super().rollback(np.maximum(length - 1, np.maximum(self._committed, 1)))


class LastIgnored(PlantedSession):
    """All logits are shown, however few are wanted."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        return super().feed(tokens, depth)


PLANTED = (
    Planted("commit-frees-too-much", "commit", "commit frees the layer of the cap itself", with_session(FreesTooMuch),
            ROLLBACK, LOGITS),
    Planted("commit-of-a-part", "commit", "commit of part of a row frees by the cap of now",
            with_session(FreesByTheCapOfNow), SESSIONS, r"after a rollback to what was committed"),
    Planted("rollback-too-far", "commit", "rollback goes one token too far", with_session(ForgetsOneToken), ROLLBACK,
            r"after rollback: length"),
    Planted("drop-from-the-end", "drop", "the rows dropped are counted from the end", with_session(DropsFromTheEnd),
            SESSIONS, r"after drop: length|were dropped at once"),
    Planted("drop-shifting-indices", "drop", "several rows are dropped by indices that shift",
            with_session(ShiftingIndices), SESSIONS, r"after drop: length|were dropped at once"),
    Planted("sessions-share-buffers", "sessions", "sessions of one decoder share their buffers",
            with_session(SharedBuffers), SESSIONS, r"row \d, position \d+"),
    Planted("memory-of-closed-sessions", "memory", "what sessions held is kept after they are closed",
            made(KeepsForEver), MEMORY, r"memory grew by \d+ MB over \d+ sessions"),
    Planted("memory-of-rollbacks", "memory", "what is rolled back is kept", with_session(KeepsWhatIsRolledBack), MEMORY,
            r"memory grew by \d+ MB in one session"),
    Planted("arrays-reused", "arrays", "each step's logits are written over the last ones", with_session(ReusedLogits),
            SESSIONS, r"step\.logits of call \d+ has changed"),
    Planted("arrays-live", "arrays", "length is the session's own array", with_session(LiveLength), SESSIONS,
            r"session\.length .* has changed"),
    Planted("last-ignored", "arrays", "all logits are shown, however few are wanted", with_session(LastIgnored),
            MACHINE, r"logits of shape"),
)  # fmt: skip
