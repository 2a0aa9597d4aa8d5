"""Promises of calibration, and the number of calibration sets shown to keep them.

A promise P(risk ≤ δ) ≥ 1 − ε concerns newly drawn sets, so sets are the unit, and no two share a member. Each set
chooses a threshold; a separate pool estimates its risk. A set breaks the promise if the pool shows a risk above δ, and
keeps it if the pool shows a risk below δ, or if the set chose full depth. Undecided sets count against either verdict,
and so does the chance of a misleading pool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from emad_ref.absent import Absent
from emad_ref.calibration.learn_then_test import (
    betting_pvalues,
    documents_needed_to_certify,
    hoeffding_bentkus_pvalues,
    min_sequences_to_certify,
    select_threshold,
)
from emad_ref.record import Bools, Floats, Ints
from pytest_emad.claims.base import Answer, ClaimContext, Question, answer_unmet_learned_exit_premise
from pytest_emad.claims.early_exit_answers import (
    EXIT_TASKS,
    make_early_exit_question,
    make_missing_task_legs,
    make_undecided_leg,
)
from pytest_emad.measurements.early_exits import EarlyExitMeasurements, TextConsistency
from pytest_emad.measurements.learned_exit import ExitEvaluation
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.screening.guarantee import EXCESS
from pytest_emad.statistics.estimate import Estimate, needed_sample_size
from pytest_emad.statistics.legs import LEVEL, LegTest, build_leg_test, build_measured_count_leg
from pytest_emad.statistics.rates import mean_rate
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import Leg, Verdict

MISLED = 0.01  # chance, over pools, of misjudging any threshold
NOUN = "calibration sets"


def make_risky_safe_threshold_masks(pool: Floats, delta: float) -> tuple[Bools, Bools]:
    """Masks [λ] of risk shown above, and below, ``delta``, from independent losses [n, λ] in 0–1.

    Uses Hoeffding–Bentkus on either side; the upper side tests the mean of 1 − loss against 1 − δ.
    """
    n, error = len(pool), MISLED / (2 * pool.shape[1])
    risky = hoeffding_bentkus_pvalues((1 - pool).sum(axis=0), n, 1 - delta)
    safe = hoeffding_bentkus_pvalues(pool.sum(axis=0), n, delta)
    return risky <= error, safe <= error


def make_set_share_leg(
    name: str,
    sets: int,
    *,
    sure: int,
    not_so: int,
    seen: int,
    least: float,
    unit: str,
    minimum: Mapping[str, int],
    misled: float = MISLED,
) -> LegTest:
    """Make a leg for a share of ``sets`` against ``least``, with exact binomial tests.

    Args:
        sure: sets shown to count; ``not_so``: sets shown not to count; ``seen``: sets that appear to count.
        misled: chance that any of this is wrong.
    """
    open_at_most = sets - not_so
    low = stats.binomtest(sure, sets, least, alternative="greater")
    high = stats.binomtest(open_at_most, sets, least, alternative="less")
    estimate = Estimate(
        seen / sets,
        float(stats.binomtest(sure, sets).proportion_ci(0.95, method="exact").low),
        float(stats.binomtest(open_at_most, sets).proportion_ci(0.95, method="exact").high),
        sets,
        min(1.0, float(low.pvalue) + misled),
        min(1.0, float(high.pvalue) + misled),
        unit,
        f"Clopper–Pearson over {NOUN}" + (", of those whose risk the pool shows" if misled else ""),
        NOUN,
    )
    tested = build_leg_test(name, estimate, "below", least, minimum)
    return LegTest(tested.leg, NOUN, lambda error: compute_needed_calibration_sets(least, misled))


def compute_needed_calibration_sets(least: float, misled: float = MISLED) -> int:
    """The fewest sets that can show a share of ``least`` if all of them count.

    >>> compute_needed_calibration_sets(0.95)
    63
    """
    return math.ceil(math.log(LEVEL - misled) / math.log(least))


# ---------------------------------------------------------------- EE-7: thresholds of softmax response


THRESHOLDS = (0.99, 0.9, 0.7, 0.4, 0.1)  # of softmax response, strict to loose
ENOUGH = 0.5  # share of sets that must choose an exit for a useful promise


# consistency by task, blocks of the model, unavailable task → reason
PromiseEvidence = tuple[Mapping[str, TextConsistency], int, Mapping[str, Absent]]


@dataclass(frozen=True)
class PromiseCounts:
    """Numbers of calibration sets that kept or broke the promise.

    ``exiting``: sets that chose a threshold. ``broken``, ``safe``: choices shown to risk more than δ, or less.
    ``seen``: choices with a pool mean of at most δ. ``saved``: blocks per token, mean over sets.
    """

    sets: int
    exiting: int
    broken: int
    safe: int
    seen: int
    saved: float


def decide_kept_promises(found: PromiseEvidence, asked: ClaimContext) -> Verdict:
    """EE-7: a leg per task, the share of calibration sets that kept the promise, against 1 − ε.

    No two sets share an item, since sets redrawn from the same items would agree because of these items. Each chooses
    by Learn-then-Test (``certify_loosest_threshold``); a pool shows the result. If no threshold on the grid risks more
    than δ, the promise cannot fail; if most sets choose full depth, it is worth little. The row survives in neither
    case.
    """
    delta = asked.claim.thresholds["tolerance"]
    tests: list[LegTest] = []
    consistency, layers, missing = found
    beside = make_missing_task_legs(missing)
    for task, each in consistency.items():
        name, (more, less) = f"{task}, δ={delta:g}", make_risky_safe_threshold_masks(each.pool, delta)
        kept = count_kept_promises(each, more, less, layers, asked)
        if (leg := _undecidable_promise_leg(name, each, more, kept, asked)) is not None:
            beside.append(leg)
        else:
            counts = {"sure": kept.safe, "not_so": kept.broken, "seen": kept.seen}
            least, claim = asked.claim.thresholds["coverage"], asked.claim
            tests.append(
                make_set_share_leg(name, kept.sets, **counts, least=least, unit=claim.unit, minimum=claim.minimum)
            )
        beside += _promise_worth_legs(task, each, kept, asked.claim.unit)
    return asked.decide_tests(tests, beside)


def count_kept_promises(
    each: TextConsistency, more: Bools, less: Bools, layers: int, asked: ClaimContext
) -> PromiseCounts:
    """Choose a threshold on each calibration set, and count safe and broken choices."""
    delta, level = asked.claim.thresholds["tolerance"], 1 - asked.claim.thresholds["coverage"]
    chosen = [select_threshold(losses, each.mean_exit, layers, tolerance=delta, level=level) for losses in each.sets]
    exiting = [index for one in chosen if (index := one.certificate.index) is not None]
    full, risk = len(chosen) - len(exiting), each.pool.mean(axis=0)
    return PromiseCounts(
        len(chosen),
        len(exiting),
        int(more[exiting].sum()),
        full + int(less[exiting].sum()),
        full + int((risk[exiting] <= delta).sum()),
        sum(one.blocks_saved for one in chosen) / max(1, len(chosen)),
    )


def _undecidable_promise_leg(
    name: str, each: TextConsistency, more: Bools, kept: PromiseCounts, asked: ClaimContext
) -> Leg | None:
    """A leg that explains why these items cannot decide the claim; None if they can."""
    delta, items, least = asked.claim.thresholds["tolerance"], len(each.pool), asked.claim.minimum.get("items", 0)
    if items < least:
        return make_undecided_leg(name, f"{items} items, at least {least} are needed", items, "inconclusive")
    if not kept.sets:
        return make_undecided_leg(name, "too few items for a calibration set", items, "inconclusive")
    if kept.broken:
        return None
    worst = each.pool.mean(axis=0).max()
    if worst <= delta:
        return make_undecided_leg(name, f"no threshold differs by more than {worst:.3f}: nothing could break", items)
    if not more.any():
        said = f"no threshold is shown to differ by more than {delta:g} on {items} items"
        return make_undecided_leg(name, said, items, "inconclusive")
    if kept.exiting < ENOUGH * kept.sets:
        said = f"{kept.exiting} of {kept.sets} sets certify any exit, half are needed"
        return make_undecided_leg(name, said, kept.sets, "inconclusive")
    return None


def _promise_worth_legs(task: str, each: TextConsistency, kept: PromiseCounts, unit: str) -> list[Leg]:
    """Legs about the promise's value: share of chosen exits, savings, and difference of each threshold."""
    legs = [
        build_measured_count_leg(
            f"{task}: sets that chose any exit", kept.exiting / max(1, kept.sets), kept.sets, unit
        ),
        build_measured_count_leg(f"{task}: blocks saved per token", kept.saved, kept.sets, "blocks"),
    ]
    for threshold, loss, depth in zip(THRESHOLDS, each.pool.mean(axis=0), each.mean_exit, strict=True):
        name, said = f"{task}, λ={threshold:g}: difference from full depth", f"mean exit {depth:.2f}"
        legs.append(build_measured_count_leg(name, loss, len(each.pool), "D", said))
    return legs


def gather_promise_evidence(exits: EarlyExitMeasurements) -> PromiseEvidence:
    """Answers under softmax response at each threshold, compared with the text of full depth."""
    found = {task: exits.measure_consistency(task, THRESHOLDS) for task in exits.task_names}
    return found, exits.subject.stepper.layers, exits.absent_by_task


# ---------------------------------------------------------------- EMAD-X2: the guarantee of an exit


SHARE = "share of calibration sets"


# (int64 [sets] index of each set's certified threshold, −1 for full depth; [documents, λ] losses in 0–B at each
# threshold, of documents outside all sets)
CalibrationDraws = tuple[Ints, ByDocument]


@dataclass(frozen=True)
class GuaranteeEvidence:
    """``losses`` [documents] in 0–B of the exit on evaluated ones, or why full depth was chosen.

    ``risk``, ``error``, ``cap``: δ, ε and B. ``documents``: number used for calibration. ``power``: stated power, or
    None.
    """

    losses: ByDocument | Absent
    risk: float
    error: float
    documents: int
    power: float | None = None
    draws: CalibrationDraws | None = None
    cap: float = 1.0


def decide_guarantee(found: GuaranteeEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-X2: whether the guarantee of an exit holds (``screening.guarantee``), and sets are large enough. Legs:

    risk   mean loss on fresh documents against δ. One exit is only one draw, so a share ε of honest guarantees fails.
           It survives by a betting bound, as in the guarantee: a mean of a few documents without loss does not show a
           rare document that loses B.
    draws  if text can be drawn again, the share of disjoint calibration sets that keep the promise, against 1 − ε. It
           does not apply if no threshold on the grid risks more than δ.
    power  the share of such sets that certify any exit. Without sets it is the guarantee's stated power: too small a
           value leaves the row open, and no value decides it.

    Full depth keeps any promise: if it was chosen and no sets were drawn, the row does not apply.
    """
    if isinstance(found.losses, Absent) and found.draws is None:
        return asked.not_applicable(f"full depth was chosen, which keeps any promise: {found.losses.reason}")
    tests: list[LegTest] = []
    beside: list[Leg] = []
    if not isinstance(found.losses, Absent):
        tests.append(_fresh_risk(found.losses, found, asked))
    if found.draws is not None:
        kept = _promises_kept(found.draws, found, asked)
        if isinstance(kept, LegTest):
            tests.append(kept)
        else:
            beside.append(kept)
        tests.append(_certifying(found.draws[0], asked))
    else:
        beside.append(_stated(found, asked))
    return asked.decide_tests(tests, beside)


def _fresh_risk(losses: ByDocument, found: GuaranteeEvidence, asked: ClaimContext) -> LegTest:
    ones, risk = losses.with_values(np.ones(len(losses))), found.risk
    mean = mean_rate(losses, ones, threshold=risk, rng=asked.rng, unit=asked.claim.unit)
    shares, tolerance = losses.values[:, None] / found.cap, risk / found.cap
    (certified,) = betting_pvalues(shares, tolerance, LEVEL)
    mean = replace(mean, p_below=max(mean.p_below, float(certified)))
    tested = asked.make_leg_test(f"risk on fresh documents, δ={risk:g}", mean, "above", risk)

    def needed(error: float) -> int | None:
        if mean.value > risk:
            return needed_sample_size(mean, error)
        number = documents_needed_to_certify(shares, tolerance, error)
        return None if number is None else max(number, mean.n + 1)

    return replace(tested, needed=needed, needed_range=None, to_survive=min_sequences_to_certify(tolerance, LEVEL))


def _promises_kept(draws: CalibrationDraws, found: GuaranteeEvidence, asked: ClaimContext) -> LegTest | Leg:
    """Leg about the share of sets shown to keep the promise, or the reason why none can break it."""
    chosen, pool = draws
    risk = found.risk
    name = f"promises kept, δ={risk:g}"
    means, sets = pool.values.mean(axis=0), len(chosen)
    if means.max() <= risk:
        said = f"no threshold risks more than {means.max():.3g}: nothing could break"
        return Leg(name, "not applicable", None, None, sets, None, SHARE, said)
    more, less = make_risky_safe_threshold_masks(pool.values / found.cap, risk / found.cap)
    exiting = chosen[chosen >= 0]
    full = sets - len(exiting)
    return make_set_share_leg(
        name,
        sets,
        sure=full + int(less[exiting].sum()),
        not_so=int(more[exiting].sum()),
        seen=full + int((means[exiting] <= risk).sum()),
        least=1 - found.error,
        unit=SHARE,
        minimum=asked.claim.minimum,
    )


def _certifying(chosen: Ints, asked: ClaimContext) -> LegTest:
    sets, exiting = len(chosen), int((chosen >= 0).sum())
    return make_set_share_leg(
        "sets that certify an exit",
        sets,
        sure=exiting,
        not_so=sets - exiting,
        seen=exiting,
        least=asked.claim.thresholds["power"],
        unit=SHARE,
        minimum=asked.claim.minimum,
        misled=0.0,
    )


def _stated(found: GuaranteeEvidence, asked: ClaimContext) -> Leg:
    """Leg about the guarantee's stated power: enough, too little, or none stated."""
    name, least = "power of its calibration set, as stated", asked.claim.thresholds["power"]
    if found.power is None:
        return Leg(name, "unmeasured", None, None, 0, least, SHARE, "the guarantee states none")
    if found.power >= least:
        return Leg(name, "measured", found.power, None, found.documents, least, SHARE)
    said = f"a set of {found.documents} documents certifies an exit in {found.power:.0%} of draws"
    return Leg(name, "inconclusive", found.power, None, found.documents, least, SHARE, said, good="higher")


def answer_guarantee(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-X2 from the exit's guarantee and its losses on evaluated documents."""
    if unjudged := answer_unmet_learned_exit_premise(evidence, asked):
        return unjudged
    return Answer(_guarantee_verdict(evidence.exit_evaluation, asked), evidence.corpus, evidence.fingerprint)


def _guarantee_verdict(beyond: ExitEvaluation, asked: ClaimContext) -> Verdict:
    guarantee, point = beyond.exit.guarantee, beyond.recommended_point
    if guarantee is None and isinstance(point, Absent):
        return asked.not_applicable(f"no exit that a guarantee is given for: {point.reason}")
    if guarantee is None:
        return asked.unmeasured("the exit carries no guarantee")
    if guarantee.loss != EXCESS.name:
        return asked.unmeasured(f"its guarantee is about the loss {guarantee.loss!r}, which is not measured here")
    losses = point if isinstance(point, Absent) else beyond.excess_nll_by_document
    return decide_guarantee(
        GuaranteeEvidence(
            losses,
            guarantee.risk,
            guarantee.error,
            guarantee.documents,
            guarantee.power,
            cap=guarantee.cap,
        ),
        asked,
    )


QUESTIONS = (
    make_early_exit_question("EE-7", gather_promise_evidence, decide_kept_promises, legs=EXIT_TASKS),
    # Risk, kept promises, certifying sets.
    Question(
        "EMAD-X2",
        "model",
        answer_guarantee,
        legs=lambda study, layers: 3,
        budget="standard",
        decide=decide_guarantee,
    ),
)
