"""EMAD-F2, falsifier: does wall-clock improve by at least 10 % at equal batch size and prompt length?

EMAD, Experiments, Falsification criteria, second item. End-to-end requests, paired. The claim is about the fastest way
to run all layers, and nobody knows beforehand which that is: our own full depth, the model's ``generate``, or its
compiled twin. Choosing the fastest by its measured time would favour whichever the noise favoured. So every batch size
and baseline is a leg: the row survives only if the point is shown to be 10 % faster than each of them (an
intersection–union test, which needs no correction), and one against which it is shown not to be falsifies it (Holm).

A point that is slower than a baseline is not a matter of ten per cent: where the whole 95 % interval of a leg lies
below 1×, the leg is falsified without Holm's correction over the other rows of the run. What pays for that is the
distance from the threshold: to get there a speed-up of 1.10× would have to be missed by a tenth besides its own noise.

The time of a mix of requests is their total: a leg estimates the ratio of totals (``times.total_ratio``).

The point timed is one that EMAD-F1 lets stand; where there is none the row does not apply, and its ratios are listed as
numbers. So with random weights, which take as long as trained ones and have no quality that a speed-up could cost.

At ``standard`` and above further batch sizes are timed from fewer pairs (``evidence.swept``). They are numbers beside:
a leg more would only ask more of the others. What they are for is the batch size at which the gain vanishes
(``verdict.vanishing``), which is named in the reason and has a leg that decides nothing.

What was emitted while the clock ran is looked at afterwards (``audit.timed``). Times of requests that are not what they
are said to be are times of nothing, and a leg that names the difference is falsified, whatever else is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from emad_ref.audit.finding import Finding
from emad_ref.evidence.exhibits import Exhibits, Table
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.stopwatch import ADAPTIVE, COMPILED, FULL, GENERATE, Requests, tries_compiling
from emad_ref.evidence.study import Study
from emad_ref.point import OperatingPoint
from emad_ref.questions import emad_f1
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.questions.premises import unanswered
from emad_ref.questions.quality import stands
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.interval import Estimate
from emad_ref.verdict.legs import corrected, counted, estimated, finite, row, weighed
from emad_ref.verdict.times import total_ratio
from emad_ref.verdict.units import ByPair
from emad_ref.verdict.vanishing import Vanishing, vanishing

BASELINES = {FULL: "full depth", GENERATE: "generate", COMPILED: "compiled generate"}  # arm → how legs call it
UNCOMPILED = "compiled baseline not run"
ENDS = "batch size at which the gain vanishes"


@dataclass(frozen=True)
class Timed:
    """Seconds [pairs] of the same requests: at the point, and by each baseline; ``check``: what was found of them."""

    adaptive: ByPair
    baselines: Mapping[str, ByPair]
    check: Finding | None = None


@dataclass(frozen=True)
class Found:
    """``batches``: batch size → times. ``unusable``: why no speed-up of this point counts; "" where F1 lets it stand.

    ``uncompiled``: why no compiled baseline ran; "" where one did. ``swept``: batch sizes that decide nothing, from
    fewer pairs; empty where there was no sweep.
    """

    batches: Mapping[int, Timed]
    unusable: str = ""
    uncompiled: str = ""
    swept: Mapping[int, Timed] = field(default_factory=dict)

    @property
    def every(self) -> Mapping[int, Timed]:
        """Batch sizes that decide and others, from the smallest on."""
        return dict(sorted({**self.batches, **self.swept}.items()))


def decide(found: Found, asked: Asked) -> Verdict:
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
        numbers = [estimated(name, ratio, threshold=threshold) for name, ratio in ratios.items()]
        legs = [*broken, *numbers, *beside]
        if lies:
            return row(asked.claim, asked.model, legs)
        return replace(asked.not_applicable(found.unusable), legs=tuple(legs))
    tests = [weighed(name, ratio, "below", threshold, asked.claim.minimum) for name, ratio in ratios.items()]
    legs = [_slower(leg) for leg in corrected(tests, asked.other_legs)]
    verdict = row(asked.claim, asked.model, [*broken, *legs, *beside])
    if lies or not found.swept:
        return verdict
    return replace(verdict, reason=f"{verdict.reason}; {vanished(found.every).said}")


def vanished(batches: Mapping[int, Timed]) -> Vanishing:
    """Where the gain over every baseline ends. Raises BadArgument as ``vanishing``."""
    return vanishing({
        rows: {name: total_ratio(baseline, timed.adaptive) for name, baseline in timed.baselines.items()}
        for rows, timed in batches.items()
    })  # fmt: skip


def _swept(found: Found, threshold: float) -> list[Leg]:
    """Ratios of the batch sizes that decide nothing, and the leg that says where the gain ends."""
    if not found.swept:
        return []
    legs = [estimated(name, ratio, threshold=threshold) for name, ratio in _ratios(found.swept, threshold)]
    ends = vanished(found.every)
    last = ends.at or ends.sweep[-1]
    rows = None if ends.at is None else float(last.rows)
    return [*legs, Leg(ENDS, "measured", rows, None, last.ratio.n, None, "rows", ends.said)]


def _slower(leg: Leg) -> Leg:
    """Falsified where the interval leaves no doubt that the baseline is the faster of the two."""
    if leg.outcome != "inconclusive" or leg.interval is None or leg.p_falsify is None or leg.interval[1] >= 1:
        return leg
    return replace(leg, outcome="falsified", reason="slower than this baseline: the whole interval lies below 1×")


def _ratios(batches: Mapping[int, Timed], threshold: float) -> Iterator[tuple[str, Estimate]]:
    for batch, timed in batches.items():
        for name, baseline in timed.baselines.items():
            yield f"batch {batch}, against {name}", total_ratio(baseline, timed.adaptive, threshold=threshold)


def _checks(found: Found) -> list[Leg]:
    """Per batch size: timed requests that are not what they are said to be falsify; else how much was compared."""
    legs = []
    for batch, timed in found.every.items():
        if timed.check is None:
            continue
        leg = counted(f"batch {batch}: timed requests", timed.check.n, timed.check.n, "tokens compared")
        said = replace(leg, reason=timed.check.detail)
        legs.append(replace(said, outcome="falsified") if timed.check.passed is False else said)
    return legs


def _why_uncompiled(found: Found) -> str:
    return f"{UNCOMPILED}: {found.uncompiled}"


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """Of the points put forward that F1 lets stand, the one that saves most; beside it its row of the point table."""
    if evidence.subject.seq2seq:
        return Answer(asked.not_applicable(evidence.subject.without_quality), evidence.corpus, evidence.fingerprint)
    point, unusable = usable(evidence, asked)
    found = found_at(evidence, point, unusable)
    exhibits = shown(found, evidence, point, asked) + Exhibits(points=(evidence.stopwatch.row(point),))
    refused = unanswered(evidence) if unusable else ""
    return Answer(decide(found, asked), evidence.corpus, evidence.fingerprint, exhibits, refused)


def found_at(evidence: Evidence, point: OperatingPoint, unusable: str) -> Found:
    """What was timed at ``point``, and looked at afterwards."""
    stopwatch, swept = evidence.stopwatch, evidence.swept
    return Found(
        {rows: timed_of(each, stopwatch.checked(point, rows)) for rows, each in stopwatch.timed(point).items()},
        unusable,
        stopwatch.without_compiled,
        {rows: timed_of(each, swept.checked(point, rows)) for rows, each in swept.timed(point).items()},
    )


def shown(found: Found, evidence: Evidence, point: OperatingPoint, asked: Asked) -> Exhibits:
    """What was timed and what it can decide, where the gain ends, and the times of all arms."""
    legs = sum(len(timed.baselines) for timed in found.batches.values()) + asked.other_legs
    watch = evidence.stopwatch
    notes = [watch.note(point, asked.claim.thresholds["speedup_ratio"], legs), watch.apart(point)]
    if found.swept:
        notes.append(f"{evidence.subject.name}: {point.name!r}: {vanished(found.every).said}")
    return Exhibits((Table(f"{asked.claim.id}: time by batch size", time_rows(found)),), tuple(notes))


def time_rows(found: Found) -> list[dict[str, Any]]:
    """Per batch size the mean time of a request by every arm, and the ratio against the baseline that is least sure."""
    rows = []
    for at in vanished(found.every).sweep:
        timed, interval = found.every[at.rows], finite(at.ratio)
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


def timed_of(requests: Requests, check: Finding) -> Timed:
    seconds = requests.by_pair()
    return Timed(seconds[ADAPTIVE], {name: seconds[arm] for arm, name in BASELINES.items() if arm in seconds}, check)


def usable(evidence: Evidence, asked: Asked) -> tuple[OperatingPoint, str]:
    """The point to time, and why its speed-up does not count: "" for the one that saves most of those F1 lets stand."""
    if not evidence.loaded.trained:
        reason = (
            f"no usable point: {evidence.subject.without_quality}, and a speed-up is worth what quality it keeps; the "
            "ratios are measured all the same (--emad-require speed asks for weights that were trained)"
        )
        return evidence.stopwatch.point, reason
    f1 = emad_f1.answer(evidence, asked.also("EMAD-F1")).verdict
    standing = [loss for loss in evidence.points.losses if stands(f1, loss.point.name)]
    if not standing:
        return evidence.stopwatch.point, f"no usable point: {f1.id} is {f1.verdict} ({f1.reason})"
    return max(standing, key=lambda loss: loss.net_reduction).point, ""


def legs_of(study: Study) -> int:
    """Each batch size against each baseline."""
    return len(study.budget.batch_sizes) * baselines_of(study)


def baselines_of(study: Study) -> int:
    """Full depth, ``generate`` and, where one is tried, its compiled twin."""
    return len(BASELINES) - (not tries_compiling(study))


QUESTION = Question(
    "EMAD-F2",
    "model",
    answer,
    legs=lambda study, layers: legs_of(study),
    measures=True,
    suite="cost",
)
