"""Is the decoder right where users live: behind prompts of hundreds of tokens, up to the last positions of the window?

A handful of long audits, with lengths drawn for this run; ``test_depth`` has the many short ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.audit.decisions import decisions
from emad_ref.audit.forced import forced
from emad_ref.audit.generation import generation
from emad_ref.audit.shapes import brief, edges, far
from emad_ref.evidence.gathered import Evidence
from pytest_emad.auditing import Auditor

FED, LONG = 12, 72  # tokens after a prompt, beyond one buffer and beyond several
LENGTHS = {"far": far, "edges": edges}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_forced_depths_are_obeyed_far_into_the_window(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator, lengths: str
) -> None:
    subject = emad_evidence.subject
    point, drawn = subject.full, LENGTHS[lengths](emad_rng, subject.window - FED)
    with subject.open_drawn(point, emad_rng, drawn, FED) as (decoder, prompts, continuation):
        emad_audit(forced(decoder, subject.lens, point, prompts, continuation, emad_rng, subject.tolerance))


def test_forced_depths_are_obeyed_late_in_a_session(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    point, fed = subject.full, min(LONG, subject.window // 2)
    drawn = brief(emad_rng, 3, subject.window - fed)
    with subject.open_drawn(point, emad_rng, drawn, fed) as (decoder, prompts, continuation):
        emad_audit(forced(decoder, subject.lens, point, prompts, continuation, emad_rng, subject.tolerance))


def test_decisions_are_the_rules_far_into_the_window(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    point = emad_evidence.bridging.probing_point
    drawn = far(emad_rng, subject.window - FED)[:2]
    with subject.open_drawn(point, emad_rng, drawn, FED) as (decoder, prompts, continuation):
        emad_audit(
            decisions(decoder, subject.lens, point, prompts, continuation, subject.tolerance, exact_context=False)
        )


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("full", [True, False], ids=["full", "probing"])
def test_generation_holds_far_into_the_window(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator, lengths: str, full: bool
) -> None:
    """Depths, signals and tokens; where depth changes too few tokens, ``test_bridge`` has the power."""
    subject = emad_evidence.subject
    point = subject.full if full else emad_evidence.bridging.probing_point
    drawn = LENGTHS[lengths](emad_rng, subject.window - FED)[:2]
    with subject.open_drawn(point, emad_rng, drawn, 1) as (decoder, prompts, _):
        emad_audit(
            generation(decoder, subject.lens, point, prompts, FED, subject.tolerance, needed=0, exact_context=False)
        )
