"""Golden data: what earlier runs decoded, by explicit id, and the verdicts they reached.

A golden is a JSON file listed in ``index.json`` as ``{"id", "file", "sha256", "provenance"}``. Not listed means never
recorded, and reads as None. Listed but missing or changed is damage, and raises. Ids carry the model's fingerprint;
they never derive from pytest's node ids, which differ by how a test was named.

``verdicts.json`` is described, read and compared by ``emad_ref.verdict.known``; here it is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref.errors import EmadError
from emad_ref.files import BadFile, read_bytes, write_atomically
from emad_ref.verdict.known import SCHEMA, VERDICTS, Change, DamagedGolden, load_json, with_verdict, writable_entries

INDEX = "index.json"
LONGEST = 255  # bytes of a name, as file systems have it
KEYS = {"id", "file", "sha256", "provenance"}


@dataclass(frozen=True)
class Goldens:
    """``folders`` are searched in order, the first that lists an id answers; ``target`` takes updates (None: none)."""

    folders: tuple[Path, ...]
    target: Path | None = None

    def read(self, name: str) -> Any | None:
        """The stored JSON value, or None where no folder lists ``name``.

        Raises:
            DamagedGolden: listed, but the file is missing or its SHA-256 differs; or an index that cannot be read.
        """
        for folder in self.folders:
            entry = _index(folder).get(name)
            if entry is not None:
                return _content(folder, entry)
        return None

    def verify(self) -> None:
        """Read everything that is listed. Raises DamagedGolden as ``read`` does."""
        for folder in self.folders:
            for entry in _index(folder).values():
                _content(folder, entry)

    def update(self, name: str, value: Any, provenance: dict[str, Any]) -> Change:
        """Write ``value`` to ``target`` under ``name`` and list it; an equal value leaves file and index alone."""
        if self.target is None:
            raise EmadError(f"golden {name!r} cannot be updated without --emad-golden DIR")
        with _locked(self.target):
            index, text = _index(self.target), _dump(value)
            digest = hashlib.sha256(text.encode()).hexdigest()
            old = index.get(name)
            if old is not None and old["sha256"] == digest and (self.target / old["file"]).is_file():
                return "unchanged"
            file = _file_name(name)
            write_atomically(self.target / file, text)
            index[name] = {"id": name, "file": file, "sha256": digest, "provenance": provenance}
            write_atomically(self.target / INDEX, _dump([index[key] for key in sorted(index)]))
        return "added" if old is None else "changed"


def _dump(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def _file_name(name: str) -> str:
    """Readable and unique: the digest keeps apart ids that differ only in characters a file name cannot hold."""
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', name)}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def _index(folder: Path) -> dict[str, dict[str, Any]]:
    if not (folder / INDEX).exists():
        return {}
    entries = load_json(folder / INDEX)
    if not isinstance(entries, list):
        raise DamagedGolden(f"{folder / INDEX}: expected a list, found {type(entries).__name__}; restore it")
    for number, entry in enumerate(entries):
        if wrong := _wrong(entry):
            raise DamagedGolden(f"{folder / INDEX}: entry {number}: {wrong}; restore it from the repository")
    return {entry["id"]: entry for entry in entries}


def _wrong(entry: Any) -> str:
    """What is wrong with an entry of the index; empty where nothing is."""
    if not isinstance(entry, dict) or set(entry) != KEYS:
        return f"expected a table with exactly {', '.join(sorted(KEYS))}"
    for key in ("id", "file", "sha256"):
        if not isinstance(entry[key], str):
            return f"{key}={entry[key]!r:.60}, but expected a text"
    file = entry["file"]
    if (
        file in ("", ".", "..", INDEX, VERDICTS)
        or set(file) & set("/\\\0")
        or len(file.encode("utf-8", "replace")) > LONGEST
    ):
        return f"file={file!r:.60}, but expected the name of a file in this folder"
    return ""


def _content(folder: Path, entry: dict[str, Any]) -> Any:
    path = folder / entry["file"]
    if not path.is_file():
        raise DamagedGolden(f"golden {entry['id']!r} is listed in {folder / INDEX}, but {path} is missing; restore it")
    try:
        digest = hashlib.sha256(read_bytes(path, "golden")).hexdigest()
    except BadFile as error:
        raise DamagedGolden(f"golden {entry['id']!r}: {error}") from error
    if digest != entry["sha256"]:
        raise DamagedGolden(
            f"golden {entry['id']!r}: {path} has SHA-256 {digest}, but the index says {entry['sha256']}; "
            "restore it, or record it anew with --emad-update-golden"
        )
    return load_json(path)


def record_verdict(folder: Path, key: Mapping[str, str], name: str, seed: int, outcome: str) -> Change:
    """Put one verdict on record in ``folder``'s ``verdicts.json``, beside those of other seeds.

    Read, changed and written under a lock: runs of several seeds may record at once.

    Args:
        key: ``known.key_of``; ``name``: the model's, for readers.

    Raises:
        DamagedGolden: the file there cannot be read, or is of another schema; it is left as it is.
    """
    with _locked(folder):
        entries, change = with_verdict(writable_entries(folder), key, name, seed, outcome)
        if change != "unchanged":
            write_atomically(folder / VERDICTS, _dump({"schema": SCHEMA, "verdicts": entries}))
    return change


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time; the lock is on the folder itself, leaves no file and ends with its process.

    Raises:
        EmadError: a system without POSIX locks.
    """
    try:
        import fcntl
    except ImportError as error:
        raise EmadError("goldens are recorded on systems with POSIX locks only: use Linux or macOS") from error
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
