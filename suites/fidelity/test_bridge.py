"""Does replay speak for this decoder? Teacher-forced depths and NLL must be replay's, generated tokens their argmax."""

from __future__ import annotations

import pytest

from emad_ref.audit.generation import generation

NEW, ROWS, LENGTH = 24, 2, 8


def test_teacher_forced_depths_and_losses_are_replays(emad_evidence, emad_audit):
    emad_audit(emad_evidence.bridge)


@pytest.mark.parametrize("kind", ["probing_point", "shallow_point"])
def test_generated_tokens_are_the_argmax_at_their_depths(emad_evidence, emad_audit, kind):
    point = getattr(emad_evidence, kind)
    prompts = emad_evidence.prompts(ROWS, LENGTH)
    with emad_evidence.open(point, max_rows=ROWS) as decoder:
        emad_audit(
            generation(decoder, emad_evidence.lens, point, prompts, NEW, emad_evidence.tolerance, exact_context=False)
        )


@pytest.mark.parametrize("seed", [1, 2])
def test_sampling_is_reproducible_from_its_seed(emad_evidence, seed):
    prompts = emad_evidence.prompts(ROWS, LENGTH)
    runs = []
    for _ in range(2):
        with emad_evidence.open(emad_evidence.probing_point, max_rows=ROWS, temperature=1.0, seed=seed) as decoder:
            runs.append([e.tolist() for e in decoder.generate(prompts, NEW, frozenset()).emitted])
    assert runs[0] == runs[1]
