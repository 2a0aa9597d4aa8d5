"""EMAD-F2, falsifier: does wall-clock improve by at least 10 % at equal batch size and prompt length?

EMAD, Experiments, Falsification criteria, second item. End-to-end requests, paired. The claim is about the fastest way
to run all layers, and nobody knows beforehand which that is: our own full depth, the model's ``generate``, or its
compiled twin. Choosing the fastest by its measured time would favour whichever the noise favoured. So every batch size
and baseline is a leg: the row survives only if the point is shown to be 10 % faster than each of them (an
intersection–union test, which needs no correction), and one against which it is shown not to be falsifies it (Holm).

A point that is slower than a baseline is not a matter of ten per cent: where the whole 95 % interval of a leg lies
below 1×, the leg is falsified without Holm's correction over the other rows of the run. What pays for that is the
distance from the threshold: to get there a speed-up of 1.10× would have to be missed by a tenth besides its own noise.

The time of a mix of requests is their total: a leg estimates the ratio of totals (``speedup.total_ratio``).

The point timed is one that EMAD-F1 lets stand; where there is none the row does not apply, and its ratios are listed as
numbers. So with random weights, which take as long as trained ones and have no quality that a speed-up could cost.

At ``standard`` and above further batch sizes are timed from fewer pairs (``LatencyBenchmark.swept``). They are numbers
beside: a leg more would only ask more of the others. What they are for is the batch size at which the gain vanishes
(``statistics.speedup``), which is named in the reason and has a leg that decides nothing.

What was emitted while the clock ran is checked afterwards (``audit.answers``). Where it is not what the record says, a
leg that names the difference is falsified, whatever else is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emad_ref.audit.finding import Finding
from emad_ref.claims.base import Answer, ClaimContext, Question
from emad_ref.claims.premises import decoder_refusal
from emad_ref.claims.quality import is_usable
from emad_ref.measurements.attachments import AttachedTable, Attachments
from emad_ref.measurements.latency import ADAPTIVE, COMPILED, FULL, GENERATE, TimingResult, has_compiled_baseline
from emad_ref.measurements.model import ModelMeasurements
from emad_ref.measurements.study import Study
from emad_ref.point import OperatingPoint
from emad_ref.statistics.estimate import Estimate
from emad_ref.statistics.legs import combine_verdict, count_leg, decide_legs, estimate_leg, finite_interval, leg_test
from emad_ref.statistics.speedup import SpeedupLimit, speedup_limit, total_ratio
from emad_ref.statistics.units import ByPair
from emad_ref.statistics.verdicts import Leg, Verdict

BASELINES = {FULL: "full depth", GENERATE: "generate", COMPILED: "compiled generate"}  # arm → how legs call it
UNCOMPILED = "compiled baseline not run"
ENDS = "batch size at which the gain vanishes"


@dataclass(frozen=True)
class TimedBatch:
    """Seconds [pairs] of the same requests: at the point, and by each baseline; ``check``: what was found of them."""

    adaptive: ByPair
    baselines: Mapping[str, ByPair]
    check: Finding | None = None


@dataclass(frozen=True)
class SpeedupEvidence:
    """``batches``: batch size → times. ``unusable``: why no speed-up of this point counts; "" where F1 lets it stand.

    ``uncompiled``: why no compiled baseline ran; "" where one did. ``swept``: batch sizes that decide nothing, from
    fewer pairs; empty where there was no sweep.
    """

    batches: Mapping[int, TimedBatch]
    unusable: str = ""
    uncompiled: str = ""
    swept: Mapping[int, TimedBatch] = field(default_factory=dict)

    @property
    def every(self) -> Mapping[int, TimedBatch]:
        """Batch sizes that decide and others, from the smallest on."""
        return dict(sorted({**self.batches, **self.swept}.items()))


def decide(found: SpeedupEvidence, asked: ClaimContext) -> Verdict:
    """A leg per batch size and baseline: how many times faster, against ``speedup_ratio``."""
    if not found.batches:
        return asked.unmeasured("no batch size was timed")
    threshold = asked.claim.thresholds["speedup_ratio"]
    ratios = dict(_ratios(found.batches, threshold))
    broken = _checks(found)
    lies = any(leg.outcome == "falsified" for leg in broken)
    beside = [] if lies else _swept(found, threshold)  # times of nothing end nowhere
    if found.uncompiled:
        beside.append(Leg("compiled baseline", "not applicable", None, None, 0, None, "", _why_uncompiled(found)))
    if found.unusable:
        numbers = [estimate_leg(name, ratio, threshold=threshold) for name, ratio in ratios.items()]
        legs = [*broken, *numbers, *beside]
        if lies:
            return combine_verdict(asked.claim, asked.model, legs)
        return replace(asked.not_applicable(found.unusable), legs=tuple(legs))
    tests = [leg_test(name, ratio, "below", threshold, asked.claim.minimum) for name, ratio in ratios.items()]
    legs = [_slower(leg) for leg in decide_legs(tests, asked.other_legs)]
    verdict = combine_verdict(asked.claim, asked.model, [*broken, *legs, *beside])
    if lies or not found.swept:
        return verdict
    return replace(verdict, reason=f"{verdict.reason}; {speedup_limit_of(found.every).said}")


def speedup_limit_of(batches: Mapping[int, TimedBatch]) -> SpeedupLimit:
    """Where the gain over every baseline ends. Raises BadArgument as ``speedup_limit``."""
    return speedup_limit({
        rows: {name: total_ratio(baseline, timed.adaptive) for name, baseline in timed.baselines.items()}
        for rows, timed in batches.items()
    })  # fmt: skip


def _swept(found: SpeedupEvidence, threshold: float) -> list[Leg]:
    """Ratios of the batch sizes that decide nothing, and the leg that says where the gain ends."""
    if not found.swept:
        return []
    legs = [estimate_leg(name, ratio, threshold=threshold) for name, ratio in _ratios(found.swept, threshold)]
    ends = speedup_limit_of(found.every)
    last = ends.at or ends.sweep[-1]
    rows = None if ends.at is None else float(last.rows)
    return [*legs, Leg(ENDS, "measured", rows, None, last.ratio.n, None, "rows", ends.said)]


def _slower(leg: Leg) -> Leg:
    """Falsified where the interval leaves no doubt that the baseline is the faster of the two."""
    if leg.outcome != "inconclusive" or leg.interval is None or leg.p_falsify is None or leg.interval[1] >= 1:
        return leg
    return replace(leg, outcome="falsified", reason="slower than this baseline: the whole interval lies below 1×")


def _ratios(batches: Mapping[int, TimedBatch], threshold: float) -> Iterator[tuple[str, Estimate]]:
    for batch, timed in batches.items():
        for name, baseline in timed.baselines.items():
            yield f"batch {batch}, against {name}", total_ratio(baseline, timed.adaptive, threshold=threshold)


def _checks(found: SpeedupEvidence) -> list[Leg]:
    """Per batch size: timed requests that are not what they are said to be falsify; else how much was compared."""
    legs = []
    for batch, timed in found.every.items():
        if timed.check is None:
            continue
        leg = count_leg(f"batch {batch}: timed requests", timed.check.n, timed.check.n, "tokens compared")
        said = replace(leg, reason=timed.check.detail)
        legs.append(replace(said, outcome="falsified") if timed.check.passed is False else said)
    return legs


def _why_uncompiled(found: SpeedupEvidence) -> str:
    return f"{UNCOMPILED}: {found.uncompiled}"


def answer(evidence: ModelMeasurements, asked: ClaimContext) -> Answer:
    """Of the points put forward that F1 lets stand, the one that saves most; beside it its row of the point table."""
    if evidence.subject.seq2seq:
        return Answer(asked.not_applicable(evidence.subject.without_quality), evidence.corpus, evidence.fingerprint)
    point, unusable = usable_point(evidence, asked)
    found = speedup_evidence_at(evidence, point, unusable)
    exhibits = speedup_exhibits(found, evidence, point, asked) + Attachments(points=(evidence.latency.row(point),))
    refused = decoder_refusal(evidence) if unusable else ""
    return Answer(decide(found, asked), evidence.corpus, evidence.fingerprint, exhibits, refused)


def speedup_evidence_at(evidence: ModelMeasurements, point: OperatingPoint, unusable: str) -> SpeedupEvidence:
    """What was timed at ``point``, and looked at afterwards."""
    latency = evidence.latency
    return SpeedupEvidence(
        {rows: timed_batch(each, latency.checked(each, point)) for rows, each in latency.timed(point).items()},
        unusable,
        latency.without_compiled,
        {rows: timed_batch(each, latency.checked(each, point)) for rows, each in latency.swept(point).items()},
    )


def speedup_exhibits(
    found: SpeedupEvidence, evidence: ModelMeasurements, point: OperatingPoint, asked: ClaimContext
) -> Attachments:
    """What was timed and what it can decide, where the gain ends, and the times of all arms."""
    legs = sum(len(timed.baselines) for timed in found.batches.values()) + asked.other_legs
    watch = evidence.latency
    notes = [watch.note(point, asked.claim.thresholds["speedup_ratio"], legs), watch.prefill_note(point)]
    if found.swept:
        notes.append(f"{evidence.subject.name}: {point.name!r}: {speedup_limit_of(found.every).said}")
    return Attachments((AttachedTable(f"{asked.claim.id}: time by batch size", time_rows(found)),), tuple(notes))


def time_rows(found: SpeedupEvidence) -> list[dict[str, Any]]:
    """Per batch size the mean time of a request by every arm, and the ratio against the baseline that is least sure."""
    rows = []
    for at in speedup_limit_of(found.every).sweep:
        timed, interval = found.every[at.rows], finite_interval(at.ratio)
        arms = {"the point": timed.adaptive, **timed.baselines}
        rows.append({
            "batch": at.rows,
            "decides": at.rows in found.batches,
            "pairs": at.ratio.n,
            **{f"{name}, ms": 1e3 * float(seconds.values.mean()) for name, seconds in arms.items()},
            "least sure against": at.against,
            "× as fast": at.ratio.value,
            "low": interval and interval[0],
            "high": interval and interval[1],
        })  # fmt: skip
    return rows


def timed_batch(requests: TimingResult, check: Finding) -> TimedBatch:
    seconds = requests.by_pair()
    return TimedBatch(
        seconds[ADAPTIVE], {name: seconds[arm] for arm, name in BASELINES.items() if arm in seconds}, check
    )


def usable_point(evidence: ModelMeasurements, asked: ClaimContext) -> tuple[OperatingPoint, str]:
    """The point to time, and why its speed-up does not count: "" for the one that saves most of those F1 lets stand."""
    if not evidence.loaded.trained:
        reason = (
            f"no usable point: {evidence.subject.without_quality}, and a speed-up is worth what quality it keeps; the "
            "ratios are measured all the same (--emad-require speed asks for weights that were trained)"
        )
        return evidence.latency.point, reason
    f1 = asked.verdict_of("EMAD-F1", evidence)
    standing = [loss for loss in evidence.points.losses if is_usable(f1, loss.point.name)]
    if not standing:
        return evidence.latency.point, f"no usable point: {f1.id} is {f1.verdict} ({f1.reason})"
    return max(standing, key=lambda loss: loss.net_reduction).point, ""


def legs_of(study: Study) -> int:
    """Each batch size against each baseline."""
    return len(study.budget.batch_sizes) * baselines_of(study)


def baselines_of(study: Study) -> int:
    """Full depth, ``generate`` and, where one is tried, its compiled twin."""
    return len(BASELINES) - (not has_compiled_baseline(study))


QUESTIONS = (
    Question(
        "EMAD-F2",
        "model",
        answer,
        legs=lambda study, layers: legs_of(study),
        measures=True,
        suite="cost",
        needs=("EMAD-F1",),
        decide=decide,
    ),
)
