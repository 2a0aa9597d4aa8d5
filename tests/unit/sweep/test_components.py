"""EMAD's components: the replacements, how each is set, and copied K/V that is decoded, not predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from emad_ref.calibration.profile import profile_of
from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.replay.losses import PointColumnsBySequence, decoded_columns, replay_points_to_columns
from emad_ref.replay.replay import replay
from pytest_emad.sweep.components import (
    BEST,
    PUBLISHED,
    SingleComponentExchange,
    SingleReadoutTraces,
    Split,
    TunedCombination,
    exchange_each_component,
)
from pytest_emad.sweep.oracle_savings import columns_with_fill_cost
from tests.random_lenses import attached
from tests.small_models import LAYERS, VOCABULARY, small_model

PROBES = (2, 4)
GATE = EntropyEstimator("linear", weights=tuple(map(tuple, np.random.default_rng(3).normal(0, 0.3, (2, 33)).tolist())))
LEVEL = 0.03


@cache
def stepper() -> CausalStepper:
    return CausalStepper(small_model("gpt_neox", torch.float64))


@cache
def texts(split: Split) -> tuple[TokenSequence, ...]:
    rng = np.random.default_rng({"chosen": 1, "judged": 2}[split])
    return tuple(TokenSequence(rng.integers(0, VOCABULARY, 25), document=number) for number in range(6))


@cache
def readout(tuned: bool, gated: bool = True) -> SingleReadoutTraces:
    lens = attached(stepper(), range(1, LAYERS), 5, scale=0.1) if tuned else None
    chosen, judged = (
        take_trace(stepper(), texts(split), estimators={GATE: PROBES}, lens=lens, divergence=True)
        for split in ("chosen", "judged")
    )
    profile = profile_of(chosen, PROBES, model="m", fingerprint="f", corpus="c", dtype="float64")
    return SingleReadoutTraces("tuned" if tuned else "own", chosen, judged, profile, GATE if gated else None)


def rise(found: PointColumnsBySequence, trace: Trace) -> float:
    return float(np.expm1(np.diff(found.nll_nats.sum(axis=0))[0] / len(trace)))


def decoding(split: Split, points: Sequence[OperatingPoint]) -> PointColumnsBySequence:
    return decoded_columns(stepper(), stepper().geometry, texts(split), points)


@cache
def found() -> tuple[SingleComponentExchange, ...]:
    own, lens = readout(False), readout(True)
    return tuple(exchange_each_component(own, lens, stepper().geometry, level=LEVEL, count=12, decoded=decoding))


def test_one_part_is_exchanged_at_a_time() -> None:
    fields = {"readout": {"lens"}, "criterion": {"criterion"}, "monotone rule": {"depth", "kept"}, "K/V": {"kept"}}
    for each in found():
        before, after = each.before.way, each.after.way
        apart = {
            name for name in ("lens", "criterion", "depth", "kept") if getattr(before, name) != getattr(after, name)
        }
        assert apart == fields[each.part.split(",")[0]], each.part
        assert before in (PUBLISHED, BEST)
        if each.back:
            assert before == BEST
            (changed,) = apart - ({"kept"} if len(apart) > 1 else set())
            assert getattr(after, changed) == getattr(PUBLISHED, changed)
    assert [each.part for each in found() if each.back] == ["readout", "criterion", "monotone rule", "K/V"]
    assert sum(each.before.way == PUBLISHED for each in found()) == 4


def test_every_way_is_set_on_one_split_and_shown_on_the_other() -> None:
    """EMAD by hand: margins that distinguish tokens hardly save more within the level."""
    own, geometry = readout(False), stepper().geometry
    room = (np.array(own.profile.targets_nats) - own.chosen.entropy_nats[:, [1, 3]]).max(axis=1)

    def tried(point: OperatingPoint) -> tuple[float, float]:
        """Return (rise, saving) on the split of the choice."""
        pair = replay_points_to_columns(own.chosen, geometry, [full_depth(LAYERS), point])
        return rise(pair, own.chosen), float(1 - np.divide(*pair.flops.sum(axis=0)[::-1]))

    emad = exchange_each_component(own, readout(True), geometry, level=LEVEL, count=240)[0].before
    assert emad.way == PUBLISHED
    lost, saved = tried(emad.point)
    assert lost <= LEVEL
    by_hand = [tried(own.profile.point(float(margin))) for margin in room[room > 0]]
    best = max(saving for lost, saving in by_hand if lost <= LEVEL)
    assert 0 < best <= saved + 0.02
    assert saved < max(saving for _, saving in by_hand)
    expected = replay_points_to_columns(own.judged, geometry, [full_depth(LAYERS), emad.point])
    for name in ("nll_nats", "wrong", "flops", "depth"):
        assert np.array_equal(getattr(emad.columns, name), getattr(expected, name)), name
    assert emad.net_saving == pytest.approx(1 - expected.flops[:, 1].sum() / expected.flops[:, 0].sum())


def test_exact_keys_above_a_free_exit_are_paid_in_full() -> None:
    """The same tokens exit as early, but their blocks run nevertheless, except those that no later token needs."""
    (kept,) = (each for each in found() if each.part == "K/V")
    paid, geometry, judged = kept.after, stepper().geometry, readout(True).judged
    assert paid.point.schedule == "free_deferred"
    expected = replay_points_to_columns(judged, geometry, [full_depth(LAYERS), paid.point])
    assert np.array_equal(paid.columns.flops, expected.flops)
    copied = columns_with_fill_cost(judged, geometry, [replay(judged, paid.point)])
    assert not np.array_equal(paid.columns.flops[:, 1], copied.flops[:, 0])


def test_copied_keys_are_decoded_at_the_first_setting_that_stays_within_the_level() -> None:
    asked: list[tuple[Split, str]] = []

    def dear(split: Split, points: Sequence[OperatingPoint]) -> PointColumnsBySequence:
        """Fails twice on the split of the choice."""
        asked.append((split, points[0].name))
        assert points[0].schedule == "copying"
        assert points[0].lens is not None
        columns = decoding(split, points)
        lost = 1e4 if split == "chosen" and len(asked) <= 2 else -1e4
        return replace(columns, nll_nats=columns.nll_nats + lost)

    own, lens = readout(False), readout(True)
    result = exchange_each_component(own, lens, stepper().geometry, level=9.0, count=12, decoded=dear)
    copied = next(each.after for each in result if each.after.way.kept == "copied")
    assert [split for split, _ in asked] == ["chosen"] * 3 + ["judged"]
    assert len({name for _, name in asked}) == 3
    assert copied.point.name == asked[-1][1] == asked[-2][1]
    assert copied.columns.nll_nats[:, 1].max() < -1e3, "the decoded numbers are shown"
    assert not [
        each
        for each in exchange_each_component(own, lens, stepper().geometry, count=4)
        if each.after.way.kept == "copied"
    ]


def test_an_oracle_stands_in_where_the_own_head_has_no_gate() -> None:
    plain = exchange_each_component(readout(False, gated=False), readout(True), stepper().geometry, count=6)
    assert [each.part for each in plain if each.before.way == PUBLISHED] == [
        "readout", "criterion, by an oracle", "monotone rule",
    ]  # fmt: skip
    (back,) = (each for each in plain if each.back and each.part == "readout")
    assert back.before.way.criterion == back.after.way.criterion == "oracle"


def test_the_part_that_fails_is_the_one_that_costs_most_where_it_comes_back() -> None:
    def at(net: float) -> TunedCombination:
        return TunedCombination(
            BEST, full_depth(LAYERS), PointColumnsBySequence(*(np.array([[1.0, 1 - net]]) for _ in range(4)))
        )

    rows = [
        SingleComponentExchange("readout", at(0.4), at(0.1), True),
        SingleComponentExchange("criterion", at(0.3), at(0.05), True),
        SingleComponentExchange("K/V", at(0.4), at(-0.9), False),
    ]
    assert (
        min((each for each in rows if each.back), key=lambda each: each.after.net_saving - each.before.net_saving).part
        == "readout"
    )
    assert rows[0].after.net_saving - rows[0].before.net_saving == pytest.approx(-0.3)
