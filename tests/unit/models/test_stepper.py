"""The layered model gives the model's own logits for any depth of each row and token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from emad_ref.errors import BadArgument
from emad_ref.models.causal import CausalStepper
from emad_ref.models.geometry import geometry_of
from emad_ref.models.kv_cache import KVCache, MissingEntryError
from emad_ref.models.stepper import ModelMismatch, SizeMismatch, Stepper, count_parameters
from tests.small_models import FAMILIES, LAYERS, VOCABULARY, small_config, small_model

# RMSNorm and Gemma 2's softmax compute in float32 even in a float64 model; LayerNorm families stay in float64
DOUBLE = (
    "gpt_neox", "gpt_neox_sequential", "opt", "opt_350m", "gpt2", "phi", "stablelm", "stablelm_parallel", "falcon",
    "falcon_grouped", "falcon_sequential",
)  # fmt: skip
TOKENS = 14  # longer than the window and CAPACITY, so that buffers grow
CAPACITY = 4


def tolerance(family: str, attention: str = "sdpa") -> float:
    """Return the tolerance relative to the largest number: eager attention has its softmax in float32."""
    return 1e-10 if family in DOUBLE and attention == "sdpa" else 2e-5


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return small_model(family)


@pytest.fixture(scope="module")
def stepper(model: Any) -> Stepper:
    return CausalStepper(model)


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


def random_tokens(rows: int, n: int = TOKENS) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(3))


def at(first: list[int], n: int) -> np.ndarray:
    return np.array(first)[:, None] + np.arange(n)


def plain_states(stepper: Stepper, ids: Tensor) -> list[Tensor]:
    """Return h_0 … h_L [rows, n, D] of one forward without a cache."""
    inputs = stepper.prepare_forward(at([0] * len(ids), ids.shape[1]), None)
    states = [stepper.embed(ids, inputs)]
    for layer in range(1, stepper.layers + 1):
        states.append(stepper.run_layers(states[-1], layer - 1, layer, inputs))
    return states


def advance(stepper: Stepper, cache: KVCache, ids: Tensor, first: list[int], depth: int) -> Tensor:
    """Return logits of one chunk for all rows at one depth."""
    inputs = stepper.prepare_forward(at(first, ids.shape[1]), cache)
    return stepper.logits(stepper.run_layers(stepper.embed(ids, inputs), 0, depth, inputs))


def close(mine: Tensor, theirs: Tensor, family: str, attention: str = "sdpa") -> None:
    assert mine.shape == theirs.shape
    assert float((mine - theirs).abs().max()) <= tolerance(family, attention) * float(theirs.abs().max())


def test_full_depth_is_the_models_own_forward(stepper: Stepper, model: Any, family: str) -> None:
    ids = random_tokens(2)
    close(stepper.logits(plain_states(stepper, ids)[-1]), model(ids, use_cache=False).logits, family)


def test_every_intermediate_state_is_the_models_own(stepper: Stepper, model: Any, family: str) -> None:
    ids = random_tokens(2)
    theirs = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    for mine, state in zip(plain_states(stepper, ids)[:-1], theirs[:-1], strict=True):  # the last one is already normed
        close(mine, state, family)


def test_layers_matter_in_the_test_models(stepper: Stepper) -> None:
    """Otherwise the laws below would hold without some layers."""
    states = plain_states(stepper, random_tokens(1))
    for below, above in pairwise(states):
        assert float((above - below).norm() / below.norm()) > 0.05


def test_logits_are_the_head_of_the_normed_state(stepper: Stepper, family: str) -> None:
    """Estimators read rows of the head, so every change of logits but a cap must already be in the state."""
    state = plain_states(stepper, random_tokens(1))[3]
    read = stepper.apply_final_norm(state) @ stepper.unembedding.T
    read = read if stepper.unembedding_bias is None else read + stepper.unembedding_bias
    read = read if stepper.logit_softcap is None else stepper.logit_softcap * torch.tanh(read / stepper.logit_softcap)
    close(stepper.logits(state), read, family)


@pytest.mark.parametrize("chunk", [1, 3])
def test_cached_decode_is_the_full_forward(stepper: Stepper, model: Any, family: str, chunk: int) -> None:
    ids, cache = random_tokens(2), stepper.new_cache(2, CAPACITY)
    pieces = [advance(stepper, cache, ids[:, :5], [0, 0], LAYERS)]
    pieces += [advance(stepper, cache, ids[:, t : t + chunk], [t, t], LAYERS) for t in range(5, TOKENS, chunk)]
    close(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits, family)


def test_a_ragged_prompt_gives_each_row_what_it_gets_alone(stepper: Stepper, model: Any, family: str) -> None:
    lengths, steps = [7, 3, 1], 5
    ids = random_tokens(3)
    cache = stepper.new_cache(3, CAPACITY)
    inputs = stepper.prepare_forward(at([0, 0, 0], 7), cache, lengths=np.array(lengths))
    prompt = stepper.logits(stepper.run_layers(stepper.embed(ids[:, :7], inputs), 0, LAYERS, inputs))
    decoded = []
    for step in range(steps):
        fed = torch.stack([ids[row, n + step] for row, n in enumerate(lengths)])[:, None]
        decoded.append(advance(stepper, cache, fed, [n + step for n in lengths], LAYERS))
    for row, n in enumerate(lengths):
        alone = model(ids[row : row + 1, : n + steps], use_cache=False).logits[0]
        close(torch.cat([prompt[row, :n], torch.cat(decoded, dim=1)[row]]), alone, family)


def test_rows_without_a_prompt_wait_for_the_others(stepper: Stepper, model: Any, family: str) -> None:
    """The forward of a subset of rows writes only their entries."""
    ids, cache = random_tokens(3), stepper.new_cache(3, CAPACITY)
    inputs = stepper.prepare_forward(at([0, 0], 6), cache, rows=np.array([0, 2]), lengths=np.array([6, 2]))
    stepper.run_layers(stepper.embed(ids[[0, 2], :6], inputs), 0, LAYERS, inputs)
    assert [layer.row_lengths.tolist() for layer in cache.layers] == [[6, 0, 2]] * LAYERS
    logits = advance(stepper, cache, torch.stack([ids[0, 6], ids[1, 0], ids[2, 2]])[:, None], [6, 0, 2], LAYERS)
    for row, n in enumerate([7, 1, 3]):
        close(logits[row, -1], model(ids[row : row + 1, :n], use_cache=False).logits[0, -1], family)


def test_depth_that_never_rises_needs_no_repair(stepper: Stepper, family: str) -> None:
    """Logits at depth D_t are the full model's readout there (EMAD, "no KV backfill")."""
    depths = [LAYERS] * 6 + [5, 5, 4, 4, 2, 2, 1, 1]
    ids, cache = random_tokens(1), stepper.new_cache(1, CAPACITY)
    states = plain_states(stepper, ids)
    advance(stepper, cache, ids[:, :6], [0], LAYERS)
    for t in range(6, TOKENS):
        close(
            advance(stepper, cache, ids[:, t : t + 1], [t], depths[t])[:, 0],
            stepper.logits(states[depths[t]][:, t]),
            family,
        )


@pytest.mark.parametrize("freeing", [False, True])
def test_rows_leave_at_their_own_depths(stepper: Stepper, family: str, freeing: bool) -> None:
    """Per-row monotone depths in a ragged batch, with ``take`` and with or without freed K/V."""
    prompts = np.array([6, 4, 2])
    schedule = np.array([[6, 6, 4, 4, 1], [5, 3, 3, 3, 3], [6, 6, 6, 6, 2]])
    ids, cache = random_tokens(3), stepper.new_cache(3, CAPACITY)
    states = plain_states(stepper, ids)
    inputs = stepper.prepare_forward(at([0, 0, 0], 6), cache, lengths=prompts)
    stepper.run_layers(stepper.embed(ids[:, :6], inputs), 0, LAYERS, inputs)
    for step, depth in enumerate(schedule.T):
        here = prompts + step
        inputs = stepper.prepare_forward(here[:, None], cache)
        fed = ids[torch.arange(3), torch.from_numpy(here)][:, None]
        hidden, running, layer = stepper.embed(fed, inputs), np.arange(3), 0
        for stop in sorted(set(depth.tolist())):
            hidden = stepper.run_layers(hidden, layer, stop, inputs)
            layer, stays = stop, depth[running] > stop
            for i in np.flatnonzero(~stays):
                row = running[i]
                close(stepper.logits(hidden)[i, 0], stepper.logits(states[stop][row, here[row]]), family)
            if stays.any():
                hidden = hidden[torch.from_numpy(stays)]
                inputs = inputs.select_rows(inputs.running.keep(np.flatnonzero(stays)))
                running = running[stays]
        if freeing:
            cache.free_layers_above(depth)


def test_truncate_and_go_on_is_a_fresh_history(stepper: Stepper, model: Any, family: str) -> None:
    """Rows roll back by different numbers of tokens; the depths of the remaining ones stay."""
    ids, other = random_tokens(2), random_tokens(2).flip(1)
    cache = stepper.new_cache(2, CAPACITY)
    advance(stepper, cache, ids[:, :7], [0, 0], LAYERS)
    for t in range(7, 10):
        advance(stepper, cache, ids[:, t : t + 1], [t, t], 3)
    cache.truncate(np.array([7, 4]))
    assert [layer.row_lengths.tolist() for layer in cache.layers] == [[7, 4]] * LAYERS
    logits = [advance(stepper, cache, other[:, i : i + 1], [7 + i, 4 + i], LAYERS) for i in range(4)]
    for row, kept in enumerate([7, 4]):
        history = torch.cat([ids[row, :kept], other[row, :4]])[None]
        close(torch.cat(logits, dim=1)[row], model(history, use_cache=False).logits[0, kept:], family)


def test_filling_with_the_true_state_is_running_the_block(stepper: Stepper, model: Any, family: str) -> None:
    """Ragged rows too: the K/V-only pass writes the same entries as the block."""
    ids, lengths = random_tokens(2), [6, 3]
    states = plain_states(stepper, ids)
    cache = stepper.new_cache(2, CAPACITY)
    inputs = stepper.prepare_forward(at([0, 0], 6), cache, lengths=np.array(lengths))
    stepper.run_layers(stepper.embed(ids[:, :6], inputs), 0, LAYERS, inputs)
    inputs = stepper.prepare_forward(at(lengths, 1), cache)
    fed = torch.stack([ids[row, n] for row, n in enumerate(lengths)])[:, None]
    stepper.run_layers(stepper.embed(fed, inputs), 0, 2, inputs)
    for layer in range(3, LAYERS + 1):
        true = torch.stack([states[layer - 1][row, n] for row, n in enumerate(lengths)])[:, None]
        stepper.write_kv(true, layer, inputs)
    assert [layer.row_lengths.tolist() for layer in cache.layers] == [[7, 4]] * LAYERS
    fed = torch.stack([ids[row, n + 1] for row, n in enumerate(lengths)])[:, None]
    logits = advance(stepper, cache, fed, [7, 4], LAYERS)
    for row, n in enumerate([7, 4]):
        close(logits[row, 0], model(ids[row : row + 1, : n + 1], use_cache=False).logits[0, n], family)


def test_a_missing_entry_raises_before_anything_is_written(stepper: Stepper) -> None:
    ids, cache = random_tokens(2), stepper.new_cache(2, CAPACITY)
    advance(stepper, cache, ids[:, :4], [0, 0], LAYERS)
    advance(stepper, cache, ids[:, 4:5], [4, 4], 3)
    with pytest.raises(
        MissingEntryError, match=r"layer=4.*position 5 of row 0 it must hold 5 entries and holds 4"
    ) as caught:
        advance(stepper, cache, ids[:, 5:6], [5, 5], LAYERS)
    assert (caught.value.layer, caught.value.row, caught.value.position, caught.value.held) == (4, 0, 5, 4)
    assert [layer.row_lengths.tolist() for layer in cache.layers] == [[5, 5]] * 3 + [[4, 4]] * 3
    with pytest.raises(MissingEntryError):
        stepper.write_kv(torch.zeros(2, 1, 32, dtype=stepper.dtype), 4, stepper.prepare_forward(at([5, 5], 1), cache))


@pytest.mark.parametrize(
    "family_",
    [
        "gpt_neox", "llama3", "opt", "mistral_window", "gemma3", "granite", "smollm3_window", "stablelm", "falcon",
        "falcon_grouped", "falcon_sequential", "qwen3_moe", "mixtral",
    ],
)  # fmt: skip
def test_eager_attention_walks_alike(family_: str) -> None:
    """Eager attention without a mask attends to everything, so a mask must always exist."""
    model = small_model(family_, attention="eager")
    stepper, ids = CausalStepper(model), random_tokens(2)
    theirs = model(ids, use_cache=False).logits
    close(stepper.logits(plain_states(stepper, ids)[-1]), theirs, family_, attention="eager")
    cache = stepper.new_cache(2, CAPACITY)
    pieces = [advance(stepper, cache, ids[:, :5], [0, 0], LAYERS)]
    pieces += [advance(stepper, cache, ids[:, t : t + 1], [t, t], LAYERS) for t in range(5, TOKENS)]
    close(torch.cat(pieces, dim=1), theirs, family_, attention="eager")


@pytest.mark.parametrize(
    "family_", ["gpt_neox", "llama", "opt", "gemma", "smollm3", "stablelm", "falcon", "gptj", "qwen3_moe", "mixtral"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_decode_are_the_models_own_to_the_bit(family_: str, dtype: torch.dtype) -> None:
    """Compared with the modules; ``tests/laws/test_fused_blocks.py`` has the tolerance of fused steps."""
    model = small_model(family_, dtype)
    stepper, ids = CausalStepper(model, backend="walked"), random_tokens(1)
    cache = stepper.new_cache(1, CAPACITY)
    past, mine, theirs = None, [], []
    for piece in (ids[:, :6], *ids[:, 6:].split(1, dim=1)):
        first = cache.layers[0].row_lengths.tolist()
        mine.append(advance(stepper, cache, piece, first, LAYERS))
        out = model(piece, past_key_values=past, use_cache=True)
        past = out.past_key_values
        theirs.append(out.logits)
    assert torch.equal(torch.cat(mine, dim=1), torch.cat(theirs, dim=1))


@pytest.fixture(scope="module")
def neox() -> Stepper:
    return CausalStepper(small_model("gpt_neox"))


class TestFrame:
    def test_keys_are_those_executed(self, neox: Stepper) -> None:
        cache = neox.new_cache(2, CAPACITY)
        assert neox.prepare_forward(at([0, 0], 6), cache, lengths=np.array([6, 2])).running.keys == 6
        inputs = neox.prepare_forward(at([6, 2], 1), cache)
        assert inputs.running.keys == 7
        assert inputs.running.keep(np.array([1])).keys == 3

    def test_masks_are_kept_while_all_rows_run(self, neox: Stepper) -> None:
        inputs = neox.prepare_forward(at([4, 2], 1), neox.new_cache(2))
        assert inputs.select_rows(inputs.running.keep(np.arange(2))) is inputs

    def test_no_mask_where_none_is_needed(self, neox: Stepper) -> None:
        cache, (placement,) = neox.new_cache(2), neox.placements
        together, apart = (neox.prepare_forward(at(starts, 1), cache) for starts in ([7, 7], [7, 3]))
        assert together.block_kwargs(placement)["attention_mask"] is None
        ragged = apart.block_kwargs(placement)["attention_mask"]
        assert (ragged == 0).sum(dim=-1).flatten().tolist() == [8, 4]

    @pytest.mark.parametrize(
        ("positions", "given", "message"),
        [
            ([[0, 2]], {}, "consecutive"),
            ([0, 1], {}, "shape"),
            ([[-1]], {}, "≥ 0"),
            ([[0], [0], [0]], {}, "rows"),
            ([[0], [0]], {"rows": np.array([1, 0])}, "ascending"),
            ([[0]], {"rows": np.array([2])}, "rows of 0–1"),
            ([[0, 1], [0, 1]], {"lengths": np.array([2, 3])}, "lengths in 1–2"),
            ([[0, 1], [0, 1]], {"lengths": np.array([2, 0])}, "lengths in 1–2"),
        ],
    )
    def test_misuse_is_refused(self, neox: Stepper, positions: list, given: dict, message: str) -> None:
        with pytest.raises(BadArgument, match=message):
            neox.prepare_forward(np.array(positions), neox.new_cache(2), **given)

    def test_without_a_cache_positions_start_at_zero(self, neox: Stepper) -> None:
        with pytest.raises(BadArgument, match="0 without a cache"):
            neox.prepare_forward(at([3], 2), None)

    @pytest.mark.parametrize("family_", ["gpt2", "gptj"])
    def test_tables_of_positions_end(self, family_: str) -> None:
        stepper = CausalStepper(small_model(family_))
        with pytest.raises(BadArgument, match="less than 128"):
            stepper.prepare_forward(at([128], 1), stepper.new_cache(1))


def test_a_walk_in_inference_mode_does_not_spoil_gradients() -> None:
    """Rotary tables outlive their forward."""
    with torch.inference_mode(False):
        stepper, ids = CausalStepper(small_model("llama")), random_tokens(1).clone()
    plain_states(stepper, ids)
    with torch.inference_mode(False), torch.enable_grad():
        stepper.logits(plain_states(stepper, ids.clone())[-1]).sum().backward()
    assert stepper.model.model.layers[0].self_attn.q_proj.weight.grad is not None


class TestConstruction:
    def test_a_wrong_walk_is_caught(self) -> None:
        """The model's forward does something that its family's row does not contain."""
        model = small_model("llama")
        model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * model.logit_factor)
        model.logit_factor = 1.0
        CausalStepper(model)
        layer = model.model.layers[2]
        layer.forward_twice = layer.forward
        calls = {"n": 0}

        def swapped(*args: Any, **kwargs: Any) -> Any:
            calls["n"] += 1
            return layer.forward_twice(*args, **kwargs) * (1 if calls["n"] == 1 else 1.5)

        layer.forward = swapped
        with pytest.raises(ModelMismatch, match=r"model_type='llama'.*families.py"):
            CausalStepper(model)

    def test_training_mode_is_refused(self) -> None:
        with pytest.raises(BadArgument, match="eval"):
            CausalStepper(small_model("gpt_neox").train())

    def test_attention_without_additive_masks_is_refused(self) -> None:
        model = small_model("llama")
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(BadArgument, match="sdpa or eager"):
            CausalStepper(model)

    def test_an_unknown_family_is_named(self) -> None:
        config = small_config("llama")
        config.model_type = "mamba"
        with pytest.raises(BadArgument, match=r"model_type='mamba'.*gpt_neox"):
            CausalStepper(small_model("llama", config=config))

    def test_parameters_that_the_row_does_not_count_are_refused_although_the_logits_agree(self) -> None:
        """Every FLOP count would be wrong; ``check=False`` does not permit that."""
        model = small_model("llama")
        held = sum(p.numel() for p in model.parameters())
        model.model.layers[1].adapter = torch.nn.Linear(32, 7)
        for check in (True, False):
            with pytest.raises(SizeMismatch, match=rf"model_type='llama'.*{held:,} parameters.*holds {held + 231:,}"):
                CausalStepper(model, check=check)

    def test_experts_walked_with_a_dense_row_are_refused_although_the_logits_agree(self) -> None:
        """The model's own config with another family name: one MLP of that width would be another model."""
        model = small_model("qwen3_moe")
        counted = geometry_of(small_config("qwen3")).parameter_count()
        model.config.model_type = "qwen3"
        held = sum(p.numel() for p in model.parameters())
        with pytest.raises(SizeMismatch, match=rf"model_type='qwen3'.*{counted:,} parameters.*holds {held:,};"):
            CausalStepper(model)

    def test_a_part_that_the_row_names_wrongly_is_named(self) -> None:
        model = small_model("gpt2")
        del model.transformer.ln_f
        model.transformer.register_parameter("norm", torch.nn.Parameter(torch.zeros(64, dtype=torch.float64)))
        with pytest.raises(BadArgument, match=r"model_type='gpt2', but expected a decoder with the part 'ln_f'"):
            CausalStepper(model)

    def test_tied_parameters_count_once(self) -> None:
        model = small_model("opt")
        assert count_parameters(model) == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight

    def test_a_model_that_also_sees_is_held_to_its_text_part(self) -> None:
        text = small_config("gemma3").to_dict()
        sight = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "image_size": 28, "patch_size": 14}  # fmt: skip
        config = hf.Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=1)
        model = small_model("gemma3", config=config)
        assert count_parameters(model) == CausalStepper(model).geometry.parameter_count()
        assert count_parameters(model) < sum(p.numel() for p in model.parameters())
        model.get_decoder().layers[0].adapter = torch.nn.Linear(32, 7)
        with pytest.raises(SizeMismatch):
            CausalStepper(model)

    def test_rotary_frequencies_must_not_depend_on_the_batch(self) -> None:
        config = small_config("llama")
        config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        with pytest.raises(BadArgument, match="rope_type='dynamic'"):
            CausalStepper(small_model("llama", config=config))

    @pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 2), (0, LAYERS + 1)])
    def test_layers_out_of_range(self, first: int, last: int) -> None:
        stepper = CausalStepper(small_model("gpt_neox"))
        inputs = stepper.prepare_forward(at([0], 2), None)
        with pytest.raises(BadArgument, match=f"≤ {LAYERS}"):
            stepper.run_layers(torch.zeros(1, 2, 32, dtype=stepper.dtype), first, last, inputs)
