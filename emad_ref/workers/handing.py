"""Units handed out, results taken in order: what a run comes to does not depend on how many workers there are.

    for unit, result in handed_out(crew, function, units): …      # results come in the order of the units

As many units are out as the crew can hold, and no more: a corpus of any length passes in constant memory. Whoever adds
results up does so in their order, so that sums are those of one worker, bit for bit.

A worker that dies takes the unit with it that it had, which is handed out again when its turn has come; what others are
at goes on. A unit that is lost ``LOST`` times in a row is taken to be what kills them. An exception of the function
itself is the caller's: nothing is tried again.

What takes time or energy is not handed to workers that share a machine: ``with_room`` hands it out when all the rest is
done, to as many of them as there are machines.

Knows no model and no address.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass
from typing import TypeVar

from emad_ref.errors import EmadError

EACH = 4  # units out per worker: one at work, others waiting behind one that takes long (docs/scale.md)
LOST = 3  # times in a row that a unit may be lost before it is the unit's fault

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class WorkersLost(EmadError):
    """Workers died one after another, and no unit was finished in between."""


@dataclass(frozen=True, eq=False)
class Crew:
    """Workers, and how to get them.

    ``name``     of what they are, for messages: ``4 processes``, ``dask://10.0.0.1:8786``.
    ``engage``   an executor of them, which outlives any of them.
    ``ahead``    units that are out at once: enough that nobody waits, few enough to hold in memory.
    ``deaths``   exceptions that say that a worker died and not that its function failed.
    ``alone``    those of them that have a machine to themselves, one unit at a time on each; None: all of them have.
    """

    name: str
    engage: Callable[[], Executor]
    ahead: int
    deaths: tuple[type[BaseException], ...] = (BrokenExecutor,)
    alone: Crew | None = None


def handed_out(crew: Crew, function: Callable[[Unit], Result], units: Iterable[Unit]) -> Iterator[tuple[Unit, Result]]:
    """Each unit and what ``function`` made of it, in the order of ``units``. Both cross to workers by pickle.

    What is out when the caller stops early is cancelled, or finished and thrown away.

    Raises:
        WorkersLost: nobody who has a unit stays alive.
    """
    source, out, lost = iter(units), deque[tuple[Unit, Future[Result]]](), 0
    executor = crew.engage()
    try:
        while True:
            for unit in source:
                out.append((unit, executor.submit(function, unit)))
                if len(out) >= crew.ahead:
                    break
            if not out:
                return
            unit, future = out[0]
            try:
                result = future.result()
            except crew.deaths as death:
                lost += 1
                if lost >= LOST:
                    raise WorkersLost(
                        f"{crew.name}: workers died {lost} times in a row on the same unit ({type(death).__name__}: "
                        f"{death}), but expected them to stay; is there memory enough? what was kept can be resumed"
                    ) from death
                out[0] = unit, executor.submit(function, unit)
                continue
            lost = 0
            out.popleft()
            yield unit, result
    finally:
        for _, future in out:  # not every executor cancels what waits when it is shut down
            future.cancel()
        executor.shutdown(wait=False)


def with_room(
    crew: Crew, function: Callable[[Unit], Result], units: Iterable[Unit], measures: Callable[[Unit], bool]
) -> Iterator[tuple[Unit, Result]]:
    """As ``handed_out``, but nothing is at work beside a unit that ``measures`` on the machine where it is.

    Where workers share a machine what measures nothing comes first, and is through before the rest begins.
    """
    if crew.alone is None:
        yield from handed_out(crew, function, units)
        return
    known = [(unit, measures(unit)) for unit in units]
    yield from handed_out(crew, function, [unit for unit, timed in known if not timed])
    yield from handed_out(crew.alone, function, [unit for unit, timed in known if timed])
