"""Verification that a report is consistent, and that it proves a complete and passed judgment.

pytest reports the outcome of a test, which a mark, a hook or a plugin can change. Verdicts, audits and exceptions of
test bodies are recorded earlier. A report holds both, and a gate passes only if both pass. A waiver excuses undecided
tests, never a contradiction. A known gap (``report.known_gaps``) excuses the failure of its tests.
``find_contradictions`` gives one sentence for each violation:

- A gating verdict that fails, a failed audit, or a failed first attempt: the test must be reported as failed.
- A test reported as failed must have a failing verdict, a failing audit or a reason.
- A shipped test that passed must have recorded an audit, a verdict, or the tables it exists for.
- One verdict per claim, model and run, from the first attempt. A second try has another error rate.

``find_proof_shortfalls`` gives one sentence for each reason why a report is no proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_emad.report.deselection import is_in_selection
from pytest_emad.report.gaps import find_gaps, find_tier_gaps, find_wrong_decoder, format_gaps, is_waived
from pytest_emad.report.known_gaps import KNOWN_GAP, known_gap_mark
from pytest_emad.report.schema import Report
from pytest_emad.report.tiers import UNANSWERED_PAIRS
from pytest_emad.statistics.verdicts import load_register

FAILED = ("failed", "error")
PASSED = ("passed", "xpassed")
TABLE_TESTS = ("suites/ablations", "suites/claims/test_tables.py")  # shipped tests that only show tables
OUTCOME_REMEDY = "find the mark, hook or plugin that changed the outcome"
MAX_NAMES = 3  # most tests named in one sentence


def find_contradictions(report: Report) -> list[str]:
    """One sentence for each contradiction in ``report``; empty if it is consistent."""
    tests = {entry["nodeid"]: entry for entry in report["tests"]}
    return [
        *_gate_contradictions(report),
        *_verdict_contradictions(report, tests),
        *_audit_contradictions(report, tests),
        *_attempt_contradictions(report),
        *_known_gap_contradictions(report),
        *_repeat_contradictions(report),
        *_unexplained_failures(report),
        *_exit_status_contradictions(report),
        *_tests_without_evidence(report),
    ]


def is_failing_verdict(claim: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a verdict fails its test: as recorded with it, or by gate and options."""
    gates = claim["gate"] and settings["gate"] == "paper"
    failing = claim["verdict"] == "falsified" or (
        claim["verdict"] == "inconclusive" and settings["inconclusive"] == "fail"
    )
    return bool(claim["fails"]) or (gates and failing)


def _gate_contradictions(report: Report) -> Iterator[str]:
    """Contradictions of gates. Under ``paper`` register and options choose the gates; a user's register may differ."""
    settings = report["settings"]
    if report["run"]["claims_file"] is not None or settings["gate"] != "paper":
        return
    register = load_register()
    for claim in report["claims"]:
        row = register.get(claim["id"])
        if row is not None and row.is_gating(settings["gate_claims"]) and not claim["gate"]:
            yield f"{claim['id']} of {claim['model']} gates by the register, but is recorded with gate=false"


def _verdict_contradictions(report: Report, tests: Mapping[str, Any]) -> Iterator[str]:
    for claim in report["claims"]:
        if not is_failing_verdict(claim, report["settings"]):
            continue
        message = f"{claim['id']} of {claim['model']} is {claim['verdict']} and fails the run"
        entry = tests.get(claim["test"])
        if entry is not None and KNOWN_GAP in entry:
            continue
        if entry is None:
            if report["run"]["exit_status"] == 0:
                yield f"{message}, but exit_status=0 and its test is not on record; run again"
        elif _is_finished(report, entry) and entry["outcome"] not in FAILED:
            test = f"its test {entry['nodeid']} is reported as {entry['outcome']}"
            yield f"{message}, but {test}; {_contradiction_remedy(entry)}"


def _audit_contradictions(report: Report, tests: Mapping[str, Any]) -> Iterator[str]:
    for audit in report["audits"]:
        entry = tests.get(audit["test"])
        if entry is None:
            yield f"audit {audit['check']} is of {audit['test']}, but no such test is on record; run again"
        elif KNOWN_GAP in entry:
            continue
        elif audit["passed"] is False and entry["outcome"] not in FAILED and _is_finished(report, entry):
            message = f"{entry['shipped'] or entry['nodeid']}: {entry['outcome']}, although audit {audit['check']}"
            yield f"{message} refuted it ({audit['detail']}); {_contradiction_remedy(entry)}"


def _attempt_contradictions(report: Report) -> Iterator[str]:
    """Failed first attempts of shipped tests whose verdicts and audits do not show the failure."""
    refuted = {audit["test"] for audit in report["audits"] if audit["passed"] is False}
    refuted |= {claim["test"] for claim in report["claims"] if is_failing_verdict(claim, report["settings"])}
    for entry in report["tests"]:
        attempts = entry.get("attempts") or ()
        if entry["shipped"] is None or not attempts or entry["outcome"] in FAILED or not _is_finished(report, entry):
            continue
        if entry["nodeid"] in refuted or KNOWN_GAP in entry:
            continue
        first, *others = attempts
        if first["outcome"] in FAILED or (entry["outcome"] in PASSED and first["outcome"] != "passed"):
            then = f", then {', '.join(attempt['outcome'] for attempt in others)}" if others else ""
            what = "its first attempt" if others else "its body"
            yield (
                f"{entry['nodeid']}: reported as {entry['outcome']}, although {what} {_attempt_text(first)}{then}; "
                f"{_contradiction_remedy(entry)}"
            )


def _known_gap_contradictions(report: Report) -> Iterator[str]:
    """Entries marked as a known gap that are not listed, or did not fail themselves."""
    for entry in report["tests"]:
        if KNOWN_GAP in entry and not known_gap_mark(entry, report["settings"]):
            gap = f"reported as known gap {entry[KNOWN_GAP]!r}"
            yield f"{entry['nodeid']}: {gap}, but no such test is listed and failed by itself; {OUTCOME_REMEDY}"


def _repeat_contradictions(report: Report) -> Iterator[str]:
    """Second verdicts of a claim. A verdict that repeats the same fact in another test is no second try."""
    further: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for repeat in report["repeats"]:
        if repeat["attempt"] > 1 or not repeat["alike"]:
            further.setdefault((repeat["id"], repeat["model"]), []).append(repeat)
    for (claim, model), repeats in further.items():
        first = next((c["verdict"] for c in report["claims"] if (c["id"], c["model"]) == (claim, model)), "no verdict")
        verdicts = ", ".join(repeat["verdict"] for repeat in repeats)
        yield (
            f"{claim} of {model} was decided {len(repeats) + 1} times ({first}, then {verdicts}): the first verdict "
            "counts, and a second try has another error rate; ask each claim once a run"
        )


def _unexplained_failures(report: Report) -> Iterator[str]:
    """Tests reported as failed without a recorded reason."""
    settings = report["settings"]
    bad = {audit["test"] for audit in report["audits"] if audit["passed"] is not True}
    bad |= {claim["test"] for claim in report["claims"] if is_failing_verdict(claim, settings)}
    for entry in report["tests"]:
        if entry["shipped"] is None or entry["outcome"] not in FAILED or entry["nodeid"] in bad:
            continue
        if not entry["reason"].strip():
            yield (
                f"{entry['nodeid']}: reported as {entry['outcome']}, although every verdict and audit of it holds and "
                f"no reason is on record; {OUTCOME_REMEDY}"
            )


def _exit_status_contradictions(report: Report) -> Iterator[str]:
    status = report["run"]["exit_status"]
    mine = {audit["test"] for audit in report["audits"]} | {claim["test"] for claim in report["claims"]}
    failed = [
        entry["nodeid"]
        for entry in report["tests"]
        if entry["outcome"] in FAILED and (entry["shipped"] is not None or entry["nodeid"] in mine)
    ]
    if status == 0 and failed:
        remedy = "find the hook or plugin that changed the exit status"
        yield f"exit_status=0, although {_first_names(failed)} failed; {remedy}"


def _tests_without_evidence(report: Report) -> Iterator[str]:
    recorded = {each["test"] for each in (*report["audits"], *report["repeats"])}
    recorded |= {claim["test"] for claim in report["claims"]}
    empty: dict[str, list[str]] = {}
    for entry in report["tests"]:
        if entry["shipped"] is None or entry["outcome"] not in PASSED or entry["nodeid"] in recorded:
            continue
        if not (entry.get("shown") and is_in_selection(entry["shipped"], TABLE_TESTS)):
            empty.setdefault(entry["shipped"], []).append(entry["nodeid"])
    for nodeids in empty.values():
        yield (
            f"{_first_names(nodeids)} passed, but put no audit and no verdict on record: that is no pass; find the "
            "fixture, hook or plugin that keeps body or audits from running"
        )


def _is_finished(report: Report, entry: Mapping[str, Any]) -> bool:
    """Whether the test finished. An interrupted run has one that did not, and is no pass anyway."""
    return bool(report["state"] == "complete" or entry["outcome"] != "not reported")


def _contradiction_remedy(entry: Mapping[str, Any]) -> str:
    return "the first attempt counts: run it once" if len(entry.get("attempts", ())) > 1 else OUTCOME_REMEDY


def _attempt_text(attempt: Mapping[str, Any]) -> str:
    ended = "never ended" if attempt["outcome"] == "not reported" else f"ended as {attempt['outcome']}"
    return f"{ended} ({attempt['reason'].partition(chr(10))[0]})" if attempt["reason"] else ended


def _first_names(nodeids: Sequence[str]) -> str:
    more = f" and {len(nodeids) - MAX_NAMES} more" if len(nodeids) > MAX_NAMES else ""
    return f"{', '.join(nodeids[:MAX_NAMES])}{more}"


def find_proof_shortfalls(
    report: Report, selection: Sequence[str], shipped: Sequence[str], decoder: str | None, tier: str | None = None
) -> Iterator[str]:
    """One sentence for each reason why ``report`` is no proof; empty if it is proof.

    Args:
        report: as ``schema.read_report`` gives it.
        selection: suites that must have run, besides the run's own selection.
        shipped: names of the tests that this version ships.
        decoder: the decoder that must have been judged; None for any.
        tier: the tier at which it must have been judged; None for that of the run. Without a ``selection`` only the
            tests of the tier must have run.
    """
    if report["state"] != "complete":
        yield f"state={report['state']!r}, but expected 'complete': the run did not come to its end"
    run = report["run"]
    if run["exit_status"] != 0:
        yield f"exit_status={run['exit_status']!r}, but expected 0"
    yield from (f"the run failed as a whole: {failure}" for failure in run["failures"])
    for entry in report["tests"]:
        if entry["outcome"] in ("failed", "error"):
            yield f"{entry['nodeid']}: {entry['outcome']} ({entry['reason'].partition(chr(10))[0]})"
    for audit in report["audits"]:
        if audit["passed"] is None and audit.get("live", {}).get(UNANSWERED_PAIRS):
            yield f"{audit['test']}: {audit['detail']}"
    yield from (sentence for sentence in find_contradictions(report) if sentence not in run["failures"])
    tier = tier or report["settings"]["tier"]
    required = list(dict.fromkeys([*run["asked"], *selection]))
    missing = [
        *find_wrong_decoder(report, decoder, "--expect-decoder"),
        *(gap for gap in find_tier_gaps(report, tier) if str(gap) not in run["failures"]),
        # the strict rules include the reference decoder: a run may omit tests, a proof may not
        *find_gaps(report, required, shipped, always=True, tier=None if selection else tier),
    ]
    waivers = [waiver["of"] for waiver in report["waivers"]]
    yield from format_gaps(gap for gap in missing if not is_waived(gap, waivers))
