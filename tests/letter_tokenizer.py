"""A tokenizer of letters for small models."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from tests.small_models import VOCABULARY


class Letters:
    """Maps each character to one token, so that no tokenizer has to be trained."""

    eos_token_id = 0
    backend_tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    backend_tokenizer.decoder = Fuse()

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) % VOCABULARY for letter in text]

    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)
