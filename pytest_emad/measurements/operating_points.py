"""Operating points that a run proposes: cost and saving of each on the evaluation split, and their tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from emad_ref.absent import Absent
from emad_ref.calibration.trace import Trace
from emad_ref.calibration.windows import TokenSequence
from emad_ref.exit_rules import format_numbers_distinctly, name_of_margin
from emad_ref.models.tokenizers import decode_tokens, describe_loss_above_chance
from emad_ref.point import OperatingPoint
from emad_ref.protocol import Prompt, Unsupported
from emad_ref.record import Ints
from emad_ref.replay.grids import SETTINGS_PER_FAMILY, NetSavingFunction, margin_points, truncation_points
from emad_ref.replay.losses import (
    Losses,
    PointLoss,
    choose_margin_point,
    depth_by_position,
    gross_saving,
    replay_losses,
    tokens_before_depth_by_sequence,
)
from emad_ref.replay.replay import ReplayResult, iterate_point_replays, replay, replay_depths
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.replay_and_flop_checks import FlopVerification
from pytest_emad.measurements.task_scores import LmEvalTaskScorer, TaskScores
from pytest_emad.measurements.traces import LensTraces
from pytest_emad.statistics.accuracy import TaskAccuracy
from pytest_emad.statistics.rates import draw_document_counts, estimate_point_rise, nll_pair_by_document
from pytest_emad.statistics.units import ByDocument

NllPair = tuple[ByDocument, ByDocument, ByDocument]  # NLL sums at the point and at full depth, tokens

DEFAULT, NAMED, SELECTED = "calibrated default", "named by the user", "chosen on validation"


@dataclass(frozen=True)
class PointMeasurements:
    """One operating point against full depth on the same documents and items.

    ``digest``: ``OperatingPoint.digest``, by which legs refer to the point; ``name``: its label. ``net_reduction``:
    share of decode FLOPs saved, probes and repair charged. ``tasks``: also those that do not count.
    """

    digest: str
    name: str
    net_reduction: float
    perplexity: Mapping[str, NllPair]
    tasks: Mapping[str, TaskAccuracy] = field(default_factory=dict)


class CandidatePoints:
    """Proposed operating points of a run, with their losses and savings on the evaluation split."""

    def __init__(self, traces: LensTraces, scored: TaskScores, witnessed: FlopVerification):
        self.traces, self.task_scores, self.flop_verification = traces, scored, witnessed
        self.subject = traces.subject

    @cached_property
    def margin_points(self) -> list[OperatingPoint]:
        """EMAD at margins from 0 up, spaced evenly by savings on the validation split."""
        saved = NetSavingFunction(self.traces.validation, self.subject.loaded.geometry)
        return margin_points(self.traces.profile, saved, SETTINGS_PER_FAMILY)

    @cached_property
    def selected_margin_loss(self) -> PointLoss | Absent:
        """The cheapest margin whose validation drop is within bounds."""
        table = replay_losses(self.traces.validation, self.subject.loaded.geometry, self.margin_points)
        return choose_margin_point(table, self.task_scores.compute_validation_drop_by_task)

    @property
    def selected_points(self) -> list[OperatingPoint]:
        """Calibrated default, the user's margin, the margin chosen on validation: each once."""
        return list(self.roles_by_point)

    @cached_property
    def roles_by_point(self) -> dict[OperatingPoint, tuple[str, ...]]:
        """Each selected point → its roles. Equal points are one, and no two have the same name."""
        named, profile = self.subject.study.margin, self.traces.profile
        margins = {DEFAULT: 0.0} | ({} if named is None else {NAMED: named + 0.0})  # −0.0 + 0.0 is 0.0
        chosen = self.selected_margin_loss
        if not isinstance(chosen, Absent) and chosen.point.margin_nats is not None:
            margins[SELECTED] = chosen.point.margin_nats
        roles: dict[OperatingPoint, tuple[str, ...]] = {}
        for (role, margin), text in zip(margins.items(), format_numbers_distinctly([*margins.values()]), strict=True):
            point = replace(profile.point(margin), name=name_of_margin(text, bins=profile.bins))
            roles[point] = (*roles.get(point, ()), role)
        return roles

    @cached_property
    def selected_losses(self) -> Losses:
        """Evaluation losses of full depth and the selected points."""
        return replay_losses(self.traces.evaluation, self.subject.loaded.geometry, self.selected_points)

    @cached_property
    def full_loss(self) -> PointLoss:
        """Full depth's row. It needs no selected point, whose margin costs a trace of every task."""
        return replay_losses(self.traces.evaluation, self.subject.loaded.geometry, [])[0]

    @property
    def selected_evaluation_losses(self) -> list[PointLoss]:
        """Rows of the selected points."""
        return list(self.selected_losses)[1:]

    def choose_most_saving(self, accept: Callable[[PointLoss], bool]) -> PointLoss | Absent:
        """The selected point, among those that ``accept`` takes, that saves most FLOPs."""
        within = np.arange(len(self.selected_losses)) > 0
        return self.selected_losses.choose("flops", within, accept)

    @cached_property
    def emad_sweep_losses(self) -> Losses:
        """Evaluation losses of full depth and of EMAD at every margin of the grid."""
        return replay_losses(self.traces.evaluation, self.subject.loaded.geometry, self.margin_points)

    @cached_property
    def truncation_sweep_losses(self) -> Losses:
        """Evaluation losses of full depth and of fixed truncation at every depth whose head was read."""
        evaluation = self.traces.evaluation
        depths = [point for point in truncation_points(self.subject.stepper.layers) if evaluation.has_layers_for(point)]
        return replay_losses(evaluation, self.subject.loaded.geometry, depths)

    def measure_point(self, loss: PointLoss, tasks: Sequence[str] | None = None) -> PointMeasurements:
        """Perplexity per document and answers per item against full depth, the input of EMAD-F1."""
        chosen = self.task_scores.accuracy_tasks if tasks is None else tasks
        return PointMeasurements(
            loss.point.digest,
            loss.point.name,
            loss.net_reduction,
            {self.subject.corpus: nll_pair_by_document(loss)},
            {task: self.task_scores.measure_accuracy_against_full_depth(task, loss.point) for task in chosen},
        )


COLLAPSED = 0.9  # share of tokens at the first probe from which depth counts as collapsed

Interval = tuple[float, float] | None


def make_point_attachments(points: CandidatePoints, intervals: Mapping[str, Interval]) -> Attachments:
    """Rows of the point table, and notes on the judged text and on how soon each point fell to its first probe.

    ``intervals``: digest of a point → 95 % interval of its perplexity rise, if a claim estimated one.
    """
    scored_note = [note] if (note := points.task_scores.continuation_choice_note) else []
    notes = (
        judged_text_note(points),
        *full_depth_below_chance_notes(points),
        *scored_note,
        *(depth_collapse_note(points, loss) for loss in points.selected_evaluation_losses),
    )
    return Attachments(notes=notes, points=tuple(make_point_rows(points, intervals)))


def full_depth_below_chance_notes(points: CandidatePoints) -> tuple[str, ...]:
    """A sentence if full depth predicts this text worse than a uniform guess, as with a permuted vocabulary."""
    subject = points.subject
    sentence = describe_loss_above_chance(np.log(points.full_loss.perplexity), subject.stepper.vocabulary_size)
    return (f"{subject.name} on {subject.corpus}: {sentence}",) if sentence else ()


def make_task_attachments(points: CandidatePoints) -> Attachments:
    """lm-eval's tasks at the selected points; empty if none was scored."""
    published: LmEvalTaskScorer = points.task_scores.published
    rows = published.make_task_rows(points.selected_points)
    if not rows:
        return Attachments()
    return Attachments(
        (AttachedTable("lm-eval's tasks at the points put forward", rows),), (published.scored_documents_note,)
    )


def make_point_rows(points: CandidatePoints, intervals: Mapping[str, Interval]) -> list[dict[str, Any]]:
    """Full depth, the selected points, and for each the best truncation; keys as ``report.tables`` reads them."""
    scored = points.task_scores
    tasks = [
        {task: scored.measure_accuracy_against_full_depth(task, loss.point) for task in scored.accuracy_tasks}
        for loss in (points.full_loss, *points.selected_evaluation_losses)
    ]
    rivals = find_best_truncations(points)
    return [
        _row(points, loss, scores, intervals.get(loss.point.digest))
        for loss, scores in zip(
            [points.full_loss, *points.selected_evaluation_losses, *rivals],
            [*tasks, *({} for _ in rivals)],
            strict=True,
        )
    ]


def find_best_truncations(points: CandidatePoints) -> list[PointLoss]:
    """For each selected point with a saving, the best fixed depth that saves as much; each once."""
    fixed = points.truncation_sweep_losses
    rivals = [
        fixed.choose("nats", fixed.savings >= loss.net_reduction)
        for loss in points.selected_evaluation_losses
        if loss.net_reduction > 0
    ]
    return list(dict.fromkeys(rival for rival in rivals if not isinstance(rival, Absent)))


def _row(
    points: CandidatePoints, loss: PointLoss, tasks: Mapping[str, TaskAccuracy], interval: Interval
) -> dict[str, Any]:
    subject, evaluation = points.subject, points.traces.evaluation
    replayed = replay(evaluation, loss.point)
    depth = replayed.depth
    layers, tokens = np.unique(depth, return_counts=True)
    return {
        "model": subject.name,
        "name": loss.point.name,
        "digest": loss.point.digest,
        "roles": list(points.roles_by_point.get(loss.point, ())),
        "family": loss.point.family,
        "margin_nats": loss.point.margin_nats,
        "corpus": subject.corpus,
        "window_tokens": subject.window_size,
        "mean_depth": loss.mean_depth,
        "depth_p50": float(np.quantile(depth, 0.5)),
        "depth_p90": float(np.quantile(depth, 0.9)),
        "depth_shares": {str(layer): float(n / len(depth)) for layer, n in zip(layers, tokens, strict=True)},
        "depth_by_position": depth_by_position(evaluation, depth),
        "flop_evidence": points.flop_verification.evidence_grade,
        "gross_reduction": gross_saving(evaluation, subject.loaded.geometry, replayed),
        "net_reduction": loss.net_reduction,
        "perplexity_reference": points.full_loss.perplexity,
        "perplexity": loss.perplexity,
        "perplexity_rise": loss.perplexity_rise,
        "interval": interval,
        "accuracy": {task: list(scores.accuracies) for task, scores in tasks.items()},
        "not_counted": {}
        if loss == points.full_loss
        else {task: scores.exclusion.reason for task, scores in tasks.items() if scores.exclusion},
        "lost_answers": {} if loss == points.full_loss else lost_answers_by_task(points.task_scores, tasks, loss.point),
        # ``LatencyBenchmark.make_timing_row`` has them, and ``run.run_report.upsert_point_row`` joins the two rows
        "time_ratio": None,
        "tokens_per_s": None,
        "peak_memory": None,
    }


def lost_answers_by_task(scored: TaskScores, tasks: Iterable[str], point: OperatingPoint) -> dict[str, Any]:
    """Task that loses items at ``point`` → their number, and the first of them with both answers."""
    found = {task: scored.lost_answers(task, point) for task in tasks}
    return {
        task: {"count": count, "first": [one.to_json() for one in first]}
        for task, (count, first) in found.items()
        if count
    }


def judged_text_note(points: CandidatePoints) -> str:
    """One sentence: the judged text and its windows."""
    subject, traces = points.subject, points.traces
    source = f", text sampled from the model itself (seed {subject.seed})" if subject.corpus == "self" else ""
    documents, windows = len(traces.document_lengths), traces.evaluation.n_sequences
    counted = "documents" if subject.corpus_group is None else f"groups of documents (by {subject.corpus_group})"
    alike = subject.count_dropped_near_duplicates("evaluate")
    left_out = f" ({alike} near-duplicates left out)" if alike else ""
    fewer = f"; a model of this size reads less ({subject.reductions_note}; all of it with --emad-budget standard)"
    return (
        f"{subject.name}: perplexity on {subject.corpus}{source}, {documents} {counted}{left_out} in {windows} windows "
        f"of up to {subject.window_size} tokens, each from full depth; no prompt: decode FLOPs are all there are"
        f"{fewer if subject.reductions_note else ''}"
    )


def depth_collapse_note(points: CandidatePoints, loss: PointLoss) -> str:
    """One sentence: how soon depth fell to the first probe, from which it never returns."""
    evaluation, prefix = points.traces.evaluation, f"{points.subject.name}: {loss.point.name}: "
    if not loss.point.probes:
        return f"{prefix}no probes, depth is fixed"
    depth, first = replay_depths(evaluation, loss.point), loss.point.probes[0]
    before = tokens_before_depth_by_sequence(evaluation, depth, first)
    soon = float(np.median(before))
    verb = "collapsed to" if (depth <= first).mean() >= COLLAPSED else "reached"
    reached = (
        f"depth {verb} the first probe (layer {first}) after a median of {soon:g} tokens"
        if np.isfinite(soon)
        else f"depth {verb} the first probe (layer {first}) in {np.isfinite(before).mean():.0%} of windows"
    )
    means = ", ".join(f"{mean:.1f} at {span}" for span, mean in depth_by_position(evaluation, depth).items())
    return f"{prefix}{reached}; mean depth by position: {means}"


MARGINS, TOKENS = "depth by margin", "depth by token"  # figures of ``report.figures``
PROMPT, CONTINUED = 16, 44  # tokens
TRIED = 12  # prompts; the one with the largest difference of depth is shown
READABLE = 2.0  # letters per word; texts below this spell single letters, and are shown only without another
RESAMPLES = 2000  # of the documents: bounds to two digits, as shown


def make_explorer_tables(points: CandidatePoints) -> Attachments:
    """Tables of the page's explorer: every margin of the sweep, and a short text at each margin.

    The text is a prompt with the model's own greedy continuation: of ``TRIED``, the readable one with the largest
    difference of depth.

    Raises:
        Unsupported: thresholds differ from token to token, or no document is as long as a prompt.
    """
    losses = compute_margin_losses(points)
    if any(len(loss.point.thresholds) > 1 for loss in losses):
        raise Unsupported("thresholds of this profile depend on the token: no margin has one per probe")
    margins = AttachedTable(f"margins on {points.subject.corpus}", make_margin_rows(points, losses), MARGINS)
    text = AttachedTable("a text at every margin", make_token_rows(points, [loss.point for loss in losses]), TOKENS)
    return Attachments((margins, text))


def compute_margin_losses(points: CandidatePoints) -> list[PointLoss]:
    """Full depth, then every margin of the sweep and of the selected points, by rising saving."""
    swept = list(points.emad_sweep_losses)[1:]
    at = {loss.point.margin_nats: loss for loss in (*swept, *points.selected_evaluation_losses)}
    return [points.full_loss, *sorted(at.values(), key=lambda loss: -(loss.point.margin_nats or 0.0))]


def make_margin_rows(points: CandidatePoints, losses: Sequence[PointLoss]) -> list[dict[str, Any]]:
    """A row per loss. Columns that end in " %" are fractions; ``thresholds, nats`` one per probe, () at full depth."""
    rng = np.random.default_rng(points.subject.seed)
    draws = draw_document_counts(len(points.traces.document_lengths), RESAMPLES, rng)
    return [_margin_row(points, loss, draws) for loss in losses]


def _margin_row(points: CandidatePoints, loss: PointLoss, draws: Any) -> dict[str, Any]:
    rise = estimate_point_rise(loss, threshold=0.0, rng=np.random.default_rng(points.subject.seed), draws=draws)
    bounded = loss != points.full_loss and np.isfinite([rise.low, rise.high]).all()
    return {
        "point": loss.point.name,
        "put forward as": ", ".join(points.roles_by_point.get(loss.point, ())),
        "corpus": points.subject.corpus,
        "margin, nats": loss.point.margin_nats,
        "mean depth": loss.mean_depth,
        "net reduction %": loss.net_reduction,
        "perplexity": loss.perplexity,
        "rise %": loss.perplexity_rise,
        "rise low %": rise.low if bounded else None,
        "rise high %": rise.high if bounded else None,
        "probes": list(loss.point.probes),
        "thresholds, nats": [float(np.float32(each)) for row in loss.point.thresholds for each in row],
    }


def make_token_rows(points: CandidatePoints, compared: Sequence[OperatingPoint]) -> list[dict[str, Any]]:
    """A row per token; lists of prompt tokens are empty, because their depth is not decided.

    ``entropy, nats``: one per probe. ``depths``: one per point of ``compared``. ``instead``: the likeliest token at
    that depth, None if it is the emitted one.

    Raises:
        Unsupported: no document is as long as a prompt.
    """
    subject, probes = points.subject, max((point.probes for point in compared), key=len)
    read = min(PROMPT, subject.window_size // 2)
    tokenizer = subject.loaded.tokenizer
    windows = [window.tokens for window in subject.cut_windows("evaluate", TRIED)]
    opened = [Prompt(find_readable_opening(tokenizer, tokens, read)) for tokens in windows if len(tokens) >= read]
    if not opened:
        raise Unsupported(f"corpus={subject.corpus!r} has no document of {read} tokens to open a text with")
    continuation = subject.generate_greedy(opened, min(CONTINUED, subject.window_size - read))
    texts = [np.concatenate([prompt.tokens, emitted]) for prompt, emitted in zip(opened, continuation, strict=True)]
    decided = [TokenSequence(text, first_decided=read - 1) for text in texts]
    trace = subject.take_lens_trace(decided, "texts for the page", layers=points.traces.layers_read)
    replays = list(iterate_point_replays(trace, compared))
    number, rows = _most_varied(trace, replays, [mean_word_length(tokenizer, text) >= READABLE for text in texts])
    words = decode_tokens_singly(tokenizer, texts[number])
    columns: list[dict[str, Any]] = [{"depths": [], "instead": [], "entropy, nats": []}] * read
    columns += [_token_row(points, trace, replays, probes, row) for row in rows]
    return [
        {"token": piece, "part": "prompt" if at < read else "continuation", **one}
        for at, (piece, one) in enumerate(zip(words, columns, strict=True))
    ]


def find_readable_opening(tokenizer: Any, tokens: Ints, read: int) -> Ints:
    """``read`` tokens (int64) from the line start of ``tokens`` with the longest words; the first of equals.

    A special token that opens ``tokens`` stays in front, since the model was trained behind it.
    """
    if tokenizer is None:
        return tokens[:read]
    front = tokens[:1] if tokens[0] in tokenizer.all_special_ids else tokens[:0]
    lines = [
        len(front),
        *(at + 1 for at, text in enumerate(decode_tokens_singly(tokenizer, tokens)) if text.endswith("\n")),
    ]
    length = read - len(front)
    openings = [np.concatenate([front, tokens[at : at + length]]) for at in lines if at + length <= len(tokens)]
    return max(openings, key=lambda opening: mean_word_length(tokenizer, opening))


def mean_word_length(tokenizer: Any, tokens: Ints) -> float:
    """Mean length of the words between spaces in the text of ``tokens``; infinite without a tokenizer."""
    if tokenizer is None:
        return float("inf")
    words = decode_tokens(tokenizer, tokens.tolist(), skip_special_tokens=True).split()
    return sum(map(len, words)) / max(len(words), 1)


def _most_varied(trace: Trace, replays: Sequence[ReplayResult], readable: Sequence[bool]) -> tuple[int, range]:
    """(Number, rows) of the text with the largest difference of depth, among readable ones if any."""
    depth = np.stack([each.depth for each in replays])
    rows = [range(*bounds) for bounds in itertools.pairwise(trace.starts.tolist())]
    numbers = [number for number, words in enumerate(readable) if words] or range(len(rows))
    number = max(numbers, key=lambda number: depth[:, rows[number]].var())
    return number, rows[number]


def _token_row(
    points: CandidatePoints, trace: Trace, replays: Sequence[ReplayResult], probes: tuple[int, ...], row: int
) -> dict[str, Any]:
    columns, target = np.array(probes, dtype=np.int64) - 1, trace.target[row]
    others = [None if each.top1[row] == target else each.top1[row : row + 1].astype(np.int64) for each in replays]
    tokenizer = points.subject.loaded.tokenizer
    return {
        "depths": [int(each.depth[row]) for each in replays],
        "instead": [None if other is None else decode_tokens_singly(tokenizer, other)[0] for other in others],
        "entropy, nats": [float(value) for value in trace.entropy_nats[row, columns]],
    }


def decode_tokens_singly(tokenizer: Any, tokens: Ints) -> list[str]:
    """Text of each token alone; its id without a tokenizer."""
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in tokens.tolist()]
    return [decode_tokens(tokenizer, [token]) for token in tokens.tolist()]
