"""GGUF files of llama.cpp → folders in the format of Transformers, with dequantised weights and the file's tokenizer.

Transformers reads the config and the weights, and undoes llama.cpp's order of heads. The tokenizer is built here: a
byte-level BPE from the file's tokens and merges, cut into words as ``tokenizer.ggml.pre`` names it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from emad_ref.errors import BadArgument

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # words as GPT-2 cuts them
PRE_TOKENIZERS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
}
CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type: never a part of text
PLAIN_TYPES = ("F32", "F16", "BF16")
CHECKED_TOKENS = 32  # of the text on which the written model is compared


def convert(path: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """Write the causal model of a GGUF file to ``folder``, in float32.

    Returns:
        The type of most of its quantised tensors, such as ``Q4_1``, or of all of them, and versions of the libraries.

    Raises:
        BadArgument: no GGUF file, an architecture, quantisation or tokenizer that cannot be read, or a written model
            whose logits differ.
    """
    reader = _open(path)
    try:
        read = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    # what Transformers and gguf raise for architectures, quantisations and tensors that they cannot read
    except (ValueError, NotImplementedError, KeyError, RuntimeError) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise BadArgument("file", path.name, "a GGUF file that Transformers and gguf can dequantise", said) from error
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)  # its weights are plain numbers by now
    model = type(read)(type(read.config).from_dict(settings))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    _tokenizer(path, reader).save_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    ids = torch.arange(min(CHECKED_TOKENS, read.config.vocab_size))[None]
    with torch.inference_mode():
        if not torch.equal(read.eval()(ids).logits, written.eval()(ids).logits):
            raise BadArgument("file", path.name, "a model that Transformers can write", "its logits change")
    return _quantisation(reader), {name: version(name) for name in ("gguf", "torch", "transformers")}


def _open(path: Path) -> Any:
    try:
        return import_module("gguf").GGUFReader(str(path))
    except (ValueError, IndexError, OSError) as error:
        raise BadArgument("file", path.name, "a GGUF file", f"{error}; fetch it again") from error


def _quantisation(reader: Any) -> str:
    """By the numbers that are stored so."""
    stored: dict[str, int] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        stored[kind] = stored.get(kind, 0) + int(tensor.n_elements)
    quantised = {kind: count for kind, count in stored.items() if kind not in PLAIN_TYPES}
    held = quantised or stored
    return max(held, key=lambda kind: held[kind])


def _tokenizer(path: Path, reader: Any) -> PreTrainedTokenizerFast:
    """Raises BadArgument for a kind of tokenizer, or of words, that is not in ``PRE_TOKENIZERS``."""

    def field(name: str) -> Any:
        held = reader.fields.get(f"tokenizer.ggml.{name}")
        return None if held is None else held.contents()

    kind, words = field("model"), field("pre")
    if kind != "gpt2" or words not in PRE_TOKENIZERS:
        expected = f"a tokenizer of the kind gpt2 with words of {', '.join(PRE_TOKENIZERS)}"
        raise BadArgument("file", path.name, expected, f"it has {kind!r} with words of {words!r}")
    tokens = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = PRE_TOKENIZERS[words]
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, field("token_type"), strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    roles = {
        role: tokens[at]
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (at := field(f"{name}_token_id")) is not None
    }
    longest = reader.fields[f"{reader.fields['general.architecture'].contents()}.context_length"].contents()
    named = {f"{role}_token": token for role, token in roles.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=int(longest), **named)
