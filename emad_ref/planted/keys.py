"""K/V that are unwritten, stale, another row's, at other positions, or of states that never were."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from emad_ref.models.cache import LayerCache, Writing
from emad_ref.models.stepper import Stepper
from emad_ref.planted.base import Careless, PlantedDecoder, PlantedSession, keeping, made, with_session
from emad_ref.planted.entry import NotPlantable, Planted
from emad_ref.schedule.flow import Leave

FAR = "invariants/test_positions.py::test_forced_depths_are_obeyed_far_into_the_window"
LATE = "invariants/test_positions.py::test_forced_depths_are_obeyed_late_in_a_session"
FORCED = "invariants/test_depth.py::test_forced_depths_are_obeyed_and_rising_ones_refused"
ROLLBACK = "invariants/test_depth.py::test_rollback_restores_tokens_cache_and_cap"
GOLDEN = "fidelity/test_golden.py::test_tokens_and_depths_are_the_golden_ones"
LOGITS = r"row \d, position \d+, depth \d+.*: logits off by"


class PositionsFrom(PlantedDecoder):
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


class Unwritten(LayerCache):
    """Nothing is written from position 40 on."""

    def write(self, keys: Tensor, values: Tensor, frame: Writing) -> tuple[Tensor, Tensor]:
        beyond = (frame.slots(keys.device) >= 40)[:, None, :, None]
        return super().write(keys.masked_fill(beyond, 0), values.masked_fill(beyond, 0), frame)


class LastLayerUnwritten(PlantedSession):
    def keeper(self, number: int, rows: int, capacity: int) -> LayerCache:
        return (Unwritten if number == self._stepper.layers else LayerCache)(number, rows, capacity)


class Stale(LayerCache):
    """Single tokens write the K/V of the token before once more, where ``stale`` says so of row and position."""

    def stale(self, row: int, position: int) -> bool:
        return row > 0 and position >= 30

    def write(self, keys: Tensor, values: Tensor, frame: Writing) -> tuple[Tensor, Tensor]:
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

    def write(self, keys: Tensor, values: Tensor, frame: Writing) -> tuple[Tensor, Tensor]:
        self.steps += frame.queries == 1
        return super().write(keys, values, frame)

    def stale(self, row: int, position: int) -> bool:
        return self.steps > 40


class LateSession(PlantedSession):
    def keeper(self, number: int, rows: int, capacity: int) -> LayerCache:
        return StaleLate(number, rows, capacity)


class LateByTheToken(PlantedDecoder):
    """Fed one token at a time."""

    session = LateSession

    def prepare(self) -> None:
        self.capabilities = replace(self.capabilities, max_feed=1)


class NeighboursRow(LayerCache):
    """Rows write one another's K/V."""

    def write(self, keys: Tensor, values: Tensor, frame: Writing) -> tuple[Tensor, Tensor]:
        return super().write(keys.roll(1, 0), values.roll(1, 0), frame)


class WrittenOnce(Careless):
    """What was written once stays, although it was rolled back."""

    def __init__(self, number: int, rows: int, capacity: int):
        super().__init__(number, rows, capacity)
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def truncate(self, length: Any) -> None:
        self.written = {row: self.entries(row) for row, held in zip(self._rows, self._length, strict=True) if held}
        self.written = {row: (keys.clone(), values.clone()) for row, (keys, values) in self.written.items()}
        super().truncate(length)

    def write(self, keys: Tensor, values: Tensor, frame: Writing) -> tuple[Tensor, Tensor]:
        for place, (row, start, end) in enumerate(zip(frame.rows, frame.starts, frame.ends, strict=True)):
            for new, old in zip((keys, values), self.written.get(row, ()), strict=False):
                kept = old[:, start:end]
                new[place, :, : kept.shape[1]] = kept
        return super().write(keys, values, frame)

    def keep(self, rows: Any, numbers: dict[int, int]) -> None:
        self.written = {}
        super().keep(rows, numbers)


class OverWhatever(PlantedSession):
    def keeper(self, number: int, rows: int, capacity: int) -> LayerCache:
        return Careless(number, rows, capacity)


class NoBackfill(PlantedDecoder):
    """Rows that stop owe nothing, although they may rise again."""

    session = OverWhatever

    def prepare(self) -> None:
        if self.point.schedule != "monotone":
            self._walker.schedule = replace(self._walker.schedule, flow=Leave)


class Rewalked(PlantedDecoder):
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
    Planted("positions-from-64", "positions", "positions are one too far from 64 on", made(PositionsFrom), FAR, LOGITS),
    Planted(
        "positions-from-128", "positions", "positions are one too far from 128 on", made(PositionsFrom128), FAR, LOGITS
    ),
    Planted(
        "positions-from-1", "positions", "all positions but the first are one too far", made(EveryPosition), FORCED,
        LOGITS,
    ),
    Planted(
        "kv-last-layer-unwritten", "K/V", "the last layer writes nothing from position 40 on",
        with_session(LastLayerUnwritten), FAR, LOGITS,
    ),
    Planted(
        "kv-stale-in-later-rows", "K/V", "rows but the first write old K/V from position 30 on", keeping(Stale), FAR,
        r"row [1-9], position \d+.*logits off by",
    ),
    Planted("kv-stale-late", "K/V", "after 40 steps old K/V are written", made(LateByTheToken), LATE, LOGITS),
    Planted(
        "kv-lost-at-a-buffer's-edge", "K/V", "position 127 holds what 126 holds", keeping(StaleAtTheEdge), FAR,
        r"row \d, position 1[23]\d.*logits off by", case="edges",
    ),
    Planted("kv-of-other-rows", "K/V", "rows write one another's K/V", keeping(NeighboursRow), FORCED, LOGITS),
    Planted("kv-stale-after-rollback", "K/V", "what was rolled back is not overwritten", keeping(WrittenOnce), ROLLBACK,
            LOGITS),
    Planted("kv-fills-of-zeros", "K/V", "K/V owed to skipped layers are filled with nothing", made(FilledWithNothing),
            GOLDEN, r"audit golden: row \d", case="copying"),
    Planted("backfill-missing", "K/V", "a schedule that rises leaves unwritten what it skipped", made(NoBackfill),
            GOLDEN, r"audit golden: row \d", case="eager"),
    Planted("prompts-shallow", "prompts", "the upper half of the layers never runs for prompts of 40 tokens and more",
            made(ShallowPrompts), FAR, LOGITS),
    Planted("last-layer-mixed", "weights", "what the last layer gives is mixed up a little", made(Mixed),
            FORCED, LOGITS),
)  # fmt: skip
