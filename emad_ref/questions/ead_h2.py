"""EAD-H2: what does the headline leave out? A model that takes over reads what it has not seen. (EAD, Abstract)

On the runs of EAD-F1: saved by token share, by tokens processed, by FLOPs executed, all of the large model alone. A
model that takes over for the first time reads the prompt too: what the large model alone reads once, a pair reads up to
twice. It does not apply to weights without quality, nor where the large model is not better on any task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from emad_ref.decoding.switching import LARGE, MODELS, Switched, SwitchingRule
from emad_ref.evidence.pair.answered import described
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.meters.cost import relative_cost, token_share_cost
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.paired import about, nothing_to_route
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.legs import counted, row


@dataclass(frozen=True)
class Charged:
    """What one rule did on the judged items, and what the large model alone did; pairs are (small, large).

    ``emitted``     tokens, the large model's ``large_share`` of them included.
    ``processed``   tokens that went through each model, prompts and catch-up included; ``read_alone``: through the
                    large model where it is alone.
    ``caught_up``   tokens each model read when it took over, those it had not seen.
    ``flops``, ``opening_flops``, ``alone_flops``  executed in all, on opening with the prompts, and by the large model
                    alone; None where a decoder does not count.
    """

    rule: str
    items: int
    emitted: int
    large_share: float
    processed: tuple[int, int]
    read_alone: int
    caught_up: tuple[int, int]
    flops: int | None
    opening_flops: int | None
    alone_flops: int | None


@dataclass(frozen=True)
class Found:
    """``tasks``: task worth routing → the rules that validation chose for the paper's savings. ``parameters``: (small,
    large)."""

    tasks: Mapping[str, tuple[Charged, ...]]
    parameters: tuple[float, float]


def decide(found: Found, asked: Asked) -> Verdict:
    """Per rule the paper's saving less that in FLOPs (in tokens processed where nothing is counted), then the parts."""
    legs: list[Leg] = []
    for task, rules in found.tasks.items():
        legs += [leg for charged in rules for leg in _lost_by(task, charged, found.parameters)]
        if not rules:
            legs.append(counted(f"{task}: rules tried that save as much as the paper's", 0, 0, "rules"))
    return row(asked.claim, asked.model, legs)


def _lost_by(task: str, charged: Charged, parameters: tuple[float, float]) -> list[Leg]:
    name, n = f"{task}, {charged.rule}", charged.items
    small, large = parameters
    paper = 1 - token_share_cost(charged.large_share, small_parameters=small, large_parameters=large)
    processed = 1 - relative_cost(
        charged.processed[0],
        charged.processed[1],
        charged.read_alone,
        small_parameters=small,
        large_parameters=large,
    )
    legs = [
        counted(f"{name}: by token share", paper, n, "saving"),
        counted(f"{name}: by tokens processed, prompts and catch-up included", processed, n, "saving"),
    ]
    for model, reread in zip(MODELS, charged.caught_up, strict=True):
        legs.append(
            counted(f"{name}: the {model} model catches up on", reread / charged.emitted, n, "tokens per token emitted")
        )
    if charged.flops is None or charged.opening_flops is None or charged.alone_flops is None:
        return [counted(f"{name}: token share less tokens processed", paper - processed, n, "saving lost"), *legs]
    executed, opening = 1 - charged.flops / charged.alone_flops, charged.opening_flops / charged.flops
    return [
        counted(f"{name}: token share less FLOPs executed", paper - executed, n, "saving lost"),
        *legs,
        counted(f"{name}: by FLOPs executed, prompts and catch-up included", executed, n, "saving"),
        counted(f"{name}: spent on opening with the prompts", opening, n, "share of FLOPs"),
    ]


def answer(pair: Pair, asked: Asked) -> Answer:
    """From the rules that EAD-F1 judges: each once, though it may serve both savings."""
    if absent := nothing_to_route(pair, asked):
        return absent
    sizes = pair.models.parameters
    found = Found(
        {task: _rules(pair, task) for task in pair.rules.tasks}, (sizes["small_parameters"], sizes["large_parameters"])
    )
    return about(pair, decide(found, asked))


def _rules(pair: Pair, task: str) -> tuple[Charged, ...]:
    chosen = dict.fromkeys(pair.rules.chosen(task, saving) for saving in pair.savings)
    return tuple(_charged(pair, task, rule) for rule in chosen if rule is not None)


def _charged(pair: Pair, task: str, rule: SwitchingRule) -> Charged:
    done, alone = pair.rules.judged(rule, task), pair.rules.judged_alone(LARGE, task)
    (run,) = done.runs
    assert isinstance(run, Switched)
    small, large = np.bincount(run.record.tokens.model, minlength=2).tolist()
    reread = run.catch_up_tokens.tolist()
    prompts = sum(len(item.prompt) - 1 for item in pair.answers.items(task, "evaluate", pair.size.judged))
    return Charged(
        described(rule),
        len(done.right),
        int(done.emitted.sum()),
        done.large_share,
        (small, large),
        prompts + int(alone.emitted.sum()),
        (reread[0], reread[1]),
        done.flops,
        None if run.opening_work is None else pair.models.flops(run.opening_work),
        alone.flops,
    )


QUESTION = Question("EAD-H2", "pair", answer)
