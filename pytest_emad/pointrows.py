"""Rows of the operating-point table, and the sentences that a reader needs beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from emad_ref.replay import depths
from emad_ref.sweep.losses import Loss, depth_by_position, tokens_before
from emad_ref.sweep.select import equal_flops
from emad_ref.verdict.claims import Verdict
from pytest_emad.recording import Recorder

if TYPE_CHECKING:
    from pytest_emad.session import Evidence

COLLAPSED = 0.9  # share of tokens at the first probe from which depth no longer adapts to anything


def report_points(evidence: Evidence, record: Recorder, verdict: Verdict) -> None:
    """Put full depth, the points put forward and the best truncation at equal net FLOPs on record."""
    intervals = {leg.name: leg.interval for leg in verdict.legs}
    rows = [
        (evidence.full_loss, evidence.scored.accuracy(evidence.full)),
        *((loss, evidence.scored.accuracy(loss.point)) for loss in evidence.losses),
    ]
    rivals = [
        equal_flops(evidence.truncation_sweep, loss.net_reduction) for loss in evidence.losses if loss.net_reduction > 0
    ]
    rows += [(rival, {}) for rival in dict.fromkeys(r for r in rivals if r is not None)]
    for loss, accuracy in rows:
        interval = intervals.get(f"{loss.point.name}: perplexity on {evidence.corpus}")
        record.point(
            {
                "model": evidence.name,
                "name": loss.point.name,
                "family": loss.point.family,
                "corpus": evidence.corpus,
                "window_tokens": evidence.window,
                "mean_depth": loss.mean_depth,
                "depth_p50": loss.depth_p50,
                "depth_p90": loss.depth_p90,
                "depth_shares": {str(depth): share for depth, share in loss.depth_shares.items()},
                "depth_by_position": depth_by_position(evidence.evaluation, depths(evidence.evaluation, loss.point)),
                "flop_evidence": evidence.flop_evidence,
                "gross_reduction": loss.gross_reduction,
                "net_reduction": loss.net_reduction,
                "perplexity_reference": evidence.full_loss.perplexity,
                "perplexity": loss.perplexity,
                "perplexity_rise": loss.perplexity_rise,
                "interval": interval,
                "accuracy": {task: list(pair) for task, pair in accuracy.items()},
                "time_ratio": None,  # by ``Stopwatch.row``
            }
        )
    record.note(reading_note(evidence))
    for loss in evidence.losses:
        record.note(collapse_note(evidence, loss))


def reading_note(evidence: Evidence) -> str:
    """One sentence: which text was judged, in what windows."""
    source = f", text sampled from the model itself (seed {evidence.seed})" if evidence.corpus == "self" else ""
    documents, windows = len(evidence.by_document(evidence.evaluation.lengths)), evidence.evaluation.sequences
    return (
        f"{evidence.name}: perplexity on {evidence.corpus}{source}, {documents} documents in {windows} windows of up "
        f"to {evidence.window} tokens, each from full depth; no prompt: decode FLOPs are all there are"
    )


def collapse_note(evidence: Evidence, loss: Loss) -> str:
    """One sentence: how soon depth was down at the first probe, from where it never returns."""
    said = f"{evidence.name}: {loss.point.name}: "
    if not loss.point.probes:
        return f"{said}no probes, depth is fixed"
    depth, first = depths(evidence.evaluation, loss.point), loss.point.probes[0]
    before = tokens_before(evidence.evaluation, depth, first)
    soon = float(np.median(before))
    verb = "collapsed to" if (depth <= first).mean() >= COLLAPSED else "reached"
    reached = (
        f"depth {verb} the first probe (layer {first}) after a median of {soon:g} tokens"
        if np.isfinite(soon)
        else f"depth {verb} the first probe (layer {first}) in {np.isfinite(before).mean():.0%} of windows"
    )
    means = ", ".join(f"{mean:.1f} at {span}" for span, mean in depth_by_position(evidence.evaluation, depth).items())
    return f"{said}{reached}; mean depth by position: {means}"
