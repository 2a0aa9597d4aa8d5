"""Self-speculative decoding: a model drafts by leaving early and verifies by going on with the same tokens.

    copy     where the last three tokens stood in the text before, d_1 … d_k are what followed there; else
    feed     (last token, d_1 … d_k), one by one, to layer e
    gate     g_i = w·norm(h_e) + c, the expected √KL between the readout there and the model's final output
    draft    d_{i+1} from softmax(head_S(norm(T_e(h_e))))  while g_i ≤ τ and i < ``longest``
    verify   those k + 1 tokens run on in one pass, layers e + 1 … ceiling, over their states and K/V after layer e
    accept and emit by the rule of ``decoding.speculation``; roll back the rest

Symbols: ``layer`` is e, ``threshold`` τ, ``lens`` T, ``vocabulary`` S; a round copies up to ``copied`` tokens. Draft
and verification share one session and one cache, so no token runs a layer twice. The output is the model's own at the
point's ceiling, whatever ``Drafting`` says; only the cost changes.

In the record (model 0) every token of a round stands twice: as ``draft`` at depth e, not kept, and as ``verify`` at
the
ceiling. With a gate the last position of each prompt does too, as ``draft`` and ``decode``. ``draft`` works through
the
protocol with any decoder whose capabilities say ``deepens``; ``DraftingDecoder`` is the timed path over a layered
model, greedy and with a pruned draft head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.pair import LoggedSession, Partner, TokenLog, require_prompts
from emad_ref.decoding.reference import ReferenceSession, WalkedDecoder
from emad_ref.decoding.speculation import (
    EndOfText,
    SpeculationOptions,
    SpeculationResult,
    SpeculativeSequence,
    never_ends,
    run_rounds,
    speculation_result,
    verified_lengths,
)
from emad_ref.decoding.step import StepOutput
from emad_ref.errors import BadArgument
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator, OperatingPoint, full_depth
from emad_ref.probes.draft_reader import DraftReader
from emad_ref.probes.pruned_vocabulary import SeparateHeads, full_head
from emad_ref.probes.signal_values import require_finite
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import DECODE, DRAFT, PROMPT, VERIFY, Floats, Ints, Record, StopReason, Tokens
from emad_ref.schedule.interface import count_blocks

MATCHED_TOKENS = 3  # tokens: after two, every other copy is of a word that only looks alike


class PromptLookup:
    """Of one text that grows: where each run of ``MATCHED_TOKENS`` tokens stood last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = MATCHED_TOKENS

    def of(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``tokens``, all of the text so far; none where its end is new.

        ``tokens`` go on from those of the last call.
        """
        if most < 1:
            return []
        for end in range(self._read, len(tokens)):  # only runs that something follows
            self._after[tuple(tokens[end - MATCHED_TOKENS : end])] = end
        self._read = max(MATCHED_TOKENS, len(tokens))
        start = self._after.get(tuple(tokens[-MATCHED_TOKENS:]))
        if start is None:
            return []
        period = len(tokens) - start
        return [tokens[start + at % period] for at in range(most)]


MODEL = 0


@dataclass(frozen=True, eq=False)  # holds an array: a way of drafting is itself, not its values
class Drafting:
    """How a model drafts for itself.

    ``layer``       e, 1…L − 1: drafted tokens run so far before they are verified.
    ``longest``     drafts a round at most that are read after ``layer``, ≥ 0.
    ``threshold``   √nats: drafting goes on while the gate's expected √KL is ≤ it; inf: always, and no gate is asked.
    ``lens``        digest of the attached lens that drafts are read through; None: the model's own head.
    ``gate``        a linear estimator of the signal ``divergence`` with one probe, ``layer``; None where it is not
                    asked.
    ``vocabulary``  int64 [k] ascending ids whose rows of the head a draft reads; None: all of them.
    ``copied``      tokens that a round copies at most in place of drafts, where the text repeats itself; 0: none.

    Raises:
        BadArgument: values outside these ranges, a threshold without a gate, another kind of gate.
    """

    layer: int
    longest: int
    threshold: float = math.inf
    lens: str | None = None
    gate: Estimator | None = None
    vocabulary: Ints | None = None
    copied: int = 0

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise BadArgument("drafting.layer", self.layer, "a layer ≥ 1, below the last")
        if self.copied < 0:
            raise BadArgument("drafting.copied", self.copied, "0 or more tokens a round", "0 copies none")
        if self.longest < (self.copied == 0):
            raise BadArgument("drafting.longest", self.longest, "at least one drafted token a round")
        if math.isnan(self.threshold):
            raise BadArgument("drafting.threshold", self.threshold, "√nats, or inf to draft on always")
        if self.lens == "":
            raise BadArgument(
                "drafting.lens", self.lens, "the digest of a tuned lens", "None reads by the model's head"
            )
        self._require_gate()
        self._require_vocabulary()

    @property
    def gated(self) -> bool:
        """Whether the gate is asked."""
        return self.threshold < math.inf

    @property
    def opened(self) -> Estimator | None:
        """The gate, where it is asked."""
        return self.gate if self.gated else None

    def require(self, ceiling: int, vocabulary: int | None = None) -> None:
        """Refuse a model whose tokens go no deeper than ``layer``, or that lacks an id.

        Raises:
            BadArgument: a layer outside 1 … ceiling − 1, an id outside 0 … vocabulary − 1.
        """
        if not 1 <= self.layer < ceiling:
            raise BadArgument(
                "drafting.layer",
                self.layer,
                f"a layer in 1–{ceiling - 1}",
                "at the ceiling nothing is left to verify",
            )
        if vocabulary is not None and self.vocabulary is not None and self.vocabulary[-1] >= vocabulary:
            expected = f"ids in 0–{vocabulary - 1} of this model"
            raise BadArgument(
                "drafting.vocabulary", int(self.vocabulary[-1]), expected, "choose them from its own text"
            )

    def _require_gate(self) -> None:
        if self.gate is None:
            if self.gated:
                raise BadArgument(
                    "drafting.gate", None, f"a gate for threshold {self.threshold:g}", "threshold inf asks none"
                )
            return
        if self.gate.kind != "linear" or len(self.gate.weights) != 1:
            found = f"{self.gate.name} with {len(self.gate.weights)} probes"
            raise BadArgument("drafting.gate", found, "linear with one probe, the layer", "see calibration.gate")

    def _require_vocabulary(self) -> None:
        ids = self.vocabulary
        if ids is None:
            return
        whole = isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1 and len(ids) > 0
        if not whole or ids[0] < 0 or (np.diff(ids) <= 0).any():
            expected = "ascending ids ≥ 0, int64 [k ≥ 1], each once"
            raise BadArgument("drafting.vocabulary", ids, expected, "np.unique sorts them; None reads all")


def drafting_point(layers: int, drafting: Drafting | None = None) -> OperatingPoint:
    """What to open a decoder at that is to draft: full depth for every token that is not told to stop early, and what
    is needed to take up those that are.

    With a gate every token that is not told its depth stops after ``self_speculation.layer``, where the gate is read:
    its value is the step's signal, and who feeds decides by it.
    """
    point = replace(full_depth(layers), name="self-drafting", schedule="free_deferred")
    if drafting is None:
        return point
    drafting.require(layers)
    gate = drafting.opened
    if gate is None:
        return replace(point, lens=drafting.lens)
    always = ((math.inf,),)
    return replace(
        point, lens=drafting.lens, probes=(drafting.layer,), thresholds=always, estimator=gate, signal="divergence"
    )


def draft(
    model: Partner,
    drafting: Drafting,
    prompts: Sequence[Prompt],
    max_new: int,
    *,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
    ended: EndOfText = never_ends,
) -> SpeculationResult:
    """Emit up to ``max_new`` tokens per prompt; a stop token is emitted and ends its row.

    ``model``: a decoder opened at ``drafting_point(layers, drafting)``. Rows and room: as of ``speculation.speculate``.

    Raises:
        Unsupported: a decoder that cannot take a stopped token up again, or does not show the gate's value.
        BadArgument: a decoder at another point, a layer outside 1 … ceiling − 1, ids outside the vocabulary, and what
            ``speculate`` refuses.
        NotFinite: logits hold NaN or +inf.
    """
    options = SpeculationOptions(max_new, max(drafting.longest, drafting.copied), stop, temperature, seed, None, ended)
    require_prompts(prompts)
    require_deepening(model)
    drafting.require(model.point.ceiling)
    asked = replace(drafting_point(model.point.layers, drafting), name=model.point.name, ceiling=model.point.ceiling)
    if model.point != asked:
        raise BadArgument("model.point", model.point.name, "the point of this drafting", "see drafting_point")
    return run_drafting(model, drafting, prompts, options)


def require_deepening(model: Partner) -> None:
    """Raises Unsupported for a decoder that does not offer ``Session.deepen``."""
    if not model.decoder.capabilities.deepens:
        raise Unsupported(
            f"self-speculation with schedule={model.point.schedule!r}, but the decoder's capabilities do not say that "
            "it deepens; open it at drafting_point(layers) if it can under any schedule"
        )


def run_drafting(
    model: Partner, drafting: Drafting, prompts: Sequence[Prompt], options: SpeculationOptions
) -> SpeculationResult:
    """What ``draft`` does, of arguments that are known to fit."""
    log, opening = TokenLog(), DRAFT if drafting.gated else DECODE
    with closing(LoggedSession(model, MODEL, log, range(len(prompts)), prompts, PROMPT, opening)) as seat:
        drafting.require(model.point.ceiling, seat.logits.shape[-1])
        # under a gate's point the last position of a prompt stopped, too
        logits = seat.deepen(seat.length - 1, DECODE)[:, 0] if drafting.gated else seat.logits
        opened = seat.work
        texts = [PromptLookup() for _ in prompts]
        rows = run_rounds(prompts, logits, options, (seat,), lambda alive: _draft_round(alive, seat, drafting, texts))
        work = seat.work
    return speculation_result(
        rows, log, None if work is None else {MODEL: work}, None if opened is None else {MODEL: opened}
    )


def _draft_round(
    rows: Sequence[SpeculativeSequence], seat: LoggedSession, drafting: Drafting, texts: Sequence[PromptLookup]
) -> None:
    """Draft, go on, take back: afterwards the session holds all tokens of each row but the last, at the ceiling."""
    before, vocabulary = seat.length, seat.logits.shape[-1]
    copies = [texts[row.number].of(row.tokens, min(drafting.copied, row.room)) for row in rows]
    going = [not copied and min(drafting.longest, row.room) > 0 for row, copied in zip(rows, copies, strict=True)]
    if any(going):
        _draft_tokens(rows, seat, drafting, copies, going)
    else:
        for row, copied in zip(rows, copies, strict=True):
            for token in copied:
                row.copy(token, vocabulary)
        count = max(map(len, copies))
        tokens = np.array([row.padded(count) for row in rows], dtype=np.int64)
        seat.feed(tokens, [DRAFT] * (count + 1), depth=drafting.layer, last=0)
    for row, logits_there in zip(rows, seat.deepen(before, VERIFY), strict=True):
        row.verify(logits_there)
    seat.keep(verified_lengths(rows))


def _draft_tokens(
    rows: Sequence[SpeculativeSequence],
    seat: LoggedSession,
    drafting: Drafting,
    copies: Sequence[list[int]],
    going: list[bool],
) -> None:
    """Token by token: of the rows ``going`` what is read after the layer, of others the next of their copies."""
    at, vocabulary = 0, seat.logits.shape[-1]
    while True:
        tokens = np.array([[row.padded(at)[-1]] for row in rows], dtype=np.int64)
        if drafting.gated and any(going):
            logits = seat.feed(tokens, [DRAFT], last=1)
            going = [on and sure for on, sure in zip(going, _gate_allows(seat, drafting), strict=True)]
        else:
            # the last draft of a round is only taken along: a head on it would propose what the verification emits
            logits = seat.feed(tokens, [DRAFT], depth=drafting.layer, last=int(any(going)))
        if not any(going) and at >= max(map(len, copies)):
            return
        for number, (row, on, copied) in enumerate(zip(rows, going, copies, strict=True)):
            if on:
                row.propose(logits[number, -1], drafting.vocabulary)
            elif at < len(copied):
                row.copy(copied[at], vocabulary)
        at += 1
        going = [on and at < min(drafting.longest, row.room) for on, row in zip(going, rows, strict=True)]


def _gate_allows(seat: LoggedSession, drafting: Drafting) -> list[bool]:
    """Of each row, whether the gate lets it draft on from the token that was just fed."""
    expected = seat.signal[:, -1, 0]
    if np.isnan(expected).any():
        raise Unsupported(
            f"drafting with a gate after layer {drafting.layer}, but the decoder's steps show no signal there"
        )
    return (expected <= drafting.threshold).tolist()


class DraftingDecoder(WalkedDecoder):
    """A model that drafts for itself as ``drafting`` says; greedy.

    Its sessions are those of a decoder at ``drafting_point(layers)``. A row needs up to ``longest`` positions more than
    prompt + max_new beside others, as in ``self_speculation.draft``.

    Raises:
        BadArgument: a layer or ids that this model has not, a lens that is not attached, a gate of another width.
    """

    def __init__(self, stepper: Stepper, drafting: Drafting, *, max_rows: int = 1):
        drafting.require(stepper.layers, stepper.vocabulary)
        super().__init__(stepper, drafting_point(stepper.layers), max_rows=max_rows)
        self.drafting = drafting
        self._reader = DraftReader(stepper, drafting.layer, drafting.lens, drafting.opened, drafting.vocabulary)
        self._heads = SeparateHeads(stepper)

    def _decode(
        self,
        session: ReferenceSession,
        arrival: StepOutput,
        prompts: Sequence[Prompt],
        max_new: int,
        stop: frozenset[int],
    ) -> Record:
        log, rows = (
            _DraftingLog(prompts, self.drafting.layer, self.point.ceiling),
            _sequences_of(prompts, max_new, stop),
        )
        first = arrival.logits[:, -1].argmax(dim=-1)
        for row, token in zip(rows, first.tolist(), strict=True):
            row.take([token])
        alive = _drop_finished_sequences(rows, session)
        while alive:
            self._round(alive, session, log)
            alive = _drop_finished_sequences(alive, session)
        return Record(
            tokens=log.tokens(),
            signal=log.signal(self.drafting.gated),
            emitted=[np.array(row.emitted, dtype=np.int64) for row in rows],
            stop=[row.reason for row in rows],
            work={0: session.work},
            prompt_work={0: self.prompt_work(prompts)},
        )

    def _round(self, rows: Sequence[_DraftedSequence], session: ReferenceSession, log: _DraftingLog) -> None:
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
            log.stretches.append(_RoundLog(row.number, starts[i], tokens, row.held - starts[i], [g[i] for g in gates]))
        if any(row.held < start + chunk.shape[1] for row, start in zip(rows, starts, strict=True)):
            session.store.cache.truncate(np.array([row.held for row in rows]))

    def _copied(
        self, rows: Sequence[_DraftedSequence], session: ReferenceSession, copies: Sequence[list[int]]
    ) -> _ShallowRun:
        """Nothing is read after layer e: what is copied goes there in one chunk, shorter rows with their last token."""
        most = max(map(len, copies))
        fed = [_pad_with_last([row.last, *copied], most + 1) for row, copied in zip(rows, copies, strict=True)]
        tokens = torch.tensor(fed, device=self.stepper.device)
        states = self._shallow(session, tokens, _next_positions(rows) + np.arange(most + 1))
        return _ShallowRun([states], fed, [len(copied) for copied in copies], [])

    def _drafts(
        self,
        rows: Sequence[_DraftedSequence],
        session: ReferenceSession,
        widths: Sequence[int],
        copies: Sequence[list[int]],
    ) -> _ShallowRun:
        """Token by token: of rows of some width what is read after layer e, of others the next of their copies."""
        device, layer, work = self.stepper.device, self.drafting.layer, session.store.work
        position, going = _next_positions(rows), [width > 0 for width in widths]
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
                return _ShallowRun(states, torch.cat(fed, dim=1).tolist(), drafts, gates)
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

    def _shallow(self, session: ReferenceSession, tokens: Tensor, position: Ints) -> Tensor:
        """States [rows, n, D] of ``tokens`` [rows, n] after layer e."""
        store, layer = session.store, self.drafting.layer
        frame = self.stepper.frame(position, store.cache)
        hidden = self.stepper.run(self.stepper.embed(tokens, frame), 0, layer, frame, store.cache)
        count_blocks(store.work, 0, layer, len(tokens), tokens.shape[1], frame.executed)
        return hidden

    def _verified(self, session: ReferenceSession, chunk: Tensor, starts: Sequence[int]) -> list[list[int]]:
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
class _DraftedSequence:
    """One sequence under way: ``tokens`` is the prompt and all emitted; the last has not been fed yet."""

    number: int
    tokens: list[int]
    prompt: int
    left: int
    stop: frozenset[int]
    reason: StopReason = "length"
    seen: PromptLookup = field(default_factory=PromptLookup)

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


def _sequences_of(prompts: Sequence[Prompt], max_new: int, stop: frozenset[int]) -> list[_DraftedSequence]:
    return [
        _DraftedSequence(number, prompt.tokens.tolist(), len(prompt.tokens), max_new, stop)
        for number, prompt in enumerate(prompts)
    ]


def _next_positions(rows: Sequence[_DraftedSequence]) -> Ints:
    """int64 [rows, 1] position of the token that each feeds next."""
    return np.array([row.held for row in rows])[:, None]


def _drop_finished_sequences(rows: Sequence[_DraftedSequence], session: ReferenceSession) -> list[_DraftedSequence]:
    """The rows that go on; finished ones leave the cache."""
    finished = [i for i, row in enumerate(rows) if not row.going]
    if finished and len(finished) < len(rows):
        session.drop(np.array(finished))
    return [row for row in rows if row.going]


def _pad_with_last(tokens: list[int], length: int) -> list[int]:
    """With the last one again up to ``length``, to be rolled back."""
    return tokens + tokens[-1:] * (length - len(tokens))


class _ShallowRun(NamedTuple):
    """What was fed to layer e: ``states`` [rows, n, D] of each feed, the tokens ``fed`` [rows][all], ``drafts`` of each
    row, ``gates`` read [feeds][rows]."""

    states: list[Tensor]
    fed: list[list[int]]
    drafts: list[int]
    gates: list[list[float]]


class _RoundLog(NamedTuple):
    """One row's part of a round: ``tokens`` fed from position ``start`` on, the first ``kept`` of which stand, and what
    the ``gates`` said of the first of them."""

    sequence: int
    start: int
    tokens: list[int]
    kept: int
    gates: list[float]


class _DraftingLog:
    """The columns of a record: of prompts, and of ``layer_groups`` in order. Made at the end: the loop only
    collects."""

    def __init__(self, prompts: Sequence[Prompt], layer: int, ceiling: int):
        self._prompts, self._layer, self._ceiling = prompts, layer, ceiling
        self.stretches: list[_RoundLog] = []

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
        return _token_columns(number, 0, np.asarray(prompt.tokens), self._ceiling, phase, np.ones(n, dtype=np.int64))

    def _twice(self, stretch: _RoundLog) -> tuple[tuple[Ints, ...], tuple[Ints, ...]]:
        tokens, n = np.array(stretch.tokens), len(stretch.tokens)
        none, stands = np.zeros(n, dtype=np.int64), (np.arange(n) < stretch.kept).astype(np.int64)
        at = stretch.sequence, stretch.start, tokens
        return (
            _token_columns(*at, self._layer, np.full(n, DRAFT), none),
            _token_columns(*at, self._ceiling, np.full(n, VERIFY), stands),
        )


def _token_columns(number: int, start: int, tokens: Ints, depth: int, phase: Ints, kept: Ints) -> tuple[Ints, ...]:
    """sequence, position, token, depth, phase and kept of tokens in a row."""
    n = len(tokens)
    return np.full(n, number), start + np.arange(n), tokens, np.full(n, depth), phase, kept


def self_speculate(
    model: Partner,
    exit_layer: int,
    prompts: Sequence[Prompt],
    max_new: int,
    *,
    k: int = 4,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
    gate_bits: float | None = None,
    ended: EndOfText = never_ends,
) -> SpeculationResult:
    """Emit up to ``max_new`` tokens per prompt; a stop token is emitted and ends its row.

    Options, rows and room are those of ``speculation.speculate``, of which this is the case "itself, shallower".

    Raises:
        Unsupported: a decoder that cannot take a stopped token up again.
        BadArgument: an exit layer outside 1 … ceiling − 1, a point that decides depth by itself, and what ``speculate``
            refuses.
        NotFinite: logits hold NaN or +inf.
    """
    options = SpeculationOptions(max_new, k, stop, temperature, seed, gate_bits, ended)
    require_prompts(prompts)
    _require_exit_layer(model, exit_layer)
    return run_drafting(model, Drafting(exit_layer, k, lens=model.point.lens), prompts, options)


def _require_exit_layer(model: Partner, exit_layer: int) -> None:
    require_deepening(model)
    if model.undecided:
        raise BadArgument(
            "model.point", model.point.name, "a point under which no token leaves by itself", "see drafting_point"
        )
    if not 1 <= exit_layer < model.point.ceiling:
        raise BadArgument(
            "exit_layer",
            exit_layer,
            f"a layer in 1–{model.point.ceiling - 1}",
            "at the ceiling nothing is left to verify",
        )
