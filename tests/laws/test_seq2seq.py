"""Laws of T5 run layer by layer: exits under depth that never rises are exact, and the ledger is PyTorch's.

EMAD's "no KV backfill" for an encoder-decoder. With decoder depth that never rises, the logits of every token are the
full model's readout at that token's depth. Layers above it neither run for that token nor read its source.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emad_ref.models.geometry import Geometry, geometry_of
from emad_ref.models.seq2seq import Seq2SeqKVCache, Seq2SeqStepper
from tests.flop_counter import counted
from tests.small_models import small_config
from tests.unit.models.test_seq2seq import (
    EXACT,
    KINDS,
    LAYERS,
    TOKENS,
    VOCABULARY,
    at,
    small_t5,
    some_sources,
    some_targets,
    theirs,
)  # fmt: skip

SETTINGS = [(kind, kernel) for kind in KINDS for kernel in ("sdpa", "eager")]


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def stepper(request: pytest.FixtureRequest) -> Seq2SeqStepper:
    return Seq2SeqStepper(small_t5(request.param[0], attention=request.param[1]))


def readouts(stepper: Seq2SeqStepper, sources: list[np.ndarray], targets: torch.Tensor) -> torch.Tensor:
    """Return the full model's readout after every layer, [L, rows, n, V], from its own states and modules."""
    model = stepper.model
    own = theirs(model, sources, targets, output_hidden_states=True)
    scale = model.config.d_model**-0.5 if model.config.scale_decoder_outputs else 1.0
    below = [model.lm_head(model.decoder.final_layer_norm(h) * scale) for h in own.decoder_hidden_states[1:-1]]
    return torch.stack([*below, own.logits])


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_exits_under_falling_depth_are_the_full_models_readout(stepper: Seq2SeqStepper, seed: int) -> None:
    """Falling depths that differ by row, ragged sources and prompts; rows leave a batch within a step."""
    rng = np.random.default_rng(seed)
    sources, prompt = some_sources(*rng.integers(1, 18, 3), seed=seed), rng.integers(1, 4, 3)
    targets = some_targets(3)
    wanted, cache = readouts(stepper, sources, targets), stepper.open_cache(sources, capacity=2)
    depths = -np.sort(-rng.integers(1, LAYERS + 1, (3, TOKENS)), axis=1)
    if (longest := int(prompt.max()) - 1) > 0:  # the prompt but its last position, at full depth
        rows = np.flatnonzero(prompt > 1)
        inputs = stepper.prepare_forward(at([0] * len(rows), longest), cache, rows=rows, lengths=prompt[rows] - 1)
        stepper.run_layers(stepper.embed(targets[rows, :longest], inputs), 0, LAYERS, inputs)
    for step in range(TOKENS - longest - 1):
        position = prompt - 1 + step
        depth = depths[:, step]
        inputs = stepper.prepare_forward(position[:, None], cache)
        hidden = stepper.embed(targets[np.arange(3), position][:, None], inputs)
        running = np.arange(3)
        for layer in range(1, LAYERS + 1):
            hidden = stepper.run_layers(hidden, layer - 1, layer, inputs)
            for row, logits in zip(running, stepper.logits(hidden)[:, 0], strict=True):
                full = wanted[layer - 1, row, position[row]]
                assert float((logits - full).abs().max()) <= EXACT, f"row {row}, position {position[row]}, {layer=}"
            stay = np.flatnonzero(depth[running] > layer)
            if len(stay) == 0:
                break
            hidden, inputs, running = hidden[stay], inputs.select_rows(inputs.running.keep(stay)), running[stay]
        cache.free_layers_above(depth)  # layers above the depth are never needed again
    reached = np.where(prompt > 1, LAYERS, depths[:, 0])
    width = max(len(source) for source in sources)
    assert cache.cross_fills.tolist() == [int((reached >= layer).sum()) * width for layer in range(1, LAYERS + 1)]


# ---------------------------------------------------------------- FLOPs


def source_flops(sizes: Geometry, cache: Seq2SeqKVCache) -> int:
    """Return FLOPs of encoder, cross-attention K and V, and cross-attention, as the cache counted them."""
    return (
        sizes.encoder_flops(cache.encoder_tokens, cache.encoder_context)
        + int(cache.cross_fills.sum()) * sizes.cross_fill_flops()
        + sizes.attention_flops(int(cache.cross_context.sum()))
    )


@pytest.mark.parametrize("lengths", [(9, 9), (9, 4)])
def test_encoder_and_cached_decode_are_counted_exactly(stepper: Seq2SeqStepper, lengths: tuple[int, int]) -> None:
    """The encoder, a prompt, then a step with a probe, an exit below the top, one row going deeper, and a fill."""
    sources, targets, sizes = some_sources(*lengths), some_targets(2), stepper.geometry
    opened: list[Seq2SeqKVCache] = []

    def decode() -> None:
        opened.append(cache := stepper.open_cache(sources))
        inputs = stepper.prepare_forward(at([0, 0], 5), cache)
        stepper.run_layers(stepper.embed(targets[:, :5], inputs), 0, 4, inputs)
        inputs = stepper.prepare_forward(at([5, 5]), cache)
        hidden = stepper.run_layers(stepper.embed(targets[:, 5:6], inputs), 0, 3, inputs)
        stepper.logits(hidden)
        hidden = stepper.run_layers(hidden[1:], 3, 4, inputs.select_rows(inputs.running.keep(np.array([1]))))
        stepper.logits(hidden)
        stepper.write_kv(hidden, 5, stepper.prepare_forward(at([0]), cache, rows=np.array([1])))

    theirs = counted(decode)
    tokens, context = 4 * 10 + 3 * 2 + 1, 4 * 10 * 5 + (3 * 2 + 1) * 6
    mine = tokens * sizes.block_flops() + sizes.attention_flops(context) + 3 * sizes.head_flops()
    assert mine + sizes.kv_fill_flops() + source_flops(sizes, opened[0]) == theirs


def test_the_models_own_forward_costs_the_same(stepper: Seq2SeqStepper) -> None:
    """The formulas describe the model, not only our layered forward."""
    source, n, sizes = torch.randint(2, VOCABULARY, (2, 13)), 7, stepper.geometry
    own = counted(lambda: stepper.model(input_ids=source, decoder_input_ids=some_targets(2, n), use_cache=False))
    decoder = 2 * n * (LAYERS * (sizes.block_flops() + sizes.attention_flops(n + 13)) + sizes.head_flops())
    encoder = sizes.encoder_flops(2 * 13, 2 * 13 * 13) + LAYERS * 2 * 13 * sizes.cross_fill_flops()
    assert decoder + encoder == own


def test_a_decoder_only_geometry_has_no_source() -> None:
    sizes = geometry_of(small_config("gpt_neox"))
    assert (sizes.encoder_flops(9, 81), sizes.cross_fill_flops(), sizes.encoder_layers) == (0, 0, 0)
