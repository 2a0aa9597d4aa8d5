"""Plain forms of what the reference computes fast, to compare with."""

from __future__ import annotations

import numpy as np

from emad_ref.calibration.trace import Trace
from emad_ref.exit_rules import first_firing_probe
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats, Ints, Work
from emad_ref.replay.replay import compute_decode_work, compute_prompt_work


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
