"""All records of a run, gathered on the one process that reports: the controller under xdist.

``Results.take`` reads them from test reports; ``report`` lays them out as ``report.json``; ``write`` puts that into the
report folder with everything that shows it; ``failures`` says why a run must fail although each of its tests may have
passed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emad_ref.report.reading import REPORT, SCHEMA
from emad_ref.report.writing import write_atomically
from emad_ref.verdict.gating import UNDECIDED
from emad_ref.verdict.known import nothing_compared
from pytest_emad.options import Settings
from pytest_emad.recording import CLAIM, GOLDEN, KNOWN, MODEL, NOTE, POINT, TABLE, read_properties

if TYPE_CHECKING:
    from emad_ref.report.folder import Written


@dataclass
class Results:
    """Lists in the order in which the tests finished; ``pages``: what shows them, once written."""

    claims: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    goldens: list[dict[str, Any]] = field(default_factory=list)
    known: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    torch_threads: int | None = None
    pages: Written | None = None

    def __bool__(self) -> bool:
        return any((self.claims, self.points, self.notes, self.models, self.goldens, self.known, self.tables))

    def take(self, properties: list[tuple[str, object]]) -> None:
        """Add the records of one finished test; facts that several tests record alike are kept once."""
        kinds: dict[str, list[Any]] = {
            CLAIM: self.claims,
            NOTE: self.notes,
            MODEL: self.models,
            GOLDEN: self.goldens,
            KNOWN: self.known,
            TABLE: self.tables,
        }
        for kind, value in read_properties(properties):
            if kind == POINT:
                self._take_point(value)
            elif value not in kinds[kind]:
                kinds[kind].append(value)

    def _take_point(self, values: dict[str, Any]) -> None:
        """One row per model and name: quality and time of a point are measured by different tests."""
        known = {key: value for key, value in values.items() if value is not None}
        for row in self.points:
            if (row["model"], row["name"]) == (values["model"], values["name"]):
                row |= known
                return
        self.points.append(dict(values))

    @property
    def updated(self) -> list[dict[str, Any]]:
        """Goldens that this run added or changed."""
        return [entry for entry in self.goldens if entry["outcome"] in ("added", "changed")]

    def failures(self, settings: Settings, requires: Mapping[str, str]) -> list[str]:
        """Reasons to fail the whole run; ``requires`` maps each claim to the ``--emad-require`` word it answers."""
        reasons = []
        if self.updated:
            reasons.append("goldens updated, read the diff and run again")
        decided = {requires[claim["id"]] for claim in self.claims if claim["verdict"] not in UNDECIDED}
        if any(entry["outcome"] == "read" for entry in self.goldens) or self._compared:
            decided.add("golden")
        for word in sorted(settings.gating.require - decided):
            reasons.append(f"--emad-require {word}: no claim that needs it was decided in this run")
        if settings.gating.gate == "known" and not settings.update_golden and (reason := nothing_compared(self.known)):
            reasons.append(reason)
        return reasons

    @property
    def _compared(self) -> bool:
        return any(entry["expected"] is not None for entry in self.known)

    def report(self, settings: Settings, provenance: dict[str, Any]) -> dict[str, Any]:
        """``report.json`` as data (``report.reading``). Models nothing was recorded about are listed by name."""
        described = {facts["name"] for facts in self.models}
        bare = [{"name": name} for name in settings.models if name not in described]
        threads = provenance["torch_threads"] if self.torch_threads is None else self.torch_threads
        return {
            "schema": SCHEMA,
            "models": [*self.models, *bare],
            "settings": settings.to_json(),
            "points": self.points,
            "claims": self.claims,
            "tables": self.tables,
            "goldens": self.goldens,
            "notes": self.notes,
            "provenance": provenance | {"torch_threads": threads},
        }

    def write(self, folder: Path, settings: Settings, provenance: dict[str, Any]) -> Path:
        """Write ``report.json`` into ``folder``, then what shows it, each file whole or not at all. Raises OSError."""
        from emad_ref.report.folder import write_pages  # tabulate: not at the start of every run

        path, report = folder / REPORT, self.report(settings, provenance)
        write_atomically(path, json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
        self.pages = write_pages([report], folder)
        return path
