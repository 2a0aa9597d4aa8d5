"""Are tokens and depths those that were once recorded for these weights, on text of the same seed?

By every kind of decoding: EMAD at two points, full depth, the repairs and rivals of its schedule, drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from emad_ref.audit.golden import Taken, depths, margins, rooms
from emad_ref.audit.rule import noise_of
from emad_ref.evidence.bridging import Bridging
from emad_ref.evidence.gathered import Evidence
from emad_ref.point import OperatingPoint
from pytest_emad.auditing import Auditor

NEW, LENGTH = 24, 8


@dataclass(frozen=True)
class Kind:
    """``point`` of a bridging; how many ``rows``; ``temperature`` 0: greedy."""

    point: Callable[[Bridging], OperatingPoint]
    rows: int = 2
    temperature: float = 0.0


def probing(**changed: Any) -> Callable[[Bridging], OperatingPoint]:
    """The probing point under another schedule."""
    return lambda bridging: replace(bridging.probing_point, **changed)


KINDS = {
    "greedy": Kind(probing(), rows=4),
    "shallow": Kind(lambda bridging: bridging.shallow_point),
    "full": Kind(lambda bridging: bridging.subject.full),
    "eager": Kind(probing(schedule="free_eager")),
    "deferred": Kind(probing(schedule="free_deferred")),
    "copying": Kind(probing(schedule="copying")),
    "chunked": Kind(probing(schedule="chunked", period=4)),
    "drawn": Kind(probing(), temperature=1.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_depths_are_the_golden_ones(emad_evidence: Evidence, emad_audit: Auditor, kind: str) -> None:
    evidence, subject, asked = emad_evidence, emad_evidence.subject, KINDS[kind]
    if subject.seed and kind != "greedy":
        pytest.skip("not applicable (kinds beside greedy are on record for seed 0 alone)")
    point, prompts = asked.point(evidence.bridging), subject.prompts(asked.rows, LENGTH)
    if point.schedule not in subject.capabilities.schedules:
        pytest.skip(f"not applicable (the decoder has no schedule {point.schedule})")
    if asked.temperature and not subject.decoder_is_ours:
        pytest.skip("not applicable (another decoder draws in its own way)")
    with subject.open(point, max_rows=asked.rows, temperature=asked.temperature) as decoder:
        made = decoder.generate(prompts, NEW, frozenset())
        none = np.full((asked.rows, NEW), np.inf)
        margin = none if asked.temperature else margins(decoder, prompts, made.emitted)
        taken = Taken(np.stack(made.emitted), depths(made), margin, rooms(made, point))
        declared = subject.allowed(decoder.capabilities)
    about = evidence.fingerprint[:16], subject.dtype, evidence.corpus, subject.seed, kind
    drawn = bool(asked.temperature)
    if not emad_audit.golden(about, taken, prompts, noise_of(point), declared=declared, point=point, drawn=drawn):
        pytest.skip("not applicable (no golden recorded)")
