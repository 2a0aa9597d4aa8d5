"""A comparison as text for a terminal and as Markdown for a pull request; both print the same rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from pytest_emad.accuracy.comparison import AccuracyComparison
from pytest_emad.accuracy.decision import ScoreTest, format_points
from pytest_emad.accuracy.differing_items import DifferingItem
from pytest_emad.report.tables import Cell, Row, escape_markdown, escape_markdown_paragraph, format_text_table
from pytest_emad.statistics.accuracy_power import DetectableDrops
from pytest_emad.statistics.number_format import ABSENT

PROMPT_END, ANSWER_START = 300, 200  # characters that a terminal and Markdown show
DETECTABLE = "tells, %"
# below the first table
LEGEND = (
    "tells: four of five samples of this size show that a true drop of the first number exceeds the margin, or "
    "that one of the second stays below it. −/+: items lost and gained."
)
PARTS = 10  # tasks of a group that a terminal shows
WITHOUT_VERDICT = "tasks of a group, without a verdict of their own"


def score_test_row(test: ScoreTest) -> Row:
    """The line of a test, and of a task of a group; shares in percent."""
    detectable = {} if test.detectable is None else {DETECTABLE: Cell(_detectable_text(test.detectable))}
    verdict = {} if test.detectable is None else {"verdict": Cell(test.leg.outcome)}
    return {
        "task": Cell(test.name or test.task),
        "items": Cell(f"{test.items:,}", test.items),
        **detectable,
        "accuracy, %": Cell(f"{100 * test.base:.1f} → {100 * test.candidate:.1f}", [test.base, test.candidate]),
        "−/+": Cell(f"{test.lost:,}/{test.gained:,}", [test.lost, test.gained]),
        "drop, % [95 %]": Cell(_drop_text(test), test.leg.estimate),
        **verdict,
    }


def _points(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:z.2f}"


def _drop_text(test: ScoreTest) -> str:
    bounds = test.leg.interval
    interval = ABSENT if bounds is None else f"[{', '.join(map(_points, bounds))}]"
    return f"{_points(test.estimate.value)} {interval}"


def _detectable_text(found: DetectableDrops) -> str:
    return f"{_points(found.falsified)} / {_points(found.survived)}"


def side_lines(comparison: AccuracyComparison) -> list[str]:
    """One line for each side: path, form, model."""
    lines = []
    for name, side in (("base", comparison.base), ("candidate", comparison.candidate)):
        facts = ", ".join(part for part in (side.form, side.model) if part)
        lines.append(f"{name}: {side.path} ({facts})")
    return lines


def omission_lines(comparison: AccuracyComparison) -> list[str]:
    """One line for each kind of thing that no verdict uses."""
    return [f"{each.subject}: {each.reason} ({each.count:,})" for each in comparison.omissions]


def reason_lines(comparison: AccuracyComparison) -> list[str]:
    """Why each test that did not survive has its verdict."""
    return [
        f"{test.name}: {test.leg.outcome}; {_reason(test)}"
        for test in comparison.tests
        if test.leg.outcome != "survived"
    ]


def _reason(test: ScoreTest) -> str:
    if test.leg.outcome != "falsified":
        return test.leg.reason
    shown = f"the drop exceeds the margin, p = {test.leg.p_falsify:.2g} alone"
    return "; ".join(part for part in (shown, test.leg.reason) if part)


def verdict_line(comparison: AccuracyComparison) -> str:
    """The verdict of the whole."""
    counts = [
        f"{count} {outcome}"
        for outcome in ("falsified", "inconclusive", "survived")
        if (count := sum(test.leg.outcome == outcome for test in comparison.tests))
    ]
    claim = f"accuracy falls by at most {format_points(comparison.margin)}"
    return f"{comparison.verdict.upper()}: {claim} ({', '.join(counts)})"


def clipped(text: str, length: int, end: bool = False) -> str:
    """``text`` in one line, cut to its first ``length`` characters, or its last ones."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    return f"…{line[-length:]}" if end else f"{line[:length]}…"


def item_heading(item: DifferingItem) -> str:
    where = f"{item.task} ({item.filter})" if item.filter not in ("", "none") else item.task
    lead = "" if item.lead_change is None else f"; the target's lead changed by {item.lead_change:+.3g} nats"
    same = "; both answers are equal, and their scores differ" if item.has_equal_answers and not lead else ""
    return f"{item.change}: {where}, id {item.id}, {item.base_score:g} → {item.candidate_score:g}{lead}{same}"


def _item_lines(number: int, item: DifferingItem, width: int) -> Iterator[str]:
    yield f"{number}. {item_heading(item)}"
    texts = {
        "prompt": clipped(item.candidate.prompt, PROMPT_END, end=True),
        "target": clipped(item.candidate.target, ANSWER_START),
        "base": clipped(item.base.answer, ANSWER_START),
        "candidate": clipped(item.candidate.answer, ANSWER_START),
    }
    for name, text in texts.items():
        first = f"   {name:<10} "
        yield textwrap.fill(text or ABSENT, width, initial_indent=first, subsequent_indent=" " * len(first))


def format_comparison_summary(comparison: AccuracyComparison, width: int, items: int) -> str:
    """The text of a terminal.

    Args:
        width: letters in a line.
        items: number of differing items to show.
    """
    parts = [
        "\n".join(side_lines(comparison)),
        format_text_table([score_test_row(test) for test in comparison.tests], width),
    ]
    parts.append(
        "\n".join(textwrap.fill(line, width) for line in [verdict_line(comparison), *reason_lines(comparison)])
    )
    parts.append(textwrap.fill(LEGEND, width))
    parts += [_parts_table(test, width) for test in comparison.tests if test.parts]
    for heading, lines in (("Left out:", omission_lines(comparison)), ("Notes:", comparison.notes)):
        if lines:
            filled = (textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  ") for line in lines)
            parts.append("\n".join([heading, *filled]))
    shown = comparison.differing_items[:items]
    if shown:
        lines = [line for number, item in enumerate(shown, 1) for line in _item_lines(number, item, width)]
        parts.append("\n".join([_items_heading(comparison, len(shown)), *lines]))
    return "\n\n".join(parts)


def _parts_table(test: ScoreTest, width: int) -> str:
    """The tasks of a group that fell the most."""
    worst = sorted(test.parts, key=lambda part: -part.estimate.value)[:PARTS]
    heading = f"{test.name}: {WITHOUT_VERDICT}"
    if len(worst) < len(test.parts):
        heading += f"; the {len(worst)} of {len(test.parts)} that fell the most, --json and --html have all"
    return f"{heading}\n{format_text_table([score_test_row(part) for part in worst], width)}"


def _items_heading(comparison: AccuracyComparison, shown: int) -> str:
    every = comparison.differing_items
    lost = sum(item.change == "lost" for item in every)
    counted = f"{lost:,} items lost, {len(every) - lost:,} gained"
    return f"{counted}; the first {shown}:" if shown < len(every) else f"{counted}:"


def format_comparison_pull_request(comparison: AccuracyComparison, items: int) -> str:
    """Markdown for a pull request: a heading, a table, and the rest folded."""
    parts = [f"### emad accuracy: {escape_markdown(verdict_line(comparison))}"]
    parts.append("\n".join(f"- {escape_markdown(line)}" for line in side_lines(comparison)))
    parts.append(_markdown_table([score_test_row(test) for test in comparison.tests]))
    parts.append(escape_markdown(LEGEND))
    if reasons := reason_lines(comparison):
        parts.append("\n".join(f"- {escape_markdown_paragraph(line)}" for line in reasons))
    for test in comparison.tests:
        if test.parts:
            heading = f"{test.name}: {len(test.parts)} {WITHOUT_VERDICT}"
            parts.append(_folded(heading, _markdown_table([score_test_row(part) for part in test.parts])))
    if omissions := omission_lines(comparison):
        parts.append(_folded("Left out", "\n".join(f"- {escape_markdown_paragraph(line)}" for line in omissions)))
    if comparison.notes:
        parts.append("\n".join(f"- {escape_markdown_paragraph(line)}" for line in comparison.notes))
    shown = comparison.differing_items[:items]
    if shown:
        parts.append(
            _folded(_items_heading(comparison, len(shown)), _markdown_table([item_row(item) for item in shown]))
        )
    return "\n\n".join(parts) + "\n"


def item_row(item: DifferingItem, prompt_end: int = PROMPT_END, answer_start: int = ANSWER_START) -> Row:
    """A differing item, both answers side by side."""
    return {
        "item": Cell(item_heading(item)),
        "prompt": Cell(clipped(item.candidate.prompt, prompt_end, end=True)),
        "target": Cell(clipped(item.candidate.target, answer_start)),
        "base": Cell(clipped(item.base.answer, answer_start)),
        "candidate": Cell(clipped(item.candidate.answer, answer_start)),
    }


def _folded(heading: str, text: str) -> str:
    return f"<details><summary>{escape_markdown(heading)}</summary>\n\n{text}\n\n</details>"


def _markdown_table(rows: Sequence[Row]) -> str:
    text = [{escape_markdown(key): escape_markdown(cell.text) for key, cell in row.items()} for row in rows]
    table: str = tabulate(text, headers="keys", tablefmt="github", disable_numparse=True)
    return table
