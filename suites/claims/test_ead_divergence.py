"""EAD-A3, EAD-A4: which decisive tokens go to the small model, and would entropy serve better inside speculation?"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from emad_ref.decoding.switching import SMALL
from emad_ref.verdict.interval import accuracy_drop, mean_rate
from emad_ref.verdict.legs import counted, estimated, not_applicable, row
from pytest_emad.pairing import CORPUS, described, table_row

WIDTHS = (2, 8)  # k
GATES = (None, 1.0)  # quantiles of the drafts' entropies: nothing refused is kept; everything is


@pytest.mark.emad(claim="EAD-A3")
def test_decisive_tokens_of_the_small_model(emad_pair, emad_record, emad_register, emad_rng):
    """A token is decisive where its own entropy reaches τ, whatever the window says; right is the large model's greedy
    choice after the same history."""
    pair, claim = emad_pair, emad_register["EAD-A3"]
    with emad_record.unless_unsupported(claim.id, pair.name):
        if reason := pair.premise():
            verdict = not_applicable(claim, pair.name, reason)
        else:
            task = pair.tasks[0]
            rule = pair.put_forward(task)
            verdict = row(claim, pair.name, decisive(pair, task, rule, emad_rng))
        emad_record.claim(verdict, corpus=CORPUS, fingerprint=pair.fingerprint)


def decisive(pair, task, rule, rng):
    (run,) = pair.judged(rule, task).runs
    agrees = pair.agreement(run, pair.items(task, "evaluate", pair.size.judged))
    rows = list(zip(run.entropy_bits, run.model, agrees, strict=True))

    def per_item(chosen):
        return np.array(
            [int(chosen(bits >= rule.threshold_bits, model == SMALL, same).sum()) for bits, model, same in rows]
        )

    high, high_small = per_item(lambda high, small, same: high), per_item(lambda high, small, same: high & small)
    wrong = per_item(lambda high, small, same: high & small & ~same)
    calm, calm_wrong = (
        per_item(lambda high, small, same: ~high & small),
        per_item(lambda high, small, same: ~high & small & ~same),
    )
    name = f"{task}, {described(rule)}"
    return [
        rate_leg(f"{name}: decisive tokens emitted by the small model", high_small, high, rng),
        rate_leg(f"{name}: of them another than the large model's", wrong, high_small, rng),
        rate_leg(f"{name}: of its other tokens another than the large model's", calm_wrong, calm, rng),
    ]


def rate_leg(name, part, whole, rng):
    """Σ part / Σ whole with its interval over items; without one where every item has the same."""
    seen, unit = whole > 0, "share of tokens"
    if not seen.any():
        return replace(counted(name, 0, 0, unit, "there is no such token"), estimate=None)
    estimate = mean_rate(part[seen].astype(float), whole[seen], threshold=0.0, rng=rng, unit=unit)
    if estimate.low == estimate.high:
        return counted(name, estimate.value, estimate.n, unit, "the same in every item: there is no spread")
    why = "" if math.isfinite(estimate.low) else "too few items differ to bound it"
    return estimated(name, estimate, why)


@pytest.mark.emad(claim="EAD-A4")
def test_gated_acceptance_at_equal_share(emad_pair, emad_record, emad_register):
    """Of all widths and gates the one of highest validation score that leaves the large model no more tokens than EAD.

    A speculated token counts as the large model's where no draft stands for it. The verifier reads every draft all the
    same: FLOPs stand in the table.
    """
    pair, claim = emad_pair, emad_register["EAD-A4"]
    with emad_record.unless_unsupported(claim.id, pair.name):
        if reason := pair.premise():
            verdict = not_applicable(claim, pair.name, reason)
        else:
            task = pair.tasks[0]
            rule = pair.put_forward(task)
            verdict = row(claim, pair.name, gated_against_switching(pair, task, rule, emad_record))
        emad_record.claim(verdict, corpus=CORPUS, fingerprint=pair.fingerprint)


def gated_against_switching(pair, task, rule, record):
    tried = {
        (k, gate): pair.speculated(task, "validate", pair.size.tried, k=k, gate_bits=gate, padded=True)
        for k, gate in product(WIDTHS, gates_bits(pair, task))
    }
    allowed = pair.switched(rule, task, "validate", pair.size.tried).large_share
    within = {option: run for option, run in tried.items() if run.large_share <= allowed}
    if not within:
        return [
            counted(f"{task}: no gate leaves the large model as little", allowed, pair.size.tried, "share of tokens")
        ]
    k, gate = max(within, key=lambda option: (within[option].score, -(option[1] or 0.0)))
    gated = pair.speculated(task, "evaluate", pair.size.judged, k=k, gate_bits=gate)
    switched = pair.judged(rule, task)
    name = f"speculative, k = {k}" + ("" if gate is None else f", gate {gate:.3g} bits")
    record.table(
        f"entropy where speculation diverges, {task}",
        pair.name,
        [table_row(name, gated), table_row(f"EAD, {described(rule)}", switched)],
    )
    lost, n = accuracy_drop(switched.right, gated.right, threshold=0.0), len(gated.right)
    return [
        estimated(f"{task}: score lost by {name} against EAD", lost),
        counted(f"{task}: {name}: large-model share", gated.large_share, n, "share of tokens"),
        counted(f"{task}: EAD: large-model share", switched.large_share, n, "share of tokens"),
    ]


def gates_bits(pair, task):
    """Gates from the drafts' entropies on validation; beyond the largest nothing is refused."""
    drawn = np.concatenate(
        [run.drafts.entropy_bits for run in pair.speculated(task, "validate", pair.size.tried, padded=True).runs]
    )
    return [None if share is None else math.nextafter(float(np.quantile(drawn, share)), math.inf) for share in GATES]
