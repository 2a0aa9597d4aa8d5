"""Is greedy speculative decoding its verifier's greedy decoding, alone and in a batch, at full and adaptive depth?"""

from __future__ import annotations

import pytest

from emad_ref.audit.generation import generation
from pytest_emad.pairing import Speculation

NEW = 12
POINTS = {
    "full depth": lambda pair: (pair.small.full, pair.large.full),
    "emad in the verifier": lambda pair: (pair.small.full, pair.large.probing_point),
    "emad in both": lambda pair: (pair.small.probing_point, pair.large.probing_point),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("depth", POINTS)
def test_speculation_emits_what_its_verifier_would(emad_pair, emad_record, rows, depth):
    pair, points = emad_pair, POINTS[depth](emad_pair)
    prompts, _ = pair.large.rows(rows, 1)
    audit = pair.auditor(emad_record)
    with pair.partners(*points, rows=rows) as (draft, verifier):
        speculation = Speculation(draft, verifier)
        own = verifier.decoder.generate(prompts, NEW, frozenset())
        found = speculation.generate(prompts, NEW, frozenset())
        emitted = [[tokens.tolist() for tokens in record.emitted] for record in (found, own)]
        audit.same_tokens(prompts, *emitted, verifier.point)
        audit(generation(speculation, pair.large.lens, verifier.point, prompts, NEW, pair.large.tolerance))
