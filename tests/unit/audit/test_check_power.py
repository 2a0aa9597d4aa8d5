"""Power and ties of audit checks: inconclusive if depth changes no token, a pass if no token exits, ties excused."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPTNeoXForCausalLM

from emad_ref.point import OperatingPoint, full_depth, truncated
from pytest_emad.audit import Finding, check_decisions, check_generation
from pytest_emad.audit.session_checks import WIDEST_PARTLY_SHOWN, check_feed_last_argument, plan_feeds_with_last_logits
from tests.decoders.audited_model import LAYERS, drawn, spread_point, tiny_neox, under_test
from tests.decoders.cached_decoder import CachedDecoder
from tests.decoders.foreign_decoder import ForeignDecoder

PROMPTS, CONTINUATION = drawn((4, 6), 8)
POINT, FULL = spread_point(), full_depth(LAYERS)


def identity_above(layer: int) -> GPTNeoXForCausalLM:
    """Return the tiny model with blocks above ``layer`` that add nothing."""
    model = copy.deepcopy(tiny_neox())
    with torch.no_grad():
        for block in model.gpt_neox.layers[layer:]:
            for linear in (block.attention.dense, block.mlp.dense_4h_to_h):
                linear.weight.zero_()
                linear.bias.zero_()
    return model


def test_generation_has_no_power_where_depth_changes_nothing() -> None:
    finding = check_generation(under_test(CachedDecoder, POINT, model=identity_above(2)), PROMPTS, 8)
    assert finding.passed is None
    assert "too few positions" in finding.detail
    assert "judge a model whose answers vary more" in finding.detail


@pytest.mark.parametrize("point", [FULL, truncated(LAYERS, 3)], ids=lambda point: point.name)
@pytest.mark.parametrize("check", ["decisions", "generation"])
def test_a_point_without_probes_passes(check: str, point: OperatingPoint) -> None:
    decoder = under_test(CachedDecoder, point)
    finding: Finding = (
        check_decisions(decoder, PROMPTS, CONTINUATION)
        if check == "decisions"
        else check_generation(decoder, PROMPTS, 8)
    )
    assert finding.passed is True, finding.detail


@pytest.mark.parametrize("widest", [1, 2, 3, 64])
def test_last_logits_are_checked_however_wide_a_decoders_feeds_are(widest: int) -> None:
    prompts, continuation = drawn((4, 2), sum(n for n, _ in plan_feeds_with_last_logits(WIDEST_PARTLY_SHOWN)))
    asked = under_test(ForeignDecoder, FULL)
    asked.decoder.capabilities = replace(asked.decoder.capabilities, max_feed=widest)
    finding = check_feed_last_argument(asked, prompts, continuation, np.random.default_rng(0))
    assert finding.passed is True, finding.detail
