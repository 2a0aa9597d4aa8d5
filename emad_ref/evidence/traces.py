"""Lens traces of one model's three splits, and the profile calibrated on the first.

calibrate on one split → profile → choose a margin on a second → judge on a third
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.profile import BadProfile, Profile, load_profile, profile_of
from emad_ref.calibration.trace import TokenSequence, Trace
from emad_ref.evidence.subject import PLAIN, Subject
from emad_ref.point import BinSpec
from emad_ref.policy.bins import frequency_buckets
from emad_ref.policy.thresholds import default_probes
from emad_ref.protocol import Unsupported
from emad_ref.replay import sums
from emad_ref.verdict.units import ByDocument, DocumentOf


class Traces:
    """Taken when first asked for and kept.

    Raises:
        Unsupported: an encoder-decoder model continues no document: the claim that asked is not applicable.
    """

    def __init__(self, subject: Subject):
        self.subject = subject

    def _require_plain(self) -> None:
        """What is calibrated on documents belongs to models that continue documents."""
        if self.subject.seq2seq:
            raise Unsupported(PLAIN)

    @cached_property
    def calibration(self) -> Trace:
        self._require_plain()
        sequences = self.subject.sequences("calibrate", self.subject.budget.calibrate)
        return self.subject.trace(sequences, f"calibrate, {self.subject.corpus}")

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

    # ------------------------------------------------------------ the unit that intervals resample

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
        by_layer = [sums(trace, trace.entropy_nats[:, layer]) for layer in range(trace.layers)]
        return self.by_document(np.stack(by_layer, axis=1))

    # ------------------------------------------------------------ profile

    @cached_property
    def profile(self) -> Profile:
        """The one named in the study, else the run's own.

        Raises:
            BadProfile: the named one belongs to another model.
        """
        given, subject = self.subject.study.profile, self.subject
        if given is None:
            return self.calibrated()
        profile = load_profile(given)
        profile.require(subject.fingerprint, subject.dtype)
        if profile.layers != subject.stepper.layers:
            raise BadProfile(
                f"profile.layers={profile.layers}, but the model under test has {subject.stepper.layers}; "
                "calibrate this model itself"
            )
        return profile

    def calibrated(self, probes: tuple[int, ...] | None = None, features: tuple[str, ...] = ()) -> Profile:
        """The profile of this run's calibration text at ``probes`` (default: METHODS'), thresholds by ``features``."""
        frequency = b""
        if "frequency" in features:
            counts = np.bincount(self.calibration.target, minlength=self.subject.stepper.vocabulary)
            frequency = frequency_buckets(counts)
        return profile_of(
            self.calibration,
            default_probes(self.subject.stepper.layers) if probes is None else probes,
            model=self.subject.name,
            fingerprint=self.subject.fingerprint,
            corpus=self.subject.corpus,
            dtype=self.subject.dtype,
            bins=BinSpec(features, frequency=frequency),
        )


def documents_of(sequences: list[TokenSequence]) -> DocumentOf:
    """[windows] the document each of ``sequences`` was cut from."""
    return DocumentOf(np.array([window.document for window in sequences]))


def tokens_of(trace: Trace, sequences: list[TokenSequence]) -> DocumentOf:
    """[tokens] the document each token of ``trace``, which was taken of ``sequences``, belongs to."""
    return DocumentOf(documents_of(sequences).number[trace.sequence])
