"""The paper's cost of a pair: its headline reproduced, and the costs that it omits."""

from __future__ import annotations

import pytest

from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import two_model_cost_at_large_share, two_model_relative_cost


@pytest.mark.parametrize(
    ("share", "small", "large", "cost"),
    [
        (0.43, 3e9, 11e9, 0.585),  # EAD, abstract: Llama, −41.5 %
        (0.25, 1.5e9, 14e9, 0.33),  # EAD, abstract: Qwen, −67 %
    ],
)
def test_the_headline_is_the_parameter_weighted_token_share(share, small, large, cost):
    found = two_model_cost_at_large_share(share, small_parameters=small, large_parameters=large)
    assert found == pytest.approx(cost, abs=0.0005)  # the paper's last digit


def test_the_ends_are_the_models_alone():
    sizes = {"small_parameters": 2.0, "large_parameters": 8.0}
    assert two_model_cost_at_large_share(1.0, **sizes) == 1.0
    assert two_model_cost_at_large_share(0.0, **sizes) == 0.25


def test_catching_up_is_charged_on_top():
    sizes = {"small_parameters": 3e9, "large_parameters": 11e9}
    assert two_model_relative_cost(57, 43, 100, **sizes) == pytest.approx(two_model_cost_at_large_share(0.43, **sizes))
    assert two_model_relative_cost(57 + 43, 43 + 57, 100, **sizes) == pytest.approx(1 + 3 / 11), (
        "both models read everything"
    )


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_outside_zero_to_one_are_refused(share):
    with pytest.raises(BadArgument, match=r"large_share=.*but expected a share in 0–1"):
        two_model_cost_at_large_share(share, small_parameters=1, large_parameters=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2, 3, 1, 2), "token counts ≥ 0"),
        ((1, 2, 0, 1, 2), "emitted=0, but expected at least one emitted token"),
        ((1, 2, 3, 0, 2), "parameter counts > 0"),
    ],
)
def test_counts_that_make_no_sense_are_refused(arguments, message):
    small_tokens, large_tokens, emitted, small, large = arguments
    with pytest.raises(BadArgument, match=message):
        two_model_relative_cost(small_tokens, large_tokens, emitted, small_parameters=small, large_parameters=large)
