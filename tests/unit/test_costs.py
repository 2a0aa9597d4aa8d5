"""Costs as data, and arithmetic on them: what stands between measured numbers, and what cannot be asked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.decoding.self_speculation import Drafting
from emad_ref.errors import BadArgument
from emad_ref.point import Estimator, OperatingPoint, full_depth
from emad_ref.screening.drafts import DraftingRounds, seconds_of_round, seconds_per_token_drafting
from emad_ref.screening.prediction import ComponentCosts, parts_of_token, passes_of, seconds_per_token, shares_of

LAYERS = 4
COSTS = ComponentCosts(
    layers=LAYERS,
    vocabulary=100,
    threads=1,
    keys=32,
    step=0.5,
    token=0.25,
    probe=0.125,
    lengths=np.array([1, 2, 4]),
    block=np.array([1.0, 1.5, 4.0]),
    head=np.array([2.0, 2.0, 3.0]),
    per_key=0.01,
    again={1: 0.75},
    pruned={10: 0.5, 50: 1.25},
    lens=0.25,
    gate=0.0625,
    fill=0.375,
    translator=0.125,
)
GATE = Estimator("linear", weights=((0.0, 0.0),))


def point(schedule="copying", estimator=None, **fields):
    estimator = estimator or Estimator()
    return OperatingPoint("x", "x", LAYERS, LAYERS, (2,), ((0.0,),), schedule, estimator, **fields)


def test_between_measured_lengths_stands_a_line_and_beyond_them_the_mean_slope():
    np.testing.assert_allclose(COSTS.passes(np.array([1, 2, 3, 4, 6])), [1.0, 1.5, 2.75, 4.0, 6.0])
    assert COSTS.heads(3) == 2.5
    assert COSTS.heads(0) == 0.0
    alone = replace(COSTS, lengths=np.array([1]), block=np.array([1.0]), head=np.array([2.0]))
    assert alone.blocks(1, 3) == 3.0, "of one length alone: in proportion"


def test_keys_count_from_those_that_were_timed():
    assert COSTS.blocks(2, 1, keys=42) == pytest.approx(2.2)
    assert COSTS.blocks(2, 1, keys=32) == COSTS.blocks(2)
    assert COSTS.shallow(1, keys=42) == pytest.approx(0.85)
    assert COSTS.shallow(2) == COSTS.blocks(2), "where no shallow pass was timed"
    assert COSTS.blocks(1, keys=-1000) == 0.0, "never below nothing"


def test_a_pruned_head_lies_between_those_timed_and_the_full_one():
    assert [COSTS.pruned_head(rows) for rows in (5, 10, 30, 75, 100)] == pytest.approx([0.5, 0.5, 0.875, 1.625, 2.0])
    for rows in (0, 101):
        with pytest.raises(BadArgument, match=r"^rows="):
            COSTS.pruned_head(rows)
    with pytest.raises(BadArgument, match="that was measured"):
        replace(COSTS, pruned={}).pruned_head(10)


@pytest.mark.parametrize("part", ["lens", "gate", "fill", "translator", "whole"])
def test_what_was_not_measured_is_not_nothing(part):
    with pytest.raises(BadArgument, match=rf"^costs\.{part}=None"):
        replace(COSTS, **{part: None}).of(part)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lengths": np.array([2, 1, 4])}, "costs.lengths"),
        ({"lengths": np.array([2, 3, 4])}, "costs.lengths"),
        ({"block": np.ones(2)}, "costs.block"),
        ({"head": np.ones(2)}, "costs.head"),
        ({"step": -1.0}, "costs.step"),
        ({"head": np.array([1.0, math.nan, 1.0])}, "costs.head"),
        ({"again": {2: math.inf}}, "costs.again"),
        ({"fill": -0.1}, "costs.fill"),
    ],
)
def test_costs_that_are_none_are_refused_by_name(change, named):
    with pytest.raises(BadArgument, match=f"^{named}"):
        replace(COSTS, **change)


def test_a_token_pays_for_the_heads_its_probes_read_and_emits_from_the_last_of_them():
    shares = np.array([0.0, 0.5, 0.0, 0.5])
    lensed = parts_of_token(COSTS, point(lens="d"), shares)
    assert lensed == {
        "step": 0.5,
        "blocks": 3.0,
        "fills": 2 * 0.5 * 0.375,
        "heads": 1.5 * 2.0,
        "lens": 0.25,
        "probes": 0.125,
        "gates": 0.0,
    }
    gated = parts_of_token(COSTS, point(estimator=GATE, lens="d"), shares)
    assert (gated["heads"], gated["lens"], gated["gates"]) == (2.0, 0.125, 0.0625), "the lens where it leaves alone"


def test_translated_states_are_paid_for_beside_their_fills():
    """The layer right above an exit is given the state itself."""
    translated, shares = point("translated", translators="d"), np.array([0.0, 1.0, 0.0, 0.0])
    copied = parts_of_token(COSTS, point(), shares)["fills"]
    assert parts_of_token(COSTS, translated, shares)["fills"] == pytest.approx(copied + 0.125)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.6, 0.7, 0.9])
def test_right_below_the_last_layer_no_state_is_translated_however_shares_are_rounded(share):
    untranslated, shares = replace(COSTS, translator=None), np.array([0.0, 0.0, share, 1 - share])
    parts = parts_of_token(untranslated, replace(point("translated", translators="d"), probes=(3,)), shares)
    assert parts["fills"] == pytest.approx(share * 0.375)


def test_independent_exits_wait_as_long_as_drawn_ones_do():
    """4,000 drawn depths: within four standard errors of a share (0.03)."""
    drawn = np.random.default_rng(0).choice([1, 2, 4], size=4000, p=[0.3, 0.3, 0.4])
    deferred, shares = point("free_deferred"), shares_of(drawn, LAYERS)
    assumed = seconds_per_token(COSTS, deferred, shares)
    found = seconds_per_token(COSTS, deferred, shares, passes=passes_of([drawn], LAYERS))
    assert found == pytest.approx(assumed, rel=0.03)
    assert found > seconds_per_token(COSTS, point("monotone"), shares), "tokens that waited run in the end"


def test_passes_of_depths_in_order_are_those_that_run():
    passes = passes_of([np.array([1, 3, 2, 1, 4]), np.array([2])], LAYERS)
    expected = np.zeros((4, 5))
    expected[0, 0] = 6  # every token alone
    expected[1, [0, 1]] = 2, 2  # (1, 3) and (1, 4) together; 2 and 2 alone
    expected[2, [1, 2]] = 1, 1  # (1, 3), then (2, 1, 4)
    expected[3, 4] = 1
    np.testing.assert_allclose(passes, expected / 6)


def test_a_round_of_drafts_pays_for_each_and_for_one_pass_above():
    drafting = Drafting(1, 3, threshold=0.5, gate=GATE, lens="d", vocabulary=np.arange(10))
    two = 0.5 + 2 * 0.25 + 3 * 0.75 + 2 * (0.5 + 0.25) + 3 * 0.0625 + 3 * 2.75 + 2.5
    assert seconds_of_round(COSTS, drafting, 2) == pytest.approx(two)
    none = 0.5 + 1.0 + 0.0625 + 3.0 + 2.0
    assert seconds_of_round(COSTS, drafting, 0) == pytest.approx(none), "asked once, and gone on"
    three = seconds_of_round(COSTS, drafting, 3)
    ungated = seconds_of_round(COSTS, replace(drafting, threshold=math.inf), 3)
    assert three - ungated == pytest.approx(3 * 0.0625), "after the longest nobody asks"
    rounds = DraftingRounds(np.array([0.5, 0.0, 0.5]), 1.5)
    assert seconds_per_token_drafting(COSTS, drafting, rounds) == pytest.approx((none + two) / 2 / 1.5)


def test_copies_pay_for_one_pass_through_all_layers():
    way, rounds = Drafting(1, 1, copied=2), DraftingRounds(np.array([0.25, 0.0]), 2.5, np.array([0.0, 0.0, 0.75]))
    none, two = seconds_of_round(COSTS, way, 0), 0.5 + COSTS.blocks(4, 3) + COSTS.heads(3)
    assert seconds_per_token_drafting(COSTS, way, rounds) == pytest.approx((0.25 * none + 0.75 * two) / 2.5)


def scheduled(name):
    """A point of a schedule that has no price: no constructor would give it."""
    made = point()
    object.__setattr__(made, "schedule", name)
    return made


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (lambda: seconds_per_token(COSTS, point(), np.ones(3) / 3), "depth_shares"),
        (lambda: seconds_per_token(COSTS, full_depth(5), np.ones(4) / 4), "depth_shares"),
        (lambda: seconds_per_token(COSTS, point(), np.ones(4)), "depth_shares"),
        (lambda: seconds_per_token(COSTS, replace(full_depth(4), ceiling=3), np.ones(4) / 4), "depth_shares"),
        (lambda: seconds_per_token(COSTS, point(estimator=Estimator("topk", k=4)), np.ones(4) / 4), "point.estimator"),
        (lambda: seconds_per_token(COSTS, scheduled("of tomorrow"), np.ones(4) / 4), "point.schedule"),
        (lambda: DraftingRounds(np.array([0.5, 0.4]), 1.0), "rounds.drafts"),
        (lambda: DraftingRounds(np.array([0.5, 0.5]), 2.5), "rounds.tokens"),
        (lambda: DraftingRounds(np.array([0.5, 0.5]), 1.0, np.array([0.0, 0.5])), "rounds.drafts and rounds.copies"),
        (lambda: DraftingRounds(np.array([0.5]), 1.0, np.array([0.5])), "rounds.copies"),
        (
            lambda: seconds_per_token_drafting(
                COSTS, Drafting(1, 1), DraftingRounds(np.ones(1) / 2, 1.0, np.array([0, 0.5]))
            ),
            "rounds.copies",
        ),
        (
            lambda: seconds_per_token_drafting(COSTS, Drafting(1, 1), DraftingRounds(np.ones(3) / 3, 1.0)),
            "rounds.drafts",
        ),
        (
            lambda: seconds_per_token_drafting(COSTS, Drafting(4, 2), DraftingRounds(np.ones(3) / 3, 1.0)),
            "drafting.layer",
        ),
        (lambda: COSTS.blocks(1, 0), "tokens"),
    ],
)
def test_what_does_not_add_up_is_refused_by_name(asked, named):
    with pytest.raises(BadArgument, match=f"^{named}"):
        asked()
