"""Are tokens sampled from the model's distribution at their depths, at the temperature and by the seed asked for?"""

from __future__ import annotations

import numpy as np

from emad_ref.audit.sampling import Drawn, sampling
from emad_ref.audit.shapes import brief
from emad_ref.evidence.gathered import Evidence
from pytest_emad.auditing import Auditor

ROWS, NEW = 4, 24
SEEDS = 6
HOT = 1.3, 2.0  # temperatures: well above 1, where most tokens leave something to draw


def test_tokens_are_drawn_from_the_distribution_at_their_depths(
    emad_evidence: Evidence, emad_audit: Auditor, emad_rng: np.random.Generator
) -> None:
    """The first two rows have one prompt, the first seed is asked for twice."""
    subject = emad_evidence.subject
    point = emad_evidence.bridging.probing_point
    temperature = float(emad_rng.uniform(*HOT))
    prompts, _ = subject.drawn_rows(emad_rng, brief(emad_rng, ROWS - 1), 1)
    prompts = [prompts[0], *prompts]
    first, *others = (int(seed) for seed in emad_rng.choice(2**16, SEEDS, replace=False))
    drawn = []
    for seed in (first, *others, first):
        with subject.open(point, max_rows=ROWS, temperature=temperature, seed=seed) as decoder:
            drawn.append(Drawn(seed, decoder.generate(prompts, NEW, frozenset())))
            said = decoder.capabilities
    emad_audit(sampling(drawn, subject.lens, point, prompts, NEW, temperature, said, emad_rng, subject.tolerance))
