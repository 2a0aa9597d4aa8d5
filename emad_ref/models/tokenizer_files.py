"""Reads a tokenizer as the files of its folder store it: ``tokenizer.json`` decides the ids.

Classes of Transformers 5 rebuild many families from the vocabulary alone. They drop the file's normalizer,
pre-tokenizer, decoder or flags of added tokens, or decode by code of their own. Therefore the file itself is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument, convert_errors_to_bad_argument
from emad_ref.models.diagnosis import MAKE_TOKENIZER, SENTENCEPIECE, TOKENIZER_FILE
from emad_ref.models.tokenizers import SAMPLES

COMPARED_TEXTS = (  # what normalizers and pre-tokenizers of the families treat in different ways
    *SAMPLES,
    "In 1984 they've paid 650841823 for 12 boxes, 3.14 each; that's 1,000,000.",
    "YOU'RE here, I'LL come, She'd; McDonald iPhone HTTPServer",
    "  Two  spaces   and more    ",
    "Grüße aus Ångström: naïve café, \ufb01ne \u00a0\u00bd cafe\u0301",
    "東京タワーは333メートル。 мир שלום नमस्ते",
    "😀👍🏽 at 5° \u2013 “so” … he said",
    "\tif x_1 == 'a-b':\r\n\t\treturn x[0]**2  # done\n\n\n",
    "abc123def 4x4 ١٢٣ a@b.org/~c?d=1&e=%20",
)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token: where in a text it is found


def read_tokenizer(place: str, folder: Path, **where: Any) -> tuple[Any, str]:
    """The tokenizer of a folder or a repository, and a sentence if Transformers would read another one, or "".

    With ``tokenizer.json`` it is this file, with the folder's special tokens and settings. Without it, it is the
    tokenizer of the class that the folder names.

    Parameters
    ----------
    place : str
        Folder or repository, as Transformers takes it.
    folder : Path
        Folder of the files; for a repository, the folder of its commit in the cache.
    where : Any
        Further arguments of requests to the hub.

    Returns
    -------
    tuple of (tokenizer, str)
        The sentence says that the class cannot be built, that it reads or writes sample texts otherwise than the file,
        or that other files of the folder add tokens.

    Raises
    ------
    Exception
        Of Transformers or tokenizers, if the files cannot be read.
    """
    file = folder / TOKENIZER_FILE
    read_by_class = partial(AutoTokenizer.from_pretrained, place, trust_remote_code=False, **where)
    if not file.is_file():
        return read_by_class(), ""
    stored = Tokenizer.from_file(str(file))
    stored.no_padding()  # Transformers pads and truncates on request only
    stored.no_truncation()
    by_class = _call(read_by_class)
    if not isinstance(by_class, Absent):
        is_generic = type(by_class) is PreTrainedTokenizerFast and not by_class.split_special_tokens
        if is_generic and _pipeline(by_class.backend_tokenizer) == _pipeline(stored):
            return by_class, ""
    by_file = PreTrainedTokenizerFast.from_pretrained(place, tokenizer_file=str(file), **where)
    _restore_file(by_file.backend_tokenizer, stored)
    if isinstance(by_class, Absent):
        difference = f"Transformers cannot build the class that its folder names ({by_class.reason})"
    else:
        _adopt_class_settings(by_file, by_class, stored)
        difference = _describe_difference(by_class, stored)
    splits = "tokenizer_config.json has it split special tokens in a text" if by_file.split_special_tokens else ""
    told = "; ".join(filter(None, (difference, _describe_further_tokens(by_file, stored), splits)))
    return by_file, told and f"the tokenizer is {TOKENIZER_FILE} itself: {told}"


def require_sentencepiece_ids(name: str, tokenizer: Any, folder: Path) -> None:
    """Refuse a tokenizer that Transformers converted from a SentencePiece file if it reads other ids than that file.

    Without tokenizer.json the SentencePiece file is the truth; the package that reads it is installed, or loading had
    failed.

    Raises
    ------
    BadArgument: with the first text whose ids differ, and how to make a tokenizer.json.
    """
    stored = next((folder / file for file in SENTENCEPIECE if (folder / file).is_file()), None)
    if stored is None or (folder / TOKENIZER_FILE).is_file() or find_spec("sentencepiece") is None:
        return
    expected = f"a tokenizer with the ids of {stored.name}"
    remedy = MAKE_TOKENIZER.format(folder=folder)
    with convert_errors_to_bad_argument("name", name, expected, remedy):
        truth = import_module("sentencepiece").SentencePieceProcessor(model_file=str(stored))
        ids = partial(tokenizer.encode, add_special_tokens=False)
        different = next((text for text in COMPARED_TEXTS if ids(text) != truth.encode(text)), None)
    if different is not None:
        problem = f"{type(tokenizer).__name__} of Transformers reads {different!r} otherwise: {remedy}"
        raise BadArgument("name", name, expected, problem)


def _call(function: Callable[[], Any]) -> Any | Absent:
    """Result of a library's function, or its error."""
    try:
        with convert_errors_to_bad_argument("tokenizer", TOKENIZER_FILE, "a file that the library reads", ""):
            return function()
    except BadArgument as error:
        cause = error.__cause__ or error
        return Absent(f"{type(cause).__name__}: {' '.join(str(cause).split())[:120]}")


def _call_or_none(function: Callable[[], Any]) -> Any | None:
    found = _call(function)
    return None if isinstance(found, Absent) else found


def _pipeline(backend: Any) -> dict[str, Any]:
    """All that decides the ids of a text and the text of ids.

    A post-processor that adds no token does not count: Transformers puts one where the file has none.
    """
    parts: dict[str, Any] = json.loads(backend.to_str())
    if not any(backend.num_special_tokens_to_add(is_pair) for is_pair in (False, True)):
        parts.pop("post_processor")
    return {name: part for name, part in parts.items() if name not in ("padding", "truncation", "version")}


def _restore_file(backend: Any, stored: Tokenizer) -> None:
    """Give each part and each added token what the file says, which tokenizer_config.json may have overridden.

    A token with a role stays special: decoding skips it, and ids do not depend on it.
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (
            part := getattr(stored, name)
        ) is not None:  # Transformers replaces words of Mistral's tokenizers on request
            setattr(backend, name, part)
    own = {token.content: token for token in stored.get_added_tokens_decoder().values()}
    for token in backend.get_added_tokens_decoder().values():
        original = own.get(token.content, token)
        flags = {name: getattr(original, name) for name in FLAGS}
        if flags != {name: getattr(token, name) for name in FLAGS}:
            backend.add_tokens([AddedToken(token.content, special=token.special or original.special, **flags)])


def _adopt_class_settings(by_file: Any, by_class: Any, stored: Tokenizer) -> None:
    """Sides and inputs of the class, and its default for each role that the folder leaves open.

    A default counts only if it is a special token of the file: otherwise it would be a new token.
    """
    for name in ("padding_side", "truncation_side", "model_input_names"):
        setattr(by_file, name, getattr(by_class, name, getattr(by_file, name)))
    special = {token.content for token in stored.get_added_tokens_decoder().values() if token.special}
    for role in by_file.SPECIAL_TOKENS_ATTRIBUTES:
        default = getattr(by_class, role, None)
        if getattr(by_file, role) is None and default in special:
            setattr(by_file, role, default)


def _describe_difference(by_class: Any, stored: Tokenizer) -> str:
    """Sentence about the sample texts that the class reads otherwise, or else writes otherwise; "" without any."""
    of_class = _call_or_none(lambda: by_class.added_tokens_decoder) or {}  # some classes have none, or refuse
    added = (*stored.get_added_tokens_decoder().values(), *of_class.values())
    tokens = dict.fromkeys(token.content for token in added)
    texts = [*COMPARED_TEXTS, "".join(f"a {token} b{token}{token.upper()}c" for token in tokens)]
    # None: the file lacks its token for unknown text
    read = {text: _call_or_none(partial(_encode_twice, stored, text)) for text in texts}
    misread = [text for text, ids in read.items() if _call_or_none(partial(_encode_twice, by_class, text)) != ids]
    decode = partial(by_class.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    miswritten = [
        text
        for text, ids in read.items()
        if ids is not None
        and _call_or_none(partial(decode, ids[0])) != stored.decode(ids[0], skip_special_tokens=False)
    ]
    for texts_told, verb in ((misread, "reads"), (miswritten, "writes")):
        if texts_told:
            return (
                f"{type(by_class).__name__} of Transformers {verb} {len(texts_told)} of {len(texts)} sample texts "
                f"otherwise, such as {min(texts_told, key=len)[:60]!r}"
            )
    return ""


def _encode_twice(tokenizer: Any, text: str) -> list[list[int]]:
    """Ids without and with the tokens that open and end a text, of a tokenizer of either library."""
    encoded = (tokenizer.encode(text, add_special_tokens=special) for special in (False, True))
    return [list(getattr(ids, "ids", ids)) for ids in encoded]


def _describe_further_tokens(by_file: Any, stored: Tokenizer) -> str:
    """Sentence about tokens that other files of the folder add, or ""."""
    own = {token.content for token in stored.get_added_tokens_decoder().values()}
    further = [token.content for token in by_file.added_tokens_decoder.values() if token.content not in own]
    if not further:
        return ""
    listed = ", ".join(map(repr, further[:8])) + (", …" if len(further) > 8 else "")
    return f"other files of its folder add {listed}, which a text may contain"
