"""The explorer's tables: every number is the replay's, and depths follow from the signals shown beside them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.calibration.trace import TokenSequence
from emad_ref.decoding.prefix_tree import SwitchedText
from emad_ref.decoding.switching import SwitchingRule
from emad_ref.measurements.operating_points import explorer_tables, margin_losses, token_rows, token_texts
from emad_ref.measurements.pair_routing import turn_table
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.replay import replay
from emad_ref.report.depth_explorer import has_matching_lists
from emad_ref.report.figures import require_drawable
from tests.small_evidence import PROBES, small_evidence


@pytest.fixture(scope="module")
def points():
    evidence = small_evidence()
    evidence.scored.__dict__["validation_drops"] = lambda point: {}
    evidence.points.__dict__["selected"] = None
    return evidence.points


@pytest.fixture(scope="module")
def tables(points):
    return {table.figure: list(table.rows) for table in explorer_tables(points).tables}


def test_rows_of_margins_are_losses_of_the_evaluation_split(points, tables):
    rows, losses = tables["depth by margin"], margin_losses(points)
    assert [row["margin, nats"] for row in rows] == [loss.point.margin_nats for loss in losses]
    assert rows[0]["point"] == points.full_loss.point.name
    for row, loss in zip(rows, losses, strict=True):
        found = row["mean depth"], row["net reduction %"], row["perplexity"], row["rise %"]
        assert found == (loss.mean_depth, loss.net_reduction, loss.perplexity, loss.perplexity_rise)
        if loss is not points.full_loss:
            assert row["rise low %"] <= row["rise %"] <= row["rise high %"]
    margins = [row["margin, nats"] for row in rows[1:]]
    assert margins == sorted(margins, reverse=True)
    assert rows[-1]["put forward as"] == "calibrated default"


def test_depths_of_the_text_are_those_that_replay_gives_it(points, tables):
    rows, subject = tables["depth by token"], points.subject
    ids = np.array([int(row["token"].strip("⟨⟩")) for row in rows])
    read = sum(row["part"] == "prompt" for row in rows)
    trace = subject.trace([TokenSequence(ids, adaptive_from=read - 1)], "again")
    for at, loss in enumerate(margin_losses(points)):
        found = replay(trace, loss.point)
        assert [row["depths"][at] for row in rows[read:]] == found.depth.tolist()
        said = [row["instead"][at] for row in rows[read:]]
        told = [None if one == other else f"⟨{one}⟩" for one, other in zip(found.top1, trace.target, strict=True)]
        assert said == told
    assert len({depth for row in rows[read:] for depth in row["depths"]}) > 1, "depth differs somewhere"


def test_depths_follow_from_the_signals_and_thresholds_shown(tables):
    """The plain rule: the first probe below its threshold, and never deeper than the token before."""
    decided = [row for row in tables["depth by token"] if row["depths"]]
    for at, margin in enumerate(tables["depth by margin"]):
        cap = max(decided[0]["depths"])
        for row in decided:
            fired = [
                probe
                for probe, entropy, threshold in zip(
                    margin["probes"], row["entropy, nats"], margin["thresholds, nats"], strict=False
                )
                if entropy <= threshold
            ]
            cap = min([cap, *fired])
            assert row["depths"][at] == cap


def test_the_tables_are_what_the_page_and_the_figures_read(tables):
    assert has_matching_lists(tables["depth by margin"], tables["depth by token"])
    for figure, rows in tables.items():
        require_drawable(figure, rows)
        assert not [value for row in rows for value in row.values() if isinstance(value, np.generic)]
    assert all(row["probes"] in ([], list(PROBES)) for row in tables["depth by margin"])


def test_thresholds_that_differ_from_token_to_token_have_no_explorer(points, monkeypatch):
    loss = points.full_loss
    binned = replace(loss, point=SimpleNamespace(margin_nats=0.1, thresholds=((1.0,), (2.0,)), probes=(2,)))
    monkeypatch.setitem(points.__dict__, "emad_sweep", [binned])
    with pytest.raises(Unsupported, match="depend on the token"):
        explorer_tables(points)


def test_a_corpus_of_few_documents_has_a_text_and_one_of_none_so_long_says_so(points, monkeypatch):
    def windows(split, count):
        return [TokenSequence(np.arange(length)) for length in lengths]

    monkeypatch.setattr(points.subject, "sequences", windows)
    lengths = [5, 20, 3]
    rows = token_rows(points, [points.full_loss.point, points.put_forward[0]])
    assert [row["token"] for row in rows[:3]] == ["⟨0⟩", "⟨1⟩", "⟨2⟩"]
    lengths = [5, 3]
    with pytest.raises(Unsupported, match="no document of 12 tokens"):
        token_rows(points, [points.full_loss.point])


def test_pieces_are_texts_of_single_tokens_and_ids_without_a_tokenizer():
    assert token_texts(SimpleNamespace(decode=lambda ids: f"<{ids}>"), np.array([3, 4])) == ["<[3]>", "<[4]>"]
    assert token_texts(None, np.array([3])) == ["⟨3⟩"]


# ---------------------------------------------------------------- a pair


def rules(*walks: SwitchedText) -> SimpleNamespace:
    """As far as ``turns`` reads them."""
    model = SimpleNamespace(subject=SimpleNamespace(loaded=SimpleNamespace(tokenizer=None)))
    prompts = [Prompt(np.array([number])) for number in range(len(walks))]
    return SimpleNamespace(
        put_forward=lambda task: SwitchingRule(1.5, window=2, least_run=1),
        judged=lambda rule, task: SimpleNamespace(walks=walks),
        answers=SimpleNamespace(prompts=lambda *asked: prompts, models=SimpleNamespace(large=model)),
        called=lambda rule: "a rule",
    )


def walk(*model: int) -> SwitchedText:
    count = len(model)
    return SwitchedText(1, np.arange(10, 10 + count), np.array(model), np.arange(count) / 2, np.ones(count))


def test_the_text_shown_is_the_first_on_which_both_models_write():
    (table,) = turn_table(rules(walk(1, 1), walk(1, 0, 1)), "recall").tables
    assert [row["token"] for row in table.rows] == ["⟨1⟩", "⟨10⟩", "⟨11⟩", "⟨12⟩"]
    assert [row["model"] for row in table.rows] == ["large", "large", "small", "large"]
    assert [row["entropy, bits"] for row in table.rows] == [None, 0.0, 0.5, 1.0]
    assert all(math.isclose(row["threshold, bits"], 1.5) for row in table.rows)
    require_drawable(table.figure, table.rows)
    assert table.title == "a text of recall: a rule"


def test_a_pair_whose_models_never_take_turns_shows_its_first_text_and_one_that_writes_none_shows_nothing():
    (table,) = turn_table(rules(walk(1, 1), walk(0)), "recall").tables
    assert [row["token"] for row in table.rows] == ["⟨0⟩", "⟨10⟩", "⟨11⟩"]
    assert turn_table(rules(), "recall").tables == ()
