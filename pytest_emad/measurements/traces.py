"""Lens traces of one model's three splits, the profile of the first, and entropy estimators fitted on them.

Calibrate on one split, choose a margin on a second, judge on a third.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.profile import BadProfile, Profile, load_profile, profile_of
from emad_ref.calibration.regression import LinearProbeFit, correct_estimator
from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.exit_rules import assign_frequency_buckets, default_probes
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec
from emad_ref.protocol import Unsupported
from emad_ref.text.documents import Split
from pytest_emad.measurements.model_under_test import ENCODER_DECODER_REFUSAL, ModelUnderTest
from pytest_emad.statistics.units import ByDocument, DocumentMembership

TRACES: dict[Split, str] = {"calibrate": "calibration", "validate": "validation", "evaluate": "evaluation"}
SAMPLE_EVERY = 8  # number of sampled positions, at which every layer's head costs less than the probes' heads at all


class LensTraces:
    """Lens traces, each taken on first use. Raises Unsupported for an encoder-decoder, which continues no document.

    ``subject``: the model with its corpus, windows and decoders; its ``take_lens_trace`` calls ``trace.take_trace``.
    """

    def __init__(self, subject: ModelUnderTest):
        self.subject = subject
        self._every_layer: dict[Split, Trace] = {}
        self._windows: dict[Split, list[TokenSequence]] = {}

    @cached_property
    def calibration(self) -> Trace:
        """Lens trace of the calibration text, after ``layers_read`` and the last."""
        return self._take("calibrate", self.layers_read)

    @cached_property
    def validation(self) -> Trace:
        """Lens trace of the validation text, after ``layers_read`` and the last."""
        return self._take("validate", self.layers_read)

    @cached_property
    def evaluation(self) -> Trace:
        """Lens trace of the evaluation text, after ``layers_read`` and the last layer; after the others at a sample."""
        return self._take("evaluate", self.layers_read, SAMPLE_EVERY)

    def trace_every_layer(self, split: Split) -> Trace:
        """Lens trace of a split after every layer, for probes and depths that an ablation chooses."""
        if split not in self._every_layer:
            self._every_layer[split] = self._take(split, None)
        return self._every_layer[split]

    def get_trace_covering(self, split: Split, points: Iterable[OperatingPoint]) -> Trace:
        """The split's trace if it has read every layer of ``points``, else that of every layer."""
        trace: Trace = getattr(self, TRACES[split])
        return trace if all(trace.has_layers_for(point) for point in points) else self.trace_every_layer(split)

    def _take(self, split: Split, layers: tuple[int, ...] | None, sample_every: int | None = None) -> Trace:
        if self.subject.is_seq2seq:
            raise Unsupported(ENCODER_DECODER_REFUSAL)
        return self.subject.take_lens_trace(
            self._text(split), f"{split}, {self.subject.corpus}", layers=layers, sample_every=sample_every
        )

    def _text(self, split: Split) -> list[TokenSequence]:
        """The windows of a split, as many as the budget has, cut once."""
        if split not in self._windows:
            self._windows[split] = self.subject.cut_windows(split, getattr(self.subject.budget, split))
        return self._windows[split]

    @cached_property
    def layers_read(self) -> tuple[int, ...] | None:
        """Layers whose heads are read if a head costs more FLOPs than a block: the probes. None: every layer."""
        geometry, given = self.subject.loaded.geometry, self.subject.study.profile
        if not geometry.has_costly_head:
            return None
        further = () if given is None else self.profile.probes
        return tuple(sorted({*default_probes(self.subject.stepper.layers), *further}))

    @cached_property
    def calibration_windows(self) -> list[TokenSequence]:
        return self._text("calibrate")

    @cached_property
    def evaluation_windows(self) -> list[TokenSequence]:
        return self._text("evaluate")

    @cached_property
    def document_of_window(self) -> DocumentMembership:
        """[windows] the document each window of ``evaluation`` was cut from."""
        return documents_of_windows(self.evaluation_windows)

    @cached_property
    def document_of_token(self) -> DocumentMembership:
        """[tokens] the document each token of ``evaluation`` belongs to."""
        return documents_of_tokens(self.evaluation, self.evaluation_windows)

    def sum_by_document(self, values: NDArray[Any]) -> ByDocument:
        """Sums of ``values`` [windows, …] of ``evaluation`` within each document."""
        return ByDocument.from_summed_windows(values, self.document_of_window)

    @property
    def document_lengths(self) -> ByDocument:
        """[documents] decided tokens of each evaluated document."""
        return self.sum_by_document(self.evaluation.n_decided_by_sequence)

    @property
    def entropy_sums(self) -> tuple[ByDocument, ByDocument]:
        """(Σ H_ℓ in nats [documents, L], tokens [documents]) over the positions at which every layer was read.

        Only evaluated documents with such a position; a short one may have none.
        """
        trace = self.evaluation.fully_read_trace
        by_layer = [
            trace.token_positions.sum_by_sequence(trace.entropy_nats[:, layer]) for layer in range(trace.layers)
        ]
        sums, tokens = (
            self.sum_by_document(np.stack(by_layer, axis=1)),
            self.sum_by_document(trace.n_decided_by_sequence),
        )
        has_tokens = tokens.values > 0
        return sums.select(has_tokens), tokens.select(has_tokens)

    @cached_property
    def profile(self) -> Profile:
        """The study's profile, else the run's own. Raises BadProfile if it belongs to another model."""
        path, subject = self.subject.study.profile, self.subject
        if path is None:
            return self.calibrate_profile()
        profile = load_profile(path)
        profile.require(subject.fingerprint, subject.dtype)
        if profile.layers != subject.stepper.layers:
            raise BadProfile(
                f"profile.layers={profile.layers}, but the model under test has {subject.stepper.layers}; "
                "calibrate this model itself"
            )
        return profile

    def calibrate_profile(self, probes: tuple[int, ...] | None = None, features: tuple[str, ...] = ()) -> Profile:
        """The profile of the calibration text at ``probes`` (``default_probes``), thresholds by ``features``."""
        frequency = b""
        probes = default_probes(self.subject.stepper.layers) if probes is None else probes
        read = set(probes) <= set(self.calibration.layers_read)
        trace = self.calibration if read else self.trace_every_layer("calibrate")
        if "frequency" in features:
            counts = np.bincount(trace.target, minlength=self.subject.stepper.vocabulary_size)
            frequency = assign_frequency_buckets(counts)
        return profile_of(
            trace,
            probes,
            model=self.subject.name,
            fingerprint=self.subject.fingerprint,
            corpus=self.subject.corpus,
            dtype=self.subject.dtype,
            bins=ThresholdBinSpec(features, frequency=frequency),
            document=documents_of_tokens(trace, self.calibration_windows).number,
        )


def documents_of_windows(sequences: list[TokenSequence]) -> DocumentMembership:
    """[windows] the document each of ``sequences`` was cut from."""
    return DocumentMembership(np.array([window.document for window in sequences]))


def documents_of_tokens(trace: Trace, sequences: list[TokenSequence]) -> DocumentMembership:
    """[tokens] the document each token of ``trace``, which was taken of ``sequences``, belongs to."""
    return DocumentMembership(documents_of_windows(sequences).number[trace.sequence_index])


PAPER_KS = ((32, 64), (128, 16))  # the paper's K, and the largest share of V for it
PAPER_RANKS = (16, 8)  # fractions of the width: "r ≪ d"
LEAST_K = 4  # with fewer logits the K-th is too uninformative about the tail for ranking
FITTED, READ = 40, 100  # most windows: thousands of tokens, one pass over each per set of estimators
READ_SHARE = 0.6  # of a window: more documents with fewer positions each show more at the same cost
COSTLY_TOKENS = 64  # decided tokens of a window if a head costs more than a block, since estimators read several


class EntropyEstimators:
    """Entropy estimators: weights from calibration, linear map from validation, compared on evaluation."""

    def __init__(self, traces: LensTraces):
        self._traces, self._subject = traces, traces.subject

    @property
    def probes(self) -> tuple[int, ...]:
        return self._traces.profile.probes

    @cached_property
    def paper_topk_and_lowrank_estimators(self) -> list[EntropyEstimator]:
        """The paper's cheap estimators at sizes that this model can hold.

        Top-K: K = 32 and 128 ("K ≈ 32–128"), at most V/64 and V/16. Low-rank: r = d/16 and d/8 ("r ≪ d"), then top-K at
        the larger K.
        """
        vocabulary, width = self._subject.stepper.unembedding.shape
        ks = [max(min(k, vocabulary // part), LEAST_K) for k, part in PAPER_KS]
        ranks = [max(width // part, 1) for part in PAPER_RANKS]
        estimators = [
            *(EntropyEstimator("topk", k=k) for k in ks),
            *(EntropyEstimator("lowrank", k=ks[-1], rank=rank) for rank in ranks),
        ]
        return list(dict.fromkeys(estimators))

    @cached_property
    def linear_estimator(self) -> EntropyEstimator:
        """The linear probe: a ridge regression from the head's input to entropy, per probe."""
        probes = LinearProbeFit(self._subject.stepper, self.probes)
        sequences = self._beginnings("calibrate", FITTED)
        take_trace(self._subject.stepper, sequences, observe=probes, layers=self.probes)
        return probes.fit_estimator()

    def correct_estimators(self, estimators: Sequence[EntropyEstimator]) -> list[EntropyEstimator]:
        """Each with its linear map to full entropy."""
        trace, _ = self.take_trace_with_documents("validate", FITTED, estimators)
        full = self.take_probe_columns(trace.entropy_nats)
        return [correct_estimator(e, self.take_probe_columns(trace.estimates[e]), full) for e in estimators]

    def take_trace_with_estimates(self, split: Split, count: int, estimators: Sequence[EntropyEstimator]) -> Trace:
        """The trace of at most ``count`` windows with every estimator's columns at the probes."""
        return self._take(self._subject.cut_windows(split, count), split, estimators)

    def take_trace_with_documents(
        self, split: Split, count: int, estimators: Sequence[EntropyEstimator]
    ) -> tuple[Trace, DocumentMembership]:
        """``take_trace_with_estimates`` of beginnings, and the document of each token; windows may share a document."""
        sequences = self._beginnings(split, count)
        trace = self._take(sequences, split, estimators)
        return trace, documents_of_tokens(trace, sequences)

    def _take(self, sequences: list[TokenSequence], split: Split, estimators: Sequence[EntropyEstimator]) -> Trace:
        return take_trace(
            self._subject.stepper,
            sequences,
            estimators=dict.fromkeys(estimators, self.probes),
            layers=self.probes,
            progress=f"{self._subject.name}: estimators, {split}",
            file=self._subject.get_progress_stream(),
        )

    def _beginnings(self, split: Split, count: int) -> list[TokenSequence]:
        """Beginnings of at most ``count`` windows; ``COSTLY_TOKENS`` tokens of each if the model's head is costly."""
        costly = self._subject.loaded.geometry.has_costly_head
        longest = COSTLY_TOKENS if costly else max(1, round(READ_SHARE * self._subject.window_size))
        sequences = self._subject.cut_windows(split, count)
        return [replace(each, tokens=each.tokens[: each.first_decided + 1 + longest]) for each in sequences]

    def take_probe_columns(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """[tokens, probes] of per-layer ``values`` [tokens, L]."""
        return values[:, np.array(self.probes) - 1].astype(np.float64)

    def compute_uncorrected_estimates(self, trace: Trace, estimator: EntropyEstimator) -> NDArray[np.float64]:
        """Estimates [tokens, probes] of a corrected ``estimator`` without its linear map, which ``trace`` has applied.

        The map hides an estimator's own bias, and a negative slope its order.
        """
        slope, intercept = np.array(estimator.correction).T
        raw: NDArray[np.float64] = (self.take_probe_columns(trace.estimates[estimator]) - intercept) / slope
        return raw
