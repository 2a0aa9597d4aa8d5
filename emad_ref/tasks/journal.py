"""A results journal: an interrupted evaluation goes on where it stopped.

One JSON-lines file per identity (model fingerprint, operating point, dtype, library versions) in a folder the caller
names; its first line is the identity, every other line one request's hash and result. Lines are written batch by batch
and flushed, so an interruption loses at most the batch in progress. lm-eval's own request cache is no substitute: its
keys do not name the model.

This module knows nothing of models or tasks: results are JSON values under hashes of JSON values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from emad_ref.errors import EmadError
from emad_ref.files import append, cut, parsed_json, read_bytes, require_writable_folder


class BadJournal(EmadError):
    """A journal file that holds something else than results of this identity."""


def digest_of(*parts: Any) -> str:
    """sha256, hex, over JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


class Journal:
    """Results by request hash, in memory and on disk.

    Raises:
        BadJournal: a file of another identity under this one's name, or a damaged line before the last.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        require_writable_folder(folder, "journal")
        self.path = folder / f"{digest_of(identity)[:16]}.jsonl"
        self.results: dict[str, Any] = {}
        if self.path.exists():
            self._read(identity)
        if not self.path.exists() or self.path.stat().st_size == 0:
            self._append([json.dumps({"identity": identity}, sort_keys=True)])

    def record(self, results: Iterable[tuple[str, Any]]) -> None:
        """Keep (request hash, result) pairs: on disk when this returns."""
        new = dict(results)
        self.results.update(new)
        self._append(json.dumps({"request": key, "result": result}) for key, result in new.items())

    def _append(self, lines: Iterable[str]) -> None:
        append(self.path, "".join(line + "\n" for line in lines), "journal")

    def _read(self, identity: dict[str, Any]) -> None:
        whole = read_bytes(self.path, "journal")
        complete = whole[: whole.rfind(b"\n") + 1]
        if len(complete) < len(whole):  # the process died while writing this line: it never counted
            cut(self.path, len(complete), "journal")
        for number, line in enumerate(complete.split(b"\n")[:-1], start=1):
            self._take(number, line, identity)

    def _take(self, number: int, line: bytes, identity: dict[str, Any]) -> None:
        try:
            entry = parsed_json(line.decode("utf-8"), constants=True)  # the log-likelihood of the impossible is −∞
            if number == 1:
                if entry["identity"] != json.loads(json.dumps(identity)):
                    raise ValueError("it belongs to another model or operating point")
            else:
                self.results[entry["request"]] = entry["result"]
        except (ValueError, KeyError, TypeError) as error:
            shown = line[:60].decode("utf-8", "replace")
            raise BadJournal(
                f"journal={str(self.path)!r}, line {number}={shown!r}, but expected a result "
                f"({type(error).__name__}: {error}); remove the file to start over"
            ) from error
