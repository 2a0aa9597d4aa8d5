"""Joules per token, from NVIDIA's management library (NVML), RAPL or the decoder's own counter, or why there are none.

    J / token = (E(stop) − E(start)) / tokens generated between,    per window, arms in pairs

EMAD-N1 measures this. E is the device's energy counter (millijoules since the driver was loaded; Volta and newer).
Without it, power is sampled and integrated: NVML's reading is instantaneous up to and including the A100 and averages
the last second on newer parts. ``source`` names the instrument.

A window repeats requests for at least ``min_seconds``, 5 s by default. Both readings wait for the device, so that each
window is charged for all of its work. A window is *spoiled*, and its pair measured again, if the clocks were throttled,
another process was on the device, or the counter did not rise. Processes are listed before and after a window, so a
process that runs only within it is not detected.

Devices are identified by UUID, because NVML and CUDA number boards differently. A missing measurement is a
``Absent``, never 0 J. ``pynvml`` (package nvidia-ml-py, extra ``gpu``) is imported when a device is opened.

The counter moves in steps of up to a tenth of a second (``measure_refresh_seconds``). So each end of a window may be
wrong by that time × mean power, in the worst case the same way in every window. The spread of windows does not show
this error, so intervals include its worst case (``statistics.speedup.estimate_ratio_with_meter_error``).
``counter_to_power_ratio`` checks the counter against the power readings.

On CPUs the counters of packages (RAPL) are used, as shown by Linux:

    /sys/class/powercap/intel-rapl:N/{name, energy_uj, max_energy_range_uj}

Intel and AMD processors count microjoules per package: cores and caches, mostly without memory, for all running
programs. A virtual machine has no counter. A counter wraps at ``max_energy_range_uj``, within minutes under load, so
every reading adds the increase since the last. Since 2020 only root may read it on most systems (CVE-2020-8694).

A decoder on another machine may count its own joules (``energy_j``), as TensorRT-LLM's server does.

Further windows, whose requests ask for one token only, separate prefill from decode. A request that reads n tokens and
generates m costs E_m = E_1 + (m − 1)·d joules: E_1 / n for each token that it reads, d for each further one that it
generates. Idle power is measured before the windows, with the decoder loaded. It stands beside the gross joules
(TokenPowerBench, arXiv:2512.03024).
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument, EmadError, is_number
from emad_ref.record import Floats, Ints
from pytest_emad.benchmark.clock import WARM_UP, collect_garbage, draw_arm_orders, timing_setup

EnergySource = Literal[
    "energy counter",
    "power, instantaneous",
    "power, averaged over 1 s",
    "CPU package energy",
    "the decoder's energy counter",
]
COUNTERS: tuple[EnergySource, ...] = ("energy counter", "CPU package energy", "the decoder's energy counter")
EnergyArm = Callable[[int, int], int]  # (pair, request of the window) → tokens it generated

WINDOW_SECONDS = 5.0  # of the shortest window
IDLE_STEP_SECONDS = 0.1  # between two looks at the clock while the device is idle
CORE_TEMPERATURE = 0  # NVML's only sensor
SAMPLE_SECONDS = 0.05  # seconds between power readings; sensors refresh every 15–100 ms
AVERAGED_SECONDS = 1.0  # seconds averaged by a reading after GA100
GA100 = (8, 0)  # the newest compute capability with instantaneous power readings

# Clock event reasons that change the cost of a token. Idling, clocks set by a user and synchronised boards are no
# fault.
SLOWDOWNS: dict[int, str] = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

# Texts for NVML's error numbers as reasons for no measurement. Others keep NVML's text.
FAILURES: dict[int, str] = {
    3: "not supported by this device",
    4: "no permission to read the device",
    6: "no device has this UUID",
    9: "no NVML device: the NVIDIA driver is not loaded",
    12: "no NVML device: the driver's library is not on this machine",
    13: "not offered by this driver",
    15: "the device was lost",
    18: "driver and its library differ in version; reload the driver",
}
NOT_FOUND = 13
ABSENT = frozenset({3, NOT_FOUND})  # another reading method may still work

NOT_MEASURED = Absent("not measured")

_log = logging.getLogger(__name__)


class CounterUnreadable(EmadError):
    """Raised if the device cannot be read in any window. ``code`` is NVML's, None for other errors."""

    def __init__(self, reason: str, code: int | None = None):
        self.reason, self.code = reason, code
        super().__init__(reason)


class WindowSpoiled(EmadError):
    """Raised if a window measured more than the request; another window may be valid."""


class EnergyCounter(Protocol):
    """Current readings of one device. Every method raises ``CounterUnreadable`` if it has no reading."""

    device: str  # name and UUID
    source: EnergySource

    def energy_mj(self) -> int: ...  # since the driver was loaded; only for energy counters
    def power_mw(self) -> int: ...
    def throttle_reason_bits(self) -> int: ...  # bit mask of clock event reasons
    def process_ids(self) -> frozenset[int]: ...  # every process with a context on the device
    def temperature_c(self) -> float: ...


@dataclass(frozen=True)
class EnergyWindow:
    """Joules, seconds, generated tokens and requests of one window that was not spoiled."""

    energy_j: float
    seconds: float
    tokens: int
    requests: int


@dataclass(frozen=True, eq=False)
class EnergyResult:
    """Arm → [pairs] of joules, seconds, generated tokens and requests; ``first``: the arm that ran first in each pair.

    ``spoiled``: reasons for discarded windows; ``caveats``: unavailable checks. ``refresh_s``: longest time between two
    changes of the counter (``benchmark.energy``); 0: not measured. ``temperature_c``: of the device, before the first
    window and after the last. ``prompt_tokens``: read by each request; 0: unknown. ``prefill``: the same requests, for
    one token each. ``idle_w``: power of the device without requests.
    """

    joules: dict[str, Floats]
    seconds: dict[str, Floats]
    tokens: dict[str, Ints]
    first: tuple[str, ...]
    source: EnergySource
    device: str
    spoiled: tuple[str, ...]
    caveats: tuple[str, ...]
    refresh_s: float = 0.0
    requests: dict[str, Ints] = field(default_factory=dict)
    temperature_c: tuple[float, float] | Absent = NOT_MEASURED
    prompt_tokens: int = 0
    prefill: EnergyResult | Absent = NOT_MEASURED
    idle_w: float | Absent = NOT_MEASURED

    def relative_resolution(self, arm: str) -> Floats:
        """[pairs] largest relative error of each window's joules, from one refresh of the counter at either end."""
        share: Floats = self.refresh_s / self.seconds[arm]
        return share

    def joules_per_token_by_pair(self, arm: str) -> Floats:
        """[pairs] J per generated token, including idle power of a device that waits for its next token.

        Raises:
            BadArgument: an unknown arm.
        """
        if arm not in self.joules:
            raise BadArgument("arm", arm, f"one of {sorted(self.joules)}")
        return self.joules[arm] / self.tokens[arm]

    def joules_per_token(self, arm: str) -> float:
        """J per generated token over all windows."""
        return float(self.joules[arm].sum() / self.tokens[arm].sum())

    def joules_per_token_read_or_generated(self, arm: str) -> float:
        """J per token that a request reads or generates, over all windows."""
        assert self.prompt_tokens, "how many tokens a request reads is known"
        return float(self.joules[arm].sum() / (self.tokens[arm] + self.requests[arm] * self.prompt_tokens).sum())

    def joules_per_token_above_idle(self, arm: str) -> float | Absent:
        """J per generated token beyond what the idle device takes in the same time."""
        if isinstance(self.idle_w, Absent):
            return self.idle_w
        return float((self.joules[arm] - self.idle_w * self.seconds[arm]).sum() / self.tokens[arm].sum())

    def joules_per_prompt_token(self, arm: str) -> float | Absent:
        """J of the prefill per token that it reads; the first generated token comes from it."""
        if isinstance(self.prefill, Absent):
            return self.prefill
        return float(self.prefill.joules[arm].sum() / self.prefill.requests[arm].sum() / self.prompt_tokens)

    def joules_per_decoded_token(self, arm: str) -> float | Absent:
        """J per generated token but the first of each row."""
        if isinstance(self.prefill, Absent):
            return self.prefill
        beyond_j, beyond = (
            whole[arm].sum() / self.requests[arm].sum() - first[arm].sum() / self.prefill.requests[arm].sum()
            for whole, first in ((self.joules, self.prefill.joules), (self.tokens, self.prefill.tokens))
        )
        if not (beyond > 0 and beyond_j > 0):
            return Absent(f"a request costs {beyond_j:.2g} J more than its prefill, for {beyond:g} tokens more")
        return float(beyond_j / beyond)


def measure_energy_pairs(
    arms: Mapping[str, EnergyArm],
    pairs: int,
    rng: np.random.Generator,
    counter: EnergyCounter | Absent,
    *,
    min_seconds: float = WINDOW_SECONDS,
    warm_up: int = WARM_UP,
    spare: int = 5,
    own: frozenset[int] | None = None,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> EnergyResult | Absent:
    """Measure every arm once per pair, one after the other, in random order.

    Args:
        arms: name → callable; it gets the numbers of the pair and of the request within its window, chooses the input
            by them and returns its number of generated tokens, ≥ 1. Equal numbers give every arm equal input; a faster
            arm completes more requests.
        pairs: requested pairs, ≥ 1.
        rng: the order of the arms.
        counter: from ``open_nvml_counter``; a ``Absent`` is returned unchanged.
        min_seconds: shortest window.
        warm_up: requests of each arm before measuring, numbered as pair −1.
        spare: allowed number of spoiled pairs. One spoiled window spoils its pair, so that both arms have equal
            conditions. If more are spoiled, the result has the pairs until then.
        own: processes of the decoder, by default this one. Inside a container NVML may list it under its number
            outside; then the only listed process counts as it, with a note in ``caveats``.
        synchronize: waits for the device.
        clock: wall clock in seconds.

    Returns:
        ``EnergyResult`` of 1 to ``pairs`` pairs; ``Absent`` if the device cannot be read or no pair was valid.

    Raises:
        BadArgument: no arm; a count that is too small; an arm that generated no token.
    """
    _require_valid_arguments(arms, pairs, min_seconds, warm_up, spare)
    if isinstance(counter, Absent):
        return counter
    real = clock is time.perf_counter
    names = list(arms)
    good: list[dict[str, EnergyWindow]] = []
    first: list[str] = []
    spoiled: list[str] = []
    orders = draw_arm_orders(names, pairs, rng)
    with timing_setup() if real else nullcontext():
        for request in range(warm_up):
            for name, arm in arms.items():
                _generated_tokens(name, arm, -1, request)
        try:
            ours, caveats = _own_processes(counter, own)
            before_c = _read_temperature(counter)
            measure = partial(
                measure_energy_window, counter, min_seconds=min_seconds, own=ours, synchronize=synchronize, clock=clock
            )
            while len(good) < pairs and len(spoiled) <= spare:
                pair, order = len(good) + len(spoiled), orders[len(good)]
                try:
                    windows = {name: measure(partial(_generated_tokens, name, arms[name], pair)) for name in order}
                except WindowSpoiled as why:
                    spoiled.append(str(why))
                else:
                    good.append(windows)
                    first.append(order[0])
                if real:
                    collect_garbage()
        except CounterUnreadable as why:
            return Absent(why.reason)
    if not good:
        return Absent(f"none of {len(spoiled)} pairs of windows was clean; the last: {spoiled[-1]}")
    return EnergyResult(
        joules={name: np.array([windows[name].energy_j for windows in good]) for name in names},
        seconds={name: np.array([windows[name].seconds for windows in good]) for name in names},
        tokens={name: np.array([windows[name].tokens for windows in good]) for name in names},
        requests={name: np.array([windows[name].requests for windows in good]) for name in names},
        first=tuple(first),
        source=counter.source,
        device=counter.device,
        spoiled=tuple(spoiled),
        caveats=caveats,
        temperature_c=before_c if isinstance(before_c, Absent) else _both(before_c, _read_temperature(counter)),
    )


def _both(before: float, after: float | Absent) -> tuple[float, float] | Absent:
    return after if isinstance(after, Absent) else (before, after)


def _read_temperature(counter: EnergyCounter) -> float | Absent:
    try:
        return counter.temperature_c()
    except CounterUnreadable as why:
        return Absent(why.reason)


def measure_idle_watts(
    counter: EnergyCounter,
    *,
    seconds: float = WINDOW_SECONDS,
    own: frozenset[int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float | Absent:
    """Mean power of the device in W while no request runs, or why it is unknown.

    ``own`` as in ``measure_energy_pairs``.
    """

    def wait(request: int) -> int:
        sleep(IDLE_STEP_SECONDS)
        return 0

    try:
        ours, _ = _own_processes(counter, own)
        window = measure_energy_window(counter, wait, min_seconds=seconds, own=ours, clock=clock)
    except (WindowSpoiled, CounterUnreadable) as why:
        return Absent(f"idle: {why}")
    return window.energy_j / window.seconds


def measure_energy_window(
    counter: EnergyCounter,
    request: Callable[[int], int],
    *,
    min_seconds: float = WINDOW_SECONDS,
    own: frozenset[int],
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> EnergyWindow:
    """Repeat ``request`` (number → tokens) until ``min_seconds`` have passed, between two readings.

    Raises:
        WindowSpoiled: throttled, shared with another process, or a counter that did not rise.
        CounterUnreadable: as the counter does.
    """
    synchronize()
    listed = counter.process_ids()
    meter = _METERS[counter.source](counter, clock)
    slowed, tokens, requests = counter.throttle_reason_bits(), 0, 0
    meter.start()
    start = clock()
    try:
        while (stop := clock()) - start < min_seconds:
            tokens += request(requests)
            requests += 1
            synchronize()  # per request, else queued work would fill the time
            slowed |= counter.throttle_reason_bits()
    finally:
        meter.stop()
    _refuse_spoiled(slowed, (listed | counter.process_ids()) - own)
    return EnergyWindow(meter.joules(start, stop), stop - start, tokens, requests)


def _own_processes(counter: EnergyCounter, own: frozenset[int] | None) -> tuple[frozenset[int], tuple[str, ...]]:
    """(Processes that may be on the device, text about assumptions).

    The decoder is loaded, so one of the listed processes is its own even if its number differs. A single unknown one
    counts as it in all windows; several unknown ones are ambiguous.
    """
    own, listed = frozenset({os.getpid()}) if own is None else own, counter.process_ids()
    if not listed:
        return own, ("NVML lists no process, not even this one: sharing cannot be ruled out",)
    if len(listed) == 1 and not listed & own:
        return own | listed, (f"process {min(listed)}, alone on the device, is taken to be this one seen from outside",)
    return own, ()


def _refuse_spoiled(slowed: int, foreign: frozenset[int]) -> None:
    reasons = [name for bit, name in SLOWDOWNS.items() if slowed & bit]
    if reasons:
        raise WindowSpoiled(f"clocks throttled: {', '.join(reasons)}")
    if foreign:
        raise WindowSpoiled(f"other processes on the device: {', '.join(map(str, sorted(foreign)))}")


def _generated_tokens(name: str, arm: EnergyArm, pair: int, request: int) -> int:
    tokens = arm(pair, request)
    if tokens < 1:
        raise BadArgument(f"tokens of {name}", tokens, "at least 1 per request", "return how many were generated")
    return tokens


def _require_valid_arguments(
    arms: Mapping[str, EnergyArm], pairs: int, min_seconds: float, warm_up: int, spare: int
) -> None:
    if not arms:
        raise BadArgument("arms", sorted(arms), "at least one arm, and two to compare")
    for name, value, least in (("pairs", pairs, 1), ("warm_up", warm_up, 0), ("spare", spare, 0)):
        if value < least:
            raise BadArgument(name, value, f"at least {least}")
    if not min_seconds > 0:
        raise BadArgument("min_seconds", min_seconds, "a positive time", "5 s is what the counters' steps ask for")


class CounterMeter:
    """Two readings of the energy counter."""

    def __init__(self, counter: EnergyCounter, clock: Callable[[], float]):
        self._counter = counter

    def start(self) -> None:
        self._start_mj = self._counter.energy_mj()

    def stop(self) -> None:
        self._stop_mj = self._counter.energy_mj()

    def joules(self, start: float, stop: float) -> float:
        used = self._stop_mj - self._start_mj
        if used < 0:
            raise WindowSpoiled(f"the energy counter went back by {-used} mJ: device reset or driver reloaded")
        if used == 0:
            raise WindowSpoiled("the energy counter stood still")
        return used / 1000


class PowerMeter:
    """``readings`` (seconds, milliwatts) from a thread, since at the ends of requests the device looks idle."""

    def __init__(self, counter: EnergyCounter, clock: Callable[[], float]):
        self._counter, self._clock = counter, clock
        self.readings: list[tuple[float, int]] = []
        self._failure: CounterUnreadable | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power readings", daemon=True)

    def _sample(self) -> None:
        try:
            while True:
                self.readings.append((self._clock(), self._counter.power_mw()))
                if self._over.wait(SAMPLE_SECONDS):
                    return
        except CounterUnreadable as why:
            self._failure = why

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def joules(self, start: float, stop: float) -> float:
        if self._failure is not None:
            raise self._failure
        lag = AVERAGED_SECONDS if self._counter.source == "power, averaged over 1 s" else 0.0
        return integrate_power(self.readings, start, stop, lag)


_METERS: dict[EnergySource, Callable[[EnergyCounter, Callable[[], float]], CounterMeter | PowerMeter]] = {
    "energy counter": CounterMeter,
    "CPU package energy": CounterMeter,
    "the decoder's energy counter": CounterMeter,
    "power, instantaneous": PowerMeter,
    "power, averaged over 1 s": PowerMeter,
}


def integrate_power(readings: Sequence[tuple[float, int]], start: float, stop: float, lag: float) -> float:
    """Joules between ``start`` and ``stop`` (seconds) from ``readings`` (seconds, milliwatts).

    Mean power by the trapezoidal rule over the readings that cover only the window, times its length. A reading that
    averages the last ``lag`` seconds covers time before the window until ``start + lag``.

    Raises:
        WindowSpoiled: fewer than two such readings, or no power in them.
    """
    inside = np.array([reading for reading in readings if start + lag <= reading[0] <= stop], dtype=np.float64)
    if len(inside) < 2:
        raise WindowSpoiled(f"{len(inside)} power readings in {stop - start:.3g} s, at least 2 are needed")
    at, power_w = inside[:, 0], inside[:, 1] / 1000
    mean_w = float(np.trapezoid(power_w, at) / (at[-1] - at[0]))
    if not mean_w > 0:
        raise WindowSpoiled("the power readings are all zero")
    return mean_w * (stop - start)


class _NvmlCounter:
    """``EnergyCounter`` over ``pynvml``; every error of the library or its bindings becomes ``CounterUnreadable``."""

    def __init__(self, pynvml: Any, uuid: str):
        self._pynvml = pynvml
        self._handle = self._call("nvmlDeviceGetHandleByUUID", uuid)
        self._refuse_slices()
        self.device = f"{self._name()} ({uuid})"
        self.source: EnergySource = self._find_source()

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._pynvml, function)(*arguments)
        except Exception as error:  # NVMLError, or any error of its bindings
            raise _as_unreadable(error, function) from error

    def _name(self) -> str:
        """The board's name for display. Energy does not depend on it, so an unreadable name is ignored."""
        try:
            name = self._call("nvmlDeviceGetName", self._handle)
        except CounterUnreadable as why:
            return f"GPU whose name cannot be read ({why.reason})"
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def _refuse_slices(self) -> None:
        """Refuse slices, which a framework may name by the board's UUID, since its counter includes other slices."""
        try:
            current, _ = self._call("nvmlDeviceGetMigMode", self._handle)
        except CounterUnreadable as why:
            if why.code not in ABSENT:
                raise
            return
        if current:
            raise CounterUnreadable(
                "MIG is enabled on this board: NVML counts the energy of whole boards, not of slices"
            )

    def _find_source(self) -> EnergySource:
        try:
            self.energy_mj()
        except CounterUnreadable as why:
            if why.code not in ABSENT:
                raise
            self.power_mw()  # neither: report its reason
            capability = self._call("nvmlDeviceGetCudaComputeCapability", self._handle)
            return "power, averaged over 1 s" if tuple(capability) > GA100 else "power, instantaneous"
        return "energy counter"

    def energy_mj(self) -> int:
        return int(self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle))

    def power_mw(self) -> int:
        return int(self._call("nvmlDeviceGetPowerUsage", self._handle))

    def throttle_reason_bits(self) -> int:
        try:
            return int(self._call("nvmlDeviceGetCurrentClocksEventReasons", self._handle))
        except CounterUnreadable as why:
            if why.code not in ABSENT:
                raise
            # The name before driver 535, with the same bits.
            return int(self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle))

    def temperature_c(self) -> float:
        return float(self._call("nvmlDeviceGetTemperature", self._handle, CORE_TEMPERATURE))

    def process_ids(self) -> frozenset[int]:
        # Graphics clients too, since the same counter includes their energy.
        kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
        return frozenset(int(process.pid) for kind in kinds for process in self._listed(kind))

    def _listed(self, kind: str) -> Sequence[Any]:
        """Listed processes; None if the device lists none, which ``measure_energy_pairs`` notes as a caveat."""
        try:
            return list(self._call(kind, self._handle))
        except CounterUnreadable as why:
            if why.code not in ABSENT:
                raise
            return []


def _as_unreadable(error: Exception, function: str) -> CounterUnreadable:
    """``error`` of the library, which carries NVML's number, or of its Python bindings, which do not."""
    value = getattr(error, "value", None)
    if not isinstance(value, int):
        # bindings older than the function count as a library older than it
        code = NOT_FOUND if isinstance(error, AttributeError) else None
        return CounterUnreadable(f"{function}: {type(error).__name__}: {error}", code)
    known = FAILURES.get(value, f"NVML error {value}, {error}")
    return CounterUnreadable(known if known.startswith("no NVML device") else f"{function}: {known}", value)


def import_nvml() -> Any | Absent:
    """The module ``pynvml`` of the package nvidia-ml-py, or the reason why it cannot be used.

    The older package ``pynvml`` installs a folder of that name, which Python prefers to a module file. So it hides
    nvidia-ml-py if both are installed.
    """
    try:
        module: Any = importlib.import_module("pynvml")
    except ImportError:
        return Absent("no NVML device: the package nvidia-ml-py is not installed; pip install 'pytest-emad[gpu]'")
    except Exception as error:  # runs another package's code
        return Absent(f"the module pynvml cannot be imported: {type(error).__name__}: {error}")
    if hasattr(module, "__path__"):
        return Absent(
            "the module pynvml comes from the deprecated package pynvml, but nvidia-ml-py is expected; "
            "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py"
        )
    return module


@contextmanager
def open_nvml_counter(uuid: str | None) -> Iterator[EnergyCounter | Absent]:
    """The counter of the device with this UUID, open within the context, or the reason why it cannot be read.

    Args:
        uuid: the decoder's device, as its framework names it (``torch.cuda.get_device_properties(i).uuid`` as text; the
            prefix ``GPU-`` may be missing). None: the decoder runs on no GPU, so no GPU's energy is its own. A slice of
            a board (MIG) has no separate counter.
    """
    if uuid is None:
        yield Absent("no NVML device: the decoder runs on no GPU")
        return
    if uuid.startswith("MIG-"):
        yield Absent(f"{uuid} is a slice of a board: NVML counts the energy of whole boards only")
        return
    pynvml = import_nvml()
    if isinstance(pynvml, Absent):
        yield pynvml
        return
    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVMLError, or any error of its bindings
        yield Absent(_as_unreadable(error, "nvmlInit").reason)
        return
    try:
        yield _open_device(pynvml, uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    finally:
        shut_down_nvml(pynvml)


def shut_down_nvml(pynvml: Any) -> None:
    """Close the library. A failure is only logged, since earlier readings remain valid."""
    try:
        pynvml.nvmlShutdown()
    except Exception as error:  # NVMLError, or any error of its bindings
        _log.warning("NVML did not shut down (%s: %s); readings taken before stand", type(error).__name__, error)


def _open_device(pynvml: Any, uuid: str) -> EnergyCounter | Absent:
    try:
        return _NvmlCounter(pynvml, uuid)
    except CounterUnreadable as why:
        return Absent(f"{uuid}: {why.reason}")


WATCHED_SECONDS = 2.0  # longer than any counter's refresh time
CHANGES = 12  # changes observed for the refresh time of a counter


def measure_refresh_seconds(
    counter: EnergyCounter, *, seconds: float = WATCHED_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> float | Absent:
    """The longest time between the next ``CHANGES`` changes of the energy counter; for power, between two readings.

    Absent: it changed less than twice in ``seconds``, or cannot be read.
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
    except CounterUnreadable as why:
        return Absent(why.reason)
    if len(moved) < 2:
        return Absent(f"the energy counter moved {len(moved)} times in {seconds:g} s: its resolution is not known")
    return max(after - before for before, after in pairwise(moved))


def counter_to_power_ratio(
    counter: EnergyCounter,
    request: Callable[[int], int],
    *,
    seconds: float = 5.0,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float | Absent:
    """Joules by the energy counter over joules from the power readings of the same window.

    A self-check of the instrument, 1 if both agree. Absent: only one of them exists.
    """
    if counter.source != "energy counter":
        return Absent(f"{counter.source} has no second instrument beside it")
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
        # on boards with a counter a reading may average the last second
        return counting.joules(start, stop) / integrate_power(polling.readings, start, stop, AVERAGED_SECONDS)
    except (WindowSpoiled, CounterUnreadable) as why:
        return Absent(str(why))


# ---------------------------------------------------------------- CPU packages: RAPL under Linux

POWERCAP = Path("/sys/class/powercap")
RAPL_SOURCE: EnergySource = "CPU package energy"


class RaplCounter:
    """``EnergyCounter`` over package domains; energy since it was opened."""

    source: EnergySource = RAPL_SOURCE

    def __init__(self, domains: list[Path]):
        self._domains = domains
        self._range = [_read_counter(domain / "max_energy_range_uj") for domain in domains]
        self._last = [_read_counter(domain / "energy_uj") for domain in domains]
        self._counted_uj = 0
        self.device = f"{len(domains)} CPU package{'s' * (len(domains) > 1)}"

    def energy_mj(self) -> int:
        now = [_read_counter(domain / "energy_uj") for domain in self._domains]
        for last, read, whole in zip(self._last, now, self._range, strict=True):
            self._counted_uj += read - last if read >= last else read + whole - last
        self._last = now
        return self._counted_uj // 1000

    def power_mw(self) -> int:
        raise CounterUnreadable("RAPL counts energy and shows no power")

    def throttle_reason_bits(self) -> int:
        return 0  # RAPL does not report lowered clocks

    def process_ids(self) -> frozenset[int]:
        return frozenset({os.getpid()})  # a package has no list of processes

    def temperature_c(self) -> float:
        raise CounterUnreadable("RAPL shows no temperature")


def open_rapl(root: Path = POWERCAP) -> RaplCounter | Absent:
    """Counter of all packages of this machine, or the reason why their energy cannot be read."""
    domains = sorted(path.parent for path in root.glob("intel-rapl:*/name") if _is_package(path))
    if not domains:
        return Absent("no CPU package shows its energy here (RAPL): a virtual machine, or another processor")
    try:
        return RaplCounter(domains)
    except CounterUnreadable as why:
        return Absent(why.reason)


def _is_package(name: Path) -> bool:
    try:
        return name.read_text().strip().startswith("package")
    except OSError:
        return False


def _read_counter(file: Path) -> int:
    try:
        return int(file.read_text())
    except PermissionError as error:
        reason = f"CPU package energy is for root alone here: sudo chmod o+r {POWERCAP}/*/energy_uj, or run as root"
        raise CounterUnreadable(reason) from error
    except (OSError, ValueError) as error:
        raise CounterUnreadable(f"CPU package energy cannot be read: {error}") from error


# ---------------------------------------------------------------- a decoder that counts its own joules


class DecoderEnergyCounter:
    """``EnergyCounter`` over ``decoder.energy_j()``, which includes all other work of its device.

    A counter that was reset may exceed an earlier reading soon after, so one fall makes it unreadable for good.
    """

    source: EnergySource = "the decoder's energy counter"
    device = "the decoder's device"

    def __init__(self, decoder: Any):
        self._decoder, self._last_mj, self._fallen = decoder, 0, ""

    def energy_mj(self) -> int:
        try:
            joules = self._decoder.energy_j()
        except EmadError as error:
            raise CounterUnreadable(str(error)) from error
        if not (is_number(joules) and 0 <= joules < math.inf):
            raise CounterUnreadable(f"energy_j() is {joules!r:.40}, but expected a finite number of joules ≥ 0")
        now_mj = round(1000 * joules)
        if now_mj < self._last_mj and not self._fallen:
            fallen = f"from {self._last_mj / 1000:g} J to {joules:g} J"
            self._fallen = f"the energy counter went back {fallen}: it was reset; measure again"
        if self._fallen:
            raise CounterUnreadable(self._fallen)
        self._last_mj = now_mj
        return now_mj

    def power_mw(self) -> int:
        raise CounterUnreadable("the decoder counts energy and shows no power")

    def throttle_reason_bits(self) -> int:
        return 0  # it does not report lowered clocks

    def process_ids(self) -> frozenset[int]:
        return frozenset({os.getpid()})  # it lists no processes

    def temperature_c(self) -> float:
        raise CounterUnreadable("the decoder shows no temperature")


def open_decoder_counter(decoder: Any) -> DecoderEnergyCounter | Absent:
    """The counter of a ``decoder`` with ``energy_j``, or the reason why it cannot be read."""
    counter = DecoderEnergyCounter(decoder)
    try:
        counter.energy_mj()
    except CounterUnreadable as why:
        return Absent(why.reason)
    return counter
