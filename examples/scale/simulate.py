"""What a calibration beyond one machine would take: the real scheduler, against workers that exist only as times.

    python examples/scale/simulate.py

``dispatch_in_order`` is the project's own; beneath it lie workers whose clock is a number. A unit is eight batches of
text. It crosses the network, waits for the worker that is free first, runs (some runs take longer, and a worker dies
now and then, which costs its unit), and its statistics cross back to one process, which adds them up in order. FLOPs
come from the project's geometry of a Llama of 70 billion parameters. Everything under ASSUMED is an assumption: put in
yours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from heapq import heapify, heapreplace
from types import SimpleNamespace
from typing import Any

from emad_ref.calibration.calibration_run import BATCHES_PER_SHARD
from emad_ref.calibration.entropy_statistics import BUCKETS
from emad_ref.calibration.windows import TOKENS_PER_BATCH
from emad_ref.exit_rules import default_probes
from emad_ref.models.geometry import Geometry
from emad_ref.workers.dispatch import UNITS_PER_WORKER, WorkerPool, dispatch_in_order

ASSUMED = SimpleNamespace(
    gpus_per_worker=2,  # 141 GB of weights in bfloat16 do not fit beside states into one accelerator of 141 GB
    flops_per_second=4e14,  # of one accelerator, sustained in bfloat16
    spread=0.05,  # of running times, one standard deviation
    slow=(0.01, 3.0),  # one unit in a hundred takes three times as long
    hours_between_deaths=24.0,  # of one worker
    seconds_to_notice=30.0,  # that a worker died
    bytes_per_second=1.2e9,  # of the network of the process that adds up: 10 Gbit/s
    seconds_to_add=0.02,  # to unpack one unit and add its batches up
    keys=128,  # that a token attends to on average, in windows of 256 tokens
    dollars_per_gpu_hour=2.5,
)
TOKENS = 10_000_000_000
SIMULATED = 100_000_000  # tokens of one simulated stretch; the whole is so many stretches
LLAMA_70B = Geometry(
    family="llama", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, gated=True,
    vocabulary=128_256, embedding_width=8192, tied=False,
)  # fmt: skip


class Workers:
    """``count`` workers and the process that hands out and adds up, all on one clock; ``busy``: seconds of work."""

    def __init__(self, count: int, seconds: float, received: float, returned: float):
        self._free = [0.0] * count
        heapify(self._free)
        self._seconds, self._received, self._returned = seconds, received, returned
        self._random = random.Random(0)
        self.now = self.busy = self.adding = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        arrives = self.now + self._received / ASSUMED.bytes_per_second
        ends = max(self._free[0], arrives) + self._run()
        heapreplace(self._free, ends)
        return Arriving(self, ends)

    def wait_for(self, ends: float) -> None:
        """The result is here, has crossed the network and was added up."""
        came = max(self.now, ends)
        adding = self._returned / ASSUMED.bytes_per_second + ASSUMED.seconds_to_add
        self.now, self.adding = came + adding, self.adding + adding

    def _run(self) -> float:
        share, factor = ASSUMED.slow
        seconds = self._seconds * self._random.gauss(1, ASSUMED.spread)
        seconds *= factor if self._random.random() < share else 1.0
        self.busy += seconds
        if self._random.random() < seconds / (3600 * ASSUMED.hours_between_deaths):  # half done on average, and again
            return 1.5 * seconds + ASSUMED.seconds_to_notice
        return seconds


class Arriving(Future[None]):
    """Result of a unit that ends at a given time; a reader waits until then."""

    def __init__(self, workers: Workers, ends: float):
        super().__init__()
        self._workers, self._ends = workers, ends

    def result(self, timeout: float | None = None) -> None:
        self._workers.wait_for(self._ends)


def simulated(geometry: Geometry, workers: int, each: int, read: tuple[int, ...]) -> dict[str, str]:
    """One row: ``each`` units out per worker; ``read``: layers after which a head is read, none run above the last."""
    per_token = read[-1] * (geometry.block_flops() + geometry.attention_flops(ASSUMED.keys))
    per_token += len(read) * geometry.head_flops()
    tokens = BATCHES_PER_SHARD * TOKENS_PER_BATCH
    seconds = tokens * per_token / (ASSUMED.gpus_per_worker * ASSUMED.flops_per_second)
    cells = min(tokens, BUCKETS) * len(read)  # of the histogram, at most
    received, returned = 8.0 * tokens, 16.0 * cells
    crowd = Workers(workers, seconds, received, returned)
    units: Iterator[int] = iter(range(SIMULATED // tokens))
    count = sum(
        1 for _ in dispatch_in_order(WorkerPool("simulated", crowd.submit, each * workers), lambda unit: None, units)
    )
    stretches = TOKENS / (count * tokens)
    hours = crowd.now * stretches / 3600
    gpu_hours = hours * workers * ASSUMED.gpus_per_worker
    return {
        "GPUs": f"{workers * ASSUMED.gpus_per_worker}",
        "units out": f"{each} each",
        "heads": f"{len(read)}",
        "hours": f"{hours:.1f}",
        "workers busy": f"{crowd.busy / (workers * crowd.now):.0%}",
        "adding up busy": f"{crowd.adding / crowd.now:.0%}",
        "MB/s in": f"{returned * count / crowd.now / 1e6:.0f}",
        "TB in all": f"{(received + returned) * count * stretches / 1e12:.2f}",
        "dollars": f"{gpu_hours * ASSUMED.dollars_per_gpu_hour:,.0f}",
    }


def main() -> None:
    from tabulate import tabulate

    probes, curve = default_probes(LLAMA_70B.layers), tuple(range(1, LLAMA_70B.layers + 1))
    plans = [(50, each, probes) for each in (1, 2, UNITS_PER_WORKER, 8)]
    plans += [
        (50, UNITS_PER_WORKER, curve),
        (200, UNITS_PER_WORKER, probes),
        (500, UNITS_PER_WORKER, probes),
        (1000, UNITS_PER_WORKER, probes),
    ]
    rows = [simulated(LLAMA_70B, workers, each, read) for workers, each, read in plans]
    print(tabulate(rows, headers="keys", stralign="right", disable_numparse=True))


if __name__ == "__main__":
    main()
