"""Does a report agree with itself: verdicts, audits, attempts, reported outcomes, exit status? One sentence where not.

An outcome is what pytest reports of a test, and a mark, a hook or a plugin can change it. Verdicts, audits and what a
body raised are recorded before that. A report holds both, and a gate passes only where each says so. No waiver excuses
a contradiction: waivers are for what was not decided.

- A gating verdict that fails, a failed audit, a first attempt that failed: the test must be reported as failed.
- A test that is reported as failed must have a failing verdict, a failing audit or a reason.
- A shipped test that passed must have an audit or a verdict on record, or what it is there to show.
- One verdict a claim, model and run, from the first attempt. A second try has another error rate.
- No part of the judge is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from emad_ref.report.reading import Report
from emad_ref.report.shipped import below
from emad_ref.verdict.claims import load_register

FAILED = ("failed", "error")
PASSED = ("passed", "xpassed")
SHOWING = ("suites/ablations", "suites/claims/test_tables.py")  # shipped tests that judge nothing, and show tables
CHANGED = "find the mark, hook or plugin that changed the outcome"
LISTED = 3  # tests that one sentence names


def contradictions(report: Report) -> list[str]:
    """One sentence for each contradiction in ``report`` (schema 2), none where it agrees with itself."""
    tests = {entry["nodeid"]: entry for entry in report["tests"]}
    return [
        *_replaced(report),
        *_gates(report),
        *_verdicts(report, tests),
        *_audits(report, tests),
        *_attempts(report),
        *_repeats(report),
        *_failed(report),
        *_exit_status(report),
        *_empty(report),
    ]


def fails(claim: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a verdict fails its test: as was recorded with it, or as gate and options say by themselves."""
    gates = claim["gate"] and settings.get("gate", "paper") == "paper"
    failing = claim["verdict"] == "falsified" or (
        claim["verdict"] == "inconclusive" and settings.get("inconclusive") == "fail"
    )
    return bool(claim.get("fails")) or (gates and failing)


def _gates(report: Report) -> Iterator[str]:
    """Under ``paper`` the register and the options say which rows gate; a register of the user's may say otherwise."""
    settings = report["settings"]
    if report["run"]["claims_file"] is not None or settings.get("gate", "paper") != "paper":
        return
    register = load_register()
    for claim in report["claims"]:
        row = register.get(claim["id"])
        if row is not None and row.gates(settings.get("gate_claims") or ()) and not claim["gate"]:
            yield f"{claim['id']} of {claim['model']} gates by the register, but is recorded with gate=false"


def _verdicts(report: Report, tests: Mapping[str, Any]) -> Iterator[str]:
    for claim in report["claims"]:
        if not fails(claim, report["settings"]):
            continue
        said = f"{claim['id']} of {claim['model']} is {claim['verdict']} and fails the run"
        entry = tests.get(claim.get("test", ""))
        if entry is None:
            if report["run"]["exit_status"] == 0:
                yield f"{said}, but exit_status=0 and its test is not on record; run again with this version"
        elif _over(report, entry) and entry["outcome"] not in FAILED:
            yield f"{said}, but its test {entry['nodeid']} is reported as {entry['outcome']}; {_remedy(entry)}"


def _audits(report: Report, tests: Mapping[str, Any]) -> Iterator[str]:
    for audit in report["audits"]:
        entry = tests.get(audit["test"])
        if entry is None:
            yield f"audit {audit['check']} is of {audit['test']}, but no such test is on record; run again"
        elif audit["passed"] is False and entry["outcome"] not in FAILED and _over(report, entry):
            said = f"{entry['shipped'] or entry['nodeid']}: {entry['outcome']}, although audit {audit['check']}"
            yield f"{said} refuted it ({audit['detail']}); {_remedy(entry)}"


def _attempts(report: Report) -> Iterator[str]:
    """Of shipped tests whose verdicts and audits do not say it already."""
    refuted = {audit["test"] for audit in report["audits"] if audit["passed"] is False}
    refuted |= {claim.get("test") for claim in report["claims"] if fails(claim, report["settings"])}
    for entry in report["tests"]:
        attempts = entry.get("attempts") or ()
        if entry["shipped"] is None or not attempts or entry["outcome"] in FAILED or not _over(report, entry):
            continue
        if entry["nodeid"] in refuted:
            continue
        first, *others = attempts
        if first["outcome"] in FAILED or (entry["outcome"] in PASSED and first["outcome"] != "passed"):
            then = f", then {', '.join(attempt['outcome'] for attempt in others)}" if others else ""
            what = "its first attempt" if others else "its body"
            yield (
                f"{entry['nodeid']}: reported as {entry['outcome']}, although {what} {_ended(first)}{then}; "
                f"{_remedy(entry)}"
            )


def _repeats(report: Report) -> Iterator[str]:
    """A verdict that only repeats the same fact in another test is no second try."""
    further: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for repeat in report.get("repeats", ()):
        if repeat["attempt"] > 1 or not repeat["alike"]:
            further.setdefault((repeat["id"], repeat["model"]), []).append(repeat)
    for (claim, model), repeats in further.items():
        first = next((c["verdict"] for c in report["claims"] if (c["id"], c["model"]) == (claim, model)), "no verdict")
        said = ", ".join(repeat["verdict"] for repeat in repeats)
        yield (
            f"{claim} of {model} was decided {len(repeats) + 1} times ({first}, then {said}): the first verdict "
            "counts, and a second try has another error rate; ask each claim once a run"
        )


def _failed(report: Report) -> Iterator[str]:
    """Reported as failed, and nothing says why."""
    settings = report["settings"]
    bad = {audit["test"] for audit in report["audits"] if audit["passed"] is not True}
    bad |= {claim["test"] for claim in report["claims"] if "test" in claim and fails(claim, settings)}
    for entry in report["tests"]:
        if entry["shipped"] is None or entry["outcome"] not in FAILED or entry["nodeid"] in bad:
            continue
        if not entry["reason"].strip():
            yield (
                f"{entry['nodeid']}: reported as {entry['outcome']}, although every verdict and audit of it holds and "
                f"no reason is on record; {CHANGED}"
            )


def _exit_status(report: Report) -> Iterator[str]:
    status = report["run"]["exit_status"]
    mine = {audit["test"] for audit in report["audits"]} | {claim.get("test") for claim in report["claims"]}
    failed = [
        entry["nodeid"]
        for entry in report["tests"]
        if entry["outcome"] in FAILED and (entry["shipped"] is not None or entry["nodeid"] in mine)
    ]
    if status == 0 and failed:
        yield f"exit_status=0, although {_listed(failed)} failed; find the hook or plugin that changed the exit status"


def _empty(report: Report) -> Iterator[str]:
    recorded = {each["test"] for each in (*report["audits"], *report.get("repeats", ()))}
    recorded |= {claim.get("test") for claim in report["claims"]}
    empty: dict[str, list[str]] = {}
    for entry in report["tests"]:
        if entry["shipped"] is None or entry["outcome"] not in PASSED or entry["nodeid"] in recorded:
            continue
        if not (entry.get("shown") and below(entry["shipped"], SHOWING)):
            empty.setdefault(entry["shipped"], []).append(entry["nodeid"])
    for nodeids in empty.values():
        yield (
            f"{_listed(nodeids)} passed, but put no audit and no verdict on record: that is no pass; find the fixture, "
            "hook or plugin that keeps body or audits from running"
        )


def _replaced(report: Report) -> Iterator[str]:
    parts = [f"{part['what']} by {part['by']}" for part in report.get("replaced", ())]
    if parts:
        yield (
            f"replaced: {_listed(parts)}: a run with another judge proves nothing; take the replacement out, or "
            "provide the decoder by pytest_emad_make_decoder"
        )


def _over(report: Report, entry: Mapping[str, Any]) -> bool:
    """Whether the test had come to its end: a run that was stopped has one that had not, and is no pass anyhow."""
    return bool(report["state"] == "complete" or entry["outcome"] != "not reported")


def _remedy(entry: Mapping[str, Any]) -> str:
    return "the first attempt counts: run it once" if len(entry.get("attempts", ())) > 1 else CHANGED


def _ended(attempt: Mapping[str, Any]) -> str:
    ended = "never ended" if attempt["outcome"] == "not reported" else f"ended as {attempt['outcome']}"
    return f"{ended} ({attempt['reason'].partition(chr(10))[0]})" if attempt["reason"] else ended


def _listed(nodeids: Sequence[str]) -> str:
    more = f" and {len(nodeids) - LISTED} more" if len(nodeids) > LISTED else ""
    return f"{', '.join(nodeids[:LISTED])}{more}"
