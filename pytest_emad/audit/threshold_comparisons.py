"""Check the comparison of a signal with its threshold: ≤ at equality, in float32 or wider, threshold by layer.

The check needs no tolerance, because it compares the decoder with itself: the reported signals and the given thresholds
determine the allowed depths. First it reads all signals of some prompts under thresholds that no signal meets. Then it
sets thresholds at which a careless comparison errs, at each probe near the row nearest to firing:

below  the signal misses the threshold slightly; rounded to fewer digits the two are equal, and the token stops
equal  both are the same float32: the token stops, since the rule is ≤ (≥ for signals that rise)
above  the signal meets the threshold slightly; with either rounded the other way the token does not stop

Points that compare entropies name a margin, which their thresholds include already. A decoder that applies it again
stops too late.

Discriminating are the careless comparisons (``CARELESS_COMPARISONS``) that would change some token's depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emad_ref.exit_rules import first_firing_probe
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Decoder, Prompt
from emad_ref.record import DECODE, Floats, Ints
from emad_ref.signals import ENTROPY, SIGNALS
from pytest_emad.audit.finding import Finding, Tally, require_shape

MOST_PROBES = 8
THRESHOLD_STEP = 2.0**-15  # relative to a signal: at least an eighth of float16's spacing, and 256 times float32's
MARGIN_NATS = 0.25  # margin of the label only: a decoder that subtracts it again never stops in time
UNREACHED_THRESHOLD = {"falls": -1.0, "rises": 1e6}  # finite thresholds, which must be read, and which no value meets

DecoderOpening = Callable[[OperatingPoint], AbstractContextManager[Decoder]]
Rounding = Callable[[Any], Any]


def round_float32(values: Floats) -> Floats:
    return np.asarray(values, dtype=np.float32).astype(np.float64)


def round_bfloat16(values: Floats) -> Floats:
    """``values`` rounded to 8 bits, to nearest even."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32)
    return rounded.view(np.float32).astype(np.float64)


# (of the signal, of the threshold, comparison)
Comparison = tuple[Rounding, Rounding, Callable[[Any, Any], Any]]
HONEST_COMPARISONS: tuple[Comparison, ...] = (
    (np.float32, np.float32, np.less_equal),
    (np.float64, np.float64, np.less_equal),
)
CARELESS_COMPARISONS: dict[str, Comparison] = {
    "bfloat16": (round_bfloat16, round_bfloat16, np.less_equal),
    "thresholds in bfloat16": (np.float32, round_bfloat16, np.less_equal),
    "signals in bfloat16": (round_bfloat16, np.float32, np.less_equal),
    "float16": (np.float16, np.float16, np.less_equal),
    "thresholds in float16": (np.float32, np.float16, np.less_equal),
    "signals in float16": (np.float16, np.float32, np.less_equal),
    "< for ≤": (np.float32, np.float32, np.less),
    "the next probe's threshold": (np.float32, lambda row: np.append(row[1:], row[-1]), np.less_equal),
    "the last probe's threshold": (np.float32, lambda row: np.append(row[0], row[:-1]), np.less_equal),
}


def check_threshold_comparisons(
    opened: DecoderOpening,
    layers: int,
    batches: Sequence[Sequence[Prompt]],
    *,
    signal: str = "entropy_nats",
) -> Finding:
    """Check the first decided position of all prompts, through ``start`` and through ``generate``.

    ``opened`` opens the decoder under test at a point. ``batches``: used one after the other, until every careless
    comparison would show.

    Raises:
        Unsupported: the decoder declines the signal.
    """
    tally, power = Tally("comparisons"), np.zeros(len(CARELESS_COMPARISONS), dtype=np.int64)
    probes = tuple(range(1, layers, max(1, -(-(layers - 1) // MOST_PROBES))))
    with tally:
        for prompts in batches:
            unreached = _comparison_point(
                layers, probes, [UNREACHED_THRESHOLD[SIGNALS[signal].sense]] * len(probes), signal
            )
            with opened(unreached) as decoder:
                _, read = _start_depths(decoder, prompts, len(probes))
            tally.require(not np.isnan(read).any(), "a signal that the rule compares was not read")
            for how, thresholds in _near_thresholds(read, signal).items():
                point = _comparison_point(layers, probes, round_float32(thresholds).tolist(), signal)
                with opened(point) as decoder:
                    power += _judge_comparisons(tally, how, point, *_start_depths(decoder, prompts, len(probes)))
                    power += _judge_comparisons(tally, how, point, *_generate_depths(decoder, prompts, len(probes)))
            if power.all():
                break
        tally.discriminating = int((power > 0).sum())
        tally.notes += [
            f"{name} would not have shown" for name, n in zip(CARELESS_COMPARISONS, power, strict=True) if n == 0
        ]
    return tally.to_finding()


def _comparison_point(layers: int, probes: tuple[int, ...], thresholds: Sequence[float], signal: str) -> OperatingPoint:
    """A point of these thresholds. Entropy points are labelled as EMAD's, whose thresholds include the margin."""
    family, margin = ("emad", MARGIN_NATS) if signal == ENTROPY.name else ("quantile", None)
    return OperatingPoint(
        "comparisons", family, layers, layers, probes, (tuple(thresholds),), signal=signal, margin_nats=margin
    )


def _near_thresholds(read: Floats, signal: str) -> dict[str, Floats]:
    """How → thresholds [probes], each near the row of ``read`` [rows, probes] that comes nearest to firing there."""
    falls = SIGNALS[signal].sense == "falls"
    nearest = round_float32(read.min(axis=0) if falls else read.max(axis=0))
    little = np.abs(nearest) * THRESHOLD_STEP * (1 if falls else -1)
    return {"below": nearest - little, "equal": nearest, "above": nearest + little}


def _start_depths(decoder: Decoder, prompts: Sequence[Prompt], probes: int) -> tuple[Ints, Floats]:
    session, step = decoder.start(prompts)
    session.close()
    require_shape("step.signal", step.signal, (len(prompts), 1, probes))
    return np.array(step.depth[:, 0]), np.array(step.signal[:, 0], dtype=np.float64)


def _generate_depths(decoder: Decoder, prompts: Sequence[Prompt], probes: int) -> tuple[Ints, Floats]:
    record = decoder.generate(prompts, 1, frozenset())
    require_shape("record.signal", record.signal, (len(record.tokens), probes))
    first = [int(np.flatnonzero((record.tokens.sequence == row) & (record.tokens.phase == DECODE))[0])
             for row in range(len(prompts))]  # fmt: skip
    return np.array(record.tokens.depth[first]), np.array(record.signal[first], dtype=np.float64)


def _judge_comparisons(tally: Tally, how: str, point: OperatingPoint, depth: Ints, signal: Floats) -> NDArray[np.int64]:
    """Number of tokens that would reveal each careless comparison, after requiring the depths of an honest one."""
    threshold = np.array(point.thresholds[0], dtype=np.float64)
    expected = [_compared_depths(point, signal, threshold, *each) for each in HONEST_COMPARISONS]
    right = np.logical_or.reduce([depth == each for each in expected])
    tally.n += len(depth)
    if not right.all():
        row = int(np.argmin(right))
        at = min(int(depth[row]), int(expected[0][row]))
        which = point.probes.index(at) if at in point.probes else 0
        tally.require(
            False,
            f"row {row}, depth {depth[row]}, but by the signals that it reports the rule gives depth "
            f"{expected[0][row]}: after layer "
            f"{point.probes[which]} it compared {float(signal[row, which])!r} with {float(threshold[which])!r} ({how})",
        )
    careless = CARELESS_COMPARISONS.values()
    return np.array([(_compared_depths(point, signal, threshold, *each) != expected[0]).sum() for each in careless])


def _compared_depths(
    point: OperatingPoint,
    signal: Floats,
    threshold: Floats,
    of_signal: Rounding,
    of_threshold: Rounding,
    compare: Callable[[Any, Any], Any],
) -> Ints:
    """Depths [rows] by one way of comparing; unread signals do not fire."""
    sense = 1.0 if SIGNALS[point.signal].sense == "falls" else -1.0
    fired = compare(sense * of_signal(signal), sense * of_threshold(threshold))
    return first_firing_probe(fired, np.asarray(point.probes, dtype=np.int64), point.ceiling)
