"""Near-duplicates: detected copies, the places where they are removed, and texts that stay."""

from __future__ import annotations

import json
import random
from itertools import count, islice, repeat

import pytest

from emad_ref.text import corpora
from emad_ref.text.corpora import (
    MAX_DUPLICATES_IN_A_ROW,
    DistinctDocumentIterator,
    bottom_k_sketch,
    cluster_near_duplicates,
    iterate_corpus_documents,
    jaccard_index,
)
from emad_ref.text.documents import Split

WORDS = [
    f"{first}{last}" for first in ("ba", "ke", "mi", "to", "su", "ra") for last in ("la", "ven", "dor", "nik", "sh")
]


def text(seed: int, words: int = 150) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def changed(original: str, every: int) -> str:
    return " ".join("other" if at % every == every - 1 else word for at, word in enumerate(original.split()))


ORIGINAL = text(1)
COPIES = {
    "the same": ORIGINAL,
    "in capitals, punctuated": ORIGINAL.upper().replace(" ", ", ") + "!",
    "on other lines": ORIGINAL.replace(" ", "\n  "),
    "under a header": f"Forwarded message of 12 May, please read.\n{ORIGINAL}",
    "with more behind it": f"{ORIGINAL} {text(2, 60)}",
    "without its first fifth": " ".join(ORIGINAL.split()[30:]),
    "every fifteenth word another": changed(ORIGINAL, 15),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_copy_is_found_whatever_was_done_to_it(copy: str) -> None:
    assert cluster_near_duplicates([text(3), ORIGINAL, text(4), copy]).tolist() == [0, 1, 2, 1]


def test_a_copy_of_text_without_spaces_is_found() -> None:
    rng = random.Random(1)
    one, other = ("".join(chr(rng.randrange(0x4E00, 0x5E00)) for _ in range(600)) for _ in range(2))
    assert cluster_near_duplicates([one, other, one + "完", one.replace("，", "")]).tolist() == [0, 1, 0, 0]


def test_texts_of_one_kind_are_not_alike() -> None:
    """Neither a template with other words, nor short texts that differ in a number."""
    assert cluster_near_duplicates(text(seed) for seed in range(200)).tolist() == list(range(200))
    assert cluster_near_duplicates(f"paragraph {number}" for number in range(50)).tolist() == list(range(50))
    for corpus in ("world:premise", "world:mixed"):
        read = list(islice(iterate_corpus_documents(corpus, "evaluate"), 100))
        assert len(set(cluster_near_duplicates(read))) == 100


def test_an_estimated_resemblance_is_near_the_exact_one() -> None:
    long, half = text(5, 4000), text(5, 2000)
    assert jaccard_index(bottom_k_sketch(long), bottom_k_sketch(half)) == pytest.approx(0.5, abs=0.1)
    assert jaccard_index(bottom_k_sketch(long), bottom_k_sketch(long)) == 1.0
    assert jaccard_index(bottom_k_sketch(long), bottom_k_sketch(text(6, 4000))) == 0.0


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("split", ["calibrate", "validate", "evaluate"])
def test_a_file_that_holds_every_document_several_times_gives_each_once(tmp_path, times: int, split: Split) -> None:
    path = tmp_path / "again.jsonl"
    lines = [json.dumps({"text": text(seed)}) for seed in range(40) for _ in range(times)]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = iterate_corpus_documents(str(path), split)
    texts = list(found)
    assert len(texts) == len(set(texts)) == (20 if split == "evaluate" else 10)
    assert isinstance(found, DistinctDocumentIterator)
    assert found.left_out == (times - 1) * len(texts)


@pytest.mark.parametrize("kind", ["file", "folder", "hub"])
def test_a_text_stands_in_one_split_alone(tmp_path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Copies lie anywhere in the corpus; the first split that holds a text keeps it."""
    texts = [text(seed) for seed in range(40)] * 3
    random.Random(0).shuffle(texts)
    lines = [json.dumps({"text": each}) for each in texts]
    parts = {"file": {"all": lines}, "folder": {"valid": lines[:60], "test": lines[60:]}, "hub": {}}[kind]
    for name, held in parts.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(held), encoding="utf-8")
    monkeypatch.setattr(corpora, "stream_hub_documents", lambda corpus, part: iter(texts))
    corpus = {"file": str(tmp_path / "all.jsonl"), "folder": str(tmp_path), "hub": "pile"}[kind]
    found = {split: iterate_corpus_documents(corpus, split) for split in corpora.DEALT}
    read = [each for documents in found.values() for each in documents]
    assert len(read) == len(set(read)) == 40
    assert sum(documents.left_out for documents in found.values()) == 80


def test_a_split_that_is_not_there_holds_nothing_to_compare(tmp_path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": ORIGINAL}), encoding="utf-8")
    assert list(iterate_corpus_documents(str(tmp_path), "evaluate")) == [ORIGINAL]
    (tmp_path / "valid.jsonl").write_text(json.dumps({"text": ORIGINAL}), encoding="utf-8")
    assert list(iterate_corpus_documents(str(tmp_path), "evaluate")) == [], "the corpus has changed"


def test_a_source_that_repeats_itself_for_ever_ends() -> None:
    found = DistinctDocumentIterator(zip(repeat("the one and only document that there is"), count()))
    assert len(list(found)) == 1
    assert found.left_out == MAX_DUPLICATES_IN_A_ROW


def test_documents_under_one_header_are_compared_with_few_others_and_copies_are_found(monkeypatch) -> None:
    """A licence fills a third of every document: comparing all of them with all would take hours."""
    compared = 0

    def counted(a, b) -> float:
        nonlocal compared
        compared += 1
        return jaccard_index(a, b)

    monkeypatch.setattr(corpora, "jaccard_index", counted)
    header, number = text(0, 60), 300
    documents = [f"{header} {text(seed, 90)}" for seed in range(1, number + 1)]
    signed = [f"{header} {text(seed, 3)}" for seed in range(number + 1, number + 4)]
    copies = [changed(document, 15) for document in documents[-20:]]
    found = cluster_near_duplicates([*documents, *signed, *copies]).tolist()
    assert found == [*range(number), *[number] * 3, *range(number - 20, number)]
    assert compared <= corpora.MAX_COMPARISONS * len(found)
