"""Energy without a GPU: replayed readings, a simulated board, and a library with injected failures."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from pytest_emad.benchmark import energy
from pytest_emad.benchmark.energy import (
    CounterUnreadable,
    EnergyResult,
    WindowSpoiled,
    integrate_power,
    measure_energy_pairs,
    measure_energy_window,
    measure_idle_watts,
    open_nvml_counter,
)

ME = os.getpid()
OWN = frozenset({ME})


class Board:
    """A device and a wall clock: work advances the clock and raises the counter, polling costs nothing."""

    device = "Board (GPU-test)"

    def __init__(self, source="energy counter"):
        self.source, self.now, self.millijoules, self.slow, self.listed = source, 100.0, 7_000_000, 0, [ME]
        self.log: list[tuple[str, int, int]] = []
        self.read = 0  # readings of the temperature

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.millijoules += round(1000 * seconds * watts)

    def arm(self, name: str, seconds: float, watts: float, tokens: int):
        def work(pair: int, request: int) -> int:
            self.log.append((name, pair, request))
            self.spend(seconds, watts)
            return tokens

        return work

    def energy_mj(self) -> int:
        return self.millijoules

    def power_mw(self) -> int:
        return 200_000

    def throttle_reason_bits(self) -> int:
        return self.slow

    def process_ids(self) -> frozenset[int]:
        return frozenset(self.listed)

    def temperature_c(self) -> float:
        self.read += 1
        return 39.0 + self.read


def run(board, pairs=6, seed=0, arms=None, **options):
    if arms is None:
        arms = {"full": board.arm("full", 2.0, 300.0, 10), "adaptive": board.arm("adaptive", 1.5, 280.0, 10)}
    return measure_energy_pairs(arms, pairs, np.random.default_rng(seed), board, clock=board.clock, **options)


def one(board, request, **options):
    return measure_energy_window(board, request, own=OWN, clock=board.clock, **options)


def test_joules_per_token_are_those_spent_between_the_readings():
    """Full: 3 requests of 2 s at 300 W fill 5 s. Adaptive: 4 of 1.5 s at 280 W. 10 tokens each."""
    measured = run(Board())
    assert isinstance(measured, EnergyResult)
    assert measured.joules["full"].tolist() == [1800.0] * 6
    assert measured.tokens["full"].tolist() == [30] * 6
    assert measured.seconds["full"].tolist() == [6.0] * 6
    assert measured.joules_per_token_by_pair("full") == pytest.approx([60.0] * 6)
    assert measured.joules_per_token_by_pair("adaptive") == pytest.approx([42.0] * 6)
    assert (measured.source, measured.device) == ("energy counter", "Board (GPU-test)")
    assert measured.spoiled == measured.caveats == ()


def test_the_temperature_is_read_before_the_first_window_and_after_the_last():
    assert run(Board(), pairs=2).temperature_c == (40.0, 41.0)
    board = Board()
    board.temperature_c = lambda: unreadable("not supported by this device")
    assert run(board, pairs=2).temperature_c == Absent("not supported by this device")


def unreadable(reason):
    raise CounterUnreadable(reason)


def test_idle_power_is_that_of_a_window_without_requests():
    board = Board()
    resting = {"clock": board.clock, "sleep": lambda seconds: board.spend(seconds, 55.0)}
    assert measure_idle_watts(board, **resting) == pytest.approx(55.0)
    still = {"clock": board.clock, "sleep": lambda seconds: board.spend(seconds, 0.0)}
    assert measure_idle_watts(board, **still) == Absent("idle: the energy counter stood still")
    board.slow = 0x40
    assert measure_idle_watts(board, **resting) == Absent("idle: clocks throttled: hardware thermal slowdown")


def phases(prefill_j, whole_j, new=5):
    """Three requests of two rows, eight tokens of prompt each, for one token and for ``new``."""

    def result(joules, tokens):
        columns = [np.full(3, value) for value in (joules, 2.0, tokens, 1)]
        joules, seconds, tokens, requests = ({"full": column} for column in columns)
        return EnergyResult(
            joules, seconds, tokens, ("full",) * 3, "energy counter", "Board", (), (), requests=requests,
            prompt_tokens=16,
        )  # fmt: skip

    return replace(result(whole_j, 2 * new), prefill=result(prefill_j, 2), idle_w=10.0)


def test_prefill_and_decode_are_told_apart():
    found = phases(prefill_j=32.0, whole_j=112.0)
    assert found.joules_per_prompt_token("full") == pytest.approx(2.0)
    assert found.joules_per_decoded_token("full") == pytest.approx(80 / 8)
    assert found.joules_per_token("full") == pytest.approx(11.2)
    assert found.joules_per_token_read_or_generated("full") == pytest.approx(112 / 26)
    assert found.joules_per_token_above_idle("full") == pytest.approx((112 - 20) / 10)


@pytest.mark.parametrize(("whole_j", "new"), [(30.0, 5), (40.0, 1)])
def test_a_request_that_costs_no_more_than_its_prefill_has_no_decode(whole_j, new):
    found = phases(prefill_j=32.0, whole_j=whole_j, new=new).joules_per_decoded_token("full")
    assert isinstance(found, Absent)
    assert "J more than its prefill" in found.reason


def test_what_was_not_measured_beside_the_windows_is_no_number():
    found = run(Board(), pairs=2)
    of = found.joules_per_prompt_token, found.joules_per_decoded_token, found.joules_per_token_above_idle
    assert [each("full") for each in of] == [Absent("not measured")] * 3


def test_the_ratio_of_joules_per_token_goes_into_the_interval_of_pairs():
    from pytest_emad.statistics.speedup import estimate_speedup_per_request
    from pytest_emad.statistics.units import ByPair

    board, noise = Board(), np.random.default_rng(3)

    def arm(watts):
        def work(pair, request):
            board.spend(6.0, watts * float(np.exp(0.02 * noise.standard_normal())))
            return 100

        return work

    measured = run(board, pairs=30, arms={"full": arm(300.0), "adaptive": arm(240.0)})
    joules = (ByPair(measured.joules_per_token_by_pair(arm)) for arm in ("adaptive", "full"))
    ratio = estimate_speedup_per_request(*joules, threshold=1.0)
    assert ratio.low < 0.8 < ratio.high
    assert ratio.p_below < 1e-6


def test_every_pair_has_its_own_input_the_same_for_both_arms_and_windows_run_side_by_side():
    board = Board()
    run(board, pairs=4, warm_up=2)
    assert board.log[:4] == [("full", -1, 0), ("adaptive", -1, 0), ("full", -1, 1), ("adaptive", -1, 1)]
    for pair in range(4):
        mine = [entry for entry in board.log if entry[1] == pair]
        assert [r for name, _, r in mine if name == "full"] == [0, 1, 2]
        assert [r for name, _, r in mine if name == "adaptive"] == [0, 1, 2, 3]
    assert [pair for _, pair, _ in board.log[4:]] == sorted(pair for _, pair, _ in board.log[4:])


def test_each_arm_leads_half_of_the_pairs_in_an_order_that_the_seed_decides():
    orders = {run(Board(), pairs=20, seed=seed).first for seed in range(5)}
    assert len(orders) == 5
    assert all(order.count("full") == 10 for order in orders)
    assert run(Board(), seed=3).first == run(Board(), seed=3).first


def test_first_names_the_arm_that_really_ran_first():
    board = Board()
    measured = run(board, pairs=8)
    leaders = [next(name for name, p, _ in board.log if p == pair) for pair in range(8)]
    assert list(measured.first) == leaders


def test_the_device_is_waited_for_before_both_readings():
    """Asynchronous work finishes in ``synchronize`` and belongs to the window that started it."""
    board, queue = Board(), [(50.0, 300.0)]  # earlier work, of no window

    def synchronize():
        while queue:
            board.spend(*queue.pop())

    def request(_):
        board.now += 0.5  # time of the asynchronous start
        queue.append((2.0, 100.0))
        return 1

    measured = one(board, request, synchronize=synchronize)
    assert (measured.seconds, measured.energy_j, measured.tokens) == (5.0, 400.0, 2)


def test_a_window_lasts_five_seconds_unless_told_otherwise():
    board = Board()
    assert one(board, lambda r: board.spend(0.5, 10.0) or 1).tokens == 10
    assert one(board, lambda r: board.spend(0.5, 10.0) or 1, min_seconds=1.0).tokens == 2
    assert one(board, lambda r: board.spend(60.0, 10.0) or 1).tokens == 1


@pytest.mark.parametrize(("bit", "name"), list(energy.SLOWDOWNS.items()))
def test_a_throttled_window_is_spoiled_and_says_by_what(bit, name):
    """Throttled in one request of ten only, and recovered at its end."""
    board = Board()

    def request(number):
        board.slow = bit | 0x1 if number == 4 else 0
        board.spend(0.5, 10.0)
        return 1

    with pytest.raises(WindowSpoiled, match=f"throttled: {name}$"):
        one(board, request)


@pytest.mark.parametrize("bits", [0x1, 0x2, 0x10, 0x100, 0x113])
def test_idling_and_chosen_clocks_spoil_nothing(bits):
    board = Board()
    board.slow = bits
    assert one(board, lambda r: board.spend(6.0, 10.0) or 1).energy_j == 60.0


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_process_spoils_the_window(when):
    board = Board()
    board.listed = [ME, 4242] if when == "before" else [ME]

    def request(_):
        board.listed = [ME] if when == "before" else [ME, 4242]
        board.spend(6.0, 10.0)
        return 1

    with pytest.raises(WindowSpoiled, match=r"other processes on the device: 4242$"):
        one(board, request)


@pytest.mark.parametrize(
    ("readings", "said"),
    [((9_000_000, 8_999_999), "went back by 1 mJ"), ((9_000_000, 9_000_000), "stood still"), ((2**32 - 5, 3), "back")],
)
def test_a_counter_that_does_not_rise_is_no_measurement(readings, said):
    """Also if it wraps: the difference is never used as energy."""
    board, values = Board(), iter(readings)
    board.energy_mj = lambda: next(values)
    with pytest.raises(WindowSpoiled, match=said):
        one(board, lambda r: board.spend(6.0, 10.0) or 1)


def test_a_spoiled_pair_is_measured_again_on_fresh_input_and_kept_in_the_books():
    board, hot = Board(), []

    def full(pair, request):
        hot.extend([0x40] if pair in (1, 3) else [])
        return board.arm("full", 6.0, 300.0, 10)(pair, request)

    board.throttle_reason_bits = lambda: hot.pop() if hot else 0
    measured = run(board, pairs=4, arms={"full": full, "adaptive": board.arm("adaptive", 6.0, 200.0, 10)})
    assert measured.joules["full"].tolist() == [1800.0] * 4
    assert measured.joules["adaptive"].tolist() == [1200.0] * 4  # no pair with 1 or 3 missing among them
    assert measured.spoiled == ("clocks throttled: hardware thermal slowdown",) * 2
    assert max(pair for _, pair, _ in board.log) == 5
    assert sorted(measured.first) == ["adaptive", "adaptive", "full", "full"]


def test_when_the_spare_pairs_are_used_up_the_good_ones_remain():
    board = Board()

    def full(pair, request):
        board.listed = [ME, 77] if pair >= 2 else [ME]
        return board.arm("full", 6.0, 300.0, 10)(pair, request)

    measured = run(board, 10, arms={"full": full, "adaptive": board.arm("adaptive", 6.0, 200.0, 10)}, spare=3)
    assert len(measured.joules["full"]) == len(measured.first) == 2
    assert len(measured.spoiled) == 4


def test_no_clean_pair_is_unmeasured_not_zero():
    board = Board()
    board.slow = 0x4
    found = run(board, spare=2)
    assert found == Absent("none of 3 pairs of windows was clean; the last: clocks throttled: software power cap")


def test_a_device_lost_on_the_way_is_unmeasured():
    board = Board()

    def gone(*_):
        raise CounterUnreadable("the device was lost", 15)

    def adaptive(pair, request):
        if pair == 2:
            board.energy_mj = gone
        return board.arm("adaptive", 6.0, 200.0, 10)(pair, request)

    arms = {"full": board.arm("full", 6.0, 300.0, 10), "adaptive": adaptive}
    assert run(board, arms=arms) == Absent("the device was lost")


def test_a_reason_passes_through_without_running_anything():
    def never(pair, request):
        raise AssertionError("ran without a device")

    why = Absent("no NVML device: the NVIDIA driver is not loaded")
    assert measure_energy_pairs({"full": never, "adaptive": never}, 3, np.random.default_rng(0), why) is why


def test_a_single_unknown_process_is_this_one_seen_from_outside_a_container_and_said():
    board = Board()
    board.listed = [31337]
    measured = run(board, pairs=2)
    assert len(measured.joules["full"]) == 2
    assert "process 31337, alone on the device, is taken to be this one" in measured.caveats[0]


def test_the_unknown_process_taken_for_ours_stays_the_only_one():
    board = Board()
    board.listed = [31337]

    def full(pair, request):
        board.listed = [4242]
        return board.arm("full", 6.0, 300.0, 10)(pair, request)

    found = run(board, pairs=2, arms={"full": full, "adaptive": full}, warm_up=0, spare=0)
    assert found.reason.endswith("other processes on the device: 4242")


def test_of_several_unknown_processes_none_is_taken_for_ours():
    board = Board()
    board.listed = [31337, 4242]
    assert "other processes on the device: 4242, 31337" in run(board, pairs=1, spare=0).reason


def test_processes_named_as_the_decoders_own_are_no_strangers():
    board = Board()
    board.listed = [31337, 4242]
    measured = run(board, pairs=1, own=frozenset({31337, 4242}))
    assert measured.spoiled == measured.caveats == ()


def test_an_empty_process_list_is_a_caveat():
    board = Board()
    board.listed = []
    assert "sharing cannot be ruled out" in run(board, pairs=1).caveats[0]


def test_instantaneous_power_is_integrated_over_the_window_only():
    """A ramp 0–100 W over 10 s, read every 0.5 s: exactly 500 J by trapezoids; readings outside do not count."""
    ramp = [(t, round(10_000 * t)) for t in np.arange(0, 10.5, 0.5)]
    outside = [(-1.0, 10**9), (11.0, 10**9)]
    assert integrate_power(outside[:1] + ramp + outside[1:], 0.0, 10.0, 0.0) == pytest.approx(500.0)


def test_uneven_readings_are_weighted_by_time():
    readings = [(0.0, 100_000), (1.0, 100_000), (1.0 + 1e-9, 300_000), (1.5, 300_000), (1.75, 300_000), (2.0, 300_000)]
    assert integrate_power(readings, 0.0, 2.0, 0.0) == pytest.approx(400.0, rel=1e-6)


def test_readings_that_average_the_last_second_leave_out_the_time_before_the_window():
    """50 W before, 200 W within: readings of the first second mix both, later ones are of the window."""
    times = np.arange(0.0, 5.05, 0.05)
    averaged = [(t, round(1000 * (50 + 150 * min(1.0, t)))) for t in times]
    assert integrate_power(averaged, 0.0, 5.0, 1.0) == pytest.approx(1000.0)
    assert integrate_power(averaged, 0.0, 5.0, 0.0) < 950.0  # result if they were treated as instantaneous


@pytest.mark.parametrize(
    ("readings", "said"),
    [([], "0 power readings"), ([(0.5, 1)], "1 power readings"), ([(0.2, 0), (0.8, 0)], "all zero")],
)
def test_power_that_says_nothing_is_no_zero(readings, said):
    with pytest.raises(WindowSpoiled, match=said):
        integrate_power(readings, 0.0, 1.0, 0.0)


def test_power_is_read_while_the_request_runs():
    """Real clock and thread. Constant 200 W: joules are 200 × seconds for any times of the readings."""
    board, readings = Board("power, instantaneous"), []
    board.power_mw = lambda: readings.append(time.perf_counter()) or 200_000

    def request(_):
        deadline = time.perf_counter() + 10
        while len(readings) < 4 and time.perf_counter() < deadline:
            time.sleep(0.01)
        return len(readings)

    measured = measure_energy_window(board, request, own=OWN, min_seconds=0.01)
    assert measured.tokens >= 4
    assert measured.energy_j == pytest.approx(200 * measured.seconds)


def test_a_power_sensor_that_fails_in_its_thread_is_heard():
    board = Board("power, instantaneous")

    def gone():
        raise CounterUnreadable("the device was lost", 15)

    board.power_mw = gone
    with pytest.raises(CounterUnreadable, match="lost"):
        measure_energy_window(board, lambda r: time.sleep(0.05) or 1, own=OWN, min_seconds=0.01)


def test_averaged_power_of_a_window_shorter_than_a_second_is_spoiled():
    board = Board("power, averaged over 1 s")
    with pytest.raises(WindowSpoiled, match="0 power readings"):
        measure_energy_window(board, lambda r: time.sleep(0.1) or 1, own=OWN, min_seconds=0.1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pairs": 0}, "pairs"),
        ({"warm_up": -1}, "warm_up"),
        ({"spare": -1}, "spare"),
        ({"min_seconds": 0.0}, "min_seconds"),
        ({"min_seconds": float("nan")}, "min_seconds"),
        ({"arms": {}}, "arms"),
    ],
)
def test_misuse_is_refused_by_name(change, named):
    with pytest.raises(BadArgument, match=f"^{named}="):
        run(Board(), **change)


def test_an_arm_without_tokens_and_an_unknown_arm_are_refused():
    board = Board()
    with pytest.raises(BadArgument, match=r"^tokens of full=0"):
        run(board, arms={"full": board.arm("full", 6.0, 1.0, 0), "adaptive": board.arm("adaptive", 6.0, 1.0, 1)})
    with pytest.raises(BadArgument, match=r"^arm='fuull'"):
        run(board, pairs=1).joules_per_token_by_pair("fuull")


class NVMLError(Exception):
    def __init__(self, value):
        self.value = value
        super().__init__(f"text of {value}")


class Library:
    """The used functions of ``pynvml``. Boards in NVML's order; ``fails``: function → its error number."""

    NVMLError = NVMLError

    def __init__(self, fails=None, capability=(9, 0)):
        self.boards = {"GPU-aaaa": 1_000, "GPU-bbbb": 2_000, "GPU-cccc": 3_000}
        self.fails, self.capability, self.users = fails or {}, capability, 0

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        code = object.__getattribute__(self, "fails").get(name) if name.startswith("nvml") else None
        if code is None:
            return value

        def fail(*_):
            raise NVMLError(code)

        return fail

    def nvmlInit(self):  # noqa: N802  # NVML's names
        self.users += 1

    def nvmlShutdown(self):  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.boards:
            raise NVMLError(6)
        return uuid

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "NVIDIA Example"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        return self.boards[handle]

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return self.boards[handle] + 1

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        return 47 if sensor == 0 else 99

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return self.capability

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        return 0x5

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        return 0x9

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(pid=11), SimpleNamespace(pid=12)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(pid=12), SimpleNamespace(pid=13)]


@pytest.fixture
def library(monkeypatch):
    def install(**how):
        made = Library(**how)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return install


def test_the_board_is_found_by_uuid_whatever_cuda_numbers_it(library, monkeypatch):
    """CUDA_VISIBLE_DEVICES=2,0: CUDA's device 0 is NVML's third board. PyTorch writes UUIDs without the prefix."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    library()
    for uuid in ("cccc", "GPU-cccc"):
        with open_nvml_counter(uuid) as counter:
            assert (counter.energy_mj(), counter.power_mw()) == (3_000, 3_001)
            assert counter.device == "NVIDIA Example (GPU-cccc)"
            assert counter.source == "energy counter"
            assert counter.throttle_reason_bits() == 0x5
            assert counter.process_ids() == {11, 12, 13}
            assert counter.temperature_c() == 47.0


@pytest.mark.parametrize("absent", [3, 13])
@pytest.mark.parametrize(
    ("capability", "source"),
    [
        ((6, 1), "power, instantaneous"),
        ((8, 0), "power, instantaneous"),
        ((8, 6), "power, averaged over 1 s"),
        ((9, 0), "power, averaged over 1 s"),
    ],
)
def test_without_an_energy_counter_power_is_read_and_named_by_its_kind(library, absent, capability, source):
    library(fails={"nvmlDeviceGetTotalEnergyConsumption": absent}, capability=capability)
    with open_nvml_counter("bbbb") as counter:
        assert counter.source == source
        assert counter.power_mw() == 2_001


def test_clock_reasons_are_asked_under_their_older_name_where_the_driver_has_only_that(library):
    library(fails={"nvmlDeviceGetCurrentClocksEventReasons": 13})
    with open_nvml_counter("aaaa") as counter:
        assert counter.throttle_reason_bits() == 0x9


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ({"nvmlInit": 12}, "no NVML device: the driver's library is not on this machine"),
        ({"nvmlInit": 9}, "no NVML device: the NVIDIA driver is not loaded"),
        ({"nvmlInit": 18}, "nvmlInit: driver and its library differ in version; reload the driver"),
        ({"nvmlInit": 999}, "nvmlInit: NVML error 999, text of 999"),
        ({"nvmlDeviceGetTotalEnergyConsumption": 4}, "no permission to read the device"),
        ({"nvmlDeviceGetTotalEnergyConsumption": 3, "nvmlDeviceGetPowerUsage": 3}, "not supported by this device"),
        ({"nvmlDeviceGetTotalEnergyConsumption": 15}, "the device was lost"),
    ],
)
def test_every_failure_of_the_library_becomes_a_reason(library, fails, reason):
    made = library(fails=fails)
    with open_nvml_counter("aaaa") as found:
        assert isinstance(found, Absent)
        assert reason in found.reason
    assert made.users == 0


def test_an_unknown_uuid_is_a_reason_that_names_it(library):
    library()
    with open_nvml_counter("dddd") as found:
        assert found == Absent("GPU-dddd: nvmlDeviceGetHandleByUUID: no device has this UUID")


def test_without_the_package_the_reason_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with open_nvml_counter("aaaa") as found:
        assert found.reason.startswith("no NVML device: the package nvidia-ml-py is not installed")


def test_a_decoder_off_the_gpu_is_not_charged_with_what_the_gpu_draws(library):
    library()
    with open_nvml_counter(None) as found:
        assert found == Absent("no NVML device: the decoder runs on no GPU")


def test_a_slice_of_a_board_has_no_energy_of_its_own(library):
    library()
    with open_nvml_counter("MIG-aaaa") as found:
        assert "slice of a board" in found.reason


def test_the_library_is_shut_down_also_after_an_error(library):
    made = library()

    def measure():
        with open_nvml_counter("aaaa"):
            assert made.users == 1
            raise RuntimeError("the measurement broke")

    with pytest.raises(RuntimeError, match="broke"):
        measure()
    assert made.users == 0


def test_an_error_of_the_open_device_is_unreadable_with_its_number(library):
    made = library()
    with open_nvml_counter("aaaa") as counter:
        made.fails["nvmlDeviceGetTotalEnergyConsumption"] = 15
        with pytest.raises(CounterUnreadable, match="lost") as caught:
            counter.energy_mj()
    assert caught.value.code == 15


def test_the_real_library_has_every_function_that_is_called():
    """nvidia-ml-py itself, without a driver: the names and error numbers that the wrapper uses."""
    pynvml = pytest.importorskip("pynvml")
    for name in dir(Library):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))
    assert {code: pynvml.NVMLError(code).value for code in energy.FAILURES} == {code: code for code in energy.FAILURES}
    assert pynvml.NVML_ERROR_NOT_SUPPORTED in energy.ABSENT
    assert pynvml.NVML_ERROR_FUNCTION_NOT_FOUND in energy.ABSENT
    assert pynvml.nvmlClocksEventReasonHwThermalSlowdown in energy.SLOWDOWNS
