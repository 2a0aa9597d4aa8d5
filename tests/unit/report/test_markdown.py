"""The Markdown report: verdicts first, every table, and no markup from names."""

from __future__ import annotations

import html
import re

import pytest

from pytest_emad.report.contents import PageFigure, build_report_contents
from pytest_emad.report.markdown import render_markdown_report
from pytest_emad.report.tables import escape_markdown, escape_markdown_paragraph
from tests.unit.report.sample_report import report, verdict


def text_of(*reports: dict, figures=None, remark: str = "") -> str:
    return render_markdown_report(build_report_contents(reports, figures or [{} for _ in reports]), remark)


def cells(line: str) -> list[str]:
    """Return the cells of a line as a reader of Markdown sees them."""
    parts = re.split(r"(?<!\\)\|", line)[1:-1]
    return [html.unescape(re.sub(r"\\(.)", r"\1", part.strip())) for part in parts]


def table_below(text: str, heading: str) -> list[list[str]]:
    lines = text[text.index(f"\n{heading}\n") + len(heading) :].lstrip("\n").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = lines[first:]
    rows = rows[: next((number for number, line in enumerate(rows) if not line.startswith("|")), len(rows))]
    return [cells(line) for number, line in enumerate(rows) if number != 1]


def test_verdicts_come_first_then_claims_points_tables_notes_and_where_it_comes_from():
    text = text_of(report())
    headings = [line for line in text.splitlines() if line.startswith(("# ", "## ", "### "))]
    assert headings == [
        "# Verdicts on m",
        "## Verdicts",
        "## m",
        *(
            f"### {name}"
            for name in ("Gates", "Claims", "Legs", "Operating points", "Tables", "Notes", "Goldens", "Models")
        ),
        "### Settings",
        "### Provenance",
    ]
    assert table_below(text, "## Verdicts") == [
        ["run", "survived", "falsified", "inconclusive", "measured", "not applicable", "unmeasured"],
        ["m", "1", "1", "1", "0", "0", "0"],
    ]


def test_the_text_opens_with_passed_or_failed_and_why_of_each_run():
    found = report()
    found["claims"] = found["claims"][:1]
    text = text_of(found)
    assert text.startswith("# Verdicts on m\n\nFAILED: 1 of 1 gate does not hold\n")
    assert table_below(text, "### Gates")[1][:4] == [
        *("EMAD-F1", "Saving 15 % of FLOPs leaves quality as it was"),
        "m",
        "falsified",
    ]
    both = text_of(found, report("n|x"))
    assert "\n- m: FAILED: 1 of 1 gate does not hold\n- n\\|x: FAILED: 1 of 1" in both


def test_claims_show_what_the_terminal_shows_and_their_legs_follow():
    text = text_of(report())
    head, first, second, third = table_below(text, "### Claims")
    assert head == ["claim", "verdict", "estimate", "[95 %]", "n", "threshold", "unit", "reason"]
    assert first == [
        *("EMAD-F1*", "falsified", "+3.1 %", "[+2.1 %, +4.2 %]", "1,234", "+1.00 %", "relative rise"),
        "1 of 2 legs falsified",
    ]
    assert (second[:2], third[:5]) == (["EMAD-E1", "survived"], ["EMAD-R2", "inconclusive", "–", "–", "–"])
    legs = table_below(text, "#### EMAD-F1 on m")
    assert [leg[:3] for leg in legs[1:]] == [["world:premise", "falsified", "+3.1 %"], ["recall", "unmeasured", "–"]]
    assert "#### EMAD-E1 on m" not in text, "it has no legs"


def test_falsified_is_set_as_survived_is():
    texts = [text_of(report(claims=[verdict(o, legs=(), reason="")])) for o in ("falsified", "survived")]
    rows = [table_below(text, "### Claims")[1] for text in texts]
    assert [cell.replace("falsified", "survived") for cell in rows[0]] == rows[1]


def test_figures_are_linked_or_missed_by_name():
    text = text_of(report(), figures=[{0: PageFigure("m: equal FLOPs", "m-pareto.svg", "<svg/>")}])
    assert "![m: equal FLOPs](m-pareto.svg)" in text
    assert table_below(text, "#### m: equal FLOPs")[1] == ["EMAD", "30.00", "0.40"]
    absent = [{0: PageFigure("m: equal FLOPs", absent="no row has a_b")}]
    assert "No figure: no row has a\\_b" in text_of(report(), figures=absent)


def test_a_remark_stands_below_the_title_and_empty_parts_have_no_heading():
    text = text_of(report(points=[], notes=[], claims=[]), remark="no figures: matplotlib")
    assert text.startswith(
        "# Verdicts on m\n\nPASSED: no claim and no test of this run is a gate\n\n"
        "no figures: matplotlib\n\n## Verdicts\n"
    )
    assert "### Operating points" not in text
    assert "### Notes" not in text
    assert "### Claims" not in text


def test_several_runs_have_an_overview():
    two = report("two", claims=[verdict("survived", model="two")])
    text = text_of(report("one"), two)
    assert ["EMAD-F1", "falsified", "survived"] in [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert text.index("## one") < text.index("## two")


HOSTILE = [
    ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ("a | b", r"a \| b"),
    ("[click](javascript:x)", r"\[click\](javascript:x)"),
    ("![x](http://x)", r"!\[x\](http://x)"),
    ("`code` *b* _i_ ~~s~~ $m$", r"\`code\` \*b\* \_i\_ \~\~s\~\~ \$m\$"),
    ("back\\slash", r"back\\slash"),
    ("&lt;", "&amp;lt;"),
    ("two\nlines\r\nmore\u2028on", "two<br>lines<br>more<br>on"),
    ("heading #", r"heading \#"),
]


@pytest.mark.parametrize(("text", "expected"), HOSTILE)
def test_markup_is_text(text, expected):
    assert escape_markdown(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# heading", r"\# heading"),
        ("- item", r"\- item"),
        ("+ item", r"\+ item"),
        ("=== underline", r"\=== underline"),
        ("1. item", r"1\. item"),
        ("12) item", r"12\) item"),
        ("> quote", "&gt; quote"),
        ("    code", "code"),
        ("2.5 % rise", r"2\.5 % rise"),
        ("plain - text", "plain - text"),
    ],
)
def test_what_begins_a_line_begins_no_block(text, expected):
    assert escape_markdown_paragraph(text) == expected


def test_nothing_in_a_report_becomes_markup():
    hostile = "<img src=x>| `x` **y**\n# z"
    data = report(
        model=hostile,
        claims=[verdict(model=hostile, reason=hostile)],
        tables=[{"title": hostile, "model": hostile, "rows": [{hostile: hostile}]}],
        notes=[hostile],
        settings={hostile: hostile},
    )
    text = text_of(data, remark=hostile)
    assert "<img" not in text
    assert not re.search(r"(?<!\\)[`*#]", re.sub("^#+ ", "", text, flags=re.MULTILINE))
    head, *rows = table_below(text, "### Claims")
    assert {len(row) for row in rows} == {len(head)}, "no cell was split"
    assert "\n# z" not in text
    assert rows[0][-1] == hostile.replace("\n", "<br>")
