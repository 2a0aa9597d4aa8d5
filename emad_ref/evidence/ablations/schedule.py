"""Schedule: what does the same rule cost and save with and without monotone depth? (EMAD, "Ablations")

Copies have to be decoded, on shorter text (``Openings``), with monotone and free depth on it beside. Positional depth
has no thresholds and meets the rule's saving instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emad_ref.calibration.trace import take_trace
from emad_ref.decoding.forcing import teacher_forced
from emad_ref.evidence.ablations.rows import BEFORE, UNTIMED, Row, Rows, points, quality, require_quality, speeds, tried
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.subject import Subject
from emad_ref.meters.flops import flops
from emad_ref.models.geometry import Geometry
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.protocol import Unsupported
from emad_ref.record import Work
from emad_ref.replay import replay, work_of
from emad_ref.signals import perplexity_of, relative_rise
from emad_ref.sweep.grids import CHUNKS, positional
from emad_ref.sweep.losses import loss_table
from emad_ref.sweep.select import equal_flops

FREE: dict[str, ScheduleName] = {"eager backfill": "free_eager", "deferred fill": "free_deferred"}
COPYING = "state copying"
REPLAYED, OPENED = "evaluation split", "openings"  # text of a row
TIMED = ("monotone", *FREE, "chunks of 8", "positional")
DECODED, DECODED_TOKENS = 40, 48  # documents, and tokens of each, on which state copying is scored


def ablation(evidence: Evidence, rng: np.random.Generator) -> Exhibits:
    """Every schedule at every margin; speed at m = 0 only.

    Raises:
        Unsupported: as ``require_quality``.
    """
    require_quality(evidence.subject, evidence.bridging)
    rules = points(evidence.traces.profile, tried(evidence))
    by_margin = {rule.margin_nats: schedules(evidence, rule) for rule in rules}
    first, rule = by_margin[rules[0].margin_nats], rules[0]
    copying = replace(rule, name=f"{rule.name} copying", schedule="copying")
    timed = {name: point for name, point in first.items() if name in TIMED}
    times = speeds(evidence.stopwatch, evidence.subject, timed | {COPYING: copying})
    rows, shown, notes = Rows(evidence, rng), [], []
    for margin, named in by_margin.items():
        for name, point in named.items():
            speed = times[name] if margin == 0 and name in times else UNTIMED
            shown += [row | speed for row in rows.at([point], {"schedule": name, "text": REPLAYED})]
    openings = Openings(evidence.subject)
    shown += [on_openings(name, openings.replayed(first[name])) for name in ("monotone", "eager backfill")]
    try:
        copied = openings.decoded(copying)
    except Unsupported as refusal:
        notes.append(f"{evidence.name}: {COPYING}: not applicable ({refusal})")
    else:
        shown.append(on_openings(COPYING, copied) | times[COPYING])
    return Exhibits((Table(f"ablation, schedule on {evidence.corpus}", shown),), tuple(notes))


def schedules(evidence: Evidence, rule: OperatingPoint) -> dict[str, OperatingPoint]:
    """The rule under each schedule that replay knows, and positional depth that saves as much."""
    free = {name: replace(rule, name=f"{rule.name} {name}", schedule=schedule) for name, schedule in FREE.items()}
    chunks = {
        f"chunks of {period}": replace(rule, name=f"{rule.name}, chunks of {period}", schedule="chunked", period=period)
        for period in CHUNKS
    }
    validation, geometry = evidence.traces.validation, evidence.loaded.geometry
    (mine,) = loss_table(validation, geometry, [rule])
    falls = loss_table(validation, geometry, positional(rule.layers))
    best = equal_flops(falls, mine.net_reduction)  # chosen on validation, as every point of this project
    return {"monotone": rule, **free, **chunks, **({} if best is None else {"positional": best.point})}


def on_openings(name: str, row: Row) -> Row:
    return {"schedule": name, "text": OPENED, **row, "rise interval %": None, **UNTIMED}


class Openings:
    """First tokens of evaluated documents, decoded token by token and replayed, against full depth on the same text."""

    def __init__(self, subject: Subject):
        self.subject = subject
        windows = subject.sequences("evaluate", DECODED)
        self.texts = [replace(window, tokens=window.tokens[:DECODED_TOKENS]) for window in windows]
        self.trace = take_trace(subject.stepper, self.texts)

    def replayed(self, point: OperatingPoint) -> Row:
        """The row of a point that replay knows."""
        (row,) = loss_table(self.trace, self.subject.loaded.geometry, [point])
        return quality(row, self.trace)

    def decoded(self, point: OperatingPoint) -> Row:
        """The row of any point; reductions are None for a decoder that does not count.

        Raises:
            Unsupported: the decoder declines the point.
        """
        full = replay(self.trace, self.subject.full)
        with self.subject.open_audited(point) as decoder:
            forced = [teacher_forced(decoder, text) for text in self.texts]
        mean = float(np.concatenate([each.nll_nats for each in forced]).mean())
        works = [each.work for each in forced if each.work is not None]
        saved = _saved(self.subject.loaded.geometry, works, work_of(self.trace, full))
        return {
            "point": point.name,
            "mean depth": float(np.concatenate([each.depth for each in forced]).mean()),
            BEFORE: None,  # no trace to read it from
            **(saved if len(works) == len(forced) else dict.fromkeys(saved)),
            "perplexity": perplexity_of(mean),
            "rise %": relative_rise(mean - float(full.nll_nats.mean())),
        }


def _saved(geometry: Geometry, works: Sequence[Work], full: Work) -> Row:
    mine, reference = flops(sum(works, Work.none(geometry.layers)), geometry), flops(full, geometry)
    return {
        "gross reduction %": 1 - mine.gross / reference.gross,
        "net reduction %": 1 - mine.total / reference.total,
    }
