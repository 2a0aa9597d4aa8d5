"""Defects where users live: behind long prompts, in large batches, in timed requests, late in a session, in sampling.

As in ``defective``, the cached decoder with one thing wrong. ``PLANTED`` maps the name of each to its decoder, to the
test of the shipped suites that is there for it, and to what that test says.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from emad_ref.protocol import Prompt, Step
from emad_ref.record import DECODE, Floats, Ints, Record
from tests.decoders.cached import CachedDecoder, CachedSession, Memory, Row
from tests.decoders.defective import BatchWideExit, with_session
from tests.decoders.foreign import as_record

TIMED = 64  # tokens of a timed prompt


class PositionsFrom(CachedSession):
    """Positions are one too far from ``first`` on, in prompts and steps alike."""

    first: ClassVar[int] = 64

    def positions(self, row: Row, n: int) -> Tensor:
        positions = super().positions(row, n)
        return positions + (positions >= self.first)


class PositionsFrom128(PositionsFrom):
    first = 128


class LastLayerUnwritten(CachedSession):
    """The last layer holds 40 positions, and no more are written."""

    def run(self, row: Row, hidden: Tensor, layer: int) -> Tensor:
        hidden = super().run(row, hidden, layer)
        if layer == self.point.layers and row.memory.layers[-1] is not None:
            keys, values = row.memory.layers[-1]
            row.memory.layers[-1] = keys[:, :, :40], values[:, :, :40]
        return hidden


class StaleLaterRows(CachedSession):
    """From position 30 on, rows but the first write the K/V of the step before once more."""

    def run(self, row: Row, hidden: Tensor, layer: int) -> Tensor:
        later = hidden.shape[1] == 1 and len(row.tokens) >= 30 and row is not self.rows[0]
        hidden = super().run(row, hidden, layer)
        if later:
            held = row.memory.layers[layer - 1]
            assert held is not None, "just written"
            row.memory.layers[layer - 1] = _repeated(held)
        return hidden


class ShallowPrefill(CachedSession):
    """Prompts over 40 tokens: the upper half of the layers only writes K/V, of what the lower half left."""

    def read(self, row: Row, tokens: Sequence[int]) -> None:
        hidden = self.embed(tokens)
        for layer in range(1, self.point.ceiling + 1):
            after = self.run(row, hidden, layer)
            hidden = after if len(tokens) < 40 or layer <= self.point.ceiling // 2 else hidden


class ExitsAtFour(BatchWideExit):
    """From four rows on all leave where the first of them does."""

    least: ClassVar[int] = 4

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        alone = len(self.rows) < self.least
        return CachedSession.feed(self, tokens, depth, last) if alone else super().feed(tokens, depth, last)


class ExitsAtFive(ExitsAtFour):
    least = 5


class FreesByCurrentCap(CachedSession):
    """Commit of part of a row frees what the cap of now, not that of then, leaves unread."""

    def commit(self, length: Ints) -> None:
        for row in self.rows:
            self.free(row, row.caps[-1])


class ShiftingIndices(CachedSession):
    """Rows are dropped one after the other, by indices that were those of all."""

    def drop(self, rows: Ints) -> None:
        for row in rows:
            del self.rows[min(int(row), len(self.rows) - 1)]


class ReusedLogits(CachedSession):
    """Each step's logits are written where the last ones were."""

    buffer: Floats | None = None

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        if self.buffer is None or self.buffer.shape != step.logits.shape:
            self.buffer = step.logits
        self.buffer[...] = step.logits
        return replace(step, logits=self.buffer)


class LiveLength(CachedSession):
    """``length`` is the session's own array."""

    @property
    def length(self) -> Ints:
        now = np.array([len(row.tokens) for row in self.rows])
        live: Ints = self.__dict__.setdefault("live", now)
        if len(live) != len(now):
            live = self.__dict__["live"] = now
        live[...] = now
        return live


class SharedBuffers(CachedDecoder):
    """K/V belong to the decoder: the next session begins where the last one still is."""

    def start(self, prompts: Sequence[Prompt], generating: bool = False) -> tuple[CachedSession, Step]:
        pool: list[Memory] = self.__dict__.setdefault("pool", [])
        pool += [Memory(self.point.layers) for _ in prompts[len(pool) :]]
        session = self.session(self.model, self.point, len(prompts), generating)
        for row, memory in zip(session.rows, pool, strict=False):
            memory.layers = [None] * self.point.layers
            row.memory = memory
        with torch.inference_mode():
            return session, session.prefill(prompts)


class KeepsForEver(CachedDecoder):
    """No K/V is ever given back."""

    kept: ClassVar[list[Memory]] = []

    def start(self, prompts: Sequence[Prompt], generating: bool = False) -> tuple[CachedSession, Step]:
        session, step = super().start(prompts, generating)
        self.kept.extend(row.memory for row in session.rows)
        return session, step


class NeverCuts(CachedSession):
    """What is rolled back is kept beside the session, in case it were asked for once more."""

    def rollback(self, length: Ints) -> None:
        forgotten = self.__dict__.setdefault("forgotten", [])
        for row, held in zip(self.rows, length, strict=True):
            forgotten += [kv and (kv[0][:, :, held:].clone(), kv[1][:, :, held:].clone()) for kv in row.memory.layers]
        super().rollback(length)


class StaleLate(CachedSession):
    """After 40 steps rows but the first write the K/V of the step before once more."""

    steps = 0

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        self.steps += 1
        for row in self.rows[1:] if self.steps > 40 else []:
            row.memory.layers = [kv and _repeated(kv) for kv in row.memory.layers]
        return step


def _repeated(held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """K and V with the last position as the one before."""
    keys, values = (torch.cat([x[:, :, :-1], x[:, :, -2:-1]], 2) for x in held)
    return keys, values


class LosesTheEdge(CachedSession):
    """A buffer of 128 positions is grown without its last one."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        step = super().feed(tokens, depth, last)
        for row in self.rows:
            if len(row.tokens) == 128:
                row.memory.layers = [kv and _repeated(kv) for kv in row.memory.layers]
        return step


class OneTokenWhereTimed(CachedDecoder):
    """Of prompts as long as timed ones the last token is read, one is emitted, and the record tells of more."""

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        if any(len(prompt.tokens) != TIMED for prompt in prompts):
            return super().generate(prompts, max_new, stop)
        brief = super().generate([Prompt(prompt.tokens[-1:]) for prompt in prompts], 1, stop)
        claimed = super().generate([Prompt(np.zeros(1, dtype=np.int64))], 1, stop)
        assert claimed.work is not None
        table, signals, emitted = [], [], []
        unread, ceiling = np.full(len(self.point.probes), np.nan), self.point.ceiling
        for row, prompt in enumerate(prompts):
            (token,), first = brief.emitted[row], int(np.flatnonzero(brief.tokens.sequence == row)[0])
            depth, fed = int(brief.tokens.depth[first]), [int(prompt.tokens[-1])] + [int(token)] * (max_new - 1)
            table += [(row, at, int(one), ceiling, ceiling, 0) for at, one in enumerate(prompt.tokens[:-1])]
            signals += [unread] * (TIMED - 1)
            for at, one in enumerate(fed):
                table.append((row, TIMED - 1 + at, one, depth, depth if at else ceiling, DECODE))
                signals.append(brief.signal[first])
            emitted.append(np.array([int(token)] * max_new))
        record = as_record(table, signals, emitted, ["length"] * len(prompts))
        return replace(record, work=claimed.work)


class Greedy(CachedDecoder):
    """The temperature is not heard."""

    def draw(self, scaled: Tensor, generator: torch.Generator) -> int:
        return int(scaled.argmax())


class AnotherTemperature(CachedDecoder):
    """Every temperature is 1."""

    def draw(self, scaled: Tensor, generator: torch.Generator) -> int:
        return super().draw(scaled * self.temperature, generator)


class OneSeedForAllRows(CachedDecoder):
    """Every row draws what the first one draws."""

    def generators(self, rows: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(self.seed) for _ in range(rows)]


class SeedIgnored(CachedDecoder):
    """The same draw, whatever the seed."""

    def generators(self, rows: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(row) for row in range(rows)]


class NotReproducible(CachedDecoder):
    """Another draw each time, whatever the seed."""

    def generators(self, rows: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(secrets.randbits(32)) for _ in range(rows)]


@dataclass(frozen=True)
class Planted:
    """``test`` of the suites (module, function, a parameter's value) that is there for it.

    ``says``: a pattern in its complaint.
    """

    decoder: type[CachedDecoder]
    test: tuple[str, ...]
    says: str


FORCED = ("invariants.test_positions", "test_forced_depths_are_obeyed_far_into_the_window", "far")
EDGES = ("invariants.test_positions", "test_forced_depths_are_obeyed_far_into_the_window", "edges")
LATE = ("invariants.test_positions", "test_forced_depths_are_obeyed_late_in_a_session")
SESSIONS = ("invariants.test_depth", "test_sessions_side_by_side_keep_to_themselves")
ROWS = ("invariants.test_depth", "test_rows_of_a_batch_decide_alone")
DECISIONS = ("invariants.test_depth", "test_signals_depths_and_ledger_are_the_rules")
SAMPLING = ("fidelity.test_sampling", "test_tokens_are_drawn_from_the_distribution_at_their_depths")
MEMORY = ("invariants.test_memory", "test_what_is_closed_or_rolled_back_gives_its_memory_back")
LOGITS = r"row \d, position \d+, depth \d+.*: logits off by"

PLANTED: dict[str, Planted] = {
    "positions wrong from 64 on": Planted(with_session(PositionsFrom), FORCED, LOGITS),
    "positions wrong from 128 on": Planted(with_session(PositionsFrom128), FORCED, LOGITS),
    "last layer unwritten from 40 on": Planted(with_session(LastLayerUnwritten), FORCED, LOGITS),
    "stale K/V in later rows": Planted(with_session(StaleLaterRows), FORCED, r"row [12], position \d+.*logits off by"),
    "stale K/V after many steps": Planted(with_session(StaleLate), LATE, r"row [12], position \d+.*logits off by"),
    "a buffer's last position lost": Planted(
        with_session(LosesTheEdge), EDGES, r"row \d, position 1[23]\d.*logits off"
    ),
    "long prompts prefilled shallow": Planted(with_session(ShallowPrefill), FORCED, LOGITS),
    "exits depend on four rows": Planted(with_session(ExitsAtFour), ROWS, r"row \d, position \d+.*but alone depth \d+"),
    "exits depend on five rows": Planted(with_session(ExitsAtFive), ROWS, r"row \d, position \d+.*but alone depth \d+"),
    "five rows of a session exit together": Planted(
        with_session(ExitsAtFive), DECISIONS, r"row \d, position \d+, depth \d+: the rule gives depth"
    ),
    "partial commit frees by the current cap": Planted(
        with_session(FreesByCurrentCap), SESSIONS, r"position \d+, depth \d+, after a rollback to what was committed"
    ),
    "several rows dropped by shifting indices": Planted(
        with_session(ShiftingIndices), SESSIONS, r"after drop: length|after rows \[.*\] were dropped at once"
    ),
    "sessions share buffers": Planted(SharedBuffers, SESSIONS, r"row \d, position \d+"),
    "logits written over": Planted(with_session(ReusedLogits), SESSIONS, r"step\.logits of call \d+ has changed"),
    "length is live": Planted(with_session(LiveLength), SESSIONS, r"session\.length .* has changed"),
    "K/V kept for ever": Planted(KeepsForEver, MEMORY, r"memory grew by \d+ MB over \d+ sessions that were closed"),
    "K/V kept after rollback": Planted(with_session(NeverCuts), MEMORY, r"memory grew by \d+ MB in one session"),
    "greedy in place of sampling": Planted(Greedy, SAMPLING, "it decodes greedily"),
    "another temperature": Planted(AnotherTemperature, SAMPLING, r"temperatures (0\.9|1\.)\d+ fits them best"),
    "one seed for all rows": Planted(OneSeedForAllRows, SAMPLING, r"rows 0 and 1 of one batch drew the same"),
    "seed ignored": Planted(SeedIgnored, SAMPLING, r"seeds \d+ and \d+ drew the same"),
    "not reproducible": Planted(NotReproducible, SAMPLING, r"seed \d+ drew other tokens the second time"),
}
