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
from emad_ref.readout.contrast import score_of
from emad_ref.readout.signals import Seen, saturation, shown, softmax_response
from emad_ref.readout.subset import Heads, OwnHeads, Race, adaptive_size, full_head
from emad_ref.readout.tuned import lens_of
from emad_ref.record import Work
from emad_ref.signals import ALONE, BELOW, HALFWAY, SIGNALS, SINCE, Needs


class HeadWatch:
    """What all watches share: nothing to remember, and a full head at the exit, through the point's lens if it has one.

    ``heads``: how readouts are computed; the stepper's own by default.

    Raises:
        BadArgument: a lens that is not attached to the stepper, or that lacks one of the probes.
    """

    def __init__(self, stepper: Stepper, point: OperatingPoint, heads: Heads | None = None):
        self.stepper, self.point, self.heads = stepper, point, heads or OwnHeads(stepper)
        self.lens = lens_of(stepper, point)

    def begin(self) -> None:
        """Nothing is remembered from probe to probe."""

    def keep(self, rows: Tensor) -> None:
        """Nothing is remembered from probe to probe."""

    def emit(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        read = hidden if self.lens is None else self.lens.charged(hidden, layer, work)
        return full_head(self.heads, read, layer, work)


class SaturationWatch(HeadWatch):
    """Compares with the layer below, so probes are consecutive; at the first of them there is nothing to compare."""

    def begin(self) -> None:
        self.below: Tensor | None = None

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        below, self.below = self.below, hidden
        if below is None:
            return Seen(torch.full_like(hidden[:, 0], torch.nan), None)
        require_aligned(len(below), len(hidden))
        return Seen(shown(saturation(hidden, below), f"after layer {self.point.probes[probe]}"), None)

    def keep(self, rows: Tensor) -> None:
        self.below = None if self.below is None else self.below[rows]


class ContrastWatch(HeadWatch):
    """Remembers logits [rows, V] by layer."""

    def begin(self) -> None:
        self.shallower: dict[int, Tensor] = {}

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        layer = self.point.probes[probe]
        for logits in self.shallower.values():
            require_aligned(len(logits), len(hidden))
        logits = self.emit(hidden, layer, work)
        seen = score_of(self.point.signal)(_parameters(self.point), layer, logits, self.shallower)
        self.shallower[layer] = logits
        return seen

    def keep(self, rows: Tensor) -> None:
        self.shallower = {layer: logits[rows] for layer, logits in self.shallower.items()}


class PrunedWatch(HeadWatch):
    """Remembers the race: the tokens still in it, row by row, and their logits by layer.

    Raises:
        BadArgument: an adaptive rule that, sure of its token, would keep less than two of this vocabulary.
    """

    def __init__(self, stepper: Stepper, point: OperatingPoint, heads: Heads | None = None):
        super().__init__(stepper, point, heads)
        shrink = _parameters(point).shrink
        if shrink is not None and adaptive_size(stepper.vocabulary, shrink, 1.0) < 2:
            expected = f"a share that leaves 2 of {stepper.vocabulary} tokens at full confidence"
            raise BadArgument("confidence.shrink", shrink, expected, "of one token there is no second to compare")

    def begin(self) -> None:
        self.race: Race | None = None
        self.confidence: Tensor | None = None  # [rows] of the last probe: what the adaptive k depends on

    def see(self, hidden: Tensor, probe: int, work: Work) -> Seen:
        layer, parameters = self.point.probes[probe], _parameters(self.point)
        if layer == parameters.minimum:
            logits = self.emit(hidden, layer, work)
            self.race = Race.of_all(layer, logits)
            # the JSD contrast is not defined yet: the readout's own response is the only confidence there is
            self.confidence = softmax_response(logits)
            return score_of(self.point.signal)(parameters, layer, logits, {})
        assert self.race is not None, "the minimum layer is the first that a pruned rule reads"
        require_aligned(len(self.race), len(hidden))
        self.race = self.race.narrowed(self._sizes(probe)).read(self.heads, hidden, layer, work)
        shallower = {m: z for m, z in self.race.logits.items() if m < layer}
        seen = score_of(self.point.signal)(parameters, layer, self.race.logits[layer], shallower)
        self.confidence = seen.signal
        assert seen.logits is not None, "scores of readouts give logits"
        return Seen(seen.signal, self.race.spread(seen.logits), self.race.macs(self.stepper.geometry))

    def keep(self, rows: Tensor) -> None:
        if self.race is not None and self.confidence is not None:
            self.race, self.confidence = self.race.keep(rows), self.confidence[rows]

    def _sizes(self, probe: int) -> list[int]:
        parameters = _parameters(self.point)
        assert self.confidence is not None, "set at the minimum layer"
        if parameters.shrink is None:
            # the first probe is the minimum layer, which prunes nothing
            return [parameters.kept[probe - 1]] * len(self.confidence)
        vocabulary, shrink = self.stepper.vocabulary, parameters.shrink
        return [adaptive_size(vocabulary, shrink, c) for c in self.confidence.double().tolist()]


def _parameters(point: OperatingPoint) -> Confidence:
    assert point.confidence is not None, "only points with a confidence have these watches"
    return point.confidence


def require_aligned(remembered: int, shown: int) -> None:
    """The rows shown must be those remembered: ``keep`` is owed wherever some rows stop and others go on."""
    assert remembered == shown, f"{remembered} rows are remembered, {shown} are shown"


def confidence_watch(
    stepper: Stepper, point: OperatingPoint, heads: Heads | None = None
) -> SaturationWatch | ContrastWatch | PrunedWatch:
    """The watch of a point with a ``confidence``; ``heads`` as of ``HeadWatch``."""
    return WATCHES[SIGNALS[point.signal].needs, _parameters(point).pruned](stepper, point, heads)


# (what the signal needs, whether the vocabulary is pruned) → what remembers it; points refuse the other combinations
WATCHES: dict[tuple[Needs, bool], type[SaturationWatch | ContrastWatch | PrunedWatch]] = {
    (BELOW, False): SaturationWatch,
    (HALFWAY, False): ContrastWatch,
    (SINCE, False): ContrastWatch,
    (SINCE, True): PrunedWatch,
    (ALONE, True): PrunedWatch,
}
