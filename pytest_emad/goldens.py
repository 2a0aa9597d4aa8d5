"""Golden data: what earlier runs decoded, by explicit id, and the verdicts they reached.

A golden is a JSON file listed in ``index.json`` as ``{"id", "file", "sha256", "provenance"}``. Not listed means never
recorded, and reads as None. Listed but missing or changed is damage, and raises. Ids carry the model's fingerprint;
they never derive from pytest's node ids, which differ by how a test was named.

``verdicts.json`` is a list of ``{"claim", "model", "corpus", "verdict"}``; ``model`` is a name or a fingerprint, an
empty ``corpus`` holds for all of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from emad_ref.errors import EmadError
from emad_ref.report.writing import write_atomically
from emad_ref.verdict.claims import OUTCOMES

INDEX = "index.json"
VERDICTS = "verdicts.json"

Change = Literal["added", "changed", "unchanged"]


class DamagedGolden(EmadError):
    """Golden data that is listed but missing, altered or not readable: never the same as data not recorded."""


def shipped() -> Path | None:
    """The packaged folder if there is one, else the checkout's; None if neither exists."""
    package = Path(__file__).resolve().parent
    return next((folder for folder in (package / "golden", package.parent / "golden") if folder.is_dir()), None)


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


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedGolden(f"{path} cannot be read as JSON ({error}); restore it from the repository") from error


def _index(folder: Path) -> dict[str, dict[str, Any]]:
    if not (folder / INDEX).exists():
        return {}
    entries = _load(folder / INDEX)
    keys = {"id", "file", "sha256", "provenance"}
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and set(entry) == keys for entry in entries):
        raise DamagedGolden(f"{folder / INDEX}: expected a list of tables with exactly {', '.join(sorted(keys))}")
    return {entry["id"]: entry for entry in entries}


def _content(folder: Path, entry: dict[str, Any]) -> Any:
    path = folder / entry["file"]
    if not path.is_file():
        raise DamagedGolden(f"golden {entry['id']!r} is listed in {folder / INDEX}, but {path} is missing; restore it")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != entry["sha256"]:
        raise DamagedGolden(
            f"golden {entry['id']!r}: {path} has SHA-256 {digest}, but the index says {entry['sha256']}; "
            "restore it, or record it anew with --emad-update-golden"
        )
    return _load(path)


@dataclass(frozen=True)
class KnownVerdicts:
    """Verdicts on record: ``entries`` in order of preference, each with claim, model, corpus and verdict."""

    entries: tuple[dict[str, str], ...] = field(default=())

    def expected(self, claim: str, models: Sequence[str], corpus: str) -> str | None:
        """The recorded verdict for a claim, any of the model's names (name, fingerprint) and a corpus, or None."""
        for entry in self.entries:
            if entry["claim"] == claim and entry["model"] in models and entry["corpus"] in ("", corpus):
                return entry["verdict"]
        return None


def known_verdicts(folders: Sequence[Path]) -> KnownVerdicts:
    """All ``verdicts.json`` of ``folders``, earlier folders first. Raises DamagedGolden for a malformed one."""
    return KnownVerdicts(tuple(entry for folder in folders for entry in _verdicts(folder)))


def _verdicts(folder: Path) -> list[dict[str, str]]:
    path = folder / VERDICTS
    if not path.exists():
        return []
    entries = _load(path)
    keys = {"claim", "model", "corpus", "verdict"}
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and set(entry) == keys for entry in entries):
        raise DamagedGolden(f"{path}: expected a list of tables with exactly {', '.join(sorted(keys))}")
    for entry in entries:
        if entry["verdict"] not in OUTCOMES:
            raise DamagedGolden(f"{path}: verdict={entry['verdict']!r}, but expected one of {', '.join(OUTCOMES)}")
    return entries


def record_verdict(folder: Path, claim: str, model: str, corpus: str, verdict: str) -> Change:
    """Put one verdict on record in ``folder``'s ``verdicts.json``, in place of any other for the same key."""
    entries = _verdicts(folder)
    new = {"claim": claim, "model": model, "corpus": corpus, "verdict": verdict}
    same = [entry for entry in entries if all(entry[key] == new[key] for key in ("claim", "model", "corpus"))]
    if same == [new]:
        return "unchanged"
    kept = [entry for entry in entries if entry not in same]
    ordered = sorted([*kept, new], key=lambda entry: (entry["claim"], entry["model"], entry["corpus"]))
    write_atomically(folder / VERDICTS, _dump(ordered))
    return "changed" if same else "added"
