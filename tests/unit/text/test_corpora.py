"""Corpora by name: files, folders, the hub; disjoint splits; clean text, or a refusal that names the line."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from emad_ref.errors import BadArgument
from emad_ref.text import corpora
from emad_ref.text.corpora import (
    BLOCK,
    CorpusUnavailable,
    iterate_corpus_documents,
    iterate_file_documents,
    join_lines_into_articles,
)
from emad_ref.text.documents import SPLITS, TaskExample, normalize_newlines_and_bom

READ = tuple(split for split in SPLITS if split != "train")
WIKITEXT = "\n = One = \n\n first\n = = Section = = \n more\n = Two = \n second\n"


def written(path, *texts):
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


def test_a_text_file_holds_paragraphs(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("one\nstill one\n\n\ntwo\n \nthree\n\nfour\n", encoding="utf-8")
    assert [t.strip() for t in iterate_file_documents(path)] == ["one\nstill one", "two", "three", "four"]


@pytest.mark.parametrize("total", [7, 8, 10, 41])
def test_no_paragraph_has_a_neighbour_in_another_split(tmp_path, total):
    """Both may belong to one article: each split is one run, and the paragraph at a border is dropped."""
    path = tmp_path / "notes.txt"
    path.write_text("\n\n".join(f"paragraph {i}" for i in range(total)), encoding="utf-8")
    runs = [[int(text.split()[1]) for text in iterate_corpus_documents(str(path), split)] for split in READ]
    assert all(run == list(range(run[0], run[-1] + 1)) for run in runs)
    assert [after[0] - before[-1] for before, after in itertools.pairwise(runs)] == [2, 2]
    assert (runs[0][0], runs[-1][-1]) == (0, total - 1)


def test_articles_and_lines_of_json_are_dealt_in_runs_without_losing_one(tmp_path):
    wikitext = tmp_path / "articles.txt"
    wikitext.write_text("".join(f" = {i} = \n\n text {i}\n\n more\n" for i in range(12)), encoding="utf-8")
    lines = written(tmp_path / "a.jsonl", *(f" = {i} = " for i in range(12)))
    for path in (wikitext, lines):
        runs = [[int(text.split(" = ")[1]) for text in iterate_corpus_documents(str(path), split)] for split in READ]
        assert runs == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_a_wikitext_file_holds_articles_with_their_sections(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "test.txt").write_text(WIKITEXT, encoding="utf-8")
    found = list(iterate_corpus_documents("wikitext", "evaluate", data=tmp_path))
    assert [text.split(" = ")[1] for text in found] == ["One", "Two"]
    assert "Section" in found[0]


@pytest.mark.parametrize("kind", ["file", "folder", "data folder"])
def test_splits_never_overlap_and_leave_nothing_out(tmp_path, kind):
    if kind == "file":
        name, data = str(written(tmp_path / "a.jsonl", *(f"text {i}" for i in range(20)))), None
    else:
        folder = tmp_path / "pile"
        folder.mkdir()
        written(folder / "valid.jsonl", *(f"valid {i}" for i in range(10)))
        written(folder / "test.jsonl", *(f"test {i}" for i in range(10)))
        name, data = (str(folder), None) if kind == "folder" else ("pile", tmp_path)
    parts = [list(iterate_corpus_documents(name, split, data=data)) for split in READ]
    assert all(parts)
    assert len({text for part in parts for text in part}) == sum(map(len, parts)) == 20


def test_a_folder_keeps_its_test_part_for_evaluation_alone(tmp_path):
    written(tmp_path / "valid.jsonl", "v0", "v1", "v2")
    written(tmp_path / "test.jsonl", "t0", "t1")
    assert list(iterate_corpus_documents(str(tmp_path), "calibrate")) == ["v0", "v1"]
    assert list(iterate_corpus_documents(str(tmp_path), "validate")) == ["v2"]
    assert list(iterate_corpus_documents(str(tmp_path), "evaluate")) == ["t0", "t1"]


def test_a_line_separator_inside_a_json_string_is_not_the_end_of_the_line(tmp_path):
    path = written(tmp_path / "a.jsonl", "left\u2028right\x85end")
    assert list(iterate_corpus_documents(str(path), "calibrate")) == ["left\u2028right\x85end"]


@pytest.mark.parametrize("line", ["not json", '"text"', "[]", '{"body": "x"}', '{"text": 7}', '{"text": null}'])
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(BadArgument, match=r"^a\.jsonl, line 3=.*field \"text\" is a string; mend the line"):
        list(iterate_corpus_documents(str(path), "calibrate"))


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("naïve".encode("latin-1"))
    with pytest.raises(BadArgument, match="a file in UTF-8; convert it first"):
        list(iterate_corpus_documents(str(path), "calibrate"))


def test_unreadable_names_are_refused_at_once(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    for name, message in (
        (
            "no/such/path",
            "one of world:premise, world:mixed, world:curriculum, wikitext, pile, gsm8k, self, or a path that exists",
        ),
        (str(tmp_path / "a.pdf"), "a file ending in .txt or .jsonl; convert it first"),
        (str(tmp_path), "a folder that holds valid.txt or valid.jsonl; name a single file instead"),
    ):
        with pytest.raises(BadArgument, match=re.escape(message)):
            iterate_corpus_documents(name, "calibrate")


@pytest.mark.parametrize(
    ("split", "message"), [("test", "one of train, calibrate"), ("train", "only the world has text")]
)
def test_splits_that_a_file_does_not_have_are_refused_at_once(tmp_path, split, message):
    with pytest.raises(BadArgument, match=f"split='{split}', but expected .*{message}"):
        iterate_corpus_documents(str(written(tmp_path / "a.jsonl", "x")), split)


def test_the_world_is_a_corpus_like_any_other():
    assert next(iterate_corpus_documents("world:premise", "train", seed=3)) == next(
        iterate_corpus_documents("world:premise", "train", seed=3)
    )


# ---------------------------------------------------------------- the hub, without a network


@pytest.fixture
def hub(monkeypatch):
    """Replace ``datasets.load_dataset``: it serves rows from a dict of parts, or raises its content."""
    parts = {}

    def load_dataset(name, configuration, *, split, streaming):
        assert streaming
        if isinstance(parts[split], Exception):
            raise parts[split]
        return iter(parts[split]) if isinstance(parts[split], tuple) else parts[split]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(corpora, "is_hub_reachable", lambda: True)
    return parts


def rows(text):
    return [{"text": line} for line in text.splitlines(keepends=True)]


def test_wikitext_from_the_hub_is_evaluated_on_its_test_part(hub):
    hub["test"] = rows(WIKITEXT)
    hub["validation"] = rows(WIKITEXT.replace("One", "Three").replace("Two", "Four"))
    titles = {split: [t.split(" = ")[1] for t in iterate_corpus_documents("wikitext", split)] for split in READ}
    assert titles == {"evaluate": ["One", "Two"], "calibrate": ["Three"], "validate": ["Four"]}


def test_pile_from_the_hub_is_dealt_to_the_splits_in_blocks(hub):
    hub["train"] = [{"text": f"text {i}"} for i in range(8 * BLOCK)]
    dealt = {split: list(iterate_corpus_documents("pile", split)) for split in READ}
    assert [len(dealt[split]) for split in READ] == [2 * BLOCK, 2 * BLOCK, 4 * BLOCK]
    assert len({text for part in dealt.values() for text in part}) == 8 * BLOCK
    assert dealt["calibrate"][: BLOCK + 1] == [f"text {i}" for i in [*range(BLOCK), 4 * BLOCK]]


def test_a_hub_out_of_reach_names_the_ways_out(hub):
    hub["test"] = OSError("no network")
    with pytest.raises(CorpusUnavailable) as refused:
        iterate_corpus_documents("wikitext", "evaluate")
    for part in (
        "'wikitext'",
        "Salesforce/wikitext",
        "no network",
        "wikitext-2/",
        "another corpus",
    ):
        assert part in str(refused.value)


def test_a_hub_set_with_other_fields_is_refused(hub):
    hub["train"] = [{"body": "x"}]
    with pytest.raises(CorpusUnavailable, match=r"fields \['body'\], but expected 'text'; choose another corpus"):
        iterate_corpus_documents("pile", "evaluate")


def test_articles_lose_no_line():
    lines = WIKITEXT.splitlines(keepends=True)
    assert "".join(join_lines_into_articles(lines)) == WIKITEXT


PARAGRAPHS = "\n\n".join(f"paragraph {i}\nof two lines" for i in range(16))


@pytest.mark.parametrize(
    "written_as",
    [
        lambda text: text.encode(),
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
        lambda text: text.replace("\n", "\r").encode(),
    ],
    ids=["plain", "byte order mark", "windows", "both", "carriage returns"],
)
@pytest.mark.parametrize("name", ["a.txt", "folder/valid.txt", "a.jsonl", "escaped.jsonl"])
def test_the_same_words_are_the_same_documents(tmp_path, name, written_as):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name == "escaped.jsonl":  # inside the strings
        lines = (json.dumps({"text": written_as(text).decode()}) for text in PARAGRAPHS.split("\n\n"))
        path.write_text("\n".join(lines))
    elif name == "a.jsonl":  # of the file
        lines = "\n".join(json.dumps({"text": text}) for text in PARAGRAPHS.split("\n\n"))
        path.write_bytes(written_as(lines) if b"\n" in written_as("\n") else lines.encode())
    else:
        path.write_bytes(written_as(PARAGRAPHS))
    corpus = path.parent if path.parent != tmp_path else path
    for split in ("calibrate", "validate"):
        found = [text.strip("\n") for text in iterate_corpus_documents(str(corpus), split)]
        assert set(found) <= set(PARAGRAPHS.split("\n\n"))
        assert len(found) >= 2


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (
            "a.txt",
            b"one\n\ntwo \0 words\n",
            r"a\.txt, line 3='two \\x00 words\\n', but expected text without NUL",
        ),
        ("a.txt", "one\n\ntwo".encode("utf-16"), r"expected a file in UTF-8; convert it first \(.*UTF-16"),
        ("a.txt", "one\n\ntwo".encode("utf-32"), r"expected a file in UTF-8; convert it first \(.*UTF-32"),
        ("a.txt", "one\n\ntwo".encode("utf-16-le"), r"a\.txt, line 1=.*text without NUL"),
        ("a.txt", b"one\n\n\xe9t\xe9\n", r"expected a file in UTF-8; convert it first \(line 3: "),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b \\u0000"}\n', r"a\.jsonl, line 2=.*text without NUL"),
        ("a.jsonl", b'{"text": "b \\ud83d"}\n', r"a\.jsonl, line 1=.*half of a surrogate pair"),
        ("a.jsonl", b'{"text": "a\0"}\n', r"a\.jsonl, line 1="),
    ],
)
def test_what_is_no_text_is_refused_by_file_and_line(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadArgument, match=said):
        list(iterate_corpus_documents(str(tmp_path / name), "evaluate"))


def test_a_whole_character_in_two_escapes_is_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n' * 4)
    assert set(iterate_corpus_documents(str(tmp_path / "a.jsonl"), "calibrate")) == {"\U0001f600"}


def test_a_pipe_is_no_corpus(tmp_path):
    """A file is read more than once, because splits are dealt by number."""
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(BadArgument, match=r"expected a file or a folder; it is a pipe, which can be read once only"):
        iterate_corpus_documents(str(tmp_path / "a.txt"), "evaluate")
    with pytest.raises(BadArgument, match="it is a device"):
        iterate_corpus_documents(os.devnull, "evaluate")


def test_a_document_of_the_hub_with_nul_is_left_out_and_told(monkeypatch, caplog):
    rows = [{"text": "one\r\n"}, {"text": "t\0wo"}, {"text": "\ufeffthree"}]
    datasets = SimpleNamespace(load_dataset=lambda *_, **__: rows)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr(corpora, "is_hub_reachable", lambda: True)
    assert list(corpora.stream_hub_documents("pile", "train")) == ["one\n", "three"]
    assert "a document holds NUL, which is no text, and is left out: 't\\x00wo'" in caplog.text


def solved(number: int) -> dict[str, str]:
    return {"question": f"What is {number} + 1?", "answer": f"It is {number + 1}."}


def test_gsm8k_gives_a_question_and_its_answer_per_document(tmp_path):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for name, numbers in (("train", range(8)), ("test", range(100, 103))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(solved(number)) + "\n" for number in numbers))
    texts = {split: [*corpora._raw_documents("gsm8k", split, 0, tmp_path)] for split in READ}
    assert texts["evaluate"][0] == "Question: What is 100 + 1?\nAnswer: It is 101.\n"
    assert [len(texts[split]) for split in READ] == [4, 4, 3]
    assert not set(texts["calibrate"]) & set(texts["validate"])


def test_gsm8k_of_the_hub_reads_the_same(tmp_path, monkeypatch):
    parts = {"train": [solved(number) for number in range(8)], "test": [solved(100)]}
    asked = []

    def load_dataset(name, configuration, *, split, streaming):
        asked.append((name, configuration, split))
        return parts[split]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(corpora, "is_hub_reachable", lambda: True)
    assert next(corpora._raw_documents("gsm8k", "evaluate", 0, None)).endswith("\nAnswer: It is 101.\n")
    assert len(list(corpora._raw_documents("gsm8k", "validate", 0, tmp_path))) == 4
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]


def test_a_row_of_the_hub_without_its_answer_is_refused_by_number(monkeypatch):
    rows = [solved(1), {"question": "Why?", "answer": None}]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    monkeypatch.setattr(corpora, "is_hub_reachable", lambda: True)
    expected = "openai/gsm8k, test, row 2 has no text as 'question', 'answer'"
    with pytest.raises(CorpusUnavailable, match=expected):
        list(corpora.stream_hub_documents("gsm8k", "test"))


def test_a_row_without_its_answer_is_refused_by_line(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "Why?"}\n')
    expected = r'test\.jsonl, line 1=.*expected a JSON object whose fields "question" and "answer" are strings'
    with pytest.raises(BadArgument, match=expected):
        list(iterate_corpus_documents("gsm8k", "evaluate", data=tmp_path))


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return an endpoint that refuses at once, with a client that is not offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def test_an_address_without_an_answer_is_out_of_reach(nowhere: None) -> None:
    assert not corpora.is_hub_reachable()


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(corpora, "_hub_answers", lambda endpoint: pytest.fail("asked"))
    assert not corpora.is_hub_reachable()


def test_an_answer_is_remembered(monkeypatch: pytest.MonkeyPatch, nowhere: None) -> None:
    asked = []
    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=lambda *a, **k: asked.append(a)))
    monkeypatch.setattr(constants, "ENDPOINT", "http://answers.invalid")
    assert corpora.is_hub_reachable()
    assert corpora.is_hub_reachable()
    assert asked == [("http://answers.invalid",)]


def test_without_the_hub_datasets_are_read_from_the_cache(monkeypatch: pytest.MonkeyPatch, nowhere: None) -> None:
    config = SimpleNamespace(HF_HUB_OFFLINE=False)
    seen = []

    def load_dataset(name: str, configuration: str, *, split: str, streaming: bool) -> list[dict[str, str]]:
        seen.append((streaming, config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        if split == "validation":
            raise ConnectionError("not in the cache")
        return [{"text": " = One = \n"}, {"text": "cached\n"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, config=config))
    monkeypatch.setitem(sys.modules, "datasets.config", config)
    assert list(iterate_corpus_documents("wikitext", "evaluate")) == [" = One = \ncached\n"]
    with pytest.raises(CorpusUnavailable, match="not in the cache"):
        iterate_corpus_documents("wikitext", "validate")
    assert set(seen) == {(False, True, True)}
    assert (config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE) == (False, False)
    assert corpora.is_hub_reachable is corpora.is_hub_reachable


CHOICE = TaskExample("facts", "Where?", " barn", "choice", options=(" attic", " barn", " shed"))


def test_the_answer_of_a_choice_is_found_among_its_options():
    assert CHOICE.answer_index == 1


TOLD = TaskExample("chart", "a B b C ? a", "c", "exact", guess=0.5)
NAMED = TaskExample("recall", "Mira met Tom.", " Tom", "choice", options=(" Tom", " Mira", " Ada", " Ben"), guess=0.5)


@pytest.mark.parametrize(
    ("example", "chance"), [(CHOICE, 1 / 3), (TaskExample("t", "p", "a", "exact"), 0.0), (TOLD, 0.5), (NAMED, 0.5)]
)
def test_a_guess_is_what_the_task_says_else_one_option_of_many_else_never_right(example, chance):
    assert example.chance_accuracy == chance


def test_there_are_four_splits():
    assert SPLITS == ("train", "calibrate", "validate", "evaluate")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain\ntext", "plain\ntext"),
        ("\ufeffplain", "plain"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("a\rb", "a\nb"),
        ("a\r\n\rb", "a\n\nb"),
        ("\u2028 and \x0c stay", "\u2028 and \x0c stay"),
        ("a \ufeff b", "a \ufeff b"),  # after the first character it is a zero-width space
        ("", ""),
    ],
)
def test_the_same_words_are_the_same_text_whichever_system_wrote_them(text, clean):
    assert normalize_newlines_and_bom(text, "here") == clean


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ab\0c", r"here='ab\\x00c', but expected text without NUL; character 2 is one"),
        ("\ud83d", r"half of a surrogate pair \(U\+D83D\); character 0"),
        ("x" * 100 + "\udcff", r"half of a surrogate pair \(U\+DCFF\); character 100"),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(text, said):
    with pytest.raises(BadArgument, match=said) as caught:
        normalize_newlines_and_bom(text, "here")
    assert len(str(caught.value)) < 250
