"""A stream has the tokens that ``generate`` returns, and the texts of its tokens join to the whole text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from emad_ref.decoding.detokenizer import IncrementalDetokenizer
from emad_ref.decoding.partner import Partner
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.self_speculation import Drafting
from emad_ref.decoding.streaming import (
    make_prompt_from_text,
    stream,
    stream_pair,
    stream_self_speculation,
    stream_tokens_and_depths,
)
from emad_ref.decoding.switching import SwitchingRule, switch
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import fixed_entropy_point
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE
from pytest_emad import cli
from tests.small_models import small_model

POINT = fixed_entropy_point(12, (4, 8), 0.05)
TEXT = "In the morning Kai went to the"


@pytest.fixture(scope="module")
def tiny():
    return load("emad-tiny")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("stops", [False, True])
def test_tokens_and_depths_are_those_of_generate(tiny, temperature, stops):
    decoder = WalkedDecoder(tiny.stepper, POINT, seed=3, temperature=temperature)
    prompt = make_prompt_from_text(tiny, TEXT)
    stop = frozenset(tiny.tokenizer.encode(".")) if stops else frozenset()
    record = decoder.generate([prompt], 20, stop)
    found = list(stream_tokens_and_depths(decoder, prompt, 20, stop))
    assert [token for token, _ in found] == record.emitted[0].tolist()
    assert [depth for _, depth in found] == record.tokens.select_sequence(0, DECODE).depth.tolist()
    assert (len(found) < 20) == stops


def test_a_pair_takes_the_turns_of_switch(tiny):
    nano = load("emad-nano")
    rule = SwitchingRule(0.3, window=2, least_run=2)
    partners = [Partner(WalkedDecoder(m.stepper, full_depth(m.geometry.layers)), full_depth(m.geometry.layers))
                for m in (nano, tiny)]  # fmt: skip
    whole = switch(*partners, rule, [make_prompt_from_text(tiny, "Kai")], 16, stop=frozenset({0}))
    found = list(stream_pair(nano, tiny, "Kai", rule, 16))
    assert [piece.token for piece in found] == whole.record.emitted[0].tolist()
    assert [piece.model for piece in found] == [("emad-nano", "emad-tiny")[m] for m in whole.model[0]]
    assert len(set(whole.model[0])) == 2, "the models never switched: nothing was tested"


def test_texts_of_tokens_are_the_whole_text(tiny):
    pieces = list(stream(tiny, TEXT, POINT, 20))
    assert "".join(piece.text for piece in pieces) == tiny.tokenizer.decode([piece.token for piece in pieces])
    assert {piece.layers for piece in pieces} == {12}


@pytest.mark.parametrize(("name", "smile"), [("emad-tiny", "😀"), ("emad-t5-tiny", "😀!")])
def test_a_character_of_several_tokens_is_one_text(name, smile):
    """Byte fallback holds it back until another token follows."""
    tokenizer = load(name).tokenizer
    ids = tokenizer.encode("Ben: é, 😀!", add_special_tokens=False)
    words = IncrementalDetokenizer(tokenizer, ids[:2])
    texts = [words.add_token(token) for token in ids[2:]]
    assert "" in texts
    assert smile in texts
    assert "�" not in "".join(texts)
    assert "".join(texts).endswith(" é, 😀!")
    assert words.flush() == ""


def test_a_character_that_never_comes_stands_as_its_replacement(tiny):
    first = tiny.tokenizer.encode("😀", add_special_tokens=False)[0]
    words = IncrementalDetokenizer(tiny.tokenizer)
    assert words.add_token(first) == ""
    assert words.flush() == "�"


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model with the tokenizer of a Llama, whose last 40 rows have no token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *ascii_lowercase, "▁the"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    rows, ends = len(tokens) + 40, {"bos_token_id": 1, "eos_token_id": 2}
    config = hf.LlamaConfig(vocab_size=rows, **sizes, max_position_embeddings=256, **ends)
    folder = tmp_path_factory.mktemp("models") / "fallback"
    small_model("llama", torch.float32, config=config).save_pretrained(folder)
    hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def assert_text_of_all_ids(tokenizer: Any, prompt: str, ids: list[int], text: str) -> None:
    read = tokenizer.encode(prompt, add_special_tokens=False)
    assert text == tokenizer.decode(read + ids)[len(tokenizer.decode(read)) :]
    assert "\ufffd" in text, "no byte was without its character: nothing was tested"
    assert max(ids) >= len(tokenizer), "no id beyond the tokenizer: nothing was tested"


@pytest.mark.parametrize("way", ["one model", "a pair", "drafts"])
def test_bytes_and_ids_beyond_the_tokenizer_join_to_the_text(byte_fallback: Path, way: str) -> None:
    loaded = load(str(byte_fallback))
    streamed = {
        "one model": partial(stream, loaded, "the river"),
        "a pair": partial(stream_pair, loaded, loaded, "the river", SwitchingRule(4.0)),
        "drafts": partial(stream_self_speculation, loaded, "the river", Drafting(2, 3)),
    }[way]
    for seed in range(6):
        pieces = list(streamed(tokens=60, temperature=1.5, seed=seed))
        ids, text = [piece.token for piece in pieces], "".join(piece.text for piece in pieces)
        assert_text_of_all_ids(loaded.tokenizer, "the river", ids, text)


def test_the_command_prints_the_text_of_all_ids(byte_fallback: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-new-tokens", "60", "--temperature", "1.5", "--seed", "3", "--format", "jsonl"]
    assert cli.main(["generate", str(byte_fallback), "the river", *options]) == 0
    pieces = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ids, text = [piece["token"] for piece in pieces], "".join(piece["text"] for piece in pieces)
    assert_text_of_all_ids(load(str(byte_fallback)).tokenizer, "the river", ids, text)


def test_a_text_without_tokens_starts_from_the_opening_token(tiny):
    assert make_prompt_from_text(tiny, "").tokens.tolist() == [tiny.opening_token_id]


def test_an_encoder_decoder_reads_the_text_as_its_source():
    t5 = load("emad-t5-tiny")
    prompt = make_prompt_from_text(t5, "Where is Mia?")
    assert prompt.tokens.tolist() == [t5.opening_token_id]
    assert prompt.source.tolist() == t5.tokenizer.encode("Where is Mia?")
    decoder = WalkedDecoder(t5.stepper, full_depth(10))
    pieces = list(stream(t5, "Where is Mia?", tokens=8))
    assert [piece.token for piece in pieces] == decoder.generate([prompt], 8, frozenset({1})).emitted[0].tolist()


def test_no_new_token_is_refused(tiny):
    with pytest.raises(BadArgument, match="max_new=0"):
        next(stream_tokens_and_depths(WalkedDecoder(tiny.stepper, POINT), Prompt(np.array([1])), 0))


def test_a_prompt_is_clean_text_as_a_document_is(tiny):
    assert (
        make_prompt_from_text(tiny, "\ufeffa\r\nb").tokens.tolist()
        == make_prompt_from_text(tiny, "a\nb").tokens.tolist()
    )
    for text, said in (("a\0b", "NUL"), ("a\udcff", "half of a surrogate pair")):
        with pytest.raises(BadArgument, match=rf"prompt=.*text without {said}"):
            make_prompt_from_text(tiny, text)
