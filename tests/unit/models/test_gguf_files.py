"""What a GGUF file says is read, or refused by name: keys of metadata, tensors, types of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

from emad_ref.errors import BadArgument
from emad_ref.models.loading import load
from tests.gguf_models import SPECIAL, TOKENS, small_llama, write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/gguf"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(60)[None]).logits


def require_refused(tmp_path: Path, cache: Path, said: str, **fields: Any) -> str:
    path = write_gguf(tmp_path / "other.gguf", small_llama(), **fields)
    with pytest.raises(BadArgument) as caught:
        load(path)
    assert said in str(caught.value)
    assert "other.gguf" in str(caught.value)
    assert not list(cache.iterdir())
    return str(caught.value)


UNLIKE = {
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32,
    "llama.rope.scaling.attn_factor": 1.5,
    "llama.rope.scaling.yarn_beta_fast": 16.0,
    "llama.rope.scale_linear": 2.0,
    "llama.rope.freq_base_swa": 20000.0,
    "llama.rope.dimension_sections": [2, 2, 0, 0],
    "llama.attention.key_length": 16,
    "llama.attention.value_length": 4,
    "llama.attention.scale": 0.5,
    "llama.attention.sliding_window": 16,
    "llama.attention.sliding_window_pattern": 2,
    "llama.attention.clamp_kqv": 8.0,
    "llama.attention.max_alibi_bias": 8.0,
    "llama.attention.causal": False,
    "llama.attention.layer_norm_epsilon": 1e-5,
    "llama.attn_logit_softcapping": 50.0,
    "llama.final_logit_softcapping": 30.0,
    "llama.logit_scale": 0.25,
    "llama.embedding_scale": 12.0,
    "llama.residual_scale": 0.5,
    "llama.expert_count": 8,
    "llama.expert_used_count": 2,
    "llama.use_parallel_residual": True,
    "llama.tensor_data_layout": "Meta AI original pth",
    "llama.unheard_of": "x",
    "other.block_count": 2,
    "general.type": "adapter",
    "general.quantization_version": 1,
    "adapter.type": "lora",
    "tokenizer.huggingface.json": "{}",
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.ggml.remove_extra_whitespaces": True,
    "tokenizer.ggml.add_sep_token": True,
    "tokenizer.ggml.normalizer.lowercase": True,
    "tokenizer.ggml.precompiled_charsmap": [1, 2],
}


@pytest.mark.parametrize("key", UNLIKE)
def test_a_key_that_the_model_does_not_follow_is_refused_by_name(tmp_path: Path, cache: Path, key: str) -> None:
    said = require_refused(tmp_path, cache, key, **{key: UNLIKE[key]})
    assert "config.json can say it" in said


def test_a_part_of_a_file_is_refused_with_the_command_that_merges_it(tmp_path: Path, cache: Path) -> None:
    assert "llama-gguf-split --merge" in require_refused(tmp_path, cache, "split.count", **{"split.count": 3})


@pytest.mark.parametrize(
    "key", ["attention.layer_norm_rms_epsilon", "attention.head_count", "embedding_length", "feed_forward_length"]
)
def test_a_missing_key_is_not_filled_with_a_default(tmp_path: Path, cache: Path, key: str) -> None:
    require_refused(tmp_path, cache, f"llama.{key}=", **{f"llama.{key}": None})


def test_heads_of_another_width_than_their_rotation_are_refused(tmp_path: Path, cache: Path) -> None:
    """Transformers takes the rotated part for the whole head."""
    require_refused(
        tmp_path, cache, "llama.attention.key_length=8, but expected 4", **{"llama.rope.dimension_count": 4}
    )


def test_a_window_that_only_the_class_of_the_config_has_is_refused(tmp_path: Path, cache: Path) -> None:
    """Transformers makes a Mistral of this name, whose class has a window of 4096 positions."""
    require_refused(
        tmp_path, cache, "llama.attention.sliding_window=None, but expected 4096", **{"general.name": "mistral"}
    )


LIKE = {
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "llama.attention.key_length": 8,
    "llama.attention.value_length": 8,
    "llama.attention.causal": True,
    "llama.expert_count": 0,
    "llama.attention.sliding_window": 0,
    "general.type": "model",
    "general.quantization_version": 2,
    "general.file_type": 1,
    "general.license": "mit",
    "general.tags": ["a", "b"],
    "general.sampling.temp": 0.8,
    "quantize.imatrix.file": "x.dat",
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.fim_pre_token_id": 4,
    "tokenizer.chat_template": "{{ messages[0].content }}",
    "tokenizer.chat_template.tools": "other",
}


def test_keys_that_the_model_follows_and_descriptions_change_nothing(tmp_path: Path) -> None:
    model = small_llama()
    loaded = load(write_gguf(tmp_path / "said.gguf", model, **LIKE))
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.tokenizer.chat_template == LIKE["tokenizer.chat_template"]


@pytest.mark.parametrize(("family", "others"), [("qwen2", {}), ("qwen3", {"head_dim": 128})])
def test_other_families_are_read(tmp_path: Path, family: str, others: dict[str, int]) -> None:
    model = small_llama(family, **others)
    assert torch.equal(logits(load(write_gguf(tmp_path / "q.gguf", model)).model), logits(model))


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "rope_factors_long.weight", "blk.0.attn_q.bias", "blk.1.attn_q_norm.weight"]
)
def test_a_tensor_that_fills_no_part_of_the_model_is_refused_by_name(tmp_path: Path, cache: Path, name: str) -> None:
    require_refused(tmp_path, cache, f"nothing reads {name}: ", tensors={name: np.ones(32, np.float32)})


def test_a_folder_with_other_logits_than_the_file_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = LlamaForCausalLM.save_pretrained

    def save_other(model: Any, folder: Path) -> None:
        with torch.no_grad():
            model.model.norm.weight[0] *= 2
        save(model, folder)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_other)
    require_refused(tmp_path, cache, "a model that Transformers can write; its logits change")


# ---------------------------------------------------------------- tokens

KINDS = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(TOKENS) - len(SPECIAL))
OWN = ("<think>", "<unk>", "[PAD0]")  # in place of the last three tokens, which no merge needs


def tokenizer_of(tmp_path: Path, *types: int, **fields: Any) -> Any:
    """Return the tokenizer of a file whose last three tokens are ``OWN``, of these types."""
    tokens, kinds = [*TOKENS[:-3], *OWN], [*KINDS[:-3], *types]
    changed = {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["Ġ t"], "tokenizer.ggml.token_type": kinds, **fields,
    }  # fmt: skip
    return load(write_gguf(tmp_path / "types.gguf", small_llama(), **changed)).tokenizer


def test_each_type_of_token_is_registered_for_what_it_is(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, USER_DEFINED, UNKNOWN, UNUSED)
    user, unknown, unused = range(len(TOKENS) - 3, len(TOKENS))
    text = "a <think>b<unk>c[PAD0]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert user in ids, "a user-defined token is matched whole"
    assert unknown in ids
    assert unused not in ids, "no text has an unused token"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a <think>bc[PAD0]"
    assert tokenizer.decode([unused]) == ""
    added = tokenizer.added_tokens_decoder
    assert {number: token.special for number, token in added.items()} == {
        0: True,
        1: True,
        2: True,
        user: False,
        unknown: True,
    }


def test_a_normal_token_that_looks_like_a_special_one_is_not_matched(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, NORMAL, NORMAL, NORMAL)
    assert max(tokenizer.encode("<think><unk>[PAD0]", add_special_tokens=False)) < len(TOKENS) - 3


def test_an_unused_token_that_has_a_role_is_kept(tmp_path: Path) -> None:
    at = len(TOKENS) - 1
    tokenizer = tokenizer_of(tmp_path, NORMAL, NORMAL, UNUSED, **{"tokenizer.ggml.padding_token_id": at})
    assert (tokenizer.pad_token, tokenizer.pad_token_id, len(tokenizer)) == ("[PAD0]", at, len(TOKENS))


@pytest.mark.parametrize("kind", [0, BYTE, 7])
def test_a_type_that_a_byte_level_vocabulary_does_not_have_is_refused(tmp_path: Path, cache: Path, kind: int) -> None:
    kinds = [*KINDS[:-1], kind]
    said = require_refused(tmp_path, cache, f"tokenizer.ggml.token_type={kind}", **{"tokenizer.ggml.token_type": kinds})
    assert repr(TOKENS[-1]) in said


def test_what_begins_and_ends_a_text_is_read(tmp_path: Path) -> None:
    said = {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.eot_token_id": 0,
    }
    loaded = load(write_gguf(tmp_path / "ends.gguf", small_llama(), **said))
    plain = loaded.tokenizer.encode("the", add_special_tokens=False)
    assert loaded.tokenizer.encode("the") == [1, *plain, 2]
    assert loaded.end_token_ids == {0, 2}
    other = load(write_gguf(tmp_path / "plain.gguf", small_llama(), **{"tokenizer.ggml.add_bos_token": False}))
    assert other.tokenizer.encode("the") == plain
    assert other.end_token_ids == {2}
