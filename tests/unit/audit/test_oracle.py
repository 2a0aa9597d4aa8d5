"""The lens of a model: logits of positions at their own depths, without heads that nothing is asked of."""

from __future__ import annotations

import numpy as np
import pytest

from emad_ref.audit.oracle import ModelLens
from emad_ref.models.causal import CausalStepper
from tests.small import LAYERS, VOCABULARY, small_model

TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, 9)


@pytest.mark.parametrize("depths", [[LAYERS, 4, 4, 2, 1], [LAYERS] * len(TOKENS), [1]])
def test_logits_at_depths_are_the_whole_lens_there_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, depths: list[int]
) -> None:
    lens, heads = ModelLens(CausalStepper(small_model("gpt_neox"))), []
    whole = np.asarray(lens(TOKENS))
    logits = CausalStepper.logits
    monkeypatch.setattr(CausalStepper, "logits", lambda self, hidden: heads.append(hidden) or logits(self, hidden))
    found = lens(TOKENS).between(len(TOKENS) - len(depths), len(TOKENS)).at_depth(np.array(depths))
    expected = whole[np.arange(len(TOKENS) - len(depths), len(TOKENS)), np.array(depths) - 1]
    assert found.dtype == np.float64
    assert np.array_equal(found, expected)
    assert len(heads) == len(set(depths))
