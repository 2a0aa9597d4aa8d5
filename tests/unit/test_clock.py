"""Paired timing under a simulated clock."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest

from emad_ref.errors import BadArgument
from pytest_emad.benchmark.clock import OwnSeconds, minimum_detectable_speedup, time_pairs


class Clock:
    """A clock that advances only while an arm works."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def __call__(self) -> float:
        return self.now

    def arm(self, name: str, seconds: float, result: float | None = None):
        def work(index: int) -> float | None:
            self.log.append((name, index))
            self.now += seconds * (index + 1)
            return result

        return work


def run(clock: Clock, pairs: int = 6, warm_up: int = 2, seed: int = 0, **options):
    arms = {"full": clock.arm("full", 3.0), "adaptive": clock.arm("adaptive", 2.0)}
    return time_pairs(
        arms, pairs, np.random.default_rng(seed), warm_up=warm_up, clock=clock, process_clock=clock, **options
    )


def test_warm_up_is_left_out_and_every_pair_has_its_own_input():
    clock = Clock()
    timings = run(clock)
    assert timings.seconds["full"].tolist() == [3.0 * (i + 1) for i in range(2, 8)]
    assert timings.seconds["adaptive"].tolist() == [2.0 * (i + 1) for i in range(2, 8)]
    assert timings.process_seconds["full"].tolist() == timings.seconds["full"].tolist()
    assert sorted(clock.log) == sorted((name, i) for i in range(8) for name in ("full", "adaptive"))
    assert [index for _, index in clock.log] == [i // 2 for i in range(16)]  # the arms of a pair run next to each other


def test_each_arm_leads_half_of_the_pairs_in_an_order_that_the_seed_decides():
    orders = {run(Clock(), pairs=20, warm_up=0, seed=seed).first for seed in range(5)}
    assert len(orders) == 5
    assert all(order.count("full") == 10 for order in orders)
    assert run(Clock(), seed=3).first == run(Clock(), seed=3).first


def test_first_names_the_arm_that_really_ran_first():
    clock = Clock()
    timings = run(clock, pairs=10, warm_up=3)
    assert timings.first == tuple(name for name, _ in clock.log[6::2])


def test_an_arm_may_bring_its_own_seconds():
    clock = Clock()
    arms = {
        "device": lambda index: OwnSeconds(0.25),
        "number": clock.arm("number", 0.5, 7.0),
        "host": clock.arm("host", 1.0),
    }
    timings = time_pairs(arms, 3, np.random.default_rng(0), warm_up=1, clock=clock)
    assert timings.seconds["device"].tolist() == [0.25] * 3
    assert timings.seconds["number"].tolist() == [1.0, 1.5, 2.0], "a result that happens to be a number is no time"
    assert timings.seconds["host"].tolist() == [2.0, 3.0, 4.0]


def test_the_device_is_waited_for_before_start_and_before_stop():
    """Asynchronous work finishes in ``synchronize`` and belongs to the arm that started it."""
    clock, queue = Clock(), [100.0]  # earlier work, of no arm

    def synchronize() -> None:
        while queue:
            clock.now += queue.pop()

    arms = {"a": lambda index: queue.append(2.0), "b": lambda index: queue.append(5.0)}
    timings = time_pairs(arms, 4, np.random.default_rng(0), warm_up=0, clock=clock, synchronize=synchronize)
    assert timings.seconds["a"].tolist() == [2.0] * 4
    assert timings.seconds["b"].tolist() == [5.0] * 4


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.self = self


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_between_pairs_and_never_while_an_arm_runs(enabled):
    alive, running, collected = [], [False], []

    def arm(index: int) -> None:
        running[0] = True
        assert not gc.isenabled()
        assert all(each() is None for pair, each in alive if pair < index), "left over from an earlier pair"
        alive.append((index, weakref.ref(Cycle())))
        running[0] = False

    def watch(phase: str, info: dict[str, int]) -> None:
        collected.append(running[0])

    before = gc.isenabled()
    gc.enable() if enabled else gc.disable()
    gc.callbacks.append(watch)
    try:
        time_pairs({"a": arm, "b": arm}, 3, np.random.default_rng(0))
        assert gc.isenabled() == enabled
    finally:
        gc.callbacks.remove(watch)
        gc.enable() if before else gc.disable()
    assert collected, "the collector runs between pairs"
    assert not any(collected)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"pairs": 0}, "pairs"), ({"warm_up": -1}, "warm_up")],
)
def test_misuse_is_refused_by_name(change, named):
    with pytest.raises(BadArgument, match=f"^{named}="):
        run(Clock(), **change)


def test_one_arm_is_no_comparison():
    with pytest.raises(BadArgument, match="arms"):
        time_pairs({"full": lambda index: None}, 3, np.random.default_rng(0))


@pytest.mark.parametrize("own", [0.0, -1.0, math.nan])
def test_a_time_that_is_none_is_refused(own):
    with pytest.raises(BadArgument, match="seconds of b"):
        time_pairs({"a": lambda index: OwnSeconds(1), "b": lambda index: OwnSeconds(own)}, 1, np.random.default_rng(0))


def test_the_smallest_decidable_speedup_is_decided_about_as_often_as_promised():
    """30 pairs, spread 5 %, power 80 %: 400 simulated runs, 4 standard errors of a share (8 points)."""
    from pytest_emad.statistics.speedup import BLOCKS, PLANNED_INFLATION, estimate_speedup_per_request
    from pytest_emad.statistics.units import ByPair

    planned = {"units": BLOCKS[-1], "inflation": PLANNED_INFLATION}
    truth, source = minimum_detectable_speedup(0.05, 30, threshold=1.10, **planned), np.random.default_rng(0)
    assert truth > 1.10
    shown = [
        estimate_speedup_per_request(
            ByPair(truth * np.exp(0.05 * source.standard_normal(30))), ByPair(np.ones(30)), threshold=1.10
        ).p_above
        <= 0.05
        for _ in range(400)
    ]
    assert 0.72 < np.mean(shown) < 0.88


def test_more_pairs_decide_smaller_speedups_and_no_spread_decides_all():
    reach = [minimum_detectable_speedup(0.1, n) for n in (5, 30, 300)]
    assert reach == sorted(reach, reverse=True)
    assert reach[-1] > 1
    assert minimum_detectable_speedup(0.0, 30, threshold=1.10) == pytest.approx(1.10)
    assert minimum_detectable_speedup(0.1, 30, error=0.01) > minimum_detectable_speedup(0.1, 30)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"spread": -0.1, "n": 30}, "spread"),
        ({"spread": math.nan, "n": 30}, "spread"),
        ({"spread": 0.1, "n": 1}, "n"),
        ({"spread": 0.1, "n": 30, "threshold": 0.0}, "threshold"),
        ({"spread": 0.1, "n": 30, "error": 0.0}, "error"),
        ({"spread": 0.1, "n": 30, "power": 1.0}, "power"),
    ],
)
def test_impossible_preflights_are_refused(arguments, named):
    with pytest.raises(BadArgument, match=f"^{named}="):
        minimum_detectable_speedup(**arguments)
