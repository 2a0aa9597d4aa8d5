"""Work that is under- or overcounted, or done beside what is counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.step import StepOutput
from emad_ref.mutants.base import MutantSession, session_factory
from emad_ref.mutants.depths import DECISIONS
from emad_ref.mutants.keys import ROLLBACK
from emad_ref.mutants.mutant import Mutant, NotPlantable
from emad_ref.record import Ints, Work

WITNESS = "invariants/test_apart.py::test_counted_work_is_the_work_that_runs"


class MiscountingSession(MutantSession):
    """``seen_as``: what is said of the work that was done."""

    @property
    def work(self) -> Work:
        return self.seen_as(super().work)

    def seen_as(self, work: Work) -> Work:
        return work


class ProbesFree(MiscountingSession):
    """Readouts of probes are left out: as many remain as there are tokens of the last one's depth."""

    def seen_as(self, work: Work) -> Work:
        return replace(work, readout_rows=np.zeros_like(work.readout_rows))


class ContextFree(MiscountingSession):
    """Attention is charged for the new keys alone."""

    def seen_as(self, work: Work) -> Work:
        return replace(work, context=np.minimum(work.context, work.tokens))


class BlocksHalved(MiscountingSession):
    def seen_as(self, work: Work) -> Work:
        return replace(work, tokens=work.tokens // 2)


class BlocksDoubled(MiscountingSession):
    """What full depth costs looks dearer than it is: whoever saves, saves twice."""

    def seen_as(self, work: Work) -> Work:
        return replace(work, tokens=work.tokens * 2, context=work.context * 2)


class ForgetsWhatWasRolledBack(MutantSession):
    def rollback(self, length: Ints) -> None:
        for trail, kept in zip(self._trail, length.tolist(), strict=True):
            for depth in trail[kept:]:
                self._store.work.tokens[:depth] -= 1
        super().rollback(length)


class AllLayersThenRoute(MutantSession):
    """All layers run for every token; what the rule leaves out is not counted."""

    def advance(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        stepper = self._stepper
        if stepper.geometry.encoder_layers:
            raise NotPlantable("blocks that read a source do not run beside a session")
        frame = stepper.frame(np.tile(np.arange(ids.shape[1]), (len(ids), 1)), None)
        stepper.run(stepper.embed(ids, frame), 0, stepper.layers, frame, None)
        return super().advance(ids, forced, last)


class ReadsEveryLayer(MutantSession):
    """The head reads as often as there are layers, whatever the rule asks for."""

    def advance(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        stepper = self._stepper
        states = torch.ones(len(ids), stepper.geometry.hidden, dtype=stepper.dtype, device=stepper.device)
        for _ in range(2 * stepper.layers):
            stepper.logits(states)
        return super().advance(ids, forced, last)


class ContextDoubled(MiscountingSession):
    """Attention is charged twice."""

    def seen_as(self, work: Work) -> Work:
        return replace(work, context=work.context * 2)


class ContextOfFullDepthDoubled(MiscountingSession):
    """The same at full depth alone, so that exits seem to save more."""

    def seen_as(self, work: Work) -> Work:
        return replace(work, context=work.context * 2) if self._point.fixed else work


class BatchesDoubled(MiscountingSession):
    """Blocks of several rows are counted four times over."""

    def seen_as(self, work: Work) -> Work:
        rows = len(self._trail)
        return work if rows == 1 else replace(work, tokens=work.tokens * 4, context=work.context * 4)


class SourceOfNothing(MiscountingSession):
    """An encoder is charged that the model does not have, or a second time."""

    def seen_as(self, work: Work) -> Work:
        return replace(work, encoder_tokens=2 * work.encoder_tokens + 1)


COUNTED = r"work|runs of|counts"
COSTS = "invariants/test_fields.py::test_the_same_tokens_cost_the_same_at_every_point"
FAR_DECISIONS = "invariants/test_positions.py::test_decisions_are_the_rules_far_into_the_window"

PLANTED = (
    Mutant(
        "work-of-probes-left-out",
        "work",
        "readouts are free of charge",
        session_factory(ProbesFree),
        DECISIONS,
        COUNTED,
    ),
    Mutant(
        "work-of-context-left-out",
        "work",
        "attention is charged for the new keys alone",
        session_factory(ContextFree),
        DECISIONS,
        COUNTED,
    ),
    Mutant("work-halved", "work", "half of the blocks are counted", session_factory(BlocksHalved), DECISIONS, COUNTED),
    Mutant("work-doubled", "work", "blocks are counted twice", session_factory(BlocksDoubled), DECISIONS, COUNTED),
    Mutant(
        "work-of-rollbacks-forgotten",
        "work",
        "rolled-back tokens are taken off the bill",
        session_factory(ForgetsWhatWasRolledBack),
        ROLLBACK,
        r"work fell",
    ),
    Mutant(
        "work-all-layers-then-route",
        "work",
        "all layers run, and a router is applied afterwards",
        session_factory(AllLayersThenRoute),
        WITNESS,
        r"layer \d+ ran for .* but its record counts",
    ),
    Mutant(
        "work-head-at-every-layer",
        "work",
        "the head reads twice as often as there are layers",
        session_factory(ReadsEveryLayer),
        WITNESS,
        r"the head ran for .* but its record counts",
    ),
    Mutant(
        "work-of-context-doubled",
        "work",
        "attention is charged twice",
        session_factory(ContextDoubled),
        FAR_DECISIONS,
        r"work\.context per layer .* keys each imply at most",
    ),
    Mutant(
        "work-of-full-depth-doubled",
        "work",
        "attention is charged twice at full depth",
        session_factory(ContextOfFullDepthDoubled),
        COSTS,
        r"layer 1 counts \d+ keys at full depth, but",
    ),
    Mutant(
        "work-of-batches-doubled",
        "work",
        "blocks of several rows are counted four times over",
        session_factory(BatchesDoubled),
        DECISIONS,
        r"work\.tokens per layer .* imply at most",
    ),
    Mutant(
        "work-of-no-source",
        "work",
        "an encoder is charged that the model does not have",
        session_factory(SourceOfNothing),
        COSTS,
        r"work\.encoder_tokens counts",
    ),
)
