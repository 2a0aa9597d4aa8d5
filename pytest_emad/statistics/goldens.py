"""Known verdicts and golden data: results of earlier runs, so that a change is noticed.

``verdicts.json`` of a folder of goldens::

    {"schema": 2, "verdicts": [
      {"claim": "EMAD-F1", "model": "283b…", "name": "emad-tiny", "corpus": "world:premise", "budget": "smoke",
       "options": "", "seeds": {"0": "survived", "1": "survived", "2": "survived"}, "verdict": "survived"}]}

``model``    the fingerprint of the weights, or a name without weights; ``name`` is for readers of the diff.
``options``  other departures from the defaults that may change a verdict, "" for none
(``list_changes_from_shipped_register``).
``seeds``    the outcome of each seed.
``verdict``  the common outcome of three or more seeds, ``seed-dependent`` if they differ, ``unsettled`` if fewer agree
             so far.

A person reads and edits this file in review, so it has no digest, and its reader checks every entry. Only a run that
compares with the record reads it.

An entry applies to runs of the same claim, model, corpus, budget and options. A settled verdict
holds for every seed. For a seed-dependent one any recorded outcome passes under any seed: such a row is at its
threshold, and another machine may round it the other way. An unsettled entry applies to the seeds it lists. The record
does not include the device, nor the number of models that a run judged.

A golden is a JSON file with what an earlier run decoded. ``index.json`` lists it as ``{"id", "file", "sha256",
"provenance"}``. An unlisted golden was never recorded and reads as None. A listed one that is missing or changed is
damaged, and raises. Ids carry the model's fingerprint and never derive from pytest's node ids, which depend on the name
of a test.

``record_verdict`` and ``Goldens.update`` write; nothing else does. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from emad_ref.absent import Absent
from emad_ref.errors import EmadError, is_whole
from emad_ref.files import BadFile, read_bytes, read_json, write_atomically
from pytest_emad.statistics.verdicts import OUTCOMES, Claim, Verdict, load_register

VERDICTS = "verdicts.json"
# Raised with the form of this file and with every rule of decision: verdicts of other rules are not comparable.
SCHEMA = 2
AGREEING = 3  # seeds
SEED_DEPENDENT, UNSETTLED = "seed-dependent", "unsettled"
MACHINE_BOUND = ("speed", "energy")  # requirements of rows on time and energy, which have no record
OF_THE_MACHINE = "a verdict on time or energy belongs to the machine it was measured on"
UNRECORDED = "none on record for this model, corpus, budget, seed and options"

KEY = ("claim", "model", "corpus", "budget", "options")
TEXTS = (*KEY, "name", "verdict")

Change = Literal["added", "changed", "unchanged"]
Entry = Mapping[str, Any]


class DamagedGolden(EmadError):
    """Raised for golden data that is listed but missing, altered or unreadable; unrecorded data reads as None."""


@dataclass(frozen=True)
class VerdictConditions:
    """Conditions common to all verdicts of a run that may change one."""

    seed: int
    budget: str
    options: str = ""


def list_changes_from_shipped_register(
    register: Mapping[str, Claim], gate_claims: frozenset[str] = frozenset()
) -> list[str]:
    """Differences of the rows in force from the shipped ones: thresholds and gates.

    Gates count because they share Holm's correction.
    """
    usual = load_register()
    thresholds = [
        f"{name}.{key}={value:g}"
        for name, row in register.items()
        for key, value in row.thresholds.items()
        if value != usual[name].thresholds[key]
    ]
    gates = [
        f"{name}.gate={str(gates).lower()}"
        for name, row in register.items()
        if (gates := row.is_gating(gate_claims)) != usual[name].gate
    ]
    return [*thresholds, *gates]


@dataclass(frozen=True)
class AcceptedOutcomes:
    """``outcomes`` that are no change; ``label``: their name in messages."""

    outcomes: frozenset[str]
    label: str


@dataclass(frozen=True)
class KnownVerdicts:
    """Entries of ``verdicts.json``, those of earlier folders first."""

    entries: tuple[Entry, ...] = field(default=())

    def find_outcome(self, key: Mapping[str, str], seed: int) -> AcceptedOutcomes | None:
        """The record for a run of ``seed``, or None. ``key``: as ``verdict_key_fields``."""
        for entry in self.entries:
            if (
                all(entry[part] == key[part] for part in KEY)
                and (recorded := _recorded_outcome(entry, seed)) is not None
            ):
                return recorded
        return None


def _recorded_outcome(entry: Entry, seed: int) -> AcceptedOutcomes | None:
    seeds: Mapping[str, str] = entry["seeds"]
    if entry["verdict"] == SEED_DEPENDENT:
        return AcceptedOutcomes(frozenset(seeds.values()), f"{SEED_DEPENDENT} ({_by_outcome(seeds)})")
    if entry["verdict"] == UNSETTLED and str(seed) not in seeds:
        return None
    (outcome,) = set(seeds.values())
    return AcceptedOutcomes(frozenset({outcome}), outcome)


def _by_outcome(seeds: Mapping[str, str]) -> str:
    ordered = sorted(seeds, key=int)
    outcomes = dict.fromkeys(seeds[seed] for seed in ordered)
    return "; ".join(f"{o}: seed {', '.join(seed for seed in ordered if seeds[seed] == o)}" for o in outcomes)


def verdict_key_fields(claim: str, model: str, corpus: str, run: VerdictConditions) -> dict[str, str]:
    """The key of a verdict's entry. ``model``: the fingerprint, or the name without weights."""
    return {"claim": claim, "model": model, "corpus": corpus, "budget": run.budget, "options": run.options}


def summarise_seed_outcomes(seeds: Mapping[str, str]) -> str:
    """The one outcome of three seeds or more, else ``SEED_DEPENDENT`` or ``UNSETTLED``.

    >>> summarise_seed_outcomes({"0": "survived", "1": "survived", "2": "survived"})
    'survived'
    >>> summarise_seed_outcomes({"0": "survived", "1": "falsified"})
    'seed-dependent'
    """
    outcomes = set(seeds.values())
    if len(outcomes) > 1:
        return SEED_DEPENDENT
    return outcomes.pop() if len(seeds) >= AGREEING else UNSETTLED


def updated_verdict_entries_and_change(
    entries: Sequence[Entry], key: Mapping[str, str], name: str, seed: int, outcome: str
) -> tuple[list[Entry], Change]:
    """``entries`` with the outcome of ``seed`` added or replaced; sorted, so that a diff shows nothing else."""
    same = [entry for entry in entries if all(entry[part] == key[part] for part in KEY)]
    seeds: dict[str, str] = dict(same[0]["seeds"]) if same else {}
    before = seeds.get(str(seed))
    seeds[str(seed)] = outcome
    new = {**key, "name": name, "seeds": seeds, "verdict": summarise_seed_outcomes(seeds)}
    others = [entry for entry in entries if entry not in same]
    ordered = sorted([*others, new], key=lambda entry: [entry[part] for part in KEY])
    return ordered, "unchanged" if same == [new] else "added" if before is None else "changed"


# ---------------------------------------------------------------- records


def find_golden_folder() -> Path | None:
    """The packaged folder of goldens if there is one, else the checkout's; None if neither exists."""
    root = Path(__file__).resolve().parents[2]
    return next((folder for folder in (root / "pytest_emad" / "golden", root / "golden") if folder.is_dir()), None)


def load_known_verdicts_from_folders(folders: Sequence[Path]) -> KnownVerdicts:
    """All ``verdicts.json`` of ``folders``, earlier folders first.

    Raises:
        DamagedGolden: one that cannot be read, is of another schema, or contradicts itself.
    """
    return KnownVerdicts(tuple(entry for folder in folders for entry in read_verdict_entries(folder)))


def require_known_verdicts_file(folders: Sequence[Path]) -> None:
    """Raise DamagedGolden if a run that compares with the record finds none."""
    if not any((folder / VERDICTS).exists() for folder in folders):
        looked = ", ".join(str(folder / VERDICTS) for folder in folders) or "no folder of goldens"
        raise DamagedGolden(
            f"gate='known', but expected verdicts on record; looked at {looked}: record them with "
            "--emad-update-golden --emad-golden DIR, or choose the gate paper"
        )


def read_verdict_entries(folder: Path) -> list[Entry]:
    """Entries of ``folder``; empty without a file.

    Raises:
        DamagedGolden: as ``load_known_verdicts_from_folders``.
    """
    path = folder / VERDICTS
    if not path.exists():
        return []
    stored = load_golden_json(path)
    if not isinstance(stored, dict) or set(stored) != {"schema", "verdicts"} or not is_whole(stored["schema"]):
        raise DamagedGolden(f"{path}: expected a table of schema, a whole number, and verdicts; {_RECORD_AGAIN}")
    if stored["schema"] != SCHEMA:
        raise DamagedGolden(
            f"{path}: schema={stored['schema']}, but this version reads {SCHEMA} alone; move the file away, and record "
            "anew with --emad-update-golden"
        )
    if not isinstance(stored["verdicts"], list):
        raise DamagedGolden(f"{path}: verdicts={stored['verdicts']!r:.60}, but expected a list; {_RECORD_AGAIN}")
    for number, entry in enumerate(stored["verdicts"]):
        if wrong := _entry_error(entry):
            raise DamagedGolden(f"{path}: verdicts[{number}]: {wrong}; {_RECORD_AGAIN}")
    keys = Counter(tuple(entry[part] for part in KEY) for entry in stored["verdicts"])
    if twice := [key for key, count in keys.items() if count > 1]:
        raise DamagedGolden(f"{path}: {' '.join(twice[0])} is on record twice; {_RECORD_AGAIN}")
    return list(stored["verdicts"])


_RECORD_AGAIN = "restore it from the repository, or move it away and record anew with --emad-update-golden"


def _entry_error(entry: Any) -> str:
    """Text about an entry's missing or contradictory fields; empty if it is valid."""
    if not isinstance(entry, dict) or set(entry) != {*TEXTS, "seeds"}:
        return f"expected a table with exactly {', '.join(sorted({*TEXTS, 'seeds'}))}"
    if texts := [part for part in TEXTS if not isinstance(entry[part], str)]:
        return f"{texts[0]}={entry[texts[0]]!r}, but expected a text"
    seeds = entry["seeds"]
    if not isinstance(seeds, dict) or not seeds or not all(seed.isdecimal() for seed in seeds):
        return f"seeds={seeds!r}, but expected seed → outcome, one or more"
    if strange := [outcome for outcome in seeds.values() if outcome not in OUTCOMES]:
        return f"outcome={strange[0]!r}, but expected one of {', '.join(OUTCOMES)}"
    if entry["verdict"] != summarise_seed_outcomes(seeds):
        return f"verdict={entry['verdict']!r}, but its seeds say {summarise_seed_outcomes(seeds)!r}"
    return ""


def load_golden_json(path: Path) -> Any:
    """Raises DamagedGolden for a file that cannot be read or is not JSON."""
    try:
        return read_json(path, "golden")
    except BadFile as error:
        raise DamagedGolden(
            f"{path} cannot be read as JSON ({error.reason}); restore it from the repository"
        ) from error


# ---------------------------------------------------------------- comparison of a run


@dataclass(frozen=True)
class VerdictRecordComparison:
    """One verdict and its record; ``why``: reason why no entry applies to it."""

    verdict: Verdict
    expected: AcceptedOutcomes | None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Built-in types only, as ``format_comparison_summary`` reads them."""
        expectation_of_point_values = None if self.expected is None else self.expected.label
        changed = self.expected is not None and self.verdict.verdict not in self.expected.outcomes
        return {
            "claim": self.verdict.id,
            "model": self.verdict.model,
            "expected": expectation_of_point_values,
            "outcomes": [] if self.expected is None else sorted(self.expected.outcomes),
            "changed": changed,
            "why": self.why,
        }


def compare_verdict_with_record(
    row: Claim, verdict: Verdict, expected: AcceptedOutcomes | None
) -> VerdictRecordComparison:
    """Compare ``verdict`` with the record."""
    if row.requires in MACHINE_BOUND:
        return VerdictRecordComparison(verdict, None, OF_THE_MACHINE)
    return VerdictRecordComparison(verdict, expected, "" if expected else UNRECORDED)


MOST_TITLED = 4  # most claims of a list with titles; a longer list shows only ids


def format_comparison_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Summary lines: verdicts compared, and those not compared with the reason.

    ``rows``: as from ``VerdictRecordComparison.to_json``.
    """
    register = load_register()

    def listed(some: Sequence[Mapping[str, Any]]) -> str:
        several = len({row["model"] for row in some}) > 1
        names = [f"{row['claim']} of {row['model']}" if several else str(row["claim"]) for row in some]
        claims = [register.get(row["claim"]) for row in some]
        titles = [claim.display_title for claim in claims if claim]
        if len(titles) < len(some) or len(some) > MOST_TITLED:
            return ", ".join(names)
        return "; ".join(f"{title} ({name})" for title, name in zip(titles, names, strict=True))

    compared = [row for row in rows if row["expected"] is not None]
    changed = [row for row in compared if row["changed"]]
    loose = [row for row in compared if len(row["outcomes"]) > 1]
    changes = f", {len(changed)} changed: {listed(changed)}" if changed else ""
    lines = [f"{len(compared)} verdicts compared with the record: {len(compared) - len(changed)} as recorded{changes}"]
    if loose:
        lines.append(f"{len(loose)} of them {SEED_DEPENDENT}, any outcome seen passes: {listed(loose)}")
    for why in dict.fromkeys(row["why"] for row in rows if row["expected"] is None):
        absent = [row for row in rows if row["expected"] is None and row["why"] == why]
        lines.append(f"{len(absent)} not compared, {why}: {listed(absent)}")
    return "\n".join(lines)


def absent_comparison(rows: Sequence[Mapping[str, Any]]) -> Absent | None:
    """Why a run without comparisons fails; None if it compared some, or judged no claim."""
    if not rows or any(row["expected"] is not None for row in rows):
        return None
    return Absent("nothing was compared, no verdict on record is about these models, corpora, budget, seed and options")


INDEX = "index.json"
LONGEST = 255  # bytes of a file name, as file systems limit it
KEYS = {"id", "file", "sha256", "provenance"}


@dataclass(frozen=True)
class Goldens:
    """Goldens of ``folders``: the first folder that lists an id answers. ``target`` takes updates (None: none)."""

    folders: tuple[Path, ...]
    target: Path | None = None

    def read(self, name: str) -> Any | None:
        """The stored JSON value, or None if no folder lists ``name``.

        Raises:
            DamagedGolden: listed, but the file is missing or its SHA-256 differs; or an index that cannot be read.
        """
        for folder in self.folders:
            entry = _index(folder).get(name)
            if entry is not None:
                return load_golden_json(_verified_path(folder, entry))
        return None

    def verify_checksums(self) -> None:
        """Compare every listed golden with its SHA-256. Raises DamagedGolden as ``read`` does."""
        for folder in self.folders:
            for entry in _index(folder).values():
                _verified_path(folder, entry)

    def update(self, name: str, value: Any, provenance: dict[str, Any]) -> Change:
        """Write ``value`` to ``target`` under ``name`` and list it; an equal value leaves file and index unchanged."""
        if self.target is None:
            raise EmadError(f"golden {name!r} cannot be updated without --emad-golden DIR")
        with _folder_lock(self.target):
            index, text = _index(self.target), _to_text(value)
            digest = hashlib.sha256(text.encode()).hexdigest()
            old = index.get(name)
            if old is not None and old["sha256"] == digest and (self.target / old["file"]).is_file():
                return "unchanged"
            file = _file_name(name)
            write_atomically(self.target / file, text)
            index[name] = {"id": name, "file": file, "sha256": digest, "provenance": provenance}
            write_atomically(self.target / INDEX, _to_text([index[key] for key in sorted(index)]))
        return "added" if old is None else "changed"


def _to_text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def _file_name(name: str) -> str:
    """Readable and unique: a digest separates ids that differ only in characters a file name cannot hold."""
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', name)}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def _index(folder: Path) -> dict[str, dict[str, Any]]:
    if not (folder / INDEX).exists():
        return {}
    entries = load_golden_json(folder / INDEX)
    if not isinstance(entries, list):
        raise DamagedGolden(f"{folder / INDEX}: expected a list, found {type(entries).__name__}; restore it")
    for number, entry in enumerate(entries):
        if wrong := _index_error(entry):
            raise DamagedGolden(f"{folder / INDEX}: entry {number}: {wrong}; restore it from the repository")
    return {entry["id"]: entry for entry in entries}


def _index_error(entry: Any) -> str:
    """Text about the fault of an entry of the index; empty if valid."""
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


def _verified_path(folder: Path, entry: dict[str, Any]) -> Path:
    path: Path = folder / entry["file"]
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
    return path


def record_verdict(folder: Path, key: Mapping[str, str], name: str, seed: int, outcome: str) -> Change:
    """Record one verdict in ``folder``'s ``verdicts.json`` with those of other seeds.

    The file is read, changed and written under a lock: runs of several seeds may record at once.

    Args:
        key: ``goldens.verdict_key_fields``; ``name``: the model's, for readers.

    Raises:
        DamagedGolden: the file cannot be read, or is of another schema; it stays unchanged.
    """
    with _folder_lock(folder):
        entries, change = updated_verdict_entries_and_change(read_verdict_entries(folder), key, name, seed, outcome)
        if change != "unchanged":
            write_atomically(folder / VERDICTS, _to_text({"schema": SCHEMA, "verdicts": entries}))
    return change


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for one writer. The lock is on the folder itself, leaves no file and ends with its process.

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
