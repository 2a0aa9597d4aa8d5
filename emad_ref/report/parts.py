"""Reports of parts of the suites put together: the report of one run that asked all of them.

    whole = put_together({"claims": report, "cost": report, …}, Asked(…), shipped)

Parts tell of one model, judged by one version under the same options, and no test and no claim is in two of them;
machines may differ, and are all named. What only the whole can say is asked of it again: which claims nobody was asked,
whether what had to be decided was, and so the exit status.

Models judged part by part: a unit is one of them and one part of the suites, kept where it was judged before.

    DIR/<model>/<part>/       done.json, report, pages and log.txt of a unit
    DIR/<model>/parts.json    what was cut: the units of one run, what it would leave out
    DIR/<model>/report.json   the report of that one run, put together, with its pages
    DIR/summary.json, .txt    all models' claims, statuses         DIR/index.html, …    one page over all models

A unit is a run of its own in a process of its own, so that one that cannot be made takes no other down. Which units
there are, and how each is asked for, is for others to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref import __version__
from emad_ref.errors import EmadError
from emad_ref.files import BadFile, read_json, remove_file, write_atomically
from emad_ref.report import schema
from emad_ref.report.deselection import deselection_lines, shipped_tests
from emad_ref.report.gaps import is_waived, undecided_reasons, unmet_requirements
from emad_ref.report.provenance import decoder_names, merge_providers
from emad_ref.report.schema import REPORT_FILE, BadReport, Report, read_report
from emad_ref.statistics.verdicts import load_register
from emad_ref.workers import child_process
from emad_ref.workers.dispatch import WorkerPool, dispatch_exclusively

MACHINE_KEYS = ("platform", "machine", "torch_threads")  # of provenance: each part has its own
PART_KEYS = ("started", "duration_s", "exit_status")  # of run
RAN_KEY = "ran"  # of a model: by what its steps ran, where that is more than the backend asked for
LIST_PARTS = ("claims", "tables", "goldens", "known")  # of facts, which several tests may record alike


class PartsDisagree(EmadError):
    """Reports that are no parts of one."""


@dataclass(frozen=True)
class RunRequest:
    """What one run would have been asked: ``tests``, ``suites/…``; the ``deselected``; the ``command`` in its place."""

    tests: Sequence[str]
    deselected: Sequence[Mapping[str, Any]]
    command: Sequence[str]


def merge_reports(parts: Mapping[str, Report], asked: RunRequest, shipped: Sequence[str]) -> dict[str, Any]:
    """The report of all ``parts``, by name and in order; each of schema 2, as read back.

    Args:
        shipped: names of the tests that this version ships.

    Raises:
        PartsDisagree: on what they share, or one test or claim in two of them. The message names both.
    """
    _require_one_run(parts)
    reports = list(parts.values())
    first, providers = reports[0], merge_providers(report["decoder"]["providers"] for report in reports)
    whole = dict(first) | {name: distinct([each for report in reports for each in report[name]]) for name in LIST_PARTS}
    overlooked = distinct(name for report in reports for name in report["decoder"]["overlooked"])
    foreign = any(report["decoder"]["foreign"] for report in reports)
    whole |= {
        "state": next((report["state"] for report in reports if report["state"] != "complete"), "complete"),
        "settings": first["settings"] | {"report": None},
        "models": _merge_models(reports),
        "points": [],
        "notes": distinct(note for report in reports for note in _part_notes(report))
        + list(deselection_lines(asked.deselected)),
        "tests": [test for report in reports for test in report["tests"]],
        "audits": [audit for report in reports for audit in report["audits"]],
        "repeats": [repeat for report in reports for repeat in report.get("repeats", ())],
        "replaced": distinct(part for report in reports for part in report.get("replaced", ())),
        "deselected": list(asked.deselected),
        "decoder": {
            "name": decoder_names(providers),
            "foreign": foreign,
            "providers": providers,
            "overlooked": overlooked,
        },
        "provenance": first["provenance"] | {name: _joined_facts(reports, name) for name in MACHINE_KEYS},
    }
    for point in (point for report in reports for point in report["points"]):
        add_point(whole["points"], point)
    whole["run"] = first["run"] | _merge_runs(parts, asked)
    return _with_failures(whole, reports, shipped)


def distinct(listed: Iterable[Any]) -> list[Any]:
    """Each once, in order."""
    found: list[Any] = []
    for each in listed:
        if each not in found:
            found.append(each)
    return found


def add_point(points: list[dict[str, Any]], values: Mapping[str, Any]) -> None:
    """One row per model and name: quality and time of a point are measured by different tests."""
    known = {key: value for key, value in values.items() if value is not None}
    for row in points:
        if (row["model"], row["name"]) == (values["model"], values["name"]):
            row |= known
            return
    points.append(dict(values))


def add_model(models: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """One row per model: by what it was walked is known once a test has walked it, and may change."""
    for row in models:
        if _lasting_facts(row) == _lasting_facts(facts):
            row |= facts
            return
    models.append(dict(facts))


def _lasting_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != RAN_KEY}


# ---------------------------------------------------------------- what parts share


def _shared_facts(report: Report) -> dict[str, Any]:
    """What parts of one report have in common, by what it is called."""
    settings = {f"option {name}": value for name, value in report["settings"].items() if name != "report"}
    given = {"exit": None, "extensions": None} | report["provenance"]
    made = {name: value for name, value in given.items() if name not in MACHINE_KEYS}
    run = {name: report["run"][name] for name in ("addopts", "claims_file", "project")}
    weights = {f"model {facts['name']}": _lasting_facts(facts) for facts in report["models"] if len(facts) > 1}
    decoders = [(provider["plugin"], provider["foreign"]) for provider in report["decoder"]["providers"]]
    return {"schema": report["schema"], **settings, **made, **run, **weights, "decoders": decoders}


def _require_one_run(parts: Mapping[str, Report]) -> None:
    said: dict[str, tuple[str, Any]] = {}
    for part, report in parts.items():
        for name, value in _shared_facts(report).items():
            other, before = said.setdefault(name, (part, value))
            if value != before:
                raise PartsDisagree(
                    f"{other} and {part} are parts of one report, but {name} is {before!r} in the first and {value!r} "
                    "in the second; remove the folder of the one that is wrong, and judge it again"
                )
    _require_disjoint(parts, "tests", lambda test: str(test["nodeid"]))
    _require_disjoint(parts, "claims", lambda claim: f"{claim['id']} of {claim['model']}")


def _require_disjoint(parts: Mapping[str, Report], what: str, named: Callable[[Mapping[str, Any]], str]) -> None:
    whose_it_is: dict[str, str] = {}
    for part, report in parts.items():
        for name in map(named, report[what]):
            if whose_it_is.setdefault(name, part) != part:
                raise PartsDisagree(
                    f"{name} is in {whose_it_is[name]} and in {part}, but expected in one of them alone"
                )


# ---------------------------------------------------------------- what is put together


def _merge_models(reports: Sequence[Report]) -> list[Any]:
    """Of a model that some part describes, no bare name of another part."""
    listed: list[dict[str, Any]] = []
    for model in (model for report in reports for model in report["models"]):
        add_model(listed, model)
    described = {model["name"] for model in listed if len(model) > 1}
    return [model for model in listed if len(model) > 1 or model["name"] not in described]


def _part_notes(report: Report) -> Iterator[str]:
    """Without those on what was not asked: a part is not asked what the others are."""
    of_a_part = set(deselection_lines(report["deselected"]))
    yield from (note for note in report["notes"] if note not in of_a_part)


def _joined_facts(reports: Sequence[Report], name: str) -> Any:
    """What all have, or what each has, in words."""
    found = distinct(report["provenance"][name] for report in reports)
    return found[0] if len(found) == 1 else " and ".join(map(str, found))


def _merge_runs(parts: Mapping[str, Report], asked: RunRequest) -> dict[str, Any]:
    """Of the whole; seconds are those of all parts, one after the other."""
    runs = [report["run"] for report in parts.values()]
    return {
        "started": min(run["started"] for run in runs),
        "duration_s": round(sum(run["duration_s"] or 0.0 for run in runs), 3),
        "command": list(asked.command),
        "asked": list(asked.tests),
        "parts": {name: {key: report["run"][key] for key in PART_KEYS} for name, report in parts.items()},
    }


def _with_failures(whole: dict[str, Any], reports: Sequence[Report], shipped: Sequence[str]) -> dict[str, Any]:
    """``whole`` with why it fails: not for what a part alone leaves open, and another part decides."""
    register = load_register(whole["settings"]["claims"])

    def reasons(report: Report) -> tuple[list[str], Sequence[Any]]:
        undecided, gaps = undecided_reasons(report, shipped) if report["state"] == "complete" else ([], [])
        return [*unmet_requirements(report, register), *undecided], gaps

    own = [failure for report in reports for failure in report["run"]["failures"] if failure not in reasons(report)[0]]
    whole["run"]["failures"] = []
    failures, gaps = reasons(whole)
    whole["run"]["failures"] = distinct([*own, *failures])
    whole["waivers"] = [
        waiver | {"needed": any(is_waived(gap, [waiver["of"]]) for gap in gaps)} for waiver in whole["waivers"]
    ]
    failed = any(test["outcome"] in ("failed", "error") for test in whole["tests"])
    whole["run"]["exit_status"] = int(failed or bool(whole["run"]["failures"]))
    return whole


DONE_FILE, PARTS_FILE, LOG_FILE = "done.json", "parts.json", "log.txt"
DECIDED_STATUSES = (0, 1)  # statuses of a run that reached its verdicts


@dataclass(frozen=True)
class SuitePart:
    """``words`` of a pytest that is started in ``start`` and reports into ``folder``; whether it ``measures``.

    ``identity``: what a finished unit must have been asked for to stand for this one.
    """

    model: str
    part: str
    measures: bool
    words: tuple[str, ...]
    folder: Path
    start: Path
    identity: Mapping[str, str]

    def judged(self) -> int:
        """Run it, or find that it was run; its exit status."""
        if (before := self.before()) is not None:
            return before
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_file(self.folder / DONE_FILE, DONE_FILE)  # what is begun again is not done, and may be killed half way
        status = child_process.run_module("pytest", self.words, self.folder / LOG_FILE, folder=self.start)
        if status in DECIDED_STATUSES:
            mark = {"identity": self.identity, "status": status}
            write_atomically(self.folder / DONE_FILE, json.dumps(mark) + "\n")
        return status

    def before(self) -> int | None:
        """The status with which it was judged before, if its report is there: one that was lost says nothing."""
        status = finished_status(self.folder / DONE_FILE, self.identity)
        try:
            return status if status is None or read_report(self.folder) else None
        except BadReport:
            return None


def finished_status(mark: Path, wanted: Mapping[str, str]) -> int | None:
    """The status of a finished unit that was asked for the same; None where there is none."""
    if not mark.exists():
        return None
    try:
        done = read_json(mark, DONE_FILE, dict, remedy="it is judged again")
    except BadFile as error:
        print(error, flush=True)
        return None
    return done["status"] if done.get("identity") == wanted and done.get("status") in DECIDED_STATUSES else None


def run_parts(crew: WorkerPool | None, units: Sequence[SuitePart]) -> Iterator[tuple[SuitePart, int]]:
    """Each unit and its status: judged here, or by ``crew``. What measures has no other unit beside it.

    Raises:
        WorkersLost: what was judged is kept.
    """
    if crew is None:
        yield from ((unit, unit.judged()) for unit in units)
    else:
        yield from dispatch_exclusively(crew, SuitePart.judged, units, lambda unit: unit.measures)


def read_part_plan(folder: Path) -> dict[str, Any]:
    """``parts`` of one run of all suites, the ``tests`` it would be asked and the ``deselected``. Raises BadFile."""
    found: dict[str, Any] = read_json(folder / PARTS_FILE, PARTS_FILE, dict)
    return found


def merge_parts(units: Sequence[SuitePart], folder: Path, command: Sequence[str]) -> Report:
    """The report of a model, put together from all its ``units``, and written with its pages.

    Raises:
        PartsDisagree: they are no parts of one.
        BadReport, BadFile: what is there cannot be read.
    """
    from emad_ref.report.page import write_pages  # it brings tabulate

    was = read_part_plan(folder)
    parts = {unit.part: read_report(unit.folder) for unit in units}
    found = merge_reports(parts, RunRequest(was["tests"], was["deselected"], command), shipped_tests())
    write_atomically(folder / REPORT_FILE, json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    write_pages([found], folder)
    schema.mark_run_finished(folder)
    return found


def summarize_models(statuses: Mapping[str, int], reports: Sequence[Report], out: Path) -> str:
    """What all models came to, in words: their claims as a table, who could not be judged. Written, with the pages.

    ``statuses``: of each model; ``reports``: of those that have one.
    """
    from emad_ref.report.page import write_pages  # they bring tabulate
    from emad_ref.report.tables import claims_table

    claims = [claim for report in reports for claim in report["claims"]]
    found = {"schema": 1, "version": __version__, "status": dict(statuses), "claims": claims}
    write_atomically(out / "summary.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    failed = [
        f"{model}: status {status}, see {LOG_FILE}"
        for model, status in statuses.items()
        if status not in DECIDED_STATUSES
    ]
    text = "\n".join([claims_table(claims), *failed])
    write_atomically(out / "summary.txt", text + "\n")
    return f"{text}\n{out}: {write_pages(reports, out)}" if reports else text


def folder_name(model: str) -> str:
    """A model's name as one folder's."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.") or "model"
