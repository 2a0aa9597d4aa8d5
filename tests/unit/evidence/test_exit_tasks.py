"""What early exits are asked: the world's pairs or published files, how they are cut, scored, and spoken of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from emad_ref.errors import RunStopped
from emad_ref.measurements import early_exit_tasks as exit_tasks
from emad_ref.measurements.early_exit_tasks import ITEMS, TASKS, WORLD, exact_match, score_answer
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.model_under_test import ModelUnderTest
from emad_ref.models.geometry import geometry_named
from emad_ref.models.loading import LoadedModel, load
from emad_ref.tasks.metrics import token_f1
from emad_ref.text.seq2seq_pairs import generate_pairs
from tests.small_exits import TUNED, WORLD_TASKS, published, somebodys
from tests.unit.tasks.test_datasets import write

PASSAGE = "Ada put the tea in the red box. The red box is in the barn."
# as many as no budget's draw takes whole; the first word of an answer tells them apart
QUESTIONS = [{"id": str(n), "question": f"What did {n} put?", "answers": [{"text": f"{n} the tea", "answer_start": 0}]}
             for n in range(120)]  # fmt: skip
SQUAD = {"version": "1.1", "data": [{"title": "Tea", "paragraphs": [{"context": PASSAGE, "qas": QUESTIONS}]}]}
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


# ---------------------------------------------------------------- which tasks


def test_bundled_models_are_asked_the_worlds_pairs_whatever_the_folder_holds(made, data: Path) -> None:
    asked = made(data, bundled=True).exits.asked
    assert asked.names == WORLD_TASKS
    assert (asked.corpus, asked.missing, asked.none) == (WORLD, {}, "")
    assert asked.items("qa").pairs == tuple(generate_pairs("qa", "evaluate", ITEMS["smoke"], 0))
    assert asked.title("qa") == "world:pairs, qa"
    (note,) = asked.notes
    assert "asked world:pairs, for which it was trained, and not the files of --emad-data" in note
    assert made(bundled=True).exits.asked.notes == [], "nothing was cut, and nothing else was there to ask"


def test_other_models_are_asked_what_the_folder_holds(made, data: Path) -> None:
    asked = made(data).exits.asked
    assert asked.names == ("squad", "samsum")
    assert (asked.corpus, asked.missing, asked.none) == ("squad+samsum", {}, "")
    assert asked.title("squad") == "squad"
    assert {pair.task for pair in asked.items("squad").pairs} == {"squad"}


@pytest.mark.parametrize(
    ("there", "lacking", "file"), [("squad", "samsum", "val.json"), ("samsum", "squad", "dev-v1.1.json")]
)
def test_one_published_task_is_asked_and_the_other_is_missing_with_what_it_lacks(
    made, data: Path, there: str, lacking: str, file: str
) -> None:
    next((data / lacking).iterdir()).unlink()
    asked = made(data).exits.asked
    assert (asked.names, asked.corpus, asked.none) == ((there,), there, "")
    ((task, reason),) = asked.missing.items()
    assert task == lacking
    assert f"{lacking}/{file}" in reason
    assert str(data) in reason


def test_without_files_nothing_is_asked_and_that_is_said(made, tmp_path: Path) -> None:
    bare, empty = made(), made(tmp_path)
    assert bare.exits.tasks == empty.exits.tasks == ()
    absence = bare.exits.absence
    assert absence.outcome == "unmeasured"
    assert absence.reason.startswith(
        "no SQuAD/SamSum files; --emad-data DIR holds squad/dev-v1.1.json, samsum/val.json"
    )
    assert list(bare.exits.missing) == ["squad", "samsum"]
    said = empty.exits.absence.reason
    assert "no squad/dev-v1.1.json in --emad-data" in said
    assert "no samsum/val.json or samsum/test.json in" in said


def test_a_summary_that_cannot_be_scored_is_missing_with_a_reason(
    made, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_tasks, "find_spec", lambda name: None)
    for asked, task, corpus in (
        (made(data).exits.asked, "samsum", "squad"),
        (made(bundled=True).exits.asked, "summary", WORLD),
    ):
        assert asked.corpus == corpus
        assert list(asked.missing) == [task]
        assert "rouge-score is not installed" in asked.missing[task]


# ---------------------------------------------------------------- items


@pytest.mark.parametrize(("budget", "squad", "samsum"), [("smoke", 100, 7), ("standard", 120, 7)])
def test_as_many_items_as_the_budget_allows_and_the_file_has(
    made, data: Path, budget: str, squad: int, samsum: int
) -> None:
    asked = made(data, budget=budget).exits.asked
    assert [len(asked.items(name).pairs) for name in asked.names] == [squad, samsum]
    if budget == "smoke":
        assert asked.notes[0].endswith(
            "squad: 100 of 120 pairs of dev-v1.1.json; 0 sources cut to 512 tokens, 0 references to 30"
        )


def test_a_source_longer_than_the_window_loses_its_end_but_not_the_token_that_closes_it(made, data: Path) -> None:
    run = made(data)
    whole = run.exits.asked.items("squad")
    lengths = sorted(len(source) for source in whole.sources)
    window = lengths[len(lengths) // 2]
    short = made(data)
    short.subject.__dict__["window"] = window
    items = short.exits.asked.items("squad")
    longer = sum(length > window for length in lengths)
    assert 0 < longer < len(lengths), "all or none are cut: nothing was told apart"
    assert items.cut == (longer, 0)
    end = run.subject.tokenizer.eos_token_id
    for before, after in zip(whole.sources, items.sources, strict=True):
        if len(before) <= window:
            assert after.tolist() == before.tolist()
        else:
            assert after.tolist() == [*before[: window - 1], end]
    assert short.exits.prompts("squad")[0].source is items.sources[0]
    assert (
        f"squad: 100 of 120 pairs of dev-v1.1.json; {longer} sources cut to {window} tokens"
        in short.exits.asked.notes[0]
    )


def test_a_reference_is_read_as_far_as_it_could_be_written(made, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(data)
    whole = run.exits.asked.items("samsum").targets
    monkeypatch.setitem(TASKS, "samsum", replace(TASKS["samsum"], new=5))
    short = made(data).exits.asked
    assert [target.tolist() for target in short.items("samsum").targets] == [t[:5].tolist() for t in whole]
    assert short.items("samsum").cut == (0, 7)
    assert "7 references to 5" in short.notes[1]


def test_a_file_that_does_not_fit_ends_the_run(made, data: Path) -> None:
    write(data / "samsum/val.json", [{"id": "1", "dialogue": " ", "summary": "Nothing."}])
    with pytest.raises(RunStopped, match=r"val\.json, \[0\]: dialogue"):
        made(data).exits.asked.items("samsum")


def test_limits_of_new_tokens_are_those_of_the_task(made, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that never stops is written as long as its task allows."""
    monkeypatch.setitem(exit_tasks.ITEMS, "smoke", 1)
    run, asked = made(data), []
    monkeypatch.setattr(ModelUnderTest, "stop", frozenset())
    for task in run.exits.tasks:
        asked.append(int(run.exits.under(task, run.exits.full).exited.tokens.values[0]))
    assert asked == [30, 128]
    assert {name: task.new for name, task in TASKS.items()} == {
        "qa": 8, "summary": 44, "count": 44, "squad": 30, "samsum": 128,
    }  # fmt: skip


@pytest.mark.parametrize("task", WORLD_TASKS)
def test_no_answer_of_the_world_is_cut(bundled: LoadedModel, task: str) -> None:
    longest = max(len(bundled.tokenizer.encode(pair.target)) for pair in generate_pairs(task, "evaluate", 500))
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


# ---------------------------------------------------------------- what is independent, and an honest guess

TWO_TEXTS = {
    "version": "1.1",
    "data": [
        {
            "title": "Tea",
            "paragraphs": [
                {"context": PASSAGE, "qas": QUESTIONS[:60]},
                {"context": f"Then: {PASSAGE}", "qas": [{**q, "id": f"second {q['id']}"} for q in QUESTIONS[:60]]},
            ],
        },
        {"title": "Tea, later", "paragraphs": [{"context": f"Later: {PASSAGE}", "qas": QUESTIONS[:1]}]},
    ],
}


def test_questions_about_one_paragraph_share_a_cluster_and_items_of_the_world_do_not(made, data: Path) -> None:
    write(data / "squad/dev-v1.1.json", TWO_TEXTS)
    items = made(data).exits.asked.items("squad")
    texts = [pair.text for pair in items.pairs]
    assert 2 <= len(set(texts)) <= 3
    assert len(set(items.cluster.tolist())) == len(set(texts))
    assert all(texts[i] == texts[list(items.cluster).index(number)] for i, number in enumerate(items.cluster))
    assert len(items.column(items.cluster).independent) == len(set(texts))
    assert items.column(items.cluster).cluster is items.cluster
    for task in WORLD_TASKS:
        assert made(bundled=True).exits.asked.items(task).column([0.0] * ITEMS["smoke"]).all_distinct


def test_what_calibrates_is_about_other_texts_each_about_its_own(made, data: Path) -> None:
    write(data / "squad/dev-v1.1.json", TWO_TEXTS)
    asked = made(data).exits.asked
    judged = {pair.text for pair in asked.items("squad").pairs}
    others = [pair.text for pair in asked.elsewhere("squad", 50).pairs]
    assert len(others) == 3 - len(judged) == len(set(others) - judged)
    assert asked.elsewhere("squad", 50, by=2).pairs == ()
    worlds = made(bundled=True).exits.asked
    for task in WORLD_TASKS:
        judged = {pair.text for pair in worlds.items(task).pairs}
        others = [pair.text for pair in worlds.elsewhere(task, 75, by=50).pairs]
        assert len(others) == len(set(others) - judged) == 50


def test_an_honest_guess_is_the_commonest_answer_or_what_the_source_offers(made, data: Path) -> None:
    worlds = made(bundled=True).exits.asked
    guessed = {task: float(worlds.guessed(task).mean()) for task in WORLD_TASKS}
    assert guessed == pytest.approx({"qa": 0.03, "summary": 0.41, "count": 0.01}, abs=0.02)  # a lead is half a summary
    same = [{"id": str(n), "dialogue": f"Ada: {n}?\nBob: Yes.", "summary": "Bob agrees."} for n in range(300)]
    write(data / "samsum/val.json", same)
    pytest.importorskip("rouge_score", reason="the extra `tasks` is not installed")
    assert made(data).exits.asked.guessed("samsum").tolist() == [1.0] * 100, "everybody answers that"


# ---------------------------------------------------------------- premises


def test_a_model_without_room_for_the_settings_has_no_room_with_files_either(made, data: Path) -> None:
    small = replace(geometry_named("t5-large"), layers=3)
    absence = made(data, geometry=small).exits.absence
    assert (absence.outcome, "no room" in absence.reason) == ("not applicable", True)


def test_random_weights_and_a_lost_tokenizer_are_told_apart(made, data: Path) -> None:
    random, wordless = (made(data, **fact).exits.absence for fact in ({"trained": False}, {"tokenizer": None}))
    assert (random.outcome, "random weights" in random.reason) == ("not applicable", True)
    assert (wordless.outcome, "without a tokenizer" in wordless.reason) == ("unmeasured", True)
    assert made(data).exits.absence is None
    decoder_only = somebodys(load("emad-nano")).exits.absence
    assert (decoder_only.outcome, "a decoder-only model" in decoder_only.reason) == ("not applicable", True)
