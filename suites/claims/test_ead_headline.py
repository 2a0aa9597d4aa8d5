"""EAD-H1, EAD-H2: is the headline's arithmetic right, and what does it leave out?"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.decoding.switching import LARGE, MODELS
from emad_ref.meters.cost import relative_cost, token_share_cost
from emad_ref.verdict.judge import judge_exact
from emad_ref.verdict.legs import counted, not_applicable, row
from pytest_emad.pairing import CORPUS, described, name_of

BILLION = 1e9
SAVINGS = ("saving_llama", "saving_qwen")  # thresholds of EAD-F1
# pair → large-model share, parameters of both, the saving claimed; the small sizes are those that reproduce it
HEADLINES = {
    "LLaMA 11B + 3B at 43 % of tokens": (0.43, 3 * BILLION, 11 * BILLION, 0.415),
    "Qwen 14B + 1.5B at 25 % of tokens": (0.25, 1.5 * BILLION, 14 * BILLION, 0.67),
}


@pytest.mark.emad(claim="EAD-H1")
def test_token_shares_give_the_headline_savings(emad_settings, emad_record, emad_register):
    claim = emad_register["EAD-H1"]
    differences = {}
    for pair, (share, small, large, claimed) in HEADLINES.items():
        saving = 1 - token_share_cost(share, small_parameters=small, large_parameters=large)
        differences[f"{pair}: saves {saving:.2%}, the paper says {claimed:.1%}"] = [abs(saving - claimed)]
    emad_record.claim(judge_exact(claim, name_of(emad_settings), differences, claim.thresholds["saving"]))


@pytest.mark.emad(claim="EAD-H2")
def test_what_catching_up_costs(emad_pair, emad_record, emad_register):
    """The runs of EAD-F1: saved by token share, by tokens processed, by FLOPs executed, all of the large model alone.

    A model that takes over for the first time reads the prompt too: what the large model alone reads once, a pair
    reads up to twice.
    """
    pair, claim = emad_pair, emad_register["EAD-H2"]
    with emad_record.unless_unsupported(claim.id, pair.name):
        if reason := pair.premise():
            verdict = not_applicable(claim, pair.name, reason)
        else:
            legs = [leg for task in pair.tasks for leg in left_out(pair, task, emad_register["EAD-F1"])]
            verdict = row(claim, pair.name, legs)
        emad_record.claim(verdict, corpus=CORPUS, fingerprint=pair.fingerprint)


def left_out(pair, task, headline):
    legs, arguments = [], (task, "evaluate", pair.size.judged)
    reference = pair.alone(LARGE, *arguments)
    read_alone = sum(len(item.prompt) - 1 for item in pair.items(*arguments)) + int(reference.emitted.sum())
    for rule in dict.fromkeys(pair.chosen(task, headline.thresholds[name]) for name in SAVINGS):
        if rule is not None:
            legs += lost_by(pair, rule, task, reference, read_alone)
    return legs or [counted(f"{task}: rules tried that save as much as the paper's", 0, 0, "rules")]


def lost_by(pair, rule, task, reference, read_alone):
    """The paper's saving less that in FLOPs, then the parts. ``read_alone``: tokens the large model alone processes."""
    done, name = pair.judged(rule, task), f"{task}, {described(rule)}"
    (run,) = done.runs
    n, emitted = len(done.right), int(done.emitted.sum())
    paper = pair.saving(done.large_share)
    processed = np.bincount(run.record.tokens.model, minlength=2)
    charged = 1 - relative_cost(*map(float, processed), read_alone, **pair.parameters)
    legs = [
        counted(f"{name}: by token share", paper, n, "saving"),
        counted(f"{name}: by tokens processed, prompts and catch-up included", charged, n, "saving"),
    ]
    for model, reread in zip(MODELS, run.catch_up_tokens.tolist(), strict=True):
        legs.append(
            counted(f"{name}: the {model} model catches up on", reread / emitted, n, "tokens per token emitted")
        )
    if done.flops is None or reference.flops is None:
        return [counted(f"{name}: token share less tokens processed", paper - charged, n, "saving lost"), *legs]
    executed, opening = 1 - done.flops / reference.flops, pair.flops(run.opening_work) / done.flops
    return [
        counted(f"{name}: token share less FLOPs executed", paper - executed, n, "saving lost"),
        *legs,
        counted(f"{name}: by FLOPs executed, prompts and catch-up included", executed, n, "saving"),
        counted(f"{name}: spent on opening with the prompts", opening, n, "share of FLOPs"),
    ]
