"""Which of EAD's constants matter, and what would speculative decoding of the same pair have done? One table.

τ, the model that starts, w and d_min, one at a time from the paper's w and d_min; speculation at several widths, gated
and not, and drafted by the large model itself, which leaves at each of its probes and goes on from there. Batch 1, the
same items and prompts for all; score, share, acceptance and FLOPs off records, time in pairs.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from emad_ref.decoding.speculative import speculate
from emad_ref.decoding.switching import LARGE, SMALL, switch
from emad_ref.sweep.routing import threshold_for_share
from pytest_emad.pairing import DRAFTED, described, self_drafted, table_row

SHARES = (0.1, 0.5, 0.9)
WINDOWS = (1, 2, 10, 20)
LEAST_RUNS = (1, 5, 20, 40)
WIDTHS = (2, DRAFTED, 8)
GATES_BITS = (0.3, 1.0)
TITLE = "switching and speculation of one pair"


@pytest.mark.emad(budget="standard", measures=True)
def test_one_table_of_switching_and_speculation(emad_pair, emad_record):
    pair = emad_pair
    if reason := pair.premise():
        pytest.skip(f"not applicable ({reason})")
    if pair.without_drafting:
        emad_record.note(f"{pair.name}: self-speculation: not applicable ({pair.without_drafting})")
    rows = [line for task in pair.tasks for line in table(pair, task)]
    emad_record.table(f"{TITLE}, {', '.join(pair.tasks)}", pair.name, rows)
    assert {row["large-model share %"] for row in rows} >= {0.0, 1.0}, "both models alone belong to the table"


def table(pair, task):
    items = (task, "validate", pair.size.tried)
    rules = {described(rule): rule for rule in varied(pair, task)}
    widths = {f"speculative, k = {k}": (k, None) for k in WIDTHS}
    widths |= {f"speculative, k = {DRAFTED}, gate {gate} bits": (DRAFTED, gate) for gate in GATES_BITS}
    answered = {"small alone": pair.alone(SMALL, *items), "large alone": pair.alone(LARGE, *items)}
    answered |= {name: pair.switched(rule, *items) for name, rule in rules.items()}
    answered |= {name: pair.speculated(*items, k=k, gate_bits=gate) for name, (k, gate) in widths.items()}
    exits = {f"self-speculative after layer {layer}, k = {DRAFTED}": layer for layer in pair.exit_layers}
    answered |= {name: pair.self_speculated(layer, *items) for name, layer in exits.items()}
    speeds = tokens_per_second(pair, rules, widths, exits)
    return [
        table_row(name, done, **{"acceptance %": done.acceptance, "task": task, "tokens/s": speeds[name]})
        for name, done in answered.items()
    ]


def varied(pair, task):
    """One constant at a time; the base is the paper's w and d_min at the middle share, the small model first."""
    thresholds = [threshold_for_share(pair.rolling_bits(task), share) for share in SHARES]
    tried = list(pair.tried(task))
    base = next(rule for rule in tried if rule.threshold_bits == thresholds[1] and rule.start == SMALL)
    rules = [replace(base, threshold_bits=tau, start=start) for start in (SMALL, LARGE) for tau in thresholds]
    rules += [replace(base, window=window) for window in WINDOWS]
    return [*rules, *(replace(base, least_run=least) for least in LEAST_RUNS)]


def tokens_per_second(pair, rules, widths, exits):
    with ExitStack() as stack:
        small, large = stack.enter_context(pair.partners())
        arms = {
            "small alone": lambda prompt, new: small.decoder.generate([prompt], new, frozenset()),
            "large alone": lambda prompt, new: large.decoder.generate([prompt], new, frozenset()),
        }
        arms |= {name: switching(small, large, rule) for name, rule in rules.items()}
        arms |= {name: speculation(small, large, *how) for name, how in widths.items()}
        if exits:
            drafting = stack.enter_context(pair.drafting())
            arms |= {name: self_drafted(drafting, layer) for name, layer in exits.items()}
        timings, _ = pair.timed(arms, pair.size.reported)
    return {name: float(pair.timed_new / np.median(seconds)) for name, seconds in timings.seconds.items()}


def switching(small, large, rule):
    return lambda prompt, new: switch(small, large, rule, [prompt], new)


def speculation(small, large, k, gate):
    return lambda prompt, new: speculate(small, large, [prompt], new, k=k, gate_bits=gate)
