"""A verdict in a line or two, the same wherever a person meets it: what was asked, what came out, found, needed.

Read from the form that ``report.json`` holds, so that a failing test, the summary of its run and whoever reads the
report later say the same. Standard library only.

What a verdict does to whoever asked: whether it fails a run, warns, or neither. The same for pytest and ``emad``.

- gate ``paper``: the row gates (register, or named by the user) and is falsified, or is inconclusive where that fails;
- gate ``decoder``: the same for the rows that a decoder can help; ``METHOD_ROWS`` are reported and do not gate;
- gate ``known``: the verdict is none of those on record for such a run (``known``);
- ``require``: the row needs a required kind and is ``not applicable`` or ``unmeasured``.

Standard library only.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from emad_ref.statistics.goldens import MACHINE_BOUND, RecordedOutcome
from emad_ref.statistics.number_format import needed, quantity
from emad_ref.statistics.verdicts import Claim, Outcome, Verdict


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


GATES: tuple[str, ...] = ("paper", "decoder", "known")
METHOD_ROWS = frozenset({"EMAD-F1", "EMAD-F2"})  # what exits cost and save on a model: no decoder can help it
INCONCLUSIVE: tuple[str, ...] = ("warn", "fail")
REQUIREMENTS: tuple[str, ...] = ("energy", "speed", "quality", "golden")

WIDTH = 80  # letters in a line of a message, which goes into logs as well as onto terminals
UNDECIDED: tuple[Outcome, Outcome] = ("not applicable", "unmeasured")


@dataclass(frozen=True)
class GateOptions:
    """``inconclusive``: what an inconclusive gating row does. ``require``: words of ``REQUIREMENTS``."""

    gate: Literal["paper", "decoder", "known"] = "paper"
    inconclusive: Literal["warn", "fail"] = "warn"
    require: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GateResult:
    """``failure`` and ``warning`` are messages of a few lines, empty when there is nothing to say."""

    failure: str = ""
    warning: str = ""


def gate_result(verdict: Verdict, claim: Claim, gating: GateOptions, expected: RecordedOutcome | None) -> GateResult:
    """Apply requirement, gate and known verdict; ``verdict.gate`` already says whether the row gates.

    ``expected``: what is on record, None where nothing is. Rows on time and energy never are: nothing is asked of them.
    """
    said = describe_verdict(verdict, claim)
    if verdict.verdict in UNDECIDED and claim.requires in gating.require:
        return GateResult(f"{said}\n--emad-require {claim.requires} asks for a decision.")
    if gating.gate == "known":
        if expected is not None and verdict.verdict not in expected.outcomes:
            return GateResult(f"{said}\nThe verdict on record is {expected.said}: gate known fails on any change.")
        if expected is None and "golden" in gating.require and claim.requires not in MACHINE_BOUND:
            return GateResult(f"{said}\nNo verdict is on record for it, and golden is required.")
        return GateResult()
    if not verdict.gate:
        return GateResult()
    if verdict.verdict == "falsified":
        return GateResult(f"{said}\nThis row gates.")
    if verdict.verdict == "inconclusive":
        if gating.inconclusive == "fail":
            return GateResult(f"{said}\nThis row gates, and --emad-inconclusive fail is set.")
        return GateResult(warning=said)
    return GateResult()


def describe_verdict(verdict: Verdict, claim: Claim) -> str:
    """The line of the summary, as a message: claim and outcome, what was found and what it needs, then why."""
    told = verdict.to_json()
    found, why = measurement(told), verdict.reason if verdict.estimate is not None else ""
    lines = [heading(told, title_of(told, {claim.id: claim})), _with_full_stop(found), _with_full_stop(why)]
    return "\n".join(textwrap.fill(line, WIDTH, break_long_words=False) for line in lines if line)


def _with_full_stop(text: str) -> str:
    return f"{text.rstrip('.')}." if text else ""
