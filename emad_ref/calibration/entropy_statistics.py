"""Running statistics of entropies H_ℓ: calibration in constant memory (EMAD, "Teacher-forcing entropy profile").

    window → one pass up to the last layer read → head(norm(h_ℓ)) after each → H_ℓ [tokens, read] → running statistics

H_ℓ is the entropy of the model's distribution after layer ℓ, given the text's own history, in nats.

Per bin and layer: tokens n, Σ H, Σ H² (float64) and a histogram of H. Statistics add up over batches, corpora and bins.

    mean H_ℓ = Σ H / n     deviation = √(Σ H² / n − mean²)     q-quantile of H_ℓ: where the histogram passes q·n

The histogram has 4,096 buckets at fixed edges: [0, 1e-6], then geometric up to 16 nats (ln V of eight million tokens).
A bucket is 0.41 % wide, so the error of a quantile is below 0.41 % of its value, or 1e-6 nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emad_ref.calibration.trace import Trace, iterate_states_after
from emad_ref.calibration.windows import TokenSequence, decided_positions
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import assign_bins
from emad_ref.models.stepper import Stepper
from emad_ref.point import ThresholdBinSpec
from emad_ref.probes.signal_values import apply_in_row_blocks, entropy_nats
from emad_ref.record import Floats, Ints
from emad_ref.signals import LogitsReadout, exp_log_probabilities, require_finite

BUCKETS = 4096
LOWEST_NATS, HIGHEST_NATS = 1e-6, 16.0
EDGES_NATS: Floats = np.concatenate([[0.0], np.geomspace(LOWEST_NATS, HIGHEST_NATS, BUCKETS)])  # bucket i: (i, i + 1]


@dataclass(frozen=True, eq=False)
class DocumentMoments:
    """Second moments over documents, which give the clustered standard error of every mean entropy.

    v_d = (tokens, Σ H after each layer read) of document d; ``products`` float64 [1 + read, 1 + read] = Σ_d v_d v_dᵀ
    over ``count`` documents. ``first`` and ``last``: (number, v) of the documents at both ends, which may continue in a
    neighbouring batch.
    """

    count: int
    products: Floats
    first: tuple[int, Floats] | None = None
    last: tuple[int, Floats] | None = None

    @staticmethod
    def empty(n_layers_read: int) -> DocumentMoments:
        """Moments of no documents."""
        return DocumentMoments(0, np.zeros((1 + n_layers_read, 1 + n_layers_read)))

    @staticmethod
    def from_entropies(entropy: Floats, document: Ints) -> DocumentMoments:
        """Moments of ``entropy`` [tokens, read], nats, whose tokens belong to ``document`` [tokens]."""
        numbers, place = np.unique(document, return_inverse=True)
        sums = np.stack([np.bincount(place), *(np.bincount(place, weights=column) for column in entropy.T)], axis=1)
        first, last = (int(numbers[0]), sums[0]), (int(numbers[-1]), sums[-1])
        return DocumentMoments(len(numbers), sums.T @ sums, first, last)

    def __add__(self, other: DocumentMoments) -> DocumentMoments:
        """Moments of both texts in sequence; a document that ends one and begins the other counts once."""
        count, products = self.count + other.count, self.products + other.products
        first, last = self.first or other.first, other.last or self.last
        if self.last and other.first and self.last[0] == other.first[0]:
            (number, ours), (_, theirs) = self.last, other.first
            count, products = count - 1, products + np.outer(ours, theirs) + np.outer(theirs, ours)
            first = (number, ours + theirs) if self.count == 1 else first
            last = (number, ours + theirs) if other.count == 1 else last
        return DocumentMoments(count, products, first, last)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DocumentMoments)
            and self.count == other.count
            and np.array_equal(self.products, other.products)
        )

    __hash__ = None  # type: ignore[assignment]  # holds an array

    def with_document_ended(self) -> DocumentMoments:
        """The same moments at the end of a text; the next one begins with another document of any number."""
        return DocumentMoments(self.count, self.products)


@dataclass(frozen=True, eq=False)
class EntropyStatistics:
    """Running statistics of entropies, per bin and layer read.

    ``tokens`` int64 [bins]; ``sums``, ``squares`` float64 [bins, read] of H and H², nats; ``histogram`` int64 [bins,
    read, BUCKETS]; ``sequences`` counts windows. ``documents``: None if documents are unknown.
    """

    tokens: Ints
    sums: Floats
    squares: Floats
    histogram: Ints
    sequences: int
    documents: DocumentMoments | None = None

    @staticmethod
    def empty(bins: int, n_layers_read: int) -> EntropyStatistics:
        """Statistics of no tokens."""
        return EntropyStatistics(
            np.zeros(bins, dtype=np.int64),
            np.zeros((bins, n_layers_read)),
            np.zeros((bins, n_layers_read)),
            np.zeros((bins, n_layers_read, BUCKETS), dtype=np.int64),
            0,
            DocumentMoments.empty(n_layers_read),
        )

    def __add__(self, other: EntropyStatistics) -> EntropyStatistics:
        mine, theirs = self.documents, other.documents
        return EntropyStatistics(
            self.tokens + other.tokens,
            self.sums + other.sums,
            self.squares + other.squares,
            self.histogram + other.histogram,
            self.sequences + other.sequences,
            None if mine is None or theirs is None else mine + theirs,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EntropyStatistics) and all(
            np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays: equal by value, not hashable

    @property
    def n_layers_read(self) -> int:
        return self.sums.shape[1]

    def with_document_ended(self) -> EntropyStatistics:
        """The same statistics at the end of a corpus (``DocumentMoments.with_document_ended``)."""
        return self if self.documents is None else replace(self, documents=self.documents.with_document_ended())

    def pool_bin_groups(self, group: Ints) -> EntropyStatistics:
        """Statistics of groups of bins: ``group`` int64 [bins] numbers the group of each, 0…groups − 1, none empty."""

        def joined(values: NDArray[Any]) -> NDArray[Any]:
            out = np.zeros((int(group.max()) + 1, *values.shape[1:]), dtype=values.dtype)
            np.add.at(out, group, values)
            return out

        sums, squares, histogram = joined(self.sums), joined(self.squares), joined(self.histogram)
        return EntropyStatistics(joined(self.tokens), sums, squares, histogram, self.sequences, self.documents)

    def mean_nats(self) -> Floats:
        """[bins, read]; NaN for a bin without tokens."""
        return self._per_token(self.sums)

    def deviation_nats(self) -> Floats:
        """[bins, read] standard deviation; NaN for a bin without tokens."""
        variance = self._per_token(self.squares) - self.mean_nats() ** 2
        return np.sqrt(np.maximum(variance, 0.0))  # rounding may give a negative difference of equal numbers

    def _per_token(self, total: Floats) -> Floats:
        counts = np.where(self.tokens == 0, np.nan, self.tokens)
        ratio: Floats = total / counts[:, None]
        return ratio

    def quantile_nats(self, quantile: float) -> Floats:
        """[bins, read] the ``quantile`` of the entropies; NaN without tokens.

        Raises:
            BadArgument: not within (0, 1).
        """
        require_quantile(quantile)
        below = self.histogram.cumsum(axis=-1)
        # q·n may round up past an integer it equals, and so past the bucket of that order statistic
        target = quantile * self.tokens * (1 - 1e-12)
        bucket = (below < target[:, None, None]).sum(axis=-1)
        bucket = np.minimum(bucket, BUCKETS - 1)
        inside = np.take_along_axis(self.histogram, bucket[..., None], axis=-1)[..., 0]
        before = np.take_along_axis(below, bucket[..., None], axis=-1)[..., 0] - inside
        with np.errstate(invalid="ignore"):  # 0/0 for a bin without tokens: the result is NaN
            share = (target[:, None] - before) / inside
        level: Floats = EDGES_NATS[bucket] + share * (EDGES_NATS[bucket + 1] - EDGES_NATS[bucket])
        return level


ARRAYS = ("tokens", "sums", "squares", "histogram")  # additive arrays of statistics


def require_quantile(quantile: float) -> None:
    """Refuse a share outside (0, 1): the ends are no order statistics of an unfinished stream."""
    if not 0 < quantile < 1:
        raise BadArgument("quantile", quantile, "a share between 0 and 1, both excluded", "0.5 is the median")


@dataclass(frozen=True, eq=False)
class BatchEntropies:
    """Input of statistics: ``entropy_nats`` float32 [tokens, layers read], ``position`` int64 [tokens] in its sequence.

    ``top1`` int32, ``top1_probability`` float32 [tokens]: the first probe's readout, for bins that need it.
    ``sequences`` counts windows; ``document`` int64 [tokens] numbers the text of each token, None if unknown.
    """

    entropy_nats: NDArray[np.float32]
    position: Ints
    top1: NDArray[np.int32]
    top1_probability: NDArray[np.float32]
    sequences: int
    document: Ints | None = None


def needs_first_probe(spec: ThresholdBinSpec) -> bool:
    """Whether bins depend on the first probe's readout."""
    return bool(set(spec.features) - {"position"})


def require_first_probe(spec: ThresholdBinSpec, first_probe: int | None) -> None:
    """Refuse bins that need a probe if there is none."""
    if first_probe is None and needs_first_probe(spec):
        raise BadArgument("first_probe", None, f"the layer that shows {spec.name}", "choose at least one probe")


def compute_trace_statistics(
    trace: Trace, spec: ThresholdBinSpec, first_probe: int | None, document: Ints | None = None
) -> EntropyStatistics:
    """Statistics of one trace (or batch of it) in the bins of ``spec``, after the layers that it has read.

    ``first_probe``: the layer at which top-1 probability and predicted token are read; None if ``spec`` needs neither.
    ``document``: [tokens] the text of each token, if known.

    Raises:
        BadArgument: features without the probe that shows them; an entropy outside 0–16 nats.
    """
    require_first_probe(spec, first_probe)
    column = (first_probe or 1) - 1
    top1, probability = trace.top1[:, column], trace.top1_probability[:, column]
    entropy = trace.entropy_nats[:, np.array(trace.layers_read) - 1]
    read = BatchEntropies(entropy, trace.position, top1, probability, trace.n_sequences, document)
    return statistics_from_batch_entropies(read, spec)


def statistics_from_batch_entropies(read: BatchEntropies, spec: ThresholdBinSpec) -> EntropyStatistics:
    """Statistics of ``read`` in the bins of ``spec``.

    Raises:
        BadArgument: an entropy outside 0–16 nats.
    """
    index = assign_bins(spec, read.position + 1, read.top1_probability, read.top1)
    entropy = read.entropy_nats.astype(np.float64)
    layers = entropy.shape[1]
    cells = (index[:, None] * layers + np.arange(layers)) * BUCKETS + _bucket_index(entropy)
    shape = (spec.bin_count, layers, BUCKETS)
    statistics = EntropyStatistics.empty(spec.bin_count, layers)
    for number in np.unique(index):
        # layer by layer, so that a sum does not depend on the number of other layers
        mine = np.ascontiguousarray(entropy[index == number].T)
        statistics.sums[number], statistics.squares[number] = mine.sum(axis=1), (mine**2).sum(axis=1)
    return EntropyStatistics(
        np.bincount(index, minlength=spec.bin_count).astype(np.int64),
        statistics.sums,
        statistics.squares,
        np.bincount(cells.ravel(), minlength=int(np.prod(shape))).reshape(shape).astype(np.int64),
        read.sequences,
        None if read.document is None else DocumentMoments.from_entropies(entropy, read.document),
    )


def _bucket_index(entropy: Floats) -> Ints:
    """Bucket of each entropy; values rounded below zero are in the first."""
    bucket = np.searchsorted(EDGES_NATS[1:], entropy, side="left")
    if not (bucket < BUCKETS).all() or not (entropy > -LOWEST_NATS).all():
        raise BadArgument(
            "entropy_nats",
            [float(np.min(entropy)), float(np.max(entropy))],
            f"entropies within 0–{HIGHEST_NATS:g} nats",
            "check the weights and the dtype",
        )
    return bucket.astype(np.int64)


def measure_batch_statistics(
    stepper: Stepper,
    batch: Sequence[TokenSequence],
    spec: ThresholdBinSpec,
    first_probe: int | None,
    layers: Sequence[int],
) -> EntropyStatistics:
    """Statistics of ``batch`` after ``layers`` in the bins of ``spec``, from one forward.

    ``first_probe`` as of ``compute_trace_statistics``, one of ``layers``.

    Raises:
        BadArgument: features without the probe that shows them; an entropy outside 0–16 nats.
        NotFinite: a layer's logits hold NaN.
    """
    require_first_probe(spec, first_probe)
    return statistics_from_batch_entropies(
        compute_batch_entropies(stepper, batch, first_probe if needs_first_probe(spec) else None, layers), spec
    )


@torch.inference_mode()
def compute_batch_entropies(
    stepper: Stepper, batch: Sequence[TokenSequence], shown_after: int | None, layers: Sequence[int]
) -> BatchEntropies:
    """Entropies of ``batch`` after ``layers``, ascending, from one forward.

    ``shown_after``: the layer with likeliest tokens for bins; None: none, replaced by −1 and NaN, which no bin accepts.

    Raises:
        NotFinite: a layer's logits hold NaN.
    """
    position = decided_positions(batch)
    top1: NDArray[np.int32] = np.full(len(position), -1, dtype=np.int32)
    probability: NDArray[np.float32] = np.full(len(position), np.nan, dtype=np.float32)
    columns = []
    for layer, states in zip(layers, iterate_states_after(stepper, batch, layers), strict=True):
        logits = stepper.logits(states)
        entropy = fast_entropy_nats(logits)
        require_finite(entropy, f"after layer {layer}")
        columns.append(entropy.cpu().numpy())
        if layer == shown_after:
            top1 = apply_in_row_blocks(logits, _top1).cpu().numpy()
            probability = apply_in_row_blocks(logits, _top1_probability).cpu().numpy()
    document = np.repeat([s.document for s in batch], [s.n_decided for s in batch])
    return BatchEntropies(np.stack(columns, axis=1), position, top1, probability, len(batch), document)


def fast_entropy_nats(logits: Tensor) -> Tensor:
    """``entropy_nats`` of ``logits`` [n, V] in float32, with equal bits, but faster if no logit is −inf.

    ``signals`` bounds log p below, so that 0·log 0 of a masked logit is 0. That pass and its copy cost a quarter of the
    time. Calibration leaves them out, and calls ``entropy_nats`` if a product was NaN.
    """
    entropy = -apply_in_row_blocks(logits, _expected_log_p)
    return entropy if math.isfinite(entropy.sum().item()) else apply_in_row_blocks(logits, _entropy)


def _expected_log_p(logits: Tensor) -> Tensor:
    """Σ p log p."""
    log_p = logits.float().log_softmax(dim=-1)
    return exp_log_probabilities(log_p).mul_(log_p).sum(dim=-1)


def _entropy(logits: Tensor) -> Tensor:
    return entropy_nats(logits.float())  # in float32 for any dtype of the model, as in a trace


def _top1(logits: Tensor) -> Tensor:
    return LogitsReadout(logits.float()).top2_logits_and_tokens[1][:, 0].int()


def _top1_probability(logits: Tensor) -> Tensor:
    return LogitsReadout(logits.float()).top2_log_probs_and_tokens[0][:, 0].exp()
