"""A minimal foreign decoder, a dozen lines of substance: no K/V cache, every feed recomputes the whole history.

The least that an accelerator team has to write. It does not count its work, and declares so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, InadmissibleDepth, Prompt, Step, Unsupported
from emad_ref.record import DECODE, PROMPT, Floats, Ints, Record, StopReason, TokenTable
from tests.decoders.audited_model import entropy_nats, readout


class ForeignSession:
    work = None

    def __init__(self, model: torch.nn.Module, point: OperatingPoint, prompts: Sequence[Prompt]):
        self.model, self.point = model, point
        self.history = [list(map(int, prompt.tokens)) for prompt in prompts]
        self.caps = [[point.ceiling] * len(prompt.tokens) for prompt in prompts]  # caps[row][p] holds for position p

    @property
    def length(self) -> Ints:
        return np.array([len(tokens) for tokens in self.history])

    @property
    def cap(self) -> Ints:
        return np.array([caps[len(tokens)] for caps, tokens in zip(self.caps, self.history, strict=True)])

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        if depth is not None:
            limits = np.minimum.accumulate(np.column_stack([self.cap, depth]), axis=1)[:, :-1]
            if ((depth < 1) | (depth > limits)).any():
                raise InadmissibleDepth(f"depth={depth.tolist()}, but expected 1 to {limits.tolist()}")
        for row, fed in enumerate(tokens):
            self.history[row].extend(map(int, fed))
        step = self.read(tokens.shape[1], depth)
        return step if last is None else replace(step, logits=step.logits[:, tokens.shape[1] - last :])

    def deepen(self, length: Ints) -> Step:
        if self.point.schedule != "free_deferred":
            raise Unsupported(f"deepen under {self.point.schedule}: only free_deferred lets a token rise")
        (n,) = {*(self.length - length).tolist()}
        for row, first in enumerate(length):
            del self.caps[row][first + 1 :]
        return self.read(n, np.full((len(self.history), n), self.point.ceiling))

    @torch.inference_mode()
    def read(self, n: int, depth: Ints | None) -> Step:
        """Decide (or obey) the last ``n`` positions of every row from a pass over its whole history."""
        steps = []
        for row, tokens in enumerate(self.history):
            logits = readout(self.model, np.array(tokens)).numpy()
            for at in range(len(tokens) - n, len(tokens)):
                cap, signal = self.caps[row][at], np.full(len(self.point.probes), np.nan)
                taken = cap if depth is None else int(depth[row, at - len(tokens) + n])
                for column, probe in enumerate(self.point.probes if depth is None else ()):
                    if probe > taken:
                        break
                    signal[column] = entropy_nats(logits[at, probe - 1])
                    if signal[column] <= self.point.thresholds[0][column]:
                        taken = probe
                        break
                self.caps[row].append(taken if self.point.schedule == "monotone" else self.point.ceiling)
                steps.append((logits[at, taken - 1], taken, signal))
        shaped = (np.array(part).reshape(len(self.history), n, *np.shape(part[0])) for part in zip(*steps, strict=True))
        return Step(*shaped)

    def rollback(self, length: Ints) -> None:
        for row, held in enumerate(length):
            del self.history[row][held:], self.caps[row][held + 1 :]

    def commit(self, length: Ints) -> None:
        """Do nothing: no K/V is held."""

    def drop(self, rows: Ints) -> None:
        for row in sorted(map(int, rows), reverse=True):
            del self.history[row], self.caps[row]

    def close(self) -> None:
        self.history.clear()


class ForeignDecoder:
    capabilities = Capabilities(
        max_feed=4, schedules=frozenset({"monotone", "free_eager", "free_deferred"}), counted=False
    )

    def __init__(self, model: torch.nn.Module, point: OperatingPoint):
        if point.schedule not in self.capabilities.schedules:
            raise Unsupported(f"schedule {point.schedule}")
        self.model, self.point = model, point
        deepens, most = point.schedule == "free_deferred", model.config.max_position_embeddings
        self.capabilities = replace(self.capabilities, deepens=deepens, max_positions=most)

    def start(self, prompts: Sequence[Prompt]) -> tuple[ForeignSession, Step]:
        session = ForeignSession(self.model, self.point, prompts)
        return session, session.read(1, None)

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> Record:
        """Generate row after row: slow, and certainly independent of other rows."""
        table: list[tuple[int, ...]] = []
        signals: list[Floats] = []
        emitted: list[Ints] = []
        reasons: list[StopReason] = []
        for row, prompt in enumerate(prompts):
            table += [
                (row, at, int(t), self.point.ceiling, self.point.ceiling, PROMPT)
                for at, t in enumerate(prompt.tokens[:-1])
            ]
            signals += [np.full(len(self.point.probes), np.nan)] * (len(prompt.tokens) - 1)
            session, step = self.start([prompt])
            new: list[int] = []
            while True:
                at = len(session.history[0]) - 1
                table.append((row, at, session.history[0][at], int(step.depth[0, 0]), session.caps[0][at], DECODE))
                signals.append(step.signal[0, 0])
                new.append(int(step.logits[0, 0].argmax()))
                if new[-1] in stop or len(new) == max_new:
                    break
                step = session.feed(np.array([[new[-1]]]))
            emitted.append(np.array(new))
            reasons.append("stop token" if new[-1] in stop else "length")
        return as_record(table, signals, emitted, reasons)

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


def as_record(
    table: Sequence[tuple[int, ...]], signals: Sequence[Floats], emitted: list[Ints], reasons: list[StopReason]
) -> Record:
    """Return a Record of one model without work, from rows (sequence, position, token, depth, cap, phase)."""
    sequence, position, token, depth, cap, phase = np.array(table, dtype=np.int64).T
    kept = np.ones(len(table), dtype=bool)
    tokens = TokenTable(sequence, position, token, depth, cap, phase, np.zeros(len(table), dtype=np.int64), kept)
    return Record(tokens, np.array(signals), emitted, reasons)
