"""``index.html``: every value of report.json, texts by token, no external resource, no markup from names."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from xml.etree import ElementTree

import pytest

from emad_ref.errors import MissingExtra
from pytest_emad.report.contents import build_report_contents
from pytest_emad.report.depth_explorer import build_depth_explorers, depth_shade_index, has_matching_lists
from pytest_emad.report.markdown import render_markdown_report
from pytest_emad.report.page import (
    inline_svg,
    read_package_text,
    render_figures_and_remark,
    render_html_page,
)
from pytest_emad.statistics.verdicts import Leg, load_register
from tests.unit.report.html_page import Page
from tests.unit.report.sample_report import (
    LEGS,
    MARGINS,
    MOVING,
    PARETO,
    SAVING,
    TOKENS,
    foreign_report,
    report,
    verdict,
)

pytest.importorskip("jinja2", reason="the extra `report` is not installed")

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\' & </td></table>{{ 7 * 7 }}'
MARKUP = '</script><script>alert(1)</script><b onfocus="x">\' & {{ 7 * 7 }}'


def page_of(*reports: dict, remark: str = "") -> str:
    figures, _ = render_figures_and_remark(reports)
    return render_html_page(build_report_contents(reports, figures), remark)


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
    assert (first["estimate"].text, first["[95 %]"].text, first["n"].text) == ("+3.1 %", "[+2.1 %, +4.2 %]", "1,234")
    assert (absent["estimate"].text, absent["estimate"].values, absent["n"].text) == ("–", [], "–")


def test_every_leg_is_there_folded_away_below_its_claim():
    found = shown(report())
    legs = found.named("legs of EMAD-F1 on m")
    assert [(row["leg"].text, row["outcome"].text) for row in legs] == [(leg.name, leg.outcome) for leg in LEGS]
    assert legs[0]["p falsify"].values == [0.00012]
    assert legs[0]["[95 %]"].values == [[0.0211, 0.0419]]
    folded = [attrs for tag, attrs in found.tags if tag == "details"]
    assert sum(attrs.get("class") != "part" for attrs in folded) == 3 + 2, "one per claim and per table"
    assert not any("open" in attrs for attrs in folded)


def test_the_page_opens_with_the_verdict_in_a_word_and_a_colour():
    failed, passed = report(), report(claims=[verdict("survived")])
    failed["claims"] = [verdict("falsified")]
    for found, tone, word in ((failed, "bad", "FAILED: 1 of 1 gate"), (passed, "good", "PASSED: 1 of 1 gate holds")):
        text = page_of(found)
        assert f'<p class="overall {tone}">{word}' in text
        assert text.index('class="overall') < text.index("<h3>Gates</h3>")


def test_causes_of_failed_tests_come_before_the_gates_on_both_pages():
    found = report(claims=[verdict("survived")]) | {"state": "complete", "audits": []}
    reasons = [f"Failed: {word} <went> wrong" for word in "abcdefghi"]
    found["tests"] = [{"nodeid": f"a.py::test_{i}", "outcome": "failed", "reason": r} for i, r in enumerate(reasons)]
    text = page_of(found)
    assert text.index("<strong>Failed:</strong> 1 test: a &lt;went&gt; wrong</p>") < text.index("<h3>Gates</h3>")
    assert "<summary>1 more cause</summary><ul><li>1 test: i &lt;went&gt; wrong</li></ul>" in text
    assert "- 1 test: a &lt;went&gt; wrong\n" in render_markdown_report(build_report_contents([found], [{}]))


def test_every_part_below_the_figures_is_folded_and_named_in_the_contents():
    found = shown(report())
    parts = {attrs["id"] for tag, attrs in found.tags if tag == "details" and attrs.get("class") == "part"}
    links = {attrs["href"][1:] for tag, attrs in found.tags if tag == "a" and attrs["href"].startswith("#run-")}
    assert {"run-1-claims", "run-1-points", "run-1-tables", "run-1-notes", "run-1-provenance"} <= parts <= links


def test_on_a_phone_every_cell_carries_its_column():
    found = shown(report())
    cells = [attrs for tag, attrs in found.tags if tag == "td" and "colspan" not in attrs]
    assert cells
    assert all(attrs.get("data-name") for attrs in cells)


def test_a_claim_is_told_in_the_registers_words_where_it_has_them():
    text = page_of(report(claims=[verdict(), verdict(claim="OWN-1")]))
    assert load_register()["EMAD-F1"].title in text
    assert "OWN-1 on m (2 legs)" in text


def test_falsified_is_set_as_survived_is():
    """Only the word and the counts differ: no style distinguishes outcomes."""
    pages = [
        page_of(report(claims=[verdict(outcome, legs=(), reason="all legs")])) for outcome in ("falsified", "survived")
    ]
    rows = [
        [line for line in text.splitlines() if f">{outcome}</td>" in line]
        for text, outcome in zip(pages, ("falsified", "survived"), strict=True)
    ]
    assert rows[0]
    assert [line.replace("falsified", "survived") for line in rows[0]] == rows[1]
    tags = [tag for text in pages for tag in Page(text).tags]
    attributes = [str(value) for _, attrs in tags for name, value in attrs.items() if name != "data-name"]
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
    assert facts["versions"].text == "pytest-emad 0.2\ntorch 2.11\nnumpy 2.1"
    assert facts["versions"].values == [{"pytest-emad": "0.2", "torch": "2.11", "numpy": "2.1"}]
    assert facts["tasks"].text == "recall, count"
    assert facts["commit"].text == facts["margin"].text == "–"
    assert facts["m: fingerprint"].text == "f00d"


def test_nothing_is_fetched_and_no_script_runs_but_the_one_that_the_policy_names():
    text = page_of(report())
    found = Page(text)
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in found.tags}
    assert found.scripts == [read_package_text("page.js")]
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
    """The parser sees no tag, attribute or template from a name, and reads every name unchanged."""
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
    assert found.scripts == [read_package_text("page.js")]
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
    found = shown(report(points=[], tables=[table | {"model": "n"}, table | {"model": "n", "title": "again"}]))
    drawings = [attrs for tag, attrs in found.tags if tag == "svg" and attrs.get("role") == "img"]
    assert [attrs["aria-label"] for attrs in drawings] == ["n: equal FLOPs", "n: again"]
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    used = {str(attrs["xlink:href"])[1:] for _, attrs in found.tags if "xlink:href" in attrs}
    assert used
    assert used <= set(ids), "marks are found where they are used"


def test_a_figure_keeps_the_size_of_its_letters_on_a_phone_and_scrolls():
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    table = {"title": "equal FLOPs", "model": "m", "rows": PARETO, "figure": "pareto"}
    found = shown(report(points=[], tables=[table]))
    figures = [attrs for _, attrs in found.tags if attrs.get("aria-label", "").endswith("a figure that may scroll")]
    assert figures
    assert all((figure["class"], figure["tabindex"]) == ("wide", "0") for figure in figures)
    narrow = read_package_text("page.css").partition("@media (max-width: 46rem)")[2].partition("\n}")[0]
    assert "figure svg { max-width: none }" in narrow


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
    links = [
        attrs["href"]
        for tag, attrs in found.tags
        if tag == "a" and attrs["href"].startswith("#run-") and attrs["href"].count("-") == 1
    ]
    assert links == ["#run-1", "#run-2", "#run-3"]
    assert set(links) <= {f"#{attrs['id']}" for _, attrs in found.tags if "id" in attrs}


def test_an_empty_report_is_a_page_all_the_same():
    parts = ("models", "points", "claims", "tables", "goldens", "notes")
    bare = report(settings={"models": []}, **{part: [] for part in parts})
    found = shown(bare)
    assert "Verdicts on no model" in found.text
    assert [row["survived"].text for row in found.named("how many of each outcome")] == ["0"]


def test_a_figure_without_numbers_says_so():
    rows = [{"decoding": "foreign", "score": 0.5, "MFLOPs per token": None}]
    table = {"title": "t", "model": "m", "rows": rows, "figure": "score against cost"}
    assert "No figure: no row has MFLOPs per token" in shown(report(tables=[table])).text


def test_what_sets_the_page_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pytest-emad\[report\]'"):
        render_html_page(build_report_contents([report()], [{}]))


def test_in_a_run_of_several_models_every_verdict_names_its_own():
    both = report("one", models=[{"name": "one"}, {"name": "two"}])
    rows = shown(both, report("three")).named("claims and runs")
    assert [row["one, two"].text for row in rows] == ["one: falsified", "one: survived", "one: inconclusive"]


def parsed_page(*reports: dict, **given) -> Page:
    return Page(render_html_page(build_report_contents(reports, [{} for _ in reports]), **given))


def elements(found: Page, **wanted: str) -> list[dict]:
    return [attrs for _, attrs in found.tags if all(attrs.get(name) == value for name, value in wanted.items())]


def tokens(found: Page) -> list[dict]:
    return [attrs for tag, attrs in found.tags if tag == "button" and "token" in str(attrs.get("class")).split()]


# ---------------------------------------------------------------- numbers equal the replay's


def test_the_page_holds_every_margin_and_every_depth_as_the_table_has_them():
    (data,) = parsed_page(report(tables=MOVING)).data
    assert [stop["name"] for stop in data["stops"]] == [row["point"] for row in MARGINS]
    assert [token["depth"] for token in data["tokens"]] == [row["depths"] for row in TOKENS]
    assert data["stops"][1]["dials"] == ["3.00 layers", "20.0 %", "8.04", "+0.50 %", "[+0.40 %, +0.60 %]"]
    assert data["stops"][0]["dials"][-1] == "–", "full depth has no interval"


def test_a_margin_that_is_an_operating_point_has_the_interval_of_that_point():
    point = {"model": "m", "corpus": "text", "margin_nats": 0.0, "interval": (0.021, 0.043)}
    found = report(tables=MOVING)
    found["points"] = [
        {**found["points"][0], **point},
        {**found["points"][0], **point, "corpus": "other", "interval": (0, 1)},
    ]
    (data,) = parsed_page(found).data
    assert [stop["dials"][-1] for stop in data["stops"]] == ["–", "[+0.40 %, +0.60 %]", "[+2.1 %, +4.3 %]"]
    (margins,) = (rows for title, rows, _ in build_report_contents([found], [{}]).runs[0].tables if "margins" in title)
    assert margins[2]["rise high %"].text == "4.30"


def test_the_script_shows_what_the_table_says_at_every_stop():
    """Run as in a browser: the same file, and the data of a page."""
    if shutil.which("node") is None:
        pytest.skip("node, which runs the page's script, is not installed")
    (data,) = parsed_page(report(tables=MOVING)).data
    asked = f"{read_package_text('page.js')}\nconst data = {json.dumps(data)};\n" + (
        "console.log(JSON.stringify(data.stops.map((_, at) => explorerAt(data, at))))"
    )
    out = subprocess.run(["node", "-e", asked], capture_output=True, text=True, check=True, timeout=60).stdout
    for at, (now, margin) in enumerate(zip(json.loads(out), MARGINS, strict=True)):
        assert now["name"] == margin["point"]
        assert now["dials"][0] == f"{margin['mean depth']:.2f} layers"
        assert now["tokens"][0] is None, "a prompt is not decided"
        assert [token["depth"] for token in now["tokens"][1:]] == [row["depths"][at] for row in TOKENS[1:]]


def test_it_opens_at_the_point_put_forward_and_says_depth_signal_and_threshold():
    found = parsed_page(report(tables=MOVING))
    once, upon, line = tokens(found)[:3]
    assert ["joined" in token["class"].split() for token in (once, upon, line)] == [True, False, False], (
        "parts of words"
    )
    assert upon["data-numbers"] == "depth 4; layer 2: entropy 1.25 against 1 nats"
    assert line["data-numbers"] == "depth 2; layer 2: entropy 0.5 against 1 nats"
    assert line["data-text"] == "↵\n"
    (slider,) = elements(found, type="range")
    assert (slider["min"], slider["max"], slider["value"]) == ("0", "2", "1")
    (data,) = found.data
    assert data["tokens"][1]["said"][2].endswith("likeliest there: “ more” instead")
    assert data["tokens"][1]["said"][0] == "depth 4; no probe"


def test_shades_run_from_shallow_to_deep():
    assert [depth_shade_index(depth, 12) for depth in (1, 3, 5, 8, 12)] == [0, 0, 1, 2, 4]
    assert [depth_shade_index(depth, 1) for depth in (1,)] == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"depths": [4, 4]},
        {"depths": [4, 0, 2]},
        {"entropy, nats": ["1"]},
        {"entropy, nats": []},
        {"instead": [1, 2, 3]},
    ],
)
def test_lists_that_do_not_fit_colour_nothing(change):
    rows = copy.deepcopy(TOKENS)
    assert has_matching_lists(MARGINS, rows)
    rows[1] |= change
    assert not has_matching_lists(MARGINS, rows)
    tables = [MOVING[0], MOVING[1] | {"rows": rows}]
    assert build_depth_explorers(report(tables=tables)) == []
    assert parsed_page(report(tables=tables)).data == []


def test_a_text_in_turns_names_its_model_at_every_token():
    found = tokens(parsed_page(report(tables=MOVING[2:])))
    assert [token["data-numbers"].split(";")[0] for token in found] == [
        "read first by the large model",
        "written by the large model",
        "written by the small model",
    ]
    assert found[1]["data-numbers"].endswith("entropy 1.5 bits, rolling mean 1.5 against 1 bits")
    assert ["large" in token["class"].split() for token in found] == [False, True, False]


# ---------------------------------------------------------------- top of the page


def test_each_gate_says_what_was_found_what_it_needs_and_which_way_is_good():
    cards = parsed_page(report(claims=[verdict(threshold=0.01, good="lower")])).text
    said = ("falsified: does not hold", "+3.1 %", "[+2.1 %, +4.2 %]", "at most +1.00 %")
    for words in (*said, "Saving 15 % of FLOPs leaves quality as it was"):
        assert words in cards
    high = parsed_page(report(claims=[verdict("survived", threshold=0.01, good="higher")])).text
    assert "at least +1.00 %" in high
    older = parsed_page(report(claims=[verdict("falsified", threshold=0.01)])).text
    assert "at most" not in older, "a report that does not say leaves it"


def test_against_the_record_the_gates_of_the_page_are_those_of_the_terminal():
    """There every verdict on record gates, and 34 cards would hide the five that matter."""
    claims = [verdict("falsified"), verdict("survived", "EMAD-E1") | {"gate": True}]
    text = " ".join(parsed_page(report(claims=claims, settings={"gate": "known"})).text.split())
    assert text.count("EMAD-F1 on m") > text.count("EMAD-E1 on m")
    assert "Of the rows that do not gate: 1 survived (holds)." in text


def test_the_opening_counts_the_rest_and_names_failures_waivers_and_whose_decoder_it_was():
    data = foreign_report()
    data["run"] |= {"failures": ["EMAD-F2: no verdict was given"], "exit_status": 1}
    text = parsed_page(data).text
    for said in (
        "hook of plugin mylib (mylib)",
        "The run failed: EMAD-F2: no verdict was given",
        "Waived: EMAD-F2: no sessions yet",
        "1 survived (holds), 1 inconclusive (cannot be told from this much data).",
        "exit status 1",
    ):
        assert said in " ".join(text.split())


def test_rows_that_do_not_apply_are_folded_into_a_table_of_their_own():
    claims = [verdict("falsified"), verdict("not applicable", "EMAD-E1"), verdict("unmeasured", "EMAD-R2")]
    found = parsed_page(report(claims=claims))
    assert [row["claim"].text for row in found.named("claims")] == ["EMAD-F1*", "EMAD-R2"]
    assert [row["claim"].text for row in found.named("claims that do not apply")] == ["EMAD-E1"]
    assert "1 row that do not apply here" not in found.text
    assert "1 row that does not apply here" in found.text


def test_changes_have_a_table_where_they_are_given():
    assert "What changed" not in parsed_page(report()).text
    rows = parsed_page(report(), changes=[{"claim": "EMAD-F1", "before": "survived", "now": "falsified"}]).named(
        "what changed since the run it is compared with"
    )
    assert [row["before"].text for row in rows] == ["survived"]


# ---------------------------------------------------------------- drawings


def figures_of(*reports: dict) -> Page:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    return Page(render_html_page(build_report_contents(reports, render_figures_and_remark(reports)[0])))


def test_cost_against_quality_opens_the_page_and_counts_the_points_that_the_claim_asks_for():
    found = figures_of(report(tables=MOVING))
    drawn = [attrs["aria-label"] for attrs in elements(found, role="img")]
    assert drawn[0] == "m: cost against quality"
    assert "1 of 4 points lie in the shaded region that EMAD-F1 asks for" in found.text
    own = report(points=[], tables=[])
    assert [attrs["aria-label"] for attrs in elements(figures_of(own), role="img")] == [], "no numbers, no figure"


def test_the_upper_bound_is_the_best_oracle_within_the_loss_that_the_claim_allows():
    table = {"title": "criteria and ceilings", "model": "m", "rows": SAVING, "figure": "saving against loss"}
    said = "would save 35.0 % of FLOPs net at a rise of perplexity of at most 1 %"
    assert said in figures_of(report(tables=[table])).text, "the gate's 30 % and 50 % at 6 % are not it"


def test_the_collapse_is_named_where_depth_falls():
    rows = [
        {"positions": name, "mean depth": depth, "mean free depth": 11.0, "mean entropy of the last layer, nats": 0.5}
        for name, depth in (("1", 12.0), ("2", 7.0), ("3–4", 4.2), ("5–8", 4.0))
    ]
    table = {"title": "t", "model": "m", "rows": rows, "figure": "depth by position"}
    text = figures_of(report(tables=[table])).text
    assert "from positions 3–4 on, depth is down to 4.2 of 12.0 layers and never rises again" in text
    flat = [row | {"mean depth": 12.0} for row in rows]
    assert "layers at every position of this text." in figures_of(report(tables=[table | {"rows": flat}])).text


def test_timed_legs_stand_in_a_table_with_their_intervals():
    legs = (
        Leg("batch 1", "survived", 1.25, (1.2, 1.3), 30, 1.1, "× as fast"),
        Leg("batch 4", "measured", 2.0, None, 1, None, "× as fast in total"),
        Leg("perplexity", "survived", 0.0, None, 1, None, "relative rise"),
    )
    data = report(claims=[verdict("survived", "EMAD-F2", legs=legs)])
    found = parsed_page(data).named("speed")
    assert [(row["timed"].text, row["times as fast"].text, row["[95 %]"].text) for row in found] == [
        ("batch 1", "1.25×", "[1.2×, 1.3×]"),
        ("batch 4", "2×", "–"),
    ]
    assert "speed" not in parsed_page(report()).tables


# ---------------------------------------------------------------- accessibility


def test_whatever_can_be_used_has_a_name_and_is_reached_by_keys():
    found = parsed_page(report(tables=MOVING))
    for tag, attrs in found.tags:
        if attrs.get("role") in ("button", "region", "group"):
            assert attrs.get("aria-label"), (tag, attrs)
        if attrs.get("role") in ("button", "region"):
            assert attrs.get("tabindex") in ("0", "-1")
    landmarks = {tag for tag, _ in found.tags}
    assert {"header", "main", "section", "h1", "h2"} <= landmarks
    assert all(token["aria-label"] and token["tabindex"] == "-1" for token in tokens(found))
    assert "rove(" in read_package_text("page.js")
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def colours(theme: int) -> dict[str, str]:
    """Return the style sheet's colours by name: ``theme`` 0 for light, 1 for dark."""
    found = re.findall(r"--([a-z0-9-]+): light-dark\((#\w{6}), (#\w{6})\)", read_package_text("page.css"))
    return {name: pair[theme] for name, *pair in found}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_letters_stand_out_as_wcag_asks(theme):
    """4.5 : 1 for text, 3 : 1 for lines (WCAG AA)."""
    palette = colours(theme)
    grounds = [palette["paper"], palette["panel"]]
    for letters in ("ink", "muted", "accent"):
        assert min(contrast(palette[letters], ground) for ground in grounds) >= 4.5, letters
    for number in range(5):
        assert contrast(palette[f"shade-{number}-ink"], palette[f"shade-{number}"]) >= 4.5
    assert min(contrast(palette["line"], ground) for ground in grounds) >= 3


def test_every_colour_of_the_style_sheet_is_one_of_its_palette():
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", read_package_text("page.css")))
    assert used == set(colours(0))


# ---------------------------------------------------------------- text from other sources


def test_a_text_that_would_be_markup_stays_text_everywhere_it_moves():
    tables = copy.deepcopy(MOVING)
    for table in tables:
        table["title"] = table["rows"][1]["token" if "token" in table["rows"][1] else "point"] = MARKUP
    tables[0]["rows"][1]["put forward as"] = tables[1]["rows"][1]["instead"][2] = MARKUP
    found = parsed_page(report(tables=tables), changes=[{MARKUP: MARKUP}])
    assert found.scripts == [read_package_text("page.js")]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert not [tag for tag, _ in found.tags if tag == "b"]
    assert found.open == []
    assert found.data[0]["stops"][1]["name"] == MARKUP
    assert tokens(found)[1]["data-text"] == MARKUP


def test_the_decoder_under_test_is_named():
    for data, name in ((report(), "the reference decoder of this package"), (foreign_report(), "hook of plugin mylib")):
        assert f"Decoder under test: {name}" in parsed_page(data).text
