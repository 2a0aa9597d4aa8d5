"""What one run knows of one model: evidence, taken once, on demand, in the order the paper prescribes.

    calibrate on one split → profile → choose a margin on a second → judge on a third

Every property is computed when a suite first asks for it and kept until the model is freed. No mathematics here: it
calls ``emad_ref`` and holds the results. What belongs to one family of questions stands in a module of its own
(``scored``, ``rivals``, ``estimates``, ``exits``, ``timing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.calibration.profile import BadProfile, Profile, load_profile, profile_of
from emad_ref.calibration.trace import EmptyCorpus, TokenSequence, Trace
from emad_ref.models.loading import Loaded, load
from emad_ref.point import BinSpec, OperatingPoint
from emad_ref.policy.bins import frequency_buckets
from emad_ref.policy.thresholds import default_probes
from emad_ref.protocol import Unsupported
from emad_ref.record import Ints
from emad_ref.sweep.grids import emad_margins, truncations
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.sweep.select import cheapest_within_bounds
from emad_ref.text.documents import Split
from emad_ref.verdict.judge import PointEvidence
from pytest_emad.estimates import Estimates
from pytest_emad.exits import Exits
from pytest_emad.options import MARGINS
from pytest_emad.rivals import Rivals
from pytest_emad.scored import Scored
from pytest_emad.subject import PLAIN, Subject
from pytest_emad.timing import Stopwatch

JUDGED: tuple[Split, ...] = ("calibrate", "validate", "evaluate")
SHIFTED = {"world:premise": "world:mixed", "world:mixed": "world:premise"}  # corpora at hand that differ most


class Evidence(Subject):
    """Lazily gathered evidence about one model."""

    def check(self) -> None:
        """What every question needs, tried before the first is asked, so that its absence is said once.

        Raises:
            EmadError: layers that do not walk as the model does, a family without a tolerance, a split without text,
                a profile that cannot be read or belongs to another model, a margin under which nothing exits.
        """
        assert self.tolerance > 0  # asks for the stepper, which walks the model once and compares
        for split in JUDGED:
            if not self.sequences(split, 1):
                raise EmptyCorpus(
                    f"corpus={self.corpus!r} has no document of two tokens for split {split!r}, but expected at least "
                    "one for each of calibrate, validate and evaluate; use a larger corpus"
                )
        if self.settings.profile is not None or self.settings.margin is not None:
            self.profile.point(self.settings.margin or 0.0)
        self.scored.harnessed.check()

    def _require_plain(self) -> None:
        """What is calibrated on documents belongs to models that continue documents.

        Raises:
            Unsupported: an encoder-decoder model; a claim that asked is ``not applicable`` with this reason.
        """
        if self.seq2seq:
            raise Unsupported(PLAIN)

    # ------------------------------------------------------------ traces and profile

    @cached_property
    def calibration(self) -> Trace:
        self._require_plain()
        return self.trace(self.sequences("calibrate", self.budget.calibrate), f"calibrate, {self.corpus}")

    @cached_property
    def validation(self) -> Trace:
        self._require_plain()
        return self.trace(self.sequences("validate", self.budget.validate), f"validate, {self.corpus}")

    @cached_property
    def evaluation(self) -> Trace:
        self._require_plain()
        return self.trace(self._evaluated, f"evaluate, {self.corpus}")

    @cached_property
    def _evaluated(self) -> list[TokenSequence]:
        return self.sequences("evaluate", self.budget.evaluate)

    @cached_property
    def document_of_window(self) -> Ints:
        """[windows] number of the document each window of ``evaluation`` was cut from."""
        return np.array([window.document for window in self._evaluated])

    def by_document(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums of ``values`` [windows, …] of ``evaluation`` within each document, the unit that intervals resample."""
        _, first = np.unique(self.document_of_window, return_index=True)
        return np.add.reduceat(values, first, axis=0)

    @cached_property
    def profile(self) -> Profile:
        if self.settings.profile is not None:
            profile = load_profile(self.settings.profile)
            profile.require(self.loaded.fingerprint, self.dtype)
            if profile.layers != self.stepper.layers:
                raise BadProfile(
                    f"profile.layers={profile.layers}, but the model under test has {self.stepper.layers}; "
                    "calibrate this model itself"
                )
            return profile
        return self.calibrated()

    def calibrated(self, probes: tuple[int, ...] | None = None, features: tuple[str, ...] = ()) -> Profile:
        """The profile of this run's calibration text at ``probes`` (default: METHODS') with thresholds by ``features``.

        Raises:
            Unsupported: an encoder-decoder model.
        """
        frequency = b""
        if "frequency" in features:
            counts = np.bincount(self.calibration.target, minlength=self.stepper.vocabulary)
            frequency = frequency_buckets(counts)
        return profile_of(
            self.calibration,
            default_probes(self.stepper.layers) if probes is None else probes,
            model=self.name,
            fingerprint=self.loaded.fingerprint,
            corpus=self.corpus,
            dtype=self.dtype,
            bins=BinSpec(features, frequency=frequency),
        )

    # ------------------------------------------------------------ points and losses

    @cached_property
    def selected(self) -> Loss | None:
        """The cheapest margin whose validation drop is within bounds; None if no margin's is."""
        table = loss_table(self.validation, self.loaded.geometry, emad_margins(self.profile, MARGINS))
        (reference,) = loss_table(self.validation, self.loaded.geometry, [self.full])
        accuracy_drop = self.scored.validation_drop if self.scored.validated else None
        return cheapest_within_bounds(table, reference.perplexity, accuracy_drop)

    @cached_property
    def points(self) -> list[OperatingPoint]:
        """The points this run puts forward: calibrated default, margin chosen on validation, margins the user named."""
        margins = [0.0] if self.settings.margin is None else [0.0, self.settings.margin]
        if self.selected is not None and self.selected.point.margin_nats is not None:
            margins.append(self.selected.point.margin_nats)
        points = [self.profile.point(margin) for margin in margins]
        return list({point.name: point for point in points}.values())

    @cached_property
    def losses(self) -> list[Loss]:
        """Evaluation losses of the points put forward."""
        return loss_table(self.evaluation, self.loaded.geometry, self.points)

    @cached_property
    def full_loss(self) -> Loss:
        (reference,) = loss_table(self.evaluation, self.loaded.geometry, [self.full])
        return reference

    @cached_property
    def emad_sweep(self) -> list[Loss]:
        """Evaluation losses of EMAD at every margin of the grid."""
        return loss_table(self.evaluation, self.loaded.geometry, emad_margins(self.profile, MARGINS))

    @cached_property
    def truncation_sweep(self) -> list[Loss]:
        """Evaluation losses of fixed truncation at every depth."""
        return loss_table(self.evaluation, self.loaded.geometry, truncations(self.stepper.layers))

    def at(self, loss: Loss, tasks: Sequence[str] | None = None) -> PointEvidence:
        """What F1 judges at a point: perplexity per document and answers per item, against full depth."""
        nll, full_nll = self.by_document(loss.nll_nats), self.by_document(self.full_loss.nll_nats)
        tokens = self.by_document(self.evaluation.lengths)
        chosen = self.scored.tasks if tasks is None else tasks
        return PointEvidence(
            loss.point.name,
            loss.net_reduction,
            {self.corpus: (nll, full_nll, tokens)},
            {task: (self.scored.correct(task, self.full), self.scored.correct(task, loss.point)) for task in chosen},
            {task: self.scored.chance(task) for task in chosen},
        )

    # ------------------------------------------------------------ other models and corpora

    def of(self, loaded: Loaded) -> Evidence:
        """Evidence about another model (a copy of this one) under the same settings, from the same hook."""
        return Evidence(loaded, self.settings, self._make_decoder)

    @cached_property
    def shifted(self) -> Evidence | None:
        """The same model on another corpus, whose profile is foreign here; None where there is no other."""
        other = SHIFTED.get(self.corpus, None if self.corpus == "self" else "self")
        if other is None or not self.loaded.trained:
            return None
        return Evidence(self.loaded, replace(self.settings, corpus=other, profile=None), self._make_decoder)

    def beside(self, name: str) -> Evidence:
        """Evidence of another model under the same settings."""
        loaded = load(name, device=self.settings.device, dtype=self.stepper.dtype, seed=self.settings.seed)
        return Evidence(loaded, self.settings, self._make_decoder)

    # ------------------------------------------------------------ families of questions

    @cached_property
    def scored(self) -> Scored:
        """What this model answers on the tasks of its corpus."""
        return Scored(self)

    @cached_property
    def estimates(self) -> Estimates:
        """Cheaper readings of entropy than a full softmax."""
        return Estimates(self)

    @cached_property
    def exits(self) -> Exits:
        """What this encoder-decoder answers under early-exit rules, and what that cost."""
        return Exits(self)

    @cached_property
    def rivals(self) -> Rivals:
        """EMAD beside fixed truncation, fixed thresholds and other schedules."""
        return Rivals(self)

    @cached_property
    def stopwatch(self) -> Stopwatch:
        """What the decoder under test takes in time."""
        return Stopwatch(self)
