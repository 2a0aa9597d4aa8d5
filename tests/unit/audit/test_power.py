"""Where depth makes no difference the audit says inconclusive; where nothing adapts it still passes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import GPTNeoXForCausalLM

from emad_ref.audit import decisions, forced, generation, rows
from emad_ref.audit.finding import Finding
from emad_ref.point import OperatingPoint, full_depth, truncated
from tests.decoders.cached import CachedDecoder
from tests.decoders.foreign import ForeignDecoder
from tests.decoders.subject import LAYERS, drawn, lens_of, spread_point, tiny_neox

TOLERANCE = 1e-9
PROMPTS, CONTINUATION = drawn((4, 6), 8)


def identity_above(layer: int) -> GPTNeoXForCausalLM:
    """The tiny model with blocks above ``layer`` that add nothing."""
    model = copy.deepcopy(tiny_neox())
    with torch.no_grad():
        for block in model.gpt_neox.layers[layer:]:
            for linear in (block.attention.dense, block.mlp.dense_4h_to_h):
                linear.weight.zero_()
                linear.bias.zero_()
    return model


def test_generation_has_no_power_where_depth_changes_nothing() -> None:
    model, point = identity_above(2), spread_point()
    finding = generation(CachedDecoder(model, point), lens_of(model), point, PROMPTS, 8, TOLERANCE)
    assert finding.passed is None
    assert "too few positions" in finding.detail


def test_forced_has_no_power_where_depth_changes_nothing() -> None:
    model, point = identity_above(1), full_depth(LAYERS)
    rng = np.random.default_rng(0)
    finding = forced(
        CachedDecoder(model, point), lens_of(model), point, PROMPTS, CONTINUATION, rng, TOLERANCE, needed=9
    )
    assert finding.passed is None


def test_rows_that_decide_alike_are_inconclusive() -> None:
    point = spread_point()
    finding = rows(
        ForeignDecoder(tiny_neox(), point), lens_of(tiny_neox()), point, [PROMPTS[0], PROMPTS[0]], 4, TOLERANCE
    )
    assert finding.passed is None


@pytest.mark.parametrize("point", [full_depth(LAYERS), truncated(LAYERS, 3)], ids=lambda point: point.name)
@pytest.mark.parametrize("check", [decisions, generation])
def test_a_point_without_probes_passes(check: object, point: OperatingPoint) -> None:
    model = tiny_neox()
    decoder, lens = CachedDecoder(model, point), lens_of(model)
    if check is decisions:
        finding: Finding = decisions(decoder, lens, point, PROMPTS, CONTINUATION, TOLERANCE)
    else:
        finding = generation(decoder, lens, point, PROMPTS, 8, TOLERANCE)
    assert finding.passed is True, finding.detail


def test_declared_noise_costs_power_instead_of_buying_a_pass() -> None:
    """A decoder that claims logits may be off by 100 cannot be refuted, but is not passed either."""

    class Vague(CachedDecoder):
        capabilities = CachedDecoder.capabilities.__class__(logit_noise=100.0)

    point = full_depth(LAYERS)
    finding = forced(
        Vague(tiny_neox(), point),
        lens_of(tiny_neox()),
        point,
        PROMPTS,
        CONTINUATION,
        np.random.default_rng(0),
        TOLERANCE,
    )
    assert finding.passed is None
