"""Tables of a run: operating points, claims, legs and recorded tables, as rows of cells and as text for a terminal.

Rows are made from the dictionaries of ``report.json``. Each ``Cell`` holds a text and the value that it shows, and
terminal, Markdown and HTML print the same rows. An absent value shows as "–", never as zero.

``format_text_table`` fits a width: columns of words wrap first, the widest of them, down to ``MIN_WORDS_WIDTH`` letters
or their longest word. Numbers and intervals stay in one piece. A table that is still too wide is cut between columns,
and each part begins with the key columns, by default the first.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from pytest_emad.benchmark.arrivals import AT_ONCE, BETWEEN, FIRST_TOKEN, UNSTREAMED, WHOLE, WITHIN
from pytest_emad.report.figures import EMBEDDED
from pytest_emad.statistics import number_format
from pytest_emad.statistics.gate import UNDECIDED
from pytest_emad.statistics.number_format import ABSENT as ABSENT

STREAM_TIMES = "Times of streamed answers"
COLUMN_GAP = 2  # blanks that tabulate puts between columns
HEADING_GAP = 2  # letters by which tabulate makes a column wider than its heading
MIN_WORDS_WIDTH = 16
DEFAULT_WIDTH = 150  # letters in a line without a terminal


@dataclass(frozen=True)
class Cell:
    """``text`` as shown, with newlines; ``value`` of ``report.json``, None if it is the text or absent."""

    text: str
    value: Any = None


Row = dict[str, Cell]


def format_stream_latency_row(row: Mapping[str, Any]) -> str:
    """``8 at once: first token 12 (15), between tokens 3.1 (4)`` of a row of ``stream_latency_rows``."""
    times = [
        f"{name.removesuffix(', ms')} {row[name]:.3g} ({row[f'{name}{WITHIN}']:.3g})"
        for name in (FIRST_TOKEN, BETWEEN, WHOLE)
        if row.get(name) is not None
    ]
    return f"{row[AT_ONCE]}{'' if row[AT_ONCE] == UNSTREAMED else ' at once'}: {', '.join(times)}"


def format_text_table(rows: Sequence[Row], width: int, keys: int = 1) -> str:
    """``rows``, which share their keys, as text of at most ``width`` letters a line; "" for no rows.

    Only key columns that are wider than ``width`` run over.

    Args:
        keys: number of columns that each part of a wide table begins with.
    """
    if not rows:
        return ""
    columns = list(rows[0])
    parts: list[str] = []
    rest = columns[keys:]
    while rest or not parts:
        part = _fitting_columns(columns[:keys], rest, rows, width)
        parts.append(_render_table(rows, _column_widths(part, rows, width)))
        rest = rest[len(part) - keys :]
    return "\n\n".join(parts)


def _fitting_columns(keys: Sequence[str], rest: Sequence[str], rows: Sequence[Row], width: int) -> list[str]:
    """``keys`` and as many of ``rest`` as fit with all words wrapped, at least one."""
    part = [*keys, *rest[:1]]
    for column in rest[1:]:
        if sum(_min_width(each, rows) for each in (*part, column)) + COLUMN_GAP * len(part) > width:
            break
        part.append(column)
    return part


def _column_widths(columns: Sequence[str], rows: Sequence[Row], width: int) -> dict[str, int]:
    """Letters for each column: the widest shrinkable column shrinks until all fit."""
    widths = {column: _natural_width(column, rows) for column in columns}
    least = {column: _min_width(column, rows) for column in columns}
    while (over := sum(widths.values()) + COLUMN_GAP * (len(columns) - 1) - width) > 0:
        giving = [column for column in columns if widths[column] > least[column]]
        if not giving:
            break
        widest = max(giving, key=lambda column: widths[column])
        second = max((widths[column] for column in giving if column != widest), default=0)
        widths[widest] -= max(1, min(over, widths[widest] - max(second, least[widest])))
    return widths


def _natural_width(column: str, rows: Sequence[Row]) -> int:
    cells = [len(line) for row in rows for line in row[column].text.split("\n")]
    return max(len(column) + HEADING_GAP, *cells)


def _min_width(column: str, rows: Sequence[Row]) -> int:
    """The longest word or number of a column, but at least ``MIN_WORDS_WIDTH`` where the column has so many letters."""
    cells = [row[column] for row in rows]
    pieces = (cell.text.split() if _is_wrapped(cell) else cell.text.split("\n") for cell in cells)
    words = [len(piece) for cell_pieces in pieces for piece in cell_pieces]
    longest = max([len(word) + HEADING_GAP for word in column.split()] + words)
    return max(longest, min(MIN_WORDS_WIDTH, _natural_width(column, rows)))


def _is_wrapped(cell: Cell) -> bool:
    return cell.value is None or isinstance(cell.value, str)


def _render_table(rows: Sequence[Row], widths: dict[str, int]) -> str:
    text = [
        {
            _wrap_lines(column, width - HEADING_GAP): _wrap_lines(row[column].text, width)
            if _is_wrapped(row[column])
            else row[column].text
            for column, width in widths.items()
        }
        for row in rows
    ]
    table: str = tabulate(text, headers="keys", disable_numparse=True)
    return "\n".join(line.rstrip() for line in table.split("\n"))


def _wrap_lines(text: str, width: int) -> str:
    """Wrap each line; words with hyphens, such as ids of claims, stay in one piece."""
    return "\n".join(
        textwrap.fill(line, max(width, 1), break_on_hyphens=False, break_long_words=False) for line in text.split("\n")
    )


def operating_point_rows(points: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per operating point.

    Keys, all optional but ``name``: ``model``, ``roles`` (why it was selected), ``mean_depth``, ``depth_p50``,
    ``depth_p90``, ``gross_reduction`` and ``net_reduction`` (shares of decode FLOPs), ``end_to_end_reduction`` (of a
    timed request, its prompt included), ``perplexity_reference``, ``perplexity``, ``perplexity_rise`` with its
    ``interval`` (fractions), ``accuracy`` (task → [reference, candidate]), ``lost_answers`` (see
    ``lost_answer_rows``), ``not_counted`` (task → why nothing is decided by it), ``time_ratio`` (batch size → full
    depth / adaptive), ``tokens_per_s`` (batch size → new tokens per second of a median request, its prompt included, at
    full depth and at the point), ``peak_memory`` (``bytes`` and ``of``, a counter, or ``why_none``).
    A model column exists if there are several.
    """
    several = len({point.get("model") for point in points}) > 1
    return [
        ({"model": Cell(point.get("model") or ABSENT)} if several else {})
        | {
            "point": Cell("\n".join([point["name"], *(point.get("roles") or ())]), point["name"]),
            "depth": Cell(number_format.format_digits(point.get("mean_depth"), ".2f"), point.get("mean_depth")),
            "P50/P90": Cell(
                "/".join(number_format.format_digits(point.get(key), "g") for key in ("depth_p50", "depth_p90")),
                [point.get("depth_p50"), point.get("depth_p90")],
            ),
            "FLOPs gross": Cell(
                number_format.format_reduction_as_change(point.get("gross_reduction")), point.get("gross_reduction")
            ),
            "net": Cell(
                number_format.format_reduction_as_change(point.get("net_reduction")), point.get("net_reduction")
            ),
            "end to end": Cell(
                number_format.format_reduction_as_change(point.get("end_to_end_reduction")),
                point.get("end_to_end_reduction"),
            ),
            "perplexity": Cell(_perplexity_text(point), [point.get("perplexity_reference"), point.get("perplexity")]),
            "rise [95 %]": Cell(_rise_text(point), [point.get("perplexity_rise"), point.get("interval")]),
            "accuracy": Cell(_accuracy_text(point), point.get("accuracy")),
            "speed": Cell("\n".join(list_speed_texts(point, "batch {}: {}")) or ABSENT, point.get("time_ratio")),
        }
        for point in points
    ]


def lost_answer_rows(points: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per shown item that full depth answers right and a point does not; of each point the worst task first.

    ``lost_answers`` of a point: task → {"count": all such items, "first": [{"prompt", "full_depth", "at_point": the
    answers, "depths": of each token of the latter, [] if unknown}]}.
    """
    several = len({point.get("model") for point in points}) > 1
    return [
        ({"model": Cell(point.get("model") or ABSENT)} if several else {})
        | {
            "task": Cell(f"{task} ({number} of {lost['count']} lost)"),
            "prompt, its end": Cell(one["prompt"]),
            "full depth": Cell(one["full_depth"]),
            "at the point": Cell(one["at_point"]),
            "depths": Cell(" ".join(map(str, one["depths"])) or ABSENT),
            "point": Cell(point["name"]),
        }
        for point in points
        for task, lost in sorted((point.get("lost_answers") or {}).items(), key=lambda each: -each[1]["count"])
        for number, one in enumerate(lost["first"], 1)
    ]


def claim_rows(claims: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per verdict (``Verdict.to_json()``), with the model if there are several.

    A ``*`` after the id marks a gating row.
    """
    several = len({claim["model"] for claim in claims}) > 1
    return [
        {"claim": Cell(claim["id"] + ("*" if claim["gate"] else ""))}
        | ({"model": Cell(claim["model"])} if several else {})
        | {"verdict": Cell(claim["verdict"])}
        | _estimate_cells(claim)
        for claim in claims
    ]


def leg_rows(legs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per leg of a verdict (``Leg.to_json()``), with its unadjusted one-sided p-values."""
    return [
        {"leg": Cell(leg["name"]), "outcome": Cell(leg["outcome"])}
        | _estimate_cells(leg)
        | {
            f"p {side}": Cell(number_format.format_digits(leg[f"p_{side}"], ".2g"), leg[f"p_{side}"])
            for side in ("falsify", "survive")
        }
        for leg in legs
    ]


def _estimate_cells(result: Mapping[str, Any]) -> Row:
    unit = result["unit"]
    return {
        "estimate": Cell(number_format.format_value(result["estimate"], unit, result["interval"]), result["estimate"]),
        "[95 %]": Cell(number_format.format_interval(result["interval"], unit), result["interval"]),
        "n": Cell(number_format.format_count_or_dash(result["n"]), result["n"]),
        "threshold": Cell(number_format.format_value(result["threshold"], unit), result["threshold"]),
        "unit": Cell(unit),
        "reason": Cell(result["reason"]),
    }


def to_cell_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Each value as a ``Cell``: floats to four digits, values under keys that end in " %" as shares in percent.

    Columns named "interval" hold [low, high].
    """
    return [{key: _plain_cell(key, value) for key, value in row.items()} for row in rows]


def format_points_table(points: Sequence[Mapping[str, Any]], width: int = DEFAULT_WIDTH) -> str:
    """``operating_point_rows`` for a terminal of ``width`` letters; an empty string for none."""
    return format_text_table(operating_point_rows(points), width)


def format_claims_table(claims: Sequence[Mapping[str, Any]], width: int = DEFAULT_WIDTH) -> str:
    """``claim_rows`` for a terminal; undecided claims that share a reason share a row. An empty string for none."""
    return format_text_table(claim_rows(_fold_undecided(claims)), width)


def format_plain_table(rows: Sequence[Mapping[str, Any]], width: int = DEFAULT_WIDTH, keys: int = 1) -> str:
    """``to_cell_rows`` for a terminal, ``keys`` as in ``format_text_table``; an empty string for none."""
    return format_text_table(to_cell_rows(rows), width, keys)


def format_section_titles_and_texts(
    points: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, Any]],
    claims: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    width: int = DEFAULT_WIDTH,
) -> list[tuple[str, str]]:
    """(title, text) of each section of a run, in order, without empty ones and tables that only the page shows.

    ``tables``: ``{"title", "model", "rows"}`` each, as ``report.json`` holds them. ``width``: letters in a line.
    """
    candidates = [
        ("emad operating points", format_points_table(points, width)),
        ("emad lost answers", format_text_table(lost_answer_rows(points), width)),
        *(
            (f"{table['model']}: {table['title']}", format_plain_table(table["rows"], width))
            for table in tables
            if table.get("figure") not in EMBEDDED
        ),
        ("emad claims", format_claims_table(claims, width)),
        ("emad notes", "\n".join(format_note_list_item(note, width) for note in notes)),
    ]
    return [(title, text) for title, text in candidates if text]


def _fold_undecided(claims: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Claims, with undecided ones of one model and reason that do not gate joined to one row."""
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for number, claim in enumerate(claims):
        alone = claim["gate"] or claim["verdict"] not in UNDECIDED
        groups.setdefault(number if alone else (claim["model"], claim["verdict"], claim["reason"]), []).append(claim)
    return [
        group[0] if len(group) == 1 else {**group[0], "id": ", ".join(claim["id"] for claim in group), "unit": ABSENT}
        for group in groups.values()
    ]


def format_note_list_item(note: str, width: int = DEFAULT_WIDTH) -> str:
    """A note as a list item."""
    return textwrap.fill(note, width, initial_indent="- ", subsequent_indent="  ", break_long_words=False)


def _plain_cell(key: str, value: Any) -> Cell:
    text = _plain_text(key, value)
    return Cell(text, None if text == value else value)


def _plain_text(key: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain_text(key, part) for part in value)}]"
    if isinstance(value, float):
        percent = key.endswith(" %")
        if percent and "rise" in key and value >= number_format.TENFOLD:
            return number_format.format_percent(value)
        scaled = 100 * value if percent else value
        # a percentage of a million and more is written with a power of ten, as `number_format.format_percent` writes it
        return f"{scaled:z.2f}" if percent and abs(value) < number_format.VAST else f"{scaled:z.4g}"
    return ABSENT if value is None else str(value)


def _perplexity_text(point: Mapping[str, Any]) -> str:
    reference, value = (point.get(key) for key in ("perplexity_reference", "perplexity"))
    return number_format.format_before_and_after(reference, value)


def _rise_text(point: Mapping[str, Any]) -> str:
    rise, interval = point.get("perplexity_rise"), point.get("interval")
    if rise is None or interval is None:
        return number_format.format_percent(rise)
    value = number_format.format_value(rise, "relative rise", interval)
    return f"{value} {number_format.format_interval(interval, 'relative rise')}"


def _accuracy_text(point: Mapping[str, Any]) -> str:
    """One line per task, and below it the reason why the task does not count."""
    accuracy, why = point.get("accuracy"), point.get("not_counted") or {}
    if not accuracy:
        return ABSENT
    return "\n".join(
        f"{task} {number_format.format_before_and_after(reference, candidate, '.3f')}"
        + (f"\n({why[task]})" if task in why else "")
        for task, (reference, candidate) in accuracy.items()
    )


def list_speed_texts(point: Mapping[str, Any], form: str, *, whole: bool = True) -> list[str]:
    """``form`` with each timed batch size and its speed; if ``whole``, also the rate: ``1.05× (204 tokens/s)``.

    Then also the peak memory of all of them.
    """
    rates = (point.get("tokens_per_s") if whole else None) or {}
    peak = (point.get("peak_memory") if whole else None) or {}
    texts = [
        form.format(rows, number_format.format_ratio(ratio))
        + (f" ({number_format.format_digits(rates[rows][1], '.3g')} tokens/s)" if rows in rates else "")
        for rows, ratio in (point.get("time_ratio") or {}).items()
    ]
    return [*texts, number_format.format_peak_memory(peak["bytes"], peak["of"])] if texts and "bytes" in peak else texts


ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
INLINE = re.compile(r"([\\`*_\[\]|~$#])")
LINE_MARKER = re.compile(r"^(\d*)([+=.)-])")  # starts a list or underlines a heading at the beginning of a line
LINE_BREAKS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def escape_markdown(text: str) -> str:
    """``text`` such that Markdown shows it unchanged within a line; line breaks become ``<br>``."""
    return "<br>".join(_escape_line(line) for line in LINE_BREAKS.split(text))


def escape_markdown_paragraph(text: str) -> str:
    """``escape_markdown`` for text at the beginning of a line."""
    return LINE_MARKER.sub(r"\1\\\2", escape_markdown(text))


def _escape_line(line: str) -> str:
    for letter, entity in ENTITIES.items():
        line = line.replace(letter, entity)
    return INLINE.sub(r"\\\1", line.strip())
