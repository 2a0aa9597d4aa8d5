"""The summary of a run, at most forty lines: outcome with reason, gates, operating points, other claims.

It uses only ``report.json``, and the shipped register for order and missing titles. So the run that wrote the report,
``emad report --text`` and a job summary print the same. Gates and ids are in the order of the register. A gate shows
claim, verdict, measured value, requirement, place.

``DETAIL_LEVELS`` define the order of omissions for lack of room: survived claims, then reasons, then titles, points and
lines about the run. Gates that do not hold keep their numbers, undecided claims their remedies. Ids of falsified claims
are printed at every level, even in more than forty lines.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tabulate import tabulate

from pytest_emad.report.deselection import describe_deselections
from pytest_emad.report.figures import RISE, entropy_rise_rows
from pytest_emad.report.gaps import excused_declined_test_entries, excused_features, is_partial_run
from pytest_emad.report.provenance import REQUESTS, format_request_counts
from pytest_emad.report.schema import Report
from pytest_emad.report.tables import STREAM_TIMES, escape_markdown, format_stream_latency_row
from pytest_emad.report.tiers import format_tier
from pytest_emad.statistics import goldens, number_format
from pytest_emad.statistics.gate import UNDECIDED, claim_title, deciding_leg_name, format_measurement_and_requirement
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


FailedTest = Mapping[str, Any]  # an entry of ``tests`` in the report
# claims of one outcome: reason or "" → (id, plain title) of each claim with it
ClaimGroups = Mapping[str, Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class RunSummary:
    """All content of a summary.

    ``headline``  passed or failed, with the reason.
    ``passed``    whether the run passed; None: it did not end.
    ``broken``    failed tests that decided no claim, a sentence for each cause.
    ``repeat``    the command that repeats the first of them.
    ``unknown``   a sentence for each model that does not know its judged text.
    ``points``    name of each selected operating point → its roles, cost and quality.
    ``lost``      answers that the first point to lose any loses: how many by task, and two of the task that loses most.
    ``rest``      outcome → claims that do not gate, by reason.
    ``more``      the option to read more text, if that would decide a claim.
    ``record``    lines about known verdicts.
    ``about``     lines about the run.
    ``failures``  reasons for which the run as a whole fails.
    """

    models: str
    headline: str
    passed: bool | None
    broken: tuple[str, ...]
    repeat: str
    unknown: tuple[str, ...]
    gates: tuple[GatingClaimSummary, ...]
    points: Mapping[str, str]
    lost: tuple[str, ...]
    rest: Mapping[Outcome, ClaimGroups]
    more: str
    record: tuple[str, ...]
    about: tuple[str, ...]
    failures: tuple[str, ...]


def build_run_summary(report: Report) -> RunSummary:
    """All content of the summary of ``report``."""
    register = load_register()
    order = {name: place for place, name in enumerate(register)}
    claims = sorted(report["claims"], key=lambda claim: order.get(claim["id"], len(order)))
    gating = [claim for claim in claims if _is_gate(claim, report, register)]
    rest = [claim for claim in claims if claim not in gating]
    models = [str(name) for name in report["settings"]["models"]]
    gates = tuple(_gate_summary(claim, models, register) for claim in gating)
    broken = _broken_tests(report)
    headline, passed = _headline(report, gates, broken)
    return RunSummary(
        models=", ".join(models),
        headline=headline,
        passed=passed,
        broken=tuple(_causes(broken, report)),
        repeat=_repeat_command(broken, report),
        unknown=tuple(_unknown_texts(report)),
        gates=gates,
        points=dict(_selected_points(report["points"])),
        lost=tuple(_lost_answers(report["points"])),
        rest=_group_rest(rest, register),
        more=_larger_budget(rest, report),
        record=tuple(_record_lines(report)),
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
        return "PASSED: every verdict equals the record", True
    passed = f"{_count_of_gates(gates)}{_unrefuted(report)}" if gates else "no claim of this run is a gate"
    return f"PASSED: {passed}", True


EXIT_REASONS = {3: "pytest reported an internal error", 5: "no test was selected"}  # by exit status of pytest
UNFINISHED = {
    "running": "is still running, or was killed",
    "interrupted": "was interrupted",
    "usage error": "ended with a usage error",
}


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
    failing = [claim for claim in report["claims"] if claim["fails"]]
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
    return bool(broken) or any(claim["fails"] for claim in report["claims"])


def _broken_tests(report: Report) -> list[FailedTest]:
    """Failed tests that did not fail for the verdict of a claim."""
    of_claims = {claim["test"] for claim in report["claims"] if claim["fails"]}
    return [
        test for test in report["tests"] if test["outcome"] in ("failed", "error") and test["nodeid"] not in of_claims
    ]


def _causes(broken: Sequence[FailedTest], report: Report) -> Iterator[str]:
    """For each cause of failed tests: their number, the audits that refuted the decoder, the first finding.

    Two tests have one cause if one requirement of the audits refuted both (``Finding.cause``), or, without an audit, if
    both raised at one place. A test without either is its own cause.
    """
    refuted = {audit["test"]: audit for audit in reversed(report["audits"]) if audit["passed"] is False}
    causes: dict[str, list[str]] = {}
    audits: dict[str, list[str]] = {}
    for test in broken:
        audit = refuted.get(test["nodeid"])
        if audit:
            found, cause = audit.get("complaint") or audit["detail"], audit.get("cause") or audit["check"]
        else:
            found = test["reason"].partition("\n")[0].removeprefix("Failed: ")
            cause = test.get("crash") or test["nodeid"]
        causes.setdefault(cause, []).append(found)
        audits.setdefault(cause, []).extend([audit["check"]] if audit else [])
    for cause, found in causes.items():
        checks = list(dict.fromkeys(audits[cause]))
        of = f" ({'audit' if len(checks) == 1 else 'audits'} {', '.join(checks)})" if checks else ""
        yield f"{format_unit_count(len(found), 'tests')}{of}: {found[0] or 'no reason was reported'}"


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
        where=deciding_leg_name(claim),
        why=claim["why"] if claim["verdict"] == "inconclusive" else "",
    )


# ---------------------------------------------------------------- operating points


def _selected_points(points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(name, roles with cost and quality) of each point that has a role."""
    several = len({point.get("model") for point in points}) > 1
    for point in points:
        if point.get("roles"):
            name = f"{point['model']}: {point['name']}" if several else point["name"]
            yield name, "; ".join([", ".join(point["roles"]), *_point_facts(point)])


def _point_facts(point: Mapping[str, Any]) -> Iterator[str]:
    if point.get("net_reduction") is not None:
        yield f"{number_format.format_reduction_as_change(point['net_reduction'])} FLOPs net"
    if point.get("time_ratio"):
        yield ", ".join(
            f"{number_format.format_ratio(times)} as fast at batch {rows}"
            for rows, times in point["time_ratio"].items()
        )
    if point.get("perplexity") is not None:
        rise, bounds = point.get("perplexity_rise"), point.get("interval")
        parts = [number_format.format_percent(rise)] + (
            [number_format.format_interval(bounds, "relative rise")] if bounds else []
        )
        values = number_format.format_before_and_after(point.get("perplexity_reference"), point["perplexity"])
        yield f"perplexity {values}, {' '.join(parts)}"
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
        yield f"worst of {len(lost)} task{'s' * (len(lost) > 1)} {task} {change}"
    elif accuracy:
        yield f"no task of {len(accuracy)} counts"


LOST_SHOWN, LOST_LETTERS = 2, 24  # items, and letters of a text: each item in one line


def _lost_answers(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line with counts by task, then a line for each shown item, of the first point that loses any."""
    for point in points:
        if lost := point.get("lost_answers"):
            by_count = sorted(lost.items(), key=lambda entry: -entry[1]["count"])
            counts = ", ".join(f"{task} {found['count']}" for task, found in by_count)
            yield f"answers that full depth gives and {point['name']} loses: {counts}"
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
    return f"More text may decide them: --emad-budget {larger}" if wanting and larger else ""


# ---------------------------------------------------------------- the run


def _record_lines(report: Report) -> Iterator[str]:
    updated = [entry for entry in report["goldens"] if entry["outcome"] in ("added", "changed")]
    if updated:
        kinds = [entry["outcome"] for entry in updated]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        yield f"goldens updated: {counts}"
    settings = report["settings"]
    if settings["gate"] == "known" and not settings["update_golden"] and report["known"]:
        yield from goldens.format_comparison_summary(report["known"]).split("\n")


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
    for model in report["models"]:
        remarks = model.get("remarks")
        yield from (f"{model['name']}: {remark}" for remark in (remarks if isinstance(remarks, list) else ()))
    yield from _profile_remarks(report)
    undecided = [audit for audit in report["audits"] if audit["passed"] is None]
    for check in dict.fromkeys(audit["check"] for audit in undecided):
        details = [audit["detail"] for audit in undecided if audit["check"] == check]
        why = details[0].partition(" (")[0].partition(": ")[0]
        yield f"audit {check} inconclusive in {len(details)} test{'s' * (len(details) > 1)}: {why}"
    yield from describe_deselections(report["deselected"], report["settings"])
    for waiver in report["waivers"]:
        yield f"waive{'d' if waiver['needed'] else 'r not needed:'} {waiver['of']}: {waiver['reason']}"


def _stream_remarks(report: Report) -> Iterator[str]:
    """Times of streamed answers by the number of simultaneous requests, and of whole answers."""
    for table in report["tables"]:
        if table["title"] == STREAM_TIMES:
            of = f" of {table['model']}" if len(report["settings"]["models"]) > 1 else ""
            yield f"times in ms, median (95 % within){of}: {'; '.join(map(format_stream_latency_row, table['rows']))}"


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


def format_id_ranges(ids: Sequence[str]) -> str:
    """``ids``, with three or more consecutive ones as a range.

    >>> format_id_ranges(["EE-1", "EE-2", "EE-3", "EE-5", "EMAD-E1"])
    'EE-1 to EE-3, EE-5, EMAD-E1'
    """
    runs: list[list[str]] = []
    for name in ids:
        if runs and _is_next_id(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _is_next_id(before: str, name: str) -> bool:
    ends = [re.fullmatch(r"(.*?)(\d+)", each) for each in (before, name)]
    if not (ends[0] and ends[1]):
        return False
    return ends[0][1] == ends[1][1] and int(ends[0][2]) + 1 == int(ends[1][2])


MAX_LINES = 40  # lines
Tone = Literal["good", "bad", "open", ""]
TONES: dict[Outcome, Tone] = {"survived": "good", "falsified": "bad", "inconclusive": "open"}


@dataclass(frozen=True)
class DetailLevelSettings:
    """How much is printed.

    ``titled``     outcomes of claims printed with titles; the others with ids and reasons
    ``survivors``  whether to print claims that survived or were measured
    ``reason``     letters of the reason that a claim is not decided, 0 for none
    ``remedies``   whether to print the remedy of an inconclusive claim; never cut
    ``holding``    whether gates that hold show their numbers
    ``points``     number of operating points
    ``failures``   number of reasons for which the run as a whole fails
    """

    titled: Sequence[str]
    survivors: bool
    reason: int
    remedies: bool
    holding: bool
    points: int
    failures: int


NOT_DECIDED = "not decided"  # not applicable and unmeasured claims together
ALL, FALSIFIED = ("falsified", "inconclusive", NOT_DECIDED, "survived", "measured"), ("falsified",)
DETAIL_LEVELS = (
    DetailLevelSettings(ALL, True, 160, True, True, 12, 40),
    DetailLevelSettings(ALL, False, 160, True, True, 6, 40),
    DetailLevelSettings(ALL, False, 90, True, True, 6, 12),
    DetailLevelSettings(ALL, False, 90, True, False, 6, 12),
    DetailLevelSettings(ALL, False, 45, True, False, 4, 6),
    DetailLevelSettings(ALL, False, 0, True, False, 4, 6),
    DetailLevelSettings(FALSIFIED, False, 0, True, False, 4, 6),
    DetailLevelSettings((), False, 0, True, False, 4, 4),
    DetailLevelSettings((), False, 0, False, False, 4, 4),
    DetailLevelSettings((), False, 0, False, False, 1, 2),
)
BROKEN_LETTERS = 240  # letters for one cause of failed tests
GATE_LETTERS = 160  # letters for a gate's measured and required value, and its leg


def format_summary_lines_with_tones(
    brief: RunSummary, width: int, places: Sequence[str] = (), most: int = MAX_LINES
) -> list[tuple[str, Tone]]:
    """(line, tone for a terminal with colours) of the summary: the fullest level that fits ``most`` lines, or the last.

    Lost answers stand in it if that level still fits.

    Args:
        width: letters in a line; only a single longer word runs over.
        places: sentences with the place of the report.
    """
    for level, shown in ((level, each) for level in DETAIL_LEVELS for each in (brief, replace(brief, lost=()))):
        lines = [
            (line, tone)
            for text, indent, tone in _text_parts(shown, level, places)
            for line in _wrapped(text, max(width, 20), indent)
        ]
        if len(lines) <= most:
            break
    return lines


UNIT_SPACE = re.compile(r"(?<=\d) (?=%|nats\b|points?\b)")  # a value and its unit stay on one line
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


def _wrapped(text: str, width: int, indent: str) -> Iterator[str]:
    """Lines of at most ``width`` letters, all but the first indented; only a single longer word runs over."""
    glued = UNIT_SPACE.sub(NO_BREAK_SPACE, text)
    for line in textwrap.wrap(glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False):
        yield line.replace(NO_BREAK_SPACE, " ")


TextPart = tuple[str, str, Tone]  # text, indent of its further lines, tone


def _text_parts(brief: RunSummary, level: DetailLevelSettings, places: Sequence[str]) -> Iterator[TextPart]:
    yield brief.headline, "  ", "open" if brief.passed is None else "good" if brief.passed else "bad"
    for cause in brief.broken[: level.failures]:
        yield f"  {textwrap.shorten(cause, BROKEN_LETTERS, placeholder=' …')}", "    ", "bad"
    if len(brief.broken) > level.failures:
        yield (
            f"  {format_unit_count(len(brief.broken) - level.failures, 'more causes')}: see above or the report",
            "    ",
            "bad",
        )
    if brief.repeat:
        yield f"  to repeat one test alone: {brief.repeat}", "    ", ""
    for failure in brief.failures[: level.failures]:
        yield f"emad: FAILED: {failure}", "  ", "bad"
    if len(brief.failures) > level.failures:
        more = len(brief.failures) - level.failures
        yield f"emad: FAILED: {more} more reason{'s' * (more > 1)}: see -v or the report", "  ", "bad"
    for sentence in brief.unknown:
        yield sentence, "  ", "bad"
    yield from _gate_lines(brief.gates, level)
    if brief.points:
        yield "selected operating points:", "", ""
    for name, facts in list(brief.points.items())[: level.points]:
        yield f"  {name}: {facts}", "    ", ""
    if len(brief.points) > level.points:
        yield f"  {len(brief.points) - level.points} more: see -v or the report", "    ", ""
    for text in brief.lost:
        yield text, "    ", ""
    yield from _rest_lines(brief, level)
    for text in (*brief.record, *brief.about):
        yield text if text in brief.record else f"emad: {text}", "  ", ""
    for place in places:
        yield f"emad: {place}", "  ", ""


def _gate_lines(gates: Sequence[GatingClaimSummary], level: DetailLevelSettings) -> Iterator[TextPart]:
    """Lines of each gate: claim and verdict, then measured and required value, then leg, then remedy."""
    if not gates:
        return
    yield f"gates: {format_gate_counts(gates)}", "  ", ""
    names = max(len(gate.id) for gate in gates)
    indent = " " * (names + 4)
    for gate in gates:
        of = f" ({gate.of})" if gate.of else ""
        yield f"  {gate.id:{names}}  {gate.title}: {gate.verdict}{of}", indent, TONES.get(gate.verdict, "")
        facts = gate.list_detail_texts() if level.remedies else gate.list_detail_texts()[:1]
        for text in facts if level.holding or gate.verdict != "survived" else ():
            whole = text == gate.why
            yield (
                indent + (text if whole else textwrap.shorten(text, GATE_LETTERS, placeholder=" …")),
                f"{indent}  ",
                "",
            )


def format_gate_counts(gates: Sequence[GatingClaimSummary]) -> str:
    """``3 of 5 hold, 2 falsified``."""
    verdicts = [gate.verdict for gate in gates]
    parts = [f"{verdicts.count('survived')} of {len(gates)} hold"]
    parts += [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts) if verdict != "survived"]
    return ", ".join(parts)


def _rest_lines(brief: RunSummary, level: DetailLevelSettings) -> Iterator[TextPart]:
    if not brief.rest:
        return
    counts = {verdict: sum(map(len, groups.values())) for verdict, groups in brief.rest.items()}
    kind = "other claim" if brief.gates else "claim"
    yield (
        f"{sum(counts.values())} {kind}{'s' * (sum(counts.values()) > 1)}: {format_claim_outcome_counts(counts)}",
        "  ",
        "",
    )
    for words, outcomes in (
        ("falsified", ("falsified",)),
        ("inconclusive", ("inconclusive",)),
        (NOT_DECIDED, UNDECIDED),
    ):
        groups = [group for outcome in outcomes for group in brief.rest.get(outcome, {}).items()]  # type: ignore[call-overload]
        if groups:
            more = f". {brief.more}" if brief.more and words == "inconclusive" else ""
            remedy = PARAGRAPH_LETTERS if level.reason >= WHOLE_REASON else REMEDY_LETTERS
            room = (remedy if level.remedies else 0) if words == "inconclusive" else level.reason
            yield f"  {words}: {_list_claims(groups, room, words in level.titled)}{more}", "    ", ""
    if level.survivors:
        for outcome in ("survived", "measured"):
            if kept := brief.rest.get(outcome):
                yield f"  {outcome}: {_list_claims(list(kept.items()), 0, outcome in level.titled)}", "    ", ""
    if level.titled != ALL:
        yield "  what each id claims: -v, the report, docs/claims.md", "    ", ""


def format_claim_outcome_counts(counts: dict[Outcome, int]) -> str:
    """``8 survived, 9 falsified, 5 inconclusive, 6 measured, 8 not decided``."""
    undecided = sum(counts.get(outcome, 0) for outcome in UNDECIDED)
    listed = ("survived", "falsified", "inconclusive", "measured")
    parts = [f"{counts[outcome]} {outcome}" for outcome in listed if outcome in counts]
    return ", ".join(parts + ([f"{undecided} {NOT_DECIDED}"] if undecided else []))


def _list_claims(groups: Sequence[tuple[str, Sequence[tuple[str, str]]]], reason: int, titles: bool) -> str:
    """Lines of the claims of ``groups``, (reason, [(id, title)]); only ids without ``titles``.

    Reasons have at most ``reason`` letters. Three or more claims with the same reason are counted, without titles.
    """
    parts = []
    for whole, claims in groups:
        is_counted = titles and whole and len(claims) > 2
        room = max(reason, COUNTED_LETTERS) if is_counted else reason
        why = textwrap.shorten(whole, room, placeholder=" …") if room and whole else ""
        if titles and not is_counted:
            named = "; ".join(f"{title} ({id})" if title else id for id, title in claims)
        else:
            named = format_id_ranges([id for id, _ in claims])
            named = f"{len(claims)} claims ({named})" if titles else named
        parts.append(f"{named}: {why}" if why else named)
    return "; ".join(parts)


WHOLE_REASON, REMEDY_LETTERS = 160, 40  # a level of such reasons has whole remedies, others so many letters of each
COUNTED_LETTERS = 70  # letters of a reason in place of several titles
PARAGRAPH_LETTERS = 10_000  # Markdown wraps paragraphs by itself
TABLE_LINES = 8  # lines around the table of gates: heading, headline, blanks, table head


def format_ci_job_summary(brief: RunSummary, places: Sequence[str] = ()) -> str:
    """The summary as Markdown, at most forty lines: gates in a table, every other line as a list item.

    Args:
        places: sentences with the place of the report.
    """
    parts = [f"## emad: {escape_markdown(brief.models)}", f"**{escape_markdown(brief.headline)}**"]
    if brief.gates:
        rows = [_gate_row(gate) for gate in brief.gates]
        parts.append(tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True))
    room = MAX_LINES - TABLE_LINES - len(brief.gates)
    _, *rest = format_summary_lines_with_tones(replace(brief, gates=()), PARAGRAPH_LETTERS, places, room)
    items = [("  - " if line.startswith("  ") else "- ") + escape_markdown(line.strip()) for line, _ in rest]
    parts.append("\n".join(items))
    return "\n\n".join(part for part in parts if part) + "\n"


def _gate_row(gate: GatingClaimSummary) -> dict[str, str]:
    claim = f"{gate.id} ({gate.of})" if gate.of else gate.id
    row = {"gate": claim, "claim": gate.title, "verdict": gate.verdict, "found": "; ".join(gate.list_detail_texts())}
    return {key: escape_markdown(text) for key, text in row.items()}
