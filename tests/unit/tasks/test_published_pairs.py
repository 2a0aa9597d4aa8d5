"""SQuAD and SamSum as pairs: T5's form, which file is asked, an order that the seed fixes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from emad_ref.errors import BadArgument
from emad_ref.tasks.datasets import PUBLISHED, has_task_file, load_pairs, task_files
from emad_ref.text.seq2seq_pairs import format_source
from tests.unit.tasks.test_datasets import SAMSUM, SQUAD, write

DIALOGUES = [{"id": str(n), "dialogue": f"Ada: {n} cups?", "summary": f"Ada offers {n} cups."} for n in range(40)]


def squad_of(*questions: str) -> dict:
    """One paragraph with these questions; the answer is the second word of each."""
    asked = [
        {"id": q, "question": q, "answers": [{"text": q.split()[1], "answer_start": 0}]} for q in questions
    ]  # fmt: skip
    return {"version": "1.1", "data": [{"title": "T", "paragraphs": [{"context": "Some text.", "qas": asked}]}]}


def test_pairs_have_the_form_in_which_t5_was_trained(tmp_path: Path) -> None:
    write(tmp_path / "squad/dev-v1.1.json", SQUAD)
    write(tmp_path / "samsum/val.json", SAMSUM)
    asked = {pair.source: pair for pair in load_pairs("squad", tmp_path, 10).pairs}
    what = asked["question: What flows? context: The Elbe flows to the sea."]
    assert (what.task, what.target, what.answers) == ("squad", "The Elbe", ("The Elbe", "Elbe"))
    assert asked["question: Where to? context: The Elbe flows to the sea."].answers == ("the sea",)
    (told,) = load_pairs("samsum", tmp_path, 10).pairs
    assert (told.source, told.target) == ("summarize: Ada: Tea?\nBob: Yes.", "Bob wants tea.")
    assert told.answers == ("Bob wants tea.",)


def test_the_seed_fixes_an_order_of_which_a_smaller_draw_is_the_beginning(tmp_path: Path) -> None:
    write(tmp_path / "samsum/test.json", DIALOGUES)
    few, many = load_pairs("samsum", tmp_path, 10, seed=3), load_pairs("samsum", tmp_path, 30, seed=3)
    assert few.pairs == many.pairs[:10]
    assert (len(many.pairs), many.of) == (30, 40)
    assert many.pairs != load_pairs("samsum", tmp_path, 30, seed=4).pairs
    everything = load_pairs("samsum", tmp_path, 1000).pairs
    assert sorted(pair.target for pair in everything) == sorted(row["summary"] for row in DIALOGUES)
    assert [pair.target for pair in everything] != [row["summary"] for row in DIALOGUES], "as the file is sorted"


def test_the_papers_split_comes_first_and_training_files_are_never_asked(tmp_path: Path) -> None:
    train = tmp_path / "trained"
    write(train / "squad/train-v1.1.json", squad_of("Who trained"))
    write(train / "samsum/train.json", DIALOGUES)
    assert not has_task_file("squad", train)
    assert not has_task_file("samsum", train)
    write(train / "squad/dev-v1.1.json", squad_of("Who develops"))
    assert [pair.target for pair in load_pairs("squad", train, 9).pairs] == ["develops"]
    write(train / "samsum/test.json", DIALOGUES[:2])
    assert load_pairs("samsum", train, 9).file == train / "samsum/test.json"
    write(train / "samsum/val.json", DIALOGUES[:3])
    found = load_pairs("samsum", train, 9)
    assert (found.file, found.of) == (train / "samsum/val.json", 3)


def test_files_are_named_for_people() -> None:
    assert task_files("squad") == ("squad/dev-v1.1.json",)
    assert task_files("samsum") == ("samsum/val.json", "samsum/test.json")


@pytest.mark.parametrize("task", list(PUBLISHED))
def test_a_folder_without_the_file_says_which_it_lacks(task: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=f"a folder that holds {task}/"):
        load_pairs(task, tmp_path, 1)


def test_a_row_that_does_not_fit_is_named(tmp_path: Path) -> None:
    write(tmp_path / "samsum/val.json", [*DIALOGUES[:2], {"id": "x", "dialogue": "Ada: Hm."}])
    with pytest.raises(BadArgument, match=r"val\.json, \[2\]: summary"):
        load_pairs("samsum", tmp_path, 1)


@pytest.mark.parametrize(
    "ask", [task_files, lambda task: has_task_file(task, Path()), lambda task: load_pairs(task, Path(), 1)]
)
def test_an_unknown_task_is_refused(ask) -> None:
    with pytest.raises(BadArgument, match="task='qa', but expected one of squad, samsum"):
        ask("qa")


def test_a_form_that_t5_does_not_have_is_refused() -> None:
    with pytest.raises(BadArgument, match="task='squad', but expected one of qa, summary"):
        format_source("squad", "text")  # type: ignore[arg-type]
