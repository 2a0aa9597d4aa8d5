"""What would work on this model instead: an exit, brought or found in this run, and what its rows need, taken once.

The exit brings its lens, and with it goes on whatever of the model decodes. Text is the run's own: what criteria save
and lose is shown on its evaluation split, which nothing was fitted or chosen on, wherever the exit was made, as long as
the splits of a corpus are the same everywhere.

An exit is judged as it decodes: with our own decoder token by token, K and V filled in as its point says. A decoder of
somebody else is judged at the exit only where it opens at it, and replay speaks for it there: a point names its lens,
which is no part of the model that crosses a wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from emad_ref.calibration.trace import EmptyCorpus, TokenSequence, take_trace
from emad_ref.errors import BadArgument
from emad_ref.evidence.bridging import Bridging
from emad_ref.evidence.traces import Traces
from emad_ref.point import OperatingPoint
from emad_ref.record import Floats
from emad_ref.screening.bounded import excess
from emad_ref.screening.exit import Exit
from emad_ref.screening.exit_file import load_exit
from emad_ref.screening.families import Family, freed, published, tuned
from emad_ref.screening.reached import Chooser, replayed_columns
from emad_ref.screening.screen import screen
from emad_ref.screening.settings import Settings
from emad_ref.screening.texts import Text, TooLittleText
from emad_ref.screening.traced import Traced
from emad_ref.sweep.ceilings import FREE, LEVELS, Curve, ceiling
from emad_ref.sweep.decoded import decoded_columns
from emad_ref.sweep.grids import evenly
from emad_ref.sweep.losses import Columns
from emad_ref.verdict.spending import Measured, Spent
from emad_ref.verdict.units import ByDocument

OPTION = "--emad-exit"
DOCUMENTS = {"smoke": 200, "standard": 300, "full": 600}  # that finding an exit reads on either side, by budget
SETTINGS = 8  # of each dial, spaced evenly in what they save
REPLAYED = ("monotone", "free_eager", "free_deferred")  # schedules of which a trace says what they lose
JUDGED = 0.01  # rise of perplexity at which slack is told


class Beyond:
    """Of one subject, taken when first asked for and kept.

    Raises:
        BadArgument: the exit that was brought belongs to another model.
        Unsupported: an encoder-decoder model.
    """

    def __init__(self, traces: Traces, bridging: Bridging):
        self._traces, self._bridging, self.subject = traces, bridging, traces.subject

    # ------------------------------------------------------------ the exit

    @property
    def exit(self) -> Exit:
        """Attached to the judge's own model, from which copies lend it to others."""
        assert isinstance(self._found, Exit), "whoever asks has asked what is missing"
        return self._found

    @property
    def missing(self) -> str:
        """Why there is no exit to look at; "" where there is."""
        return "" if isinstance(self._found, Exit) else self._found

    @cached_property
    def _found(self) -> Exit | str:
        """Brought or found; or why neither."""
        subject, path = self.subject, self.subject.study.exit
        if path is not None:
            return self._brought(path)
        documents, seed = DOCUMENTS[subject.budget.name], subject.seed
        asked = Settings(corpus=subject.corpus, data=subject.data, documents=documents, seed=seed)
        try:
            return screen(subject.loaded, asked, progress=True).attach(subject.loaded)
        except (TooLittleText, EmptyCorpus) as error:
            return f"no exit was brought ({OPTION} FILE), and none can be found here: {error}"

    def _brought(self, path: Path) -> Exit:
        loaded = self.subject.loaded
        found = load_exit(path)
        if found.fingerprint != loaded.fingerprint:
            expected = f"an exit of {loaded.name} ({loaded.fingerprint[:12]}…)"
            theirs = f"that one is of a model {found.fingerprint[:12]}…: emad screen {loaded.name}"
            raise BadArgument(OPTION, str(path), expected, theirs)
        return found.attach(loaded)

    @property
    def point(self) -> OperatingPoint | None:
        """The lossy point that screening recommends, or None."""
        return self.exit.lossy

    @property
    def exact(self) -> OperatingPoint | None:
        """The same with exact K and V above exits: what audits hold against the model itself; None without one."""
        point = self.point
        if point is None or point.schedule in REPLAYED:
            return point
        return replace(point, name=f"{point.name}, exact K and V", schedule=FREE, translators=None)

    @cached_property
    def refusal(self) -> str:
        """Why nothing may be said of the decoder under test at the exit; "" where it may.

        Raises:
            Unsupported: it declines the exit's point.
        """
        point = self.point
        if point is None or self.subject.decoder_is_ours:
            return ""
        with self.subject.open(point):
            pass  # it raises where it declines
        if point.schedule not in REPLAYED:
            return f"replay does not speak for a decoder of somebody else under the schedule {point.schedule}"
        finding = self._bridging.bridged(point)
        return "" if finding.passed is not False else f"replay does not speak for this decoder: {finding.detail}"

    # ------------------------------------------------------------ what is judged

    @cached_property
    def evaluated(self) -> Traced:
        """The evaluated text by the model's own head and through the exit's lens, divergences recorded."""
        return self._read(self._traces.evaluated, "evaluate")

    @cached_property
    def validated(self) -> Traced:
        """The same of the text that settings are spaced on."""
        return self._read(self.subject.sequences("validate", self.subject.budget.validate), "validate")

    def _read(self, sequences: Sequence[TokenSequence], split: str) -> Traced:
        fitted, lens = self.exit.fitted, self.exit.fitted.lens.digest
        gate = {} if fitted.gate is None else {fitted.gate: tuple(fitted.lens.translators)}
        named, file = f"{self.subject.name}: {split}, {self.subject.corpus}", self.subject.bars()
        own = take_trace(
            self.subject.stepper, sequences, divergence=True, progress=f"{named}, every readout", file=file
        )
        through = take_trace(
            self.subject.stepper, sequences, lens=lens, estimators=gate, divergence=True,
            progress=f"{named}, through the lens", file=file,
        )  # fmt: skip
        return Traced(Text(tuple(sequences)), own, through)

    @cached_property
    def full(self) -> Measured:
        """Full depth on the evaluated documents, FLOPs as its work."""
        return Measured(self.spent("full depth", self.curves[0].columns, 0), self._tokens)

    @cached_property
    def in_blocks(self) -> Measured:
        """The same, blocks as its work."""
        columns = self.curves[0].columns
        full = Spent("full depth", self._by(columns.nll_nats[:, 0]), self._by(columns.depth[:, 0]))
        return Measured(full, self._tokens)

    @cached_property
    def chosen(self) -> Spent | None:
        """The exit's own point as it decodes, everything charged."""
        if self.point is None:
            return None
        columns = decoded_columns(
            self.subject.stepper, self.subject.loaded.geometry, self._traces.evaluated, [self.point],
            progress=f"{self.subject.name}: decoding at {self.point.name}",
        )  # fmt: skip
        return self.spent(self.point.name, columns, 0)

    @property
    def excess(self) -> ByDocument:
        """[documents] what the exit's point adds to each document's NLL, nats per token, as its guarantee counts it."""
        assert self.chosen is not None, "an exit with a point"
        nll, full = self.chosen.nll_nats, self.full.full.nll_nats
        found = excess(nll.like(nll.values[:, None]), full, self.full.tokens)
        return found.like(found.values[:, 0])

    @cached_property
    def criteria(self) -> list[Spent]:
        """Every family that was screened, each at settings spaced evenly in what it saves on validation."""
        points = [(family, point) for family in self._families for point in self._spaced(family)]
        columns = replayed_columns(self.evaluated, [point for _, point in points], self.subject.loaded.geometry)
        return [
            self.spent(f"{family.readout}, {family.name}, {family.depth}, {point.name}", columns, at)
            for at, (family, point) in enumerate(points, start=1)
        ]

    @property
    def _families(self) -> list[Family]:
        fitted, vocabulary, layers = self.exit.fitted, self.subject.stepper.vocabulary, self.subject.stepper.layers
        own = published(self._traces.profile, vocabulary) + freed(layers, vocabulary)
        return own + ([] if fitted.gate is None else tuned(fitted, vocabulary))

    def _spaced(self, family: Family) -> list[OperatingPoint]:
        along = (evenly(dial, self.chooser.saved, SETTINGS) for dial in family.dials)
        return [*family.points, *(point for points in along for point in points)]

    @cached_property
    def chooser(self) -> Chooser:
        """Of settings, by validation text."""
        return Chooser(self.validated, self.evaluated.text.count, self.subject.loaded.geometry)

    # ------------------------------------------------------------ ceilings

    @cached_property
    def curves(self) -> list[Curve]:
        """Oracles: through the tuned lens before the own head, free depth before monotone."""
        geometry = self.subject.loaded.geometry
        return [
            ceiling(trace, geometry, monotone=monotone)
            for trace in (self.evaluated.tuned, self.evaluated.own)
            for monotone in (False, True)
        ]

    def at_loss(self, curve: Curve, loss: float) -> Spent:
        """Where ``curve`` saves most blocks at a rise of at most ``loss`` on the text judged, blocks as its work."""
        at = self.within(curve, loss)
        nll, depth = (self._by(column[:, at]) for column in (curve.columns.nll_nats, curve.columns.depth))
        return Spent(self.named(curve), nll, depth)

    def named(self, curve: Curve) -> str:
        """What an oracle of ``curves`` reads through, and how it is told."""
        return f"{'tuned lens' if curve in self.curves[:2] else 'own head'}, {curve.name}"

    @staticmethod
    def within(curve: Curve, loss: float) -> int:
        """The place of that setting; 0, full depth, where no other stays within."""
        return int(np.argmin(np.where(curve.rises <= loss, curve.columns.depth.sum(axis=0), np.inf)))

    @property
    def slack(self) -> float:
        """The largest net share of FLOPs that an oracle saves at a rise of ``JUDGED``, its own reading free."""
        return max(self._saved(curve) for curve in self.curves)

    @staticmethod
    def _saved(curve: Curve) -> float:
        flops = np.where(curve.rises <= JUDGED, curve.columns.flops.sum(axis=0), np.inf)
        return float(1 - flops.min() / flops[0])

    @property
    def losses(self) -> tuple[float, ...]:
        """Rises of perplexity at which ceilings are told, ``JUDGED`` first."""
        return tuple(sorted(LEVELS, key=lambda level: (level != JUDGED, level)))

    # ------------------------------------------------------------ by document

    def spent(self, name: str, columns: Columns, at: int) -> Spent:
        """The way at place ``at`` of columns by window of the evaluated text, FLOPs as its work."""
        return Spent(name, self._by(columns.nll_nats[:, at]), self._by(columns.flops[:, at]))

    @property
    def _tokens(self) -> ByDocument:
        return self._traces.by_document(self.evaluated.own.lengths)

    def _by(self, values: Floats) -> ByDocument:
        return self._traces.by_document(values)
