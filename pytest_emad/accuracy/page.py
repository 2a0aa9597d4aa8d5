"""An HTML page of a comparison in the style of the report: one file that fetches nothing and runs no script."""

from __future__ import annotations

from importlib import resources

from pytest_emad.accuracy.comparison import AccuracyComparison
from pytest_emad.accuracy.summary import (
    LEGEND,
    WITHOUT_VERDICT,
    item_heading,
    omission_lines,
    reason_lines,
    score_test_row,
    side_lines,
    verdict_line,
)
from pytest_emad.report.figures import NOT_XML
from pytest_emad.report.page import make_page_environment, read_package_text

MOST_ITEMS = 200  # items of a page, the most instructive first
TONES = {"survived": "good", "falsified": "bad"}


def render_accuracy_page(comparison: AccuracyComparison) -> str:
    """The text of the page.

    Raises:
        MissingExtra: the extra ``report`` is not installed.
    """
    environment = make_page_environment()
    from markupsafe import Markup

    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    items = comparison.differing_items
    text = environment.from_string(template).render(
        css=Markup(read_package_text("page.css")),
        tone=TONES.get(comparison.verdict, ""),
        headline=verdict_line(comparison),
        sides=side_lines(comparison),
        rows=[score_test_row(test) for test in comparison.tests],
        groups=[(test.name, [score_test_row(part) for part in test.parts]) for test in comparison.tests if test.parts],
        legend=LEGEND,
        without_verdict=WITHOUT_VERDICT,
        reasons=reason_lines(comparison),
        omissions=omission_lines(comparison),
        notes=comparison.notes,
        items=[(item_heading(item), item) for item in items[:MOST_ITEMS]],
        count=len(items),
    )
    return NOT_XML.sub("\ufffd", text)
