"""Sizes of a model for FLOP formulas; from a config alone, no weights, no torch.

One multiply-add counts as two; only matrix products and attention are counted, as in PyTorch's own counter. Per token
and block, with D ``hidden``, H ``heads``, KV ``kv_heads``, hd ``head_dim``, I ``intermediate``:

    2·D·H·hd + 4·D·KV·hd + 2·H·hd·D   projections of attention
    + {2 | 3}·2·D·I                    MLP, plain or gated
    + 4·H·hd·keys                      scores and their weighted sum

and 2·E·V for a readout (E ``embedding_width``; + 2·D·E if E ≠ D). Cross-attention (T5) adds

    4·D·H·hd                           query and output projections, per token and block
    + 4·H·hd·source keys               scores and their weighted sum
    4·D·H·hd                           K and V of one source position, once per reached layer

and an encoder block costs the first three lines, per source position. In a mixture of experts the MLP counts once for
each expert that a token runs, and the router costs 2·D·experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from emad_ref.errors import BadArgument
from emad_ref.models.families import family_of_config


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model, named as above; ``tied``: embedding and unembedding are one table.

    ``encoder_layers``: blocks of an encoder, of the decoder's width; 0 without an encoder and cross-attention.
    ``layers`` are the decoder's. ``experts``, ``experts_used``: MLPs of one block, and those that one token runs; 0 for
    one MLP without a router. ``block_extras``, ``extras``: parameters of one block, and of the rest, that belong to no
    matrix product (norms, biases, learned positions); they cost no FLOPs here.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool
    vocabulary: int
    embedding_width: int
    tied: bool
    block_extras: int = 0
    extras: int = 0
    encoder_layers: int = 0
    experts: int = 0
    experts_used: int = 0

    def block_flops(self) -> int:
        """FLOPs of one token through one block, without attention over keys."""
        return self._self_flops() + 2 * self._heads_flops(self.heads) * bool(self.encoder_layers)

    def attention_flops(self, keys: int = 1) -> int:
        """FLOPs of one query against ``keys`` keys in one layer, its own or a source's."""
        return 4 * self.heads * self.head_dim * keys

    def kv_fill_flops(self) -> int:
        """FLOPs of a K/V-only pass of one token through one layer, as executed.

        The query projection runs too, except in T5, where each projection is a module of its own.
        """
        return self._heads_flops((0 if self.encoder_layers else self.heads) + 2 * self.kv_heads)

    def cross_fill_flops(self) -> int:
        """FLOPs of cross-attention K and V of one source position in one layer; 0 without an encoder."""
        return 2 * self._heads_flops(self.heads) * bool(self.encoder_layers)

    def encoder_flops(self, tokens: int, context: int) -> int:
        """FLOPs of ``tokens`` source positions through the encoder; ``context`` Σ queries × keys in one of its layers.

        Both as executed: a batch of r sources padded to s positions is r·s tokens and r·s² context.
        """
        return self.encoder_layers * (tokens * self._self_flops() + self.attention_flops(context))

    def head_flops(self) -> int:
        """FLOPs of reading one hidden state out over the full vocabulary."""
        return 2 * self.embedding_width * self.vocabulary + self._projection_flops()

    @property
    def has_costly_head(self) -> bool:
        """Whether a readout costs more FLOPs than a block, as with 49,152 tokens at width 576."""
        return self.head_flops() > self.block_flops()

    def input_flops(self) -> int:
        """FLOPs of one token before the first block: 0 unless the embedding is projected to D."""
        return self._projection_flops()

    def parameter_count(self) -> int:
        """Parameters of the whole model, tied ones once."""
        tables = (1 if self.tied else 2) * self.vocabulary * self.embedding_width
        projections = self._projection_flops()  # two matrices of D·E weights, with two FLOPs per weight
        idle = (self.experts - self.experts_used) * self._mlp_flops()
        block = (self.block_flops() + self.cross_fill_flops() + idle) // 2 + self.block_extras
        return self.layers * block + self.encoder_flops(1, 0) // 2 + tables + projections + self.extras

    def _self_flops(self) -> int:
        """FLOPs of the projections of self-attention and of the MLP, or of the router and the chosen experts."""
        attention = self._heads_flops(2 * self.heads + 2 * self.kv_heads)
        return attention + (self.experts_used or 1) * self._mlp_flops() + 2 * self.hidden * self.experts

    def _mlp_flops(self) -> int:
        return (3 if self.gated else 2) * 2 * self.hidden * self.intermediate

    def _heads_flops(self, heads: int) -> int:
        """FLOPs from the state to ``heads`` heads, or back."""
        return 2 * self.hidden * self.head_dim * heads

    def _projection_flops(self) -> int:
        return 0 if self.embedding_width == self.hidden else 2 * self.hidden * self.embedding_width


def geometry_of(config: Any) -> Geometry:
    """Geometry of a transformers config (its text part).

    Raises:
        BadArgument: a family without a row, or an unsupported variant.
    """
    return _geometry(config.get_text_config())


def _geometry(config: Any) -> Geometry:
    sizes = family_of_config(config).sizes
    widths = sizes.widths(config)
    return Geometry(
        family=config.model_type,
        layers=getattr(config, sizes.layers),
        hidden=widths.hidden,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        intermediate=widths.intermediate,
        gated=sizes.gated(config),
        vocabulary=widths.vocabulary,
        embedding_width=getattr(config, "word_embed_proj_dim", None) or widths.hidden,
        tied=sizes.tied(config),
        block_extras=sizes.block_extras(config, widths),
        extras=sizes.extras(config, widths),
        encoder_layers=getattr(config, sizes.encoder_layers) if sizes.encoder_layers else 0,
        experts=getattr(config, sizes.experts) if sizes.experts else 0,
        experts_used=getattr(config, sizes.experts_used) if sizes.experts_used else 0,
    )


def _pythia(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "vocab_size": 50304, "max_position_embeddings": 2048, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "attention_bias": True,
    }  # fmt: skip


def _opt(hidden: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "opt", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "ffn_dim": 4 * hidden, "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": hidden,
        "tie_word_embeddings": True, "enable_bias": True, "layer_norm_elementwise_affine": True,
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, **others,
    }  # fmt: skip


def _grouped(family: str, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int,
             tied: bool, positions: int, rotary: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": vocabulary,
        "tie_word_embeddings": tied, "max_position_embeddings": positions,
        "rope_parameters": rotary,
    }  # fmt: skip


def _llama3_rotary(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


def _t5(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "t5", "d_model": hidden, "d_kv": 64, "d_ff": 4 * hidden, "num_heads": heads,
        "num_layers": layers, "num_decoder_layers": layers, "vocab_size": 32128, "feed_forward_proj": "relu",
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "tie_word_embeddings": True,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


_QWEN_ROTARY = {"rope_type": "default", "rope_theta": 1000000.0}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "gpt2": {
        "model_type": "gpt2",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "n_inner": None,
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "llama-7b": _grouped(
        "llama", 4096, 32, 32, 32, 11008, 32000, False, 2048, {"rope_type": "default", "rope_theta": 10000.0}
    ),
    "llama-3.2-3b": _grouped("llama", 3072, 28, 24, 8, 8192, 128256, True, 131072, _llama3_rotary(32.0)),
    # the text part: 32 of its 40 layers attend to text; the other 8 attend to an image and are skipped without one
    "llama-3.2-11b": _grouped("llama", 4096, 32, 32, 8, 14336, 128256, False, 131072, _llama3_rotary(8.0)),
    "qwen2.5-0.5b": _grouped("qwen2", 896, 24, 14, 2, 4864, 151936, True, 32768, _QWEN_ROTARY),
    "qwen2.5-1.5b": _grouped("qwen2", 1536, 28, 12, 2, 8960, 151936, True, 131072, _QWEN_ROTARY),
    "qwen2.5-14b": _grouped("qwen2", 5120, 48, 40, 8, 13824, 152064, False, 131072, _QWEN_ROTARY),
    "t5-small": _t5(512, 6, 8),
    "t5-base": _t5(768, 12, 12),
    "t5-large": _t5(1024, 24, 16),
}
PUBLISHED_NAMES: tuple[str, ...] = tuple(_PUBLISHED)


def published_config(name: str) -> dict[str, Any]:
    """The config of a published model, ``model_type`` included, as far as it determines shapes and positions.

    Raises:
        BadArgument: an unknown name.
    """
    if name not in _PUBLISHED:
        raise BadArgument("name", name, f"one of {', '.join(PUBLISHED_NAMES)}")
    return dict(_PUBLISHED[name])


def published_geometry(name: str) -> Geometry:
    """Geometry of a published model, from constants: no network, no weights.

    >>> pythia = published_geometry("pythia-410m")
    >>> f"a full readout costs {pythia.head_flops() / pythia.block_flops():.1f} blocks"
    'a full readout costs 4.1 blocks'

    Raises:
        BadArgument: an unknown name.
    """
    return _geometry(SimpleNamespace(**published_config(name)))
