"""Tables that belong to no claim, by name: of one model's evidence, ours first, then those of extensions.

Each is a function of ``evidence.gathered.Evidence`` that returns ``Exhibits``, or raises ``protocol.Unsupported`` with
the reason for which there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable

from emad_ref.evidence.exhibits import Exhibits
from emad_ref.evidence.exits.tables import by_rule
from emad_ref.evidence.explorer import explorer
from emad_ref.evidence.gathered import Evidence
from emad_ref.extending import added, part_of
from emad_ref.protocol import Unsupported

Shown = Callable[[Evidence], Exhibits]


def pareto(evidence: Evidence) -> Exhibits:
    """Every family of rules: the best point at each net reduction."""
    if reason := evidence.subject.without_quality:
        raise Unsupported(reason)
    return evidence.rivals.exhibits()


def early_exits(evidence: Evidence) -> Exhibits:
    """Every early-exit rule, minimum layer and task: exit, score, FLOPs apart and together."""
    if absence := evidence.exits.absence:
        raise Unsupported(absence.reason)
    return by_rule(evidence.exits)


def margins_and_text(evidence: Evidence) -> Exhibits:
    """Every margin of the sweep, and one short text at each of them: what the page's explorer moves through."""
    if reason := evidence.subject.without_quality:
        raise Unsupported(reason)
    return explorer(evidence.points)


TABLES: dict[str, Shown] = {"Pareto table": pareto, "explorer": margins_and_text, "early exits": early_exits}


def table_names() -> list[str]:
    """Names of all tables."""
    return [*TABLES, *added("tables")]


def table_of(name: str) -> Shown:
    """The function that makes a table of evidence.

    Raises:
        KeyError: no table of this name.
        BadArgument: an extension names one that is not there.
    """
    return TABLES[name] if name in TABLES else part_of("tables", name)
