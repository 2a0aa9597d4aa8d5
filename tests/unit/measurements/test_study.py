"""Budgets: ``smoke`` reads less of a large model and says so, larger budgets read everything."""

from __future__ import annotations

import pytest

from emad_ref.models.geometry import geometry_of
from pytest_emad.measurements.study import BUDGETS, FEWEST
from pytest_emad.screening.settings import LARGE_TOKEN_FLOPS, compute_traced_token_flops
from tests.small_models import small_config


def test_a_small_model_reads_all_of_its_budget() -> None:
    geometry = geometry_of(small_config("llama"))
    heads = 1 + (geometry.layers - 1) // 2  # a probe after every second layer of a model with few layers
    expected = geometry.layers * geometry.block_flops() + heads * geometry.head_flops()
    assert compute_traced_token_flops(geometry) == expected < LARGE_TOKEN_FLOPS
    smoke = BUDGETS["smoke"]
    assert smoke.reduce_for_token_cost(expected) == smoke
    assert smoke.describe_reductions(smoke) == ""


def test_smoke_reads_less_of_a_large_model_in_proportion_and_never_too_little() -> None:
    smoke = BUDGETS["smoke"]
    less = smoke.reduce_for_token_cost(LARGE_TOKEN_FLOPS / 0.8)
    assert (less.calibrate, less.validate, less.evaluate, less.examples) == (80, 48, 160, 8)
    assert (
        less.describe_reductions(smoke)
        == "examples 8 of 10, calibrate 80 of 100, validate 48 of 60, evaluate 160 of 200"
    )
    assert {name: getattr(smoke.reduce_for_token_cost(1e15), name) for name in FEWEST} == FEWEST
    assert (less.pairs, less.items, less.batch_sizes) == (smoke.pairs, smoke.items, smoke.batch_sizes)


@pytest.mark.parametrize("name", ["standard", "full"])
def test_larger_budgets_read_all_at_every_size(name: str) -> None:
    assert BUDGETS[name].reduce_for_token_cost(1e15) == BUDGETS[name]
