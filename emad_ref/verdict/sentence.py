"""A verdict in a line or two, the same wherever a person meets it: what was asked, what came out, found, needed.

Read from the form that ``report.json`` holds, so that a failing test, the summary of its run and whoever reads the
report later say the same. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emad_ref.verdict.claims import Claim
from emad_ref.verdict.numbers import needed, quantity


def title_of(claim: Mapping[str, Any], register: Mapping[str, Claim]) -> str:
    """The claim in plain words: the report's own, else the register's; "" for a row that neither knows."""
    row = register.get(claim["id"])
    return str(claim.get("title") or (row and (row.plain or row.title)) or "")


def measurement(claim: Mapping[str, Any]) -> str:
    """``found … ; needs …, lower is better``; why there is nothing to show where nothing was estimated."""
    if claim["estimate"] is None:
        return str(claim["reason"])
    needs = needed(claim)
    found = f"found {quantity(claim['estimate'], claim['unit'], claim['interval'])}"
    return found + (f"; needs {needs}" if needs else "")


def heading(claim: Mapping[str, Any], title: str) -> str:
    """``EMAD-F1 on emad-tiny: falsified. Saving 15 % of FLOPs leaves quality as it was``."""
    return " ".join(part for part in (f"{claim['id']} on {claim['model']}: {claim['verdict']}.", title) if part)
