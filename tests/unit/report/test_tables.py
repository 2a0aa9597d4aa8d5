"""Tables show every value, mark missing ones, and format good and bad results alike."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.protocol import TokenArrivals
from pytest_emad.benchmark.arrivals import stream_latency_rows
from pytest_emad.report.tables import (
    ABSENT,
    format_claims_table,
    format_plain_table,
    format_points_table,
    format_section_titles_and_texts,
    format_stream_latency_row,
    lost_answer_rows,
)
from pytest_emad.statistics.verdicts import Verdict
from tests.unit.report.sample_report import MOVING

POINT = {
    "model": "m",
    "name": "emad m=0.20",
    "mean_depth": 7.254,
    "depth_p50": 4,
    "depth_p90": 12,
    "gross_reduction": 0.4,
    "net_reduction": 0.312,
    "perplexity_reference": 1.429,
    "perplexity": 1.447,
    "perplexity_rise": 0.0125,
    "interval": [0.011, 0.014],
    "accuracy": {"recall": [0.9, 0.88], "count": [0.5, None]},
    "end_to_end_reduction": 0.207,
    "time_ratio": {"1": 1.234, "4": 1.1},
}


def claim(**changes) -> dict:
    verdict = Verdict("EMAD-F1", "m", "survived", 0.001, (0.0005, 0.0015), 1234, 0.01, "relative rise", "all 2 legs")
    return verdict.to_json() | {"gate": True} | changes


def test_a_point_shows_every_number_with_its_unit():
    table = format_points_table([POINT])
    parts = ("7.25", "4/12", "-40.0 %", "-31.2 %", "-20.7 %", "1.429 → 1.447", "+1.25 % [+1.10 %, +1.40 %]")
    for part in (*parts, "batch 1: 1.234×", "batch 4: 1.1×"):
        assert part in table, part
    assert "recall 0.900 → 0.880" in table
    assert "count 0.500 → –" in table


def test_a_point_says_why_it_is_put_forward():
    """One point may have two reasons: the user's margin may be the one that validation chose."""
    table = format_points_table([POINT | {"roles": ["named by the user", "chosen on validation"]}], 200)
    first, second, third = table.splitlines()[-3:]
    assert [first.split("  ")[0], second.strip()[:17], third.strip()[:20]] == [
        "emad m=0.20",
        "named by the user",
        "chosen on validation",
    ]


def test_what_was_not_measured_is_a_dash_and_never_a_zero():
    table = format_points_table([{"name": "bare"}])
    row = table.splitlines()[-1]
    assert "0" not in row
    assert row.split() == ["bare", "–", "–/–", "–", "–", "–", "–", "–", "–", "–"]
    bare = format_claims_table([claim(estimate=None, interval=None, n=0, threshold=None, verdict="unmeasured")])
    assert "0" not in bare.splitlines()[-1].replace("all 2 legs", "")


def test_zero_is_shown_as_zero():
    table = format_points_table([POINT | {"net_reduction": 0.0, "perplexity_rise": -1e-9}])
    assert "recall 0.000 → 0.000" in format_points_table([POINT | {"accuracy": {"recall": [0.0, 0.0]}}])
    assert "-0.0" not in table
    assert "+0.0 %" in table
    assert "+0.00 %" in format_points_table([POINT | {"perplexity_rise": 0.0, "interval": None}])


def test_a_task_that_does_not_count_says_why_below_its_line():
    table = format_points_table([POINT | {"not_counted": {"recall": "not exercised: saves 0.4 %"}}])
    lines = [" ".join(line.split()) for line in table.splitlines()]
    at = next(i for i, line in enumerate(lines) if "recall 0.900 → 0.880" in line)
    assert "(not exercised: saves 0.4 %)" in lines[at + 1]
    assert "count 0.500 → –" in lines[at + 2]


def test_the_model_has_a_column_where_there_are_several():
    assert "model" not in format_points_table([POINT, POINT])
    assert "model" not in format_claims_table([claim(), claim()])
    assert "model" in format_points_table([POINT, POINT | {"model": "other"}])
    assert "other" in format_claims_table([claim(), claim(model="other")])


def test_a_claim_shows_verdict_estimate_interval_n_and_threshold():
    table = format_claims_table([claim()])
    for part in ("EMAD-F1*", "survived", "+0.10 %", "[+0.05 %, +0.15 %]", "1,234", "+1.00 %", "all 2 legs"):
        assert part in table, part
    assert "EMAD-F1 " in format_claims_table([claim(gate=False)])


def test_units_that_are_no_fractions_are_not_shown_in_percent():
    table = format_claims_table([claim(unit="× as fast", estimate=1.0534, interval=[1.0, 1.1], threshold=1.1)])
    assert "1.053" in table
    assert "%" not in table.splitlines()[-1].replace("[95 %]", "")
    assert " 4.90 %" in format_claims_table([claim(unit="share of block FLOPs", estimate=0.049)])


def test_falsified_is_set_like_survived():
    good, bad = format_claims_table([claim()]), format_claims_table([claim(verdict="falsified")])
    assert [word.replace("falsified", "survived") for word in bad.split() if set(word) != {"-"}] == [
        word for word in good.split() if set(word) != {"-"}
    ]


def test_long_reasons_wrap_inside_their_column():
    table = format_claims_table([claim(reason="because " * 40)])
    assert 140 < max(map(len, table.splitlines())) <= 150


@pytest.mark.parametrize("width", [80, 120])
def test_no_table_is_wider_than_the_page_and_none_loses_a_number(width):
    """Words wrap, then columns go below one another; a number and an interval stay in one piece."""
    wide = {f"a long heading {number}": 0.5 + number for number in range(20)}
    point = POINT | {"roles": ["chosen on validation"], "name": "quantile q=0.0055, 69.4% full depth"}
    claims = [claim(reason="because " * 40), claim(id="EMAD-F1-literal", unit="largest |difference| of a logit")]
    tables = {
        format_points_table([point], width): ("-31.2 %", "+1.25 % [+1.10 %, +1.40 %]", "batch 1: 1.234×", "69.4%"),
        format_claims_table(claims, width): (
            "EMAD-F1-literal",
            "[+0.05 %, +0.15 %]",
            "1,234",
            "because",
            "|difference|",
        ),
        format_plain_table([{"family": "EMAD"} | wide], width): [f"{value:.4g}" for value in wide.values()],
    }
    for table, parts in tables.items():
        assert max(map(len, table.splitlines())) <= width
        assert [part for part in parts if part not in table] == []


def test_parts_of_a_table_that_is_cut_begin_with_its_first_column():
    table = format_plain_table([{"family": "EMAD"} | {f"column {number}": 123456789 for number in range(12)}], 80)
    parts = table.split("\n\n")
    assert len(parts) > 1
    assert {part.splitlines()[0].split()[0] for part in parts} == {"family"}
    assert {part.splitlines()[-1].split()[0] for part in parts} == {"EMAD"}


def test_every_part_of_a_cut_table_begins_with_all_key_columns():
    row = {"saving": 0.15, "family": "EMAD"} | {f"column {number}": 123456789 for number in range(12)}
    parts = format_plain_table([row], 60, keys=2).split("\n\n")
    assert len(parts) > 1
    assert {tuple(part.splitlines()[0].split()[:2]) for part in parts} == {("saving", "family")}
    assert [column for column in row if sum(f"{column} " in f"{part} ".replace("\n", " ") for part in parts) == 0] == []


def test_no_rows_no_table():
    assert format_points_table([]) == ""
    assert format_claims_table([]) == ""
    assert format_plain_table([]) == ""


def cells(row: dict) -> list[str]:
    """Return the only row of a table, cell by cell: columns are at least two spaces apart."""
    return format_plain_table([row]).splitlines()[-1].split("  ")


def test_plain_rows_stand_under_their_keys_in_order():
    lines = format_plain_table([{"b": "x", "a": 1}, {"b": "y", "a": 20}]).splitlines()
    assert [line.split() for line in (lines[0], *lines[2:])] == [["b", "a"], ["x", "1"], ["y", "20"]]


def test_shares_are_in_percent_and_other_floats_have_four_digits():
    row = {"rise %": 0.01234, "depth": 5.84901, "probe FLOPs": 60590.4, "n": 12345, "name": "0.5000"}
    assert [cell.strip() for cell in cells(row) if cell] == ["1.23", "5.849", "6.059e+04", "12345", "0.5000"]


def test_an_interval_is_set_like_its_column():
    assert cells({"rise interval %": [-0.0125, 0.5]})[0] == "[-1.25, 50.00]"
    assert cells({"speed interval": (0.97531, 1.25)})[0] == "[0.9753, 1.25]"
    assert cells({"interval": [None, 2.0]})[0] == "[–, 2]"


def test_in_plain_tables_absent_is_a_dash_zero_is_zero_and_zero_has_no_sign():
    assert cells({"rise %": None})[0] == "–"
    assert cells({"rise %": 0.0})[0] == "0.00"
    assert cells({"rise %": -1e-9})[0] == "0.00"
    assert cells({"depth": -0.0})[0] == "0"
    assert cells({"done": False})[0] == "False"


def test_undecided_claims_of_one_reason_share_a_row_and_nothing_else_does():
    def undecided(name, **changes):
        absent = {"estimate": None, "interval": None, "n": 0, "threshold": None, "gate": False}
        return claim(**{"id": name, "verdict": "not applicable", "reason": "no encoder", **absent, **changes})

    table = format_claims_table(
        [
            undecided("EE-1"),
            claim(id="EE-2", verdict="falsified", gate=False),
            undecided("EE-3"),
            undecided("EE-4", reason="no scorer"),
            undecided("EE-5", verdict="unmeasured"),
            undecided("EE-6", gate=True),
            undecided("EE-7", model="another"),
        ]
    )
    first = [line.split("  ")[0] for line in table.splitlines()[2:]]
    assert first == ["EE-1, EE-3", "EE-2", "EE-4", "EE-5", "EE-6*", "EE-7"]


def test_many_ids_wrap_between_ids():
    names = [f"EE-{number}" for number in range(1, 16)]
    absent = {"estimate": None, "interval": None, "n": 0, "threshold": None, "gate": False}
    table = format_claims_table([claim(id=name, verdict="unmeasured", reason="no data", **absent) for name in names])
    shown = " ".join(line.split("  ")[0] for line in table.splitlines()[2:])
    assert shown.replace(",", "").split() == names


def test_what_is_made_for_the_page_stays_out_of_the_terminal():
    """The report contains lists and a row per token, which only the page can show."""
    assert [title for title, _ in format_section_titles_and_texts([], MOVING, [], ["n"])] == ["emad notes"]


def test_times_of_streams_are_percentiles_and_tokens_that_arrive_together_share_a_gap() -> None:
    def arrivals(seconds: list[float], whole_s: float) -> TokenArrivals:
        return TokenArrivals(np.zeros(len(seconds), dtype=np.int64), np.array(seconds), whole_s)

    single = [arrivals([0.1, 0.2, 0.5, 0.5, 0.5], 0.5)] * 19 + [arrivals([0.9], 1.0)]
    whole, streamed, one = stream_latency_rows({0: [arrivals([0.4] * 3, 0.4)], 2: single, 8: single[-1:]})
    assert whole["first token, ms"] is whole["between tokens, ms (95 %)"] is one["between tokens, ms"] is None
    assert (streamed["first token, ms"], streamed["first token, ms (95 %)"]) == (100.0, 100.0)
    assert (streamed["between tokens, ms"], streamed["whole answer, ms"]) == (100.0, 500.0)
    assert one["first token, ms (95 %)"] == 900.0
    assert format_stream_latency_row(whole) == "1, unstreamed: whole answer 400 (400)"
    assert format_stream_latency_row(one) == "8 at once: first token 900 (900), whole answer 1e+03 (1e+03)"


def test_lost_answers_have_a_row_each_with_both_answers():
    first = [{"prompt": "how many?", "full_depth": "7", "at_point": "3", "depths": [2, 1]},
             {"prompt": "who?", "full_depth": "Mia", "at_point": "Kai", "depths": []}]  # fmt: skip
    points = [POINT, POINT | {"name": "early", "lost_answers": {"chart": {"count": 5, "first": first}}}]
    rows = [{column: cell.text for column, cell in row.items()} for row in lost_answer_rows(points)]
    assert rows == [
        {"task": "chart (1 of 5 lost)", "prompt, its end": "how many?", "full depth": "7", "at the point": "3",
         "depths": "2 1", "point": "early"},
        {"task": "chart (2 of 5 lost)", "prompt, its end": "who?", "full depth": "Mia", "at the point": "Kai",
         "depths": ABSENT, "point": "early"},
    ]  # fmt: skip
    two = {"facts": {"count": 1, "first": first[:1]}, "chart": {"count": 5, "first": first[:1]}}
    worst_first = [row["task"].text for row in lost_answer_rows([POINT | {"lost_answers": two}])]
    assert worst_first == ["chart (1 of 5 lost)", "facts (1 of 1 lost)"]
