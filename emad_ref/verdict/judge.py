"""From measurements to verdicts: pure functions, arrays in, ``Verdict`` out.

The rules (they bind every claim test):

- Each leg is tested one-sided against its threshold at 5 %, in both directions: shown to be beyond it → ``falsified``,
  shown to be inside → ``survived``, neither → ``inconclusive``. A good point estimate alone decides nothing.
- Holm's correction over the legs, separately for each direction. ``other_legs`` counts gating legs of the same run that
  are decided elsewhere; their p-values count as 1, so the correction stays valid, if conservative.
- Below the row's minimum n a leg is inconclusive and names the n needed; it takes no part in Holm.
- ``legs.combine`` is the one place where legs become a row.

Intervals are two-sided 95 % and not corrected: a leg whose interval clears the threshold may still be inconclusive
among many, and then says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import binomtest

from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats, Ints
from emad_ref.verdict.claims import Claim, Leg, Outcome, Verdict
from emad_ref.verdict.interval import (
    RESAMPLES,
    accuracy_drop,
    document_draws,
    log_ratio,
    needed_items,
    perplexity_rise,
    profile_slope,
    profile_steps,
)
from emad_ref.verdict.legs import LEVEL, Tested, cut, decided, finite, not_applicable, row, unmeasured, unseen, weighed

NllPair = tuple[Floats, Floats, Ints]  # candidate and reference NLL sums, tokens: [documents] each
AnswerPair = tuple[Bools, Bools]  # right at full depth, right at the point: [items] each
TimePair = tuple[Floats, Floats]  # seconds of the baseline, seconds of the candidate: [pairs] each


@dataclass(frozen=True)
class PointEvidence:
    """What was measured at one operating point, against full depth on the same documents and items.

    ``net_reduction`` share of decode FLOPs saved, probes and repair charged; ``perplexity`` by corpus, ``tasks`` by
    task name; ``chance`` the accuracy of guessing by task name, 0 where it is not named.
    """

    name: str
    net_reduction: float
    perplexity: Mapping[str, NllPair]
    tasks: Mapping[str, AnswerPair] = field(default_factory=dict)
    chance: Mapping[str, float] = field(default_factory=dict)


def judge_f1(
    points: Sequence[PointEvidence],
    claim: Claim,
    model: str,
    rng: np.random.Generator,
    *,
    other_legs: int = 0,
    shown: int | None = None,
) -> Verdict:
    """EMAD-F1 and EMAD-F1-literal: quality at every operating point that saves at least 15 % of decode FLOPs, net.

    Legs per judged point: one per corpus (perplexity rise against 1 %), one for accuracy. Points that save less are
    listed as not applicable. No judged point → not applicable, never survived.

    The accuracy leg asks whether two or more of k tasks lose more than a point; single tasks are listed beside it as
    measured. Its p-values are partial conjunctions (Benjamini & Heller 2008, Bonferroni form, valid whatever the
    dependence of the tasks): falsify with (k − 1) · p₍₂₎ of "the drop exceeds 1 point", survive with 2 · p₍ₖ₋₁₎ of "the
    drop stays below": all tasks but one are shown to hold. A task below the minimum of items shows neither. A task that
    full depth does not solve (not above chance at 5 %, or by less than the threshold) takes no part: it cannot lose
    what it does not have. Fewer than two tasks leave the leg unmeasured, so that the row cannot survive on perplexity
    alone.

    Args:
        points: the points put forward (F1), or the whole sweep (F1-literal).
        claim: thresholds ``flop_reduction``, ``perplexity_rise``, ``accuracy_drop``; minimum ``documents``, ``items``.
        rng: bootstrap samples; points of one corpus share them.
        other_legs: gating legs of the run decided elsewhere.
        shown: keep only the worst that many legs; the verdict's ``n`` then counts the legs judged.

    Raises:
        BadArgument: a net reduction that is NaN, and as in ``interval``.
    """
    smallest = claim.thresholds["flop_reduction"]
    if not points:
        return not_applicable(claim, model, "no operating point was put forward")
    for point in points:
        if not point.net_reduction <= 1:
            raise BadArgument(
                "net_reduction", point.net_reduction, "a share of at most 1", f"look at point {point.name!r}"
            )
    judged = [point for point in points if point.net_reduction >= smallest]
    idle = [_too_small(point, smallest) for point in points if point.net_reduction < smallest]
    if not judged:
        best = max(point.net_reduction for point in points)
        reason = f"none of {len(points)} points saves {100 * smallest:g} % of FLOPs; the best {100 * best:.1f} % net"
        return replace(not_applicable(claim, model, reason), legs=tuple(idle))
    family = sum(len(point.perplexity) + 1 for point in judged) + other_legs
    resamples = max(RESAMPLES, math.ceil(2 * family / LEVEL))  # else Holm asks for p-values the bootstrap cannot reach
    draws: dict[int, Floats] = {}
    tests: list[Tested] = []
    listed: list[Leg] = idle
    for point in judged:
        for corpus, arms in point.perplexity.items():
            documents = len(arms[2])
            if documents not in draws and documents:
                draws[documents] = document_draws(documents, resamples, rng)
            rise = perplexity_rise(
                *arms, threshold=claim.thresholds["perplexity_rise"], rng=rng, draws=draws.get(documents)
            )
            name = f"{point.name}: perplexity on {corpus}"
            tests.append(weighed(name, rise, "above", claim.thresholds["perplexity_rise"], claim.minimum, "documents"))
        if not point.perplexity:
            listed.append(unseen(f"{point.name}: perplexity", "no corpus was scored"))
        accuracy, tasks = _accuracy(point, claim)
        listed += tasks
        if isinstance(accuracy, Tested):
            tests.append(accuracy)
        else:
            listed.append(accuracy)
    legs = [*decided(tests, other_legs), *listed]
    verdict = row(claim, model, legs)
    return verdict if shown is None or len(legs) <= shown else cut(verdict, shown)


def _too_small(point: PointEvidence, smallest: float) -> Leg:
    reason = f"saves {100 * point.net_reduction:.1f} % net, less than {100 * smallest:g} %"
    return Leg(
        f"{point.name}: reduction",
        "not applicable",
        point.net_reduction,
        None,
        0,
        smallest,
        "net FLOP reduction",
        reason,
    )


def _accuracy(point: PointEvidence, claim: Claim) -> tuple[Tested | Leg, list[Leg]]:
    """The accuracy leg of one point, and each task as a leg that only reports."""
    name, threshold = f"{point.name}: accuracy on two or more tasks", claim.thresholds["accuracy_drop"]
    drops = {task: accuracy_drop(*answers, threshold=threshold) for task, answers in point.tasks.items()}
    unsolved = {task for task in drops if not _solved(point.tasks[task][0], point.chance.get(task, 0.0), threshold)}
    tasks = [
        Leg(
            f"{point.name}: {task}",
            "measured",
            drop.value,
            finite(drop),
            drop.n,
            threshold,
            drop.unit,
            "full depth does not solve it: it cannot fall" if task in unsolved else "",
        )
        for task, drop in drops.items()
    ]
    scored = len(drops)
    drops = {task: drop for task, drop in drops.items() if task not in unsolved}
    if len(drops) < 2:
        seen = f"{scored or 'no'} task was scored"
        if unsolved:
            seen = f"full depth solves {len(drops) or 'none'} of {scored} tasks"
        return unseen(name, f"{seen}; the criterion speaks of two"), tasks
    small = {task: drop.n for task, drop in drops.items() if drop.n < claim.minimum.get("items", 0)}
    second = sorted(drops, key=lambda task: drops[task].value)[-2]
    above = sorted(1.0 if task in small else drop.p_above for task, drop in drops.items())
    below = sorted(1.0 if task in small else drop.p_below for task, drop in drops.items())
    leg = Leg(
        name,
        "inconclusive",
        drops[second].value,
        finite(drops[second]),
        drops[second].n,
        threshold,
        "accuracy drop",
        f"value of {second}, the second-worst of {len(drops)} tasks"
        + "".join(f"; {task} has {n} items, at least {claim.minimum['items']} are needed" for task, n in small.items()),
        p_falsify=min(1.0, (len(drops) - 1) * above[1]),
        p_survive=min(1.0, 2 * below[-2]),
    )

    def needed(error: float) -> int | None:
        items = [needed_items(*point.tasks[task], threshold=threshold, error=error / 2) for task in drops]
        reachable = sorted(number for number in items if number is not None)
        return reachable[len(drops) - 2] if len(reachable) > len(drops) - 2 else None

    return Tested(leg, "items per task", needed), tasks


def _solved(right: Bools, chance: float, threshold: float) -> bool:
    """Whether full depth answers better than guessing, shown at 5 %, and has more than ``threshold`` to lose."""
    shown = binomtest(int(right.sum()), len(right), chance, alternative="greater").pvalue <= LEVEL
    return bool(shown and right.mean() - chance > threshold)


def judge_f2(
    pairs: Mapping[int, TimePair],
    baselines: Mapping[int, TimePair],
    claim: Claim,
    model: str,
    *,
    other_legs: int = 0,
) -> Verdict:
    """EMAD-F2: end-to-end speed-up of adaptive decoding over full depth, paired; every batch size is a leg.

    The baseline is the faster of our full depth and the model's own ``generate``, batch size by batch size. A leg whose
    full depth is shown (one-sided, 5 %, uncorrected) to be slower than ``generate`` is inconclusive: a sleeping
    baseline flatters whatever is compared with it. So is one without that check.

    Args:
        pairs: batch size → seconds (full depth, adaptive), [pairs] each.
        baselines: batch size → seconds (our full depth, ``generate``), [pairs] each, of the same pairs.
        claim: threshold ``speedup_ratio``; minimum ``pairs``.
        other_legs: gating legs of the run decided elsewhere.
    """
    if not pairs:
        return unmeasured(claim, model, "no batch size was timed")
    threshold = claim.thresholds["speedup_ratio"]
    tests: list[Tested] = []
    listed: list[Leg] = []
    for batch, arms in pairs.items():
        name, beside = f"batch {batch}", baselines.get(batch)
        doubt = _sleeping(beside)
        if not doubt and beside is not None and log_ratio(*beside).value > 1:
            name, arms = f"{name}, against generate", (beside[1], arms[1])
        test = weighed(name, log_ratio(*arms, threshold=threshold), "below", threshold, claim.minimum, "pairs")
        if doubt:
            listed.append(replace(test.leg, reason=doubt, p_falsify=None, p_survive=None))
        else:
            tests.append(test)
    return row(claim, model, [*decided(tests, other_legs), *listed])


def _sleeping(arms: TimePair | None) -> str:
    if arms is None:
        return "full depth was not compared with the model's generate: the baseline may be asleep"
    slower = log_ratio(*arms)
    if slower.p_above > LEVEL:
        return ""
    return (
        f"sleeping baseline: generate is {slower.value:.2f} × as fast as our full depth "
        f"[{slower.low:.2f}, {slower.high:.2f}]"
    )


def judge_e1(
    entropy_sums: Floats, tokens: Ints, claim: Claim, model: str, rng: np.random.Generator, *, other_legs: int = 0
) -> Verdict:
    """EMAD-E1: mean entropy falls from each layer to the next; one leg per step, resampled by document.

    An adjacent rise shown to be above zero falsifies; a step that is flat within its interval leaves the row
    inconclusive. The slope over all layers is listed as measured.

    Args:
        entropy_sums: [documents, L] Σ_t H_ℓ(t) per document and layer, nats; all layers, not probes only.
        tokens: [documents].
        claim: threshold ``entropy_rise_nats``; minimum ``documents``.
        other_legs: gating legs of the run decided elsewhere.
    """
    threshold = claim.thresholds["entropy_rise_nats"]
    steps = profile_steps(entropy_sums, tokens, threshold=threshold, rng=rng)
    tests = [
        weighed(f"layer {layer} → {layer + 1}", step, "above", threshold, claim.minimum, "documents")
        for layer, step in enumerate(steps, start=1)
    ]
    slope = profile_slope(entropy_sums, tokens, threshold=threshold, rng=rng)
    interval = finite(slope)
    measured = Leg("slope over all layers", "measured", slope.value, interval, slope.n, threshold, slope.unit)
    return row(claim, model, [*decided(tests, other_legs), measured])


def judge_exact(claim: Claim, model: str, errors: Mapping[str, Floats], tolerance: float) -> Verdict:
    """EMAD-E2, EMAD-E5: an identity holds wherever it was checked; one leg per entry of ``errors``.

    Args:
        errors: name of the leg → |difference| of every comparison made, any shape. NaN or infinite: falsified.
        tolerance: the largest honest difference, from the table of tolerances; 0 for counted integers.

    Raises:
        BadArgument: a tolerance that is negative or NaN, or negative errors.
    """
    if not tolerance >= 0:
        raise BadArgument("tolerance", tolerance, "a number ≥ 0")
    legs = [
        _exact_leg(name, np.asarray(part, dtype=np.float64), tolerance, claim.unit) for name, part in errors.items()
    ]
    return row(claim, model, legs) if legs else unmeasured(claim, model, "nothing was compared")


def _exact_leg(name: str, errors: Floats, tolerance: float, unit: str) -> Leg:
    if not errors.size:
        return replace(unseen(name, "nothing was compared"), threshold=tolerance, unit=unit)
    if (errors < 0).any():
        raise BadArgument("errors", float(errors.min()), "absolute differences ≥ 0", f"take abs() for leg {name!r}")
    if not np.isfinite(errors).all():
        reason = f"{int((~np.isfinite(errors)).sum())} of {errors.size} differences are NaN or infinite"
        return Leg(name, "falsified", None, None, errors.size, tolerance, unit, reason)
    largest = float(errors.max())
    outcome: Outcome = "survived" if largest <= tolerance else "falsified"
    beyond = f"{int((errors > tolerance).sum())} of {errors.size} comparisons differ by more than {tolerance:g}"
    return Leg(name, outcome, largest, None, errors.size, tolerance, unit, beyond if outcome == "falsified" else "")


def judge_e3(shares: Mapping[str, Mapping[str, float]], claim: Claim, model: str) -> Verdict:
    """EMAD-E3: probe FLOPs as a share of block FLOPs; arithmetic on geometries, so a leg has no interval.

    Args:
        shares: geometry → estimator → share at the depth and stride the caller expects; each pair is a leg.
        claim: threshold ``probe_share``; a share below it survives, as the paper says "<5 %".
        model: what the row is about, e.g. ``"geometries"``.
    """
    threshold = claim.thresholds["probe_share"]
    legs = []
    for geometry, by_estimator in shares.items():
        for estimator, share in by_estimator.items():
            outcome: Outcome = "survived" if share < threshold else "falsified"
            legs.append(Leg(f"{geometry}, {estimator}", outcome, float(share), None, 1, threshold, claim.unit))
    return row(claim, model, legs) if legs else unmeasured(claim, model, "no geometry was counted")


def judge_e13(tied: bool, claim: Claim, model: str) -> Verdict:
    """EMAD-E13: whether the premise of a tied unembedding holds (survived) or does not (falsified)."""
    outcome: Outcome = "survived" if tied else "falsified"
    reason = "the premise holds" if tied else "the premise does not hold: embedding and unembedding are separate"
    return row(claim, model, [Leg("tied unembedding", outcome, float(tied), None, 1, 1.0, claim.unit, reason)])
