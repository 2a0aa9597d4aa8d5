"""Reports of parts of the suites put together: the report of one run that asked all of them.

    whole = put_together({"claims": report, "cost": report, …}, Asked(…), shipped)

Parts tell of one model, judged by one version under the same options, and no test and no claim is in two of them;
machines may differ, and are all named. What only the whole can say is asked of it again: which claims nobody was asked,
whether what had to be decided was, and so the exit status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emad_ref.errors import EmadError
from emad_ref.report.failing import decided, demanded
from emad_ref.report.missing import waived
from emad_ref.report.providers import together, whose
from emad_ref.report.reading import Report
from emad_ref.report.unasked import told
from emad_ref.verdict.claims import load_register

OF_MACHINES = ("platform", "machine", "torch_threads")  # of provenance: each part has its own
OF_PARTS = ("started", "duration_s", "exit_status")  # of run
RAN = "ran"  # of a model: by what its steps ran, where that is more than the backend asked for
LISTS = ("claims", "tables", "goldens", "known")  # of facts, which several tests may record alike


class PartsDisagree(EmadError):
    """Reports that are no parts of one."""


@dataclass(frozen=True)
class Asked:
    """What one run would have been asked: ``tests``, ``suites/…``; the ``deselected``; the ``command`` in its place."""

    tests: Sequence[str]
    deselected: Sequence[Mapping[str, Any]]
    command: Sequence[str]


def put_together(parts: Mapping[str, Report], asked: Asked, shipped: Sequence[str]) -> dict[str, Any]:
    """The report of all ``parts``, by name and in order; each of schema 2, as read back.

    Args:
        shipped: names of the tests that this version ships.

    Raises:
        PartsDisagree: on what they share, or one test or claim in two of them. The message names both.
    """
    _require_one(parts)
    reports = list(parts.values())
    first, providers = reports[0], together(report["decoder"]["providers"] for report in reports)
    whole = dict(first) | {name: facts([each for report in reports for each in report[name]]) for name in LISTS}
    overlooked = facts(name for report in reports for name in report["decoder"]["overlooked"])
    foreign = any(report["decoder"]["foreign"] for report in reports)
    whole |= {
        "state": next((report["state"] for report in reports if report["state"] != "complete"), "complete"),
        "settings": first["settings"] | {"report": None},
        "models": _models(reports),
        "points": [],
        "notes": facts(note for report in reports for note in _notes(report)) + list(told(asked.deselected)),
        "tests": [test for report in reports for test in report["tests"]],
        "audits": [audit for report in reports for audit in report["audits"]],
        "repeats": [repeat for report in reports for repeat in report.get("repeats", ())],
        "replaced": facts(part for report in reports for part in report.get("replaced", ())),
        "deselected": list(asked.deselected),
        "decoder": {"name": whose(providers), "foreign": foreign, "providers": providers, "overlooked": overlooked},
        "provenance": first["provenance"] | {name: _each(reports, name) for name in OF_MACHINES},
    }
    for point in (point for report in reports for point in report["points"]):
        add_point(whole["points"], point)
    whole["run"] = first["run"] | _run(parts, asked)
    return _judged(whole, reports, shipped)


def facts(listed: Iterable[Any]) -> list[Any]:
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
        if _lasting(row) == _lasting(facts):
            row |= facts
            return
    models.append(dict(facts))


def _lasting(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != RAN}


# ---------------------------------------------------------------- what parts share


def _shared(report: Report) -> dict[str, Any]:
    """What parts of one report have in common, by what it is called."""
    settings = {f"option {name}": value for name, value in report["settings"].items() if name != "report"}
    given = {"exit": None, "extensions": None} | report["provenance"]
    made = {name: value for name, value in given.items() if name not in OF_MACHINES}
    run = {name: report["run"][name] for name in ("addopts", "claims_file", "project")}
    weights = {f"model {facts['name']}": _lasting(facts) for facts in report["models"] if len(facts) > 1}
    decoders = [(provider["plugin"], provider["foreign"]) for provider in report["decoder"]["providers"]]
    return {"schema": report["schema"], **settings, **made, **run, **weights, "decoders": decoders}


def _require_one(parts: Mapping[str, Report]) -> None:
    said: dict[str, tuple[str, Any]] = {}
    for part, report in parts.items():
        for name, value in _shared(report).items():
            other, before = said.setdefault(name, (part, value))
            if value != before:
                raise PartsDisagree(
                    f"{other} and {part} are parts of one report, but {name} is {before!r} in the first and {value!r} "
                    "in the second; remove the folder of the one that is wrong, and judge it again"
                )
    _require_apart(parts, "tests", lambda test: str(test["nodeid"]))
    _require_apart(parts, "claims", lambda claim: f"{claim['id']} of {claim['model']}")


def _require_apart(parts: Mapping[str, Report], what: str, named: Callable[[Mapping[str, Any]], str]) -> None:
    whose_it_is: dict[str, str] = {}
    for part, report in parts.items():
        for name in map(named, report[what]):
            if whose_it_is.setdefault(name, part) != part:
                raise PartsDisagree(
                    f"{name} is in {whose_it_is[name]} and in {part}, but expected in one of them alone"
                )


# ---------------------------------------------------------------- what is put together


def _models(reports: Sequence[Report]) -> list[Any]:
    """Of a model that some part describes, no bare name of another part."""
    listed: list[dict[str, Any]] = []
    for model in (model for report in reports for model in report["models"]):
        add_model(listed, model)
    described = {model["name"] for model in listed if len(model) > 1}
    return [model for model in listed if len(model) > 1 or model["name"] not in described]


def _notes(report: Report) -> Iterator[str]:
    """Without those on what was not asked: a part is not asked what the others are."""
    of_a_part = set(told(report["deselected"]))
    yield from (note for note in report["notes"] if note not in of_a_part)


def _each(reports: Sequence[Report], name: str) -> Any:
    """What all have, or what each has, in words."""
    found = facts(report["provenance"][name] for report in reports)
    return found[0] if len(found) == 1 else " and ".join(map(str, found))


def _run(parts: Mapping[str, Report], asked: Asked) -> dict[str, Any]:
    """Of the whole; seconds are those of all parts, one after the other."""
    runs = [report["run"] for report in parts.values()]
    return {
        "started": min(run["started"] for run in runs),
        "duration_s": round(sum(run["duration_s"] or 0.0 for run in runs), 3),
        "command": list(asked.command),
        "asked": list(asked.tests),
        "parts": {name: {key: report["run"][key] for key in OF_PARTS} for name, report in parts.items()},
    }


def _judged(whole: dict[str, Any], reports: Sequence[Report], shipped: Sequence[str]) -> dict[str, Any]:
    """``whole`` with why it fails: not for what a part alone leaves open, and another part decides."""
    register = load_register(whole["settings"]["claims"])

    def reasons(report: Report) -> tuple[list[str], Sequence[Any]]:
        undecided, gaps = decided(report, shipped) if report["state"] == "complete" else ([], [])
        return [*demanded(report, register), *undecided], gaps

    own = [failure for report in reports for failure in report["run"]["failures"] if failure not in reasons(report)[0]]
    whole["run"]["failures"] = []
    failures, gaps = reasons(whole)
    whole["run"]["failures"] = facts([*own, *failures])
    whole["waivers"] = [
        waiver | {"needed": any(waived(gap, [waiver["of"]]) for gap in gaps)} for waiver in whole["waivers"]
    ]
    failed = any(test["outcome"] in ("failed", "error") for test in whole["tests"])
    whole["run"]["exit_status"] = int(failed or bool(whole["run"]["failures"]))
    return whole
