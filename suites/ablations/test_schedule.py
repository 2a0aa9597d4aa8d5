"""Schedule: what does the same rule cost and save with and without monotone depth? (EMAD, "Ablations")"""

from __future__ import annotations

from dataclasses import replace

import pytest

from emad_ref.protocol import Unsupported
from emad_ref.sweep.grids import CHUNKS, positional
from emad_ref.sweep.losses import loss_table
from emad_ref.sweep.select import equal_flops
from pytest_emad.ablated import UNTIMED, Openings, Table, margins, not_applicable, points, speeds

FREE = {"eager backfill": "free_eager", "deferred fill": "free_deferred"}
TEXTS = ("evaluation split", "openings")
TIMED = ("monotone", *FREE, "chunks of 8", "positional")


@pytest.mark.emad(budget="standard", measures=True)
def test_schedule(emad_evidence, emad_record, emad_rng):
    """Speed at m = 0 only. Copies have to be decoded, on shorter text, with monotone and free depth on it beside."""
    evidence = emad_evidence
    if reason := not_applicable(evidence):
        pytest.skip(reason)
    rules = points(evidence.profile, margins(evidence))
    tried = {rule.margin_nats: schedules(evidence, rule) for rule in rules}
    copying = replace(rules[0], name=f"{rules[0].name} copying", schedule="copying")
    named = {name: point for name, point in tried[rules[0].margin_nats].items() if name in TIMED}
    times = speeds(evidence, named | {"state copying": copying})
    table, rows = Table(evidence, emad_rng), []
    for margin, named in tried.items():
        for name, point in named.items():
            rows += [row | timed(times, name, margin) for row in table.rows([point], schedule=name, text=TEXTS[0])]
    openings = Openings(evidence)
    for name in ("monotone", "eager backfill"):
        rows.append(on_openings(name, openings.replayed(tried[rules[0].margin_nats][name])))
    try:
        copied = openings.decoded(copying)
    except Unsupported as refusal:
        emad_record.note(f"{evidence.name}: state copying: not applicable ({refusal})")
    else:
        rows.append(on_openings("state copying", copied) | times["state copying"])
    emad_record.table(f"ablation, schedule on {evidence.corpus}", evidence.name, rows)
    held_to_their_repair(evidence, rows)


def schedules(evidence, rule):
    """The rule under each schedule that replay knows; positional depth has none and meets the rule's saving instead."""
    rest = {name: replace(rule, name=f"{rule.name} {name}", schedule=schedule) for name, schedule in FREE.items()}
    chunks = {
        f"chunks of {period}": replace(rule, name=f"{rule.name}, chunks of {period}", schedule="chunked", period=period)
        for period in CHUNKS
    }
    geometry = evidence.loaded.geometry
    (mine,) = loss_table(evidence.validation, geometry, [rule])
    falls = loss_table(evidence.validation, geometry, positional(rule.layers))
    best = equal_flops(falls, mine.net_reduction)  # chosen on validation, as every point of this project
    return {"monotone": rule, **rest, **chunks, **({} if best is None else {"positional": best.point})}


def timed(times, name, margin):
    return times[name] if margin == 0 and name in times else UNTIMED


def on_openings(name, row):
    return {"schedule": name, "text": TEXTS[1], **row, "rise interval %": None, **UNTIMED}


def held_to_their_repair(evidence, rows):
    """Backfill runs every block but the last's of tokens that stopped: no more than a layer's share can be saved."""
    on = {(row["schedule"], row["point"]): row for row in rows if row["text"] == TEXTS[0]}
    eager = [row for (name, _), row in on.items() if name == "eager backfill"]
    monotone = [row for (name, _), row in on.items() if name == "monotone"]
    assert all(row["gross reduction %"] <= 1 / evidence.stepper.layers for row in eager)
    assert all(row["net reduction %"] <= row["gross reduction %"] for row in [*eager, *monotone])
    for bound, free in zip(monotone, eager, strict=True):
        assert free["mean depth"] >= bound["mean depth"], "monotone depth is a minimum over the tokens before"
        assert free["net reduction %"] <= bound["net reduction %"]
