"""Record of a decoder's decisions and executed work. Uses only NumPy, and no clock.

``TokenTable``  one row per processed token: the decisions (depth D_t, cap D_{t-1}, phase).
``Work``        executed work, summed per layer. With a model's geometry it gives FLOPs (``flop_ledger``).
``Record``      both, plus the signals compared and the reason each row stopped.
``TokenLog``    the table and the signals while a decoder runs.

Layers count from 1 to L for users; column ``l - 1`` of a per-layer array belongs to layer ``l``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

PHASES: tuple[str, ...] = ("prompt", "decode", "draft", "verify", "catch_up")
PROMPT, DECODE, DRAFT, VERIFY, CATCH_UP = range(len(PHASES))

READOUTS: tuple[str, ...] = ("full", "topk", "lowrank", "linear", "subset")  # kinds: rows of Work.readout_rows
FILLS: tuple[str, ...] = ("exact", "copied")  # K/V-only passes: from the true state, from a substitute

HEAD = 0  # the head's number among layers, which count from 1

StopReason = Literal["stop token", "length"]


@dataclass(frozen=True)
class TokenTable:
    """One row per processed token, in the order of processing; every column has shape [tokens].

    ``token`` is the token that was fed, ``position`` its place in its sequence (from 0), ``depth`` the number of
    blocks executed for it before its logits were read, ``cap`` the largest depth it was allowed,
    ``phase`` an index into ``PHASES``, ``kept`` whether it is still part of its sequence at the end.
    """

    sequence: Ints
    position: Ints
    token: Ints
    depth: Ints
    cap: Ints
    phase: Ints
    model: Ints
    kept: Bools

    def __len__(self) -> int:
        return len(self.token)

    def select_sequence(self, sequence: int, phase: int | None = None) -> TokenTable:
        """The rows of one sequence (and one phase), in order."""
        chosen = self.sequence == sequence
        if phase is not None:
            chosen &= self.phase == phase
        return TokenTable(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def kept_row_indices(self, sequence: int) -> Ints:
        """Indices of the rows that are still part of one sequence, by their position in it."""
        mine = np.flatnonzero((self.sequence == sequence) & self.kept)
        return mine[np.argsort(self.position[mine], kind="stable")]


@dataclass(frozen=True)
class Work:
    """Executed work of one model, summed per layer; ``count_…`` methods add to the arrays in place.

    Attributes
    ----------
    tokens : int64 [L]
        Rows × positions that ran the whole block.
    context : int64 [L]
        Σ queries × keys of those runs, as executed: padding and masked keys included.
    readout_rows : int64 [len(READOUTS), L]
        Hidden states read out after a layer, probes and final head alike.
    readout_macs : int64 [len(READOUTS), L]
        Multiply-adds of readouts other than full heads, retrieval included. The cost of a readout over part of the
        vocabulary differs by row, so it is counted, not derived. In the row of full heads: those of a tuned lens.
    fills : int64 [len(FILLS), L]
        Hidden states that only wrote K and V.
    fill_macs : int64 [L]
        Multiply-adds of state translators in front of those passes.
    cross_fills : int64 [L]
        Encoder states that wrote cross-attention K and V.
    cross_context : int64 [L]
        Σ queries × source keys of those runs, padding included.
    encoder_tokens : int
        Positions that ran through an encoder.
    encoder_context : int
        Σ queries × keys in one of the encoder's layers.
    """

    tokens: Ints
    context: Ints
    readout_rows: Ints
    readout_macs: Ints
    fills: Ints
    fill_macs: Ints
    cross_fills: Ints
    cross_context: Ints
    encoder_tokens: int = 0
    encoder_context: int = 0

    @staticmethod
    def none(layers: int) -> Work:
        """Zero work of a model with ``layers`` layers."""

        def zeros(*shape: int) -> Ints:
            return np.zeros(shape, dtype=np.int64)

        return Work(
            zeros(layers),
            zeros(layers),
            zeros(len(READOUTS), layers),
            zeros(len(READOUTS), layers),
            zeros(len(FILLS), layers),
            zeros(layers),
            zeros(layers),
            zeros(layers),
        )

    def count_blocks(self, first: int, last: int, rows: int, queries: int, keys: int) -> None:
        """Add layers first+1 … last over ``rows`` × ``queries`` tokens, each against ``keys`` keys."""
        self.tokens[first:last] += rows * queries
        self.context[first:last] += rows * queries * keys

    def count_readout(self, kind: str, layer: int, rows: int, macs: int = 0) -> None:
        """Add ``rows`` states read after ``layer`` by a readout of ``READOUTS``; ``macs`` is a sum over the rows."""
        at = READOUTS.index(kind), layer - 1
        self.readout_rows[at] += rows
        self.readout_macs[at] += macs

    def count_fills(self, kind: str, layer: int, states: int) -> None:
        """Add ``states`` for which ``layer`` wrote only K and V; ``kind`` is one of ``FILLS``."""
        self.fills[FILLS.index(kind), layer - 1] += states

    @property
    def layers(self) -> int:
        return len(self.tokens)

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Work) and all(
            np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays: equal by value, not hashable

    def describe_difference(self, other: Work) -> str:
        """Names of the parts that differ, with both values; empty when equal."""
        parts = ((f.name, np.asarray(getattr(self, f.name)), np.asarray(getattr(other, f.name))) for f in fields(self))
        return "; ".join(f"{n}: {a.tolist()} ≠ {b.tolist()}" for n, a, b in parts if not np.array_equal(a, b))


@dataclass(frozen=True)
class Record:
    """Decisions and executed work of one call of ``generate``.

    Attributes
    ----------
    tokens : TokenTable
        One row per processed token.
    signal : float64 [tokens, probes]
        Values compared with thresholds, before rounding to float32; NaN where no probe was read.
    emitted : list of int64 arrays, one per sequence
        New tokens, the stop token included if one was emitted.
    stop : list of str
        Why each sequence ended: ``"stop token"`` or ``"length"``.
    work : dict of int to Work, or None
        Executed work by the model's index; None: the decoder does not count.
    prompt_work : dict of int to Work, or None
        The part of ``work`` spent on prompt positions before the last.
    """

    tokens: TokenTable
    signal: Floats
    emitted: list[Ints]
    stop: list[StopReason]
    work: dict[int, Work] | None = None
    prompt_work: dict[int, Work] | None = field(default=None)

    def copied(self) -> Record:
        """Copy in plain arrays, so that no value is computed on access or changed later by other code.

        Every column is read, of whatever class this record is.
        """
        tokens = TokenTable(*(np.array(getattr(self.tokens, f.name)) for f in fields(TokenTable)))
        emitted: list[Ints] = [np.array(each) for each in self.emitted]
        works = (_copy_works(self.work), _copy_works(self.prompt_work))
        return Record(tokens, np.array(self.signal), emitted, list(self.stop), *works)


def make_fixed_depth_record(
    prompts: Sequence[Ints], emitted: Sequence[Ints], stop: Sequence[StopReason], depth: int
) -> Record:
    """Record of a decoder that runs ``depth`` layers for each token, reads no probe and counts no work.

    ``prompts`` and ``emitted``: int64 [n] of each row; ``stop``: why it ended. A prompt's last position is a step.
    """
    columns: list[tuple[Ints, Ints, Ints, Ints]] = []  # sequence, position, token, phase
    for row, (prompt, tokens) in enumerate(zip(prompts, emitted, strict=True)):
        fed = np.concatenate([prompt, tokens[:-1]]).astype(np.int64)
        position = np.arange(len(fed), dtype=np.int64)
        phase = np.where(position < len(prompt) - 1, PROMPT, DECODE).astype(np.int64)
        columns.append((np.full(len(fed), row, dtype=np.int64), position, fed, phase))
    sequence, position, token, phase = (np.concatenate(column) for column in zip(*columns, strict=True))
    depths, zeros = np.full(len(token), depth, dtype=np.int64), np.zeros(len(token), dtype=np.int64)
    kept = np.ones(len(token), dtype=np.bool_)
    table = TokenTable(sequence, position, token, depths, depths.copy(), phase, zeros, kept)
    return Record(table, np.empty((len(token), 0)), list(emitted), list(stop))


def _copy_works(works: dict[int, Work] | None) -> dict[int, Work] | None:
    if works is None:
        return None
    # a sum creates a new array of every part
    return {model: Work.none(work.layers) + work for model, work in works.items()}


class TokenLog:
    """``TokenTable`` and signals of a record under construction, of one model or several, in the order of processing.

    A rollback turns ``kept`` off.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._signal: list[Floats] = []
        self._kept: list[bool] = []
        self._held: dict[tuple[int, int], list[int]] = {}  # (sequence, model) → entry of each position in the cache

    def append(self, sequence: int, model: int, token: int, depth: int, cap: int, phase: int, signal: Floats) -> None:
        """The next token of a sequence in one model; ``signal`` [probes]."""
        entries = self._held.setdefault((sequence, model), [])
        self._rows.append((sequence, len(entries), token, depth, cap, phase, model))
        entries.append(len(self._kept))
        self._kept.append(True)
        self._signal.append(signal)

    def extend(
        self, sequence: int, model: int, tokens: Ints, depth: Ints, cap: Ints, phase: Sequence[int], signal: Floats
    ) -> None:
        """The next tokens of a sequence in one model: all [n], ``signal`` [n, probes]."""
        for columns in zip(tokens.tolist(), depth.tolist(), cap.tolist(), phase, signal, strict=True):
            self.append(sequence, model, *columns)

    def relog_deepened_tokens(
        self, sequence: int, model: int, length: int, depth: Ints, cap: Ints, phase: int, signal: Floats
    ) -> None:
        """Log the tokens from position ``length`` on again at a larger depth; mark their earlier rows as not kept."""
        tokens = np.array([self._rows[entry][2] for entry in self._held[sequence, model][length:]], dtype=np.int64)
        self.truncate(sequence, model, length)
        self.extend(sequence, model, tokens, depth, cap, [phase] * len(tokens), signal)

    def truncate(self, sequence: int, model: int, length: int) -> None:
        """Log a rollback: the tokens from position ``length`` on are no longer part of the sequence."""
        entries = self._held[sequence, model]
        for entry in entries[length:]:
            self._kept[entry] = False
        del entries[length:]

    def to_token_table(self) -> TokenTable:
        sequence, position, token, depth, cap, phase, model = np.array(self._rows, dtype=np.int64).T
        return TokenTable(sequence, position, token, depth, cap, phase, model, np.array(self._kept, dtype=bool))

    def to_signal_array(self) -> Floats:
        """[tokens, most probes of any model]; NaN if a model has fewer or read none."""
        widths = {len(values) for values in self._signal}
        widest = max(widths)
        if len(widths) == 1:
            return np.array(self._signal, dtype=np.float64)
        return np.array([np.pad(values, (0, widest - len(values)), constant_values=np.nan) for values in self._signal])
