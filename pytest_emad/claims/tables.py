"""Tables of one model's evidence without a claim, by name: built-in ones first, then those of extensions.

Each is a function of ``measurements.model_measurements.ModelMeasurements`` that returns ``Attachments``, or raises
``protocol.Unsupported`` with the reason for no table.
"""

from __future__ import annotations

from collections.abc import Callable

from emad_ref.protocol import Unsupported
from pytest_emad.extensions import JUDGE_EXTENSIONS
from pytest_emad.measurements.attachments import Attachments
from pytest_emad.measurements.early_exits import tabulate_rules_of_all_tasks
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.operating_points import make_explorer_tables

TableFunction = Callable[[ModelMeasurements], Attachments]


def make_pareto_tables(evidence: ModelMeasurements) -> Attachments:
    """Table of the best point of every family of rules at each net reduction."""
    if absent := evidence.subject.absent_quality:
        raise Unsupported(absent.reason)
    return evidence.baseline_comparison.make_pareto_tables()


def make_early_exit_table(evidence: ModelMeasurements) -> Attachments:
    """Table of every early-exit rule, minimum layer and task: exit, score, FLOPs by part and in total."""
    if absence := evidence.early_exits.absent_premise:
        raise Unsupported(absence.reason)
    return tabulate_rules_of_all_tasks(evidence.early_exits)


def make_margin_explorer_table(evidence: ModelMeasurements) -> Attachments:
    """Table of every margin of the sweep with one short text, for the page's explorer."""
    if absent := evidence.subject.absent_quality:
        raise Unsupported(absent.reason)
    return make_explorer_tables(evidence.points)


TABLES: dict[str, TableFunction] = {
    "Pareto table": make_pareto_tables,
    "explorer": make_margin_explorer_table,
    "early exits": make_early_exit_table,
}


def table_names() -> list[str]:
    """Names of all tables."""
    return [*TABLES, *JUDGE_EXTENSIONS.places("tables")]


def find_table_function(name: str) -> TableFunction:
    """The function that makes a table of evidence.

    Raises:
        KeyError: no table of this name.
        BadArgument: an extension names a missing one.
    """
    return TABLES[name] if name in TABLES else JUDGE_EXTENSIONS.load_part("tables", name)
