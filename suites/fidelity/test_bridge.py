"""Does replay speak for this decoder? Teacher-forced depths and NLL must be replay's, generated tokens their argmax."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.audit.generation import generation
from emad_ref.audit.shapes import brief
from emad_ref.evidence.gathered import Evidence
from pytest_emad.auditing import Auditor

NEW, ROWS, LENGTH = 24, 2, 8
TOGETHER = 5  # rows of audited generation


def test_teacher_forced_depths_and_losses_are_replays(emad_evidence: Evidence, emad_audit: Auditor) -> None:
    emad_audit(emad_evidence.bridging.bridge)


@pytest.mark.parametrize("kind", ["probing_point", "shallow_point"])
def test_generated_tokens_are_the_argmax_at_their_depths(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator, kind: str
) -> None:
    """After prompts of one token up to twice those that are timed."""
    subject = emad_evidence.subject
    point = getattr(emad_evidence.bridging, kind)
    longest = min(2 * subject.budget.prompt_tokens, subject.window - NEW)
    prompts, _ = subject.drawn_rows(emad_rng, brief(emad_rng, TOGETHER, longest), 1)
    with subject.open(point, max_rows=TOGETHER) as decoder:
        emad_audit(generation(decoder, subject.lens, point, prompts, NEW, subject.tolerance, exact_context=False))


@pytest.mark.parametrize("seed", [1, 2])
def test_sampling_is_reproducible_from_its_seed(emad_evidence: Evidence, seed: int) -> None:
    subject = emad_evidence.subject
    prompts = subject.prompts(ROWS, LENGTH)
    runs = []
    for _ in range(2):
        with subject.open(emad_evidence.bridging.probing_point, max_rows=ROWS, temperature=1.0, seed=seed) as decoder:
            runs.append([e.tolist() for e in decoder.generate(prompts, NEW, frozenset()).emitted])
    assert runs[0] == runs[1]
