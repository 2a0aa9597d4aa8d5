"""Reference decoder: the protocol's ``Decoder`` over a layered model.

A session keeps the depth of every token of a row (its *trail*), so that a rollback restores the cap. K/V above the cap
stay until ``commit``. Under ``free_deferred`` a session also keeps the state of every token that stopped early, so that
``deepen`` can continue it. ``generate`` is the timed path: it commits every token and keeps logits on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.step import AdaptiveForward, StepInput, StepOutput, concatenate_steps
from emad_ref.errors import BadArgument, EmadError, is_number, is_whole, require_instance, require_whole
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Capabilities, InadmissibleDepth, Prompt, Step, Unsupported, as_int64
from emad_ref.record import DECODE, PROMPT, Ints, Record, StopReason, TokenLog, Work
from emad_ref.schedule.schedules import (
    SCHEDULES,
    DeferredStates,
    SessionState,
    TokenDepthCap,
    compute_deferred_states_at_ceiling,
    get_point_schedule,
)
from emad_ref.signals import require_finite

LARGEST_SEED = 2**43 - 1  # a torch generator's seed holds the largest times 1,000,003 plus a row


class SessionClosed(EmadError):
    """Raised if a session is used after ``close``."""


def require_sampling_parameters(temperature: object, seed: object) -> None:
    """Raise BadArgument for a temperature or seed that ``Sampler`` does not take."""
    if not is_number(temperature) or not 0 <= temperature < math.inf:
        raise BadArgument("temperature", temperature, "a finite number ≥ 0", "0 decodes greedily")
    require_whole("seed", seed, -LARGEST_SEED, LARGEST_SEED)


class Sampler:
    """Greedy at ``temperature`` 0, else a draw from softmax(logits / temperature).

    Each row has its own generator, seeded with (seed, row): its tokens do not depend on its neighbours.
    """

    def __init__(self, rows: int, temperature: float = 0.0, seed: int = 0):
        require_sampling_parameters(temperature, seed)
        self.temperature = float(temperature)
        self._generators = [torch.Generator().manual_seed(int(seed) * 1_000_003 + row) for row in range(rows)]

    def pick_next_tokens(self, logits: Tensor, rows: list[int]) -> Tensor:
        """int64 [len(rows)] next tokens for ``logits`` [len(rows), V]; ``rows`` are the original row numbers."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        weights = torch.softmax(logits.double() / self.temperature, dim=-1).cpu()
        draws = [torch.multinomial(w, 1, generator=self._generators[row]) for w, row in zip(weights, rows, strict=True)]
        return torch.cat(draws).to(logits.device)


class ReferenceSession:
    """The protocol's ``Session``. Every array argument is [rows] or [rows, n]; depths count from 1."""

    def __init__(self, forward: AdaptiveForward, prompts: Sequence[Prompt], capacity: int):
        self._forward, self._stepper = forward, forward.stepper
        self._point, self._schedule = forward.point, forward.schedule
        cache = self._stepper.open_cache([prompt.source for prompt in prompts], capacity)
        deferred, work = DeferredStates(len(prompts)), Work.none(self._stepper.layers)
        self._store = SessionState(self._stepper, cache, deferred, work, forward.translators)
        self._trail: list[list[int]] = [[] for _ in prompts]
        self._first_decided = [len(prompt.tokens) - 1 for prompt in prompts]  # by row, the first decided position
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
        return self._store.work + self._store.cache.encoder_work()

    @torch.inference_mode()
    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        self._require_open()
        tokens = self._checked_tokens(tokens)
        forced = None if depth is None else self._checked_depth(depth, tokens.shape)
        n = tokens.shape[1]
        n_logits = n if last is None else last
        if not 0 <= n_logits <= n:
            raise BadArgument("last", last, f"0–{n}, tokens of this feed", "None asks for the logits of all of them")
        ids = torch.from_numpy(tokens).to(self._stepper.device)
        one_pass = self._forward.can_decide_chunks if forced is None else bool((forced == forced[:, :1]).all())
        if one_pass:
            return self.process_tokens(ids, forced, n_logits).to_numpy_step()
        steps = [
            self.process_tokens(ids[:, [i]], None if forced is None else forced[:, [i]], int(i >= n - n_logits))
            for i in range(n)
        ]
        return concatenate_steps(steps).to_numpy_step()

    @torch.inference_mode()
    def deepen(self, length: Ints) -> Step:
        self._require_open()
        length, ceiling = self._checked_shallow(length), self._point.ceiling
        states = compute_deferred_states_at_ceiling(self._store, ceiling, length, self.length)
        logits = self._forward.probe.emit_logits(states, ceiling, self._store.work)
        require_finite(logits.amax(dim=-1), "at the ceiling")
        rows, n = logits.shape[:2]
        for trail, first in zip(self._trail, length.tolist(), strict=True):
            trail[first:] = [ceiling] * n
        depth, unread = np.full((rows, n), ceiling), np.full((rows, n, len(self._point.probes)), np.nan)
        return StepOutput(logits, depth, unread, depth[:, 0]).to_numpy_step()

    def rollback(self, length: Ints) -> None:
        self._require_open()
        length = self._checked_length(length, "rollback")
        for row, new_length in enumerate(length.tolist()):
            del self._trail[row][new_length:]
            # the rule decides everything after a shortened prompt
            self._first_decided[row] = min(self._first_decided[row], new_length)
        self._store.cache.truncate(length)
        self._store.deferred.truncate(length)

    def commit(self, length: Ints) -> None:
        self._require_open()
        self._commit(self._checked_length(length, "commit").copy())  # the caller may use its array again

    def drop(self, rows: Ints) -> None:
        self._require_open()
        gone, rows_now = set(np.atleast_1d(as_int64("rows", rows)).tolist()), range(len(self._trail))
        if not gone < set(rows_now):
            expected = f"some, not all, of rows 0–{len(rows_now) - 1}"
            raise BadArgument("rows", sorted(gone), expected, "close() ends the whole session")
        self._store.cache.drop_rows(np.array(sorted(gone), dtype=np.int64))
        remaining = [row for row in rows_now if row not in gone]
        self._trail = [self._trail[row] for row in remaining]
        self._first_decided = [self._first_decided[row] for row in remaining]
        self._committed = self._committed[remaining]
        self._store.deferred.keep_rows(remaining)

    def close(self) -> None:
        empty = self._stepper.new_cache(1, 1)  # allocates nothing before its first write
        self._open = False
        self._store = replace(self._store, cache=empty, deferred=DeferredStates(1), work=self.work)

    # ------------------------------------------------------------ the timed path

    @property
    def state(self) -> SessionState:
        """State for a loop that runs layers itself instead of the session's steps."""
        return self._store

    def prefill(self, prompts: Sequence[Prompt]) -> StepOutput:
        """Prefill: run prompts at the ceiling except their last positions, which are the first step."""
        prefixes = [np.asarray(prompt.tokens[:-1], dtype=np.int64) for prompt in prompts]
        lengths = np.array([len(prefix) for prefix in prefixes])
        if lengths.max() > 0:
            self._run_prompts(prefixes, lengths)
        last = torch.tensor([[int(prompt.tokens[-1])] for prompt in prompts], device=self._stepper.device)
        return self.process_tokens(last, None)

    def prefill_whole(self, prompts: Sequence[Prompt]) -> StepOutput:
        """Prefill whole prompts in one forward: enough if no token can exit below the ceiling."""
        lengths = np.array([len(prompt.tokens) for prompt in prompts])
        hidden = self._run_prompts([np.asarray(prompt.tokens, dtype=np.int64) for prompt in prompts], lengths)
        last = torch.from_numpy(lengths - 1).to(hidden.device)
        ceiling, states = self._point.ceiling, hidden[torch.arange(len(prompts), device=hidden.device), last]
        logits = self._forward.probe.emit_logits(states, ceiling, self._store.work)
        require_finite(logits.amax(dim=-1), "at the depth of emission")
        depth = np.full((len(prompts), 1), ceiling)
        return StepOutput(logits[:, None], depth, np.empty((len(prompts), 1, 0)), depth[:, 0])

    def commit_all(self) -> None:
        """``commit`` every token held."""
        self._commit(self.length)

    def process_tokens(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        """Process int64 [rows, n] on the device; ``forced`` [rows, n], constant along n.

        Without ``forced`` n is 1, or any if ``AdaptiveForward.can_decide_chunks``. ``last``: number of tokens with
        logits, 0…n.
        """
        length, cache = self.length, self._store.cache
        if forced is None:
            admitted = self._admissions()
            caps = np.array([one.cap for one in admitted], dtype=np.int64)
            by_rule = np.array([not one.fixed for one in admitted], dtype=bool)
        else:
            caps, by_rule = forced[:, 0], np.zeros(len(forced), dtype=bool)
        positions = length[:, None] + np.arange(ids.shape[1])
        inputs = self._stepper.prepare_forward(positions, cache, caps=caps, by_rule=by_rule)
        decided = length - np.array(self._first_decided)
        output = self._forward.run_step(StepInput(ids, inputs, self._store, decided, last))
        # without a probe no other check notices NaN, and the argmax of NaN is a valid id
        require_finite(output.logits.amax(dim=-1), "at the depth of emission")
        for trail, depths in zip(self._trail, output.depth.tolist(), strict=True):
            trail.extend(depths)
        return output

    # ------------------------------------------------------------ private

    def _commit(self, length: Ints) -> None:
        self._committed = length
        if self._schedule.never_rises:
            self._store.cache.free_layers_above(np.array([admitted.cap for admitted in self._admissions(length)]))

    def _run_prompts(self, prefixes: Sequence[Ints], lengths: Ints) -> Tensor:
        """Hidden states at the ceiling of ``prefixes``, padded on the right: [rows with one, longest, D]."""
        rows = np.flatnonzero(lengths > 0)
        widest = int(lengths.max())
        tokens = np.zeros((len(rows), widest), dtype=np.int64)
        for i, row in enumerate(rows):
            tokens[i, : lengths[row]] = prefixes[int(row)]
        positions = np.broadcast_to(np.arange(widest), tokens.shape)
        inputs = self._stepper.prepare_forward(positions, self._store.cache, rows=rows, lengths=lengths[rows])
        ceiling = self._point.ceiling
        hidden = self._stepper.embed(torch.from_numpy(tokens).to(self._stepper.device), inputs)
        hidden = self._stepper.run_layers(hidden, 0, ceiling, inputs)
        self._store.work.count_blocks(0, ceiling, len(rows), widest, inputs.executed)
        for row in rows:
            self._trail[row].extend([ceiling] * int(lengths[row]))
        return hidden

    def _admissions(self, length: Ints | None = None) -> list[TokenDepthCap]:
        """Admission of the schedule for the next token of each row, after ``length`` [rows] tokens (all by default)."""
        lengths = self.length if length is None else length
        return [
            self._schedule.admit(self._point, trail, first_decided, t)
            for trail, first_decided, t in zip(self._trail, self._first_decided, lengths.tolist(), strict=True)
        ]

    def _require_open(self) -> None:
        if not self._open:
            raise SessionClosed("session=closed, but expected an open one; start() a new one")

    def _checked_tokens(self, tokens: Ints) -> Ints:
        tokens = as_int64("tokens", tokens)
        if tokens.ndim != 2 or len(tokens) != len(self._trail) or tokens.shape[1] < 1:
            raise BadArgument("tokens", tokens.shape, f"shape [{len(self._trail)}, n ≥ 1]")
        require_known_token_ids(tokens, self._stepper.vocabulary_size)
        require_within_max_positions(int(self.length.max()) + tokens.shape[1], self._stepper)
        return tokens

    def _checked_depth(self, depth: Ints, shape: tuple[int, ...]) -> Ints:
        depth = as_int64("depth", depth)
        if depth.shape != shape:
            raise BadArgument("depth", depth.shape, f"the shape of tokens, {list(shape)}")
        for row, depths in enumerate(depth.tolist()):
            trail = list(self._trail[row])
            for i, one in enumerate(depths):
                admitted = self._schedule.admit(self._point, trail, self._first_decided[row], len(trail))
                if one != admitted.cap and (admitted.fixed or not 1 <= one < admitted.cap):
                    admits = admitted.cap if admitted.fixed else f"1–{admitted.cap}"
                    why = self._schedule.inadmissible_reason
                    raise InadmissibleDepth(f"depth[{row}, {i}]={one}, but row {row} admits {admits} here; {why}")
                trail.append(one)
        return depth

    def _checked_shallow(self, length: Ints) -> Ints:
        """Check ``length`` [rows]: all tokens from there on stopped early, the same number in each row."""
        if not self._schedule.deepens:
            able = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.deepens)
            raise Unsupported(
                f"deepen under schedule={self._point.schedule!r}, but only {able} keeps the states of tokens that "
                f"stopped early and lets them rise; open the decoder at a point with schedule={able!r}"
            )
        length, current = as_int64("length", length), self.length
        if length.shape != current.shape or (length < 0).any() or len({*(current - length).tolist()}) > 1:
            expected = f"one per row, each as far below the held {current.tolist()} as the others"
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
        length = as_int64("length", length)
        # lists, because this runs once per token: on a few rows the call overhead of NumPy dominates
        current, least = self.length.tolist(), [max(1, n) for n in self._committed.tolist()]
        lengths = length.tolist()
        if length.shape != (len(current),) or not all(
            a <= n <= b for a, n, b in zip(least, lengths, current, strict=True)
        ):
            expected = f"one per row, between the committed {least} and the held {current}"
            raise BadArgument("length", lengths, expected, f"nothing else can be the target of a {verb}")
        return length


class WalkedDecoder:
    """The protocol's ``Decoder`` for any family of ``models.families``.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    point : OperatingPoint
        For that model's number of layers.
    session, sampler : type
        Classes of its sessions and draws, which a subclass may replace.

    Raises
    ------
    BadArgument
        A point for another number of layers.

    References
    ----------
    EMAD, "Algorithm (per token)".
    """

    session: ClassVar[type[ReferenceSession]] = ReferenceSession
    sampler: ClassVar[type[Sampler]] = Sampler

    def __init__(
        self, stepper: Stepper, point: OperatingPoint, *, seed: int = 0, max_rows: int = 1, temperature: float = 0.0
    ):
        require_instance("point", point, OperatingPoint, "full_depth(layers), or profile.point(margin)")
        require_sampling_parameters(temperature, seed)
        require_whole("max_rows", max_rows, 1)
        if point.layers != stepper.layers:
            raise BadArgument("point.layers", point.layers, f"{stepper.layers}, the layers of this model")
        self.stepper, self.point = stepper, point
        self.seed, self.max_rows, self.temperature = seed, max_rows, temperature
        self._forward = AdaptiveForward(stepper, point)
        self.capabilities = Capabilities(
            max_feed=64,
            schedules=frozenset(SCHEDULES),
            deepens=get_point_schedule(point).deepens,
            max_positions=stepper.max_positions,
        )

    @torch.inference_mode()
    def start(self, prompts: Sequence[Prompt]) -> tuple[ReferenceSession, Step]:
        session = self._open(prompts, capacity=256)
        return session, session.prefill(prompts).to_numpy_step()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        """Decode up to ``max_new`` tokens per row; a row ends with its stop token, which is emitted.

        Raises:
            BadArgument: no prompt, an empty one, too many rows, a token outside the vocabulary, or more positions
                than the model has.
            NotFinite: logits hold NaN or +inf.
        """
        session, output = self.start_with_room(prompts, max_new)
        return self._decode(session, output, prompts, max_new, stop)

    @torch.inference_mode()
    def start_with_room(self, prompts: Sequence[Prompt], max_new: int) -> tuple[ReferenceSession, StepOutput]:
        """Open a session with room for ``max_new`` tokens; returns it with the step after each prompt.

        Logits stay on the device. For loops that choose tokens themselves and call ``process_tokens``. Raises as
        ``generate``.
        """
        if not is_whole(max_new) or max_new < 1:
            raise BadArgument("max_new", max_new, "at least one new token", "start() reads a prompt without emitting")
        longest = max((len(p.tokens) for p in prompts), default=0)
        require_within_max_positions(longest + max_new - 1, self.stepper)
        session = self._open(prompts, capacity=longest + max_new)
        return session, session.prefill_whole(prompts) if self.point.has_fixed_depth else session.prefill(prompts)

    def prompt_work(self, prompts: Sequence[Prompt]) -> Work:
        """Work of ``start_with_room`` for prompt positions before the last."""
        work = Work.none(self.stepper.layers)
        widest = max(len(p.tokens) for p in prompts)
        if self.point.has_fixed_depth:
            work.tokens[: self.point.ceiling] = len(prompts) * (widest - 1)
            work.context[: self.point.ceiling] = len(prompts) * (widest - 1) * widest
        elif widest > 1:
            rows = sum(len(p.tokens) > 1 for p in prompts)
            work.count_blocks(0, self.point.ceiling, rows, widest - 1, widest - 1)
        return self._with_sources(work, prompts)

    def synchronize(self) -> None:
        for device in {self.stepper.device, *self.stepper.devices}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def close(self) -> None:
        """Nothing to free: the model belongs to the caller."""

    # ------------------------------------------------------------ private

    def _open(self, prompts: Sequence[Prompt], capacity: int) -> ReferenceSession:
        if not 1 <= len(prompts) <= self.max_rows:
            raise BadArgument("prompts", f"{len(prompts)} prompts", f"1–{self.max_rows}", "ask for a larger max_rows")
        for row, prompt in enumerate(prompts):
            if len(prompt.tokens) == 0:
                raise BadArgument(f"prompts[{row}]", [], "at least one token", "start with the model's opening token")
            tokens = as_int64(f"prompts[{row}]", prompt.tokens)
            if tokens.ndim != 1:
                raise BadArgument(f"prompts[{row}]", tokens.shape, "shape [n]", "one Prompt per row")
            require_known_token_ids(tokens, self.stepper.vocabulary_size)
        require_within_max_positions(max(len(p.tokens) for p in prompts), self.stepper)
        return self.session(self._forward, prompts, capacity)

    def _decode(
        self,
        session: ReferenceSession,
        output: StepOutput,
        prompts: Sequence[Prompt],
        max_new: int,
        stop: frozenset[int],
    ) -> Record:
        log, sampler = TokenLog(), self.sampler(len(prompts), self.temperature, self.seed)
        ceiling, unread = self.point.ceiling, np.full(len(self.point.probes), np.nan)
        for row, prompt in enumerate(prompts):
            for token in prompt.tokens[:-1]:
                log.append(row, 0, int(token), ceiling, ceiling, PROMPT, unread)
        fed = [int(prompt.tokens[-1]) for prompt in prompts]
        emitted: list[list[int]] = [[] for _ in prompts]
        reasons: list[StopReason] = ["length"] * len(prompts)
        alive = list(range(len(prompts)))
        while True:
            picked, depths = sampler.pick_next_tokens(output.logits[:, -1], alive), output.depth[:, -1].tolist()
            finished = []
            for i, (row, token, depth) in enumerate(zip(alive, picked.tolist(), depths, strict=True)):
                log.append(row, 0, fed[row], depth, int(output.cap[i]), DECODE, output.signal[i, -1])
                emitted[row].append(token)
                fed[row] = token
                if token in stop:
                    reasons[row] = "stop token"
                if token in stop or len(emitted[row]) == max_new:
                    finished.append(i)
            if len(finished) == len(alive):
                break
            if finished:
                session.drop(np.array(finished))
                keep = [i for i in range(len(alive)) if i not in finished]
                picked, alive = picked[keep], [alive[i] for i in keep]
            session.commit_all()
            output = session.process_tokens(picked[:, None], None)
        return Record(
            tokens=log.to_token_table(),
            signal=log.to_signal_array(),
            emitted=[np.array(tokens, dtype=np.int64) for tokens in emitted],
            stop=reasons,
            work={0: session.work},
            prompt_work={0: self.prompt_work(prompts)},
        )

    def _with_sources(self, work: Work, prompts: Sequence[Prompt]) -> Work:
        """``work`` of prompts, and of their sources: the encoder, and K/V for prompt positions."""
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


def require_within_max_positions(positions: int, stepper: Stepper) -> None:
    """Raise BadArgument for more positions than the model supports."""
    if positions > stepper.max_positions:
        expected = f"at most {stepper.max_positions}, the positions of this model"
        raise BadArgument("positions", positions, expected, "ask for fewer tokens")


def require_known_token_ids(tokens: Ints, vocabulary: int) -> None:
    """Raise BadArgument for a token id without a row in the model's embedding."""
    bad = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(bad):
        raise BadArgument("tokens", int(bad[0]), f"ids in 0–{vocabulary - 1}", "is this the model's own tokenizer?")
