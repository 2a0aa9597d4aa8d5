"""Entropy estimator: what do cheaper readings of entropy save, and what do they lose? (EMAD, "Ablations")

The thresholds are the profile's for all; an estimate meets them after its linear map to full entropy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch import Tensor

from emad_ref.calibration.trace import take_trace
from emad_ref.evidence.ablations.rows import UNTIMED, Row, Rows, require_quality, speeds, tried
from emad_ref.evidence.estimates import READ
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.meters.flops import flops
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator, OperatingPoint
from emad_ref.readout.index import Exact, recall
from emad_ref.readout.lowrank import LowRankIndex, factors
from emad_ref.replay import replay, work_of
from emad_ref.sweep.estimators import agreements

KS, RANKS, LOW_RANK_K = (32, 64, 128), (16, 32, 64), 64
ROUNDING_NATS = 1e-3  # of a float32 estimate whose linear map is undone, with slopes down to a hundredth
TIMED = ("full", "topk-64", "lowrank-32 top-64", "linear")  # at m = 0: what the others take follows from their FLOPs


def ablation(evidence: Evidence, rng: np.random.Generator) -> Exhibits:
    """Every estimator at every margin, the full softmax first.

    Raises:
        Unsupported: as ``require_quality``.
    """
    require_quality(evidence.subject, evidence.bridging)
    paper = [*(Estimator("topk", k=k) for k in KS), *(Estimator("lowrank", k=LOW_RANK_K, rank=r) for r in RANKS)]
    estimated = Estimated(evidence, [*usable(evidence.subject.stepper, paper), evidence.estimates.linear])
    margins = tried(evidence)
    fits = {estimator.name: estimated.fit(estimator, margins) for estimator in estimated.fitted}
    require_bounds(fits)
    by_name = {
        (estimator.name, margin): replace(evidence.traces.profile.point(margin), estimator=estimator)
        for estimator in (Estimator(), *estimated.fitted)
        for margin in margins
    }
    timed = {name: by_name[name, 0.0] for name in TIMED if (name, 0.0) in by_name}
    times = speeds(evidence.stopwatch, evidence.subject, timed)
    rows, shown = Rows(evidence, rng), []
    for (name, margin), point in by_name.items():
        cost = {"probe FLOPs per token": estimated.probe_flops(point)}
        first = {"estimator": name} | agreed(fits.get(name), margin) | cost
        (row,) = rows.at([point], first, estimated.trace)
        shown.append(row | (times.get(name, UNTIMED) if margin == 0 else UNTIMED))
    return Exhibits((Table(f"ablation, entropy estimator on {evidence.corpus}: worst probe", shown),))


def require_bounds(fits: Mapping[str, Fit]) -> None:
    """Top-K bounds entropy from above, the nearer the larger K is, and exact search misses no row."""
    bounds = [fits[f"topk-{k}"].bias_nats for k in KS if f"topk-{k}" in fits]
    for fewer, more in pairwise(bounds):
        assert all(a >= b - ROUNDING_NATS for a, b in zip(fewer, more, strict=True)), "Ĥ rises with K"
    assert all(bias >= -ROUNDING_NATS for biases in bounds for bias in biases), "top-K is no upper bound"
    assert all(fits[name].recall == 1 for name in fits if name.startswith("topk")), "exact search missed a row"


def usable(stepper: Stepper, estimators: Iterable[Estimator]) -> list[Estimator]:
    """Those whose k and rank this model's unembedding can hold."""
    vocabulary, width = stepper.unembedding.shape
    return [e for e in estimators if e.k <= vocabulary and e.rank <= width]


@dataclass(frozen=True)
class Fit:
    """An estimator against the full softmax, worst over the probes of the run's profile.

    ``changed``: τ's margin in nats → share of tokens whose exit decision changes. ``recall``: None if none is known.
    """

    spearman: float
    bias_nats: tuple[float, ...]
    rmse_nats: float
    recall: float | None
    changed: dict[float, float]


def agreed(fit: Fit | None, margin: float) -> Row:
    """Leading columns; the full softmax (None) is its own reference."""
    if fit is None:
        return {"ρ": 1.0, "RMSE, nats": 0.0, "recall@K": None, "decisions changed %": 0.0}
    return {
        "ρ": fit.spearman,
        "RMSE, nats": fit.rmse_nats,
        "recall@K": fit.recall,
        "decisions changed %": fit.changed[margin],
    }


class Estimated:
    """Estimators fitted on calibration and validation text, with a trace of the whole evaluation split by each."""

    def __init__(self, evidence: Evidence, uncorrected: Sequence[Estimator]):
        self._estimates, self._profile = evidence.estimates, evidence.traces.profile
        self._subject = evidence.subject
        self.fitted = self._estimates.corrected(uncorrected)
        self.trace = self._estimates.read("evaluate", evidence.study.budget.evaluate, self.fitted)

    @cached_property
    def _recalls(self) -> dict[tuple[str, int], float]:
        stepper = self._subject.stepper
        counted = Recalls(stepper, self.fitted, self._estimates.probes)
        take_trace(stepper, self._subject.sequences("evaluate", READ), observe=counted)
        return counted.shares

    def fit(self, estimator: Estimator, margins: Sequence[float]) -> Fit:
        """How ``estimator``, one of ``fitted``, agrees with the full softmax."""
        estimates = self._estimates
        raw = estimates.uncorrected(self.trace, estimator)
        thresholds = [[target - margin for margin in margins] for target in self._profile.targets_nats]
        full = estimates.columns(self.trace.entropy_nats)
        rows = agreements(estimates.probes, full, {estimator: raw}, thresholds)
        recalls = [share for (name, _), share in self._recalls.items() if name == estimator.name]
        changes = zip(*(row.changed.values() for row in rows), strict=True)
        return Fit(
            spearman=min(row.spearman for row in rows),
            bias_nats=tuple(row.bias_nats for row in rows),
            rmse_nats=max(row.rmse_nats for row in rows),
            recall=min(recalls, default=None),
            changed={margin: max(shares) for margin, shares in zip(margins, changes, strict=True)},
        )

    def probe_flops(self, point: OperatingPoint) -> float:
        """FLOPs of readouts per token beyond the one head that emits it."""
        replayed = replay(self.trace, point)
        work = work_of(self.trace, replayed)
        geometry = self._subject.loaded.geometry
        readouts = sum(flops(work, geometry).readouts.values())
        return float(readouts / len(self.trace) - geometry.head_flops())


class Recalls:
    """Counts, in a trace's pass, which of the true K largest logits an estimator retrieves: hand it over as observer.

    ``shares``: (estimator, probe) → recall@K. Estimators that retrieve nothing have none.
    """

    def __init__(self, stepper: Stepper, estimators: Iterable[Estimator], probes: Sequence[int]):
        rows = stepper.unembedding.detach()
        bias = None if stepper.unembedding_bias is None else stepper.unembedding_bias.detach()
        self._stepper, self._probes, self._exact = stepper, frozenset(probes), Exact(rows, bias)
        self._indices = {
            estimator: LowRankIndex(rows, factors(rows, estimator.rank), bias) if estimator.rank else self._exact
            for estimator in estimators
            if estimator.k and estimator.search in ("exact", "lowrank")
        }
        self._hits: dict[tuple[str, int], float] = {}
        self._tokens: dict[int, int] = {}

    def __call__(self, layer: int, states: Tensor, entropy: Tensor) -> None:
        """Take in states [tokens, D] after ``layer``."""
        if layer not in self._probes:
            return
        normed = self._stepper.normed(states)
        self._tokens[layer] = self._tokens.get(layer, 0) + len(states)
        for estimator, index in self._indices.items():
            found, true = (each.search(normed, estimator.k)[1] for each in (index, self._exact))
            key = (estimator.name, layer)
            self._hits[key] = self._hits.get(key, 0.0) + float(recall(found, true).sum())

    @property
    def shares(self) -> dict[tuple[str, int], float]:
        return {key: hits / self._tokens[key[1]] for key, hits in self._hits.items()}
