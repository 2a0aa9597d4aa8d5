"""A small, slow, simple decoder with a K/V cache: K/V per row, one block at a time, work counted during execution.

Its methods are small so that ``planted_defects.py`` can break one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import GPTNeoXForCausalLM

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, InadmissibleDepth, Prompt, Step
from emad_ref.record import DECODE, FILLS, PROMPT, READOUTS, Floats, Ints, Record, StopReason, Work
from tests.decoders.audited_model import entropy_nats
from tests.decoders.foreign_decoder import as_record

FULL, EXACT = READOUTS.index("full"), FILLS.index("exact")


class Memory:
    """K and V of one row: per layer [1, heads, n, head_dim], grown by the attention's own ``update`` call."""

    def __init__(self, layers: int):
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        held = self.layers[layer]
        joined = (keys, values) if held is None else (torch.cat([held[0], keys], 2), torch.cat([held[1], values], 2))
        self.layers[layer] = joined
        return joined

    def held(self, layer: int) -> int:
        entry = self.layers[layer]
        return 0 if entry is None else entry[0].shape[2]

    def truncate(self, length: int) -> None:
        self.layers = [kv and (kv[0][:, :, :length], kv[1][:, :, :length]) for kv in self.layers]


class Row:
    """One row: its K/V, its tokens so far, and ``caps[p]``, the largest depth that position p may take."""

    def __init__(self, point: OperatingPoint):
        self.memory = Memory(point.layers)
        self.tokens: list[int] = []
        self.caps = [point.ceiling]


class CachedSession:
    def __init__(self, model: GPTNeoXForCausalLM, point: OperatingPoint, rows: int, generating: bool = False):
        self.model, self.point, self.generating = model, point, generating
        self.body, self.head = model.gpt_neox, model.get_output_embeddings()
        self.rows = [Row(point) for _ in range(rows)]
        self.work = Work.none(point.layers)

    @property
    def length(self) -> Ints:
        return np.array([len(row.tokens) for row in self.rows])

    @property
    def cap(self) -> Ints:
        return np.array([row.caps[-1] for row in self.rows])

    # blocks and readouts -------------------------------------------------

    def position(self, row: Row, n: int) -> int:
        return len(row.tokens)

    def positions(self, row: Row, n: int) -> Tensor:
        """Return the positions int64 [n] of the row's next ``n`` tokens."""
        return torch.arange(n) + self.position(row, n)

    def run(self, row: Row, hidden: Tensor, layer: int) -> Tensor:
        """Run block ``layer`` (from 1) over ``hidden`` [1, n, d], the row's next n positions."""
        n, held = hidden.shape[1], row.memory.held(layer - 1)
        positions = self.positions(row, n)[None]
        mask = torch.full((n, held + n), -torch.inf, dtype=hidden.dtype).triu(held + 1)[None, None]
        self.count_block(layer, n, held + n)
        return self.body.layers[layer - 1](
            hidden,
            attention_mask=mask,
            layer_past=row.memory,
            position_embeddings=self.body.rotary_emb(hidden, position_ids=positions),
        )

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.body.embed_in(torch.tensor([list(tokens)]))

    def logits(self, hidden: Tensor) -> Floats:
        """Return the logits [V] of the last position."""
        return self.head(self.body.final_layer_norm(hidden[0, -1])).numpy()

    def signal(self, hidden: Tensor) -> float:
        return float(entropy_nats(self.logits(hidden)))

    def count_block(self, layer: int, n: int, keys: int) -> None:
        self.work.tokens[layer - 1] += n
        self.work.context[layer - 1] += n * keys

    def count_readout(self, layer: int, probe: bool) -> None:
        self.work.readout_rows[FULL, layer - 1] += 1

    def count_shown(self, layer: int) -> None:
        """Count the head of a step if its logits are requested."""
        if self.wanted:
            self.count_readout(layer, probe=False)

    # one token -----------------------------------------------------------

    def prefill(self, prompts: Sequence[Prompt]) -> Step:
        for row, prompt in zip(self.rows, prompts, strict=True):
            before = list(map(int, prompt.tokens[:-1]))
            if before:
                self.read(row, before)
                row.tokens += before
                row.caps += [self.point.ceiling] * len(before)
        return self.feed(np.array([[int(prompt.tokens[-1])] for prompt in prompts]))

    def read(self, row: Row, tokens: Sequence[int]) -> None:
        """Read the prompt positions before the last in one pass at the ceiling."""
        hidden = self.embed(tokens)
        for layer in range(1, self.point.ceiling + 1):
            hidden = self.run(row, hidden, layer)

    def ceiling_of(self, row: Row) -> int:
        """Return the largest depth of the row's next token."""
        return row.caps[-1]

    def decide(self, row: Row, token: int) -> tuple[Floats, int, Floats]:
        """Decode one token at the depth that the rule decides: (logits [V], depth, signal [probes])."""
        signal, hidden, cap = np.full(len(self.point.probes), np.nan), self.embed([token]), self.ceiling_of(row)
        for layer in range(1, cap + 1):
            hidden = self.run(row, hidden, layer)
            if layer not in self.point.probes:
                continue
            column = self.point.probes.index(layer)
            signal[column] = self.signal(hidden)
            self.count_readout(layer, probe=True)
            if signal[column] <= self.point.thresholds[0][column]:
                return self.shown(row, hidden, layer), layer, signal
        if cap not in self.point.probes:
            self.count_shown(cap)
        return self.shown(row, hidden, cap), cap, signal

    def obey(self, row: Row, token: int, depth: int) -> tuple[Floats, int, Floats]:
        hidden = self.embed([token])
        for layer in range(1, depth + 1):
            hidden = self.run(row, hidden, layer)
        self.count_shown(depth)
        return self.shown(row, hidden, depth), depth, np.full(len(self.point.probes), np.nan)

    def shown(self, row: Row, hidden: Tensor, depth: int) -> Floats:
        """Return the logits [V] that the step shows for a token that stopped after ``depth``."""
        return self.logits(hidden)

    def next_cap(self, row: Row, depth: int) -> int:
        return depth

    # the protocol --------------------------------------------------------

    def admit(self, depth: Ints) -> None:
        if ((depth[:, 0] < 1) | (depth[:, 0] > self.cap)).any():
            raise InadmissibleDepth(f"depth={depth[:, 0].tolist()}, but expected 1 to {self.cap.tolist()}")

    @torch.inference_mode()
    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        if depth is not None:
            self.admit(depth)
        self.wanted, said = last != 0, []
        for index, row in enumerate(self.rows):
            token = int(tokens[index, 0])
            said.append(self.decide(row, token) if depth is None else self.obey(row, token, int(depth[index, 0])))
            row.tokens.append(token)
            row.caps.append(self.next_cap(row, said[-1][1]))
        logits, depths, signals = (np.array(part)[:, None] for part in zip(*said, strict=True))
        return Step(logits if last is None else logits[:, 1 - last :], depths, signals)

    def rollback(self, length: Ints) -> None:
        for row, held in zip(self.rows, length, strict=True):
            del row.tokens[held:], row.caps[held + 1 :]
            row.memory.truncate(int(held))

    def commit(self, length: Ints) -> None:
        """Free K/V above the caps at ``length``: no later token runs deeper."""
        for row, held in zip(self.rows, length, strict=True):
            self.free(row, row.caps[int(held)])

    def free(self, row: Row, cap: int) -> None:
        row.memory.layers[cap:] = [None] * (self.point.layers - cap)

    def drop(self, rows: Ints) -> None:
        self.rows = [row for index, row in enumerate(self.rows) if index not in set(map(int, rows))]

    def close(self) -> None: ...


class CachedDecoder:
    capabilities = Capabilities()
    session: type[CachedSession] = CachedSession

    def __init__(self, model: GPTNeoXForCausalLM, point: OperatingPoint, temperature: float = 0.0, seed: int = 0):
        self.model, self.point, self.temperature, self.seed = model, point, temperature, seed

    def generators(self, rows: int) -> list[torch.Generator]:
        """Return one generator per row, so that rows draw independently."""
        return [torch.Generator().manual_seed(1_000_003 * self.seed + row) for row in range(rows)]

    def pick(self, logits: Floats, generator: torch.Generator) -> int:
        """Return the argmax, or a draw from softmax(logits [V] / temperature)."""
        if self.temperature == 0:
            return int(logits.argmax())
        return self.draw(torch.from_numpy(logits).double() / self.temperature, generator)

    def draw(self, scaled: Tensor, generator: torch.Generator) -> int:
        return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))

    def start(self, prompts: Sequence[Prompt], generating: bool = False) -> tuple[CachedSession, Step]:
        session = self.session(self.model, self.point, len(prompts), generating)
        with torch.inference_mode():
            return session, session.prefill(prompts)

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        session, step = self.start(prompts, generating=True)
        generators = self.generators(len(prompts))
        ceiling, before = self.point.ceiling, np.array([len(prompt.tokens) - 1 for prompt in prompts])
        prompt_work = Work.none(self.point.layers)
        prompt_work.tokens[:ceiling], prompt_work.context[:ceiling] = before.sum(), (before**2).sum()
        unread = np.full(len(self.point.probes), np.nan)
        table: list[tuple[int, ...]] = [
            (row, at, int(token), ceiling, ceiling, PROMPT)
            for row, prompt in enumerate(prompts)
            for at, token in enumerate(prompt.tokens[:-1])
        ]
        signals = [unread] * len(table)
        emitted: list[list[int]] = [[] for _ in prompts]
        reasons: list[StopReason] = ["length"] * len(prompts)
        running = list(range(len(prompts)))
        while True:
            for index, row in enumerate(running):
                state = session.rows[index]
                at = len(state.tokens) - 1
                table.append((row, at, state.tokens[at], int(step.depth[index, 0]), state.caps[at], DECODE))
                signals.append(step.signal[index, 0])
                emitted[row].append(self.pick(step.logits[index, 0], generators[row]))
            ended = [i for i, row in enumerate(running) if emitted[row][-1] in stop or len(emitted[row]) == max_new]
            for index in ended:
                reasons[running[index]] = "stop token" if emitted[running[index]][-1] in stop else "length"
            session.drop(np.array(ended, dtype=np.int64))
            running = [row for index, row in enumerate(running) if index not in ended]
            if not running:
                break
            step = session.feed(np.array([[emitted[row][-1]] for row in running]))
        record = as_record(table, signals, [np.array(tokens) for tokens in emitted], reasons)
        return replace(record, work={0: session.work}, prompt_work={0: prompt_work})

    def synchronize(self) -> None: ...

    def close(self) -> None: ...
