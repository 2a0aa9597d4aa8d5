"""What moves on the page: the explorer, texts and drawings; their numbers, their keys, their colours."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess

import pytest

from emad_ref.report.contents import report_contents, timing_strips
from emad_ref.report.depth_explorer import depth_explorers, has_matching_lists, shade
from emad_ref.report.page import DARK_COLORS, LIGHT_COLORS, package_text, page
from emad_ref.statistics.verdicts import Leg
from tests.unit.report.sample import MARGINS, MOVING, TOKENS, report, report_2, verdict
from tests.unit.report.shown import Page

pytest.importorskip("jinja2", reason="the extra `report` is not installed")

HOSTILE = '</script><script>alert(1)</script><b onfocus="x">\' & {{ 7 * 7 }}'


def page_of(*reports: dict, **given) -> Page:
    return Page(page(report_contents(reports, [{} for _ in reports]), **given))


def elements(found: Page, **wanted: str) -> list[dict]:
    return [attrs for _, attrs in found.tags if all(attrs.get(name) == value for name, value in wanted.items())]


def tokens(found: Page) -> list[dict]:
    return [attrs for tag, attrs in found.tags if tag == "button" and "token" in str(attrs.get("class")).split()]


# ---------------------------------------------------------------- numbers are the replay's


def test_the_page_holds_every_margin_and_every_depth_as_the_table_has_them():
    (data,) = page_of(report(tables=MOVING)).data
    assert [stop["name"] for stop in data["stops"]] == [row["point"] for row in MARGINS]
    assert [token["depth"] for token in data["tokens"]] == [row["depths"] for row in TOKENS]
    assert data["stops"][1]["dials"] == ["3.00 layers", "20.0 %", "8.04", "+0.50 %", "[+0.40 %, +0.60 %]"]
    assert data["stops"][0]["dials"][-1] == "–", "full depth has no interval"


def test_the_script_shows_what_the_table_says_at_every_stop():
    """Run as a browser runs it: the same file, and the data of a page."""
    if shutil.which("node") is None:
        pytest.skip("node, which runs the page's script, is not installed")
    (data,) = page_of(report(tables=MOVING)).data
    asked = f"{package_text('page.js')}\nconst data = {json.dumps(data)};\n" + (
        "console.log(JSON.stringify(data.stops.map((_, at) => explorerAt(data, at))))"
    )
    out = subprocess.run(["node", "-e", asked], capture_output=True, text=True, check=True, timeout=60).stdout
    for at, (now, margin) in enumerate(zip(json.loads(out), MARGINS, strict=True)):
        assert now["name"] == margin["point"]
        assert now["dials"][0] == f"{margin['mean depth']:.2f} layers"
        assert now["tokens"][0] is None, "a prompt is not decided"
        assert [token["depth"] for token in now["tokens"][1:]] == [row["depths"][at] for row in TOKENS[1:]]


def test_it_opens_at_the_point_put_forward_and_says_depth_signal_and_threshold():
    found = page_of(report(tables=MOVING))
    _, upon, line = tokens(found)[:3]
    assert upon["data-numbers"] == "depth 4; layer 2: entropy 1.25 against 1 nats"
    assert line["data-numbers"] == "depth 2; layer 2: entropy 0.5 against 1 nats"
    assert line["data-text"] == "↵\n"
    (slider,) = elements(found, type="range")
    assert (slider["min"], slider["max"], slider["value"]) == ("0", "2", "1")
    (data,) = found.data
    assert data["tokens"][1]["said"][2].endswith("likeliest there: “ more” instead")
    assert data["tokens"][1]["said"][0] == "depth 4; no probe"


def test_shades_run_from_shallow_to_deep():
    assert [shade(depth, 12) for depth in (1, 3, 5, 8, 12)] == [0, 0, 1, 2, 4]
    assert [shade(depth, 1) for depth in (1,)] == [0]


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
    assert depth_explorers(report(tables=tables)) == []
    assert page_of(report(tables=tables)).data == []


def test_a_text_in_turns_names_its_model_at_every_token():
    found = tokens(page_of(report(tables=MOVING[2:])))
    assert [token["data-numbers"].split(";")[0] for token in found] == [
        "read first by the large model",
        "written by the large model",
        "written by the small model",
    ]
    assert found[1]["data-numbers"].endswith("entropy 1.5 bits, rolling mean 1.5 against 1 bits")
    assert ["large" in token["class"].split() for token in found] == [False, True, False]


# ---------------------------------------------------------------- what opens the page


def test_each_gate_says_what_was_found_what_it_needs_and_which_way_is_good():
    cards = page_of(report(claims=[verdict(threshold=0.01, good="lower")])).text
    said = ("falsified: does not hold", "+3.12 %", "[+2.11 %, +4.19 %]", "≤ +1.00 %, lower is better")
    for words in (*said, "Saving 15 % of FLOPs leaves quality as it was"):
        assert words in cards
    high = page_of(report(claims=[verdict("survived", threshold=0.01, good="higher")])).text
    assert "≥ +1.00 %, higher is better" in high
    older = page_of(report(claims=[verdict("falsified", threshold=0.01)])).text
    assert "is better" not in older.split("found")[1].split("Right and down")[0], "a report that does not say leaves it"


def test_the_opening_counts_the_rest_and_names_failures_waivers_and_whose_decoder_it_was():
    data = report_2()
    data["run"] |= {"failures": ["EMAD-F2: no verdict was given"], "exit_status": 1}
    text = page_of(data).text
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
    found = page_of(report(claims=claims))
    assert [row["claim"].text for row in found.named("claims")] == ["EMAD-F1*", "EMAD-R2"]
    assert [row["claim"].text for row in found.named("claims that do not apply")] == ["EMAD-E1"]
    assert "1 row that do not apply here" not in found.text
    assert "1 row that does not apply here" in found.text


def test_changes_have_a_table_where_they_are_given():
    assert "What changed" not in page_of(report()).text
    rows = page_of(report(), changes=[{"claim": "EMAD-F1", "before": "survived", "now": "falsified"}]).named(
        "what changed since the run it is compared with"
    )
    assert [row["before"].text for row in rows] == ["survived"]


# ---------------------------------------------------------------- drawings


def test_cost_against_quality_has_a_mark_for_every_point_and_its_numbers_once():
    found = page_of(report(tables=MOVING))
    marks = [attrs for attrs in elements(found, role="button") if "mark" in str(attrs.get("class")).split()]
    panels = [attrs for _, attrs in found.tags if "data-panel" in attrs]
    assert len(panels) == len(MARGINS) + 1, "margins and the point put forward"
    assert len(marks) == 2 * len(panels), "for a desk and for a phone"
    assert len([attrs for attrs in panels if "hidden" not in attrs]) == 1
    (second, _) = [attrs for attrs in marks if attrs["data-mark"] == "1"]
    assert "emad m=0.50: net FLOPs saved 20.0 %, rise of perplexity +0.50 %" in second["aria-label"]
    assert "1 of 4 points lie in the region that EMAD-F1 asks for" in found.text


def test_the_collapse_is_named_where_depth_falls():
    rows = [
        {"positions": name, "mean depth": depth, "mean free depth": 11.0, "mean entropy of the last layer, nats": 0.5}
        for name, depth in (("1", 12.0), ("2", 7.0), ("3–4", 4.2), ("5–8", 4.0))
    ]
    table = {"title": "t", "model": "m", "rows": rows, "figure": "depth by position"}
    text = page_of(report(tables=[table])).text
    assert "from positions 3–4 on, depth is down to 4.2 of 12.0 layers and never rises again" in text
    flat = [row | {"mean depth": 12.0} for row in rows]
    assert "nothing collapses" in page_of(report(tables=[table | {"rows": flat}])).text


def test_timed_legs_stand_on_one_scale_with_their_intervals():
    legs = (
        Leg("batch 1", "survived", 1.25, (1.2, 1.3), 30, 1.1, "× as fast"),
        Leg("batch 4", "measured", 2.0, None, 1, None, "× as fast in total"),
        Leg("perplexity", "survived", 0.0, None, 1, None, "relative rise"),
    )
    data = report(claims=[verdict("survived", "EMAD-F2", legs=legs)])
    found = page_of(data).named("speed")
    assert [(row["timed"].text, row["times as fast"].text, row["[95 %]"].text) for row in found] == [
        ("batch 1", "1.25×", "[1.2×, 1.3×]"),
        ("batch 4", "2×", "–"),
    ]
    one, two = timing_strips(data)
    assert one.at - one.one == pytest.approx((two.at - two.one) / 4), "1.25 lies a quarter as far from 1 as 2"
    assert one.low < one.at < one.high
    assert (two.low, two.high) == (None, None)
    assert "speed" not in page_of(report()).tables


# ---------------------------------------------------------------- everyone can use it


def test_whatever_can_be_used_has_a_name_and_is_reached_by_keys():
    found = page_of(report(tables=MOVING))
    for tag, attrs in found.tags:
        if attrs.get("role") in ("button", "region", "group"):
            assert attrs.get("aria-label"), (tag, attrs)
        if attrs.get("role") in ("button", "region"):
            assert attrs.get("tabindex") in ("0", "-1")
    landmarks = {tag for tag, _ in found.tags}
    assert {"header", "main", "section", "h1", "h2"} <= landmarks
    assert all(token["aria-label"] and token["tabindex"] == "-1" for token in tokens(found))
    assert "rove(" in package_text("page.js")
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT_COLORS, DARK_COLORS], ids=["light", "dark"])
def test_letters_stand_out_as_wcag_asks(palette):
    """4.5 : 1 for text, 3 : 1 for what is drawn (AA)."""
    grounds = [palette["paper"], palette["panel"]]
    for letters in ("ink", "muted", "accent"):
        assert min(contrast(palette[letters], ground) for ground in grounds) >= 4.5, letters
    pairs = [("good-ink", "good"), *((f"shade-{number}-ink", f"shade-{number}") for number in range(5))]
    for letters, ground in pairs:
        assert contrast(palette[letters], palette[ground]) >= 4.5, letters
    for number in range(10):  # names of series are text, on paper; marks lie in the good region too
        assert contrast(palette[f"series-{number}"], palette["paper"]) >= 4.5
        assert contrast(palette[f"series-{number}"], palette["good"]) >= 3
    assert min(contrast(palette["line"], ground) for ground in grounds) >= 3


def test_every_colour_of_the_style_sheet_is_one_of_the_palette():
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", re.sub(r"\{\{ number \}\}", "0", package_text("page.css"))))
    assert used <= set(LIGHT_COLORS)
    assert set(LIGHT_COLORS) == set(DARK_COLORS)


# ---------------------------------------------------------------- what others wrote


def test_a_text_that_would_be_markup_stays_text_everywhere_it_moves():
    tables = copy.deepcopy(MOVING)
    for table in tables:
        table["title"] = table["rows"][1]["token" if "token" in table["rows"][1] else "point"] = HOSTILE
    tables[0]["rows"][1]["put forward as"] = tables[1]["rows"][1]["instead"][2] = HOSTILE
    found = page_of(report(tables=tables), changes=[{HOSTILE: HOSTILE}])
    assert found.scripts == [package_text("page.js")]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert not [tag for tag, _ in found.tags if tag == "b"]
    assert found.open == []
    assert found.data[0]["stops"][1]["name"] == HOSTILE
    assert tokens(found)[1]["data-text"] == HOSTILE


def test_reports_of_the_first_schema_are_pages_too():
    assert "What gates" in page_of(report()).text
    assert "Decoder under test" not in page_of(report()).text
    assert "Decoder under test" in page_of(report_2()).text
