"""Comparison of two families of points at equal net FLOPs, and the saving of one family at a given loss.

``compare_families_at_saving_levels`` gives an estimate per saving, with the selection of points resampled as well:

    θ(s) = loss of ours at saving s − loss of the rival's at saving s        per token, on evaluation (``sweep.front``)

Each bootstrap sample draws validation documents, on which both fronts are chosen anew, and evaluation documents, on
which both are mixed to the same saving anew. An interval with fixed points would hide that other text chooses others.
The profile is the run's own, and is not resampled.

The bootstrap is studentised: t* = (θ* − mean of θ*) / se*. se is the linearised standard error of θ at fixed corners,

    z_i = (l_i − θ_side·n_i) / Σn + slope · (c_i − (1 − s)·f_i) / Σf      of ours, less that of the rival's

with l_i and c_i the loss and cost of the mixture on document i, f_i the cost of full depth, and slope that of the
front: shares follow from costs, which vary from sample to sample. The numerator covers that corners change from sample
to sample. It centres θ* on its own mean and not on θ̂. If many points are nearly equal, θ̂ is the chance result of one
of them on evaluation, and samples average over several. A bias "correction" by the difference would count that chance
twice (with independent noise at each of 33 points the error of a one-sided 5 % bound was 12 %). As with means, the
bound is never more confident than Student's t: with 30 documents, half of them equal on both sides, the error of the
bootstrap alone was 6.6 %. Nor is it more confident than blocks of neighbouring evaluation documents
(``rates.widen_by_neighbour_blocks``).

``estimate_saving_at_loss`` goes the other way round:

    saving(δ)   the largest saving of a mixture of neighbouring corners of the family's front that loses at most
                δ nats per token more than full depth

The front (``sweep.front``) is chosen on one split and judged on another. An oracle promises nothing, so it is chosen
and judged on one split. The crossing of the front with δ is found on the judged text, so several families are compared
at exactly the same loss, as tables rank them. Whether a chosen point keeps a promise is another question.

This estimate is bootstrapped over documents of both splits, with fronts and crossings anew in each sample. Samples are
smaller than the text (``rates.draw_document_counts``), and their spread is scaled down accordingly. A crossing is not
linear in documents, so there is no standard error to studentise by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats
from emad_ref.replay.losses import CostColumn, LossColumn, Losses
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import LEVEL, LegTest, build_leg_test
from pytest_emad.statistics.rates import (
    draw_document_counts,
    estimate_from_bootstrap_t_values,
    required_resamples,
    widen_by_neighbour_blocks,
)
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Claim, Leg
from pytest_emad.sweep.front import (
    BootstrapMixtures,
    FamilyFront,
    FrontMixtureByDocument,
    choose_front,
    mark_lower_hull_corners,
    mix_to_saving,
    require_finite_losses,
    resample_savings_and_losses,
)

FRONT_RESAMPLES = 4_999  # if few legs share their error; ``resample_count_for_legs`` gives the number for many
SHARE_ROUNDING = 1e-9  # relative: shares are quotients of float64 sums; one different decision costs a whole block
AT_ONCE = 100_000  # draws × documents per batch: arrays of 0.8 MB stay in a cache


@dataclass(frozen=True, eq=False)
class PointFamily:
    """A family, whose front is chosen on ``validation`` and judged on ``evaluation`` by ``loss``."""

    validation: Losses
    evaluation: Losses
    loss: LossColumn = "nats"

    @property
    def front(self) -> FamilyFront:
        return choose_front(self.validation, self.evaluation, self.loss)

    @property
    def largest_validation_saving(self) -> float:
        """The largest saving of any point on validation."""
        return float(self.validation.savings.max())


@dataclass(frozen=True, eq=False)
class EqualFlopsComparison:
    """Both families at one net saving.

    ``level``     the requested saving; ``saving``: the saving of both, less if a side falls short on evaluation.
    ``estimate``  θ against the threshold; None for a tie, if both decide equally on every document.
    ``tied``      whether θ is shown to lie within the tie margin of the threshold.
    """

    level: float
    saving: float
    ours: FrontMixtureByDocument
    rival: FrontMixtureByDocument
    estimate: Estimate | None
    tied: bool = False


def resample_count_for_legs(legs: int) -> int:
    """Number of bootstrap samples for so many legs: fewer than elsewhere, since each chooses two fronts anew."""
    return required_resamples(legs, LEVEL, FRONT_RESAMPLES)


def compare_families_at_saving_levels(
    ours: PointFamily,
    rival: PointFamily,
    levels: Sequence[float],
    *,
    threshold: float,
    rng: np.random.Generator,
    unit: str,
    resamples: int = FRONT_RESAMPLES,
    tie_margin: float = 0.0,
) -> list[EqualFlopsComparison]:
    """θ at each of ``levels`` that both families reach on validation.

    Args:
        ours, rival: judged on the same evaluation documents, chosen on the same validation documents.
        threshold: of θ, in the loss's unit per token.
        resamples: bootstrap samples; the smallest p-value is 1 / (resamples + 1).
        tie_margin: largest difference of θ from ``threshold`` that is of no interest. p_above is against the threshold
            plus the margin, p_below against the threshold less it. If both one-sided tests show θ to lie between the
            two, the sides are tied (two one-sided tests: Schuirmann 1987).

    Raises:
        BadArgument: other documents on either side.
    """
    for name in ("validation", "evaluation"):
        mine, theirs = (getattr(side, name).tokens for side in (ours, rival))
        if not np.array_equal(mine, theirs):
            raise BadArgument(f"rival.{name}", f"{len(theirs)} documents", "those of ours", "compare on the same text")
    fronts = ours.front, rival.front
    comparisons = []
    for level in levels:
        if level > min(ours.largest_validation_saving, rival.largest_validation_saving):
            continue
        saving = min(level, *(side.largest_saving for side in fronts))
        mine, theirs = (side.mixture_at(saving) for side in fronts)
        comparisons.append(EqualFlopsComparison(level, saving, mine, theirs, None))
    open_ = [number for number, each in enumerate(comparisons) if not _is_tied(each)]
    estimates = _estimates(
        (ours, rival), [comparisons[number].level for number in open_], threshold, rng, unit, resamples, tie_margin
    )
    for number, (estimate, tied) in zip(open_, estimates, strict=True):
        comparisons[number] = replace(comparisons[number], estimate=estimate, tied=tied)
    return comparisons


def build_comparison_leg_test(
    name: str, comparison: EqualFlopsComparison, estimate: Estimate | None, threshold: float, claim: Claim
) -> LegTest:
    """A leg that fails above ``threshold``, before Holm; its reason has the saving of both sides.

    A tie decides nothing. If both sides decide equally, no text distinguishes them, and there is no p-value. If they
    are shown to differ by no more than the tie margin, neither side of the claim is shown, and both p-values are 1.

    Args:
        estimate: of ``comparison``, in the claim's own unit; None for a tie.
    """
    saved = f"both save {comparison.saving:.2%} net"
    if estimate is None:
        same, n = "tied: both decide the same", len(comparison.ours.loss)
        tie = Leg(
            name, "inconclusive", 0.0, None, n, threshold, claim.unit, f"{same}; {saved}", good="lower", remedy=same
        )
        return LegTest(tie, ByDocument.noun, lambda error: None)
    weighted = build_leg_test(name, estimate, "above", threshold, claim.minimum)
    leg = weighted.leg
    within = ""
    if comparison.tied and leg.p_falsify is not None:
        margin = claim.thresholds["tie_margin"]
        within = f"tied: shown to differ by less than ±{100 * margin:g} %, and more documents would not change it"
        leg = replace(leg, p_falsify=1.0, p_survive=1.0, remedy=within)
    reason = "; ".join(filter(None, (within, saved, leg.reason)))
    return replace(weighted, leg=replace(leg, reason=reason))


def _is_tied(comparison: EqualFlopsComparison) -> bool:
    """Whether both mixtures are equal document by document, up to rounding of shares."""
    return all(
        np.allclose(mine, theirs, rtol=SHARE_ROUNDING, atol=0.0)
        for mine, theirs in (
            (comparison.ours.loss, comparison.rival.loss),
            (comparison.ours.flops, comparison.rival.flops),
        )
    )


def _estimates(
    sides: tuple[PointFamily, PointFamily],
    levels: Sequence[float],
    threshold: float,
    rng: np.random.Generator,
    unit: str,
    resamples: int,
    tie_margin: float,
) -> list[tuple[Estimate, bool]]:
    """Estimates at ``levels``, and whether each is shown to be tied."""
    if not levels:
        return []
    chosen, judged = (len(each.tokens) for each in (sides[0].validation, sides[0].evaluation))
    as_it_is = _ResampledFronts(sides, np.ones((1, chosen)), np.ones((1, judged)))
    differences = [as_it_is.difference(level) for level in levels]
    resampled: list[list[tuple[Floats, Floats]]] = [[] for _ in levels]
    for size in _portions(resamples, judged + chosen):
        sample = _ResampledFronts(sides, *(draw_document_counts(n, size, rng) for n in (chosen, judged)))
        for number, level in enumerate(levels):
            resampled[number].append(sample.difference(level)[:2])
    estimates = []
    for (value, error, (residuals,)), parts in zip(differences, resampled, strict=True):
        values, errors = (np.concatenate(part) for part in zip(*parts, strict=True))
        below_margin, above_margin = (
            widen_by_neighbour_blocks(
                _selection_estimate(float(value[0]), float(error[0]), values, errors, judged, against, unit),
                residuals,
                threshold=against,
            )
            for against in (threshold - tie_margin, threshold + tie_margin)
        )
        tied = max(below_margin.p_above, above_margin.p_below) <= LEVEL
        estimates.append((replace(above_margin, p_below=below_margin.p_below), tied))
    return estimates


def _portions(resamples: int, documents: int) -> Iterator[int]:
    each = max(AT_ONCE // documents, 1)
    yield from (min(each, resamples - done) for done in range(0, resamples, each))


class _ResampledFronts:
    """Samples of both splits, ``chosen_counts`` and ``judged_counts`` [draws, documents], with both fronts in each."""

    def __init__(self, sides: Sequence[PointFamily], chosen_counts: Floats, judged_counts: Floats):
        self.counts = judged_counts
        self.sides = [
            _FamilyFronts(
                side,
                mark_lower_hull_corners(*resample_savings_and_losses(side.validation, chosen_counts, side.loss)),
                *resample_savings_and_losses(side.evaluation, judged_counts, side.loss),
            )
            for side in sides
        ]

    def difference(self, level: float) -> tuple[Floats, Floats, Floats]:
        """(θ [draws], its standard error [draws], each document's part of the error [draws, documents]).

        At ``level``, or at the largest saving that both sides reach in a draw.
        """
        saving = np.minimum(level, np.minimum(*(side.reach for side in self.sides)))
        (mine, pull), (theirs, push) = (side.at(saving, self.counts) for side in self.sides)
        z, documents = pull - push, self.counts.shape[1]
        scale = documents / max(documents - 1, 1)  # one document has no spread, which ``_selection_estimate`` reports
        return mine - theirs, np.sqrt(scale * np.einsum("bd,bd->b", self.counts, z * z)), z


@dataclass(frozen=True, eq=False)
class _FamilyFronts:
    """One family in every draw: ``corners``, ``savings``, ``losses`` [draws, points]."""

    family: PointFamily
    corners: Bools
    savings: Floats
    losses: Floats

    @property
    def reach(self) -> Floats:
        most: Floats = np.where(self.corners, self.savings, -np.inf).max(axis=1)
        return most

    def at(self, saving: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """(loss per token [draws], pull of each document on it [draws, documents]) at ``saving`` [draws]."""
        mixed, table = mix_to_saving(self.corners, self.savings, saving), self.family.evaluation
        loss = mixed.expectation_of_resampled_values(self.losses)
        tokens, full = counts @ table.tokens, counts @ table.flops[0]
        lost = mixed.expectation_of_point_values(getattr(table, self.family.loss)) - loss[:, None] * table.tokens
        spent = mixed.expectation_of_point_values(table.flops) - (1 - saving)[:, None] * table.flops[0]
        return loss, lost / tokens[:, None] + (self.slope(mixed) / full)[:, None] * spent

    def slope(self, mixed: BootstrapMixtures) -> Floats:
        """[draws] slope of the front between the two points of each mixture; 0 for a single point."""
        draw = np.arange(len(self.savings))
        (less, more), (lost, more_lost) = (
            (values[draw, mixed.first], values[draw, mixed.second]) for values in (self.savings, self.losses)
        )
        apart = more - less
        slope: Floats = np.where(apart > 0, (more_lost - lost) / np.where(apart > 0, apart, 1.0), 0.0)
        return slope


def _selection_estimate(
    value: float, error: float, values: Floats, errors: Floats, n: int, threshold: float, unit: str
) -> Estimate:
    noun = ByDocument.noun
    if n == 1:
        return Estimate(value, -math.inf, math.inf, 1, 1.0, 1.0, unit, "one document has no spread", noun)
    # A sample without spread has an infinite t, as in ``rates.mean_rate``.
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.sort(np.nan_to_num((values - values.mean()) / errors, nan=0.0, posinf=np.inf, neginf=-np.inf))
    estimate = estimate_from_bootstrap_t_values(value, error, t, n, threshold=threshold, unit=unit, noun=noun)
    return replace(estimate, method=f"{estimate.method}, of selection and evaluation")


LOSS_RESAMPLES = 1_999
SAMPLES_AT_ONCE = 250  # samples per batch
TAIL = 0.025


def estimate_saving_at_loss(
    judged: Losses,
    nats_per_token: float,
    *,
    chosen: Losses | None = None,
    cost: CostColumn = "flops",
    threshold: float,
    rng: np.random.Generator,
    resamples: int = LOSS_RESAMPLES,
) -> Estimate:
    """The saving at ``nats_per_token``, a share of full depth's ``cost``, against ``threshold``.

    ``chosen``: the same points on the split that their front is chosen on; None: the judged split.

    Raises:
        BadArgument: a loss that is no number ≥ 0; other points on either split.
    """
    if not 0 <= nats_per_token < math.inf:
        raise BadArgument("nats_per_token", nats_per_token, "a finite number ≥ 0")
    before = judged if chosen is None else chosen
    if len(before) != len(judged):
        raise BadArgument("chosen", len(before), f"{len(judged)} points, those that are judged")
    for table in (before, judged):
        require_finite_losses(table, "nats")
    documents = len(judged.tokens)
    once = np.ones((1, len(before.tokens))), np.ones((1, documents))
    (value,) = _savings_at_loss(before, judged, *once, nats_per_token, cost)
    noun, unit = ByDocument.noun, "share saved"
    if documents == 1:
        return Estimate(value, -math.inf, math.inf, 1, 1.0, 1.0, unit, "one document has no spread", noun)
    parts = []
    for size in [SAMPLES_AT_ONCE] * (resamples // SAMPLES_AT_ONCE) + [resamples % SAMPLES_AT_ONCE]:
        judged_counts = draw_document_counts(documents, size, rng)
        before_counts = judged_counts if chosen is None else draw_document_counts(len(before.tokens), size, rng)
        parts.append(_savings_at_loss(before, judged, before_counts, judged_counts, nats_per_token, cost))
    scale = math.sqrt(judged_counts[0].sum() / documents) if len(judged_counts) else 1.0
    resampled = value + scale * (np.concatenate(parts) - value)
    low, high = np.quantile(resampled, (TAIL, 1 - TAIL))
    above, below = (1 + np.count_nonzero(resampled <= threshold)), (1 + np.count_nonzero(resampled >= threshold))
    method = f"bootstrap, {resamples:,} samples of {noun}, of front and crossing"
    each = resamples + 1
    return Estimate(
        float(value), float(low), float(high), documents, float(above / each), float(below / each), unit, method, noun
    )


def _savings_at_loss(
    before: Losses, judged: Losses, before_counts: Floats, judged_counts: Floats, most: float, cost: CostColumn
) -> Floats:
    """[draws] savings at a loss of ``most``, for samples with these counts [draws, documents]."""
    return largest_savings_within_loss(
        mark_lower_hull_corners(*resample_savings_and_losses(before, before_counts, cost=cost)),
        *resample_savings_and_losses(judged, judged_counts, cost=cost),
        most,
    )


def largest_savings_within_loss(corners: Bools, savings: Floats, losses: Floats, most: float) -> Floats:
    """[draws] the largest saving on the lines between neighbouring ``corners`` at ``most`` nats above full depth.

    All [draws, points]; the first point is full depth, a corner, and saves nothing.
    """
    order = np.argsort(np.where(corners, savings, np.inf), axis=1, kind="stable")
    corner = np.take_along_axis(corners, order, axis=1)
    saved, lost = (np.take_along_axis(column, order, axis=1) for column in (savings, losses - losses[:, :1]))
    best: Floats = np.zeros(len(saved))
    for at in range(saved.shape[1]):
        within = corner[:, at] & (lost[:, at] <= most)
        best = np.where(within, np.maximum(best, saved[:, at]), best)
        if at + 1 < saved.shape[1]:
            apart = lost[:, at + 1] - lost[:, at]
            leaving = within & corner[:, at + 1] & (lost[:, at + 1] > most)
            share = np.where(leaving, (most - lost[:, at]) / np.where(apart > 0, apart, 1.0), 0.0)
            best = np.maximum(best, np.where(leaving, saved[:, at] + share * (saved[:, at + 1] - saved[:, at]), 0.0))
    return best
