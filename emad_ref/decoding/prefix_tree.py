"""Switching and greedy speculation under many rules at once, over a shared tree of prefixes.

Under greedy decoding the next token is a function of the history and the model in charge. Rules share a text as long as
they agree on it, so the texts of one prompt form a tree of ``PrefixNode``; a rule is a path through it. If a path needs
a model's output after a new prefix, that model writes up to ``AHEAD`` further tokens, for all waiting paths in batches.
The first rule costs one decoding; the twentieth costs almost nothing.

Laws compare every path with ``switching.switch`` (tokens, models, entropies, work) and ``speculation.speculate``
(tokens, models). Both models run at full depth: if a model decides its depth, its output depends on what it read
before. Decoding is greedy only.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from scipy.special import logsumexp

from emad_ref.decoding.partner import Partner, entropy_bits
from emad_ref.decoding.speculation import EndOfText, never_end_of_text
from emad_ref.decoding.switching import LARGE, MODELS, SMALL, SwitchingRule, rolling_mean
from emad_ref.errors import BadArgument
from emad_ref.protocol import Prompt, Session, Step
from emad_ref.record import Bools, Floats, Ints, Work
from emad_ref.signals import require_finite

AHEAD = 32  # tokens that a model writes ahead of need: most are discarded at the next switch, some are used

Partners = tuple[Partner, Partner]
NextToken = tuple[int, float]  # a model's next token, and the entropy of its logits in bits


@dataclass(frozen=True, eq=False)
class TextGenerationRequest:
    """A request for one text after ``prompt`` int64 [n].

    It has at most ``most`` new tokens. It ends at a token of ``stop``, or once ``ended`` holds of the emitted tokens.
    """

    prompt: Ints
    most: int
    stop: frozenset[int] = frozenset()
    ended: EndOfText = never_end_of_text

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether the text is complete with ``tokens``, at least one."""
        return len(tokens) == self.most or tokens[-1] in self.stop or self.ended(tokens)


@dataclass(eq=False)
class PrefixNode:
    """A prefix: each model's next token (None until needed), and the prefixes with one more token."""

    answers: list[NextToken | None] = field(default_factory=lambda: [None] * len(MODELS))
    after: dict[int, PrefixNode] = field(default_factory=dict)

    def get_or_add_child(self, token: int) -> PrefixNode:
        return self.after.setdefault(token, PrefixNode())


@dataclass(frozen=True, eq=False)
class SwitchedText:
    """One text under one rule, after ``prompt`` tokens.

    int64 [emitted] ``tokens`` and the ``model`` of each, float64 [emitted] its entropy and the rolling mean after it.
    """

    prompt: int
    tokens: Ints
    model: Ints
    entropy_bits: Floats
    rolling_bits: Floats

    @property
    def large_model_token_count(self) -> int:
        return int(self.model.sum())

    def iterate_feeds(self, model: int) -> Iterator[tuple[int, int]]:
        """(tokens read before, tokens read) of each feed of ``model``; 0 before at its opening."""
        position = 0
        for at in np.flatnonzero(self.model == model).tolist():
            yield position, self.prompt + at - position
            position = self.prompt + at

    def count_tokens_read(self, model: int) -> int:
        """Number of tokens that ``model`` read, prompt and catch-up included."""
        return sum(n for _, n in self.iterate_feeds(model))

    def count_catch_up_tokens(self, model: int) -> int:
        """Number of tokens that ``model`` read only to take over, prompt included, without its own decoding step."""
        feeds = list(self.iterate_feeds(model))
        opened = int(bool(feeds) and self.model[0] == model)  # the starting model reads the prompt in any case
        return sum(n - 1 for _, n in feeds[opened:])

    def compute_work_of_model(self, model: int, layers: int, widest: int, opening: bool = False) -> Work:
        """Work of ``model`` with ``layers`` layers, at full depth in a session of one row.

        With ``opening`` only that of reading the prompt. A session reads its prompt except the last position in one
        chunk, and then that position. Later it reads at most ``widest`` tokens at once
        (``protocol.Capabilities.max_feed``): each sees what stood before its chunk, and all of its chunk.
        """
        work = Work.none(layers)
        for before, n in self.iterate_feeds(model):
            if opening and (before or self.model[0] != model):
                break
            # opening: the positions before the last see each other, masked keys included, the last sees all
            keys = _count_keys(before, n, widest) if before else (n - 1) ** 2 + n
            work.tokens[:] += n
            work.context[:] += keys
            work.readout_rows[0, -1] += 1
        return work


def _count_keys(before: int, n: int, widest: int) -> int:
    """Keys that ``n`` tokens after ``before`` others compute with, in chunks of ``widest``, masked ones included."""
    chunks = [(at, min(widest, n - at)) for at in range(0, n, widest)]
    return sum(chunk * (before + at + chunk) for at, chunk in chunks)


@dataclass(frozen=True, eq=False)
class ContinuationTokenScores:
    """One model's scores of a given continuation, per token [n].

    log p in nats, whether it is the greedy choice, and the entropy of the distribution in bits.
    """

    log_p: Floats
    greedy: Bools
    entropy_bits: Floats


@dataclass(frozen=True, eq=False)
class SwitchedTokenScores:
    """``ContinuationTokenScores`` of the models in charge; ``model`` int64 [n] of each token."""

    model: Ints
    log_p: Floats
    greedy: Bools
    entropy_bits: Floats


def _score_continuation(logits: Floats, tokens: Ints) -> ContinuationTokenScores:
    """Scores of ``tokens`` [n] from the logits [n, V] that predict them."""
    chosen = np.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return ContinuationTokenScores(
        chosen - logsumexp(logits, axis=-1), logits.argmax(axis=-1) == tokens, entropy_bits(logits)
    )


def _models_in_charge(rule: SwitchingRule, entropies_bits: Sequence[Floats]) -> list[int]:
    """Models of the n tokens of a given text, from both models' entropies [n]."""
    models, bits, run = [rule.start], [float(entropies_bits[rule.start][0])], 1
    for at in range(1, len(entropies_bits[0])):
        following = rule.next_model(rolling_mean(bits, rule.window), models[-1], run)
        run = run + 1 if following == models[-1] else 1
        models.append(following)
        bits.append(float(entropies_bits[following][at]))
    return models


@dataclass(frozen=True, eq=False)
class SpeculatedText:
    """One text by greedy speculation.

    int64 [emitted] ``tokens``, and the ``model`` of each, ``SMALL`` for an accepted or gated draft; float64 [judged]
    ``entropy_bits`` of the judged drafts.
    """

    tokens: Ints
    model: Ints
    entropy_bits: Floats


PrefixQuery = tuple[PrefixNode, int, list[int]]  # prefix, model, and the tokens emitted before
W = TypeVar("W", SwitchedText, SpeculatedText)


def _next_token(node: PrefixNode, model: int, tokens: list[int]) -> Generator[PrefixQuery, None, NextToken]:
    while (answer := node.answers[model]) is None:
        yield node, model, tokens
    return answer


def _switching_path(
    text: TextGenerationRequest, rule: SwitchingRule, node: PrefixNode
) -> Generator[PrefixQuery, None, SwitchedText]:
    """The path of ``rule`` from the root of ``text``; it yields a query for each missing next token."""
    tokens: list[int] = []
    model: list[int] = []
    bits: list[float] = []
    rolling: list[float] = []
    current, run = rule.start, 1
    while True:
        token, entropy = yield from _next_token(node, current, tokens)
        tokens.append(token)
        model.append(current)
        bits.append(entropy)
        rolling.append(rolling_mean(bits, rule.window))
        node = node.get_or_add_child(token)
        if text.is_complete(tokens):
            whole = np.array(tokens, dtype=np.int64), np.array(model, dtype=np.int64)
            return SwitchedText(len(text.prompt), *whole, np.array(bits), np.array(rolling))
        following = rule.next_model(rolling[-1], current, run)
        current, run = following, run + 1 if following == current else 1


def _speculation_path(
    text: TextGenerationRequest, k: int, gate_bits: float | None, node: PrefixNode
) -> Generator[PrefixQuery, None, SpeculatedText]:
    """Greedy speculation: k drafts a round, or as many as fit before the verifier's own token (``acceptance``)."""
    tokens: list[int] = []
    model: list[int] = []
    bits: list[float] = []
    left = 0  # drafts left in this round; the verifier writes the first token of all
    while not (tokens and text.is_complete(tokens)):
        chosen, _ = yield from _next_token(node, LARGE, tokens)
        emitted, by = chosen, LARGE
        if left:
            draft, entropy = yield from _next_token(node, SMALL, tokens)
            bits.append(entropy)
            if draft == chosen or (gate_bits is not None and entropy < gate_bits):
                emitted, by = draft, SMALL
        tokens.append(emitted)
        model.append(by)
        node = node.get_or_add_child(emitted)
        left = left - 1 if by == SMALL else min(k, text.most - len(tokens) - 1)
    return SpeculatedText(np.array(tokens, dtype=np.int64), np.array(model, dtype=np.int64), np.array(bits))


class PrefixTrees:
    """The prefix trees of some prompts for one pair of models.

    Methods take the ``partners``, small first, both at full depth: always decoders of the same two models. ``rows``:
    prompts per batch of their decoders.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._roots: dict[tuple[int, ...], PrefixNode] = {}
        self._options: dict[tuple[int, tuple[int, ...], tuple[int, ...]], ContinuationTokenScores] = {}

    def generate_switched(
        self, partners: Partners, requests: Sequence[tuple[TextGenerationRequest, SwitchingRule]]
    ) -> list[SwitchedText]:
        """Each text under its rule, in order.

        Raises:
            BadArgument: no requested new token, a partner that decides its depth, and as the decoders raise.
            NotFinite: logits hold NaN or +inf.
        """
        _require_full_depth(partners)
        if any(text.most < 1 for text, _ in requests):
            raise BadArgument("most", 0, "at least one new token")
        return self._run_paths(
            partners, [(text, _switching_path(text, rule, self._root(text))) for text, rule in requests]
        )

    def generate_speculative(
        self, partners: Partners, requests: Sequence[TextGenerationRequest], k: int, gate_bits: float | None
    ) -> list[SpeculatedText]:
        """Each text by greedy speculation with ``k`` drafts a round, in order: tokens and shares, no work.

        Raises:
            As ``generate_switched``.
        """
        _require_full_depth(partners)
        return self._run_paths(
            partners, [(text, _speculation_path(text, k, gate_bits, self._root(text))) for text in requests]
        )

    def greedy_choice_mask(
        self, partners: Partners, text: TextGenerationRequest, walk: SwitchedText, model: int
    ) -> Bools:
        """[emitted] whether each token of ``walk`` is the greedy choice of ``model`` after the same history."""
        node, nodes = self._root(text), []
        for token in walk.tokens.tolist():
            nodes.append(node)
            node = node.get_or_add_child(token)
        if any(node.answers[model] is None for node in nodes):
            _require_full_depth(partners)
            self._read(partners, model, text, walk.tokens, nodes)
        chosen = [answer[0] for node in nodes if (answer := node.answers[model]) is not None]
        return np.array(chosen) == walk.tokens

    def score_continuations(
        self, partners: Partners, requests: Sequence[tuple[Ints, Ints]], rule: SwitchingRule
    ) -> list[SwitchedTokenScores]:
        """Scores of each (prompt, continuation), teacher-forced under ``rule``, by the models in charge.

        H_t is the entropy of the model in charge of token t, as in decoding; the text is given, so the rule decides
        models only.

        Raises:
            As ``generate_switched``.
        """
        _require_full_depth(partners)
        for model in (SMALL, LARGE):
            self._read_options(partners[model], model, requests)
        scores = []
        for prompt, continuation in requests:
            key = tuple(prompt.tolist()), tuple(continuation.tolist())
            both = self._options[(SMALL, *key)], self._options[(LARGE, *key)]
            models = np.array(_models_in_charge(rule, [option.entropy_bits for option in both]), dtype=np.int64)
            at = np.arange(len(models))
            columns = ([getattr(option, name) for option in both] for name in ("log_p", "greedy", "entropy_bits"))
            scores.append(SwitchedTokenScores(models, *(np.array(each)[models, at] for each in columns)))
        return scores

    # ------------------------------------------------------------ private

    def _read_options(self, partner: Partner, model: int, requests: Sequence[tuple[Ints, Ints]]) -> None:
        """Score every continuation that ``model`` has not read yet; one session per prompt."""
        todo: dict[tuple[int, ...], dict[tuple[int, ...], Ints]] = {}
        for prompt, continuation in requests:
            key = tuple(prompt.tolist()), tuple(continuation.tolist())
            if (model, *key) not in self._options:
                todo.setdefault(key[0], {})[key[1]] = continuation
        for prompt_key, continuations in todo.items():
            prompt = np.array(prompt_key, dtype=np.int64)
            session, step = partner.decoder.start([Prompt(prompt)])
            try:
                for tokens_key, tokens in continuations.items():
                    logits = _shared_logits(partner, model, _feed_text(partner, session, step, tokens))
                    session.rollback(np.array([len(prompt)]))
                    self._options[model, prompt_key, tokens_key] = _score_continuation(logits, tokens)
            finally:
                session.close()

    def _root(self, text: TextGenerationRequest) -> PrefixNode:
        return self._roots.setdefault(tuple(text.prompt.tolist()), PrefixNode())

    def _run_paths(
        self, partners: Partners, paths: Sequence[tuple[TextGenerationRequest, Generator[PrefixQuery, None, W]]]
    ) -> list[W]:
        """Results of ``paths``, in rounds: all paths that wait for a model's next token get it together."""
        results: dict[int, W] = {}
        while True:
            waiting: dict[tuple[int, int], tuple[TextGenerationRequest, PrefixNode, list[int]]] = {}
            for number, (text, path) in enumerate(paths):
                if number in results:
                    continue
                try:
                    node, model, tokens = next(path)
                    waiting.setdefault((id(node), model), (text, node, tokens))
                except StopIteration as end:
                    results[number] = end.value
            if not waiting:
                return [results[number] for number in range(len(paths))]
            for model in (SMALL, LARGE):
                self._answer(partners, model, [query for (_, of), query in waiting.items() if of == model])

    def _answer(
        self, partners: Partners, model: int, waiting: Sequence[tuple[TextGenerationRequest, PrefixNode, list[int]]]
    ) -> None:
        """Let ``model`` continue each waiting prefix; batches have similar lengths, to limit padding."""
        order = sorted(waiting, key=lambda query: len(query[0].prompt) + len(query[2]))
        for at in range(0, len(order), self._rows):
            self._write(partners[model], model, order[at : at + self._rows])

    def _write(
        self, partner: Partner, model: int, waiting: Sequence[tuple[TextGenerationRequest, PrefixNode, list[int]]]
    ) -> None:
        texts = [(text, node, list(tokens)) for text, node, tokens in waiting]
        prompts = [Prompt(np.concatenate([text.prompt, tokens]).astype(np.int64)) for text, _, tokens in texts]
        session, step = partner.decoder.start(prompts)
        try:
            for _ in range(AHEAD):
                answers = self._next_tokens(partner, model, step.logits[:, -1])
                for (_, node, tokens), one in zip(texts, answers, strict=True):
                    node.answers[model] = one
                    tokens.append(one[0])
                texts = [(text, node.get_or_add_child(tokens[-1]), tokens) for text, node, tokens in texts]
                # beyond a prefix that this model has answered, all its tokens are known
                alive = [
                    row
                    for row, (text, node, tokens) in enumerate(texts)
                    if node.answers[model] is None and not text.is_complete(tokens)
                ]
                if not alive:
                    return
                if ended := sorted(set(range(len(texts))).difference(alive)):
                    session.drop(np.array(ended))
                    texts = [texts[row] for row in alive]
                session.commit(session.length)
                last = np.array([[tokens[-1]] for _, _, tokens in texts], dtype=np.int64)
                step = session.feed(last, partner.forced_feed_depth(last.shape))
        finally:
            session.close()

    def _read(
        self, partners: Partners, model: int, text: TextGenerationRequest, tokens: Ints, nodes: Sequence[PrefixNode]
    ) -> None:
        """Next tokens of ``model`` after each prefix of one text, which it reads in chunks."""
        session, step = partners[model].decoder.start([Prompt(text.prompt)])
        try:
            logits = _feed_text(partners[model], session, step, tokens)
            for node, one in zip(nodes, self._next_tokens(partners[model], model, logits), strict=True):
                node.answers[model] = node.answers[model] or one
        finally:
            session.close()

    @staticmethod
    def _next_tokens(partner: Partner, model: int, logits: Floats) -> list[NextToken]:
        """Next tokens from logits [rows, V]."""
        shared = _shared_logits(partner, model, logits)
        return list(zip(shared.argmax(axis=-1).tolist(), entropy_bits(shared).tolist(), strict=True))


def _feed_text(partner: Partner, session: Session, opened: Step, tokens: Ints) -> Floats:
    """Logits [n, V] that predict each of ``tokens`` [n] after the prompt of a one-row session; the last is not fed."""
    logits, widest = [opened.logits[0, -1:]], partner.decoder.capabilities.max_feed
    for at in range(0, len(tokens) - 1, widest):
        piece = tokens[None, at : min(at + widest, len(tokens) - 1)]
        logits.append(session.feed(piece, partner.forced_feed_depth(piece.shape)).logits[0])
    return np.concatenate(logits)


def _shared_logits(partner: Partner, model: int, logits: Floats) -> Floats:
    """Logits [..., V] over the shared ids."""
    shared = logits[..., : partner.vocabulary]
    require_finite(torch.from_numpy(shared.max(axis=-1)), f"of model {MODELS[model]}")
    return shared


def _require_full_depth(partners: Partners) -> None:
    if any(partner.has_adaptive_depth for partner in partners):
        points = ", ".join(partner.point.name for partner in partners)
        raise BadArgument("partners", points, "two models at full depth", "switch() decodes adaptive ones")
