"""Figures: the rows that each shows or refuses; the same rows give the same file."""

from __future__ import annotations

import math
import re
import sys
import warnings
from xml.etree import ElementTree

import pytest

from emad_ref.errors import BadArgument, MissingExtra
from pytest_emad.report.figures import (
    FIGURES,
    LINE_STYLES,
    MARKERS,
    QUANTILES,
    NoDrawableRows,
    figure_caption,
    open_figure,
    render_figure_svg,
    require_drawable,
)
from tests.unit.report.sample_report import MARGINS, PARETO, SAVING, TOKENS, TURNS

pytest.importorskip("matplotlib", reason="the extra `report` is not installed")

TASKS = ("qa", "summary")
PROFILE = [
    {
        "layer": layer,
        "mean entropy, nats": 3.0 / layer,
        "target, nats": {2: 1.4, 4: 0.7}.get(layer),
        "echo %": 0.1 * layer,
        "agrees with last %": 0.2 * layer,
        "AUROC of low entropy for that": None if layer == 5 else 0.6,
        "shown rise, nats": None,
    }
    for layer in range(1, 6)
]
ALONG = [
    {"positions": name, "mean depth": depth, "mean free depth": depth + 1, "mean entropy of the last layer, nats": 0.5}
    for name, depth in (("1", 12.0), ("2", 11.0), ("3–4", 5.5))
]
RANKS = [
    {"task": task, "layer": layer} | {quantile: 100 * (place + 1) // layer for place, quantile in enumerate(QUANTILES)}
    for task in TASKS
    for layer in (1, 2, 3)
]
TRUST = [
    {"task": task, "layer": layer, "confidence": 0.3 * layer, "accuracy": 0.2 * layer, "ECE": 0.05}
    for task in TASKS
    for layer in (1, 2, 3)
]
EXITS = [
    {
        "task": task,
        "rule": rule,
        "j": j,
        "mean exit": j + 0.5,
        "score": 0.5,
        "confidence MFLOPs": 1.25 * j,
        "decoder MFLOPs": 10.0,
    }
    for task in TASKS
    for rule, minima in (("softmax", (2, 5)), ("JSD", (2, 5)), ("full depth", (12,)))
    for j in minima
]
QUALITY = [
    {"series": series, "net reduction %": saved, "rise %": rise, "rise low %": low, "rise high %": high}
    for series, saved, rise, low, high in (
        ("EMAD, by margin", 0.2, 0.005, 0.004, 0.006),
        ("EMAD, by margin", 0.0, 0.0, None, None),
        ("selected points", 0.25, 0.006, None, None),
        ("selected points", 0.35, 0.02, None, None),
    )
]
COST = [
    {"decoding": "small alone", "score": 0.25, "MFLOPs per token": 1.5},
    {"decoding": "large alone", "score": 0.75, "MFLOPs per token": 6.0},
    {"decoding": "speculative, k = 4", "score": 0.75, "MFLOPs per token": 7.5},
]
UNCOUNTED = [
    {"decoding": "small alone", "score": 0.25, "MFLOPs per token": 1.5},
    {"decoding": "foreign", "score": 0.75, "MFLOPs per token": None},
]
ROWS = {
    "cost against quality": QUALITY,
    "pareto": PARETO,
    "saving against loss": SAVING,
    "entropy profile": PROFILE,
    "depth by position": ALONG,
    "final token rank": RANKS,
    "confidence and accuracy": TRUST,
    "exits by minimum layer": EXITS,
    "FLOPs by rule": EXITS,
    "score against cost": COST,
    "depth by margin": MARGINS,
    "depth by token": TOKENS,
    "model by token": TURNS,
}


def texts(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def points(line) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]


def labelled(axes) -> dict[str, list[tuple[float, float]]]:
    """Return series by label; reference lines have none."""
    return {line.get_label(): points(line) for line in axes.lines if not line.get_label().startswith("_")}


def labels(axes) -> tuple[str, str]:
    return axes.get_xlabel(), axes.get_ylabel()


def test_every_figure_has_its_rows_here():
    assert set(ROWS) == set(FIGURES)


@pytest.mark.parametrize("name", ROWS)
def test_every_figure_can_be_written_and_keeps_its_series_apart_without_colours(name):
    assert render_figure_svg(name, ROWS[name], name).endswith("</svg>\n")
    with open_figure(name, ROWS[name], name) as canvas:
        for axes in canvas.axes:
            looks = [(line.get_marker(), line.get_linestyle()) for line in axes.lines if line.get_marker() != "None"]
            assert len(set(looks)) == len(looks)


def test_cost_against_quality_shades_what_the_claim_asks_for_and_joins_margins_alone():
    with open_figure("cost against quality", QUALITY, "t") as canvas:
        (axes,) = canvas.axes
        assert labelled(axes)["EMAD, by margin"] == [(0.0, 0.0), (20.0, 0.5)]
        looks = {line.get_label(): line.get_linestyle() for line in axes.lines}
        assert looks == {"EMAD, by margin": "-", "selected points": "None"}
        intervals, region = axes.collections
        assert intervals.get_segments()[0].tolist() == [[20.0, 0.4], [20.0, 0.6]]
        low, high = region.get_paths()[0].get_extents().get_points()
        assert (low[0], high[1]) == (15.0, 1.0), "EMAD-F1: at least 15 % saved, at most 1 % lost"
        assert high[0] == axes.get_xlim()[1]
        assert axes.get_yscale() == "symlog"


def test_pareto_has_a_line_per_family_in_percent_by_what_it_saves():
    with open_figure("pareto", PARETO[::-1], "t") as canvas:
        (axes,) = canvas.axes
        assert labels(axes) == ("net FLOPs saved, %", "rise of perplexity, %")
        assert labelled(axes) == {"truncation": [(40.0, 300.0)], "EMAD": [(30.0, 0.4), (50.0, 2.0)]}
        assert axes.get_yscale() == "symlog"
        low, high = axes.get_ylim()
        assert low < 0.4
        assert high > 300.0


def test_saving_against_loss_has_ceilings_in_black_and_a_panel_for_blocks():
    with open_figure("saving against loss", SAVING, "t") as canvas:
        net, blocks = canvas.axes
        assert labels(net)[1] == "net FLOPs saved, %"
        assert labels(blocks) == ("rise of perplexity, %", "blocks saved, %")
        assert labelled(net) == {
            "gate": [(0.0, 0.0), (pytest.approx(0.95), 30.0), (5.0, 40.0)],
            "oracle": [(0.0, 0.0), (0.8, 35.0), (6.0, 50.0)],
        }
        assert labelled(blocks)["oracle"][-1] == (6.0, 75.0)
        looks = {line.get_label(): (line.get_color(), line.get_marker()) for line in net.lines}
        assert looks["oracle"] == ("black", "None")
        assert looks["gate"][1] == MARKERS[0]
        assert net.get_xscale() == "symlog"
        assert net.get_ylim()[0] == 0.0
        assert net.get_xlim()[1] >= 10.0


def test_many_families_keep_marks_of_their_own():
    rows = [PARETO[0] | {"family": f"family {number}"} for number in range(len(MARKERS) + 3)]
    with open_figure("pareto", rows, "t") as canvas:
        lines = [line for line in canvas.axes[0].lines if line.get_label().startswith("family")]
        assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == len(rows)
        assert lines[len(MARKERS)].get_linestyle() == LINE_STYLES[1]


def test_the_entropy_profile_marks_the_targets_and_leaves_gaps():
    with open_figure("entropy profile", PROFILE, "t") as canvas:
        entropy, worth = canvas.axes
        assert labelled(entropy) == {
            "mean entropy": [(layer, 3.0 / layer) for layer in range(1, 6)],
            "target of a probe": [(2.0, 1.4), (4.0, 0.7)],
        }
        assert labels(entropy)[1] == "entropy, nats"
        assert labels(worth) == ("layer", "share, AUROC")
        found = labelled(worth)
        assert found["echo of the input, share"] == [(layer, pytest.approx(0.1 * layer)) for layer in range(1, 6)]
        assert found["agrees with the last layer, share"][-1] == (5, 1.0)
        assert math.isnan(found["AUROC of low entropy for that"][-1][1])
    with open_figure("entropy profile", [row | {"target, nats": None} for row in PROFILE], "t") as canvas:
        assert list(labelled(canvas.axes[0])) == ["mean entropy"]


def test_the_entropy_profile_marks_steps_that_are_shown_to_rise():
    rising = [row | {"shown rise, nats": 0.2} if row["layer"] in (3, 5) else row for row in PROFILE]
    with open_figure("entropy profile", rising, "t") as canvas:
        marked = [line.get_xdata().tolist() for line in canvas.axes[0].lines if line.get_color() == "crimson"]
        assert marked == [[2, 3], [4, 5]]
        assert "rises from the layer before" in [text.get_text() for text in canvas.axes[0].get_legend().get_texts()]
    assert "it rises at 2 of 4 steps and is lowest after layer 5" in figure_caption("entropy profile", rising)
    assert "rises" not in figure_caption("entropy profile", PROFILE)


@pytest.mark.parametrize(
    ("figure", "rows"), [("entropy profile", PROFILE), ("final token rank", RANKS), ("confidence and accuracy", TRUST)]
)
def test_layers_are_numbered_in_whole_numbers(figure, rows):
    few = [row for row in rows if row["layer"] <= 3]
    with open_figure(figure, few, "t") as canvas:
        axes = canvas.axes[-1]
        assert axes.get_xlabel() == "layer"
        assert [tick for tick in axes.get_xticks() if tick % 1] == []


def test_depth_and_entropy_stand_over_the_same_positions():
    with open_figure("depth by position", ALONG, "t") as canvas:
        depth, entropy = canvas.axes
        assert labelled(depth) == {
            "mean depth": [(0, 12.0), (1, 11.0), (2, 5.5)],
            "mean free depth": [(0, 13.0), (1, 12.0), (2, 6.5)],
        }
        assert depth.get_ylim()[0] == 0, "layers not saved are not exaggerated"
        assert [tick.get_text() for tick in entropy.get_xticklabels()] == ["1", "2", "3–4"]
        assert entropy.get_xlabel() == "position"
        assert points(entropy.lines[0]) == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_ranks_have_a_panel_per_task_and_a_line_per_quantile():
    from pytest_emad.sweep import diagnostics

    assert tuple(f"{quantile:.0%}" for quantile in diagnostics.RANK_QUANTILES) == QUANTILES
    with open_figure("final token rank", RANKS, "t") as canvas:
        assert [axes.get_title() for axes in canvas.axes] == list(TASKS)
        for axes in canvas.axes:
            assert axes.get_yscale() == "log"
            assert labelled(axes)["25% of tokens"] == [(1, 100), (2, 50), (3, 33)]
            assert len(labelled(axes)) == len(QUANTILES)
        assert labels(canvas.axes[0]) == ("layer", "rank of the final token, at most")


def test_confidence_stands_beside_accuracy_and_its_error():
    with open_figure("confidence and accuracy", TRUST, "t") as canvas:
        assert [axes.get_title() for axes in canvas.axes] == list(TASKS)
        assert list(labelled(canvas.axes[1])) == ["confidence", "accuracy", "ECE"]
        assert labelled(canvas.axes[1])["accuracy"] == [(layer, pytest.approx(0.2 * layer)) for layer in (1, 2, 3)]


def test_exit_and_score_stand_over_the_minimum_layer_per_task():
    with open_figure("exits by minimum layer", EXITS, "t") as canvas:
        exits, _, scores, _ = canvas.axes
        assert labelled(exits)["JSD"] == [(2, 2.5), (5, 5.5)]
        assert labelled(exits)["full depth"] == [(12, 12.5)]
        assert labelled(scores)["JSD"] == [(2, 0.5), (5, 0.5)]
        assert labels(scores) == ("minimum exit layer j", "score")
        assert exits.get_title() == "qa"


def test_a_rule_met_on_one_task_only_has_the_same_mark_on_all():
    rows = [row for row in EXITS if (row["task"], row["rule"]) != ("qa", "softmax")]
    with open_figure("exits by minimum layer", rows, "t") as canvas:
        marks = [{line.get_label(): line.get_marker() for line in axes.lines} for axes in canvas.axes]
        assert marks[0] == marks[1]
        assert "softmax" in marks[0]


def test_flops_are_stacked_and_every_bar_has_its_rule():
    with open_figure("FLOPs by rule", EXITS, "t") as canvas:
        for axes in canvas.axes:
            names = [tick.get_text() for tick in axes.get_yticklabels()]
            assert names == ["softmax, j = 2", "softmax, j = 5", "JSD, j = 2", "JSD, j = 5", "full depth, j = 12"]
            confidence, decoder = axes.containers
            assert [bar.get_width() for bar in confidence] == [2.5, 6.25, 2.5, 6.25, 15.0]
            assert [bar.get_x() for bar in decoder] == [bar.get_width() for bar in confidence]
            assert {bar.get_hatch() for bar in confidence} != {bar.get_hatch() for bar in decoder}
            assert axes.yaxis_inverted(), "in the order of the table"
        assert canvas.axes[-1].get_xlabel() == "MFLOPs per item, encoder left out"


def test_every_way_to_answer_is_a_mark_of_its_own():
    with open_figure("score against cost", COST, "t") as canvas:
        (axes,) = canvas.axes
        assert labels(axes) == ("MFLOPs per token", "score")
        assert labelled(axes) == {row["decoding"]: [(row["MFLOPs per token"], row["score"])] for row in COST}
        assert axes.get_xlim()[0] == 0
        assert axes.get_xlim()[1] > 7.5


def test_margins_stand_by_what_they_save_with_their_intervals():
    with open_figure("depth by margin", MARGINS, "t") as canvas:
        rise, depth = canvas.axes
        assert [points(line) for line in rise.lines] == [[(0.0, 0.0), (20.0, 0.5), (pytest.approx(40.0), 3.0)]]
        assert len(rise.collections) == 2, "full depth has no interval"
        assert [points(line) for line in depth.lines] == [[(0.0, 4.0), (20.0, 3.0), (pytest.approx(40.0), 2.5)]]


def test_depth_along_a_text_is_shown_at_the_first_a_middle_and_the_last_margin():
    with open_figure("depth by token", TOKENS, "t") as canvas:
        (axes,) = canvas.axes
        assert [points(line) for line in axes.lines] == [
            [(0.0, 4.0), (1.0, 4.0)],
            [(0.0, 4.0), (1.0, 2.0)],
            [(0.0, 2.0), (1.0, 2.0)],
        ]


def test_a_text_in_turns_shows_entropies_and_who_wrote_what():
    with open_figure("model by token", TURNS, "t") as canvas:
        found = labelled(canvas.axes[0])
        assert found["rolling, bits"] == [(0.0, 1.5), (1.0, 0.75)]
        assert found["written by the large model"] == [(0.0, 0.0)]


def test_the_same_rows_give_the_same_text_and_others_do_not():
    assert render_figure_svg("pareto", PARETO, "t") == render_figure_svg("pareto", PARETO, "t")
    assert render_figure_svg("pareto", PARETO, "t") != render_figure_svg("pareto", PARETO[:2], "t")


def test_the_readers_own_settings_change_nothing():
    import matplotlib

    plain = render_figure_svg("pareto", PARETO, "t")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert render_figure_svg("pareto", PARETO, "t") == plain
        assert matplotlib.rcParams["font.size"] == 30, "the settings are restored afterwards"


def test_text_stays_text_whatever_a_model_is_called():
    """A $ starts no formula, markup is escaped; characters invalid in XML are replaced, or the file would not open."""
    name = "a$b_{$c & <script>\x1b\ud800 模"
    rows = [row | {"family": name} for row in PARETO]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = texts(render_figure_svg("pareto", rows, name))
    assert found.count("a$b_{$c & <script>\ufffd\ufffd 模") == 2, "in the title and in the legend"


def test_long_titles_are_wrapped():
    with open_figure("pareto", PARETO, "a long title " * 20) as canvas:
        lines = canvas.get_suptitle().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 90


def test_rows_without_a_number_are_left_out_and_counted():
    with open_figure("score against cost", UNCOUNTED, "t") as canvas:
        assert [line.get_label() for line in canvas.axes[0].lines] == ["small alone"]
        assert canvas.get_suptitle() == "t\n(1 of 2 rows lack a number and are not drawn)"
    with open_figure("score against cost", UNCOUNTED[:1], "t") as canvas:
        assert canvas.get_suptitle() == "t"
    with pytest.raises(NoDrawableRows, match="no row has MFLOPs per token"):
        render_figure_svg("score against cost", UNCOUNTED[1:], "t")


@pytest.mark.parametrize(
    ("figure", "rows", "message"),
    [
        ("pie", PARETO, "figure='pie', but expected one of cost against quality, pareto, saving against loss"),
        ("pareto", [], "rows=[], but expected at least one row"),
        ("pareto", [{"family": "a", "rise %": 0.1}], "expected 'net reduction %', which figure 'pareto' draws"),
        ("pareto", [PARETO[0], {"family": "b"}], "columns of row 1=['family'], but expected 'net reduction %'"),
        ("pareto", [PARETO[0] | {"family": 3}], "row 0: family=3, but expected a text"),
        ("pareto", [PARETO[0] | {"rise %": "much"}], "row 0: rise %='much', but expected a number or None"),
        ("pareto", [PARETO[0] | {"rise %": True}], "row 0: rise %=True, but expected a number or None"),
        ("entropy profile", [{"layer": 1, "mean entropy, nats": 1.0, "echo %": 0.1}], "'agrees with last %'"),
        ("entropy profile", [PROFILE[0] | {"shown rise, nats": "x"}], "row 0: shown rise, nats='x', but expected"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(figure, rows, message):
    with pytest.raises(BadArgument, match=re.escape(message)):
        require_drawable(figure, rows)
    with pytest.raises(BadArgument, match=re.escape(message)):
        render_figure_svg(figure, rows, "t")


def test_what_to_draw_with_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pytest-emad\[report\]'"):
        render_figure_svg("pareto", PARETO, "t")
