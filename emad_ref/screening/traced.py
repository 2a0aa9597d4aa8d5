"""Traces of a screening: validation and evaluation text, by the model's own head and through the lens.

Both know the true divergence, for ceilings, and the gate's estimates at every layer of the lens: a gate asked after
fewer layers reads the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from emad_ref.calibration.lens_file import FittedLens
from emad_ref.calibration.trace import Trace, take_trace
from emad_ref.models.loading import Loaded
from emad_ref.point import OperatingPoint
from emad_ref.replay import Ladder, Replay
from emad_ref.screening.texts import Text


@dataclass(frozen=True, eq=False)
class Traced:
    """``text``, and what the model says after every layer of it: ``own`` by its head, ``tuned`` through the lens."""

    text: Text
    own: Trace
    tuned: Trace
    _ladders: dict[object, Ladder] = field(default_factory=dict)

    def replay(self, point: OperatingPoint) -> Replay:
        """``point`` on its trace, which is laid out once for all points that read alike."""
        key = point.lens, point.estimator
        if key not in self._ladders:
            self._ladders[key] = Ladder(self.of(point))
        return self._ladders[key].replay(point)

    def of(self, point: OperatingPoint) -> Trace:
        """The trace that ``point`` is replayed on, which then knows its gate."""
        trace = self.own if point.lens is None else self.tuned
        if point.estimator.kind == "linear" and point.estimator not in trace.estimates:
            (whole,) = (known for known in trace.estimates if known.kind == "linear")
            estimates = {**trace.estimates, point.estimator: trace.estimates[whole]}
            macs = {**trace.macs_per_row, point.estimator: trace.macs_per_row[whole]}
            return replace(trace, estimates=estimates, macs_per_row=macs)
        return trace


def traced(model: Loaded, text: Text, fitted: FittedLens, lens: str, progress: str | None = None) -> Traced:
    """Both traces of ``text``. ``lens``: digest of the fitted lens, attached to the model's stepper."""
    named = {name: None if progress is None else f"{progress}, {name}" for name in ("own head", "tuned lens")}
    gate = {} if fitted.gate is None else {fitted.gate: tuple(fitted.lens.translators)}
    stepper, windows = model.stepper, text.windows
    own = take_trace(stepper, windows, divergence=True, progress=named["own head"])
    tuned = take_trace(stepper, windows, lens=lens, estimators=gate, divergence=True, progress=named["tuned lens"])
    return Traced(text, own, tuned)
