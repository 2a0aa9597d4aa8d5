"""Which of EAD's constants matter, and what would speculative decoding of the same pair have done? One table.

τ, the model that starts, w and d_min, one at a time from the w and d_min in force; speculation at several widths, gated
and not, and drafted by the large model itself, which leaves at each of its probes and goes on from there. Batch 1, the
same items and prompts for all; score, share, acceptance and FLOPs off records, time in pairs. Transformers' own ways
(``library``) have a time, and no record to read the rest off. No claim is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from emad_ref.decoding.switching import LARGE, SMALL, SwitchingRule
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.pair.answered import described, table_row
from emad_ref.evidence.pair.arms import Arm, alone, self_speculating, speculating, switching
from emad_ref.evidence.pair.gathered import Pair
from emad_ref.evidence.pair.speculation import DRAFTED
from emad_ref.sweep.routing import thresholds

TAUS = 3  # thresholds by quantile, with either model first
WINDOWS = (1, 2, 5, 10, 20)
LEAST_RUNS = (1, 5, 10, 20, 40)
WIDTHS = (2, DRAFTED, 8)
GATES_BITS = (0.3, 1.0)
TITLE = "switching and speculation of one pair"

Widths = Mapping[str, tuple[int, float | None]]  # name → k, gate in bits


def exhibited(pair: Pair) -> Exhibits:
    """The table over all tasks worth routing, and why self-speculation is not in it where it is not."""
    tasks, reason = pair.rules.written, pair.models.without_drafting
    absent = dict(pair.timing.library.absent) | ({"self-speculation": reason} if reason else {})
    notes = tuple(f"{pair.name}: {name}: not applicable ({why})" for name, why in absent.items())
    rows = [row for task in tasks for row in _rows(pair, task)]
    return Exhibits((Table(f"{TITLE}, {', '.join(tasks)}", rows),), notes)


def _rows(pair: Pair, task: str) -> list[dict[str, object]]:
    rules = {described(rule): rule for rule in varied(pair, task)}
    widths: dict[str, tuple[int, float | None]] = {f"speculative, k = {k}": (k, None) for k in WIDTHS}
    widths |= {f"speculative, k = {DRAFTED}, gate {gate} bits": (DRAFTED, gate) for gate in GATES_BITS}
    exits = {f"self-speculative after layer {layer}, k = {DRAFTED}": layer for layer in pair.models.exit_layers}
    answers, count = pair.answers, pair.size.tried
    answered = {
        "small alone": answers.alone(SMALL, task, "validate", count),
        "large alone": answers.alone(LARGE, task, "validate", count),
    }
    answered |= {name: pair.rules.validated(rule, task) for name, rule in rules.items()}
    answered |= {
        name: answers.speculated(task, "validate", count, k=k, gate_bits=gate) for name, (k, gate) in widths.items()
    }
    answered |= {name: answers.self_speculated(layer, task, "validate", count) for name, layer in exits.items()}
    speeds = _tokens_per_second(pair, rules, widths, exits)
    rows = [
        table_row(name, done, **{"acceptance %": done.acceptance, "task": task, "tokens/s": speeds[name]})
        for name, done in answered.items()
    ]
    unread: dict[str, object] = dict.fromkeys(rows[0])
    library = [unread | {"decoding": name, "task": task, "tokens/s": speeds[name]} for name in pair.timing.library.arms]
    return [*rows, *library]


def varied(pair: Pair, task: str) -> list[SwitchingRule]:
    """One constant at a time; the base is the w and d_min in force at the middle threshold, the small model first."""
    own = pair.rules.constants(task)
    taus = thresholds(pair.rules.rolling_bits(task, own.window), TAUS)
    base = SwitchingRule(taus[len(taus) // 2], own.window, own.least_run, SMALL)
    rules = [replace(base, threshold_bits=tau, start=start) for start in (SMALL, LARGE) for tau in taus]
    rules += [replace(base, window=window) for window in WINDOWS if window != own.window]
    return [*rules, *(replace(base, least_run=least) for least in LEAST_RUNS if least != own.least_run)]


def _tokens_per_second(
    pair: Pair, rules: Mapping[str, SwitchingRule], widths: Widths, exits: Mapping[str, int]
) -> dict[str, float]:
    with ExitStack() as stack:
        small, large = stack.enter_context(pair.models.partners())
        arms: dict[str, Arm] = {"small alone": alone(small.decoder), "large alone": alone(large.decoder)}
        arms |= {name: switching(small, large, rule) for name, rule in rules.items()}
        arms |= {name: speculating(small, large, k, gate) for name, (k, gate) in widths.items()}
        if exits:
            drafting = stack.enter_context(pair.models.drafting())
            arms |= {name: self_speculating(drafting, layer) for name, layer in exits.items()}
        arms |= dict(pair.timing.library.arms)
        timed = pair.timing.timed(arms, pair.size.reported)
        pair.timing.require_lossless(timed, large.decoder.capabilities, "large alone")
    return {name: float(timed.new / np.median(seconds.values)) for name, seconds in timed.seconds.items()}
