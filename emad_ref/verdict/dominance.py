"""Two families of points at exactly the same net FLOPs: an estimate per saving, with selection resampled as well.

    θ(s) = loss of ours at saving s − loss of the rival's at saving s        per token, on evaluation (``sweep.front``)

Each bootstrap sample draws validation documents, on which both fronts are chosen anew, and evaluation documents, on
which both are mixed to the same saving anew: an interval that took the chosen points as given would hide that other
text chooses others. The profile is the run's own, and is not resampled.

Studentised: t* = (θ* − mean of θ*) / se*, where se is the linearised standard error of θ with the corners as they are,

    z_i = (l_i − θ_side·n_i) / Σn + slope · (c_i − (1 − s)·f_i) / Σf      of ours, less that of the rival's

l_i, c_i being what the mixture loses and costs on document i, f_i full depth's cost, and slope that of the front there:
shares follow from costs, which vary from sample to sample. That the corners change from sample to sample too stands in
the numerator. There θ* is taken from its own mean and not from θ̂: where many points are nearly as good as each other,
θ̂ is what one of them happened to do on evaluation, samples average over several of them, and a bias "corrected" by
the difference would count that accident twice (with independent noise at each of 33 points a one-sided 5 % bound erred
12 % of the time). As with means, the bound is never surer than Student's t: of 30 documents of which half are alike on
both sides, the bootstrap alone erred 6.6 % of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats
from emad_ref.sweep.front import Front, Mixture, Mixtures, Sheet, front, lower_hulls, mixtures
from emad_ref.verdict.bootstrap import by_t, document_draws, resamples_for
from emad_ref.verdict.claims import Claim, Leg
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.legs import LEVEL, Tested, weighed
from emad_ref.verdict.units import ByDocument

RESAMPLES = 4_999  # where few legs share their error; ``enough_for`` says how many where many do
ROUNDING = 1e-9  # relative: shares are quotients of sums, float64; a decision that differs costs a whole block
AT_ONCE = 100_000  # draws × documents that are worked on together: arrays of 0.8 MB stay in a cache


@dataclass(frozen=True, eq=False)
class Split:
    """What a family's points did on the documents of one split; the first point is full depth.

    ``loss``, ``flops`` [documents, points]: sums over each document's tokens, FLOPs; ``tokens`` [documents].
    """

    loss: ByDocument
    flops: ByDocument
    tokens: ByDocument

    @property
    def sheet(self) -> Sheet:
        """The same as plain arrays; raises as ``Sheet``."""
        return Sheet(*(np.asarray(column.values, dtype=np.float64) for column in (self.loss, self.flops, self.tokens)))


@dataclass(frozen=True, eq=False)
class Family:
    """``names`` [points] as reports call them; the front is chosen on ``validation`` and judged on ``evaluation``."""

    names: tuple[str, ...]
    validation: Split
    evaluation: Split

    @property
    def front(self) -> Front:
        return front(self.names, self.validation.sheet, self.evaluation.sheet)

    @property
    def promised(self) -> float:
        """The most that any point saves on validation."""
        savings, _ = self.validation.sheet.whole
        return float(savings.max())


@dataclass(frozen=True, eq=False)
class Met:
    """Both sides at one net saving.

    ``level``     the saving asked for; ``saving``: what both save, less where a side falls short of it on evaluation.
    ``estimate``  θ against the threshold; None where both decide the same of every document, and so tie.
    """

    level: float
    saving: float
    ours: Mixture
    rival: Mixture
    estimate: Estimate | None


def enough_for(legs: int) -> int:
    """Bootstrap samples for so many legs: each chooses two fronts anew, so that fewer are drawn than elsewhere."""
    return resamples_for(legs, LEVEL, RESAMPLES)


def at_equal_flops(
    ours: Family,
    rival: Family,
    levels: Sequence[float],
    *,
    threshold: float,
    rng: np.random.Generator,
    unit: str,
    resamples: int = RESAMPLES,
) -> list[Met]:
    """θ at each of ``levels`` that both families reach on validation.

    Args:
        ours, rival: judged on the same evaluation documents, chosen on the same validation documents.
        threshold: of θ, in the loss's unit per token.
        resamples: bootstrap samples; the smallest p-value is 1 / (resamples + 1).

    Raises:
        BadArgument: other documents on either side.
    """
    for name in ("validation", "evaluation"):
        mine, theirs = (getattr(side, name).tokens.values for side in (ours, rival))
        if not np.array_equal(mine, theirs):
            raise BadArgument(f"rival.{name}", f"{len(theirs)} documents", "those of ours", "compare on the same text")
    fronts = ours.front, rival.front
    met = []
    for level in levels:
        if level > min(ours.promised, rival.promised):
            continue
        saving = min(level, *(side.reach for side in fronts))
        mine, theirs = (side.mixture_at(saving) for side in fronts)
        met.append(Met(level, saving, mine, theirs, None))
    open_ = [number for number, each in enumerate(met) if not _tied(each)]
    estimates = _estimates((ours, rival), [met[number].level for number in open_], threshold, rng, unit, resamples)
    for number, estimate in zip(open_, estimates, strict=True):
        met[number] = replace(met[number], estimate=estimate)
    return met


def as_leg(name: str, met: Met, estimate: Estimate | None, threshold: float, claim: Claim) -> Tested:
    """A leg that fails above ``threshold``, before Holm; both sides' saving stands in its reason.

    A tie has no p-value and takes no part: where both sides decide the same, no text would tell them apart.

    Args:
        estimate: of ``met``, in the claim's own unit; None for a tie.
    """
    saved = f"both save {met.saving:.2%} net"
    if estimate is None:
        reason = f"tied: both decide the same; {saved}"
        tie = Leg(name, "inconclusive", 0.0, None, len(met.ours.loss), threshold, claim.unit, reason, good="lower")
        return Tested(tie, ByDocument.noun, lambda error: None)
    weighted = weighed(name, estimate, "above", threshold, claim.minimum)
    reason = "; ".join(filter(None, (saved, weighted.leg.reason)))
    return replace(weighted, leg=replace(weighted.leg, reason=reason))


def _tied(met: Met) -> bool:
    """Whether both mixtures do the same, document by document, but for the rounding of shares."""
    return all(
        np.allclose(mine, theirs, rtol=ROUNDING, atol=0.0)
        for mine, theirs in ((met.ours.loss, met.rival.loss), (met.ours.flops, met.rival.flops))
    )


def _estimates(
    sides: tuple[Family, Family],
    levels: Sequence[float],
    threshold: float,
    rng: np.random.Generator,
    unit: str,
    resamples: int,
) -> list[Estimate]:
    if not levels:
        return []
    chosen, judged = ([getattr(side, name).sheet for side in sides] for name in ("validation", "evaluation"))
    as_it_is = _Drawn(chosen, judged, *(np.ones((1, len(sheets[0].tokens))) for sheets in (chosen, judged)))
    found = [as_it_is.difference(level) for level in levels]
    documents = len(judged[0].tokens)
    drawn: list[list[tuple[Floats, Floats]]] = [[] for _ in levels]
    for size in _portions(resamples, documents + len(chosen[0].tokens)):
        counts = (document_draws(len(sheets[0].tokens), size, rng) for sheets in (chosen, judged))
        sample = _Drawn(chosen, judged, *counts)
        for number, level in enumerate(levels):
            drawn[number].append(sample.difference(level))
    estimates = []
    for (value, error), parts in zip(found, drawn, strict=True):
        values, errors = (np.concatenate(part) for part in zip(*parts, strict=True))
        estimates.append(_studentised(float(value[0]), float(error[0]), values, errors, documents, threshold, unit))
    return estimates


def _portions(resamples: int, documents: int) -> Iterator[int]:
    each = max(AT_ONCE // documents, 1)
    yield from (min(each, resamples - done) for done in range(0, resamples, each))


class _Drawn:
    """Samples of both splits, ``chosen_counts`` and ``judged_counts`` [draws, documents], with both fronts in each."""

    def __init__(self, chosen: Sequence[Sheet], judged: Sequence[Sheet], chosen_counts: Floats, judged_counts: Floats):
        self.counts = judged_counts
        self.sides = [
            _Side(sheet, lower_hulls(*before.drawn(chosen_counts)), *sheet.drawn(judged_counts))
            for before, sheet in zip(chosen, judged, strict=True)
        ]

    def difference(self, level: float) -> tuple[Floats, Floats]:
        """(θ, its standard error), both [draws], at ``level`` or the most that both sides reach in a draw."""
        saving = np.minimum(level, np.minimum(*(side.reach for side in self.sides)))
        (mine, pull), (theirs, push) = (side.at(saving, self.counts) for side in self.sides)
        z, documents = pull - push, self.counts.shape[1]
        scale = documents / max(documents - 1, 1)  # one document has no spread, which ``_studentised`` says
        return mine - theirs, np.sqrt(scale * np.einsum("bd,bd->b", self.counts, z * z))


@dataclass(frozen=True, eq=False)
class _Side:
    """One family in every draw: ``corners``, ``savings``, ``losses`` [draws, points]."""

    sheet: Sheet
    corners: Bools
    savings: Floats
    losses: Floats

    @property
    def reach(self) -> Floats:
        most: Floats = np.where(self.corners, self.savings, -np.inf).max(axis=1)
        return most

    def at(self, saving: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """(loss per token [draws], pull of each document on it [draws, documents]) at ``saving`` [draws]."""
        mixed, sheet = mixtures(self.corners, self.savings, saving), self.sheet
        loss = mixed.at(self.losses)
        tokens, full = counts @ sheet.tokens, counts @ sheet.flops[:, 0]
        lost = mixed.of(sheet.loss.T) - loss[:, None] * sheet.tokens
        spent = mixed.of(sheet.flops.T) - (1 - saving)[:, None] * sheet.flops[:, 0]
        return loss, lost / tokens[:, None] + (self.slope(mixed) / full)[:, None] * spent

    def slope(self, mixed: Mixtures) -> Floats:
        """[draws] of the front between the two points of each mixture; 0 where there is one."""
        draw = np.arange(len(self.savings))
        (less, more), (lost, more_lost) = (
            (values[draw, mixed.first], values[draw, mixed.second]) for values in (self.savings, self.losses)
        )
        apart = more - less
        slope: Floats = np.where(apart > 0, (more_lost - lost) / np.where(apart > 0, apart, 1.0), 0.0)
        return slope


def _studentised(
    value: float, error: float, values: Floats, errors: Floats, n: int, threshold: float, unit: str
) -> Estimate:
    noun = ByDocument.noun
    if n == 1:
        return Estimate(value, -math.inf, math.inf, 1, 1.0, 1.0, unit, "one document has no spread", noun)
    # A sample without spread has an infinite t, as in ``rates.mean_rate``.
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.sort(np.nan_to_num((values - values.mean()) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf))
    found = by_t(value, error, t, n, threshold=threshold, unit=unit, noun=noun)
    return replace(found, method=f"{found.method}, of selection and evaluation")
