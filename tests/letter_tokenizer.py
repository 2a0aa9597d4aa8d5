"""A tokenizer of letters for small models."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.small_models import VOCABULARY


class Letters(PreTrainedTokenizerFast):
    """Maps each character to one token, so that no tokenizer has to be trained."""

    def __init__(self) -> None:
        backend = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
        backend.decoder = Fuse()
        super().__init__(tokenizer_object=backend, eos_token="<0>")

    def encode(self, text: str, **options: Any) -> list[int]:
        assert options == {"add_special_tokens": False}
        return [ord(letter) % VOCABULARY for letter in text]
