"""What ablations vary, one ingredient of an operating point at a time, and how a table's rows are made.

Thresholds come from the calibration split, rows from replays of the evaluation split; an interval resamples its
documents. State copying changes later states: it is decoded, on the openings of documents. No claim is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.decoding.forcing import teacher_forced
from emad_ref.meters.flops import flops
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator, OperatingPoint
from emad_ref.policy.bins import bin_names
from emad_ref.protocol import Unsupported
from emad_ref.readout.index import Exact, recall
from emad_ref.readout.lowrank import LowRankIndex, factors
from emad_ref.record import Floats, Ints, Work
from emad_ref.replay import decode_work, replay
from emad_ref.sweep.diagnostics import collapse
from emad_ref.sweep.estimators import agreements
from emad_ref.sweep.losses import Loss, loss_table
from emad_ref.verdict.interval import RESAMPLES, document_draws, log_ratio, perplexity_rise
from emad_ref.verdict.legs import finite
from pytest_emad.estimates import READ

if TYPE_CHECKING:
    from pytest_emad.session import Evidence

MARGINS = {"smoke": 2, "standard": 4, "full": 8}  # per profile, by budget
BEFORE = "tokens before first probe"
DECODED, DECODED_TOKENS = 40, 48  # documents, and tokens of each, on which state copying is scored

Row = dict[str, Any]


def not_applicable(evidence: Evidence) -> str:
    """Why no table about quality can be made; empty where one can."""
    if reason := evidence.without_quality:
        return f"not applicable ({reason})"
    if evidence.bridge.passed is False:
        return f"not applicable (replay does not speak for this decoder: {evidence.bridge.detail})"
    return ""


# ------------------------------------------------------------ ingredients


def strided(layers: int, stride: int) -> tuple[int, ...]:
    """Probes after every ``stride`` layers, the last layer left out."""
    return tuple(range(stride, layers, stride))


def margins(evidence: Evidence) -> list[float]:
    """Margins in nats from 0 to below the highest target of the run's profile, as many as the budget allows."""
    highest = max(evidence.profile.targets_nats)
    return [float(m) for m in np.linspace(0.0, highest, MARGINS[evidence.budget.name], endpoint=False)]


def points(profile: Profile, margins: Iterable[float]) -> list[OperatingPoint]:
    """The profile's point at each margin under which anything can exit."""
    highest = max(max(row) for row in profile.bin_targets_nats or (profile.targets_nats,))
    return [profile.point(margin) for margin in margins if margin <= highest]


def fallback_note(profile: Profile) -> str:
    """Which bins took the thresholds of an ancestor; empty for none."""
    names = zip(bin_names(profile.bins), profile.fallbacks, strict=False)  # a profile without bins has no fallbacks
    fell = [name for name, dropped in names if dropped]
    few = f"fewer than {profile.minimum_tokens} calibration tokens"
    return f"{profile.bins.name}: {few} in {'; '.join(fell)}: thresholds of the parent bin" if fell else ""


# ------------------------------------------------------------ rows


class Table:
    """Rows about one evaluation split, their intervals from the same resamples of its documents."""

    def __init__(self, evidence: Evidence, rng: np.random.Generator):
        self.evidence, self._rng = evidence, rng

    @cached_property
    def _tokens(self) -> Ints:
        return self.evidence.by_document(self.evidence.evaluation.lengths)

    @cached_property
    def _draws(self) -> Floats:
        return document_draws(len(self._tokens), RESAMPLES, self._rng)

    def rows(self, points: Sequence[OperatingPoint], trace: Trace | None = None, **first: Any) -> list[Row]:
        """One row per point; ``first`` are leading columns. ``trace``: of the same windows, with estimates."""
        trace = self.evidence.evaluation if trace is None else trace
        return [first | self._row(loss, trace) for loss in loss_table(trace, self.evidence.loaded.geometry, points)]

    def full(self, **first: Any) -> Row:
        """The row of full depth."""
        return self.rows([self.evidence.full], **first)[0]

    def _row(self, loss: Loss, trace: Trace) -> Row:
        mine, full = (self.evidence.by_document(part.nll_nats) for part in (loss, self.evidence.full_loss))
        rise = perplexity_rise(mine, full, self._tokens, threshold=0.0, rng=self._rng, draws=self._draws)
        return quality(loss, trace) | {"rise interval %": finite(rise)}


def quality(loss: Loss, trace: Trace) -> Row:
    """Depth, reductions and perplexity of one replay of ``trace``.

    Rows that agree to the last digit are points that collapse alike: the median of tokens before the first probe says
    so; None without probes, or where most sequences never get there.
    """
    before = collapse(trace, loss.point) if loss.point.probes else math.inf
    return {
        "point": loss.point.name,
        "mean depth": loss.mean_depth,
        BEFORE: before if math.isfinite(before) else None,
        "gross reduction %": loss.gross_reduction,
        "net reduction %": loss.net_reduction,
        "perplexity": loss.perplexity,
        "rise %": loss.perplexity_rise,
    }


def speeds(evidence: Evidence, points: Mapping[str, OperatingPoint]) -> dict[str, Row]:
    """name → speed against full depth at batch 1, paired, with interval; None where the decoder declines the point."""
    accepted = {name: point for name, point in points.items() if _accepts(evidence, point)}
    arms = {f"point {name}": point for name, point in accepted.items()}  # "full" is the name of the arm they all meet
    seconds = evidence.stopwatch.against_full(arms).seconds if arms else {}
    ratios = {name: log_ratio(seconds["full"], seconds[f"point {name}"], threshold=1.0) for name in accepted}
    return {
        name: {"speed ×": ratios[name].value, "speed interval": finite(ratios[name])} if name in ratios else UNTIMED
        for name in points
    }


UNTIMED: Row = {"speed ×": None, "speed interval": None}


def _accepts(evidence: Evidence, point: OperatingPoint) -> bool:
    try:
        with evidence.open(point):
            return True
    except Unsupported:
        return False


# ------------------------------------------------------------ what has to be decoded


class Openings:
    """First tokens of evaluated documents, decoded token by token and replayed, against full depth on the same text."""

    def __init__(self, evidence: Evidence):
        self.evidence = evidence
        windows = evidence.sequences("evaluate", DECODED)
        self.texts = [replace(window, tokens=window.tokens[:DECODED_TOKENS]) for window in windows]
        self.trace = take_trace(evidence.stepper, self.texts)

    def replayed(self, point: OperatingPoint) -> Row:
        """The row of a point that replay knows."""
        (row,) = loss_table(self.trace, self.evidence.loaded.geometry, [point])
        return quality(row, self.trace)

    def decoded(self, point: OperatingPoint) -> Row:
        """The row of any point; reductions are None for a decoder that does not count.

        Raises:
            Unsupported: the decoder declines the point.
        """
        full = replay(self.trace, self.evidence.full)
        with self.evidence.open(point) as decoder:
            forced = [teacher_forced(decoder, text) for text in self.texts]
        mean = float(np.concatenate([each.nll_nats for each in forced]).mean())
        works = [each.work for each in forced if each.work is not None]
        saved = _saved(self.evidence, works, decode_work(self.trace, full.depth, full.point))
        return {
            "point": point.name,
            "mean depth": float(np.concatenate([each.depth for each in forced]).mean()),
            BEFORE: None,  # no trace to read it from
            **(saved if len(works) == len(forced) else dict.fromkeys(saved)),
            "perplexity": float(np.exp(mean)),
            "rise %": float(np.expm1(mean - full.nll_nats.mean())),
        }


def _saved(evidence: Evidence, works: Sequence[Work], full: Work) -> Row:
    geometry = evidence.loaded.geometry
    mine, reference = flops(sum(works, Work.none(geometry.layers)), geometry), flops(full, geometry)
    return {
        "gross reduction %": 1 - mine.gross / reference.gross,
        "net reduction %": 1 - mine.total / reference.total,
    }


# ------------------------------------------------------------ estimators


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


class Estimated:
    """Estimators fitted on calibration and validation text, with a trace of the whole evaluation split by each."""

    def __init__(self, evidence: Evidence, uncorrected: Sequence[Estimator]):
        self.evidence = evidence
        self.fitted = evidence.estimates.corrected(uncorrected)
        self.trace = evidence.estimates.read("evaluate", evidence.budget.evaluate, self.fitted)

    @cached_property
    def _recalls(self) -> dict[tuple[str, int], float]:
        counted = Recalls(self.evidence.stepper, self.fitted, self.evidence.estimates.probes)
        take_trace(self.evidence.stepper, self.evidence.sequences("evaluate", READ), observe=counted)
        return counted.shares

    def fit(self, estimator: Estimator, margins: Sequence[float]) -> Fit:
        """How ``estimator``, one of ``fitted``, agrees with the full softmax."""
        estimates, profile = self.evidence.estimates, self.evidence.profile
        raw = estimates.uncorrected(self.trace, estimator)
        thresholds = [[target - margin for margin in margins] for target in profile.targets_nats]
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
        work = decode_work(self.trace, replayed.depth, point, replayed.macs_per_row)
        geometry = self.evidence.loaded.geometry
        readouts = sum(flops(work, geometry).readouts.values())
        return readouts / len(self.trace) - geometry.head_flops()


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


def usable(evidence: Evidence, estimators: Iterable[Estimator]) -> list[Estimator]:
    """Those whose k and rank this model's unembedding can hold."""
    vocabulary, width = evidence.stepper.unembedding.shape
    return [e for e in estimators if e.k <= vocabulary and e.rank <= width]
