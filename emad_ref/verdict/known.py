"""Known verdicts: what earlier runs decided, so that a change is seen (METHODS, "Goldens and known verdicts").

``verdicts.json`` of a folder of goldens::

    {"schema": 2, "verdicts": [
      {"claim": "EMAD-F1", "model": "283b…", "name": "emad-tiny", "corpus": "world:premise", "budget": "smoke",
       "options": "", "seeds": {"0": "survived", "1": "survived", "2": "survived"}, "verdict": "survived"}]}

``model``    the fingerprint of the weights, or a name where none were read; ``name`` is for readers of the diff.
``options``  what else departs from the defaults and may change a verdict, "" for nothing (``departures``).
``seeds``    what each seed gave.
``verdict``  what they say together: the one outcome of three or more seeds, ``seed-dependent`` where they differ,
             ``unsettled`` where fewer agree so far.

Like is compared with like: an entry speaks for runs of the same claim, model, corpus, budget and options, under the
same schema. A settled verdict holds for every seed. Of a seed-dependent one any outcome that was seen passes, whatever
the seed: such a row lies on its threshold, and the next machine may round it the other way. An unsettled entry speaks
for the seeds it lists. What the record cannot know: the device, and how many models a run judged beside this one.

Nothing here writes. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from emad_ref.errors import EmadError
from emad_ref.files import BadFile, read_json
from emad_ref.verdict.claims import OUTCOMES, Claim, Verdict, load_register

VERDICTS = "verdicts.json"
# Raised with the form of this file and with every rule of decision: verdicts of other rules are no record of these.
SCHEMA = 2
AGREEING = 3  # seeds
SEED_DEPENDENT, UNSETTLED = "seed-dependent", "unsettled"
MACHINE_BOUND = ("speed", "energy")  # what rows on time and energy require: theirs go on no record
OF_THE_MACHINE = "a verdict on time or energy belongs to the machine it was measured on"
UNRECORDED = f"none on record under schema {SCHEMA} for this model, corpus, budget, seed and options"

KEY = ("claim", "model", "corpus", "budget", "options")
TEXTS = (*KEY, "name", "verdict")

Change = Literal["added", "changed", "unchanged"]
Entry = Mapping[str, Any]


class DamagedGolden(EmadError):
    """Golden data that is listed but missing, altered or not readable: never the same as data not recorded."""


@dataclass(frozen=True)
class Circumstances:
    """What all verdicts of a run have in common, as far as it may change one."""

    seed: int
    budget: str
    options: str = ""


def departures(register: Mapping[str, Claim], gate_claims: frozenset[str] = frozenset()) -> list[str]:
    """How the rows in force differ from the shipped: thresholds, and gates, which are each other's family for Holm."""
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
        if (gates := row.gates(gate_claims)) != usual[name].gate
    ]
    return [*thresholds, *gates]


@dataclass(frozen=True)
class Expected:
    """``outcomes`` that are no change; ``said``: how a message calls them."""

    outcomes: frozenset[str]
    said: str


@dataclass(frozen=True)
class KnownVerdicts:
    """Entries of ``verdicts.json``, those of earlier folders first."""

    entries: tuple[Entry, ...] = field(default=())

    def expected(self, key: Mapping[str, str], seed: int) -> Expected | None:
        """What is on record for a run of ``seed``, or None. ``key``: as ``key_of``."""
        for entry in self.entries:
            if all(entry[part] == key[part] for part in KEY) and (found := _expected(entry, seed)) is not None:
                return found
        return None


def _expected(entry: Entry, seed: int) -> Expected | None:
    seeds: Mapping[str, str] = entry["seeds"]
    if entry["verdict"] == SEED_DEPENDENT:
        return Expected(frozenset(seeds.values()), f"{SEED_DEPENDENT} ({_by_outcome(seeds)})")
    if entry["verdict"] == UNSETTLED and str(seed) not in seeds:
        return None
    (outcome,) = set(seeds.values())
    return Expected(frozenset({outcome}), outcome)


def _by_outcome(seeds: Mapping[str, str]) -> str:
    given = sorted(seeds, key=int)
    outcomes = dict.fromkeys(seeds[seed] for seed in given)
    return "; ".join(f"{o}: seed {', '.join(seed for seed in given if seeds[seed] == o)}" for o in outcomes)


def key_of(claim: str, model: str, corpus: str, run: Circumstances) -> dict[str, str]:
    """What a verdict is filed under. ``model``: the fingerprint, or the name where no weights were read."""
    return {"claim": claim, "model": model, "corpus": corpus, "budget": run.budget, "options": run.options}


def settled(seeds: Mapping[str, str]) -> str:
    """The one outcome of three seeds or more, else ``SEED_DEPENDENT`` or ``UNSETTLED``.

    >>> settled({"0": "survived", "1": "survived", "2": "survived"}), settled({"0": "survived", "1": "falsified"})
    ('survived', 'seed-dependent')
    """
    outcomes = set(seeds.values())
    if len(outcomes) > 1:
        return SEED_DEPENDENT
    return outcomes.pop() if len(seeds) >= AGREEING else UNSETTLED


def with_verdict(
    entries: Sequence[Entry], key: Mapping[str, str], name: str, seed: int, outcome: str
) -> tuple[list[Entry], Change]:
    """``entries`` with what ``seed`` gave, in place of what it gave before; sorted, so that a diff shows no more."""
    same = [entry for entry in entries if all(entry[part] == key[part] for part in KEY)]
    seeds: dict[str, str] = dict(same[0]["seeds"]) if same else {}
    before = seeds.get(str(seed))
    seeds[str(seed)] = outcome
    new = {**key, "name": name, "seeds": seeds, "verdict": settled(seeds)}
    kept = [entry for entry in entries if entry not in same]
    ordered = sorted([*kept, new], key=lambda entry: [entry[part] for part in KEY])
    return ordered, "unchanged" if same == [new] else "added" if before is None else "changed"


# ---------------------------------------------------------------- what is on record


def shipped() -> Path | None:
    """The packaged folder of goldens if there is one, else the checkout's; None if neither exists."""
    root = Path(__file__).resolve().parents[2]
    return next((folder for folder in (root / "pytest_emad" / "golden", root / "golden") if folder.is_dir()), None)


def known_verdicts(folders: Sequence[Path]) -> KnownVerdicts:
    """All ``verdicts.json`` of ``folders``, earlier folders first.

    Raises:
        DamagedGolden: one that cannot be read, or is at odds with itself.
    """
    return KnownVerdicts(tuple(entry for folder in folders for entry in entries_of(folder)))


def require_record(folders: Sequence[Path]) -> None:
    """Raises DamagedGolden where a run that compares with the record has none to compare with."""
    if not any((folder / VERDICTS).exists() for folder in folders):
        looked = ", ".join(str(folder / VERDICTS) for folder in folders) or "no folder of goldens"
        raise DamagedGolden(
            f"gate='known', but expected verdicts on record; looked at {looked}: record them with "
            "--emad-update-golden --emad-golden DIR, or choose the gate paper"
        )


def entries_of(folder: Path) -> list[Entry]:
    """What ``folder`` has on record under this schema; nothing where it has no file, or one of another schema.

    Raises:
        DamagedGolden: as ``known_verdicts``.
    """
    path = folder / VERDICTS
    stored = stored_in(path)
    if stored is None or stored["schema"] != SCHEMA:
        return []
    if not isinstance(stored["verdicts"], list):
        raise DamagedGolden(f"{path}: verdicts={stored['verdicts']!r:.60}, but expected a list; {_ANEW}")
    for number, entry in enumerate(stored["verdicts"]):
        if wrong := _wrong(entry):
            raise DamagedGolden(f"{path}: verdicts[{number}]: {wrong}; {_ANEW}")
    keys = Counter(tuple(entry[part] for part in KEY) for entry in stored["verdicts"])
    if twice := [key for key, count in keys.items() if count > 1]:
        raise DamagedGolden(f"{path}: {' '.join(twice[0])} is on record twice; {_ANEW}")
    return list(stored["verdicts"])


def stored_in(path: Path) -> dict[str, Any] | None:
    """The file as it stands, whatever its schema, or None. Raises DamagedGolden where it is no such file."""
    if not path.exists():
        return None
    stored = load_json(path)
    if not isinstance(stored, dict) or set(stored) != {"schema", "verdicts"} or not isinstance(stored["schema"], int):
        raise DamagedGolden(f"{path}: expected a table of schema, a whole number, and verdicts; {_ANEW}")
    return stored


def writable_entries(folder: Path) -> list[Entry]:
    """What ``folder`` has on record, to be written again with more.

    Raises:
        DamagedGolden: as ``entries_of``; or the file is of another schema, whose verdicts would be lost.
    """
    stored = stored_in(folder / VERDICTS)
    if stored is not None and stored["schema"] != SCHEMA:
        raise DamagedGolden(
            f"{folder / VERDICTS}: schema={stored['schema']}, but this version records schema {SCHEMA}; "
            "move the file away to start a record anew"
        )
    return entries_of(folder)


_ANEW = "restore it from the repository, or move it away and record anew with --emad-update-golden"


def _wrong(entry: Any) -> str:
    """What an entry lacks or contradicts; empty where it is whole."""
    if not isinstance(entry, dict) or set(entry) != {*TEXTS, "seeds"}:
        return f"expected a table with exactly {', '.join(sorted({*TEXTS, 'seeds'}))}"
    if texts := [part for part in TEXTS if not isinstance(entry[part], str)]:
        return f"{texts[0]}={entry[texts[0]]!r}, but expected a text"
    seeds = entry["seeds"]
    if not isinstance(seeds, dict) or not seeds or not all(seed.isdecimal() for seed in seeds):
        return f"seeds={seeds!r}, but expected seed → outcome, one or more"
    if strange := [outcome for outcome in seeds.values() if outcome not in OUTCOMES]:
        return f"outcome={strange[0]!r}, but expected one of {', '.join(OUTCOMES)}"
    if entry["verdict"] != settled(seeds):
        return f"verdict={entry['verdict']!r}, but its seeds say {settled(seeds)!r}"
    return ""


def load_json(path: Path) -> Any:
    """Raises DamagedGolden for a file that cannot be read or is not JSON."""
    try:
        return read_json(path, "golden")
    except BadFile as error:
        raise DamagedGolden(
            f"{path} cannot be read as JSON ({error.reason}); restore it from the repository"
        ) from error


# ---------------------------------------------------------------- what a run says of it


@dataclass(frozen=True)
class Compared:
    """One verdict beside the record; ``why``: the reason where nothing on record speaks for it."""

    verdict: Verdict
    expected: Expected | None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Built-in types only, as ``summary`` reads them."""
        said = None if self.expected is None else self.expected.said
        changed = self.expected is not None and self.verdict.verdict not in self.expected.outcomes
        return {
            "claim": self.verdict.id,
            "model": self.verdict.model,
            "expected": said,
            "changed": changed,
            "why": self.why,
        }


def compared(row: Claim, verdict: Verdict, expected: Expected | None) -> Compared:
    """``verdict`` beside what is on record for it."""
    if row.requires in MACHINE_BOUND:
        return Compared(verdict, None, OF_THE_MACHINE)
    return Compared(verdict, expected, "" if expected else UNRECORDED)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a run compared, and what not and why: one line each. ``rows``: as ``Compared.to_json``."""
    held = [row for row in rows if row["expected"] is not None]
    changed = [row for row in held if row["changed"]]
    loose = [row for row in held if row["expected"].startswith(SEED_DEPENDENT)]
    lines = [f"{len(held)} verdicts compared with the record: {len(held) - len(changed)} as recorded{_named(changed)}"]
    if loose:
        lines.append(f"{len(loose)} of them {SEED_DEPENDENT}, any outcome seen passes: {_claims(loose)}")
    for why in dict.fromkeys(row["why"] for row in rows if row["expected"] is None):
        absent = [row for row in rows if row["expected"] is None and row["why"] == why]
        lines.append(f"{len(absent)} not compared, {why}: {_claims(absent)}")
    return "\n".join(lines)


def _named(changed: Sequence[Mapping[str, Any]]) -> str:
    return f", {len(changed)} changed: {_claims(changed)}" if changed else ""


def _claims(rows: Sequence[Mapping[str, Any]]) -> str:
    several = len({row["model"] for row in rows}) > 1
    return ", ".join(f"{row['claim']} of {row['model']}" if several else row["claim"] for row in rows)


def nothing_compared(rows: Sequence[Mapping[str, Any]]) -> str:
    """The reason for which a run that compared nothing fails; empty where it did compare, or asked no claim."""
    if not rows or any(row["expected"] is not None for row in rows):
        return ""
    return (
        f"gate known: nothing was compared, no verdict on record under schema {SCHEMA} is about these models, corpora, "
        "budget, seed and options"
    )
