"""Holm's family of a run: the gating statistical legs that are decided in other tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from emad_ref.sweep.pareto import LEVELS
from emad_ref.verdict.claims import load_register
from pytest_emad.family import LEGS, REDUCTIONS, other_legs
from pytest_emad.options import Settings, settings

REGISTER = load_register()
LAYERS = 12


@pytest.fixture
def chosen(project: pytest.Pytester) -> Callable[..., Settings]:
    return lambda *arguments: settings(project.parseconfig(*arguments))


def test_the_two_falsifiers_count_each_other(chosen: Callable[..., Settings]) -> None:
    run = chosen()
    assert other_legs("EMAD-F1", run, REGISTER, LAYERS) == len(run.budget.batch_sizes) == 2
    assert other_legs("EMAD-F2", run, REGISTER, LAYERS) == 2 * 2


def test_a_named_margin_is_one_more_point(chosen: Callable[..., Settings]) -> None:
    assert other_legs("EMAD-F2", chosen("--emad-margin", "0.1"), REGISTER, LAYERS) == 2 * 3


def test_every_model_of_the_run_has_legs(chosen: Callable[..., Settings]) -> None:
    run = chosen("--emad-model", "one", "--emad-model", "two")
    assert other_legs("EMAD-F1", run, REGISTER, LAYERS) == 4 + 2 + 2
    assert other_legs("EMAD-F2", run, REGISTER, LAYERS) == 2 + 4 + 4


def test_rows_that_do_not_gate_stand_alone_until_the_user_gates_them(chosen: Callable[..., Settings]) -> None:
    assert other_legs("EMAD-E1", chosen(), REGISTER, LAYERS) == 0
    run = chosen("--emad-gate-claims", "EMAD-E1")
    assert other_legs("EMAD-E1", run, REGISTER, LAYERS) == 4 + 2
    assert other_legs("EMAD-F1", run, REGISTER, LAYERS) == 2 + 11


def test_rivals_meet_at_every_level() -> None:
    assert len(LEVELS) == REDUCTIONS


def test_every_statistical_row_with_intervals_is_counted() -> None:
    assert set(LEGS) == {name for name, claim in REGISTER.items() if claim.minimum}
