"""Speculative decoding: one model drafts k tokens, another verifies them in one chunk.

    draft    d_1 … d_k, one by one, d_i ~ q_i                  q_i, p_i: softmax(logits / temperature) of the draft
    verify   p_1 … p_{k+1}, after the last token, d_1, …, d_k                              and of the verifier
    accept   d_i with probability min(1, p_i(d_i) / q_i(d_i)), up to the first refusal
    emit     after a refusal at i a token from max(0, p_i − q_i), normalised; else one from p_{k+1}

At temperature 0 both distributions are one-hot: the rule accepts the longest matching prefix and emits the verifier's
own token. The output is the verifier's at its operating point: at temperature 0 its own tokens, else its distribution
exactly. With an EMAD verifier, tokens and depths are those of the EMAD model. With ``gate_bits`` the output is not
exact: a refused draft token is kept if the draft's entropy is below it.

A chunk's logits differ from a single step's by rounding, so at a tie of the two largest logits either may win.
Self-speculation (``decoding.self_speculation``) shares this acceptance rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from emad_ref.decoding.partner import (
    Partner,
    TokenLoggingSession,
    entropy_bits,
    make_work_by_model_index,
    require_equal_logit_widths,
    require_prompts,
)
from emad_ref.errors import BadArgument
from emad_ref.protocol import Prompt
from emad_ref.record import CATCH_UP, DECODE, DRAFT, PROMPT, VERIFY, Floats, Ints, Record, StopReason, TokenLog, Work

VERDICTS: tuple[str, ...] = ("accepted", "gated", "refused", "unreached")
ACCEPTED, GATED, REFUSED, UNREACHED = range(len(VERDICTS))


@dataclass(frozen=True)
class DraftedTokenVerdicts:
    """One row per drafted token, every column [drafts]: its position in the sequence, and its verdict.

    ``entropy_bits``: of the draft's logits, before temperature. ``verdict``: index into ``VERDICTS``; ``unreached``
    are those after a refusal or a stop token.
    """

    sequence: Ints
    position: Ints
    token: Ints
    entropy_bits: Floats
    verdict: Ints


@dataclass(frozen=True, eq=False)
class SpeculationResult:
    """Result of a speculation: its ``record``, rounds and verdicts.

    ``kept`` in the record marks the tokens that each model holds of a sequence: at most all but the last emitted one.

    ``rounds`` int64 [sequences]: verifications. ``opening_work``: the part of ``record.work`` for reading the prompts,
    their last positions included.
    """

    record: Record
    drafts: DraftedTokenVerdicts
    rounds: Ints
    opening_work: dict[int, Work] | None

    def count_drafts_by_sequence(self, verdict: int | None = None) -> Ints:
        """int64 [sequences] drafted tokens, of one verdict or all."""
        chosen = slice(None) if verdict is None else self.drafts.verdict == verdict
        return np.bincount(self.drafts.sequence[chosen], minlength=len(self.rounds))

    @property
    def judged_count(self) -> int:
        """Draft tokens that were accepted, gated or refused."""
        return int((self.drafts.verdict != UNREACHED).sum())

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over judged draft tokens; None without judged ones."""
        return int((self.drafts.verdict == ACCEPTED).sum()) / self.judged_count if self.judged_count else None


def token_distribution(logits: Floats, temperature: float) -> Floats:
    """softmax(logits / temperature), float64 [..., V]; at temperature 0 all on the first of the largest logits."""
    if temperature == 0:
        certain = np.zeros(logits.shape)
        np.put_along_axis(certain, logits.argmax(axis=-1, keepdims=True), 1.0, axis=-1)
        return certain
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return weights / weights.sum(axis=-1, keepdims=True)


def scatter_distribution(q: Floats, ids: Ints, size: int) -> Floats:
    """q [k] of ``ids`` [k] as a distribution over all ``size`` tokens; the others have no probability."""
    whole = np.zeros(size)
    whole[ids] = q
    return whole


def is_accepted(p: Floats, q: Floats, token: int, rng: np.random.Generator) -> bool:
    """Whether ``token``, drawn from q [V], is accepted as a draw from p [V]: with probability min(1, p/q)."""
    return bool(rng.random() * q[token] < p[token])


def residual_distribution(p: Floats, q: Floats) -> Floats:
    """max(0, p − q), normalised [V]: the distribution after a refusal."""
    excess = np.maximum(p - q, 0.0)
    total = excess.sum()
    # a refusal needs p(d) < q(d), so p > q somewhere; rounding can lose this only if p ≈ q
    return excess / total if total > 0 else p


def draw_token(p: Floats, rng: np.random.Generator) -> int:
    """A token from p [V]: one uniform number, inverted."""
    cumulative = np.cumsum(p)
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))


EndOfText = Callable[[Sequence[int]], bool]  # whether the tokens emitted so far end their text


def never_end_of_text(tokens: Sequence[int]) -> bool:
    """False: no text ends before its last token; the default of ``ended``."""
    return False


@dataclass(frozen=True)
class SpeculationOptions:
    """Options of a speculation: ``k`` drafts a round for up to ``max_new`` tokens a row.

    A row ends at a token of ``stop``, or once ``ended`` holds of its emitted tokens.

    ``temperature`` 0 decodes greedily; each row has its own generator, seeded with (``seed``, row). ``gate_bits`` None
    keeps the verifier's output exact.

    Raises:
        BadArgument: max_new or k < 1, a temperature or gate below 0.
    """

    max_new: int
    k: int
    stop: frozenset[int]
    temperature: float
    seed: int
    gate_bits: float | None
    ended: EndOfText = never_end_of_text

    def __post_init__(self) -> None:
        if self.max_new < 1:
            raise BadArgument("max_new", self.max_new, "at least one new token")
        if self.k < 1:
            raise BadArgument("k", self.k, "at least one drafted token")
        if not 0 <= self.temperature < math.inf:
            raise BadArgument("temperature", self.temperature, "a finite number ≥ 0", "0 decodes greedily")
        if self.gate_bits is not None and not self.gate_bits >= 0:
            raise BadArgument(
                "gate_bits", self.gate_bits, "bits ≥ 0, or None", "None keeps the verifier's output exact"
            )


class _DraftedToken(NamedTuple):
    position: int
    token: int
    entropy_bits: float


class SpeculativeSequence:
    """One sequence: ``tokens`` is the prompt and all emitted; the last has not been fed yet."""

    def __init__(self, number: int, tokens: list[int], options: SpeculationOptions):
        self.number, self.tokens, self.prompt, self.options = number, tokens, len(tokens), options
        self.rng = np.random.default_rng((options.seed, number))  # separate, so draws do not depend on neighbours
        self.reason: StopReason | None = None
        self.rounds = 0
        self.drafts: list[tuple[_DraftedToken, Floats]] = []  # of this round, each with q
        self.verdicts: list[tuple[_DraftedToken, int]] = []  # of all rounds

    @property
    def request_end(self) -> int:
        """Tokens that the sequence holds at its end: the prompt and ``max_new``, the last of which is never fed."""
        return self.prompt + self.options.max_new - 1

    @property
    def draft_limit_by_max_new(self) -> int:
        """Tokens that the sequence may still emit besides the verifier's own."""
        return self.request_end - len(self.tokens)

    @property
    def useful_draft_count(self) -> int:
        """Useful drafts for this row: the verifier adds one more token."""
        return min(self.options.k, self.draft_limit_by_max_new)

    def append_token(self, token: int) -> None:
        """Emit ``token``; sets ``reason`` if it is the row's last."""
        self.tokens.append(token)
        if token in self.options.stop or self.options.ended(self.tokens[self.prompt :]):
            self.reason = "stop token"
        elif len(self.tokens) - self.prompt == self.options.max_new:
            self.reason = "length"

    def last_token_and_padded_drafts(self, drafts: int) -> list[int]:
        """The last token and ``drafts`` drafts; a row with fewer repeats its last one, to be rolled back."""
        fed = [self.tokens[-1], *(drafted.token for drafted, _ in self.drafts)]
        return fed + [fed[-1]] * (drafts + 1 - len(fed))

    def draft_from_logits(self, logits: Floats, vocabulary: Ints | None = None) -> None:
        """Draft one more token from logits [V] of the draft; ``vocabulary``: ids [k] that may be drafted."""
        read = logits if vocabulary is None else logits[vocabulary]
        q = token_distribution(read, self.options.temperature)
        if vocabulary is not None:
            q = scatter_distribution(q, vocabulary, len(logits))
        at = len(self.tokens) + len(self.drafts)
        self.drafts.append((_DraftedToken(at, draw_token(q, self.rng), float(entropy_bits(read))), q))

    def draft_copied_token(self, token: int, vocabulary: int) -> None:
        """Draft ``token`` with probability 1, so its entropy is 0."""
        q = np.zeros(vocabulary)
        q[token] = 1.0
        self.drafts.append((_DraftedToken(len(self.tokens) + len(self.drafts), token, 0.0), q))

    def emit_until_refused(self, drafted: Sequence[int], choose: Callable[[int], int]) -> None:
        """Emit the verifier's tokens: the accepted prefix of ``drafted``, and one more unless the row ends before.

        ``choose(i)`` is the verifier's token in place of ``drafted[i]``, that very one if it accepts it, and for
        i = len(drafted) the token after all drafts.
        """
        self.rounds += 1
        for at in range(len(drafted) + 1):
            self.append_token(token := choose(at))
            if self.reason is not None or at == len(drafted) or token != drafted[at]:
                return

    def verify_drafts(self, logits: Sequence[Floats]) -> None:
        """Accept a prefix of the drafts and emit one token more, from the verifier's logits [> drafts][V]."""
        verdicts = [UNREACHED] * len(self.drafts)

        def choose(at: int) -> int:
            p = token_distribution(logits[at], self.options.temperature)
            if at == len(self.drafts):
                return draw_token(p, self.rng)
            drafted, q = self.drafts[at]
            verdicts[at] = self._verdict(drafted, p, q)
            return draw_token(residual_distribution(p, q), self.rng) if verdicts[at] == REFUSED else drafted.token

        self.emit_until_refused([drafted.token for drafted, _ in self.drafts], choose)
        self.verdicts += [(drafted, verdict) for (drafted, _), verdict in zip(self.drafts, verdicts, strict=True)]
        self.drafts = []

    def _verdict(self, drafted: _DraftedToken, p: Floats, q: Floats) -> int:
        if is_accepted(p, q, drafted.token, self.rng):
            return ACCEPTED
        gate = self.options.gate_bits
        return GATED if gate is not None and drafted.entropy_bits < gate else REFUSED


def start_sequences(prompts: Sequence[Prompt], options: SpeculationOptions) -> list[SpeculativeSequence]:
    """A sequence per prompt, numbered from 0, that has emitted nothing."""
    return [
        SpeculativeSequence(number, list(map(int, prompt.tokens)), options) for number, prompt in enumerate(prompts)
    ]


def draw_first_tokens(rows: Sequence[SpeculativeSequence], logits: Floats) -> None:
    """Emit the first token of each row, from the verifier's ``logits`` [rows, V] after its prompt."""
    for row, z in zip(rows, logits, strict=True):
        row.append_token(draw_token(token_distribution(z, row.options.temperature), row.rng))


class RowSession(Protocol):
    """A session as ``run_rounds`` sees it."""

    def drop(self, rows: Ints) -> None:
        """Drop the rows at these indices int64 [dropped]."""


def run_rounds(
    rows: Sequence[SpeculativeSequence],
    sessions: Sequence[RowSession],
    run_round: Callable[[Sequence[SpeculativeSequence]], None],
) -> None:
    """Run rounds over the ``rows`` of ``sessions``, which have their first token, until all have finished.

    ``run_round`` drafts and verifies for the unfinished rows, and rolls back the refused tokens in every session.
    Finished rows are dropped from every session.
    """
    alive = list(rows)
    while True:
        finished = [i for i, row in enumerate(alive) if row.reason is not None]
        alive = [row for row in alive if row.reason is None]
        if not alive:
            return
        if finished:
            for session in sessions:
                session.drop(np.array(finished))
        run_round(alive)


def lengths_before_last_token(rows: Sequence[SpeculativeSequence]) -> Ints:
    """int64 [rows] tokens that a model may hold of each: all but the last, which the next round feeds first."""
    return np.array([len(row.tokens) - 1 for row in rows], dtype=np.int64)


def room_by_row(rows: Sequence[SpeculativeSequence], session: TokenLoggingSession) -> Ints:
    """int64 [rows] tokens, at least 1, that ``session`` may hold of each row from its last token on.

    A row ends with its model's positions, or with its request if the decoder does not state them.
    """
    most = session.partner.decoder.capabilities.max_positions or 0
    return np.array([max(most, row.request_end) for row in rows]) - lengths_before_last_token(rows)


def make_room(rows: Sequence[SpeculativeSequence], session: TokenLoggingSession, n: int) -> list[int]:
    """Let ``session`` read ``n`` more tokens of every row, up to the smallest ``room_by_row``.

    A row without room for them is rolled back, to read its own last tokens again: rows share feeds, and there is no
    padding beyond a row's end. Returns, for each row, the place of its next token, counted from its last emitted one.
    """
    before, held = lengths_before_last_token(rows), session.length
    lengths = np.minimum(held, before + room_by_row(rows, session) - n)
    if (lengths < held).any():
        session.rollback(lengths)
    places: list[int] = (lengths - before).tolist()
    return places


def tokens_at(rows: Sequence[SpeculativeSequence], places: Sequence[int], n: int) -> Ints:
    """int64 [rows, n] tokens of each row from its place on: last token, drafts, and padding."""
    padded = [row.last_token_and_padded_drafts(at + n - 1)[at : at + n] for row, at in zip(rows, places, strict=True)]
    return np.array(padded, dtype=np.int64)


def read_in_pieces(
    rows: Sequence[SpeculativeSequence],
    session: TokenLoggingSession,
    drafts: int,
    read: Callable[[Ints], Floats],
) -> LogitsByPlace:
    """Logits after the last token and up to ``drafts`` drafts of every row, in one piece if all rows have room for it.

    ``read`` returns logits [rows, n, V] of the next tokens [rows, n].
    """
    widest, verified = int(room_by_row(rows, session).min()), LogitsByPlace(rows)
    for at in range(0, drafts + 1, widest):
        n = min(widest, drafts + 1 - at)
        places = make_room(rows, session, n)
        verified.store(places, read(tokens_at(rows, places, n)))
    return verified


class LogitsByPlace:
    """The verifier's logits of one round, by row and place; a place that was read twice has the later ones."""

    def __init__(self, rows: Sequence[SpeculativeSequence]):
        self._rows, self._logits = rows, [list[Floats]() for _ in rows]

    def store(self, places: Sequence[int], logits: Floats) -> None:
        """Store ``logits`` [rows, n, V] of each row's tokens from its place on."""
        for known, at, read in zip(self._logits, places, logits, strict=True):
            known[at:] = read

    def verify(self) -> None:
        """Let each row accept and emit."""
        for row, logits in zip(self._rows, self._logits, strict=True):
            row.verify_drafts(logits)


def build_speculation_result(
    rows: Sequence[SpeculativeSequence],
    log: TokenLog,
    work: dict[int, Work] | None,
    opening_work: dict[int, Work] | None,
) -> SpeculationResult:
    """The result of rows that have all finished."""
    drafts = [(row.number, *drafted, verdict) for row in rows for drafted, verdict in row.verdicts]
    sequence, position, token, entropies, verdict = zip(*drafts, strict=True) if drafts else ((),) * 5
    return SpeculationResult(
        record=Record(
            tokens=log.to_token_table(),
            signal=log.to_signal_array(),
            emitted=[np.array(row.tokens[row.prompt :], dtype=np.int64) for row in rows],
            stop=[row.reason or "length" for row in rows],
            work=work,
        ),
        drafts=DraftedTokenVerdicts(
            sequence=np.array(sequence, dtype=np.int64),
            position=np.array(position, dtype=np.int64),
            token=np.array(token, dtype=np.int64),
            entropy_bits=np.array(entropies, dtype=np.float64),
            verdict=np.array(verdict, dtype=np.int64),
        ),
        rounds=np.array([row.rounds for row in rows], dtype=np.int64),
        opening_work=opening_work,
    )


DRAFTER, VERIFIER = 0, 1


def speculate(
    draft: Partner,
    verifier: Partner,
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
    """Decode by speculation: one model drafts, another verifies; the output is the verifier's.

    In the record model 0 is the draft, 1 the verifier, which emits the first token. Rows share feeds; a row's tokens do
    not depend on its neighbours. A row that needs fewer drafts than its neighbours is fed as many, and the surplus is
    rolled back. A row at the end of its model's positions reads its last tokens again instead, so every request fits
    whose prompt and ``max_new`` − 1 tokens do.

    Parameters
    ----------
    draft, verifier : Partner
        Decoders with the same vocabulary.
    prompts : sequence of Prompt
        One row each.
    max_new : int
        Most new tokens per row.
    k : int
        Drafts per round.
    stop : set of int
        Tokens that end a row; they are emitted.
    temperature : float
        0 is greedy.
    seed : int
        Each row draws from (seed, row).
    gate_bits : float or None
        Entropy in bits below which refused drafts are kept; None is exact.
    ended : callable or None
        Whether the tokens emitted so far end their text.

    Returns
    -------
    SpeculationResult
        Record, rounds and verdicts of drafts.

    Raises
    ------
    BadArgument
        No prompt, max_new or k < 1, a temperature or gate below 0, vocabularies of different sizes, and as the decoders
        raise.
    NotFinite
        Logits hold NaN or +inf.

    References
    ----------
    Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", Algorithm 1.
    """
    options = SpeculationOptions(max_new, k, stop, temperature, seed, gate_bits, ended)
    require_prompts(prompts)
    log, numbers = TokenLog(), range(len(prompts))
    with (
        closing(TokenLoggingSession(verifier, VERIFIER, log, numbers, prompts, PROMPT, DECODE)) as large,
        closing(TokenLoggingSession(draft, DRAFTER, log, numbers, prompts, PROMPT, DRAFT)) as small,
    ):
        require_equal_logit_widths(small.logits, large.logits)
        rows = start_sequences(prompts, options)
        draw_first_tokens(rows, large.logits)
        run_rounds(rows, (small, large), lambda alive: _speculation_round(alive, small, large))
        work, opening = (
            make_work_by_model_index(small.work, large.work),
            make_work_by_model_index(small.opening_work, large.opening_work),
        )
    return build_speculation_result(rows, log, work, opening)


def _speculation_round(
    rows: Sequence[SpeculativeSequence], small: TokenLoggingSession, large: TokenLoggingSession
) -> None:
    """Draft, verify, roll back: afterwards the verifier holds all tokens of each row but the last."""
    width = max(row.useful_draft_count for row in rows)
    if width > 0:
        _propose_drafts(rows, small, width)
    read_in_pieces(rows, large, width, lambda tokens: large.feed(tokens, [VERIFY] * tokens.shape[1])).verify()
    lengths = lengths_before_last_token(rows)
    large.rollback_and_commit(lengths)
    small.rollback(np.minimum(small.length, lengths))


def _propose_drafts(rows: Sequence[SpeculativeSequence], small: TokenLoggingSession, width: int) -> None:
    """Let the draft read its unseen tokens, then propose up to ``useful_draft_count`` tokens per row.

    If all drafts of a row were accepted, it has not seen the last of them. A feed takes equally many tokens of every
    row, so the other rows roll a token back and read it again.
    """
    lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    unseen = int((lengths - small.length).max())
    small.rollback_and_commit(lengths - unseen)
    tokens = np.array([row.tokens[-unseen:] for row in rows], dtype=np.int64)
    phases = [CATCH_UP] * (unseen - 1) + [DRAFT]
    for at in range(width):
        if at > 0:
            tokens, phases = tokens_at(rows, make_room(rows, small, 1), 1), [DRAFT]
        for row, z in zip(rows, small.feed(tokens, phases, last=1)[:, -1], strict=True):
            if at < row.useful_draft_count:
                row.draft_from_logits(z)
