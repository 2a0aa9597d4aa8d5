"""A decoder under an exit rule of its own, against the same decoder at full depth (claim ENG-7).

The decoder names its operating point and states what it saves (``protocol.StatedRule``). Here its answers are timed in
pairs, its blocks are counted on the modules that it was lent, and its tokens are scored by the model at full depth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax

from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.models.families import anatomy_of
from emad_ref.protocol import Decoder, Prompt, StatedRule, Unsupported
from emad_ref.record import Ints
from emad_ref.statistics.units import ByDocument, ByPair

PROMPT, NEW = 48, 32  # tokens of a prompt at most, and new ones
DOCUMENTS = 400  # against a rise of 1 % nothing survives with fewer than 300
WITNESSED = 40  # documents of which blocks are counted, apart from those timed
ARMS = ("full", "rule")


@dataclass(frozen=True)
class OwnRuleEvidence:
    """``full_s``, ``rule_s`` [pairs] seconds of the same request. ``loss``, ``full_loss`` [documents]: −log p, in nats,
    that the model at full depth gives the tokens emitted under the rule and at full depth; ``tokens`` [documents].

    ``skipped``, ``blocks`` [documents]: blocks of single-token steps that the rule skipped, of those that full depth
    runs; None: the engine runs no lent module.
    """

    stated: StatedRule
    full_s: ByPair
    rule_s: ByPair
    loss: ByDocument
    full_loss: ByDocument
    tokens: ByDocument
    skipped: ByDocument | None
    blocks: ByDocument | None


def own_rule_evidence(subject: ModelUnderTest, documents: int = DOCUMENTS) -> OwnRuleEvidence:
    """Answers of both arms to requests about ``subject``'s evaluation documents.

    Raises Unsupported: the decoder has no exit rule of its own.
    """
    rng = np.random.default_rng([subject.seed, NEW])
    prompts = subject.openings(documents, min(PROMPT, subject.window - NEW))
    seconds = {arm: np.zeros(len(prompts)) for arm in ARMS}
    loss = {arm: np.zeros(len(prompts)) for arm in ARMS}
    with subject.open(subject.full) as full, subject.open(subject.full, own_rule=True) as rule:
        stated = stated_rule(rule)
        decoders = dict(zip(ARMS, (full, rule), strict=True))
        emitted: dict[str, list[Ints]] = {arm: [] for arm in ARMS}
        for decoder in decoders.values():
            decoder.generate(prompts[:1], NEW, frozenset())  # the first request may compile
        for at, prompt in enumerate(prompts):
            for arm in rng.permutation(ARMS).tolist():
                began = time.perf_counter()
                record = decoders[arm].generate([prompt], NEW, frozenset())
                decoders[arm].synchronize()
                seconds[arm][at] = time.perf_counter() - began
                emitted[arm].append(np.array(record.emitted[0]))
        blocks = {arm: _executed_blocks(subject, decoder, prompts[:WITNESSED]) for arm, decoder in decoders.items()}
    for arm in ARMS:
        loss[arm][:] = [_loss(subject, prompt, tokens) for prompt, tokens in zip(prompts, emitted[arm], strict=True)]
    seen = bool(blocks["full"].sum())
    return OwnRuleEvidence(
        stated,
        ByPair(seconds["full"]),
        ByPair(seconds["rule"]),
        ByDocument.distinct(loss["rule"]),
        ByDocument.distinct(loss["full"]),
        ByDocument.distinct(np.full(len(prompts), NEW)),
        ByDocument.distinct(blocks["full"] - blocks["rule"]) if seen else None,
        ByDocument.distinct(blocks["full"]) if seen else None,
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
