"""Simulated evidence of known truth, and the outcomes that each case allows.

A module of ``cases`` belongs to the module of ``pytest_emad.claims`` of the same name: its ``CASES`` are lists by
claim. A case makes evidence from a generator, passes it to the claim's ``decide``, and names the outcomes that its
truth allows:

holds    the claim is true by a margin: ``survived`` (or, on an inconclusive draw, nothing)
fails    the claim is false by a margin: ``falsified``
edge     the truth lies on the threshold: ``survived`` and ``falsified`` may each come at most 5 % of the time
power    the truth lies at twice the threshold, or where a Wald test of the same data has a power of 80 %: the outcome
         ``wanted`` must come at least 80 % of the time
tied     both sides decide the same, and a tie decides nothing: ``inconclusive`` or ``not applicable``, in every draw
premise  the premise of the claim is absent: ``not applicable`` or ``unmeasured``
value    a row that only reports: ``measured``, and the number is the true one

**Cells.** An error rate depends on the number of units and on their correlation. ``celled`` makes one case for each n
and intra-cluster correlation (ICC); a function of both makes the evidence::

    def rise(n: int, icc: float):
        def found(rng): ...
        return found

    EMAD_F1 = [*celled("a per cent is lost", "edge", rise), *celled("two per cent", "power", rise_of_two, n=(200,))]

``clustered`` draws values of known ICC.

**Draws.** ``hold`` makes the few draws of ``Case.draws`` and allows for chance. ``hold_rates`` measures every ``edge``
and ``power`` case: 500 draws with fixed seeds, at most 6 % false ``falsified`` and 6 % false ``survived``, a power of
at least 80 %. With a true rate of 5 %, 500 draws exceed 6 % one time in eight. So where 500 draws fail, 5,000 decide by
the same bounds, the 500 among them: at 5,000 the bound lies three standard errors from 5 %, and no draw is discarded.
They run with --run-slow (``tox -e rates``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from scipy.stats import binom

from emad_ref.record import Floats, Ints
from pytest_emad.claims.base import ClaimContext
from pytest_emad.statistics.verdicts import Outcome, Verdict, load_register

Truth = Literal["holds", "fails", "edge", "power", "tied", "premise", "value"]
REGISTER = load_register()
SEED = 20
ERROR = 0.05  # one-sided level of every verdict
UNLIKELY = 1e-3  # probability that a correct rule fails a case of few draws
MOST, LEAST = 0.06, 0.80  # measured error rate and power
MEASURED, RECOUNTED = 500, 5_000

UNITS = (36, 60, 200)  # 36 documents of unequal lengths have an effective number of 30, the minimum of a verdict
SCORED = (100, 200)  # items of a score: the minimum is a hundred
ICC = (0.0, 0.3)

WANTED: dict[Truth, frozenset[Outcome]] = {
    "holds": frozenset({"survived"}),
    "fails": frozenset({"falsified"}),
    "tied": frozenset({"inconclusive", "not applicable"}),
    "premise": frozenset({"not applicable", "unmeasured"}),
    "value": frozenset({"measured"}),
}
DECIDED: tuple[Outcome, Outcome] = ("survived", "falsified")


@dataclass(frozen=True)
class Case:
    """``found(rng)`` makes the evidence for ``decide``. ``draws``: the number of draws, each with its own verdict.

    ``least``   minimum share of draws with a wanted outcome (power; 1 for arithmetic).
    ``check``   inspects every verdict, and asserts its other properties.
    ``wanted``  of a case of ``power``: the outcome that its truth requires.
    ``thresholds``  of a user's file, in place of the row's own.
    ``sampled``  drawn without --run-slow, too.
    """

    name: str
    truth: Truth
    found: Callable[[np.random.Generator], Any]
    draws: int = 1
    least: float = 1.0
    check: Callable[[Verdict], None] | None = None
    wanted: Outcome = "falsified"
    thresholds: Mapping[str, float] = field(default_factory=dict)
    sampled: bool = True


Cell = tuple[int, float]  # number of units, ICC
SAMPLED: dict[Truth, Callable[[Sequence[int], Sequence[float]], Cell]] = {
    "edge": lambda n, icc: (n[0], icc[-1]),
    "power": lambda n, icc: (n[-1], icc[0]),
}


def celled(
    name: str,
    truth: Truth,
    made: Callable[[int, float], Callable[[np.random.Generator], Any]],
    *,
    n: Sequence[int] = UNITS,
    icc: Sequence[float] = ICC,
    draws: int = 5,  # of four draws, a rule with the minimum power may get none right
    **options: Any,
) -> Iterator[Case]:
    """Return one case for every number of units and every ICC; ``made(n, icc)`` gives its ``found``.

    ``icc=(0.0,)`` for rows whose units are independent by construction. ``options`` are those of ``Case``.
    Of a rate one cell is sampled: of an error the fewest units with the largest ICC, of a power the most units with the
    smallest. ``hold_rates`` measures every cell.
    """
    for units in n:
        for correlation in icc:
            cell = f"{name}; n = {units}, ICC {correlation:g}"
            sampled = (units, correlation) == SAMPLED[truth](n, icc) if truth in SAMPLED else True
            yield Case(cell, truth, made(units, correlation), draws, sampled=sampled, **options)


def clustered(rng: np.random.Generator, clusters: int, each: int, icc: float) -> tuple[Floats, Ints]:
    """Return (values, cluster), [items]: normal values of mean 0, variance 1 and this ICC, ``each`` per cluster."""
    cluster = np.repeat(np.arange(clusters), each)
    shared, own = rng.standard_normal(clusters)[cluster], rng.standard_normal(len(cluster))
    return np.sqrt(icc) * shared + np.sqrt(1 - icc) * own, cluster


def asked(claim: str, rng: np.random.Generator, other_legs: int = 0) -> ClaimContext:
    """Return the context of the shipped row with a simulated model."""
    return ClaimContext(REGISTER[claim], "simulated", rng, other_legs)


def says(*parts: str) -> Callable[[Verdict], None]:
    """Check: the verdict's reason contains these texts."""

    def check(verdict: Verdict) -> None:
        assert all(part in verdict.reason for part in parts), verdict.reason

    return check


Decide = Callable[[Any, ClaimContext], Verdict]


def judged(claim: str, decide: Decide, case: Case, draws: range) -> list[Verdict]:
    """Return a verdict for each draw, after the case's check of each. Asserts."""
    verdicts = []
    for draw in draws:
        found = case.found(np.random.default_rng([SEED, draw]))
        context = asked(claim, np.random.default_rng([SEED, draw, 1]))
        row = replace(context.claim, thresholds=context.claim.thresholds | dict(case.thresholds))
        verdict = decide(found, replace(context, claim=row))
        assert verdict.id == claim
        if case.check is not None:
            case.check(verdict)
        verdicts.append(verdict)
    return verdicts


def hold(claim: str, decide: Decide, case: Case) -> None:
    """Draw, decide, and compare the outcomes with the truth. Asserts."""
    verdicts = judged(claim, decide, case, range(case.draws))
    outcomes = Counter(verdict.verdict for verdict in verdicts)
    require_enough(case, verdicts)
    if case.truth == "edge":
        allowed = int(binom.ppf(1 - UNLIKELY, case.draws, ERROR))
        for outcome in DECIDED:
            assert outcomes[outcome] <= allowed, f"{outcomes} at the threshold, {allowed} of each may be chance"
        return
    if case.truth == "power":
        least = int(binom.ppf(UNLIKELY, case.draws, LEAST))
        assert least > 0, f"{case.draws} draws cannot fail; take more"
        assert outcomes[case.wanted] >= least, f"{outcomes}: {case.wanted} less than {least} times"
        return
    right = sum(outcomes[outcome] for outcome in WANTED[case.truth])
    assert right >= case.least * case.draws, f"{dict(outcomes)}; reasons: {verdicts[0].reason}"
    opposite = {"holds": "falsified", "fails": "survived"}.get(case.truth)
    assert not opposite or outcomes[opposite] == 0, f"{outcomes}: {opposite} although the claim {case.truth}"


def require_enough(case: Case, verdicts: Sequence[Verdict]) -> None:
    """Raise AssertionError if a rate is measured on too few units for any verdict."""
    if case.truth in ("edge", "power"):
        few = [verdict for verdict in verdicts if re.search(r"at least [\d,]+ (are )?needed", verdict.reason)]
        assert len(few) < len(verdicts), f"measures nothing: {verdicts[0].reason}"


def hold_rates(claim: str, decide: Decide, case: Case) -> None:
    """Measure the error rates of an ``edge`` case or the power of a ``power`` case. Asserts."""
    outcomes: Counter[Outcome] = Counter()
    for start, stop in ((0, MEASURED), (MEASURED, RECOUNTED)):
        verdicts = judged(claim, decide, case, range(start, stop))
        require_enough(case, verdicts)
        outcomes.update(verdict.verdict for verdict in verdicts)
        share = {outcome: outcomes[outcome] / stop for outcome in DECIDED}
        if case.truth == "power":
            found, right = share[case.wanted], share[case.wanted] >= LEAST
        else:
            found, right = max(share.values()), max(share.values()) <= MOST
        print(f"{claim}: {case.name}: {share} of {stop}")
        if right:
            return
    raise AssertionError(
        f"{share} of {RECOUNTED} draws: {found:.1%} where {case.truth} allows {MOST:.0%} or {LEAST:.0%}"
    )
