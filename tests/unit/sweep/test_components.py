"""EMAD's components: the replacements, how each is set, and copied K/V that is decoded, not predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from emad_ref.calibration.profile import profile_of
from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.models.causal import CausalStepper
from emad_ref.point import EntropyEstimator, OperatingPoint
from emad_ref.replay.losses import Losses, decode_losses, replay_losses
from pytest_emad.sweep.components import (
    BEST,
    PUBLISHED,
    SingleComponentExchange,
    SingleReadoutTraces,
    Split,
    TunedCombination,
    exchange_each_component,
)
from pytest_emad.sweep.oracle_savings import replay_losses_with_fill_cost
from tests.handmade_losses import handmade_losses
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


def decoding(split: Split, points: Sequence[OperatingPoint]) -> Losses:
    return decode_losses(stepper(), stepper().geometry, texts(split), points)


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
        nats, spent = (replay_losses(own.chosen, geometry, [point]).totals(name) for name in ("nats", "flops"))
        return float(np.expm1((nats[1] - nats[0]) / len(own.chosen))), float(1 - spent[1] / spent[0])

    emad = exchange_each_component(own, readout(True), geometry, level=LEVEL, count=240)[0].before
    assert emad.way == PUBLISHED
    lost, saved = tried(emad.point)
    assert lost <= LEVEL
    by_hand = [tried(own.profile.point(float(margin))) for margin in room[room > 0]]
    best = max(saving for lost, saving in by_hand if lost <= LEVEL)
    assert 0 < best <= saved + 0.02
    assert saved < max(saving for _, saving in by_hand)
    expected = replay_losses(own.judged, geometry, [emad.point])
    for name in ("nats", "wrong", "flops", "depth"):
        assert np.array_equal(getattr(emad.loss.table, name)[emad.loss.index], getattr(expected, name)[1]), name
    assert emad.loss.net_reduction == pytest.approx(1 - expected.flops[1].sum() / expected.flops[0].sum())


def test_exact_keys_above_a_free_exit_are_paid_in_full() -> None:
    """The same tokens exit as early, but their blocks run nevertheless, except those that no later token needs."""
    (kept,) = (each for each in found() if each.part == "K/V")
    paid, geometry, judged = kept.after, stepper().geometry, readout(True).judged
    assert paid.point.schedule == "free_deferred"
    mine = paid.loss.table.flops[paid.loss.index]
    assert np.array_equal(mine, replay_losses(judged, geometry, [paid.point]).flops[1])
    copied = replay_losses_with_fill_cost(judged, geometry, [paid.point])
    assert not np.array_equal(mine, copied.flops[1])


def test_copied_keys_are_decoded_at_the_first_setting_that_stays_within_the_level() -> None:
    asked: list[tuple[Split, str]] = []

    def dear(split: Split, points: Sequence[OperatingPoint]) -> Losses:
        """Fails twice on the split of the choice."""
        asked.append((split, points[0].name))
        assert points[0].schedule == "copying"
        assert points[0].lens is not None
        losses = decoding(split, points)
        lost = 1e4 if split == "chosen" and len(asked) <= 2 else -1e4
        return replace(losses, nats=losses.nats + lost)

    own, lens = readout(False), readout(True)
    result = exchange_each_component(own, lens, stepper().geometry, level=9.0, count=12, decoded=dear)
    copied = next(each.after for each in result if each.after.way.kept == "copied")
    assert [split for split, _ in asked] == ["chosen"] * 3 + ["judged"]
    assert len({name for _, name in asked}) == 3
    assert copied.point.name == asked[-1][1] == asked[-2][1]
    assert copied.loss.nats.max() < -1e3, "the decoded numbers are shown"
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
        return TunedCombination(BEST, handmade_losses(np.ones((1, 2)), np.array([[1.0, 1 - net]]), np.ones(1))[1])

    def gained(each: SingleComponentExchange) -> float:
        return each.after.loss.net_reduction - each.before.loss.net_reduction

    rows = [
        SingleComponentExchange("readout", at(0.4), at(0.1), True),
        SingleComponentExchange("criterion", at(0.3), at(0.05), True),
        SingleComponentExchange("K/V", at(0.4), at(-0.9), False),
    ]
    assert min((each for each in rows if each.back), key=gained).part == "readout"
    assert gained(rows[0]) == pytest.approx(-0.3)
