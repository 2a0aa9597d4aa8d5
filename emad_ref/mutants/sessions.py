"""Sessions that share, keep, lose or give away what is theirs: commit, rollback, drop, buffers, memory, arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.reference import ReferenceSession
from emad_ref.models.kv_cache import LayerKVCache
from emad_ref.mutants.base import MutantDecoder, MutantSession, decoder_factory, session_factory
from emad_ref.mutants.keys import LOGITS, ROLLBACK
from emad_ref.mutants.mutant import Mutant
from emad_ref.protocol import Prompt, Step
from emad_ref.record import Floats, Ints

SESSIONS = "invariants/test_depth.py::test_sessions_side_by_side_keep_to_themselves"
MEMORY = "invariants/test_memory.py::test_what_is_closed_or_rolled_back_gives_its_memory_back"
MACHINE = "invariants/test_session_machine.py::test_session_survives_any_order_of_operations"


@torch.inference_mode()
def blank(layers: Sequence[LayerKVCache], row: int) -> None:
    """Zeros in the place of what ``layers`` hold of ``row``."""
    for layer in layers:
        if row in layer.rows and layer.length[layer.rows == row].any():
            for entries in layer.entries(row):
                entries.zero_()


class CapLayerFreedSession(MutantSession):
    """Commit frees the layer of the cap itself."""

    def commit(self, length: Ints) -> None:
        super().commit(length)
        for row, cap in enumerate(self.cap.tolist()):
            blank(self._store.cache.layers[cap - 1 :], row)


class FreesByTheCapOfNow(MutantSession):
    """Commit of part of a row frees what the cap of now, not that of then, leaves unread."""

    def commit(self, length: Ints) -> None:
        super().commit(length)
        for row, cap in enumerate(self.cap.tolist()):
            blank(self._store.cache.layers[cap:], row)


class DropsFromTheEnd(MutantSession):
    """Rows are counted from the end."""

    def drop(self, rows: Ints) -> None:
        super().drop(np.array([len(self._trail) - 1 - int(row) for row in np.atleast_1d(rows)]))


class ShiftingIndices(MutantSession):
    """Rows are dropped one after the other, by indices that were those of all."""

    def drop(self, rows: Ints) -> None:
        for row in np.atleast_1d(rows).tolist():
            super().drop(np.array([min(row, len(self._trail) - 1)]))


class Pooled(LayerKVCache):
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


class SharedBuffers(MutantSession):
    def keeper(self, number: int, rows: int, capacity: int) -> LayerKVCache:
        return Pooled(number, rows, capacity, vars(self._walker).setdefault("pool", {}))


class KeepsForEver(MutantDecoder):
    """What sessions held is kept after they are closed."""

    def prepare(self) -> None:
        self.kept: list[Any] = []

    def _open(self, prompts: Sequence[Prompt], capacity: int) -> ReferenceSession:
        session = super()._open(prompts, capacity)
        self.kept.append(session._store)
        return session


class KeepsWhatIsRolledBack(MutantSession):
    """In case it were asked for once more."""

    def rollback(self, length: Ints) -> None:
        kept_beside: list[Tensor] = self.__dict__.setdefault("kept_beside", [])
        for row, kept in enumerate(length.tolist()):
            for layer in self._store.cache.layers:
                if row in layer.rows:
                    kept_beside.extend(entries[:, kept:].clone() for entries in layer.entries(row))
        super().rollback(length)


class ReusedLogits(MutantSession):
    """Each step's logits are written where the last ones were."""

    buffer: Floats | None = None

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        if self.buffer is None or self.buffer.shape != step.logits.shape:
            self.buffer = step.logits
        self.buffer[...] = step.logits
        return replace(step, logits=self.buffer)


class LiveLength(MutantSession):
    """``length`` is the session's own array."""

    @property
    def length(self) -> Ints:
        now = np.array([len(trail) for trail in self._trail], dtype=np.int64)
        live: Ints = self.__dict__.setdefault("live", now)
        if len(live) != len(now):
            live = self.__dict__["live"] = now
        live[...] = now
        return live


class ForgetsOneToken(MutantSession):
    """Rollback goes one token too far, where it can."""

    def rollback(self, length: Ints) -> None:
        super().rollback(np.maximum(length - 1, np.maximum(self._committed, 1)))


class LastIgnored(MutantSession):
    """All logits are shown, however few are wanted."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        return super().feed(tokens, depth)


PLANTED = (
    Mutant(
        "commit-frees-too-much",
        "commit",
        "commit frees the layer of the cap itself",
        session_factory(CapLayerFreedSession),
        ROLLBACK,
        LOGITS,
    ),
    Mutant(
        "commit-of-a-part",
        "commit",
        "commit of part of a row frees by the cap of now",
        session_factory(FreesByTheCapOfNow),
        SESSIONS,
        r"after a rollback to what was committed",
    ),
    Mutant(
        "rollback-too-far",
        "commit",
        "rollback goes one token too far",
        session_factory(ForgetsOneToken),
        ROLLBACK,
        r"after rollback: length",
    ),
    Mutant(
        "drop-from-the-end",
        "drop",
        "the rows dropped are counted from the end",
        session_factory(DropsFromTheEnd),
        SESSIONS,
        r"after drop: length|were dropped at once",
    ),
    Mutant(
        "drop-shifting-indices",
        "drop",
        "several rows are dropped by indices that shift",
        session_factory(ShiftingIndices),
        SESSIONS,
        r"after drop: length|were dropped at once",
    ),
    Mutant(
        "sessions-share-buffers",
        "sessions",
        "sessions of one decoder share their buffers",
        session_factory(SharedBuffers),
        SESSIONS,
        r"row \d, position \d+",
    ),
    Mutant(
        "memory-of-closed-sessions",
        "memory",
        "what sessions held is kept after they are closed",
        decoder_factory(KeepsForEver),
        MEMORY,
        r"memory grew by \d+ MB over \d+ sessions",
    ),
    Mutant(
        "memory-of-rollbacks",
        "memory",
        "what is rolled back is kept",
        session_factory(KeepsWhatIsRolledBack),
        MEMORY,
        r"memory grew by \d+ MB in one session",
    ),
    Mutant(
        "arrays-reused",
        "arrays",
        "each step's logits are written over the last ones",
        session_factory(ReusedLogits),
        SESSIONS,
        r"step\.logits of call \d+ has changed",
    ),
    Mutant(
        "arrays-live",
        "arrays",
        "length is the session's own array",
        session_factory(LiveLength),
        SESSIONS,
        r"session\.length .* has changed",
    ),
    Mutant(
        "last-ignored",
        "arrays",
        "all logits are shown, however few are wanted",
        session_factory(LastIgnored),
        MACHINE,
        r"logits of shape",
    ),
)
