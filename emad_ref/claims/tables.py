"""Tables that belong to no claim, by name: of one model's evidence, ours first, then those of extensions.

Each is a function of ``measurements.model_measurements.ModelMeasurements`` that returns ``Attachments``, or raises
``protocol.Unsupported`` with the reason for which there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable

from emad_ref.extensions import list_added_parts, load_added_part
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.early_exits import rule_table
from emad_ref.measurements.model_measurements import ModelMeasurements
from emad_ref.measurements.operating_points import explorer_tables
from emad_ref.protocol import Unsupported

TableFunction = Callable[[ModelMeasurements], Attachments]


def pareto(evidence: ModelMeasurements) -> Attachments:
    """Every family of rules: the best point at each net reduction."""
    if reason := evidence.subject.without_quality:
        raise Unsupported(reason)
    return evidence.rivals.exhibits()


def early_exits(evidence: ModelMeasurements) -> Attachments:
    """Every early-exit rule, minimum layer and task: exit, score, FLOPs apart and together."""
    if absence := evidence.exits.absence:
        raise Unsupported(absence[1])
    return rule_table(evidence.exits)


def margins_and_text(evidence: ModelMeasurements) -> Attachments:
    """Every margin of the sweep, and one short text at each of them: what the page's explorer moves through."""
    if reason := evidence.subject.without_quality:
        raise Unsupported(reason)
    return explorer_tables(evidence.points)


TABLES: dict[str, TableFunction] = {"Pareto table": pareto, "explorer": margins_and_text, "early exits": early_exits}


def table_names() -> list[str]:
    """Names of all tables."""
    return [*TABLES, *list_added_parts("tables")]


def table_of(name: str) -> TableFunction:
    """The function that makes a table of evidence.

    Raises:
        KeyError: no table of this name.
        BadArgument: an extension names one that is not there.
    """
    return TABLES[name] if name in TABLES else load_added_part("tables", name)
