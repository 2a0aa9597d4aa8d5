"""One decoding step at adaptive depth (EMAD, "Algorithm (per token)").

    for each new token:  hidden = embed(token)
      for segment (i, j] between layers where a row may stop:
         hidden = run(hidden, i, j)
         at a probe: read the signal Ĥ_j of the rows still running; rows whose rule fires stop
         rows whose cap is j stop
      emit from the head at D_t

Symbols: ``depth`` is D_t, ``cap`` is D_{t-1}, ``signal`` is Ĥ. A row that stops leaves the batch for the layers above:
under the monotone schedule it never returns to them, so no K/V is owed. Under ``free_eager`` stopped rows go on to
write K and V of the layers above (the last by a K/V-only pass): exact, and no gain by construction.

The readout at a probe doubles as the output distribution of a row that stops there: it is never computed twice.
This module knows no prompts, no sampling and no clock. It counts what it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emad_ref.models.cache import Cache
from emad_ref.models.stepper import Frame, Stepper
from emad_ref.point import OperatingPoint
from emad_ref.policy.thresholds import fires
from emad_ref.readout.signals import entropy_nats, require_finite
from emad_ref.record import FILLS, READOUTS, Bools, Floats, Ints, Work

FULL, EXACT = READOUTS.index("full"), FILLS.index("exact")


@dataclass(frozen=True)
class Outcome:
    """``logits`` [rows, n, V] on the device; ``depth`` int64 [rows]; ``signal`` float64 [rows, probes], NaN unread."""

    logits: Tensor
    depth: Ints
    signal: Floats


def count_blocks(work: Work, first: int, last: int, rows: int, queries: int, keys: int) -> None:
    """Charge layers first+1 … last with ``rows`` × ``queries`` tokens against ``keys`` keys each."""
    work.tokens[first:last] += rows * queries
    work.context[first:last] += rows * queries * keys


class Step:
    """Everything a step needs that does not change from token to token."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        self.stepper, self.point = stepper, point
        self.free = point.schedule == "free_eager"
        self.column = {probe: i for i, probe in enumerate(point.probes)}

    def decide(self, tokens: Tensor, frame: Frame, cache: Cache, cap: Ints, work: Work) -> Outcome:
        """Process one token per row, int64 [rows, 1]; the rule chooses depths up to ``cap`` [rows]."""
        return self._run(tokens, frame, cache, cap, work, probing=True)

    def obey(self, tokens: Tensor, frame: Frame, cache: Cache, depth: Ints, work: Work) -> Outcome:
        """Process ``tokens`` int64 [rows, n] at the given ``depth`` [rows]; no probe is read."""
        return self._run(tokens, frame, cache, depth, work, probing=False)

    def _run(self, tokens: Tensor, frame: Frame, cache: Cache, cap: Ints, work: Work, *, probing: bool) -> Outcome:
        stepper, (rows, queries) = self.stepper, tokens.shape
        depth = np.zeros(rows, dtype=np.int64)
        signal = np.full((rows, len(self.column)), np.nan)
        logits: Tensor | None = None
        running = np.arange(rows)  # batch rows that have not stopped; without backfill, also the rows of ``hidden``
        hidden, at = stepper.embed(tokens, frame), 0
        for layer in self._halts(cap, probing):
            hidden = stepper.run(hidden, at, layer, frame, cache)
            count_blocks(work, at, layer, len(hidden), queries, frame.keys)
            at = layer
            stops = cap[running] == layer
            probe = self.column.get(layer) if probing else None
            if probe is None and not stops.any():
                continue
            asking = _rows(hidden, running) if self.free else hidden
            z = stepper.logits(asking if probe is not None else _where(asking, stops))
            work.readout_rows[FULL, layer - 1] += z.shape[0] * queries
            if probe is not None:
                values = self._read(z, layer)
                signal[running, probe] = values
                stops = stops | fires(self.point, probe, values)
                z = _where(z, stops)
            if not stops.any():
                continue
            depth[running[stops]] = layer
            if len(z) == rows:
                logits = z
            else:
                logits = z.new_empty(rows, queries, z.shape[-1]) if logits is None else logits
                logits[torch.from_numpy(running[stops]).to(z.device)] = z
            running = running[~stops]
            if len(running) == 0:
                break
            if not self.free:
                hidden, frame = _where(hidden, ~stops), frame.take(np.flatnonzero(~stops))
        assert logits is not None, "some row stops at some layer"
        assert len(running) == 0, "every row stops at its cap at the latest"
        if self.free:
            self._backfill(hidden, at, frame, cache, work, queries)
        return Outcome(logits, depth, signal)

    def _read(self, logits: Tensor, layer: int) -> Floats:
        """Signal [rows] of the last position of each row."""
        entropy = entropy_nats(logits[:, -1])
        require_finite(entropy, f"after layer {layer}")
        return entropy.double().cpu().numpy()

    def _halts(self, cap: Ints, probing: bool) -> list[int]:
        """Layers after which some row may stop, ascending."""
        halts = set(cap.tolist())
        if probing:
            top = max(halts)
            halts.update(probe for probe in self.column if probe <= top)
        return sorted(halts)

    def _backfill(self, hidden: Tensor, at: int, frame: Frame, cache: Cache, work: Work, queries: int) -> None:
        """Write K and V of layers above ``at``: blocks up to the last but one, a K/V-only pass of the last."""
        ceiling = self.point.ceiling
        if at == ceiling:
            return
        hidden = self.stepper.run(hidden, at, ceiling - 1, frame, cache)
        count_blocks(work, at, ceiling - 1, len(hidden), queries, frame.keys)
        self.stepper.fill(hidden, ceiling, frame, cache)
        work.fills[EXACT, ceiling - 1] += len(hidden) * queries


def _rows(tensor: Tensor, rows: Ints) -> Tensor:
    return tensor if len(rows) == len(tensor) else tensor[torch.from_numpy(rows).to(tensor.device)]


def _where(tensor: Tensor, chosen: Bools) -> Tensor:
    return tensor if chosen.all() else tensor[torch.from_numpy(chosen).to(tensor.device)]
