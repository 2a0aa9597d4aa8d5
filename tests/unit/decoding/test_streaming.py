"""A stream has the tokens that ``generate`` returns, and the texts of its tokens join to the whole text."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.decoding.partner import Partner
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.streaming import (
    IncrementalDetokenizer,
    make_prompt_from_text,
    stream,
    stream_pair,
    stream_tokens_and_depths,
)
from emad_ref.decoding.switching import SwitchingRule, switch
from emad_ref.errors import BadArgument
from emad_ref.exit_rules import fixed_entropy_point
from emad_ref.models.loading import load
from emad_ref.point import full_depth
from emad_ref.protocol import Prompt
from emad_ref.record import DECODE

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


@pytest.mark.parametrize("name", ["emad-tiny", "emad-t5-tiny"])
def test_a_character_of_several_tokens_is_one_text(name):
    tokenizer = load(name).tokenizer
    ids = tokenizer.encode("Ben: é, 😀!", add_special_tokens=False)
    words = IncrementalDetokenizer(tokenizer, ids[:2])
    texts = [words.add_token(token) for token in ids[2:]]
    assert "" in texts
    assert "😀" in texts
    assert "�" not in "".join(texts)
    assert "".join(texts).endswith(" é, 😀!")
    assert words.flush() == ""


def test_a_character_that_never_comes_stands_as_its_replacement(tiny):
    first = tiny.tokenizer.encode("😀", add_special_tokens=False)[0]
    words = IncrementalDetokenizer(tiny.tokenizer)
    assert words.add_token(first) == ""
    assert words.flush() == "�"


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
