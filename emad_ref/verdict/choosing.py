"""Rows of the register by id or pattern: ``EMAD-F1``, ``EMAD-R*``. Whoever asks for nothing that exists hears so.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from emad_ref.errors import BadArgument, nearest

OF_EXITS = "EMAD-X"  # how the ids begin of rows about an exit: whoever brings one asks them
DASHES = str.maketrans(dict.fromkeys("‐‑–−", "-"))  # hyphens of typeset text, en dash, minus sign U+2212


def chosen(patterns: Iterable[str], known: Iterable[str], where: str) -> frozenset[str]:
    """The ids of ``known`` that match one of ``patterns``, whatever their case.

    Raises:
        BadArgument: a pattern matches none; the message names ``where`` and the nearest ids.
    """
    ids = list(known)
    found: set[str] = set()
    for pattern in patterns:
        wanted = pattern.translate(DASHES).upper()
        matching = {name for name in ids if fnmatchcase(name.upper(), wanted)}
        if not matching:
            expected = "an id of the register, or a pattern such as EMAD-R*"
            raise BadArgument(where, pattern, expected, nearest(wanted, ids) or f"ids: {', '.join(ids)}")
        found |= matching
    return frozenset(found)
