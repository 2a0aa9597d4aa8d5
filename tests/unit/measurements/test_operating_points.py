"""Rows of the point table and of the explorer's tables: every number equals the replay's."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.calibration.windows import TokenSequence
from emad_ref.decoding.prefix_tree import SwitchedText
from emad_ref.decoding.switching import SwitchingRule
from emad_ref.models.loading import load
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.replay.replay import replay
from pytest_emad.claims.base import ClaimContext, answer_question, find_question_of_claim
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.operating_points import (
    CandidatePoints,
    compute_margin_losses,
    decode_tokens_singly,
    depth_collapse_note,
    find_best_truncations,
    find_readable_opening,
    judged_text_note,
    make_explorer_tables,
    make_point_attachments,
    make_point_rows,
    make_task_attachments,
    make_token_rows,
)
from pytest_emad.measurements.pair_routing import make_item_switching_token_table
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.report.depth_explorer import has_matching_lists
from pytest_emad.report.figures import require_drawable
from pytest_emad.statistics.verdicts import load_register
from tests.small_measurements import PROBES, small_evidence

FEW = replace(BUDGETS["smoke"], calibrate=12, validate=6, evaluate=9, items=4)


@pytest.fixture(scope="module")
def evidence() -> ModelMeasurements:
    return ModelMeasurements(load("emad-nano"), Study(corpus="world:premise", budget=FEW), RunResources())


@pytest.fixture(scope="module")
def points(evidence: ModelMeasurements) -> CandidatePoints:
    return evidence.points


def test_full_depth_comes_first_then_points_put_forward_then_their_rivals(points: CandidatePoints):
    rows = make_point_rows(points, {points.selected_evaluation_losses[0].point.digest: (0.001, 0.002)})
    names = [
        loss.point.name
        for loss in (points.full_loss, *points.selected_evaluation_losses, *find_best_truncations(points))
    ]
    assert [row["name"] for row in rows] == names
    assert [row["roles"][:1] for row in rows[:2]] == [[], ["calibrated default"]]
    assert [row["interval"] for row in rows[:2]] == [None, (0.001, 0.002)]
    assert all(
        row["net_reduction"] == loss.net_reduction
        for row, loss in zip(rows[1:], points.selected_evaluation_losses, strict=False)
    )
    json.dumps(rows, allow_nan=False)


def test_a_rival_is_the_best_truncation_that_saves_as_much_and_has_no_accuracy(points: CandidatePoints):
    saving = [loss for loss in points.selected_evaluation_losses if loss.net_reduction > 0]
    rivals = find_best_truncations(points)
    assert rivals
    assert len(set(rivals)) == len(rivals)
    for rival in rivals:
        assert any(rival.net_reduction >= loss.net_reduction for loss in saving)
    rows = {row["name"]: row for row in make_point_rows(points, {})}
    assert all(rows[rival.point.name]["accuracy"] == {} for rival in rivals)
    assert set(rows["full depth"]["accuracy"]) == set(points.task_scores.accuracy_tasks)
    assert all(full == same for full, same in rows["full depth"]["accuracy"].values())


def test_a_row_says_which_tasks_do_not_count_and_why(points: CandidatePoints):
    rows = {row["name"]: row for row in make_point_rows(points, {})}
    assert rows["full depth"]["not_counted"] == {}, "full depth needs no saving"
    for loss in points.selected_evaluation_losses:
        said = rows[loss.point.name]["not_counted"]
        held = {
            task: points.task_scores.measure_accuracy_against_full_depth(task, loss.point)
            for task in points.task_scores.accuracy_tasks
        }
        assert said == {task: at.exclusion.reason for task, at in held.items() if at.exclusion}
        assert said, "four items of a task show nothing"


def test_notes_say_what_was_read_and_how_soon_depth_was_down(points: CandidatePoints):
    notes = make_point_attachments(points, {}).notes
    assert notes[0] == judged_text_note(points)
    assert notes[0].startswith("emad-nano: perplexity on world:premise, 9 documents in 9 windows of up to 512 tokens")
    assert len(notes) == 1 + len(points.selected_evaluation_losses)
    assert "mean depth by position" in notes[1]
    assert depth_collapse_note(points, points.full_loss) == "emad-nano: full depth: no probes, depth is fixed"


def test_tasks_make_a_table_only_where_some_were_scored(points: CandidatePoints):
    assert make_task_attachments(points).tables == make_task_attachments(points).notes == ()
    asked = []

    def rows(at):
        asked.extend(at)
        return [{"task": "arc_easy", "point": point.name} for point in at]

    published = SimpleNamespace(make_task_rows=rows, scored_documents_note="lm-eval's arc_easy")
    held = SimpleNamespace(task_scores=SimpleNamespace(published=published), selected_points=points.selected_points)
    (table,) = make_task_attachments(held).tables
    assert table.title == "lm-eval's tasks at the points put forward"
    assert len(table.rows) == len(asked) == len(points.selected_points)
    assert make_task_attachments(held).notes == ("lm-eval's arc_easy",)


def test_the_question_shows_the_table_with_the_intervals_it_decided_by(evidence: ModelMeasurements):
    asked = ClaimContext(load_register()["EMAD-F1"], evidence.name, np.random.default_rng(0))
    answer = answer_question(find_question_of_claim("EMAD-F1"), evidence, asked)
    by_leg = {leg.name: leg.interval for leg in answer.verdict.legs}
    judged = [row for row in answer.attachments.points if row["interval"] is not None]
    assert judged
    for row in judged:
        assert row["interval"] == by_leg[f"{row['name']}: perplexity on world:premise"]


@pytest.fixture(scope="module")
def explored():
    evidence = small_evidence()
    evidence.task_scores.compute_validation_drop_by_task = lambda point: {}
    evidence.points.selected_margin_loss = Absent("none is asked for")
    return evidence.points


@pytest.fixture(scope="module")
def tables(explored):
    return {table.figure: list(table.rows) for table in make_explorer_tables(explored).tables}


def test_rows_of_margins_are_losses_of_the_evaluation_split(explored, tables):
    rows, losses = tables["depth by margin"], compute_margin_losses(explored)
    assert [row["margin, nats"] for row in rows] == [loss.point.margin_nats for loss in losses]
    assert rows[0]["point"] == explored.full_loss.point.name
    for row, loss in zip(rows, losses, strict=True):
        found = row["mean depth"], row["net reduction %"], row["perplexity"], row["rise %"]
        assert found == (loss.mean_depth, loss.net_reduction, loss.perplexity, loss.perplexity_rise)
        if loss != explored.full_loss:
            assert row["rise low %"] <= row["rise %"] <= row["rise high %"]
    margins = [row["margin, nats"] for row in rows[1:]]
    assert margins == sorted(margins, reverse=True)
    assert rows[-1]["put forward as"] == "calibrated default"


def test_depths_of_the_text_are_those_that_replay_gives_it(explored, tables):
    rows, subject = tables["depth by token"], explored.subject
    ids = np.array([int(row["token"].strip("⟨⟩")) for row in rows])
    read = sum(row["part"] == "prompt" for row in rows)
    trace = subject.take_lens_trace([TokenSequence(ids, first_decided=read - 1)], "again")
    for at, loss in enumerate(compute_margin_losses(explored)):
        found = replay(trace, loss.point)
        assert [row["depths"][at] for row in rows[read:]] == found.depth.tolist()
        said = [row["instead"][at] for row in rows[read:]]
        told = [None if one == other else f"⟨{one}⟩" for one, other in zip(found.top1, trace.target, strict=True)]
        assert said == told
    assert len({depth for row in rows[read:] for depth in row["depths"]}) > 1, "depth differs somewhere"


def test_depths_follow_from_the_signals_and_thresholds_shown(tables):
    """The plain rule: the first probe below its threshold, never deeper than the previous token."""
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


def test_thresholds_that_differ_from_token_to_token_have_no_explorer(explored, monkeypatch):
    loss = explored.full_loss
    binned = SimpleNamespace(
        point=SimpleNamespace(margin_nats=0.1, thresholds=((1.0,), (2.0,)), probes=(2,)), table=loss.table
    )
    monkeypatch.setattr(explored, "emad_sweep_losses", [explored.full_loss, binned])
    with pytest.raises(Unsupported, match="depend on the token"):
        make_explorer_tables(explored)


def test_a_corpus_of_few_documents_has_a_text_and_one_of_none_so_long_says_so(explored, monkeypatch):
    def windows(split, count):
        return [TokenSequence(np.arange(length)) for length in lengths]

    monkeypatch.setattr(explored.subject, "cut_windows", windows)
    lengths = [5, 20, 3]
    rows = make_token_rows(explored, [explored.full_loss.point, explored.selected_points[0]])
    assert [row["token"] for row in rows[:3]] == ["⟨0⟩", "⟨1⟩", "⟨2⟩"]
    lengths = [5, 3]
    with pytest.raises(Unsupported, match="no document of 12 tokens"):
        make_token_rows(explored, [explored.full_loss.point])


LETTERS = "p C i A j P a J c E e I ? p c i j e i j p i a j p e a ! p e c i a p e a i j"
SENTENCE = "On that day Ben and Cleo were cleaning the shed. Under a white cloth Ben found the old pens."


def test_a_document_that_spells_letters_is_opened_at_its_first_line_of_words(points: CandidatePoints):
    tokenizer = points.subject.loaded.tokenizer
    front = tokenizer.all_special_ids[:1]
    tokens = np.array(front + tokenizer.encode(f"{LETTERS}\n{SENTENCE}", add_special_tokens=False))
    opening = find_readable_opening(tokenizer, tokens, 12)
    assert len(opening) == 12
    assert opening[0] == front[0], "a special token stays at the front"
    assert tokenizer.decode(opening[1:]).strip() in SENTENCE
    assert find_readable_opening(tokenizer, tokens[1:], 12)[0] == opening[1], "and is not added there"
    assert (find_readable_opening(tokenizer, tokens[:20], 12) == tokens[:12]).all(), "one line opens at its start"
    assert (find_readable_opening(None, tokens, 12) == tokens[:12]).all()


def test_the_text_shown_is_in_words_even_if_depth_differs_more_on_letters(points: CandidatePoints, monkeypatch):
    tokenizer = points.subject.loaded.tokenizer
    windows = [
        TokenSequence(np.array(tokenizer.encode(text, add_special_tokens=False))) for text in (LETTERS, SENTENCE)
    ]
    margin = points.selected_points[0]
    shown = []
    for given in (windows, windows[::-1], windows[:1]):
        monkeypatch.setattr(points.subject, "cut_windows", lambda split, count, given=given: given)
        rows = make_token_rows(points, [points.full_loss.point, margin])
        shown.append("".join(row["token"] for row in rows if row["part"] == "prompt").strip())
    assert [text[:11] for text in shown] == ["On that day", "On that day", LETTERS[:11]]


def test_pieces_are_texts_of_single_tokens_and_ids_without_a_tokenizer():
    words = SimpleNamespace(backend_tokenizer="in Rust", decode=lambda ids, skip_special_tokens: f"<{ids}>")
    assert decode_tokens_singly(words, np.array([3, 4])) == ["<[3]>", "<[4]>"]
    assert decode_tokens_singly(None, np.array([3])) == ["⟨3⟩"]


# ---------------------------------------------------------------- a pair


def rules(*walks: SwitchedText) -> SimpleNamespace:
    """The attributes of a rule that ``turns`` reads."""
    model = SimpleNamespace(subject=SimpleNamespace(loaded=SimpleNamespace(tokenizer=None)))
    prompts = [Prompt(np.array([number])) for number in range(len(walks))]
    return SimpleNamespace(
        select_rule_for_paper_saving=lambda task: SwitchingRule(1.5, window=2, least_run=1),
        answer_judged_items=lambda rule, task: SimpleNamespace(walks=walks),
        answers=SimpleNamespace(make_prompts=lambda *asked: prompts, models=SimpleNamespace(large=model)),
        format_rule_name=lambda rule: "a rule",
    )


def walk(*model: int) -> SwitchedText:
    count = len(model)
    return SwitchedText(1, np.arange(10, 10 + count), np.array(model), np.arange(count) / 2, np.ones(count))


def test_the_text_shown_is_the_first_on_which_both_models_write():
    (table,) = make_item_switching_token_table(rules(walk(1, 1), walk(1, 0, 1)), "recall").tables
    assert [row["token"] for row in table.rows] == ["⟨1⟩", "⟨10⟩", "⟨11⟩", "⟨12⟩"]
    assert [row["model"] for row in table.rows] == ["large", "large", "small", "large"]
    assert [row["entropy, bits"] for row in table.rows] == [None, 0.0, 0.5, 1.0]
    assert all(math.isclose(row["threshold, bits"], 1.5) for row in table.rows)
    require_drawable(table.figure, table.rows)
    assert table.title == "a text of recall: a rule"


def test_a_pair_whose_models_never_take_turns_shows_its_first_text_and_one_that_writes_none_shows_nothing():
    (table,) = make_item_switching_token_table(rules(walk(1, 1), walk(0)), "recall").tables
    assert [row["token"] for row in table.rows] == ["⟨0⟩", "⟨10⟩", "⟨11⟩"]
    assert make_item_switching_token_table(rules(), "recall").tables == ()
