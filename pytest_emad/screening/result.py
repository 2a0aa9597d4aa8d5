"""Result of a screening as plain JSON, and its recommendation: exit at one point, or leave the model alone.

FLOPs alone recommend nothing: the point must also be faster than full depth on this machine. And it must not be shown
to lose more than allowed in text that it writes itself, or more than a point of accuracy in a task.

An exit carries the JSON; tables, pages and suites read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from emad_ref.absent import Absent, reason_if_absent
from emad_ref.calibration.lens_files import FittedLens
from emad_ref.calibration.profile import library_versions
from emad_ref.models.loading import LoadedModel
from emad_ref.point import OperatingPoint
from emad_ref.probes.tuned_lens import StateTranslators
from emad_ref.signals import perplexity_from_nats
from pytest_emad.benchmark.machine import peak_memory, peak_memory_to_json
from pytest_emad.screening.drafts import SelfDraftingResult
from pytest_emad.screening.guarantee import Guarantee
from pytest_emad.screening.own_text import OwnText
from pytest_emad.screening.selection import Certification, OracleHeadroom, SelectedPoint, SelectionRow, largest_headroom
from pytest_emad.screening.settings import ScreeningSettings
from pytest_emad.screening.task_losses import ScreenedTask
from pytest_emad.screening.timing import CandidateTime
from pytest_emad.screening.traces import ENOUGH_DOCUMENTS, MIN_DOCUMENTS, TextSplits, TextTracesByReadout
from pytest_emad.statistics.accuracy import AT_STAKE
from pytest_emad.statistics.estimate import Estimate
from pytest_emad.sweep.oracle_savings import WORTHLESS_SAVING

WORTH_SAVING = 0.05  # least lower bound of the net saving that justifies changed output
CONFIRMATION_LEVEL = 0.05


@dataclass(frozen=True, eq=False)
class ScreeningResult:
    """All results of a screening. ``decoded``: rows decoded on evaluation text.

    ``within_reach``: the largest possible saving of each family. ``timed``: seconds of full depth and of
    candidate points; empty if no text could be timed. ``own_text``, ``tasks``: of decoded points. ``seconds``: phase →
    its duration; ``predicted``: of the longest phases.
    """

    model: LoadedModel
    settings: ScreeningSettings
    texts: TextSplits
    fitted: FittedLens
    evaluated: TextTracesByReadout
    slack: list[OracleHeadroom]
    reached: list[SelectionRow]
    within_reach: list[SelectionRow]
    states: StateTranslators | None
    certified: Certification | None
    decoded: list[SelectedPoint]
    timed: Mapping[OperatingPoint, CandidateTime]
    own_text: list[OwnText]
    tasks: list[ScreenedTask] | Absent
    drafts: SelfDraftingResult
    seconds: dict[str, float]
    predicted: dict[str, float]


@dataclass(frozen=True)
class Recommendation:
    """A recommendation: ``lossy`` and ``leave_early``, as in an exit; its ``guarantee``; its text, ``sentence``."""

    lossy: OperatingPoint | Absent
    guarantee: Guarantee | None
    sentence: str
    leave_early: bool = False


def recommend(
    oracles: Sequence[OracleHeadroom],
    certification: Certification | None,
    decoded: Sequence[SelectedPoint],
    within_reach: Sequence[SelectionRow],
    rise: float,
    inconclusive: Absent | None,
    documents: int,
    times: Mapping[OperatingPoint, CandidateTime],
    own_text: Sequence[OwnText],
    tasks: Sequence[ScreenedTask] | Absent,
) -> Recommendation:
    """The first of ``decoded`` that evaluation confirms and that saves enough, or the reason for none.

    Leaving early at it is advised only if ``times`` shows it to be faster than full depth, ``own_text`` does not show
    that it loses more than ``rise`` there, and ``tasks`` does not show that one loses more than a point.

    ``within_reach``: the largest possible saving of each family with any number of documents. ``inconclusive``: why
    so little text allows no recommendation (``traces.absent_text``). ``documents``: of evaluation. With
    ``MIN_DOCUMENTS`` or more, the text may say that further documents would not change the result.
    """
    if inconclusive and documents < MIN_DOCUMENTS:
        return _no_exit(inconclusive.reason)
    most = largest_headroom(oracles, rise)
    oracle = f"{_share_text(most.net, most.low, most.high)} at {rise:.1%} more perplexity"
    if most.net <= WORTHLESS_SAVING:
        return _no_exit(
            f"no slack: leave this model alone; even a rule that knew how far every readout is from the end would save "
            f"{oracle}, deciding not charged"
        )
    best = max(
        (row for row in within_reach if isinstance(row, SelectedPoint)), key=lambda row: row.net.high, default=None
    )
    knew = f"a rule that knew would save {oracle}"
    if (best is None or best.net.high < WORTH_SAVING) and (inconclusive or documents < ENOUGH_DOCUMENTS):
        return _no_exit(f"{_never_worth_it(best, rise, documents)}; {knew}")
    room = f"{knew}, ours {'nothing' if best is None else 'at most ' + _saving_text(best.net)}"
    if inconclusive:
        return _no_exit(f"{inconclusive.reason}; {room}")
    if certification is None or not decoded:
        return _no_exit(f"no rule of ours is sure to stay below {rise:.1%} more perplexity and saves anything; {room}")
    # tries the next point only if the one before is confirmed and saves too little, which rules out lucky searches
    confirmed = list(takewhile(lambda row: not _absent_confirmation(row, rise), decoded))
    row = next((row for row in confirmed if row.net.low >= WORTH_SAVING), decoded[0])
    if against := _absent_confirmation(row, rise) or _absent_worth(row):
        return _no_exit(f"{against.reason}; {room}")
    promise = certification.promise if certification.certified_point == row.point else None
    unpromised = (
        ""
        if promise is not None or certification.certified_point is None
        else "Nothing is promised of it, but of another: "
    )
    name = (
        f"{row.family.readout}, {row.family.name}, free depth, {row.point.name} after layers "
        f"{', '.join(map(str, row.point.probes))}"
    )
    point = row.point
    tried = [
        _try_clock(times.get(point)),
        _try_own_text(next((each for each in own_text if each.point == point), None)),
        _try_tasks(tasks if isinstance(tasks, Absent) else [each for each in tasks if each.point == point]),
    ]
    failed, passed = ([trial.sentence for trial in tried if trial.passed is side] for side in (False, True))
    outcome = f"{name}, saves {_saving_text(row.net)} of the FLOPs at {row.rise.value:+.2%} perplexity on given text"
    verdict = (
        f"do not leave early here: {'; '.join(failed)}. The point: {outcome}" if failed else f"leave early: {outcome}"
    )
    sentence = f"{'; '.join([verdict, *passed])}. {unpromised}{certification.promise.statement}"
    return Recommendation(point, promise, sentence, leave_early=not failed)


@dataclass(frozen=True)
class _Trial:
    passed: bool
    sentence: str


def _try_clock(time: CandidateTime | None) -> _Trial:
    if time is None:
        return _Trial(False, "no text is long enough to time it")
    speed = f"{time.fast:.2f}× [{time.low:.2f}, {time.high:.2f}] as fast as full depth on this machine"
    return _Trial(True, speed) if time.low > 1 else _Trial(False, f"it is not shown to save time ({speed})")


def _try_own_text(written: OwnText | None) -> _Trial:
    if written is None:
        return _Trial(False, "no text is long enough to let it write")
    rise, refuted = written.rise, written.rise.p_above <= CONFIRMATION_LEVEL
    if written.same == written.new:
        return _Trial(True, f"after {rise.n} prompts it writes all {written.new} tokens as full depth does")
    risen = f"perplexity {rise.value:+.1%} [{rise.low:+.1%}, {rise.high:+.1%}] as full depth scores it"
    said = f"{risen}; the first {written.same:.0f} of {written.new} tokens as full depth writes them"
    return _Trial(not refuted, f"text that it writes itself {'is worse' if refuted else 'holds'} ({said})")


def _try_tasks(tasks: Sequence[ScreenedTask] | Absent) -> _Trial:
    """Fails if a task is shown to lose more than a point, by Bonferroni; a loss that is not shown is named."""
    if isinstance(tasks, Absent):
        return _Trial(False, f"no task can be tried: {tasks.reason}")
    solved = [each for each in tasks if each.scores.is_counted]
    if not solved:
        names = ", ".join(each.task for each in tasks)
        return _Trial(True, f"no task tells: full depth solves none of {names}, {tasks[0].drop.n} items each")
    worst_first = sorted(solved, key=lambda each: -each.drop.value)
    lost = [each for each in worst_first if each.drop.p_above <= CONFIRMATION_LEVEL / len(solved)]
    unsure = [each.task for each in worst_first if each.drop.value > AT_STAKE and each not in lost]
    scores = ", ".join(
        f"{each.task} {100 * full:.0f} → {100 * at_point:.0f} %"
        for each in lost or worst_first
        for full, at_point in [each.scores.accuracies]
    )
    many = "task" if len(solved) == 1 else "tasks"
    said = f"{scores} right; {len(solved[0].scores.full)} items each of {len(solved)} {many} that full depth solves"
    if lost:
        return _Trial(False, f"it loses answers ({said})")
    caveat = f", but {' and '.join(unsure)} may lose: too few items to tell" if unsure else ""
    return _Trial(True, f"tasks hold ({said}{caveat})")


def _absent_confirmation(row: SelectedPoint, rise: float) -> Absent | None:
    """Why evaluation does not confirm a point; None if it does."""
    if row.rise.n < ENOUGH_DOCUMENTS:
        return Absent(
            f"inconclusive: {row.point.name} saves {_outcome_text(row)}, but on text worth "
            f"{row.rise.n} documents of one length; "
            f"{ENOUGH_DOCUMENTS} are the fewest to recommend on (more --documents)"
        )
    if row.rise.p_below > CONFIRMATION_LEVEL:
        said = f"evaluation does not confirm {row.point.name}: {_outcome_text(row)}, at most {rise:.1%} allowed"
        return Absent(said)
    return None


def _absent_worth(row: SelectedPoint) -> Absent | None:
    """Why a point is not worth it: it saves too little; None if it saves enough."""
    if row.net.low >= WORTH_SAVING:
        return None
    return Absent(f"not worth it: {row.point.name} saves {_outcome_text(row)}, {WORTH_SAVING:.0%} is the least")


def _never_worth_it(best: SelectedPoint | None, rise: float, documents: int) -> str:
    """A sentence that no family saves enough, and that more documents would not change this."""
    saved = "anything" if best is None else f"more than {_saving_text(best.net)}"
    return (
        f"not worth it: no rule of ours saves {saved} at {rise:.1%} more perplexity on {documents} documents, "
        f"{WORTH_SAVING:.0%} is the least, and more documents would not change it"
    )


def _outcome_text(row: SelectedPoint) -> str:
    return f"{_saving_text(row.net)} at {row.rise.value:+.2%} perplexity"


def _saving_text(net: Estimate) -> str:
    return _share_text(net.value, net.low, net.high)


def _share_text(value: float, low: float, high: float) -> str:
    return f"{value:.1%} net [{low:.1%}, {high:.1%}]"


def _no_exit(why: str) -> Recommendation:
    return Recommendation(Absent(why), None, why)


MACHINE_KEYS = (
    "time",
    "threads",
    "peak_memory",
    "drafts",
    "seconds",
    "predicted",
    "recommendation",
    "leave_early",
)  # keys that depend on the machine
EMPTY_ROW = {"how": "replayed"} | dict.fromkeys(
    ("point", "probes", "net", "rise", "blocks")
)  # of a row without a point


def screening_to_json(result: ScreeningResult, recommendation: Recommendation) -> dict[str, Any]:
    """Provenance, sizes, and every table; shares are fractions, and intervals are [value, low, high].

    ``by_clock`` names the entries that depend on times. All others are equal on every machine for the same seed and
    model, up to the last digits.
    """
    own, proven = result.evaluated.own, result.certified
    settings = result.settings
    return {
        "model": result.model.name,
        "fingerprint": result.model.fingerprint,
        "dtype": result.fitted.lens.dtype,
        "layers": own.layers,
        "corpus": settings.corpus,
        "window": result.fitted.plan["window"],
        "seed": settings.seed,
        "rise": settings.rise,
        "versions": library_versions(),
        "documents": {name: text.n_documents for name, text in vars(result.texts).items()},
        "near_duplicates": {name: text.near_duplicates for name, text in vars(result.texts).items()},
        "tokens": {name: text.n_tokens for name, text in vars(result.texts).items()},
        "perplexity": perplexity_from_nats(float(own.nll_nats[:, -1].astype(np.float64).mean())),
        "lens": {
            "rank": result.fitted.lens.rank,
            "steps": result.fitted.plan["steps"],
            "raw_nats": {str(layer): nats for layer, nats in result.fitted.raw_nats.items()},
            "tuned_nats": {str(layer): nats for layer, nats in result.fitted.tuned_nats.items()},
        },
        "slack": [asdict(each) | _bounds_json(each.low, each.high) for each in result.slack],
        "reached": _selection_json(result.reached),
        "within_reach": _selection_json(result.within_reach),
        "decoded": _selection_json(result.decoded),
        "certified": None
        if proven is None
        else {
            "family": proven.family.name,
            "documents": proven.promise.documents,
            "tried": [
                {"point": point.name, "bound": float(bound), "net": float(net)}
                for point, bound, net in zip(proven.tried, proven.bounds, proven.saved, strict=True)
            ],
            "chosen": None if proven.point_within_bound is None else proven.point_within_bound.name,
            "promise": proven.promise.to_json(),
        },
        "time": [time_to_json(each) for each in result.timed.values()],
        "own_text": [
            {
                "point": each.point.name,
                "rise": value_and_interval_to_json(each.rise),
                "same": each.same,
                "new": each.new,
                "documents": each.rise.n,
            }
            for each in result.own_text
        ],
        "why_no_tasks": reason_if_absent(result.tasks),
        "tasks": [
            {
                "point": each.point.name,
                "task": each.task,
                "items": len(each.scores.full),
                "full_depth": each.scores.accuracies[0],
                "at_point": each.scores.accuracies[1],
                "drop": value_and_interval_to_json(each.drop),
                "why_not_counted": reason_if_absent(each.scores.exclusion),
            }
            for each in ([] if isinstance(result.tasks, Absent) else result.tasks)
        ],
        "drafts": _drafts_json(result.drafts),
        "threads": torch.get_num_threads(),
        "peak_memory": peak_memory_to_json(peak_memory(result.model.stepper.device)),
        "seconds": result.seconds,
        "predicted": {phase: round(seconds, 1) for phase, seconds in result.predicted.items()},
        "by_clock": list(MACHINE_KEYS),
        "recommendation": recommendation.sentence,
        "leave_early": recommendation.leave_early,
    }


def _drafts_json(drafts: SelfDraftingResult) -> dict[str, Any]:
    way = drafts.best
    return {
        "why_none": reason_if_absent(drafts.drafting),
        "layer": None if way is None else way.layer,
        "longest": None if way is None else way.longest,
        "gated": None if way is None else way.uses_gate,
        "vocabulary": None if way is None or way.vocabulary is None else len(way.vocabulary),
        "by_rows": [lengths._asdict() for lengths in (way.by_rows if way is not None else None) or ()],
        "agreement": drafts.agreement,
        "tokens": drafts.tokens,
        "seconds": None if drafts.time is None else drafts.time.seconds,
        "fast": None if drafts.time is None else drafts.time.fast,
        "sentence": drafts.recommendation_text,
    }


def _selection_json(rows: Sequence[SelectionRow]) -> list[dict[str, Any]]:
    return [
        {"family": row.family.name, "readout": row.family.readout, "depth": row.family.depth, "level": row.level}
        | (_point_json(row) if isinstance(row, SelectedPoint) else EMPTY_ROW)
        for row in rows
    ]


def time_to_json(time: CandidateTime) -> dict[str, Any]:
    """None for an unbounded side: few pairs on a busy machine may bound no ratio."""
    return asdict(time) | _bounds_json(time.low, time.high)


def _bounds_json(low: float, high: float) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in (("low", low), ("high", high))}


def _point_json(row: SelectedPoint) -> dict[str, Any]:
    return {
        "how": row.how,
        "point": row.point.name,
        "probes": list(row.point.probes),
        "net": value_and_interval_to_json(row.net),
        "rise": value_and_interval_to_json(row.rise),
        "blocks": value_and_interval_to_json(row.blocks),
    }


def value_and_interval_to_json(estimate: Estimate) -> list[float | None]:
    """None for an unbounded side: JSON has no infinity."""
    return [number if math.isfinite(number) else None for number in (estimate.value, estimate.low, estimate.high)]
