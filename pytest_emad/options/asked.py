"""What a run was asked to do: the one frozen ``Settings`` that everything else reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from emad_ref.evidence.study import Budget, Study
from emad_ref.verdict.gating import Gating
from emad_ref.wire.address import Address


@dataclass(frozen=True)
class Settings:
    """What this run was asked to do, validated. Plain data: comparable, printable, free of torch.

    ``study``: what evidence is gathered on and with; the other fields say what becomes of it.
    """

    study: Study
    models: tuple[str, ...]
    only: frozenset[str]  # ids of the claims that alone are asked; empty: all
    pair: tuple[str, str] | None  # small, large; None: the models are the user's, and no pair was named
    pair_named: bool  # by the user: then its claims are asked at every budget
    all_claims: bool
    backend: str | None
    decoder: Address | None
    decoder_timeout: float
    process_timeout: float
    expect_decoder: str | None
    waive: tuple[tuple[str, str], ...]  # what may stay undecided → why
    report: Path | None
    gating: Gating
    gate_claims: frozenset[str]
    claims: Path | None
    golden: Path | None
    update_golden: bool
    evidence: str

    @property
    def budget(self) -> Budget:
        return self.study.budget

    def to_json(self) -> dict[str, Any]:
        """Built-in types only, sets sorted, by the names of the options: the ``settings`` entry of ``report.json``."""
        parts = (self, self.study, self.gating)
        named = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
        return {name: _plain(value) for name, value in named.items() if name not in ("study", "gating", "journal")}


def _plain(value: Any) -> Any:
    if isinstance(value, Budget):
        return value.name
    if isinstance(value, Path | Address):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value
