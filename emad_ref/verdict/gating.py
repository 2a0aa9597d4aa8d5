"""What a verdict does to whoever asked: whether it fails a run, warns, or neither. The same for pytest and ``emad``.

- gate ``paper``: the row gates (register, or named by the user) and is falsified, or is inconclusive where that fails;
- gate ``known``: the verdict is none of those on record for such a run (``known``);
- ``require``: the row needs a required kind and is ``not applicable`` or ``unmeasured``.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from emad_ref.verdict.claims import Claim, Leg, Outcome, Verdict
from emad_ref.verdict.known import MACHINE_BOUND, Expected

GATES: tuple[str, ...] = ("paper", "known")
INCONCLUSIVE: tuple[str, ...] = ("warn", "fail")
REQUIREMENTS: tuple[str, ...] = ("energy", "speed", "quality", "golden")

UNDECIDED: tuple[Outcome, Outcome] = ("not applicable", "unmeasured")


@dataclass(frozen=True)
class Gating:
    """``inconclusive``: what an inconclusive gating row does. ``require``: words of ``REQUIREMENTS``."""

    gate: Literal["paper", "known"] = "paper"
    inconclusive: Literal["warn", "fail"] = "warn"
    require: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Consequence:
    """``failure`` and ``warning`` are messages, empty when there is nothing to say."""

    failure: str = ""
    warning: str = ""


def consequence(verdict: Verdict, claim: Claim, gating: Gating, expected: Expected | None) -> Consequence:
    """Apply requirement, gate and known verdict; ``verdict.gate`` already says whether the row gates.

    ``expected``: what is on record, None where nothing is. Rows on time and energy never are: nothing is asked of them.
    """
    said = describe(verdict)
    if verdict.verdict in UNDECIDED and claim.requires in gating.require:
        return Consequence(f"{said} --emad-require {claim.requires} asks for a decision.")
    if gating.gate == "known":
        if expected is not None and verdict.verdict not in expected.outcomes:
            return Consequence(f"{said} The verdict on record is {expected.said}: gate known fails on any change.")
        if expected is None and "golden" in gating.require and claim.requires not in MACHINE_BOUND:
            return Consequence(f"{said} No verdict is on record for it, and golden is required.")
        return Consequence()
    if not verdict.gate:
        return Consequence()
    if verdict.verdict == "falsified":
        return Consequence(f"{said} This row gates.")
    if verdict.verdict == "inconclusive":
        if gating.inconclusive == "fail":
            return Consequence(f"{said} This row gates, and --emad-inconclusive fail is set.")
        return Consequence(warning=said)
    return Consequence()


def describe(verdict: Verdict) -> str:
    """One paragraph with every number a reader needs: outcome, estimate, interval, n, threshold, reason, legs."""
    parts = [f"{verdict.id} on {verdict.model}: {verdict.verdict}.", _numbers(verdict)]
    if verdict.reason:
        parts.append(f"{verdict.reason.rstrip('.')}.")
    if len(verdict.legs) > 1:
        parts.append(f"Legs: {'; '.join(_leg(leg) for leg in verdict.legs)}.")
    return " ".join(part for part in parts if part)


def _numbers(result: Verdict | Leg) -> str:
    if result.estimate is None:
        return ""
    text = f"{result.estimate:.4g} {result.unit}".rstrip()
    if result.interval is not None:
        text += f" (95 % interval {result.interval[0]:.4g} to {result.interval[1]:.4g}, n = {result.n})"
    else:
        text += f" (n = {result.n})"
    return text + ("." if result.threshold is None else f", threshold {result.threshold:.4g}.")


def _leg(leg: Leg) -> str:
    return " ".join(part for part in (f"{leg.name} {leg.outcome}", _numbers(leg).rstrip("."), leg.reason) if part)
