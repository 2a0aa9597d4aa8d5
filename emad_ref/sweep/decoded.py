"""The columns of points that only decoding knows: given text, fed token by token through our own decoder, in batches.

Under state copying the states of later tokens change with every exit, so no trace says what a point loses; where replay
is exact both give the same columns (a law). Rows of a batch take one step together; each is charged what a session of
that row alone executes (a law too): as its depths imply, or as counted in such a session where depths do not say it
all, under a confidence rule, whose readouts depend on what they show.

Charged are decode steps, as in ``sweep.losses``: the last prompt position and all after it. An encoder's run is its
prompt's; cross-attention of decode steps, and a source's K and V that they ask for, are charged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tqdm import tqdm

from emad_ref.calibration.trace import TokenSequence, batched
from emad_ref.decoding.taught import ROWS, alike, taught
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.errors import BadArgument
from emad_ref.meters.flops import flops
from emad_ref.models.geometry import Geometry
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint
from emad_ref.readout.estimate import reader_of
from emad_ref.readout.signals import on_host
from emad_ref.readout.states import translators_of
from emad_ref.readout.tuned import lens_of, macs_ahead
from emad_ref.record import Floats, Ints, Work
from emad_ref.schedule.derived import flops_at, probed_by
from emad_ref.schedule.interface import Places
from emad_ref.schedule.table import schedule_of
from emad_ref.signals import raised
from emad_ref.sweep.losses import Columns


def decoded_columns(
    stepper: Stepper,
    geometry: Geometry,
    sequences: Sequence[TokenSequence],
    points: Iterable[OperatingPoint],
    *,
    rows: int = ROWS,
    progress: str | None = None,
) -> Columns:
    """A column per point, in order; sequences in the order given. ``rows``: of one batch, at most.

    ``geometry``: of the model that ``stepper`` walks. ``progress`` names the bar, None shows none.

    Raises:
        BadArgument: no point; no sequence, or one in which nothing is decided; fewer than one row; what a decoder
            refuses of a point or of a text.
        NotFinite: logits hold NaN or +inf.
    """
    asked = list(points)
    if not asked:
        raise BadArgument("points", [], "at least one point")
    if rows < 1:
        raise BadArgument("rows", rows, "at least 1")
    if not list(batched(sequences)):
        raise BadArgument("sequences", [], "at least one sequence")
    total = len(asked) * sum(len(sequence.tokens) - 1 - sequence.adaptive_from for sequence in sequences)
    with tqdm(desc=progress, disable=progress is None, total=total, unit="tok", unit_scale=True) as bar:
        columns = [_column(stepper, geometry, sequences, point, rows, bar) for point in asked]
    return Columns(*(np.stack(each, axis=1) for each in zip(*columns, strict=True)))


def _column(
    stepper: Stepper,
    geometry: Geometry,
    sequences: Sequence[TokenSequence],
    point: OperatingPoint,
    rows: int,
    bar: tqdm,
) -> tuple[Floats, Floats, Floats, Floats]:
    """(nll_nats, wrong, flops, depth) [sequences] of one point."""
    alone = point.confidence is not None
    decoder = WalkedDecoder(stepper, point, max_rows=1 if alone else rows)
    found: list[tuple[float, float, float, float]] = [(0.0, 0.0, 0.0, 0.0)] * len(sequences)
    for chosen in alike(sequences, decoder.max_rows):
        batch = [sequences[i] for i in chosen]
        nll, wrong, depths, work = _fed(decoder, batch, bar)
        cost = [float(flops(work, geometry).total)] if alone else _derived(stepper, geometry, batch, point, depths)
        for row, i in enumerate(chosen):
            found[i] = float(nll[row].sum()), float(wrong[row].sum()), float(cost[row]), float(depths[row].sum())
    columns = np.array(found, dtype=np.float64).T
    return columns[0], columns[1], columns[2], columns[3]


@torch.inference_mode()
def _fed(decoder: WalkedDecoder, batch: Sequence[TokenSequence], bar: tqdm) -> tuple[Floats, Ints, list[Ints], Work]:
    """(NLL [rows, longest], wrong [rows, longest], depths [decided] by row, decode work) of feeding ``batch``.

    Entries after a row's last decided position are 0. The last token of a row is only predicted.
    """
    lengths = [len(text.tokens) - 1 - text.adaptive_from for text in batch]
    nll: Floats = np.zeros((len(batch), max(lengths)))
    wrong: Ints = np.zeros(nll.shape, dtype=np.int64)
    depth = np.zeros_like(wrong)
    for lesson in taught(decoder, batch):
        rows, at, target = lesson.rows, lesson.at, lesson.target
        log_p = torch.log_softmax(raised(lesson.arrival.logits[:, -1]), dim=-1)
        nll[rows, at] = -on_host(log_p.gather(-1, target[:, None])[:, 0])
        wrong[rows, at] = (log_p.argmax(dim=-1) != target).cpu().numpy()
        depth[rows, at] = lesson.arrival.depth[:, -1]
        bar.update(len(rows))
    return nll, wrong, [row[:n] for row, n in zip(depth, lengths, strict=True)], lesson.work


def _derived(
    stepper: Stepper, geometry: Geometry, batch: Sequence[TokenSequence], point: OperatingPoint, depths: Sequence[Ints]
) -> Floats:
    """[rows] FLOPs that these depths imply, each row decoded alone."""
    starts = np.concatenate([[0], np.cumsum([len(row) for row in depths])])
    position = np.concatenate(
        [text.adaptive_from + np.arange(len(row)) for text, row in zip(batch, depths, strict=True)]
    )
    places, depth = Places(position, starts), np.concatenate(depths)
    ahead = macs_ahead(lens_of(stepper, point), point.layers)
    reading = 0 if point.estimator.kind == "full" else reader_of(stepper, point.estimator, point.probes).macs_per_row
    probed = probed_by(point, len(depth), ahead, reading)
    each = flops_at(point, places, depth, probed, ahead, geometry, translators_of(stepper, point))
    each += _across(geometry, batch, point, places, depth)
    return np.add.reduceat(each, starts[:-1])


def _across(
    geometry: Geometry, batch: Sequence[TokenSequence], point: OperatingPoint, places: Places, depth: Ints
) -> Floats:
    """[tokens] FLOPs of cross-attention, and of a source's K and V where a row's first token in a layer asks for them.

    A prompt of more than its last position has asked for them everywhere.
    """
    each = np.zeros(len(depth))
    if all(text.source is None for text in batch):
        return each
    sequence = np.repeat(np.arange(len(batch)), np.diff(places.starts))
    widths = np.array([len(text.source) if text.source is not None else 0 for text in batch])
    unread = np.array([text.adaptive_from == 0 for text in batch])
    for layer in range(1, point.ceiling + 1):
        ran = schedule_of(point).ran(places, depth, layer, point.ceiling).keys > 0
        each += ran * widths[sequence] * geometry.attention_flops()
        first = np.flatnonzero(ran)[np.unique(sequence[ran], return_index=True)[1]]
        each[first] += (unread * widths)[sequence[first]] * geometry.cross_fill_flops()
    return each
