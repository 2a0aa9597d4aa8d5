"""Self-speculative decoding: a model drafts with an early exit and verifies the same tokens at full depth.

    copy     if the last three tokens occurred before, d_1 … d_k are their continuation there; else
    feed     (last token, d_1 … d_k), one by one, to layer e
    gate     g_i = w·norm(h_e) + c, the expected √KL between the readout there and the model's final output
    draft    d_{i+1} from softmax(head_S(norm(T_e(h_e))))  while g_i ≤ τ and i < ``longest``
    verify   those k + 1 tokens in one pass, layers e + 1 … ceiling, over their states and K/V after layer e
    accept and emit by the rule of ``decoding.speculation``; roll back the rest

Symbols: ``layer`` is e, ``threshold`` τ, ``lens`` T, ``vocabulary`` S; a round copies up to ``copied`` tokens. Draft
and verification share one session and one cache, so no token runs a layer twice. The output is the model's own at the
point's ceiling, whatever ``Drafting`` says (up to ties of two logits by rounding); only the cost changes. A token
outside S has no probability under the draft, and the acceptance rule stays exact.

In the record (model 0) every token of a round occurs twice: as ``draft`` at depth e, not kept, and as ``verify`` at the
ceiling. With a gate the last position of each prompt does too, as ``draft`` and ``decode``. So layers up to e run draft
rows, layers above e run verify rows, and both run the opening's rows. The head runs once per verify row and per draft
row, except the last draft row of a round, whose proposal is unused. Copies run neither gate nor head.

``draft`` and ``self_speculate`` work through the protocol with any decoder whose capabilities say ``deepens``; they
read all logits of a draft and drop those outside S. ``DraftingDecoder`` is the timed path over a layered model:
greedy, and with a pruned draft head (kind ``subset``). Rows share forwards: a row that has stopped drafting repeats its
last token, and the surplus is rolled back.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import harmonic_mean, median
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.partner import Partner, TokenLoggingSession, require_prompts
from emad_ref.decoding.reference import ReferenceSession, WalkedDecoder
from emad_ref.decoding.speculation import (
    EndOfText,
    LogitsByPlace,
    SpeculationOptions,
    SpeculationResult,
    SpeculativeSequence,
    build_speculation_result,
    lengths_before_last_token,
    make_room,
    never_end_of_text,
    room_by_row,
    run_rounds,
    tokens_at,
    verify_in_pieces,
)
from emad_ref.decoding.step import StepOutput
from emad_ref.errors import BadArgument, is_number, is_whole
from emad_ref.models.stepper import LayerInputs, Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.probes.draft_reader import EarlyExitDraftReader
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import DECODE, DRAFT, PROMPT, VERIFY, Floats, Ints, Record, StopReason, TokenLog
from emad_ref.signals import require_finite

MODEL = 0
MATCHED_TOKENS = 3  # with two, every other match is accidental


class PromptLookup:
    """Prompt lookup in one growing text: what followed an earlier occurrence of its last ``MATCHED_TOKENS``.

    A text that repeats itself with a period shorter than the copy continues in that period. After prompt lookup
    decoding (Saxena 2023) and LLMA (Yang et al. 2304.04487).
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = MATCHED_TOKENS

    def find_continuation(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``tokens``, the last call's text extended; empty if its end is new."""
        if most < 1:
            return []
        for end in range(self._read, len(tokens)):  # only matches with a following token
            self._after[tuple(tokens[end - MATCHED_TOKENS : end])] = end
        self._read = max(MATCHED_TOKENS, len(tokens))
        start = self._after.get(tuple(tokens[-MATCHED_TOKENS:]))
        if start is None:
            return []
        period = len(tokens) - start
        return [tokens[start + at % period] for at in range(most)]


@dataclass(frozen=True, eq=False)
class Drafting:
    """Setting of self-speculation: how a model drafts for itself.

    Attributes
    ----------
    layer : int
        e, 1…L − 1: drafted tokens run to this layer before they are verified.
    longest : int
        Most drafts per round read after ``layer``, ≥ 0.
    threshold : float
        √nats: drafting continues while the gate's expected √KL is at most this; inf: always, without a gate.
    lens : str or None
        Digest of the attached lens of the drafts' readout; None: the model's own head.
    gate : EntropyEstimator or None
        A linear estimator of the signal ``divergence`` with one probe, ``layer``; None without a threshold.
    vocabulary : int64 [k] or None
        Ascending ids whose rows of the head a draft reads; None: all.
    copied : int
        Most tokens per round copied in place of drafts if the text repeats itself; 0: none.

    Raises
    ------
    BadArgument
        Values outside these ranges, a threshold without a gate, another kind of gate.

    References
    ----------
    Saxena 2023 (prompt lookup); Belrose et al., 2303.08112 (lens).
    """

    layer: int
    longest: int
    threshold: float = math.inf
    lens: str | None = None
    gate: EntropyEstimator | None = None
    vocabulary: Ints | None = None
    copied: int = 0

    def __post_init__(self) -> None:
        for name in ("layer", "longest", "copied"):
            if not is_whole(getattr(self, name)):
                raise BadArgument(f"drafting.{name}", getattr(self, name), "a whole number", "pass an int")
        if self.layer < 1:
            raise BadArgument("drafting.layer", self.layer, "a layer ≥ 1, below the last")
        if self.copied < 0:
            raise BadArgument("drafting.copied", self.copied, "0 or more tokens a round", "0 copies none")
        if self.longest < (self.copied == 0):
            raise BadArgument("drafting.longest", self.longest, "at least one drafted token a round")
        if not is_number(self.threshold) or math.isnan(self.threshold):
            raise BadArgument("drafting.threshold", self.threshold, "√nats, or inf to draft on always")
        if self.lens == "":
            raise BadArgument(
                "drafting.lens", self.lens, "the digest of a tuned lens", "None reads by the model's head"
            )
        if self.gate is None and self.uses_gate:
            raise BadArgument(
                "drafting.gate", None, f"a gate for threshold {self.threshold:g}", "threshold inf asks none"
            )
        if self.gate is not None and (self.gate.kind != "linear" or len(self.gate.weights) != 1):
            description = f"{self.gate.name} with {len(self.gate.weights)} probes"
            raise BadArgument("drafting.gate", description, "linear with one probe, the layer", "see emad_ref.fit_gate")
        ids = self.vocabulary
        if ids is None:
            return
        whole = isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1 and len(ids) > 0
        if not whole or ids[0] < 0 or (np.diff(ids) <= 0).any():
            expected = "ascending ids ≥ 0, int64 [k ≥ 1], each once"
            raise BadArgument("drafting.vocabulary", ids, expected, "np.unique sorts them; None reads all")

    @property
    def uses_gate(self) -> bool:
        """Whether the gate reads."""
        return self.threshold < math.inf

    @property
    def active_gate(self) -> EntropyEstimator | None:
        """The gate, if it reads."""
        return self.gate if self.uses_gate else None

    def require_fits_model(self, ceiling: int, vocabulary: int | None = None) -> None:
        """Raise BadArgument for a model with a ``ceiling`` not above ``layer``, or without one of the ids."""
        if not 1 <= self.layer < ceiling:
            remedy = "at the ceiling nothing is left to verify"
            raise BadArgument("drafting.layer", self.layer, f"a layer in 1–{ceiling - 1}", remedy)
        if vocabulary is not None and self.vocabulary is not None and self.vocabulary[-1] >= vocabulary:
            expected = f"ids in 0–{vocabulary - 1} of this model"
            raise BadArgument(
                "drafting.vocabulary", int(self.vocabulary[-1]), expected, "choose them from its own text"
            )


def drafting_point(layers: int, drafting: Drafting | None = None) -> OperatingPoint:
    """The operating point of a decoder that drafts for itself.

    Parameters
    ----------
    layers : int
        L of the model.
    drafting : Drafting or None
        With a gate, every token without a forced depth stops after the gate's ``layer``. The gate's value is the step's
        signal, and the caller decides by it.

    Returns
    -------
    OperatingPoint
        Full depth, under a schedule that lets a stopped token continue.
    """
    point = replace(full_depth(layers), name="self-drafting", schedule="free_deferred")
    if drafting is None:
        return point
    drafting.require_fits_model(layers)
    gate = drafting.active_gate
    if gate is None:
        return replace(point, lens=drafting.lens)
    always = ((math.inf,),)
    return replace(
        point, lens=drafting.lens, probes=(drafting.layer,), thresholds=always, estimator=gate, signal="divergence"
    )


# ---------------------------------------------------------------- through the protocol


def draft(
    model: Partner,
    drafting: Drafting,
    prompts: Sequence[Prompt],
    max_new: int,
    *,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
    ended: EndOfText = never_end_of_text,
) -> SpeculationResult:
    """Decode by self-speculation: the model's own output at full depth, at the cost of drafts and verifications.

    Parameters
    ----------
    model : Partner
        A decoder opened at ``drafting_point(layers, drafting)``.
    drafting : Drafting
        Layer, gate, vocabulary and lengths of the drafts.
    prompts : sequence of Prompt
        One row each; rows and room as in ``speculate``.
    max_new : int
        Most new tokens per row.
    stop : set of int
        Tokens that end a row; they are emitted.
    temperature : float
        0 is greedy.
    seed : int
        Each row draws from (seed, row).
    ended : callable or None
        Whether the tokens emitted so far end their text.

    Returns
    -------
    SpeculationResult
        Record, rounds and verdicts of drafts.

    Raises
    ------
    Unsupported
        A decoder that cannot continue a stopped token, or does not show the gate's value.
    BadArgument
        A decoder at another point, a layer outside 1 … ceiling − 1, ids outside the vocabulary, and as ``speculate``.
    NotFinite
        Logits hold NaN or +inf.
    """
    options = SpeculationOptions(max_new, max(drafting.longest, drafting.copied), stop, temperature, seed, None, ended)
    require_prompts(prompts)
    require_deepening_support(model)
    drafting.require_fits_model(model.point.ceiling)
    expected = replace(drafting_point(model.point.layers, drafting), name=model.point.name, ceiling=model.point.ceiling)
    if model.point != expected:
        raise BadArgument("model.point", model.point.name, "the point of this drafting", "see drafting_point")
    return run_self_speculation(model, drafting, prompts, options)


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
    ended: EndOfText = never_end_of_text,
) -> SpeculationResult:
    """Decode by self-speculation without a gate: k drafts a round from the readout at ``exit_layer``.

    The readout goes through the point's lens. Only here acceptance may be lossy, by ``gate_bits``.

    Parameters
    ----------
    model : Partner
        A decoder that can continue a stopped token.
    exit_layer : int
        Layer of the drafts, 1 … ceiling − 1.
    prompts, max_new, k, stop, temperature, seed, gate_bits, ended
        As in ``speculate``.

    Returns
    -------
    SpeculationResult
        Record, rounds and verdicts of drafts.

    Raises
    ------
    Unsupported
        A decoder that cannot continue a stopped token.
    BadArgument
        An exit layer outside 1 … ceiling − 1, a point that decides depth by itself, and as ``speculate``.
    NotFinite
        Logits hold NaN or +inf.
    """
    options = SpeculationOptions(max_new, k, stop, temperature, seed, gate_bits, ended)
    require_prompts(prompts)
    require_deepening_support(model)
    if model.has_adaptive_depth:
        raise BadArgument(
            "model.point", model.point.name, "a point under which no token leaves by itself", "see drafting_point"
        )
    if not 1 <= exit_layer < model.point.ceiling:
        remedy = "at the ceiling nothing is left to verify"
        raise BadArgument("exit_layer", exit_layer, f"a layer in 1–{model.point.ceiling - 1}", remedy)
    return run_self_speculation(model, Drafting(exit_layer, k, lens=model.point.lens), prompts, options)


def require_deepening_support(model: Partner) -> None:
    """Raise Unsupported for a decoder without ``Session.deepen``."""
    if not model.decoder.capabilities.deepens:
        raise Unsupported(
            f"self-speculation with schedule={model.point.schedule!r}, but the decoder's capabilities do not say that "
            "it deepens; open it at drafting_point(layers) if it can under any schedule"
        )


def run_self_speculation(
    model: Partner, drafting: Drafting, prompts: Sequence[Prompt], options: SpeculationOptions
) -> SpeculationResult:
    """``draft`` with checked arguments."""
    log, opening = TokenLog(), DRAFT if drafting.uses_gate else DECODE
    with closing(TokenLoggingSession(model, MODEL, log, range(len(prompts)), prompts, PROMPT, opening)) as session:
        drafting.require_fits_model(model.point.ceiling, session.logits.shape[-1])
        # under a gate's point the last position of a prompt stopped too
        logits = session.deepen(session.length - 1, DECODE)[:, 0] if drafting.uses_gate else session.logits
        opened = session.work
        lookups = [PromptLookup() for _ in prompts]
        rows = run_rounds(
            prompts, logits, options, (session,), lambda alive: _draft_round(alive, session, drafting, lookups)
        )
        work = session.work
    return build_speculation_result(
        rows, log, None if work is None else {MODEL: work}, None if opened is None else {MODEL: opened}
    )


def _draft_round(
    rows: Sequence[SpeculativeSequence],
    session: TokenLoggingSession,
    drafting: Drafting,
    lookups: Sequence[PromptLookup],
) -> None:
    """Draft, verify, roll back: afterwards the session holds all tokens of each row but the last, at the ceiling."""
    vocabulary = session.logits.shape[-1]
    copies = [
        lookups[row.number].find_continuation(row.tokens, min(drafting.copied, row.draft_limit_by_max_new))
        for row in rows
    ]
    going = [
        not copied and min(drafting.longest, row.draft_limit_by_max_new) > 0
        for row, copied in zip(rows, copies, strict=True)
    ]
    if any(going):
        _draft_and_verify(rows, session, drafting, copies, going)
    else:
        for row, copied in zip(rows, copies, strict=True):
            for token in copied:
                row.draft_copied_token(token, vocabulary)

        def read_shallow_then_deepen(tokens: Ints) -> Floats:
            n = tokens.shape[1]
            session.feed(tokens, [DRAFT] * n, depth=drafting.layer, last=0)
            return session.deepen(session.length - n, VERIFY)

        verify_in_pieces(rows, session, max(map(len, copies)), read_shallow_then_deepen)
    session.rollback_and_commit(lengths_before_last_token(rows))


def _draft_and_verify(
    rows: Sequence[SpeculativeSequence],
    session: TokenLoggingSession,
    drafting: Drafting,
    copies: Sequence[list[int]],
    going: list[bool],
) -> None:
    """Run tokens one by one, then verify: ``going`` rows draft from the readout after the layer, others feed copies.

    Tokens beyond the least room of a row are verified one by one: ``deepen`` takes equally many of every row.
    """
    at, vocabulary = 0, session.logits.shape[-1]
    least, verified, unverified = int(room_by_row(rows, session).min()), LogitsByPlace(rows), list[list[int]]()
    while True:
        places = make_room(rows, session, 1)
        tokens = tokens_at(rows, places, 1)
        unverified.append(places)
        if drafting.uses_gate and any(going):
            logits = session.feed(tokens, [DRAFT], last=1)
            expected = session.signal[:, -1, 0]
            if np.isnan(expected).any():
                raise Unsupported(
                    f"drafting with a gate after layer {drafting.layer}, but the decoder's steps show no signal there"
                )
            going = [on and sure for on, sure in zip(going, expected <= drafting.threshold, strict=True)]
        else:
            # no head on the last draft of a round, whose proposal the verification replaces
            logits = session.feed(tokens, [DRAFT], depth=drafting.layer, last=int(any(going)))
        is_last = not any(going) and at >= max(map(len, copies))
        if is_last or at + 1 >= least:
            verified.store(unverified[0], session.deepen(session.length - len(unverified), VERIFY))
            unverified.clear()
        if is_last:
            return verified.verify()
        for number, (row, on, copied) in enumerate(zip(rows, going, copies, strict=True)):
            if on:
                row.draft_from_logits(logits[number, -1], drafting.vocabulary)
            elif at < len(copied):
                row.draft_copied_token(copied[at], vocabulary)
        at += 1
        going = [
            on and at < min(drafting.longest, row.draft_limit_by_max_new) for on, row in zip(going, rows, strict=True)
        ]


# ---------------------------------------------------------------- the timed path

RoundKind = Literal["draft", "copy", "step"]  # read drafts; only verify copied tokens; one token at full depth
TRIED = 3  # rounds of a kind before it is compared; the first also pays for first uses of code and memory
REMEMBERED = 16  # rounds of a kind: what drafts gain depends on the text
SHORTEST_WAIT = 64  # rounds before a kind that was found more expensive is tried again
MOST_LOST = 0.005  # share of the time that trials may lose, plus the time of ``CREDIT`` tokens at the start
CREDIT = 2
FEW_ROWS = 2  # with more, rows that gain wait long for the slowest one


class RoundKindChooser:
    """Chooses the kind of the next round of n rows: the one of least measured time per token and row, at about n rows.

    With one row, a round of drafts may emit several tokens for the price of one. With many rows, the weights are read
    once for all of them anyway, and each rejected draft costs. All kinds emit the same tokens. The cost of a kind is
    its median time over its mean number of tokens per row, so that an interrupted round decides nothing.

    A round of another kind than the cheapest is a trial. Its loss is its time beyond that of as many tokens of the
    cheapest kind; a gain reduces earlier losses. While losses are too large, no kind is tried, so all trials together
    cost at most a known share of the time. The first round of each kind does not count.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, _SizeClass] = {}
        self._cheapest: float | None = None  # seconds per token, while a trial runs

    def choose_kind(self, rows: int, possible: Sequence[RoundKind]) -> RoundKind:
        """Choose among the ``possible`` kinds of a round of ``rows`` rows, "step" among them."""
        size = self._by_size.setdefault(_size_class(rows), _SizeClass())
        self._cheapest = None
        for kind in possible:
            if kind not in size.latest:
                return kind
        if len(size.rounds["step"]) < TRIED:
            return "step"
        cost = {kind: _seconds_per_token(size.rounds[kind]) for kind in possible if len(size.rounds[kind]) >= TRIED}
        best = min(cost, key=cost.__getitem__)
        if size.lost > MOST_LOST * size.seconds + CREDIT * cost[best]:
            return best
        waited = [kind for kind in possible if kind != best and size.is_due(kind)]
        if not waited:
            return best
        self._cheapest = cost[best]
        kind = min(waited, key=size.latest.__getitem__)
        while len(size.rounds[kind]) >= TRIED:  # the text has changed
            size.rounds[kind].popleft()
        return kind

    def record_round(self, kind: RoundKind, seconds: float, tokens: Sequence[int]) -> None:
        """Record a round that emitted ``tokens`` [rows]; the cost of the first of a kind does not count.

        A batch ends with its slowest row: up to ``FEW_ROWS`` rows count by their harmonic mean, more by their fewest.
        """
        size = self._by_size.setdefault(_size_class(len(tokens)), _SizeClass())
        gain = harmonic_mean(tokens) if len(tokens) <= FEW_ROWS else min(tokens)
        if kind in size.latest:
            size.rounds[kind].append((seconds, gain))
        size.latest[kind], size.count, size.seconds = size.count, size.count + 1, size.seconds + seconds
        if self._cheapest is not None:
            size.lost = max(0.0, size.lost + seconds - gain * self._cheapest)


@dataclass
class _SizeClass:
    """Rounds of about n rows; ``lost`` by trials and ``seconds`` of all rounds, and the ``latest`` round of a kind."""

    rounds: dict[RoundKind, deque[tuple[float, float]]] = field(  # seconds, tokens a row
        default_factory=lambda: defaultdict(lambda: deque(maxlen=REMEMBERED))
    )
    latest: dict[RoundKind, int] = field(default_factory=dict)
    count: int = 0
    seconds: float = 0.0
    lost: float = 0.0

    def is_due(self, kind: RoundKind) -> bool:
        """Whether ``kind`` was last compared too long ago, or never."""
        return len(self.rounds[kind]) < TRIED or self.count - self.latest[kind] > SHORTEST_WAIT


def _size_class(rows: int) -> int:
    """The least power of two that is not below ``rows``."""
    return 1 << (rows - 1).bit_length()


def _seconds_per_token(rounds: Collection[tuple[float, float]]) -> float:
    return median(seconds for seconds, _ in rounds) * len(rounds) / sum(tokens for _, tokens in rounds)


class DraftingDecoder(WalkedDecoder):
    """Greedy self-speculation of one model by ``drafting``.

    Its sessions are those of a decoder at ``drafting_point(layers)``. A round drafts as many tokens as every row of the
    batch has positions left, so each request fits that fits without drafts.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    drafting : Drafting
        Layer, gate, vocabulary and lengths of the drafts.
    max_rows : int
        Largest batch.
    always : bool
        Draft in every round. By default rounds stop drafting where drafts cost more measured time per token
        (``RoundKindChooser``): the tokens stay the same, the recorded depths and work depend on the machine.

    Raises
    ------
    BadArgument
        A layer or ids that this model lacks, a lens that is not attached, a gate of another width.
    """

    def __init__(self, stepper: Stepper, drafting: Drafting, *, max_rows: int = 1, always: bool = False):
        drafting.require_fits_model(stepper.layers, stepper.vocabulary_size)
        super().__init__(stepper, drafting_point(stepper.layers), max_rows=max_rows)
        self.drafting, self._choice = drafting, None if always else RoundKindChooser()
        self._reader = EarlyExitDraftReader(
            stepper, drafting.layer, drafting.lens, drafting.active_gate, drafting.vocabulary
        )

    def _decode(
        self,
        session: ReferenceSession,
        output: StepOutput,
        prompts: Sequence[Prompt],
        max_new: int,
        stop: frozenset[int],
    ) -> Record:
        rows = [
            _DraftedSequence(number, prompt.tokens.tolist(), len(prompt.tokens), max_new, stop)
            for number, prompt in enumerate(prompts)
        ]
        rounds: list[_RoundLog] = []
        for row, token in zip(rows, output.logits[:, -1].argmax(dim=-1).tolist(), strict=True):
            row.take([token])
        alive = _drop_finished_sequences(rows, session)
        while alive:
            rounds += self._next_round(alive, session)
            alive = _drop_finished_sequences(alive, session)
        log = self._log(prompts, rounds)
        return Record(
            tokens=log.to_token_table(),
            signal=log.to_signal_array(),
            emitted=[np.array(row.tokens[row.prompt :], dtype=np.int64) for row in rows],
            stop=[row.reason for row in rows],
            work={0: session.work},
            prompt_work={0: self.prompt_work(prompts)},
        )

    def _log(self, prompts: Sequence[Prompt], rounds: Sequence[_RoundLog]) -> TokenLog:
        """Build the record's columns from the collected rounds."""
        log, ceiling, unread = TokenLog(), self.point.ceiling, np.full(int(self.drafting.uses_gate), np.nan)
        for number, prompt in enumerate(prompts):
            for token in prompt.tokens[:-1].tolist():
                log.append(number, 0, token, ceiling, ceiling, PROMPT, unread)
            log.append(number, 0, int(prompt.tokens[-1]), ceiling, ceiling, DECODE, unread)
        for sequence, start, tokens, n_kept, gates in _join_steps(rounds):
            n = len(tokens)
            cap, signal = np.full(n, ceiling), np.full((n, len(unread)), np.nan)
            if gates is None:
                log.extend(sequence, 0, np.array(tokens), cap, cap, [DECODE] * n, signal)
                continue
            verified = signal.copy()
            signal[: len(gates)] = np.array(gates)[:, None]
            log.extend(sequence, 0, np.array(tokens), np.full(n, self.drafting.layer), cap, [DRAFT] * n, signal)
            log.relog_deepened_tokens(sequence, 0, start, cap, cap, VERIFY, verified)
            log.truncate(sequence, 0, start + n_kept)
        return log

    def _next_round(self, rows: Sequence[_DraftedSequence], session: ReferenceSession) -> list[_RoundLog]:
        """A round of the kind that ``RoundKindChooser`` chooses; reading its tokens waits for the device."""
        began, before = time.perf_counter(), [row.left for row in rows]
        # rows share forwards, and there is no padding beyond the model's positions
        most = self.stepper.max_positions - max(len(row.tokens) for row in rows)
        copied, longest = min(self.drafting.copied, most), min(self.drafting.longest, most)
        copies = [row.lookup.find_continuation(row.tokens, row.room(copied)) for row in rows]
        widths = [0 if copy else row.room(longest) for row, copy in zip(rows, copies, strict=True)]
        if self._choice is None:
            return self._round(rows, session, widths, copies)
        possible: list[RoundKind] = ["step"]
        possible += ["copy"] if any(copies) else []
        possible += ["draft"] if any(widths) else []
        kind = self._choice.choose_kind(len(rows), possible)
        if kind == "step":
            rounds = self._step(rows, session)
        else:
            rounds = self._round(rows, session, widths if kind == "draft" else [0] * len(rows), copies)
        emitted = [left - row.left for left, row in zip(before, rows, strict=True)]
        self._choice.record_round(kind, time.perf_counter() - began, emitted)
        return rounds

    def _step(self, rows: Sequence[_DraftedSequence], session: ReferenceSession) -> list[_RoundLog]:
        """Run one token of each row at full depth, without a draft."""
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=self.stepper.device)
        inputs = self.stepper.prepare_forward(_next_positions(rows), session.state.cache)
        hidden = self._run(session, self.stepper.embed(tokens, inputs), 0, self.point.ceiling, inputs)
        rounds = [_RoundLog(row.number, row.n_cached, row.tokens[-1:], 1, None) for row in rows]
        for row, own in zip(rows, self._own_tokens(session, hidden), strict=True):
            row.take(own)
        return rounds

    def _round(
        self,
        rows: Sequence[_DraftedSequence],
        session: ReferenceSession,
        widths: Sequence[int],
        copies: Sequence[list[int]],
    ) -> list[_RoundLog]:
        """Draft up to ``widths`` tokens of each row, or take its ``copies``; verify; roll back what was rejected."""
        starts = [row.n_cached for row in rows]
        shallow = self._draft if any(widths) else self._copy
        states, fed, proposed, gates = shallow(rows, session, widths, copies)
        chunk = torch.cat(states, dim=1) if len(states) > 1 else states[0]
        rounds = []
        for i, (row, tokens, width, own) in enumerate(
            zip(rows, fed, proposed, self._verify(session, chunk, starts), strict=True)
        ):
            right = 0
            while right < width and tokens[right + 1] == own[right]:
                right += 1
            row.take([*tokens[1 : right + 1], own[right]])
            rounds.append(_RoundLog(row.number, starts[i], tokens, row.n_cached - starts[i], [g[i] for g in gates]))
        if any(row.n_cached < start + chunk.shape[1] for row, start in zip(rows, starts, strict=True)):
            session.state.cache.truncate(np.array([row.n_cached for row in rows]))
        return rounds

    def _copy(
        self,
        rows: Sequence[_DraftedSequence],
        session: ReferenceSession,
        widths: Sequence[int],
        copies: Sequence[list[int]],
    ) -> _ShallowRun:
        """Run all copied tokens to layer e in one chunk, without readout; shorter rows repeat their last token."""
        most = max(map(len, copies))
        fed = [[row.tokens[-1], *copied] for row, copied in zip(rows, copies, strict=True)]
        fed = [tokens + tokens[-1:] * (most + 1 - len(tokens)) for tokens in fed]
        tokens = torch.tensor(fed, device=self.stepper.device)
        states = self._run_shallow(session, tokens, _next_positions(rows) + np.arange(most + 1))
        return _ShallowRun([states], fed, [len(copied) for copied in copies], [])

    def _draft(
        self,
        rows: Sequence[_DraftedSequence],
        session: ReferenceSession,
        widths: Sequence[int],
        copies: Sequence[list[int]],
    ) -> _ShallowRun:
        """Run tokens one by one: rows with ``widths`` > 0 draft from the readout after layer e, others feed copies."""
        device, layer, work = self.stepper.device, self.drafting.layer, session.state.work
        position, going = _next_positions(rows), [width > 0 for width in widths]
        drafts, most = [len(copied) for copied in copies], max(map(len, copies))
        token = torch.tensor([[row.tokens[-1]] for row in rows], device=device)
        fed, states, gates = [token], [], []
        while True:
            states.append(self._run_shallow(session, token, position))
            hidden = states[-1][:, -1]
            if self.drafting.uses_gate and any(going):
                gates.append(self._reader.predict_sqrt_kl(hidden, work).tolist())
                if not all(map(math.isfinite, gates[-1])):
                    require_finite(torch.tensor(gates[-1]), f"after layer {layer}")
                going = [on and gate <= self.drafting.threshold for on, gate in zip(going, gates[-1], strict=True)]
            at = len(states) - 1
            if not any(going) and at >= most:
                return _ShallowRun(states, torch.cat(fed, dim=1).tolist(), drafts, gates)
            if any(going):
                best = self._reader.draft_tokens(hidden, work)[:, None]
                token = best if all(going) else torch.where(torch.tensor(going, device=device)[:, None], best, token)
            copied = [row for row, copy in enumerate(copies) if at < len(copy)]
            if copied:
                token = token.clone()
                token[copied, 0] = torch.tensor([copies[row][at] for row in copied], device=device)
            fed.append(token)
            drafts = [count + on for count, on in zip(drafts, going, strict=True)]
            going = [on and count < width for on, count, width in zip(going, drafts, widths, strict=True)]
            position = position + 1

    def _run_shallow(self, session: ReferenceSession, tokens: Tensor, position: Ints) -> Tensor:
        """States [rows, n, D] of ``tokens`` [rows, n] after layer e."""
        inputs = self.stepper.prepare_forward(position, session.state.cache)
        return self._run(session, self.stepper.embed(tokens, inputs), 0, self.drafting.layer, inputs)

    def _run(self, session: ReferenceSession, hidden: Tensor, first: int, last: int, inputs: LayerInputs) -> Tensor:
        hidden = self.stepper.run_layers(hidden, first, last, inputs)
        session.state.work.count_blocks(first, last, len(hidden), hidden.shape[1], inputs.executed)
        return hidden

    def _verify(self, session: ReferenceSession, chunk: Tensor, starts: Sequence[int]) -> list[list[int]]:
        """The model's own next token after each token of ``chunk`` [rows, n, D], states after layer e."""
        ceiling = self.point.ceiling
        inputs = self.stepper.prepare_forward(
            np.array(starts)[:, None] + np.arange(chunk.shape[1]), session.state.cache
        )
        return self._own_tokens(session, self._run(session, chunk, self.drafting.layer, ceiling, inputs))

    def _own_tokens(self, session: ReferenceSession, hidden: Tensor) -> list[list[int]]:
        """Tokens [rows][n] that the model emits at states [rows, n, D] at the ceiling."""
        best = self._forward.probe.emit_logits(hidden, self.point.ceiling, session.state.work).max(dim=-1)
        if not math.isfinite(float(best.values.sum())):
            require_finite(best.values, "at the ceiling")
        tokens: list[list[int]] = best.indices.tolist()
        return tokens


@dataclass
class _DraftedSequence:
    """One sequence: ``tokens`` is the prompt and all emitted; the last has not been fed yet."""

    number: int
    tokens: list[int]
    prompt: int
    left: int
    stop: frozenset[int]
    reason: StopReason = "length"
    lookup: PromptLookup = field(default_factory=PromptLookup)

    @property
    def n_cached(self) -> int:
        """Tokens in the cache, once the first is emitted."""
        return len(self.tokens) - 1

    def room(self, drafts: int) -> int:
        """Useful drafts for this row, up to ``drafts``: the verification adds one more token."""
        return min(drafts, self.left - 1)

    def take(self, tokens: Sequence[int]) -> None:
        """Emit ``tokens``, up to the first that ends the row."""
        for token in tokens:
            self.tokens.append(token)
            self.left -= 1
            if token in self.stop:
                self.reason = "stop token"
                break


class _ShallowRun(NamedTuple):
    """A round up to layer e.

    ``states`` [rows, n, D] of each feed, tokens ``fed`` [rows][all], ``drafts`` of each row, ``gates`` read
    [feeds][rows].
    """

    states: list[Tensor]
    fed: list[list[int]]
    drafts: list[int]
    gates: list[list[float]]


class _RoundLog(NamedTuple):
    """One row's part of a round.

    ``tokens`` fed from position ``start`` on; the first ``kept`` are accepted. The gate's values at the first of them;
    None: steps at full depth.
    """

    sequence: int
    start: int
    tokens: list[int]
    kept: int
    gates: list[float] | None


def _join_steps(rounds: Sequence[_RoundLog]) -> Iterator[_RoundLog]:
    """The rounds of each sequence in order; consecutive steps at full depth are joined, as columns cost per entry."""
    steps: dict[int, list[_RoundLog]] = {}
    for each in rounds:
        if each.gates is None:
            steps.setdefault(each.sequence, []).append(each)
            continue
        yield from _joined(steps.pop(each.sequence, []))
        yield each
    for left in steps.values():
        yield from _joined(left)


def _joined(steps: Sequence[_RoundLog]) -> Iterator[_RoundLog]:
    if steps:
        tokens = [token for step in steps for token in step.tokens]
        yield steps[0]._replace(tokens=tokens, kept=len(tokens))


def _next_positions(rows: Sequence[_DraftedSequence]) -> Ints:
    """int64 [rows, 1] position of the next token fed by each row."""
    return np.array([row.n_cached for row in rows])[:, None]


def _drop_finished_sequences(rows: Sequence[_DraftedSequence], session: ReferenceSession) -> list[_DraftedSequence]:
    """The unfinished rows; finished ones leave the cache."""
    going = [row.left > 0 and row.reason == "length" for row in rows]
    if any(going) and not all(going):
        session.drop(np.flatnonzero(~np.array(going)))
    return [row for row, on in zip(rows, going, strict=True) if on]
