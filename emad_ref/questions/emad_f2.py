"""EMAD-F2, falsifier: does wall-clock improve by at least 10 % at equal batch size and prompt length?

EMAD, Experiments, Falsification criteria, second item. End-to-end requests, paired; every batch size is a leg.

The baseline is the faster of our own full depth and the model's ``generate``, batch size by batch size. A leg whose
full depth is shown (one-sided, 5 %, uncorrected) to be slower than ``generate`` is inconclusive: a sleeping baseline
flatters whatever is compared with it. So is one without that check. Random weights take as long as trained ones:
quality is no premise. It does not apply to an encoder-decoder, of which no document is continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from emad_ref.evidence.exhibits import Exhibits
from emad_ref.evidence.gathered import Evidence
from emad_ref.evidence.stopwatch import by_pair
from emad_ref.questions.asking import Answer, Asked, Question
from emad_ref.verdict.claims import Leg, Verdict
from emad_ref.verdict.interval import log_ratio
from emad_ref.verdict.legs import LEVEL, Tested, corrected, row, weighed
from emad_ref.verdict.units import ByPair


@dataclass(frozen=True)
class Timed:
    """Seconds [pairs] of the same requests: our full depth, the point, the model's ``generate`` (None: not timed)."""

    full: ByPair
    adaptive: ByPair
    generate: ByPair | None


@dataclass(frozen=True)
class Found:
    """Batch size → times."""

    batches: Mapping[int, Timed]


def decide(found: Found, asked: Asked) -> Verdict:
    """A leg per batch size: how many times faster than the faster baseline, against ``speedup_ratio``."""
    if not found.batches:
        return asked.unmeasured("no batch size was timed")
    tests: list[Tested] = []
    listed: list[Leg] = []
    for batch, timed in found.batches.items():
        doubt = _sleeping(timed)
        test = _compared(f"batch {batch}", timed, asked, against_full=bool(doubt))
        if doubt:
            listed.append(replace(test.leg, reason=doubt, p_falsify=None, p_survive=None))
        else:
            tests.append(test)
    return row(asked.claim, asked.model, [*corrected(tests, asked.other_legs), *listed])


def _compared(name: str, timed: Timed, asked: Asked, against_full: bool) -> Tested:
    """The point against the faster of the two baselines, or against our full depth whatever ``generate`` does."""
    baseline, generate = timed.full, timed.generate
    if generate is not None and not against_full and log_ratio(timed.full, generate).value > 1:
        name, baseline = f"{name}, against generate", generate
    threshold = asked.claim.thresholds["speedup_ratio"]
    ratio = log_ratio(baseline, timed.adaptive, threshold=threshold)
    return weighed(name, ratio, "below", threshold, asked.claim.minimum)


def _sleeping(timed: Timed) -> str:
    """Why the baseline is in doubt; empty where it is not."""
    if timed.generate is None:
        return "full depth was not compared with the model's generate: the baseline may be asleep"
    slower = log_ratio(timed.full, timed.generate)
    if slower.p_above > LEVEL:
        return ""
    return (
        f"sleeping baseline: generate is {slower.value:.2f} × as fast as our full depth "
        f"[{slower.low:.2f}, {slower.high:.2f}]"
    )


def answer(evidence: Evidence, asked: Asked) -> Answer:
    """The point that saves most of those put forward; beside it what was timed, and its row of the point table."""
    stopwatch = evidence.stopwatch
    seconds = {rows: by_pair(timings) for rows, timings in stopwatch.timings.items()}
    found = Found({rows: Timed(arms["full"], arms["adaptive"], arms["generate"]) for rows, arms in seconds.items()})
    exhibits = Exhibits(notes=(stopwatch.note,), points=(stopwatch.row,))
    return Answer(decide(found, asked), evidence.corpus, evidence.fingerprint, exhibits)


QUESTION = Question(
    "EMAD-F2",
    "model",
    answer,
    legs=lambda study, layers: len(study.budget.batch_sizes),
    measures=True,
    suite="cost",
)
