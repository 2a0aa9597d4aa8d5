"""Correct decoders that compute in other ways than the reference, so no suite may complain of them.

Their sums differ in order or precision, and so in rounding. None counts its work. ``tests.mutants.catalogue`` runs all
invariants and fidelity suites on each.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.reference import Sampler
from emad_ref.models.causal import CausalStepper
from emad_ref.models.kv_cache import LayerKVCache, RunningRows
from emad_ref.point import EntropyEstimator, ThresholdBinSpec
from emad_ref.protocol import Decoder, Prompt, Request, Step, Unsupported
from emad_ref.record import Ints, Record, Work
from emad_ref.signals import ENTROPY
from tests.decoders.cached_decoder import CachedDecoder
from tests.mutants.mutant import (
    ALL_SUITES,
    Mutant,
    MutantSession,
    ServingDecoder,
    declare_capabilities,
    make_decoder,
    run_prompts_in_chunks,
)

PAGE, CHUNK = 16, 7  # positions of a page of K/V, tokens of a chunk
REMEMBERED = 64  # prompts of a prefix cache


class UncountedDecoder(ServingDecoder):
    prepare: ClassVar[Any] = staticmethod(declare_capabilities(counted=False))


def make_float64_decoder(request: Request) -> Decoder:
    """All layers, K/V and heads in float64."""
    stepper = CausalStepper(copy.deepcopy(request.model.load().model).double(), backend="walked")
    return UncountedDecoder(
        stepper, request.point, seed=request.seed, max_rows=request.max_rows, temperature=request.temperature
    )


# ---------------------------------------------------------------- rows in reverse order


class ReversedSampler(Sampler):
    """Row r, the r-th from the end here, draws by the numbers of row r."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        super().__init__(rows, temperature, seed)
        self._generators.reverse()


class ReversedSession:
    """A session whose rows lie in reverse order in memory."""

    def __init__(self, session: Any):
        self.session = session

    @property
    def length(self) -> Ints:
        return self.session.length[::-1].copy()  # type: ignore[no-any-return]

    @property
    def cap(self) -> Ints:
        return self.session.cap[::-1].copy()  # type: ignore[no-any-return]

    @property
    def work(self) -> Work:
        return self.session.work  # type: ignore[no-any-return]

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        return reverse_step(self.session.feed(tokens[::-1].copy(), None if depth is None else depth[::-1].copy(), last))

    def deepen(self, length: Ints) -> Step:
        return reverse_step(self.session.deepen(length[::-1].copy()))

    def rollback(self, length: Ints) -> None:
        self.session.rollback(length[::-1].copy())

    def commit(self, length: Ints) -> None:
        self.session.commit(length[::-1].copy())

    def drop(self, rows: Ints) -> None:
        self.session.drop(len(self.session.length) - 1 - np.atleast_1d(rows))

    def close(self) -> None:
        self.session.close()


def reverse_step(step: Step) -> Step:
    return Step(*(getattr(step, part)[::-1].copy() for part in ("logits", "depth", "signal")))


class ReversedDecoder(UncountedDecoder):
    """Batches lie in reverse order in memory."""

    def start(self, prompts: Sequence[Prompt]) -> tuple[Any, Step]:
        session, step = super().start(prompts[::-1])
        return ReversedSession(session), reverse_step(step)

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        session, output = self.start_with_room(prompts[::-1], max_new)
        with torch.inference_mode():
            record = ReversedRequest(self.stepper, self.point, seed=self.seed, max_rows=self.max_rows,
                                     temperature=self.temperature)._decode(
                session, output, prompts[::-1], max_new, stop)  # fmt: skip
        tokens = replace(record.tokens, sequence=len(prompts) - 1 - record.tokens.sequence)
        return replace(record, tokens=tokens, emitted=record.emitted[::-1], stop=record.stop[::-1])


class ReversedRequest(UncountedDecoder):
    sampler = ReversedSampler


# ---------------------------------------------------------------- pages, chunks, a prefix cache


class PagedLayerKVCache(LayerKVCache):
    """K/V in pages of ``PAGE`` positions, which any row may take. Pages that a row gives up are taken again."""

    def __init__(self, number: int, rows: int, capacity: int):
        super().__init__(number, rows, capacity)
        self.pages: list[tuple[Tensor, Tensor]] = []  # keys and values [kv_heads, PAGE, head_dim]
        self.free: list[int] = []
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # pages of each served row

    def write(self, keys: Tensor, values: Tensor, running: RunningRows) -> tuple[Tensor, Tensor]:
        rows, heads, _, width = keys.shape
        found = keys.new_zeros(2, rows, heads, running.keys, width)
        for place, (row, start, end) in enumerate(zip(running.rows, running.starts, running.ends, strict=True)):
            table = self.tables[self._rows.index(row)]
            for at in range(start, end):
                if at // PAGE == len(table):
                    table.append(self._take_page(keys))
                for entries, new in zip(self.pages[table[at // PAGE]], (keys, values), strict=True):
                    entries[:, at % PAGE] = new[place, :, at - start]
            found[:, place, :, :end] = self._gather(table, end)
        self._hold(running)
        return found[0], found[1]

    def row_kv(self, row: int) -> tuple[Tensor, Tensor]:
        place = self._rows.index(row)
        keys, values = self._gather(self.tables[place], self._length[place])
        return keys, values

    def truncate(self, length: Sequence[int]) -> None:
        super().truncate(length)
        for table, held in zip(self.tables, self._length, strict=True):
            self._give_up(table, -(-held // PAGE))

    def keep_rows(self, rows: Sequence[int], numbers: dict[int, int]) -> None:
        kept = set(rows)
        for row, table in zip(self._rows, self.tables, strict=True):
            self._give_up(table, len(table) if row in kept else 0)
        self.tables = [table for row, table in zip(self._rows, self.tables, strict=True) if row in kept]
        super().keep_rows(rows, numbers)

    def _take_page(self, like: Tensor) -> int:
        if not self.free:
            shape = like.shape[1], PAGE, like.shape[3]
            self.free.append(len(self.pages))
            self.pages.append((like.new_zeros(shape), like.new_zeros(shape)))
        return self.free.pop()

    def _give_up(self, table: list[int], kept: int) -> None:
        self.free += table[kept:]
        del table[kept:]

    def _gather(self, table: Sequence[int], end: int) -> Tensor:
        """Keys and values [2, kv_heads, end, head_dim] of the row with ``table``."""
        parts = [torch.cat([self.pages[page][part] for page in table], dim=1)[:, :end] for part in (0, 1)]
        return torch.stack(parts)


class PagedSession(MutantSession):
    cache_type = PagedLayerKVCache


class PagedDecoder(UncountedDecoder):
    session = PagedSession


class ChunkedSession(MutantSession):
    """Reads prompts and feeds in chunks of ``CHUNK`` tokens."""

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        tokens = self._checked_tokens(tokens)
        depth = None if depth is None else self._checked_depth(depth, tokens.shape)
        n = tokens.shape[1]
        shown = n if last is None else last
        steps = []
        for first in range(0, n, CHUNK):
            columns = slice(first, min(first + CHUNK, n))
            visible = min(max(0, columns.stop - (n - shown)), columns.stop - first)
            steps.append(super().feed(tokens[:, columns], None if depth is None else depth[:, columns], visible))
        return Step(*(np.concatenate([getattr(step, part) for step in steps], axis=1)
                      for part in ("logits", "depth", "signal")))  # fmt: skip

    def _run_prompts(self, prefixes: Sequence[Ints], lengths: Ints) -> Tensor:
        return run_prompts_in_chunks(super()._run_prompts, self, prefixes, lengths, CHUNK)


class ChunkedDecoder(UncountedDecoder):
    session = ChunkedSession


class PrefixCachingSession(MutantSession):
    """Takes K/V of the longest common beginning of an earlier prompt; only the rest of a prompt is run."""

    def _run_prompts(self, prefixes: Sequence[Ints], lengths: Ints) -> Tensor:
        known: list[tuple[Ints, list[tuple[Tensor, Tensor]]]] = vars(self._forward).setdefault("known", [])
        stepper, cache, ceiling = self._stepper, self._store.cache, self._point.ceiling
        states: list[Tensor] = []
        for row in np.flatnonzero(lengths > 0).tolist():
            tokens, shared, entries = np.asarray(prefixes[row]), 0, []
            for other, theirs in known:
                most = min(len(other), len(tokens) - 1)
                common = int(np.argmin(np.append(other[:most] == tokens[:most], False)))
                if common > shared:
                    shared, entries = common, theirs
            one = np.array([row])
            if shared:
                running = stepper.prepare_forward(np.arange(shared)[None], cache, rows=one).running
                for layer, (keys, values) in zip(cache.layers, entries, strict=False):
                    layer.write(keys[None, :, :shared], values[None, :, :shared], running)
            inputs = stepper.prepare_forward(np.arange(shared, len(tokens))[None], cache, rows=one)
            hidden = stepper.embed(torch.from_numpy(tokens[None, shared:].copy()), inputs)
            hidden = stepper.run_layers(hidden, 0, ceiling, inputs)
            states.append(hidden.new_zeros(int(lengths.max()), hidden.shape[-1]))
            states[-1][shared : len(tokens)] = hidden[0]
            kept = [tuple(entry.clone() for entry in layer.row_kv(row)) for layer in cache.layers[:ceiling]]
            known.append((tokens.copy(), kept))  # type: ignore[arg-type]  # a pair of clones
            del known[:-REMEMBERED]
            self._trail[row].extend([ceiling] * len(tokens))
        return torch.stack(states)


class PrefixCachingDecoder(UncountedDecoder):
    session = PrefixCachingSession


# ---------------------------------------------------------------- the cached decoder


def make_cached_decoder(request: Request) -> Decoder:
    """``CachedDecoder``, which declines all points but entropy exits whose depth falls."""
    point = request.point
    plain: dict[str, Any] = {
        "schedule": "monotone",
        "signal": ENTROPY.name,
        "estimator": EntropyEstimator(),
        "bins": ThresholdBinSpec(),
    }
    plain |= dict.fromkeys(("period", "floor", "confidence", "decay", "lens", "translators")) | {"interpolate": False}
    if any(getattr(point, name) != value for name, value in plain.items()):
        raise Unsupported(f"{point.name}: only entropy exits, and only falling depth")
    return CachedDecoder(request.model.load().model, point, request.temperature, request.seed)


HONEST = tuple(
    Mutant(f"honest-{name}", "honest", does, make, ALL_SUITES)
    for name, does, make in (
        ("float64", "it computes in float64", make_float64_decoder),
        ("rows-reversed", "batches lie in reverse order", lambda request: make_decoder(ReversedDecoder, request)),
        ("pages-of-16", "K/V lie in pages of 16", lambda request: make_decoder(PagedDecoder, request)),
        ("chunks-of-7", "prompts and feeds are read in sevens", lambda request: make_decoder(ChunkedDecoder, request)),
        ("prefix-cache", "beginnings are kept", lambda request: make_decoder(PrefixCachingDecoder, request)),
        ("row-by-row", "each row has a cache of its own", make_cached_decoder),
    )
)
