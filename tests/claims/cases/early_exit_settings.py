"""Simulated answers at two settings of the same rule, and tokens that two models lose, with a known sign."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.claims.early_exit_answers import RuleComparisons
from pytest_emad.claims.early_exit_settings import SettingsEvidence
from tests.claims.simulated_exits import LAYERS, PLAIN, Cell, alike, contest
from tests.claims.simulation import SCORED, Case, celled, says

# ---------------------------------------------------------------- EE-16
#
# A lower λ that exits earlier and loses score, a first layer and a pruning that gain it, and a k that costs the
# pre-trained model more tokens: each by a known amount of either sign.

TOKENS = 20  # of each item
Draw = Callable[[np.random.Generator], SettingsEvidence]


def settings(
    *, sooner: float = 0.5, worse: float = 0.06, since: float = 0.05, adaptive: float = 0.05, fewer: float = 0.2,
    cell: Cell = PLAIN,
) -> Draw:  # fmt: skip
    """Return evidence of these true differences; the claim needs each above 0."""

    def draw(rng: np.random.Generator) -> SettingsEvidence:
        lowered = contest(rng, "qa, softmax", sooner=sooner, gained=-worse, cell=cell)
        lowest = contest(rng, "qa, j=3", gained=since, cell=cell)
        pruned = contest(rng, "qa, adaptive", gained=adaptive, cell=cell)
        hard = rng.uniform(0.3, 0.5, cell.items) + 0.05 * cell.noise(rng)  # items differ in what a small k loses
        after = rng.binomial(TOKENS, np.clip(hard, 0.0, 1.0)).astype(float)
        before = after + TOKENS * fewer + rng.normal(0.0, 1.0, cell.items)
        tokens = cell.column(np.full(cell.items, float(TOKENS)))
        lost = {"qa, k=13": (cell.column(before), cell.column(after), tokens)}
        return SettingsEvidence(*(RuleComparisons((one,), LAYERS) for one in (lowered, lowest, pruned)), lost)

    return draw


def absent(rng: np.random.Generator) -> SettingsEvidence:
    """Nothing to show: λ that changes no exit, a confidence that rises from the first layer on, no twin."""
    same, none = RuleComparisons((alike(rng, "qa, softmax"),), LAYERS), RuleComparisons((), LAYERS)
    twin = Absent("one model before and after tuning is missing", "premise")
    layers = {"qa": Absent("confidence is lowest after the first layer", "premise")}
    return SettingsEvidence(same, none, none, twin, layers)


def without_twin(rng: np.random.Generator) -> SettingsEvidence:
    return replace(settings()(rng), lost=Absent("one model before and after tuning is missing", "premise"))


def same_tokens(rng: np.random.Generator) -> SettingsEvidence:
    found = absent(rng)
    tokens = PLAIN.column(np.full(PLAIN.items, 3.0))
    return replace(found, lost={"qa, k=13": (tokens, tokens, tokens)})


def fails(sentence: str, **truth: float) -> Case:
    return Case(f"all but one sentence: {sentence}", "fails", settings(**truth), draws=10, check=says(sentence))


EE_16 = [
    Case("every sentence holds", "holds", settings(), draws=10),
    fails("qa, softmax: exit", sooner=-0.4),
    fails("qa, softmax: score", worse=-0.06),
    fails("qa, j=3: score", since=-0.05),
    fails("qa, adaptive: score", adaptive=-0.05),
    fails("qa, k=13", fewer=-0.2),
    Case("a model without a tuned twin", "holds", without_twin, draws=10),
    Case("a model that shows no sentence", "premise", absent, check=says("confidence is lowest")),
    Case("a k that costs both models the same", "tied", same_tokens),
    *celled(
        "a lower λ loses nothing", "edge", lambda n, icc: settings(worse=0.0, cell=Cell(n, icc)), n=SCORED, draws=12
    ),
    *celled("tuning needs equal k", "edge", lambda n, icc: settings(fewer=0.0, cell=Cell(n, icc)), n=SCORED, draws=12),
]

CASES = {"EE-16": EE_16}
