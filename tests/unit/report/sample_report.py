"""A small report with every kind of entry."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from pytest_emad.report.schema import write_report
from pytest_emad.statistics.verdicts import Leg, Verdict, load_register

PARETO = [
    {"family": "EMAD", "net reduction %": 0.3, "rise %": 0.004},
    {"family": "EMAD", "net reduction %": 0.5, "rise %": 0.02},
    {"family": "truncation", "net reduction %": 0.4, "rise %": 3.0},
]
MARGINS = [
    {
        "point": name,
        "put forward as": role,
        "corpus": "text",
        "margin, nats": margin,
        "mean depth": depth,
        "net reduction %": saved,
        "perplexity": perplexity,
        "rise %": rise,
        "rise low %": low,
        "rise high %": high,
        "probes": [2] if margin is not None else [],
        "thresholds, nats": [1.5 - margin] if margin is not None else [],
    }
    for name, role, margin, depth, saved, perplexity, rise, low, high in (
        ("full depth", "", None, 4.0, 0.0, 8.0, 0.0, None, None),
        ("emad m=0.50", "chosen on validation", 0.5, 3.0, 0.2, 8.04, 0.005, 0.004, 0.006),
        ("emad m=0.00", "calibrated default", 0.0, 2.5, 0.4, 8.24, 0.03, 0.02, 0.04),
    )
]
TOKENS = [
    {"token": "Once", "part": "prompt", "depths": [], "instead": [], "entropy, nats": []},
    {
        "token": " upon",
        "part": "continuation",
        "depths": [4, 4, 2],
        "instead": [None, None, " more"],
        "entropy, nats": [1.25],
    },
    {
        "token": "\n",
        "part": "continuation",
        "depths": [4, 2, 2],
        "instead": [None, None, None],
        "entropy, nats": [0.5],
    },
]
TURNS = [
    {"token": token, "part": part, "model": model, "entropy, bits": entropy, "rolling, bits": rolling}
    | {"threshold, bits": 1.0}
    for token, part, model, entropy, rolling in (
        ("Q", "prompt", "large", None, None),
        (" A", "continuation", "large", 1.5, 1.5),
        (" B", "continuation", "small", 0.0, 0.75),
    )
]
MOVING = [
    {"title": "margins on text", "model": "m", "rows": MARGINS, "figure": "depth by margin"},
    {"title": "a text", "model": "m", "rows": TOKENS, "figure": "depth by token"},
    {"title": "a text of recall", "model": "s + m", "rows": TURNS, "figure": "model by token"},
]
SAVING = [
    {
        "family": family,
        "kind": kind,
        "point": f"{family} {saved}",
        "rise %": rise,
        "net reduction %": saved,
        "blocks %": 1.5 * saved,
    }
    for family, kind, saved, rise in (
        ("gate", "criterion", 0.3, 0.0095),
        ("gate", "criterion", 0.0, 0.0),
        ("gate", "criterion", 0.4, 0.05),
        ("oracle", "ceiling", 0.0, 0.0),
        ("oracle", "ceiling", 0.35, 0.008),
        ("oracle", "ceiling", 0.5, 0.06),
    )
]
LEGS = (
    Leg("world:premise", "falsified", 0.03125, (0.0211, 0.0419), 200, 0.01, "relative rise", "", 0.00012, 0.99988),
    Leg("recall", "unmeasured", None, None, 0, None, "accuracy drop", "no items"),
)


def verdict(outcome: str = "falsified", claim: str = "EMAD-F1", model: str = "m", **changes: Any) -> dict[str, Any]:
    numbers = {"estimate": 0.03125, "interval": (0.0211, 0.0419), "n": 1234, "threshold": 0.01} | changes
    reason = numbers.pop("reason", "1 of 2 legs falsified")
    legs = numbers.pop("legs", LEGS)
    numbers = {"deciding": 0 if legs and "estimate" not in changes else None} | numbers
    gate = claim == "EMAD-F1"
    made = Verdict(claim, model, outcome, unit="relative rise", reason=reason, legs=legs, **numbers)
    row = load_register().get(claim)
    return made.to_json() | {
        "title": row.display_title if row else "",
        "gate": gate,
        "fails": gate and outcome == "falsified",
        "test": "",
    }


SETTINGS = {
    "models": ["m"],
    "budget": "smoke",
    "seed": 0,
    "tasks": ["recall", "count"],
    "margin": None,
    "only": [],
    "gate": "paper",
    "gate_claims": [],
    "inconclusive": "warn",
    "require": [],
    "update_golden": False,
    "tier": None,
    "expect_decoder": None,
    "report": None,
}
RUN = {
    "started": "2026-01-02T03:04:05+00:00",
    "duration_s": 61.5,
    "command": ["pytest", "suites"],
    "addopts": "",
    "exit_status": 0,
    "failures": [],
    "asked": ["suites"],
    "partial": "",
    "replay": {"folder": "/work", "arguments": ["suites"], "left_out": [], "environment": {}},
    "earlier": 0,
    "claims_file": None,
    "project": {"root": "/work", "commit": None},
}
OURS = {
    "name": "reference (ours)",
    "plugin": "emad-walked",
    "foreign": False,
    "answered": 3,
    "declined": 0,
    "none": 0,
    "features": {},
}


def report(model: str = "m", **changes: Any) -> dict[str, Any]:
    """Return the content of ``report.json``: a run of no test. ``changes`` replace parts, and single settings."""
    settings = SETTINGS | {"models": [model]} | changes.pop("settings", {})
    return {
        "state": "complete",
        "run": deepcopy(RUN),
        "decoder": {"name": OURS["name"], "foreign": False, "providers": [dict(OURS)], "overlooked": []},
        **{part: [] for part in ("tests", "audits", "repeats", "deselected", "waivers", "known")},
        "models": [{"name": model, "fingerprint": "f00d", "layers": 12}],
        "settings": settings,
        "points": [
            {
                "model": model,
                "name": "emad m=0.20",
                "digest": "0123456789ab",
                "mean_depth": 7.254321,
                "depth_p50": 4,
                "depth_p90": 12,
                "net_reduction": 0.3124567,
                "perplexity_reference": 1.42923,
                "perplexity": 1.44711,
                "perplexity_rise": 0.0125103,
                "interval": [0.0111, 0.0142],
                "accuracy": {"recall": [0.9, 0.8825]},
                "time_ratio": {"1": 1.23456},
            }
        ],
        "claims": [
            verdict("falsified", model=model),
            verdict("survived", "EMAD-E1", model, legs=()),
            verdict("inconclusive", "EMAD-R2", model, estimate=None, interval=None, n=0, threshold=None),
        ],
        "tables": [
            {"title": "equal FLOPs", "model": model, "rows": PARETO, "figure": "pareto"},
            {"title": "probe stride", "model": model, "rows": [{"stride": 2, "rise %": 0.01234, "recall": None}]},
        ],
        "goldens": [{"id": "tokens/m", "outcome": "read"}],
        "notes": ["the baseline sleeps"],
        "provenance": {
            "versions": {"pytest-emad": "0.2", "torch": "2.11", "numpy": "2.1"},
            "commit": None,
            "seed": 0,
            "device": "cpu",
        },
    } | changes


def written(folder: Path, data: dict[str, Any]) -> Path:
    """Return ``folder`` with ``data`` as its report.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_report(folder, data)
    return folder


def foreign_report(model: str = "m", **changes: Any) -> dict[str, Any]:
    """Return ``report`` of a foreign decoder, with an entry of every kind and without gaps."""
    provider = {"name": "hook of plugin mylib (mylib)", "plugin": "mylib", "foreign": True}
    decoder = {
        "name": provider["name"],
        "foreign": True,
        "providers": [provider | {"answered": 3, "declined": 0, "none": 0, "features": {}}],
        "overlooked": [],
    }
    entries = {
        "decoder": decoder,
        "tests": [passed("suites/invariants/test_depth.py::test_rows")],
        "audits": [{"test": "t", "check": "rows", "passed": None, "detail": "no power", "n": 3, "ties": 0}],
        "deselected": [{"nodeid": "suites/a.py::test_b", "shipped": None, "claim": None, "why": "deselected"}],
        "waivers": [{"of": "EMAD-F2", "reason": "no sessions yet", "needed": True}],
    }
    return report(model, **entries | changes)


def passed(name: str, **changes: Any) -> dict[str, Any]:
    """Return the entry of a passed shipped test."""
    entry = {"nodeid": f"{name}[m]", "shipped": name, "outcome": "passed", "kind": "", "reason": "", "duration_s": 0.5}
    return entry | changes
