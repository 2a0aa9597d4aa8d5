"""Resolution and self-check of energy counters, those of a processor included, with simulated clocks and counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from emad_ref.absent import Absent
from pytest_emad.benchmark.energy import (
    CHANGES,
    CounterUnreadable,
    counter_to_power_ratio,
    measure_refresh_seconds,
    open_rapl,
)
from tests.unit.test_energy import Board


class Stepping(Board):
    """A counter that moves every ``rest`` seconds; each look at the clock takes a millisecond."""

    def __init__(self, rest: float, watts: float = 300.0):
        super().__init__()
        self._rest, self._watts = rest, watts

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def energy_mj(self) -> int:
        return int(int((self.now - 100.0) / self._rest) * self._rest * self._watts * 1000)


@pytest.mark.parametrize("rest", [0.02, 0.1])
def test_the_longest_rest_of_a_counter_is_found(rest: float) -> None:
    board = Stepping(rest)
    assert measure_refresh_seconds(board, clock=board.clock) == pytest.approx(rest, abs=0.0021)


def test_looking_ends_when_enough_was_seen() -> None:
    board = Stepping(0.02)
    measure_refresh_seconds(board, clock=board.clock, seconds=1000.0)
    assert board.now - 100 < 0.02 * (CHANGES + 3)


def test_a_counter_that_rests_too_long_has_no_known_resolution() -> None:
    board = Stepping(30.0)
    found = measure_refresh_seconds(board, clock=board.clock)
    assert found == Absent("the energy counter moved 0 times in 2 s: its resolution is not known")


def test_a_counter_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Stepping(0.1)

    def lost() -> int:
        raise CounterUnreadable("the device was lost")

    monkeypatch.setattr(board, "energy_mj", lost)
    assert measure_refresh_seconds(board, clock=board.clock) == Absent("the device was lost")


@pytest.mark.parametrize(("watts", "ratio"), [(200.0, 1.0), (300.0, 1.5)])
def test_the_counter_is_held_against_the_power_beside_it(watts: float, ratio: float) -> None:
    """The board always reports 200 W; a thread takes readings, some of them after more than a second."""
    board = Board()

    def request(number: int) -> int:
        import time

        time.sleep(0.06)  # of the thread's time, which is real
        board.spend(0.5, watts)
        return 1

    found = counter_to_power_ratio(board, request, seconds=5.0, clock=board.clock)
    assert found == pytest.approx(ratio, rel=1e-6)


def test_without_a_second_instrument_there_is_no_self_check() -> None:
    found = counter_to_power_ratio(Board("CPU package energy"), lambda request: 1)
    assert found == Absent("CPU package energy has no second instrument beside it")


# ---------------------------------------------------------------- CPU packages


def package(root: Path, number: int, name: str, energy_uj: int, whole: int = 1_000_000) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", whole)):
        (folder / file).write_text(f"{value}\n")
    return folder


def test_packages_are_added_up_and_wrap(tmp_path: Path) -> None:
    first, second = package(tmp_path, 0, "package-0", 900_000), package(tmp_path, 1, "package-1", 0)
    package(tmp_path, 2, "psys", 5)  # the whole platform would count packages twice
    counter = open_rapl(tmp_path)
    assert not isinstance(counter, Absent)
    assert (counter.device, counter.energy_mj()) == ("2 CPU packages", 0)
    (first / "energy_uj").write_text("100000")  # past its range: 200,000 more
    (second / "energy_uj").write_text("50000")
    assert counter.energy_mj() == 250
    assert counter.energy_mj() == 250


def test_a_machine_without_packages_says_so(tmp_path: Path) -> None:
    found = open_rapl(tmp_path)
    assert isinstance(found, Absent)
    assert "no CPU package shows its energy here" in found.reason


def test_packages_for_root_alone_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, 0, "package-0", 1)
    real = Path.read_text

    def refused(self: Path, *arguments: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "read_text", refused)
    found = open_rapl(tmp_path)
    assert isinstance(found, Absent)
    assert "for root alone here: sudo chmod" in found.reason
