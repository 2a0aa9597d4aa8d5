"""Gates: a verdict in a line or two, and its effect on a run: fail, warn, or none.

A message is built from the form in ``report.json``, so a failing test, the summary of its run and a later reader show
the same text. pytest and the ``emad`` command share the rules:

- gate ``paper``: the row gates (register, or named by the user) and is falsified, or is inconclusive and that fails;
- gate ``decoder``: the same for the rows that depend on the decoder; ``METHOD_ROWS`` are reported and do not gate
  (``pytest_emad.run.options.load_claims_register`` sets this in the run's register);
- gate ``known``: the verdict is none of those on record for such a run (``goldens``);
- ``require``: the row needs a required kind and is ``not applicable`` or ``unmeasured``.

Standard library only.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_emad.statistics.goldens import MACHINE_BOUND, AcceptedOutcomes
from pytest_emad.statistics.number_format import format_quantity, format_requirement
from pytest_emad.statistics.verdicts import Claim, Outcome, Verdict


def claim_title(claim: Mapping[str, Any], register: Mapping[str, Claim]) -> str:
    """The claim in plain words: the report's own, else the register's; "" if neither has the row."""
    row = register.get(claim["id"])
    return str(claim.get("title") or (row and row.display_title) or "")


MAX_TITLES, MAX_IDS = 2, 12  # claims to name in a sentence by title, and by id beside their number


def format_claim_names(ids: Sequence[str], register: Mapping[str, Claim]) -> str:
    """Claims for a sentence: titles with ids, of more than ``MAX_TITLES`` their number and ids.

    >>> format_claim_names(["MY-1", "MY-2", "MY-3"], {})
    '3 claims (MY-1, MY-2, MY-3)'
    """
    if len(ids) > MAX_TITLES:
        return f"{len(ids)} claims" + (f" ({', '.join(ids)})" if len(ids) <= MAX_IDS else "")
    titles = [claim_title({"id": name}, register) for name in ids]
    named = [f'"{title}" ({name})' if title else f"claim {name}" for name, title in zip(ids, titles, strict=True)]
    return " and ".join(named)


def format_measurement_and_requirement(claim: Mapping[str, Any]) -> str:
    """``found … ; needs at most …``; without an estimate, the reason for its absence.

    A check without a threshold that falsified the claim counts what it compared: its reason is the result.
    """
    if claim["estimate"] is None:
        return str(claim["reason"])
    if claim["verdict"] == "falsified" and claim["threshold"] is None and (leg := find_deciding_leg(claim)):
        return str(leg["reason"] or claim["reason"])
    needs = format_requirement(claim)
    result = f"found {format_quantity(claim['estimate'], claim['unit'], claim['interval'])}"
    return result + (f"; needs {needs}" if needs else "")


def deciding_leg_name(claim: Mapping[str, Any]) -> str:
    """The name of the leg whose number the claim reports; "" without a number, whose reason names the leg."""
    leg = find_deciding_leg(claim)
    return "" if leg is None or claim["estimate"] is None else str(leg["name"])


def describe_deciding_leg(claim: Mapping[str, Any]) -> str:
    """``deciding_leg_name``; of a falsified claim with what the leg's number is, ``NAME: REASON``."""
    name, leg = deciding_leg_name(claim), find_deciding_leg(claim)
    said = leg["reason"] if name and leg and claim["verdict"] == "falsified" and claim["threshold"] is not None else ""
    return ": ".join(filter(None, (name, said)))


def find_deciding_leg(claim: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The leg that decided the claim (``Verdict.deciding``); None for a claim that no leg decides."""
    leg: Mapping[str, Any] | None = None if claim["deciding"] is None else claim["legs"][claim["deciding"]]
    return leg


def format_claim_heading(claim: Mapping[str, Any], title: str) -> str:
    """``EMAD-F1, "Saving 15 % of FLOPs leaves quality as it was": falsified on emad-tiny``."""
    named = f'{claim["id"]}, "{title}"' if title else str(claim["id"])
    return f"{named}: {claim['verdict']} on {claim['model']}"


GATES: tuple[str, ...] = ("paper", "decoder", "known")
METHOD_ROWS = frozenset(
    {"EMAD-F1", "EMAD-F2"}
)  # cost and saving of exits on a model: they do not depend on the decoder
INCONCLUSIVE: tuple[str, ...] = ("warn", "fail")
REQUIREMENTS: tuple[str, ...] = ("energy", "speed", "quality", "golden")

WIDTH = 80  # letters in a line of a message, which appears in logs and on terminals
UNDECIDED: tuple[Outcome, Outcome] = ("not applicable", "unmeasured")


@dataclass(frozen=True)
class GateOptions:
    """Options of the gate.

    ``inconclusive``: effect of an inconclusive gating row. ``require``: words of ``REQUIREMENTS``.
    """

    gate: Literal["paper", "decoder", "known"] = "paper"
    inconclusive: Literal["warn", "fail"] = "warn"
    require: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GateMessages:
    """Effect of a verdict. ``failure`` and ``warning`` are messages of a few lines, empty without one."""

    failure: str = ""
    warning: str = ""


def build_gate_messages(
    verdict: Verdict, claim: Claim, is_gating: bool, gating: GateOptions, expected: AcceptedOutcomes | None
) -> GateMessages:
    """Apply requirement, gate and known verdict. ``is_gating``: whether the row gates in this run.

    ``expected`` is the record, None without one. Rows on time and energy never have one.
    """
    message = describe_verdict(verdict, claim)
    if verdict.verdict in UNDECIDED and claim.requires in gating.require:
        return GateMessages(f"{message}\n--emad-require {claim.requires} asks for a decision.")
    if gating.gate == "known":
        if expected is not None and verdict.verdict not in expected.outcomes:
            return GateMessages(
                f"{message}\nThe verdict on record is {expected.label}: gate known fails on any change."
            )
        if expected is None and "golden" in gating.require and claim.requires not in MACHINE_BOUND:
            return GateMessages(f"{message}\nNo verdict is on record for it, and golden is required.")
        return GateMessages()
    if not is_gating:
        return GateMessages()
    if verdict.verdict == "falsified":
        return GateMessages(f"{message}\nThis row gates.")
    if verdict.verdict == "inconclusive":
        if gating.inconclusive == "fail":
            return GateMessages(f"{message}\nThis row gates, and --emad-inconclusive fail is set.")
        return GateMessages(warning=message)
    return GateMessages()


def describe_verdict(verdict: Verdict, claim: Claim) -> str:
    """The summary's line as a message: claim and outcome, measured and required value, then the reason."""
    data = verdict.to_json()
    result, why = format_measurement_and_requirement(data), verdict.reason if verdict.estimate is not None else ""
    result = "" if result in why else result  # holds a check's reason
    lines = [
        format_claim_heading(data, claim_title(data, {claim.id: claim})),
        _with_full_stop(result),
        _with_full_stop(why),
    ]
    return "\n".join(textwrap.fill(line, WIDTH, break_long_words=False) for line in lines if line)


def _with_full_stop(text: str) -> str:
    return f"{text.rstrip('.')}." if text else ""
