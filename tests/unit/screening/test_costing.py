"""Costs measured on a clock that only passes move, and what they predict held against what decoding takes on it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting, DraftingDecoder
from emad_ref.errors import BadArgument
from emad_ref.point import BinSpec, Estimator, OperatingPoint, full_depth, truncated
from emad_ref.protocol import Prompt
from emad_ref.screening import prediction
from emad_ref.screening.drafts import seconds_per_token_drafting
from emad_ref.screening.prediction import (
    FEWEST_LAPS,
    measure_costs,
    parts_of_token,
    passes_of,
    seconds_per_token,
    shares_of,
)
from tests.rounds import rounds_of
from tests.small import LAYERS, VOCABULARY
from tests.ticking import ticking

DEPTHS = (6, 2, 4, 4, 2, 2, 6, 2, 4, 6)
FALLING = tuple(sorted(DEPTHS, reverse=True))
PROBES = (2, 4)
LAP = 84.0  # seconds of one on the clock, of which FEW leaves these parts
FEW = {"lengths": (1,), "draft_layers": (), "heads": ()}  # where it does not matter what a lap holds


def measured(stepper, **options):
    return measure_costs(stepper, clock=stepper.clock, **{"seconds": 1.0, **options})


@pytest.fixture(scope="module")
def steady():
    stepper = ticking()
    return stepper, measured(stepper)


def forced(depths, schedule, estimator=None):
    """A point at which the token at each position has the depth that ``depths`` says, by thresholds of its bin."""
    levels = {2: (math.inf, math.inf), 4: (-math.inf, math.inf), 6: (-math.inf, -math.inf)}
    bins = BinSpec(("position",), position_edges=tuple(range(1, len(depths))))
    rows = tuple(levels[depth] for depth in depths)
    return OperatingPoint(
        schedule, "forced", LAYERS, LAYERS, PROBES, rows, schedule, estimator or Estimator(), bins=bins
    )


def decoded(stepper, point, tokens):
    """Seconds a token on the stepper's clock, and the depths."""
    start = stepper.clock.now
    record = WalkedDecoder(stepper, point).generate([Prompt(np.array([1]))], tokens, frozenset())
    return (stepper.clock.now - start) / tokens, record.tokens.depth


def test_every_part_is_found_as_the_clock_has_it(steady):
    stepper, costs = steady
    grown = 1 + stepper.more * (costs.lengths - 1)
    assert costs.token == costs.step == stepper.embedding
    np.testing.assert_allclose(costs.block, stepper.block * grown)
    np.testing.assert_allclose(costs.head, stepper.head * grown)
    assert (costs.fill, costs.gate, costs.lens, costs.probe) == (stepper.kv, stepper.norm, 0.0, 0.0)
    assert set(costs.again.values()) == {stepper.block}
    assert list(costs.again) == [1, 2, 4]
    assert costs.per_key == 0.0
    assert set(costs.pruned.values()) == {stepper.norm}
    assert costs.whole == pytest.approx(stepper.embedding + LAYERS * stepper.block + stepper.head)
    assert (costs.layers, costs.vocabulary) == (LAYERS, VOCABULARY)


def test_a_small_model_has_its_loop_timed_with_its_passes():
    stepper = ticking(block=0.001, head=0.003, embedding=0.00025, norm=0.0005)
    costs = measured(stepper, **FEW)
    assert costs.block[0] == pytest.approx(stepper.block)
    assert costs.step == pytest.approx(stepper.embedding)
    assert costs.probe == pytest.approx(0.0, abs=1e-12)
    assert costs.gate == pytest.approx(stepper.norm)
    assert costs.whole == pytest.approx(stepper.embedding + LAYERS * stepper.block + stepper.head)


def test_what_a_lens_and_a_translator_take_is_theirs():
    stepper = ticking()

    def taking(seconds):
        def translate(hidden):
            stepper.clock.take(seconds)
            return hidden

        return translate

    costs = measured(stepper, lens=taking(0.75), translator=taking(0.625), **FEW)
    assert (costs.lens, costs.translator) == (0.75, 0.625)
    assert (costs.fill, costs.gate) == (stepper.kv, stepper.norm)


def test_keys_cost_what_they_cost():
    stepper = ticking(per_key=0.01)
    costs = measured(stepper, **FEW)
    assert costs.per_key == pytest.approx(0.01)
    assert costs.blocks(3, 1, keys=50) == pytest.approx(3 * (stepper.block + 0.5))
    seconds, depth = decoded(stepper, full_depth(LAYERS), 9)
    assert seconds_per_token(costs, full_depth(LAYERS), shares_of(depth, LAYERS), keys=4) == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["full", "linear"])
@pytest.mark.parametrize("schedule", ["monotone", "free_eager", "free_deferred", "copying"])
def test_what_is_predicted_of_a_point_is_what_decoding_there_takes(steady, schedule, kind):
    stepper, costs = steady
    estimator = Estimator() if kind == "full" else Estimator("linear", weights=((0.0,) * 33,) * 2)
    point = forced(FALLING if schedule == "monotone" else DEPTHS, schedule, estimator)
    seconds, depth = decoded(stepper, point, len(DEPTHS))
    assert sorted(depth.tolist()) == sorted(DEPTHS)
    passes = passes_of([depth], LAYERS) if schedule == "free_deferred" else None
    shares = shares_of(depth, LAYERS)
    assert seconds_per_token(costs, point, shares, passes=passes) == pytest.approx(seconds)


def test_so_it_is_of_points_without_probes_and_of_chunks(steady):
    stepper, costs = steady
    falls = OperatingPoint("falls", "positional", LAYERS, LAYERS, schedule="positional", period=4, floor=2)
    chunks = OperatingPoint(
        "chunks", "chunked", LAYERS, LAYERS, PROBES, ((-math.inf, math.inf),), schedule="chunked", period=2
    )
    for point in (full_depth(LAYERS), truncated(LAYERS, 4), falls, chunks):
        seconds, depth = decoded(stepper, point, 8)
        predicted = seconds_per_token(costs, point, shares_of(depth, LAYERS), passes=_passes(point, depth))
        assert predicted == pytest.approx(seconds), point.name


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("layer", "longest"), [(1, 3), (2, 1), (4, 5)])
def test_so_it_is_of_drafting(steady, layer, longest, gated):
    stepper, costs = steady
    prompt, new, weights = Prompt(np.array([5, 3, 8])), 40, np.random.default_rng(0).normal(size=33)
    said = WalkedDecoder(stepper, full_depth(LAYERS)).generate([prompt], new).emitted[0]
    vocabulary = np.unique(said)[: VOCABULARY // 8]  # as many rows as were timed
    gate = Estimator("linear", weights=(tuple(weights),))
    drafting = Drafting(layer, longest, threshold=0.0 if gated else math.inf, gate=gate, vocabulary=vocabulary)
    decoder = DraftingDecoder(stepper, drafting)
    start = stepper.clock.now
    decoder.generate([prompt], 1, frozenset())
    opened = stepper.clock.now
    record = decoder.generate([prompt], new, frozenset())
    seconds = (stepper.clock.now - opened - (opened - start)) / (new - 1)
    rounds = rounds_of(record, longest)
    assert len(np.flatnonzero(rounds.drafts)) > 1 or not gated, "the gate decides"
    predicted = seconds_per_token_drafting(costs, drafting, rounds)
    # the last rounds have room for fewer drafts than ``longest``, and the last of those is not asked about
    assert predicted == pytest.approx(seconds, abs=longest * stepper.norm / (new - 1) if gated else 1e-9)


def _passes(point, depth):
    return passes_of([depth], LAYERS) if point.schedule == "chunked" else None


def test_a_machine_that_is_now_faster_now_slower_has_the_same_costs():
    """Every lap at a pace of its own: after division by it all laps say the same."""
    stepper = ticking()
    paces = iter([5.0, 1.0, 2.0, 1.0, 0.5, 3.0, 1.0])

    def slower(_):
        stepper.clock.rate = next(paces)

    costs, usual = measured(stepper, between=slower, **FEW), measured(ticking(), **FEW)
    np.testing.assert_allclose(costs.block, usual.block)
    assert costs.whole == pytest.approx(usual.whole)
    for name, (low, high) in costs.intervals.items():
        assert low == pytest.approx(high), name


def test_laps_go_on_until_the_seconds_are_spent_and_no_longer(monkeypatch):
    monkeypatch.setattr(prediction, "MOST_LAPS", FEWEST_LAPS + 3)
    counts = []
    for seconds in (1.0, 6.5 * LAP, 1e9):
        laps = []
        measured(ticking(), seconds=seconds, between=laps.append, **FEW)
        counts.append(len(laps))
        assert laps == list(range(len(laps)))
    assert counts == [FEWEST_LAPS, 7, FEWEST_LAPS + 3]


def test_a_bar_is_shown_where_it_has_a_name(capsys):
    measured(ticking(), **FEW)
    assert capsys.readouterr().err == ""
    measured(ticking(), progress="costs", **FEW)
    assert "costs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seconds": 0.0}, "seconds"),
        ({"keys": (8, 8)}, "keys"),
        ({"keys": (8, 1000)}, "keys"),
        ({"lengths": (2, 3)}, "lengths"),
        ({"draft_layers": (6,)}, "draft_layers"),
        ({"heads": (VOCABULARY,)}, "heads"),
    ],
)
def test_what_cannot_be_timed_is_refused_by_name(options, named):
    with pytest.raises(BadArgument, match=f"^{named}="):
        measured(ticking(), **options)


def test_parts_say_what_takes_the_time(steady):
    stepper, costs = steady
    shares = shares_of(np.array([2, 6]), LAYERS)
    parts = parts_of_token(costs, forced((2, 6), "copying"), shares)
    assert parts["blocks"] == 4 * stepper.block
    assert parts["fills"] == 2 * stepper.kv
    assert parts["heads"] == (1 + 3) / 2 * stepper.head  # one at the first probe; two probes and the emission
    assert parts["gates"] == parts["lens"] == 0


def test_intervals_are_named_by_part_and_size(steady):
    _, costs = steady
    assert {"block 1", "block 8", "head 1", "again 4", "far", "lens", "whole"} <= set(costs.intervals)
    assert "lens 1" not in costs.intervals
    assert all(costs.intervals[f"block {size}"][0] <= costs.block[at] for at, size in enumerate(costs.lengths))
