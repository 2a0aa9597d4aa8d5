"""All measurements of one pair under one study, and the ablation of EAD's constants."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property

import numpy as np

from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule
from emad_ref.models.loading import LoadedModel
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.pair_answers import TEXTS, WORLD, PairAnswers, describe_rule, make_answer_row
from pytest_emad.measurements.pair_models import DRAFT_TOKENS, PairModels
from pytest_emad.measurements.pair_routing import RoutingRules
from pytest_emad.measurements.pair_timing import (
    PairArm,
    PairLatencyBenchmark,
    make_decoder_arm,
    make_self_speculative_arm,
    make_speculative_arm,
    make_switching_arm,
)
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import PAIR_SIZES, PairNames, PairSampleSizes, Study
from pytest_emad.sweep.front import switching_thresholds


class PairMeasurements:
    """Measurements of two loaded models that read the same ids, each made on first use.

    Args:
        names: as the user gave them, the small model's first.
        savings: of the paper's results, thresholds of EAD-F1 in force; the proposed rule must save the first.
        size: items and pairs; None: those of the study's budget.

    Raises:
        BadArgument: as ``PairModels``.
    """

    def __init__(
        self,
        small: LoadedModel,
        large: LoadedModel,
        study: Study,
        host: RunResources,
        *,
        names: tuple[str, str],
        savings: tuple[float, ...],
        size: PairSampleSizes | None = None,
    ):
        self.names, self.study, self.savings = PairNames(*names), study, savings
        self.size = size or PAIR_SIZES[study.budget.name]
        self.models = PairModels(small, large, study, host, self.size)

    # ------------------------------------------------------------ names for reports

    @property
    def name(self) -> str:
        return self.names.name

    @property
    def corpus(self) -> str:
        """Corpus of the pair: the world's tasks, the named lm-eval tasks, or plain documents without either."""
        scored = self.answers.scorable_tasks if self.models.absent_quality is None else {}
        own = [WORLD] if not all(task.published for task in scored.values()) else []
        named = [name for name, task in scored.items() if task.published]
        return ", ".join([*own, *named]) or TEXTS

    @property
    def fingerprint(self) -> str:
        return self.models.fingerprint

    # ------------------------------------------------------------ holders

    @property
    def small(self) -> ModelMeasurements:
        return self.models.small

    @property
    def large(self) -> ModelMeasurements:
        return self.models.large

    @cached_property
    def answers(self) -> PairAnswers:
        """Items answered by each way of decoding."""
        return PairAnswers(self.models, self.study.seed, self.size.compared)

    @cached_property
    def routing_rules(self) -> RoutingRules:
        """Tasks worth routing, and the rules proposed by validation."""
        return RoutingRules(self.answers, self.size, self.name, self.savings)

    @cached_property
    def latency(self) -> PairLatencyBenchmark:
        """Paired seconds of each way of decoding."""
        return PairLatencyBenchmark(self.routing_rules, self.names, self.study)


TRIED_THRESHOLDS = 3  # thresholds by quantile, with either model first
TRIED_WINDOWS = (1, 2, 5, 10, 20)
LEAST_RUNS = (1, 5, 10, 20, 40)
WIDTHS = (2, DRAFT_TOKENS, 8)
GATES_BITS = (0.3, 1.0)
TITLE = "switching and speculation of one pair"

Widths = Mapping[str, tuple[int, float | None]]  # name → k, gate in bits


def make_cost_score_table(pair: PairMeasurements) -> Attachments:
    """The table over all tasks worth routing; a note says why self-speculation is missing, if it is."""
    tasks, own = pair.routing_rules.written_tasks_worth_routing, pair.models.absent_drafting
    absent = dict(pair.latency.transformers_arms.absent) | ({"self-speculation": own} if own else {})
    notes = tuple(f"{pair.name}: {name}: not applicable ({why.reason})" for name, why in absent.items())
    rows = [row for task in tasks for row in _constant_rows(pair, task)]
    return Attachments((AttachedTable(f"{TITLE}, {', '.join(tasks)}", rows),), notes)


def _constant_rows(pair: PairMeasurements, task: str) -> list[dict[str, object]]:
    rules = {describe_rule(rule): rule for rule in make_varied_rules(pair, task)}
    widths: dict[str, tuple[int, float | None]] = {f"speculative, k = {k}": (k, None) for k in WIDTHS}
    widths |= {f"speculative, k = {DRAFT_TOKENS}, gate {gate} bits": (DRAFT_TOKENS, gate) for gate in GATES_BITS}
    exits = {
        f"self-speculative after layer {layer}, k = {DRAFT_TOKENS}": layer for layer in pair.models.drafting_exit_layers
    }
    answers, count = pair.answers, pair.size.tried
    answered = {
        "small alone": answers.answer_by_one_model(SMALL, task, "validate", count),
        "large alone": answers.answer_by_one_model(LARGE, task, "validate", count),
    }
    answered |= {name: pair.routing_rules.answer_validation_items(rule, task) for name, rule in rules.items()}
    answered |= {
        name: answers.answer_by_speculation(task, "validate", count, k=k, gate_bits=gate)
        for name, (k, gate) in widths.items()
    }
    answered |= {
        name: answers.answer_by_self_speculation(layer, task, "validate", count) for name, layer in exits.items()
    }
    speeds = _tokens_per_second(pair, rules, widths, exits)
    rows = [
        make_answer_row(name, done, **{"acceptance %": done.accepted_share, "task": task, "tokens/s": speeds[name]})
        for name, done in answered.items()
    ]
    unread: dict[str, object] = dict.fromkeys(rows[0])
    library = [
        unread | {"decoding": name, "task": task, "tokens/s": speeds[name]}
        for name in pair.latency.transformers_arms.arms
    ]
    return [*rows, *library]


def make_varied_rules(pair: PairMeasurements, task: str) -> list[SwitchingRule]:
    """Rules that vary one constant at a time from w and d_min in force at the middle threshold, small model first."""
    own = pair.routing_rules.scale_paper_constants(task)
    taus = switching_thresholds(pair.routing_rules.rolling_entropy_bits(task, own.window), TRIED_THRESHOLDS)
    base = SwitchingRule(taus[len(taus) // 2], own.window, own.least_run, SMALL)
    rules = [replace(base, threshold_bits=tau, start=start) for start in (SMALL, LARGE) for tau in taus]
    rules += [replace(base, window=window) for window in TRIED_WINDOWS if window != own.window]
    return [*rules, *(replace(base, least_run=least) for least in LEAST_RUNS if least != own.least_run)]


def _tokens_per_second(
    pair: PairMeasurements, rules: Mapping[str, SwitchingRule], widths: Widths, exits: Mapping[str, int]
) -> dict[str, float]:
    with ExitStack() as stack:
        small, large = stack.enter_context(pair.models.open_partners())
        arms: dict[str, PairArm] = {
            "small alone": make_decoder_arm(small.decoder),
            "large alone": make_decoder_arm(large.decoder),
        }
        arms |= {name: make_switching_arm(small, large, rule) for name, rule in rules.items()}
        arms |= {name: make_speculative_arm(small, large, k, gate) for name, (k, gate) in widths.items()}
        if exits:
            drafting = stack.enter_context(pair.models.open_self_drafter())
            arms |= {name: make_self_speculative_arm(drafting, layer) for name, layer in exits.items()}
        arms |= dict(pair.latency.transformers_arms.arms)
        timed = pair.latency.time_arms(arms, pair.size.reported)
        pair.latency.require_lossless(timed, large.decoder.capabilities, "large alone")
    return {name: float(pair.latency.n_new_tokens / np.median(seconds)) for name, seconds in timed.seconds.items()}
