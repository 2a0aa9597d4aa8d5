"""Entropy-adaptive decoding (EAD): a small and a large model take turns, token by token.

    H_t  = −Σ p_i log₂ p_i                        of the logits that emit token t, before temperature, in bits
    H̄_t  = mean of H over the last w tokens
    next = large  if H̄_t ≥ τ and c ≥ d_min
           small  if H̄_t < τ and c ≥ d_min
           the current model otherwise

Symbols: ``threshold_bits`` is τ, ``window`` w, ``least_run`` d_min, ``run`` c, the tokens the current model has emitted
since it took over, token t included ("Dynamic Switching Mechanism"). The paper's ≥ and ≤ overlap at equality; here the
large model wins.

The paper leaves open, and we define: before w tokens are emitted, H̄_t is the mean over the existing ones. The window
continues across a switch: it holds the last w tokens, whichever model emitted them. H_t is known with token t's logits,
so it affects decisions from token t + 1 on. No computed distribution is discarded.

The starting model reads the prompt. A model that takes over first processes every token it has not seen, in one chunked
forward (``catch_up`` in the record); the last of them is its decoding step, and the only one whose
logits are computed. The output is neither model's own: EAD promises no exactness. This module records costs and does
not judge them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from emad_ref.decoding.partner import (
    Partner,
    TokenLoggingSession,
    entropy_bits,
    make_work_by_model_index,
    require_equal_logit_widths,
    require_prompts,
)
from emad_ref.decoding.reference import Sampler
from emad_ref.errors import BadArgument, is_number, is_whole
from emad_ref.protocol import Prompt
from emad_ref.record import CATCH_UP, DECODE, PROMPT, Floats, Ints, Record, StopReason, TokenLog, Work

MODELS: tuple[str, ...] = ("small", "large")
SMALL, LARGE = range(len(MODELS))


@dataclass(frozen=True)
class SwitchingRule:
    """Rule of entropy-adaptive switching (EAD) between a small and a large model.

    Attributes
    ----------
    threshold_bits : float
        τ, bits: the large model writes while the rolling mean of entropies is at least this.
    window : int
        w, tokens of the rolling mean.
    least_run : int
        d_min, tokens that a model writes before the next switch.
    start : int
        The first model, ``SMALL`` or ``LARGE``.

    Raises
    ------
    BadArgument
        τ < 0 or not a number, w or d_min < 1, another model.

    References
    ----------
    EAD, "Dynamic Switching Mechanism".
    """

    threshold_bits: float
    window: int = 5
    least_run: int = 10
    start: int = LARGE

    def __post_init__(self) -> None:
        if not is_number(self.threshold_bits) or not 0 <= self.threshold_bits < math.inf:
            raise BadArgument("threshold_bits", self.threshold_bits, "a finite number of bits ≥ 0")
        for name in ("window", "least_run"):
            if not is_whole(getattr(self, name)) or getattr(self, name) < 1:
                raise BadArgument(name, getattr(self, name), "at least one token, a whole number")
        if self.start not in (SMALL, LARGE):
            raise BadArgument("start", self.start, f"{SMALL} (small) or {LARGE} (large)")

    def next_model(self, rolling_bits: float, current: int, run: int) -> int:
        """The model of token t + 1, given H̄_t and that ``current`` has emitted ``run`` tokens since it took over."""
        if run < self.least_run:
            return current
        return LARGE if rolling_bits >= self.threshold_bits else SMALL

    def model_by_token(self, entropies_bits: Sequence[float]) -> Ints:
        """int64 [T + 1]: the models of tokens 1 … T + 1, from the entropies [T] of tokens 1 … T."""
        chosen, run = [self.start], 1
        for mean in rolling_means(entropies_bits, self.window).tolist():
            following = self.next_model(mean, chosen[-1], run)
            run = run + 1 if following == chosen[-1] else 1
            chosen.append(following)
        return np.array(chosen, dtype=np.int64)


def rolling_mean(entropies_bits: Sequence[float], window: int) -> float:
    """H̄_t, bits, from the entropies of tokens 1 … t (t ≥ 1)."""
    last = entropies_bits[-window:]
    return sum(last) / len(last)


def rolling_means(entropies_bits: Sequence[float], window: int) -> Floats:
    """H̄_1 … H̄_T, bits, float64 [T], from the entropies [T] of one text."""
    ends = range(1, len(entropies_bits) + 1)
    return np.array([rolling_mean(entropies_bits[max(0, end - window) : end], window) for end in ends])


@dataclass(frozen=True, eq=False)  # holds arrays: results compare by identity
class SwitchingResult:
    """Result of a run; in ``record`` model 0 is the small one, 1 the large one.

    ``model``, ``entropy_bits``, ``rolling_bits``: one array per sequence, an entry per emitted token. ``opening_work``:
    the part of ``record.work`` for opening with the prompts, their last positions included.
    """

    record: Record
    model: list[Ints]
    entropy_bits: list[Floats]
    rolling_bits: list[Floats]
    opening_work: dict[int, Work] | None

    @property
    def large_share(self) -> float:
        """Share of all emitted tokens that the large model emitted (EAD-H1's token share)."""
        return float(np.concatenate(self.model).mean())

    @property
    def catch_up_tokens_by_model(self) -> Ints:
        """int64 [2] tokens that the small and the large model processed only to take over, the prompt's included."""
        tokens = self.record.tokens
        return np.bincount(tokens.model[tokens.phase == CATCH_UP], minlength=len(MODELS))


def switch(
    small: Partner,
    large: Partner,
    rule: SwitchingRule,
    prompts: Sequence[Prompt],
    max_new: int,
    *,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
) -> SwitchingResult:
    """Decode by entropy-adaptive switching (EAD) between two models.

    Prompts run one after the other, each in its own pair of sessions: rows switch at different times, and a feed of the
    protocol advances all rows of a session. So a row's result does not depend on the batch, and a batch saves no time.

    Parameters
    ----------
    small, large : Partner
        Decoders with the same vocabulary.
    rule : SwitchingRule
        Threshold in bits, window, shortest run and first model.
    prompts : sequence of Prompt
        One row each.
    max_new : int
        Most new tokens per row.
    stop : set of int
        Tokens that end a row; they are emitted.
    temperature : float
        0 is greedy.
    seed : int
        Each row draws from (seed, row).

    Returns
    -------
    SwitchingResult
        Tokens, models, entropies and rolling means in bits, and the record.

    Raises
    ------
    BadArgument
        No prompt, max_new < 1, a threshold above log₂ V, vocabularies of different sizes, and as the decoders raise.
    NotFinite
        Logits hold NaN or +inf.

    References
    ----------
    EAD, "Dynamic Switching Mechanism".
    """
    if max_new < 1:
        raise BadArgument("max_new", max_new, "at least one new token")
    require_prompts(prompts)
    log, sampler = TokenLog(), Sampler(len(prompts), temperature, seed)
    rows = [_SwitchedSequence(number, prompt, (small, large), rule, log) for number, prompt in enumerate(prompts)]
    for row in rows:
        deque(row.decode(sampler, max_new, stop), maxlen=0)
    return SwitchingResult(
        record=Record(
            tokens=log.to_token_table(),
            signal=log.to_signal_array(),
            emitted=[np.array(row.history[len(row.prompt.tokens) :], dtype=np.int64) for row in rows],
            stop=[row.reason for row in rows],
            work=_total_work((small, large), [row.work for row in rows]),
        ),
        model=[np.array(row.model, dtype=np.int64) for row in rows],
        entropy_bits=[np.array(row.entropy_bits) for row in rows],
        rolling_bits=[np.array(row.rolling_bits) for row in rows],
        opening_work=_total_work((small, large), [row.opening_work for row in rows]),
    )


def stream_tokens_and_models(
    small: Partner,
    large: Partner,
    rule: SwitchingRule,
    prompt: Prompt,
    max_new: int,
    *,
    stop: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[tuple[int, int]]:
    """(token, model) as ``switch`` emits them after one prompt, each as soon as it is known. Raises as ``switch``."""
    if max_new < 1:
        raise BadArgument("max_new", max_new, "at least one new token")
    require_prompts([prompt])
    yield from _SwitchedSequence(0, prompt, (small, large), rule, TokenLog()).decode(
        Sampler(1, temperature, seed), max_new, stop
    )


@dataclass
class _SwitchedSequence:
    """One sequence in progress; ``history`` is the prompt and all emitted tokens."""

    number: int
    prompt: Prompt
    partners: tuple[Partner, Partner]
    rule: SwitchingRule
    log: TokenLog
    history: list[int] = field(default_factory=list)
    model: list[int] = field(default_factory=list)
    entropy_bits: list[float] = field(default_factory=list)
    rolling_bits: list[float] = field(default_factory=list)
    reason: StopReason = "length"
    sessions: dict[int, TokenLoggingSession] = field(default_factory=dict)
    work: dict[int, Work | None] = field(default_factory=dict)
    opening_work: dict[int, Work | None] = field(default_factory=dict)

    def decode(self, sampler: Sampler, max_new: int, stop: frozenset[int]) -> Iterator[tuple[int, int]]:
        """(token, model) one by one; the row is complete once all are consumed."""
        with ExitStack() as stack:
            current, run = self.rule.start, 1
            session = self._open(stack, current, self.prompt, PROMPT, DECODE)
            self.opening_work[current] = session.opening_work
            self.history, logits = list(map(int, self.prompt.tokens)), session.logits
            _require_reachable(self.rule, logits.shape[-1])
            while True:
                self._emit(logits, current, sampler)
                yield self.history[-1], current
                if self.history[-1] in stop:
                    self.reason = "stop token"
                if self.reason == "stop token" or len(self.model) == max_new:
                    break
                following = self.rule.next_model(self.rolling_bits[-1], current, run)
                current, run = following, run + 1 if following == current else 1
                logits = self._read_on(stack, current, logits)
            self.work = {model: session.work for model, session in self.sessions.items()}

    def _emit(self, logits: Floats, current: int, sampler: Sampler) -> None:
        self.model.append(current)
        self.entropy_bits.append(float(entropy_bits(logits)[0]))
        self.rolling_bits.append(rolling_mean(self.entropy_bits, self.rule.window))
        self.history.append(int(sampler.pick_next_tokens(torch.from_numpy(logits), [self.number])))

    def _read_on(self, stack: ExitStack, current: int, former: Floats) -> Floats:
        """Logits [1, V] of ``current`` after the whole history; it reads one token, or all unseen ones."""
        if current not in self.sessions:
            # a model with adaptive depth decides the depth of every token after the prompt, whichever model emitted it
            undecided = self.partners[current].has_adaptive_depth
            readable = np.array(self.history[: len(self.prompt.tokens)] if undecided else self.history, dtype=np.int64)
            last = CATCH_UP if len(readable) < len(self.history) else DECODE
            opened = self._open(stack, current, replace(self.prompt, tokens=readable), CATCH_UP, last)
            require_equal_logit_widths(former, opened.logits)
        session = self.sessions[current]
        unseen = np.array([self.history[int(session.length[0]) :]], dtype=np.int64)
        if unseen.size == 0:
            return session.logits
        logits = session.feed(unseen, [CATCH_UP] * (unseen.shape[1] - 1) + [DECODE], last=1)[:, -1]
        session.session.commit(session.length)  # EAD never rolls back
        return logits

    def _open(self, stack: ExitStack, model: int, prompt: Prompt, head: int, last: int) -> TokenLoggingSession:
        session = TokenLoggingSession(self.partners[model], model, self.log, [self.number], [prompt], head, last)
        stack.callback(session.close)
        self.sessions[model] = session
        return session


def _require_reachable(rule: SwitchingRule, vocabulary: int) -> None:
    if rule.threshold_bits > math.log2(vocabulary):
        raise BadArgument(
            "threshold_bits",
            rule.threshold_bits,
            f"at most log₂ V = {math.log2(vocabulary):.4f} bits",
            f"no distribution over {vocabulary} tokens has more; is it in nats, or for another vocabulary?",
        )


def _total_work(partners: tuple[Partner, Partner], spent: Sequence[dict[int, Work | None]]) -> dict[int, Work] | None:
    """Work of all rows by model, zero for a model that no row opened; None unless both decoders count."""
    if not all(partner.decoder.capabilities.counted for partner in partners):
        return None
    totals = [Work.none(partner.point.layers) for partner in partners]
    for row in spent:
        for model, work in row.items():
            if work is None:
                return None
            totals[model] += work
    return make_work_by_model_index(*totals)
