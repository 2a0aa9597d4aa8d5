"""Documents as decoding shows them: depths and signals of given text at one point, a document a row.

From a trace where replay is exact, else fed token by token as ``sweep.decoded`` does: where both can speak they say the
same (a law). Fresh text has to go the way that calibration text went: copied K and V change what probes read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from emad_ref.calibration.trace import EmptyCorpus, TokenSequence, Trace, take_trace
from emad_ref.decoding.taught import ROWS, alike, taught
from emad_ref.decoding.walked import WalkedDecoder
from emad_ref.models.stepper import Stepper
from emad_ref.point import Estimator, OperatingPoint
from emad_ref.record import Floats, Ints
from emad_ref.replay import replay
from emad_ref.schedule.table import schedule_of
from emad_ref.screening.signs import Signs, signs_of
from emad_ref.verdict.units import DocumentOf


def read_signs(
    stepper: Stepper,
    point: OperatingPoint,
    windows: Sequence[TokenSequence],
    text: str,
    *,
    progress: str | None = None,
) -> Signs:
    """The signs of the documents that ``windows`` were cut from, from a trace if its schedule has a replay.

    ``text``: what they are documents of, in words. ``progress`` names the bar, None shows none.

    Raises:
        EmptyCorpus: no window.
        BadArgument: what a decoder or a trace refuses of a point or a text; a lens that is not attached.
        NotFinite: logits hold NaN or +inf.
    """
    if schedule_of(point).settle is None or point.confidence is not None:
        return watched_signs(stepper, point, windows, text, progress=progress)
    asked = {} if point.estimator == Estimator() else {point.estimator: point.probes}
    trace = take_trace(stepper, windows, estimators=asked, lens=point.lens, progress=progress)
    return replayed_signs(trace, point, DocumentOf(np.array([window.document for window in windows])), text)


def watched_signs(
    stepper: Stepper,
    point: OperatingPoint,
    windows: Sequence[TokenSequence],
    text: str,
    *,
    rows: int = ROWS,
    progress: str | None = None,
) -> Signs:
    """As ``read_signs``, by decoding, whatever the schedule; ``rows`` of a batch at most."""
    if not windows:
        raise EmptyCorpus(f"corpus={text!r} has no window, but expected at least one; name another text")
    decoder = WalkedDecoder(stepper, point, max_rows=rows)
    depths: list[Ints] = []
    signals: list[Floats] = []
    document: list[Ints] = []
    total = sum(len(window.tokens) - 1 - window.adaptive_from for window in windows)
    with tqdm(desc=progress, disable=progress is None, total=total, unit="tok", unit_scale=True) as bar:
        for chosen in alike(windows, rows):
            batch = [windows[i] for i in chosen]
            for window, depth, signal in zip(batch, *_fed(decoder, batch, bar), strict=True):
                depths.append(depth)
                signals.append(signal)
                document.append(np.full(len(depth), window.document, dtype=np.int64))
    of = DocumentOf(np.concatenate(document))
    return signs_of(np.concatenate(depths), np.concatenate(signals), of, point, text)


def _fed(decoder: WalkedDecoder, batch: Sequence[TokenSequence], bar: tqdm) -> tuple[list[Ints], list[Floats]]:
    """(depth [decided], signal [decided, probes]) of each row; the last token is only predicted."""
    depths: list[list[int]] = [[] for _ in batch]
    signals: list[list[Floats]] = [[] for _ in batch]
    for lesson in taught(decoder, batch):
        arrival = lesson.arrival
        for row, depth, signal in zip(lesson.rows, arrival.depth[:, -1], arrival.signal[:, -1], strict=True):
            depths[row].append(int(depth))
            signals[row].append(signal)
        bar.update(len(lesson.rows))
    return [np.array(each, dtype=np.int64) for each in depths], [np.array(each) for each in signals]


def replayed_signs(trace: Trace, point: OperatingPoint, windows: DocumentOf, text: str) -> Signs:
    """The same from a trace; ``windows`` [sequences]: the document that each of its sequences was cut from.

    Raises:
        BadArgument: a point that this trace cannot replay.
    """
    columns = [probe - 1 for probe in point.probes]
    document = DocumentOf(windows.number[trace.sequence])
    signal = trace.signal(point)[:, columns].astype(np.float64)
    return signs_of(replay(trace, point).depth, signal, document, point, text)
