"""Wall-clock of adaptive depth (EMAD-F2, X3 and X4), and of repair without the monotone constraint (EMAD-E7).

The claims time paired end-to-end requests. The time of a mix of requests is their total: a leg estimates the ratio of
totals (``statistics.speedup.estimate_total_speedup``). EMAD-F2 times a point that
EMAD-F1 judges and does not falsify (``claims.base.is_point_quality_unfalsified``), EMAD-X3 an exit that survives
EMAD-X1. Without one the row does not apply, and lists its ratios. This includes random weights, which take as long as
trained ones and have no quality to lose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from emad_ref.absent import Absent
from emad_ref.decoding.teacher_forcing import sequence_nll_sums_and_counts
from emad_ref.models.generation import LOOKUP
from emad_ref.point import OperatingPoint, ScheduleName
from emad_ref.replay.losses import replay_losses
from pytest_emad.audit.finding import Finding
from pytest_emad.claims.base import (
    Answer,
    ClaimContext,
    Question,
    absent_for_decoder,
    answer_unmet_learned_exit_premise,
    is_point_quality_unfalsified,
    make_unmet_learned_exit_verdict,
)
from pytest_emad.measurements.attachments import AttachedTable, Attachments
from pytest_emad.measurements.latency import (
    ADAPTIVE,
    COMPILED,
    FULL,
    GENERATE,
    LOOKUP_ROWS,
    LatencyBenchmark,
    TimingResult,
    is_compiled_baseline_tried,
)
from pytest_emad.measurements.learned_exit import SelfSpeculationTiming
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.operating_points import NllPair
from pytest_emad.measurements.study import Study
from pytest_emad.measurements.traces import documents_of_windows
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.statistics.legs import (
    LegTest,
    build_measured_count_leg,
    build_measured_estimate_leg,
    decide_legs,
    interval_if_finite,
)
from pytest_emad.statistics.rates import estimate_perplexity_rise
from pytest_emad.statistics.speedup import BatchSizeLimit, estimate_total_speedup, find_batch_size_limit
from pytest_emad.statistics.units import ByDocument, ByPair
from pytest_emad.statistics.verdicts import Leg, Outcome, Verdict

BASELINES = {  # arm → its name in legs
    FULL: "full depth",
    GENERATE: "generate",
    COMPILED: "compiled generate",
    LOOKUP: "generate with prompt lookup",
}
ENDS = "batch size at which the gain vanishes"


@dataclass(frozen=True)
class TimedBatch:
    """Seconds [pairs] of the same requests, at the point and by each baseline; ``check``: of their outputs."""

    adaptive: ByPair
    baselines: Mapping[str, ByPair]
    check: Finding | None = None


@dataclass(frozen=True)
class SpeedupEvidence:
    """``batches``: batch size → times. ``unusable``: why no speed-up of this point counts; None: it does.

    ``not_run``: arm of a baseline that did not run → why. ``swept``: non-deciding batch sizes, from fewer pairs;
    empty without a sweep.
    """

    batches: Mapping[int, TimedBatch]
    unusable: Absent | None = None
    not_run: Mapping[str, Absent] = field(default_factory=dict)
    swept: Mapping[int, TimedBatch] = field(default_factory=dict)

    @property
    def all_batches(self) -> Mapping[int, TimedBatch]:
        """Deciding and other batch sizes, ascending."""
        return dict(sorted({**self.batches, **self.swept}.items()))


def decide_speedup(found: SpeedupEvidence, asked: ClaimContext, also: Sequence[Leg] = ()) -> Verdict:
    """EMAD-F2, X3: a leg per batch size and baseline: the speed-up against ``speedup_ratio``.

    Choosing the fastest baseline by measured time would favour noise. So the row survives only if the point is faster
    than each baseline (an intersection–union test, without correction), and one baseline against which it is proven not
    faster falsifies it (Holm). A leg with its whole 95 % interval below 1× is falsified without Holm's correction,
    because of the distance from the threshold.

    Other batch sizes (``swept``) are only listed, since more legs would make each harder to pass. Timed requests that
    contradict their record (``audit.spot_checks``) falsify the row, even if other legs are absent.

    Args:
        also: further legs, which are only listed.
    """
    if not found.batches:
        return asked.unmeasured("no batch size was timed", also)
    threshold = asked.claim.thresholds["speedup_ratio"]
    ratios = dict(_ratios(found.batches, threshold))
    broken = _checks(found)
    lies = any(leg.outcome == "falsified" for leg in broken)
    beside = [] if lies else _swept(found, threshold)  # without valid times no batch size is reported
    for arm, absent in found.not_run.items():
        reason = f"{arm} baseline not run: {absent.reason}"
        beside.append(Leg(f"{arm} baseline", "not applicable", None, None, 0, None, "", reason))
    beside += also
    if found.unusable:
        numbers = [build_measured_estimate_leg(name, ratio, threshold=threshold) for name, ratio in ratios.items()]
        legs = [*broken, *numbers, *beside]
        if lies:
            return asked.combine_legs(legs)
        return asked.lacking(found.unusable, legs)
    tests = [_test_speedup(asked.make_leg_test(name, ratio, "below", threshold)) for name, ratio in ratios.items()]
    gain_ends = "" if lies or not found.swept else estimate_batch_size_limit(found.all_batches).description
    return asked.combine_legs([*broken, *decide_legs(tests, asked.other_legs), *beside], notes=[gain_ends])


def estimate_batch_size_limit(batches: Mapping[int, TimedBatch]) -> BatchSizeLimit:
    """Batch size at which the gain over every baseline ends. Raises BadArgument as ``find_batch_size_limit``."""
    return find_batch_size_limit({
        rows: {name: estimate_total_speedup(baseline, timed.adaptive) for name, baseline in timed.baselines.items()}
        for rows, timed in batches.items()
    })  # fmt: skip


def _swept(found: SpeedupEvidence, threshold: float) -> list[Leg]:
    """Listed legs: ratios of non-deciding batch sizes, and the batch size at which the gain ends."""
    if not found.swept:
        return []
    legs = [
        build_measured_estimate_leg(name, ratio, threshold=threshold) for name, ratio in _ratios(found.swept, threshold)
    ]
    ends = estimate_batch_size_limit(found.all_batches)
    last = ends.first_insignificant_speedup or ends.sweep[-1]
    rows = None if ends.first_insignificant_speedup is None else float(last.rows)
    return [*legs, Leg(ENDS, "measured", rows, None, last.ratio.n, None, "rows", ends.description)]


def _test_speedup(test: LegTest) -> LegTest:
    """The test, which falsifies the leg if its interval proves that the baseline is faster."""
    if test.leg.interval is None or test.leg.interval[1] >= 1:
        return test
    return replace(test, surely_fails="slower than this baseline: the whole interval lies below 1×")


def _ratios(batches: Mapping[int, TimedBatch], threshold: float) -> Iterator[tuple[str, Estimate]]:
    for batch, timed in batches.items():
        for name, baseline in timed.baselines.items():
            yield (
                f"batch {batch}, against {name}",
                estimate_total_speedup(baseline, timed.adaptive, threshold=threshold),
            )


def _checks(found: SpeedupEvidence) -> list[Leg]:
    """Leg per batch size: falsified if timed requests contradict their record; else the amount compared."""
    legs = []
    for batch, timed in found.all_batches.items():
        if timed.check is None:
            continue
        outcome: Outcome = "falsified" if timed.check.passed is False else "measured"
        compared = timed.check.n
        name, unit = f"batch {batch}: timed requests", "tokens compared"
        legs.append(Leg(name, outcome, float(compared), None, compared, None, unit, timed.check.detail))
    return legs


def answer_speedup(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-F2 on the most saving proposed point that EMAD-F1 does not falsify; attaches its table row."""
    if evidence.subject.is_seq2seq and (absent := evidence.subject.absent_quality):
        return Answer(asked.lacking(absent), evidence.corpus, evidence.fingerprint)
    point, unusable, timed = time_chosen_point(evidence, asked)
    found = measure_speedup(evidence, point, unusable, timed)
    attachments = make_speedup_attachments(found, evidence, point, asked) + Attachments(
        points=(evidence.latency.make_timing_row(point),)
    )
    refused = absent_for_decoder(evidence) if unusable else None
    return Answer(decide_speedup(found, asked), evidence.corpus, evidence.fingerprint, attachments, refused)


def measure_speedup(
    evidence: ModelMeasurements, point: OperatingPoint, unusable: Absent | None, timed: Mapping[int, TimingResult]
) -> SpeedupEvidence:
    """Evidence from ``timed``, batch size → times at ``point``: checks their outputs, and times further sizes."""
    latency = evidence.latency

    def make_batches(timings: Mapping[int, TimingResult]) -> dict[int, TimedBatch]:
        return {
            rows: make_timed_batch(each, latency.check_point_outputs(each, point)) for rows, each in timings.items()
        }

    return SpeedupEvidence(
        make_batches(timed),
        unusable,
        absent_baselines(latency),
        make_batches(latency.time_extra_batch_sizes(point)),
    )


def absent_baselines(latency: LatencyBenchmark) -> dict[str, Absent]:
    """Arm of a baseline that does not run here → why."""
    baselines = {COMPILED: latency.absent_compiled, LOOKUP: latency.absent_lookup}
    return {arm: absent for arm, absent in baselines.items() if absent}


def make_speedup_attachments(
    found: SpeedupEvidence, evidence: ModelMeasurements, point: OperatingPoint, asked: ClaimContext
) -> Attachments:
    """Attachments: a note on the timing and its power, the end of the gain, and the times of all arms."""
    legs = sum(len(timed.baselines) for timed in found.batches.values()) + asked.other_legs
    latency = evidence.latency
    notes = [
        latency.format_timing_note(point, asked.claim.thresholds["speedup_ratio"], legs),
        latency.format_prefill_note(point),
    ]
    if found.swept:
        notes.append(
            f"{evidence.subject.name}: {point.name!r}: {estimate_batch_size_limit(found.all_batches).description}"
        )
    return Attachments((AttachedTable(f"{asked.claim.id}: time by batch size", make_time_rows(found)),), tuple(notes))


def make_time_rows(found: SpeedupEvidence) -> list[dict[str, Any]]:
    """Rows per batch size: mean time of a request by every arm, and the ratio against the least certain baseline."""
    rows, names = [], dict.fromkeys(name for timed in found.all_batches.values() for name in timed.baselines)
    for at in estimate_batch_size_limit(found.all_batches).sweep:
        timed, interval = found.all_batches[at.rows], interval_if_finite(at.ratio)
        arms = {"the point": timed.adaptive} | {name: timed.baselines.get(name) for name in names}
        rows.append({
            "batch": at.rows,
            "decides": at.rows in found.batches,
            "pairs": at.ratio.n,
            **{f"{name}, ms": seconds and 1e3 * float(seconds.values.mean()) for name, seconds in arms.items()},
            "least sure against": at.against,
            "× as fast": at.ratio.value,
            "low": interval and interval[0],
            "high": interval and interval[1],
        })  # fmt: skip
    return rows


def make_timed_batch(requests: TimingResult, check: Finding) -> TimedBatch:
    seconds = requests.paired_seconds_by_arm()
    return TimedBatch(
        seconds[ADAPTIVE], {name: seconds[arm] for arm, name in BASELINES.items() if arm in seconds}, check
    )


def time_chosen_point(
    evidence: ModelMeasurements, asked: ClaimContext
) -> tuple[OperatingPoint, Absent | None, dict[int, TimingResult]]:
    """``choose_point_to_time``, and batch size → times: ``n_indicative_pairs`` if no speed-up of the point counts."""
    point, unusable = choose_point_to_time(evidence, asked)
    pairs = evidence.latency.n_indicative_pairs if unusable else None
    return point, unusable, evidence.latency.time_point_by_batch_size(point, pairs)


def choose_point_to_time(evidence: ModelMeasurements, asked: ClaimContext) -> tuple[OperatingPoint, Absent | None]:
    """``choose_usable_point`` and None, else the most saving of all points and why its speed-up does not count."""
    point = choose_usable_point(evidence, asked)
    return (evidence.latency.most_saving_point, point) if isinstance(point, Absent) else (point, None)


def choose_usable_point(evidence: ModelMeasurements, asked: ClaimContext) -> OperatingPoint | Absent:
    """The most saving of the points that EMAD-F1 judges and does not falsify."""
    absent = evidence.subject.absent_quality
    if absent is not None:
        reason = (
            f"no usable point: {absent.reason}, and a speed-up is worth what quality it keeps; the ratios are measured "
            "all the same (--emad-require speed asks for weights that were trained)"
        )
        return Absent(reason, "premise")
    f1 = asked.verdict_of("EMAD-F1", evidence)
    best = evidence.points.choose_most_saving(lambda loss: is_point_quality_unfalsified(f1, loss.point.digest))
    if isinstance(best, Absent):
        return Absent(f"no usable point: {_describe_verdict(f1, asked)}", "premise")
    return best.point


def _describe_verdict(verdict: Verdict, asked: ClaimContext) -> str:
    """Text ``"claim" (id) is falsified``, without reasons, which that row gives."""
    return f'"{asked.row_of(verdict.id).display_title}" ({verdict.id}) is {verdict.verdict}'


def count_speedup_legs(study: Study) -> int:
    """Number of legs: batch sizes times baselines."""
    return sum(count_baselines(study, rows) for rows in study.budget.batch_sizes)


def count_baselines(study: Study, rows: int = LOOKUP_ROWS) -> int:
    """Number of baselines: full depth, ``generate``, compiled ``generate`` and prompt lookup if they run."""
    return len(BASELINES) - (not is_compiled_baseline_tried(study)) - (rows != LOOKUP_ROWS)


# ---------------------------------------------------------------- EMAD-X3: the exit found for this model


def answer_learned_exit_speedup(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-X3: as EMAD-F2, for this model's learned exit if it survives EMAD-X1; else ratios are listed."""
    if unjudged := answer_unmet_learned_exit_premise(evidence, asked):
        return unjudged
    point = evidence.exit_evaluation.recommended_point
    if isinstance(point, Absent):
        verdict = asked.not_applicable(f"no exit to time: {point.reason}")
        return Answer(verdict, evidence.corpus, evidence.fingerprint)
    x1 = asked.verdict_of("EMAD-X1", evidence)
    no_exit = Absent(f"no usable exit: {_describe_verdict(x1, asked)}", "premise")
    unusable = None if x1.verdict == "survived" else no_exit
    found = measure_speedup(evidence, point, unusable, evidence.latency.time_point_by_batch_size(point))
    return Answer(
        decide_speedup(found, asked),
        evidence.corpus,
        evidence.fingerprint,
        make_speedup_attachments(found, evidence, point, asked),
    )


# ---------------------------------------------------------------- EMAD-X4: the model drafts for itself


# (drafting as EMAD-F2's ``adaptive``, and its baselines; drafting as ``adaptive`` and other lossless ways → seconds
# [pairs] of the same one-row requests; batch size → share of accepted verified tokens)
SelfSpeculationEvidence = tuple[SpeedupEvidence, Mapping[str, ByPair], Mapping[int, float]]


def decide_self_speculation(found: SelfSpeculationEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-X4: legs of time, one request at a time (as EMAD-F2), and of the output; lists other lossless ways.

    Drafting uses arithmetic that one row leaves idle; several rows leave less. So larger batches are timed too, their
    output is judged, and their ratios show where the gain ends (``decoding.self_speculation``). The row does not apply
    to random weights, which draft as fast as trained ones but never right.
    """
    return decide_speedup(_one_row_decides(found[0]), asked, _other_lossless_ways(*found))


def _one_row_decides(raced: SpeedupEvidence) -> SpeedupEvidence:
    """Evidence in which batch size 1 decides, and larger batches are the sweep."""
    first = min(raced.batches, default=0)
    larger = {rows: timed for rows, timed in raced.batches.items() if rows != first}
    return replace(raced, batches={first: raced.batches[first]} if raced.batches else {}, swept=larger)


def _other_lossless_ways(raced: SpeedupEvidence, beside: Mapping[str, ByPair], stood: Mapping[int, float]) -> list[Leg]:
    """Legs: speed-up of drafting over each other lossless way."""
    legs = [
        build_measured_estimate_leg(f"batch 1, against {name}", estimate_total_speedup(seconds, beside[ADAPTIVE]))
        for name, seconds in beside.items()
        if name != ADAPTIVE
    ]
    for batch, share in stood.items():
        pairs = len(raced.batches[batch].adaptive)
        legs.append(
            build_measured_count_leg(f"batch {batch}: verified tokens that stand", share, pairs, "share of tokens")
        )
    return legs


def answer_self_speculation(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-X4 with the exit's own drafting over the judge's model; the decoder under test does not matter."""
    verdict, attachments = make_unmet_learned_exit_verdict(evidence, asked), Attachments()
    if verdict is None and evidence.self_speculation.drafting is None:
        verdict = asked.not_applicable("the exit holds no way to draft: none was found to pay")
    if verdict is None:
        latency, speculation = evidence.latency, evidence.self_speculation
        found = gather_self_speculation(speculation, absent_baselines(latency))
        verdict = decide_self_speculation(found, asked)
        times = AttachedTable(f"{asked.claim.id}: time by batch size", make_time_rows(_one_row_decides(found[0])))
        attachments = Attachments(
            (times,), (latency.describe_timing("drafts of the exit", speculation.timings_by_batch_size),)
        )
    return Answer(verdict, evidence.corpus, evidence.fingerprint, attachments)


def gather_self_speculation(
    speculation: SelfSpeculationTiming, not_run: Mapping[str, Absent]
) -> SelfSpeculationEvidence:
    """Evidence for EMAD-X4: times by arm, with the check of the timed outputs."""
    raced = {
        rows: make_timed_batch(timed, speculation.check_outputs(rows))
        for rows, timed in speculation.timings_by_batch_size.items()
    }
    stood = {rows: speculation.compute_accepted_share(rows) for rows in speculation.timings_by_batch_size}
    return SpeedupEvidence(raced, None, not_run), speculation.lossless_arm_timings.paired_seconds_by_arm(), stood


# ---------------------------------------------------------------- EMAD-E7: repair without the monotone constraint


EXACT: dict[str, ScheduleName] = {"eager backfill": "free_eager", "deferred fill": "free_deferred"}
COPYING, MONOTONE = "state copying", "monotone"
LEAST_SKIPPED = 0.05  # share of blocks that the rule must skip for a test of its repair
DECODED, DECODED_TOKENS = 32, 32  # documents, and tokens of each, for scoring state copying


@dataclass(frozen=True)
class BackfillEvidence:
    """Seconds [pairs] of full depth, of the rule under each exact repair, under state copying, and kept monotone.

    ``skipped``: share of skipped blocks of decided tokens before repair. ``net_reductions``: share of FLOPs saved by
    exact repair, as replayed; empty if replay is not valid. ``quality``: NLL under copied states and under exact ones
    at the same rule.
    """

    full: ByPair
    exact: Mapping[str, ByPair]
    copying: ByPair
    monotone: ByPair
    skipped: float
    net_reductions: Mapping[str, float] = field(default_factory=dict)
    quality: NllPair | None = None


def decide_backfill_speedup(found: BackfillEvidence, asked: ClaimContext) -> Verdict:
    """EMAD-E7: a leg per exact repair: the speed-up of the same rule over full depth.

    It lists state copying, which is not exact, the monotone schedule, which needs no repair, and FLOPs and quality if
    replay is valid. It does not apply if the rule skips too few blocks to need repair.
    """
    threshold = asked.claim.thresholds["speedup_ratio"]
    ratios = {
        name: estimate_total_speedup(found.full, seconds, threshold=threshold) for name, seconds in found.exact.items()
    }
    beside = [
        build_measured_estimate_leg(name, estimate_total_speedup(found.full, seconds, threshold=threshold))
        for name, seconds in ((COPYING, found.copying), (MONOTONE, found.monotone))
    ]
    beside.append(build_measured_count_leg("blocks left out", found.skipped, len(found.full), "share of blocks"))
    beside += [
        build_measured_count_leg(f"{name}: FLOPs", saved, 1, "net FLOP reduction")
        for name, saved in found.net_reductions.items()
    ]
    if found.quality is not None:
        rise = estimate_perplexity_rise(*found.quality, threshold=0.0, rng=asked.rng)
        beside.append(build_measured_estimate_leg(f"{COPYING}: perplexity", rise))
    if found.skipped < LEAST_SKIPPED:
        reason = f"the rule leaves out {100 * found.skipped:.1f} % of blocks: there is next to nothing to repair"
        numbers = [build_measured_estimate_leg(name, ratio) for name, ratio in ratios.items()]
        return asked.not_applicable(reason, [*numbers, *beside])
    return asked.judge_against_threshold(ratios, "above", threshold, beside)


def answer_backfill_speedup(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Answer EMAD-E7 from paired requests at batch 1; with a valid bridge also from replay and short openings."""
    rule = evidence.latency.most_saving_point
    exact = {name: replace(rule, name=name, schedule=schedule) for name, schedule in EXACT.items()}
    copying = replace(rule, name=COPYING, schedule="copying")
    requests = evidence.latency.time_against_full_depth(exact | {COPYING: copying, MONOTONE: rule}, decides=True)
    seconds = requests.paired_seconds_by_arm()
    found = BackfillEvidence(
        seconds["full"],
        {name: seconds[name] for name in exact},
        seconds[COPYING],
        seconds[MONOTONE],
        requests.compute_skipped_share(next(iter(exact)), evidence.subject.stepper.layers),
    )
    notes: tuple[str, ...] = (evidence.latency.describe_timing("repairs", {1: requests}),)
    if evidence.subject.absent_quality is None:
        if refused := evidence.replay_validity.absent_replay:
            notes += (f"{evidence.name}: {asked.claim.id}: no FLOPs and no quality: {refused.reason}",)
        else:
            saved = replay_losses(evidence.traces.evaluation, evidence.loaded.geometry, exact.values())
            reductions = {name: loss.net_reduction for name, loss in zip(exact, list(saved)[1:], strict=True)}
            found = replace(found, net_reductions=reductions, quality=measure_copied_and_exact_nll(evidence, copying))
    return Answer(
        decide_backfill_speedup(found, asked), evidence.corpus, evidence.fingerprint, Attachments(notes=notes)
    )


def measure_copied_and_exact_nll(evidence: ModelMeasurements, copying: OperatingPoint) -> NllPair:
    """NLL of state copying, decoded, against exact free depth on the openings of documents."""
    windows = evidence.subject.cut_windows("evaluate", DECODED)
    texts = [replace(window, tokens=window.tokens[:DECODED_TOKENS]) for window in windows]
    with evidence.subject.open_audited_decoder(copying) as decoder:
        copied, tokens = sequence_nll_sums_and_counts(decoder, texts)
    with evidence.subject.open_audited_decoder(replace(copying, schedule="free_eager")) as decoder:
        exact, _ = sequence_nll_sums_and_counts(decoder, texts)
    document = documents_of_windows(texts)
    return (
        ByDocument.from_summed_windows(copied, document),
        ByDocument.from_summed_windows(exact, document),
        ByDocument.from_summed_windows(tokens, document),
    )


QUESTIONS = (
    Question(
        "EMAD-F2",
        "model",
        answer_speedup,
        legs=lambda study, layers: count_speedup_legs(study),
        measures=True,
        suite="cost",
        decide=decide_speedup,
        needs=("EMAD-F1",),
    ),
    Question(
        "EMAD-X3",
        "model",
        answer_learned_exit_speedup,
        legs=lambda study, layers: count_speedup_legs(study),
        measures=True,
        suite="cost",
        budget="standard",
        decide=decide_speedup,
        needs=("EMAD-X1",),
    ),
    Question(
        "EMAD-X4",
        "model",
        answer_self_speculation,
        legs=lambda study, layers: count_baselines(study),
        measures=True,
        suite="cost",
        budget="standard",
        decide=decide_self_speculation,
    ),
    Question(
        "EMAD-E7",
        "model",
        answer_backfill_speedup,
        legs=lambda study, layers: len(EXACT),
        measures=True,
        suite="cost",
        budget="standard",
        decide=decide_backfill_speedup,
    ),
)
