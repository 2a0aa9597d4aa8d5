"""Claims and verdicts as plain data, and selection of rows of the register by id or pattern.

``Claim``    one row of ``register.toml``: a checkable sentence, its thresholds, its minimum n, whether it gates.
``Leg``      one part of a verdict: a corpus, a task, a batch size, a model geometry.
``Verdict``  the result for one model, with every leg; ``report.json`` holds its JSON form.

Standard library only: the pytest plugin imports it at start-up.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from emad_ref.console import NotebookReprMixin
from emad_ref.errors import BadArgument, is_number, is_whole, suggest_nearest
from emad_ref.files import read_toml
from pytest_emad.extensions import list_claim_register_paths
from pytest_emad.statistics import number_format

Outcome = Literal["survived", "falsified", "inconclusive", "measured", "not applicable", "unmeasured"]
Kind = Literal["falsifier", "exact", "statistical", "report"]
Requirement = Literal["quality", "speed", "energy", ""]
Good = Literal["lower", "higher", ""]  # better direction of an estimate; "": neither, or no threshold
# what a leg about an operating point measures; "": a leg that only its name tells apart
LegKind = Literal["perplexity", "accuracy", "task", "reduction", ""]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# name of a paper in ``Claim.paper`` → its id and address; EMAD is a proposal that has neither in public
PAPERS = {
    "EAD": ("arXiv:2502.06833", "https://arxiv.org/abs/2502.06833"),
    "Early-exit LLMs": ("arXiv:2410.18952", "https://arxiv.org/abs/2410.18952"),
    "early-exit LLMs": ("arXiv:2410.18952", "https://arxiv.org/abs/2410.18952"),
}
COUNTED = ("documents", "items", "pairs")  # nouns of ``units``
TO_SURVIVE = "_to_survive"


@dataclass(frozen=True)
class Claim:
    """One row of the register.

    ``thresholds`` name → number, the unit in the name; rises, drops, reductions and shares are fractions.
    ``minimum``    counted unit (a word of ``COUNTED``) → smallest n that decides; ``documents_to_survive`` and so on →
                   smallest n with which a leg may survive, if larger.
    ``gate``       whether a falsified claim fails the run.
    ``requires``   the ``--emad-require`` word under which an undecided premise fails the run; ``""`` = none.
    ``plain``      the title in plain words, for summaries; ``""``: the title itself.
    """

    id: str
    title: str
    paper: str
    kind: Kind
    thresholds: dict[str, float]
    unit: str
    minimum: dict[str, int]
    gate: bool
    requires: Requirement
    plain: str = ""

    @property
    def display_title(self) -> str:
        """The title that summaries print."""
        return self.plain or self.title

    def is_gating(self, named: Collection[str] = ()) -> bool:
        """Whether the row gates in a run with additional gating rows ``named``."""
        return self.gate or self.id in named


class LegIdentity(TypedDict, total=False):
    """What a leg is about, as data: the fields ``point``, ``kind`` and ``on`` of ``Leg``."""

    point: str
    kind: LegKind
    on: str


FORECAST = "would decide it in four of five samples"  # end of a remedy that names a number of units


@dataclass(frozen=True)
class Leg:
    """One part of a verdict.

    ``name``       for readers; code asks ``point``, ``kind`` and ``on``.
    ``point``      ``OperatingPoint.digest`` of the point that it is about; "" none.
    ``kind``       what it measures there; "" without a point.
    ``on``         the corpus, task or baseline that it is about; the name itself, if neither point nor kind are given.
    ``interval``   two-sided 95 %, or None; ``reason`` then explains it if not obvious.
    ``p_falsify``  one-sided p-value of "the threshold is not crossed", unadjusted: small values falsify.
    ``p_survive``  one-sided p-value of "the threshold is crossed", unadjusted: small values let the leg survive.
    ``remedy``     of an open leg: text about the means to decide it, as in ``reason``; "" unknown.
    ``enough``     approximate number of units that would decide it; None: unknown, or none would.

    Raises:
        BadArgument: an unknown outcome; a number that is NaN or infinite (use None and a reason).
    """

    name: str
    outcome: Outcome
    estimate: float | None
    interval: tuple[float, float] | None
    n: int
    threshold: float | None
    unit: str
    reason: str = ""
    p_falsify: float | None = None
    p_survive: float | None = None
    good: Good = ""
    remedy: str = ""
    enough: int | None = None
    point: str = ""
    kind: LegKind = ""
    on: str = ""

    def __post_init__(self) -> None:
        _require_valid_numbers(self, self.outcome, ("estimate", "threshold", "p_falsify", "p_survive"))
        assert self.point or not self.kind, f"{self.name!r} measures {self.kind} at no point"
        if not (self.point or self.kind or self.on):
            object.__setattr__(self, "on", self.name)

    def to_json(self) -> dict[str, Any]:
        """Built-in types only: NumPy scalars cannot be sent to an xdist controller."""
        return {f.name: _builtin(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, repr=False)
class Verdict(NotebookReprMixin):
    """The result of one claim for one model.

    ``estimate``, ``interval``, ``n``, ``threshold``, ``unit``, ``good`` and ``enough`` are those of the leg that
    decided (``legs.outcome_and_deciding_leg``); ``n`` of a row that lists only its worst legs counts the judged ones.
    ``why``       of an open row: the means to decide it or, if unknown, that leg's reason; else "".
    ``deciding``  index in ``legs`` of the leg that decided; None for a row that no leg decides.

    Raises:
        BadArgument: an unknown outcome; a number that is NaN or infinite (use None and a reason); a deciding leg that
            is not listed.
    """

    id: str
    model: str
    verdict: Outcome
    estimate: float | None
    interval: tuple[float, float] | None
    n: int
    threshold: float | None
    unit: str
    reason: str
    legs: tuple[Leg, ...] = field(default=())
    good: Good = ""
    why: str = ""
    enough: int | None = None
    deciding: int | None = None

    @property
    def _notebook_title(self) -> str:
        return f"{self.id} on {self.model}"

    @property
    def _notebook_facts(self) -> dict[str, str]:
        if self.estimate is None:
            return {"verdict": self.verdict, "reason": self.reason}
        found = number_format.format_quantity(self.estimate, self.unit, self.interval)
        needs = number_format.format_requirement({"threshold": self.threshold, "unit": self.unit, "good": self.good})
        return {"verdict": self.verdict, "found": f"found {found}"} | ({"needed": f"needs {needs}"} if needs else {})

    def __post_init__(self) -> None:
        _require_valid_numbers(self, self.verdict, ("estimate", "threshold"))
        if self.deciding is not None and not 0 <= self.deciding < len(self.legs):
            raise BadArgument("deciding", self.deciding, f"an index of its {len(self.legs)} legs, or None")

    def to_json(self) -> dict[str, Any]:
        """The ``claims`` entry of ``report.json``, to which the run adds whether it gates: built-in types, no NaN."""
        plain = {f.name: _builtin(getattr(self, f.name)) for f in fields(self) if f.name != "legs"}
        return plain | {"legs": [leg.to_json() for leg in self.legs]}


def _require_valid_numbers(item: Leg | Verdict, outcome: str, names: tuple[str, ...]) -> None:
    if outcome not in OUTCOMES:
        raise BadArgument("outcome", outcome, f"one of {', '.join(OUTCOMES)}")
    numbers = [(name, getattr(item, name)) for name in names]
    numbers += [("interval", bound) for bound in item.interval or ()]
    for name, value in numbers:
        if value is not None and not math.isfinite(value):
            raise BadArgument(name, value, "a finite number", "write None and say in the reason what is missing")


def _builtin(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_builtin(part) for part in value]
    return value.item() if hasattr(value, "item") else value


def load_register(path: Path | str | None = None) -> dict[str, Claim]:
    """The shipped rows by id, in their order, then those of extensions; ``path`` sets gates and thresholds.

    A user's file holds tables of known rows with ``gate = true|false`` and ``thresholds = { name = number }``, e.g.::

        [EMAD-F1]
        thresholds = { perplexity_rise = 0.02 }

    Raises:
        BadArgument: the file cannot be read or parsed, changes nothing, or names an unknown row, an unknown field or
            threshold, or a value of another type; an extension's file with invalid rows, or with a shipped id. The
            message names file, row and field.
    """
    register = dict(_shipped_rows())
    for file in list_claim_register_paths():
        for name, row in read_toml(file, "claims file").items():
            register[name] = _extension_row(name, row, file, register)
    if path is None:
        return register
    changed = read_toml(path, "claims file")
    if not changed:
        raise BadArgument("claims file", str(path), "a table of at least one claim", "leave the file out")
    for name, row in changed.items():
        if name not in register:
            remedy = "this file changes known claims; docs/own-claim.md adds one"
            raise BadArgument(f"{path}: row", name, f"one of {', '.join(register)}", remedy)
        register[name] = _row_with_overrides(register[name], row, f"{path}: {name}")
    return register


@cache
def _shipped_rows() -> dict[str, Claim]:
    """The shipped rows, parsed once per process, since a run reads them several times."""
    shipped = resources.files(__package__).joinpath("register.toml").read_text(encoding="utf-8")
    register = {name: Claim(id=name, **row) for name, row in tomllib.loads(shipped).items()}
    for name, claim in register.items():
        _require_valid_minimum(claim.minimum, f"register.toml: {name}")
    return register


def _extension_row(name: str, row: Any, file: Path, register: Mapping[str, Claim]) -> Claim:
    """A row of an extension."""
    if name in register:
        raise BadArgument(f"{file}: row", name, "an id that no other row has", "choose a prefix of your own")
    required = {f.name for f in fields(Claim)} - {"id", "plain"}
    if not isinstance(row, dict) or set(row) - {"plain"} != required:
        columns = sorted(row) if isinstance(row, dict) else row
        raise BadArgument(
            f"{file}: {name}", columns, f"a table of exactly {', '.join(sorted(required))}", "see register.toml"
        )
    for field_name, allowed in (("kind", get_args(Kind)), ("requires", get_args(Requirement))):
        if row[field_name] not in allowed:
            raise BadArgument(
                f"{file}: {name}: {field_name}", row[field_name], f"one of {', '.join(map(repr, allowed))}"
            )
    _require_valid_minimum(row["minimum"], f"{file}: {name}")
    return Claim(id=name, **row)


def _require_valid_minimum(minimum: Any, where: str) -> None:
    """Check a minimum: known words, whole numbers, and at least as many units to survive as to decide."""
    if not isinstance(minimum, dict):
        raise BadArgument(f"{where}: minimum", minimum, "a table", "write minimum = { documents = 30 }")
    allowed = [*COUNTED, *(noun + TO_SURVIVE for noun in COUNTED)]
    for noun, n in minimum.items():
        if noun not in allowed:
            raise BadArgument(f"{where}: minimum", noun, f"one of {', '.join(allowed)}", "n counts what is resampled")
        if not is_whole(n) or n < 1:
            raise BadArgument(f"{where}: minimum.{noun}", n, "a whole number of at least 1")
        least = minimum.get(noun.removesuffix(TO_SURVIVE), 0)
        if n < least:
            raise BadArgument(f"{where}: minimum.{noun}", n, f"at least {least}", "fewer decide nothing at all")


def _row_with_overrides(claim: Claim, row: Any, where: str) -> Claim:
    if not isinstance(row, dict):
        raise BadArgument(where, row, "a table", f"write [{claim.id}] and its fields below")
    if row in ({}, {"thresholds": {}}):
        raise BadArgument(where, row, "gate, or a threshold", f"without one of them [{claim.id}] changes nothing")
    for name in row:
        if name not in ("gate", "thresholds"):
            raise BadArgument(f"{where}: field", name, "gate or thresholds", "the rest of a row belongs to the paper")
    gate = row.get("gate", claim.gate)
    if not isinstance(gate, bool):
        raise BadArgument(f"{where}: gate", gate, "true or false", "write it without quotes")
    changes = row.get("thresholds", {})
    if not isinstance(changes, dict):
        raise BadArgument(f"{where}: thresholds", changes, "a table", "write thresholds = { name = number }")
    for name, value in changes.items():
        if name not in claim.thresholds:
            allowed = ", ".join(claim.thresholds) or "none: this row has no threshold to set"
            raise BadArgument(f"{where}: thresholds", name, f"one of {allowed}")
        if not is_number(value) or not math.isfinite(value):
            raise BadArgument(f"{where}: thresholds.{name}", value, "a finite number", "a fraction: 1 % is 0.01")
    return replace(claim, gate=gate, thresholds=claim.thresholds | {k: float(v) for k, v in changes.items()})


EXIT_PREFIX = "EMAD-X"  # prefix of rows about an exit, only in runs with one
DASH_VARIANTS = str.maketrans(dict.fromkeys("‐‑–−", "-"))  # hyphens of typeset text, en dash, minus sign U+2212


def match_id_patterns(patterns: Iterable[str], known: Iterable[str], where: str) -> frozenset[str]:
    """The ids of ``known`` that match one of ``patterns``, ignoring case.

    Raises:
        BadArgument: a pattern matches none; the message names ``where`` and the nearest ids.
    """
    ids = list(known)
    selected: set[str] = set()
    for pattern in patterns:
        pattern_text = pattern.translate(DASH_VARIANTS).upper()
        matching = {name for name in ids if fnmatchcase(name.upper(), pattern_text)}
        if not matching:
            expected = "an id of the register, or a pattern such as EMAD-R*"
            raise BadArgument(where, pattern, expected, suggest_nearest(pattern_text, ids) or f"ids: {', '.join(ids)}")
        selected |= matching
    return frozenset(selected)
