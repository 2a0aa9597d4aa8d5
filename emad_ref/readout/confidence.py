"""What early-exit rules for LLMs read at a probe, over one step of a token (early-exit LLMs; CALM).

``SaturationWatch``  cos(h_ℓ, h_{ℓ−1}): remembers the state after the last probe, runs no head until the exit.
``ContrastWatch``    contrasts full heads: remembers the logits of every probe, each charged as the full head it is,
                     below the minimum exit layer too.
``PrunedWatch``      softmax response or JSD contrast over a vocabulary that narrows: one full head after the minimum
                     layer j, k inner products after each later layer.

A row that stops at a probe emits what the rule compared there, over the tokens still in the race: pruned ones have no
probability. A row that reaches the ceiling emits from a plain full head, as does one that was told its depth.

Deviation: the papers prune up to layer L; here the last layer, which decides nothing, is read in full, so that a rule
that never fires is full depth to the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import Confidence, OperatingPoint
from emad_ref.readout.contrast import SCORES
from emad_ref.readout.signals import Seen, require_finite, saturation, softmax_response
from emad_ref.readout.subset import Candidates, adaptive_size, full_head, spread, subset_head
from emad_ref.record import Work


class HeadWatch:
    """What all watches share: nothing to remember, and a full head at the exit."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        self.stepper, self.point = stepper, point

    def begin(self) -> None:
        """Nothing is remembered from probe to probe."""

    def keep(self, rows: Tensor) -> None:
        """Nothing is remembered from probe to probe."""

    def emit(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        return full_head(self.stepper, hidden, layer, work)


class SaturationWatch(HeadWatch):
    """Compares with the layer below, so probes are consecutive; at the first of them there is nothing to compare."""

    def begin(self) -> None:
        self.below: Tensor | None = None

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        below, self.below = self.below, hidden
        if below is None:
            return Seen(torch.full_like(hidden[:, 0], torch.nan), None)
        _require_aligned(len(below), len(hidden))
        signal = saturation(hidden, below)
        require_finite(signal, f"after layer {self.point.probes[probe]}")
        return Seen(signal, None)

    def keep(self, rows: Tensor) -> None:
        self.below = None if self.below is None else self.below[rows]


class ContrastWatch(HeadWatch):
    """Remembers logits [rows, V] by layer."""

    def begin(self) -> None:
        self.shallower: dict[int, Tensor] = {}

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        layer = self.point.probes[probe]
        for logits in self.shallower.values():
            _require_aligned(len(logits), len(hidden))
        logits = self.emit(hidden, layer, work)
        seen = SCORES[self.point.signal](_parameters(self.point), layer, logits, self.shallower)
        self.shallower[layer] = logits
        return seen

    def keep(self, rows: Tensor) -> None:
        self.shallower = {layer: logits[rows] for layer, logits in self.shallower.items()}


class PrunedWatch(HeadWatch):
    """Row by row, for rows differ in their tokens and the adaptive rule even in how many they keep.

    Raises:
        BadArgument: an adaptive rule that, sure of its token, would keep less than two of this vocabulary.
    """

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        super().__init__(stepper, point)
        shrink = _parameters(point).shrink
        if shrink is not None and adaptive_size(stepper.vocabulary, shrink, 1.0) < 2:
            expected = f"a share that leaves 2 of {stepper.vocabulary} tokens at full confidence"
            raise BadArgument("confidence.shrink", shrink, expected, "of one token there is no second to compare")

    def begin(self) -> None:
        self.rows: list[Candidates] = []
        self.confidence: list[float] = []  # of the last probe, per row: what the adaptive k depends on

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        layer, parameters = self.point.probes[probe], _parameters(self.point)
        if layer == parameters.minimum:
            logits = self.emit(hidden, layer, work)
            everything = torch.arange(logits.shape[1], device=logits.device)
            self.rows = [Candidates(everything, {layer: row}) for row in logits]
            # the JSD contrast is not defined yet: the readout's own response is the only confidence there is
            self.confidence = softmax_response(logits).double().tolist()
        else:
            _require_aligned(len(self.rows), len(hidden))
            sizes = [self._size(probe, c) for c in self.confidence]
            chosen = [row.narrowed(k) for row, k in zip(self.rows, sizes, strict=True)]
            read = subset_head(self.stepper, hidden, [row.ids for row in chosen], layer, work)
            self.rows = [row.read(layer, logits) for row, logits in zip(chosen, read, strict=True)]
        seen = [self._score(row, layer) for row in self.rows]
        if layer > parameters.minimum:
            self.confidence = [float(one.signal) for one in seen]
        emitted = [_spread(one, row, self.stepper.vocabulary) for one, row in zip(seen, self.rows, strict=True)]
        return Seen(torch.cat([one.signal for one in seen]), torch.stack(emitted))

    def keep(self, rows: Tensor) -> None:
        if self.rows:
            self.rows = [self.rows[row] for row in rows.tolist()]
            self.confidence = [self.confidence[row] for row in rows.tolist()]

    def _size(self, probe: int, confidence: float) -> int:
        parameters = _parameters(self.point)
        if parameters.shrink is None:
            return parameters.kept[probe - 1]  # the first probe is the minimum layer, which prunes nothing
        return adaptive_size(self.stepper.vocabulary, parameters.shrink, confidence)

    def _score(self, row: Candidates, layer: int) -> Seen:
        shallower = {m: z[None] for m, z in row.logits.items() if m < layer}
        return SCORES[self.point.signal](_parameters(self.point), layer, row.logits[layer][None], shallower)


def _spread(seen: Seen, row: Candidates, vocabulary: int) -> Tensor:
    assert seen.logits is not None, "scores of readouts give logits"
    return spread(seen.logits[0], row.ids, vocabulary)


def _parameters(point: OperatingPoint) -> Confidence:
    assert point.confidence is not None, "only points with a confidence have these watches"
    return point.confidence


def _require_aligned(remembered: int, shown: int) -> None:
    """The rows shown must be those remembered: ``keep`` is owed wherever some rows stop and others go on."""
    assert remembered == shown, f"{remembered} rows are remembered, {shown} are shown"


def confidence_watch(stepper: Stepper, point: OperatingPoint) -> SaturationWatch | ContrastWatch | PrunedWatch:
    """The watch of a point with a ``confidence``."""
    if point.signal == "saturation":
        return SaturationWatch(stepper, point)
    return PrunedWatch(stepper, point) if _parameters(point).pruned else ContrastWatch(stepper, point)
