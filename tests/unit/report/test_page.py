"""The page: every value of report.json, nothing from elsewhere, no markup that anybody else wrote."""

from __future__ import annotations

import hashlib
import sys
from base64 import b64encode
from xml.etree import ElementTree

import pytest

from emad_ref.report.contents import report_contents
from emad_ref.report.page import PageMissing, draw_figures, inline_svg, package_text, page
from emad_ref.statistics.verdicts import load_register
from tests.unit.report.sample import LEGS, PARETO, report, verdict
from tests.unit.report.shown import Page

pytest.importorskip("jinja2", reason="the extra `report` is not installed")

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\' & </td></table>{{ 7 * 7 }}'


def page_of(*reports: dict, remark: str = "") -> str:
    figures, _ = draw_figures(reports)
    return page(report_contents(reports, figures), remark)


def shown(*reports: dict) -> Page:
    return Page(page_of(*reports))


def test_values_are_those_of_the_report_to_the_last_digit():
    data = report()
    found = shown(data)
    for row, claim in zip(found.named("claims"), data["claims"], strict=True):
        assert row["claim"].text == claim["id"] + "*" * claim["gate"]
        assert row["verdict"].text == claim["verdict"]
        assert (row["unit"].text, row["reason"].text) == (claim["unit"], claim["reason"])
        for column, key in (("estimate", "estimate"), ("[95 %]", "interval"), ("n", "n"), ("threshold", "threshold")):
            assert row[column].values == ([] if claim[key] is None else [claim[key]])
    (point,) = found.named("operating points")
    given = data["points"][0]
    assert point["depth"].values == [given["mean_depth"]]
    assert point["rise [95 %]"].values == [[given["perplexity_rise"], given["interval"]]]
    assert point["accuracy"].values == [given["accuracy"]]
    drawn = found.named("m: equal FLOPs")
    assert [row["net reduction %"].values for row in drawn] == [[row["net reduction %"]] for row in PARETO]
    assert [row["family"].text for row in drawn] == [row["family"] for row in PARETO]


def test_values_are_shown_rounded_as_in_the_terminal_and_absent_ones_as_a_dash():
    found = shown(report())
    first, _, absent = found.named("claims")
    assert (first["estimate"].text, first["[95 %]"].text, first["n"].text) == ("+3.12 %", "[+2.11 %, +4.19 %]", "1,234")
    assert (absent["estimate"].text, absent["estimate"].values, absent["n"].text) == ("–", [], "–")


def test_every_leg_is_there_folded_away_below_its_claim():
    found = shown(report())
    legs = found.named("legs of EMAD-F1 on m")
    assert [(row["leg"].text, row["outcome"].text) for row in legs] == [(leg.name, leg.outcome) for leg in LEGS]
    assert legs[0]["p falsify"].values == [0.00012]
    assert legs[0]["[95 %]"].values == [[0.0211, 0.0419]]
    tags = [tag for tag, _ in found.tags]
    assert tags.count("details") == 3 + 2, "one per claim and per table, folded: none is open"
    assert not any("open" in attrs for tag, attrs in found.tags if tag == "details")


def test_a_claim_is_told_in_the_registers_words_where_it_has_them():
    text = page_of(report(claims=[verdict(), verdict(claim="OWN-1")]))
    assert load_register()["EMAD-F1"].title in text
    assert "OWN-1 on m (2 legs)" in text


def test_falsified_is_set_as_survived_is():
    """Only the word differs, and how many of each there are: no style can tell outcomes apart."""
    pages = [
        page_of(report(claims=[verdict(outcome, legs=(), reason="all legs")])) for outcome in ("falsified", "survived")
    ]
    rows = [
        [line for line in text.splitlines() if f"<td>{outcome}</td>" in line]
        for text, outcome in zip(pages, ("falsified", "survived"), strict=True)
    ]
    assert rows[0]
    assert [line.replace("falsified", "survived") for line in rows[0]] == rows[1]
    attributes = [str(value) for text in pages for _, attrs in Page(text).tags for value in attrs.values()]
    assert not [value for value in attributes if "falsified" in value or "survived" in value]


def test_verdicts_come_first_and_all_are_counted():
    text = page_of(report())
    (counts,) = Page(text).named("how many of each outcome")
    assert {name: cell.text for name, cell in counts.items()} == {
        "run": "m",
        "survived": "1",
        "falsified": "1",
        "inconclusive": "1",
        "measured": "0",
        "not applicable": "0",
        "unmeasured": "0",
    }
    order = ["Verdicts</h2>", "Claims</h3>", "Operating points</h3>", "Tables</h3>", "Notes</h3>", "Provenance</h3>"]
    places = [text.index(heading) for heading in order]
    assert places == sorted(places)


def test_settings_and_provenance_are_shown():
    found = shown(report())
    facts = {
        row["name"].text: row["value"] for label in ("Models", "Settings", "Provenance") for row in found.named(label)
    }
    assert facts["versions"].text == "torch 2.11\nnumpy 2.1"
    assert facts["versions"].values == [{"torch": "2.11", "numpy": "2.1"}]
    assert facts["tasks"].text == "recall, count"
    assert facts["commit"].text == facts["margin"].text == "–"
    assert facts["m: fingerprint"].text == "f00d"


def test_nothing_is_fetched_and_no_script_runs_but_the_one_that_the_policy_names():
    text = page_of(report())
    found = Page(text)
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in found.tags}
    assert found.scripts == [package_text("page.js")]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert all(
        str(attrs[name]).startswith("#")
        for _, attrs in found.tags
        for name in ("src", "href", "xlink:href")
        if name in attrs
    )
    (policy,) = [attrs["content"] for tag, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    digest = b64encode(hashlib.sha256(found.scripts[0].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "@import" not in text
    assert "url(http" not in text


def test_what_others_wrote_is_text():
    """The parser sees no tag, no attribute and no template that a name brought in, and reads every name unchanged."""
    rows = [{"family": HOSTILE, "net reduction %": 0.1, "rise %": 0.1, HOSTILE: HOSTILE}]
    hostile = {
        "models": [{"name": HOSTILE, HOSTILE: HOSTILE}],
        "claims": [verdict(model=HOSTILE, reason=HOSTILE), verdict("survived", "EMAD-E1", "plain")],
        "points": [{"name": HOSTILE, "model": HOSTILE}],
        "tables": [{"title": HOSTILE, "model": HOSTILE, "rows": rows, "figure": "pareto"}],
        "goldens": [{"id": HOSTILE, "outcome": HOSTILE}],
        "notes": [HOSTILE],
        "settings": {HOSTILE: [HOSTILE]},
        "provenance": {HOSTILE: {HOSTILE: HOSTILE}},
    }
    text = page_of(report(**hostile), report(**hostile), remark=HOSTILE)
    found = Page(text)
    tags = [tag for tag, _ in found.tags]
    assert found.scripts == [package_text("page.js")]
    assert "img" not in tags
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert found.open == [], "every element is closed"
    assert "49" not in found.text
    assert found.text.count(HOSTILE) >= 4, "title, remark, run, note"
    assert found.named("claims")[0]["reason"].text == HOSTILE
    assert f"{HOSTILE}: {HOSTILE}" in found.tables


def test_figures_are_inside_with_ids_of_their_own():
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    table = {"title": "equal FLOPs", "model": "m", "rows": PARETO, "figure": "pareto"}
    found = shown(report(tables=[table, table | {"title": "again"}]))
    drawings = [attrs for tag, attrs in found.tags if tag == "svg" and attrs.get("role") == "img"]
    assert [attrs["aria-label"] for attrs in drawings] == ["m: equal FLOPs", "m: again"]
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    used = {str(attrs["xlink:href"])[1:] for _, attrs in found.tags if "xlink:href" in attrs}
    assert used
    assert used <= set(ids), "marks are found where they are used"


def test_references_follow_the_ids_and_labels_stay_as_they_are():
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"><metadata>x</metadata>'
        '<path id="a" clip-path="url(#b)"/><use xlink:href="#a"/><text>id="a" url(#b) &lt;b&gt;</text></svg>'
    )
    root = ElementTree.fromstring(inline_svg(svg, "f1", "what it shows"))
    path, use, text = list(root)
    assert path.attrib == {"id": "f1-a", "clip-path": "url(#f1-b)"}
    assert list(use.attrib.values()) == ["#f1-a"]
    assert text.text == 'id="a" url(#b) <b>'
    assert (root.get("role"), root.get("aria-label")) == ("img", "what it shows")


def test_several_runs_are_laid_side_by_side_and_apart():
    one, two = report("one"), report("two")
    two["claims"] = [verdict("survived", model="two"), verdict("measured", model="pair")]
    two["claims"].append(verdict("measured", "EAD-H1", model="pair"))
    found = shown(one, two, report("one", claims=[]))
    rows = [{name: cell.text for name, cell in row.items()} for row in found.named("claims and runs")]
    assert rows == [
        {"claim by run": "EMAD-F1", "one (1)": "falsified", "two": "two: survived\npair: measured", "one (2)": "–"},
        {"claim by run": "EMAD-E1", "one (1)": "survived", "two": "–", "one (2)": "–"},
        {"claim by run": "EMAD-R2", "one (1)": "inconclusive", "two": "–", "one (2)": "–"},
        {"claim by run": "EAD-H1", "one (1)": "–", "two": "pair: measured", "one (2)": "–"},
    ]
    assert [row["run"].text for row in found.named("how many of each outcome")] == ["one (1)", "two", "one (2)"]
    links = [attrs["href"] for tag, attrs in found.tags if tag == "a" and attrs["href"] != "#main"]
    assert links == ["#run-1", "#run-2", "#run-3"]
    assert set(links) <= {f"#{attrs['id']}" for _, attrs in found.tags if "id" in attrs}


def test_an_empty_report_is_a_page_all_the_same():
    bare = {"schema": 1, "settings": {}, "provenance": {}}
    bare |= {part: [] for part in ("models", "points", "claims", "tables", "goldens", "notes")}
    found = shown(bare)
    assert "Verdicts on no model" in found.text
    assert [row["survived"].text for row in found.named("how many of each outcome")] == ["0"]


def test_a_figure_without_numbers_says_so():
    rows = [{"decoding": "foreign", "score": 0.5, "MFLOPs per token": None}]
    table = {"title": "t", "model": "m", "rows": rows, "figure": "score against cost"}
    assert "No figure: no row has MFLOPs per token" in shown(report(tables=[table])).text


def test_what_sets_the_page_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(PageMissing, match=r"pip install 'pytest-emad\[report\]'"):
        page(report_contents([report()], [{}]))


def test_in_a_run_of_several_models_every_verdict_names_its_own():
    both = report("one", models=[{"name": "one"}, {"name": "two"}])
    rows = shown(both, report("three")).named("claims and runs")
    assert [row["one, two"].text for row in rows] == ["one: falsified", "one: survived", "one: inconclusive"]
