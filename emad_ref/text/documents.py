"""Documents and examples: the two kinds of text of this project.

A *document* is a string that is scored token by token. An *example* is a prompt with an answer that is scored as right
or wrong. This module is independent of tokens, models and files.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from emad_ref.errors import BadArgument

Split = Literal["train", "calibrate", "validate", "evaluate"]
SPLITS: tuple[Split, ...] = ("train", "calibrate", "validate", "evaluate")

DEFAULT_CORPUS, DEFAULT_DOCUMENTS = (
    "world:premise",
    200,
)  # the default corpus, and its number of windows

# One checksum bucket in eight for each measuring split, the rest for training.
_BUCKETS: tuple[Split, ...] = ("train",) * 5 + ("calibrate", "validate", "evaluate")

Scoring = Literal["choice", "mean_choice", "exact", "runs"]


@dataclass(frozen=True)
class TaskExample:
    """One scored item of a task.

    ``choice``: the option with the highest log-likelihood must be ``options[answer_index]``. ``exact``: the greedy
    continuation must equal ``answer``. ``runs``: ``prompt`` + the greedy continuation + ``check`` must be a program
    whose asserts hold.

    ``guess``: probability of a right answer by the best guess from the input's own symbols; None: 1 / options for a
    choice, 0 for an open answer space.
    """

    task: str
    prompt: str
    answer: str
    scoring: Scoring
    options: tuple[str, ...] = ()
    check: str = ""
    guess: float | None = None

    @property
    def answer_index(self) -> int:
        return self.options.index(self.answer)

    @property
    def chance_accuracy(self) -> float:
        """Accuracy of the best guess from the input's own symbols."""
        if self.guess is not None:
            return self.guess
        return 1 / len(self.options) if self.options else 0.0


Documents = Iterator[str]

BYTE_ORDER_MARK = "\ufeff"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def normalize_newlines_and_bom(text: str, place: str) -> str:
    """``text`` without a byte order mark at its start and with \n for every end of a line.

    The same words then give the same tokens, whichever system wrote them. ``place``: the origin of the text, for the
    message.

    Raises:
        BadArgument: a NUL, or half of a surrogate pair, which no text encoding has.
    """
    match = _NO_TEXT.search(text)
    if match is not None:
        what = "NUL" if match[0] == "\0" else f"half of a surrogate pair (U+{ord(match[0]):04X})"
        around = text[max(0, match.start() - 20) : match.start() + 20]
        raise BadArgument(
            place, around, f"text without {what}", f"character {match.start()} is one: remove it, or convert to UTF-8"
        )
    return text.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n").replace("\r", "\n")


def split_by_checksum(text: str) -> Split:
    """The split of a generated item, by the checksum of its text."""
    return _BUCKETS[zlib.crc32(text.encode()) % len(_BUCKETS)]
