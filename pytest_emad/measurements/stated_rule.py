"""A decoder with its own exit rule against the same decoder at full depth (claim ENG-7).

The decoder names its operating point and states its savings (``protocol.StatedRule``). This module times its answers in
pairs, counts its blocks on the modules lent to it, and scores its tokens by the model at full depth.

A speed-up may also come from fewer tokens, from remembered answers, or from a slowed full depth. So every answer must
have the requested number of tokens. A time counts only if the other arm has not answered the same prompt before. Blocks
are counted on random prompts that are scored like the others. The blocks and heads of full depth beyond those of the
rule limit the ratio that they explain, at the rule's own pace:

    1 + ((n_full − n_rule)·b + (m_full − m_rule)·h + p) / t

with n blocks of b seconds in single-token steps, m heads of h seconds, p seconds in blocks that read prompts, full
depth's beyond the rule's, and t seconds of the rule's answers.

Where both arms take several requests at once, they are also timed under load (``load``).

If no lent module runs, blocks explain nothing. Then the model's own ``generate`` also answers some requests: a full
depth that takes longer may have been slowed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from emad_ref.absent import Absent
from emad_ref.models.families import anatomy_of
from emad_ref.protocol import Decoder, Prompt, StatedRule, Unsupported
from emad_ref.record import Ints
from pytest_emad.audit.finding import AuditRefutedError
from pytest_emad.audit.log_probs import own_log_probs
from pytest_emad.benchmark.clock import collect_garbage, time_call, timing_setup
from pytest_emad.measurements.load import LoadByRequests, measure_load
from pytest_emad.measurements.model_under_test import ModelUnderTest
from pytest_emad.statistics.units import ByDocument, ByPair

PROMPT, NEW = 48, 32  # most tokens of a prompt, and new ones
DOCUMENTS = 400  # least documents: against a rise of 1 % no row survives with fewer than 300
WITNESSED = 40  # additional documents, for counting blocks without timing
GENERATED = 60  # most documents that ``generate`` answers after full depth
ARMS = ("full", "rule")
NOT_LOADED = Absent("not timed under load")
REMEMBERED = 0.5  # least share of an answer's time when the other arm has answered the same prompt before
EXPLAINED = 1.15  # factor on the ratio that blocks explain, for overheads that the rule may skip


@dataclass(frozen=True)
class OwnRuleSpeedupEvidence:
    """``full_s``, ``rule_s`` [pairs] seconds of requests with prompts that are new to both arms. ``loss``,
    ``full_loss`` [documents]: −log p, in nats, that the model at full depth gives the tokens emitted under the rule and
    at full depth; ``tokens`` [documents].

    ``skipped``, ``blocks`` [documents]: blocks of single-token steps that the rule skipped, of those that full depth
    runs; None: an arm runs no lent module. ``explained``: the largest ratio of times that blocks explain.
    ``generate_s`` [pairs]: seconds of the model's own ``generate`` for the first requests, if blocks explain nothing.
    ``load``: times by the number of requests in flight, or why there are none.
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
    load: LoadByRequests | Absent = NOT_LOADED


def measure_own_rule_speedup(subject: ModelUnderTest, documents: int = DOCUMENTS) -> OwnRuleSpeedupEvidence:
    """Answers of both arms to requests about ``subject``'s evaluation documents.

    Raises:
        Unsupported: the decoder has no exit rule of its own.
        AuditRefutedError: an answer has other than ``NEW`` tokens, or the rule remembers answers of full depth.
    """
    rng = np.random.default_rng([subject.seed, NEW])
    prompts = subject.make_opening_prompts(documents + WITNESSED, min(PROMPT, subject.window_size - NEW))
    witnessed = set(rng.choice(len(prompts), min(WITNESSED, len(prompts) // 2), replace=False).tolist())
    seconds: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    emitted: dict[str, list[Ints]] = {arm: [] for arm in ARMS}
    runs: dict[str, list[BlockExecutionStats]] = {arm: [] for arm in ARMS}
    first: dict[str, list[int]] = {arm: [] for arm in ARMS}  # timed prompts that the arm answered first
    generate_s: list[float] = []
    order = list(ARMS)
    with (
        timing_setup(),
        subject.open_decoder(subject.full_depth_point) as full,
        subject.open_decoder(subject.full_depth_point, own_rule=True) as rule,
    ):
        stated = get_required_stated_rule(rule)
        decoders = dict(zip(ARMS, (full, rule), strict=True))
        for decoder in decoders.values():
            decoder.generate([Prompt(prompts[0].tokens[::-1].copy())], NEW, frozenset())  # the first may compile
        for at, prompt in enumerate(prompts):
            watched = at in witnessed
            if not watched:  # each arm is first in every second prompt
                order = order[::-1] if len(seconds["full"]) % 2 else rng.permutation(ARMS).tolist()
                first[order[0]].append(at)
            for arm in ARMS[::-1] if watched else order:  # blocks of the rule are counted on new prompts
                if watched:
                    ran, tokens = _block_runs(subject, decoders[arm], prompt)
                    runs[arm].append(ran)
                else:
                    seconds[arm][at], _, tokens = time_call(partial(_answer, decoders[arm], prompt))
                if len(tokens) != NEW:
                    raise AuditRefutedError(f"{arm}: {len(tokens)} new tokens, where {NEW} were asked for")
                emitted[arm].append(tokens)
            collect_garbage()
            if not watched and order[0] == "full" and len(generate_s) < GENERATED and not _all_seen(runs):
                generate_s.append(_generate_seconds(subject, prompt))
        _require_own_answers(seconds["rule"], set(first["rule"]))
        load = measure_load(decoders, partial(_new_prompts, subject, prompts), prompts[0], NEW, rng)
    loss = {
        arm: np.array([_loss(subject, prompt, tokens) for prompt, tokens in zip(prompts, emitted[arm], strict=True)])
        for arm in ARMS
    }
    seen = _all_seen(runs)
    rule_runs = BlockExecutionStats.concatenate(runs["rule"])
    full_runs = BlockExecutionStats.concatenate(runs["full"]).cap_at_full_depth_work(rule_runs, subject.stepper.layers)
    pairs = min(map(len, first.values()))
    new_s = {arm: ByPair(np.array([seconds[arm][at] for at in first[arm][:pairs]])) for arm in ARMS}
    return OwnRuleSpeedupEvidence(
        stated,
        new_s["full"],
        new_s["rule"],
        ByDocument.from_whole_documents(loss["rule"]),
        ByDocument.from_whole_documents(loss["full"]),
        ByDocument.from_whole_documents(np.full(len(prompts), NEW)),
        ByDocument.from_whole_documents(full_runs.counts - rule_runs.counts) if seen else None,
        ByDocument.from_whole_documents(full_runs.counts) if seen else None,
        EXPLAINED * compute_explained_speedup(full_runs, rule_runs) if seen else None,
        None if seen else ByPair(np.array(generate_s)),
        load,
    )


def _new_prompts(subject: ModelUnderTest, asked: Sequence[Prompt], most: int) -> list[Prompt]:
    """At most ``most`` prompts that no arm has read; those that were ``asked``, if there are no more documents."""
    longest = max(len(prompt.tokens) for prompt in asked)
    return subject.make_opening_prompts(len(asked) + most, longest)[len(asked) :] or list(asked)


def _answer(decoder: Decoder, prompt: Prompt) -> Ints:
    """Decode and read the new tokens, since an answer may be computed only on reading."""
    record = decoder.generate([prompt], NEW, frozenset())
    decoder.synchronize()
    return np.array(record.emitted[0])


def _generate_seconds(subject: ModelUnderTest, prompt: Prompt) -> float:
    return time_call(partial(subject.generate_greedy, [prompt], NEW)).seconds


@dataclass(frozen=True)
class BlockExecutionStats:
    """Blocks and heads that ran on lent modules during answers.

    ``counts`` [documents]: blocks of single-token steps. ``step_s``, ``prompt_s``: seconds in them, and in blocks that
    read several tokens. ``heads``, ``head_s``: calls of the output embedding, and seconds in them. ``whole_s``: seconds
    of all answers. ``lengths`` [documents]: tokens of the prompts. ``read``, ``passed`` [documents]: tokens that passes
    of several took through the block that read the most, and through all blocks.
    """

    counts: np.ndarray
    step_s: float
    prompt_s: float
    heads: int
    head_s: float
    whole_s: float
    lengths: np.ndarray
    read: np.ndarray
    passed: np.ndarray

    @classmethod
    def concatenate(cls, runs: Sequence[BlockExecutionStats]) -> BlockExecutionStats:
        """``runs`` end to end."""
        columns: dict[str, Any] = {}
        for each in fields(cls):
            values = [getattr(run, each.name) for run in runs]
            columns[each.name] = np.concatenate(values) if isinstance(values[0], np.ndarray) else sum(values)
        return cls(**columns)

    def cap_at_full_depth_work(self, rule: BlockExecutionStats, layers: int) -> BlockExecutionStats:
        """Work that full depth needs: each of ``layers`` once for each token, and prompts in passes as ``rule``'s.

        Otherwise repeated work would count as savings of the rule.
        """
        steps = self.lengths + NEW - rule.read
        most = layers * self.lengths.sum() / max(self.passed.sum(), 1)
        return replace(
            self,
            counts=np.minimum(self.counts, layers * steps),
            heads=min(self.heads, int(steps.sum())),
            head_s=self.head_s * min(1.0, steps.sum() / max(self.heads, 1)),
            prompt_s=self.prompt_s * min(1.0, float(most)),
        )


def compute_explained_speedup(full: BlockExecutionStats, rule: BlockExecutionStats) -> float:
    """Time of full depth over that of the rule, if only executed blocks and heads differ."""
    blocks = (full.counts.sum() - rule.counts.sum()) * rule.step_s / rule.counts.sum()
    paced = rule if rule.heads else full  # a rule may never read a whole head
    heads = (full.heads - rule.heads) * paced.head_s / max(paced.heads, 1)
    beyond = (blocks, heads, full.prompt_s - rule.prompt_s)
    return 1 + sum(max(float(each), 0.0) for each in beyond) / rule.whole_s


def _all_seen(runs: Mapping[str, Sequence[BlockExecutionStats]]) -> bool:
    """Whether blocks of single-token steps were observed in every arm."""
    return all(any(run.counts.sum() for run in arm) for arm in runs.values())


def _require_own_answers(seconds: Mapping[int, float], first: Container[int]) -> None:
    """Require that the rule's answers, prompt → seconds, are not far faster on prompts that full depth answered first.

    ``first``: prompts that the rule answered first. Raises AuditRefutedError.
    """
    new = [taken for at, taken in seconds.items() if at in first]
    second = [taken for at, taken in seconds.items() if at not in first]
    if new and second and np.median(second) < REMEMBERED * np.median(new):
        raise AuditRefutedError(
            f"the rule answers in {1000 * np.median(second):.3g} ms what full depth has just answered, and in "
            f"{1000 * np.median(new):.3g} ms what it has not: it remembers answers"
        )


def _loss(subject: ModelUnderTest, prompt: Prompt, tokens: Ints) -> float:
    """Loss of ``tokens`` after ``prompt``, −log p by the model at full depth, in nats."""
    history = np.concatenate([prompt.tokens, tokens[:-1]])
    return -float(own_log_probs(subject.reference_lens(history).last_layer[-len(tokens) :], tokens).sum())


def _block_runs(subject: ModelUnderTest, decoder: Decoder, prompt: Prompt) -> tuple[BlockExecutionStats, Ints]:
    """(Blocks and heads that run on lent modules while ``decoder`` answers, its tokens)."""
    models = [loaded.model for loaded in subject.isolation.loaded_copies]
    with record_block_and_head_calls(models, decoder.synchronize) as (ran, heads):
        whole_s, _, tokens = time_call(partial(_answer, decoder, prompt))
    step_s, prompt_s = (sum(run.seconds for run in ran if (run.tokens == 1) == single) for single in (True, False))
    read: Counter[int] = Counter()
    for run in ran:
        read[run.block] += run.rows * run.tokens if run.tokens > 1 else 0
    count = sum(run.rows for run in ran if run.tokens == 1)
    columns = (np.array([n]) for n in (len(prompt.tokens), max(read.values(), default=0), read.total()))
    return BlockExecutionStats(np.array([count]), step_s, prompt_s, len(heads), sum(heads), whole_s, *columns), tokens


def get_required_stated_rule(decoder: Decoder) -> StatedRule:
    """The decoder's statement of its own rule. Raises Unsupported without one."""
    stated: StatedRule | None = getattr(decoder, "stated", None)
    if stated is None:
        raise Unsupported("the decoder states no exit rule of its own (protocol.StatedRule)")
    return stated


class BlockCall(NamedTuple):
    """``block``: its identity. ``rows``, ``tokens`` of a row."""

    block: int
    rows: int
    tokens: int
    seconds: float


@contextmanager
def record_block_and_head_calls(
    models: Sequence[Any], synchronize: Callable[[], None]
) -> Iterator[tuple[list[BlockCall], list[float]]]:
    """List calls of transformer blocks of ``models``, and seconds of head calls, inside the ``with`` block."""
    ran: list[BlockCall] = []
    heads: list[float] = []
    began: list[float] = []

    def begin(module: Any, given: tuple[Any, ...]) -> None:
        synchronize()
        began.append(time.perf_counter())

    def end(module: Any, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        synchronize()
        states = given[0] if given else named["hidden_states"]
        ran.append(BlockCall(id(module), int(states.shape[0]), int(states.shape[1]), time.perf_counter() - began.pop()))

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
