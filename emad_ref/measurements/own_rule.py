"""A decoder under an exit rule of its own, against the same decoder at full depth (claim ENG-7).

The decoder names its operating point and states what it saves (``protocol.StatedRule``). Here its answers are timed in
pairs, its blocks are counted on the modules that it was lent, and its tokens are scored by the model at full depth.

A speed-up may also come from fewer tokens, from answers that were remembered, or from a full depth that was slowed. So
every answer has the tokens that were asked for, blocks are counted on prompts that were not sent before, and the blocks
that run limit the ratio that they explain:

    (L·b + h) / ((1 − s)·L·b)        L layers of b FLOPs, a head of h that may cost the rule nothing, s blocks skipped
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
ARMS = ("full", "rule")
REMEMBERED = 0.5  # of the time of an answer: one that follows the other arm's to the same prompt takes more
EXPLAINED = 1.25  # factor on what blocks explain: overheads that a step of the rule may do without


@dataclass(frozen=True)
class OwnRuleEvidence:
    """``full_s``, ``rule_s`` [pairs] seconds of the same request. ``loss``, ``full_loss`` [documents]: −log p, in nats,
    that the model at full depth gives the tokens emitted under the rule and at full depth; ``tokens`` [documents].

    ``skipped``, ``blocks`` [documents]: blocks of single-token steps that the rule skipped, of those that full depth
    runs; None: an arm runs no lent module. ``explained``: the largest ratio of times that these blocks explain.
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
    after = np.zeros(len(prompts), dtype=bool)  # whether the rule answered after full depth
    loss = {arm: np.zeros(len(prompts)) for arm in ARMS}
    with subject.open(subject.full) as full, subject.open(subject.full, own_rule=True) as rule:
        stated = stated_rule(rule)
        decoders = dict(zip(ARMS, (full, rule), strict=True))
        emitted: dict[str, list[Ints]] = {arm: [] for arm in ARMS}
        for decoder in decoders.values():
            decoder.generate(prompts[:1], NEW, frozenset())  # the first request may compile
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
        _require_own_answers(seconds["rule"], after)
        blocks = {arm: _executed_blocks(subject, decoders[arm], unsent) for arm in ARMS[::-1]}  # the rule's are new
    for arm in ARMS:
        loss[arm][:] = [_loss(subject, prompt, tokens) for prompt, tokens in zip(prompts, emitted[arm], strict=True)]
    seen = all(each.sum() for each in blocks.values())
    geometry = subject.stepper.geometry
    depth = geometry.layers * geometry.block_flops()
    return OwnRuleEvidence(
        stated,
        ByPair(seconds["full"]),
        ByPair(seconds["rule"]),
        ByDocument.distinct(loss["rule"]),
        ByDocument.distinct(loss["full"]),
        ByDocument.distinct(np.full(len(prompts), NEW)),
        ByDocument.distinct(blocks["full"] - blocks["rule"]) if seen else None,
        ByDocument.distinct(blocks["full"]) if seen else None,
        EXPLAINED * (1 + geometry.head_flops() / depth) * blocks["full"].sum() / blocks["rule"].sum() if seen else None,
    )


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


def _executed_blocks(subject: ModelUnderTest, decoder: Decoder, prompts: Sequence[Prompt]) -> np.ndarray:
    """[documents] blocks that ran in single-token steps on modules that decoders were lent."""
    counts = np.zeros(len(prompts))
    with counted_blocks([loaded.model for loaded in subject.isolation.copies]) as ran:
        for at, prompt in enumerate(prompts):
            ran.clear()
            decoder.generate([prompt], NEW, frozenset())
            decoder.synchronize()
            counts[at] = sum(ran)
    return counts


def stated_rule(decoder: Decoder) -> StatedRule:
    """What the decoder states of its own rule. Raises Unsupported: it states none."""
    stated: StatedRule | None = getattr(decoder, "stated", None)
    if stated is None:
        raise Unsupported("the decoder states no exit rule of its own (protocol.StatedRule)")
    return stated


@contextmanager
def counted_blocks(models: Sequence[Any]) -> Iterator[list[int]]:
    """Inside the block, the list gets the rows of every single-token call of a transformer block of ``models``."""
    ran: list[int] = []

    def count(module: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        states = given[0] if given else named["hidden_states"]
        if states.shape[1] == 1:
            ran.append(int(states.shape[0]))

    hooks = [
        block.register_forward_hook(count, with_kwargs=True)
        for model in models
        for block in getattr(model.get_decoder(), anatomy_of(model.config.get_text_config()).blocks)
    ]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()
