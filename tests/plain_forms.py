"""Plain forms of what the reference computes fast, to compare with."""

from __future__ import annotations

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.exit_rules import first_firing_probe
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints, Work
from emad_ref.replay.replay import compute_decode_work


def monotone_depths_from_signal(signal: Floats, thresholds: Floats, probes: Ints, ceiling: int) -> Ints:
    """Depths [n] of one sequence under ``monotone``: the running minimum of first fires.

    ``signal`` [n, probes] complete (NaN never fires); ``thresholds`` [probes] or [n, probes].
    """
    return np.minimum.accumulate(first_firing_probe(signal <= thresholds, probes, ceiling))


def decode_and_prompt_work(
    trace: Trace, point: OperatingPoint, depth: Ints, macs_per_row: int = 0
) -> tuple[Work, Work]:
    """(decode, prompt) Work of decoding every sequence alone, token by token, at ``depth`` [tokens].

    The prompt before the last position is one forward at the ceiling: n positions against n keys each.
    """
    return compute_decode_work(trace, depth, point, macs_per_row), compute_prompt_work(trace.first_decided, point)


def compute_prompt_work(first_decided: Ints, point: OperatingPoint) -> Work:
    """Work of prompts, ``first_decided`` [sequences] positions each, in one forward at the ceiling."""
    work = Work.none(point.layers)
    work.tokens[: point.ceiling] = int(first_decided.sum())
    work.context[: point.ceiling] = int((first_decided**2).sum())
    return work
