"""What is captured: blocks first+1 … last over one token per row, all that varies from step to step in tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from emad_ref.models.anatomy import SLIDING
from emad_ref.models.fused.parts import Given, Step, Turns, alone
from emad_ref.models.graphs.arena import Arena, Inputs
from emad_ref.models.prepared import Station

if TYPE_CHECKING:
    from emad_ref.models.causal import CausalStepper


class _Buffers:
    """What fused steps see as their cache: stores at the rows' positions, gives a bucket of keys and values."""

    def __init__(self, arena: Arena, inputs: Inputs, keys: int):
        self._keys, self._values, self._inputs, self._bucket = arena.keys, arena.values, inputs, keys
        self._whole = len(inputs.positions) == arena.rows

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        return self._put(self._keys[layer_idx], keys), self._put(self._values[layer_idx], values)

    def _put(self, buffer: Tensor, states: Tensor) -> Tensor:
        at, seen = self._inputs, buffer.narrow(2, 0, self._bucket)
        if self._whole:
            buffer.scatter_(2, at.positions[:, None, None, None].expand_as(states), states)
            return seen
        # an index before and one after the slice: what is put there is [rows, kv_heads, head_dim]
        buffer[at.places, :, at.positions] = states[:, :, 0]
        return seen.index_select(0, at.places)


class Segment:
    """Layers first+1 … last of ``stepper`` over the rows of ``inputs``, against ``keys`` keys of ``arena`` each.

    Called, it gives h_last [rows, 1, D] of ``inputs.hidden``, and writes K and V; called twice, it has done no more.
    """

    def __init__(self, stepper: CausalStepper, first: int, last: int, arena: Arena, inputs: Inputs, keys: int):
        self._steps = _present(stepper.steps(first, last))
        self._inputs, self._buffers = inputs, _Buffers(arena, inputs, keys)
        self._dtype, self._window = stepper.dtype, stepper.window
        stations = {station for _, station in self._steps}
        # as long as the graph: a table that grows is another one
        self._turns: dict[Station, Turns | None] = {
            station: None if stepper.rotary is None else stepper.turns(station, keys) for station in stations
        }
        with torch.inference_mode(False), torch.no_grad():
            self._slots = torch.arange(keys, device=inputs.positions.device)

    def __call__(self) -> Tensor:
        given = {station: self._given(station) for station in self._turns}
        hidden = self._inputs.hidden
        states = alone(hidden)
        for step, station in self._steps:
            states = step(states, given[station])
        return states.view(hidden.shape)

    def _given(self, station: Station) -> Given:
        positions, turns = self._inputs.positions, self._turns[station]
        if turns is not None:
            cos, sin = turns
            turns = cos[0].index_select(0, positions)[:, None], sin[0].index_select(0, positions)[:, None]
        return Given(self._buffers, self._mask(station), turns, several=False)

    def _mask(self, station: Station) -> Tensor:
        """Additive [rows, 1, 1, keys]: as ``stepper.attention_mask``, of positions that are known when it runs."""
        here = self._inputs.positions[:, None]
        seen = self._slots <= here
        if station.kind == SLIDING and self._window is not None:
            seen = seen & (self._slots > here - self._window)
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self._dtype).min)[:, None, None]


def _present(steps: Sequence[tuple[Step | None, Station]]) -> list[tuple[Step, Station]]:
    """All of them: where a block has none, nothing is captured (``replayed.graphs_of``)."""
    present = [(step, station) for step, station in steps if step is not None]
    assert len(present) == len(steps), "a block without a fused step cannot be captured"
    return present
