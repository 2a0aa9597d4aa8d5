"""EMAD as published beside itself with one part exchanged: what each part costs on this model.

    readout         the exit's tuned lens for the model's own head, and a profile calibrated through it
    criterion       an oracle that knows the divergence, and pays nothing for it, for the entropy profile
    monotone rule   depth that may rise again, K and V filled in above exits, for depth that only falls
    K/V             of the exit itself: exact states above it for those that it copies or translates

Where two parts fail, neither exchange alone saves anything. So each part is exchanged among the others' better ones,
too: the way in which all are exchanged, beside the same with EMAD's own part put back.

Every way of decoding is set to lose at most 1 % of perplexity: rules on validation text, so that text not seen yet
confirms it (``screening.choosing``), the oracle on the text judged itself. One of which no setting does is full depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from emad_ref.calibration.profile import Profile, profile_of
from emad_ref.calibration.trace import take_trace
from emad_ref.evidence.beyond import JUDGED, Beyond
from emad_ref.evidence.traces import Traces
from emad_ref.point import OperatingPoint
from emad_ref.screening.families import LENS, OWN, Family
from emad_ref.screening.reached import replayed_columns
from emad_ref.sweep.ceilings import FREE, Curve
from emad_ref.sweep.grids import Dial, margins
from emad_ref.verdict.spending import Spent

EMAD = "EMAD as published"


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
        """Readout, criterion and rule of EMAD, each alone; and K/V of the exit, where it fills any in."""
        own, lens = margins(self._traces.profile), self._through_the_lens(margins(self._profile))
        emad = self._best(Family(EMAD, OWN, "monotone", (own,)))
        ways = {
            "readout": self._best(Family("EMAD through the tuned lens", LENS, "monotone", (lens,))),
            "criterion": self._oracle(self._beyond.curves[-1]),
            "monotone rule": self._best(Family("EMAD, free depth", OWN, "free", (_free(own),))),
        }
        found = [Exchange(f"{part} alone", emad, after) for part, after in ways.items()]
        return [*found, *self._put_back(lens), *self._kept_exact()]

    def _put_back(self, profiled: Dial) -> list[Exchange]:
        """All parts exchanged, beside the same with one of EMAD's; ``profiled``: its criterion, through the lens."""
        best, falling, own, _ = map(self._oracle, self._beyond.curves)
        family = Family("EMAD's criterion through the tuned lens, free depth", LENS, "free", (_free(profiled),))
        ways = {"readout": own, "criterion": self._best(family), "monotone rule": falling}
        return [Exchange(f"{part}, all others exchanged", before, best) for part, before in ways.items()]

    @cached_property
    def _profile(self) -> Profile:
        """EMAD's, of the same calibration text and probes, read through the lens."""
        subject, lens = self._subject, self._beyond.exit.fitted.lens
        known = tuple(probe for probe in self._traces.profile.probes if probe in lens.translators)
        trace = take_trace(
            subject.stepper,
            subject.sequences("calibrate", subject.budget.calibrate),
            lens=lens.digest,
            progress=f"{subject.name}: calibrate, {subject.corpus}, through the lens",
            file=subject.bars(),
        )
        return profile_of(
            trace,
            known,
            model=subject.name,
            fingerprint=subject.fingerprint,
            corpus=subject.corpus,
            dtype=subject.dtype,
        )

    def _through_the_lens(self, dial: Dial) -> Dial:
        digest = self._beyond.exit.fitted.lens.digest
        return replace(dial, point=lambda setting: replace(dial.point(setting), lens=digest))

    def _best(self, family: Family) -> Spent:
        return self._replayed(family.name, self._beyond.chooser.best(family, JUDGED))

    def _replayed(self, name: str, point: OperatingPoint | None) -> Spent:
        """``point`` on the evaluated text; full depth under this name where there is none."""
        if point is None:
            return replace(self._beyond.full.full, name=f"{name}, which no setting keeps within {JUDGED:.0%}")
        columns = replayed_columns(self._beyond.evaluated, [point], self._subject.loaded.geometry)
        return self._beyond.spent(f"{name}, {point.name}", columns, 1)

    def _oracle(self, curve: Curve) -> Spent:
        beyond = self._beyond
        return beyond.spent(beyond.named(curve), curve.columns, beyond.within(curve, JUDGED))

    def _kept_exact(self) -> Iterator[Exchange]:
        exact, chosen = self._beyond.exact, self._beyond.chosen
        if exact is not None and chosen is not None and exact is not self._beyond.point:
            yield Exchange("K/V", chosen, self._replayed("the exit", exact))


def _free(dial: Dial) -> Dial:
    return replace(dial, point=lambda setting: replace(dial.point(setting), schedule=FREE))
