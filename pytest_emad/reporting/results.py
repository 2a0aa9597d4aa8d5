"""All records of a run, gathered on the one process that reports: the controller under xdist.

``Results.take`` reads them from test reports, and how each test went; ``report`` lays them out as ``report.json``;
``write`` puts that into the report folder with everything that shows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emad_ref.files import write_atomically
from emad_ref.report.reading import REPORT, SCHEMA, TEST_OUTCOMES, Outcome
from pytest_emad.attendance import FEATURES, KIND, SHIPPED
from pytest_emad.options import Settings
from pytest_emad.recording import (
    ATTEMPT,
    AUDIT,
    CLAIM,
    GOLDEN,
    KNOWN,
    MODEL,
    NOTE,
    POINT,
    RAISED,
    REPLACED,
    TABLE,
    read_properties,
)

if TYPE_CHECKING:
    from emad_ref.report.folder import Written

NEVER: Outcome = "not reported"  # a test whose body did not run, or not to its end
SHOWN = (TABLE, POINT, NOTE)  # facts that a test may be there to show
LONGEST_REASON = 1000  # letters; the whole of it stands in the log


@dataclass
class Results:
    """Lists in the order in which the tests finished; ``pages``: what shows them, once written.

    A claim has one verdict a model and run: that of the first attempt of the first test that gives one. What else is
    said of it goes to ``repeats``, and so do all later attempts: they are counted, and decide nothing.

    ``tests``: node id → its entry of ``report.json``.
    """

    claims: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    goldens: list[dict[str, Any]] = field(default_factory=list)
    known: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)
    repeats: list[dict[str, Any]] = field(default_factory=list)
    replaced: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    torch_threads: int | None = None
    pages: Written | None = None
    _taken: dict[tuple[str, str], int] = field(default_factory=dict)  # by test and worker: how many of its records

    def __bool__(self) -> bool:
        return any(
            (self.claims, self.points, self.notes, self.models, self.goldens, self.known, self.tables, self.audits)
        )

    def take(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Add how a phase of a test went, and what the test has put on record since the phase before."""
        outcome, reason = _went(report)
        entry = self.tests.setdefault(
            report.nodeid,
            {"nodeid": report.nodeid, "shipped": None, "outcome": NEVER, "kind": "", "reason": "", "duration_s": 0.0},
        )
        entry["shipped"] = getattr(report, SHIPPED, entry["shipped"])
        entry["duration_s"] = round(entry["duration_s"] + getattr(report, "duration", 0.0), 6)
        if TEST_OUTCOMES.index(outcome) > TEST_OUTCOMES.index(entry["outcome"]):
            entry |= {"outcome": outcome, "kind": getattr(report, KIND, ""), "reason": reason[:LONGEST_REASON]}
            if (declined := getattr(report, FEATURES, None)) is not None:
                entry["features"] = declined
        if isinstance(report, pytest.TestReport):
            self._take_records(entry, report)

    def _take_records(self, entry: dict[str, Any], report: pytest.TestReport) -> None:
        """Every phase carries the records of those before it; facts that several tests record alike are kept once."""
        worker = report.nodeid, str(getattr(report, "worker_id", ""))
        found = list(read_properties(report.user_properties))
        known, self._taken[worker] = self._taken.get(worker, 0), max(len(found), self._taken.get(worker, 0))
        attempts, repeated = entry.get("attempts", []), False
        for kind, value in found[known:]:
            if kind == ATTEMPT:
                times = max(value, len(attempts) + 1) - len(attempts)  # more than one where others were kept from us
                attempts = [*attempts, *({"outcome": NEVER, "reason": ""} for _ in range(times))]
                entry["attempts"] = attempts
            elif kind == RAISED:
                _raise_to(attempts[-1], value)
            elif kind == REPLACED:
                if value not in self.replaced:
                    self.replaced.append(value)
            elif kind == AUDIT:
                later = {"attempt": len(attempts)} if len(attempts) > 1 else {}
                self.audits.append({"test": report.nodeid} | value | later)
            elif kind == CLAIM:
                repeated = self._take_claim(report.nodeid, len(attempts), value)
            elif len(attempts) < 2 and not (kind == KNOWN and repeated):
                self._take_fact(kind, value)
                if kind in SHOWN:
                    entry["shown"] = entry.get("shown", 0) + 1

    def _take_claim(self, nodeid: str, attempt: int, value: dict[str, Any]) -> bool:
        """Whether it is a further verdict of a claim that has one."""
        first = next((c for c in self.claims if (c["id"], c["model"]) == (value["id"], value["model"])), None)
        if first is None and attempt < 2:
            self.claims.append(value | {"test": nodeid})
            return False
        alike = first is not None and {name: each for name, each in first.items() if name != "test"} == value
        self.repeats.append(
            {name: value[name] for name in ("id", "model", "verdict", "gate", "fails")}
            | {"test": nodeid, "attempt": max(attempt, 1), "alike": alike}
        )
        return True

    def _take_fact(self, kind: str, value: Any) -> None:
        kinds: dict[str, list[Any]] = {
            NOTE: self.notes,
            GOLDEN: self.goldens,
            KNOWN: self.known,
            TABLE: self.tables,
        }
        if kind == POINT:
            from emad_ref.report.parts import add_point  # not at the start of every run

            add_point(self.points, value)
        elif kind == MODEL:
            from emad_ref.report.parts import add_model

            add_model(self.models, value)
        elif value not in kinds[kind]:
            kinds[kind].append(value)

    def report(self, settings: Settings, provenance: dict[str, Any], around: Mapping[str, Any]) -> dict[str, Any]:
        """``report.json`` as data (``report.reading``). Models nothing was recorded about are listed by name.

        ``around``: the parts that tell of the run and not of what its tests found.
        """
        described = {facts["name"] for facts in self.models}
        bare = [{"name": name} for name in settings.models if name not in described]
        threads = provenance["torch_threads"] if self.torch_threads is None else self.torch_threads
        return {
            "schema": SCHEMA,
            **around,
            "models": [*self.models, *bare],
            "settings": settings.to_json(),
            "points": self.points,
            "claims": self.claims,
            "tables": self.tables,
            "goldens": self.goldens,
            "notes": self.notes,
            "known": self.known,
            "tests": list(self.tests.values()),
            "audits": self.audits,
            "repeats": self.repeats,
            "replaced": self.replaced,
            "provenance": provenance | {"torch_threads": threads},
        }

    def write(self, folder: Path, report: Mapping[str, Any]) -> None:
        """Write ``report`` into ``folder``, then what shows it, each file whole or not at all. Raises OSError."""
        from emad_ref.report.folder import write_pages  # tabulate: not at the start of every run

        write_report(folder, report)
        self.pages = write_pages([report], folder)


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """``report.json`` alone. Raises OSError."""
    write_atomically(folder / REPORT, json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _raise_to(attempt: dict[str, Any], raised: Mapping[str, Any]) -> None:
    """The worst of what body, setup and teardown came to."""
    if TEST_OUTCOMES.index(raised["outcome"]) > TEST_OUTCOMES.index(attempt["outcome"]):
        attempt |= raised


def _went(report: pytest.TestReport | pytest.CollectReport) -> tuple[Outcome, str]:
    """The outcome of one phase, and why it did not simply pass."""
    expected = getattr(report, "wasxfail", None)
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        return "failed" if report.when == "call" else "error", str(report.longrepr if crash is None else crash.message)
    if report.skipped and expected is not None:
        return "xfailed", str(expected)
    if report.skipped:
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        return "skipped", said.removeprefix("Skipped: ")
    if report.when != "call" or not report.passed:  # of another plugin's outcome, say a rerun, another report follows
        return NEVER, ""
    return ("xpassed", str(expected)) if expected is not None else ("passed", "")
