"""Zeus beside our own counter: the same window read by both, where Zeus is installed (ml.energy; package zeus).

Nothing here depends on it, and no verdict does: both ask the same NVML or RAPL, so that what they agree on is how it is
asked (which board, which unit, where a window begins and ends), and not what the counter itself is worth.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from emad_ref.benchmark.energy import (
    COUNTERS,
    CounterMeter,
    CounterUnreadable,
    EnergyCounter,
    Unmeasured,
    WindowSpoiled,
)

WINDOW = "emad"  # Zeus has a name for every window


def counted_over_zeus(
    counter: EnergyCounter,
    request: Callable[[int], int],
    gpu: int | None,
    *,
    seconds: float = 5.0,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float | Unmeasured | None:
    """Joules of one window by ``counter``, over those that Zeus reads of it: 1 where both speak of the same device.

    ``gpu``: CUDA's index of the device; None: all CPU packages. None comes back where Zeus is not installed,
    ``Unmeasured`` where there is no counter to compare with, or Zeus fails.
    """
    if find_spec("zeus") is None:
        return None
    if counter.source not in COUNTERS:
        return Unmeasured(f"{counter.source} is no counter")
    monitor = _asked(lambda: importlib.import_module("zeus.monitor").ZeusMonitor([] if gpu is None else [gpu]))
    synchronize()
    begun = monitor if isinstance(monitor, Unmeasured) else _asked(lambda: monitor.begin_window(WINDOW))
    if isinstance(begun, Unmeasured):
        return begun
    try:
        counting = CounterMeter(counter, clock)
        counting.start()
        start, requests = clock(), 0
        while (stop := clock()) - start < seconds:
            request(requests)
            requests += 1
            synchronize()
        counting.stop()
        ours = counting.joules(start, stop)
    except (WindowSpoiled, CounterUnreadable) as why:
        return Unmeasured(str(why))
    measured = _asked(lambda: monitor.end_window(WINDOW))
    if isinstance(measured, Unmeasured):
        return measured
    read = measured.gpu_energy if gpu is not None else measured.cpu_energy
    theirs = float(sum((read or {}).values()))
    return ours / theirs if theirs > 0 else Unmeasured("it read no energy")


def _asked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as failure:  # another library's errors have no common root, and no number of ours needs it
        return Unmeasured(f"{type(failure).__name__}: {failure}")
