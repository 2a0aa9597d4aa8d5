"""Grids of operating points: the margins, thresholds and depths that a sweep replays.

Under the monotone schedule one sure token decides for all later ones, so a rule's best thresholds may lie where only
very sure tokens pass: entropies near zero, responses near one. Every family is searched there too, as finely as its
rivals: a rule with coarser thresholds would lose for that alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emad_ref.calibration.profile import Profile
from emad_ref.calibration.trace import Trace
from emad_ref.point import OperatingPoint, truncated
from emad_ref.policy.early_exit import early_exit
from emad_ref.policy.thresholds import fixed_entropy, response, short, spelled
from emad_ref.signals import Signal

CHUNKS = (4, 8, 16)  # tokens
FALLS = (8, 32, 128)  # tokens over which positional depth falls
FINEST = 1e-6  # the least threshold of a grid, as share of the largest
# 1 − λ of the confidence rules, four to a decade; the paper's 0.9 is among them, and float32 knows no λ between
# 1 − 1e-7 and 1
DOUBTS = tuple(10 ** (-quarter / 4) for quarter in range(29))


def emad_margins(profile: Profile, count: int) -> list[OperatingPoint]:
    """EMAD points at ``count`` margins, fewer where some coincide, from 0 up to the highest target, ends included.

    Half of them stand in equal steps, the others just below the target of each probe, whose threshold is then small.
    """
    targets = sorted({target for target in profile.targets_nats if target > 0})
    highest = max(targets, default=0.0)
    each = min(count // 2, count - 2) // max(len(targets), 1)
    coarse = np.linspace(0.0, highest, count - each * len(targets))
    below = _small(highest, highest / (len(coarse) - 1), each)
    fine = {target - small: (target, small) for target in targets for small in below if small < target}
    margins = sorted({*map(float, coarse), *fine})
    return [
        _near_target(profile.point(margin), *fine[margin]) if margin in fine else profile.point(margin)
        for margin in margins
    ]


def _near_target(point: OperatingPoint, target: float, small: float) -> OperatingPoint:
    """``point`` of margin target − small, whose own name would be that of margin ``target``."""
    return spelled(point, f"{short(target)}−{small:.1e}")


def fixed_entropies(profile: Profile, count: int) -> list[OperatingPoint]:
    """Fixed-threshold points at ``count`` values of h₀ from 0 up to the profile's largest mean entropy.

    Half of them stand in equal steps, the others below the first of these.
    """
    largest, fine = max(profile.mean_nats), min(count // 2, count - 2)
    coarse = np.linspace(0.0, largest, count - fine)
    values = sorted({*map(float, coarse), *_small(largest, float(coarse[1]), fine)})
    return [fixed_entropy(profile.layers, profile.probes, h0) for h0 in values]


def _small(largest: float, step: float, count: int) -> list[float]:
    """``count`` thresholds in equal ratios from ``FINEST`` of the largest up to, and without, ``step``."""
    if count == 0 or largest == 0:
        return []
    return [float(value) for value in np.geomspace(FINEST * largest, step, count + 1)[:-1]]


def truncations(layers: int) -> list[OperatingPoint]:
    """Fixed truncation at every depth below full."""
    return [truncated(layers, depth) for depth in range(1, layers)]


def responses(layers: int, probes: Sequence[int], count: int) -> list[OperatingPoint]:
    """Softmax response at ``count`` thresholds λ from 1 down to 0 (everything exits), 1 − λ in equal ratios.

    In equal steps the rival would be worse than it is: its best thresholds lie near 1 (``DOUBTS``).
    """
    doubts = (0.0, *np.geomspace(DOUBTS[-1], 1.0, count - 1))
    points = ((response(layers, probes, float(1 - doubt)), _sure(float(doubt))) for doubt in doubts)
    return [replace(point, name=f"response λ={sure}") for point, sure in points]


def early_exits(signal: str, layers: int, vocabulary: int, minimum: int, pruning: str = "none") -> list[OperatingPoint]:
    """A confidence rule of ``policy.early_exit`` from layer ``minimum`` on, monotone, at every λ of ``DOUBTS``.

    From λ = 0, under which a token leaves where it first may, up.

    Raises:
        BadArgument: a rule that a model of this size has no room for.
    """
    return [
        replace(point, name=f"{point.family} j={minimum} λ={_sure(doubt)}".replace("_", " "))
        for doubt in DOUBTS
        for point in [early_exit(signal, layers, vocabulary, minimum, 1 - doubt, pruning=pruning, schedule="monotone")]
    ]


def _sure(doubt: float) -> str:
    """0, 0.9, 1−0.0018, 1−1.8e-05: many digits of λ would be nines."""
    return f"{1 - doubt:.2g}" if doubt > 0.05 or doubt == 0 else f"1−{doubt:.2g}"


def chunked(profile: Profile, count: int) -> list[OperatingPoint]:
    """The EMAD rule asked at the first token of each chunk only, at ``count`` margins and three chunk lengths."""
    return [
        replace(point, name=f"{point.name}, chunks of {period}", family="chunked", schedule="chunked", period=period)
        for point in emad_margins(profile, count)
        for period in CHUNKS
    ]


def positional(layers: int) -> list[OperatingPoint]:
    """Depth that falls with position alone, to every floor within several numbers of tokens."""
    return [
        OperatingPoint(
            f"falls to {floor} over {period}",
            "positional",
            layers,
            layers,
            schedule="positional",
            period=period,
            floor=floor,
        )
        for floor in range(1, layers)
        for period in FALLS
    ]


def quantiles(profile: Profile, count: int) -> list[OperatingPoint]:
    """EMAD with τ_ℓ = q-quantile of H_ℓ, at ``count`` values of q between 0 and 1, both ends left out."""
    return [profile.point(quantile=float(q)) for q in np.linspace(0.0, 1.0, count + 2)[1:-1]]


def by_quantile(signal: Signal, calibration: Trace, probes: Sequence[int], count: int) -> list[OperatingPoint]:
    """A signal of one layer with τ_ℓ its own quantile there on calibration text: at every probe as many tokens pass.

    At ``count`` shares of tokens that pass: half of them in equal steps up to 1, under which every token leaves at the
    first probe, the others in equal ratios below the first step, down to one token of the text.

    Raises:
        BadArgument: a signal that the trace does not hold.
    """
    column = calibration.column(signal.name)[:, np.asarray(probes, dtype=np.int64) - 1].astype(np.float64)
    coarse = np.linspace(0.0, 1.0, count - count // 2 + 1)[1:]
    least = min(1 / len(calibration), float(coarse[0]) / 2)
    shares = (*np.geomspace(least, coarse[0], count // 2 + 1)[:-1], *coarse)
    return [
        OperatingPoint(
            name=f"{signal.name.replace('_', ' ')} p={share:.3g}",
            family=f"{signal.name} quantile",
            layers=calibration.layers,
            ceiling=calibration.layers,
            probes=tuple(probes),
            thresholds=(tuple(map(float, np.quantile(column, share if falls else 1 - share, axis=0))),),
            signal=signal.name,
        )
        for falls in [signal.sense == "falls"]
        for share in map(float, shares)
    ]
