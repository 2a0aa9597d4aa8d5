"""Timing is refused while a tracer, profiler or debugger is active."""

from __future__ import annotations

import cProfile
import gc
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from emad_ref.errors import BadArgument
from pytest_emad.benchmark.clock import OwnSeconds, iterate_active_tracers, time_pairs


def measure():
    return time_pairs({"a": lambda index: OwnSeconds(1), "b": lambda index: OwnSeconds(1)}, 1, np.random.default_rng(0))


def trace(frame, event, argument):
    return None


class Tracer:
    """Imitates coverage's C tracer: a callable object without a name."""

    def __call__(self, frame, event, argument):
        return None


def test_without_one_nothing_is_refused():
    assert list(iterate_active_tracers()) == []
    measure()


@pytest.mark.parametrize(
    ("function", "name"),
    [(trace, "trace function tests.unit.test_active_tracers.trace"),
     (Tracer(), "trace function tests.unit.test_active_tracers.Tracer")],
)  # fmt: skip
def test_a_trace_function_is_named(function, name):
    before = sys.gettrace()
    sys.settrace(function)
    try:
        with pytest.raises(BadArgument, match=r"^timing='trace function .*measure in a run without it$") as refused:
            measure()
    finally:
        sys.settrace(before)
    assert name in str(refused.value)


def test_a_profile_function_is_named():
    profile = cProfile.Profile()
    profile.enable()
    try:
        found = list(iterate_active_tracers())
    finally:
        profile.disable()
    assert [name.startswith(("profile function ", "sys.monitoring tool ")) for name in found] == [True]


def test_tracers_of_other_threads_memory_and_torch_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    threading.settrace(trace)
    tracemalloc.start()
    gc.set_debug(gc.DEBUG_STATS)
    try:
        with torch.autograd.set_detect_anomaly(True), torch.profiler.profile():
            found = " ".join(iterate_active_tracers())
    finally:
        gc.set_debug(0)
        tracemalloc.stop()
        threading.settrace(None)
    for name in (
        "trace function",
        "tracemalloc",
        "gc.set_debug",
        "CUDA_LAUNCH_BLOCKING=1",
        "anomaly",
        "torch.profiler",
    ):
        assert name in found


def test_development_mode_is_named():
    code = "from pytest_emad.benchmark.clock import iterate_active_tracers; print(*iterate_active_tracers())"
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, check=True)
    assert "development mode" in done.stdout


def test_a_simulated_clock_may_be_traced():
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        time_pairs(
            {"a": lambda index: OwnSeconds(1), "b": lambda index: OwnSeconds(1)},
            1,
            np.random.default_rng(0),
            clock=lambda: 0.0,
        )
    finally:
        sys.settrace(before)
