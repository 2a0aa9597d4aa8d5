"""Is greedy speculative decoding its verifier's greedy decoding, alone and in a batch, at full and adaptive depth?

And is it the model's own where the model drafts for itself, whatever layer it leaves at?
"""

from __future__ import annotations

import pytest

from emad_ref.audit.generation import generation
from pytest_emad.pairing import self_speculation, speculation

NEW, BESIDE = 12, 4
POINTS = {
    "full depth": lambda pair: (pair.small.full, pair.large.full),
    "emad in the verifier": lambda pair: (pair.small.full, pair.large.probing_point),
    "emad in both": lambda pair: (pair.small.probing_point, pair.large.probing_point),
}


@pytest.mark.parametrize("rows", [1, BESIDE])
@pytest.mark.parametrize("depth", POINTS)
def test_speculation_emits_what_its_verifier_would(emad_pair, emad_record, rows, depth):
    with emad_pair.partners(*POINTS[depth](emad_pair), rows=rows) as (draft, verifier):
        emit_the_same(emad_pair, emad_record, rows, verifier, [speculation(draft, verifier)])


def test_a_model_that_drafts_for_itself_emits_what_it_would(emad_pair, emad_record):
    if reason := emad_pair.without_drafting:
        pytest.skip(f"not applicable ({reason})")
    with emad_pair.drafting(BESIDE) as model:
        decoders = [self_speculation(model, layer) for layer in emad_pair.exit_layers]
        emit_the_same(emad_pair, emad_record, BESIDE, model, decoders)


def emit_the_same(pair, record, rows, verifier, decoders):
    """Token by token up to ties, and at the depths that replay gives what was emitted."""
    prompts, _ = pair.large.rows(rows, 1)
    audit, point = pair.auditor(record), verifier.point
    own = verifier.decoder.generate(prompts, NEW, frozenset())
    for decoder in decoders:
        found = decoder.generate(prompts, NEW, frozenset())
        emitted = [[tokens.tolist() for tokens in one.emitted] for one in (found, own)]
        audit.same_tokens(prompts, *emitted, point)
        audit(generation(decoder, pair.large.lens, point, prompts, NEW, pair.large.tolerance))
