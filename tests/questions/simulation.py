"""Simulated evidence whose truth is known, and what may be said of it.

A module of ``cases`` belongs to the question of the same name and lists its ``CASES``. A case makes evidence from a
generator, hands it to the question's ``decide``, and says which outcomes its truth allows:

holds    the claim is true with room to spare: ``survived`` (or, on an inconclusive draw, nothing)
fails    the claim is false with room to spare: ``falsified``
edge     the truth lies on the threshold itself: neither outcome may come more often than 5 % of the time
premise  what the claim speaks of is absent: ``not applicable`` or ``unmeasured``
value    a row that only reports: ``measured``, and the number is the true one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import binom

from emad_ref.questions.asking import Asked
from emad_ref.verdict.claims import Outcome, Verdict, load_register

Truth = Literal["holds", "fails", "edge", "premise", "value"]
SEED = 20
ERROR = 0.05  # one-sided level of every verdict
UNLIKELY = 1e-3  # chance that an honest rule fails a case at the edge

WANTED: dict[Truth, frozenset[Outcome]] = {
    "holds": frozenset({"survived"}),
    "fails": frozenset({"falsified"}),
    "premise": frozenset({"not applicable", "unmeasured"}),
    "value": frozenset({"measured"}),
}


@dataclass(frozen=True)
class Case:
    """``found(rng)``: evidence as ``decide`` takes it. ``draws``: how often it is made and judged anew.

    ``least``: share of draws that must have a wanted outcome (power; 1 for arithmetic).
    ``check``: looks at every verdict, and asserts what else its truth says of it.
    """

    name: str
    truth: Truth
    found: Callable[[np.random.Generator], Any]
    draws: int = 1
    least: float = 1.0
    check: Callable[[Verdict], None] | None = None


def asked(claim: str, rng: np.random.Generator, other_legs: int = 0) -> Asked:
    """The shipped row, asked about a simulated model."""
    return Asked(load_register()[claim], "simulated", rng, other_legs)


def hold(claim: str, decide: Callable[[Any, Asked], Verdict], case: Case) -> None:
    """Draw, decide, and compare with the truth. Asserts."""
    verdicts = []
    for draw in range(case.draws):
        found = case.found(np.random.default_rng([SEED, draw]))
        verdict = decide(found, asked(claim, np.random.default_rng([SEED, draw, 1])))
        assert verdict.id == claim
        if case.check is not None:
            case.check(verdict)
        verdicts.append(verdict)
    outcomes = Counter(verdict.verdict for verdict in verdicts)
    if case.truth == "edge":
        allowed = int(binom.ppf(1 - UNLIKELY, case.draws, ERROR))
        for outcome in ("survived", "falsified"):
            assert outcomes[outcome] <= allowed, f"{outcomes} at the threshold, {allowed} of each may be chance"
        return
    right = sum(outcomes[outcome] for outcome in WANTED[case.truth])
    assert right >= case.least * case.draws, f"{dict(outcomes)}; reasons: {verdicts[0].reason}"
    opposite = {"holds": "falsified", "fails": "survived"}.get(case.truth)
    assert not opposite or outcomes[opposite] == 0, f"{outcomes}: {opposite} although the claim {case.truth}"
