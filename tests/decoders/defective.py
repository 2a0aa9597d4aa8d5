"""Planted defects: the cached decoder with one thing wrong, and the checks that must catch it.

Each is a mistake somebody has made. ``DEFECTS`` maps its name to the decoder and to the check that is there for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from emad_ref.protocol import InadmissibleDepth, Prompt, Step
from emad_ref.record import Floats, Ints, Record, Work
from tests.decoders.cached import CachedDecoder, CachedSession, Row
from tests.decoders.subject import entropy_nats


class StaleMemory(CachedSession):
    """Rollback forgets the tokens but leaves their K/V in place."""

    def rollback(self, length: Ints) -> None:
        for row, held in zip(self.rows, length, strict=True):
            del row.tokens[held:], row.caps[held + 1 :]


class UncutUpperMemory(CachedSession):
    """Rollback cuts every layer by the same count instead of to the same length."""

    def rollback(self, length: Ints) -> None:
        for row, held in zip(self.rows, length, strict=True):
            cut = len(row.tokens) - int(held)
            row.memory.layers = [
                kv and (kv[0][:, :, : max(kv[0].shape[2] - cut, 0)], kv[1][:, :, : max(kv[1].shape[2] - cut, 0)])
                for kv in row.memory.layers
            ]
            del row.tokens[held:], row.caps[held + 1 :]


class PositionOffByOne(CachedSession):
    """Decoding steps are rotated one position too far."""

    def position(self, row: Row, n: int) -> int:
        return len(row.tokens) + (n == 1)


class RisingDepth(CachedSession):
    """The cap never falls, and the K/V that skipped tokens owe are never written."""

    def next_cap(self, row: Row, depth: int) -> int:
        return self.point.ceiling


class RisingDepthHidden(CachedSession):
    """The rule ignores the cap, while ``cap`` is reported as if it held."""

    def ceiling_of(self, row: Row) -> int:
        return self.point.ceiling


class AcceptsRisingDepth(CachedSession):
    """Any depth the model has is run, over missing K/V if it must be."""

    def admit(self, depth: Ints) -> None:
        if ((depth < 1) | (depth > self.point.ceiling)).any():
            raise InadmissibleDepth(f"depth={depth.tolist()}, but expected 1 to {self.point.ceiling}")


class RefusesTooLate(CachedSession):
    """An inadmissible depth is refused after earlier rows of the batch have been fed."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        if depth is not None and ((depth[:, 0] < 1) | (depth[:, 0] > self.cap)).any():
            with torch.inference_mode():
                self.obey(self.rows[0], int(tokens[0, 0]), 1)
        return super().feed(tokens, depth, last)


class ProbeWithoutNorm(CachedSession):
    """The signal is read from the raw hidden state."""

    def signal(self, hidden: Tensor) -> float:
        return float(entropy_nats(self.head(hidden[0, -1]).numpy()))


class UncountedProbes(CachedSession):
    """Probe readouts are free of charge."""

    def count_readout(self, layer: int, probe: bool) -> None:
        if not probe:
            super().count_readout(layer, probe)


class UncountedContext(CachedSession):
    """Attention is charged for the new keys only."""

    def count_block(self, layer: int, n: int, keys: int) -> None:
        super().count_block(layer, n, n)


class WorkForgottenOnRollback(CachedSession):
    """Rolled-back tokens are taken off the bill."""

    def rollback(self, length: Ints) -> None:
        for row, held in zip(self.rows, length, strict=True):
            for depth in row.caps[held + 1 :]:
                self.work.tokens[:depth] -= 1
        super().rollback(length)


class FullTokens(CachedSession):
    """All layers run and full-depth logits are shown, under the shallow depth the rule chose."""

    def shown(self, row: Row, hidden: Tensor, depth: int) -> Floats:
        tokens, work = row.tokens, self.work
        self.work = Work.none(self.point.layers)
        for layer in range(depth + 1, self.point.layers + 1):
            hidden = self.run(row, hidden, layer)
        self.work = work
        assert row.tokens is tokens
        return self.logits(hidden)


class FullTokensInGenerate(FullTokens):
    """Honest in ``feed``, full-depth tokens on the timed path."""

    def shown(self, row: Row, hidden: Tensor, depth: int) -> Floats:
        return super().shown(row, hidden, depth) if self.generating else CachedSession.shown(self, row, hidden, depth)


class Routed(CachedSession):
    """Every layer runs at every step, routers are applied afterwards, and the blocks above are not counted."""

    def shown(self, row: Row, hidden: Tensor, depth: int) -> Floats:
        work, self.work = self.work, Work.none(self.point.layers)
        deeper = hidden
        for layer in range(depth + 1, self.point.layers + 1):
            deeper = self.run(row, deeper, layer)
        self.work = work
        return super().shown(row, hidden, depth)


class ReadEverywhere(CachedSession):
    """The head reads every layer, whatever the rule asks for."""

    def run(self, row: Row, hidden: Tensor, layer: int) -> Tensor:
        made = super().run(row, hidden, layer)
        self.head(made)
        return made


class WrongRow(CachedSession):
    """Answers come back one row off."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        return Step(np.roll(step.logits, 1, axis=0), step.depth, step.signal)


class DropsTheWrongRow(CachedSession):
    """``drop`` removes the last row instead of the one it was given."""

    def drop(self, rows: Ints) -> None:
        super().drop(np.array([len(self.rows) - 1 - int(row) for row in rows], dtype=np.int64))


class BatchWideExit(CachedSession):
    """All rows leave where the first of them does."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        if depth is not None or len(self.rows) == 1:
            return super().feed(tokens, depth, last)
        kept, counted = [(row.memory.layers[:], len(row.tokens)) for row in self.rows], self.work
        self.work = Work.none(self.point.layers)
        step = super().feed(tokens)
        for row, (layers, length) in zip(self.rows, kept, strict=True):
            row.memory.layers = layers
            del row.tokens[length:], row.caps[length + 1 :]
        self.work = counted
        shallowest = np.full_like(step.depth, step.depth.min())
        obeyed = super().feed(tokens, shallowest)
        signal = np.where(np.array(self.point.probes) > shallowest[..., None], np.nan, step.signal)
        return Step(obeyed.logits, obeyed.depth, signal)


class RollbackKeepsCap(CachedSession):
    """Rollback restores tokens and K/V but not the cap."""

    def rollback(self, length: Ints) -> None:
        caps = self.cap
        super().rollback(length)
        for row, cap in zip(self.rows, caps, strict=True):
            row.caps[-1] = int(cap)


class FreesTooMuch(CachedSession):
    """Commit frees the layer of the cap itself."""

    def commit(self, length: Ints) -> None:
        for row in self.rows:
            top = row.caps[-1] - 1
            row.memory.layers[top:] = [None] * (self.point.layers - top)


def with_session(session: type[CachedSession]) -> type[CachedDecoder]:
    return type(session.__name__, (CachedDecoder,), {"session": session})


class Truncating(CachedDecoder):
    """Three tokens short of what was asked."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        return super().generate(prompts, max_new - 3, stop)


# what only a witness of executed work sees: all they say of themselves is right
AllLayersThenRoute, ReadsEveryLayer = with_session(Routed), with_session(ReadEverywhere)


class DeafToStop(CachedDecoder):
    """Stop tokens are ignored."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        return super().generate(prompts, max_new, frozenset())


DEFECTS: dict[str, tuple[type[CachedDecoder], str]] = {
    "stale K/V after rollback": (with_session(StaleMemory), "rollback"),
    "relative cut of ragged K/V": (with_session(UncutUpperMemory), "rollback"),
    "rollback forgets the cap": (with_session(RollbackKeepsCap), "rollback"),
    "rolled-back work is forgotten": (with_session(WorkForgottenOnRollback), "rollback"),
    "commit frees the cap's layer": (with_session(FreesTooMuch), "rollback"),
    "position off by one": (with_session(PositionOffByOne), "forced"),
    "accepts a rising forced depth": (with_session(AcceptsRisingDepth), "forced"),
    "refuses after feeding": (with_session(RefusesTooLate), "forced"),
    "wrong batch row": (with_session(WrongRow), "forced"),
    "drops the wrong row": (with_session(DropsTheWrongRow), "forced"),
    "depth rises": (with_session(RisingDepth), "decisions"),
    "depth rises behind a false cap": (with_session(RisingDepthHidden), "decisions"),
    "probe without the final norm": (with_session(ProbeWithoutNorm), "decisions"),
    "probes left out of the work": (with_session(UncountedProbes), "decisions"),
    "context left out of the work": (with_session(UncountedContext), "decisions"),
    "full-depth tokens under shallow depths": (with_session(FullTokens), "decisions"),
    "full-depth tokens in generate only": (with_session(FullTokensInGenerate), "generation"),
    "truncated generation": (Truncating, "generation"),
    "stop tokens ignored": (DeafToStop, "generation"),
    "batch-wide exit": (with_session(BatchWideExit), "rows"),
}
