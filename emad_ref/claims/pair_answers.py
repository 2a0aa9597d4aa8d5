"""What questions about a pair share: their premise, the ways to answer that were timed, and their answer's frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from emad_ref.claims.base import Answer, ClaimContext
from emad_ref.measurements.attachments import Attachments
from emad_ref.measurements.latency import TimingResult
from emad_ref.measurements.pair_measurements import PairMeasurements
from emad_ref.measurements.pair_timing import accepted_shares
from emad_ref.statistics.legs import build_count_leg
from emad_ref.statistics.units import ByPair
from emad_ref.statistics.verdicts import Leg, Verdict


@dataclass(frozen=True)
class TimedArm:
    """One arm on the timed requests: [pairs] ``seconds``, FLOPs ``spent`` (None: not counted), and of each run that
    drafted, what share of its judged drafts was ``accepted``."""

    seconds: ByPair
    spent: ByPair | None = None
    accepted: tuple[float, ...] = ()


def timed_arms(pair: PairMeasurements, timed: TimingResult, arms: Iterable[str]) -> Mapping[str, TimedArm]:
    """Those of ``arms`` that were timed, in that order; where one model alone did the work, it was the large one."""
    found, seconds = {}, timed.by_pair()
    for arm in arms:
        if arm in seconds:
            recorded = timed.recorded(arm)
            spent = pair.models.spent(recorded) if recorded else None
            column = None if spent is None else ByPair(spent)
            found[arm] = TimedArm(seconds[arm], column, tuple(accepted_shares(timed, arm)))
    return found


def routing_answer_absent(pair: PairMeasurements, asked: ClaimContext) -> Answer | None:
    """Not applicable where scores mean nothing, or the large model is not better anywhere; unmeasured where no task is
    at hand; else None."""
    reason = pair.rules.premise()
    if not reason:
        return None
    if reason == pair.rules.missing():
        return pair_answer(pair, asked.unmeasured(reason))
    return pair_answer(pair, asked.not_applicable(reason))


def writing_answer_absent(pair: PairMeasurements, asked: ClaimContext) -> Answer | None:
    """As ``routing_answer_absent``; and not applicable where every task worth routing reads options and writes
    nothing."""
    if absent := routing_answer_absent(pair, asked):
        return absent
    if pair.rules.written:
        return None
    tasks = ", ".join(pair.rules.tasks)
    return pair_answer(
        pair, asked.not_applicable(f"{tasks}: options are read, no token is emitted that could be looked at")
    )


def pair_answer(pair: PairMeasurements, verdict: Verdict, exhibits: Attachments | None = None) -> Answer:
    """The answer of a question that was decided on this pair's items."""
    return Answer(verdict, pair.corpus, pair.fingerprint, exhibits or Attachments())


def skipped_arm_legs(absent: Mapping[str, str]) -> list[Leg]:
    """Arms of transformers that did not run, each with the reason."""
    return [
        Leg(name, "not applicable", None, None, 0, None, "", f"{name} not run: {why}") for name, why in absent.items()
    ]


def speed_leg(name: str, new: int, seconds: ByPair) -> Leg:
    """Median tokens per second of requests of ``new`` tokens."""
    return build_count_leg(f"{name}: tokens per second", new / np.median(seconds.values), len(seconds), "tokens/s")


def acceptance_leg(name: str, accepted: tuple[float, ...]) -> Leg:
    """Mean over requests."""
    return build_count_leg(f"{name}: acceptance", float(np.mean(accepted)), len(accepted), "accepted per judged draft")
