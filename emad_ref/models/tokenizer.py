"""Whether a tokenizer fits its model and gives back what it reads, and what makes two of them the same.

Tokenizers of transformers come in two kinds: those with a Rust backend, whose JSON says all of them, and those written
in Python (ByT5, Canine), which say a vocabulary and settings.

A vocabulary that is permuted consistently gives every text back: no round trip finds it. What finds it is the loss of
the model on text, which is then worse than that of a guess.
"""

from __future__ import annotations

import json
import math
from typing import Any

from emad_ref.errors import BadArgument

SAMPLE = "The quick brown fox jumps over the lazy dog, 1 2 3.\nAnd then it sleeps."
REMEDY = "use the tokenizer that the model was trained with"


def tokenizer_identity(tokenizer: Any) -> str:
    """A text that two tokenizers share where they read every text alike."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str())
    told = {
        "class": type(tokenizer).__name__,
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])),
        "settings": {key: str(value) for key, value in sorted(tokenizer.init_kwargs.items()) if "path" not in key},
    }
    return json.dumps(told)


def require_tokenizer(name: str, tokenizer: Any, rows: int) -> str:
    """Refuse a tokenizer that cannot be the model's; what it loses of a sample, in words, or "".

    Parameters
    ----------
    rows: of the model's embedding: ids are 0 … rows − 1.

    Raises
    ------
    BadArgument: it gives no token for plain text, ids without a row, or cannot read its own tokens back. Special tokens
        without a row are let through, for no text gives them: a padding token is often added and never trained.
    """
    try:
        ids = list(tokenizer.encode(SAMPLE, add_special_tokens=False))
        back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
        special = set(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        outside = {number for number in tokenizer.get_vocab().values() if not 0 <= number < rows} - special
    except Exception as error:  # a damaged one raises whatever its backend raises
        said = f"{type(error).__name__}: {str(error)[:120]}; {REMEDY}"
        raise BadArgument("name", name, "a tokenizer that reads plain text", said) from error
    if not ids:
        raise BadArgument("name", name, "a tokenizer that reads plain text", f"it gives no token for it: {REMEDY}")
    highest = max(ids)
    if outside or not 0 <= highest < rows:
        said = f"{len(outside)} of its tokens have others, up to {max([*outside, highest])}: {REMEDY}"
        raise BadArgument("name", name, f"a tokenizer whose ids are rows of the embedding, 0–{rows - 1}", said)
    if _letters(back) == _letters(SAMPLE):
        return ""
    return f"the tokenizer loses text: {SAMPLE[:43]!r} comes back as {str(back)[:60]!r}"


def worse_than_a_guess(loss_nats: float, vocabulary: int) -> str:
    """What a mean loss per token above ln V means, in words; "" where it is not above.

    No refusal: untrained weights, or a text of another language, do as badly.
    """
    if not loss_nats > math.log(vocabulary):
        return ""
    return (
        f"the model's loss at full depth, {loss_nats:.2f} nats a token, is above that of a guess among its "
        f"{vocabulary:,} tokens ({math.log(vocabulary):.2f}): it is untrained, the text is not of its kind, or this is "
        "not its own tokenizer (a permuted vocabulary reads every text and gives it back)"
    )


def _letters(text: str) -> str:
    """What has to come back: most tokenizers normalise spaces on purpose."""
    return "".join(str(text).split())
