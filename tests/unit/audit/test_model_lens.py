"""``ModelLens``: logits of each position at its own depth, computed without heads that no check reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from emad_ref.exit_rules import early_exit_point
from emad_ref.models.causal import CausalStepper
from pytest_emad.audit.model_lens import ModelLens
from pytest_emad.audit.reference_logits import LayerLogits, PrefixCachingLens
from pytest_emad.audit.tolerances import tolerance
from tests.small_models import LAYERS, VOCABULARY, small_model

TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, 9)


@pytest.mark.parametrize("depths", [[LAYERS, 4, 4, 2, 1], [LAYERS] * len(TOKENS), [1]])
def test_logits_at_depths_are_the_whole_lens_there_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, depths: list[int]
) -> None:
    lens, heads = ModelLens(CausalStepper(small_model("gpt_neox"))), []
    whole = np.asarray(lens(TOKENS))
    logits = CausalStepper.logits
    monkeypatch.setattr(CausalStepper, "logits", lambda self, hidden: heads.append(hidden) or logits(self, hidden))
    found = lens(TOKENS).slice_positions(len(TOKENS) - len(depths), len(TOKENS)).at_depth(np.array(depths))
    expected = whole[np.arange(len(TOKENS) - len(depths), len(TOKENS)), np.array(depths) - 1]
    assert found.dtype == np.float64
    assert np.array_equal(found, expected)
    assert len(heads) == len(set(depths))


def test_rounding_covers_the_order_of_summation_and_follows_the_precision() -> None:
    """Copies, each fed alone or in one batch, sum in different orders; float64 rounds 2^29 times as finely."""
    model, every = small_model("llama"), range(1, LAYERS + 1)
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        stepper = CausalStepper(model.to(dtype))
        found[dtype] = ModelLens(stepper).max_rounding_error(TOKENS, every)
    model.to(torch.float32)
    exact, rounded = (
        np.asarray(ModelLens(CausalStepper(model.to(each)))(TOKENS))[-1] for each in found if each.itemsize > 2
    )
    assert np.abs(exact - rounded).max() < found[torch.float32] < tolerance("llama", "float32", "cpu")
    assert found[torch.float64] < found[torch.float32] / 1e6 < found[torch.bfloat16] / 1e8


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_the_size_of_an_adaptive_readout_is_known_within_the_error_of_its_confidence(error: float) -> None:
    lens = ModelLens(CausalStepper(small_model("gpt_neox")))
    rule = early_exit_point("softmax_response", LAYERS, VOCABULARY, 1, pruning="adaptive", schedule="monotone")
    point = replace(rule, confidence=replace(rule.confidence, shrink=0.9))
    readouts = lens.read_rule(TOKENS, 0, point).readouts
    least, most = (each.macs for each in readouts.work_bounds(error))
    assert (least <= readouts.macs).all()
    assert (readouts.macs <= most).all()
    assert np.array_equal(least, most) is (error == 0.0)
    width = lens.stepper.geometry.embedding_width
    assert (most - least).max() <= (2 * error * 0.9 * VOCABULARY + 1) * width * (error > 0)


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "opt", "gemma2"])
def test_sequences_in_one_pass_have_the_logits_of_each_alone(family: str) -> None:
    """Shorter sequences are padded at the end, which changes only the order of summation."""
    lens = ModelLens(CausalStepper(small_model(family)))
    sequences = [(TOKENS, 0), (TOKENS[2:5], 1), (TOKENS[::-1][:7], 6)]
    for (tokens, first), found in zip(
        sequences, lens.read_layer_logits_by_sequence(sequences, (2, LAYERS)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(found), np.asarray(lens(tokens, first)), atol=1e-5)


def test_announced_sequences_are_read_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, with others between; a pass holds at most ``AT_ONCE`` positions."""
    lens, passes = ModelLens(CausalStepper(small_model("gpt_neox"))), list[list[int]]()
    together = ModelLens.read_layer_logits_by_sequence
    monkeypatch.setattr("pytest_emad.audit.reference_logits.AT_ONCE", 27)

    def counted(self: ModelLens, group: list[tuple[np.ndarray, int]], *shared: Any) -> list[LayerLogits]:
        passes.append([len(one) for one, _ in group])
        return together(self, group, *shared)

    monkeypatch.setattr(ModelLens, "read_layer_logits_by_sequence", counted)
    texts = [np.roll(TOKENS, by)[: 9 - by % 3] for by in range(5)]
    ahead = PrefixCachingLens(lens)
    ahead.announce_sequences(((text, 2) for text in texts), (LAYERS,))
    order = [texts[0], texts[2], TOKENS[:4], texts[1], texts[3], texts[4], texts[4][:6]]
    for tokens in order:
        np.testing.assert_allclose(np.asarray(ahead(tokens, 2)), np.asarray(lens(tokens, 2)), atol=1e-5)
    assert [each for each in passes if len(each) > 1] == [[9, 8, 7], [9, 8]]
    assert passes.count([4]) == 2  # not announced: read alone in both cases
