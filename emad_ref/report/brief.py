"""What a run says in forty lines: gates, the points put forward, the rest counted and named, and what follows from it.

Read from ``report.json`` alone, so that the run that wrote it, ``emad report --text`` and a job summary say the same.
Nothing is sorted by merit: gates and ids stand in the register's order. Whatever else is left out for want of room, the
ids of what was falsified are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emad_ref.report.missing import not_applicable
from emad_ref.report.providers import not_offered
from emad_ref.report.reading import Report
from emad_ref.report.unasked import told
from emad_ref.verdict import known, numbers
from emad_ref.verdict.claims import Claim, Outcome, load_register
from emad_ref.verdict.gating import UNDECIDED
from emad_ref.verdict.sentence import measurement, title_of


@dataclass(frozen=True)
class Gate:
    """One row that gates. ``of``: its model where it is not the run's only one; ``why``: what would decide it."""

    id: str
    of: str
    verdict: Outcome
    title: str
    measured: str
    why: str

    @property
    def told(self) -> tuple[str, str]:
        """What was found and needed, and what would decide it."""
        return self.measured, self.why


@dataclass(frozen=True)
class Point:
    """An operating point put forward, ``said`` its cost and quality."""

    name: str
    said: str


@dataclass(frozen=True)
class Group:
    """Rows of one outcome that share a reason, ``why``; "" where none is told."""

    ids: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Brief:
    """``rest``: outcome → its groups, rows beside the gates. ``more``: what would decide some of them, in a sentence.

    ``record``, ``about``: lines on known verdicts and on the run. ``failures``: why the run fails though no test may.
    """

    models: str
    gates: tuple[Gate, ...]
    points: tuple[Point, ...]
    rest: Mapping[Outcome, tuple[Group, ...]]
    more: str
    record: tuple[str, ...]
    about: tuple[str, ...]
    failures: tuple[str, ...]

    def without_gates(self) -> Brief:
        """All else, for a page that shows the gates by itself."""
        return replace(self, gates=())


def brief(report: Report) -> Brief:
    """Everything the summary has to say; how much of it fits is decided where it is set.

    Args:
        report: of either schema; parts that schema 1 lacks are left out.
    """
    register = load_register()
    order = {name: place for place, name in enumerate(register)}
    claims = sorted(report["claims"], key=lambda claim: order.get(claim["id"], len(order)))
    gating = [claim for claim in claims if _gates(claim, report, register)]
    rest = [claim for claim in claims if claim not in gating]
    models = [str(name) for name in report["settings"].get("models", ())]
    run = report.get("run") or {}
    return Brief(
        models=", ".join(models),
        gates=tuple(_gate(claim, models, register) for claim in gating),
        points=tuple(_points(report["points"])),
        rest=_rest(rest),
        more=_more(rest, report),
        record=tuple(_record(report)),
        about=tuple(_about(report)),
        failures=tuple(run.get("failures", ())),
    )


def _gates(claim: Mapping[str, Any], report: Report, register: Mapping[str, Claim]) -> bool:
    """Held against the record every row gates: shown are then those that gate otherwise."""
    if report["settings"].get("gate") != "known":
        return bool(claim["gate"])
    row, named = register.get(claim["id"]), report["settings"].get("gate_claims", ())
    return claim["id"] in named if row is None else row.gates(named)


def _gate(claim: Mapping[str, Any], models: Sequence[str], register: Mapping[str, Claim]) -> Gate:
    return Gate(
        id=claim["id"],
        of="" if [claim["model"]] == list(models) else claim["model"],
        verdict=claim["verdict"],
        title=title_of(claim, register),
        measured=measurement(claim),
        why=_why(claim) if claim["verdict"] == "inconclusive" else "",
    )


def _why(claim: Mapping[str, Any]) -> str:
    """Of a row that was left open; reports of earlier versions have no more than its whole reason."""
    return str(claim.get("why", claim["reason"]))


# ---------------------------------------------------------------- operating points


def _points(points: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    """Those with a role; where none has one, none was put forward."""
    forward = [point for point in points if point.get("roles")]
    several = len({point.get("model") for point in points}) > 1
    for point in forward:
        parts = [f"{point['model']}:" if several else "", point["name"]]
        yield Point(" ".join(filter(None, parts)), "; ".join([", ".join(point["roles"]), *_said(point)]))


def _said(point: Mapping[str, Any]) -> Iterator[str]:
    if point.get("net_reduction") is not None:
        yield f"{numbers.saved(point['net_reduction'])} FLOPs net"
    if point.get("time_ratio"):
        yield ", ".join(
            f"{numbers.ratio(times)} as fast at batch {rows}" for rows, times in point["time_ratio"].items()
        )
    if point.get("perplexity") is not None:
        rise, bounds = point.get("perplexity_rise"), point.get("interval")
        parts = [numbers.percent(rise)] + ([numbers.interval(bounds, "relative rise")] if bounds else [])
        yield f"perplexity {numbers.change(point.get('perplexity_reference'), point['perplexity'])}, {' '.join(parts)}"
    yield from _worst(point.get("accuracy") or {}, point.get("not_counted") or {})


def _worst(accuracy: Mapping[str, Sequence[float | None]], left_out: Mapping[str, str]) -> Iterator[str]:
    lost = {
        task: before - after
        for task, (before, after) in accuracy.items()
        if task not in left_out and before is not None and after is not None
    }
    if lost:
        task = max(lost, key=lambda name: lost[name])
        before, after = accuracy[task]
        yield f"worst of {len(lost)} task{'s' * (len(lost) > 1)} {task} {numbers.change(before, after, '.3f')}"
    elif accuracy:
        yield f"no task of {len(accuracy)} counts"


# ---------------------------------------------------------------- the rest


def _rest(claims: Sequence[Mapping[str, Any]]) -> dict[Outcome, tuple[Group, ...]]:
    """Rows by outcome, and of those left open by what would decide them; asked of several models, with its own."""
    ids = [claim["id"] for claim in claims]
    outcomes: dict[Outcome, dict[str, list[str]]] = {}
    for claim in claims:
        verdict: Outcome = claim["verdict"]
        why = _why(claim) if verdict in ("inconclusive", *UNDECIDED) else ""
        name = f"{claim['id']} of {claim['model']}" if ids.count(claim["id"]) > 1 else str(claim["id"])
        outcomes.setdefault(verdict, {}).setdefault(why, []).append(name)
    return {
        verdict: tuple(Group(tuple(ids), why) for why, ids in groups.items()) for verdict, groups in outcomes.items()
    }


def _more(claims: Iterable[Mapping[str, Any]], report: Report) -> str:
    """How more text is asked for, where that would decide something."""
    wanting = any(
        claim["verdict"] == "inconclusive" and claim.get("enough") is not None
        for claim in (*claims, *(claim for claim in report["claims"] if claim["gate"]))
    )
    larger = {"smoke": "standard", "standard": "full"}.get(report["settings"].get("budget", ""))
    return f"--emad-budget {larger} reads more" if wanting and larger else ""


# ---------------------------------------------------------------- the run


def _record(report: Report) -> Iterator[str]:
    updated = [entry for entry in report["goldens"] if entry["outcome"] in ("added", "changed")]
    if updated:
        kinds = [entry["outcome"] for entry in updated]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        yield f"goldens updated: {counts}"
    compared = report.get("known")
    if report["settings"].get("gate") == "known" and not report["settings"].get("update_golden") and compared:
        yield from known.summary(compared).split("\n")


def _about(report: Report) -> Iterator[str]:
    decoder = report.get("decoder") or {"providers": ()}
    if any(provider["answered"] or provider["declined"] for provider in decoder["providers"]):
        yield f"decoder judged: {decoder['name']}"
    if "tests" in report and (declined := not_applicable(report)):
        features = ", ".join(sorted(not_offered(decoder["providers"])))
        yield f"the decoder does not offer {features}: {len(declined)} tests do not apply"
    for model in report["models"]:
        remarks = model.get("remarks")
        yield from (f"{model['name']}: {remark}" for remark in (remarks if isinstance(remarks, list) else ()))
    undecided = [audit for audit in report.get("audits", ()) if audit["passed"] is None]
    for check in dict.fromkeys(audit["check"] for audit in undecided):
        details = [audit["detail"] for audit in undecided if audit["check"] == check]
        why = details[0].partition(" (")[0].partition(": ")[0]
        yield f"audit {check} inconclusive in {len(details)} test{'s' * (len(details) > 1)}: {why}"
    yield from told(report.get("deselected", ()))
    for waiver in report.get("waivers", ()):
        yield f"waive{'d' if waiver['needed'] else 'r not needed:'} {waiver['of']}: {waiver['reason']}"


def together(ids: Sequence[str]) -> str:
    """Ids in a row, three or more that follow one another as a range.

    >>> together(["EE-1", "EE-2", "EE-3", "EE-5", "EMAD-E1"])
    'EE-1 to EE-3, EE-5, EMAD-E1'
    """
    runs: list[list[str]] = []
    for name in ids:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _follows(before: str, name: str) -> bool:
    ends = [re.fullmatch(r"(.*?)(\d+)", each) for each in (before, name)]
    if not (ends[0] and ends[1]):
        return False
    return ends[0][1] == ends[1][1] and int(ends[0][2]) + 1 == int(ends[1][2])
