"""Speedup: ratios of paired times with the noise of the machine, ratios of counted work, and the batch size of no gain.

**Interruptions.** One pair in twenty with one arm ten times slower moves a ratio of totals by more than any claim's
threshold. ``find_interruptions`` finds pairs with a log ratio far from the others'. The counts on either side show the
cause: the machine interrupts both arms equally, a slow arm only itself.

**Spells.** Paired times are not independent: other processes come and go, clock frequencies wander, and the arms may
feel it unequally. ``measure_steadiness`` measures this:

    lag_one   correlation of neighbouring pairs' log ratios (with Kendall's correction for its bias)
    drift     KPSS statistic of the log ratios: the deviation of their partial sums from a straight line. Of 1 / 6 on
              average for independent pairs, above 0.46 one time in twenty (Kwiatkowski et al. 1992); against a random
              walk below independent noise no test is locally better (Nyblom and Mäkeläinen 1983)
    shared    the same of the time that both arms take together: the machine's own speed. If that wanders, arms
              that feel it unequally are likely, and a ratio shows it later than the times do

``variance_inflation`` multiplies squared standard errors of the ratio. It is at least ``UNSEEN``: a random walk that
moves the mean as much as independent noise does goes unnoticed in five runs of six. ``estimate_total_speedup`` also
takes the least certain of pairs, blocks of time and processes. False verdicts at the threshold then stay below 6 % each
way in all but a few of the shapes that ``tests/laws/timing_noise.py`` simulates; docs/methods.md has the table.

**Batch sizes.** ``find_batch_size_limit`` finds the batch size from which on a method is no faster:

    at b     each baseline's ratio of total times over the method, with its two-sided 95 % interval
    (``estimate_total_speedup``)
    shown    the gain is shown at b if the interval against *every* baseline lies above 1
    at       the gain vanishes at the smallest b at which it is not shown

The fastest baseline is not known beforehand, so none is chosen by its mean. The baseline named at b has the lowest
interval. If that interval is above 1, all are: an intersection–union test at 2.5 % for any number of baselines.

The number of batch sizes needs no correction. They are tested from the smallest on and the first failure ends the test:
a fixed sequence, which keeps the probability of a false gain below that size at 2.5 % (Maurer, Hothorn and Lehmacher
1995). Batch sizes after the crossing are only listed.

An interval may contain 1 because few pairs were timed, so the sentence gives the interval and the number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy import special, stats

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument
from emad_ref.record import Bools, Floats
from pytest_emad.statistics.estimate import (
    Estimate,
    estimate_near_identical_units,
    fieller_interval,
    positive_mean_pvalue,
)
from pytest_emad.statistics.units import ByPair, float_column, require_paired, sum_blocks_of_neighbours

UNSEEN = 2.0  # factor of the squared error in every run
DRIFT, DRIFT_FROM = 15.0, 0.15  # growth of that factor with ``drift``, and where it starts
SHARED, SHARED_FROM, SHARED_FULL = 8.0, 0.5, 0.9  # growth with ``shared``, where it starts and ends
STRAYS = 0.463  # KPSS: exceeded by one steady run in twenty
LAG = 2.33  # standard errors of a correlation of neighbours; one steady run in a hundred exceeds it
FARTHEST = 0.98  # a correlation nearer to 1 leaves no independent pair

MAD = 0.6745  # median absolute deviation of a standard normal variable
STRUCK = math.log(2.0)  # least distance of an interrupted pair's log ratio from the median
STRUCK_SPREADS = 8.0  # and in robust standard deviations, so that wide noise has no interruptions
OWN = 0.1  # p-value of equal chances for either arm below which interruptions are an arm's own


@dataclass(frozen=True)
class MachineSteadiness:
    """Steadiness of the machine over ``pairs`` timed pairs: ``lag_one``, ``drift`` and ``shared`` as above."""

    pairs: int
    lag_one: float
    drift: float
    shared: float

    @property
    def variance_inflation(self) -> float:
        """Factor of the squared standard error of a ratio, ≥ ``UNSEEN``."""
        wandering = np.clip((self.shared - SHARED_FROM) / (SHARED_FULL - SHARED_FROM), 0.0, 1.0)
        return UNSEEN + DRIFT * max(0.0, self.drift - DRIFT_FROM) + SHARED * float(wandering)

    @property
    def independent_pair_count(self) -> int:
        """Approximate number of independent pairs with the same error of the mean, by ``lag_one``."""
        share = (1 - self.lag_one) / (1 + self.lag_one)
        return max(1, min(self.pairs, round(self.pairs * share)))

    @property
    def absent_steadiness(self) -> Absent | None:
        """Why the machine counts as unsteady; None if it was steady."""
        reasons = []
        if self.lag_one * math.sqrt(self.pairs) > LAG:
            reasons.append(
                f"pairs that follow one another are alike (correlation {self.lag_one:.2f}; {self.pairs} pairs are "
                f"worth about {self.independent_pair_count} independent ones)"
            )
        if self.drift > STRAYS:
            reasons.append("the ratio of the arms drifts over the run")
        if self.shared > (SHARED_FROM + SHARED_FULL) / 2:
            reasons.append("the machine's speed drifts over the run")
        return Absent(f"unsteady machine: {', and '.join(reasons)}") if reasons else None


def measure_steadiness(a: Floats, b: Floats) -> MachineSteadiness:
    """Steadiness over pairs [n] in the order of timing, n ≥ 2; times > 0."""
    ratio, together = np.log(a / b), np.log(a) + np.log(b)
    return MachineSteadiness(len(a), _lag_one(ratio), _kpss(ratio), _kpss(together))


def _lag_one(values: Floats) -> float:
    n, away = len(values), values - values.mean()
    if n < 4 or not away.any():
        return 0.0
    correlation = float(away[1:] @ away[:-1] / (away @ away))
    return max(-FARTHEST, min(FARTHEST, (n * correlation + 1) / (n - 3)))


def _kpss(values: Floats) -> float:
    n, away = len(values), values - values.mean()
    squared = float(away @ away)
    return float((np.cumsum(away) ** 2).sum() / (n * squared)) if squared > 0 else 0.0


@dataclass(frozen=True)
class TimingInterruptions:
    """[pairs] in which ``a`` or ``b`` took far longer than the other pairs suggest."""

    a: Bools
    b: Bools

    @property
    def interrupted_pairs(self) -> Bools:
        return np.asarray(self.a | self.b)

    @property
    def interruptions_per_arm(self) -> tuple[int, int]:
        return int(self.a.sum()), int(self.b.sum())

    @property
    def is_arm_specific(self) -> bool:
        """Whether one arm was interrupted significantly more often than the other, so that the arm itself is slow."""
        struck = sum(self.interruptions_per_arm)
        return struck > 0 and float(stats.binomtest(self.interruptions_per_arm[0], struck).pvalue) < OWN

    @property
    def machine_causes_per_arm(self) -> tuple[bool, bool]:
        """Whether the machine explains the interruptions of ``a`` and of ``b``.

        It does if an arm has at most one standard deviation more of them than the other.
        """
        a, b = self.interruptions_per_arm
        return 0 < a <= b + math.sqrt(b), 0 < b <= a + math.sqrt(a)

    @property
    def masks_for_ratio_and_bounds(self) -> tuple[Bools, Bools, Bools]:
        """[pairs] that count for the ratio, for showing it above a threshold, and for showing it below.

        Slow pairs of ``a`` raise the ratio a / b, so dropping them makes it harder to show a high ratio. Slow pairs of
        ``b`` lower it, and are dropped there only if interruptions by the machine explain them.
        """
        every = np.ones(len(self.a), dtype=np.bool_)
        if self.is_arm_specific or not self.interrupted_pairs.any():
            return every, every, every
        machine_a, machine_b = self.machine_causes_per_arm
        rest = ~self.interrupted_pairs
        if machine_a and machine_b:
            return rest, rest, rest
        return every, rest if machine_b else ~self.a, rest if machine_a else ~self.b

    def describe_treatment(self, ratio: float) -> str:
        """Text about the treatment of such pairs; "" if there are none.

        ``ratio``: of all pairs, the baseline ``a`` over the candidate ``b``.
        """
        struck, (a, b) = int(self.interrupted_pairs.sum()), self.interruptions_per_arm
        if not struck:
            return ""
        text = f"{struck} of {len(self.a)} pairs lie far from the others ({a} by the baseline, {b} by the candidate)"
        if self.is_arm_specific:
            return f"{text}: the {'baseline' if a > b else 'candidate'} is slow at times, and they count"
        if all(self.machine_causes_per_arm):
            return f"{text} and are set aside as interrupted; {ratio:.4g}× with them"
        return f"{text}: interrupted, or an arm that is slow at times"


def find_interruptions(a: Floats, b: Floats) -> TimingInterruptions:
    """Pairs [n] whose log ratio lies ``STRUCK_SPREADS`` robust standard deviations and a factor of 2 from the median.

    None if more than half of all ratios are equal, since there is no noise to compare with.
    """
    logs = np.log(a / b)
    away = logs - np.median(logs)
    spread = float(np.median(np.abs(away))) / MAD
    least = max(STRUCK, STRUCK_SPREADS * spread) if spread > 0 else math.inf
    return TimingInterruptions(away > least, away < -least)


BLOCKS = (32, 16, 8)  # blocks of time of a run, each of two pairs or more
PLANNED_INFLATION = 3.0  # of squared errors, with BLOCKS[-1] blocks: the assumption for a steady machine


def estimate_speedup_per_request(
    times_a: ByPair, times_b: ByPair, *, threshold: float = 1.0, level: float = 0.95
) -> Estimate:
    """Speedup of b over a per request: exp of the mean of log(a_i / b_i), every request counted alike.

    The error is that of ``estimate_total_speedup``: a t test on pairs and on blocks of time, the least certain of them,
    and an allowance for an unsteady machine.

    Args:
        times_a: [pairs] seconds of the baseline, in the order in which they were taken.
        times_b: [pairs] seconds of the candidate, measured beside the baseline in the same pair.
        threshold: the ratio to compare with, > 0.

    Raises:
        BadArgument: shapes or processes differ, no pair, a time that is not positive and finite, a threshold ≤ 0; or
            pairs of several processes, which only ``estimate_total_speedup`` supports.
    """
    a, b = _paired_times(times_a, times_b, threshold)
    if times_a.process_count > 1:
        raise BadArgument(
            "times_a", f"{times_a.process_count} processes", "pairs of one process", "take estimate_total_speedup"
        )
    logs, n = np.log(a / b), len(a)
    ratio, unit = float(np.exp(logs.mean())), "× as fast"
    if n == 1:
        return _single_pair(ratio, unit)
    if np.ptp(logs) <= 8 * np.finfo(np.float64).eps * max(1.0, np.abs(logs).max()):
        return _identical_ratio(ratio, n, threshold, level, unit)
    noise, away = measure_steadiness(a, b), math.log(threshold)
    looks = [
        logs,
        *(
            sum_blocks_of_neighbours(logs, blocks) / sum_blocks_of_neighbours(np.ones(n), blocks)
            for blocks in _blocks(n)
        ),
    ]
    reaches = [
        float(special.stdtrit(len(look) - 1, (1 + level) / 2))
        * look.std(ddof=1)
        * math.sqrt(noise.variance_inflation / len(look))
        for look in looks
    ]
    low, high = (float(np.exp(logs.mean() + side * max(reaches))) for side in (-1, 1))
    above, below = (
        max(positive_mean_pvalue(sign * (look - away), noise.variance_inflation) for look in looks) for sign in (1, -1)
    )  # fmt: skip
    method = "paired t on log ratios, of pairs and of blocks of time"
    return Estimate(ratio, low, high, n, above, below, unit, method, ByPair.noun, unsteady=noise.absent_steadiness)


def estimate_total_speedup(
    times_a: ByPair, times_b: ByPair, *, threshold: float = 1.0, level: float = 0.95
) -> Estimate:
    """Speedup of b over a on the whole mix of requests: Σ a_i / Σ b_i, with Fieller's interval.

    The ratio exceeds θ exactly if the mean of a_i − θ b_i exceeds 0, which a paired t test decides. The interval holds
    every θ that it does not reject (Fieller 1954). Long requests weigh more, unlike in
    ``estimate_speedup_per_request``, which counts every request alike. Pairs are requests of different lengths: a_i and
    b_i share the length and their differences do not, so the t test fits even if the times are far from normal.

    Blocks of time are independent, pairs are not: neighbours share the state of the machine. The same test is made on
    the totals of 32, 16 and 8 blocks of consecutive pairs, as far as there are pairs enough, with one degree of
    freedom less than blocks. Pairs of several processes are also tested by process. Bounds and p-values are those of
    the least certain test, and all allow for what ``measure_steadiness`` finds of the machine and for what it cannot
    find.

    If one arm of a pair takes far longer than the others suggest, the pair was interrupted, or the arm is slow at
    times. If both arms were struck about equally often, such pairs are set aside, and ``describe_treatment`` has the
    ratio of all. If one was struck significantly more often, the arm is slow and every pair counts. In between the
    times do not tell, and each side of the verdict drops the pairs that favour it
    (``TimingInterruptions.masks_for_ratio_and_bounds``).

    Args:
        times_a: [pairs] seconds of the baseline, in the order in which they were taken.
        times_b: [pairs] seconds of the candidate, for the same request in the same pair, of the same processes.
        threshold: the ratio to compare with, > 0.

    Raises:
        BadArgument: shapes or processes differ, no pair, a time that is not positive and finite, or a threshold ≤ 0.
    """
    a, b = _paired_times(times_a, times_b, threshold)
    n, unit = len(a), "× as fast in total"
    every = float(a.sum() / b.sum())
    if n == 1:
        return _single_pair(every, unit)
    if np.abs(a - every * b).max() <= 8 * np.finfo(np.float64).eps * a.max():
        return _identical_ratio(every, n, threshold, level, unit)
    struck = find_interruptions(a, b)
    counted, above_by, below_by = struck.masks_for_ratio_and_bounds
    noise = measure_steadiness(a[~struck.interrupted_pairs], b[~struck.interrupted_pairs])
    low, high, above, below = _least_sure(times_a.select(above_by), times_b.select(above_by), noise, threshold, level)
    if below_by is not above_by:
        _, high, _, below = _least_sure(times_a.select(below_by), times_b.select(below_by), noise, threshold, level)
    ratio = float(a[counted].sum() / b[counted].sum())
    processes = f" and {times_a.process_count} processes" if times_a.process_count > 1 else ""
    return Estimate(
        ratio,
        low,
        high,
        n,
        above,
        below,
        unit,
        f"t on a − θ·b over pairs, blocks of time{processes}, the least sure of them (Fieller)",
        ByPair.noun,
        unsteady=noise.absent_steadiness,
        note=struck.describe_treatment(every),
    )


def _least_sure(
    times_a: ByPair, times_b: ByPair, noise: MachineSteadiness, threshold: float, level: float
) -> tuple[float, float, float, float]:
    """(low, high, p_above, p_below), the worst of each over pairs, blocks of time and processes."""
    a, b = (np.asarray(column.values, dtype=np.float64) for column in (times_a, times_b))
    looks = [
        (a, b),
        *((sum_blocks_of_neighbours(a, blocks), sum_blocks_of_neighbours(b, blocks)) for blocks in _blocks(len(a))),
    ]
    if times_a.process_count > 1:
        looks.append((times_a.independent_values, times_b.independent_values))
    lows, highs, above, below = zip(
        *(_ratio_by_t(*look, noise.variance_inflation, threshold, level) for look in looks), strict=True
    )
    return min(lows), max(highs), max(above), max(below)


def _blocks(pairs: int) -> list[int]:
    return [blocks for blocks in BLOCKS if pairs >= 2 * blocks]


def _ratio_by_t(
    a: Floats, b: Floats, inflation: float, threshold: float, level: float
) -> tuple[float, float, float, float]:
    """(low, high, p_above, p_below) if each entry of ``a`` and ``b`` is an independent observation of the ratio."""
    low, high = fieller_interval(a, b, float(special.stdtrit(len(a) - 1, (1 + level) / 2)), inflation)
    # More distant ratios may fit better if a total is uncertain, so the p-value is the largest of theirs.
    above = max(positive_mean_pvalue(a - threshold * b, inflation), positive_mean_pvalue(a, inflation))
    below = max(positive_mean_pvalue(threshold * b - a, inflation), positive_mean_pvalue(b, inflation))
    return low, high, above, below


def estimate_work_ratio(work_a: ByPair, work_b: ByPair, *, threshold: float = 1.0, level: float = 0.95) -> Estimate:
    """Ratio of FLOPs, a over b, on the whole mix of requests: Σ a_i / Σ b_i, with Fieller's interval.

    Work is counted: it has no noise, and requests drawn at random are independent.

    Args:
        work_a, work_b: [pairs] FLOPs of the same requests.
        threshold: the ratio to compare with, > 0.

    Raises:
        BadArgument: as ``estimate_total_speedup``.
    """
    a, b = _paired_times(work_a, work_b, threshold)
    ratio, n, unit = float(a.sum() / b.sum()), len(a), "× fewer FLOPs"
    if n == 1:
        return _single_pair(ratio, unit)
    if np.abs(a - ratio * b).max() <= 8 * np.finfo(np.float64).eps * a.max():
        return _identical_ratio(ratio, n, threshold, level, unit)
    low, high, above, below = _ratio_by_t(a, b, 1.0, threshold, level)
    return Estimate(ratio, low, high, n, above, below, unit, "paired t on a − θ·b (Fieller)", ByPair.noun)


def estimate_ratio_with_meter_error(
    a: ByPair, b: ByPair, off_a: ByPair, off_b: ByPair, *, threshold: float = 1.0, level: float = 0.95
) -> Estimate:
    """``estimate_total_speedup`` with an instrument's error, which may go the same way in every pair.

    Each bound and p-value is that of its worst case: all of a too high and all of b too low, or the other way round.
    ``off_a``, ``off_b`` [pairs]: relative error, 0 ≤ share < 1.

    Raises:
        BadArgument: as ``estimate_total_speedup``; shares outside 0–1.
    """
    shares = {"off_a": float_column("off_a", off_a, ByPair), "off_b": float_column("off_b", off_b, ByPair)}
    for name, share in shares.items():
        if not ((share >= 0) & (share < 1)).all():
            raise BadArgument(name, float(share.max()), "shares in 0–1, below 1", "lengthen the windows")
    exact = estimate_total_speedup(a, b, threshold=threshold, level=level)

    def off(sign: int) -> Estimate:
        numerator, denominator = a.values * (1 + sign * off_a.values), b.values * (1 - sign * off_b.values)
        return estimate_total_speedup(
            a.with_values(numerator), b.with_values(denominator), threshold=threshold, level=level
        )

    least, most = off(-1), off(+1)
    method = f"{exact.method}, instrument at its worst"
    return replace(exact, low=least.low, high=most.high, p_above=least.p_above, p_below=most.p_below, method=method)


def _paired_times(times_a: ByPair, times_b: ByPair, threshold: float) -> tuple[Floats, Floats]:
    for name, times in (("times_a", times_a), ("times_b", times_b)):
        _require_times(name, times)
    a, b = float_column("times_a", times_a, ByPair), float_column("times_b", times_b, ByPair)
    require_paired("times_b", times_b, times_a, "times come in pairs")
    if times_a.process_count != times_b.process_count:
        raise BadArgument("times_b.processes", times_b.process_count, str(times_a.process_count), "times come in pairs")
    if not (math.isfinite(threshold) and threshold > 0):
        raise BadArgument("threshold", threshold, "a positive ratio")
    return a, b


def _require_times(name: str, times: ByPair) -> None:
    """Raise BadArgument if an entry is not a time, and name it."""
    if not isinstance(times, ByPair) or np.ndim(times.values) != 1:
        return  # ``float_column`` raises
    values = np.asarray(times.values, dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(wrong):
        raise BadArgument(
            f"{name}[{wrong[0]}]",
            float(values[wrong[0]]),
            f"a positive, finite number, as all {len(values)} pairs have",
            "a clock or counter that stands still measures nothing",
        )


def _single_pair(ratio: float, unit: str) -> Estimate:
    return Estimate(ratio, 0.0, math.inf, 1, 1.0, 1.0, unit, "one pair has no spread", ByPair.noun)


def _identical_ratio(ratio: float, n: int, threshold: float, level: float, unit: str) -> Estimate:
    """Estimate if every pair has the same ratio, as with counted work: unobserved pairs stay unknown."""
    estimate = estimate_near_identical_units(
        ratio, ratio, 0.0, 0, n, threshold=threshold, level=level, unit=unit, noun=ByPair.noun
    )
    return replace(estimate, low=0.0)


@dataclass(frozen=True)
class BatchSpeedup:
    """Speedup at batch size ``rows`` over ``against``, the baseline against which it is least certain."""

    rows: int
    against: str
    ratio: Estimate

    @property
    def is_significant(self) -> bool:
        """Whether the speedup is shown against every baseline."""
        return self.ratio.low > 1

    @property
    def description(self) -> str:
        """``0.97× [0.93, 1.01] against generate, 12 pairs``."""
        ratio = self.ratio
        interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
        return f"{ratio.value:.2f}× {interval} against {self.against}, {ratio.n} {ratio.noun}"


@dataclass(frozen=True)
class BatchSizeLimit:
    """``sweep``: every batch size timed, from the smallest on."""

    sweep: tuple[BatchSpeedup, ...]

    @property
    def first_insignificant_speedup(self) -> BatchSpeedup | None:
        """The smallest batch size at which the gain is not shown; None: it is shown at all of them."""
        return next((each for each in self.sweep if not each.is_significant), None)

    @property
    def larger_batches_with_gain(self) -> tuple[int, ...]:
        """Batch sizes beyond the crossing whose interval lies above 1."""
        at = self.first_insignificant_speedup
        return (
            () if at is None else tuple(each.rows for each in self.sweep if each.rows > at.rows and each.is_significant)
        )

    @property
    def description(self) -> str:
        """One sentence on the batch size and ratio at which the gain vanishes, or that there was none, or no end."""
        at, largest = self.first_insignificant_speedup, self.sweep[-1]
        if at is None:
            return f"still faster at batch {largest.rows}: {largest.description}"
        first = at is self.sweep[0]
        head = f"no gain at batch {at.rows} already" if first else f"gain vanishes at batch {at.rows}"
        beyond = (
            f" (shown at batch {', '.join(map(str, self.larger_batches_with_gain))} all the same)"
            if self.larger_batches_with_gain
            else ""
        )
        return f"{head}: {at.description}{beyond}"


def find_batch_size_limit(ratios: Mapping[int, Mapping[str, Estimate]]) -> BatchSizeLimit:
    """Find the end of the gain. ``ratios``: batch size → baseline → speedup over it (> 1: faster).

    Raises:
        BadArgument: no batch size, or one without a baseline.
    """
    if not ratios:
        raise BadArgument("ratios", dict(ratios), "at least one batch size")
    for rows, against in ratios.items():
        if not against:
            raise BadArgument(f"ratios[{rows}]", dict(against), "at least one baseline", "time one beside the method")
    return BatchSizeLimit(tuple(_least_certain_baseline(rows, ratios[rows]) for rows in sorted(ratios)))


def _least_certain_baseline(rows: int, against: Mapping[str, Estimate]) -> BatchSpeedup:
    name = min(against, key=lambda each: (against[each].low, against[each].value))
    return BatchSpeedup(rows, name, against[name])
