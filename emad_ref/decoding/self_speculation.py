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

In the record (model 0) every token of a round that drafts or copies occurs twice: as ``draft`` at depth e, not kept,
and as ``verify`` at the ceiling. So layers up to e run draft rows, and layers above e run verify rows. The head runs
once per verify row, and per draft row from whose state some row may draft. A round in which no row drafts runs neither
gate nor head for its copies. ``draft`` also reads the gate at the last position of each prompt, which then occurs as
``draft`` and ``decode``; ``DraftingDecoder`` decodes a number of rows without lengths as single steps, ``decode``.

``run_drafting_round`` is the round above. Two classes run its layers: ``draft`` and ``self_speculate`` go through the
protocol, with any decoder whose capabilities say ``deepens``, read all logits of a draft and drop those outside S;
``DraftingDecoder`` is the timed path over a layered model, greedy and with a pruned draft head (kind ``subset``). Rows
share forwards: a row that has stopped drafting repeats its last token, and the surplus is rolled back. How many tokens
a round may draft or copy depends on the number of rows alone (``Drafting.lengths_at``), so that equal requests have
equal records on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import NamedTuple, Protocol

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
    draw_first_tokens,
    lengths_before_last_token,
    make_room,
    never_end_of_text,
    read_in_pieces,
    room_by_row,
    run_rounds,
    start_sequences,
    tokens_at,
)
from emad_ref.decoding.step import StepOutput
from emad_ref.errors import BadArgument, is_number, is_whole
from emad_ref.models.stepper import LayerInputs, Stepper
from emad_ref.point import EntropyEstimator, OperatingPoint, full_depth
from emad_ref.probes.draft_reader import EarlyExitDraftReader
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import DECODE, DRAFT, PROMPT, VERIFY, Floats, Ints, Record, TokenLog
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


class DraftLengths(NamedTuple):
    """Most tokens that a round of at most ``rows`` rows drafts (``longest``) and copies (``copied``)."""

    rows: int
    longest: int
    copied: int


NO_DRAFTS = DraftLengths(0, 0, 0)


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
        A linear estimator of the signal ``divergence`` with one probe, ``layer``; needed for a finite threshold.
    vocabulary : int64 [k] or None
        Ascending ids whose rows of the head a draft reads; None: all.
    copied : int
        Most tokens per round copied in place of drafts if the text repeats itself; 0: none.
    by_rows : tuple of DraftLengths or None
        Lengths for more than one row, by ascending number of rows, in place of ``longest`` and ``copied``. An entry
        holds for batches above the entry before it, up to its own ``rows``; larger batches decode at full depth without
        drafts. None: the same lengths for any number of rows.

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
    by_rows: tuple[DraftLengths, ...] | None = None

    def __post_init__(self) -> None:
        self._require_lengths_by_rows()
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

    def _require_lengths_by_rows(self) -> None:
        found = self.by_rows or ()
        for lengths in found:
            if not all(map(is_whole, lengths)) or min(lengths) < 0 or not (lengths.longest or lengths.copied):
                expected = "whole numbers ≥ 0 that draft or copy a token"
                raise BadArgument("drafting.by_rows", tuple(lengths), expected, "leave out rows that do not draft")
        rows = [1, *(lengths.rows for lengths in found)]
        if any(after <= before for before, after in pairwise(rows)):
            raise BadArgument("drafting.by_rows", rows[1:], "ascending numbers of rows above 1, each once")

    def lengths_at(self, rows: int) -> DraftLengths:
        """Lengths of the drafts and copies of a round of ``rows`` rows; ``NO_DRAFTS`` if it has none."""
        if rows == 1 or self.by_rows is None:
            return DraftLengths(rows, self.longest, self.copied)
        return next((lengths for lengths in self.by_rows if lengths.rows >= rows), NO_DRAFTS)

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
    expected = replace(drafting_point(model.point.layers, drafting), ceiling=model.point.ceiling)
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
        rows = start_sequences(prompts, options)
        draw_first_tokens(rows, logits)
        run_rounds(
            rows,
            (session,),
            lambda alive: run_drafting_round(_SessionRound(alive, session, drafting), alive, drafting, lookups),
        )
        work = session.work
    return build_speculation_result(
        rows, log, None if work is None else {MODEL: work}, None if opened is None else {MODEL: opened}
    )


class _SessionRound:
    """A round through the protocol: ``deepen`` runs the layers above the draft's.

    Tokens beyond the least room of a row are verified one by one: ``deepen`` takes equally many of every row.
    """

    def __init__(self, rows: Sequence[SpeculativeSequence], session: TokenLoggingSession, drafting: Drafting):
        self._rows, self._session, self._drafting = rows, session, drafting
        self._least, self._fed = int(room_by_row(rows, session).min()), 0
        self._verified, self._unverified = LogitsByPlace(rows), list[list[int]]()
        self._logits = session.logits

    def run_copies(self, copies: Sequence[list[int]]) -> None:
        for row, copied in zip(self._rows, copies, strict=True):
            for token in copied:
                row.draft_copied_token(token, self._logits.shape[-1])

        def read_shallow_then_deepen(tokens: Ints) -> Floats:
            n = tokens.shape[1]
            self._session.feed(tokens, [DRAFT] * n, depth=self._drafting.layer, last=0)
            return self._session.deepen(self._session.length - n, VERIFY)

        self._verified = read_in_pieces(self._rows, self._session, max(map(len, copies)), read_shallow_then_deepen)

    def run_token(self, asks_gate: bool, drafts: bool) -> Sequence[float]:
        places = make_room(self._rows, self._session, 1)
        tokens, expected = tokens_at(self._rows, places, 1), list[float]()
        if asks_gate:
            self._logits = self._session.feed(tokens, [DRAFT], last=1)
            expected = self._session.signal[:, -1, 0].tolist()
            if any(map(math.isnan, expected)):
                raise Unsupported(
                    f"drafting with a gate after layer {self._drafting.layer}, but the decoder's steps show no signal "
                    "there"
                )
        else:
            # no head on the last draft of a round, whose proposal the verification replaces
            self._logits = self._session.feed(tokens, [DRAFT], depth=self._drafting.layer, last=int(drafts))
        self._unverified.append(places)
        self._fed += 1
        if self._fed >= self._least:
            self._deepen()
        return expected

    def propose(self, going: Sequence[bool], copied: Sequence[int | None]) -> None:
        for number, (row, on, token) in enumerate(zip(self._rows, going, copied, strict=True)):
            if on:
                row.draft_from_logits(self._logits[number, -1], self._drafting.vocabulary)
            elif token is not None:
                row.draft_copied_token(token, self._session.logits.shape[-1])

    def verify(self) -> None:
        self._deepen()
        self._verified.verify()
        self._session.rollback_and_commit(lengths_before_last_token(self._rows))

    def _deepen(self) -> None:
        if self._unverified:
            first = self._session.length - len(self._unverified)
            self._verified.store(self._unverified[0], self._session.deepen(first, VERIFY))
            self._unverified.clear()


# ---------------------------------------------------------------- the round


class DraftingRound(Protocol):
    """How a round runs layers: ``run_drafting_round`` says when."""

    def run_copies(self, copies: Sequence[list[int]]) -> None:
        """Propose the ``copies`` of each row, and run all with its last token to the layer, in one chunk."""

    def run_token(self, asks_gate: bool, drafts: bool) -> Sequence[float]:
        """Run the next token of every row to the layer: its last token, then its proposals, then padding.

        Returns the gate's values [rows] there if it ``asks_gate``. ``drafts``: whether a row may draft from its state.
        """

    def propose(self, going: Sequence[bool], copied: Sequence[int | None]) -> None:
        """Propose a further token: ``going`` rows draft it, the others take ``copied``, or have none."""

    def verify(self) -> None:
        """Run what was fed through all layers, accept and emit; the cache keeps all tokens but the last of each row."""


def run_drafting_round(
    layers: DraftingRound,
    rows: Sequence[SpeculativeSequence],
    drafting: Drafting,
    lookups: Sequence[PromptLookup],
    most: int | None = None,
) -> None:
    """Copy or draft, and verify: one round of ``rows``, whose ``lookups`` are by number of the sequence.

    ``most``: a further limit of drafts and of copies.
    """
    _, longest, copied = drafting.lengths_at(len(rows))
    limits = [row.draft_limit_by_max_new if most is None else min(most, row.draft_limit_by_max_new) for row in rows]
    copies = [
        lookups[row.number].find_continuation(row.tokens, min(copied, limit))
        for row, limit in zip(rows, limits, strict=True)
    ]
    widths = [0 if copy else min(longest, limit) for copy, limit in zip(copies, limits, strict=True)]
    if any(width > 0 for width in widths):
        _propose_one_by_one(layers, drafting, copies, widths)
    else:
        layers.run_copies(copies)
    layers.verify()


def _propose_one_by_one(
    layers: DraftingRound, drafting: Drafting, copies: Sequence[list[int]], widths: Sequence[int]
) -> None:
    """Run tokens one by one: rows draft up to ``widths`` tokens from the layer's readout, or feed their ``copies``."""
    going = [width > 0 for width in widths]
    for at in count():
        asks_gate = drafting.uses_gate and any(going)
        expected = layers.run_token(asks_gate, any(going))
        if asks_gate:
            going = [on and value <= drafting.threshold for on, value in zip(going, expected, strict=True)]
        if not any(going) and at >= max(map(len, copies)):
            return
        layers.propose(going, [copied[at] if at < len(copied) else None for copied in copies])
        going = [on and at + 1 < width for on, width in zip(going, widths, strict=True)]


# ---------------------------------------------------------------- the timed path


class DraftingDecoder(WalkedDecoder):
    """Greedy self-speculation of one model by ``drafting``.

    Its sessions are those of a decoder at ``drafting_point(layers)``. A round drafts no more tokens than the row with
    the fewest positions left can hold, so each request fits that fits without drafts. With a number of rows without
    lengths (``Drafting.lengths_at``) a round is one step at full depth.

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    drafting : Drafting
        Layer, gate, vocabulary and lengths of the drafts.
    max_rows : int
        Largest batch.

    Raises
    ------
    BadArgument
        A layer or ids that this model lacks, a lens that is not attached, a gate of another width.
    """

    def __init__(self, stepper: Stepper, drafting: Drafting, *, max_rows: int = 1):
        drafting.require_fits_model(stepper.layers, stepper.vocabulary_size)
        super().__init__(stepper, drafting_point(stepper.layers), max_rows=max_rows)
        self.drafting = drafting
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
        options = SpeculationOptions(max_new, max(self.drafting.longest, self.drafting.copied), stop, 0.0, 0, None)
        rows, rounds, lookups = start_sequences(prompts, options), list[_RoundLog](), [PromptLookup() for _ in prompts]
        for row, token in zip(rows, output.logits[:, -1].argmax(dim=-1).tolist(), strict=True):
            row.append_token(token)

        def run_round(alive: Sequence[SpeculativeSequence]) -> None:
            rounds.extend(self._next_round(alive, session, lookups))

        run_rounds(rows, (session,), run_round)
        log = self._log(prompts, rounds)
        return Record(
            tokens=log.to_token_table(),
            signal=log.to_signal_array(),
            emitted=[np.array(row.tokens[row.prompt :], dtype=np.int64) for row in rows],
            stop=[row.reason or "length" for row in rows],
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

    def _next_round(
        self, rows: Sequence[SpeculativeSequence], session: ReferenceSession, lookups: Sequence[PromptLookup]
    ) -> list[_RoundLog]:
        if self.drafting.lengths_at(len(rows)) is NO_DRAFTS:
            return self._step(rows, session)
        # rows share forwards, and there is no padding beyond the model's positions
        most = self.stepper.max_positions - max(len(row.tokens) for row in rows)
        layers = _LayerRound(self, rows, session)
        run_drafting_round(layers, rows, self.drafting, lookups, most)
        return layers.log

    def _step(self, rows: Sequence[SpeculativeSequence], session: ReferenceSession) -> list[_RoundLog]:
        """Run one token of each row at full depth, without a draft."""
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=self.stepper.device)
        inputs = self.stepper.prepare_forward(_next_positions(rows), session.state.cache)
        hidden = self._run(session, self.stepper.embed(tokens, inputs), 0, self.point.ceiling, inputs)
        rounds = [_RoundLog(row.number, len(row.tokens) - 1, row.tokens[-1:], 1, None) for row in rows]
        for row, own in zip(rows, self._own_tokens(session, hidden), strict=True):
            row.append_token(own[0])
        return rounds

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


class _LayerRound:
    """A round over layers: states [rows, n, D] after the draft's layer wait for the verification.

    ``log``: one entry per row, once verified.
    """

    def __init__(self, decoder: DraftingDecoder, rows: Sequence[SpeculativeSequence], session: ReferenceSession):
        self._decoder, self._rows, self._session, self.log = decoder, rows, session, list[_RoundLog]()
        self._reader, self._position = decoder._reader, _next_positions(rows)
        self._going_on = torch.tensor([[row.tokens[-1]] for row in rows], device=decoder.stepper.device)
        self._fed, self._states, self._gates = list[Tensor](), list[Tensor](), list[list[float]]()
        self._proposed = [0] * len(rows)

    def run_copies(self, copies: Sequence[list[int]]) -> None:
        most = max(map(len, copies))
        fed = [[row.tokens[-1], *copied] for row, copied in zip(self._rows, copies, strict=True)]
        tokens = [each + each[-1:] * (most + 1 - len(each)) for each in fed]
        self._run(torch.tensor(tokens, device=self._going_on.device))
        self._proposed = [len(copied) for copied in copies]

    def run_token(self, asks_gate: bool, drafts: bool) -> Sequence[float]:
        self._run(self._going_on)
        self._position = self._position + 1
        if not asks_gate:
            return ()
        self._gates.append(self._reader.predict_sqrt_kl(self._states[-1][:, -1], self._session.state.work).tolist())
        if not all(map(math.isfinite, self._gates[-1])):
            require_finite(torch.tensor(self._gates[-1]), f"after layer {self._decoder.drafting.layer}")
        return self._gates[-1]

    def propose(self, going: Sequence[bool], copied: Sequence[int | None]) -> None:
        token, device = self._going_on, self._going_on.device
        if any(going):
            best = self._reader.draft_tokens(self._states[-1][:, -1], self._session.state.work)[:, None]
            token = best if all(going) else torch.where(torch.tensor(going, device=device)[:, None], best, token)
        places = [row for row, each in enumerate(copied) if each is not None]
        if places:
            token = token.clone()
            token[places, 0] = torch.tensor([copied[row] for row in places], device=device)
        self._going_on = token
        self._proposed = [
            count + (on or each is not None) for count, on, each in zip(self._proposed, going, copied, strict=True)
        ]

    def verify(self) -> None:
        chunk = torch.cat(self._states, dim=1) if len(self._states) > 1 else self._states[0]
        starts, fed = lengths_before_last_token(self._rows).tolist(), torch.cat(self._fed, dim=1).tolist()
        verified = self._decoder._verify(self._session, chunk, starts)
        for i, (row, tokens, width, own) in enumerate(zip(self._rows, fed, self._proposed, verified, strict=True)):
            row.emit_until_refused(tokens[1 : width + 1], own.__getitem__)
            gates = [values[i] for values in self._gates]
            self.log.append(_RoundLog(row.number, starts[i], tokens, len(row.tokens) - 1 - starts[i], gates))
        kept = lengths_before_last_token(self._rows)
        if (kept < np.array(starts) + chunk.shape[1]).any():
            self._session.state.cache.truncate(kept)

    def _run(self, tokens: Tensor) -> None:
        position = self._position + np.arange(tokens.shape[1])
        self._states.append(self._decoder._run_shallow(self._session, tokens, position))
        self._fed.append(tokens)


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


def _next_positions(rows: Sequence[SpeculativeSequence]) -> Ints:
    """int64 [rows, 1] position of the next token fed by each row."""
    return lengths_before_last_token(rows)[:, None]
