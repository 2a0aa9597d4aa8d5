"""Checks of a tokenizer against its model, and the special tokens in use.

    opening   generation_config, config, tokenizer: the first that declares a beginning-of-text token; else an end
    ends      every end that any of the three declares, an int or a list
    padding   the first of the three that declares one

The order is that of transformers. In an encoder-decoder the opening is the decoder's start token. Only explicit entries
of a config file count: transformers fills in defaults of the class, whatever the tokenizer. An opening must be a
special token of the tokenizer without another role. ``remarks`` name ignored ids and disagreements of files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from emad_ref.absent import Absent
from emad_ref.errors import BadArgument, convert_errors_to_bad_argument, is_whole

SAMPLE = "The quick brown fox jumps over the lazy dog, 1 2 3.\nAnd then it sleeps."
SPACED_SAMPLE = " Two  spaces , and\ta tab.\n\n    Then (it's 10 % off) : lines !\n"
SAMPLES = SAMPLE, SPACED_SAMPLE
REMEDY = "use the tokenizer that the model was trained with"


def tokenizer_identity_text(tokenizer: Any) -> str:
    """Text that is equal for two tokenizers with the same ids for every text, whatever they pad or truncate."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        if backend.padding or backend.truncation:
            backend = Tokenizer.from_str(backend.to_str())
            backend.no_padding()
            backend.no_truncation()
        return str(backend.to_str())
    identity = {
        "class": type(tokenizer).__name__,
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])),
        "settings": {key: str(value) for key, value in sorted(tokenizer.init_kwargs.items()) if "path" not in key},
    }
    return json.dumps(identity)


def require_tokenizer_describe_lost_text(name: str, tokenizer: Any, rows: int) -> str:
    """Refuse a tokenizer that cannot be the model's; returns a sentence about its loss on a sample, or "".

    Parameters
    ----------
    rows: of the model's embedding: ids are 0 … rows − 1.

    Raises
    ------
    BadArgument: it gives no token for plain text, gives ids without a row, cannot decode its own tokens, or splits at
        random. Special tokens without a row are accepted, since no text contains them: a padding token is often added
        and never trained.
    """
    with convert_errors_to_bad_argument("name", name, "a tokenizer that reads plain text", REMEDY):
        read = {text: list(tokenizer.encode(text, add_special_tokens=False)) for text in SAMPLES}
        back = {text: str(tokenizer.decode(ids, skip_special_tokens=False)) for text, ids in read.items() if ids}
        special = set(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        outside = {number for number in tokenizer.get_vocab().values() if not 0 <= number < rows} - special
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if dropout := getattr(getattr(backend, "model", None), "dropout", None):
        problem = f"model.dropout is {dropout:g} in tokenizer.json: set it to null"
        raise BadArgument("name", name, "a tokenizer that reads a text alike each time", problem)
    if len(back) < len(SAMPLES):
        raise BadArgument("name", name, "a tokenizer that reads plain text", f"it gives no token for it: {REMEDY}")
    highest = max(map(max, read.values()))
    if outside or not 0 <= highest < rows:
        problem = f"{len(outside)} of its tokens have others, up to {max([*outside, highest])}: {REMEDY}"
        raise BadArgument("name", name, f"a tokenizer whose ids are rows of the embedding, 0–{rows - 1}", problem)
    normalizer = getattr(backend, "normalizer", None)
    lost = next((text for text in SAMPLES if not _is_restored(text, back[text], normalizer)), None)
    return "" if lost is None else f"the tokenizer loses text: {lost[:43]!r} comes back as {back[lost][:60]!r}"


def _is_restored(text: str, back: str, normalizer: Any | None) -> bool:
    """Whether ``back`` is ``text``.

    Spaces do not count if the normalizer changes them on purpose. One space at the start never counts: Llama and T5 put
    one before every text, and take it away again.
    """
    normalized = text if normalizer is None else normalizer.normalize_str(text).replace("▁", " ")
    if normalized.lstrip(" ") == text.lstrip(" "):
        return back in (text, text.removeprefix(" "))
    return "".join(back.split()) == "".join(text.split())


def decode_tokens(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Text of ``ids``. An id beyond the tokenizer has none: those in Rust leave it out, those in Python would fail."""
    known = ids if getattr(tokenizer, "backend_tokenizer", None) is not None else keep_known_ids(tokenizer, ids)
    return str(tokenizer.decode(known, skip_special_tokens=skip_special_tokens)) if known else ""


def keep_known_ids(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Those of ``ids`` that the tokenizer has: a model may have more rows than its tokenizer has tokens."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return [each for each in ids if backend.id_to_token(each) is not None]
    if max(ids, default=-1) < len(tokenizer):
        return list(ids)
    known = set(tokenizer.get_vocab().values())
    return [each for each in ids if each in known]


def describe_loss_above_chance(loss_nats: float, vocabulary: int) -> str:
    """Sentence about a mean loss per token above ln V; "" if it is not above.

    Such a loss is not refused: untrained weights, or a text in another language, give it too.
    """
    if not loss_nats > math.log(vocabulary):
        return ""
    return (
        f"the model's loss at full depth, {loss_nats:.2f} nats a token, is above that of a guess among its "
        f"{vocabulary:,} tokens ({math.log(vocabulary):.2f}): it is untrained, the text is not of its kind, or this is "
        "not its own tokenizer (a permuted vocabulary reads every text and gives it back)"
    )


START, BOS, EOS, PAD = "decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"
PARTS = ("decoder", "generator", "text_config")  # parts of a composite config, in transformers' order
FILES = ("generation_config", "config")
TOKENIZER = "tokenizer"
DeclaredToken = tuple[str, int]  # declaring file, id


@dataclass(frozen=True)
class SpecialTokens:
    """``opening`` the id that opens every sequence, or None; ``ends`` ids that end a text; ``padding`` or None.

    ``remarks``: sentences about ignored ids, and about files that disagree.
    """

    opening: int | None
    ends: frozenset[int]
    padding: int | None
    remarks: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"opening": self.opening, "ends": sorted(self.ends), "padding": self.padding}


def special_tokens_of(
    model: Any, tokenizer: Any | None = None, declared: Mapping[str, Any] | None = None
) -> SpecialTokens:
    """The special tokens of ``model``, a transformers model.

    ``declared``: the content of config.json, if it was read from a file; None: all of ``model.config``.

    Raises:
        BadArgument: an id that is no whole number, an opening outside the vocabulary, an encoder-decoder without a
            start token or with one that is no special token of the tokenizer.
    """
    config = model.config
    settings = config.to_dict() if declared is None else declared
    reading = _TokenDeclarations(
        config.get_text_config().vocab_size, model.generation_config.to_dict(), settings, tokenizer
    )
    ends = reading.ends()
    opening = reading.start() if config.is_encoder_decoder else reading.opening(ends)
    return SpecialTokens(opening, frozenset(i for _, i in ends), reading.padding(), tuple(reading.remarks))


class _TokenDeclarations:
    def __init__(self, vocabulary: int, generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Any):
        parts = (config.get(name) for name in PARTS)
        self._files = {
            "generation_config": [generation],
            "config": [config, *(part for part in parts if isinstance(part, Mapping))],
        }
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self.remarks: list[str] = []

    # ------------------------------------------------------------ what counts

    def ends(self) -> list[DeclaredToken]:
        """Every declared end inside the vocabulary, in order of precedence."""
        inside = [each for each in self._declared(EOS) if self._is_inside(EOS, each)]
        ordinary = {token: who for who, token in reversed(inside) if who != TOKENIZER and not self._is_special(token)}
        for token, who in ordinary.items():
            token_text = self._token_text(token)
            self._remark(f"{who}.{EOS} names {token_text}, no special token of the tokenizer: texts end there, too")
        by = {who: {i for other, i in inside if other == who} for who, _ in inside}
        if any(not later <= earlier for earlier, later in zip([*by.values()], [*by.values()][1:], strict=False)):
            each = "; ".join(f"{who} {', '.join(map(self._token_text, sorted(ids)))}" for who, ids in by.items())
            self._remark(f"ends of a text differ ({each}): a text ends at each of them")
        return inside

    def opening(self, ends: Sequence[DeclaredToken]) -> int | None:
        """Beginning-of-text token, special in the tokenizer too; else the first end that may open a text."""
        refused: dict[int, str] = {}
        chosen: DeclaredToken | None = None
        for who, token in self._declared(BOS):
            if who == TOKENIZER and not self._is_inside(BOS, (who, token)):
                continue  # added to the tokenizer, and never trained
            self._require_inside(who, BOS, token)
            if absent := self._absent_opening(token):
                refused.setdefault(token, f"{who}.{BOS} is {self._token_text(token)}, {absent.reason}")
            elif chosen is None:
                chosen = who, token
        spare = next((each for each in ends if not self._absent_opening(each[1], end=True)), None)
        best = chosen or spare
        opens = "texts open with no token" if best is None else f"texts open with {self._token_text(best[1])}"
        for why in refused.values():
            self._remark(f"{why}: left out, {opens}")
        if chosen is not None:
            self._compare_opening(*chosen, set(refused))
        return None if best is None else best[1]

    def _compare_opening(self, who: str, token: int, refused: Collection[int]) -> None:
        """Remark if another file, or the tokenizer, disagrees about ``token``, which ``who`` declares."""
        self._compare(BOS, (who, token), refused)
        own = self._own(BOS)
        if who != TOKENIZER and self._tokenizer is not None and token != own:
            theirs = "has no bos_token" if own is None else f"says {self._token_text(own)}"
            self._remark(f"texts open with {self._token_text(token)}, as {who}.{BOS} says; the tokenizer {theirs}")

    def start(self) -> int:
        """The decoder's start token.

        Raises BadArgument as ``special_tokens_of``.
        """
        declared = [
            (who, name, token) for name in (START, BOS) for who, token in self._declared(name) if who != TOKENIZER
        ]
        if not declared:
            raise BadArgument(START, None, "a token id", "add it to generation_config.json; that of T5 is pad_token_id")
        who, name, token = declared[0]
        self._require_inside(who, name, token)
        if not self._is_special(token):
            raise BadArgument(
                f"{who}.{name}", token, "a special token of the tokenizer", f"to it this is {self._named(token)}"
            )
        self._compare(name, (who, token))
        return token

    def padding(self) -> int | None:
        inside = [each for each in self._declared(PAD) if self._is_inside(PAD, each)]
        return inside[0][1] if inside else None

    # ------------------------------------------------------------ what is declared

    def _declared(self, name: str) -> Iterator[DeclaredToken]:
        for who in FILES:
            for part in self._files[who]:
                for token in _token_ids(f"{who}.{name}", part.get(name), several=name == EOS):
                    yield who, token
        if (own := self._own(name)) is not None:
            yield TOKENIZER, own

    def _own(self, name: str) -> int | None:
        """The tokenizer's id of that role."""
        token_id = getattr(self._tokenizer, name, None)
        return token_id if is_whole(token_id) else None

    def _compare(self, name: str, chosen: DeclaredToken, refused: Collection[int] = ()) -> None:
        """Remark if a file of lower precedence declares another id."""
        for who, token in self._declared(name):
            if who not in (TOKENIZER, chosen[0]) and token != chosen[1] and token not in refused:
                first, second = self._token_text(chosen[1]), self._token_text(token)
                self._remark(f"{chosen[0]}.{name} is {first}, {who}.{name} is {second}: the first is taken")

    # ------------------------------------------------------------ what an id is

    def _absent_opening(self, token: int, *, end: bool = False) -> Absent | None:
        """Why no text may open with ``token``; None if one may. ``end``: whether ``token`` ends texts."""
        if self._tokenizer is None:
            return None
        if not self._is_special(token):
            return Absent("no special token of the tokenizer")
        bos, eos = self._own(BOS), self._own(EOS)
        if token == bos or (token == eos and (end or bos is None)):
            return None
        roles = ("unk", "mask") if bos is None else ("unk", "mask", "eos", "pad", "sep", "cls")
        role = next((role for role in roles if self._own(f"{role}_token_id") == token), None)
        return None if role is None else Absent(f"the tokenizer's {role}_token")

    def _is_special(self, token: int) -> bool:
        """Whether ``token`` is special in the tokenizer; without one, whether no declaration contradicts it."""
        if self._tokenizer is None or token in self._tokenizer.all_special_ids:
            return True
        added = self._tokenizer.added_tokens_decoder.get(token)
        return bool(added is not None and added.special)

    def _is_inside(self, name: str, declared: DeclaredToken) -> bool:
        who, token = declared
        if 0 <= token < self._vocabulary:
            return True
        self._remark(f"{who}.{name} names {token}, outside the vocabulary of {self._vocabulary}: it is left out")
        return False

    def _require_inside(self, who: str, name: str, token: int) -> None:
        if not 0 <= token < self._vocabulary:
            expected = f"0–{self._vocabulary - 1}, as vocab_size says"
            raise BadArgument(
                f"{who}'s first token id", token, expected, f"mend {name} in config.json and generation_config.json"
            )

    # ------------------------------------------------------------ words

    def _named(self, token: int) -> str:
        return repr(self._tokenizer.convert_ids_to_tokens(token))

    def _token_text(self, token: int) -> str:
        return str(token) if self._tokenizer is None else f"{token} ({self._named(token)})"

    def _remark(self, sentence: str) -> None:
        if sentence not in self.remarks:
            self.remarks.append(sentence)


def _token_ids(name: str, value: Any, *, several: bool) -> list[int]:
    """The ids that one entry of a file declares.

    Raises:
        BadArgument: the entry holds anything else.
    """
    listed = value if several and isinstance(value, list) else [] if value is None else [value]
    if not all(is_whole(each) for each in listed):
        raise BadArgument(name, value, f"a token id{', or a list of them' if several else ''}", "mend the file")
    return listed
