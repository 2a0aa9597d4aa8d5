"""Task data from a folder: accepted formats, and refusals by file, line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from emad_ref.errors import BadArgument
from emad_ref.text.seq2seq_pairs import format_source
from pytest_emad.tasks import datasets
from pytest_emad.tasks.datasets import (
    PUBLISHED,
    SOURCES,
    TaskDataUnavailable,
    generate_world_splits,
    has_task_file,
    load_seq2seq_pairs,
    load_task_splits,
    read_rows,
    task_file_names,
)

ARC = [
    {
        "id": "Q1",
        "question": "What melts?",
        "choices": {"text": ["ice", "stone"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    {
        "id": "Q2",
        "question": "What is wet?",
        "choices": {"text": ["sand", "air", "rain"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
]
PILE = [
    {"text": "One document.", "meta": {"pile_set_name": "Wikipedia (en)"}},
    {"text": "Another one.\nWith two lines."},
]
MATH = [
    {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{2}$."},
    {"problem": "And $\\frac{1}{2}$ twice?", "level": "Level 1", "type": "Algebra", "solution": "$\\boxed{1}$, too."},
]
GSM8K = [{"question": f"{n} and {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(1, 8)]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": "def one():\n",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    }
]
SQUAD = [
    {
        "id": "r1",
        "title": "Rivers",
        "context": "The Elbe flows to the sea.",
        "question": "What flows?",
        "answers": {"text": ["The Elbe", "Elbe"], "answer_start": [0, 4]},
    },
    {
        "id": "r2",
        "title": "Rivers",
        "context": "The Elbe flows to the sea.",
        "question": "Where to?",
        "answers": {"text": ["the sea"], "answer_start": [18]},
    },
]
SAMSUM = [{"id": "1", "dialogue": "Ada: Tea?\nBob: Yes.", "summary": "Bob wants tea."}]
WIKITEXT = " = Ada = \n \n Ada counts . \n \n = = Life = = \n \n She counts on . \n = Bob = \n \n Bob reads . \n"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_folder(data: Path) -> Path:
    """Write a whole data folder in small."""
    write(data / "arc/ARC-Easy/test.jsonl", ARC)
    write(data / "arc/ARC-Challenge/test.jsonl", ARC)
    write(data / "arc/ARC-Challenge/train.jsonl", ARC)
    write(data / "pile/valid.jsonl", PILE)
    for split in ("train", "test"):
        write(data / f"math/algebra/{split}.jsonl", MATH)
        write(data / f"gsm8k/{split}.jsonl", GSM8K)
    write(data / "humaneval/HumanEval.jsonl", HUMANEVAL)
    write(data / "squad/validation.jsonl", SQUAD)
    write(data / "samsum/test.jsonl", SAMSUM)
    for folder in ("wikitext-2", "wikitext-103"):
        (data / folder).mkdir()
        (data / folder / "test.txt").write_text(WIKITEXT, encoding="utf-8")
    return data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


@pytest.mark.parametrize(
    ("source", "folder", "split", "rows"),
    [
        ("arc", "arc/ARC-Easy", "test", ARC),
        ("pile", "pile", "validation", PILE),
        ("math", "math/algebra", "train", MATH),
        ("gsm8k", "gsm8k", "test", GSM8K),
        ("humaneval", "humaneval", "test", HUMANEVAL),
        ("samsum", "samsum", "test", SAMSUM),
        ("squad", "squad", "validation", SQUAD),
    ],
)
def test_rows_are_read_as_the_hub_has_them(data, source, folder, split, rows):
    assert read_rows(source, split, data / folder) == rows


def test_every_source_is_covered_by_these_fixtures(data):
    """A source added without a fixture would go untested."""
    folders = {"arc": "arc/ARC-Easy", "math": "math/algebra", "wikitext": "wikitext-2"}
    found = {
        s for s in SOURCES if any(datasets.find_split_file(s, p, data / folders.get(s, s)) for p in SOURCES[s].files)
    }
    assert found == set(SOURCES)


def test_wikitext_is_cut_into_pages_at_top_level_headings(data):
    first, second = read_rows("wikitext", "test", data / "wikitext-2")
    assert first["page"].startswith(" = Ada = ")
    assert "= = Life = =" in first["page"]
    assert second["page"] == " = Bob = \n \n Bob reads . \n"


@pytest.mark.parametrize(("source", "name", "rows"), [("humaneval", "HumanEval", HUMANEVAL), ("gsm8k", "test", GSM8K)])
def test_compressed_lines_are_read_too(tmp_path, source, name, rows):
    with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert read_rows(source, "test", tmp_path) == rows


def test_a_line_separator_inside_a_string_does_not_end_the_line(tmp_path):
    row = {"text": "before\u2028after"}
    (tmp_path / "valid.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read_rows("pile", "validation", tmp_path) == [row]


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("source", "row", "message"),
    [
        ("arc", without(ARC[0], "choices"), r"line 2: choices=None, but expected \{'text'"),
        ("arc", {**ARC[0], "choices": {"text": ["ice"], "label": ["A"]}}, "line 2: choices=.*two or more"),
        ("arc", {**ARC[0], "choices": {"text": ["ice", "tea"], "label": ["A"]}}, "line 2: choices=.*equally many"),
        ("arc", {**ARC[0], "choices": {"text": ["ice", 7], "label": ["A", "B"]}}, "line 2: choices=.*strings"),
        ("arc", {**ARC[0], "answerKey": "C"}, r"line 2: answerKey='C', but expected one of choices\.label"),
        ("arc", {**ARC[0], "question": {"stem": "What?"}}, "line 2: question=.*a string"),
        ("math", without(MATH[0], "problem"), "line 2: problem=None, but expected a string that is not blank"),
        ("math", {**MATH[0], "solution": "It is 2."}, r"line 2: solution='It is 2\.'.*in \\boxed"),
        ("humaneval", {**HUMANEVAL[0], "entry_point": "one()"}, r"line 2: entry_point='one\(\)'.*name of a function"),
        ("gsm8k", {**GSM8K[0], "answer": "2"}, "line 2: answer='2'.*'#### RESULT'"),
        ("gsm8k", {**GSM8K[0], "question": "  "}, "line 2: question='  '.*not blank"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_file_line_and_field(tmp_path, source, row, message):
    good = {"arc": ARC, "math": MATH, "gsm8k": GSM8K, "humaneval": HUMANEVAL}[source][0]
    path = write(tmp_path / ("HumanEval.jsonl" if source == "humaneval" else "test.jsonl"), [good, row])
    with pytest.raises(BadArgument, match=message) as caught:
        read_rows(source, "test", tmp_path)
    assert str(path) in str(caught.value)


def test_a_damaged_archive_is_refused(tmp_path):
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL[0]).encode())[:-9])
    with pytest.raises(BadArgument, match=r"HumanEval\.jsonl\.gz', but expected a complete file"):
        read_rows("humaneval", "test", tmp_path)


@pytest.mark.parametrize("source", SOURCES)
def test_a_benchmark_that_is_not_there_says_what_to_put_where(tmp_path, source):
    split = next(iter(SOURCES[source].files))
    with pytest.raises(BadArgument) as caught:
        read_rows(source, split, tmp_path / "nothing")
    assert str(tmp_path / "nothing") in str(caught.value)
    assert SOURCES[source].files[split] in str(caught.value)
    assert str(caught.value).endswith(SOURCES[source].remedy)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}\n{"text": "b"', r"valid\.jsonl, line 2=.*a JSON object; mend the line"),
        ('{"text": "a"}\n["b"]\n', r"valid\.jsonl, line 2=.*a JSON object"),
        ('{"text": "a"}\n\n{"text": 3}\n', r"line 3: text=3, but expected a string"),
        ("", "has no rows.*at least one"),
        (b"\xff\xfe", "a complete file in UTF-8"),
    ],
)
def test_a_pile_file_that_is_damaged_is_refused(tmp_path, lines, message):
    (tmp_path / "valid.jsonl").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    with pytest.raises(BadArgument, match=message):
        read_rows("pile", "validation", tmp_path)


def test_squads_second_version_is_refused(tmp_path):
    write(tmp_path / "validation.jsonl", [SQUAD[0], SQUAD[1] | {"answers": {"text": [], "answer_start": []}}])
    with pytest.raises(BadArgument, match=r"validation\.jsonl, line 2: answers=.*as in SQuAD v1\.1"):
        read_rows("squad", "validation", tmp_path)


def test_a_missing_file_or_split_is_named(data):
    with pytest.raises(BadArgument, match=r"ARC-Easy'.*a folder that holds validation\.jsonl;"):
        read_rows("arc", "validation", data / "arc/ARC-Easy")
    with pytest.raises(BadArgument, match="split='train', but expected one of test, which humaneval has"):
        read_rows("humaneval", "train", data / "humaneval")
    with pytest.raises(BadArgument, match="source='mmlu', but expected one of wikitext, pile"):
        read_rows("mmlu", "test", data)


def test_splits_are_read_when_first_asked_for(data):
    pytest.importorskip("datasets")
    wanted = load_task_splits(source="arc", folder="arc/ARC-Easy", hub="-", optional=("train",), data=data, version=1.0)
    assert len(wanted) == 0
    assert wanted["test"][1] == ARC[1]
    assert wanted["test"] is wanted["test"]
    with pytest.raises(BadArgument, match="a folder that holds validation"):
        wanted["validation"]


def test_an_optional_split_that_is_missing_is_empty_and_said_to_be(data, caplog):
    pytest.importorskip("datasets")
    wanted = load_task_splits(source="arc", folder="arc/ARC-Easy", hub="-", optional=("train",), data=data)
    assert len(wanted["train"]) == 0
    assert "no train split" in caplog.text
    with pytest.raises(BadArgument, match="a folder that holds train"):
        load_task_splits(source="arc", folder="arc/ARC-Easy", hub="-", data=data)["train"]
    with pytest.raises(BadArgument, match="a folder that holds train"):  # a wrong folder is not an empty split
        load_task_splits(source="arc", folder="nowhere", hub="-", optional=("train",), data=data)["train"]


def test_hub_rows_pass_the_same_checks(monkeypatch):
    hub = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return hub.Dataset.from_list([*ARC, {**ARC[0], "answerKey": "Z"}])

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "is_hub_reachable", lambda: True)
    wanted = load_task_splits(source="arc", folder="-", hub="allenai/ai2_arc", name="ARC-Easy")
    with pytest.raises(BadArgument, match="allenai/ai2_arc, test row 2: answerKey='Z'"):
        wanted["test"]
    assert asked == [("allenai/ai2_arc", "ARC-Easy", "test")]


def test_a_row_of_the_hub_that_is_no_text_is_left_out_and_told(monkeypatch, caplog):
    """A user cannot correct it there. Program text that spells an escape is text."""
    hub = pytest.importorskip("datasets")
    good = {**GSM8K[0], "question": "What is '\\\\x00'?"}
    rows = hub.Dataset.from_list([good, {**GSM8K[0], "question": "a\0b"}])
    monkeypatch.setattr(hub, "load_dataset", lambda *_, **__: rows)
    monkeypatch.setattr(datasets, "is_hub_reachable", lambda: True)
    found = load_task_splits(source="gsm8k", folder="-", hub="openai/gsm8k", name="main")["test"]
    assert found["question"][:] == [good["question"]]
    assert "left out: openai/gsm8k, test row 1: question='a\\x00b'" in caplog.text


def test_without_a_folder_and_offline_the_remedy_is_named(monkeypatch):
    hub = pytest.importorskip("datasets")
    seen = []

    def load_dataset(name, configuration, split):
        from huggingface_hub import constants

        seen.append(constants.HF_HUB_OFFLINE)
        raise ConnectionError("no cache")

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "is_hub_reachable", lambda: False)
    with pytest.raises(TaskDataUnavailable, match=r"hub='openai/gsm8k'.*no cache.*pass a data folder"):
        load_task_splits(source="gsm8k", folder="gsm8k", hub="openai/gsm8k", name="main")["test"]
    assert seen == [True]  # requested as under HF_HUB_OFFLINE: the cache only


def test_the_worlds_splits_are_seeded_and_differ():
    pytest.importorskip("datasets")
    one, again = generate_world_splits(world_task="facts", items=5), generate_world_splits(world_task="facts", items=5)
    assert one["test"].to_list() == again["test"].to_list()
    assert len(one["test"]) == 5
    assert one["test"][0]["prompt"].endswith("?")
    assert one["test"][0]["answer"].count(" key is in the ") == 5
    assert one["validation"].to_list() != one["test"].to_list()


@pytest.mark.parametrize("name", ["test.jsonl", "test.jsonl.gz"])
def test_rows_are_clean_text_or_refused_by_file_line_and_field(tmp_path, name):
    pack = gzip.compress if name.endswith("gz") else bytes
    row = GSM8K[0]
    (tmp_path / name).write_bytes(pack(json.dumps(row | {"question": "\ufeffOne\r\ntwo?"}).encode("utf-8-sig")))
    assert read_rows("gsm8k", "test", tmp_path)[0]["question"] == "One\ntwo?"
    (tmp_path / name).write_bytes(pack(json.dumps(row | {"question": "One\0"}).encode()))
    with pytest.raises(BadArgument, match=r"line 1: question='One\\x00', but expected text without NUL"):
        read_rows("gsm8k", "test", tmp_path)


# ---------------------------------------------------------------- SQuAD and SamSum as pairs

DIALOGUES = [{"id": str(n), "dialogue": f"Ada: {n} cups?", "summary": f"Ada offers {n} cups."} for n in range(40)]


def squad_rows(context: str, *questions: tuple[str, str]) -> list[dict[str, Any]]:
    """Return rows of SQuAD about one text, from (question, answer)."""
    return [
        {"id": q, "title": "T", "context": context, "question": q, "answers": {"text": [a], "answer_start": [0]}}
        for q, a in questions
    ]


def test_pairs_have_the_form_in_which_t5_was_trained(tmp_path: Path) -> None:
    write(tmp_path / "squad/validation.jsonl", SQUAD)
    write(tmp_path / "samsum/validation.jsonl", SAMSUM)
    asked = {pair.source: pair for pair in load_seq2seq_pairs("squad", tmp_path, 10).pairs}
    what = asked["question: What flows? context: The Elbe flows to the sea."]
    assert (what.task, what.target, what.answers) == ("squad", "The Elbe", ("The Elbe", "Elbe"))
    assert asked["question: Where to? context: The Elbe flows to the sea."].answers == ("the sea",)
    (told,) = load_seq2seq_pairs("samsum", tmp_path, 10).pairs
    assert (told.source, told.target) == ("summarize: Ada: Tea?\nBob: Yes.", "Bob wants tea.")
    assert told.answers == ("Bob wants tea.",)


def test_the_seed_fixes_an_order_of_which_a_smaller_draw_is_the_beginning(tmp_path: Path) -> None:
    write(tmp_path / "samsum/test.jsonl", DIALOGUES)
    few, many = load_seq2seq_pairs("samsum", tmp_path, 10, seed=3), load_seq2seq_pairs("samsum", tmp_path, 30, seed=3)
    assert few.pairs == many.pairs[:10]
    assert (len(many.pairs), many.of) == (30, 40)
    assert many.pairs != load_seq2seq_pairs("samsum", tmp_path, 30, seed=4).pairs
    everything = load_seq2seq_pairs("samsum", tmp_path, 1000).pairs
    assert sorted(pair.target for pair in everything) == sorted(row["summary"] for row in DIALOGUES)
    assert [pair.target for pair in everything] != [row["summary"] for row in DIALOGUES], "as the file is sorted"


def test_the_papers_split_comes_first_and_training_files_are_never_asked(tmp_path: Path) -> None:
    train = tmp_path / "trained"
    write(train / "squad/train.jsonl", squad_rows("Some text.", ("Who?", "trained")))
    write(train / "samsum/train.jsonl", DIALOGUES)
    assert not has_task_file("squad", train)
    assert not has_task_file("samsum", train)
    write(train / "squad/validation.jsonl", squad_rows("Some text.", ("Who?", "develops")))
    assert [pair.target for pair in load_seq2seq_pairs("squad", train, 9).pairs] == ["develops"]
    write(train / "samsum/test.jsonl", DIALOGUES[:2])
    assert load_seq2seq_pairs("samsum", train, 9).file == train / "samsum/test.jsonl"
    write(train / "samsum/validation.jsonl", DIALOGUES[:3])
    found = load_seq2seq_pairs("samsum", train, 9)
    assert (found.file, found.of) == (train / "samsum/validation.jsonl", 3)


def test_files_are_named_for_people() -> None:
    assert task_file_names("squad") == ("squad/validation.jsonl",)
    assert task_file_names("samsum") == ("samsum/validation.jsonl", "samsum/test.jsonl")


@pytest.mark.parametrize("task", PUBLISHED)
def test_a_folder_without_the_file_says_which_it_lacks(task: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=f"a folder that holds {task}/"):
        load_seq2seq_pairs(task, tmp_path, 1)


def test_a_row_that_does_not_fit_is_named(tmp_path: Path) -> None:
    write(tmp_path / "samsum/validation.jsonl", [*DIALOGUES[:2], {"id": "x", "dialogue": "Ada: Hm."}])
    with pytest.raises(BadArgument, match=r"validation\.jsonl, line 3: summary"):
        load_seq2seq_pairs("samsum", tmp_path, 1)


@pytest.mark.parametrize(
    "ask", [task_file_names, lambda task: has_task_file(task, Path()), lambda task: load_seq2seq_pairs(task, Path(), 1)]
)
def test_an_unknown_task_is_refused(ask) -> None:
    with pytest.raises(BadArgument, match="task='qa', but expected one of squad, samsum"):
        ask("qa")


def test_a_form_that_t5_does_not_have_is_refused() -> None:
    with pytest.raises(BadArgument, match="task='squad', but expected one of qa, summary"):
        format_source("squad", "text")  # type: ignore[arg-type]
