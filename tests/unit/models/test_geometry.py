"""Sizes computed from configs alone, compared with built models and published figures."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from emad_ref.errors import BadArgument
from emad_ref.models import families
from emad_ref.models.families import anatomy_of
from emad_ref.models.geometry import PUBLISHED_NAMES, geometry_of, published_geometry
from tests.small_models import FAMILIES, small_config, small_model

# parameters of the checkpoints on the hub; Llama-3.2-11B: its text part is Llama-3.1-8B
PUBLISHED_PARAMETERS = {
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "gpt2": 124_439_808,
    "llama-7b": 6_738_415_616,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.2-11b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_built_model(family: str) -> None:
    model = small_model(family)
    assert geometry_of(model.config).parameter_count() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_neox", {"attention_bias": False}),
        ("opt", {"enable_bias": False}),
        ("opt", {"layer_norm_elementwise_affine": False}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("gpt2", {"n_inner": 40}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("qwen3", {"attention_bias": True}),
        ("olmo2", {"attention_bias": True}),
        ("phi", {"qk_layernorm": True}),
        ("gemma", {"attention_bias": True}),
        ("gemma", {"tie_word_embeddings": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}),
        ("smollm3", {"tie_word_embeddings": False}),
        ("stablelm", {"use_qkv_bias": False, "qk_layernorm": True}),
        ("stablelm_parallel", {"use_qkv_bias": True, "qk_layernorm": False}),
        ("falcon", {"bias": True, "ffn_hidden_size": 40}),
        ("falcon_grouped", {"num_ln_in_parallel_attn": 1}),
        ("falcon_grouped", {"tie_word_embeddings": False}),
        ("gptj", {"n_inner": 40}),
        ("gptj", {"tie_word_embeddings": True}),
        ("mixtral", {"head_dim": 12}),
        ("qwen3_moe", {"attention_bias": True}),
    ],
)
def test_options_that_change_the_size(family: str, changes: dict) -> None:
    config = small_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    model = small_model(family, config=config)
    assert geometry_of(config).parameter_count() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_published_sizes(name: str) -> None:
    assert published_geometry(name).parameter_count() == PUBLISHED_PARAMETERS[name]


def test_a_probe_costs_the_blocks_the_register_says() -> None:
    """CLAIMS: a full-vocabulary probe is 4.1 blocks on Pythia-410M, 2.05 on 1.4B and OPT-1.3B, 0.65 on LLaMA-7B."""
    blocks = {
        name: published_geometry(name).head_flops() / published_geometry(name).block_flops()
        for name in ("pythia-410m", "pythia-1.4b", "opt-1.3b", "llama-7b")
    }
    assert blocks == pytest.approx(
        {"pythia-410m": 4.1, "pythia-1.4b": 2.05, "opt-1.3b": 2.05, "llama-7b": 0.65}, rel=0.01
    )


def test_a_fill_is_a_quarter_of_a_plain_block() -> None:
    geometry = published_geometry("pythia-410m")
    assert geometry.kv_fill_flops() * 4 == geometry.block_flops()


def test_every_row_is_tried() -> None:
    decoders = {name for name, row in families.FAMILIES.items() if not row.is_encoder_decoder}
    assert {small_config(family).model_type for family in FAMILIES} == decoders
    assert set(families.FAMILIES) - decoders == {"t5"}  # test_seq2seq.py


def test_a_token_pays_for_the_experts_it_runs_and_the_model_holds_them_all() -> None:
    geometry = geometry_of(small_config("mixtral"))
    one = 3 * 32 * 48
    used_once = replace(geometry, experts_used=1)
    assert (geometry.experts, geometry.experts_used) == (4, 2)
    assert geometry.block_flops() - used_once.block_flops() == 2 * one
    assert geometry.parameter_count() == used_once.parameter_count()
    more = replace(geometry, experts=5)
    assert more.parameter_count() - geometry.parameter_count() == geometry.layers * (one + 32), (
        "an expert and its router's row"
    )
    assert more.block_flops() - geometry.block_flops() == 2 * 32, "the router's row alone"
    assert geometry.kv_fill_flops() == used_once.kv_fill_flops()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("falcon", {"alibi": True}, "alibi=True, but expected False.*family falcon"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2, but expected 1.*family qwen3_moe"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\], but expected \[\]"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts=0, but expected at least 1"),
    ],
)
def test_variants_that_are_not_walked_are_refused(family: str, changes: dict, message: str) -> None:
    config = small_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    for read in (geometry_of, anatomy_of):
        with pytest.raises(BadArgument, match=message):
            read(config)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(BadArgument, match=r"name='pythia-3b'.*pythia-410m"):
        published_geometry("pythia-3b")
    config = small_config("llama")
    config.model_type = "mamba"
    for read in (geometry_of, anatomy_of):
        with pytest.raises(BadArgument, match=r"model_type='mamba'.*gpt_neox.*add its row to .*families\.py"):
            read(config)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from emad_ref.models.geometry import published_geometry;"
        "import emad_ref.models.families, emad_ref.flop_ledger, pytest_emad.audit.tolerances;"
        "assert 'torch' not in sys.modules, 'import'; published_geometry('gpt2')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
