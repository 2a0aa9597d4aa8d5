"""Documents that a field groups: dealt, cut, summed, certified and counted by group, and never over two splits."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emad_ref.calibration.trace import take_trace
from emad_ref.calibration.windows import MOST_WINDOWS, cut_windows
from emad_ref.errors import BadArgument
from emad_ref.models.loading import LoadedModel, load
from emad_ref.point import full_depth
from emad_ref.replay.losses import replay_losses
from emad_ref.text.corpora import (
    DEALT,
    DistinctDocumentIterator,
    describe_dealt_documents,
    describe_dealt_groups,
    group_of_document,
    iterate_corpus_documents,
)
from emad_ref.text.documents import Split
from emad_ref.tuning import windows_of
from pytest_emad.claims.base import Answer, ClaimContext, Question, RunPlan
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.run_resources import RunResources
from pytest_emad.measurements.study import Study
from pytest_emad.screening.guarantee import certify_losses, excess_loss
from pytest_emad.statistics.rates import estimate_perplexity_rise, estimate_point_rise, nll_pair_by_document
from pytest_emad.statistics.units import ByDocument
from pytest_emad.statistics.verdicts import load_register
from pytest_emad.tasks.scoring import CONTEXT_TOKENS, CONTINUATION_TOKENS, make_continuation_items

AUTHORS, EACH = 40, 10
FIELD = "author"


def text(seed: int, words: int = 12) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(words))


def written(path: Path, *rows: Mapping[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows_of(authors: int = AUTHORS, each: int = EACH, first: int = 0) -> list[dict[str, str]]:
    """Documents of each author, scattered over the file."""
    numbers = [(author, document) for author in range(first, first + authors) for document in range(each)]
    random.Random(1).shuffle(numbers)
    return [{"text": text(1000 * author + document), FIELD: f"author {author}"} for author, document in numbers]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return written(tmp_path / "letters.jsonl", *rows_of())


def authors_of(corpus: str, split: Split, rows: list[dict[str, str]]) -> list[str]:
    author = {row["text"]: row[FIELD] for row in rows}
    return [author[each] for each in iterate_corpus_documents(corpus, split, corpus_group=FIELD)]


def test_a_group_is_dealt_whole_and_its_documents_follow_one_another(corpus: str) -> None:
    found = {split: authors_of(corpus, split, rows_of()) for split in DEALT}
    assert {split: len(set(names)) for split, names in found.items()} == {
        "calibrate": AUTHORS // 4, "validate": AUTHORS // 4, "evaluate": AUTHORS // 2
    }  # fmt: skip
    joined = [name for split in DEALT for name in found[split]]
    assert len(joined) == AUTHORS * EACH, "no document is lost"
    places: dict[str, list[int]] = {}
    for place, name in enumerate(joined):
        places.setdefault(name, []).append(place)
    assert all(at == list(range(at[0], at[0] + EACH)) for at in places.values())
    assert list(places) == list(dict.fromkeys(row[FIELD] for row in rows_of())), "in the order of the file"


def test_documents_alone_would_be_dealt_over_splits(corpus: str) -> None:
    """The text is such that splits by document cut every group, so that the test above can fail."""
    author = {row["text"]: row[FIELD] for row in rows_of()}
    parts = [{author[each] for each in iterate_corpus_documents(corpus, split)} for split in DEALT]
    assert parts[0] & parts[1] & parts[2]


def test_a_group_of_both_files_of_a_folder_is_not_judged(tmp_path: Path) -> None:
    valid, test = rows_of(8), rows_of(6, first=6)
    for row in test:
        row["text"] = f"other {row['text']}"
    written(tmp_path / "valid.jsonl", *valid)
    written(tmp_path / "test.jsonl", *test)
    found = {split: set(authors_of(str(tmp_path), split, [*valid, *test])) for split in DEALT}
    assert [len(names) for names in found.values()] == [4, 4, 4]
    assert len(set.union(*found.values())) == 12
    said = describe_dealt_groups(str(tmp_path), FIELD)
    assert "documents (groups): calibrate 40 (4), validate 40 (4), evaluate 40 (4); groups of the test file" in said
    assert said.endswith("left out: 2")


def test_a_file_says_how_it_is_dealt_and_what_would_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "letters.jsonl", *rows_of(30))
    said = describe_dealt_documents(path, 200)
    assert said.startswith(f"{path}, 300 documents: 75 calibrate, 75 choose, 150 judge; claims about text survive from")
    assert said.endswith("from 200 judged on: 400 documents")
    assert describe_dealt_documents(path, 150).endswith("150 judge")
    counts = [sum(1 for _ in iterate_corpus_documents(path, split)) for split in DEALT]
    assert counts == [75, 75, 150]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikitext").write_text("a file of this name is not read", encoding="utf-8")
    assert describe_dealt_documents("wikitext", 200) == describe_dealt_documents("self", 200) == ""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "two"}, r"letters\.jsonl, line 2: author=None.*it has 'text'"),
        ({"text": "two", FIELD: 7}, r"letters\.jsonl, line 2: author=7, but expected a string"),
        ({"text": "two", FIELD: " "}, r"letters\.jsonl, line 2: author=' ', but expected a string"),
        ({FIELD: "a"}, r'letters\.jsonl, line 2=.*field "text" is a string'),
    ],
)
def test_a_line_without_its_group_is_an_error_with_its_number(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = written(tmp_path / "letters.jsonl", {"text": "one", FIELD: "a"}, row)
    with pytest.raises(BadArgument, match=said):
        list(iterate_corpus_documents(path, "calibrate", corpus_group=FIELD))
    with pytest.raises(BadArgument, match=said):
        describe_dealt_groups(path, FIELD)


@pytest.mark.parametrize("corpus", ["world:premise", "wikitext", "self", "no such file"])
def test_only_files_have_groups(corpus: str) -> None:
    with pytest.raises(BadArgument, match=r"corpus_group='author', but expected a corpus that is a \.jsonl file"):
        windows_of(load("emad-nano"), corpus, "calibrate", corpus_group=FIELD)


def test_a_text_file_has_no_groups(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    with pytest.raises(BadArgument, match=r"lines of JSON, which have fields.*notes\.txt has none"):
        list(iterate_corpus_documents(str(tmp_path / "notes.txt"), "calibrate", corpus_group=FIELD))


def test_a_near_duplicate_takes_no_groups_place(tmp_path: Path) -> None:
    rows = [{"text": text(at // 2), FIELD: f"{at}"} for at in range(12)]  # every second one repeats the one before
    found = iterate_corpus_documents(written(tmp_path / "a.jsonl", *rows), "evaluate", corpus_group=FIELD)
    assert isinstance(found, DistinctDocumentIterator)
    assert len(list(found)) == 3
    assert found.groups == [0, 2, 4]
    assert [group_of_document(found, place) for place in range(3)] == [0, 2, 4]


# ---------------------------------------------------------------- windows, sums and decisions


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load("emad-nano")


def test_a_group_gives_windows_as_one_document_does() -> None:
    documents = [np.arange(25)] * 6
    groups = [0, 0, 0, 1, 1, 4]

    def numbers(**options: Any) -> list[int]:
        return [each.document for each in cut_windows(documents, 10, None, group_of=groups.__getitem__, **options)]

    assert numbers() == [0] * 9 + [1] * 6 + [4] * 3
    assert numbers(per_document=1) == [0, 1, 4]
    assert numbers(per_document=4) == [0] * 4 + [1] * 4 + [4] * 3
    assert numbers(per_document=1, limit=2) == [0, 1]


def test_losses_guarantees_and_intervals_count_groups(nano: LoadedModel, corpus: str) -> None:
    windows = list(windows_of(nano, corpus, "evaluate", corpus_group=FIELD))
    assert len(windows) == AUTHORS // 2 * EACH
    trace = take_trace(nano.stepper, windows)
    losses = replay_losses(trace, nano.geometry, [full_depth(nano.stepper.layers)])
    assert losses.cluster.tolist() == list(range(AUTHORS // 2))
    assert losses.tokens.tolist() == np.add.reduceat([each.n_decided for each in windows], range(0, 200, EACH)).tolist()
    assert [len(each) for each in nll_pair_by_document(losses[1])] == [AUTHORS // 2] * 3
    rise = estimate_point_rise(losses[1], threshold=0.01, rng=np.random.default_rng(0))
    assert rise.n <= AUTHORS // 2
    columns = (ByDocument(each, losses.cluster) for each in (losses.nats[1:].T, losses.nats[0], losses.tokens))
    assert certify_losses(excess_loss(*columns), ["full"], text="t").documents == AUTHORS // 2


def measured(model: LoadedModel, corpus: str) -> ModelMeasurements:
    return ModelMeasurements(model, Study(corpus=corpus, corpus_group=FIELD), RunResources())


def test_a_run_reads_a_window_of_every_group_before_a_second_of_any(nano: LoadedModel, corpus: str) -> None:
    subject = measured(nano, corpus).subject
    for count, each in ((10, {1}), (20, {1}), (40, {2}), (1000, {MOST_WINDOWS})):
        given = np.bincount([window.document for window in subject.cut_windows("evaluate", count)])
        assert set(given.tolist()) == each
        assert len(given) == min(count, AUTHORS // 2)
    assert len(subject.make_opening_prompts(100, 16)) == AUTHORS // 2


def test_a_group_gives_one_continuation_item_of_its_first_document_that_is_long_enough() -> None:
    length = CONTEXT_TOKENS + CONTINUATION_TOKENS
    documents = [np.arange(number * 1000, number * 1000 + length - (number % 4 == 0)) for number in range(80)]
    items = make_continuation_items(
        documents, 500, text="t", opening=None, rng=np.random.default_rng(0), group_of=lambda place: place // 2
    )
    assert [int(item.prompt[0]) // 1000 for item in items] == [n + (n % 4 == 0) for n in range(0, 80, 2)]


@dataclass(frozen=True)
class Evidence:
    corpus: str
    name: str = "simulated"
    fingerprint: str = "abc"


def answered(groups: int, corpus: str, of: str | None) -> Iterator[str]:
    """The reason of a row, and of its leg, judged on ``groups`` units of ``corpus``, grouped by ``of``."""
    column = ByDocument.from_whole_documents

    def answer(evidence: Evidence, asked: ClaimContext) -> Answer:
        full, tokens = np.full(groups, 200.0), np.full(groups, 100)
        rng = np.random.default_rng(0)
        columns = column(full + rng.random(groups)), column(full), column(tokens)
        found = estimate_perplexity_rise(*columns, threshold=0.01, rng=rng)
        return Answer(asked.judge_against_threshold({"text": found}, "above", 0.01), evidence.corpus)

    claim = "EMAD-F1"
    plan = RunPlan(load_register(), Study(corpus="letters.jsonl", corpus_group=of))
    verdict = plan.answer_claim(claim, Evidence(corpus), 4, Question(claim, "model", answer)).verdict
    yield from (verdict.reason, verdict.why, verdict.legs[0].reason)


@pytest.mark.parametrize(
    ("groups", "said"), [(20, "20 {}, at least 30 are needed"), (100, "about 647 {} would decide")]
)
def test_rows_of_a_grouped_corpus_count_groups(groups: int, said: str) -> None:
    reasons = list(answered(groups, "letters.jsonl", FIELD))
    assert said.format("groups") in reasons[0]
    assert not any("document" in reason for reason in reasons)
    for reason in (*answered(groups, "letters.jsonl", None), *answered(groups, "self", FIELD)):
        assert "documents" in reason
        assert "group" not in reason
