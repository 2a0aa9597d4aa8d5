"""Decisions on paired scores: legs, groups, Holm, clusters, and what is said before and after a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_emad.accuracy.comparison import AccuracyComparison, compare_accuracy
from pytest_emad.accuracy.decision import estimate_drop
from pytest_emad.statistics.accuracy import estimate_accuracy_drop
from pytest_emad.statistics.units import ByItem
from tests.evaluation_folders import (
    DATE,
    LATER,
    choice_row,
    inspect_sample,
    paired_rights,
    write_choice_pair,
    write_inspect_json,
    write_lm_eval,
)

Scores = Sequence[float]
NAMES = (("base", DATE), ("candidate", LATER))


def compare_tasks(folder: Path, scores: dict[str, tuple[Scores, Scores]], /, **options: Any) -> AccuracyComparison:
    """Compare two evaluations with these scores by task; ``groups`` and ``by_size`` go to the files."""
    written = {name: options.pop(name) for name in ("groups", "by_size") if name in options}
    sides = []
    for side, (name, date) in enumerate(NAMES):
        rows = {
            task: [choice_row(n, {"acc": score}, document=f"{task} {n}") for n, score in enumerate(both[side])]
            for task, both in scores.items()
        }
        sides.append(write_lm_eval(folder / name, rows, model=name, date=date, **written))
    return compare_accuracy(*sides, **options)


def counts(n: int, lost: int, gained: int, seed: int = 0) -> tuple[list[float], list[float]]:
    return paired_rights(n, lost, gained, seed=seed)


@pytest.mark.parametrize(
    ("n", "lost", "gained", "outcome"),
    [
        (2000, 100, 10, "falsified"),
        (2000, 10, 12, "survived"),
        (400, 8, 4, "inconclusive"),
        (60, 30, 0, "inconclusive"),
    ],
)
def test_a_drop_is_beyond_the_margin_below_it_or_undecided(
    tmp_path: Path, n: int, lost: int, gained: int, outcome: str
) -> None:
    comparison = compare_accuracy(*write_choice_pair(tmp_path, n, lost, gained))
    (test,) = comparison.tests
    assert comparison.verdict == test.leg.outcome == outcome
    assert (test.items, test.lost, test.gained) == (n, lost, gained)
    assert test.base - test.candidate == pytest.approx((lost - gained) / n)
    assert test.leg.estimate == pytest.approx((lost - gained) / n)


def test_the_numbers_are_those_of_the_exact_tail(tmp_path: Path) -> None:
    base, candidate = counts(500, 20, 9)
    (test,) = compare_tasks(tmp_path, {"t": (base, candidate)}).tests
    columns = (ByItem.from_independent_items(np.asarray(side) == 1) for side in (base, candidate))
    assert test.estimate == estimate_accuracy_drop(*columns, threshold=0.01)


def test_fewer_than_a_hundred_items_decide_nothing_and_say_so(tmp_path: Path) -> None:
    (test,) = compare_accuracy(*write_choice_pair(tmp_path, 99, 60, 0)).tests
    assert test.leg.reason == "99 items, at least 100 are needed"


def test_holm_corrects_what_is_falsified_and_not_what_survives(tmp_path: Path) -> None:
    """One task that is falsified alone is open beside nine others that tie; each of these survives at its own level."""
    tasks = {"fell": counts(800, 24, 6)} | {f"kept{n}": counts(800, 2, 3, seed=n) for n in range(9)}
    alone = compare_tasks(tmp_path / "alone", {"fell": tasks["fell"]})
    assert alone.verdict == "falsified"
    assert 0.005 < (alone.tests[0].leg.p_falsify or 0) < 0.05
    together = compare_tasks(tmp_path / "together", tasks)
    assert together.verdict == "inconclusive"
    outcomes = {test.name: test.leg.outcome for test in together.tests}
    assert outcomes == {"fell": "inconclusive"} | {f"kept{n}": "survived" for n in range(9)}
    assert "falsified alone, but not after Holm over 10 tests" in together.tests[0].leg.reason


def test_one_falsified_task_falsifies_the_whole_and_all_must_survive(tmp_path: Path) -> None:
    kept, fell, few = counts(2000, 5, 5), counts(2000, 120, 5), counts(110, 1, 0)
    assert compare_tasks(tmp_path / "a", {"kept": kept, "fell": fell}).verdict == "falsified"
    assert compare_tasks(tmp_path / "b", {"kept": kept, "few": few}).verdict == "inconclusive"
    assert compare_tasks(tmp_path / "c", {"kept": kept, "too": kept}).verdict == "survived"


def test_a_group_is_one_test_and_its_tasks_a_table(tmp_path: Path) -> None:
    tasks = {"a": counts(600, 30, 5), "b": counts(300, 15, 2, seed=1), "alone": counts(500, 2, 2)}
    comparison = compare_tasks(tmp_path, tasks, groups={"both": ["a", "b"]})
    single, group = comparison.tests
    assert (single.name, group.name) == ("alone", "both")
    assert [part.task for part in group.parts] == ["a", "b"]
    assert (group.items, group.lost, group.gained) == (900, 45, 7)
    assert group.leg.estimate == pytest.approx(38 / 900)
    assert {part.leg.outcome for part in group.parts} == {"measured"}
    assert len(comparison.whole.legs) == 2  # no part counts in Holm


def test_a_group_that_weighs_its_tasks_alike_has_the_mean_of_their_drops(tmp_path: Path) -> None:
    tasks = {"large": counts(900, 0, 0), "small": counts(150, 30, 6, seed=1)}
    groups = {"both": ["large", "small"]}
    alike = compare_tasks(tmp_path / "alike", tasks, groups=groups, by_size=False)
    (test,) = alike.tests
    assert test.leg.estimate == pytest.approx((0 + 24 / 150) / 2)
    assert test.base - test.candidate == pytest.approx((0 + 24 / 150) / 2)
    assert alike.verdict == "falsified"
    by_size = compare_tasks(tmp_path / "size", tasks, groups=groups)
    assert by_size.tests[0].leg.estimate == pytest.approx(24 / 1050)


def test_a_task_of_a_group_can_be_named_alone(tmp_path: Path) -> None:
    tasks = {"a": counts(600, 30, 5), "b": counts(300, 0, 0)}
    comparison = compare_tasks(tmp_path, tasks, groups={"both": ["a", "b"]}, tasks=["a"])
    assert [(test.name, test.items) for test in comparison.tests] == [("a", 600)]
    comparison = compare_tasks(tmp_path, tasks, groups={"both": ["a", "b"]}, tasks=["both"])
    assert [(test.name, test.items) for test in comparison.tests] == [("both", 900)]


def test_a_metric_that_the_group_does_not_aggregate_is_counted(tmp_path: Path) -> None:
    sides = []
    for name, date in NAMES:
        tasks = {
            task: [choice_row(n, {"acc": float(n % 2), "acc_norm": 1.0}) for n in range(10)] for task in ("a", "b")
        }
        sides.append(write_lm_eval(tmp_path / name, tasks, model=name, date=date, groups={"both": ["a", "b"]}))
    comparison = compare_accuracy(*sides)
    assert [(test.name, test.metric) for test in comparison.tests] == [("both", "acc")]
    assert [(each.subject, each.count) for each in comparison.omissions] == [("acc_norm", 20)]


def test_repeats_of_one_document_count_once(tmp_path: Path) -> None:
    """Each of 100 documents stands four times in the data set."""
    base, candidate = counts(100, 6, 1)
    sides = []
    for (name, date), scores in zip(NAMES, (base, candidate), strict=True):
        rows = [choice_row(n, {"acc": scores[n % 100]}, document=f"document {n % 100}") for n in range(400)]
        sides.append(write_lm_eval(tmp_path / name, {"t": rows}, model=name, date=date))
    repeated = compare_accuracy(*sides).tests[0]
    once = compare_tasks(tmp_path / "once", {"t": (base, candidate)}).tests[0]
    assert (repeated.items, repeated.independent, once.independent) == (400, 100, 100)
    assert repeated.leg.interval == pytest.approx(once.leg.interval)


def test_items_of_one_document_in_two_tasks_of_a_group_are_one_cluster(tmp_path: Path) -> None:
    sides = []
    for name, date in NAMES:
        rows = [choice_row(n, {"acc": 1.0}) for n in range(50)]
        sides.append(
            write_lm_eval(tmp_path / name, {"a": rows, "b": rows}, model=name, date=date, groups={"both": ["a", "b"]})
        )
    assert compare_accuracy(*sides).tests[0].independent == 50


def test_a_field_of_the_documents_gives_clusters(tmp_path: Path) -> None:
    pair = write_choice_pair(tmp_path, 400)
    assert compare_accuracy(*pair).tests[0].independent == 400
    assert compare_accuracy(*pair, cluster="paragraph").tests[0].independent == 100


def test_epochs_of_inspect_count_as_clusters(tmp_path: Path) -> None:
    sides = [
        write_inspect_json(
            tmp_path / f"{run}.json", [inspect_sample(n, "C", epoch=e) for n in range(120) for e in (1, 2, 3)], run=run
        )
        for run in ("a", "b")
    ]
    (test,) = compare_accuracy(*sides).tests
    assert (test.items, test.independent) == (360, 120)


# ---------------------------------------------------------------- scores in between


def between(n: int, drop: float, spread: float = 0.1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    base = rng.uniform(0.3, 0.7, n)
    noise = rng.normal(0, spread, n)
    return base, np.clip(base - drop + noise - noise.mean(), 0, 1)


@pytest.mark.parametrize(("drop", "above", "below"), [(0.03, True, False), (-0.01, False, True), (0.01, False, False)])
def test_scores_in_between_are_studentised(drop: float, above: bool, below: bool) -> None:
    n = 800
    estimate, spread = estimate_drop(*between(n, drop), np.arange(n), np.ones(n), 0.01)
    assert "studentised" in estimate.method
    assert estimate.value == pytest.approx(drop, abs=1e-9)
    assert (estimate.p_above <= 0.05, estimate.p_below <= 0.05) == (above, below)
    assert not spread.exact


def test_many_items_are_resampled_in_blocks_with_the_same_error() -> None:
    n = 6_000
    base, candidate = between(n, 0.0)
    estimate, _ = estimate_drop(base, candidate, np.arange(n), np.ones(n), 0.01)
    error = (base - candidate).std() / np.sqrt(n)
    assert estimate.n == n
    assert (estimate.high - estimate.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.08)
    clusters = np.repeat(np.arange(n // 2), 2)
    estimate, _ = estimate_drop(base, candidate, clusters, np.ones(n), 0.01)
    assert estimate.n == n // 2


def test_a_few_items_that_differ_are_bounded_by_their_number() -> None:
    n = 250
    base = np.full(n, 0.5)
    candidate = base.copy()
    candidate[:3] = 0.4
    estimate, _ = estimate_drop(base, candidate, np.arange(n), np.ones(n), 0.01)
    assert estimate.method == "3 items differ: exact bounds on how many do"
    assert estimate.p_below > 0.05  # one per cent of unseen items may lose everything


def test_small_differences_of_few_items_do_not_hide_a_ruined_one() -> None:
    """Every item differs by a thousandth; of 150 items none shows the one per cent that would lose everything."""
    rng = np.random.default_rng(0)

    def sides(n: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(n, 0.5), 0.5 + rng.normal(0, 1e-3, n)

    few, _ = estimate_drop(*sides(150), np.arange(150), np.ones(150), 0.01)
    many, _ = estimate_drop(*sides(400), np.arange(400), np.ones(400), 0.01)
    assert few.p_below > 0.05 >= many.p_below


# ---------------------------------------------------------------- before and after the verdict


def test_the_detectable_drop_is_told_and_a_leg_falls_there(tmp_path: Path) -> None:
    (test,) = compare_accuracy(*write_choice_pair(tmp_path, 1319, 33, 33)).tests
    assert test.detectable is not None
    assert 0.02 < (test.detectable.falsified or 0) < 0.035
    assert -0.02 < (test.detectable.survived or 0) < 0.0


def test_an_open_leg_says_how_many_items_would_decide_it(tmp_path: Path) -> None:
    (test,) = compare_accuracy(*write_choice_pair(tmp_path, 400, 10, 10)).tests
    assert test.forecast is not None
    assert test.leg.enough == test.forecast.items > 400
    assert f"about {test.leg.enough:,} items would decide it in four of five samples" in test.leg.reason
    assert "at the ends of its interval" in test.leg.reason
    decided = compare_accuracy(*write_choice_pair(tmp_path / "more", test.leg.enough, *[test.leg.enough // 40] * 2))
    assert decided.verdict == "survived"


def test_two_equal_sides_survive_from_three_hundred_items_and_are_told(tmp_path: Path) -> None:
    few, many = (compare_accuracy(*write_choice_pair(tmp_path / str(n), n)) for n in (290, 300))
    assert (few.verdict, many.verdict) == ("inconclusive", "survived")
    assert many.notes == ("every score is equal on both sides: two runs of one model, or one run twice",)
