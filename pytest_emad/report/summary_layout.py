"""The summary of a run as lines for a terminal, or as Markdown for a job summary: at most forty.

A summary is a list of parts in the order of print. ``SummaryOmission`` lists in one place what gives way, first to
last; each part says which text takes its place then. Ids of falsified claims are printed even in more than forty lines.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from typing import Literal

from tabulate import tabulate

from pytest_emad.report.summary import Claims, FailureCause, GatingClaimSummary, RunSummary, format_gate_counts
from pytest_emad.report.tables import escape_markdown
from pytest_emad.statistics.gate import UNDECIDED
from pytest_emad.statistics.units import format_unit_count
from pytest_emad.statistics.verdicts import FORECAST, Outcome


class SummaryOmission(IntEnum):
    """What gives way for lack of room, first to last."""

    FORECASTS = auto()  # "about 887 items would decide it in four of five samples" becomes "about 887 items"
    SURVIVORS = auto()  # the names of other claims that survived or were measured; their number stays
    UNCOMPARED = auto()  # which known verdicts vary, and which are not compared
    FURTHER_TESTS = auto()  # the names of tests that failed by the cause of another; their number stays
    HOLDING = auto()  # the numbers and models of gates that hold
    INTERVALS = auto()  # of the perplexity of operating points, and their tokens per second
    LONG_REASONS = auto()  # reasons are cut to a few words
    REMARKS = auto()  # about the models, and the option that reads more text
    MANY = auto()  # causes, failures and points after the fourth
    LOST_ANSWERS = auto()
    REASONS = auto()  # of claims that are not decided
    TITLES = auto()  # of other claims that are not falsified; their ids stay
    FALSIFIED_TITLES = auto()  # the ids stay
    REMEDIES = auto()  # of undecided claims, with the places of gates
    MOST = auto()  # causes, failures and points after the first


LISTED = {SummaryOmission.MANY: 4, SummaryOmission.MOST: 1}  # entries of a list that stay
MAX_LINES = 40  # lines
LONG, SHORT = 240, 50  # letters of a reason or cause
Tone = Literal["good", "bad", "open", ""]
TONES: dict[Outcome, Tone] = {"survived": "good", "falsified": "bad", "inconclusive": "open"}


@dataclass(frozen=True)
class SummaryPart:
    """One paragraph of the summary.

    ``indent``   of its further lines.
    ``instead``  the text that takes its place once an omission is made, "" for none; the last one made counts.
    """

    text: str
    tone: Tone = ""
    indent: str = "    "
    instead: Mapping[SummaryOmission, str] = field(default_factory=dict)

    def text_after(self, made: Collection[SummaryOmission]) -> str:
        """The text that is left after the omissions ``made``."""
        last = max((omission for omission in self.instead if omission in made), default=None)
        return self.text if last is None else self.instead[last]


def format_summary_lines_with_tones(
    brief: RunSummary, width: int, places: Sequence[str] = (), most: int = MAX_LINES
) -> list[tuple[str, Tone]]:
    """(line, tone for a terminal with colours) of the summary, in ``most`` lines.

    Args:
        width: letters in a line; only a single longer word runs over.
        places: sentences with the place of the report.
    """
    return _fit(list(_summary_parts(brief, places)), most, max(width, 20))


def _fit(parts: Sequence[SummaryPart], most: int, width: int | None) -> list[tuple[str, Tone]]:
    """The lines of ``parts`` after as many omissions as ``most`` lines need. ``width`` None: a line per part."""
    made: set[SummaryOmission] = set()
    lines = _lines(parts, made, width)
    for omission in SummaryOmission:
        if len(lines) > most:
            made.add(omission)
            lines = _lines(parts, made, width)
    for omission in sorted(made, reverse=True):  # a later one may have made more room than was needed
        fuller = _lines(parts, made - {omission}, width)
        if len(fuller) <= most:
            made.remove(omission)
            lines = fuller
    return lines


def _lines(
    parts: Sequence[SummaryPart], made: Collection[SummaryOmission], width: int | None
) -> list[tuple[str, Tone]]:
    return [
        (line, part.tone)
        for part in parts
        if (text := part.text_after(made))
        for line in ([text] if width is None else _wrapped(text, width, part.indent))
    ]


UNIT_SPACE = re.compile(r"(?<=\d) (?=%|nats\b|points?\b)")  # a value and its unit stay on one line
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


def _wrapped(text: str, width: int, indent: str) -> Iterator[str]:
    """Lines of at most ``width`` letters, all but the first indented; only a single longer word runs over."""
    glued = UNIT_SPACE.sub(NO_BREAK_SPACE, text)
    for line in textwrap.wrap(glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False):
        yield line.replace(NO_BREAK_SPACE, " ")


def _cut(text: str, letters: int = LONG) -> str:
    return textwrap.shorten(text, letters, placeholder=" …")


# ---------------------------------------------------------------- the parts


def _summary_parts(brief: RunSummary, places: Sequence[str]) -> Iterator[SummaryPart]:
    """The parts of the summary in the order of print."""
    yield SummaryPart(brief.headline, "open" if brief.passed is None else "good" if brief.passed else "bad", "  ")
    yield from _listed(
        [list(_cause_parts(cause)) for cause in brief.broken],
        lambda more: f"  {format_unit_count(more, 'more causes')}: see above or the report",
    )
    if brief.repeat:
        yield SummaryPart(f"  to repeat one test alone: {brief.repeat}")
    yield from _listed(
        [[SummaryPart(f"emad: FAILED: {failure}", "bad", "  ")] for failure in brief.failures],
        lambda more: f"emad: FAILED: {format_unit_count(more, 'more reasons')}: see -v or the report",
    )
    yield from (SummaryPart(sentence, "bad", "  ") for sentence in brief.unknown)
    yield from _gate_parts(brief.gates)
    if brief.points:
        yield SummaryPart("selected operating points:")
    yield from _listed(
        [
            [
                SummaryPart(
                    f"  {point.name}: {point.facts}",
                    instead={SummaryOmission.INTERVALS: f"  {point.name}: {point.brief_facts}"},
                )
            ]
            for point in brief.points
        ],
        lambda more: f"  {more} more: see -v or the report",
    )
    yield from (SummaryPart(text, instead={SummaryOmission.LOST_ANSWERS: ""}) for text in brief.lost)
    yield from _rest_parts(brief)
    yield from (SummaryPart(text, indent="  ") for text in brief.record)
    yield from (SummaryPart(text, "", "  ", {SummaryOmission.UNCOMPARED: ""}) for text in brief.uncompared)
    yield from (SummaryPart(f"emad: {text}", "", "  ", {SummaryOmission.REMARKS: ""}) for text in brief.remarks)
    yield from (SummaryPart(f"emad: {text}", indent="  ") for text in (*brief.about, *places))


def _cause_parts(cause: FailureCause) -> Iterator[SummaryPart]:
    """A cause, its first difference, and the further tests that failed by it."""
    yield SummaryPart(f"  {_cut(cause.text)}", "bad")
    if cause.first:
        yield SummaryPart(f"    {_cut(cause.first)}", "bad", "      ")
    for test in cause.further:
        yield SummaryPart(f"    also {test}", "bad", "      ", {SummaryOmission.FURTHER_TESTS: ""})


def _listed(entries: Sequence[Sequence[SummaryPart]], describe_more: Callable[[int], str]) -> Iterator[SummaryPart]:
    """The parts of ``entries``, those after the first few to be left out, and the number of these in their place."""
    for number, entry in enumerate(entries):
        left_out = {each: "" for each, kept in LISTED.items() if number >= kept}
        yield from (replace(part, instead={**part.instead, **left_out}) for part in entry)
    if entries:
        more = {each: describe_more(len(entries) - kept) for each, kept in LISTED.items() if len(entries) > kept}
        yield SummaryPart("", entries[-1][-1].tone, instead=more)


def _gate_parts(gates: Sequence[GatingClaimSummary]) -> Iterator[SummaryPart]:
    """Each gate: claim and verdict, then measured and required value, then leg, then remedy."""
    if not gates:
        return
    yield SummaryPart(f"gates: {format_gate_counts(gates)}", indent="  ")
    names = max(len(gate.id) for gate in gates)
    indent = " " * (names + 4)
    for gate in gates:
        of = f" ({gate.of})" if gate.of else ""
        heading = f"  {gate.id:{names}}  {gate.title}: {gate.verdict}"
        holds, is_lone = gate.verdict == "survived", [each.id for each in gates].count(gate.id) == 1
        instead = {SummaryOmission.HOLDING: heading} if holds and is_lone else {}
        yield SummaryPart(heading + of, TONES.get(gate.verdict, ""), indent, instead)
        instead = (
            {SummaryOmission.HOLDING: ""}
            if holds
            else {SummaryOmission.REMEDIES: indent + _cut(gate.measured, 2 * SHORT)}
        )
        yield SummaryPart(indent + "; ".join(gate.list_detail_texts()), "", f"{indent}  ", instead)


NOT_DECIDED = "not decided"  # not applicable and unmeasured claims together


def _rest_parts(brief: RunSummary) -> Iterator[SummaryPart]:
    if not brief.rest:
        return
    counts = {verdict: sum(map(len, groups.values())) for verdict, groups in brief.rest.items()}
    kind = "other claims" if brief.gates else "claims"
    total = format_unit_count(sum(counts.values()), kind)
    yield SummaryPart(f"{total}: {format_claim_outcome_counts(counts)}", indent="  ")

    def claims_text(words: str, titles: bool = True, letters: int | None = LONG, forecasts: bool = True) -> str:
        outcomes = UNDECIDED if words == NOT_DECIDED else [outcome for outcome in brief.rest if outcome == words]
        groups = [group for outcome in outcomes for group in brief.rest.get(outcome, {}).items()]
        return f"  {words}: {_list_claims(groups, titles, letters, forecasts)}" if groups else ""

    yield SummaryPart(
        claims_text("falsified"), instead={SummaryOmission.FALSIFIED_TITLES: claims_text("falsified", False)}
    )
    inconclusive = {
        SummaryOmission.FORECASTS: claims_text("inconclusive", letters=None, forecasts=False),
        SummaryOmission.LONG_REASONS: claims_text("inconclusive", letters=SHORT, forecasts=False),
        SummaryOmission.TITLES: claims_text("inconclusive", False, SHORT, False),
        SummaryOmission.REMEDIES: claims_text("inconclusive", False, 0),
    }
    yield SummaryPart(claims_text("inconclusive", letters=None), instead=inconclusive)
    if brief.more:
        yield SummaryPart(f"    {brief.more}", instead={SummaryOmission.REMARKS: ""})
    not_decided = {
        SummaryOmission.LONG_REASONS: claims_text(NOT_DECIDED, letters=SHORT),
        SummaryOmission.REASONS: claims_text(NOT_DECIDED, letters=0),
        SummaryOmission.TITLES: claims_text(NOT_DECIDED, False, 0),
    }
    yield SummaryPart(claims_text(NOT_DECIDED), instead=not_decided)
    for outcome in ("survived", "measured"):
        yield SummaryPart(claims_text(outcome), instead={SummaryOmission.SURVIVORS: ""})
    ids = "  what each id claims: -v, the report, docs/claims.md"
    yield SummaryPart("", instead={SummaryOmission.TITLES: ids, SummaryOmission.FALSIFIED_TITLES: ids})


def format_claim_outcome_counts(counts: Mapping[Outcome, int]) -> str:
    """``8 survived, 9 falsified, 5 inconclusive, 6 measured, 8 not decided``."""
    undecided = sum(counts.get(outcome, 0) for outcome in UNDECIDED)
    listed: tuple[Outcome, ...] = ("survived", "falsified", "inconclusive", "measured")
    parts = [f"{counts[outcome]} {outcome}" for outcome in listed if outcome in counts]
    return ", ".join(parts + ([f"{undecided} {NOT_DECIDED}"] if undecided else []))


def _list_claims(groups: Sequence[tuple[str, Claims]], titles: bool, letters: int | None, forecasts: bool) -> str:
    """The claims of ``groups``, (reason, [(id, title)]); only ids without ``titles``.

    Three or more claims with the same reason are counted, with their reason in place of titles.

    Args:
        letters: most letters of a reason, 0 for none; None prints it whole.
        forecasts: whether a number of units that would decide a claim says so.
    """
    parts = []
    for reason, claims in groups:
        is_counted = titles and reason and len(claims) > 2
        room = SHORT if is_counted and letters == 0 else letters
        why = reason if forecasts else reason.removesuffix(f" {FORECAST}")
        why = why if room is None else _cut(why, room) if room else ""
        if titles and not is_counted:
            named = "; ".join(f"{title} ({id})" if title else id for id, title in claims)
        else:
            named = format_id_ranges([id for id, _ in claims])
            named = f"{len(claims)} claims ({named})" if titles else named
        parts.append(f"{named}: {why}" if why else named)
    return "; ".join(parts)


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


# ---------------------------------------------------------------- Markdown


def format_ci_job_summary(brief: RunSummary, places: Sequence[str] = ()) -> str:
    """The summary as Markdown, at most forty lines: gates in a table, every other part as a list item.

    Args:
        places: sentences with the place of the report.
    """
    head = [f"## emad: {escape_markdown(brief.models)}", f"**{escape_markdown(brief.headline)}**"]
    if brief.gates:
        rows = [_gate_row(gate) for gate in brief.gates]
        head.append(tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True))
    text = "\n\n".join(head) + "\n\n"
    _, *parts = _summary_parts(replace(brief, gates=()), places)
    lines = _fit(parts, MAX_LINES - len(text.splitlines()), None)
    items = [f"{'  - ' if line.startswith('  ') else '- '}{escape_markdown(line.strip())}\n" for line, _ in lines]
    return text + "".join(items)


def _gate_row(gate: GatingClaimSummary) -> dict[str, str]:
    claim = f"{gate.id} ({gate.of})" if gate.of else gate.id
    row = {"gate": claim, "claim": gate.title, "verdict": gate.verdict, "found": "; ".join(gate.list_detail_texts())}
    return {key: escape_markdown(text) for key, text in row.items()}
