"""What opens the page: whose decoder and which models, each gate in plain words, what else fails a run, and a count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emad_ref.report import forms
from emad_ref.report.reading import Report
from emad_ref.verdict.claims import OUTCOMES, load_register
from emad_ref.verdict.numbers import needed
from emad_ref.verdict.sentence import title_of

PLAIN = {
    "survived": "holds",
    "falsified": "does not hold",
    "inconclusive": "cannot be told from this much data",
    "measured": "measured, nothing to decide",
    "not applicable": "does not apply here",
    "unmeasured": "was not measured",
}
OURS = "the reference decoder of this package"


@dataclass(frozen=True)
class Gate:
    """``needs``: threshold and good side in words, "" where the row has none; the other fields are texts as shown."""

    claim: str
    model: str
    title: str
    verdict: str
    plain: str
    found: str
    interval: str
    needs: str
    unit: str
    reason: str


@dataclass(frozen=True)
class Opening:
    """``decoder`` and ``models`` in words; ``failures`` of the run as a whole; ``waivers``; ``rest``: of the rows that
    do not gate, how many of each outcome."""

    decoder: str
    models: list[str]
    state: str
    gates: list[Gate]
    failures: list[str]
    waivers: list[str]
    rest: list[tuple[str, str, int]]


def opening(report: Report) -> Opening:
    """Of one run; a report of schema 1 says nothing of decoder, state, failures and waivers."""
    later = report["schema"] > 1
    return Opening(
        decoder=_decoder(report["decoder"]) if later else "",
        models=[_model(model) for model in report["models"]],
        state=_state(report) if later else "",
        gates=[gate(claim) for claim in report["claims"] if claim["gate"]],
        failures=list(report["run"]["failures"]) if later else [],
        waivers=[_waiver(waiver) for waiver in report["waivers"]] if later else [],
        rest=_rest(report["claims"]),
    )


def gate(claim: Mapping[str, Any]) -> Gate:
    """One gating verdict."""
    register, said = load_register(), forms.answered(claim)
    return Gate(
        claim=claim["id"],
        model=claim["model"],
        title=title_of(claim, register),
        verdict=claim["verdict"],
        plain=PLAIN[claim["verdict"]],
        found=said["estimate"],
        interval=said["[95 %]"],
        needs=needed(claim),
        unit=claim["unit"],
        reason=claim["reason"],
    )


def _model(model: Mapping[str, Any]) -> str:
    facts = [f"{model['layers']} layers"] if "layers" in model else []
    facts += [str(model[key]) for key in ("family", "dtype", "device") if isinstance(model.get(key), str)]
    return f"{model['name']} ({', '.join(facts)})" if facts else str(model["name"])


def _decoder(decoder: Mapping[str, Any]) -> str:
    return str(decoder["name"]) if decoder["foreign"] else f"{OURS} ({decoder['name']})"


def _state(report: Report) -> str:
    status = report["run"]["exit_status"]
    ended = "" if status is None else ", exit status 0: nothing failed" if status == 0 else f", exit status {status}"
    return f"{report['state']}{ended}"


def _waiver(waiver: Mapping[str, Any]) -> str:
    return f"{waiver['of']}: {waiver['reason']}" + ("" if waiver["needed"] else " (not needed in this run)")


def _rest(claims: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    found = [claim["verdict"] for claim in claims if not claim["gate"]]
    return [(outcome, PLAIN[outcome], found.count(outcome)) for outcome in OUTCOMES if outcome in found]
