"""Rows of the operating-point table, and the sentences that a reader needs beside it.

Full depth, the points put forward, and for each the best truncation at equal net FLOPs; below, lm-eval's tasks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.points import Points
from emad_ref.evidence.published import Published
from emad_ref.models.tokenizer import worse_than_a_guess
from emad_ref.replay import depths
from emad_ref.sweep.losses import Loss, depth_by_position, tokens_before
from emad_ref.sweep.select import equal_flops
from emad_ref.verdict.counting import TaskAt

COLLAPSED = 0.9  # share of tokens at the first probe from which depth no longer adapts to anything

Interval = tuple[float, float] | None


def point_exhibits(points: Points, intervals: Mapping[str, Interval]) -> Exhibits:
    """The table's rows, which text was judged, and how soon each point put forward was down at its first probe.

    ``intervals``: name of a point → 95 % interval of its perplexity rise, where a question estimated one.
    """
    notes = reading_note(points), *guess_notes(points), *(collapse_note(points, loss) for loss in points.losses)
    return Exhibits(notes=notes, points=tuple(point_rows(points, intervals)))


def guess_notes(points: Points) -> tuple[str, ...]:
    """A sentence where full depth predicts this text worse than a guess would, as with a permuted vocabulary."""
    subject = points.subject
    told = worse_than_a_guess(np.log(points.full_loss.perplexity), subject.stepper.vocabulary)
    return (f"{subject.name} on {subject.corpus}: {told}",) if told else ()


def task_exhibits(points: Points) -> Exhibits:
    """lm-eval's tasks at the points put forward; nothing where none was scored."""
    published: Published = points.scored.published
    rows = published.rows(points.put_forward)
    if not rows:
        return Exhibits()
    return Exhibits((Table("lm-eval's tasks at the points put forward", rows),), (published.note,))


def point_rows(points: Points, intervals: Mapping[str, Interval]) -> list[dict[str, Any]]:
    """Keys as ``report.tables.point_rows`` reads them; ``interval`` as in ``point_exhibits``."""
    scored = points.scored
    tasks = [
        {task: scored.at(task, loss.point) for task in scored.tasks} for loss in (points.full_loss, *points.losses)
    ]
    rivals = best_truncations(points)
    return [
        _row(points, loss, held, intervals.get(loss.point.name))
        for loss, held in zip([points.full_loss, *points.losses, *rivals], [*tasks, *({} for _ in rivals)], strict=True)
    ]


def best_truncations(points: Points) -> list[Loss]:
    """For each point put forward that saves anything, the best fixed depth that saves as much; each once."""
    rivals = [
        equal_flops(points.truncation_sweep, loss.net_reduction) for loss in points.losses if loss.net_reduction > 0
    ]
    return list(dict.fromkeys(rival for rival in rivals if rival is not None))


def _row(points: Points, loss: Loss, tasks: Mapping[str, TaskAt], interval: Interval) -> dict[str, Any]:
    subject, evaluation = points.subject, points.traces.evaluation
    return {
        "model": subject.name,
        "name": loss.point.name,
        "roles": list(points.roles.get(loss.point, ())),
        "family": loss.point.family,
        "corpus": subject.corpus,
        "window_tokens": subject.window,
        "mean_depth": loss.mean_depth,
        "depth_p50": loss.depth_p50,
        "depth_p90": loss.depth_p90,
        "depth_shares": {str(depth): share for depth, share in loss.depth_shares.items()},
        "depth_by_position": depth_by_position(evaluation, depths(evaluation, loss.point)),
        "flop_evidence": points.witnessed.evidence,
        "gross_reduction": loss.gross_reduction,
        "net_reduction": loss.net_reduction,
        "perplexity_reference": points.full_loss.perplexity,
        "perplexity": loss.perplexity,
        "perplexity_rise": loss.perplexity_rise,
        "interval": interval,
        "accuracy": {task: list(held.accuracy) for task, held in tasks.items()},
        "not_counted": {} if loss is points.full_loss else standings(tasks),
        "time_ratio": None,  # by ``Stopwatch.row``
    }


def standings(tasks: Mapping[str, TaskAt]) -> dict[str, str]:
    """Task → why it does not count, of those that do not."""
    return {task: held.standing for task, held in tasks.items() if not held.counts}


def reading_note(points: Points) -> str:
    """One sentence: which text was judged, in what windows."""
    subject, traces = points.subject, points.traces
    source = f", text sampled from the model itself (seed {subject.seed})" if subject.corpus == "self" else ""
    documents, windows = len(traces.lengths), traces.evaluation.sequences
    alike = subject.near_duplicates("evaluate")
    left_out = f" ({alike} near-duplicates left out)" if alike else ""
    return (
        f"{subject.name}: perplexity on {subject.corpus}{source}, {documents} documents{left_out} in {windows} windows "
        f"of up to {subject.window} tokens, each from full depth; no prompt: decode FLOPs are all there are"
    )


def collapse_note(points: Points, loss: Loss) -> str:
    """One sentence: how soon depth was down at the first probe, from where it never returns."""
    evaluation, said = points.traces.evaluation, f"{points.subject.name}: {loss.point.name}: "
    if not loss.point.probes:
        return f"{said}no probes, depth is fixed"
    depth, first = depths(evaluation, loss.point), loss.point.probes[0]
    before = tokens_before(evaluation, depth, first)
    soon = float(np.median(before))
    verb = "collapsed to" if (depth <= first).mean() >= COLLAPSED else "reached"
    reached = (
        f"depth {verb} the first probe (layer {first}) after a median of {soon:g} tokens"
        if np.isfinite(soon)
        else f"depth {verb} the first probe (layer {first}) in {np.isfinite(before).mean():.0%} of windows"
    )
    means = ", ".join(f"{mean:.1f} at {span}" for span, mean in depth_by_position(evaluation, depth).items())
    return f"{said}{reached}; mean depth by position: {means}"
