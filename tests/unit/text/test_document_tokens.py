"""Slices of a long document equal slices of all its tokens, and only as much is tokenised as is read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from emad_ref import tuning
from emad_ref.calibration.windows import cut_windows
from emad_ref.models.loading import load
from emad_ref.text import corpora
from emad_ref.text.corpora import LazyDocumentTokens, tokenize_without_special_tokens

SENTENCE = "the red fox sees an old boat near a river, and walks home again: 12 apples\n\n"
WORDS = SENTENCE.split(" ")


class Counting:
    """A tokenizer that counts the characters of its input."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.characters = tokenizer, 0

    def encode(self, text: str, **options: Any) -> list[int]:
        self.characters += len(text)
        return list(self._tokenizer.encode(text, **options))


def trained(model: Any, trainer: Any, split: Any) -> Any:
    tokenizer = Tokenizer(model)
    if split is not None:
        tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([" ".join(WORDS) * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS: dict[str, Any] = {
    "byte-level": lambda: load("emad-nano").tokenizer,
    "merges across words": lambda: trained(
        models.BPE(unk_token="?"), trainers.BpeTrainer(vocab_size=200, special_tokens=["?"], show_progress=False), None
    ),
    "unigram": lambda: trained(
        models.Unigram(), trainers.UnigramTrainer(vocab_size=90, show_progress=False, unk_token="?"), BYTES
    ),
    "python": ByT5Tokenizer,
}


def text_of(kind: str, characters: int) -> str:
    rng = random.Random(kind)
    if kind == "words":
        return " ".join(rng.choice(WORDS) for _ in range(characters // 5))
    if kind == "one letter":
        return "e" * characters
    if kind == "no spaces":
        return "".join(rng.choice("abcdefgh") for _ in range(characters))
    return "".join(chr(rng.choice((rng.randint(32, 126), rng.randint(0x4E00, 0x4FFF)))) for _ in range(characters))


@pytest.mark.parametrize("tokenizer", KINDS)
@pytest.mark.parametrize("text", ["words", "one letter", "no spaces", "any characters"])
def test_every_slice_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, tokenizer: str, text: str) -> None:
    monkeypatch.setattr(corpora, "LONG_CHARACTERS", 3_000)
    made, written = KINDS[tokenizer](), text_of(text, 40_000)
    whole = np.array(made.encode(written, add_special_tokens=False))
    document = tokenize_without_special_tokens(made, written)
    assert isinstance(document, LazyDocumentTokens)
    for start, stop in ((0, 10), (10, 200), (150, 1000), (900, 3000), (0, 5), (len(whole) - 3, len(whole) + 50)):
        np.testing.assert_array_equal(document[start:stop], whole[start:stop])
    np.testing.assert_array_equal(document[:], whole)


def test_where_tokens_depend_on_the_end_the_whole_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "LONG_CHARACTERS", 3_000)

    class FromTheEnd:
        """Pairs letters from the end, the odd one first."""

        def encode(self, text: str, **_: Any) -> list[int]:
            return [1] * (len(text) % 2) + [2] * (len(text) // 2)

    document = tokenize_without_special_tokens(FromTheEnd(), "a" * 40_001)
    np.testing.assert_array_equal(document[:3], [1, 2, 2])


def test_four_windows_of_a_large_document_read_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of("words", 5_000_000).replace("\n", " ")
    (tmp_path / "large.txt").write_text("\n\n".join([text, "between", "between", "last"]))
    loaded = load("emad-nano")
    counting = Counting(loaded.tokenizer)
    monkeypatch.setattr(tuning, "get_required_tokenizer", lambda _: counting)
    found = list(tuning.windows_of(loaded, str(tmp_path / "large.txt"), "calibrate", limit=4))
    beginning = np.array(loaded.tokenizer.encode(text[:20_000], add_special_tokens=False))
    expected = list(
        cut_windows([beginning], tuning.window_size(loaded.stepper.max_positions), loaded.opening_token_id, 4)
    )
    assert len(found) == 4
    for window, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(window.tokens, other.tokens)
    assert counting.characters < 0.05 * len(text)


def test_a_short_document_is_an_array() -> None:
    assert isinstance(tokenize_without_special_tokens(ByT5Tokenizer(), "ab"), np.ndarray)
