"""Acceptance length on record, against which ENG-5 holds an engine: of a golden curve, or of an earlier run.

A curve is InferenceX's YAML (``golden_al_distribution``, measured on SPEED-Bench, arXiv:2604.09557): model → thinking
mode → number of drafted tokens: mean acceptance length, 1 + accepted / rounds.

    my-llama:
      thinking_off:
        1: 1.86
        3: 3.08

It has no number of prompts or rounds, so a length is taken as exact. What an earlier run measured is a sample of
``documents`` with an interval (``report.acceptance``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emad_ref.errors import BadArgument, convert_errors_to_bad_argument, is_number, is_whole, suggest_nearest
from emad_ref.files import is_file, read_text

LEVELS = ("model", "thinking mode", "number of drafted tokens")
LENGTH = "acceptance length"  # what a leg of ENG-5 is on (``Leg.on``); of a drafted position its number


@dataclass(frozen=True)
class AcceptanceRecord:
    """``length``: tokens that a round emits on average with up to ``drafted`` ones; ``source``: where it stands.

    ``drafted`` 0: unknown. ``interval``: of ``length`` over ``documents`` (95 %); None: it is taken as exact.
    """

    length: float
    drafted: int
    source: str
    interval: tuple[float, float] | None = None
    documents: int = 0

    def __str__(self) -> str:
        return f"{self.length:g} ({self.source}{f', n = {self.documents}' if self.interval else ''})"


def parse_acceptance_record(text: str, base: Path, where: str) -> AcceptanceRecord:
    """The record that ``FILE[,MODEL[,MODE[,DRAFTED]]]`` names; a level with one entry need not be named.

    Raises:
        BadArgument: no such file, no YAML of this form, an entry that is absent or not the only one, or a length
            outside 1 … drafted + 1.
    """
    name, *choice = (part.strip() for part in text.split(","))
    path = base / name
    if not name or not is_file(path) or len(choice) > len(LEVELS) or not all(choice):
        raise BadArgument(where, text, "FILE[,MODEL[,MODE[,DRAFTED]]] of an existing file", f"looked at {path}")
    import yaml  # on demand: most runs have no curve

    with convert_errors_to_bad_argument(where, name, "a curve in YAML: model, thinking mode, length by drafts", "mend"):
        entry: Any = yaml.safe_load(read_text(path, where))
    chosen: list[str] = []
    for at, level in enumerate(LEVELS):
        if not isinstance(entry, dict) or not entry:
            raise BadArgument(where, text, f"a {level} below {' → '.join([name, *chosen])}", "mend the curve")
        key = _chosen_key(entry, choice[at : at + 1], f"the {level} of {where}", text)
        entry = entry[key]
        chosen.append(str(key))
    if not (is_whole(key) and key >= 1 and is_number(entry) and 1 <= entry <= key + 1):
        expected = f"a length from 1 to drafted tokens + 1 below {' → '.join([name, *chosen])}"
        raise BadArgument(where, entry, expected, "a round emits one token besides those that it accepts")
    return AcceptanceRecord(float(entry), int(key), ", ".join(chosen))


def _chosen_key(entries: dict[Any, Any], choice: Sequence[str], what: str, text: str) -> Any:
    """The key of ``entries`` that ``choice`` names, or the only one."""
    names = {str(key): key for key in entries}
    if not choice and len(names) == 1:
        return next(iter(names.values()))
    if not choice or choice[0] not in names:
        nearest = suggest_nearest(choice[0], names) if choice else f"e.g. {text},{next(iter(names))}"
        raise BadArgument(what, choice[0] if choice else None, f"one of {', '.join(names)}", nearest)
    return names[choice[0]]
