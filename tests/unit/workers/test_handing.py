"""Units handed out: in order, few at a time, again when a worker dies, and never again when the function fails."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from emad_ref.workers.dispatch import MAX_LOSSES, WorkerPool, WorkersLost, dispatch_exclusively, dispatch_in_order


def threads(ahead: int = 3) -> WorkerPool:
    return WorkerPool("threads", lambda: ThreadPoolExecutor(3), ahead)


class Dying(Executor):
    """Runs a unit when it is submitted, or loses a worker on it; others go on."""

    def __init__(self, deadly: Callable[[Any], bool]):
        self._deadly = deadly

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._deadly(args[0]):
            future.set_exception(BrokenExecutor("its worker was killed"))
        else:
            future.set_result(fn(*args))
        return future


def test_results_come_in_the_order_of_units_whoever_is_first() -> None:
    def slow_at_first(unit: int) -> int:
        threading_wait(0.05 if unit == 0 else 0.0)
        return -unit

    assert list(dispatch_in_order(threads(), slow_at_first, range(7))) == [(n, -n) for n in range(7)]


def threading_wait(seconds: float) -> None:
    from threading import Event

    Event().wait(seconds)


def test_no_more_units_are_out_than_the_crew_holds() -> None:
    taken = 0

    def units() -> Any:
        nonlocal taken
        for unit in count():
            taken += 1
            yield unit

    results = dispatch_in_order(threads(ahead=4), lambda unit: unit, units())
    for done in range(1, 6):
        next(results)
        assert taken <= done + 3
    results.close()


@pytest.mark.parametrize("killed", [0, 1, 4])
def test_what_a_dead_worker_had_is_handed_out_again_and_nothing_else(killed: int) -> None:
    runs: list[int] = []
    deaths = [killed]

    def deadly(unit: int) -> bool:
        return unit in deaths and not deaths.remove(unit)  # type: ignore[func-returns-value]

    def function(unit: int) -> int:
        runs.append(unit)
        return unit * unit

    crew = WorkerPool("mortals", lambda: Dying(deadly), 3)
    assert [result for _, result in dispatch_in_order(crew, function, range(6))] == [n * n for n in range(6)]
    assert sorted(runs) == list(range(6))


def test_a_unit_that_kills_everybody_is_named_as_a_loss_of_workers() -> None:
    asked: list[int] = []

    def deadly(unit: int) -> bool:
        asked.append(unit)
        return unit == 2

    results = dispatch_in_order(WorkerPool("mortals", lambda: Dying(deadly), 2), lambda unit: unit, range(5))
    assert [next(results), next(results)] == [(0, 0), (1, 1)]
    with pytest.raises(WorkersLost, match=rf"mortals: workers died {MAX_LOSSES} times in a row.*can be resumed"):
        next(results)
    assert asked.count(2) == MAX_LOSSES


def test_deaths_far_apart_are_forgiven() -> None:
    left = dict.fromkeys(range(5), MAX_LOSSES - 1)

    def deadly(unit: int) -> bool:
        left[unit] -= 1
        return left[unit] >= 0

    crew = WorkerPool("mortals", lambda: Dying(deadly), 1)
    assert [result for _, result in dispatch_in_order(crew, lambda unit: unit, range(5))] == list(range(5))


def test_an_error_of_the_function_is_the_callers_at_once() -> None:
    asked = []

    def fails(unit: int) -> int:
        asked.append(unit)
        if unit == 1:
            raise ZeroDivisionError("of this unit")
        return unit

    results = dispatch_in_order(WorkerPool("threads", lambda: ThreadPoolExecutor(1), 1), fails, range(5))
    assert next(results) == (0, 0)
    with pytest.raises(ZeroDivisionError, match="of this unit"):
        next(results)
    assert asked == [0, 1]


def test_what_measures_comes_when_the_rest_is_through_where_a_machine_is_shared() -> None:
    at_work, beside = set[int](), dict[int, set[int]]()

    def noted(unit: int) -> int:
        at_work.add(unit)
        threading_wait(0.02)
        beside[unit] = at_work - {unit}
        at_work.discard(unit)
        return unit

    def measures(unit: int) -> bool:
        return unit % 3 == 0

    alone = WorkerPool("one thread", lambda: ThreadPoolExecutor(1), 3)
    shared = WorkerPool("threads", lambda: ThreadPoolExecutor(3), 3, alone=alone)
    found = [unit for unit, _ in dispatch_exclusively(shared, noted, range(9), measures)]
    assert found == [1, 2, 4, 5, 7, 8, 0, 3, 6]
    assert [beside[unit] for unit in (0, 3, 6)] == [set(), set(), set()]
    assert any(beside[unit] for unit in (1, 2, 4, 5, 7, 8)), "what measures nothing has company"


def test_whoever_has_a_machine_to_himself_measures_when_it_is_his_turn() -> None:
    assert list(dispatch_exclusively(threads(), lambda unit: -unit, range(5), lambda unit: True)) == [
        (n, -n) for n in range(5)
    ]
