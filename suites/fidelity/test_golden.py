"""Golden tokens and depths: equal to those on record for these weights, on text of the same seed.

For each kind of decoding: EMAD at two points, full depth, other schedules, sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from emad_ref.point import OperatingPoint
from pytest_emad.audit.token_comparison import GoldenTokens, emitted_depths, logit_margins, threshold_distances
from pytest_emad.audit.tolerances import signal_noise_factor
from pytest_emad.measurements.model_measurements import ModelMeasurements
from pytest_emad.measurements.replay_and_flop_checks import ReplayValidity
from pytest_emad.run.suite_support import AuditFindingGate

NEW, LENGTH = 24, 8


@dataclass(frozen=True)
class GoldenKind:
    """``point``: by name of the validity check; ``rows``: of the batch; ``temperature``: 0 is greedy."""

    point: Callable[[ReplayValidity], OperatingPoint]
    rows: int = 2
    temperature: float = 0.0


def make_probing_point_getter(**changed: Any) -> Callable[[ReplayValidity], OperatingPoint]:
    """A function that returns the probing point with the fields ``changed`` replaced."""
    return lambda bridging: replace(bridging.probing_point, **changed)


GOLDEN_KINDS = {
    "greedy": GoldenKind(make_probing_point_getter(), rows=4),
    "shallow": GoldenKind(lambda bridging: bridging.shallow_point),
    "full": GoldenKind(lambda bridging: bridging.subject.full_depth_point),
    "eager": GoldenKind(make_probing_point_getter(schedule="free_eager")),
    "deferred": GoldenKind(make_probing_point_getter(schedule="free_deferred")),
    "copying": GoldenKind(make_probing_point_getter(schedule="copying")),
    "chunked": GoldenKind(make_probing_point_getter(schedule="chunked", period=4)),
    "drawn": GoldenKind(make_probing_point_getter(), temperature=1.0),
}


@pytest.mark.parametrize("kind", GOLDEN_KINDS)
def test_tokens_and_depths_are_the_golden_ones(
    emad_evidence: ModelMeasurements, emad_audit: AuditFindingGate, kind: str
) -> None:
    evidence, subject, asked = emad_evidence, emad_evidence.subject, GOLDEN_KINDS[kind]
    if subject.seed and kind != "greedy":
        pytest.skip("not applicable (kinds beside greedy are on record for seed 0 alone)")
    point, prompts = asked.point(evidence.replay_validity), subject.make_equal_prompts(asked.rows, LENGTH)
    if point.schedule not in subject.capabilities.schedules:
        pytest.skip(f"not applicable (the decoder has no schedule {point.schedule})")
    if asked.temperature and not subject.has_reference_decoder:
        pytest.skip("not applicable (another decoder draws in its own way)")

    with subject.open_decoder(point, max_rows=asked.rows, temperature=asked.temperature) as decoder:

        def take() -> GoldenTokens:
            made = decoder.generate(prompts, NEW, frozenset())
            none = np.full((asked.rows, NEW), np.inf)
            margin = none if asked.temperature else logit_margins(decoder, prompts, made.emitted)
            return GoldenTokens(np.stack(made.emitted), emitted_depths(made), margin, threshold_distances(made, point))

        about = evidence.fingerprint[:16], subject.dtype, evidence.corpus, subject.seed, kind
        given = about, take, prompts, signal_noise_factor(point)
        declared, drawn = subject.compute_allowed_difference(decoder.capabilities), bool(asked.temperature)
        compared = emad_audit.compare_with_golden(*given, declared=declared, point=point, drawn=drawn)
    if not compared:
        pytest.skip("not applicable (no golden recorded)")
