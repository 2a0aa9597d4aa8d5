"""Base of questions about a pair: their premise, timed arms, and the frame of their answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emad_ref.absent import Absent
from pytest_emad.claims.base import Answer, ClaimContext
from pytest_emad.measurements.attachments import Attachments
from pytest_emad.measurements.latency import TimingResult
from pytest_emad.measurements.pair_measurements import PairMeasurements
from pytest_emad.measurements.pair_timing import compute_acceptance_rate_per_output
from pytest_emad.statistics.legs import build_measured_count_leg
from pytest_emad.statistics.units import ByPair
from pytest_emad.statistics.verdicts import Leg, Verdict


@dataclass(frozen=True)
class TimedArm:
    """One arm on the timed requests: [pairs] ``seconds``, FLOPs ``spent`` (None: uncounted), ``accepted`` share of
    drafts."""

    seconds: ByPair
    spent: ByPair | None = None
    accepted: tuple[float, ...] = ()


def make_timed_arms(pair: PairMeasurements, timed: TimingResult, arms: Iterable[str]) -> Mapping[str, TimedArm]:
    """Arm → times and FLOPs of the timed ``arms``; work of a single model is the large one's."""
    found, seconds = {}, timed.paired_seconds_by_arm()
    for arm in arms:
        if arm in seconds:
            recorded = timed.audited_decodings(arm)
            spent = pair.models.compute_flops_per_decoding(recorded) if recorded else None
            column = None if spent is None else ByPair(spent)
            found[arm] = TimedArm(seconds[arm], column, tuple(compute_acceptance_rate_per_output(timed, arm)))
    return found


def answer_unmet_routing_premise(
    pair: PairMeasurements, asked: ClaimContext, legs: Callable[[], Sequence[Leg]] = tuple
) -> Answer | None:
    """Not applicable without meaningful scores or a better large model; unmeasured without tasks; else None.

    ``legs``: measures what the verdict of an unmet premise lists.
    """
    absent = pair.routing_rules.absent_premise()
    return None if absent is None else make_answer_from_pair_verdict(pair, asked.lacking(absent, legs()))


def answer_unmet_writing_premise(
    pair: PairMeasurements, asked: ClaimContext, legs: Callable[[], Sequence[Leg]] = tuple
) -> Answer | None:
    """As ``answer_unmet_routing_premise``; also not applicable if no task worth routing has written answers."""
    if absent := answer_unmet_routing_premise(pair, asked, legs):
        return absent
    if pair.routing_rules.written_tasks_worth_routing:
        return None
    tasks = ", ".join(pair.routing_rules.tasks_worth_routing)
    return make_answer_from_pair_verdict(
        pair, asked.not_applicable(f"{tasks}: options are read, no token is emitted that could be looked at", legs())
    )


def make_answer_from_pair_verdict(
    pair: PairMeasurements, verdict: Verdict, attachments: Attachments | None = None
) -> Answer:
    """The answer of a question decided on this pair's items."""
    return Answer(verdict, pair.corpus, pair.fingerprint, attachments or Attachments())


def make_skipped_arm_legs(absent: Mapping[str, Absent]) -> list[Leg]:
    """Legs for arms of transformers that did not run, each with the reason."""
    return [
        Leg(name, "not applicable", None, None, 0, None, "", f"{name} not run: {why.reason}")
        for name, why in absent.items()
    ]


def make_tokens_per_second_leg(name: str, new: int, seconds: ByPair) -> Leg:
    """Leg for the median tokens per second of requests of ``new`` tokens."""
    return build_measured_count_leg(
        f"{name}: tokens per second", new / np.median(seconds.values), len(seconds), "tokens/s"
    )


def make_acceptance_leg(name: str, accepted: tuple[float, ...]) -> Leg:
    """Leg for the mean acceptance over requests."""
    return build_measured_count_leg(
        f"{name}: acceptance", float(np.mean(accepted)), len(accepted), "accepted per judged draft"
    )
