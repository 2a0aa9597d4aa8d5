"""Savings of switching between two models: the paper's arithmetic (EAD-H1), and costs that it omits (EAD-H2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from emad_ref.decoding.prefix_tree import SwitchedText
from emad_ref.decoding.switching import LARGE, MODELS, SMALL, SwitchingRule
from emad_ref.flop_ledger import two_model_cost_at_large_share, two_model_relative_cost
from pytest_emad.claims.base import Answer, ClaimContext, Question
from pytest_emad.claims.pair_answers import make_answer_from_pair_verdict
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.study import PairNames
from pytest_emad.statistics.legs import build_measured_count_leg, verdict_from_errors_and_tolerance
from pytest_emad.statistics.verdicts import Leg, Verdict

BILLION = 1e9


# name, the large model's share of emitted tokens, parameters of the small and the large model, the saving claimed
Headline = tuple[str, float, float, float, float]
PAPER: tuple[Headline, ...] = (
    ("LLaMA 11B + 3B at 43 % of tokens", 0.43, 3 * BILLION, 11 * BILLION, 0.415),
    ("Qwen 14B + 1.5B at 25 % of tokens", 0.25, 1.5 * BILLION, 14 * BILLION, 0.67),
)


def decide_paper_savings(found: Iterable[Headline], asked: ClaimContext) -> Verdict:
    """EAD-H1: a leg per headline: the difference of its saving from the claimed one, by the paper's own cost.

    If the abstract names no size of the small model, the leg uses the size that reproduces its saving.
    """
    differences = {}
    for name, large_share, small, large, claimed in found:
        saving = 1 - two_model_cost_at_large_share(large_share, small_parameters=small, large_parameters=large)
        leg = f"{name}: saves {saving:.2%}, the paper says {claimed:.1%}"
        differences[leg] = np.array([abs(saving - claimed)])
    return verdict_from_errors_and_tolerance(asked.claim, asked.model, differences, asked.claim.thresholds["saving"])


def answer_paper_savings(names: PairNames, asked: ClaimContext) -> Answer:
    """Answer EAD-H1 under the names of the run's pair, without reading it."""
    return Answer(decide_paper_savings(PAPER, asked))


# ---------------------------------------------------------------- EAD-H2: tokens that a pair reads twice


TASKS = 2  # lengths and switches determine repeated reading, which differs little between tasks


@dataclass(frozen=True)
class SwitchingRuleCosts:
    """Counts of one rule, and of the large model alone, on the judged items; pairs are (small, large).

    ``emitted``     tokens, the large model's ``large_share`` of them included.
    ``processed``   tokens through each model, prompts and catch-up included; ``read_alone``: through the large model
                    alone.
    ``caught_up``   tokens each model read when it took over, those it had not seen.
    ``flops``, ``opening_flops``, ``alone_flops`` total, on opening with the prompts, and by the large model alone; None
                    if a decoder does not count.
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


# task → one rule for each of the paper's savings; and parameters of the (small, large) model
TaskCharges = tuple[Mapping[str, tuple[SwitchingRuleCosts, ...]], tuple[float, float]]


def decide_catch_up(found: TaskCharges, asked: ClaimContext) -> Verdict:
    """EAD-H2: per rule the paper's saving minus that in FLOPs (else in processed tokens), then the parts.

    The rules are those nearest to each of the paper's savings on validation. A model that takes over for the first time
    reads the prompt too. Texts are of the two tasks most worth routing, else of the first written task, else plain
    documents. The row has no scores.
    """
    tasks, parameters = found
    legs: list[Leg] = []
    for task, rules in tasks.items():
        legs += [leg for charged in rules for leg in _charge_legs(task, charged, parameters)]
    return asked.combine_legs(legs)


def _charge_legs(task: str, charged: SwitchingRuleCosts, parameters: tuple[float, float]) -> list[Leg]:
    name, n = f"{task}, {charged.rule}", charged.items
    small, large = parameters
    paper = 1 - two_model_cost_at_large_share(charged.large_share, small_parameters=small, large_parameters=large)
    processed = 1 - two_model_relative_cost(
        charged.processed[0],
        charged.processed[1],
        charged.read_alone,
        small_parameters=small,
        large_parameters=large,
    )
    legs = [
        build_measured_count_leg(f"{name}: by token share", paper, n, "saving"),
        build_measured_count_leg(f"{name}: by tokens processed, prompts and catch-up included", processed, n, "saving"),
    ]
    for model, reread in zip(MODELS, charged.caught_up, strict=True):
        legs.append(
            build_measured_count_leg(
                f"{name}: the {model} model catches up on", reread / charged.emitted, n, "tokens per token emitted"
            )
        )
    if charged.flops is None or charged.opening_flops is None or charged.alone_flops is None:
        return [
            build_measured_count_leg(f"{name}: token share less tokens processed", paper - processed, n, "saving lost"),
            *legs,
        ]
    executed, opening = 1 - charged.flops / charged.alone_flops, charged.opening_flops / charged.flops
    return [
        build_measured_count_leg(f"{name}: token share less FLOPs executed", paper - executed, n, "saving lost"),
        *legs,
        build_measured_count_leg(f"{name}: by FLOPs executed, prompts and catch-up included", executed, n, "saving"),
        build_measured_count_leg(f"{name}: spent on opening with the prompts", opening, n, "share of FLOPs"),
    ]


def answer_catch_up(pair: PairMeasurements, asked: ClaimContext) -> Answer:
    """Answer EAD-H2, with each rule once, even if it is nearest to both savings."""
    sizes, rules = pair.models.parameters, pair.routing_rules
    tasks = [] if pair.models.absent_quality is not None else rules.written_tasks_worth_routing[:TASKS]
    charged = {}
    for task in tasks or rules.decodable_tasks[:1]:
        nearest = dict.fromkeys(rules.find_rule_nearest_saving(task, saving) for saving in pair.savings)
        charged[task] = tuple(_charges_of_rule(pair, task, rule) for rule in nearest)
    found = charged, (sizes["small_parameters"], sizes["large_parameters"])
    return make_answer_from_pair_verdict(pair, decide_catch_up(found, asked))


def _charges_of_rule(pair: PairMeasurements, task: str, rule: SwitchingRule) -> SwitchingRuleCosts:
    done = pair.routing_rules.answer_judged_items(rule, task)
    alone = pair.routing_rules.answer_judged_items_alone(LARGE, task)
    processed, caught_up = (
        (sum(count(walk, SMALL) for walk in done.walks), sum(count(walk, LARGE) for walk in done.walks))
        for count in (SwitchedText.count_tokens_read, SwitchedText.count_catch_up_tokens)
    )
    return SwitchingRuleCosts(
        pair.routing_rules.format_rule_name(rule),
        len(done.right),
        int(done.emitted.sum()),
        done.large_share,
        processed,
        sum(walk.count_tokens_read(LARGE) for walk in alone.walks),
        caught_up,
        done.flops,
        None if done.flops is None else pair.models.compute_switched_flops(done.walks, opening=True),
        alone.flops,
    )


QUESTIONS = (
    Question("EAD-H1", "names", answer_paper_savings, decide=decide_paper_savings),
    Question("EAD-H2", "pair", answer_catch_up, budget="standard", decide=decide_catch_up),
)
