"""Content of the summary of a run: outcome with reason, gates, operating points, other claims.

It uses only ``report.json``, and the shipped register for order and missing titles. So the run that wrote the report,
``emad report --text`` and a job summary print the same. Gates and ids are in the order of the register.
``summary_layout`` makes lines of it.
"""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_emad.audit.finding import FirstDifference, LikelyCause
from pytest_emad.report.deselection import describe_deselections
from pytest_emad.report.figures import RISE, entropy_rise_rows
from pytest_emad.report.gaps import excused_declined_test_entries, excused_features, is_partial_run
from pytest_emad.report.known_gaps import KNOWN_GAP, count_known_gaps, describe_known_gaps
from pytest_emad.report.provenance import REQUESTS, format_request_counts
from pytest_emad.report.schema import Report
from pytest_emad.report.tables import STREAM_TIMES, format_stream_latency_row, list_speed_texts
from pytest_emad.report.tiers import format_tier
from pytest_emad.statistics import goldens, number_format
from pytest_emad.statistics.gate import (
    UNDECIDED,
    claim_title,
    describe_deciding_leg,
    format_measurement_and_requirement,
)
from pytest_emad.statistics.units import format_unit_count
from pytest_emad.statistics.verdicts import Claim, Outcome, load_register


@dataclass(frozen=True)
class GatingClaimSummary:
    """A gating claim.

    ``of``     its model, "" in a run of one model.
    ``where``  the leg that decided.
    ``why``    what would decide it.
    """

    id: str
    of: str
    verdict: Outcome
    title: str
    measured: str
    where: str
    why: str

    def list_detail_texts(self) -> list[str]:
        """Text with measured and required value, deciding leg, and remedy."""
        where = f"where: {self.where}" if self.where else ""
        return [text for text in (self.measured, where, self.why) if text]


@dataclass(frozen=True)
class PointSummary:
    """A selected operating point. ``facts``: its roles, cost and quality; ``brief_facts``: without intervals."""

    name: str
    facts: str
    brief_facts: str


@dataclass(frozen=True)
class FailureCause:
    """One cause of failed tests.

    ``text``     their number, their audits, and the likely cause with its remedy, or the first finding.
    ``first``    the first difference, or "".
    ``further``  the other tests that failed by it.
    """

    text: str
    first: str
    further: tuple[str, ...]


FailedTest = Mapping[str, Any]  # an entry of ``tests`` in the report
Claims = Sequence[tuple[str, str]]  # (id, plain title) of each
ClaimGroups = Mapping[str, Claims]  # claims of one outcome by their reason, or ""


@dataclass(frozen=True)
class RunSummary:
    """All content of a summary.

    ``headline``  passed or failed, with the reason.
    ``passed``    whether the run passed; None: it did not end.
    ``broken``    failed tests that decided no claim, by cause.
    ``repeat``    the command that repeats the first of them.
    ``unknown``   a sentence for each model that does not know its judged text.
    ``lost``      answers that the first point to lose any loses: how many by task, and two of the task that loses most.
    ``rest``      outcome → claims that do not gate, by reason.
    ``more``      the option to read more text, if that would decide a claim.
    ``record``    lines about updated goldens and known verdicts.
    ``uncompared``  lines about known verdicts that vary or are absent.
    ``remarks``   lines about the models.
    ``about``     lines about the run.
    ``failures``  reasons for which the run as a whole fails.
    """

    models: str
    headline: str
    passed: bool | None
    broken: tuple[FailureCause, ...]
    repeat: str
    unknown: tuple[str, ...]
    gates: tuple[GatingClaimSummary, ...]
    points: tuple[PointSummary, ...]
    lost: tuple[str, ...]
    rest: Mapping[Outcome, ClaimGroups]
    more: str
    record: tuple[str, ...]
    uncompared: tuple[str, ...]
    remarks: tuple[str, ...]
    about: tuple[str, ...]
    failures: tuple[str, ...]


def build_run_summary(report: Report) -> RunSummary:
    """All content of the summary of ``report``."""
    register = load_register()
    gating, rest = split_claims_by_gate(report)
    models = [str(name) for name in report["settings"]["models"]]
    gates = tuple(_gate_summary(claim, models, register) for claim in gating)
    broken = _broken_tests(report)
    headline, passed = _headline(report, gates, broken)
    compared, *uncompared = _known_verdict_lines(report) or [""]
    return RunSummary(
        models=", ".join(models),
        headline=headline,
        passed=passed,
        broken=tuple(_causes(broken, report)),
        repeat=_repeat_command(broken, report),
        unknown=tuple(_unknown_texts(report)),
        gates=gates,
        points=tuple(_selected_points(report["points"])),
        lost=tuple(_lost_answers(report["points"])),
        rest=_group_rest(rest, register),
        more=_larger_budget(rest, report),
        record=tuple(filter(None, (_golden_updates(report), compared))),
        uncompared=tuple(uncompared),
        remarks=tuple(_model_remarks(report)),
        about=tuple(_run_remarks(report)),
        failures=tuple(report["run"]["failures"]),
    )


def _headline(
    report: Report, gates: Sequence[GatingClaimSummary], broken: Sequence[FailedTest]
) -> tuple[str, bool | None]:
    """Passed or failed, with the reason."""
    status, reasons = report["run"]["exit_status"], list(_failure_reasons(report, gates, broken))
    if (state := report["state"]) != "complete":
        unfinished = f"the run {UNFINISHED[state]}; what follows is what it reached"
        if _has_failed(report, broken):  # -x, --maxfail, or a failure before an interrupt
            return f"FAILED: {'; '.join(reasons)}; {unfinished}", False
        return f"NOT FINISHED: {unfinished}", None
    if not reasons and status:
        reasons = [EXIT_REASONS.get(status, f"pytest ended with status {status}")]
    if reasons:
        return f"FAILED: {'; '.join(reasons)}", False
    if report["settings"]["gate"] == "known" and report["known"]:
        parts = ["every verdict equals the record"]
    else:
        parts = [f"{_count_of_gates(gates)}{_unrefuted(report)}"] if gates else []
    if report["settings"]["tier"] or not parts or count_known_gaps(report):
        parts.append(_gating_tests(report))
    return f"PASSED: {'; '.join(filter(None, parts)) or 'no claim and no test of this run is a gate'}", True


EXIT_REASONS = {3: "pytest reported an internal error", 5: "no test was selected"}  # by exit status of pytest
UNFINISHED = {
    "running": "is still running, or was killed",
    "interrupted": "was interrupted",
    "usage error": "ended with a usage error",
}


def _gating_tests(report: Report) -> str:
    """``13 tests of tier tokens were the gate: all passed``; "" if no shipped test without a claim ran.

    Each such test fails the run if it fails, whatever else gates.
    """
    tier = report["settings"]["tier"]
    tests = [test for test in report["tests"] if test["shipped"] and (tier or not test.get("claim"))]
    if not tests:
        return ""
    ends = Counter(_gate_test_end(test, report) for test in tests)
    ended = "all passed" if set(ends) == {"passed"} else ", ".join(f"{count} {end}" for end, count in ends.items())
    of_tier = f" of tier {tier}" if tier else ""
    gate = "was the gate" if len(tests) == 1 else "were the gate"
    return f"{format_unit_count(len(tests), 'tests')}{of_tier} {gate}: {ended}"


def _gate_test_end(test: Mapping[str, Any], report: Report) -> str:
    """How a shipped test of a run that passed has ended."""
    if test["outcome"] in ("passed", "xpassed"):
        return "passed"
    if KNOWN_GAP in test:
        return "failed as a known gap"
    return "did not apply" if test["kind"] in ("not applicable", "refused") else "not decided"


def _count_of_gates(gates: Sequence[GatingClaimSummary]) -> str:
    """``3 of 4 gates hold, 1 not applicable``."""
    holding = [gate for gate in gates if gate.verdict == "survived"]
    _, comma, others = format_gate_counts(gates).partition(", ")
    return f"{len(holding)} of {format_unit_count(len(gates), 'gates')} {_verb(holding, 'hold')}{comma}{others}"


def _unrefuted(report: Report) -> str:
    """Text with the number of passed audits, if the run judges the decoder."""
    passed = sum(audit["passed"] is True for audit in report["audits"])
    judged = report["settings"]["gate"] == "decoder" and passed
    return f", and the decoder passed {format_unit_count(passed, 'audits')}" if judged else ""


def _failure_reasons(
    report: Report, gates: Sequence[GatingClaimSummary], broken: Sequence[FailedTest]
) -> Iterator[str]:
    """Counted failures: gates, verdicts that differ from the record, other tests, conditions on the run."""
    failing = _failing_claims(report)
    if failing and report["settings"]["gate"] == "known":
        compared = [entry for entry in report["known"] if not entry["why"]]
        verdicts = format_unit_count(len(compared), "verdicts")
        yield f"{len(failing)} of {verdicts} {_verb(failing, 'differ')} from the record"
    elif failing:
        yield f"{len(failing)} of {format_unit_count(len(gates), 'gates')} {_verb(failing, 'do')} not hold"
    if broken:
        yield f"{format_unit_count(len(broken), 'other tests' if failing else 'tests')} failed"
    if conditions := report["run"]["failures"]:
        yield f"{format_unit_count(len(conditions), 'conditions')} on the run {_verb(conditions, 'are')} not met"


def _has_failed(report: Report, broken: Sequence[FailedTest]) -> bool:
    """Whether a test failed, without conditions on a whole run, which an unfinished run cannot meet."""
    return bool(broken) or bool(_failing_claims(report))


def _failing_claims(report: Report) -> list[Mapping[str, Any]]:
    """Claims that fail the run; one in a known gap does not."""
    known = {test["nodeid"] for test in report["tests"] if KNOWN_GAP in test}
    return [claim for claim in report["claims"] if claim["fails"] and claim["test"] not in known]


def _broken_tests(report: Report) -> list[FailedTest]:
    """Failed tests that did not fail for the verdict of a claim."""
    of_claims = {claim["test"] for claim in report["claims"] if claim["fails"]}
    return [
        test for test in report["tests"] if test["outcome"] in ("failed", "error") and test["nodeid"] not in of_claims
    ]


def _causes(broken: Sequence[FailedTest], report: Report) -> Iterator[FailureCause]:
    """For each cause of failed tests: their number, the audits that refuted the decoder, the first finding.

    Two tests have one cause if their failures look alike (``Finding.likely_cause``), if one requirement of the audits
    refuted both (``Finding.cause``), or, without an audit, if both raised at one place. A test without any of these is
    its own cause.
    """
    refuted = {audit["test"]: audit for audit in reversed(report["audits"]) if audit["passed"] is False}
    causes: dict[str, list[FailedTest]] = {}
    for test in broken:
        audit = refuted.get(test["nodeid"], {})
        looks_like = audit.get("likely_cause", {}).get("kind")
        cause = looks_like or audit.get("cause") or audit.get("check") or test.get("crash") or test["nodeid"]
        causes.setdefault(cause, []).append(test)
    for tests in causes.values():
        audits = [refuted[test["nodeid"]] for test in tests if test["nodeid"] in refuted]
        checks = list(dict.fromkeys(audit["check"] for audit in audits))
        of = f" ({'audit' if len(checks) == 1 else 'audits'} {', '.join(checks)})" if checks else ""
        found = _finding_text(tests[0], refuted.get(tests[0]["nodeid"]))
        likely = [str(LikelyCause(**audit["likely_cause"])) for audit in audits if "likely_cause" in audit]
        different = [str(FirstDifference(**audit["difference"])) for audit in audits if "difference" in audit]
        yield FailureCause(
            f"{format_unit_count(len(tests), 'tests')}{of}: {likely[0] if likely else found}",
            different[0] if different else found if likely else "",
            tuple(str(test["nodeid"]).rpartition("/")[2] for test in tests[1:]),
        )


def _finding_text(test: FailedTest, audit: Mapping[str, Any] | None) -> str:
    found = audit.get("complaint") or audit["detail"] if audit else test["reason"].partition("\n")[0]
    return str(found).removeprefix("Failed: ") or "no reason was reported"


def _repeat_command(broken: Sequence[FailedTest], report: Report) -> str:
    """The ``emad replay`` command of the first of ``broken``; "" without one, or without a report folder.

    A test is named by its function, or with its parameters if several of that function failed.
    """
    names = [str(test["nodeid"]).rpartition("::")[2] for test in broken]
    place = report["settings"]["report"]
    if not names or not place or len(report["tests"]) == 1:  # the only one is the one that ran
        return ""
    function = names[0].partition("[")[0]
    is_unique = sum(name.partition("[")[0] == function for name in names) == 1
    return f"emad replay {shlex.quote(str(place))} {function if is_unique else shlex.quote(names[0])}"


_SINGULAR = {"hold": "holds", "differ": "differs", "do": "does", "are": "is"}


def _verb(things: Sequence[object], plural: str) -> str:
    return _SINGULAR[plural] if len(things) == 1 else plural


KNOWN_SHARE = 0.5  # share of a uniform guess's loss; a model with a larger loss at full depth knows little of the text


def _unknown_texts(report: Report) -> Iterator[str]:
    """A sentence for each model with a full-depth loss near that of a guess."""
    sizes = {model["name"]: model["vocabulary"] for model in report["models"] if model.get("vocabulary")}
    said = {}
    for point in report["points"]:
        perplexity, size = point.get("perplexity_reference"), sizes.get(point.get("model"))
        if perplexity and size and math.log(perplexity) > KNOWN_SHARE * math.log(size):
            said[point["model"], point.get("corpus")] = (
                f"{point['model']} does not know this text: full depth has perplexity {perplexity:,.4g} on "
                f"{point.get('corpus', 'it')}, a guess among its {size:,} tokens {size:,}. Verdicts on quality say "
                "little here; judge it on text of its own kind (--emad-corpus)"
            )
    yield from said.values()


def split_claims_by_gate(report: Report) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Gating claims and the others, in the order of the register."""
    register = load_register()
    order = {name: place for place, name in enumerate(register)}
    claims = sorted(report["claims"], key=lambda claim: order.get(claim["id"], len(order)))
    gating = [claim for claim in claims if _is_gate(claim, report, register)]
    return gating, [claim for claim in claims if claim not in gating]


def _is_gate(claim: Mapping[str, Any], report: Report, register: Mapping[str, Claim]) -> bool:
    """Whether the claim gates. Under ``--emad-gate known`` every claim does; then the register's own gates count."""
    if report["settings"]["gate"] != "known":
        return bool(claim["gate"])
    row, named = register.get(claim["id"]), report["settings"]["gate_claims"]
    return claim["id"] in named if row is None else row.is_gating(named)


def _gate_summary(claim: Mapping[str, Any], models: Sequence[str], register: Mapping[str, Claim]) -> GatingClaimSummary:
    return GatingClaimSummary(
        id=claim["id"],
        of="" if [claim["model"]] == list(models) else claim["model"],
        verdict=claim["verdict"],
        title=claim_title(claim, register) or claim["id"],
        measured=format_measurement_and_requirement(claim),
        where=describe_deciding_leg(claim),
        why=claim["why"] if claim["verdict"] == "inconclusive" else "",
    )


# ---------------------------------------------------------------- operating points


def _selected_points(points: Sequence[Mapping[str, Any]]) -> Iterator[PointSummary]:
    """Each point that has a role."""
    several = len({point.get("model") for point in points}) > 1
    for point in points:
        if point.get("roles"):
            name = f"{point['model']}: {point['name']}" if several else point["name"]
            facts = ("; ".join([", ".join(point["roles"]), *_point_facts(point, whole)]) for whole in (True, False))
            yield PointSummary(name, *facts)


def _point_facts(point: Mapping[str, Any], whole: bool) -> Iterator[str]:
    if point.get("net_reduction") is not None:
        yield f"{number_format.format_reduction_as_change(point['net_reduction'])} FLOPs net"
    if times := list_speed_texts(point, "{1} at batch {0}", whole=whole):
        yield f"speed {', '.join(times)}"
    if point.get("perplexity") is not None:
        rise, bounds = point.get("perplexity_rise"), point.get("interval")
        rise_text = number_format.format_value(rise, "relative rise", bounds)
        if bounds and whole:
            rise_text += f" {number_format.format_interval(bounds, 'relative rise')}"
        values = number_format.format_before_and_after(point.get("perplexity_reference"), point["perplexity"])
        yield f"perplexity {values}, {rise_text}" if whole or rise is None else f"perplexity {rise_text}"
    yield from _worst_task(point.get("accuracy") or {}, point.get("not_counted") or {})


def _worst_task(accuracy: Mapping[str, Sequence[float | None]], left_out: Mapping[str, str]) -> Iterator[str]:
    lost = {
        task: before - after
        for task, (before, after) in accuracy.items()
        if task not in left_out and before is not None and after is not None
    }
    if lost:
        task = max(lost, key=lambda name: lost[name])
        before, after = accuracy[task]
        change = number_format.format_before_and_after(before, after, ".3f")
        yield f"{f'worst of {len(lost)} tasks' if len(lost) > 1 else 'task'} {task} {change}"
    elif accuracy:
        yield f"no task of {len(accuracy)} counts"


LOST_SHOWN, LOST_LETTERS = 2, 18  # items, and letters of a text: each item in one line of eighty


def _lost_answers(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line with counts by task, then a line for each shown item, of the first point that loses any."""
    for point in points:
        if lost := point.get("lost_answers"):
            by_count = sorted(lost.items(), key=lambda entry: -entry[1]["count"])
            counts = ", ".join(f"{task} {found['count']}" for task, found in by_count)
            yield f"{point['name']} loses answers of full depth: {counts}"
            task, found = by_count[0]
            for one in found["first"][:LOST_SHOWN]:
                prompt = _quoted(one["prompt"][-LOST_LETTERS:])
                yield f"  {task}: {prompt} → {_quoted(one['full_depth'])}, now {_quoted(one['at_point'])}"
            return


def _quoted(text: str) -> str:
    return json.dumps(textwrap.shorten(text, LOST_LETTERS, placeholder="…") or text, ensure_ascii=False)


# ---------------------------------------------------------------- the rest


def _group_rest(claims: Sequence[Mapping[str, Any]], register: Mapping[str, Claim]) -> dict[Outcome, ClaimGroups]:
    """Claims by outcome, undecided ones also by reason. A claim of several models is named with its model."""
    ids = [claim["id"] for claim in claims]
    outcomes: dict[Outcome, dict[str, list[tuple[str, str]]]] = {}
    for claim in claims:
        verdict: Outcome = claim["verdict"]
        why = claim["why"] if verdict in ("inconclusive", *UNDECIDED) else ""
        name = f"{claim['id']} of {claim['model']}" if ids.count(claim["id"]) > 1 else str(claim["id"])
        outcomes.setdefault(verdict, {}).setdefault(why, []).append((name, claim_title(claim, register)))
    return dict(outcomes)


def _larger_budget(claims: Iterable[Mapping[str, Any]], report: Report) -> str:
    """The option that reads more text, if more text would decide an inconclusive claim."""
    wanting = any(
        claim["verdict"] == "inconclusive" and claim["enough"] is not None
        for claim in (*claims, *(claim for claim in report["claims"] if claim["gate"]))
    )
    larger = {"smoke": "standard", "standard": "full"}.get(report["settings"]["budget"])
    return f"more text may decide them: --emad-budget {larger}" if wanting and larger else ""


# ---------------------------------------------------------------- the run


def _golden_updates(report: Report) -> str:
    kinds = [entry["outcome"] for entry in report["goldens"] if entry["outcome"] in ("added", "changed")]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"goldens updated: {counts}" if kinds else ""


def _known_verdict_lines(report: Report) -> list[str]:
    """The verdicts compared with the record, then those that vary, then those without a record."""
    settings = report["settings"]
    is_compared = settings["gate"] == "known" and not settings["update_golden"] and report["known"]
    return goldens.format_comparison_summary(report["known"]).split("\n") if is_compared else []


def _run_remarks(report: Report) -> Iterator[str]:
    decoder = report["decoder"]
    if decoder["foreign"] or len(decoder["providers"]) > 1:  # the header of the run names the reference decoder alone
        yield f"decoder under test: {decoder['name']}"
        if any(provider["foreign"] and provider["answered"] for provider in decoder["providers"]):
            yield format_tier(report)
    for provider in decoder["providers"]:
        if REQUESTS in provider:
            yield f"{provider['name']}: {format_request_counts(provider)}"
    yield from _stream_remarks(report)
    if decoder["foreign"] and is_partial_run(report):
        yield (
            f"THIS RUN PROVES NOTHING: {report['run']['partial']} selects a part of the suites; a proof runs them "
            "whole, with --emad-tier or --emad-expect-decoder, and passes `emad verify`"
        )
    if declined := excused_declined_test_entries(report):
        features = ", ".join(sorted(excused_features(report)))
        yield f"the decoder does not offer {features}: {len(declined)} tests do not apply"
    undecided = [audit for audit in report["audits"] if audit["passed"] is None]
    for check in dict.fromkeys(audit["check"] for audit in undecided):
        details = [audit["detail"] for audit in undecided if audit["check"] == check]
        why = details[0].partition(" (")[0].partition(": ")[0]
        yield f"audit {check} inconclusive in {len(details)} test{'s' * (len(details) > 1)}: {why}"
    if earlier := report["run"]["earlier"]:
        yield (
            f"run {earlier + 1} of the same tests, options and weights in {report['settings']['report']}: the first "
            "is the verdict, and a further one needs a reason that was known before it"
        )
    yield from describe_deselections(report["deselected"], report["settings"])
    yield from describe_known_gaps(report)
    for waiver in report["waivers"]:
        yield f"waive{'d' if waiver['needed'] else 'r not needed:'} {waiver['of']}: {waiver['reason']}"


def _stream_remarks(report: Report) -> Iterator[str]:
    """Times of streamed answers by the number of simultaneous requests, and of whole answers."""
    for table in report["tables"]:
        if table["title"] == STREAM_TIMES:
            of = f" of {table['model']}" if len(report["settings"]["models"]) > 1 else ""
            yield f"times in ms, median (95 % within){of}: {'; '.join(map(format_stream_latency_row, table['rows']))}"


def _model_remarks(report: Report) -> Iterator[str]:
    for model in report["models"]:
        remarks = model.get("remarks")
        yield from (f"{model['name']}: {remark}" for remark in (remarks if isinstance(remarks, list) else ()))
    yield from _profile_remarks(report)


def _profile_remarks(report: Report) -> Iterator[str]:
    """Models with entropy that does not fall with depth: the largest rise, and the layer of the minimum."""
    for table in report["tables"]:
        if table.get("figure") != "entropy profile":
            continue
        rows = [row for row in table["rows"] if row["mean entropy, nats"] is not None]
        if not rows:
            continue
        lowest, last = min(rows, key=lambda row: row["mean entropy, nats"]), rows[-1]
        rising = entropy_rise_rows(rows)
        if lowest is last and not rising:
            continue
        lowest_text = f"is lowest after layer {lowest['layer']} of {last['layer']}"
        rise_text = ""
        if rising:
            most = max(rising, key=lambda row: row[RISE])
            step = f"layer {most['layer'] - 1} → {most['layer']} by {most[RISE]:.2f} nats"
            rise_text = f"rises with depth (EMAD-E1), most from {step}; "
        yield f"{table['model']}: entropy {rise_text}{lowest_text}"


def format_gate_counts(gates: Sequence[GatingClaimSummary]) -> str:
    """``3 of 5 hold, 2 falsified``."""
    verdicts = [gate.verdict for gate in gates]
    parts = [f"{verdicts.count('survived')} of {len(gates)} hold"]
    parts += [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts) if verdict != "survived"]
    return ", ".join(parts)
