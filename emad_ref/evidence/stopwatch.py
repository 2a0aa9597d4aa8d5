"""How long the decoder under test takes: paired requests at full depth, at a point put forward, and by ``generate``.

The same fresh prompts for all arms of a pair, the same number of new tokens, no stop token; ``meters.clock`` times;
questions decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
import torch

from emad_ref.errors import BadArgument
from emad_ref.evidence.points import Points
from emad_ref.meters.clock import Timings, paired, smallest_decidable_speedup
from emad_ref.meters.flops import flops
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.verdict.units import ByPair

COUNTED_REQUESTS = 4  # whose FLOPs are counted, prompt included
TIMING_SECONDS = 60.0  # bound on the timed part of a smoke run, kept by shortening requests
ARMS = 3  # full depth, adaptive, generate
FEWEST_PROMPT, FEWEST_NEW = 8, 4  # tokens below which a request is no longer decoding


class Stopwatch:
    """Timings of one model, taken when first asked for and kept."""

    def __init__(self, points: Points):
        self._points, self._subject = points, points.subject

    @cached_property
    def point(self) -> OperatingPoint:
        """The point whose speed counts: of those put forward, the one that saves most. F1 says what its quality is."""
        if not self._subject.loaded.trained:
            return self._points.traces.profile.point(0.0)
        return max(self._points.losses, key=lambda loss: loss.net_reduction).point

    @cached_property
    def timings(self) -> dict[int, Timings]:
        """Batch size → paired seconds of arms ``full``, ``adaptive`` and ``generate`` on the same fresh prompts."""
        return {rows: self._timed(rows) for rows in self._subject.budget.batch_sizes}

    @cached_property
    def request_shape(self) -> tuple[int, int]:
        """(prompt tokens, new tokens) of a timed request, shortened where the model is slow or its context short."""
        room = (self._subject.stepper.max_positions or self._subject.window) - 1
        prompt = min(self._subject.budget.prompt_tokens, room // 2)
        new = min(self._subject.budget.new_tokens, room - prompt)
        with self._subject.open(self._subject.full) as decoder:
            (trial,) = self._subject.prompts(1, prompt)
            decoder.generate([trial], 2, frozenset())
            seconds = paired(
                {"one": lambda _: _run(decoder, [trial], 1), "more": lambda _: _run(decoder, [trial], 3)},
                3, np.random.default_rng(self._subject.seed), synchronize=decoder.synchronize,
            ).seconds  # fmt: skip
        step = max(float(np.median(seconds["more"] - seconds["one"])) / 2, 1e-4)
        prefill = max(float(np.median(seconds["one"])) - step, 0.0)
        budget = self._subject.budget
        return (
            (prompt, new) if budget.rank else affordable(prompt, new, prefill, step, budget.pairs, budget.batch_sizes)
        )

    def against_full(self, points: Mapping[str, OperatingPoint], rows: int = 1) -> Timings:
        """Paired seconds of arm ``full`` and of each of ``points`` on the same fresh prompts.

        Raises:
            Unsupported: the decoder under test declines one of them.
        """
        if "full" in points:
            raise BadArgument("points", sorted(points), "names other than 'full'", "that arm is full depth")
        length, new = self.request_shape
        pairs, warm_up = self._subject.budget.pairs, 2
        prompts = self._subject.prompts(rows * (pairs + warm_up), length)
        with ExitStack() as stack:
            decoders = {
                name: stack.enter_context(self._subject.open(point, max_rows=rows))
                for name, point in {"full": self._subject.full, **points}.items()
            }

            def arm(decoder: Decoder) -> Callable[[int], None]:
                return lambda pair: _run(decoder, prompts[pair * rows : (pair + 1) * rows], new)

            return paired(
                {name: arm(decoder) for name, decoder in decoders.items()},
                pairs,
                np.random.default_rng(self._subject.seed),
                warm_up=warm_up,
                synchronize=decoders["full"].synchronize,
            )

    def _timed(self, rows: int) -> Timings:
        length, new = self.request_shape
        warm_up = 2
        prompts = self._subject.prompts(rows * (self._subject.budget.pairs + warm_up), length)

        def batch(pair: int) -> list[Prompt]:
            return prompts[pair * rows : (pair + 1) * rows]

        with (
            self._subject.open(self._subject.full, max_rows=rows) as full,
            self._subject.open(self.point, max_rows=rows) as adaptive,
        ):
            return paired(
                {
                    "full": lambda pair: _run(full, batch(pair), new),
                    "adaptive": lambda pair: _run(adaptive, batch(pair), new),
                    "generate": lambda pair: _discard(self._subject.own_greedy(batch(pair), new)),
                },
                self._subject.budget.pairs,
                np.random.default_rng(self._subject.seed),
                warm_up=warm_up,
                synchronize=full.synchronize,
            )

    @cached_property
    def row(self) -> dict[str, Any]:
        """Time and FLOPs of the timed point, prompt included: what ``pointrows`` cannot know of it."""
        return {
            "model": self._subject.name,
            "name": self.point.name,
            "end_to_end_reduction": self._request_reduction(),
            "time_ratio": {
                str(rows): float(np.exp(np.log(t.seconds["full"] / t.seconds["adaptive"]).mean()))
                for rows, t in self.timings.items()
            },
        }

    def _request_reduction(self) -> float | None:
        """Share of FLOPs saved in timed requests, prompt and decoding together; None where nothing is counted."""
        length, new = self.request_shape
        prompts = self._subject.prompts(COUNTED_REQUESTS, length)
        totals = []
        for point in (self._subject.full, self.point):
            with self._subject.open(point) as decoder:
                works = [decoder.generate([prompt], new, frozenset()).work for prompt in prompts]
            if any(work is None for work in works):
                return None
            geometry = self._subject.loaded.geometry
            totals.append(sum(flops(work[0], geometry).total for work in works if work is not None))
        return 1 - totals[1] / totals[0]

    @property
    def note(self) -> str:
        """One sentence: what was timed, and the smallest speed-up this budget could have decided."""
        length, new = self.request_shape
        reach = []
        for rows, timing in self.timings.items():
            ratios = np.log(timing.seconds["full"] / timing.seconds["adaptive"])
            least = smallest_decidable_speedup(float(ratios.std(ddof=1)), len(ratios), threshold=1.10)
            own = float(np.exp(np.log(timing.seconds["generate"] / timing.seconds["full"]).mean()))
            reach.append(f"batch {rows}: decides from {least:.3f}×, own full depth {own:.2f}× generate's speed")
        return (
            f"{self._subject.name}: timed {self.point.name!r}, {length} prompt + {new} new tokens, "
            f"{self._subject.budget.pairs} pairs, {torch.get_num_threads()} CPU threads; " + "; ".join(reach)
        )


def by_pair(timings: Timings) -> dict[str, ByPair]:
    """Arm → seconds [pairs], as intervals take them."""
    return {arm: ByPair(seconds) for arm, seconds in timings.seconds.items()}


def affordable(
    prompt: int, new: int, prefill: float, step: float, pairs: int, batch_sizes: Sequence[int]
) -> tuple[int, int]:
    """(prompt, new) tokens of a request, both shortened alike so that all timed runs take about ``TIMING_SECONDS``.

    Prompts cost by the token, so the ``prefill`` seconds of one row count for every row; a ``step`` of a few rows takes
    about as long as one of one row.
    """
    expected = pairs * ARMS * (sum(batch_sizes) * prefill + len(batch_sizes) * new * step)
    share = min(1.0, TIMING_SECONDS / expected)
    return max(min(prompt, FEWEST_PROMPT), int(prompt * share)), max(min(new, FEWEST_NEW), int(new * share))


def _run(decoder: Decoder, prompts: Sequence[Prompt], new: int) -> None:
    decoder.generate(prompts, new, frozenset())


def _discard(_: object) -> None:
    """A timed arm returns nothing: a number would be taken as its own measurement."""
