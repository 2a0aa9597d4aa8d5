"""Probe of an operating point: reads each row's signal after a layer, and the logits from which a stopping row emits.

``read`` evaluates states after a probe layer and charges its work; ``emit_logits`` is the full readout, which
probes use, and rows that stop where no probe gave logits. Some probes remember shallower layers of the same step:
``begin_step`` forgets them. ``read`` gets the rows that still run, and drops those that have stopped.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import ConfidenceParameters, OperatingPoint
from emad_ref.probes.contrast import get_score_function
from emad_ref.probes.estimators import EntropyReader, make_entropy_reader
from emad_ref.probes.pruned_vocabulary import (
    CandidateTokens,
    ReadoutHeads,
    UncachedHeads,
    vocabulary_size_at_confidence,
)
from emad_ref.probes.signal_values import hidden_state_cosine, softmax_response
from emad_ref.probes.tuned_lens import get_point_lens
from emad_ref.record import Ints, Work
from emad_ref.signals import (
    HALF_DEPTH,
    LAYER_LOGITS,
    PREVIOUS_PROBE,
    SIGNALS,
    SINCE_MINIMUM,
    STATE_BELOW,
    LogitsReadout,
    ProbeOutput,
    SignalInputRequirement,
    log_probabilities,
    require_finite,
    require_finite_cpu_float64,
)


class BaseProbe:
    """Base of all probes: without memory, and with a full head at the exit, through the point's lens if any.

    ``emit_logits`` counts one full readout per row in ``work``, for a probe's reading as for a stop.

    ``heads``: computes the readouts, such as a trace's ``CachedFullLogitHeads``; by default the stepper's own head.

    Raises:
        BadArgument: a lens that is not attached to the stepper, or that lacks one of the probes.
    """

    def __init__(self, stepper: Stepper, point: OperatingPoint, heads: ReadoutHeads | None = None):
        self.stepper, self.point, self.heads = stepper, point, heads
        self.lens = get_point_lens(stepper, point)

    def begin_step(self) -> None:
        """Nothing to forget."""

    def emit_logits(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        read = hidden if self.lens is None else self.lens.apply_and_count_work(hidden, layer, work)
        work.count_readout("full", layer, hidden.shape[:-1].numel())
        return self.stepper.logits(read) if self.heads is None else self.heads.full_logits(read)


class RememberingProbe(BaseProbe):
    """Base of probes that compare layers: ``memory`` holds a tensor [running, …] of each shallower layer, by layer."""

    def begin_step(self) -> None:
        self.memory: dict[int, Tensor] = {}
        self._row_ids: Ints | None = None  # rows of the latest reading

    def recall(self, hidden: Tensor, row_ids: Ints | None) -> dict[int, Tensor]:
        """``memory`` of the rows of ``hidden`` [running, D], without those that stopped since the latest reading."""
        before, self._row_ids = self._row_ids, row_ids
        if before is not None and row_ids is not None and len(row_ids) < len(before):
            self.keep_rows(torch.from_numpy(np.searchsorted(before, row_ids)).to(hidden.device))
        for remembered in self.memory.values():
            require_same_rows(len(remembered), len(hidden))
        return self.memory

    def keep_rows(self, kept: Tensor) -> None:
        """Keep only these of the remembered rows (int64 indices)."""
        self.memory = {layer: remembered[kept] for layer, remembered in self.memory.items()}


class FullSoftmaxProbe(BaseProbe):
    """A full softmax: its logits give any signal of one layer, and a stopping row emits from them."""

    def read(self, hidden: Tensor, column: int, work: Work, row_ids: Ints | None = None) -> ProbeOutput:
        layer = self.point.probes[column]
        logits = self.emit_logits(hidden, layer, work)
        return ProbeOutput(
            require_finite_cpu_float64(SIGNALS[self.point.signal].compute_from_logits(logits), f"after layer {layer}"),
            logits,
        )


class SaturationProbe(RememberingProbe):
    """Compares each layer with the one below, so probes are consecutive and the first has no signal."""

    def read(self, hidden: Tensor, column: int, work: Work, row_ids: Ints | None = None) -> ProbeOutput:
        layer = self.point.probes[column]
        below = self.recall(hidden, row_ids).get(layer - 1)
        self.memory = {layer: hidden}
        if below is None:
            return ProbeOutput(torch.full_like(hidden[:, 0], torch.nan), None)
        return ProbeOutput(require_finite_cpu_float64(hidden_state_cosine(hidden, below), f"after layer {layer}"), None)


class ContrastProbe(RememberingProbe):
    """Remembers log-probabilities [running, V], with which every deeper layer compares."""

    def read(self, hidden: Tensor, column: int, work: Work, row_ids: Ints | None = None) -> ProbeOutput:
        layer, log_probs = self.point.probes[column], self.recall(hidden, row_ids)
        logits = self.emit_logits(hidden, layer, work)
        log_probs[layer] = log_probabilities(logits)
        return get_score_function(self.point.signal)(_parameters(self.point), layer, logits, log_probs)


class PrunedProbe(RememberingProbe):
    """Remembers each row's candidate tokens and their logits by layer, instead of ``memory``.

    Raises:
        BadArgument: an adaptive rule that, at full confidence, would keep less than two of this vocabulary.
    """

    def __init__(self, stepper: Stepper, point: OperatingPoint, heads: ReadoutHeads | None = None):
        self.pruned_heads = heads or UncachedHeads(stepper)
        super().__init__(stepper, point, self.pruned_heads)
        shrink = _parameters(point).shrink
        if shrink is not None and vocabulary_size_at_confidence(stepper.vocabulary_size, shrink, 1.0) < 2:
            expected = f"a share that leaves 2 of {stepper.vocabulary_size} tokens at full confidence"
            raise BadArgument("confidence.shrink", shrink, expected, "of one token there is no second to compare")

    def begin_step(self) -> None:
        super().begin_step()
        self.candidates: CandidateTokens | None = None
        self.confidence: Tensor | None = None  # [running] of the last probe, which determines the adaptive k

    def read(self, hidden: Tensor, column: int, work: Work, row_ids: Ints | None = None) -> ProbeOutput:
        self.recall(hidden, row_ids)
        layer, parameters = self.point.probes[column], _parameters(self.point)
        if layer == parameters.minimum:
            logits = self.emit_logits(hidden, layer, work)
            self.candidates = CandidateTokens.start_with_all_tokens(layer, logits)
            # the JSD contrast is not defined yet: only the readout's own response gives a confidence
            self.confidence = softmax_response(logits)
            return get_score_function(self.point.signal)(parameters, layer, logits, {})
        assert self.candidates is not None, "the minimum layer is the first that a pruned rule reads"
        require_same_rows(len(self.candidates), len(hidden))
        self.candidates = self.candidates.narrow_to(self._sizes(column)).add_logits_of_layer(
            self.pruned_heads, hidden, layer, work
        )
        compared = self.candidates.logits if SIGNALS[self.point.signal].is_contrastive else {}
        log_probs = {m: log_probabilities(z) for m, z in compared.items()}  # over the remaining candidates
        output = get_score_function(self.point.signal)(parameters, layer, self.candidates.logits[layer], log_probs)
        self.confidence = output.signal
        assert output.logits is not None, "scores of readouts give logits"
        return ProbeOutput(
            output.signal,
            self.candidates.scatter_to_vocabulary(output.logits),
            self.candidates.macs_per_row(self.stepper.geometry),
        )

    def keep_rows(self, kept: Tensor) -> None:
        assert self.candidates is not None, "rows stop after the first reading"
        assert self.confidence is not None, "set with the candidates"
        self.candidates, self.confidence = self.candidates.keep_rows(kept), self.confidence[kept]

    def _sizes(self, column: int) -> list[int]:
        parameters = _parameters(self.point)
        assert self.confidence is not None, "set at the minimum layer"
        if parameters.shrink is None:
            # the first probe is the minimum layer, which prunes nothing
            return [parameters.kept[column - 1]] * len(self.confidence)
        vocabulary, shrink = self.stepper.vocabulary_size, parameters.shrink
        return [vocabulary_size_at_confidence(vocabulary, shrink, c) for c in self.confidence.double().tolist()]


def _parameters(point: OperatingPoint) -> ConfidenceParameters:
    assert point.confidence is not None, "only points with a confidence have these probes"
    return point.confidence


def require_same_rows(remembered: int, read: int) -> None:
    """Check that the rows read are those remembered, since a reading must name its rows once some have stopped."""
    assert remembered == read, f"{remembered} rows are remembered, {read} are shown"


def make_confidence_probe(
    stepper: Stepper, point: OperatingPoint, heads: ReadoutHeads | None = None
) -> SaturationProbe | ContrastProbe | PrunedProbe:
    """The probe of a point with a ``confidence``; ``heads`` as in ``BaseProbe``."""
    return CONFIDENCE_PROBES[SIGNALS[point.signal].needs, _parameters(point).prunes_vocabulary](stepper, point, heads)


# (kind of the signal, whether the vocabulary is pruned) → probe; points refuse other combinations
CONFIDENCE_PROBES: dict[tuple[SignalInputRequirement, bool], type[SaturationProbe | ContrastProbe | PrunedProbe]] = {
    (STATE_BELOW, False): SaturationProbe,
    (HALF_DEPTH, False): ContrastProbe,
    (SINCE_MINIMUM, False): ContrastProbe,
    (SINCE_MINIMUM, True): PrunedProbe,
    (LAYER_LOGITS, True): PrunedProbe,
}


class Probe(Protocol):
    def begin_step(self) -> None:
        """Begin a new step: forget the shallower layers."""

    def read(self, hidden: Tensor, column: int, work: Work, row_ids: Ints | None = None) -> ProbeOutput:
        """Read Ĥ_ℓ of states h_ℓ [running, D] after layer ℓ = ``point.probes[column]``.

        ``row_ids`` int64 [running]: the rows that still run, ascending, some of those of the step's reading before
        (``kv_cache.RunningRows.row_ids``); None: the same rows. Raises NotFinite.
        """

    def emit_logits(self, hidden: Tensor, layer: int, work: Work) -> Tensor:
        """Logits [..., V] of states [..., D] that stop after ``layer``."""


class EstimatorProbe(BaseProbe):
    """An estimate of the entropy; a head runs once, at the exit."""

    def __init__(self, stepper: Stepper, point: OperatingPoint):
        super().__init__(stepper, point)
        self.reader: EntropyReader = make_entropy_reader(stepper, point.estimator, point.probes)

    def read(self, hidden: Tensor, column: int, work: Work, row_ids: Ints | None = None) -> ProbeOutput:
        layer = self.point.probes[column]
        rows = hidden.shape[0]
        work.count_readout(self.reader.kind, layer, rows, rows * self.reader.macs_per_row)
        entropy = self.reader.entropy_nats(hidden, column)
        return ProbeOutput(require_finite_cpu_float64(entropy, f"after layer {layer}"), None)


class PreviousTop1AgreementProbe(RememberingProbe):
    """A full softmax that remembers the previous probe's top-1 token of each row."""

    def read(self, hidden: Tensor, column: int, work: Work, row_ids: Ints | None = None) -> ProbeOutput:
        layer = self.point.probes[column]
        before = self.recall(hidden, row_ids).get(self.point.probes[column - 1])
        logits = self.emit_logits(hidden, layer, work)
        log_p, best = (pair[:, 0] for pair in LogitsReadout(logits).top2_log_probs_and_tokens)
        require_finite(log_p, f"after layer {layer}")
        self.memory = {layer: best}
        if before is None:
            return ProbeOutput(torch.zeros_like(log_p), logits)
        return ProbeOutput(torch.where(best == before, log_p.exp(), 0.0), logits)


def make_probe(stepper: Stepper, point: OperatingPoint, heads: ReadoutHeads | None = None) -> Probe:
    """The probe that ``point`` names; ``heads``: as of ``make_confidence_probe``."""
    if point.confidence is not None:
        return make_confidence_probe(stepper, point, heads)
    if SIGNALS[point.signal].needs is PREVIOUS_PROBE:
        return PreviousTop1AgreementProbe(stepper, point)
    return FullSoftmaxProbe(stepper, point) if point.estimator.kind == "full" else EstimatorProbe(stepper, point)
