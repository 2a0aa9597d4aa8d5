"""Readouts of a few states, captured: norm, projection and head, one graph for each number of states."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from emad_ref.models.graphs.arena import Captured
from emad_ref.models.graphs.engine import Engine
from emad_ref.models.graphs.weights import addresses, places_of, plain

if TYPE_CHECKING:
    from emad_ref.models.causal import CausalStepper


class Readouts:
    """Of one stepper. ``able``: whether its norm and head are such that a graph does what they do."""

    def __init__(self, stepper: CausalStepper, engine: Engine):
        self._engine, self.able = engine, plain(stepper.head)
        self._places = places_of(stepper.head) if self.able else []
        self._states: dict[int, Tensor] = {}  # [states, D], where graphs read them
        self._graphs: dict[int, Captured] = {}

    def logits(self, stepper: CausalStepper, hidden: Tensor) -> Tensor:
        """[..., V] of ``hidden`` [..., D]. Raises NotCaptured."""
        *shape, width = hidden.shape
        states = self._still(hidden.numel() // width, width, hidden)
        states.copy_(hidden.reshape(states.shape))
        read, found = addresses(self._places), self._graphs.get(len(states))
        if found is None or found.read != read:
            replay = self._engine.capture(partial(stepper.read_out, states))
            found = self._graphs[len(states)] = Captured(replay, read, states)
        return found.replay().view(*shape, -1).clone()

    def _still(self, count: int, width: int, like: Tensor) -> Tensor:
        if count not in self._states:
            with torch.inference_mode(False), torch.no_grad():
                self._states[count] = torch.zeros(count, width, dtype=like.dtype, device=like.device)
        return self._states[count]
