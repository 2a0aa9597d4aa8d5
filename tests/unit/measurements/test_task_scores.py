"""Published tasks and the world's own tasks: items that are scored, their pairing, and reasons for unscored tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emad_ref.absent import Absent
from emad_ref.errors import RunStopped
from emad_ref.exit_rules import fixed_entropy_point
from emad_ref.models.loading import LoadedModel, load
from emad_ref.point import full_depth
from pytest_emad.audit.finding import AuditRefutedError
from pytest_emad.measurements import task_scores
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import BUDGETS, Study
from pytest_emad.tasks.scoring import CONTINUATION_CHOICE
from tests.decoders.foreign_decoder import ForeignDecoder
from tests.unit.tasks.test_datasets import squad_rows, write, write_folder

pytest.importorskip("lm_eval", reason="the extra `tasks` is not installed")
from pytest_emad.tasks import evaluation
from pytest_emad.tasks.evaluation import evaluate_tasks
from pytest_emad.tasks.lm_eval_model import EmadLM

EARLY = fixed_entropy_point(4, (1, 2, 3), 1.0)
FULL = full_depth(4)
SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip

Make = Callable[..., ModelMeasurements]


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("data"))
    problem = {"problem": "One?", "level": "Level 1", "type": "any", "solution": "$\\boxed{1}$."}
    for subject in SUBJECTS:
        for split in ("train", "test"):
            write(folder / f"math/{subject}/{split}.jsonl", [problem])
    return folder


@pytest.fixture
def made(nano: LoadedModel, data: Path) -> Make:
    """Return measurements of a run with these options; ``decoder`` makes the decoder under test, default: reference."""

    def make(*tasks: str, decoder: Any = None, loaded: LoadedModel = nano, **options: Any) -> ModelMeasurements:
        study = Study(**{"corpus": "self", "data": data, "tasks": frozenset(tasks), **options})
        return ModelMeasurements(loaded, study, RunResources() if decoder is None else RunResources(decoder))

    return make


@pytest.fixture
def without_stock_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lm-eval have no definitions of its own, which take 8 s to find; ``test_own_tasks`` reads them."""
    real = evaluation._task_manager
    monkeypatch.setattr(
        evaluation, "_task_manager", lambda data, own, *, with_defaults: real(data, own, with_defaults=False)
    )


# ---------------------------------------------------------------- scored tasks


def test_right_and_wrong_answers_are_lm_evals_per_document(made: Make, nano: LoadedModel, data: Path) -> None:
    scored = made("arc_easy", "gsm8k", limit=3).task_scores
    named = scored.published.accuracy_tasks
    assert named == ["arc_easy", "gsm8k"]
    for point in (FULL, EARLY):
        theirs = evaluate_tasks(EmadLM(nano, point=point), named, data=data, limit=3)
        for task in named:
            assert scored.correctness_by_item(task, point).values.dtype == np.bool_
            assert scored.correctness_by_item(task, point).values.tolist() == theirs[task].scores.astype(bool).tolist()


def test_guessing_gets_one_option_in_so_many_or_the_most_frequent_answer(
    made: Make, tmp_path: Path, data: Path
) -> None:
    """The folder's two questions have two and three options; their answers are at different places."""
    assert made("arc_easy", limit=1).task_scores.compute_chance_or_majority_accuracy("arc_easy") == 1.0, (
        "one question: its answer is the most frequent"
    )
    rows = [{"question": f"{n}?", "answer": f"It is so. #### {number}"} for n, number in enumerate([7, 7, 3, 4, 1000])]
    write(tmp_path / "gsm8k/train.jsonl", rows)
    write(tmp_path / "gsm8k/test.jsonl", rows)
    assert made("gsm8k", data=tmp_path).task_scores.compute_chance_or_majority_accuracy("gsm8k") == 0.4


def test_the_worlds_own_tasks_say_what_a_guess_from_their_input_gets(made: Make) -> None:
    """Published under lm-eval's name as well: of answers that are all different, the own one is the most frequent."""
    assert made("world_facts", corpus="self", limit=60).task_scores.compute_chance_or_majority_accuracy(
        "world_facts"
    ) == pytest.approx(1 / 60)


def test_what_a_point_saves_on_a_task_is_replayed_on_its_own_requests(
    made: Make, nano: LoadedModel, data: Path
) -> None:
    """Exits at the first layer save most, full depth nothing; generated answers are read as full depth wrote them."""
    scored = made("arc_easy", "gsm8k", limit=2).task_scores
    shallow = fixed_entropy_point(4, (1,), 1e9)
    for task in scored.published.accuracy_tasks:
        assert scored.measure_accuracy_against_full_depth(task, FULL).saving == 0.0
        assert 0.3 < scored.measure_accuracy_against_full_depth(task, shallow).saving < 0.8
        assert (
            scored.measure_accuracy_against_full_depth(task, shallow).saving
            > scored.measure_accuracy_against_full_depth(task, EARLY).saving
        )
        assert "not exercised: saves 0.0 %" in scored.measure_accuracy_against_full_depth(task, FULL).exclusion.reason
    lm = EmadLM(nano, point=FULL)
    evaluate_tasks(lm, ["gsm8k"], data=data, limit=2)
    assert len(lm.decided) == 2
    for sequence in lm.decided:
        prompt = lm.tokenizer.decode(sequence.tokens[: sequence.first_decided + 1].tolist())
        assert prompt.endswith("Answer:")
        assert len(sequence.tokens) > sequence.first_decided + 1


def test_questions_about_one_paragraph_are_one_cluster(made: Make, tmp_path: Path) -> None:
    rows = [*squad_rows("One.", ("a?", "One"), ("b?", "One")), *squad_rows("One. Two.", ("c?", "One"))]
    write(tmp_path / "squad/validation.jsonl", rows)
    right = made("squad", data=tmp_path).task_scores.correctness_by_item("squad", FULL)
    first, second, third = right.cluster.tolist()
    assert first == second != third


def test_perplexity_tasks_are_further_corpora_paired_with_full_depth(made: Make, nano: LoadedModel, data: Path) -> None:
    scored = made("wikitext", "arc_easy").task_scores
    ((name, (nll, full, tokens)),) = scored.published.compute_document_nlls_by_task(EARLY).items()
    assert name == "lm-eval's wikitext"
    assert scored.published.accuracy_tasks == ["arc_easy"]
    theirs = [evaluate_tasks(EmadLM(nano, point=p), ["wikitext"], data=data)["wikitext"] for p in (EARLY, FULL)]
    np.testing.assert_array_equal(nll.values, theirs[0].scores)
    np.testing.assert_array_equal(full.values, theirs[1].scores)
    np.testing.assert_array_equal(tokens.values, theirs[0].tokens)
    assert np.abs(nll.values - full.values).max() > 0.01, "depth made no difference: nothing was tested"


def test_a_score_that_is_neither_right_nor_wrong_is_shown_and_not_judged(made: Make) -> None:
    run = made("samsum", limit=1)
    assert run.task_scores.published.accuracy_tasks == []
    assert run.task_scores.published.compute_document_nlls_by_task(EARLY) == {}
    (shown,) = run.task_scores.published.make_task_rows([EARLY])
    assert (shown["task"], shown["metric"], shown["point"]) == ("samsum", "rougeL", EARLY.name)


def test_a_group_is_one_task_and_its_parts_are_not_counted_again(made: Make) -> None:
    scored = made("hendrycks_math", "hendrycks_math_algebra", limit=1).task_scores
    assert scored.published.accuracy_tasks == ["hendrycks_math"]
    assert scored.published.scorable_tasks["hendrycks_math"].documents == len(SUBJECTS)


def test_contexts_that_lose_their_beginning_are_counted_over_a_whole_group(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note names the task and the number."""
    long = {"problem": "One and one? " * 120, "level": "Level 1", "type": "any", "solution": "$\\boxed{2}$."}
    for subject in SUBJECTS:
        write(tmp_path / f"math/{subject}/test.jsonl", [long])
    run = made("hendrycks_math", data=tmp_path, limit=1)
    note = run.task_scores.published.scored_documents_note
    assert f"lose their beginning ({len(SUBJECTS)} of hendrycks_math's requests)" in note


def test_a_tag_is_its_tasks(made: Make) -> None:
    assert made("ai2_arc").task_scores.published.accuracy_tasks == ["arc_challenge", "arc_easy"]


def test_the_worlds_own_tasks_are_not_counted_again_on_a_corpus_of_the_world(made: Make) -> None:
    assert made("world_recall", corpus="self", limit=2).task_scores.published.accuracy_tasks == ["world_recall"]
    assert made("world_recall", corpus="world:premise").task_scores.published.accuracy_tasks == []


def test_margins_are_chosen_without_published_tasks(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        task_scores.LmEvalTaskScorer, "evaluate_task", lambda *_: pytest.fail("a published task was scored")
    )
    assert set(made("arc_easy").task_scores.compute_validation_drop_by_task(EARLY)) <= {CONTINUATION_CHOICE}


@pytest.mark.parametrize(
    ("limit", "budget", "documents"), [(3, "smoke", 3), (None, "smoke", 5), (None, "standard", 7), (6, "smoke", 6)]
)
def test_as_many_documents_as_asked_for_else_all_else_what_the_smallest_budget_holds(
    made: Make, limit: int | None, budget: str, documents: int
) -> None:
    run = made("gsm8k", limit=limit, budget=replace(BUDGETS[budget], items=5))
    assert run.task_scores.published.scorable_tasks["gsm8k"].documents == documents
    bounded = limit is None and budget == "smoke"
    assert ("--emad-limit sets another number" in run.task_scores.published.scored_documents_note) == bounded


# ---------------------------------------------------------------- origin of the scores


def test_a_foreign_decoder_is_asked_token_by_token(made: Make, nano: LoadedModel) -> None:
    asked = []

    def foreign(request: Any) -> ForeignDecoder:
        asked.append(request.point.name)
        return ForeignDecoder(request.model.load().model, request.point)

    theirs, ours = made("arc_easy", decoder=foreign), made("arc_easy")
    for point in (FULL, EARLY):
        assert (
            theirs.task_scores.correctness_by_item("arc_easy", point).values.tolist()
            == ours.task_scores.correctness_by_item("arc_easy", point).values.tolist()
        )
    assert asked == [FULL.name, EARLY.name]


@pytest.mark.parametrize("task", ["wikitext", "gsm8k"])
def test_what_a_foreign_decoder_gets_wrong_is_refuted(made: Make, task: str) -> None:
    """The decoder under test is scored: one that always exits first is not full depth, so it gets no score."""
    shallow = fixed_entropy_point(4, (1,), 1e9)
    lying = made(task, decoder=lambda request: ForeignDecoder(request.model.load().model, shallow), limit=1)
    with pytest.raises(
        AuditRefutedError, match=r"answers that this verdict reads, session, row 0, position \d+"
    ) as complaint:
        lying.task_scores.published.evaluate_task(task, FULL)
    assert complaint.value.finding is not None
    assert complaint.value.finding.check == "answers"


# ---------------------------------------------------------------- unscored tasks


def test_programs_need_leave_and_a_sandbox(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (refused,) = made("humaneval").task_scores.published.absent_by_task.values()
    assert "--emad-allow-code-execution allows that" in refused.reason
    monkeypatch.setattr(task_scores, "absent_sandbox", lambda: Absent("no namespaces"))
    (refused,) = made("humaneval", allow_code_execution="confined").task_scores.published.absent_by_task.values()
    assert refused == Absent("no namespaces")
    (other,) = made("humaneval", allow_code_execution="unconfined").task_scores.published.absent_by_task.values()
    assert other == Absent("it takes 1024 new tokens, and the model has 512 positions")


def test_a_model_too_short_for_the_answers_says_so(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_scores, "absent_sandbox", lambda: None)
    (absent,) = made("humaneval", allow_code_execution="confined").task_scores.published.absent_by_task.values()
    assert absent == Absent("it takes 1024 new tokens, and the model has 512 positions")


def test_without_a_tokenizer_no_text_can_be_scored(made: Make, nano: LoadedModel) -> None:
    (absent,) = made("arc_easy", loaded=replace(nano, tokenizer=None)).task_scores.published.absent_by_task.values()
    assert "without a tokenizer" in absent.reason


def test_data_out_of_reach_leaves_a_reason_that_names_the_folder_option(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_emad.tasks.datasets.is_hub_reachable", lambda: False)
    monkeypatch.setenv("HF_DATASETS_CACHE", "nowhere")
    (absent,) = made("arc_easy", data=None).task_scores.published.absent_by_task.values()
    assert "out of reach" in absent.reason
    assert "--emad-data DIR" in absent.reason


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("gsm9k", r"--emad-tasks='gsm9k', but expected a task of lm-eval.*gsm8k.*wikitext.*nearest: gsm8k"),
        ("pile", "data=.*pile.*, but expected a folder that holds valid"),
    ],
)
def test_a_task_that_is_not_there_ends_the_run(
    made: Make, tmp_path: Path, without_stock_tasks: None, task: str, said: str
) -> None:
    with pytest.raises(RunStopped, match=said):
        made(task, data=tmp_path).task_scores.published.require_known_tasks()


def test_without_lm_eval_the_extra_is_named(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(RunStopped, match=r"--emad-tasks='arc_easy' needs lm_eval, .*pytest-emad\[tasks\]"):
        made("arc_easy").task_scores.published.require_known_tasks()
    assert made().task_scores.accuracy_tasks == [CONTINUATION_CHOICE]
