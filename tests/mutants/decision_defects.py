"""Defects of depths, signals, thresholds, fields of a point and counted work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emad_ref.decoding.step import AdaptiveForward, StepOutput
from emad_ref.point import EntropyEstimator, OperatingPoint, ThresholdBinSpec, full_depth
from emad_ref.protocol import InadmissibleDepth, Prompt, Step
from emad_ref.record import Floats, Ints, Work
from emad_ref.schedule.schedules import TokenDepthCap
from emad_ref.signals import ENTROPY, SIGNALS
from tests.mutants.cache_defects import OF_PAIRS, PAIRS, UNCHECKED
from tests.mutants.mutant import (
    Mutant,
    MutantDecoder,
    MutantFactory,
    MutantNotApplicable,
    MutantSession,
    Overrides,
    make_decoder,
    make_mutants_for_test,
    mutate,
)

DECISIONS = "invariants/test_depth.py::test_signals_depths_and_ledger_are_the_rules"
GENERATED = "fidelity/test_bridge.py::test_generated_tokens_are_the_argmax_at_their_depths"
FIELDS = "invariants/test_fields.py::test_every_field_of_a_point_is_honoured_or_declined"
DIGITS = "invariants/test_fields.py::test_thresholds_are_compared_to_the_last_digit"
LAST = "invariants/test_fields.py::test_as_many_logits_are_shown_as_are_wanted"
COSTS = "invariants/test_fields.py::test_the_same_tokens_cost_the_same_at_every_point"
OBSERVED = "invariants/test_apart.py::test_counted_work_is_the_work_that_runs"
PLACE = r"row \d+, position \d+, depth \d+.*: "
OWN_WORD = r"by the signals that it reports the rule gives depth"
COUNTED = r"work|runs of|counts"
COMPARED = [name for name, signal in SIGNALS.items() if signal.needs_only_thresholds and signal is not ENTROPY]


# ---------------------------------------------------------------- depths


def admit_depths_to_ceiling(original: Any, session: Any, length: Ints | None = None) -> list[TokenDepthCap]:
    """Every token may run to the ceiling, over K/V that were never written."""
    return [TokenDepthCap(session._point.ceiling) for _ in session._trail]


def report_last_depth_as_cap(original: Any, session: Any) -> Ints:
    return np.array([trail[-1] if trail else session._point.ceiling for trail in session._trail])


def accept_rising_depths(original: Any, session: Any, depth: Ints, shape: tuple[int, ...]) -> Ints:
    if ((depth < 1) | (depth > session._point.ceiling)).any():
        raise InadmissibleDepth(f"depth={depth.tolist()}, but expected 1–{session._point.ceiling}")
    return depth


def refuse_depth_after_feeding(feed: Any, session: Any, *arguments: Any) -> Step:
    """Refuses an inadmissible depth only after feeding the first row."""
    try:
        step: Step = feed(*arguments)
    except InadmissibleDepth:
        session._trail[0].append(1)
        raise
    return step


def refuse_depth_at_cap(checked_depth: Any, session: Any, depth: Ints, shape: tuple[int, ...]) -> Ints:
    if (depth[:, 0] >= session.cap).any() and (session.cap > 1).all():
        raise InadmissibleDepth(f"depth={depth.tolist()}, but expected less than {session.cap.tolist()}")
    checked: Ints = checked_depth(depth, shape)
    return checked


def exit_rows_together(least: int) -> dict[str, Callable[..., Any]]:
    """With at least ``least`` rows, all exit at the first exit of any row; each reports its own signal."""

    def advance(original: Any, session: Any, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        output: StepOutput = original(ids, forced, last)
        if forced is not None or len(ids) < least or ids.shape[1] > 1:
            return output
        held = session.length - 1
        for trail, kept in zip(session._trail, held.tolist(), strict=True):
            del trail[kept:]
        session._store.cache.truncate(held)
        shallowest = np.full_like(output.depth, output.depth.min())
        ran: StepOutput = original(ids, shallowest, last)
        above = np.array(session._point.probes) > shallowest[..., None]
        return replace(ran, signal=np.where(above, np.nan, output.signal), cap=output.cap)

    return {"process_tokens": advance}


def claim_shallower_depths(advance: Any, session: Any, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
    """Reports a depth of one layer less than each token ran, at least 1."""
    output: StepOutput = advance(ids, forced, last)
    if forced is not None:
        return output
    claimed = np.maximum(output.depth - 1, 1)
    for trail, depths in zip(session._trail, claimed.tolist(), strict=True):
        trail[-len(depths) :] = depths
    return replace(output, depth=claimed)


class FullDepthLogitsSession(MutantSession):
    """Shows full-depth logits under the shallow depths that the rule chose."""

    in_feed = True

    def __init__(self, walker: Any, prompts: Sequence[Prompt], capacity: int):
        super().__init__(walker, prompts, capacity)
        deep = AdaptiveForward(walker.stepper, full_depth(walker.stepper.layers))
        self.deep, self.feeding = MutantSession(deep, prompts, capacity), False

    def feed(self, tokens: Ints, depth: Ints | None = None, last: int | None = None) -> Step:
        self.feeding = True
        return super().feed(tokens, depth, last)

    def _run_prompts(self, heads: Any, lengths: Ints) -> Tensor:
        self.deep._run_prompts(heads, lengths)
        return super()._run_prompts(heads, lengths)

    def process_tokens(self, ids: Tensor, forced: Ints | None, last: int = 1) -> StepOutput:
        output = super().process_tokens(ids, forced, last)
        full = self.deep.process_tokens(ids, np.full(ids.shape, self._stepper.layers), last)
        return replace(output, logits=full.logits) if self.in_feed or not self.feeding else output

    def rollback(self, length: Ints) -> None:
        super().rollback(length)
        self.deep.rollback(length)

    def drop(self, rows: Ints) -> None:
        super().drop(rows)
        self.deep.drop(rows)


class FullDepthGenerateLogitsSession(FullDepthLogitsSession):
    """The same only in ``generate``: ``feed`` shows the logits of the executed depth."""

    in_feed = False


def keep_cap_after_rollback(rollback: Any, session: Any, length: Ints) -> None:
    caps = session.cap.tolist()
    rollback(length)
    for trail, cap in zip(session._trail, caps, strict=True):
        trail[-1] = min(trail[-1], cap)


# ---------------------------------------------------------------- signals and rules


def change_probe_signal(change: Callable[[Any, Tensor, Tensor], Tensor]) -> MutantFactory:
    """A probe reads ``change(decoder, signal, hidden)`` instead of the rows' signal."""

    def prepare(decoder: Any) -> None:
        probe = decoder._forward.probe
        read = probe.read

        def changed(hidden: Tensor, number: int, work: Work, *row_ids: Ints) -> Any:
            output = read(hidden, number, work, *row_ids)
            return replace(output, signal=change(decoder, output.signal, hidden))

        probe.read = changed

    return mutate(prepare=prepare)


def signal_without_norm(decoder: Any, signal: Tensor, hidden: Tensor) -> Tensor:
    head = decoder.stepper.unembedding
    if head.shape[1] != hidden.shape[1]:
        raise MutantNotApplicable("states are projected before the head: they cannot be read without it")
    return SIGNALS[decoder.point.signal].compute_from_logits(hidden @ head.T)


def decide_at_changed_point(rule: Callable[[OperatingPoint], OperatingPoint]) -> MutantFactory:
    """Decides by another point than the requested one."""

    def prepare(decoder: Any) -> None:
        if decoder.point.probes:
            decoder._forward.point = rule(decoder.point)

    return mutate(prepare=prepare)


def loosen_thresholds(point: OperatingPoint) -> OperatingPoint:
    return replace(point, thresholds=tuple(tuple(one + 0.5 for one in row) for row in point.thresholds))


def loosen_if_calibrated(point: OperatingPoint) -> OperatingPoint:
    """Loosens only calibrated points, at which losses are read."""
    return point if point.margin_nats is None else loosen_thresholds(point)


def take_thresholds_of_next_probe(point: OperatingPoint) -> OperatingPoint:
    return replace(point, thresholds=tuple((*row[1:], *row[-1:]) for row in point.thresholds))


def report_no_signals(advance: Any, session: Any, *arguments: Any) -> StepOutput:
    output: StepOutput = advance(*arguments)
    return replace(output, signal=np.full_like(output.signal, np.nan))


def shift_logits_by_row(advance: Any, session: Any, *arguments: Any) -> StepOutput:
    output: StepOutput = advance(*arguments)
    return replace(output, logits=torch.roll(output.logits, 1, 0))


# ---------------------------------------------------------------- fields of a point


def decode_at_changed_point(change: Callable[[OperatingPoint], OperatingPoint]) -> MutantFactory:
    """An honest decoder of another point than the one requested."""
    return lambda request: make_decoder(MutantDecoder, replace(request, point=change(request.point)))


def drop_estimator(point: OperatingPoint) -> OperatingPoint:
    return point if SIGNALS[point.signal].is_learned else replace(point, estimator=EntropyEstimator())


def use_entropy_signal(point: OperatingPoint) -> OperatingPoint:
    plain = point.confidence is None and not SIGNALS[point.signal].is_learned
    return replace(point, signal="entropy_nats", decay=None, decay_form="free") if plain else point


def exit_only_at_probes(point: OperatingPoint) -> OperatingPoint:
    if point.layers < 6:
        raise MutantNotApplicable("probes of so few layers leave none between them")
    return replace(point, interpolate=False)


def drop_alpha_decay(point: OperatingPoint) -> OperatingPoint:
    return point if point.confidence is None else replace(point, confidence=replace(point.confidence, alpha_decay=None))


def use_monotone_schedule(point: OperatingPoint) -> OperatingPoint:
    return replace(point, schedule="monotone") if point.schedule.startswith("free") else point


def decide_at_changed_thresholds(change: Callable[[Floats, str], Floats]) -> MutantFactory:
    """Compares with ``change(thresholds, sense)`` of the finite thresholds float64 [bins, probes]."""

    def rule(point: OperatingPoint) -> OperatingPoint:
        given = np.array(point.thresholds, dtype=np.float32)
        finite = np.isfinite(given)
        changed = np.where(finite, change(np.where(finite, given, 0), SIGNALS[point.signal].sense), given)
        return replace(point, thresholds=tuple(tuple(row) for row in changed.tolist()))

    return decide_at_changed_point(rule)


def round_to_bfloat16(values: Floats, sense: str = "") -> Floats:
    """``values`` rounded to the first 16 bits, to nearest."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    cut = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return cut.astype(np.uint32).view(np.float32).astype(np.float64)


def round_comparison_to_bfloat16(thresholds: Floats, sense: str) -> Floats:
    """Rounds signals, too, so that values up to half a step beyond the threshold pass."""
    near = round_to_bfloat16(thresholds)
    half = np.exp2(np.floor(np.log2(np.maximum(np.abs(near), 2.0**-100))) - 8)
    moved: Floats = near + (half if sense == "falls" else -half)
    return moved


def tighten_thresholds(thresholds: Floats, sense: str) -> Floats:
    towards = np.float32(-np.inf if sense == "falls" else np.inf)
    nearest: Floats = np.nextafter(thresholds.astype(np.float32), towards).astype(np.float64)
    return nearest


def shift_thresholds_by_probe(point: OperatingPoint) -> OperatingPoint:
    return replace(point, thresholds=tuple((*row[1:], row[-1]) for row in point.thresholds))


def subtract_margin_twice(point: OperatingPoint) -> OperatingPoint:
    margin = point.margin_nats or 0.0
    return replace(point, thresholds=tuple(tuple(one - margin for one in row) for row in point.thresholds))


# ---------------------------------------------------------------- results of feed


def change_feed_step(change: Callable[[Step], Step]) -> Overrides:
    """Overrides of a session: every ``feed`` returns ``change`` of its step."""
    return {"feed": lambda feed, session, *arguments: change(feed(*arguments))}


def replace_logits_by_nan(step: Step) -> Step:
    return replace(step, logits=np.full_like(step.logits, np.nan))


def drop_logits_axis(step: Step) -> Step:
    return replace(step, logits=step.logits[:, -1])


def return_first_logits_as_last(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    step: Step = feed(tokens, depth)
    return step if last is None else replace(step, logits=step.logits[:, :last])


def cut_depths_and_signals(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    step: Step = feed(tokens, depth, last)
    first = 0 if last is None else tokens.shape[1] - last
    return replace(step, depth=step.depth[:, first:], signal=step.signal[:, first:])


def run_heads_of_all_tokens(
    feed: Any, session: Any, tokens: Ints, depth: Ints | None = None, last: int | None = None
) -> Step:
    step: Step = feed(tokens, depth)
    return step if last is None else replace(step, logits=step.logits[:, tokens.shape[1] - last :])


# ---------------------------------------------------------------- work


def report_changed_work(change: Callable[[Any, Work], Work]) -> MutantFactory:
    """Reports ``change(session, work)`` instead of the executed work."""
    return mutate(session={"work": lambda work, session: change(session, work())})


def multiply_work(work: Work, tokens: int, context: int) -> Work:
    return replace(work, tokens=work.tokens * tokens, context=work.context * context)


def uncount_rolled_back_work(rollback: Any, session: Any, length: Ints) -> None:
    for trail, kept in zip(session._trail, length.tolist(), strict=True):
        for depth in trail[kept:]:
            session._store.work.tokens[:depth] -= 1
    rollback(length)


def run_all_layers_uncounted(advance: Any, session: Any, ids: Tensor, *arguments: Any) -> StepOutput:
    """All layers run for every token; layers that the rule skips are not counted."""
    stepper = session._stepper
    if stepper.geometry.encoder_layers:
        raise MutantNotApplicable("blocks that read a source do not run beside a session")
    inputs = stepper.prepare_forward(np.tile(np.arange(ids.shape[1]), (len(ids), 1)), None)
    stepper.run_layers(stepper.embed(ids, inputs), 0, stepper.layers, inputs)
    output: StepOutput = advance(ids, *arguments)
    return output


def run_uncounted_heads(advance: Any, session: Any, ids: Tensor, *arguments: Any) -> StepOutput:
    """The head runs twice per layer, regardless of the rule."""
    stepper = session._stepper
    states = torch.ones(len(ids), stepper.geometry.hidden, dtype=stepper.dtype, device=stepper.device)
    for _ in range(2 * stepper.layers):
        stepper.logits(states)
    output: StepOutput = advance(ids, *arguments)
    return output


# depths that the rule does not give, or work beyond that of right ones
MUTANTS = (
    Mutant("depth-rises", "depth", "every token may go to the ceiling again",
           mutate(session={"_admissions": admit_depths_to_ceiling}, cache=UNCHECKED), DECISIONS,
           r"depth must not rise|cap"),
    Mutant("depth-rises-unsaid", "depth", "the same, while the cap is reported as if it held",
           mutate(session={"_admissions": admit_depths_to_ceiling, "cap": report_last_depth_as_cap}, cache=UNCHECKED),
           DECISIONS,
           r"depth must not rise"),
    Mutant("depth-forced-up", "depth", "a forced depth above the cap is accepted",
           mutate(session={"_checked_depth": accept_rising_depths}, cache=UNCHECKED), PAIRS,
           OF_PAIRS, case="sessions"),
    Mutant("depth-refused-late", "depth", "an inadmissible depth is refused after a row was fed",
           mutate(session={"feed": refuse_depth_after_feeding}), PAIRS, OF_PAIRS,
           case="sessions"),
    Mutant("depth-cap-refused", "depth", "the cap itself is refused",
           mutate(session={"_checked_depth": refuse_depth_at_cap}), PAIRS, OF_PAIRS,
           case="sessions"),
    Mutant("depth-claimed-shallower", "depth", "tokens are said to have stopped a layer before they did",
           mutate(session={"process_tokens": claim_shallower_depths}), DECISIONS, PLACE),
    Mutant("depth-unearned", "depth", "logits of full depth under the depths of the rule",
           mutate(session=FullDepthLogitsSession), DECISIONS, rf"{PLACE}logits off by"),
    Mutant("depth-unearned-in-generate", "depth", "the same, in generate alone",
           mutate(session=FullDepthGenerateLogitsSession), GENERATED, rf"{PLACE}emitted \d+, but the argmax"),
    Mutant("depth-cap-after-rollback", "depth", "rollback does not restore the cap",
           mutate(session={"rollback": keep_cap_after_rollback}), PAIRS, OF_PAIRS,
           case="sessions"),
    *make_mutants_for_test("batch", PAIRS, OF_PAIRS,
        ("batch-exits-together", "all rows leave where the first does", mutate(session=exit_rows_together(2))),
        ("batch-exits-together-from-4", "the same from four rows on", mutate(session=exit_rows_together(4))),
        ("batch-exits-together-from-5", "the same from five rows on", mutate(session=exit_rows_together(5))),
        case="sessions"),
    Mutant("batch-first-row's-signal", "batch", "every row decides by the first one's signal",
           change_probe_signal(lambda decoder, signal, hidden: signal[:1].expand(len(signal)).clone()), DECISIONS,
           rf"{PLACE}signal off by"),
    Mutant("batch-answers-shifted", "batch", "answers come back one row off",
           mutate(session={"process_tokens": shift_logits_by_row}), PAIRS, OF_PAIRS,
           case="sessions"),
    *make_mutants_for_test("rule", DECISIONS, rf"{PLACE}signal off by",
        ("rule-signal-in-bits", "the signal is in bits, the threshold in nats",
         change_probe_signal(lambda decoder, signal, hidden: signal / math.log(2))),
        ("rule-signal-without-norm", "probes read the state before the last norm",
         change_probe_signal(signal_without_norm))),
    Mutant("rule-threshold-looser", "rule", "thresholds are half a nat too high",
           decide_at_changed_point(loosen_thresholds), DECISIONS,
           rf"{PLACE}the rule gives depth"),
    Mutant("rule-threshold-of-next-probe", "rule", "each probe takes the next one's threshold",
           decide_at_changed_point(take_thresholds_of_next_probe), FIELDS,
           r"probes and thresholds: row 0"),
    Mutant("rule-signals-unread", "rule", "no signal is reported",
           mutate(session={"process_tokens": report_no_signals}),
           DECISIONS, r"a signal that the rule compares was not read"),
    Mutant("arrays-nan", "arrays", "logits are NaN",
           mutate(session=change_feed_step(replace_logits_by_nan)), PAIRS, OF_PAIRS,
           case="sessions"),
    Mutant("arrays-shape", "arrays", "logits lack an axis",
           mutate(session=change_feed_step(drop_logits_axis)), PAIRS, OF_PAIRS, case="sessions"),

    # work
    *make_mutants_for_test("work", DECISIONS, COUNTED,
        ("work-of-probes-left-out", "readouts are free of charge",
         report_changed_work(lambda session, work: replace(work, readout_rows=np.zeros_like(work.readout_rows)))),
        ("work-of-context-left-out", "attention is charged for the new keys alone",
         report_changed_work(lambda session, work: replace(work, context=np.minimum(work.context, work.tokens)))),
        ("work-halved", "half of the blocks are counted",
         report_changed_work(lambda session, work: replace(work, tokens=work.tokens // 2))),
        ("work-doubled", "blocks are counted twice",
         report_changed_work(lambda session, work: multiply_work(work, 2, 2)))),
    Mutant("work-of-rollbacks-forgotten", "work", "rolled-back tokens are taken off the bill",
           mutate(session={"rollback": uncount_rolled_back_work}), PAIRS, OF_PAIRS,
           case="sessions"),
    Mutant("work-all-layers-then-route", "work", "all layers run, and a router is applied afterwards",
           mutate(session={"process_tokens": run_all_layers_uncounted}), OBSERVED,
           r"layer \d+ ran for .* but its record counts"),
    Mutant("work-head-at-every-layer", "work", "the head reads twice as often as there are layers",
           mutate(session={"process_tokens": run_uncounted_heads}), OBSERVED,
           r"the head ran for .* but its record counts"),
    Mutant("work-of-context-doubled", "work", "attention is charged twice",
           report_changed_work(lambda session, work: multiply_work(work, 1, 2)), PAIRS,
           OF_PAIRS, case="requests"),
    Mutant("work-of-full-depth-doubled", "work", "attention is charged twice at full depth",
           report_changed_work(lambda own, work: multiply_work(work, 1, 2) if own._point.has_fixed_depth else work),
           COSTS,
           r"layer 1 counts \d+ keys at full depth, but"),
    Mutant("work-of-batches-doubled", "work", "blocks of several rows are counted four times over",
           report_changed_work(lambda session, work: work if len(session._trail) == 1 else multiply_work(work, 4, 4)),
           DECISIONS,
           r"work\.tokens per layer .* imply at most"),
    Mutant("work-of-prompts-unsaid", "work", "the prompts' part of the work is not reported",
           mutate(generate=lambda original, decoder, *arguments: replace(original(*arguments), prompt_work=None)),
           GENERATED, r"prompt_work of models \[\]"),
    Mutant("work-of-no-source", "work", "an encoder is charged that the model does not have",
           report_changed_work(lambda session, work: replace(work, encoder_tokens=2 * work.encoder_tokens + 1)), COSTS,
           r"work\.encoder_tokens counts"),

    # fields of a point
    Mutant("field-bins-ignored", "fields", "every token takes the first row of thresholds",
           decode_at_changed_point(lambda point: replace(point, bins=ThresholdBinSpec(),
           thresholds=point.thresholds[:1])), FIELDS,
           r"bins of \w+: row 0"),
    Mutant("field-estimator-ignored", "fields", "probes read the full head, whatever estimator is asked for",
           decode_at_changed_point(drop_estimator), FIELDS, r"(estimates|readout|linear probes): row 0"),
    Mutant("field-signal-ignored", "fields", "entropy is compared, whatever signal is asked for",
           decode_at_changed_point(use_entropy_signal), FIELDS, rf"({'|'.join(COMPARED)}): row 0"),
    Mutant("field-decay-ignored", "fields", "thresholds do not fall",
           decode_at_changed_point(lambda point: replace(point, decay=None, decay_form="free")), FIELDS,
           r"thresholds that fall: row 0"),
    Mutant("field-decay-form-ignored", "fields", "thresholds fall by one form, whichever is named",
           decode_at_changed_point(lambda point: replace(point, decay_form="free")), FIELDS,
           r"thresholds that fall by CALM's form: row 0"),
    Mutant("field-interpolation-ignored", "fields", "tokens leave at probes alone",
           decode_at_changed_point(exit_only_at_probes), FIELDS,
           r"exits between probes: row 0", model="emad-tiny"),
    Mutant("field-alpha-decay-ignored", "fields", "α stays as it is", decode_at_changed_point(drop_alpha_decay), FIELDS,
           r"a decaying α: row 0"),
    Mutant("field-ceiling-ignored", "fields", "tokens run to the last layer, whatever the ceiling is",
           decode_at_changed_point(lambda point: replace(point, ceiling=point.layers)), FIELDS,
           r"a ceiling below the last layer: "),
    Mutant("field-schedule-ignored", "fields", "depth never rises, whatever the schedule is",
           decode_at_changed_point(use_monotone_schedule), FIELDS, r"free depth, \w+: "),
    Mutant("field-lens-ignored", "fields", "heads are the model's own, whatever lens is named",
           decode_at_changed_point(lambda point: replace(point, lens=None)), FIELDS,
           r"a tuned lens that does not exist: decoded at"),
    *make_mutants_for_test("comparisons", DIGITS, OWN_WORD,
        ("compared-thresholds-in-bfloat16", "thresholds are kept in bfloat16",
         decide_at_changed_thresholds(round_to_bfloat16)),
        ("compared-thresholds-in-float16", "thresholds are kept in float16",
         decide_at_changed_thresholds(lambda thresholds, sense: thresholds.astype(np.float16).astype(np.float64))),
        ("compared-in-bfloat16", "signals and thresholds are compared in bfloat16",
         decide_at_changed_thresholds(round_comparison_to_bfloat16)),
        ("compared-strictly", "a signal that equals its threshold does not pass",
         decide_at_changed_thresholds(tighten_thresholds)),
        ("compared-with-the-next", "each probe compares with the threshold of the next",
         decide_at_changed_point(shift_thresholds_by_probe)),
        ("compared-margin-twice", "the margin, which thresholds hold already, is subtracted again",
         decide_at_changed_point(subtract_margin_twice))),
    Mutant("last-from-the-front", "last", "of a feed the first logits are shown, not the last",
           mutate(session={"feed": return_first_logits_as_last}), LAST,
           r"row \d, position \d+, depth \d+: logits off by"),
    Mutant("last-of-depths-too", "last", "depths and signals are those of the last tokens alone",
           mutate(session={"feed": cut_depths_and_signals}), LAST, r"step\.depth has shape"),
    Mutant("last-heads-all-run", "last", "heads run for all tokens, however few logits are wanted",
           mutate(session={"feed": run_heads_of_all_tokens}), LAST,
           r"work counts \d+ heads, but the logits of \d+ positions"),
)  # fmt: skip
