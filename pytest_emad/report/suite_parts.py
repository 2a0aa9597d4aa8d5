"""Merge reports of parts of the suites into the report of one run, and judge models part by part.

    whole = merge_reports({"claims": report, "cost": report, …}, plan, command, shipped)

Parts must be about one model, judged by one version under the same options. No test and no claim may be in two parts.
Machines may differ, and the report names all of them. Facts about the whole run are computed again from the merged
report: claims that no part judged, gaps, and so the exit status.

A unit is one model with one part of the suites. A unit that was judged before is not judged again.

    DIR/<model>/<part>/       done.json, report, pages and log.txt of a unit
    DIR/<model>/parts.json    the plan: units of one run, and the tests that it deselects
    DIR/<model>/report.json   the merged report of that run, with its pages
    DIR/summary.json, .txt    all models' claims, statuses         DIR/index.html, …    one page over all models

Each unit is a run in its own process, so a crash stops no other unit. The caller chooses the units and their commands.
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
from emad_ref.workers import child_process
from emad_ref.workers.dispatch import WorkerPool, dispatch_timed_units_after_others
from pytest_emad.report import schema
from pytest_emad.report.deselection import describe_deselections, list_shipped_tests
from pytest_emad.report.gaps import is_waived, undecided_failure_reasons_and_gaps, unmet_requirements
from pytest_emad.report.provenance import format_judged_decoder_names, merge_provider_counts
from pytest_emad.report.schema import REPORT_FILE, BadReport, Report, read_report
from pytest_emad.statistics.verdicts import load_register

MACHINE_KEYS = ("platform", "machine", "torch_threads")  # keys of provenance that each part has for itself
PART_KEYS = ("started", "duration_s", "exit_status")  # keys of run that each part has for itself
RAN_KEY = "ran"  # key of a model: the implementation of its steps, if that is more than the backend's name
LIST_PARTS = ("claims", "tables", "goldens", "known")  # facts that several tests may record equally


class PartsDisagreeError(EmadError):
    """Raised if reports are not parts of one run."""


def merge_reports(
    parts: Mapping[str, Report], plan: Mapping[str, Any], command: Sequence[str], shipped: Sequence[str]
) -> dict[str, Any]:
    """Merge ``parts`` (name → report of schema 2, in order) into one report.

    Args:
        plan, command: of the run that the parts stand for: its ``tests`` (``suites/…``) and ``deselected`` ones.
        shipped: names of the tests that this version ships.

    Raises:
        PartsDisagreeError: parts differ in what they must share, or one test or claim is in two.
    """
    _require_one_run(parts)
    reports = list(parts.values())
    first, providers = reports[0], merge_provider_counts(report["decoder"]["providers"] for report in reports)
    whole = dict(first) | {
        name: deduplicate([each for report in reports for each in report[name]]) for name in LIST_PARTS
    }
    overlooked = deduplicate(name for report in reports for name in report["decoder"]["overlooked"])
    foreign = any(report["decoder"]["foreign"] for report in reports)
    whole |= {
        "state": next((report["state"] for report in reports if report["state"] != "complete"), "complete"),
        "settings": first["settings"] | {"report": None},
        "models": _merge_models(reports),
        "points": [],
        "notes": deduplicate(note for report in reports for note in _part_notes(report))
        + list(describe_deselections(plan["deselected"], first["settings"])),
        "tests": [test for report in reports for test in report["tests"]],
        "audits": [audit for report in reports for audit in report["audits"]],
        "repeats": [repeat for report in reports for repeat in report.get("repeats", ())],
        "deselected": list(plan["deselected"]),
        "decoder": {
            "name": format_judged_decoder_names(providers),
            "foreign": foreign,
            "providers": providers,
            "overlooked": overlooked,
        },
        "provenance": first["provenance"] | {name: _joined_facts(reports, name) for name in MACHINE_KEYS},
    }
    for point in (point for report in reports for point in report["points"]):
        upsert_point_row(whole["points"], point)
    whole["run"] = first["run"] | _merge_runs(parts, plan["tests"], command)
    return _with_failures(whole, reports, shipped)


def deduplicate(listed: Iterable[Any]) -> list[Any]:
    """The values without repetitions, in order."""
    unique: list[Any] = []
    for each in listed:
        if each not in unique:
            unique.append(each)
    return unique


def upsert_point_row(points: list[dict[str, Any]], values: Mapping[str, Any]) -> None:
    """Add a row of a point, or complete the row of the same model and name, since several tests measure one point."""
    present = {key: value for key, value in values.items() if value is not None}
    for row in points:
        if (row["model"], row["name"]) == (values["model"], values["name"]):
            row |= present
            return
    points.append(dict(values))


def upsert_model_row(models: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Add or update a row of a model, since the implementation of its steps is known only after a test ran it."""
    for row in models:
        if _lasting_facts(row) == _lasting_facts(facts):
            row |= facts
            return
    models.append(dict(facts))


def _lasting_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != RAN_KEY}


# ---------------------------------------------------------------- facts common to parts


def _shared_facts(report: Report) -> dict[str, Any]:
    """Facts that parts of one report must share, by name."""
    settings = {f"option {name}": value for name, value in report["settings"].items() if name != "report"}
    origin = {"exit": None, "extensions": None} | report["provenance"]
    shared_origin = {name: value for name, value in origin.items() if name not in MACHINE_KEYS}
    run = {name: report["run"][name] for name in ("addopts", "claims_file", "project")}
    weights = {f"model {facts['name']}": _lasting_facts(facts) for facts in report["models"] if len(facts) > 1}
    decoders = [(provider["plugin"], provider["foreign"]) for provider in report["decoder"]["providers"]]
    return {"schema": report["schema"], **settings, **shared_origin, **run, **weights, "decoders": decoders}


def _require_one_run(parts: Mapping[str, Report]) -> None:
    first_value: dict[str, tuple[str, Any]] = {}
    for part, report in parts.items():
        for name, value in _shared_facts(report).items():
            other, before = first_value.setdefault(name, (part, value))
            if value != before:
                raise PartsDisagreeError(
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
                raise PartsDisagreeError(
                    f"{name} is in {whose_it_is[name]} and in {part}, but expected in one of them alone"
                )


# ---------------------------------------------------------------- merged facts


def _merge_models(reports: Sequence[Report]) -> list[Any]:
    """Rows of models; a part's bare name is dropped if another part describes that model."""
    listed: list[dict[str, Any]] = []
    for model in (model for report in reports for model in report["models"]):
        upsert_model_row(listed, model)
    described = {model["name"] for model in listed if len(model) > 1}
    return [model for model in listed if len(model) > 1 or model["name"] not in described]


def _part_notes(report: Report) -> Iterator[str]:
    """Notes of a part, without those about claims that it did not judge."""
    of_a_part = set(describe_deselections(report["deselected"], report["settings"]))
    yield from (note for note in report["notes"] if note not in of_a_part)


def _joined_facts(reports: Sequence[Report], name: str) -> Any:
    """The common value, or a text with the value of each part."""
    values = deduplicate(report["provenance"][name] for report in reports)
    return values[0] if len(values) == 1 else " and ".join(map(str, values))


def _merge_runs(parts: Mapping[str, Report], tests: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """The merged ``run``; its duration is the sum over the parts."""
    runs = [report["run"] for report in parts.values()]
    return {
        "started": min(run["started"] for run in runs),
        "duration_s": round(sum(run["duration_s"] or 0.0 for run in runs), 3),
        "command": list(command),
        "replay": None,  # the report of each part has its own
        "asked": list(tests),
        "parts": {name: {key: report["run"][key] for key in PART_KEYS} for name, report in parts.items()},
    }


def _with_failures(whole: dict[str, Any], reports: Sequence[Report], shipped: Sequence[str]) -> dict[str, Any]:
    """``whole`` with the reasons for which it fails, without gaps of one part that another part decides."""
    register = load_register(whole["settings"]["claims"])

    def reasons(report: Report) -> tuple[list[str], Sequence[Any]]:
        undecided, gaps = (
            undecided_failure_reasons_and_gaps(report, shipped, register) if report["state"] == "complete" else ([], [])
        )
        return [*unmet_requirements(report, register), *undecided], gaps

    own = [failure for report in reports for failure in report["run"]["failures"] if failure not in reasons(report)[0]]
    whole["run"]["failures"] = []
    failures, gaps = reasons(whole)
    whole["run"]["failures"] = deduplicate([*own, *failures])
    whole["waivers"] = [
        waiver | {"needed": any(is_waived(gap, [waiver["of"]]) for gap in gaps)} for waiver in whole["waivers"]
    ]
    failed = any(test["outcome"] in ("failed", "error") for test in whole["tests"])
    whole["run"]["exit_status"] = int(failed or bool(whole["run"]["failures"]))
    return whole


DONE_FILE, PARTS_FILE, LOG_FILE, SUMMARY_FILE = "done.json", "parts.json", "log.txt", "summary.json"
DECIDED_STATUSES = (0, 1)  # statuses of a run that reached its verdicts


@dataclass(frozen=True)
class SuitePart:
    """One part of the suites for one model: ``words`` of a pytest started in ``start`` that reports into ``folder``.

    ``measures``: whether the part takes times. ``identity``: the request that a finished unit must match to be reused.
    """

    model: str
    part: str
    measures: bool
    words: tuple[str, ...]
    folder: Path
    start: Path
    identity: Mapping[str, str]

    def run_or_reuse(self) -> int:
        """Run the part, or reuse its finished run; returns the exit status."""
        if (before := self.earlier_exit_status()) is not None:
            return before
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / DONE_FILE).exists():  # pytest would refuse to replace a damaged report
            remove_file(self.folder / REPORT_FILE, REPORT_FILE)
        remove_file(self.folder / DONE_FILE, DONE_FILE)  # a restarted unit is not done, and may be killed half way
        status = child_process.run_module_for_status("pytest", self.words, self.folder / LOG_FILE, folder=self.start)
        if status in DECIDED_STATUSES:
            mark = {"identity": self.identity, "status": status}
            write_atomically(self.folder / DONE_FILE, json.dumps(mark) + "\n")
        return status

    def earlier_exit_status(self) -> int | None:
        """The earlier exit status if the report is still there, else None."""
        status = read_reusable_exit_status(self.folder / DONE_FILE, self.identity)
        try:
            return status if status is None or read_report(self.folder) else None
        except BadReport:
            return None


def read_reusable_exit_status(mark: Path, identity: Mapping[str, str]) -> int | None:
    """The status of a finished unit with the same request; None without one."""
    if not mark.exists():
        return None
    try:
        done = read_json(mark, DONE_FILE, dict, remedy="it is judged again")
    except BadFile as error:
        print(error, flush=True)
        return None
    return done["status"] if done.get("identity") == identity and done.get("status") in DECIDED_STATUSES else None


def run_and_yield_part_statuses(crew: WorkerPool | None, units: Sequence[SuitePart]) -> Iterator[tuple[SuitePart, int]]:
    """Yield each unit with its status; judged here, or by ``crew``. A unit that measures runs alone.

    Raises:
        WorkersLost: the units judged so far are kept.
    """
    if crew is None:
        yield from ((unit, unit.run_or_reuse()) for unit in units)
    else:
        yield from dispatch_timed_units_after_others(crew, SuitePart.run_or_reuse, units, lambda unit: unit.measures)


def read_part_plan_json(folder: Path) -> dict[str, Any]:
    """``parts`` of one run of all suites, the ``tests`` it would run and the ``deselected`` ones. Raises BadFile."""
    plan: dict[str, Any] = read_json(folder / PARTS_FILE, PARTS_FILE, dict)
    return plan


def write_merged_report(units: Sequence[SuitePart], folder: Path, command: Sequence[str]) -> Report:
    """Merge all ``units`` of a model into one report, and write it with its pages.

    Raises:
        PartsDisagreeError: the units are not parts of one run.
        BadReport, BadFile: a report cannot be read.
    """
    from pytest_emad.report.page import write_pages  # imports tabulate

    parts = {unit.part: read_report(unit.folder) for unit in units}
    merged = merge_reports(parts, read_part_plan_json(folder), command, list_shipped_tests())
    write_atomically(folder / REPORT_FILE, json.dumps(merged, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    write_pages([merged], folder)
    schema.remove_run_start_mark(folder)
    return merged


def write_models_summary(statuses: Mapping[str, int], reports: Sequence[Report], out: Path) -> str:
    """Write ``summary.json``, its text and the pages over all models; returns the text.

    The text has a table of claims and names the models that could not be judged. ``statuses``: of each model;
    ``reports``: of the models that have one.
    """
    from pytest_emad.report.page import write_pages  # imports tabulate and Jinja2
    from pytest_emad.report.tables import format_claims_table

    claims = [claim for report in reports for claim in report["claims"]]
    summary = {"schema": 1, "version": __version__, "status": dict(statuses), "claims": claims}
    write_atomically(out / SUMMARY_FILE, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    failed = [
        f"{model}: status {status}, see {LOG_FILE}"
        for model, status in statuses.items()
        if status not in DECIDED_STATUSES
    ]
    text = "\n".join([format_claims_table(claims), *failed])
    write_atomically(out / "summary.txt", text + "\n")
    return f"{text}\n{out}: {write_pages(reports, out)}" if reports else text


def model_folder_name(model: str) -> str:
    """A model's name as the name of one folder."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-.") or "model"
