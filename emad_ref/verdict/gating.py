"""What a verdict does to whoever asked: whether it fails a run, warns, or neither. The same for pytest and ``emad``.

- gate ``paper``: the row gates (register, or named by the user) and is falsified, or is inconclusive where that fails;
- gate ``decoder``: the same for the rows that a decoder can help; ``OF_THE_METHOD`` are reported and do not gate;
- gate ``known``: the verdict is none of those on record for such a run (``known``);
- ``require``: the row needs a required kind and is ``not applicable`` or ``unmeasured``.

Standard library only.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

from emad_ref.verdict.claims import Claim, Outcome, Verdict
from emad_ref.verdict.known import MACHINE_BOUND, Expected
from emad_ref.verdict.sentence import heading, measurement, title_of

GATES: tuple[str, ...] = ("paper", "decoder", "known")
OF_THE_METHOD = frozenset({"EMAD-F1", "EMAD-F2"})  # what exits cost and save on a model: no decoder can help it
INCONCLUSIVE: tuple[str, ...] = ("warn", "fail")
REQUIREMENTS: tuple[str, ...] = ("energy", "speed", "quality", "golden")

WIDTH = 80  # letters in a line of a message, which goes into logs as well as onto terminals
UNDECIDED: tuple[Outcome, Outcome] = ("not applicable", "unmeasured")


@dataclass(frozen=True)
class Gating:
    """``inconclusive``: what an inconclusive gating row does. ``require``: words of ``REQUIREMENTS``."""

    gate: Literal["paper", "decoder", "known"] = "paper"
    inconclusive: Literal["warn", "fail"] = "warn"
    require: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Consequence:
    """``failure`` and ``warning`` are messages of a few lines, empty when there is nothing to say."""

    failure: str = ""
    warning: str = ""


def consequence(verdict: Verdict, claim: Claim, gating: Gating, expected: Expected | None) -> Consequence:
    """Apply requirement, gate and known verdict; ``verdict.gate`` already says whether the row gates.

    ``expected``: what is on record, None where nothing is. Rows on time and energy never are: nothing is asked of them.
    """
    said = describe(verdict, claim)
    if verdict.verdict in UNDECIDED and claim.requires in gating.require:
        return Consequence(f"{said}\n--emad-require {claim.requires} asks for a decision.")
    if gating.gate == "known":
        if expected is not None and verdict.verdict not in expected.outcomes:
            return Consequence(f"{said}\nThe verdict on record is {expected.said}: gate known fails on any change.")
        if expected is None and "golden" in gating.require and claim.requires not in MACHINE_BOUND:
            return Consequence(f"{said}\nNo verdict is on record for it, and golden is required.")
        return Consequence()
    if not verdict.gate:
        return Consequence()
    if verdict.verdict == "falsified":
        return Consequence(f"{said}\nThis row gates.")
    if verdict.verdict == "inconclusive":
        if gating.inconclusive == "fail":
            return Consequence(f"{said}\nThis row gates, and --emad-inconclusive fail is set.")
        return Consequence(warning=said)
    return Consequence()


def describe(verdict: Verdict, claim: Claim) -> str:
    """The line of the summary, as a message: claim and outcome, what was found and what it needs, then why."""
    told = verdict.to_json()
    found, why = measurement(told), verdict.reason if verdict.estimate is not None else ""
    lines = [heading(told, title_of(told, {claim.id: claim})), _ended(found), _ended(why)]
    return "\n".join(textwrap.fill(line, WIDTH, break_long_words=False) for line in lines if line)


def _ended(text: str) -> str:
    return f"{text.rstrip('.')}." if text else ""
