"""Whether replay speaks for the decoder under test, and points at which a decoder gives itself away.

A *bridge* teacher-forces the decoder on a few documents and holds its depths and losses against replay's. Only behind
it do replay's verdicts hold for that decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from random import SystemRandom

import numpy as np

from emad_ref.audit.bridge import bridge
from emad_ref.audit.finding import Finding
from emad_ref.audit.oracle import replayed_by
from emad_ref.calibration.trace import TokenSequence, take_trace
from emad_ref.evidence.subject import Subject
from emad_ref.point import OperatingPoint
from emad_ref.replay import depths

PROBED, PROBED_TOKENS = 12, 32
PROBING_QUANTILES = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005)
NEAR_TIES = 0.003  # share of positions within the tolerance of a threshold that needs no avoiding
BRIDGED = 3  # documents, of at most BRIDGED_TOKENS, on which replay is held against the decoder
BRIDGED_TOKENS = 64
SPOTS, SPOT_TOKENS = 6, 12  # sequences of each kind that are checked again, and tokens: depth comes down at once
LARGEST_NATS = float(np.finfo(np.float32).max)  # a threshold that every signal passes
NEVER_NATS = -1.0  # a threshold that no entropy passes


class Bridging:
    """One subject's bridge and probing points, made when first asked for and kept."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self._checked: dict[OperatingPoint, Finding] = {}

    @cached_property
    def probing_point(self) -> OperatingPoint:
        """A point whose depth comes down in many steps on this run's text: for invariants, not for quality.

        Thresholds are quantiles of the model's own entropies. Among a few quantiles it is the one under which short
        documents use half the layers on average, as long as hardly any signal lies so near its threshold that rounding
        decides. Shallow probes, because there depth changes what is emitted.
        """
        short = [replace(s, tokens=s.tokens[:PROBED_TOKENS]) for s in self.subject.sequences("validate", PROBED)]
        trace = take_trace(self.subject.stepper, short)
        layers = self.subject.stepper.layers
        probes = tuple(range(1, layers, max(1, layers // 6)))
        entropy = trace.entropy_nats[:, np.array(probes, dtype=np.int64) - 1]
        candidates = []
        for quantile in PROBING_QUANTILES:
            thresholds = np.quantile(entropy, quantile, axis=0)
            # signals that crowd around any low quantile (entropies near zero) decide by rounding: leave that layer out
            crowded = (np.abs(entropy - thresholds) <= self.subject.tolerance).mean(axis=0) > NEAR_TIES
            thresholds = np.where(crowded, NEVER_NATS, thresholds)
            point = OperatingPoint("probing", "quantile", layers, layers, probes, (tuple(map(float, thresholds)),))
            near = float((np.abs(entropy - thresholds) <= self.subject.tolerance).any(axis=1).mean())
            away = abs(float(depths(trace, point).mean()) - layers / 2)
            candidates.append((max(near, NEAR_TIES), away, quantile, point))
        return min(candidates)[-1]

    @cached_property
    def shallow_point(self) -> OperatingPoint:
        """Every token exits after the first third of the layers: depth matters most, and full-depth tokens show."""
        layers = self.subject.stepper.layers
        return OperatingPoint("shallow", "quantile", layers, layers, (max(1, layers // 3),), ((LARGEST_NATS,),))

    @cached_property
    def bridge(self) -> Finding:
        """Whether replay speaks for the decoder under test."""
        return self.bridged(self.probing_point)

    def bridged(self, point: OperatingPoint) -> Finding:
        """Whether replay of ``point`` speaks for the decoder under test."""
        subject = self.subject
        whole = subject.sequences("evaluate", BRIDGED)[:BRIDGED]
        sequences = [replace(sequence, tokens=sequence.tokens[:BRIDGED_TOKENS]) for sequence in whole]
        replayed = [replayed_by(subject.stepper, sequence, point, subject.tolerance) for sequence in sequences]
        with subject.open(point) as decoder:
            return bridge(decoder, point, replayed, subject.tolerance)

    def spot_checked(self, point: OperatingPoint, *sequences: Sequence[TokenSequence]) -> Finding:
        """The bridge at ``point`` on a few of each kind of ``sequences`` from which a verdict reads by replay.

        The operating system's entropy draws them, and where in each the decoder begins to decide: no seed tells. They
        are drawn once for each point. Ties are counted and excused: the point is not chosen to avoid them, and so few
        positions show no share.
        """
        if point not in self._checked:
            draw, subject = SystemRandom(), self.subject
            chosen = [_cut(draw, one) for kind in sequences for one in draw.sample(kind, min(SPOTS, len(kind)))]
            replayed = [replayed_by(subject.stepper, each, point, subject.tolerance) for each in chosen]
            with subject.open(point) as decoder:
                self._checked[point] = bridge(decoder, point, replayed, subject.tolerance, needed=0, excuses_ties=True)
        return self._checked[point]

    @property
    def refusal(self) -> str:
        """Why nothing may be concluded from replay about this decoder; empty where replay speaks for it."""
        return (
            "" if self.bridge.passed is not False else f"replay does not speak for this decoder: {self.bridge.detail}"
        )


def _cut(draw: SystemRandom, sequence: TokenSequence) -> TokenSequence:
    """``SPOT_TOKENS`` decided positions of ``sequence`` from a drawn place on, or all from its first decided one."""
    first, last = sequence.adaptive_from, len(sequence.tokens) - 1 - SPOT_TOKENS
    start = draw.randint(first, last) if first < last else first
    return replace(sequence, tokens=sequence.tokens[: start + SPOT_TOKENS + 1], adaptive_from=start)
