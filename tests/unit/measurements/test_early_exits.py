"""Measurements of early exits: the same items under every rule, scores in 0–1, FLOPs in parts that add up, tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import softmax

from emad_ref.absent import Absent
from emad_ref.calibration.trace import compute_layer_logits
from emad_ref.errors import BadArgument, RunStopped
from emad_ref.exit_rules import ALPHA, kept_vocabulary_size
from emad_ref.flop_ledger import flops
from emad_ref.models.geometry import published_geometry
from emad_ref.models.loading import LoadedModel, load
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import Work
from emad_ref.text.seq2seq_pairs import generate_source_target_pairs
from pytest_emad.measurements import early_exit_tasks, early_exits
from pytest_emad.measurements import early_exit_tasks as exit_tasks
from pytest_emad.measurements.early_exit_tasks import ITEMS, TASKS, WORLD, TaskItems, exact_match, score_answer
from pytest_emad.measurements.early_exits import (
    AS_CODED,
    LEAST_VOCABULARY,
    PRUNED_JSD_READINGS,
    RULES,
    ItemFlopsByPart,
    compute_flop_ratios,
    count_timed_flops,
    first_amateur_layer,
    scale_minimum_exit_layers,
    split_flops_per_item,
    tabulate_minimum_layers_by_task,
    tabulate_rules_of_all_tasks,
    time_rules,
)
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.model_under_test import ENCODER_DECODER_REFUSAL, FixedEncoderInput, ModelUnderTest
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.statistics.units import ByItem
from pytest_emad.tasks.metrics import token_f1
from tests.small_exits import LAYERS, MINIMA, TUNED, WORLD_TASKS, few_items, published, somebodys
from tests.unit.tasks.test_datasets import squad_rows, write

FEW_ITEMS, SMALL = 6, "emad-t5-tiny"


@pytest.fixture(scope="module")
def evidence() -> ModelMeasurements:
    return few_items(SMALL, FEW_ITEMS)


def test_a_threshold_above_one_is_full_depth_item_by_item(evidence: ModelMeasurements) -> None:
    full = evidence.early_exits.answer_at_point("qa", evidence.early_exits.full_depth_point)
    never = evidence.early_exits.answer_by_rule("qa", "JSD", 2, threshold=1.5)
    assert never.texts == full.texts
    assert set(full.exited.mean_exit_by_item.values) == set(never.exited.mean_exit_by_item.values) == {float(LAYERS)}
    assert len(full.texts) == len(full.exited) == FEW_ITEMS


def test_items_of_a_batch_answer_as_they_do_alone(evidence: ModelMeasurements) -> None:
    """Sources of different lengths are decoded together: item i must be item i."""
    exits, subject, item = evidence.early_exits, evidence.subject, 3
    together = exits.answer_by_rule("summary", "softmax", 2)
    with subject.open_decoder(together.point) as decoder:
        alone = decoder.generate(
            [exits.make_prompts("summary")[item]], early_exit_tasks.TASKS["summary"].new, subject.stop_tokens
        )
    text = subject.tokenizer.decode(alone.emitted[0].tolist(), skip_special_tokens=True).strip()
    assert text == together.texts[item]
    assert alone.tokens.depth.sum() == together.exited.depth_sums.values[item]


def test_confidence_decoder_and_encoder_are_everything_executed(evidence: ModelMeasurements) -> None:
    geometry = evidence.loaded.geometry
    done = evidence.early_exits.answer_by_rule("qa", "softmax, fixed", 2)
    parts = done.compute_flops_per_item(geometry)
    assert parts.total * FEW_ITEMS == pytest.approx(flops(done.counted, geometry).total)
    assert min(parts.confidence, parts.decoder, parts.encoder) > 0
    assert parts.without_encoder == pytest.approx(parts.total - parts.encoder)


def test_a_decoder_that_does_not_count_is_no_evidence_of_flops(evidence: ModelMeasurements) -> None:
    done = evidence.early_exits.answer_by_rule("qa", "softmax", 2)
    with pytest.raises(Unsupported, match="does not count"):
        replace(done, counted=None).compute_flops_per_item(evidence.loaded.geometry)


def test_teacher_forcing_reads_every_token_of_every_answer(evidence: ModelMeasurements) -> None:
    read = evidence.early_exits.read_layers("qa")
    targets = [
        len(evidence.subject.tokenizer.encode(item.target))
        for item in evidence.early_exits.task_items.load_items("qa").pairs
    ]
    assert np.bincount(read.item).tolist() == read.token_counts.values.tolist() == targets
    assert (read.ranks[:, -1] == 1).all()
    for (signal, _), (confidence, correct) in read.contrasts.items():
        assert confidence.shape == correct.shape == (sum(targets), LAYERS - MINIMA[0] - (signal == "jsd_contrast"))
        assert ((confidence >= 0) & (confidence <= 1)).all()


def test_response_is_how_far_the_best_token_leads_after_each_layer(evidence: ModelMeasurements) -> None:
    read, prompt = evidence.early_exits.read_layers("qa"), evidence.early_exits.make_prompts("qa")[0]
    target = evidence.early_exits.task_items.load_items("qa").targets[0]
    fed = np.concatenate([prompt.tokens, target[:-1]])
    p = softmax(compute_layer_logits(evidence.subject.stepper, fed, source=prompt.source), axis=-1)
    first, second = np.sort(p, axis=-1)[..., -1], np.sort(p, axis=-1)[..., -2]
    np.testing.assert_allclose(read.response[read.item == 0], first - second, atol=1e-12)  # float64
    assert ((p.argmax(axis=-1) == target[:, None]) == read.correct[read.item == 0]).all()


def test_fewer_items_than_timed_requests_are_asked_again(
    evidence: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(early_exit_tasks.ITEMS, "smoke", 1)
    alone = ModelMeasurements(evidence.loaded, evidence.study, RunResources()).early_exits
    asked = alone.subject, alone.make_prompts("qa")
    one, many = (count_timed_flops(*asked, alone.full_depth_point, pairs, 3) for pairs in (1, 4))
    assert one == many
    assert one.total > 0
    seconds = time_rules(*asked, {"softmax": alone.make_point("softmax", 2)}, 4, 3).seconds
    assert {name: len(each) for name, each in seconds.items()} == {"full": 4, "softmax": 4}


def test_long_references_are_contrasted_block_by_block(
    evidence: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evidence.early_exits.read_layers("summary")
    assert max(np.bincount(whole.item)) > 7
    monkeypatch.setattr(early_exits, "READ_TOKENS", 7)
    monkeypatch.setitem(ITEMS, "smoke", FEW_ITEMS)
    blocks = ModelMeasurements(evidence.loaded, evidence.study, RunResources()).early_exits.read_layers("summary")
    for key, (confidence, correct) in whole.contrasts.items():
        np.testing.assert_allclose(blocks.contrasts[key][0], confidence, atol=1e-12)  # float64; rows do not mix
        np.testing.assert_array_equal(blocks.contrasts[key][1], correct)


@pytest.mark.parametrize(
    ("layers", "minima"), [(24, (7, 19)), (12, (4, 10)), (10, (3, 8)), (8, (2, 6)), (6, (2, 4)), (4, (2,))]
)
def test_minimum_layers_stand_at_the_papers_share_of_depth(layers: int, minima: tuple[int, ...]) -> None:
    assert scale_minimum_exit_layers(layers) == minima


def test_both_readings_of_jsd_meet_softmax_response_at_the_layer_from_which_they_decide(
    evidence: ModelMeasurements,
) -> None:
    """A threshold of 0 exits at once: for each rule at its earliest layer."""
    exits = evidence.early_exits
    for minimum in exits.minimum_exit_layers:
        for rule, first in (("JSD", minimum + 1), (AS_CODED, minimum)):
            jsd, softmax = (
                exits.answer_by_rule("qa", *side, 0.0).exited for side in ((rule, minimum), ("softmax", first))
            )
            assert set(jsd.mean_exit_by_item.values) == set(softmax.mean_exit_by_item.values) == {float(first)}


def test_the_top_k_substitutes_the_plausible_tokens_in_the_papers_reading_and_holds_them_in_the_other(
    evidence: ModelMeasurements,
) -> None:
    """After the layer above the minimum, where one amateur is left: by hand, from the logits of both layers."""
    exits, minimum = evidence.early_exits, MINIMA[0]
    subject, tokens = exits.subject, np.array([exits.subject.opening_token, 3])
    logits = subject.reference_lens(tokens)[-1]  # [L, V]
    expert, amateur = logits[minimum], logits[minimum - 1]
    top_k = np.argsort(-amateur)[: kept_vocabulary_size(minimum, LAYERS, len(amateur))]
    p, q = softmax(expert[top_k]), softmax(amateur[top_k])
    for (reading, ending), least in zip(PRUNED_JSD_READINGS.items(), (0.0, ALPHA * p.max()), strict=True):
        head = p >= least
        second, first = np.sort(np.where(head, p / q / (p / q)[head].sum(), p))[-2:]
        with subject.open_decoder(exits.make_point(f"JSD, fixed{ending}", minimum, threshold=2.0)) as decoder:
            record = decoder.generate([Prompt(tokens, subject.audit_source_ids)], 1, frozenset())
        assert record.signal[-1, 1] == pytest.approx(first - second, abs=1e-5), reading
    assert 2 < head.sum() < len(top_k), "the readings differ"


def test_jsd_as_coded_contrasts_with_layers_from_the_second_on_or_with_the_one_below() -> None:
    assert [first_amateur_layer(minimum) for minimum in (2, 3, 8)] == [1, 2, 2]


def test_a_model_that_solves_nothing_has_no_task_that_counts(evidence: ModelMeasurements) -> None:
    """The pre-trained T5 only fills gaps; it was not trained on tasks."""
    exits = evidence.early_exits
    assert set(exits.unsolved_by_task) == set(exits.task_names)
    assert all("not solved: full depth scores" in absent.reason for absent in exits.unsolved_by_task.values())
    assert exits.solved_task_layer_pairs == []
    assert len(exits.task_layer_pairs) == len(exits.task_names) * len(MINIMA)


def test_j_is_the_layer_of_lowest_mean_confidence_on_items_that_are_not_judged(
    evidence: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = evidence.early_exits
    judged = {pair.text for pair in exits.task_items.load_items("qa").pairs}
    response = np.full((4, LAYERS), 0.9)

    def read(subject: ModelUnderTest, prompts: object, items: TaskItems, minimum: int) -> SimpleNamespace:
        assert items.pairs
        assert not judged & {pair.text for pair in items.pairs}
        return SimpleNamespace(response=response)

    monkeypatch.setattr(early_exits, "read_layers", read)
    response[:, 4], response[:, -1] = (0.1, 0.2, 0.9, 0.9), 0.0  # the last layer is no exit
    assert exits.find_layer_of_lowest_confidence("qa") == 5
    response[:, 0] = 0.2
    found = exits.find_layer_of_lowest_confidence("qa")
    assert isinstance(found, Absent)
    assert found.reason == "confidence is lowest after the first layer, 0.20: no layer is left out"


def test_calibration_sets_share_no_item_and_stray_nowhere_under_a_threshold_that_never_fires(
    evidence: ModelMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_exits, "SET_SIZE", 3)
    found = evidence.early_exits.measure_consistency("qa", (1.5, 0.0))
    assert (found.pool.shape, found.sets.shape) == ((FEW_ITEMS, 2), (2, 3, 2))
    assert (found.pool[:, 0] == 0).all()
    assert (found.sets[..., 0] == 0).all()
    assert found.mean_exit.tolist() == [LAYERS, MINIMA[0]]
    assert found.sets[..., 1].max() > 0


def test_a_saving_compares_part_by_part() -> None:
    before, after = ItemFlopsByPart(6.0, 4.0, 10.0), ItemFlopsByPart(2.0, 3.0, 10.0)
    assert compute_flop_ratios(before, after) == (3.0, 2.0, 20 / 15)


def test_costs_are_per_item(evidence: ModelMeasurements) -> None:
    geometry, work = evidence.loaded.geometry, evidence.early_exits.answer_by_rule("qa", "softmax", 2).counted
    assert isinstance(work, Work)
    assert split_flops_per_item(work, geometry).total == pytest.approx(
        FEW_ITEMS * split_flops_per_item(work, geometry, FEW_ITEMS).total
    )


def test_the_least_vocabulary_is_the_least_that_can_be_pruned() -> None:
    assert kept_vocabulary_size(8, 8, LEAST_VOCABULARY) == 2
    with pytest.raises(BadArgument, match="two can be kept"):
        kept_vocabulary_size(8, 8, LEAST_VOCABULARY - 1)


def test_rows_about_plain_documents_are_refused_with_a_reason(evidence: ModelMeasurements) -> None:
    assert evidence.subject.absent_quality == Absent(ENCODER_DECODER_REFUSAL, "premise")
    with pytest.raises(Unsupported, match="an encoder-decoder model"):
        evidence.traces.profile.point(0.0)


def test_audits_read_one_fixed_source_and_tasks_their_own(evidence: ModelMeasurements) -> None:
    subject = evidence.subject
    tokens = np.array([subject.opening_token, 5, 9])
    own = subject.compute_model_logits(tokens)
    assert np.abs(subject.reference_lens(tokens)[:, -1] - own).max() <= subject.tolerance
    with subject.open_decoder(subject.full_depth_point) as decoder:
        assert isinstance(decoder, FixedEncoderInput)
        _, fixed = decoder.start([Prompt(tokens)])
        _, other = decoder.start([Prompt(tokens, subject.audit_source_ids[::-1].copy())])
    assert np.abs(fixed.logits[0, 0] - own[-1]).max() <= subject.tolerance
    assert np.abs(other.logits - fixed.logits).max() > 0.01


TABLE_ITEMS = 2


@pytest.fixture(scope="module")
def tuned() -> ModelMeasurements:
    return few_items(TUNED, TABLE_ITEMS)


def test_full_depth_then_every_rule_at_the_papers_minima_whatever_was_asked_before(tuned: ModelMeasurements) -> None:
    exits = tuned.early_exits
    exits.answer_by_rule("summary", "JSD", 6)
    exits.answer_by_rule("qa", "softmax", 4)  # not a minimum of the paper
    (table,) = tabulate_rules_of_all_tasks(exits).tables
    per_task = [("full depth", LAYERS), *((rule, minimum) for minimum in MINIMA for rule in RULES)]
    assert [(r["task"], r["rule"], r["j"]) for r in table.rows] == [
        (task, *each) for task in WORLD_TASKS for each in per_task
    ]
    assert (table.title, table.figure) == ("early exits on world:pairs", "FLOPs by rule")
    assert all(row["j"] <= row["mean exit"] <= LAYERS for row in table.rows)


def test_answers_have_exact_match_and_summaries_have_none(tuned: ModelMeasurements) -> None:
    exits = tuned.early_exits
    (table,) = tabulate_rules_of_all_tasks(exits).tables
    qa, summary = (next(row for row in table.rows if row["task"] == task) for task in ("qa", "summary"))
    done = exits.answer_at_point("qa", exits.full_depth_point)
    references = [pair.answers for pair in exits.task_items.load_items("qa").pairs]
    right = [exact_match("qa", text, answers) for text, answers in zip(done.texts, references, strict=True)]
    assert qa["exact match"] == np.mean(right)
    assert summary["exact match"] is None


def test_flops_that_were_not_counted_are_none_and_unsolved_tasks_are_noted(tuned: ModelMeasurements) -> None:
    """A decoder that does not count work and solves nothing on one of three tasks."""
    exits = ModelMeasurements(tuned.loaded, tuned.study, RunResources()).early_exits
    exits.task_items._items.update(tuned.early_exits.task_items._items)
    for task in exits.task_names:
        for point in [
            exits.full_depth_point,
            *(exits.make_point(rule, minimum) for minimum in exits.minimum_exit_layers for rule in RULES),
        ]:
            done = tuned.early_exits.answer_at_point(task, point)
            wrong = (
                replace(done.exited, score=ByItem.from_independent_items(np.zeros(TABLE_ITEMS)))
                if task == "qa"
                else done.exited
            )
            exits._answered[task, point] = replace(done, counted=None, exited=wrong)
    shown = tabulate_rules_of_all_tasks(exits)
    assert {row["together MFLOPs"] for row in shown.tables[0].rows} == {None}
    (said,) = [note for note in shown.notes if note.startswith(f"{TUNED}: qa: ")]
    assert "not solved: full depth scores 0.000, an honest guess 0.0" in said


@pytest.mark.slow  # every minimum layer under every rule
def test_the_ablation_has_a_table_per_task_with_every_minimum_layer(tuned: ModelMeasurements) -> None:
    shown = tabulate_minimum_layers_by_task(tuned.early_exits)
    assert [table.title for table in shown.tables] == [
        f"ablation, minimum exit layer on world:pairs, {task}" for task in WORLD_TASKS
    ]
    for table in shown.tables:
        assert (table.rows[0]["rule"], table.rows[0]["mean exit"]) == ("full depth", LAYERS)
        assert [row["j"] for row in table.rows[1:]] == [minimum for minimum in range(2, LAYERS - 1) for _ in RULES]
        assert all(row["j"] <= row["mean exit"] <= LAYERS for row in table.rows[1:])


PASSAGE = "Ada put the tea in the red box. The red box is in the barn."
# enough that no budget draws all of them; the first word of an answer distinguishes them
QUESTIONS = [(f"What did {n} put?", f"{n} the tea") for n in range(120)]
SQUAD = squad_rows(PASSAGE, *QUESTIONS)
SAMSUM = [{"id": str(n), "dialogue": f"Ada: Tea, {n} cups?\nBob: Yes.", "summary": f"Bob wants {n} cups of tea."}
          for n in range(7)]  # fmt: skip


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load(TUNED)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return published(tmp_path, SQUAD, SAMSUM)


@pytest.fixture
def made(bundled: LoadedModel) -> Callable[..., ModelMeasurements]:
    return partial(somebodys, bundled)


# ---------------------------------------------------------------- choice of tasks


def test_bundled_models_are_asked_the_worlds_pairs_whatever_the_folder_holds(made, data: Path) -> None:
    asked = made(data, bundled=True).early_exits.task_items
    assert asked.names == WORLD_TASKS
    assert (asked.corpus, asked.absent_by_task, asked.absent_tasks) == (WORLD, {}, None)
    assert asked.load_items("qa").pairs == tuple(generate_source_target_pairs("qa", "evaluate", ITEMS["smoke"], 0))
    assert asked.format_title("qa") == "world:pairs, qa"
    (note,) = asked.notes
    assert "asked world:pairs, for which it was trained, and not the files of --emad-data" in note
    assert made(bundled=True).early_exits.task_items.notes == [], "nothing was cut, and there was no other item"


def test_other_models_are_asked_what_the_folder_holds(made, data: Path) -> None:
    asked = made(data).early_exits.task_items
    assert asked.names == ("squad", "samsum")
    assert (asked.corpus, asked.absent_by_task, asked.absent_tasks) == ("squad+samsum", {}, None)
    assert asked.format_title("squad") == "squad"
    assert {pair.task for pair in asked.load_items("squad").pairs} == {"squad"}


@pytest.mark.parametrize(("there", "lacking"), [("squad", "samsum"), ("samsum", "squad")])
def test_one_published_task_is_asked_and_the_other_is_missing_with_what_it_lacks(
    made, data: Path, there: str, lacking: str
) -> None:
    next((data / lacking).iterdir()).unlink()
    asked = made(data).early_exits.task_items
    assert (asked.names, asked.corpus, asked.absent_tasks) == ((there,), there, None)
    ((task, absent),) = asked.absent_by_task.items()
    assert task == lacking
    assert f"{lacking}/validation.jsonl" in absent.reason
    assert str(data) in absent.reason


def test_without_files_nothing_is_asked_and_that_is_said(made, tmp_path: Path) -> None:
    bare, empty = made(), made(tmp_path)
    assert bare.early_exits.task_names == empty.early_exits.task_names == ()
    absent = bare.early_exits.absent_premise
    assert absent.lacking == "data"
    assert absent.reason.startswith(
        "no SQuAD/SamSum files; --emad-data DIR holds squad/validation.jsonl, samsum/validation.jsonl"
    )
    assert list(bare.early_exits.absent_by_task) == ["squad", "samsum"]
    said = empty.early_exits.absent_premise.reason
    assert "no squad/validation.jsonl in --emad-data" in said
    assert "no samsum/validation.jsonl or samsum/test.jsonl in" in said


def test_a_summary_that_cannot_be_scored_is_missing_with_a_reason(
    made, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_tasks, "find_spec", lambda name: None)
    for asked, task, corpus in (
        (made(data).early_exits.task_items, "samsum", "squad"),
        (made(bundled=True).early_exits.task_items, "summary", WORLD),
    ):
        assert asked.corpus == corpus
        assert list(asked.absent_by_task) == [task]
        assert "rouge-score is not installed" in asked.absent_by_task[task].reason


# ---------------------------------------------------------------- items


@pytest.mark.parametrize(("budget", "squad", "samsum"), [("smoke", 100, 7), ("standard", 120, 7)])
def test_as_many_items_as_the_budget_allows_and_the_file_has(
    made, data: Path, budget: str, squad: int, samsum: int
) -> None:
    asked = made(data, budget=budget).early_exits.task_items
    assert [len(asked.load_items(name).pairs) for name in asked.names] == [squad, samsum]
    if budget == "smoke":
        assert asked.notes[0].endswith(
            "squad: 100 of 120 pairs of validation.jsonl; 0 sources cut to 512 tokens, 0 references to 30"
        )


def test_a_source_longer_than_the_window_loses_its_end_but_not_the_token_that_closes_it(made, data: Path) -> None:
    run = made(data)
    whole = run.early_exits.task_items.load_items("squad")
    lengths = sorted(len(source) for source in whole.sources)
    window = lengths[len(lengths) // 2]
    short = made(data)
    short.subject.window_size = window
    items = short.early_exits.task_items.load_items("squad")
    longer = sum(length > window for length in lengths)
    assert 0 < longer < len(lengths), "all or none are cut: nothing was tested"
    assert items.cut == (longer, 0)
    end = run.subject.tokenizer.eos_token_id
    for before, after in zip(whole.sources, items.sources, strict=True):
        if len(before) <= window:
            assert after.tolist() == before.tolist()
        else:
            assert after.tolist() == [*before[: window - 1], end]
    assert short.early_exits.make_prompts("squad")[0].source is items.sources[0]
    assert (
        f"squad: 100 of 120 pairs of validation.jsonl; {longer} sources cut to {window} tokens"
        in short.early_exits.task_items.notes[0]
    )


def test_a_reference_is_read_as_far_as_it_could_be_written(made, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(data)
    whole = run.early_exits.task_items.load_items("samsum").targets
    monkeypatch.setitem(TASKS, "samsum", replace(TASKS["samsum"], new=5))
    short = made(data).early_exits.task_items
    assert [target.tolist() for target in short.load_items("samsum").targets] == [t[:5].tolist() for t in whole]
    assert short.load_items("samsum").cut == (0, 7)
    assert "7 references to 5" in short.notes[1]


def test_a_file_that_does_not_fit_ends_the_run(made, data: Path) -> None:
    write(data / "samsum/validation.jsonl", [{"id": "1", "dialogue": " ", "summary": "Nothing."}])
    with pytest.raises(RunStopped, match=r"validation\.jsonl, line 1: dialogue"):
        made(data).early_exits.task_items.load_items("samsum")


def test_limits_of_new_tokens_are_those_of_the_task(made, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that never stops is written up to its task's limit."""
    monkeypatch.setitem(exit_tasks.ITEMS, "smoke", 1)
    run, asked = made(data), []
    monkeypatch.setattr(ModelUnderTest, "stop_tokens", frozenset())
    for task in run.early_exits.task_names:
        asked.append(
            int(run.early_exits.answer_at_point(task, run.early_exits.full_depth_point).exited.tokens.values[0])
        )
    assert asked == [30, 128]
    assert {name: task.new for name, task in TASKS.items()} == {
        "qa": 8, "summary": 44, "count": 44, "squad": 30, "samsum": 128,
    }  # fmt: skip


@pytest.mark.parametrize("task", WORLD_TASKS)
def test_no_answer_of_the_world_is_cut(bundled: LoadedModel, task: str) -> None:
    longest = max(
        len(bundled.tokenizer.encode(pair.target)) for pair in generate_source_target_pairs(task, "evaluate", 500)
    )
    assert longest < TASKS[task].new


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("task", ["qa", "squad"])
def test_an_answer_has_the_f1_of_the_reference_that_fits_best(task: str) -> None:
    assert score_answer(task, "the red box", ["nothing", "a red box"]) == 1.0
    assert score_answer(task, "red", ["red box", "barn"]) == pytest.approx(2 / 3) == token_f1("red", "red box")
    assert exact_match(task, "The red box.", ["barn", "red box"]) == 1.0
    assert exact_match(task, "red", ["red box"]) == 0.0


@pytest.mark.parametrize("task", ["summary", "samsum"])
def test_a_summary_has_rouge_l_and_no_exact_match(task: str) -> None:
    pytest.importorskip("rouge_score", reason="the extra `tasks` is not installed")
    assert score_answer(task, "Kai lost the box.", ["nobody", "Kai lost the box."]) == 1.0
    assert score_answer(task, "Kai lost", ["Kai lost the box"]) == pytest.approx(2 / 3)  # 2 of 2 words, 2 of 4
    assert exact_match(task, "Kai lost the box.", ["Kai lost the box."]) is None


def test_a_chain_is_right_where_its_last_number_is() -> None:
    right = "12 + 3 = 15. So Ala has 15 tincups."
    assert score_answer("count", "2 + 3 = 5. So Ala has 15 tincups.", [right]) == 1.0
    assert score_answer("count", "12 + 3 = 15. So Ala has 1 tincups.", [right]) == 0.0
    assert score_answer("count", "no number", ["none here either"]) == 0.0
    assert exact_match("count", "2 + 3 = 5. So Ala has 15 tincups.", [right]) == 0.0


# ---------------------------------------------------------------- independent units, and guessing

TWO_TEXTS = [
    *squad_rows(PASSAGE, *QUESTIONS[:60]),
    *squad_rows(f"Then: {PASSAGE}", *QUESTIONS[:60]),
    *squad_rows(f"Later: {PASSAGE}", QUESTIONS[0]),
]


def test_questions_about_one_paragraph_share_a_cluster_and_items_of_the_world_do_not(made, data: Path) -> None:
    write(data / "squad/validation.jsonl", TWO_TEXTS)
    items = made(data).early_exits.task_items.load_items("squad")
    texts = [pair.text for pair in items.pairs]
    assert 2 <= len(set(texts)) <= 3
    assert len(set(items.text_ids.tolist())) == len(set(texts))
    assert all(texts[i] == texts[list(items.text_ids).index(number)] for i, number in enumerate(items.text_ids))
    assert len(items.cluster_values_by_text(items.text_ids).independent_values) == len(set(texts))
    assert items.cluster_values_by_text(items.text_ids).cluster is items.text_ids
    for task in WORLD_TASKS:
        assert (
            made(bundled=True)
            .early_exits.task_items.load_items(task)
            .cluster_values_by_text([0.0] * ITEMS["smoke"])
            .has_only_independent_items
        )


def test_what_calibrates_is_about_other_texts_each_about_its_own(made, data: Path) -> None:
    write(data / "squad/validation.jsonl", TWO_TEXTS)
    asked = made(data).early_exits.task_items
    judged = {pair.text for pair in asked.load_items("squad").pairs}
    others = [pair.text for pair in asked.load_items_of_other_texts("squad", 50).pairs]
    assert len(others) == 3 - len(judged) == len(set(others) - judged)
    assert asked.load_items_of_other_texts("squad", 50, by=2).pairs == ()
    worlds = made(bundled=True).early_exits.task_items
    for task in WORLD_TASKS:
        judged = {pair.text for pair in worlds.load_items(task).pairs}
        others = [pair.text for pair in worlds.load_items_of_other_texts(task, 75, by=50).pairs]
        assert len(others) == len(set(others) - judged) == 50


def test_an_honest_guess_is_the_commonest_answer_or_what_the_source_offers(made, data: Path) -> None:
    worlds = made(bundled=True).early_exits.task_items
    guessed = {task: float(worlds.compute_guess_scores(task).mean()) for task in WORLD_TASKS}
    assert guessed == pytest.approx({"qa": 0.03, "summary": 0.41, "count": 0.01}, abs=0.02)  # a lead is half a summary
    same = [{"id": str(n), "dialogue": f"Ada: {n}?\nBob: Yes.", "summary": "Bob agrees."} for n in range(300)]
    write(data / "samsum/validation.jsonl", same)
    pytest.importorskip("rouge_score", reason="the extra `tasks` is not installed")
    assert made(data).early_exits.task_items.compute_guess_scores("samsum").tolist() == [1.0] * 100, (
        "every model answers that"
    )


# ---------------------------------------------------------------- premises


def test_a_model_without_room_for_the_settings_has_no_room_with_files_either(made, data: Path) -> None:
    small = replace(published_geometry("t5-large"), layers=3)
    absent = made(data, geometry=small).early_exits.absent_premise
    assert (absent.lacking, "no room" in absent.reason) == ("premise", True)


def test_random_weights_and_a_lost_tokenizer_are_told_apart(made, data: Path) -> None:
    random, wordless = (
        made(data, **fact).early_exits.absent_premise for fact in ({"trained": False}, {"tokenizer": None})
    )
    assert (random.lacking, "random weights" in random.reason) == ("premise", True)
    assert (wordless.lacking, "without a tokenizer" in wordless.reason) == ("data", True)
    assert made(data).early_exits.absent_premise is None
    decoder_only = somebodys(load("emad-nano")).early_exits.absent_premise
    assert (decoder_only.lacking, "a decoder-only model" in decoder_only.reason) == ("premise", True)
