"""K/V that are unwritten, stale, another row's, at other positions, or of states that never were."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from emad_ref.models.kv_cache import CacheWrite, LayerKVCache
from emad_ref.models.stepper import Stepper
from emad_ref.mutants.base import (
    MutantDecoder,
    MutantSession,
    UncheckedCache,
    cache_factory,
    decoder_factory,
    session_factory,
)
from emad_ref.mutants.mutant import Mutant, NotPlantable
from emad_ref.schedule.interface import ExitFlow

FAR = "invariants/test_positions.py::test_forced_depths_are_obeyed_far_into_the_window"
LATE = "invariants/test_positions.py::test_forced_depths_are_obeyed_late_in_a_session"
FORCED = "invariants/test_depth.py::test_forced_depths_are_obeyed_and_rising_ones_refused"
ROLLBACK = "invariants/test_depth.py::test_rollback_restores_tokens_cache_and_cap"
GOLDEN = "fidelity/test_golden.py::test_tokens_and_depths_are_the_golden_ones"
LOGITS = r"row \d, position \d+, depth \d+.*: logits off by"


class PositionsFrom(MutantDecoder):
    """The tables of positions are one row off from ``first`` on."""

    first: ClassVar[int] = 64

    def walks(self, stepper: Stepper) -> Stepper:
        require_window(stepper, self.first)
        changed: Any = copy.copy(stepper)
        learned, rotary = getattr(stepper, "_positions", None), getattr(stepper, "rotary", None)
        if rotary is not None:
            changed.rotary_table = lambda station, positions: tuple(
                self.moved(table, 1, self.first)
                for table in stepper.rotary_table(station, positions + 1)  # type: ignore[attr-defined]  # a decoder-only model's
            )
        elif learned is not None:
            offset = stepper.anatomy.position_offset  # type: ignore[attr-defined]  # the same
            changed._positions = copy.copy(learned)
            changed._positions._parameters = {"weight": self.moved(learned.weight.data, 0, self.first + offset)}
        else:
            raise NotPlantable("this family has no table of positions: distances, or positions inside its blocks")
        return changed  # type: ignore[no-any-return]  # a stepper like the one it was copied from

    def moved(self, table: Tensor, axis: int, first: int) -> Tensor:
        rows = torch.arange(table.shape[axis], device=table.device)
        return table.index_select(axis, (rows + (rows >= first)).clamp(max=len(rows) - 1))


class PositionsFrom128(PositionsFrom):
    first = 128


class EveryPosition(PositionsFrom):
    first = 1


def require_window(stepper: Stepper, positions: int) -> None:
    """Raises NotPlantable where the window ends before the defect begins."""
    if stepper.max_positions < positions + 32:
        raise NotPlantable(f"the model's window of {stepper.max_positions} ends before position {positions} matters")


class Unwritten(LayerKVCache):
    """Nothing is written from position 40 on."""

    def write(self, keys: Tensor, values: Tensor, frame: CacheWrite) -> tuple[Tensor, Tensor]:
        beyond = (frame.slots(keys.device) >= 40)[:, None, :, None]
        return super().write(keys.masked_fill(beyond, 0), values.masked_fill(beyond, 0), frame)


class LastLayerUnwritten(MutantSession):
    def keeper(self, number: int, rows: int, capacity: int) -> LayerKVCache:
        return (Unwritten if number == self._stepper.layers else LayerKVCache)(number, rows, capacity)


class Stale(LayerKVCache):
    """Single tokens write the K/V of the token before once more, where ``stale`` says so of row and position."""

    def stale(self, row: int, position: int) -> bool:
        return row > 0 and position >= 30

    def write(self, keys: Tensor, values: Tensor, frame: CacheWrite) -> tuple[Tensor, Tensor]:
        for place, (row, start) in enumerate(zip(frame.rows, frame.starts, strict=True)):
            if frame.queries == 1 and start > 0 and self.stale(row, start):
                held = [entry[:, start - 1].clone() for entry in self.entries(row)]
                keys[place, :, 0], values[place, :, 0] = held
        return super().write(keys, values, frame)


class StaleAtTheEdge(Stale):
    def stale(self, row: int, position: int) -> bool:
        return position == 127


class StaleLate(Stale):
    """After 40 single tokens."""

    def __init__(self, number: int, rows: int, capacity: int):
        super().__init__(number, rows, capacity)
        self.steps = 0

    def write(self, keys: Tensor, values: Tensor, frame: CacheWrite) -> tuple[Tensor, Tensor]:
        self.steps += frame.queries == 1
        return super().write(keys, values, frame)

    def stale(self, row: int, position: int) -> bool:
        return self.steps > 40


class LateSession(MutantSession):
    def keeper(self, number: int, rows: int, capacity: int) -> LayerKVCache:
        return StaleLate(number, rows, capacity)


class LateByTheToken(MutantDecoder):
    """Fed one token at a time."""

    session = LateSession

    def prepare(self) -> None:
        self.capabilities = replace(self.capabilities, max_feed=1)


class NeighboursRow(LayerKVCache):
    """Rows write one another's K/V."""

    def write(self, keys: Tensor, values: Tensor, frame: CacheWrite) -> tuple[Tensor, Tensor]:
        return super().write(keys.roll(1, 0), values.roll(1, 0), frame)


class WrittenOnce(UncheckedCache):
    """What was written once stays, although it was rolled back."""

    def __init__(self, number: int, rows: int, capacity: int):
        super().__init__(number, rows, capacity)
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def truncate(self, length: Any) -> None:
        self.written = {row: self.entries(row) for row, held in zip(self._rows, self._length, strict=True) if held}
        self.written = {row: (keys.clone(), values.clone()) for row, (keys, values) in self.written.items()}
        super().truncate(length)

    def write(self, keys: Tensor, values: Tensor, frame: CacheWrite) -> tuple[Tensor, Tensor]:
        for place, (row, start, end) in enumerate(zip(frame.rows, frame.starts, frame.ends, strict=True)):
            for new, old in zip((keys, values), self.written.get(row, ()), strict=False):
                kept = old[:, start:end]
                new[place, :, : kept.shape[1]] = kept
        return super().write(keys, values, frame)

    def keep(self, rows: Any, numbers: dict[int, int]) -> None:
        self.written = {}
        super().keep(rows, numbers)


class OverWhatever(MutantSession):
    def keeper(self, number: int, rows: int, capacity: int) -> LayerKVCache:
        return UncheckedCache(number, rows, capacity)


class NoBackfill(MutantDecoder):
    """Rows that stop owe nothing, although they may rise again."""

    session = OverWhatever

    def prepare(self) -> None:
        if self.point.schedule != "monotone":
            self._walker.schedule = replace(self._walker.schedule, flow=ExitFlow)


class Rewalked(MutantDecoder):
    """``run`` and ``fill`` of the stepper, replaced."""

    def walks(self, stepper: Stepper) -> Stepper:
        changed: Any = copy.copy(stepper)
        changed.run = lambda *given: self.run(stepper, *given)
        changed.fill = lambda *given: self.fill(stepper, *given)
        return changed  # type: ignore[no-any-return]  # a stepper like the one it was copied from

    def run(self, stepper: Stepper, hidden: Tensor, first: int, last: int, frame: Any, cache: Any) -> Tensor:
        return stepper.run(hidden, first, last, frame, cache)

    def fill(self, stepper: Stepper, hidden: Tensor, layer: int, frame: Any, cache: Any) -> None:
        stepper.fill(hidden, layer, frame, cache)


class ShallowPrompts(Rewalked):
    """Of prompts of 40 tokens and more the upper half of the layers only writes K/V; all layers are claimed."""

    def run(self, stepper: Stepper, hidden: Tensor, first: int, last: int, frame: Any, cache: Any) -> Tensor:
        half = max(1, stepper.layers // 2)
        if first or last <= half or frame.queries < 40:
            return stepper.run(hidden, first, last, frame, cache)
        require_window(stepper, 40)
        hidden = stepper.run(hidden, 0, half, frame, cache)
        for layer in range(half + 1, last + 1):
            stepper.fill(hidden, layer, frame, cache)
        return hidden


class FilledWithNothing(Rewalked):
    """K/V that a schedule owes to skipped layers are made of zeros."""

    def fill(self, stepper: Stepper, hidden: Tensor, layer: int, frame: Any, cache: Any) -> None:
        stepper.fill(torch.zeros_like(hidden), layer, frame, cache)


class Mixed(Rewalked):
    """The last state is mixed with itself, shifted."""

    def run(self, stepper: Stepper, hidden: Tensor, first: int, last: int, frame: Any, cache: Any) -> Tensor:
        walked = stepper.run(hidden, first, last, frame, cache)
        return walked + walked.roll(1, -1) / 4 if last == stepper.layers else walked


PLANTED = (
    Mutant(
        "positions-from-64",
        "positions",
        "positions are one too far from 64 on",
        decoder_factory(PositionsFrom),
        FAR,
        LOGITS,
    ),
    Mutant(
        "positions-from-128",
        "positions",
        "positions are one too far from 128 on",
        decoder_factory(PositionsFrom128),
        FAR,
        LOGITS,
    ),
    Mutant(
        "positions-from-1",
        "positions",
        "all positions but the first are one too far",
        decoder_factory(EveryPosition),
        FORCED,
        LOGITS,
    ),
    Mutant(
        "kv-last-layer-unwritten",
        "K/V",
        "the last layer writes nothing from position 40 on",
        session_factory(LastLayerUnwritten),
        FAR,
        LOGITS,
    ),
    Mutant(
        "kv-stale-in-later-rows",
        "K/V",
        "rows but the first write old K/V from position 30 on",
        cache_factory(Stale),
        FAR,
        r"row [1-9], position \d+.*logits off by",
    ),
    Mutant("kv-stale-late", "K/V", "after 40 steps old K/V are written", decoder_factory(LateByTheToken), LATE, LOGITS),
    Mutant(
        "kv-lost-at-a-buffer's-edge",
        "K/V",
        "position 127 holds what 126 holds",
        cache_factory(StaleAtTheEdge),
        FAR,
        r"row \d, position 1[23]\d.*logits off by",
        case="edges",
    ),
    Mutant("kv-of-other-rows", "K/V", "rows write one another's K/V", cache_factory(NeighboursRow), FORCED, LOGITS),
    Mutant(
        "kv-stale-after-rollback",
        "K/V",
        "what was rolled back is not overwritten",
        cache_factory(WrittenOnce),
        ROLLBACK,
        LOGITS,
    ),
    Mutant(
        "kv-fills-of-zeros",
        "K/V",
        "K/V owed to skipped layers are filled with nothing",
        decoder_factory(FilledWithNothing),
        GOLDEN,
        r"audit golden: row \d",
        case="copying",
    ),
    Mutant(
        "backfill-missing",
        "K/V",
        "a schedule that rises leaves unwritten what it skipped",
        decoder_factory(NoBackfill),
        GOLDEN,
        r"audit golden: row \d",
        case="eager",
    ),
    Mutant(
        "prompts-shallow",
        "prompts",
        "the upper half of the layers never runs for prompts of 40 tokens and more",
        decoder_factory(ShallowPrompts),
        FAR,
        LOGITS,
    ),
    Mutant(
        "last-layer-mixed",
        "weights",
        "what the last layer gives is mixed up a little",
        decoder_factory(Mixed),
        FORCED,
        LOGITS,
    ),
)
