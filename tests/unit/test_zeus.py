"""Zeus as a second reader of the same window: what it says, and that nothing depends on it. Zeus itself is replaced."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from emad_ref.benchmark.energy import Unmeasured
from emad_ref.benchmark.zeus import counted_over_zeus
from tests.unit.test_energy import Board


class Monitor:
    """Reads the board in joules, ``scale`` times as many; ``made``: what each was asked to watch."""

    made: ClassVar[list[list[int]]] = []
    board, scale, fails = Board(), 1.0, ""

    def __init__(self, gpu_indices):
        self.made.append(gpu_indices)
        self._gpus, self._begun = gpu_indices, {}

    def begin_window(self, name):
        if self.fails:
            raise LookupError(self.fails)
        self._begun[name] = self.board.millijoules

    def end_window(self, name):
        joules = self.scale * (self.board.millijoules - self._begun.pop(name)) / 1000
        return SimpleNamespace(
            gpu_energy=dict.fromkeys(self._gpus, joules),
            cpu_energy=None if self._gpus else {0: joules / 2, 1: joules / 2},
        )


@pytest.fixture
def zeus(monkeypatch: pytest.MonkeyPatch) -> type[Monitor]:
    class Fresh(Monitor):
        made, board = [], Board()

    package, monitor = ModuleType("zeus"), ModuleType("zeus.monitor")
    package.__spec__ = ModuleSpec("zeus", None)
    monitor.ZeusMonitor = Fresh
    monkeypatch.setitem(sys.modules, "zeus", package)
    monkeypatch.setitem(sys.modules, "zeus.monitor", monitor)
    return Fresh


def both(zeus, gpu, board=None):
    board = board or zeus.board
    return counted_over_zeus(board, lambda request: board.spend(2.0, 300.0) or 4, gpu, clock=board.clock)


@pytest.mark.parametrize(("gpu", "watched"), [(1, [1]), (None, [])])
def test_both_read_the_same_window(zeus, gpu, watched):
    if gpu is None:
        zeus.board.source = "CPU package energy"
    assert both(zeus, gpu) == pytest.approx(1.0)
    assert zeus.made == [watched]


def test_another_board_shows(zeus):
    zeus.scale = 2.5
    assert both(zeus, 0) == pytest.approx(0.4)


def test_where_it_fails_or_reads_nothing_is_said(zeus):
    zeus.fails = "no such GPU"
    assert both(zeus, 7) == Unmeasured("LookupError: no such GPU")
    zeus.fails, zeus.scale = "", 0.0
    assert both(zeus, 0) == Unmeasured("it read no energy")
    assert both(zeus, 0, Board("power, instantaneous")) == Unmeasured("power, instantaneous is no counter")


def test_a_decoder_that_fails_is_not_zeus_failing(zeus):
    def breaks(request):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        counted_over_zeus(zeus.board, breaks, 0, clock=zeus.board.clock)


def test_without_it_nothing_is_asked(monkeypatch):
    monkeypatch.setattr("emad_ref.benchmark.zeus.find_spec", lambda name: None)
    assert counted_over_zeus(Board(), lambda request: pytest.fail("asked"), 0) is None
