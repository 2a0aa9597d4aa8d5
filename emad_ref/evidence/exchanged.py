"""EMAD as published beside itself with one part exchanged, on the text of a run (``sweep.parts``).

Where two parts fail, neither exchange alone saves anything. So each part is exchanged among the others' better ones,
too. K/V are also those of the exit itself: exact states above it for those that it copies or translates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from emad_ref.calibration.profile import Profile, profile_of
from emad_ref.calibration.trace import take_trace
from emad_ref.errors import BadArgument
from emad_ref.evidence.beyond import JUDGED, Beyond
from emad_ref.evidence.traces import Traces
from emad_ref.screening.families import LENS, OWN
from emad_ref.screening.reached import replayed_columns
from emad_ref.sweep.criteria import gate_at
from emad_ref.sweep.parts import EMAD, Readout, Set, exchanges
from emad_ref.verdict.spending import Spent


@dataclass(frozen=True)
class Exchange:
    """``part`` exchanged alone: ``after`` differs from ``before`` in nothing else; FLOPs as their work."""

    part: str
    before: Spent
    after: Spent


class Exchanged:
    """Of one subject and its exit, taken when first asked for and kept."""

    def __init__(self, beyond: Beyond, traces: Traces):
        self._beyond, self._traces, self._subject = beyond, traces, traces.subject

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """Of EMAD, each part alone; of the best combination, each for EMAD's; the exit's K/V for exact ones."""
        return [*self._in_parts(), *self._kept_exact()]

    def _in_parts(self) -> Iterator[Exchange]:
        geometry = self._subject.loaded.geometry
        for each in exchanges(self._own, self._lens, geometry, level=JUDGED):
            before, after = self._spent(each.before), self._spent(each.after)
            if each.back:  # told as a gain, as all others are
                yield Exchange(f"{each.part}, all others exchanged", after, before)
            else:
                among = "alone" if each.before.way == EMAD else "in place of the best combination's"
                yield Exchange(f"{each.part} {among}", before, after)

    @property
    def _own(self) -> Readout:
        beyond = self._beyond
        return Readout(OWN, beyond.validated.own, beyond.evaluated.own, self._traces.profile)

    @property
    def _lens(self) -> Readout:
        beyond, fitted = self._beyond, self._beyond.exit.fitted
        if fitted.gate is None:
            raise BadArgument("exit.gate", None, "an exit with a gate", "screen the model again")
        known = tuple(fitted.lens.translators)
        probes = self._profile.probes
        chosen, _ = gate_at(beyond.validated.tuned, fitted.gate, known, probes)
        judged, gate = gate_at(beyond.evaluated.tuned, fitted.gate, known, probes)
        return Readout(LENS, chosen, judged, self._profile, gate)

    @cached_property
    def _profile(self) -> Profile:
        """EMAD's, of the same calibration text and probes, read through the lens."""
        subject, lens = self._subject, self._beyond.exit.fitted.lens
        trace = take_trace(
            subject.stepper,
            subject.sequences("calibrate", subject.budget.calibrate),
            lens=lens.digest,
            progress=f"{subject.name}: calibrate, {subject.corpus}, through the lens",
            file=subject.bars(),
        )
        return profile_of(
            trace,
            tuple(probe for probe in self._traces.profile.probes if probe in lens.translators),
            model=subject.name,
            fingerprint=subject.fingerprint,
            corpus=subject.corpus,
            dtype=subject.dtype,
        )

    def _spent(self, found: Set) -> Spent:
        name = f"{found.way.name}, {found.point.name}"
        if found.point.fixed:
            name = f"{found.way.name}, which no setting keeps within {JUDGED:.0%}"
        return self._beyond.spent(name, found.columns, 1)

    def _kept_exact(self) -> Iterator[Exchange]:
        exact, chosen = self._beyond.exact, self._beyond.chosen
        if exact is not None and chosen is not None and exact is not self._beyond.point:
            columns = replayed_columns(self._beyond.evaluated, [exact], self._subject.loaded.geometry)
            yield Exchange("K/V", chosen, self._beyond.spent(f"the exit, {exact.name}", columns, 1))
