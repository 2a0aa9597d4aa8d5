"""``tokenizer.json`` decides the ids, whatever class the folder names; a remark tells each difference."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from emad_ref.models import loading
from emad_ref.models.diagnosis import TOKENIZER_FILE
from emad_ref.models.loading import load, shared_vocabulary_size
from emad_ref.models.tokenizer_files import read_tokenizer
from emad_ref.models.tokenizers import SAMPLES, require_tokenizer_describe_lost_text, tokenizer_identity_text
from pytest_emad.cli import main
from tests.small_models import small_model

TEXTS = (  # none of those that the product compares
    "On 31.12.1999 we'd sold 2718281 of 44 kinds.\n\nIt's 60 %; he'll see.",
    "THEY'RE  late   today",
    " one space before",
    "Crème brûlée, Straße",
    "大阪 ラーメン 😎",
    "\tfor y in z:\r\n\t\tyield 7",
    "p <|end|> q<s>r </s> s<pad> <|endoftext|><x> t <unk>",
    " , . ! ' s 't",
    "",
)
CLASSES = ("LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "GPTNeoXTokenizer", "T5Tokenizer",
           "CohereTokenizer", "CodeLlamaTokenizer", "WhisperTokenizer", "ParakeetTokenizer", "BertTokenizer",
           "RagTokenizer", "ByT5Tokenizer", "PreTrainedTokenizerFast", "UnknownTokenizer")  # fmt: skip
ENDS = "<|end|>"


def _train(tokenizer: Tokenizer, trainer: Callable[..., Any], *first: str, **options: Any) -> Tokenizer:
    tokenizer.train_from_iterator(TEXTS * 4, trainer(special_tokens=[*first, ENDS], show_progress=False, **options))
    return tokenizer


def digits_in_threes() -> Tokenizer:
    """Byte-level, with digits in groups of three and an added token that takes the spaces beside it."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\p{N}{1,3}| ?\p{L}+|[^\p{L}\p{N}]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer, "<s>", vocab_size=400, initial_alphabet=alphabet)
    tokenizer.add_tokens([AddedToken("<x>", lstrip=True, rstrip=True)])
    return tokenizer


def lower_case_unigram() -> Tokenizer:
    """Lower-cases, keeps spaces, and opens a text with a token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    _train(tokenizer, trainers.UnigramTrainer, "<pad>", "</s>", "<unk>", vocab_size=120, unk_token="<unk>")
    opening = processors.TemplateProcessing(
        single=f"{ENDS} $A", pair=f"{ENDS} $A $B", special_tokens=[(ENDS, tokenizer.token_to_id(ENDS))]
    )
    tokenizer.post_processor = opening
    return tokenizer


def single_digits_with_byte_fallback() -> Tokenizer:
    """As Gemma and Llama 2, with single digits and without a space before the text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return _train(tokenizer, trainers.BpeTrainer, "<unk>", "<s>", "</s>", *bytes_, vocab_size=400)


def whole_words() -> Tokenizer:
    """Words with the space before them."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    return _train(tokenizer, trainers.WordLevelTrainer, "<unk>", vocab_size=120)


def cut_and_padded_word_pieces() -> Tokenizer:
    """Keeps capitals; its file truncates and pads, which Transformers does on request only."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    _train(tokenizer, trainers.WordPieceTrainer, "<unk>", "<pad>", vocab_size=220)
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=9, pad_token="<pad>")
    return tokenizer


KINDS = (
    digits_in_threes,
    lower_case_unigram,
    single_digits_with_byte_fallback,
    whole_words,
    cut_and_padded_word_pieces,
)


def write(folder: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    """A folder with the tokenizer, a Llama's config and ``settings`` as tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def as_stored(folder: Path) -> Tokenizer:
    stored = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    stored.no_truncation()
    stored.no_padding()
    return stored


def differences(tokenizer: Any, stored: Tokenizer) -> Iterator[str]:
    """Texts whose ids differ from the file's, and texts of ids that do."""
    for text in TEXTS:
        for special in (False, True):
            ids = stored.encode(text, add_special_tokens=special).ids
            if list(tokenizer.encode(text, add_special_tokens=special)) != ids:
                yield f"ids of {text!r}, special tokens {special}"
            if tokenizer.decode(ids, skip_special_tokens=special) != stored.decode(ids, skip_special_tokens=special):
                yield f"text of {ids}, special tokens skipped {special}"


def is_misread_by_transformers(folder: Path, stored: Tokenizer) -> bool:
    try:
        return any(differences(AutoTokenizer.from_pretrained(folder), stored))
    except Exception:
        return True


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_every_class_gives_ids_and_text_of_the_file(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    tokenizer, told, misread = make(), set(), set()
    for name in CLASSES:
        folder = write(tmp_path / name, tokenizer, tokenizer_class=name)
        stored = as_stored(folder)
        read, sentence = read_tokenizer(str(folder), folder)
        assert not list(differences(read, stored)), name
        told |= {name} if sentence else set()
        misread |= {name} if is_misread_by_transformers(folder, stored) else set()
    assert misread <= told
    assert {"ByT5Tokenizer", "GemmaTokenizer", "ParakeetTokenizer"} <= misread
    assert not told & {"PreTrainedTokenizerFast", "UnknownTokenizer"}


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_each_class_that_transformers_maps_is_read_as_the_file(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for name in sorted({name for name in TOKENIZER_MAPPING_NAMES.values() if name}):
        folder = write(tmp_path / name, tokenizer, tokenizer_class=name)
        stored = as_stored(folder)
        read, sentence = read_tokenizer(str(folder), folder)
        assert not list(differences(read, stored)), name
        assert sentence or not is_misread_by_transformers(folder, stored), name


@pytest.mark.parametrize(("name", "error"), [("T5Tokenizer", "TypeError"), (3, "AttributeError")])
def test_a_class_that_cannot_be_built_is_told(tmp_path: Path, name: str | int, error: str) -> None:
    folder = write(tmp_path, digits_in_threes(), tokenizer_class=name, eos_token=ENDS)
    read, sentence = read_tokenizer(str(folder), folder)
    assert sentence.startswith("the tokenizer is tokenizer.json itself: Transformers cannot build the class")
    assert error in sentence
    assert read.eos_token_id == as_stored(folder).token_to_id(ENDS)


def test_a_file_that_lacks_its_token_for_unknown_text_is_compared_on_the_other_texts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<none>": 0, "plain": 1}, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = write(tmp_path, tokenizer, tokenizer_class="ByT5Tokenizer")
    changed = json.loads((folder / TOKENIZER_FILE).read_text())
    changed["model"]["unk_token"] = "<gone>"
    (folder / TOKENIZER_FILE).write_text(json.dumps(changed))
    read, sentence = read_tokenizer(str(folder), folder)
    assert read.encode("plain plain") == [1, 1]
    assert "ByT5Tokenizer of Transformers reads" in sentence


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("GPT2Tokenizer", digits_in_threes),
        ("Qwen2Tokenizer", digits_in_threes),
        ("LlamaTokenizer", single_digits_with_byte_fallback),
        ("GemmaTokenizer", single_digits_with_byte_fallback),
        ("T5Tokenizer", lower_case_unigram),
    ],
)
def test_a_folder_that_a_class_saved_has_nothing_to_tell(
    tmp_path: Path, name: str, make: Callable[[], Tokenizer]
) -> None:
    """Its file is what the class reads, with the class's own special tokens; that it truncates does not count."""
    by_class = getattr(hf, name).from_pretrained(write(tmp_path / "first", make(), tokenizer_class=name))
    by_class.save_pretrained(tmp_path / "saved")
    truncating = as_stored(tmp_path / "saved")
    truncating.enable_truncation(3)
    truncating.save(str(tmp_path / "saved" / TOKENIZER_FILE))
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "llama"}')
    read, sentence = read_tokenizer(str(tmp_path / "saved"), tmp_path / "saved")
    assert sentence == ""
    assert read.special_tokens_map == by_class.special_tokens_map
    assert read.all_special_ids == by_class.all_special_ids


def test_without_the_file_the_class_reads_what_it_finds(tmp_path: Path) -> None:
    folder = write(tmp_path, digits_in_threes(), tokenizer_class="ByT5Tokenizer")
    (folder / TOKENIZER_FILE).unlink()
    read, sentence = read_tokenizer(str(folder), folder)
    assert (type(read).__name__, sentence) == ("ByT5Tokenizer", "")


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_flags_of_added_tokens_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    """tokenizer_config.json repeats them, and may be older."""
    tokenizer = digits_in_threes()
    at = tokenizer.token_to_id("<x>")
    plain = {"content": "<x>", "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    folder = write(tmp_path, tokenizer, tokenizer_class=name, added_tokens_decoder={at: plain | {"single_word": True}})
    assert any(differences(AutoTokenizer.from_pretrained(folder), as_stored(folder)))
    read, sentence = read_tokenizer(str(folder), folder)
    assert not list(differences(read, as_stored(folder)))
    assert "reads 1 of 11 sample texts otherwise" in sentence or name == "GPT2Tokenizer"


def test_special_tokens_that_the_folder_splits_are_told(tmp_path: Path) -> None:
    folder = write(tmp_path, digits_in_threes(), split_special_tokens=True)
    read, sentence = read_tokenizer(str(folder), folder)
    assert "split special tokens in a text" in sentence
    assert read.encode(ENDS, add_special_tokens=False) != [as_stored(folder).token_to_id(ENDS)]


def test_words_that_transformers_replaces_on_request_are_those_of_the_file(tmp_path: Path) -> None:
    """It cuts digits of Mistral's large vocabularies one by one if tokenizer_config.json asks for it."""
    tokenizer = digits_in_threes()
    changed = json.loads(tokenizer.to_str())
    first = len(changed["model"]["vocab"]) + 1
    changed["model"]["vocab"] |= {f"filler{number}": number for number in range(first, first + 100_000)}
    folder = write(tmp_path, Tokenizer.from_str(json.dumps(changed)), fix_mistral_regex=True)
    (folder / "config.json").write_text('{"model_type": "mistral", "transformers_version": "4.50.0"}')
    assert is_misread_by_transformers(folder, as_stored(folder))
    read, sentence = read_tokenizer(str(folder), folder)
    assert not list(differences(read, as_stored(folder)))
    assert "of Transformers reads" in sentence


def test_what_is_read_is_saved_without_the_place_of_its_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "first", digits_in_threes(), tokenizer_class="Qwen2Tokenizer")
    read, _ = read_tokenizer(str(folder), folder)
    read.save_pretrained(tmp_path / "again")
    assert str(tmp_path) not in (tmp_path / "again" / "tokenizer_config.json").read_text()
    (tmp_path / "again" / "config.json").write_text('{"model_type": "llama"}')
    again, sentence = read_tokenizer(str(tmp_path / "again"), tmp_path / "again")
    assert sentence == ""
    assert not list(differences(again, as_stored(folder)))


def test_tokens_that_other_files_add_are_kept_and_told(tmp_path: Path) -> None:
    added = {
        "content": "<call>",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    tokenizer = digits_in_threes()
    rows = tokenizer.get_vocab_size()
    folder = write(tmp_path, tokenizer, added_tokens_decoder={rows: added}, pad_token="<fill>")
    read, sentence = read_tokenizer(str(folder), folder)
    assert sentence.endswith("other files of its folder add '<call>', '<fill>', which a text may contain")
    assert read.encode("a<call>", add_special_tokens=False)[-1] == rows
    assert read.pad_token_id == rows + 1


def test_roles_are_those_of_the_folder_then_those_of_the_class_that_the_file_has(tmp_path: Path) -> None:
    """GPT-2's class has one token for all roles, which the first file has and the second lacks."""
    tokenizer = digits_in_threes()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder = write(tmp_path / "with", tokenizer, tokenizer_class="GPT2Tokenizer", eos_token=ENDS)
    read, _ = read_tokenizer(str(folder), folder)
    assert (read.bos_token, read.eos_token) == ("<|endoftext|>", ENDS)
    folder = write(tmp_path / "without", digits_in_threes(), tokenizer_class="GPT2Tokenizer", eos_token=ENDS)
    read, _ = read_tokenizer(str(folder), folder)
    assert (read.bos_token, read.eos_token) == (None, ENDS)
    assert len(read) == as_stored(folder).get_vocab_size()


def test_settings_of_the_folder_and_the_class_are_kept(tmp_path: Path) -> None:
    folder = write(
        tmp_path, single_digits_with_byte_fallback(), tokenizer_class="LlamaTokenizer",
        bos_token="<s>", chat_template="{{ messages }}", model_max_length=77,
    )  # fmt: skip
    read, sentence = read_tokenizer(str(folder), folder)
    by_class = AutoTokenizer.from_pretrained(folder)
    assert "LlamaTokenizer of Transformers reads" in sentence
    assert (read.chat_template, read.model_max_length, read.bos_token) == ("{{ messages }}", 77, "<s>")
    assert (read.padding_side, read.model_input_names) == (by_class.padding_side, by_class.model_input_names)
    assert "token_type_ids" not in read("a")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=96, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    small_model("llama", torch.float32, config=config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_run_reads_the_file_and_says_so(
    model: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    digits_in_threes().save(str(model / TOKENIZER_FILE))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    loading._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        loaded = load(str(model))
    assert not list(differences(loaded.tokenizer, as_stored(model)))
    (remark,) = (remark for remark in loaded.remarks if "tokenizer.json itself" in remark)
    assert "Qwen2Tokenizer of Transformers reads" in remark
    assert remark == loaded.provenance["tokenizer_file"]
    assert remark in caplog.text
    assert main(["generate", str(model), "On 31.12.1999", "--max-new-tokens", "2"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_copy_of_the_file_is_the_same_tokenizer_under_another_class(model: Path, tmp_path: Path) -> None:
    """Partners of a pair: one class per folder, padding in one file, a batch padded by one of them."""
    tokenizer = digits_in_threes()
    tokenizer.save(str(model / TOKENIZER_FILE))
    small = load(str(model))
    assert small.provenance["tokenizer_file"] == ""
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", "pad_token": ENDS}))
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(model / TOKENIZER_FILE))
    large = load(str(model))
    large.tokenizer(["a", "b c d e"], padding=True, truncation=True, max_length=3)
    assert shared_vocabulary_size(small, large) == 512


def test_padding_does_not_change_the_identity() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=digits_in_threes(), pad_token=ENDS)
    before = tokenizer_identity_text(tokenizer)
    tokenizer(["a", "b c d e"], padding=True, truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.to_str() != before
    assert tokenizer_identity_text(tokenizer) == before


@pytest.mark.parametrize(
    ("change", "loses"),
    [
        (lambda t: None, ""),
        (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "' The quick"),
        (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=True)])), "' The quick"),
        (lambda t: setattr(t, "normalizer", normalizers.Replace("  ", " ")), ""),
        (lambda t: setattr(t, "decoder", decoders.Sequence(
            [decoders.ByteLevel(), decoders.Replace("  ", " ")])), "Two spaces"),
        (lambda t: (setattr(t, "normalizer", normalizers.NFC()), setattr(t, "decoder", decoders.Sequence(
            [decoders.ByteLevel(), decoders.Replace("  ", " ")]))), "Two spaces"),
    ],
)  # fmt: skip
def test_spaces_count_in_the_round_trip_unless_a_normalizer_changes_them(
    change: Callable[[Any], None], loses: str
) -> None:
    tokenizer = digits_in_threes()
    change(tokenizer)
    told = require_tokenizer_describe_lost_text("mine", PreTrainedTokenizerFast(tokenizer_object=tokenizer), 512)
    assert bool(told) == bool(loses)
    assert loses in told


def test_spaces_that_the_folder_cleans_up_are_lost_text() -> None:
    """clean_up_tokenization_spaces takes spaces before punctuation out of generated text."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        SAMPLES,
        trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
    )
    for cleans in (False, True):
        read = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=cleans)
        told = require_tokenizer_describe_lost_text("mine", read, 512)
        assert ("Two  spaces, and" in told) == cleans, told
