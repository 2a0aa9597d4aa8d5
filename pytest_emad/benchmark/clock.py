"""Paired timing: all arms run once per pair, one after the other, in random order, on fresh input.

Pairing cancels drift (clock frequency, other processes, temperature); random order cancels effects of the previous arm
(warm caches, allocator state); fresh input keeps prompt caches from rewarding the second arm. Process time is recorded
with the wall clock: if both agree, no other process took the core. ``statistics.speedup`` makes ratios and intervals.

Everything that times decoders does it here: ``time_pairs``, or ``time_call`` inside ``timing_setup``, which refuses
tracers and keeps the garbage collector out. Tracers, profilers and debuggers slow Python by a factor that differs
between two arms: times and joules under one measure the instrument. A collection takes as long as all objects of the
process demand, and would be charged to the arm during which it happens to start. Threads belong to the model
(``emad_ref.models.threads``).
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from scipy import stats

from emad_ref.errors import BadArgument
from emad_ref.record import Floats

T = TypeVar("T")
WARM_UP = 2  # uncounted pairs: the first request may compile or allocate, the second reuses
MONITORING_TOOLS = 6  # ids that sys.monitoring has (PEP 669)
ENVIRONMENT = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "PYTHONMALLOC": ("debug", "malloc_debug", "pymalloc_debug"),
}


def iterate_active_tracers() -> Iterator[str]:
    """Names of the active instruments, for messages."""
    hooks = {
        "trace function": (sys.gettrace(), threading.gettrace()),
        "profile function": (sys.getprofile(), threading.getprofile()),
    }
    for kind, functions in hooks.items():
        yield from dict.fromkeys(
            f"{kind} {_qualified_name(function)}" for function in functions if function is not None
        )
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12 and newer
    if monitoring is not None:
        tools = (monitoring.get_tool(number) for number in range(MONITORING_TOOLS))
        yield from (f"sys.monitoring tool {tool}" for tool in tools if tool is not None)
    if tracemalloc.is_tracing():
        yield "tracemalloc"
    if sys.flags.dev_mode:
        yield "Python's development mode (-X dev)"
    if gc.get_debug():
        yield "gc.set_debug"
    for name, values in ENVIRONMENT.items():
        if os.environ.get(name) in values:
            yield f"{name}={os.environ[name]}"
    torch: Any = sys.modules.get("torch")  # not imported for this check
    if torch is not None:
        if torch.is_anomaly_enabled():
            yield "torch.autograd.set_detect_anomaly"
        if torch.autograd._profiler_enabled():
            yield "torch.profiler"


def _qualified_name(function: Any) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def require_untraced() -> None:
    """Raise BadArgument if a tracer, profiler or debugger is active."""
    if found := list(iterate_active_tracers()):
        raise BadArgument(
            "timing", ", ".join(found), "no tracer, profiler or debugger beside it", "measure in a run without it"
        )


@contextmanager
def timing_setup() -> Iterator[None]:
    """Time inside the block: no tracer, and no garbage collection but where ``collect_garbage`` is called.

    Raises:
        BadArgument: a tracer, profiler or debugger is active.
    """
    require_untraced()
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_garbage() -> None:
    """Free cyclic garbage of the last requests, between two of them; older objects are not searched."""
    gc.collect(1)


def _no_wait() -> None:
    return None


class CallTime(NamedTuple, Generic[T]):
    """Wall-clock and process ``seconds`` of a call, and its ``result``."""

    seconds: float
    process_seconds: float
    result: T


def time_call(
    call: Callable[[], T],
    synchronize: Callable[[], None] = _no_wait,
    *,
    clock: Callable[[], float] = time.perf_counter,
    process_clock: Callable[[], float] = time.process_time,
) -> CallTime[T]:
    """Time one call between two waits for the device."""
    synchronize()
    process_start, start = process_clock(), clock()
    result = call()
    synchronize()
    return CallTime(clock() - start, process_clock() - process_start, result)


class OwnSeconds(float):
    """Seconds that an arm measured itself, of a part of its call or by a device timer."""


Arm = Callable[[int], object]


@dataclass(frozen=True)
class PairedTimings:
    """Arm → [pairs] of wall and of process seconds without warm-up; ``first`` names the first arm of each pair."""

    seconds: dict[str, Floats]
    process_seconds: dict[str, Floats]
    first: tuple[str, ...]


def time_pairs(
    arms: Mapping[str, Arm],
    pairs: int,
    rng: np.random.Generator,
    *,
    warm_up: int = WARM_UP,
    synchronize: Callable[[], None] = _no_wait,
    clock: Callable[[], float] = time.perf_counter,
    process_clock: Callable[[], float] = time.process_time,
) -> PairedTimings:
    """Time every arm ``pairs`` times.

    Args:
        arms: name → callable; it gets the index of the pair and chooses that pair's input by it. Indices 0 to
            ``warm_up + pairs − 1`` each occur once, the first ``warm_up`` of them uncounted. Returned ``OwnSeconds``
            count in place of the wall clock's.
        pairs: counted pairs, ≥ 1.
        rng: the order of the arms; each leads equally often, up to one pair, with the warm-up counted.
        synchronize: called before each start and before each stop.
        clock: wall clock in seconds.
        process_clock: CPU time of this process in seconds.

    Raises:
        BadArgument: fewer than two arms, no pair, negative warm-up, or a time that is not positive and finite.
    """
    if len(arms) < 2:
        raise BadArgument("arms", sorted(arms), "at least two arms", "a time alone says nothing across machines")
    if pairs < 1:
        raise BadArgument("pairs", pairs, "at least 1")
    if warm_up < 0:
        raise BadArgument("warm_up", warm_up, "0 or more")
    real = clock is time.perf_counter
    names = list(arms)
    wall = {name: np.empty(pairs) for name in names}
    process = {name: np.empty(pairs) for name in names}
    first = []
    with timing_setup() if real else nullcontext():
        for index, order in enumerate(draw_arm_orders(names, warm_up + pairs, rng)):
            for name in order:
                timed = time_call(partial(arms[name], index), synchronize, clock=clock, process_clock=process_clock)
                seconds = float(timed.result) if isinstance(timed.result, OwnSeconds) else timed.seconds
                if not (math.isfinite(seconds) and seconds > 0):
                    raise BadArgument(
                        f"seconds of {name}", seconds, "a positive time", "give the arm more work per call"
                    )
                if index >= warm_up:
                    wall[name][index - warm_up], process[name][index - warm_up] = seconds, timed.process_seconds
            if index >= warm_up:
                first.append(order[0])
            if real:
                collect_garbage()
    return PairedTimings(wall, process, tuple(first))


def draw_arm_orders(names: Sequence[str], pairs: int, rng: np.random.Generator) -> list[list[str]]:
    """Order of the arms in each pair: each leads equally often, up to one pair, and the others follow in random order.

    A fixed order behind the leader would let one arm follow the same other arm in most pairs.
    """
    orders = []
    for leader in rng.permutation(np.arange(pairs) % len(names)):
        others = rng.permutation(np.delete(np.arange(len(names)), leader))
        orders.append([names[number] for number in (leader, *others)])
    return orders


def minimum_detectable_speedup(
    spread: float,
    n: int,
    *,
    threshold: float = 1.0,
    error: float = 0.05,
    power: float = 0.8,
    units: int | None = None,
    inflation: float = 1.0,
) -> float:
    """The smallest true speed-up that ``n`` pairs show to exceed ``threshold`` with probability ``power``.

    threshold · exp((t_{1−error} + t_{power}) · spread · √(inflation / n)), t with units − 1 degrees of freedom; the
    usual approximation.

    Args:
        spread: standard deviation of the log ratio of a pair, from a pilot.
        n: pairs, ≥ 2.
        threshold: the speed-up to exceed; 1.10 for EMAD-F2.
        error: one-sided; divide it by the number of legs for Holm's first step.
        units: number of independent units, ≥ 2, such as blocks of time; None: every pair.
        inflation: factor of the squared standard error, ≥ 1, by which the test allows for an unsteady machine.

    Raises:
        BadArgument: a negative spread, n < 2, threshold ≤ 0, or error or power outside 0–1.
    """
    if not (math.isfinite(spread) and spread >= 0):
        raise BadArgument("spread", spread, "a standard deviation ≥ 0")
    if n < 2:
        raise BadArgument("n", n, "at least 2 pairs", "one pair has no spread")
    if not threshold > 0:
        raise BadArgument("threshold", threshold, "a positive ratio")
    for name, value in (("error", error), ("power", power)):
        if not 0 < value < 1:
            raise BadArgument(name, value, "a probability between 0 and 1")
    freedom = min(n, units or n) - 1
    reach = stats.t.ppf(1 - error, freedom) + stats.t.ppf(power, freedom)
    return threshold * math.exp(float(reach) * spread * math.sqrt(inflation / n))
