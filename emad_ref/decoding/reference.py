"""The reference decoder: the protocol's ``Decoder`` over a layered model.

A session keeps the depth of every token of a row, so that a rollback restores the cap. K/V above the cap stay until
``commit``. Under ``free_deferred`` a session also keeps the state of every token that stopped early, so that
``deepen`` can continue it. ``generate`` is the timed path: it commits every token and keeps logits on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.step import AdaptiveForward, StepInput, StepOutput, concatenate_steps, has_chunk_rule, run_chunk
from emad_ref.errors import BadArgument, EmadError
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.probes.signal_values import require_finite
from emad_ref.protocol import Capabilities, InadmissibleDepth, Prompt, Step, Unsupported
from emad_ref.record import DECODE, PROMPT, Floats, Ints, Record, StopReason, Tokens, Work
from emad_ref.schedule.interface import Admission, DeferredStates, SessionState, count_blocks
from emad_ref.schedule.schedules import SCHEDULES, run_deferred_to_ceiling, schedule_of


class Sampler:
    """Greedy at ``temperature`` 0, else a draw from softmax(logits / temperature)."""

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        if not 0 <= temperature < math.inf:
            raise BadArgument("temperature", temperature, "a finite number ≥ 0", "0 decodes greedily")
        self.temperature = temperature
        self._generators = [torch.Generator().manual_seed(seed * 1_000_003 + row) for row in range(rows)]

    def pick(self, logits: Tensor, rows: list[int]) -> Tensor:
        """int64 [len(rows)] next tokens for ``logits`` [len(rows), V]; ``rows`` are the original row numbers."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        weights = torch.softmax(logits.double() / self.temperature, dim=-1).cpu()
        draws = [torch.multinomial(w, 1, generator=self._generators[row]) for w, row in zip(weights, rows, strict=True)]
        return torch.cat(draws).to(logits.device)


class SessionClosed(EmadError):
    """A session was used after ``close``."""


class ReferenceSession:
    """Rows of one batch. Layers and depths count from 1; every array argument is [rows] or [rows, n]."""

    def __init__(self, walker: AdaptiveForward, prompts: Sequence[Prompt], capacity: int):
        self._walker, self._stepper, self._point, self._schedule = walker, walker.stepper, walker.point, walker.schedule
        cache = self._stepper.open([prompt.source for prompt in prompts], capacity)
        self._store = SessionState(self._stepper, cache, DeferredStates(len(prompts)), Work.none(self._stepper.layers))
        self._trail: list[list[int]] = [[] for _ in prompts]
        self._prompt = [len(prompt.tokens) - 1 for prompt in prompts]  # positions before the first decided one
        self._committed = np.zeros(len(prompts), dtype=np.int64)
        self._open = True

    # ------------------------------------------------------------ protocol

    @property
    def length(self) -> Ints:
        return np.array([len(trail) for trail in self._trail], dtype=np.int64)

    @property
    def cap(self) -> Ints:
        return np.array([admitted.cap for admitted in self._admissions()], dtype=np.int64)

    @property
    def work(self) -> Work:
        return self._store.work + self._store.cache.source_work()

    @torch.inference_mode()
    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        self._require_open()
        tokens = self._checked_tokens(tokens)
        forced = None if depth is None else self._checked_depth(depth, tokens.shape)
        n = tokens.shape[1]
        wanted = n if last is None else _checked_last(last, n)
        ids = torch.from_numpy(tokens).to(self._stepper.device)
        if forced is not None and (forced == forced[:, :1]).all():
            return self.advance(ids, forced, wanted).step()
        if forced is None and has_chunk_rule(self._point):
            return self.advance(ids, None, wanted).step()
        columns = [
            self.advance(ids[:, [i]], None if forced is None else forced[:, [i]], int(i >= n - wanted))
            for i in range(n)
        ]
        return concatenate_steps(columns).step()

    @torch.inference_mode()
    def deepen(self, length: Ints) -> Step:
        self._require_open()
        length, ceiling = self._checked_shallow(length), self._point.ceiling
        states = run_deferred_to_ceiling(self._store, ceiling, length, self.length)
        logits = self._walker.watch.emit(states, ceiling, self._store.work)
        require_finite(logits.amax(dim=-1), "at the ceiling")
        rows, n = logits.shape[:2]
        for trail, first in zip(self._trail, length.tolist(), strict=True):
            trail[first:] = [ceiling] * n
        depth, unread = np.full((rows, n), ceiling), np.full((rows, n, len(self._point.probes)), np.nan)
        return StepOutput(logits, depth, unread, depth[:, 0]).step()

    def rollback(self, length: Ints) -> None:
        self._require_open()
        length = self._checked_length(length, "rollback")
        for row, kept in enumerate(length.tolist()):
            del self._trail[row][kept:]
            self._prompt[row] = min(self._prompt[row], kept)  # what follows a shortened prompt is decided
        self._store.cache.truncate(length)
        self._store.owed.truncate(length)

    def commit(self, length: Ints) -> None:
        self._require_open()
        length = self._checked_length(length, "commit")
        self._committed = length
        if self._schedule.never_rises:
            self._store.cache.free(np.array([admitted.cap for admitted in self._admissions(length)]))

    def drop(self, rows: Ints) -> None:
        self._require_open()
        gone = set(np.atleast_1d(to_int64("rows", rows)).tolist())
        if not gone < set(range(len(self._trail))):
            raise BadArgument(
                "rows",
                sorted(gone),
                f"some, not all, of rows 0–{len(self._trail) - 1}",
                "close() ends the whole session",
            )
        self._store.cache.drop(np.array(sorted(gone), dtype=np.int64))
        kept = [row for row in range(len(self._trail)) if row not in gone]
        self._trail, self._prompt = [self._trail[row] for row in kept], [self._prompt[row] for row in kept]
        self._committed = self._committed[kept]
        self._store.owed.drop(kept)

    def close(self) -> None:
        # buffers are made at the first write: this cache holds none
        empty, owed = self._stepper.new_cache(1, 1), DeferredStates(1)
        self._open, self._store = False, replace(self._store, cache=empty, owed=owed, work=self.work)

    # ------------------------------------------------------------ used by the timed path

    @property
    def store(self) -> SessionState:
        """What the session keeps, for a loop that runs layers itself and leaves the session's steps alone."""
        return self._store

    def prefill(self, prompts: Sequence[Prompt]) -> StepOutput:
        """Prompts but their last positions in one forward at the ceiling, then the last positions as a first step."""
        heads = [np.asarray(prompt.tokens[:-1], dtype=np.int64) for prompt in prompts]
        lengths = np.array([len(head) for head in heads])
        if lengths.max() > 0:
            self._run_prompts(heads, lengths)
        last = torch.tensor([[int(prompt.tokens[-1])] for prompt in prompts], device=self._stepper.device)
        return self.advance(last, None)

    def prefill_whole(self, prompts: Sequence[Prompt]) -> StepOutput:
        """Whole prompts in one forward: all there is to do where nothing can exit below the ceiling."""
        lengths = np.array([len(prompt.tokens) for prompt in prompts])
        hidden = self._run_prompts([np.asarray(prompt.tokens, dtype=np.int64) for prompt in prompts], lengths)
        last = torch.from_numpy(lengths - 1).to(hidden.device)
        ceiling, states = self._point.ceiling, hidden[torch.arange(len(prompts), device=hidden.device), last]
        logits = self._walker.watch.emit(states, ceiling, self._store.work)
        require_finite(logits.amax(dim=-1), "at the depth of emission")
        depth = np.full((len(prompts), 1), ceiling)
        return StepOutput(logits[:, None], depth, np.empty((len(prompts), 1, 0)), depth[:, 0])

    def advance(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        """Process int64 [rows, n] on the device and lengthen the trails; ``forced`` [rows, n], constant along n.

        Without ``forced`` n is 1, or the point one that decides a chunk in one pass. ``last``: tokens of which logits
        are wanted, 0…n.
        """
        feed = self._feed_of(ids, forced, last)
        decides = forced is None and ids.shape[1] > 1
        arrival = run_chunk(self._walker, feed) if decides else self._walker.walk(feed)
        # without a probe nothing else would see it, and the argmax of NaN is a token like any other
        require_finite(arrival.logits.amax(dim=-1), "at the depth of emission")
        for trail, depths in zip(self._trail, arrival.depth.tolist(), strict=True):
            trail.extend(depths)
        return arrival

    # ------------------------------------------------------------ private

    def _feed_of(self, ids: Tensor, forced: Ints | None, last: int) -> StepInput:
        length, cache = self.length, self._store.cache
        frame = self._stepper.frame(length[:, None] + np.arange(ids.shape[1]), cache)
        if forced is None:
            admitted = self._admissions()
            cap = np.array([one.cap for one in admitted], dtype=np.int64)
            asked = np.array([not one.held for one in admitted], dtype=bool)
        else:
            cap, asked = forced[:, 0], np.zeros(len(forced), dtype=bool)
        return StepInput(ids, frame, self._store, cap, asked, length - np.array(self._prompt), last)

    def _run_prompts(self, heads: Sequence[Ints], lengths: Ints) -> Tensor:
        """Hidden states at the ceiling of ``heads``, padded on the right: [rows that have one, longest, D]."""
        rows = np.flatnonzero(lengths > 0)
        widest = int(lengths.max())
        tokens = np.zeros((len(rows), widest), dtype=np.int64)
        for i, row in enumerate(rows):
            tokens[i, : lengths[row]] = heads[int(row)]
        positions = np.broadcast_to(np.arange(widest), tokens.shape)
        frame = self._stepper.frame(positions, self._store.cache, rows=rows, lengths=lengths[rows])
        ceiling = self._point.ceiling
        hidden = self._stepper.embed(torch.from_numpy(tokens).to(self._stepper.device), frame)
        hidden = self._stepper.run(hidden, 0, ceiling, frame, self._store.cache)
        count_blocks(self._store.work, 0, ceiling, len(rows), widest, frame.executed)
        for row in rows:
            self._trail[row].extend([ceiling] * int(lengths[row]))
        return hidden

    def _admissions(self, length: Ints | None = None) -> list[Admission]:
        """What the schedule allows the next token of each row, after ``length`` [rows] tokens (all by default)."""
        kept = self.length if length is None else length
        return [
            self._schedule.admit(self._point, trail, prompt, n)
            for trail, prompt, n in zip(self._trail, self._prompt, kept.tolist(), strict=True)
        ]

    def _require_open(self) -> None:
        if not self._open:
            raise SessionClosed("session=closed, but expected an open one; start() a new one")

    def _checked_tokens(self, tokens: Ints) -> Ints:
        tokens = to_int64("tokens", tokens)
        if tokens.ndim != 2 or len(tokens) != len(self._trail) or tokens.shape[1] < 1:
            raise BadArgument("tokens", tokens.shape, f"shape [{len(self._trail)}, n ≥ 1]")
        require_vocabulary(tokens, self._stepper.vocabulary)
        require_room(int(self.length.max()) + tokens.shape[1], self._stepper)
        return tokens

    def _checked_depth(self, depth: Ints, shape: tuple[int, ...]) -> Ints:
        depth = to_int64("depth", depth)
        if depth.shape != shape:
            raise BadArgument("depth", depth.shape, f"the shape of tokens, {list(shape)}")
        for row, wanted in enumerate(depth.tolist()):
            trail = list(self._trail[row])
            for i, one in enumerate(wanted):
                admitted = self._schedule.admit(self._point, trail, self._prompt[row], len(trail))
                if one != admitted.cap and (admitted.held or not 1 <= one < admitted.cap):
                    admits = admitted.cap if admitted.held else f"1–{admitted.cap}"
                    raise InadmissibleDepth(
                        f"depth[{row}, {i}]={one}, but row {row} admits {admits} here; {self._schedule.why}"
                    )
                trail.append(one)
        return depth

    def _checked_shallow(self, length: Ints) -> Ints:
        """``length`` [rows] from which on every token stopped early, as many of them in each row."""
        if not self._schedule.deepens:
            able = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.deepens)
            raise Unsupported(
                f"deepen under schedule={self._point.schedule!r}, but only {able} keeps the states of tokens that "
                f"stopped early and lets them rise; open the decoder at a point with schedule={able!r}"
            )
        length, held = to_int64("length", length), self.length
        if length.shape != held.shape or (length < 0).any() or len({*(held - length).tolist()}) > 1:
            expected = f"one per row, each as far below the held {held.tolist()} as the others"
            raise BadArgument("length", length.tolist(), expected, "a step has as many tokens of every row")
        for row, first in enumerate(length.tolist()):
            depths = self._trail[row][first:]
            if not depths or max(depths) == self._point.ceiling:
                raise BadArgument(
                    f"length[{row}]",
                    first,
                    f"the first of some tokens that all stopped below the ceiling {self._point.ceiling}",
                    f"the depths from there on are {depths}; logits at the ceiling were shown when it was reached",
                )
        return length

    def _checked_length(self, length: Ints, verb: str) -> Ints:
        length = to_int64("length", length)
        # lists: this runs once a token, and on a few rows NumPy takes longer to be asked than to answer
        held, least = self.length.tolist(), [max(1, n) for n in self._committed.tolist()]
        wanted = length.tolist()
        if length.shape != (len(held),) or not all(a <= n <= b for a, n, b in zip(least, wanted, held, strict=True)):
            raise BadArgument(
                "length",
                wanted,
                f"one per row, between the committed {least} and the held {held}",
                f"nothing else can be the target of a {verb}",
            )
        return length


@dataclass
class _GenerationLog:
    """Columns of ``Tokens`` under construction."""

    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    signal: list[Floats] = field(default_factory=list)

    def prompt(self, row: int, tokens: Ints, ceiling: int, probes: int) -> None:
        self.rows += [(row, i, int(token), ceiling, ceiling, PROMPT) for i, token in enumerate(tokens)]
        self.signal += [np.full(probes, np.nan)] * len(tokens)

    def decoded(self, row: int, position: int, token: int, depth: int, cap: int, signal: Floats) -> None:
        self.rows.append((row, position, token, depth, cap, DECODE))
        self.signal.append(signal)

    def tokens(self) -> Tokens:
        columns = np.array(self.rows, dtype=np.int64).T
        sequence, position, token, depth, cap, phase = columns
        return Tokens(
            sequence, position, token, depth, cap, phase, np.zeros_like(token), np.ones(len(token), dtype=bool)
        )


class WalkedDecoder:
    """The protocol's Decoder for any family that ``models.families`` knows.

    ``session``, ``sampler``: what it opens and draws with; ``planted`` puts others in their places.

    Raises:
        BadArgument: a point for another number of layers.
    """

    session: ClassVar[type[ReferenceSession]] = ReferenceSession
    sampler: ClassVar[type[Sampler]] = Sampler

    def __init__(
        self, stepper: Stepper, point: OperatingPoint, *, seed: int = 0, max_rows: int = 1, temperature: float = 0.0
    ):
        if point.layers != stepper.layers:
            raise BadArgument("point.layers", point.layers, f"{stepper.layers}, the layers of this model")
        self.stepper, self.point = stepper, point
        self.seed, self.max_rows, self.temperature = seed, max_rows, temperature
        self._walker = AdaptiveForward(stepper, point)
        self.capabilities = Capabilities(
            max_feed=64, schedules=frozenset(SCHEDULES), deepens=schedule_of(point).deepens
        )

    @torch.inference_mode()
    def start(self, prompts: Sequence[Prompt]) -> tuple[ReferenceSession, Step]:
        session = self._open(prompts, capacity=256)
        return session, session.prefill(prompts).step()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        """Decode up to ``max_new`` tokens per row; a row ends with its stop token, which is emitted.

        Raises:
            BadArgument: no prompt, an empty one, too many rows, a token outside the vocabulary, or more positions
                than the model has.
            NotFinite: logits hold NaN or +inf.
        """
        session, arrival = self.begin(prompts, max_new)
        return self._decode(session, arrival, prompts, max_new, stop)

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Prompt], max_new: int) -> tuple[ReferenceSession, StepOutput]:
        """A session with room for ``max_new`` tokens, and what follows each prompt, its logits still on the device.

        For loops that choose and stop by themselves and ``advance`` the session. Raises as ``generate``.
        """
        if max_new < 1:
            raise BadArgument("max_new", max_new, "at least one new token", "start() reads a prompt without emitting")
        longest = max((len(p.tokens) for p in prompts), default=0)
        require_room(longest + max_new - 1, self.stepper)
        session = self._open(prompts, capacity=longest + max_new)
        return session, session.prefill_whole(prompts) if self.point.fixed else session.prefill(prompts)

    def prompt_work(self, prompts: Sequence[Prompt]) -> Work:
        """What prompt positions before the last cost, of what ``begin`` executed."""
        work = Work.none(self.stepper.layers)
        widest = max(len(p.tokens) for p in prompts)
        if self.point.fixed:
            work.tokens[: self.point.ceiling] = len(prompts) * (widest - 1)
            work.context[: self.point.ceiling] = len(prompts) * (widest - 1) * widest
        elif widest > 1:
            rows = sum(len(p.tokens) > 1 for p in prompts)
            count_blocks(work, 0, self.point.ceiling, rows, widest - 1, widest - 1)
        return self._with_sources(work, prompts)

    def synchronize(self) -> None:
        for device in {self.stepper.device, *self.stepper.places}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def close(self) -> None:
        """Nothing is held beyond the model, which belongs to the caller."""

    # ------------------------------------------------------------ private

    def _open(self, prompts: Sequence[Prompt], capacity: int) -> ReferenceSession:
        if not 1 <= len(prompts) <= self.max_rows:
            raise BadArgument("prompts", f"{len(prompts)} prompts", f"1–{self.max_rows}", "ask for a larger max_rows")
        for row, prompt in enumerate(prompts):
            if len(prompt.tokens) == 0:
                raise BadArgument(f"prompts[{row}]", [], "at least one token", "start with the model's opening token")
            tokens = to_int64(f"prompts[{row}]", prompt.tokens)
            if tokens.ndim != 1:
                raise BadArgument(f"prompts[{row}]", tokens.shape, "shape [n]", "one Prompt per row")
            require_vocabulary(tokens, self.stepper.vocabulary)
        require_room(max(len(p.tokens) for p in prompts), self.stepper)
        return self.session(self._walker, prompts, capacity)

    def _decode(
        self,
        session: ReferenceSession,
        arrival: StepOutput,
        prompts: Sequence[Prompt],
        max_new: int,
        stop: frozenset[int],
    ) -> Record:
        log, sampler = _GenerationLog(), self.sampler(len(prompts), self.temperature, self.seed)
        probes, ceiling = len(self.point.probes), self.point.ceiling
        for row, prompt in enumerate(prompts):
            log.prompt(row, prompt.tokens[:-1], ceiling, probes)
        fed = [int(prompt.tokens[-1]) for prompt in prompts]
        position = [len(prompt.tokens) - 1 for prompt in prompts]
        emitted: list[list[int]] = [[] for _ in prompts]
        reasons: list[StopReason] = ["length"] * len(prompts)
        alive = list(range(len(prompts)))
        while True:
            picked, depths = sampler.pick(arrival.logits[:, -1], alive), arrival.depth[:, -1].tolist()
            finished = []
            for i, (row, token, depth) in enumerate(zip(alive, picked.tolist(), depths, strict=True)):
                log.decoded(row, position[row], fed[row], depth, int(arrival.cap[i]), arrival.signal[i, -1])
                emitted[row].append(token)
                fed[row], position[row] = token, position[row] + 1
                if token in stop:
                    reasons[row] = "stop token"
                    finished.append(i)
                elif len(emitted[row]) == max_new:
                    finished.append(i)
            if len(finished) == len(alive):
                break
            if finished:
                session.drop(np.array(finished))
                keep = [i for i in range(len(alive)) if i not in set(finished)]
                picked, alive = picked[keep], [alive[i] for i in keep]
            session.commit(session.length)
            arrival = session.advance(picked[:, None], None)
        prompt_work = self.prompt_work(prompts)
        return Record(
            tokens=log.tokens(),
            signal=np.array(log.signal).reshape(len(log.signal), probes),
            emitted=[np.array(tokens, dtype=np.int64) for tokens in emitted],
            stop=reasons,
            work={0: session.work},
            prompt_work={0: prompt_work},
        )

    def _with_sources(self, work: Work, prompts: Sequence[Prompt]) -> Work:
        """``work`` of prompts, and what their sources cost up to there: the encoder, and K/V that prompts asked for."""
        width = max(0 if p.source is None else len(p.source) for p in prompts)
        fills, rows = np.zeros_like(work.cross_fills), sum(len(p.tokens) > 1 for p in prompts)
        fills[: self.point.ceiling] = rows * width
        return replace(
            work,
            cross_fills=fills,
            cross_context=work.tokens * width,
            encoder_tokens=len(prompts) * width,
            encoder_context=len(prompts) * width**2,
        )


def _checked_last(last: int, n: int) -> int:
    if not 0 <= last <= n:
        raise BadArgument("last", last, f"0–{n}, tokens of this feed", "None asks for the logits of all of them")
    return last


def to_int64(name: str, values: Ints) -> Ints:
    """``values`` as int64; raise BadArgument for floats and flags, which a cast would quietly change."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise BadArgument(name, array.dtype.name, "integers", "cast them if that is what they are")
    return array.astype(np.int64, copy=False)


def require_room(positions: int, stepper: Stepper) -> None:
    """Raise BadArgument for more positions than the model was made for."""
    if positions > stepper.max_positions:
        raise BadArgument(
            "positions",
            positions,
            f"at most {stepper.max_positions}, the positions of this model",
            "ask for fewer tokens",
        )


def require_vocabulary(tokens: Ints, vocabulary: int) -> None:
    """Raise BadArgument for a token id the model has no row for."""
    bad = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(bad):
        raise BadArgument("tokens", int(bad[0]), f"ids in 0–{vocabulary - 1}", "is this the model's own tokenizer?")
