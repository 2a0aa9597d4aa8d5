"""EAD-A1, EAD-A2: what do the rolling window and the minimum duration do to large-model share and score?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from emad_ref.verdict.interval import accuracy_drop
from emad_ref.verdict.legs import counted, estimated, not_applicable, row
from pytest_emad.pairing import CORPUS, table_row

# claim → field of the rule, its values, the symbol
SWEEPS = {
    "EAD-A1": ("window", (1, 2, 5, 10, 20), "w"),
    "EAD-A2": ("least_run", (1, 5, 10, 20, 40), "d_min"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.emad(claim=name)) for name in SWEEPS])
def test_effect_of_one_constant(name, emad_pair, emad_record, emad_register):
    """All else stays as in the rule put forward; validation items, against the paper's own value of the constant."""
    pair, claim = emad_pair, emad_register[name]
    with emad_record.unless_unsupported(claim.id, pair.name):
        if reason := pair.premise():
            verdict = not_applicable(claim, pair.name, reason)
        else:
            task, (field, values, symbol) = pair.tasks[0], SWEEPS[name]
            base = pair.put_forward(task)
            runs = {v: pair.switched(replace(base, **{field: v}), task, "validate", pair.size.tried) for v in values}
            own = pair.switched(base, task, "validate", pair.size.tried)
            emad_record.table(
                f"{symbol} on {task}", pair.name, [table_row(f"EAD, {symbol} = {v}", run) for v, run in runs.items()]
            )
            legs = []
            for value, run in runs.items():
                leg = f"{task}, {symbol} = {value}"
                legs += [
                    estimated(f"{leg}: score lost", accuracy_drop(own.right, run.right, threshold=0.0)),
                    counted(f"{leg}: large-model share", run.large_share, len(run.right), "share of tokens"),
                ]
            verdict = row(claim, pair.name, legs)
        emad_record.claim(verdict, corpus=CORPUS, fingerprint=pair.fingerprint)
