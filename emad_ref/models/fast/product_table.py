"""The run's table of matrix products: which product each class of products takes, in all processes of the run.

A process that meets a class first measures (``models.fast.products``) and appends a line to the file that
``EMAD_PRODUCT_TABLE`` names; child processes inherit the variable. The first line of a class counts, so one class takes
one product for the whole run, and its sums have the same bits in every process. Without the variable the table is that
of this process alone. Standard library only: the controller of a run reads the table without torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from emad_ref.files import BadFile, read_text

TABLE_VARIABLE = "EMAD_PRODUCT_TABLE"
_REMEDY = f"unset {TABLE_VARIABLE}, or let it name a new file"

_known: dict[str, str] = {}  # what this process has taken; it never changes its mind
_lock = Lock()


def choose_product(kind: str, offered: tuple[str, ...], measure: Callable[[], str]) -> str:
    """The product of the class ``kind``, one of ``offered``: that of the run, or else ``measure()``, which is stored.

    Raises:
        BadFile: the table cannot be read, or names a product that this process does not offer.
    """
    with _lock:
        if kind not in _known:
            chosen = _first_lines().get(kind)
            if chosen is None:
                chosen = measure()
                if path := os.environ.get(TABLE_VARIABLE):
                    _append(path, {kind: chosen})
                    chosen = _first_lines()[kind]  # another process may have been faster
            if chosen not in offered:
                expected = f"one of {', '.join(offered)} for {kind}"
                raise BadFile(TABLE_VARIABLE, os.environ.get(TABLE_VARIABLE, ""), expected, f"{chosen!r}", _REMEDY)
            _known[kind] = chosen
        return _known[kind]


def chosen_products() -> dict[str, str]:
    """Class → product, of the run, sorted by class; of this process alone without ``EMAD_PRODUCT_TABLE``."""
    return dict(sorted((_known | _first_lines()).items()))


@contextmanager
def share_product_table(recorded: Mapping[str, str] | None = None) -> Iterator[None]:
    """Share this process's table, or a ``recorded`` one, with processes that it starts inside the block.

    A table that is shared already stays, unless another is ``recorded``.
    """
    before = os.environ.get(TABLE_VARIABLE)
    if before and recorded is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="emad-products-") as folder:
        os.environ[TABLE_VARIABLE] = path = str(Path(folder, "products.jsonl"))
        _append(path, _known if recorded is None else recorded)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(TABLE_VARIABLE, None)
            else:
                os.environ[TABLE_VARIABLE] = before


def _first_lines() -> dict[str, str]:
    path = os.environ.get(TABLE_VARIABLE)
    if not path or not Path(path).exists():
        return {}
    found: dict[str, str] = {}
    text = read_text(path, TABLE_VARIABLE)
    for line in text[: text.rfind("\n") + 1].splitlines():  # another process may be writing the last line
        try:
            (kind, product), *_ = json.loads(line).items()
        except (ValueError, AttributeError) as error:
            expected = 'lines {"class of products": "product"}'
            raise BadFile(TABLE_VARIABLE, path, expected, f"{line!r}: {error}", _REMEDY) from error
        found.setdefault(kind, product)
    return found


def _append(path: str, products: Mapping[str, str]) -> None:
    """Append lines in one write, which other processes' lines cannot divide."""
    lines = "".join(json.dumps({kind: product}, ensure_ascii=False) + "\n" for kind, product in products.items())
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, lines.encode())
        finally:
            os.close(file)
    except OSError as error:
        raise BadFile(TABLE_VARIABLE, path, "a file that this process can write", str(error), _REMEDY) from error
