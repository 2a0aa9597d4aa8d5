"""Tokenizers that fit a model, Python ones included; one of another model is refused, loss of text is reported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerFast

from emad_ref.decoding.detokenizer import IncrementalDetokenizer
from emad_ref.decoding.streaming import stream
from emad_ref.errors import BadArgument
from emad_ref.models.bundled import weights_folder
from emad_ref.models.loading import load, shared_vocabulary_size
from emad_ref.models.tokenizers import SAMPLE, require_tokenizer_describe_lost_text, tokenizer_identity_text
from pytest_emad import cli
from tests.small_models import small_model

ROWS = 512


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model of 512 tokens, without a tokenizer."""
    sizes = {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "llama", **sizes, intermediate_size=48, max_position_embeddings=96, eos_token_id=1, bos_token_id=None
    )
    small_model("llama", torch.float32, config=config).save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture
def bundled() -> dict[str, Any]:
    return dict(json.loads((weights_folder() / "emad-nano" / "tokenizer.json").read_text()))


def test_a_tokenizer_written_in_python_works_wherever_one_is_touched(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ByT5Tokenizer().save_pretrained(folder)
    loaded = load(str(folder))
    assert loaded.provenance["tokenizer_loses"] == ""
    assert loaded.fingerprint == load(str(folder)).fingerprint
    pieces = list(stream(loaded, "Ben has", tokens=8))
    ids = [piece.token for piece in pieces]
    assert "".join(piece.text for piece in pieces) == loaded.tokenizer.decode(ids)
    assert shared_vocabulary_size(loaded, load(str(folder))) == ROWS
    assert cli.main(["generate", str(folder), "Ben has", "--max-new-tokens", "4"]) == 0
    assert cli.main(["calibrate", str(folder), str(tmp_path / "profile.json"), "--documents", "3"]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["Grüße, 東京 ☃!", "é" * 5, "plain"])
def test_python_and_rust_give_the_same_text_piece_by_piece(text: str) -> None:
    """A character of several bytes is empty until its last one; one that is never completed is reported at the end."""
    tokenizer = ByT5Tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    words = IncrementalDetokenizer(tokenizer)
    pieces = [words.add_token(token) for token in ids]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) == len(text)
    cut = IncrementalDetokenizer(tokenizer)
    assert "".join(cut.add_token(token) for token in tokenizer.encode("é", add_special_tokens=False)[:1]) == ""
    assert cut.flush() in ("", "\ufffd")


def test_tokenizers_in_python_are_the_same_where_vocabulary_and_settings_are() -> None:
    assert tokenizer_identity_text(ByT5Tokenizer()) == tokenizer_identity_text(ByT5Tokenizer())
    assert tokenizer_identity_text(ByT5Tokenizer()) != tokenizer_identity_text(ByT5Tokenizer(extra_ids=5))
    assert tokenizer_identity_text(ByT5Tokenizer()) != tokenizer_identity_text(ByT5Tokenizer(eos_token="<end>"))


def test_a_vocabulary_without_rows_is_refused_but_for_special_tokens(folder: Path, bundled: dict[str, Any]) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(bundled)))
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert require_tokenizer_describe_lost_text("mine", tokenizer, ROWS) == ""
    tokenizer.add_tokens(["one", "two"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(BadArgument, match=r"rows of the embedding, 0–511; 2 of its tokens have others, up to 514"):
        load(str(folder))
    with pytest.raises(BadArgument, match=r"rows of the embedding, 0–511; .* use the tokenizer that the model"):
        require_tokenizer_describe_lost_text("mine", CanineTokenizer(), ROWS)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (models.BPE(), "gives no token for it"),
        (models.WordLevel({}, unk_token="x"), "Missing"),
        (models.WordLevel({"a": 0}, unk_token="x"), "Missing"),
    ],
)
def test_a_tokenizer_that_reads_nothing_is_refused(folder: Path, model: Any, said: str) -> None:
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(folder)
    with pytest.raises(BadArgument, match=rf"expected a tokenizer that reads plain text; .*{said}"):
        load(str(folder))


@pytest.mark.parametrize(
    ("change", "loses"),
    [
        ({}, ""),
        ({"normalizer": {"type": "Lowercase"}}, "the quick"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "[aeiou]"}, "content": ""}}, "Th qck"),
        ({"decoder": None}, "T he"),
    ],
)
def test_what_is_lost_is_told(
    folder: Path,
    bundled: dict[str, Any],
    change: dict[str, Any],
    loses: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(bundled | change))
    with caplog.at_level(logging.WARNING):
        told = load(str(folder)).provenance["tokenizer_loses"]
    assert bool(told) == bool(loses) == ("the tokenizer loses text" in caplog.text)
    assert loses in told


def test_a_permuted_vocabulary_passes_every_round_trip(bundled: dict[str, Any]) -> None:
    """Therefore the loss on text is tested, too."""
    vocabulary = bundled["model"]["vocab"]
    bundled["model"]["vocab"] = dict(zip(vocabulary, np.roll(list(vocabulary.values()), 1).tolist(), strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(bundled)))
    assert require_tokenizer_describe_lost_text("mine", tokenizer, ROWS) == ""
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("tokenizer.json", text) for text in ("{}", "[]", "x", "", '{"version": "1.0"}')),
        *(
            ("tokenizer_config.json", text)
            for text in ("[]", "x", '{"eos_token": 3}', '{"added_tokens_decoder": {"5": 3}}')
        ),
    ],
)
def test_a_damaged_tokenizer_is_one_error(folder: Path, bundled: dict[str, Any], file: str, text: str) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(bundled))
    (folder / file).write_text(text)
    with pytest.raises(BadArgument) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_tokenizer_that_splits_at_random_is_refused(folder: Path, bundled: dict[str, Any], share: float) -> None:
    bundled["model"]["dropout"] = share
    (folder / "tokenizer.json").write_text(json.dumps(bundled))
    with pytest.raises(BadArgument, match=rf"reads a text alike each time; model.dropout is {share:g} in tokenizer.js"):
        load(str(folder))


def test_a_panic_of_the_library_in_rust_is_one_error(folder: Path, bundled: dict[str, Any]) -> None:
    """It is no ``Exception``: merges without the prefix that their tokens need."""
    bundled["model"]["continuing_subword_prefix"] = "##"
    (folder / "tokenizer.json").write_text(json.dumps(bundled))
    with pytest.raises(BadArgument, match=r"can read from tokenizer\.json .*PanicException.*mend what it names"):
        load(str(folder))


def test_the_bundled_ones_lose_nothing() -> None:
    for name in ("emad-nano", "emad-t5-tiny"):
        assert load(name).provenance["tokenizer_loses"] == ""
