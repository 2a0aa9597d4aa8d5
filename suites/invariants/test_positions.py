"""Is the decoder right where users live: behind prompts of hundreds of tokens, up to the last positions of the window?

A handful of long audits, with lengths drawn for this run; ``test_depth`` has the many short ones.
"""

from __future__ import annotations

import numpy as np

from emad_ref.audit.decisions import decisions
from emad_ref.audit.forced import forced
from emad_ref.audit.generation import generation
from emad_ref.audit.shapes import far
from emad_ref.evidence.gathered import Evidence
from pytest_emad.auditing import Auditor

FED = 12


def test_forced_depths_are_obeyed_far_into_the_window(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    point = subject.full
    prompts, continuation = subject.drawn_rows(emad_rng, far(emad_rng, subject.window - FED), FED)
    with subject.open(point, max_rows=len(prompts)) as decoder:
        emad_audit(forced(decoder, subject.lens, point, prompts, continuation, emad_rng, subject.tolerance))


def test_decisions_are_the_rules_far_into_the_window(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    point = emad_evidence.bridging.probing_point
    lengths = far(emad_rng, subject.window - FED)[:2]
    prompts, continuation = subject.drawn_rows(emad_rng, lengths, FED)
    with subject.open(point, max_rows=len(prompts)) as decoder:
        emad_audit(
            decisions(decoder, subject.lens, point, prompts, continuation, subject.tolerance, exact_context=False)
        )


def test_full_depth_is_generated_far_into_the_window(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    subject = emad_evidence.subject
    point = subject.full
    prompts, _ = subject.drawn_rows(emad_rng, far(emad_rng, subject.window - FED), 1)
    with subject.open(point, max_rows=len(prompts)) as decoder:
        emad_audit(generation(decoder, subject.lens, point, prompts, FED, subject.tolerance, exact_context=False))
