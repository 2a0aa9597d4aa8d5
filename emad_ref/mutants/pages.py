"""K/V that go wrong where a block ends, whatever its size; K/V that are kept for ever, a layer of them or more."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from emad_ref.models.kv_cache import CacheWrite, LayerKVCache
from emad_ref.mutants.base import MutantSession, cache_factory, session_factory
from emad_ref.mutants.keys import LOGITS, Stale
from emad_ref.mutants.mutant import Mutant
from emad_ref.mutants.sessions import MEMORY
from emad_ref.record import Ints

POSITIONS = "invariants/test_positions.py::test_every_position_is_written_and_read"


class StaleAtPages(Stale):
    """The last position of every block holds what the one before it holds, where a single token is written."""

    page: ClassVar[int] = 16

    def stale(self, row: int, position: int) -> bool:
        return (position + 1) % self.page == 0


class StaleAtPagesOf48(StaleAtPages):
    page = 48


class StaleAt100(StaleAtPages):
    """The first block of 100 alone: the buffer grows there, once."""

    def stale(self, row: int, position: int) -> bool:
        return position == 99


class LostAcrossPages(LayerKVCache):
    """Of several tokens written at once those beyond the end of a block of ``page`` are lost."""

    page: ClassVar[int] = 32

    def write(self, keys: Tensor, values: Tensor, frame: CacheWrite) -> tuple[Tensor, Tensor]:
        slots = frame.slots(keys.device)
        if frame.queries > 1 and all(start > 0 for start in frame.starts):
            lost = (slots // self.page != slots[:, :1] // self.page)[:, None, :, None]
            keys, values = keys.masked_fill(lost, 0), values.masked_fill(lost, 0)
        return super().write(keys, values, frame)


class LostAtFullPages(LayerKVCache):
    """A prompt that fills its last block of 48 loses the last position of it."""

    def write(self, keys: Tensor, values: Tensor, frame: CacheWrite) -> tuple[Tensor, Tensor]:
        for place, (start, end) in enumerate(zip(frame.starts, frame.ends, strict=True)):
            if start == 0 and end % 48 == 0 and end > 0:
                keys, values = keys.clone(), values.clone()
                keys[place, :, end - 1], values[place, :, end - 1] = 0, 0
        return super().write(keys, values, frame)


class OneLayerForEver(MutantSession):
    """K/V of one layer outlive their session, where ``kept_at`` says; the decoder holds them."""

    def keep_a_layer(self) -> None:
        vars(self._walker).setdefault("kept", []).extend(
            entry.clone() for row in range(len(self._trail)) for entry in self._store.cache.layers[0].entries(row)
        )


class KeptAfterClose(OneLayerForEver):
    def close(self) -> None:
        self.keep_a_layer()
        super().close()


class KeptAfterDrop(OneLayerForEver):
    def drop(self, rows: Ints) -> None:
        self.keep_a_layer()
        super().drop(rows)


class KeptAfterCommit(OneLayerForEver):
    def commit(self, length: Ints) -> None:
        if len(self._trail) > 1:
            self.keep_a_layer()
        super().commit(length)


PLANTED = (
    Mutant(
        "pages-of-16",
        "pages",
        "the last position of every block of 16 holds what the one before it holds",
        cache_factory(StaleAtPages),
        POSITIONS,
        LOGITS,
    ),
    Mutant("pages-of-48", "pages", "the same with blocks of 48", cache_factory(StaleAtPagesOf48), POSITIONS, LOGITS),
    Mutant(
        "pages-first-of-100", "pages", "position 99 holds what 98 holds", cache_factory(StaleAt100), POSITIONS, LOGITS
    ),
    Mutant(
        "pages-crossed-at-once",
        "pages",
        "tokens fed at once across the end of a block of 32 are lost beyond it",
        cache_factory(LostAcrossPages),
        POSITIONS,
        LOGITS,
    ),
    Mutant(
        "pages-full-prompts",
        "pages",
        "a prompt that fills its last block of 48 loses its last position",
        cache_factory(LostAtFullPages),
        POSITIONS,
        LOGITS,
    ),
    Mutant(
        "memory-of-one-layer",
        "memory",
        "K/V of one layer are kept for ever",
        session_factory(KeptAfterClose),
        MEMORY,
        r"memory grew by",
    ),
    Mutant(
        "memory-after-drop",
        "memory",
        "K/V of one layer are kept after drop",
        session_factory(KeptAfterDrop),
        MEMORY,
        r"memory grew by",
    ),
    Mutant(
        "memory-after-commit",
        "memory",
        "K/V of one layer are kept after commit",
        session_factory(KeptAfterCommit),
        MEMORY,
        r"memory grew by",
    ),
)
