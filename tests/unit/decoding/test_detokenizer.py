"""Pieces join to the text of all ids, for every decoder; text is held back only where later ids may change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, CodeGenTokenizer, PreTrainedTokenizerFast

from emad_ref.decoding.detokenizer import IncrementalDetokenizer
from emad_ref.models.tokenizers import decode_tokens

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256 characters, one per byte
WORDS = [
    "▁",
    "▁the",
    "the",
    "##s",
    "ab</w>",
    "</w>",
    ".",
    " .",
    "'",
    " '",
    "n't",
    " n",
    "'ve",
    " ",
    "x",
    "é",
    "\ufffd",
    "a",
    "b",
]
BEYOND = 4  # rows of the model for which the tokenizer has no token


class RustShout(PreTrainedTokenizerFast):
    """Changes text after its decoder, as a class with a method of its own may: a full stop ends a shout."""

    def _decode(self, *arguments: Any, **options: Any) -> str:
        return shouted(super()._decode(*arguments, **options))


class PythonShout(ByT5Tokenizer):
    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return shouted(super().convert_tokens_to_string(tokens))


def shouted(text: str) -> str:
    head, stop, tail = text.rpartition(".")
    return head.upper() + stop + tail


def fast(decoder: Any, bytes_: Sequence[str] = BYTES, kind: type = PreTrainedTokenizerFast, **options: Any) -> Any:
    vocabulary = {token: number for number, token in enumerate(["<unk>", *bytes_, *WORDS])}
    model = options.pop("model", models.WordLevel)(vocabulary, unk_token="<unk>")
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = kind(tokenizer_object=backend, unk_token="<unk>", **options)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return tokenizer


def sequence(*steps: Any) -> Any:
    return decoders.Sequence(list(steps))


SPACES, FALLBACK, FUSE, STRIP = (
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
)
LLAMA = sequence(SPACES, FALLBACK, FUSE, STRIP)
STREAMED: dict[str, Callable[[], Any]] = {
    "no decoder": lambda: fast(None),
    "byte level": lambda: fast(decoders.ByteLevel(), ALPHABET),
    "byte level with clean-up": lambda: fast(decoders.ByteLevel(), ALPHABET, clean_up_tokenization_spaces=True),
    "metaspace": lambda: fast(decoders.Metaspace()),
    "metaspace that keeps its space": lambda: fast(decoders.Metaspace(prepend_scheme="never")),
    "word pieces": lambda: fast(decoders.WordPiece()),
    "word pieces with clean-up": lambda: fast(decoders.WordPiece(), clean_up_tokenization_spaces=True),
    "suffixes": lambda: fast(decoders.BPEDecoder()),
    "Llama": lambda: fast(LLAMA),
    "Llama with clean-up": lambda: fast(LLAMA, clean_up_tokenization_spaces=True),
    "Gemma": lambda: fast(sequence(SPACES, FALLBACK, FUSE)),
    "nested": lambda: fast(sequence(sequence(SPACES), sequence(FALLBACK, FUSE), decoders.Strip(" ", 3, 0))),
    "unigram with bytes": lambda: fast(sequence(FALLBACK, decoders.Metaspace())),
    "strip per token": lambda: fast(sequence(FALLBACK, SPACES, STRIP)),
    "characters replaced": lambda: fast(sequence(FALLBACK, FUSE, SPACES, decoders.Replace("a", ""), STRIP)),
    "CodeGen": lambda: fast(decoders.ByteLevel(), ALPHABET, CodeGenTokenizer),
    "ByT5": ByT5Tokenizer,
    "ByT5 with clean-up": lambda: ByT5Tokenizer(clean_up_tokenization_spaces=True),
}
# name → (tokenizer, tokens of which the last changes text of the others)
AT_THE_END: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a pattern": (lambda: fast(sequence(FUSE, decoders.Replace(Regex("the.*the"), "T"))), ["the", "x", "the"]),
    "two characters": (lambda: fast(sequence(FALLBACK, FUSE, decoders.Replace("ab", "X"))), ["a", "b"]),
    "a token that becomes a byte": (
        lambda: fast(sequence(decoders.Replace("b", "<0x41>"), FALLBACK, FUSE)),
        ["b", "<0xFF>"],
    ),
    "clean-up of the whole text": (lambda: fast(sequence(FUSE, decoders.WordPiece())), ["a", " ", "."]),
    "a class in Rust with a method of its own": (lambda: fast(LLAMA, kind=RustShout), ["x", "."]),
    "a class in Python that is not known": (PythonShout, ["x", "."]),
}


def is_bytes(tokenizer: Any) -> bool:
    return getattr(tokenizer, "backend_tokenizer", None) is None


def id_of_byte(tokenizer: Any, byte: int) -> int:
    if is_bytes(tokenizer):
        return 3 + byte
    return 1 + (ALPHABET.index(BYTE_CHARACTERS[byte]) if tokenizer.convert_ids_to_tokens(1) == ALPHABET[0] else byte)


def byte_characters() -> list[str]:
    """The character of each byte in a byte-level vocabulary: printable ones stand for themselves, others follow 255."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(256 + others.index(byte)) for byte in range(256)]


BYTE_CHARACTERS = byte_characters()


def draw_ids(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    """Ids of whole characters in bytes, of single bytes, of words, and ids beyond the tokenizer."""
    words = st.integers(len(tokenizer) - len(WORDS) - 1, len(tokenizer) - 1 + BEYOND)
    single = st.sampled_from([0x41, 0x20, 0x2E, 0x27, 0x6E, 0x74, 0x80, 0x96, 0xC3, 0xE2, 0xF0, 0xFF])
    whole = st.text(st.sampled_from("aé▁😀 .'"), max_size=3).map(str.encode)
    parts = st.one_of(
        words.map(lambda token: [token]),
        single.map(lambda byte: [id_of_byte(tokenizer, byte)]),
        whole.map(lambda text: [id_of_byte(tokenizer, byte) for byte in text]),
    )
    return st.lists(parts, max_size=12).map(lambda lists: [token for ids in lists for token in ids])


def known(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    vocabulary = set(tokenizer.get_vocab().values())
    return [token for token in ids if token in vocabulary]


@pytest.mark.parametrize("name", [*STREAMED, *AT_THE_END])
def test_pieces_join_to_the_text_of_all_ids(name: str) -> None:
    make, telling = AT_THE_END.get(name) or (STREAMED[name], ["x", "▁", "▁the", "▁", "▁", " ", "the"])
    tokenizer = make()
    in_bytes = is_bytes(tokenizer) and name in STREAMED
    shown = [] if in_bytes else tokenizer.convert_tokens_to_ids(telling)

    @settings(max_examples=60)
    @given(read=st.one_of(st.just([]), draw_ids(tokenizer)), ids=draw_ids(tokenizer))
    @example(read=[], ids=shown)
    def check(read: list[int], ids: list[int]) -> None:
        words = IncrementalDetokenizer(tokenizer, read)
        pieces = [words.add_token(token) for token in ids] + [words.flush()]
        before, whole = (
            tokenizer.decode(each) if each else "" for each in (known(tokenizer, read), known(tokenizer, read + ids))
        )
        assert "".join(pieces) == whole[len(before) :]

    check()


@pytest.mark.parametrize("name", STREAMED)
def test_text_arrives_with_the_token_that_makes_it_final(name: str) -> None:
    """After ``x`` nothing is open: no byte, no incomplete character, no space that clean-up could remove."""
    tokenizer = STREAMED[name]()
    ordinary = tokenizer.convert_tokens_to_ids("x") if not is_bytes(tokenizer) else id_of_byte(tokenizer, ord("x"))
    smile = [id_of_byte(tokenizer, byte) for byte in "😀".encode()]
    words, ids = IncrementalDetokenizer(tokenizer, [ordinary]), [ordinary]
    for group in ([*smile, ordinary], [ordinary], [smile[0], ordinary], [*smile, *smile, ordinary]):
        before, ids = ids, ids + group
        text = "".join(words.add_token(token) for token in group)
        assert text == tokenizer.decode(ids)[len(tokenizer.decode(before)) :]
    assert words.flush() == ""


@pytest.mark.parametrize("name", AT_THE_END)
def test_where_any_token_may_change_any_text_it_arrives_at_the_end(name: str) -> None:
    make, telling = AT_THE_END[name]
    tokenizer = make()
    ids = tokenizer.convert_tokens_to_ids(telling)
    assert not tokenizer.decode(ids).startswith(tokenizer.decode(ids[:-1])), "nothing changes: nothing was tested"
    words = IncrementalDetokenizer(tokenizer)
    assert [words.add_token(token) for token in ids] == [""] * len(ids)
    assert words.flush() == tokenizer.decode(ids)


def test_strip_at_the_end_is_asked_once_since_it_panics_on_an_empty_text() -> None:
    tokenizer = fast(sequence(FUSE, decoders.Strip(" ", 0, 1)))
    ids = tokenizer.convert_tokens_to_ids(["x", " ", "x", " "])
    words = IncrementalDetokenizer(tokenizer)
    assert [words.add_token(token) for token in ids] == [""] * len(ids)
    assert words.flush() == tokenizer.decode(ids)


def test_a_row_of_bytes_is_held_until_another_token_follows() -> None:
    tokenizer = fast(LLAMA)
    a, bad, x = (tokenizer.convert_tokens_to_ids(token) for token in ("<0x41>", "<0xFF>", "x"))
    beyond = len(tokenizer)
    words = IncrementalDetokenizer(tokenizer, [x])
    assert [words.add_token(token) for token in (a, beyond, x, a, bad, x, a)] == [
        "",
        "",
        "Ax",
        "",
        "",
        "\ufffd\ufffdx",
        "",
    ]
    assert words.flush() == "A"


@pytest.mark.parametrize("name", STREAMED)
def test_cost_grows_with_the_number_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids decoded for 4,000 tokens of words, characters in bytes and single spaces: a few for each."""
    tokenizer = STREAMED[name]()
    group = [id_of_byte(tokenizer, byte) for byte in "é x".encode()]
    if not is_bytes(tokenizer):
        group += [tokenizer.convert_tokens_to_ids(token) for token in ("▁", "▁the", "x")] + [len(tokenizer)]
    ids = (group * 4000)[:4000]
    decoded, original = [0], tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **options: (decoded.append(len(ids)), original(ids, **options))[1]
    )
    words = IncrementalDetokenizer(tokenizer)
    text = "".join(words.add_token(token) for token in ids)
    steps = sum(decoded)
    assert steps < 30 * len(ids)
    monkeypatch.undo()
    assert text + words.flush() == decode_tokens(tokenizer, ids)


def test_an_id_beyond_a_tokenizer_in_python_has_no_text() -> None:
    tokenizer = ByT5Tokenizer()
    ids = tokenizer.encode("Ben é", add_special_tokens=False)
    with pytest.raises(ValueError, match="range"):
        tokenizer.decode([*ids, len(tokenizer)])
    assert decode_tokens(tokenizer, [*ids[:5], len(tokenizer) + 100, *ids[5:], len(tokenizer)]) == "Ben é"
    assert decode_tokens(tokenizer, [*ids, tokenizer.eos_token_id]) == "Ben é</s>"
    assert decode_tokens(tokenizer, [*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "Ben é"


def test_clean_up_of_this_transformers_is_the_one_that_is_known() -> None:
    """No replacement crosses a character outside ``CLEANED``: so text up to such a character is final."""
    from emad_ref.decoding.detokenizer import CLEANED

    clean = PreTrainedTokenizerFast.clean_up_tokenization
    every = [" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"]
    for pattern, after in pairwise([*every, *every, " ' ."]):
        for cut in range(len(pattern) + 1):
            head, tail = f"{after}{pattern[:cut]}", f"{pattern[cut:]}{after}"
            assert clean(None, f"{head}x{tail}") == clean(None, f"{head}x") + clean(None, tail)
        assert clean(None, f"x{pattern}x") != f"x{pattern}x"
        assert set(pattern) <= CLEANED
