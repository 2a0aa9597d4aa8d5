"""Where documents come from, by corpus name: the world, files, a data folder, a hub data set.

``world:premise``, ``world:mixed``   generated (``text.world``)
``wikitext``                         ``wikitext-2/`` of a data folder, else the hub's WikiText-2 (raw)
``pile``                             ``pile/`` of a data folder, else the hub's Pile validation documents
PATH                                 a .txt file (articles if it has WikiText headings, else paragraphs), a .jsonl file
                                     (field ``text``), or a folder with valid.txt and test.txt

Whatever is read loses a byte order mark and gets a newline for every end of a line; NUL is refused
(``documents.clean_text``).

Splits never overlap: where a source has a test part, ``evaluate`` reads it and the other splits share the rest. What is
shared is dealt in runs of consecutive documents, a file in one run per split, a stream in blocks: neighbours may be
about one thing, above all paragraphs of one article, and a model calibrated on one of them has seen the other. Where
documents are paragraphs, the one at each border belongs to no split.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from emad_ref.errors import BadArgument, EmadError
from emad_ref.extending import added, part_of
from emad_ref.files import file_kind, lines_of, parsed_json
from emad_ref.text import world
from emad_ref.text.documents import SPLITS, Documents, Split, clean_text
from emad_ref.text.duplicates import Distinct
from emad_ref.text.hub import offline, reachable

HUB_SETS = {  # repository, configuration
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "pile": ("NeelNanda/pile-10k", None),
}
FOLDERS = {"wikitext": "wikitext-2", "pile": "pile"}
Quarters = tuple[int, int]  # of a source's documents, in order: first, and first that belongs to others
WHOLE: dict[Split, Quarters] = {"calibrate": (0, 1), "validate": (1, 2), "evaluate": (2, 4)}
WITHOUT_TEST: dict[Split, Quarters] = {"calibrate": (0, 2), "validate": (2, 4)}  # what a test part leaves to share
BLOCK = 25  # consecutive documents of a stream, whose end nobody knows, that stay in one split


log = logging.getLogger(__name__)


class CorpusUnavailable(EmadError):
    """A corpus that is neither in the data folder nor to be had from the hub."""


def documents_of(corpus: str, split: Split, *, seed: int = 0, data: Path | None = None) -> Documents:
    """Documents of a corpus and split (the world's are endless).

    Those of files, data sets and extensions come as ``duplicates.Distinct``: of near-duplicates the first alone, for
    they are what is counted as independent. The world's are drawn independently, and left as they are.

    Raises:
        BadArgument: neither a known corpus nor a readable file or folder, an unknown split, or no documents for it.
        CorpusUnavailable: a known corpus that cannot be reached.
    """
    if corpus in world.CORPORA:
        return world.documents(corpus, split, seed)
    return Distinct(_documents_of(corpus, split, seed, data))


def _documents_of(corpus: str, split: Split, seed: int, data: Path | None) -> Documents:
    if split not in SPLITS:
        raise BadArgument("split", split, f"one of {', '.join(SPLITS)}")
    if split == "train":
        raise BadArgument("split", split, "calibrate, validate or evaluate", "only the world has text to train on")
    if corpus in FOLDERS:
        folder = data / FOLDERS[corpus] if data else None
        if folder is not None and folder.is_dir():
            return folder_documents(folder, split)
        if corpus == "wikitext":
            if split == "evaluate":
                return hub_documents(corpus, "test")
            shared = list(hub_documents(corpus, "validation"))
            return iter(shared[slice(*bounds(len(shared), WITHOUT_TEST[split]))])
        return blocks(hub_documents(corpus, "train"), split)
    if corpus in added("corpora"):
        mine: Documents = part_of("corpora", corpus)(split, seed, data)
        return (clean_text(text, f"{corpus}, {split}, document {number}") for number, text in enumerate(mine, start=1))
    path = Path(corpus)
    if path.is_dir():
        return folder_documents(path, split)
    if path.is_file():
        return file_part(path, WHOLE[split])
    if path.exists():
        kind = file_kind(path.stat().st_mode)
        raise BadArgument("corpus", corpus, "a file or a folder", f"it is {kind}, which can be read once only: save it")
    known = ", ".join([*world.CORPORA, *FOLDERS, "self", *added("corpora")])
    raise BadArgument("corpus", corpus, f"one of {known}, or a path that exists", "check the spelling of the path")


def blocks(documents: Iterable[str], split: Split) -> Iterator[str]:
    """The documents of a stream of whole texts that belong to ``split``: every fourth block, or two of four."""
    first, end = WHOLE[split]
    return (text for number, text in enumerate(documents) if first <= number // BLOCK % 4 < end)


def bounds(total: int, quarters: Quarters) -> tuple[int, int]:
    """Numbers of the first document in ``quarters`` of ``total``, and of the first behind them.

    >>> [bounds(10, quarters) for quarters in WHOLE.values()]
    [(0, 3), (3, 5), (5, 10)]
    """
    first, end = (math.ceil(total * quarter / 4) for quarter in quarters)
    return first, end


def file_part(path: Path, quarters: Quarters) -> Iterator[str]:
    """The documents in ``quarters`` of a file, which is read once more to count them: it may not fit into memory."""
    first, end = bounds(sum(1 for _ in file_documents(path)), quarters)
    neighbours = first > 0 and path.suffix == ".txt" and not has_articles(path)
    return islice(file_documents(path), first + neighbours, end)


def folder_documents(folder: Path, split: Split) -> Iterator[str]:
    """``evaluate`` from test.*, the other splits from halves of valid.*; a folder without those names is refused."""
    stem = "test" if split == "evaluate" else "valid"
    found = sorted(path for path in _entries(folder) if path.stem == stem and path.suffix in READERS)
    if not found:
        raise BadArgument(
            "corpus", str(folder), f"a folder that holds {stem}.txt or {stem}.jsonl", "name a single file instead"
        )
    return file_documents(found[0]) if split == "evaluate" else file_part(found[0], WITHOUT_TEST[split])


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise BadArgument("corpus", str(folder), "a folder that can be read", str(error.strerror)) from error


def file_documents(path: Path) -> Iterator[str]:
    """Non-empty documents of a .txt or .jsonl file."""
    if path.suffix not in READERS:
        raise BadArgument("corpus", str(path), f"a file ending in {' or '.join(READERS)}", "convert it first")
    return (text for text in READERS[path.suffix](path) if text.strip())


def text_documents(path: Path) -> Iterator[str]:
    """Articles of a WikiText file (split at top-level headings), paragraphs of any other text."""
    wikitext = has_articles(path)
    document: list[str] = []
    for line in clean_lines(path):
        if is_heading(line) if wikitext else not line.strip():
            yield "".join(document)
            document = []
        document.append(line)
    yield "".join(document)


def has_articles(path: Path) -> bool:
    """Whether a text file tells where one article ends: by WikiText's headings."""
    return any(is_heading(line) for line in clean_lines(path))


def clean_lines(path: Path) -> Iterator[str]:
    """Lines of a text file, each with its \\n, whichever ends they have there.

    Raises:
        BadArgument: what is no text, by its line.
    """
    for number, line in enumerate(lines_of(path, "corpus"), start=1):
        text = clean_text(line, f"{path.name}, line {number}")
        yield from io.StringIO(text)  # several, where a carriage return alone ended them


def is_heading(line: str) -> bool:
    """A top-level WikiText heading: `` = Title = ``, not `` = = Section = = ``."""
    words = line.split()
    return len(words) > 2 and words[0] == words[-1] == "=" and words[1] != "=" and words[-2] != "="


def jsonl_documents(path: Path) -> Iterator[str]:
    """The field ``text`` of every line; blank lines are passed over."""
    for number, line in enumerate(lines_of(path, "corpus"), start=1):
        if line.strip():
            yield text_field(line, f"{path.name}, line {number}")


def text_field(line: str, place: str) -> str:
    try:
        text = parsed_json(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise BadArgument(place, line[:60], 'a JSON object whose field "text" is a string', "mend the line")
    return clean_text(text, place)


READERS = {".txt": text_documents, ".jsonl": jsonl_documents}


def hub_documents(corpus: str, part: str) -> Iterator[str]:
    """Stream the documents of a part (train, validation, test) of a hub data set.

    Raises:
        CorpusUnavailable: the hub, its cache and the package ``datasets`` do not give it.
    """
    name, configuration = HUB_SETS[corpus]
    try:
        from datasets import load_dataset  # an extra: only this source needs it

        if reachable():
            rows = load_dataset(name, configuration, split=part, streaming=True)
        else:
            with offline():  # what an earlier download left in the cache; that is no stream
                rows = load_dataset(name, configuration, split=part, streaming=False)
        first = next(iter(rows))
    except Exception as error:  # the hub client raises dozens of types; all mean the same to the caller
        raise CorpusUnavailable(
            f"corpus={corpus!r}, but {name} is out of reach ({type(error).__name__}: {error}); "
            f"install pytest-emad[tasks], or put its files under {FOLDERS[corpus]}/ in a data folder and name that, or "
            "choose another corpus"
        ) from error
    if "text" not in first:
        raise CorpusUnavailable(
            f"corpus={corpus!r}: {name} has fields {sorted(first)}, but expected 'text'; choose another corpus"
        )
    lines = (clean_text(row["text"], name) for row in rows if not _holds_nul(row["text"], name))
    return (text for text in (articles(lines) if corpus == "wikitext" else lines) if text.strip())


def _holds_nul(text: str, name: str) -> bool:
    """Whether a document of the hub is left out, by name, because it cannot be mended there."""
    if "\0" not in text:
        return False
    log.warning("%s: a document holds NUL, which is no text, and is left out: %.60r", name, text)
    return True


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Lines of the hub's WikiText, joined into articles."""
    document: list[str] = []
    for line in lines:
        if is_heading(line) and document:
            yield "".join(document)
            document = []
        document.append(line)
    yield "".join(document)
