"""``TokenDecoder``: base of a decoder that only takes and returns token ids.

Inference engines run every layer for every token and give no access to depths, probes or sessions. A subclass
implements ``complete`` or ``continue_row``; this class checks the request, declines what an engine cannot do, and
writes the record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from emad_ref.errors import BadArgument
from emad_ref.protocol import (
    Capabilities,
    GenerateArguments,
    Prompt,
    Request,
    Session,
    StatedRule,
    Step,
    TokenArrivals,
    TokenLogProbs,
    Unsupported,
)
from emad_ref.record import Floats, Ints, Record, StopReason, make_fixed_depth_record


@dataclass(frozen=True)
class Completion:
    """An engine's answer to one prompt.

    Attributes
    ----------
    tokens : int64 [m]
        The new tokens.
    stopped : bool
        Whether the last of them is the stop token that ended it.
    """

    tokens: Ints
    stopped: bool

    @classmethod
    def cut_at_stop(cls, tokens: Ints, stop: frozenset[int]) -> Completion:
        """``tokens`` up to the first of ``stop``, for an engine that takes no stop ids. The audits then judge this cut.

        Parameters
        ----------
        tokens : int64 [m]
            What the engine generated.
        stop : frozenset of int
            The ids that end a row.
        """
        found = np.isin(tokens, sorted(stop))
        return cls(tokens[: int(found.argmax()) + 1], True) if found.any() else cls(tokens, False)


class TokenDecoder:
    """Base of a decoder whose engine completes prompts at full depth, by ``complete`` or ``continue_row``.

    Parameters
    ----------
    request : Request
        The suite's request.

    Attributes
    ----------
    request : Request
        As given: ``request.model.folder`` is the folder that an engine loads.
    capabilities : Capabilities
        A subclass whose logits carry more noise than float32 replaces it (``logit_noise``).
    concurrent : bool
        Set by a subclass whose ``complete`` may be called from several threads at once.
    stated : StatedRule or None
        Its own exit rule. A subclass or the hook sets it; None: it has no such rule.

    Raises
    ------
    Unsupported
        The request has exits, another ceiling than the last layer, or an encoder's source.
    """

    capabilities = Capabilities(counted=False)
    concurrent = False
    stated: StatedRule | None = None  # of a subclass with its own exit rule

    def __init__(self, request: Request):
        point = request.point
        self.own_rule = request.own_rule
        if not point.is_full_depth:
            raise Unsupported(f"{point.name}: an engine runs every layer for every token")
        self.request = request
        self._layers, self._max_rows = point.layers, request.max_rows
        self.temperature, self.seed = request.temperature, request.seed

    def complete(self, prompts: Sequence[Ints], max_new: int, stop: frozenset[int]) -> Sequence[Completion]:
        """Complete each of ``prompts`` (int64 [n], n ≥ 1) by at most ``max_new`` tokens, up to the first of ``stop``.

        ``temperature`` 0 is greedy. Otherwise tokens are drawn from softmax(logits / temperature) over the whole
        vocabulary, and a row's tokens depend only on ``row_seed(row)`` and its prompt. A subclass implements it, or
        ``continue_row``.
        """
        rows = [self.continue_row(each, max_new, stop, self.row_seed(row))[0] for row, each in enumerate(prompts)]
        return [Completion(tokens, bool(len(tokens)) and int(tokens[-1]) in stop) for tokens in rows]

    def continue_row(self, prompt: Ints, max_new: int, stop: frozenset[int], seed: int) -> tuple[Ints, Floats | None]:
        """New tokens of one row (int64 [m]), and the logits [m, V] of each, or None, of an engine without batches."""
        raise Unsupported("the engine reports no log-probabilities")

    def log_probs(self, prompts: Sequence[Prompt], max_new: int, top: int) -> Sequence[TokenLogProbs]:
        """``max_new`` greedy tokens of each prompt, with log-probabilities. A subclass may offer it.

        By default they follow from the logits of ``continue_row``.
        """
        rows = []
        for prompt in prompts:
            tokens, logits = self.continue_row(prompt.tokens, max_new, frozenset(), 0)
            if logits is None:
                raise Unsupported("the engine reports no log-probabilities")
            rows.append(TokenLogProbs.of_logits(tokens, logits, top))
        return rows

    def token_arrivals(
        self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int], stream: bool
    ) -> Sequence[TokenArrivals]:
        """Send each prompt in a separate request, all at once, streamed or whole. A subclass may offer it."""
        raise Unsupported("the engine streams no tokens")

    def generate_at_once(self, requests: Sequence[GenerateArguments], at_once: int) -> list[Record]:
        """``generate`` for each of ``requests``, from ``at_once`` threads. Raises the first error of a request."""
        if not self.concurrent:
            raise Unsupported("the engine takes one request at a time")
        return run_concurrently([partial(self.generate, *request) for request in requests], at_once)

    def row_seed(self, row: int) -> int:
        """A seed below 2³¹ of one row, from the request's seed."""
        return int(np.random.SeedSequence([self.seed, row]).generate_state(1)[0] >> 1)

    def start(self, prompts: Sequence[Prompt]) -> tuple[Session, Step]:
        raise Unsupported("an engine offers no sessions")

    def generate(self, prompts: Sequence[Prompt], max_new: int, stop: frozenset[int] = frozenset()) -> Record:
        """The record of ``complete``: full depth for every token, no probes, no counted work.

        Raises:
            Unsupported: a prompt has a source.
            BadArgument: more prompts than ``max_rows``, or another number of completions than prompts.
        """
        if any(prompt.source is not None for prompt in prompts):
            raise Unsupported("an engine takes token ids of a decoder-only model")
        if len(prompts) > self._max_rows:
            raise BadArgument("prompts", len(prompts), f"at most max_rows={self._max_rows} of the request")
        rows = [np.asarray(prompt.tokens, dtype=np.int64) for prompt in prompts]
        completions = self.complete(rows, max_new, stop)
        if len(completions) != len(rows):
            raise BadArgument("complete", len(completions), f"one completion for each of {len(rows)} prompts")
        reasons: list[StopReason] = ["stop token" if each.stopped else "length" for each in completions]
        return make_fixed_depth_record(rows, [each.tokens for each in completions], reasons, self._layers)

    def synchronize(self) -> None:
        """Do nothing, since ``complete`` returns finished tokens."""

    def close(self) -> None:
        """Free resources of a subclass."""


Result = TypeVar("Result")


def run_concurrently(calls: Sequence[Callable[[], Result]], at_once: int) -> list[Result]:
    """Results of ``calls``, made from ``at_once`` threads that start together and each take the next one.

    After an error no further call begins, and the first one by order is raised. A hanging thread ends with the process
    and does not block an interrupted caller.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    remaining, lock, start = iter(range(len(calls))), threading.Lock(), threading.Barrier(at_once)

    def work() -> None:
        start.wait()
        while not errors:
            with lock:
                at = next(remaining, None)
            if at is None:
                return
            try:
                results[at] = calls[at]()
            except BaseException as error:  # raised again below, in the caller's thread
                errors[at] = error

    threads = [threading.Thread(target=work, daemon=True) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[at] for at in range(len(calls))]
