"""pytest-benchmark as a recorder: it is handed durations that the paired clock already measured.

Its own loop times one arm after the other, which drift makes incomparable; but its tables, JSON and comparison tools
are what people have. So its timer (``@pytest.mark.benchmark(timer=CLOCK)``) reads from our samples: a round takes two
readings, one duration apart. ``--benchmark-disable`` cannot shrink what was already measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class ReplayClock:
    """A timer whose readings make round i last ``seconds[i]`` of the samples loaded last."""

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def __call__(self) -> float:
        return next(self._readings)

    def load(self, seconds: Sequence[float]) -> None:
        self._readings = _readings([float(duration) for duration in seconds])


def _readings(seconds: Sequence[float]) -> Iterator[float]:
    now = 0.0
    for duration in seconds:
        yield now
        now += duration
        yield now


CLOCK = ReplayClock()


def record_samples(benchmark: Any, seconds: Sequence[float], group: str) -> None:
    """Record ``seconds`` as the rounds of ``benchmark``, a fixture whose timer is ``CLOCK``, in ``group``."""
    benchmark.group = group
    CLOCK.load(seconds)
    benchmark.pedantic(_nothing, rounds=len(seconds), iterations=1, warmup_rounds=0)


def _nothing() -> None:
    """What a replayed round runs."""
