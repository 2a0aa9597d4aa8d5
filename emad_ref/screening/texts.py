"""The text of a screening: three splits, dealt so that nothing that is shown was chosen on it.

    calibrate  its training documents fit the lens, its others the gate and the maps of K and V
    validate   every other document chooses rules and thresholds, the rest certify them: a promise is void if the text
               that it was made on had chosen what it is about
    evaluate   is what every figure shown is about

One window of a document each, where there are documents enough: they are what intervals resample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from emad_ref.calibration.trace import MOST_WINDOWS, TokenSequence, in_turns
from emad_ref.errors import EmadError
from emad_ref.models.loading import Loaded
from emad_ref.record import Floats
from emad_ref.screening.settings import CALIBRATED, Settings
from emad_ref.text.documents import Documents, Split
from emad_ref.text.duplicates import Distinct
from emad_ref.tuning import windows_of
from emad_ref.verdict.units import DocumentOf

FEWEST = 30  # documents, to recommend anything (METHODS: to falsify)
ENOUGH = 200  # documents, to let a claim about perplexity survive


class TooLittleText(EmadError):
    """A corpus too small to screen a model on."""


@dataclass(frozen=True, eq=False)
class Text:
    """Windows of one split, in order; ``near_duplicates``: documents of the split left out, each for another."""

    windows: tuple[TokenSequence, ...]
    near_duplicates: int = 0

    @property
    def documents(self) -> DocumentOf:
        """[windows] the document that each was cut from."""
        return DocumentOf(np.array([window.document for window in self.windows], dtype=np.int64))

    @property
    def count(self) -> int:
        """Documents."""
        return len(np.unique(self.documents.number))

    @property
    def tokens(self) -> int:
        """Decided positions."""
        return int(self.lengths.sum())

    @property
    def lengths(self) -> Floats:
        """float64 [windows] decided positions."""
        return np.array([len(window.tokens) - 1 - window.adaptive_from for window in self.windows], dtype=np.float64)

    def first(self, windows: int) -> Text:
        """The first so many windows."""
        return Text(self.windows[:windows])


@dataclass(frozen=True, eq=False)
class Texts:
    """The three splits, the second in two halves."""

    calibrate: Text
    choose: Text
    certify: Text
    evaluate: Text


def read_texts(model: Loaded, settings: Settings, progress: str | None = None) -> Texts:
    """As many windows as are asked for, or as there are.

    Raises:
        TooLittleText: a split without a window, or with a single document.
        BadArgument: as ``tuning.windows_of``.
    """
    wanted: dict[Split, int] = {
        "calibrate": CALIBRATED * settings.documents,
        "validate": 2 * settings.documents,
        "evaluate": settings.documents,
    }
    found: dict[Split, Text] = {}
    with tqdm(desc=progress, disable=progress is None, total=sum(wanted.values()), unit="window") as bar:
        for split, count in wanted.items():
            read: list[Documents] = []
            windows = tuple(_counted(_windows(model, settings, split, count, read.append), bar))
            found[split] = Text(windows, max((t.left_out for t in read if isinstance(t, Distinct)), default=0))
    texts = Texts(found["calibrate"], *_halves(found["validate"]), found["evaluate"])
    for purpose, text in vars(texts).items():
        if text.count < 2:
            raise TooLittleText(
                f"corpus={settings.corpus!r} has {text.count} documents to {purpose} on, but expected at least 2; name "
                "a larger one"
            )
    return texts


def _halves(text: Text) -> tuple[Text, Text]:
    """Every other document, and the rest."""
    place = text.documents.place % 2
    first, second = (
        Text(tuple(w for w, half in zip(text.windows, place, strict=True) if half == wanted), text.near_duplicates)
        for wanted in (0, 1)
    )
    return first, second


def _windows(
    model: Loaded, settings: Settings, split: Split, count: int, told: Callable[[Documents], None]
) -> Iterator[TokenSequence]:
    """The first window of each document; of a corpus with fewer documents than ``count``, then their others in turns.

    What is judged gets at most ``MOST_WINDOWS`` of each.
    """

    def cut(limit: int | None, per_document: int) -> Iterator[TokenSequence]:
        read = {"data": settings.data, "limit": limit, "per_document": per_document, "told": told}
        return windows_of(model, settings.corpus, split, **read)  # type: ignore[arg-type]  # each of its own type

    given = 0
    for window in cut(count, 1):
        given += 1
        yield window
    if given < count:
        seen: set[int] = set()
        for window in in_turns(cut(None, count if split == "calibrate" else MOST_WINDOWS), count):
            if window.document in seen:
                yield window
            seen.add(window.document)


def _counted(windows: Iterator[TokenSequence], bar: tqdm[None]) -> Iterator[TokenSequence]:
    for window in windows:
        yield window
        bar.update()


def too_few(texts: Texts) -> str:
    """Why nothing may be recommended on so little text; "" where there is enough."""
    for purpose, text in (("choose", texts.choose), ("certify", texts.certify), ("judge", texts.evaluate)):
        if text.count < FEWEST:
            return f"inconclusive: {text.count} documents to {purpose} on, {FEWEST} are the fewest that say anything"
    return ""
