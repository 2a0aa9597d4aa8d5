"""Small random models of every family, for tests: six layers, a hundred tokens, milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from emad_ref.models.fast import weight_layout
from emad_ref.models.fast.weight_layout import lay_out_weights
from emad_ref.models.loading import copy_in_dtype

LAYERS, VOCABULARY, WINDOW = 6, 101, 5
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_GROUPED = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "norm_topk_prob": True}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SIZES, intermediate_size=64),
    "gpt_neox_sequential": lambda: hf.GPTNeoXConfig(**_SIZES, intermediate_size=64, use_parallel_residual=False),
    "opt": lambda: hf.OPTConfig(**_SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "opt_350m": lambda: hf.OPTConfig(**_SIZES, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "llama3": lambda: hf.LlamaConfig(**_GROUPED, tie_word_embeddings=True, rope_parameters=_LLAMA3),
    "gpt2": lambda: hf.GPT2Config(
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=128,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=12),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=None),
    "mistral_window": lambda: hf.MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(**_GROUPED, head_dim=8, sliding_window=WINDOW),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 3
    ),
    "phi": lambda: hf.PhiConfig(**_SIZES, intermediate_size=64),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    # with embeddings tied to a random head and scaled by √D, the model would repeat the last token in its own text
    "gemma": lambda: hf.GemmaConfig(**_GROUPED, head_dim=12, tie_word_embeddings=False),
    "granite": lambda: hf.GraniteConfig(
        **_GROUPED, embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.3, logits_scaling=6.0
    ),
    "smollm3": lambda: hf.SmolLM3Config(**_GROUPED),
    "smollm3_window": lambda: hf.SmolLM3Config(**_GROUPED, use_sliding_window=True, sliding_window=WINDOW),
    "stablelm": lambda: hf.StableLmConfig(**_GROUPED, use_qkv_bias=True),
    "stablelm_parallel": lambda: hf.StableLmConfig(**_GROUPED, use_parallel_residual=True, qk_layernorm=True),
    "falcon": lambda: hf.FalconConfig(**_SIZES),
    "falcon_grouped": lambda: hf.FalconConfig(**_SIZES, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_sequential": lambda: hf.FalconConfig(**_SIZES, multi_query=False, parallel_attn=False, bias=True),
    "gptj": lambda: hf.GPTJConfig(
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        rotary_dim=4,
        vocab_size=VOCABULARY,
        n_positions=128,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_GROUPED, head_dim=12, **_EXPERTS, num_experts=6),
    "mixtral": lambda: hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2),
}
FAMILIES: tuple[str, ...] = tuple(_CONFIGS)
NEEDS_EAGER = frozenset({"gemma2", "gptj"})  # only eager attention applies Gemma 2's softcap; GPT-J has no SDPA
EXPERTS = frozenset({"qwen3_moe", "mixtral"})


def small_config(family: str) -> Any:
    """Return a fresh config of one of ``FAMILIES``."""
    return _CONFIGS[family]()


def small_model(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, *, attention: str | None = None, config: Any = None
) -> Any:
    """Return a random causal LM in eval mode whose layers, norms and biases all matter.

    The usual initialisation (standard deviation 0.02) makes every block nearly the identity, so a skipped or
    repeated layer would go unnoticed.
    """
    generator = torch.Generator().manual_seed(seed)
    kernel = attention or ("eager" if family in NEEDS_EAGER else "sdpa")
    model = hf.AutoModelForCausalLM.from_config(config or small_config(family), attn_implementation=kernel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            elif any(part in name for part in ("embed", "wte", "wpe")):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.tie_weights()
    if family in EXPERTS and dtype == torch.float64:
        model.set_experts_implementation("eager")  # one grouped product for all experts has no float64 kernel
    return in_dtype(model, dtype).eval()


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Return ``model`` in ``dtype``, as Transformers loads it. In float64 a cast is as exact, and faster."""
    return model.to(dtype) if torch.finfo(dtype).bits >= 32 else copy_in_dtype(model, dtype)


def small_partner() -> Any:
    """Return the model of three layers that the tests of pairs set beside ``small_model("gpt_neox")``."""
    config = small_config("gpt_neox")
    config.num_hidden_layers = 3
    return small_model("gpt_neox", seed=1, config=config)


def lay_out_as_large(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay ``model``'s weights out as if they were large: packed together, with gaps between all columns."""
    for limit in ("LARGE", "LARGE_WEIGHT"):
        monkeypatch.setattr(weight_layout, limit, 0)
    monkeypatch.setattr(weight_layout, "LONG_RUN", 0)
    monkeypatch.setattr(weight_layout, "CACHE_STRIDE", 1)
    lay_out_weights(model)
