"""The table of dimensions, its covering arrays, and the reduction of a case."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from pytest_emad.audit.dimensions import (
    REQUEST_CONSTRAINTS,
    REQUESTS,
    SESSION_CONSTRAINTS,
    SESSIONS,
    Constraint,
    Dimension,
    is_possible,
    iterate_pairs,
    make_covering_cases,
    reduce_case,
)

TABLES = {"requests": (REQUESTS, REQUEST_CONSTRAINTS), "sessions": (SESSIONS, SESSION_CONSTRAINTS)}


def values_of(dimensions: dict[str, Dimension]) -> dict[str, tuple[str, ...]]:
    return {name: each.values for name, each in dimensions.items()}


@pytest.mark.parametrize("table", TABLES)
def test_every_value_occurs_and_every_case_is_possible(table: str) -> None:
    dimensions, constraints = TABLES[table]
    cases = make_covering_cases(values_of(dimensions), constraints, 0)
    assert all(is_possible(case, constraints) for case in cases)
    for name, each in dimensions.items():
        assert {case[name] for case in cases} == set(each.values), name
    assert len(cases) < 120, "an array, and no list of all combinations"


@pytest.mark.parametrize("table", TABLES)
def test_a_pair_is_left_out_only_if_constraints_exclude_it(table: str) -> None:
    """Pairs of dimensions without any constraint between them, direct or by a third one, are all there."""
    dimensions, constraints = TABLES[table]
    cases = make_covering_cases(values_of(dimensions), constraints, 1)
    asked = {pair for case in cases for pair in iterate_pairs(case)}
    constrained = {name for one in constraints for name in one.fields}
    for one, other in combinations(sorted(dimensions), 2):
        if one in constrained and other in constrained:
            continue
        wanted = {((one, a), (other, b)) for a, b in product(dimensions[one].values, dimensions[other].values)}
        assert wanted <= asked, (one, other)


def test_the_pairs_of_the_array_are_all_that_are_possible() -> None:
    values = {"a": ("0", "1", "2"), "b": ("0", "1", "2"), "c": ("0", "1")}
    constraints = (
        Constraint(("a", "b"), lambda a, b: a != "2" or b == "0", "two excludes others"),
        Constraint(("b", "c"), lambda b, c: b != "0" or c == "0", "so two and one never meet in a and c"),
    )
    possible = [case for each in product(*values.values())
                if is_possible(case := dict(zip(values, each, strict=True)), constraints)]  # fmt: skip
    cases = make_covering_cases(values, constraints, 0)
    pairs = {pair for case in cases for pair in iterate_pairs(case)}
    assert pairs == {pair for case in possible for pair in iterate_pairs(case)}
    assert (("a", "2"), ("c", "1")) not in pairs


def test_a_seed_repeats_its_array_and_another_gives_another() -> None:
    values = values_of(REQUESTS)
    first, again, other = (make_covering_cases(values, REQUEST_CONSTRAINTS, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_strength_three_covers_triples() -> None:
    values = dict.fromkeys("abcd", ("0", "1"))
    cases = make_covering_cases(values, (), 0, 3)
    for names in combinations(values, 3):
        assert {tuple(case[name] for name in names) for case in cases} == set(product("01", repeat=3))


def test_a_case_is_reduced_to_the_values_that_fail() -> None:
    values = {"a": ("0", "1", "2"), "b": ("0", "1"), "c": ("0", "1", "2")}
    asked = []

    def fails(case: dict[str, str]) -> bool:
        asked.append(case)
        return case["a"] != "0" and case["c"] == "2"

    assert reduce_case({"a": "2", "b": "1", "c": "2"}, values, (), fails) == {"a": "1", "b": "0", "c": "2"}
    assert all(is_possible(case, ()) for case in asked)


def test_a_reduced_case_stays_possible() -> None:
    values = {"a": ("0", "1"), "b": ("0", "1")}
    together = (Constraint(("a", "b"), lambda a, b: a == b, "only together"),)
    assert reduce_case({"a": "1", "b": "1"}, values, together, lambda case: True) == {"a": "1", "b": "1"}


def test_the_page_shows_the_tables() -> None:
    page = (Path(__file__).parents[3] / "docs" / "dimensions.md").read_text(encoding="utf-8")
    for dimensions, _ in TABLES.values():
        for name, each in dimensions.items():
            assert f"| {name} | {', '.join(each.values)} | {each.about} |" in page
