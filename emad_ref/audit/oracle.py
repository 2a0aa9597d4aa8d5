"""The lens of a model with a stepper, including every rule at all layers, and the replay of a document.

Audits compute signals of one layer's readout from its logits. Rules that compare several layers, prune or estimate run
as in decoding (``probes.probe``), over the states of one plain pass and with no token stopping. Under an exact schedule
a decoder sees the same states. Such a rule is therefore checked for everything around the reading: the layers read, the
states, the comparison, the emission and the counts. Tests compare the readings themselves with the papers' formulas.

The only module of this package that runs a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emad_ref.audit.decoding_checks import ReplayedDocument
from emad_ref.audit.lens import LayerLogits, ProbeReadouts, RuleReadings, candidate_bins
from emad_ref.calibration.trace import lens_states, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator, OperatingPoint
from emad_ref.probes.lens import lens_macs, point_lens
from emad_ref.probes.probe import make_probe
from emad_ref.probes.pruned_vocabulary import SharedHeads
from emad_ref.probes.signal_values import to_host
from emad_ref.record import READOUTS, Floats, Ints, Work
from emad_ref.replay import replay


@dataclass(frozen=True, eq=False)
class ModelLens:
    """The lens of a model. ``source`` int64 [s]: the encoder input of every sequence; None for decoder-only models."""

    stepper: Stepper
    source: Ints | None = None

    def __call__(self, tokens: Ints, first: int = 0) -> LayerLogits:
        states = lens_states(self.stepper, tokens, first, self.source)

        @torch.inference_mode()
        def read(layer: int) -> Floats:
            return _finite(to_host(self.stepper.logits(states[layer - 1][None])[0]), layer)

        return LayerLogits(len(tokens) - first, self.stepper.layers, read)

    @torch.inference_mode()
    def lead(self, tokens: Ints, first: int, point: OperatingPoint) -> RuleReadings:
        """As ``audit.lens.Lens``, for every rule whose parameters fit this model.

        Raises:
            BadArgument: an estimator or a pruning of other sizes than this model's.
        """
        # A pruned readout of nearly the whole vocabulary, row by row, would take minutes at 50,000 tokens.
        watch, n = make_probe(self.stepper, point, SharedHeads(self.stepper)), len(tokens) - first
        states = lens_states(self.stepper, tokens, first, self.source)
        signal, shown = np.full((n, len(point.probes)), np.nan), dict[int, Tensor]()
        heads, shows = np.zeros((len(READOUTS), point.layers), dtype=bool), np.zeros(point.layers, dtype=bool)
        macs: Ints = np.zeros((n, point.layers), dtype=np.int64)
        watch.begin()
        for probe, layer in enumerate(point.probes):
            work = Work.none(point.layers)
            reading = watch.read(states[layer - 1], probe, work)
            signal[:, probe] = to_host(reading.signal)
            heads[:, layer - 1] = work.readout_rows[:, layer - 1] > 0
            macs[:, layer - 1] = work.readout_macs[:, layer - 1].sum() // n if reading.macs is None else reading.macs
            if reading.logits is not None:
                shows[layer - 1], shown[layer] = True, reading.logits

        @torch.inference_mode()
        def emitted(layer: int) -> Floats:
            if layer in shown:
                return to_host(shown[layer])
            return to_host(watch.emit(states[layer - 1], layer, Work.none(point.layers)))

        ahead = lens_macs(point_lens(self.stepper, point), point.layers)
        return RuleReadings(signal, LayerLogits(n, point.layers, emitted), ProbeReadouts(heads, shows, macs, ahead))


def _finite(logits: Floats, layer: int) -> Floats:
    if not np.isfinite(logits).all():
        expected = "finite logits"
        raise BadArgument("lens", f"NaN or infinite logits after layer {layer}", expected, "check weights and dtype")
    return logits


def replay_document(
    stepper: Stepper, sequence: TokenSequence, point: OperatingPoint, tolerance: float
) -> ReplayedDocument:
    """Replay of ``sequence`` under ``point``, for ``bridge``; ``tolerance`` of a decoder, for bins near an edge.

    Raises:
        BadArgument: a point that replay does not cover.
    """
    estimators = {} if point.estimator == Estimator() else {point.estimator: point.probes}
    rules = [] if point.confidence is None else [point]
    read = point.readout_layers
    trace = take_trace(stepper, [sequence], estimators=estimators, rules=rules, lens=point.lens, layers=read)
    done, columns = replay(trace, point), np.asarray(point.probes, dtype=np.int64) - 1
    rows: tuple[Ints, ...] = ()
    if point.probes and point.bins.features:
        first = columns[0]
        top1 = [trace.top1[:, first].astype(np.int64)]
        rows = candidate_bins(point.bins, trace.position, trace.top1_probability[:, first], top1, tolerance)
    signal = trace.signal(point)[:, columns].astype(np.float64)
    return ReplayedDocument(sequence.tokens, done.depth, done.nll_nats, signal, sequence.adaptive_from, rows)
