"""Lens traces of one model's three splits, the profile of the first, and entropy estimators fitted on them.

Calibrate on one split, choose a margin on a second, judge on a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.profile import BadProfile, Profile, load_profile, profile_of
from emad_ref.calibration.regression import LinearProbeFit, correct_estimator
from emad_ref.calibration.trace import TokenSequence, Trace, take_trace
from emad_ref.exit_rules.bins import frequency_buckets
from emad_ref.exit_rules.rules import default_probes
from emad_ref.measurements.model_under_test import ENCODER_DECODER_REFUSAL, ModelUnderTest
from emad_ref.point import BinSpec, Estimator
from emad_ref.protocol import Unsupported
from emad_ref.replay import sequence_sums
from emad_ref.statistics.units import ByDocument, DocumentOf
from emad_ref.text.documents import Split


class LensTraces:
    """Lens traces, each taken on first use. Raises Unsupported for an encoder-decoder, which continues no document."""

    def __init__(self, subject: ModelUnderTest):
        self.subject = subject

    def _require_plain(self) -> None:
        if self.subject.seq2seq:
            raise Unsupported(ENCODER_DECODER_REFUSAL)

    @cached_property
    def calibration(self) -> Trace:
        """Lens trace of the calibration text, after ``_calibrated_layers`` and the last."""
        return self._take_calibration(self._calibrated_layers)

    @cached_property
    def _every_layer_calibration(self) -> Trace:
        """Lens trace of the calibration text after every layer, for probes that an ablation chooses."""
        return self._take_calibration(None)

    def _take_calibration(self, layers: tuple[int, ...] | None) -> Trace:
        self._require_plain()
        return self.subject.trace(self.calibrated_on, f"calibrate, {self.subject.corpus}", layers=layers)

    @cached_property
    def _calibrated_layers(self) -> tuple[int, ...] | None:
        """Layers to calibrate at if a head costs more FLOPs than a block: the probes. None: every layer."""
        geometry, given = self.subject.loaded.geometry, self.subject.study.profile
        if geometry.head_flops() <= geometry.block_flops():
            return None
        further = () if given is None else self.profile.probes
        return tuple(sorted({*default_probes(self.subject.stepper.layers), *further}))

    @cached_property
    def calibrated_on(self) -> list[TokenSequence]:
        return self.subject.sequences("calibrate", self.subject.budget.calibrate)

    @cached_property
    def validation(self) -> Trace:
        self._require_plain()
        sequences = self.subject.sequences("validate", self.subject.budget.validate)
        return self.subject.trace(sequences, f"validate, {self.subject.corpus}")

    @cached_property
    def evaluation(self) -> Trace:
        self._require_plain()
        return self.subject.trace(self.evaluated, f"evaluate, {self.subject.corpus}")

    @cached_property
    def evaluated(self) -> list[TokenSequence]:
        return self.subject.sequences("evaluate", self.subject.budget.evaluate)

    @cached_property
    def windows(self) -> DocumentOf:
        """[windows] the document each window of ``evaluation`` was cut from."""
        return documents_of(self.evaluated)

    @cached_property
    def tokens(self) -> DocumentOf:
        """[tokens] the document each token of ``evaluation`` belongs to."""
        return tokens_of(self.evaluation, self.evaluated)

    def by_document(self, values: NDArray[Any]) -> ByDocument:
        """Sums of ``values`` [windows, …] of ``evaluation`` within each document."""
        return ByDocument.summed(values, self.windows)

    @property
    def lengths(self) -> ByDocument:
        """[documents] decided tokens of each evaluated document."""
        return self.by_document(self.evaluation.lengths)

    @property
    def entropy_sums(self) -> ByDocument:
        """[documents, L] Σ H_ℓ over the tokens of each evaluated document, nats."""
        trace = self.evaluation
        by_layer = [sequence_sums(trace, trace.entropy_nats[:, layer]) for layer in range(trace.layers)]
        return self.by_document(np.stack(by_layer, axis=1))

    @cached_property
    def profile(self) -> Profile:
        """The study's profile, else the run's own. Raises BadProfile if it belongs to another model."""
        path, subject = self.subject.study.profile, self.subject
        if path is None:
            return self.calibrated()
        profile = load_profile(path)
        profile.require(subject.fingerprint, subject.dtype)
        if profile.layers != subject.stepper.layers:
            raise BadProfile(
                f"profile.layers={profile.layers}, but the model under test has {subject.stepper.layers}; "
                "calibrate this model itself"
            )
        return profile

    def calibrated(self, probes: tuple[int, ...] | None = None, features: tuple[str, ...] = ()) -> Profile:
        """The profile of the calibration text at ``probes`` (default: METHODS'), thresholds by ``features``."""
        frequency = b""
        probes = default_probes(self.subject.stepper.layers) if probes is None else probes
        trace = self.calibration if set(probes) <= set(self.calibration.layers_read) else self._every_layer_calibration
        if "frequency" in features:
            counts = np.bincount(trace.target, minlength=self.subject.stepper.vocabulary)
            frequency = frequency_buckets(counts)
        return profile_of(
            trace,
            probes,
            model=self.subject.name,
            fingerprint=self.subject.fingerprint,
            corpus=self.subject.corpus,
            dtype=self.subject.dtype,
            bins=BinSpec(features, frequency=frequency),
            document=tokens_of(trace, self.calibrated_on).number,
        )


def documents_of(sequences: list[TokenSequence]) -> DocumentOf:
    """[windows] the document each of ``sequences`` was cut from."""
    return DocumentOf(np.array([window.document for window in sequences]))


def tokens_of(trace: Trace, sequences: list[TokenSequence]) -> DocumentOf:
    """[tokens] the document each token of ``trace``, which was taken of ``sequences``, belongs to."""
    return DocumentOf(documents_of(sequences).number[trace.sequence])


PAPER_KS = ((32, 64), (128, 16))  # K of the paper, and the part of V above which it is none of the few largest
PAPER_RANKS = (16, 8)  # fractions of the width: "r ≪ d"
LEAST_K = 4  # with fewer logits the K-th says too little of the tail for an order
FITTED, READ = 40, 60  # windows at most: thousands of tokens, one pass over each per set of estimators


class EntropyEstimates:
    """Entropy estimators: weights from calibration, linear map from validation, compared on evaluation."""

    def __init__(self, traces: LensTraces):
        self._traces, self._subject = traces, traces.subject

    @property
    def probes(self) -> tuple[int, ...]:
        return self._traces.profile.probes

    @cached_property
    def paper(self) -> list[Estimator]:
        """The paper's cheap estimators at sizes that this model can hold.

        Top-K: K = 32 and 128 ("K ≈ 32–128"), at most V/64 and V/16. Low-rank: r = d/16 and d/8 ("r ≪ d"), then top-K at
        the larger K.
        """
        vocabulary, width = self._subject.stepper.unembedding.shape
        ks = [max(min(k, vocabulary // part), LEAST_K) for k, part in PAPER_KS]
        ranks = [max(width // part, 1) for part in PAPER_RANKS]
        estimators = [
            *(Estimator("topk", k=k) for k in ks),
            *(Estimator("lowrank", k=ks[-1], rank=rank) for rank in ranks),
        ]
        return list(dict.fromkeys(estimators))

    @cached_property
    def linear(self) -> Estimator:
        """Ours: a ridge regression from the head's input to entropy, per probe."""
        probes = LinearProbeFit(self._subject.stepper, self.probes)
        sequences = self._subject.sequences("calibrate", FITTED)
        take_trace(self._subject.stepper, sequences, observe=probes, layers=self.probes)
        return probes.estimator()

    def corrected(self, estimators: Sequence[Estimator]) -> list[Estimator]:
        """Each with its linear map to full entropy."""
        trace = self.read("validate", FITTED, estimators)
        full = self.columns(trace.entropy_nats)
        return [correct_estimator(e, self.columns(trace.estimates[e]), full) for e in estimators]

    def read(self, split: Split, count: int, estimators: Sequence[Estimator]) -> Trace:
        """The trace of at most ``count`` windows with every estimator's columns at the probes."""
        return self.read_by_document(split, count, estimators)[0]

    def read_by_document(self, split: Split, count: int, estimators: Sequence[Estimator]) -> tuple[Trace, DocumentOf]:
        """``read``, and the document of each token; a document may give several windows."""
        subject = self._subject
        sequences = subject.sequences(split, count)
        trace = take_trace(
            subject.stepper,
            sequences,
            estimators=dict.fromkeys(estimators, self.probes),
            layers=self.probes,
            progress=f"{subject.name}: estimators, {split}",
            file=subject.progress_stream(),
        )
        return trace, tokens_of(trace, sequences)

    def columns(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """[tokens, probes] of per-layer ``values`` [tokens, L]."""
        return values[:, np.array(self.probes) - 1].astype(np.float64)

    def uncorrected(self, trace: Trace, estimator: Estimator) -> NDArray[np.float64]:
        """[tokens, probes] of a corrected ``estimator`` before its linear map, which ``trace`` has applied.

        The map would hide an estimator's own bias, and a negative slope its order.
        """
        slope, intercept = np.array(estimator.correction).T
        raw: NDArray[np.float64] = (self.columns(trace.estimates[estimator]) - intercept) / slope
        return raw
