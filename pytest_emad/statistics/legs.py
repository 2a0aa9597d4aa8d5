"""Legs: estimates become legs, Holm corrects falsifications, and legs become a verdict.

``build_leg_test`` gives a leg its two p-values, ``decide_legs`` decides it, ``verdict_from_legs`` combines legs. These
rules bind every claim:

- Each leg is tested one-sided against its threshold at 5 %, in both directions: shown to be beyond it → ``falsified``,
  shown to be inside → ``survived``, neither → ``inconclusive``. A good point estimate alone decides nothing.
- One falsified leg falsifies the row, so ``falsified`` carries Holm's correction over the legs. Only a slow-down
  falsifies without it (``LegTest.surely_fails``). ``other_legs`` counts gating legs of the same run that are decided
  elsewhere, 0 for a row that does not gate; their p-values count as 1, so the correction stays valid, if conservative.
- All legs must survive for the row to survive: an intersection–union test (Berger 1982), whose level is that of its
  legs. Each is tested at 5 % on its own; a correction would only cost power.
- Below the row's minimum n a leg is inconclusive and names the n needed; it takes no part in Holm, unless its
  row gives it the p-value 1 (tasks of EMAD-F1). A row may require more before a leg may survive: few documents cannot
  show that none of them is ruined.
- ``outcome_and_deciding_leg`` is the only place where legs become a row.

Intervals are two-sided 95 % and not corrected. A leg with its interval entirely on the wrong side of the threshold may
still be inconclusive among many; its reason explains that. Identities have no interval
(``verdict_from_errors_and_tolerance``):
they compare numbers exactly, with no sample and one largest honest difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack

import numpy as np

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from emad_ref.record import Floats
from pytest_emad.statistics.estimate import (
    Estimate,
    format_forecast_range,
    holm_adjusted_pvalues,
    needed_sample_range,
    needed_sample_size,
)
from pytest_emad.statistics.units import format_unit_count
from pytest_emad.statistics.verdicts import FORECAST, TO_SURVIVE, Claim, Leg, LegIdentity, Outcome, Verdict

LEVEL = 0.05  # one-sided, against the threshold
OPEN: tuple[Outcome, ...] = ("inconclusive", "not applicable", "unmeasured")

Side = Literal["above", "below"]


def outcome_and_deciding_leg(legs: Sequence[Leg]) -> tuple[Outcome, Leg]:
    """(outcome, deciding leg) of legs: falsified if a leg is, survived only if all are, else inconclusive.

    Legs that only report (``measured``) or whose premise is absent (``not applicable``) count only if there are no
    others. An ``unmeasured`` leg counts, so that the row cannot survive.

    The deciding leg is the most certain among falsified ones, else the least certain.

    Raises:
        BadArgument: no leg.
    """
    if not legs:
        raise BadArgument("legs", legs, "at least one leg", "say not_applicable or unmeasured with a reason instead")
    part = [leg for leg in legs if leg.outcome not in ("measured", "not applicable")]
    if not part:
        premise = [leg for leg in legs if leg.outcome == "not applicable"]
        return ("not applicable", premise[0]) if premise else ("measured", legs[0])
    falsified = [leg for leg in part if leg.outcome == "falsified"]
    if falsified:
        return "falsified", min(falsified, key=_worst_first)
    undecided = [leg for leg in part if leg.outcome != "survived"]
    if not undecided:
        return "survived", max(part, key=_least_sure)
    outcome: Outcome = "unmeasured" if all(leg.outcome == "unmeasured" for leg in part) else "inconclusive"
    return outcome, max(
        (leg for leg in undecided if leg.outcome == "inconclusive"), key=_least_sure, default=undecided[0]
    )


def _threshold_distance(leg: Leg) -> float:
    return 0.0 if leg.estimate is None or leg.threshold is None else abs(leg.estimate - leg.threshold)


def _worst_first(leg: Leg) -> tuple[float, float]:
    return (0.0 if leg.p_falsify is None else leg.p_falsify, -_threshold_distance(leg))


def _least_sure(leg: Leg) -> tuple[float, float]:
    return (1.0 if leg.p_survive is None else leg.p_survive, -_threshold_distance(leg))


def not_applicable_verdict(claim: Claim, model: str, reason: str, legs: Sequence[Leg] = ()) -> Verdict:
    """Verdict of a claim with an absent premise; ``reason`` names it. ``legs`` are listed and decide nothing."""
    return _verdict_without_number(claim, model, "not applicable", reason, legs)


def unmeasured_verdict(claim: Claim, model: str, reason: str, legs: Sequence[Leg] = ()) -> Verdict:
    """Verdict of a claim with an absent instrument or absent data, without a number; ``reason`` names it.

    ``legs`` are listed and decide nothing.
    """
    return _verdict_without_number(claim, model, "unmeasured", reason, legs)


def _verdict_without_number(claim: Claim, model: str, outcome: Outcome, reason: str, legs: Sequence[Leg]) -> Verdict:
    return Verdict(claim.id, model, outcome, None, None, 0, None, claim.unit, reason, tuple(legs), why=reason)


def unmeasured_leg(name: str, reason: str, **identity: Unpack[LegIdentity]) -> Leg:
    return Leg(name, "unmeasured", None, None, 0, None, "", reason, **identity)


@dataclass(frozen=True)
class LegTest:
    """A leg before it is decided.

    ``needed``      level → approximate number of ``noun`` that would decide it in four of five samples.
    ``needed_range``  level → the same at the ends of the estimate's interval; None: not known.
    ``unsteady``    of times: why the machine counts as unsteady, which more pairs do not mend; None otherwise.
    ``to_survive``  smallest n with which the leg may survive; 0 without such a minimum.
    ``falling``     whether the value is on the bad side; None: the smaller p-value decides.
    ``worst``       assumed loss of an unseen document in nats per token; 0: none.
    ``slack``       distance of the value from the threshold in the same unit, positive on the good side.
    ``cannot_survive``  reason why the leg stays open where its value would let it survive; "": none.
    ``describe_open``   whether the leg would be falsified alone → (reason, remedy, ``enough``) of an open leg, in place
                   of those that follow from ``needed``.
    ``surely_fails``    reason why the leg is falsified without Holm's correction where it would be open; "": none.
    """

    leg: Leg
    noun: str
    needed: Callable[[float], int | None]
    to_survive: int = 0
    unsteady: Absent | None = None
    falling: bool | None = None
    worst: float = 0.0
    slack: float = 0.0
    cannot_survive: str = ""
    surely_fails: str = ""
    describe_open: Callable[[bool], tuple[str, str, int | None]] | None = None
    needed_range: Callable[[float], tuple[int | None, int | None]] | None = None


def build_leg_test(
    name: str,
    estimate: Estimate,
    bad: Side,
    threshold: float,
    minimum: Mapping[str, int],
    **identity: Unpack[LegIdentity],
) -> LegTest:
    """The test of a leg. ``bad``: side of the threshold on which the claim fails, ``above`` or ``below``."""
    noun = estimate.noun
    to_survive = minimum.get(noun + TO_SURVIVE, 0)
    leg = Leg(
        name,
        "inconclusive",
        estimate.value,
        interval_if_finite(estimate),
        estimate.n,
        threshold,
        estimate.unit,
        good="lower" if bad == "above" else "higher",
        **identity,
    )
    if estimate.n < minimum.get(noun, 0):
        remedy = f"{format_unit_count(estimate.n, noun)}, at least {minimum[noun]} are needed"
        method = _join_reasons(remedy, estimate.note)
        short = replace(leg, reason=method, remedy=remedy, enough=minimum[noun])
        return LegTest(short, noun, lambda error: minimum[noun], to_survive)
    falsify, survive = estimate.p_above, estimate.p_below
    if bad == "below":
        falsify, survive = survive, falsify
    tied = falsify == survive == 1  # neither side is shown
    method = estimate.method if tied or not leg.interval else ""
    leg = replace(leg, p_falsify=falsify, p_survive=survive, reason=_join_reasons(method, estimate.note))
    tested = LegTest(
        leg,
        noun,
        lambda error: needed_sample_size(estimate, error),
        to_survive,
        estimate.unsteady,
        needed_range=lambda error: needed_sample_range(estimate, error),
    )
    if (distance := estimate.distance) is None:
        return tested
    of = noun if distance.equal else f"{noun} of equal weight"
    slack = distance.gap if bad == "above" else -distance.gap
    return replace(tested, noun=of, falling=slack < 0, worst=distance.worst or 0.0, slack=slack)


def decide_legs(tests: Sequence[LegTest], other_legs: int = 0) -> list[Leg]:
    """Decide legs: falsified after Holm, survived at 5 % each; open legs carry the reason."""
    family = [
        (test, falsify, survive)
        for test in tests
        if (falsify := test.leg.p_falsify) is not None and (survive := test.leg.p_survive) is not None
    ]
    against = holm_adjusted_pvalues([falsify for _, falsify, _ in family], other_legs)
    decided = {
        id(test): _decide_leg(test, adjusted <= LEVEL, survive <= LEVEL, len(family) + other_legs)
        for (test, _, survive), adjusted in zip(family, against, strict=True)
    }
    return [decided.get(id(test), test.leg) for test in tests]


def _decide_leg(test: LegTest, falsified: bool, survives: bool, family: int) -> Leg:
    leg = test.leg
    if falsified:
        return replace(leg, outcome="falsified")
    if not survives and test.surely_fails:
        return replace(leg, outcome="falsified", reason=test.surely_fails)
    if not survives:
        return _open_leg(test, family)
    if test.cannot_survive:
        return replace(leg, reason=test.cannot_survive)
    if leg.n < test.to_survive:
        remedy = f"{format_unit_count(leg.n, test.noun)}, at least {test.to_survive} are needed to survive"
        reason = _join_reasons(leg.reason, f"{remedy}: {_rule_of_three(test)}")
        return replace(leg, reason=reason, remedy=remedy, enough=test.to_survive)
    return replace(
        leg,
        outcome="survived",
        reason=_join_reasons(leg.reason, *((_rule_of_three(test), _breaking_shares(test)) if test.to_survive else ())),
    )


def _rule_of_three(test: LegTest) -> str:
    """The rule of three: with no failure among n, 95 % confidence leaves a share of 3 / n."""
    n = test.leg.n
    assumed = f", by up to {test.worst:.2g} nats per token" if test.worst else ""
    return f"{format_unit_count(n, test.noun)} cannot exclude that {100 * min(1.0, 3 / n):.3g} % of them fail{assumed}"


RUINS = (2.0, 10.0)  # nats per token


def _breaking_shares(test: LegTest) -> str:
    """The shares of ruined documents with which the whole text would lie on the threshold."""
    if not test.worst or test.slack <= 0:
        return ""
    shares = (f"{100 * min(1.0, test.slack / nats):.2g} % that lose {nats:g} nats per token" for nats in RUINS)
    return f"unseen {test.noun} would break it: {' or '.join(shares)}"


def _join_reasons(*parts: str) -> str:
    return "; ".join(dict.fromkeys(part for part in parts if part))


def _open_leg(test: LegTest, family: int) -> Leg:
    """The open leg with the units that would decide it, if known."""
    leg = test.leg
    assert leg.p_falsify is not None
    assert leg.p_survive is not None
    if test.describe_open is not None:
        reason, remedy, number = test.describe_open(leg.p_falsify <= LEVEL)
        return replace(leg, reason=reason, remedy=remedy, enough=number)
    if leg.p_falsify == leg.p_survive == 1:
        return leg  # a tie or a single unit; the reason names it, and no number of such units would decide
    falling = leg.p_falsify < leg.p_survive if test.falling is None else test.falling
    alone = f"falsified alone, but not after Holm over {family} legs" if leg.p_falsify <= LEVEL else ""
    if test.unsteady:
        remedy = f"{test.unsteady.reason}; time it where nothing else runs"
        return replace(leg, reason=_join_reasons(leg.reason, alone, remedy), remedy=remedy)
    level = LEVEL / family if falling else LEVEL
    number = test.needed(level)
    unseen_ones = _rule_of_three(test) if test.worst and not falling else ""
    if number is None:
        remedy = f"too near the threshold for any number of {test.noun}"
        return replace(leg, reason=_join_reasons(leg.reason, alone, remedy), remedy=remedy)
    if (number := number if falling else max(number, test.to_survive)) <= leg.n:
        return replace(leg, reason=_join_reasons(leg.reason, alone))
    remedy = f"about {number:,} {test.noun} {FORECAST}"
    ends = ""
    if test.needed_range is not None:
        fewest, most = test.needed_range(level)
        least = 0 if falling else test.to_survive
        ends = f" ({format_forecast_range(fewest and max(fewest, least), most and max(most, least))})"
    reason = _join_reasons(leg.reason, unseen_ones, alone, f"{remedy} if the estimate is true{ends}")
    return replace(leg, reason=reason, remedy=remedy, enough=number)


def interval_if_finite(estimate: Estimate) -> tuple[float, float] | None:
    bounds = (float(estimate.low), float(estimate.high))
    return bounds if all(math.isfinite(bound) for bound in bounds) else None


def verdict_from_legs(
    claim: Claim,
    model: str,
    legs: Sequence[Leg],
    *,
    headline: Sequence[Leg] = (),
    notes: Sequence[str] = (),
    listed: int | None = None,
) -> Verdict:
    """The verdict that ``outcome_and_deciding_leg`` gives on ``legs``, with the numbers of its deciding leg.

    Args:
        headline: legs of the model under test, where others are beside it. The verdict reports the worst of these that
            has the deciding leg's outcome, if there is one.
        notes: further parts of the reason, in order; empty ones are left out.
        listed: number of legs to list, the worst ones; n then counts the judged ones. None lists all.
    """
    outcome, leg = outcome_and_deciding_leg(legs)
    if own := [each for each in headline if each.outcome == leg.outcome]:
        _, leg = outcome_and_deciding_leg(own)
    part = [other for other in legs if other.outcome not in ("measured", "not applicable")]
    here = sum(other.outcome == leg.outcome for other in part)  # the deciding leg may be unmeasured in an open row
    reason = deciding_reason = leg.reason or leg.name
    if len(part) > 1:
        every = "both" if here == 2 else f"all {here}"
        count = f"{every if here == len(part) else f'{here} of {len(part)}'} legs {leg.outcome}"
        near = {"falsified": "worst leg", "survived": "leg nearest to the threshold"}.get(outcome, "open leg")
        deciding_reason = leg.name + (f" ({leg.reason})" if leg.reason else "")
        reason = f"{count}; {near}: {deciding_reason}"
    shown, n, few = list(legs), leg.n, ""
    if listed is not None and len(legs) > listed:
        shown, n, few = _worst_legs(legs, leg, listed), len(part), f"the worst {listed} of {len(legs)} legs are listed"
    still_open = outcome in OPEN
    return Verdict(
        claim.id,
        model,
        outcome,
        leg.estimate,
        leg.interval,
        n,
        leg.threshold,
        leg.unit or claim.unit,
        "; ".join(filter(None, (reason, few, *notes))),
        tuple(shown),
        leg.good,
        (leg.remedy or deciding_reason) if still_open else "",
        leg.enough if still_open else None,
        next(at for at, each in enumerate(shown) if each is leg),
    )


_ORDER: tuple[Outcome, ...] = ("falsified", "inconclusive", "unmeasured", "survived", "measured", "not applicable")


def _worst_legs(legs: Sequence[Leg], deciding: Leg, count: int) -> list[Leg]:
    """The ``count`` worst of ``legs``, the deciding one among them."""
    worst = sorted(legs, key=lambda leg: (_ORDER.index(leg.outcome), *_worst_first(leg)))[:count]
    return worst if any(leg is deciding for leg in worst) else [*worst[:-1], deciding]


def build_measured_estimate_leg(
    name: str,
    estimate: Estimate,
    reason: str = "",
    threshold: float | None = None,
    **identity: Unpack[LegIdentity],
) -> Leg:
    """Make a leg that only reports an estimate, with a ``threshold`` for display if there is one."""
    return Leg(
        name,
        "measured",
        estimate.value,
        interval_if_finite(estimate),
        estimate.n,
        threshold,
        estimate.unit,
        _join_reasons(reason, estimate.note),
        **identity,
    )


def build_measured_count_leg(
    name: str, value: float, n: int, unit: str, reason: str = "", **identity: Unpack[LegIdentity]
) -> Leg:
    """Make a leg that only reports a number without an interval: arithmetic, or a count."""
    return Leg(name, "measured", float(value), None, n, None, unit, reason, **identity)


def judge_against_threshold(
    claim: Claim,
    model: str,
    estimates: Mapping[str, Estimate],
    bad: Side,
    threshold: float,
    *,
    other_legs: int = 0,
    beside: Sequence[Leg] = (),
) -> Verdict:
    """Verdict on estimates that must lie on one side of one threshold; one leg each.

    Args:
        estimates: name of the leg → estimate, whose p-values were taken against ``threshold``.
        bad: on which side of the threshold the claim fails.
        other_legs: gating legs of the run decided elsewhere.
        beside: legs that only report, or lack a premise.
    """
    legs = [build_leg_test(name, estimate, bad, threshold, claim.minimum) for name, estimate in estimates.items()]
    if not legs and not beside:
        return unmeasured_verdict(claim, model, "nothing was compared")
    return verdict_from_legs(claim, model, [*decide_legs(legs, other_legs), *beside])


def verdict_from_errors_and_tolerance(
    claim: Claim, model: str, errors: Mapping[str, Floats], tolerance: float, *, example: str = ""
) -> Verdict:
    """Verdict on differences that must be within ``tolerance``: of ``legs_from_errors_and_tolerance``.

    Raises:
        BadArgument: as ``legs_from_errors_and_tolerance``.
    """
    legs = legs_from_errors_and_tolerance(claim, errors, tolerance, example=example)
    return verdict_from_legs(claim, model, legs) if legs else unmeasured_verdict(claim, model, "nothing was compared")


def legs_from_errors_and_tolerance(
    claim: Claim, errors: Mapping[str, Floats], tolerance: float, *, example: str = ""
) -> list[Leg]:
    """Decided legs on differences that must be within ``tolerance``; one per entry of ``errors``.

    Args:
        errors: name of the leg → |difference| of every comparison made, any shape. NaN or infinite: falsified.
        tolerance: the largest honest difference, from the table of tolerances; 0 for counted integers.
        example: the simplest input with a larger difference, for the reason of a falsified leg.

    Raises:
        BadArgument: a tolerance that is negative or NaN, or negative errors.
    """
    if not tolerance >= 0:
        raise BadArgument("tolerance", tolerance, "a number ≥ 0")
    return [
        _exact_leg(name, np.asarray(part, dtype=np.float64), tolerance, claim.unit, example)
        for name, part in errors.items()
    ]


def _exact_leg(name: str, errors: Floats, tolerance: float, unit: str, example: str) -> Leg:
    if not errors.size:
        return replace(unmeasured_leg(name, "nothing was compared"), threshold=tolerance, unit=unit, good="lower")
    if (errors < 0).any():
        raise BadArgument("errors", float(errors.min()), "absolute differences ≥ 0", f"take abs() for leg {name!r}")
    if not np.isfinite(errors).all():
        reason = f"{int((~np.isfinite(errors)).sum())} of {errors.size} differences are NaN or infinite"
        return Leg(name, "falsified", None, None, errors.size, tolerance, unit, reason, good="lower")
    largest = float(errors.max())
    outcome: Outcome = "survived" if largest <= tolerance else "falsified"
    beyond = f"{int((errors > tolerance).sum())} of {errors.size} comparisons differ by more than {tolerance:g}"
    beyond += f"; simplest: {example}" if example else ""
    reason = beyond if outcome == "falsified" else ""
    return Leg(name, outcome, largest, None, errors.size, tolerance, unit, reason, good="lower")
