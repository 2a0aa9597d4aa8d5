"""Simulated paired times of unsteady machines: the effect of serial correlation, drift and interruptions.

python -m tests.laws.timing_noise      # the table of docs/methods.md, "Unsteady machines"; some minutes

A shape gives the logarithms of both arms' times, [draws, pairs] each, with a true ratio of 1: a drift starts at the
truth, every other shape is centred on it. Verdicts must be correct under the shapes in ``SHAPES``. Those in ``BEYOND``
show too little of themselves in few pairs to be detected; the table lists them, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats
from scipy.signal import lfilter
from tabulate import tabulate

from emad_ref.record import Floats, Ints
from pytest_emad.statistics.speedup import estimate_total_speedup, estimate_work_ratio
from pytest_emad.statistics.units import ByPair

NOISE = 0.05  # standard deviation of one request's log time
PROCESSES = 20
LEVEL = 0.05
UNEQUAL = 1.2  # factor by which shared drift affects the second arm more

Arms = tuple[Floats, Floats]
Shape = Callable[[np.random.Generator, int, int], Arms]


def independent(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
    """Requests of very different length, without serial correlation."""
    length = 0.3 * rng.standard_normal((draws, pairs))
    return length + _noise(rng, draws, pairs), length + _noise(rng, draws, pairs)


def autoregressive(rho: float) -> Shape:
    """Log ratios with this correlation from pair to pair."""

    def shape(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
        length = 0.3 * rng.standard_normal((draws, pairs))
        fresh = math.sqrt(1 - rho**2) * rng.standard_normal((draws, pairs + 200))
        noise = 0.07 * lfilter([1], [1, -rho], fresh, axis=1)[:, 200:]
        return length + noise - 0.07**2 / 2, length  # equal in total

    return shape


def shared_drift(step: float, unequal: float = UNEQUAL) -> Shape:
    """The machine's speed drifts, and affects the second arm ``unequal`` times as much as the first."""

    def shape(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
        drift = np.cumsum(step * rng.standard_normal((draws, pairs)), axis=1)
        return _noise(rng, draws, pairs) + drift, _noise(rng, draws, pairs) + unequal * drift

    return shape


def own_drift(step: float) -> Shape:
    """Only one arm drifts."""

    def shape(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
        drift = np.cumsum(step * rng.standard_normal((draws, pairs)), axis=1)
        return _noise(rng, draws, pairs) + drift, _noise(rng, draws, pairs)

    return shape


def waves(periods: float, height: float) -> Shape:
    def shape(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
        phase = 2 * np.pi * rng.random((draws, 1))
        wave = height * np.sin(2 * np.pi * periods * np.arange(pairs) / pairs + phase)
        return _noise(rng, draws, pairs) + wave, _noise(rng, draws, pairs)

    return shape


def step_midway(height: float) -> Shape:
    """From a point in the middle half of the run one arm is slower; the truth lies between before and after."""

    def shape(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
        at, sign = rng.integers(pairs // 4, 3 * pairs // 4, (draws, 1)), rng.choice([-1.0, 1.0], (draws, 1))
        return _noise(rng, draws, pairs) + sign * np.where(np.arange(pairs) < at, -height, height) / 2, _noise(
            rng, draws, pairs
        )

    return shape


def bursts(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
    """A sixth of the run is five times as noisy."""
    start = rng.integers(0, pairs * 5 // 6, (draws, 1))
    inside = (np.arange(pairs) >= start) & (np.arange(pairs) < start + pairs // 6)
    wide = np.where(inside, 5.0, 1.0)
    return wide * _noise(rng, draws, pairs), wide * _noise(rng, draws, pairs)


def heavy_tails(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
    return NOISE * rng.standard_t(4, (draws, pairs)), NOISE * rng.standard_t(4, (draws, pairs))


def process_effects(spread: float) -> Shape:
    """Each of ``PROCESSES`` processes draws its own ratio."""

    def shape(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
        layout = spread * rng.standard_normal((draws, PROCESSES))[:, processes(pairs)]
        return _noise(rng, draws, pairs) + layout, _noise(rng, draws, pairs)

    return shape


def interrupted(share: float, longer: float = 10.0) -> Shape:
    """The machine interrupts this number of pairs, in one arm or the other."""

    def shape(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
        a, b = independent(rng, draws, pairs)
        struck, first = rng.random((draws, pairs)) < share, rng.random((draws, pairs)) < 0.5
        return a + math.log(longer) * (struck & first), b + math.log(longer) * (struck & ~first)

    return shape


def slow_at_times(share: float, otherwise: float, longer: float = 10.0) -> Shape:
    """The second arm is ``otherwise`` times as fast as the first, but ``longer`` times slower on this many requests."""

    def shape(rng: np.random.Generator, draws: int, pairs: int) -> Arms:
        a, b = independent(rng, draws, pairs)
        return a + math.log(otherwise), b + math.log(longer) * (rng.random((draws, pairs)) < share)

    return shape


def processes(pairs: int) -> Ints:
    return np.arange(pairs) * PROCESSES // pairs


def _noise(rng: np.random.Generator, draws: int, pairs: int) -> Floats:
    return NOISE * rng.standard_normal((draws, pairs))


SHAPES: dict[str, Shape] = {
    "independent": independent,
    **{f"autocorrelation {rho}": autoregressive(rho) for rho in (0.3, 0.5, 0.8, 0.9)},
    **{f"shared drift of {step:g} a pair, felt 20 % unequally": shared_drift(step) for step in (0.01, 0.03)},
    "one arm drifts, 0.003 a pair": own_drift(0.003),
    "one long wave of 10 %": waves(1.0, 0.1),
    "eight waves of 3 %": waves(8.0, 0.03),
    "a step of 6 % midway": step_midway(0.06),
    "a sixth of the run five times as noisy": bursts,
    "heavy tails (t with 4 degrees)": heavy_tails,
    "one pair in twenty interrupted": interrupted(0.05),
    "one pair in ten interrupted": interrupted(0.1),
    **{f"processes that differ by {100 * spread:g} %": process_effects(spread) for spread in (0.03, 0.1)},
}
BEYOND: dict[str, Shape] = {
    "one arm drifts, 0.01 a pair": own_drift(0.01),
    "one arm drifts, 0.03 a pair": own_drift(0.03),
    "shared drift of 0.1 a pair, felt 20 % unequally": shared_drift(0.1),
}


def seconds(
    shape: Shape, pairs: int, draws: int, ratio: float = 1.0, told: bool = False
) -> list[tuple[ByPair, ByPair]]:
    """Draw ``draws`` races with a true speedup ``ratio`` of the second arm; ``told``: with their processes."""
    first, second = shape(np.random.default_rng([pairs, draws]), draws, pairs)
    process = processes(pairs) if told else None
    return [
        (ByPair(ratio * a, process), ByPair(b, process)) for a, b in zip(np.exp(first), np.exp(second), strict=True)
    ]


def rates(
    shape: Shape, pairs: int, draws: int, *, ratio: float = 1.0, threshold: float = 1.0, told: bool = False
) -> tuple[float, float, float]:
    """Return the shares of draws shown above ``threshold``, shown below it, and with ``ratio`` in the interval."""
    found = [
        estimate_total_speedup(a, b, threshold=threshold)
        for a, b in seconds(shape, pairs, draws, ratio=ratio, told=told)
    ]
    return (
        float(np.mean([each.p_above <= LEVEL for each in found])),
        float(np.mean([each.p_below <= LEVEL for each in found])),
        float(np.mean([each.low <= ratio <= each.high for each in found])),
    )


def _plain(shape: Shape, pairs: int, draws: int) -> str:
    """Compute the same by a paired t test, which takes pairs as independent."""
    found = [estimate_work_ratio(a, b) for a, b in seconds(shape, pairs, draws)]
    either = (np.mean([each.p_above <= LEVEL for each in found]), np.mean([each.p_below <= LEVEL for each in found]))
    return " / ".join(f"{100 * share:.0f}" for share in either)


def _row(name: str, shape: Shape, draws: int) -> dict[str, str]:
    found = {pairs: rates(shape, pairs, draws) for pairs in (30, 120)}
    in_processes = rates(shape, 120, draws, told=True)
    return {
        "noise": name,
        **{f"{n} pairs": " / ".join(f"{100 * share:.1f}" for share in each[:2]) for n, each in found.items()},
        "120 in 20 processes": " / ".join(f"{100 * share:.1f}" for share in in_processes[:2]),
        "intervals cover, 120": f"{100 * found[120][2]:.0f}",
        "paired t, 120": _plain(shape, 120, draws),
    }


def _power(draws: int) -> list[dict[str, float]]:
    rows = []
    for pairs in (30, 60, 120):
        for speedup in (1.12, 1.15, 1.20):
            shown = {
                name: round(100 * rates(shape, pairs, draws, ratio=speedup, threshold=1.1)[0])
                for name, shape in (("independent", independent), ("interrupted", interrupted(0.05)))
            }
            t = [estimate_work_ratio(a, b, threshold=1.1) for a, b in seconds(independent, pairs, draws, ratio=speedup)]
            plain = round(100 * float(np.mean([each.p_above <= LEVEL for each in t])))
            rows.append({"pairs": pairs, "truly": speedup, **shown, "paired t, independent": plain})
    return rows


if __name__ == "__main__":
    error = stats.binom.std(1000, LEVEL) / 10
    print(tabulate([_row(*each, 1000) for each in (SHAPES | BEYOND).items()], headers="keys", tablefmt="github"))
    print(f"\n% of 1000 draws, ± {error:.1f}; power against 1.10 ×:\n")
    print(tabulate(_power(500), headers="keys", tablefmt="github"))
