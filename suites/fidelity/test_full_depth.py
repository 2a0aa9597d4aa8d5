"""With exits disabled, is the decoder the model? And is the last layer's lens the model's own distribution?"""

from __future__ import annotations

import numpy as np

NEW, PROMPTS, LENGTH = 32, 4, 8


def test_without_exits_tokens_are_the_models_own_greedy_continuation(emad_evidence, emad_audit):
    evidence = emad_evidence
    prompts = evidence.prompts(PROMPTS, LENGTH)
    with evidence.open(evidence.full, max_rows=PROMPTS) as decoder:
        record = decoder.generate(prompts, NEW, frozenset())
    own = evidence.own_greedy(prompts, NEW)
    emad_audit.same_tokens(prompts, [e.tolist() for e in record.emitted], own.tolist())


def test_last_layer_readout_is_the_models_distribution(emad_evidence):
    evidence = emad_evidence
    (prompt,) = evidence.prompts(1, LENGTH)
    own = evidence.own_logits(prompt.tokens)
    difference = np.abs(evidence.lens(prompt.tokens)[:, -1] - own).max()
    assert difference <= evidence.tolerance, f"the last layer's lens is off by {difference:.2e}"
    with evidence.open(evidence.full) as decoder:
        _, step = decoder.start([prompt])
    difference = np.abs(step.logits[0, -1] - own[-1]).max()
    assert difference <= evidence.tolerance, f"the decoder's full-depth logits are off by {difference:.2e}"
