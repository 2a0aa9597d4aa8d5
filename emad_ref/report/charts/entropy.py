"""Entropy by depth: mean entropy after each layer, and the targets of the probes."""

from __future__ import annotations

from emad_ref.report import forms
from emad_ref.report.charts.drawing import Chart, Mark, Series, plain, rows_of
from emad_ref.report.reading import Report


def entropy_by_depth(report: Report, model: str) -> Chart | None:
    """Where the profile is flat, a threshold on entropy says little of depth."""
    rows = [row for row in rows_of(report, model, "entropy profile") if row["mean entropy, nats"] is not None]
    if not rows:
        return None
    profile = [
        Mark(
            row["layer"],
            row["mean entropy, nats"],
            f"layer {row['layer']}",
            [
                ("mean entropy", f"{forms.number(row['mean entropy, nats'])} nats"),
                ("agrees with the last layer", forms.percent(row["agrees with last %"])),
            ],
        )
        for row in rows
    ]
    targets = [
        Mark(
            row["layer"],
            row["target, nats"],
            f"target of the probe at layer {row['layer']}",
            [("target", f"{forms.number(row['target, nats'])} nats")],
        )
        for row in rows
        if row["target, nats"] is not None
    ]
    series = [
        Series("mean entropy", profile),
        *([Series("target of a probe", targets, joined=False)] if targets else []),
    ]
    marks = [*profile, *targets]
    return plain(
        f"{model}: entropy against depth",
        "What the model is still unsure of after each layer. A token leaves at the first probe where its own entropy "
        "has fallen to the target less the margin.",
        ("layer", "entropy, nats"),
        series,
        marks,
    )
