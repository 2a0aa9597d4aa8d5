"""Tables about early exits: every rule that the claims name, and the ablation of the minimum exit layer."""

from __future__ import annotations

from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.exits.answers import Answered
from emad_ref.evidence.exits.gathered import Exits
from emad_ref.evidence.exits.rules import RULES

FULL = "full depth"

Row = dict[str, object]


def row(exits: Exits, task: str, rule: str, minimum: int, done: Answered) -> Row:
    """One line about ``done``: exit, score and FLOPs per item, apart and together; FLOPs None where not counted."""
    parts = None if done.counted is None else done.costs(exits.subject.loaded.geometry)
    return {
        "task": task,
        "rule": rule,
        "j": minimum,
        "mean exit": done.exited.mean_exit,
        "score": float(done.exited.score.values.mean()),
        "exact match": done.exact,
        "confidence MFLOPs": None if parts is None else parts.confidence / 1e6,
        "decoder MFLOPs": None if parts is None else parts.decoder / 1e6,
        "together MFLOPs": None if parts is None else parts.together / 1e6,
    }


def by_rule(exits: Exits) -> Exhibits:
    """Full depth, then every row of ``RULES`` at the paper's minimum layers, task by task; a note on unsolved tasks."""
    rows = [line for task in exits.tasks for line in _rows(exits, task, exits.minima)]
    notes = tuple(f"{exits.subject.name}: {task}: {reason}" for task, reason in exits.unsolved.items())
    return Exhibits((Table(f"early exits on {exits.corpus}", rows, "FLOPs by rule"),), notes)


def by_minimum_layer(exits: Exits) -> Exhibits:
    """Early-exit LLMs, Figures 6 to 13: every rule at every minimum layer at which it can decide; a table per task.

    Full depth stands on the first line.
    """
    # a contrast needs a layer below, a pruned readout one above that is not the last
    minima = range(2, exits.subject.stepper.layers - 1)
    return Exhibits(
        tuple(
            Table(
                f"ablation, minimum exit layer on {exits.asked.title(task)}",
                _rows(exits, task, minima),
                "exits by minimum layer",
            )
            for task in exits.tasks
        )
    )


def _rows(exits: Exits, task: str, minima: range | tuple[int, ...]) -> list[Row]:
    full = row(exits, task, FULL, exits.subject.stepper.layers, exits.under(task, exits.full))
    each = [(rule, minimum) for minimum in minima for rule in RULES]
    return [full, *(row(exits, task, rule, minimum, exits.answered(task, rule, minimum)) for rule, minimum in each)]
