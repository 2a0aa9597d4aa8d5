"""Verdicts of ``emad accuracy`` on simulated evaluations of known drops: their errors at the margin, and their power.

Each draw goes through pairing and decision as files do, from columns in memory. The quick test makes a few draws of
each case; ``tox -e rates`` makes all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from pytest_emad.accuracy.comparison import compare_accuracy
from pytest_emad.accuracy.decision import decide_accuracy
from pytest_emad.accuracy.items import Evaluation, ScoredTask, TaskGroup
from pytest_emad.accuracy.pairing import PairingOptions, pair_evaluations
from pytest_emad.accuracy.simulation import decide_counts, mcnemar_pvalue, simulate_table, simulate_verdicts
from tests.evaluation_folders import DATE, LATER, choice_row, write_lm_eval

MARGIN, LEVEL, POWER = 0.01, 0.05, 0.8
UNLIKELY = 1e-3  # probability that a correct rule fails a case
Draw = Callable[[np.random.Generator], str]  # a verdict on one simulated pair
Task = tuple[str, str, np.ndarray, np.ndarray, Sequence[int]]  # name, filter, base, candidate, clusters


def rights(rng: np.random.Generator, n: int, drop: float, discordance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return n items of which (s + d) / 2 are lost and (s − d) / 2 gained, on average."""
    base = rng.random(n) < 0.6
    kind = rng.random(n)
    lost, gained = (discordance + drop) / 2, (discordance - drop) / 2
    base[kind < lost + gained] = kind[kind < lost + gained] < lost
    candidate = np.where(kind < lost, False, np.where(kind < lost + gained, True, base))
    return base.astype(float), candidate.astype(float)


def evaluations(tasks: Sequence[Task], groups: Sequence[TaskGroup] = ()) -> tuple[Evaluation, Evaluation]:
    sides = []
    for side, name in enumerate(("base", "candidate")):
        scored = []
        for task in tasks:
            ids = [str(n) for n in range(len(task[2]))]
            same = [""] * len(ids)
            clusters = [f"{task[0]} {cluster}" for cluster in task[4]]
            scores = {"acc": task[2 + side]}
            scored.append(
                ScoredTask(task[0], task[1], ids, same, same, same, clusters, scores, Path(name), lambda _: [])
            )
        sides.append(Evaluation(Path(name), "lm-eval", name, name, scored, groups))
    return sides[0], sides[1]


def verdict(tasks: Sequence[Task], groups: Sequence[TaskGroup] = ()) -> str:
    base, candidate = evaluations(tasks, groups)
    return decide_accuracy(pair_evaluations(base, candidate, PairingOptions()), MARGIN, "candidate")[0].verdict


def alone(n: int, drop: float, discordance: float) -> Draw:
    def draw(rng: np.random.Generator) -> str:
        base, candidate = rights(rng, n, drop, discordance)
        lost, gained = int((base > candidate).sum()), int((base < candidate).sum())
        return decide_counts(lost, gained, n, MARGIN)

    return draw


def several(k: int, n: int, drop: float, discordance: float) -> Draw:
    """Draw ``k`` tasks of this drop."""
    return lambda rng: verdict([(f"t{i}", "none", *rights(rng, n, drop, discordance), range(n)) for i in range(k)])


def two_filters(n: int, drop: float, discordance: float) -> Draw:
    """Draw one task scored by two filters that agree on nine of ten items."""

    def draw(rng: np.random.Generator) -> str:
        strict, other = rights(rng, n, drop, discordance), rights(rng, n, drop, discordance)
        same = rng.random(n) < 0.9
        flexible = [np.where(same, *pair) for pair in zip(strict, other, strict=True)]
        return verdict([("t", "strict", *strict, range(n)), ("t", "flexible", *flexible, range(n))])

    return draw


def group(sizes: Sequence[int], drops: Sequence[float], discordance: float, by_size: bool) -> Draw:
    """Draw a group whose tasks have these sizes and drops."""
    names = [f"t{i}" for i in range(len(sizes))]
    weights = [TaskGroup("g", "acc", "none", names, by_size)]

    def draw(rng: np.random.Generator) -> str:
        tasks = [
            (name, "none", *rights(rng, n, drop, discordance), range(n))
            for name, n, drop in zip(names, sizes, drops, strict=True)
        ]
        return verdict(tasks, weights)

    return draw


def repeats(documents: int, each: int, drop: float, discordance: float) -> Draw:
    """Draw documents whose ``each`` items agree but for a tenth."""

    def draw(rng: np.random.Generator) -> str:
        n = documents * each
        shared, own = rights(rng, documents, drop, discordance), rights(rng, n, drop, discordance)
        changed = rng.random(n) < 0.1
        sides = [np.where(changed, mine, np.repeat(one, each)) for one, mine in zip(shared, own, strict=True)]
        return verdict([("t", "none", *sides, np.repeat(np.arange(documents), each))])

    return draw


def between(n: int, drop: float, ruined: float = 0.0) -> Draw:
    """Draw scores in between, from 0.1 to 0.9; a share ``ruined`` loses all of it, and the others make up the drop."""

    def draw(rng: np.random.Generator) -> str:
        base = rng.beta(4, 2, n)  # of mean 4/6
        rest = (drop / 0.8 - ruined * 4 / 6) / (1 - ruined)
        noise = rng.uniform(-0.5, 0.5, n) * np.minimum(base, 1 - base)
        candidate = np.where(rng.random(n) < ruined, 0.0, base - rest + noise)
        return verdict([("t", "none", 0.1 + 0.8 * base, 0.1 + 0.8 * candidate, range(n))])

    return draw


@dataclass(frozen=True)
class AccuracyCase:
    """``draw`` gives a verdict. ``errors``: outcomes that may each come at the level; ``wanted``: one with power."""

    draw: Draw
    errors: tuple[str, ...] = ()
    wanted: str = ""
    draws: int = 1_000
    quick: int = 20


BOTH = ("falsified", "survived")
CASES = {
    **{
        f"one task at the margin: n = {n}, {100 * s:g} % differ": AccuracyCase(alone(n, MARGIN, s), BOTH)
        for n in (400, 1_319, 14_042)
        for s in (0.02, 0.05, 0.1, 0.2)
    },
    "no drop, 14,042 items": AccuracyCase(alone(14_042, 0.0, 0.05), ("falsified",), "survived"),
    "half a point, 14,042 items": AccuracyCase(alone(14_042, 0.005, 0.02), ("falsified",), "survived"),
    "2 points, 14,042 items": AccuracyCase(alone(14_042, 0.02, 0.1), ("survived",), "falsified"),
    "5 points, 1,319 items": AccuracyCase(alone(1_319, 0.05, 0.15), ("survived",), "falsified"),
    "ten tasks at the margin": AccuracyCase(several(10, 500, MARGIN, 0.06), BOTH, draws=200, quick=4),
    "two filters at the margin": AccuracyCase(two_filters(800, MARGIN, 0.06), BOTH, draws=500, quick=10),
    "a group by size at the margin": AccuracyCase(
        group((800, 300, 200), (0.0, 0.02, 13 / 200 - 0.03), 0.08, True), BOTH, draws=500, quick=6
    ),
    "a group of equal weights at the margin": AccuracyCase(
        group((700, 250, 150), (0.0, 0.03, 0.0), 0.08, False), BOTH, draws=300, quick=4
    ),
    "a group of equal weights at 5 points": AccuracyCase(
        group((700, 250, 150), (0.05, 0.05, 0.05), 0.1, False), ("survived",), "falsified", draws=100, quick=4
    ),
    "repeats of 300 documents at the margin": AccuracyCase(repeats(300, 4, MARGIN, 0.06), BOTH, draws=500, quick=6),
    "scores in between at the margin": AccuracyCase(between(400, MARGIN), BOTH, draws=300, quick=4),
    "scores in between, all of the drop in ruined items": AccuracyCase(
        between(400, MARGIN, MARGIN / 0.8 * 6 / 4), BOTH, draws=300, quick=4
    ),
}


def hold_case(case: AccuracyCase, draws: int) -> None:
    outcomes = Counter(case.draw(np.random.default_rng([20, draw])) for draw in range(draws))
    most = int(binom.isf(UNLIKELY, draws, LEVEL))
    for outcome in case.errors:
        assert outcomes[outcome] <= most, outcomes
    if case.wanted:
        assert outcomes[case.wanted] >= binom.ppf(UNLIKELY, draws, POWER), outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_verdicts_err_at_their_level_and_find_what_is_there(name: str) -> None:
    hold_case(CASES[name], CASES[name].draws)


@pytest.mark.parametrize("name", CASES)
def test_a_few_draws_of_each_case(name: str) -> None:
    hold_case(CASES[name], CASES[name].quick)


@pytest.mark.slow
def test_beside_mcnemar_no_drop_is_seldom_falsified_and_three_points_are_found() -> None:
    for cell in simulate_table((1_319, 14_042), MARGIN, 500, seed=1):
        most = binom.isf(UNLIKELY, 500, LEVEL) / 500
        assert cell.falsified <= most or cell.drop > MARGIN, cell
        assert cell.survived <= most or cell.drop < MARGIN, cell
        if cell.drop == 0:
            assert cell.mcnemar <= most, cell
        if cell.items == 14_042 and cell.drop == 0.03:
            assert cell.falsified >= POWER, cell


def test_mcnemar_rejects_a_drop_below_the_margin_which_survives_here() -> None:
    """A true drop of 0.3 points among 14,042 items: it is there, and it is accepted."""
    cell = simulate_verdicts(14_042, 0.02, 0.003, MARGIN, 40, np.random.default_rng(0))
    assert cell.mcnemar > 0.5
    assert cell.survived > 0.9
    assert mcnemar_pvalue(0, 0) == 1
    assert mcnemar_pvalue(5, 0) == pytest.approx(2**-5)


def test_the_simulated_verdict_is_that_of_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for number, drop in enumerate((0.0, 0.01, 0.05)):
        scores = rights(rng, 600, drop, 0.06)
        sides = [
            write_lm_eval(
                tmp_path / f"{number}{name}",
                {"t": [choice_row(n, {"acc": score}) for n, score in enumerate(side)]},
                model=name,
                date=date,
            )
            for name, date, side in zip("ab", (DATE, LATER), scores, strict=True)
        ]
        lost, gained = (int((sign * (scores[0] - scores[1]) > 0).sum()) for sign in (1, -1))
        assert compare_accuracy(*sides).verdict == decide_counts(lost, gained, 600, MARGIN)
