"""Which drafted tokens stand, and what is emitted after them: acceptance, as every way of speculating shares it.

    draft    d_1 … d_k, one by one, d_i ~ q_i                  q_i, p_i: softmax(logits / temperature) of the draft
    verify   p_1 … p_{k+1}, after the last token, d_1, …, d_k                              and of the verifier
    accept   d_i with probability min(1, p_i(d_i) / q_i(d_i)), up to the first refusal
    emit     after a refusal at i a token from max(0, p_i − q_i), normalised; else one from p_{k+1}

At temperature 0 both distributions are one-hot: the same rule accepts the longest matching prefix and then emits the
verifier's own token. So the output is the verifier's: at temperature 0 the tokens it would emit alone, else its
distribution exactly. ``gate_bits`` gives that up ("why not use EAD when divergence occurs?"): a refused draft token is
kept all the same where the draft's entropy is below it.

Rows and their tokens only: who drafts and who verifies, in which sessions, is in ``speculative`` and ``drafting``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from emad_ref.decoding.pair import Log, Seat, entropy_bits
from emad_ref.errors import BadArgument
from emad_ref.protocol import Prompt
from emad_ref.record import Floats, Ints, Record, StopReason, Work

VERDICTS: tuple[str, ...] = ("accepted", "gated", "refused", "unreached")
ACCEPTED, GATED, REFUSED, UNREACHED = range(len(VERDICTS))


@dataclass(frozen=True)
class Drafts:
    """One row per drafted token, every column [drafts]: where it would have stood, and what became of it.

    ``entropy_bits``: of the draft's logits, before temperature. ``verdict``: index into ``VERDICTS``; ``unreached``
    are those after a refusal or a stop token.
    """

    sequence: Ints
    position: Ints
    token: Ints
    entropy_bits: Floats
    verdict: Ints


@dataclass(frozen=True, eq=False)  # holds arrays: a result is itself, not its values
class Speculated:
    """What a run emitted. Which models ``record`` is about is said where they are fed.

    ``record.tokens.kept`` marks, in each model, what it holds of the sequence: all but the last emitted token at most.
    ``rounds`` int64 [sequences]: verifications. ``opening_work``: the part of ``record.work`` spent on opening with the
    prompts, their last positions included.
    """

    record: Record
    drafts: Drafts
    rounds: Ints
    opening_work: dict[int, Work] | None

    def drafted(self, verdict: int | None = None) -> Ints:
        """int64 [sequences] drafted tokens, of one verdict or all."""
        chosen = slice(None) if verdict is None else self.drafts.verdict == verdict
        return np.bincount(self.drafts.sequence[chosen], minlength=len(self.rounds))

    @property
    def judged(self) -> int:
        """Draft tokens that were accepted, gated or refused."""
        return int((self.drafts.verdict != UNREACHED).sum())

    @property
    def acceptance(self) -> float | None:
        """Accepted over judged draft tokens; None where none was judged."""
        return int((self.drafts.verdict == ACCEPTED).sum()) / self.judged if self.judged else None


def distribution(logits: Floats, temperature: float) -> Floats:
    """softmax(logits / temperature), float64 [..., V]; at temperature 0 all on the first of the largest logits."""
    if temperature == 0:
        certain = np.zeros(logits.shape)
        np.put_along_axis(certain, logits.argmax(axis=-1, keepdims=True), 1.0, axis=-1)
        return certain
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return weights / weights.sum(axis=-1, keepdims=True)


def among(q: Floats, ids: Ints, size: int) -> Floats:
    """q [k] of ``ids`` [k] as a distribution over all ``size`` tokens: the others have no probability."""
    whole = np.zeros(size)
    whole[ids] = q
    return whole


def accepts(p: Floats, q: Floats, token: int, rng: np.random.Generator) -> bool:
    """Whether ``token``, drawn from q [V], may stand for a draw from p [V]: with probability min(1, p/q)."""
    return bool(rng.random() * q[token] < p[token])


def residual(p: Floats, q: Floats) -> Floats:
    """max(0, p − q), normalised [V]: the distribution after a refusal."""
    excess = np.maximum(p - q, 0.0)
    total = excess.sum()
    # a refusal needs p(d) < q(d), so somewhere p > q; only where p = q up to rounding can that be lost in the sums
    return excess / total if total > 0 else p


def drawn(p: Floats, rng: np.random.Generator) -> int:
    """A token from p [V]: one uniform number, inverted."""
    cumulative = np.cumsum(p)
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))


Ended = Callable[[Sequence[int]], bool]  # whether the tokens emitted so far end their text, the last included


def unending(tokens: Sequence[int]) -> bool:
    """No text ends by itself."""
    return False


@dataclass(frozen=True)
class Options:
    """How to speculate: ``k`` drafts a round for up to ``max_new`` tokens a row; a token of ``stop`` ends its row, and
    so does what ``ended`` says is over, of all tokens that the row has emitted.

    ``temperature`` 0 decodes greedily; each row draws from a generator of its own, seeded with (``seed``, row).
    ``gate_bits`` None keeps the verifier's output exact.

    Raises:
        BadArgument: max_new or k < 1, a temperature or gate below 0.
    """

    max_new: int
    k: int
    stop: frozenset[int]
    temperature: float
    seed: int
    gate_bits: float | None
    ended: Ended = unending

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


class _Draft(NamedTuple):
    """A drafted token, without the distribution it was drawn from, which is as long as the vocabulary."""

    position: int
    token: int
    entropy_bits: float


class Continuation:
    """One sequence under way: ``tokens`` is the prompt and all emitted; the last has not been fed yet."""

    def __init__(self, number: int, tokens: list[int], options: Options):
        self.number, self.tokens, self.prompt, self.options = number, tokens, len(tokens), options
        self.rng = np.random.default_rng((options.seed, number))  # its own: draws do not depend on its neighbours
        self.reason: StopReason | None = None
        self.rounds = 0
        self.drafts: list[tuple[_Draft, Floats]] = []  # of this round, each with q
        self.verdicts: list[tuple[_Draft, int]] = []  # of all rounds

    @property
    def room(self) -> int:
        """Tokens that it may still be given beside the verifier's own."""
        return self.options.max_new - (len(self.tokens) - self.prompt) - 1

    @property
    def width(self) -> int:
        """Drafts of use to this row: the verifier adds a token of its own."""
        return min(self.options.k, self.room)

    def take(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.options.stop or self.options.ended(self.tokens[self.prompt :]):
            self.reason = "stop token"
        elif len(self.tokens) - self.prompt == self.options.max_new:
            self.reason = "length"

    def padded(self, drafts: int) -> list[int]:
        """The last token and ``drafts`` drafts; where the row has fewer, its last one again, to be rolled back."""
        known = [self.tokens[-1], *(drafted.token for drafted, _ in self.drafts)]
        return known + [known[-1]] * (drafts + 1 - len(known))

    def propose(self, logits: Floats, vocabulary: Ints | None = None) -> None:
        """Draft one more token from logits [V] of the draft; ``vocabulary``: ids [k] that alone may be drafted."""
        read = logits if vocabulary is None else logits[vocabulary]
        q = distribution(read, self.options.temperature)
        if vocabulary is not None:
            q = among(q, vocabulary, len(logits))
        at = len(self.tokens) + len(self.drafts)
        self.drafts.append((_Draft(at, drawn(q, self.rng), float(entropy_bits(read))), q))

    def copy(self, token: int, vocabulary: int) -> None:
        """Draft ``token`` for certain, of so many ids: its entropy is 0."""
        q = np.zeros(vocabulary)
        q[token] = 1.0
        self.drafts.append((_Draft(len(self.tokens) + len(self.drafts), token, 0.0), q))

    def verify(self, logits: Floats) -> None:
        """Accept a prefix of the drafts and emit one token more, from the verifier's logits [> drafts, V]."""
        self.rounds += 1
        verdicts = [UNREACHED] * len(self.drafts)
        for at, ((drafted, q), z) in enumerate(zip(self.drafts, logits, strict=False)):
            p = distribution(z, self.options.temperature)
            verdicts[at] = self._verdict(drafted, p, q)
            if verdicts[at] == REFUSED:
                self.take(drawn(residual(p, q), self.rng))
                break
            self.take(drafted.token)
            if self.reason is not None:
                break
        else:
            self.take(drawn(distribution(logits[len(self.drafts)], self.options.temperature), self.rng))
        self.verdicts += [(drafted, verdict) for (drafted, _), verdict in zip(self.drafts, verdicts, strict=True)]
        self.drafts = []

    def _verdict(self, drafted: _Draft, p: Floats, q: Floats) -> int:
        if accepts(p, q, drafted.token, self.rng):
            return ACCEPTED
        gate = self.options.gate_bits
        return GATED if gate is not None and drafted.entropy_bits < gate else REFUSED


def speculating(
    prompts: Sequence[Prompt],
    logits: Floats,
    options: Options,
    seats: Sequence[Seat],
    play: Callable[[Sequence[Continuation]], None],
) -> list[Continuation]:
    """Play rounds over the rows of ``seats`` until all have finished; a row per prompt.

    ``logits`` [rows, V]: the verifier's after each prompt, from which its first token is drawn. ``play`` drafts and
    verifies for the rows that go on, and takes back in every session what does not stand.
    """
    rows = [Continuation(i, list(map(int, prompt.tokens)), options) for i, prompt in enumerate(prompts)]
    for row, p in zip(rows, distribution(logits, options.temperature), strict=True):
        row.take(drawn(p, row.rng))
    alive = _unfinished(rows, seats)
    while alive:
        play(alive)
        alive = _unfinished(alive, seats)
    return rows


def _unfinished(rows: Sequence[Continuation], seats: Sequence[Seat]) -> list[Continuation]:
    """The rows that go on; finished ones are dropped from every session."""
    finished = [i for i, row in enumerate(rows) if row.reason is not None]
    if finished and len(finished) < len(rows):
        for seat in seats:
            seat.drop(finished)
    return [row for row in rows if row.reason is None]


def standing(rows: Sequence[Continuation]) -> Ints:
    """int64 [rows] tokens that a model may hold of each: all but the last, which the next round feeds first."""
    return np.array([len(row.tokens) - 1 for row in rows], dtype=np.int64)


def speculated(
    rows: Sequence[Continuation], log: Log, work: dict[int, Work] | None, opening_work: dict[int, Work] | None
) -> Speculated:
    """The result of rows that have all finished."""
    return Speculated(
        record=Record(
            tokens=log.tokens(),
            signal=log.signal(),
            emitted=[np.array(row.tokens[row.prompt :], dtype=np.int64) for row in rows],
            stop=[row.reason or "length" for row in rows],
            work=work,
        ),
        drafts=_drafts(rows),
        rounds=np.array([row.rounds for row in rows], dtype=np.int64),
        opening_work=opening_work,
    )


def _drafts(rows: Sequence[Continuation]) -> Drafts:
    known = [(row.number, drafted, verdict) for row in rows for drafted, verdict in row.verdicts]
    return Drafts(
        sequence=np.array([number for number, _, _ in known], dtype=np.int64),
        position=np.array([drafted.position for _, drafted, _ in known], dtype=np.int64),
        token=np.array([drafted.token for _, drafted, _ in known], dtype=np.int64),
        entropy_bits=np.array([drafted.entropy_bits for _, drafted, _ in known], dtype=np.float64),
        verdict=np.array([verdict for _, _, verdict in known], dtype=np.int64),
    )
