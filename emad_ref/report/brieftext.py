"""The summary as lines of text: at most forty, none wider than the terminal.

``LEVELS`` say in which order things give way where room is short: survivors beside the gates, reasons, then points and
lines on the run. Gates that do not hold keep their numbers, and ids of falsified rows stay at every level: forty lines
may be passed for them alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from emad_ref.report.brief import Brief, Gate, Group, together
from emad_ref.verdict.claims import Outcome
from emad_ref.verdict.gating import UNDECIDED

MOST = 40  # lines
Tone = Literal["good", "bad", "open", ""]
TONES: dict[Outcome, Tone] = {"survived": "good", "falsified": "bad", "inconclusive": "open"}
LEFT_OPEN = "not decided"  # how not applicable and unmeasured rows are called together


@dataclass(frozen=True)
class Line:
    """``tone``: for a terminal that has colours."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Level:
    """How much is said.

    ``survivors``  whether ids of what survived or was measured are named
    ``reason``     letters of a reason, 0 for none
    ``holding``    whether gates that hold show their numbers
    ``few``        points that are shown
    ``failures``   reasons of the run's own to fail
    """

    survivors: bool
    reason: int
    holding: bool
    few: int
    failures: int


LEVELS = (
    Level(True, 160, True, 12, 40),
    Level(True, 90, True, 6, 40),
    Level(False, 90, True, 6, 12),
    Level(False, 50, True, 4, 6),
    Level(False, 0, True, 4, 4),
    Level(False, 0, False, 4, 4),
    Level(False, 0, False, 1, 2),
)
NUMBERS = 100  # letters that hold what any gate found and needs


def lines(brief: Brief, width: int, places: Sequence[str] = (), most: int = MOST) -> list[Line]:
    """The fullest level that ``most`` lines hold, else the shortest.

    Args:
        width: letters in a line; only a word longer than that, say a path, runs over.
        places: where the report lies, one sentence each.
    """
    for level in LEVELS:
        found = [line for part in _parts(brief, level, places) for line in _wrapped(*part, width)]
        if len(found) <= most:
            break
    return found


Part = tuple[str, str, Tone]  # text, what its further lines begin with, tone


def _wrapped(text: str, indent: str, tone: Tone, width: int) -> list[Line]:
    wrapped = textwrap.wrap(
        text, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [Line(line, tone) for line in wrapped]


def _parts(brief: Brief, level: Level, places: Sequence[str]) -> Iterator[Part]:
    yield from _gates(brief.gates, level)
    if brief.points:
        yield "operating points put forward:", "", ""
    for point in brief.points[: level.few]:
        yield f"  {point.name}: {point.said}", "    ", ""
    if len(brief.points) > level.few:
        yield f"  and {len(brief.points) - level.few} more: see -v or the report", "    ", ""
    yield from _rest(brief, level)
    for text in (*brief.record, *brief.about):
        yield text if text in brief.record else f"emad: {text}", "  ", ""
    for failure in brief.failures[: level.failures]:
        yield f"emad: FAILED: {failure}", "  ", "bad"
    if len(brief.failures) > level.failures:
        more = len(brief.failures) - level.failures
        yield f"emad: FAILED: and for {more} more reason{'s' * (more > 1)}: see -v or the report", "  ", "bad"
    for place in places:
        yield f"emad: {place}", "  ", ""


def _gates(gates: Sequence[Gate], level: Level) -> Iterator[Part]:
    if not gates:
        return
    yield f"gates: {counted(gates)}", "  ", ""
    names, words = (max(len(text) for text in texts) for texts in zip(*((g.id, g.verdict) for g in gates), strict=True))
    for gate in gates:
        title = f"{gate.title} ({gate.of})" if gate.of else gate.title
        indent = " " * (names + 4)
        yield f"  {gate.id:{names}}  {gate.verdict:{words}}  {title}", indent + " " * (words + 2), _tone(gate)
        if level.holding or gate.verdict != "survived":
            room = max(level.reason, NUMBERS)
            told = [textwrap.shorten(text, room, placeholder=" …") for text in gate.told if text]
            yield indent + "; ".join(told), indent, ""


def _tone(gate: Gate) -> Tone:
    return TONES.get(gate.verdict, "")


def counted(gates: Sequence[Gate]) -> str:
    """``3 of 5 hold, 2 falsified``."""
    verdicts = [gate.verdict for gate in gates]
    parts = [f"{verdicts.count('survived')} of {len(gates)} hold"]
    parts += [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts) if verdict != "survived"]
    return ", ".join(parts)


def _rest(brief: Brief, level: Level) -> Iterator[Part]:
    if not brief.rest:
        return
    counts = {verdict: sum(len(group.ids) for group in groups) for verdict, groups in brief.rest.items()}
    yield f"{tally(counts)}", "  ", ""
    for words, outcomes in (("falsified", ("falsified",)), ("inconclusive", ("inconclusive",)), (LEFT_OPEN, UNDECIDED)):
        groups = [group for outcome in outcomes for group in brief.rest.get(outcome, ())]  # type: ignore[call-overload]
        if groups:
            more = f" ({brief.more})" if brief.more and words == "inconclusive" else ""
            yield f"  {words}: {_named(groups, level.reason)}{more}", "    ", ""
    if level.survivors:
        for outcome in ("survived", "measured"):
            if kept := brief.rest.get(outcome):
                yield f"  {outcome}: {_named(kept, 0)}", "    ", ""


def tally(counts: dict[Outcome, int]) -> str:
    """``of 36 claims 8 survived, 9 falsified, 5 inconclusive, 6 measured, 8 not decided``."""
    undecided = sum(counts.get(outcome, 0) for outcome in UNDECIDED)
    shown = ("survived", "falsified", "inconclusive", "measured")
    parts = [f"{counts[outcome]} {outcome}" for outcome in shown if outcome in counts]
    parts += [f"{undecided} {LEFT_OPEN}"] if undecided else []
    total = sum(counts.values())
    return f"of {total} claim{'s' * (total > 1)} {', '.join(parts)}"


def _named(groups: Sequence[Group], reason: int) -> str:
    if not reason:
        return together([name for group in groups for name in group.ids])
    return "; ".join(
        together(group.ids) + (f" ({textwrap.shorten(group.why, reason, placeholder=' …')})" if group.why else "")
        for group in groups
    )
