"""Entropy estimators of one model's evidence: fitted on two splits, read on a third.

weights of the linear probe    calibration split
linear map to full entropy     validation split ("held-out tokens")
comparison with full entropy   evaluation split
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.fit import LinearProbes, corrected_estimator
from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.evidence.traces import Traces, tokens_of
from emad_ref.point import Estimator
from emad_ref.text.documents import Split
from emad_ref.verdict.units import DocumentOf

PAPER_KS = ((32, 64), (128, 16))  # K of the paper, and the part of V above which it is none of the few largest
PAPER_RANKS = (16, 8)  # parts of the width: "r ≪ d"
LEAST_K = 4  # with fewer logits the K-th says too little of the tail for any order to be left
FITTED, READ = 40, 60  # windows at most: tokens by the thousand, one pass over each per set of estimators


class Estimates:
    """Taken when first asked for and kept."""

    def __init__(self, traces: Traces):
        self._traces, self._subject = traces, traces.subject

    @property
    def probes(self) -> tuple[int, ...]:
        return self._traces.profile.probes

    @cached_property
    def paper(self) -> list[Estimator]:
        """The paper's cheap estimators at the sizes it means, small and large, as far as this model can hold them.

        Top-K: K = 32 and 128 (its "K ≈ 32–128"), yet at most V/64 and V/16: an eighth of a vocabulary of 512 is no
        top-K. Low-rank: r = d/16 and d/8 (its "r ≪ d"), then top-K as above at the larger K.
        """
        vocabulary, width = self._subject.stepper.unembedding.shape
        ks = [max(min(k, vocabulary // part), LEAST_K) for k, part in PAPER_KS]
        ranks = [max(width // part, 1) for part in PAPER_RANKS]
        found = [*(Estimator("topk", k=k) for k in ks), *(Estimator("lowrank", k=ks[-1], rank=rank) for rank in ranks)]
        return list(dict.fromkeys(found))

    @cached_property
    def linear(self) -> Estimator:
        """Ours: a ridge regression from the head's input to entropy, per probe."""
        probes = LinearProbes(self._subject.stepper, self.probes)
        take_trace(self._subject.stepper, self._subject.sequences("calibrate", FITTED), observe=probes)
        return probes.estimator()

    def corrected(self, estimators: Sequence[Estimator]) -> list[Estimator]:
        """Each with its linear map to full entropy."""
        trace = self.read("validate", FITTED, estimators)
        full = self.columns(trace.entropy_nats)
        return [corrected_estimator(e, self.columns(trace.estimates[e]), full) for e in estimators]

    def read(self, split: Split, count: int, estimators: Sequence[Estimator]) -> Trace:
        """The trace of at most ``count`` windows with every estimator's columns at the probes."""
        return self.read_by_document(split, count, estimators)[0]

    def read_by_document(self, split: Split, count: int, estimators: Sequence[Estimator]) -> tuple[Trace, DocumentOf]:
        """``read``, and the document that each token of it belongs to: one may have given several windows."""
        subject = self._subject
        sequences = subject.sequences(split, count)
        trace = take_trace(
            subject.stepper,
            sequences,
            estimators=dict.fromkeys(estimators, self.probes),
            progress=f"{subject.name}: estimators, {split}",
            file=subject.bars(),
        )
        return trace, tokens_of(trace, sequences)

    def columns(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """[tokens, probes] of per-layer ``values`` [tokens, L]."""
        return values[:, np.array(self.probes) - 1].astype(np.float64)

    def uncorrected(self, trace: Trace, estimator: Estimator) -> NDArray[np.float64]:
        """[tokens, probes] what a corrected ``estimator`` said before its linear map, which ``trace`` has applied.

        Order and bias are an estimator's own: a negative slope would turn the order round, and no bias would be left.
        """
        slope, intercept = np.array(estimator.correction).T
        raw: NDArray[np.float64] = (self.columns(trace.estimates[estimator]) - intercept) / slope
        return raw
