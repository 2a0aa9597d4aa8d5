"""The FLOP ledger equals PyTorch's FLOP counter exactly, for every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emad_ref.errors import BadArgument
from emad_ref.flop_ledger import flops, probes_to_blocks_flops_ratio
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.stepper import Stepper
from emad_ref.record import Work
from tests.flop_counter import counted
from tests.small_models import EXPERTS, FAMILIES, LAYERS, NEEDS_EAGER, VOCABULARY, small_model

ROWS, PROMPT = 2, 9


KERNELS = [(family, kernel) for family in FAMILIES for kernel in ("sdpa", "eager")]


@pytest.fixture(
    scope="module",
    params=[(family, kernel) for family, kernel in KERNELS if kernel == "eager" or family not in NEEDS_EAGER],
    ids="-".join,
)
def stepper(request: pytest.FixtureRequest) -> Stepper:
    family, kernel = request.param
    model = small_model(family, torch.float32, attention=kernel)
    if family in EXPERTS:
        # PyTorch's counter has no formula for the default, one grouped product for all experts
        model.set_experts_implementation("eager")
    return CausalStepper(model)


def executed(work: Work, layers: int, queries: int, keys: int, read_at: tuple[int, ...], readouts: int) -> Work:
    """Return ``work`` plus one forward of ROWS rows through the first ``layers`` layers."""
    work.tokens[:layers] += ROWS * queries
    work.context[:layers] += ROWS * queries * keys
    for layer in read_at:
        work.readout_rows[0, layer - 1] += readouts
    return work


def test_prefill_is_counted_exactly(stepper: Stepper) -> None:
    ids = torch.randint(0, VOCABULARY, (ROWS, PROMPT))
    inputs = stepper.prepare_forward(np.tile(np.arange(PROMPT), (ROWS, 1)), None)
    theirs = counted(lambda: stepper.logits(stepper.run_layers(stepper.embed(ids, inputs), 0, LAYERS, inputs)))
    work = executed(Work.none(LAYERS), LAYERS, PROMPT, inputs.running.keys, (LAYERS,), ROWS * PROMPT)
    assert flops(work, stepper.geometry).total == theirs


@pytest.mark.parametrize("lengths", [(9, 9), (9, 4)])
def test_cached_decode_with_probes_and_a_fill_is_counted_exactly(stepper: Stepper, lengths: tuple[int, int]) -> None:
    """Two probes, an exit below the top, a K/V-only pass of the layer above; padding and masked keys are charged."""
    depth, cache = LAYERS - 1, stepper.new_cache(ROWS, 4)
    ids = torch.randint(0, VOCABULARY, (ROWS, PROMPT))
    with torch.inference_mode():
        inputs = stepper.prepare_forward(np.tile(np.arange(PROMPT), (ROWS, 1)), cache, lengths=np.array(lengths))
        stepper.run_layers(stepper.embed(ids, inputs), 0, LAYERS, inputs)
    inputs = stepper.prepare_forward(np.array(lengths)[:, None], cache)

    def step() -> None:
        hidden = stepper.run_layers(stepper.embed(ids[:, :1], inputs), 0, 2, inputs)
        stepper.logits(hidden)
        hidden = stepper.run_layers(hidden, 2, depth, inputs)
        stepper.logits(hidden)
        stepper.write_kv(hidden, depth + 1, inputs)

    theirs = counted(step)
    work = executed(Work.none(LAYERS), depth, 1, inputs.running.keys, (2, depth), ROWS)
    work.fills[0, depth] += ROWS
    assert inputs.running.keys == PROMPT + 1
    assert flops(work, stepper.geometry).total == theirs


def test_the_models_own_forward_costs_the_same(stepper: Stepper) -> None:
    """The ledger describes the model, not only our layered forward."""
    ids = torch.randint(0, VOCABULARY, (1, PROMPT))
    work = Work.none(LAYERS)
    work.tokens[:], work.context[:], work.readout_rows[0, -1] = PROMPT, PROMPT**2, PROMPT
    assert flops(work, stepper.geometry).total == counted(lambda: stepper.model(ids, use_cache=False))


def test_parts_add_up() -> None:
    geometry = geometry_of(small_model("opt_350m").config)
    work = Work.none(LAYERS)
    work.tokens[:], work.context[:], work.readout_rows[0, -1] = 2, 1 + 6, 2
    cost = flops(work, geometry)
    assert cost.blocks_and_attention == cost.blocks + cost.attention
    assert cost.total == cost.blocks_and_attention + cost.readouts["full"] + cost.fills + cost.inputs
    assert cost.inputs == 2 * 2 * 32 * 16
    assert cost.attention == LAYERS * 7 * 4 * 32


def test_work_of_another_model_is_refused() -> None:
    geometry = geometry_of(small_model("gpt_neox").config)
    with pytest.raises(BadArgument, match=r"work\.layers=4"):
        flops(Work.none(4), geometry)
    seq2seq = Work.none(LAYERS)
    seq2seq.cross_fills[0] = 1
    with pytest.raises(BadArgument, match="decoder-only"):
        flops(seq2seq, geometry)


def test_probe_share_is_readouts_over_blocks() -> None:
    geometry = geometry_of(small_model("gpt_neox").config)
    work = Work.none(LAYERS)
    work.tokens[:], work.context[:] = 1, 12
    work.readout_rows[0, [1, 3, LAYERS - 1]] = 1
    cost = flops(work, geometry)
    only_probes = cost.readouts["full"] - geometry.head_flops()
    blocks = cost.blocks_and_attention
    assert probes_to_blocks_flops_ratio(geometry, 2, keys=12) == pytest.approx(only_probes / blocks)
    assert probes_to_blocks_flops_ratio(geometry, 2, keys=12, probe_flops=7) == pytest.approx(14 / blocks)
    with pytest.raises(BadArgument, match="probes ≥ 0"):
        probes_to_blocks_flops_ratio(geometry, -1, keys=12)
