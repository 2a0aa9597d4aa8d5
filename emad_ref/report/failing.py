"""Why a run fails as a whole although each of its tests may have passed, read from what it found.

``demanded``  what options asked of the whole: a kind of claim decided, a gate asked, a verdict compared, no golden new.
``decided``   what a decoder must not leave open, and whose it must have been.

Read from the report alone (``report.reading``), so that it can be asked of reports that were put together, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from emad_ref.report.missing import Missing, another, missing, waived
from emad_ref.report.reading import Report
from emad_ref.report.unasked import LEFT_OUT
from emad_ref.verdict.claims import Claim
from emad_ref.verdict.gating import UNDECIDED
from emad_ref.verdict.known import nothing_compared


def demanded(report: Report, register: Mapping[str, Claim]) -> list[str]:
    """One reason each. ``register``: as the run had it."""
    settings, reasons = report["settings"], []
    if any(entry["outcome"] in ("added", "changed") for entry in report["goldens"]):
        reasons.append("goldens updated, read the diff and run again")
    decided = {register[claim["id"]].requires for claim in report["claims"] if claim["verdict"] not in UNDECIDED}
    compared = any(entry["expected"] is not None for entry in report["known"])
    if compared or any(entry["outcome"] == "read" for entry in report["goldens"]):
        decided |= {"golden"}  # type: ignore[arg-type]  # a word of --emad-require, of no claim
    for word in sorted(set(settings["require"]) - decided):
        reasons.append(f"--emad-require {word}: no claim that needs it was decided in this run")
    if settings["gate"] == "known" and not settings["update_golden"] and (reason := nothing_compared(report["known"])):
        reasons.append(reason)
    return [*reasons, *_gates_left_out(report, register)]


def _gates_left_out(report: Report, register: Mapping[str, Claim]) -> Iterator[str]:
    """A gate that nobody asked is not green for ``--emad-require``: one reason each to fail the run."""
    settings = report["settings"]
    left = dict.fromkeys(entry["claim"] for entry in report["deselected"] if entry["why"] == LEFT_OUT)
    for name in left:
        row = register.get(name)
        if row is not None and row.requires in settings["require"] and row.gates(settings["gate_claims"]):
            yield f"--emad-require {row.requires}: {name} gates, and was {LEFT_OUT}"


def decided(report: Report, shipped: Sequence[str]) -> tuple[list[str], list[Missing]]:
    """(reasons, gaps): not decided is not green. ``gaps``: all there are, waived or not.

    ``shipped``: names of the tests that this version ships.
    """
    waivers = [waiver["of"] for waiver in report["waivers"]]
    gaps = missing(report, report["run"]["asked"], shipped)
    reasons = [str(gap) for gap in gaps if not waived(gap, waivers)]
    wanted = report["settings"]["expect_decoder"]
    if wanted is not None and (found := another(report, wanted)):
        reasons.append(f"--emad-expect-decoder {wanted}: {found}")
    return reasons, gaps
