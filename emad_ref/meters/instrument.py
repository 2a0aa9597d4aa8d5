"""What an energy counter itself is good for: how often it moves, and whether it agrees with the power beside it.

    refresh    the longest time between two changes of the counter
    resolution refresh × mean power: what each end of a window may be off by, the same way in every window at worst

A counter that moves every tenth of a second adds to a window of five seconds, or leaves out, up to 2 % at each end.
Over windows that start anywhere this averages out, and is part of their spread; over windows that start alike it does
not, and no spread shows it. So it goes into intervals at its worst (``verdict.times.ratio_within``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from emad_ref.meters.energy import (
    AVERAGED_SECONDS,
    COUNTERS,
    SAMPLE_SECONDS,
    Counter,
    CounterMeter,
    PowerMeter,
    Spoiled,
    Unmeasured,
    Unreadable,
    integrated_j,
)

WATCHED_SECONDS = 2.0  # longer than any counter rests
CHANGES = 12  # seen, to say how often a counter moves


def refresh_seconds(
    counter: Counter, *, seconds: float = WATCHED_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> float | Unmeasured:
    """The longest rest of the energy counter among its next ``CHANGES`` changes; of power readings, the time between
    two.

    Unmeasured: it moved less than twice in ``seconds``, or cannot be read.
    """
    if counter.source not in COUNTERS:
        return SAMPLE_SECONDS
    moved: list[float] = []
    try:
        begun, last = clock(), counter.energy_mj()
        while len(moved) < CHANGES and (now := clock()) - begun < seconds:
            read = counter.energy_mj()
            if read != last:
                moved.append(now)
                last = read
    except Unreadable as why:
        return Unmeasured(why.reason)
    if len(moved) < 2:
        return Unmeasured(f"the energy counter moved {len(moved)} times in {seconds:g} s: its resolution is not known")
    return max(after - before for before, after in pairwise(moved))


def counted_over_polled(
    counter: Counter,
    request: Callable[[int], int],
    *,
    seconds: float = 5.0,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float | Unmeasured:
    """Joules that the energy counter counted, over those that the power readings of the same window add up to.

    A self-check of the instrument: 1 where both speak of the same energy. Unmeasured: there is only one of them.
    """
    if counter.source != "energy counter":
        return Unmeasured(f"{counter.source} has no second instrument beside it")
    try:
        counter.power_mw()
        synchronize()
        counting, polling = CounterMeter(counter, clock), PowerMeter(counter, clock)
        counting.start()
        polling.start()
        start, requests = clock(), 0
        try:
            while (stop := clock()) - start < seconds:
                request(requests)
                requests += 1
                synchronize()
        finally:
            counting.stop()
            polling.stop()
        # on boards that have a counter a reading may average the last second
        return counting.joules(start, stop) / integrated_j(polling.readings, start, stop, AVERAGED_SECONDS)
    except (Spoiled, Unreadable) as why:
        return Unmeasured(str(why))
