"""The timed path of a model that drafts for itself: ``drafting`` at temperature 0, over the stepper, on the device.

    copy     where the text repeats itself: embed → layers 1 … e                       all copied tokens at once
    draft    elsewhere: embed → layers 1 … e → gate, lens and pruned head              one token a row
    verify   layers e + 1 … L over the states of the run, one pass, and the model's head on all of them
    keep     the prefix of drafts that the model would have emitted, and its own next token; the rest is rolled back

What it emits is what ``WalkedDecoder`` emits at full depth: up to ties of two logits by rounding, which a chunk leaves
otherwise than single steps. Rows draft as long as each would alone and share forwards: one that has stopped is fed its
last token again until the others have, and the surplus is rolled back; where some copy and others draft, all go token
by token. What is executed is counted and recorded as in
``drafting``, but for the draft's head, which is pruned here: of kind ``subset``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.adaptive import Arrival
from emad_ref.decoding.copying import Copies
from emad_ref.decoding.drafting import Drafting, drafting_point
from emad_ref.decoding.walked import WalkedDecoder, WalkedSession
from emad_ref.models.stepper import Stepper
from emad_ref.protocol import Prompt
from emad_ref.readout.drafts import DraftReader
from emad_ref.readout.signals import require_finite
from emad_ref.readout.subset import OwnHeads, full_head
from emad_ref.record import DECODE, DRAFT, PROMPT, VERIFY, Floats, Ints, Record, StopReason, Tokens
from emad_ref.schedule.flow import count_blocks


class DraftingDecoder(WalkedDecoder):
    """A model that drafts for itself as ``drafting`` says; greedy.

    Its sessions are those of a decoder at ``drafting_point(layers)``. A row needs up to ``longest`` positions more than
    prompt + max_new beside others, as in ``drafting.draft``.

    Raises:
        BadArgument: a layer or ids that this model has not, a lens that is not attached, a gate of another width.
    """

    def __init__(self, stepper: Stepper, drafting: Drafting, *, max_rows: int = 1):
        drafting.require(stepper.layers, stepper.vocabulary)
        super().__init__(stepper, drafting_point(stepper.layers), max_rows=max_rows)
        self.drafting = drafting
        self._reader = DraftReader(stepper, drafting.layer, drafting.lens, drafting.opened, drafting.vocabulary)
        self._heads = OwnHeads(stepper)

    def _decode(
        self, session: WalkedSession, arrival: Arrival, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]
    ) -> Record:
        log, rows = _Log(prompts, self.drafting.layer, self.point.ceiling), _rows_of(prompts, max_new, stop)
        first = arrival.logits[:, -1].argmax(dim=-1)
        for row, token in zip(rows, first.tolist(), strict=True):
            row.take([token])
        alive = _going(rows, session)
        while alive:
            self._round(alive, session, log)
            alive = _going(alive, session)
        return Record(
            tokens=log.tokens(),
            signal=log.signal(self.drafting.gated),
            emitted=[np.array(row.emitted, dtype=np.int64) for row in rows],
            stop=[row.reason for row in rows],
            work={0: session.work},
            prompt_work={0: self.prompt_work(prompts)},
        )

    def _round(self, rows: Sequence[_Row], session: WalkedSession, log: _Log) -> None:
        starts, drafting = [row.held for row in rows], self.drafting
        copies = [row.copies(drafting.copied) for row in rows]
        widths = [0 if copied else row.room(drafting.longest) for row, copied in zip(rows, copies, strict=True)]
        run = self._drafts(rows, session, widths, copies) if any(widths) else self._copied(rows, session, copies)
        states, fed, drafts, gates = run
        chunk = torch.cat(states, dim=1) if len(states) > 1 else states[0]
        verified = self._verified(session, chunk, starts)
        for i, (row, tokens, width, own) in enumerate(zip(rows, fed, drafts, verified, strict=True)):
            right = 0
            while right < width and tokens[right + 1] == own[right]:
                right += 1
            row.take([*tokens[1 : right + 1], own[right]])
            log.stretches.append(_Stretch(row.number, starts[i], tokens, row.held - starts[i], [g[i] for g in gates]))
        if any(row.held < start + chunk.shape[1] for row, start in zip(rows, starts, strict=True)):
            session.store.cache.truncate(np.array([row.held for row in rows]))

    def _copied(self, rows: Sequence[_Row], session: WalkedSession, copies: Sequence[list[int]]) -> _Run:
        """Nothing is read after layer e: what is copied goes there in one chunk, shorter rows with their last token."""
        most = max(map(len, copies))
        fed = [_filled([row.last, *copied], most + 1) for row, copied in zip(rows, copies, strict=True)]
        tokens = torch.tensor(fed, device=self.stepper.device)
        states = self._shallow(session, tokens, _next_of(rows) + np.arange(most + 1))
        return _Run([states], fed, [len(copied) for copied in copies], [])

    def _drafts(
        self, rows: Sequence[_Row], session: WalkedSession, widths: Sequence[int], copies: Sequence[list[int]]
    ) -> _Run:
        """Token by token: of rows of some width what is read after layer e, of others the next of their copies."""
        device, layer, work = self.stepper.device, self.drafting.layer, session.store.work
        position, going = _next_of(rows), [width > 0 for width in widths]
        drafts, most = [len(copied) for copied in copies], max(map(len, copies))
        token = torch.tensor([[row.last] for row in rows], device=device)
        fed, states, gates = [token], [], []
        while True:
            states.append(self._shallow(session, token, position))
            hidden = states[-1][:, -1]
            if self.drafting.gated and any(going):
                gates.append(self._reader.expected(hidden, work).tolist())
                if not all(map(math.isfinite, gates[-1])):
                    require_finite(torch.tensor(gates[-1]), f"after layer {layer}")
                going = [on and gate <= self.drafting.threshold for on, gate in zip(going, gates[-1], strict=True)]
            at = len(states) - 1
            if not any(going) and at >= most:
                return _Run(states, torch.cat(fed, dim=1).tolist(), drafts, gates)
            if any(going):
                best = self._reader.tokens(hidden, work)[:, None]
                token = best if all(going) else torch.where(torch.tensor(going, device=device)[:, None], best, token)
            copied = [row for row, known in enumerate(copies) if at < len(known)]
            if copied:
                token = token.clone()
                token[copied, 0] = torch.tensor([copies[row][at] for row in copied], device=device)
            fed.append(token)
            drafts = [count + on for count, on in zip(drafts, going, strict=True)]
            going = [on and count < width for on, count, width in zip(going, drafts, widths, strict=True)]
            position = position + 1

    def _shallow(self, session: WalkedSession, tokens: Tensor, position: Ints) -> Tensor:
        """States [rows, n, D] of ``tokens`` [rows, n] after layer e."""
        store, layer = session.store, self.drafting.layer
        frame = self.stepper.frame(position, store.cache)
        hidden = self.stepper.run(self.stepper.embed(tokens, frame), 0, layer, frame, store.cache)
        count_blocks(store.work, 0, layer, len(tokens), tokens.shape[1], frame.executed)
        return hidden

    def _verified(self, session: WalkedSession, chunk: Tensor, starts: Sequence[int]) -> list[list[int]]:
        """The model's own next token after each token of ``chunk`` [rows, n, D], states after layer e."""
        store, layer, ceiling = session.store, self.drafting.layer, self.point.ceiling
        frame = self.stepper.frame(np.array(starts)[:, None] + np.arange(chunk.shape[1]), store.cache)
        hidden = self.stepper.run(chunk, layer, ceiling, frame, store.cache)
        count_blocks(store.work, layer, ceiling, len(chunk), chunk.shape[1], frame.executed)
        best = full_head(self._heads, hidden, ceiling, store.work).max(dim=-1)
        if not math.isfinite(float(best.values.sum())):
            require_finite(best.values, "at the ceiling")
        tokens: list[list[int]] = best.indices.tolist()
        return tokens


@dataclass
class _Row:
    """One sequence under way: ``tokens`` is the prompt and all emitted; the last has not been fed yet."""

    number: int
    tokens: list[int]
    prompt: int
    left: int
    stop: frozenset[int]
    reason: StopReason = "length"
    seen: Copies = field(default_factory=Copies)

    @property
    def emitted(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def last(self) -> int:
        return self.tokens[-1]

    @property
    def held(self) -> int:
        """Tokens in the cache, once the first is emitted."""
        return len(self.tokens) - 1

    @property
    def going(self) -> bool:
        return self.left > 0 and self.reason == "length"

    def room(self, drafts: int) -> int:
        """Drafts of use to this row, of so many: the verification adds a token of its own."""
        return min(drafts, self.left - 1)

    def copies(self, most: int) -> list[int]:
        """What may be copied, up to ``most`` tokens."""
        return self.seen.of(self.tokens, self.room(most))

    def take(self, tokens: Sequence[int]) -> None:
        """Emit ``tokens``, up to the first that ends the row."""
        for token in tokens:
            self.tokens.append(token)
            self.left -= 1
            if token in self.stop:
                self.reason = "stop token"
                break


def _rows_of(prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> list[_Row]:
    return [
        _Row(number, prompt.tokens.tolist(), len(prompt.tokens), max_new, stop) for number, prompt in enumerate(prompts)
    ]


def _next_of(rows: Sequence[_Row]) -> Ints:
    """int64 [rows, 1] position of the token that each feeds next."""
    return np.array([row.held for row in rows])[:, None]


def _going(rows: Sequence[_Row], session: WalkedSession) -> list[_Row]:
    """The rows that go on; finished ones leave the cache."""
    finished = [i for i, row in enumerate(rows) if not row.going]
    if finished and len(finished) < len(rows):
        session.drop(np.array(finished))
    return [row for row in rows if row.going]


def _filled(tokens: list[int], length: int) -> list[int]:
    """With the last one again up to ``length``, to be rolled back."""
    return tokens + tokens[-1:] * (length - len(tokens))


class _Run(NamedTuple):
    """What was fed to layer e: ``states`` [rows, n, D] of each feed, the tokens ``fed`` [rows][all], ``drafts`` of each
    row, ``gates`` read [feeds][rows]."""

    states: list[Tensor]
    fed: list[list[int]]
    drafts: list[int]
    gates: list[list[float]]


class _Stretch(NamedTuple):
    """One row's part of a round: ``tokens`` fed from position ``start`` on, the first ``kept`` of which stand, and what
    the ``gates`` said of the first of them."""

    sequence: int
    start: int
    tokens: list[int]
    kept: int
    gates: list[float]


class _Log:
    """The columns of a record: of prompts, and of ``stretches`` in order. Made at the end: the loop only collects."""

    def __init__(self, prompts: Sequence[Prompt], layer: int, ceiling: int):
        self._prompts, self._layer, self._ceiling = prompts, layer, ceiling
        self.stretches: list[_Stretch] = []

    def tokens(self) -> Tokens:
        parts = [
            *(self._prompt(number, prompt) for number, prompt in enumerate(self._prompts)),
            *(part for stretch in self.stretches for part in self._twice(stretch)),
        ]
        sequence, position, token, depth, phase, kept = (np.concatenate(column) for column in zip(*parts, strict=True))
        cap, model = np.full(len(token), self._ceiling), np.zeros(len(token), dtype=np.int64)
        return Tokens(sequence, position, token, depth, cap, phase, model, kept.astype(bool))

    def signal(self, gated: bool) -> Floats:
        """[tokens, 1] what the gate said where it was asked, NaN elsewhere; no column without a gate."""
        parts = [np.full(len(prompt.tokens), np.nan) for prompt in self._prompts]
        for stretch in self.stretches:
            read = np.full(2 * len(stretch.tokens), np.nan)
            read[: len(stretch.gates)] = stretch.gates
            parts.append(read)
        column = np.concatenate(parts)[:, None]
        return column if gated else column[:, :0]

    def _prompt(self, number: int, prompt: Prompt) -> tuple[Ints, ...]:
        n = len(prompt.tokens)
        phase = np.where(np.arange(n) < n - 1, PROMPT, DECODE)
        return _columns(number, 0, np.asarray(prompt.tokens), self._ceiling, phase, np.ones(n, dtype=np.int64))

    def _twice(self, stretch: _Stretch) -> tuple[tuple[Ints, ...], tuple[Ints, ...]]:
        tokens, n = np.array(stretch.tokens), len(stretch.tokens)
        none, stands = np.zeros(n, dtype=np.int64), (np.arange(n) < stretch.kept).astype(np.int64)
        at = stretch.sequence, stretch.start, tokens
        return (
            _columns(*at, self._layer, np.full(n, DRAFT), none),
            _columns(*at, self._ceiling, np.full(n, VERIFY), stands),
        )


def _columns(number: int, start: int, tokens: Ints, depth: int, phase: Ints, kept: Ints) -> tuple[Ints, ...]:
    """sequence, position, token, depth, phase and kept of tokens in a row."""
    n = len(tokens)
    return np.full(n, number), start + np.arange(n), tokens, np.full(n, depth), phase, kept
