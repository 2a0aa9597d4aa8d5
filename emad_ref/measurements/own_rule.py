"""A decoder under an exit rule of its own, against the same decoder at full depth (claim ENG-7).

The decoder names its operating point and states what it saves (``protocol.StatedRule``). Here its answers are timed in
pairs, its blocks are counted on the modules that it was lent, and its tokens are scored by the model at full depth.

A speed-up may also come from fewer tokens, from answers that were remembered, or from a full depth that was slowed. So
every answer has the tokens that were asked for, blocks are counted and timed on prompts that were not sent before, and
the blocks and heads that full depth runs beyond those of the rule limit the ratio that they explain, at the rule's own
pace:

    1 + ((n_full − n_rule)·b + (m_full − m_rule)·h + p) / t

with n blocks of b seconds in single-token steps, m heads of h seconds, p seconds in blocks that read prompts, full
depth's beyond the rule's, and t seconds of the rule's answers.

Where no lent module runs, blocks explain nothing. Then the model's own ``generate`` answers some of the requests, too:
full depth that takes longer than it may have been slowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax

from emad_ref.audit.finding import AuditRefutedError
from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.models.families import anatomy_of
from emad_ref.protocol import Decoder, Prompt, StatedRule, Unsupported
from emad_ref.record import Ints
from emad_ref.statistics.units import ByDocument, ByPair

PROMPT, NEW = 48, 32  # tokens of a prompt at most, and new ones
DOCUMENTS = 400  # against a rise of 1 % nothing survives with fewer than 300
WITNESSED = 40  # documents of which blocks are counted, apart from those timed
GENERATED = 60  # documents that ``generate`` answers, too
ARMS = ("full", "rule")
REMEMBERED = 0.5  # of the time of an answer: one that follows the other arm's to the same prompt takes more
EXPLAINED = 1.15  # factor on what blocks explain: overheads that a step of the rule may do without


@dataclass(frozen=True)
class OwnRuleEvidence:
    """``full_s``, ``rule_s`` [pairs] seconds of the same request. ``loss``, ``full_loss`` [documents]: −log p, in nats,
    that the model at full depth gives the tokens emitted under the rule and at full depth; ``tokens`` [documents].

    ``skipped``, ``blocks`` [documents]: blocks of single-token steps that the rule skipped, of those that full depth
    runs; None: an arm runs no lent module. ``explained``: the largest ratio of times that blocks explain.
    ``generate_s`` [pairs]: seconds of the model's own ``generate`` for the first of the requests, where none explains.
    """

    stated: StatedRule
    full_s: ByPair
    rule_s: ByPair
    loss: ByDocument
    full_loss: ByDocument
    tokens: ByDocument
    skipped: ByDocument | None
    blocks: ByDocument | None
    explained: float | None = None
    generate_s: ByPair | None = None


def own_rule_evidence(subject: ModelUnderTest, documents: int = DOCUMENTS) -> OwnRuleEvidence:
    """Answers of both arms to requests about ``subject``'s evaluation documents.

    Raises:
        Unsupported: the decoder has no exit rule of its own.
        AuditRefutedError: an answer has other than ``NEW`` tokens, or the rule remembers answers of full depth.
    """
    rng = np.random.default_rng([subject.seed, NEW])
    prompts = subject.openings(documents + WITNESSED, min(PROMPT, subject.window - NEW))
    timed = len(prompts) - min(WITNESSED, len(prompts) // 2)
    prompts, unsent = prompts[:timed], prompts[timed:]
    seconds = {arm: np.zeros(len(prompts)) for arm in ARMS}
    generate_s: list[float] = []
    after = np.zeros(len(prompts), dtype=bool)  # whether the rule answered after full depth
    loss = {arm: np.zeros(len(prompts)) for arm in ARMS}
    with subject.open(subject.full) as full, subject.open(subject.full, own_rule=True) as rule:
        stated = stated_rule(rule)
        decoders = dict(zip(ARMS, (full, rule), strict=True))
        emitted: dict[str, list[Ints]] = {arm: [] for arm in ARMS}
        for decoder in decoders.values():
            decoder.generate(prompts[:1], NEW, frozenset())  # the first request may compile
        runs = {arm: _block_runs(subject, decoders[arm], unsent) for arm in ARMS[::-1]}  # the rule's are new
        seen = all(each.counts.sum() for each in runs.values())
        for at, prompt in enumerate(prompts):
            order = rng.permutation(ARMS).tolist()
            after[at] = order[-1] == "rule"
            for arm in order:
                began = time.perf_counter()
                record = decoders[arm].generate([prompt], NEW, frozenset())
                decoders[arm].synchronize()
                emitted[arm].append(np.array(record.emitted[0]))  # an answer may be computed when it is read
                seconds[arm][at] = time.perf_counter() - began
                if len(emitted[arm][-1]) != NEW:
                    raise AuditRefutedError(f"{arm}: {len(emitted[arm][-1])} new tokens, where {NEW} were asked for")
            if not seen and at < GENERATED:
                generate_s.append(_generate_seconds(subject, prompt))
        _require_own_answers(seconds["rule"], after)
    for arm in ARMS:
        loss[arm][:] = [_loss(subject, prompt, tokens) for prompt, tokens in zip(prompts, emitted[arm], strict=True)]
    full_runs, rule_runs = runs["full"], runs["rule"]
    return OwnRuleEvidence(
        stated,
        ByPair(seconds["full"]),
        ByPair(seconds["rule"]),
        ByDocument.distinct(loss["rule"]),
        ByDocument.distinct(loss["full"]),
        ByDocument.distinct(np.full(len(prompts), NEW)),
        ByDocument.distinct(full_runs.counts - rule_runs.counts) if seen else None,
        ByDocument.distinct(full_runs.counts) if seen else None,
        EXPLAINED * explained_ratio(full_runs, rule_runs) if seen else None,
        None if seen else ByPair(np.array(generate_s)),
    )


def _generate_seconds(subject: ModelUnderTest, prompt: Prompt) -> float:
    began = time.perf_counter()
    subject.own_greedy([prompt], NEW)
    return time.perf_counter() - began


@dataclass(frozen=True)
class BlockRuns:
    """Blocks and heads that ran on lent modules while prompts were answered.

    ``counts`` [documents]: blocks of single-token steps. ``step_s``, ``prompt_s``: seconds in them, and in blocks that
    read several tokens. ``heads``, ``head_s``: calls of the output embedding, and seconds in them. ``whole_s``: seconds
    of all answers.
    """

    counts: np.ndarray
    step_s: float
    prompt_s: float
    heads: int
    head_s: float
    whole_s: float


def explained_ratio(full: BlockRuns, rule: BlockRuns) -> float:
    """Time of full depth over that of the rule, if they differ by the blocks and heads that run alone."""
    blocks = (full.counts.sum() - rule.counts.sum()) * rule.step_s / rule.counts.sum()
    paced = rule if rule.heads else full  # a rule may read no whole head at all
    heads = (full.heads - rule.heads) * paced.head_s / max(paced.heads, 1)
    beyond = (blocks, heads, full.prompt_s - rule.prompt_s)
    return 1 + sum(max(float(each), 0.0) for each in beyond) / rule.whole_s


def _require_own_answers(seconds: np.ndarray, after: np.ndarray) -> None:
    """Require that the rule's answers [prompts] are not far faster where full depth had answered the same (``after``).

    Raises AuditRefutedError.
    """
    if after.all() or not after.any():
        return
    second, first = (float(np.median(seconds[each])) for each in (after, ~after))
    if second < REMEMBERED * first:
        raise AuditRefutedError(
            f"the rule answers in {1000 * second:.3g} ms what full depth has just answered, and in "
            f"{1000 * first:.3g} ms what it has not: it remembers answers"
        )


def _loss(subject: ModelUnderTest, prompt: Prompt, tokens: Ints) -> float:
    """−log p of ``tokens`` after ``prompt`` by the model at full depth, in nats."""
    history = np.concatenate([prompt.tokens, tokens[:-1]])
    log_p = log_softmax(subject.lens(history).last[-len(tokens) :], axis=-1)
    return -float(log_p[np.arange(len(tokens)), tokens].sum())


def _block_runs(subject: ModelUnderTest, decoder: Decoder, prompts: Sequence[Prompt]) -> BlockRuns:
    """Blocks and heads that run on modules that decoders were lent, while ``decoder`` answers ``prompts``."""
    counts, blocks, whole_s = np.zeros(len(prompts)), list[tuple[int, int, float]](), 0.0
    models = [loaded.model for loaded in subject.isolation.copies]
    with timed_blocks(models, decoder.synchronize) as (ran, heads):
        for at, prompt in enumerate(prompts):
            ran.clear()
            began = time.perf_counter()
            decoder.generate([prompt], NEW, frozenset())
            decoder.synchronize()
            whole_s += time.perf_counter() - began
            counts[at] = sum(rows for rows, tokens, _ in ran if tokens == 1)
            blocks += ran
    step_s, prompt_s = (sum(s for _, tokens, s in blocks if (tokens == 1) == single) for single in (True, False))
    return BlockRuns(counts, step_s, prompt_s, len(heads), sum(heads), whole_s)


def stated_rule(decoder: Decoder) -> StatedRule:
    """What the decoder states of its own rule. Raises Unsupported: it states none."""
    stated: StatedRule | None = getattr(decoder, "stated", None)
    if stated is None:
        raise Unsupported("the decoder states no exit rule of its own (protocol.StatedRule)")
    return stated


@contextmanager
def timed_blocks(
    models: Sequence[Any], synchronize: Callable[[], None]
) -> Iterator[tuple[list[tuple[int, int, float]], list[float]]]:
    """Inside the ``with`` block, lists get (rows, tokens of a row, seconds) of every call of a transformer block of
    ``models``, and seconds of every call of a head. ``synchronize`` waits for the device.
    """
    ran: list[tuple[int, int, float]] = []
    heads: list[float] = []
    began: list[float] = []

    def begin(module: Any, given: tuple[Any, ...]) -> None:
        synchronize()
        began.append(time.perf_counter())

    def end(module: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        synchronize()
        states = given[0] if given else named["hidden_states"]
        ran.append((int(states.shape[0]), int(states.shape[1]), time.perf_counter() - began.pop()))

    def end_head(module: Any, given: tuple[Any, ...], out: Any) -> None:
        synchronize()
        heads.append(time.perf_counter() - began.pop())

    hooks = [
        hook
        for model in models
        for block in getattr(model.get_decoder(), anatomy_of(model.config.get_text_config()).blocks)
        for hook in (block.register_forward_pre_hook(begin), block.register_forward_hook(end, with_kwargs=True))
    ]
    for head in filter(None, (model.get_output_embeddings() for model in models)):
        hooks += [head.register_forward_pre_hook(begin), head.register_forward_hook(end_head)]
    try:
        yield ran, heads
    finally:
        for hook in hooks:
            hook.remove()
