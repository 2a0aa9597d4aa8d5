"""The lens of a model with a stepper, including every rule at all layers, and the replay of a document.

Audits compute signals of one layer's readout from its logits. Rules that compare several layers, prune or estimate run
as in decoding (``probes.probe``), over the states of one plain pass and with no token stopping. Under an exact schedule
a decoder sees the same states. So the audit of such a rule covers everything except the reading: the layers read, the
states, the comparison, the emission and the counts. Tests compare the readings with the papers' formulas.

Only this module of the package runs a model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from emad_ref.calibration.trace import (
    compute_layer_states,
    compute_sequence_states,
    take_trace,
)
from emad_ref.calibration.windows import TokenSequence
from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper, make_source_cache_or_none
from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.probes.probe import PrunedProbe, make_probe
from emad_ref.probes.pruned_vocabulary import CachedFullLogitHeads, vocabulary_size_at_confidence
from emad_ref.probes.tuned_lens import get_point_lens, lens_macs_by_layer
from emad_ref.record import READOUTS, Floats, Ints, Work
from emad_ref.replay.replay import replay
from emad_ref.signals import to_numpy_float64
from pytest_emad.audit.decoding_checks import ReplayedDocument
from pytest_emad.audit.reference_logits import (
    LayerLogits,
    ProbeReadoutWork,
    RuleReadings,
    candidate_bins,
    signal_sensitivity,
)
from pytest_emad.audit.tolerances import ROUNDING_FACTORS

ROUNDING_COPIES = 8


@dataclass(frozen=True, eq=False)
class ModelLens:
    """The lens of a model. ``source`` int64 [s]: the encoder input of every sequence; None for decoder-only models."""

    stepper: Stepper
    source: Ints | None = None

    def __call__(self, tokens: Ints, first: int = 0) -> LayerLogits:
        return self.read_layer_logits_by_sequence([(tokens, first)])[0]

    def read_layer_logits_by_sequence(
        self, sequences: Sequence[tuple[Ints, int]], shared: Collection[int] = ()
    ) -> list[LayerLogits]:
        """The logits of several sequences, each from its ``first`` position on, by one pass.

        Heads after ``shared`` layers are read for all sequences at once, others per sequence on demand.
        """
        layers = compute_layer_states(self.stepper, [tokens for tokens, _ in sequences], self.source)
        parts = [slice(first, len(tokens)) for tokens, first in sequences]
        ends = np.cumsum([part.stop - part.start for part in parts])
        known: dict[int, list[Floats]] = {}

        @torch.inference_mode()
        def read(layer: int, row: int) -> Floats:
            states = layers[layer - 1]
            if layer not in shared:
                return _finite(to_numpy_float64(self.stepper.logits(states[row, parts[row]][None])[0]), layer)
            if layer not in known:
                joined = torch.cat([states[each, part] for each, part in enumerate(parts)])
                known[layer] = np.split(
                    _finite(to_numpy_float64(self.stepper.logits(joined[None])[0]), layer), ends[:-1]
                )
            return known[layer][row]

        return [
            LayerLogits(part.stop - part.start, self.stepper.layers, partial(read, row=row))
            for row, part in enumerate(parts)
        ]

    @torch.inference_mode()
    def read_rule(self, tokens: Ints, first: int, point: OperatingPoint) -> RuleReadings:
        """See ``audit.reference_logits.Lens``; for every rule with parameters that fit this model.

        Raises:
            BadArgument: an estimator or a pruning of other sizes than this model's.
        """
        # A pruned readout of nearly the whole vocabulary, row by row, would take minutes at 50,000 tokens.
        rule_probe, n = make_probe(self.stepper, point, CachedFullLogitHeads(self.stepper)), len(tokens) - first
        states = compute_sequence_states(self.stepper, tokens, first, self.source)
        signal, shown = np.full((n, len(point.probes)), np.nan), dict[int, Tensor]()
        heads, shows = np.zeros((len(READOUTS), point.layers), dtype=bool), np.zeros(point.layers, dtype=bool)
        macs: Ints = np.zeros((n, point.layers), dtype=np.int64)
        shrink = None if point.confidence is None else point.confidence.shrink
        sizing: dict[int, Floats] = {}  # layer → confidence [n] that determines the size of its readout
        rule_probe.begin_step()
        for column, layer in enumerate(point.probes):
            work = Work.none(point.layers)
            if isinstance(rule_probe, PrunedProbe) and shrink is not None and rule_probe.confidence is not None:
                sizing[layer] = to_numpy_float64(rule_probe.confidence)
            reading = rule_probe.read(states[layer - 1], column, work)
            signal[:, column] = to_numpy_float64(reading.signal)
            heads[:, layer - 1] = work.readout_rows[:, layer - 1] > 0
            macs[:, layer - 1] = work.readout_macs[:, layer - 1].sum() // n if reading.macs is None else reading.macs
            if reading.logits is not None:
                shows[layer - 1], shown[layer] = True, reading.logits

        @torch.inference_mode()
        def emitted(layer: int) -> Floats:
            if layer in shown:
                return to_numpy_float64(shown[layer])
            return to_numpy_float64(rule_probe.emit_logits(states[layer - 1], layer, Work.none(point.layers)))

        def sizes(error: float) -> Ints:
            """int64 [n, L] tokens of adaptive readouts if every confidence were higher by ``error``; 0 elsewhere."""
            assert shrink is not None, "only adaptive readouts have a size that a confidence determines"
            kept: Ints = np.zeros((n, point.layers), dtype=np.int64)
            smallest = np.full(n, self.stepper.vocabulary_size)
            for layer, confidence in sizing.items():
                certain = np.clip(confidence + error, 0, 1).tolist()
                wanted = [vocabulary_size_at_confidence(self.stepper.vocabulary_size, shrink, c) for c in certain]
                kept[:, layer - 1] = smallest = np.minimum(smallest, wanted)
            return kept

        def macs_within(error: float) -> tuple[Ints, Ints]:
            width, own = self.stepper.geometry.embedding_width, sizes(0.0)
            return macs + (sizes(error) - own) * width, macs + (sizes(-error) - own) * width

        lens_macs = lens_macs_by_layer(get_point_lens(self.stepper, point), point.layers)
        readouts = ProbeReadoutWork(heads, shows, macs, lens_macs, macs_within if sizing else None)
        return RuleReadings(signal, LayerLogits(n, point.layers, emitted), readouts)

    @torch.inference_mode()
    def max_rounding_error(self, tokens: Ints, layers: Sequence[int]) -> float:
        """Largest honest difference by rounding of a logit of the last of ``tokens`` after ``layers``.

        A multiple of the largest difference between one plain pass and copies with states moved at random within their
        dtype's precision after every layer (Parker, "Monte Carlo Arithmetic", 1997).
        """
        stepper, copies = self.stepper, 1 + ROUNDING_COPIES
        rng = torch.Generator().manual_seed(crc32(np.asarray(tokens, dtype=np.int64).tobytes()))
        cache = make_source_cache_or_none(stepper, [self.source] * copies, len(tokens))
        inputs = stepper.prepare_forward(np.tile(np.arange(len(tokens)), (copies, 1)), cache)
        rows = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).expand(copies, -1)
        hidden, largest = _round_at_random(stepper.embed(rows.to(stepper.device), inputs), rng), 0.0
        for layer in range(1, max(layers) + 1):
            hidden = _round_at_random(stepper.run_layers(hidden, layer - 1, layer, inputs), rng)
            if layer in layers:
                plain, *moved = to_numpy_float64(stepper.logits(hidden[:, -1:]))[:, 0]
                largest = max(largest, float(np.abs(np.stack(moved) - plain).max()))
        return ROUNDING_FACTORS[str(hidden.dtype).removeprefix("torch.")] * largest


def _round_at_random(hidden: Tensor, rng: torch.Generator) -> Tensor:
    """States [copies, n, D], all but the first copy moved by up to one unit in the last place."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    share = torch.finfo(hidden.dtype).eps * (2 * torch.rand(hidden.shape, generator=rng, dtype=wide) - 1)
    share[0] = 0
    return (hidden.to(wide) * (1 + share.to(hidden.device))).to(hidden.dtype)


def _finite(logits: Floats, layer: int) -> Floats:
    if not np.isfinite(logits).all():
        expected = "finite logits"
        raise BadArgument("lens", f"NaN or infinite logits after layer {layer}", expected, "check weights and dtype")
    return logits


def replay_document(
    stepper: Stepper, sequence: TokenSequence, point: OperatingPoint, tolerance: float
) -> ReplayedDocument:
    """Replay of ``sequence`` under ``point``; ``tolerance`` of a decoder, for bins near an edge.

    Raises:
        BadArgument: a point that replay does not cover.
    """
    estimators = {} if point.estimator == EntropyEstimator() else {point.estimator: point.probes}
    rules = [] if point.confidence is None else [point]
    read = point.readout_layers
    trace = take_trace(stepper, [sequence], estimators=estimators, rules=rules, lens=point.lens, layers=read)
    done, columns = replay(trace, point), np.asarray(point.probes, dtype=np.int64) - 1
    rows: tuple[Ints, ...] = ()
    if point.probes and point.bins.features:
        first = columns[0]
        top1 = [trace.top1[:, first].astype(np.int64)]
        rows = candidate_bins(point.bins, trace.position, trace.top1_probability[:, first], top1, tolerance)
    signal = trace.rule_signal(point)[:, columns].astype(np.float64)

    def slopes() -> Floats:
        read = ModelLens(stepper, sequence.source).read_rule(sequence.tokens[:-1], sequence.first_decided, point)
        return signal_sensitivity(point, read.emitted)

    return ReplayedDocument(sequence.tokens, done.depth, done.nll_nats, signal, sequence.first_decided, rows, slopes)
