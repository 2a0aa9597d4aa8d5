"""Depths, signals and rules: rising depth, exits that follow neighbours, other thresholds, probes and signals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.step import AdaptiveForward, StepOutput
from emad_ref.models.kv_cache import LayerKVCache
from emad_ref.mutants.base import MutantDecoder, MutantSession, UncheckedCache, decoder_factory, session_factory
from emad_ref.mutants.keys import FORCED, ROLLBACK
from emad_ref.mutants.mutant import Mutant, NotPlantable
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.probes.signal_values import ProbeOutput
from emad_ref.protocol import InadmissibleDepth, Prompt, Step
from emad_ref.record import Ints, Work
from emad_ref.schedule.interface import Admission
from emad_ref.signals import SIGNALS

DECISIONS = "invariants/test_depth.py::test_signals_depths_and_ledger_are_the_rules"
ROWS = "invariants/test_depth.py::test_rows_of_a_batch_decide_alone"
GENERATED = "fidelity/test_bridge.py::test_generated_tokens_are_the_argmax_at_their_depths"
PLACE = r"row \d, position \d+, depth \d+.*: "


class Rising(MutantSession):
    """Every token may go to the ceiling, over K/V that were never written."""

    def keeper(self, number: int, rows: int, capacity: int) -> LayerKVCache:
        return UncheckedCache(number, rows, capacity)

    def _admissions(self, length: Ints | None = None) -> list[Admission]:
        return [Admission(self._point.ceiling) for _ in self._trail]


class RisingBehindAFalseCap(Rising):
    @property
    def cap(self) -> Ints:
        return np.array([trail[-1] if trail else self._point.ceiling for trail in self._trail])


class AcceptsRising(MutantSession):
    """Any depth that the model has is run."""

    def keeper(self, number: int, rows: int, capacity: int) -> LayerKVCache:
        return UncheckedCache(number, rows, capacity)

    def _checked_depth(self, depth: Ints, shape: tuple[int, ...]) -> Ints:
        if ((depth < 1) | (depth > self._point.ceiling)).any():
            raise InadmissibleDepth(f"depth={depth.tolist()}, but expected 1–{self._point.ceiling}")
        return depth


class LateRefusalSession(MutantSession):
    """An inadmissible depth is refused once the first row has been fed."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        try:
            return super().feed(tokens, depth, last)
        except InadmissibleDepth:
            self._trail[0].append(1)
            raise


class RefusesTheCap(MutantSession):
    """Depths have to be below the cap, and not at most it."""

    def _checked_depth(self, depth: Ints, shape: tuple[int, ...]) -> Ints:
        if (depth[:, 0] >= self.cap).any() and (self.cap > 1).all():
            raise InadmissibleDepth(f"depth={depth.tolist()}, but expected less than {self.cap.tolist()}")
        return super()._checked_depth(depth, shape)


class ExitsTogether(MutantSession):
    """From ``least`` rows on all leave where the first of them does; each signal is reported as it was read."""

    least: ClassVar[int] = 2

    def advance(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        if forced is not None or len(ids) < self.least or ids.shape[1] > 1:
            return super().advance(ids, forced, last)
        held = self.length
        said = super().advance(ids, None, last)
        for trail, kept in zip(self._trail, held.tolist(), strict=True):
            del trail[kept:]
        self._store.cache.truncate(held)
        shallowest = np.full_like(said.depth, said.depth.min())
        ran = super().advance(ids, shallowest, last)
        above = np.array(self._point.probes) > shallowest[..., None]
        return replace(ran, signal=np.where(above, np.nan, said.signal), cap=said.cap)


class FourExitTogether(ExitsTogether):
    least = 4


class FiveExitTogether(ExitsTogether):
    least = 5


class ClaimsShallower(MutantSession):
    """Every token that can be is said to have stopped a layer before it did."""

    def advance(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        arrival = super().advance(ids, forced, last)
        if forced is not None:
            return arrival
        claimed = np.maximum(arrival.depth - 1, 1)
        for trail, depths in zip(self._trail, claimed.tolist(), strict=True):
            trail[-len(depths) :] = depths
        return replace(arrival, depth=claimed)


class ShowsFullDepth(MutantSession):
    """Full-depth logits are shown under the shallow depths that the rule chose, wherever ``shows`` says so."""

    def __init__(self, walker: Any, prompts: Sequence[Prompt], capacity: int):
        super().__init__(walker, prompts, capacity)
        deep = AdaptiveForward(walker.stepper, full_depth(walker.stepper.layers))
        self.deep, self.feeding = MutantSession(deep, prompts, capacity), False

    def shows(self) -> bool:
        return True

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        self.feeding = True
        return super().feed(tokens, depth, last)

    def _run_prompts(self, heads: Any, lengths: Ints) -> Tensor:
        self.deep._run_prompts(heads, lengths)
        return super()._run_prompts(heads, lengths)

    def advance(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        arrival = super().advance(ids, forced, last)
        full = self.deep.advance(ids, np.full(ids.shape, self._stepper.layers), last)
        return replace(arrival, logits=full.logits) if self.shows() else arrival

    def rollback(self, length: Ints) -> None:
        super().rollback(length)
        self.deep.rollback(length)

    def drop(self, rows: Ints) -> None:
        super().drop(rows)
        self.deep.drop(rows)


class ShowsFullDepthInGenerate(ShowsFullDepth):
    def shows(self) -> bool:
        return not self.feeding


class Misreading(MutantDecoder):
    """``misread``: what is taken for the signal of the rows at a probe."""

    def prepare(self) -> None:
        watch = self._walker.watch
        see = watch.see

        def misread(hidden: Tensor, probe: int, work: Work) -> ProbeOutput:
            seen = see(hidden, probe, work)
            return replace(seen, signal=self.misread(seen.signal, hidden))

        watch.see = misread  # type: ignore[method-assign]  # of this one watch

    def misread(self, signal: Tensor, hidden: Tensor) -> Tensor:
        return signal


class InBits(Misreading):
    def misread(self, signal: Tensor, hidden: Tensor) -> Tensor:
        return signal / math.log(2)


class WithoutNorm(Misreading):
    def misread(self, signal: Tensor, hidden: Tensor) -> Tensor:
        head = self.stepper.unembedding
        if head.shape[1] != hidden.shape[1]:
            raise NotPlantable("states are projected before the head: they cannot be read without it")
        return SIGNALS[self.point.signal].of(hidden @ head.T)


class FirstRowForAll(Misreading):
    def misread(self, signal: Tensor, hidden: Tensor) -> Tensor:
        return signal[:1].expand(len(signal)).clone()


class AnotherRule(MutantDecoder):
    """The walker decides by another point than the one asked for."""

    def prepare(self) -> None:
        if self.point.probes:
            self._walker.point = self.rule(self.point)

    def rule(self, point: OperatingPoint) -> OperatingPoint:
        return point


class Looser(AnotherRule):
    """A margin that nobody asked for."""

    def rule(self, point: OperatingPoint) -> OperatingPoint:
        return replace(point, thresholds=tuple(tuple(one + 0.5 for one in row) for row in point.thresholds))


class UnreadSignals(MutantSession):
    """Signals are not reported."""

    def advance(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        arrival = super().advance(ids, forced, last)
        return replace(arrival, signal=np.full_like(arrival.signal, np.nan))


class ProbeLater(MutantDecoder):
    """Probes are read a layer later than asked for."""

    def prepare(self) -> None:
        layers, probes = self.point.layers, self.point.probes
        if not probes:
            return
        if probes[-1] + 1 >= layers or any(a + 1 in probes for a in probes):
            raise NotPlantable("probes leave no layer between them")
        late = replace(self.point, probes=tuple(probe + 1 for probe in probes))
        self._walker = AdaptiveForward(self.stepper, late)


class CapKeptSession(MutantSession):
    def rollback(self, length: Ints) -> None:
        caps = self.cap.tolist()
        super().rollback(length)
        for trail, cap in zip(self._trail, caps, strict=True):
            trail[-1] = min(trail[-1], cap)


class NotANumber(MutantSession):
    """The second step and all after it show NaN."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        return replace(step, logits=np.full_like(step.logits, np.nan))


class WithoutAnAxis(MutantSession):
    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        return replace(step, logits=step.logits[:, -1])


class AnotherRowsAnswer(MutantSession):
    def advance(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        arrival = super().advance(ids, forced, last)
        return replace(arrival, logits=torch.roll(arrival.logits, 1, 0))


PLANTED = (
    Mutant(
        "depth-rises",
        "depth",
        "every token may go to the ceiling again",
        session_factory(Rising),
        DECISIONS,
        r"depth must not rise|cap",
    ),
    Mutant(
        "depth-rises-unsaid",
        "depth",
        "the same, while the cap is reported as if it held",
        session_factory(RisingBehindAFalseCap),
        DECISIONS,
        r"depth must not rise",
    ),
    Mutant(
        "depth-forced-up",
        "depth",
        "a forced depth above the cap is accepted",
        session_factory(AcceptsRising),
        FORCED,
        r"depth .* accepted under cap",
    ),
    Mutant(
        "depth-refused-late",
        "depth",
        "an inadmissible depth is refused after a row was fed",
        session_factory(LateRefusalSession),
        FORCED,
        r"was refused, but length or cap changed",
    ),
    Mutant(
        "depth-cap-refused",
        "depth",
        "the cap itself is refused",
        session_factory(RefusesTheCap),
        FORCED,
        r"admissible depth .* refused",
    ),
    Mutant(
        "depth-claimed-shallower",
        "depth",
        "tokens are said to have stopped a layer before they did",
        session_factory(ClaimsShallower),
        DECISIONS,
        PLACE,
    ),
    Mutant(
        "depth-unearned",
        "depth",
        "logits of full depth under the depths of the rule",
        session_factory(ShowsFullDepth),
        DECISIONS,
        rf"{PLACE}logits off by",
    ),
    Mutant(
        "depth-unearned-in-generate",
        "depth",
        "the same, in generate alone",
        session_factory(ShowsFullDepthInGenerate),
        GENERATED,
        rf"{PLACE}emitted \d+, but the argmax",
    ),
    Mutant(
        "depth-cap-after-rollback",
        "depth",
        "rollback does not restore the cap",
        session_factory(CapKeptSession),
        ROLLBACK,
        r"after rollback.*cap",
    ),
    Mutant(
        "batch-exits-together",
        "batch",
        "all rows leave where the first does",
        session_factory(ExitsTogether),
        ROWS,
        rf"{PLACE}.*but alone depth|rule gives depth",
    ),
    Mutant(
        "batch-exits-together-from-4",
        "batch",
        "the same from four rows on",
        session_factory(FourExitTogether),
        ROWS,
        rf"{PLACE}.*but alone depth|rule gives depth",
    ),
    Mutant(
        "batch-exits-together-from-5",
        "batch",
        "the same from five rows on",
        session_factory(FiveExitTogether),
        ROWS,
        rf"{PLACE}.*but alone depth|rule gives depth",
    ),
    Mutant(
        "batch-first-row's-signal",
        "batch",
        "every row decides by the first one's signal",
        decoder_factory(FirstRowForAll),
        DECISIONS,
        rf"{PLACE}signal off by",
    ),
    Mutant(
        "batch-answers-shifted",
        "batch",
        "answers come back one row off",
        session_factory(AnotherRowsAnswer),
        FORCED,
        rf"{PLACE}logits off by",
    ),
    Mutant(
        "rule-signal-in-bits",
        "rule",
        "the signal is in bits, the threshold in nats",
        decoder_factory(InBits),
        DECISIONS,
        rf"{PLACE}signal off by",
    ),
    Mutant(
        "rule-signal-without-norm",
        "rule",
        "probes read the state before the last norm",
        decoder_factory(WithoutNorm),
        DECISIONS,
        rf"{PLACE}signal off by",
    ),
    Mutant(
        "rule-threshold-looser",
        "rule",
        "thresholds are half a nat too high",
        decoder_factory(Looser),
        DECISIONS,
        rf"{PLACE}the rule gives depth",
    ),
    Mutant(
        "rule-probe-later", "rule", "probes are read one layer too late", decoder_factory(ProbeLater), DECISIONS, PLACE
    ),
    Mutant(
        "rule-signals-unread",
        "rule",
        "no signal is reported",
        session_factory(UnreadSignals),
        DECISIONS,
        r"a signal that the rule compares was not read",
    ),
    Mutant("arrays-nan", "arrays", "logits are NaN", session_factory(NotANumber), FORCED, r"logits off by nan"),
    Mutant("arrays-shape", "arrays", "logits lack an axis", session_factory(WithoutAnAxis), FORCED, r"shape"),
)
