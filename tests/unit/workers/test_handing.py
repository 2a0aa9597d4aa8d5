"""Units handed out: in order, few at a time, again when a worker dies, and never again when the function fails."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from emad_ref.workers.handing import LOST, Crew, WorkersLost, handed_out


def threads(ahead: int = 3) -> Crew:
    return Crew("threads", lambda: ThreadPoolExecutor(3), ahead)


class Dying(Executor):
    """Runs a unit when it is submitted; dies when its time has come, and with it whatever comes later, or a worker of
    several does, and others go on."""

    def __init__(self, deadly: Callable[[Any], bool], others: bool = False):
        self._deadly, self._others, self.dead = deadly, others, False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        dies = self._deadly(args[0])
        self.dead = self.dead or (dies and not self._others)
        if self.dead or dies:
            future.set_exception(BrokenExecutor("its worker was killed"))
        else:
            future.set_result(fn(*args))
        return future


def test_results_come_in_the_order_of_units_whoever_is_first() -> None:
    def slow_at_first(unit: int) -> int:
        threading_wait(0.05 if unit == 0 else 0.0)
        return -unit

    assert list(handed_out(threads(), slow_at_first, range(7))) == [(n, -n) for n in range(7)]


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

    results = handed_out(threads(ahead=4), lambda unit: unit, units())
    for done in range(1, 6):
        next(results)
        assert taken <= done + 3
    results.close()


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("killed", [0, 1, 4])
def test_what_a_dead_worker_had_is_handed_out_again_and_what_was_done_is_not(killed: int, others: bool) -> None:
    runs: list[int] = []
    deaths = [killed]

    def deadly(unit: int) -> bool:
        return unit in deaths and not deaths.remove(unit)  # type: ignore[func-returns-value]

    def function(unit: int) -> int:
        runs.append(unit)
        return unit * unit

    crew = Crew("mortals", lambda: Dying(deadly, others), 3)
    assert [result for _, result in handed_out(crew, function, range(6))] == [n * n for n in range(6)]
    assert sorted(runs) == list(range(6))


def test_a_unit_that_kills_everybody_is_named_as_a_loss_of_workers() -> None:
    engaged = []

    def engage() -> Dying:
        engaged.append(1)
        return Dying(lambda unit: unit == 2)

    results = handed_out(Crew("mortals", engage, 2), lambda unit: unit, range(5))
    assert [next(results), next(results)] == [(0, 0), (1, 1)]
    with pytest.raises(WorkersLost, match=rf"mortals: workers died {LOST} times in a row.*can be resumed"):
        next(results)
    assert len(engaged) == LOST


def test_deaths_far_apart_are_forgiven() -> None:
    left = dict.fromkeys(range(5), LOST - 1)

    def deadly(unit: int) -> bool:
        left[unit] -= 1
        return left[unit] >= 0

    crew = Crew("mortals", lambda: Dying(deadly), 1)
    assert [result for _, result in handed_out(crew, lambda unit: unit, range(5))] == list(range(5))


def test_an_error_of_the_function_is_the_callers_at_once() -> None:
    asked = []

    def fails(unit: int) -> int:
        asked.append(unit)
        if unit == 1:
            raise ZeroDivisionError("of this unit")
        return unit

    results = handed_out(Crew("threads", lambda: ThreadPoolExecutor(1), 1), fails, range(5))
    assert next(results) == (0, 0)
    with pytest.raises(ZeroDivisionError, match="of this unit"):
        next(results)
    assert asked == [0, 1]
