"""What operating points lose and cost on one text: a table, the choice of a point from it, and how it is made.

``Losses`` has a row per point and a column per document. Replays of a trace make it (``replay_losses``). Under state
copying the states of later tokens change with every exit, so no trace gives a point's loss; then the text is decoded
(``decode_losses``): layer by layer for points with copied K/V, else token by token in batches. If replay is exact both
give the same table (a law). Each row of a batch is charged the work of a session of that row alone (a law): derived
from its depths, or as counted under a confidence rule, whose readouts depend on the text.

Decode steps are charged: the last prompt position and all after it. An encoder's run belongs to its prompt;
cross-attention of decode steps, and the K/V of a source that they need, are charged.

``Losses.choose`` takes the point of least cost, or least loss, within bounds; ``docs/layout.md`` lists the choices made
elsewhere. A margin ("Select margin m on a small validation set", EMAD) is chosen by an upper bound of its rise,
``bound_rises``: a choice by the estimate ends on the threshold, and the chosen point's true rise exceeds the threshold
in a third of runs and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from scipy import stats
from tqdm import tqdm

from emad_ref.absent import Absent
from emad_ref.calibration.trace import Trace
from emad_ref.calibration.windows import TokenSequence, iterate_batches
from emad_ref.decoding.reference import WalkedDecoder
from emad_ref.decoding.teacher_forcing import BATCH_ROWS, TeacherForcedText, teacher_force_texts
from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import flops
from emad_ref.models.geometry import Geometry
from emad_ref.models.stepper import Stepper
from emad_ref.point import OperatingPoint, full_depth
from emad_ref.probes.estimators import make_entropy_reader
from emad_ref.probes.tuned_lens import get_point_lens, get_point_translators, lens_macs_by_layer
from emad_ref.record import Bools, Floats, Ints
from emad_ref.replay.replay import (
    ReplayResult,
    compute_decode_flops_by_sequence,
    compute_decode_work,
    compute_replayed_decode_work,
    iterate_point_replays,
)
from emad_ref.schedule.derived_work import compute_probe_costs, derive_sequence_flops
from emad_ref.schedule.schedules import TokenPositions, get_point_schedule
from emad_ref.signals import perplexity_from_nats, perplexity_rise_from_nats

ONE_SIDED_LEVEL = 0.05  # of every bound on a rise
SYMMETRIC = 1e-9  # skewness over √n that counts as none
MAX_PERPLEXITY_POINTS = 0.1  # the paper's bound
MAX_RELATIVE_RISE = 0.01  # an additional bound, since at perplexity 1.4 the paper's 0.1 alone would be 7 %
MAX_ACCURACY_DROP = 0.005  # the paper's bound on EM

Column = Literal["nats", "wrong", "flops", "depth"]
LossColumn = Literal["nats", "wrong"]
CostColumn = Literal["flops", "depth"]
COLUMNS: tuple[Column, ...] = ("nats", "wrong", "flops", "depth")


@dataclass(frozen=True, eq=False)  # holds arrays: tables compare by identity
class Losses:
    """What ``points`` lose and cost, by document: sums over its decided tokens. Comparisons are with the first point.

    ``points`` [points], the first of which is full depth. ``cluster`` int64 [documents], ascending: the id of each, by
    which its windows were summed. ``tokens`` int64 [documents].

    ``nats``   float64 [points, documents] −log p of the next tokens; inf where a pruned vocabulary lost one.
    ``wrong``  int64 [points, documents] wrongly predicted next tokens, which compares every rule.
    ``flops``  int64 [points, documents] all executed work.
    ``depth``  int64 [points, documents] layers run.
    """

    points: tuple[OperatingPoint, ...]
    cluster: Ints
    tokens: Ints
    nats: Floats
    wrong: Ints
    flops: Ints
    depth: Ints

    @classmethod
    def of_sequences(
        cls, points: Sequence[OperatingPoint], document: Ints, tokens: Ints, columns: Mapping[Column, Floats]
    ) -> Losses:
        """From ``columns`` [points, sequences], summed by ``document`` [sequences]; ``tokens`` [sequences]."""
        order = np.argsort(document, kind="stable")
        cluster, first = np.unique(document[order], return_index=True)

        def summed(values: Floats | Ints) -> Floats:
            sums: Floats = np.add.reduceat(np.asarray(values, dtype=np.float64)[..., order], first, axis=-1)
            return sums

        nats, *counts = (summed(columns[name]) for name in COLUMNS)
        whole = (each.astype(np.int64) for each in (summed(tokens), *counts))
        return cls(tuple(points), cluster, next(whole), nats, *whole)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> PointLoss:
        return PointLoss(self, range(len(self))[index])

    def __iter__(self) -> Iterator[PointLoss]:
        return map(self.__getitem__, range(len(self)))

    def of(self, point: OperatingPoint) -> PointLoss:
        """The row of ``point``, the first if there are several."""
        return self[self.points.index(point)]

    def select(self, indices: Sequence[int] | Ints) -> Losses:
        """The rows of these indices, in their order."""
        rows = np.asarray(indices, dtype=np.int64)
        taken = {name: getattr(self, name)[rows] for name in COLUMNS}
        return replace(self, points=tuple(self.points[row] for row in rows), **taken)

    def join(self, other: Losses) -> Losses:
        """The rows of both tables, of the same documents."""
        assert np.array_equal(self.tokens, other.tokens), "tables of one text"
        both = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in COLUMNS}
        return replace(self, points=self.points + other.points, **both)

    def totals(self, column: Column) -> Floats:
        """float64 [points] sums of ``column`` over documents."""
        sums: Floats = getattr(self, column).sum(axis=1).astype(np.float64)
        return sums

    @cached_property
    def savings(self) -> Floats:
        """[points] net share of full depth's FLOPs saved."""
        return self.saved_shares("flops")

    def saved_shares(self, cost: CostColumn) -> Floats:
        """[points] share of full depth's ``cost`` saved."""
        spent = self.totals(cost)
        shares: Floats = 1 - spent / spent[0]
        return shares

    def means(self, column: Column) -> Floats:
        """[points] ``column`` per token."""
        mean: Floats = self.totals(column) / self.tokens.sum()
        return mean

    @cached_property
    def perplexities(self) -> Floats:
        """[points] exp(Σ nats / Σ tokens)."""
        return np.array([perplexity_from_nats(float(mean)) for mean in self.means("nats")])

    @cached_property
    def rises(self) -> Floats:
        """[points] relative rise of perplexity over full depth."""
        mean = self.excess_nats.sum(axis=1) / self.tokens.sum()
        return np.array([perplexity_rise_from_nats(float(each)) for each in mean])

    @cached_property
    def excess_nats(self) -> Floats:
        """[points, documents] nats above full depth."""
        excess: Floats = self.nats - self.nats[0]
        return excess

    @cached_property
    def rise_bounds(self) -> Floats:
        """[points] upper bound of the rise (``bound_rises``)."""
        return bound_rises(self.excess_nats, self.tokens)

    def choose(
        self, by: Column, within: Bools, accept: Callable[[PointLoss], bool] = lambda row: True
    ) -> PointLoss | Absent:
        """The row with the least total of ``by`` among those ``within`` [points] that ``accept`` takes.

        The first of equals. ``accept`` is asked in this order, and no further than needed.
        """
        for index in np.argsort(self.totals(by), kind="stable").tolist():
            if within[index] and accept(self[index]):
                return self[index]
        return Absent(f"none of {len(self)} points is within the bounds", lacking="premise")


@dataclass(frozen=True)
class PointLoss:
    """Row ``index`` of ``table``: a point with what it loses and saves against full depth, the table's first row.

    Perplexities are exp(Σ nats / Σ tokens), infinite as soon as a pruned vocabulary has lost one next token.
    """

    table: Losses
    index: int

    @property
    def point(self) -> OperatingPoint:
        return self.table.points[self.index]

    def named(self, name: str) -> PointLoss:
        """The same row, with its point under another name."""
        points = list(self.table.points)
        points[self.index] = replace(self.point, name=name)
        return PointLoss(replace(self.table, points=tuple(points)), self.index)

    @property
    def nats(self) -> Floats:
        """float64 [documents] −log p of the next tokens, summed over each document."""
        nats: Floats = self.table.nats[self.index]
        return nats

    @property
    def mean_depth(self) -> float:
        """Layers run per token."""
        return float(self.table.means("depth")[self.index])

    @property
    def net_reduction(self) -> float:
        """Share of full-depth FLOPs of the same decode steps that is saved, all executed work charged."""
        return float(self.table.savings[self.index])

    @property
    def perplexity(self) -> float:
        return float(self.table.perplexities[self.index])

    @property
    def perplexity_rise(self) -> float:
        """Relative rise over full depth."""
        return float(self.table.rises[self.index])


# ---------------------------------------------------------------- the choice of a margin


def bound_rises(
    excess_nats: Floats, tokens: Ints | Floats, *, confirmed_on: int | None = None, lower: bool = False
) -> Floats:
    """One-sided 95 % bounds of relative rises of perplexity, from sums by document; upper ones unless ``lower``.

    With a mean excess of m nats per token, its linearised standard error s over documents, and Student's t, the bound
    is m + t·s. For upper bounds t is the larger of Student's and Hall's, which reflects skew: a sample without the few
    documents that lose much has a low mean and a low error at once (Hall 1992, "On the removal of skewness by
    transformation"). A margin chosen by it among many closely around the threshold truly exceeds it in 2 to 4 % of
    runs, and in 10 % with 60 documents of log-normal rises (σ = 1). A single document bounds nothing. A lost next token
    has an infinite rise, and NaN for its bound, which is within no level.

    Args:
        excess_nats: [..., documents] nats above full depth.
        tokens: [documents].
        confirmed_on: None, or a number of documents of another text: then the bound is the smallest level at which
            that text, with an expected error of s′, will confirm the point in 95 of 100 runs, m + t·√(s² + s′²) + t·s′.
        lower: the largest level that the point is shown to exceed, m − t·s.
    """
    count, total = len(tokens), float(np.sum(tokens))
    mean = np.asarray(excess_nats).sum(axis=-1) / total
    if count < 2:
        return np.full(np.shape(mean), -1.0 if lower else np.inf)
    with np.errstate(invalid="ignore"):
        away = excess_nats - mean[..., None] * tokens
        squares = (away * away).sum(axis=-1)
        error = np.sqrt(count / (count - 1) * squares) / total
    least = count if confirmed_on is None else min(count, max(confirmed_on, 2))
    t = float(stats.t.ppf(1 - ONE_SIDED_LEVEL, least - 1))
    if lower:
        return _rises(mean - t * error)
    with np.errstate(invalid="ignore", divide="ignore"):
        skew = np.nan_to_num((away**3).sum(axis=-1) * np.sqrt(count) / squares**1.5)  # 0 without spread
    wide = np.maximum(t, _hall_quantile(t, skew / np.sqrt(count)))
    if confirmed_on is None:
        return _rises(mean + wide * error)
    later = error * np.sqrt(count / confirmed_on)
    return _rises(mean + wide * np.hypot(error, later) + wide * later)


def _hall_quantile(t: float, skew: Floats) -> Floats:
    """−g⁻¹(−``t``) for g(T) = T + a·T²/3 + a²·T³/27 + a/6, where a is ``skew``, the skewness of a sum of n, over √n."""
    small = np.abs(skew) < SYMMETRIC
    a = np.where(small, 1.0, skew)
    quantile: Floats = np.where(small, t, 3 / a * (1 - np.cbrt(1 - a * (t + a / 6))))
    return quantile


def _rises(nats: Floats) -> Floats:
    return np.array([perplexity_rise_from_nats(float(each)) for each in np.ravel(nats)]).reshape(np.shape(nats))


def mark_within_margin_bounds(losses: Losses) -> Bools:
    """[points] whether an upper bound shows a validation rise of at most min(0.1 perplexity points, 1 %).

    Full depth, the first point, is no candidate.
    """
    most = min(MAX_RELATIVE_RISE, MAX_PERPLEXITY_POINTS / losses.perplexities[0])
    within: Bools = losses.rise_bounds <= most
    within[0] = False
    return within


def choose_margin_point(
    losses: Losses, accuracy_drops: Callable[[OperatingPoint], Mapping[str, float]] | None = None
) -> PointLoss | Absent:
    """The point of smallest mean depth whose loss on validation text, ``losses``, is within bounds.

    Args:
        accuracy_drops: point → validation accuracy lost by each task that counts there, fractions, each bound by 0.5 %:
            a mean would let one task pay for another. Called only for points within the bounds of perplexity, cheapest
            first. These stay estimates, since a bound of 0.5 % takes 600 items without a loss. None: perplexity alone
            decides.
    """

    def keeps_tasks(row: PointLoss) -> bool:
        return accuracy_drops is None or all(drop <= MAX_ACCURACY_DROP for drop in accuracy_drops(row.point).values())

    return losses.choose("depth", mark_within_margin_bounds(losses), keeps_tasks)


# ---------------------------------------------------------------- by replay


def replay_losses(trace: Trace, geometry: Geometry, points: Iterable[OperatingPoint]) -> Losses:
    """Full depth, and then a row per point, in order, by replay of ``trace``."""
    return losses_of_replays(
        trace,
        iterate_point_replays(trace, [full_depth(trace.layers), *points]),
        lambda replayed: compute_decode_flops_by_sequence(trace, replayed, geometry),
    )


def losses_of_replays(trace: Trace, replays: Iterable[ReplayResult], spent: Callable[[ReplayResult], Floats]) -> Losses:
    """A row per replay, in order, full depth first; ``spent``: its FLOPs [sequences]."""
    points, rows = list[OperatingPoint](), list[tuple[Floats, ...]]()
    for replayed in replays:
        points.append(replayed.point)
        rows.append(
            (
                trace.token_positions.sum_by_sequence(replayed.nll_nats),
                trace.token_positions.sum_by_sequence(~replayed.is_top1_correct(trace)),
                spent(replayed),
                trace.token_positions.sum_by_sequence(replayed.depth),
            )
        )
    columns = dict(zip(COLUMNS, map(np.stack, zip(*rows, strict=True)), strict=True))
    return Losses.of_sequences(points, trace.document_of_sequence, trace.n_decided_by_sequence, columns)


def gross_saving(trace: Trace, geometry: Geometry, replayed: ReplayResult) -> float:
    """Share of full depth's FLOPs of blocks and attention alone that a replay of ``trace`` saves; no probes."""
    every = compute_decode_work(trace, np.full(len(trace), trace.layers), full_depth(trace.layers))
    full, mine = (
        flops(work, geometry).blocks_and_attention for work in (every, compute_replayed_decode_work(trace, replayed))
    )
    return 1 - mine / full


def tokens_before_depth_by_sequence(trace: Trace, depth: Ints, layer: int) -> Floats:
    """[sequences] decided tokens before the first at ``depth`` [tokens] ≤ ``layer``; inf without one.

    With τ = mean entropy about half of all tokens fire at the first probe, and under the monotone schedule depth never
    returns: this number shows whether a point adapts or has collapsed.
    """
    return np.minimum.reduceat(
        np.where(depth <= layer, trace.token_positions.index_among_decided_tokens, np.inf), trace.starts[:-1]
    )


POSITIONS = ((1, 32), (33, 128), (129, None))


def depth_by_position(trace: Trace, depth: Ints) -> dict[str, float]:
    """Mean ``depth`` [tokens] in each of ``POSITIONS`` (counted from 1) with tokens, e.g. ``{"1–32": 7.5}``."""
    position = trace.position + 1
    means = {}
    for first, last in POSITIONS:
        inside = (position >= first) & (True if last is None else position <= last)
        if inside.any():
            means[f"{first}+" if last is None else f"{first}–{last}"] = float(depth[inside].mean())
    return means


# ---------------------------------------------------------------- by decoding


def decode_losses(
    stepper: Stepper,
    geometry: Geometry,
    sequences: Sequence[TokenSequence],
    points: Iterable[OperatingPoint],
    *,
    rows: int = BATCH_ROWS,
    progress: str | None = None,
) -> Losses:
    """Losses and costs of operating points, by teacher forcing at each point (``decoding.teacher_forcing``).

    Parameters
    ----------
    stepper : Stepper
        The model, layer by layer.
    geometry : Geometry
        Sizes of that model, for FLOPs.
    sequences : sequence of TokenSequence
        The text; those of one document are summed.
    points : sequence of OperatingPoint
        One row each, in order. Shares and rises are over the first: name full depth there.
    rows : int
        Largest batch.
    progress : str or None
        Name of the progress bar; None shows none.

    Returns
    -------
    Losses
        A row per point, a column per document.

    Raises
    ------
    BadArgument
        No point; no sequence, or one without a decided token; fewer than one row; a point or text that the decoder
        refuses.
    NotFinite
        Logits hold NaN or +inf.
    """
    requested = list(points)
    if not requested:
        raise BadArgument("points", [], "at least one point")
    if rows < 1:
        raise BadArgument("rows", rows, "at least 1")
    if not list(iterate_batches(sequences)):
        raise BadArgument("sequences", [], "at least one sequence")
    first, *others = (
        losses_of_texts(
            stepper,
            geometry,
            sequences,
            point,
            teacher_force_at_point(stepper, sequences, point, rows=rows, progress=progress),
        )
        for point in requested
    )
    for other in others:
        first = first.join(other)
    return first


def teacher_force_at_point(
    stepper: Stepper,
    sequences: Sequence[TokenSequence],
    point: OperatingPoint,
    *,
    rows: int = BATCH_ROWS,
    progress: str | None = None,
) -> list[TeacherForcedText]:
    """``sequences`` fed to the reference decoder at ``point``; arguments and exceptions as of ``decode_losses``."""
    decoder = WalkedDecoder(stepper, point, max_rows=1 if point.confidence is not None else rows)
    total = sum(sequence.n_decided for sequence in sequences)
    with tqdm(desc=progress, disable=progress is None, total=total, unit="tok", unit_scale=True) as bar:
        return teacher_force_texts(decoder, sequences, bar.update)


def losses_of_texts(
    stepper: Stepper,
    geometry: Geometry,
    sequences: Sequence[TokenSequence],
    point: OperatingPoint,
    texts: Sequence[TeacherForcedText],
) -> Losses:
    """The row of ``texts``, the result of ``teacher_force_at_point`` on ``sequences`` at ``point``."""
    depths = [text.depth for text in texts]
    if point.confidence is None:
        cost = _derived_flops(stepper, geometry, sequences, point, depths)
    else:
        cost = np.array([float(flops(text.work, geometry).total) for text in texts if text.work is not None])
    nats, wrong = (np.array([getattr(text, name).sum() for text in texts], float) for name in ("nll_nats", "wrong"))
    depth = np.array([each.sum() for each in depths])
    columns = {name: values[None] for name, values in zip(COLUMNS, (nats, wrong, cost, depth), strict=True)}
    document = np.array([sequence.document for sequence in sequences])
    return Losses.of_sequences([point], document, np.array([len(each) for each in depths]), columns)


def _derived_flops(
    stepper: Stepper, geometry: Geometry, batch: Sequence[TokenSequence], point: OperatingPoint, depths: Sequence[Ints]
) -> Floats:
    """[rows] FLOPs derived from these depths, each row decoded alone."""
    starts = np.concatenate([[0], np.cumsum([len(row) for row in depths])])
    position = np.concatenate(
        [text.first_decided + np.arange(len(row)) for text, row in zip(batch, depths, strict=True)]
    )
    positions, depth = TokenPositions(position, starts), np.concatenate(depths)
    lens_macs = lens_macs_by_layer(get_point_lens(stepper, point), point.layers)
    reading = (
        0
        if point.estimator.kind == "full"
        else make_entropy_reader(stepper, point.estimator, point.probes).macs_per_row
    )
    costs = compute_probe_costs(point, len(depth), lens_macs, reading)
    each = derive_sequence_flops(
        point, positions, depth, costs, lens_macs, geometry, get_point_translators(stepper, point)
    )
    return each + positions.sum_by_sequence(_cross_flops(geometry, batch, point, positions, depth))


def _cross_flops(
    geometry: Geometry, batch: Sequence[TokenSequence], point: OperatingPoint, positions: TokenPositions, depth: Ints
) -> Floats:
    """[tokens] FLOPs of cross-attention, and of a source's K and V when a row's first token in a layer needs them.

    A prompt of more than its last position has computed them everywhere.
    """
    each = np.zeros(len(depth))
    if all(text.source is None for text in batch):
        return each
    sequence = np.repeat(np.arange(len(batch)), np.diff(positions.starts))
    widths = np.array([len(text.source) if text.source is not None else 0 for text in batch])
    unread = np.array([text.first_decided == 0 for text in batch])
    for layer in range(1, point.ceiling + 1):
        ran_block = get_point_schedule(point).layer_work(positions, depth, layer, point.ceiling).keys > 0
        each += ran_block * widths[sequence] * geometry.attention_flops()
        first = np.flatnonzero(ran_block)[np.unique(sequence[ran_block], return_index=True)[1]]
        each[first] += (unread * widths)[sequence[first]] * geometry.cross_fill_flops()
    return each
